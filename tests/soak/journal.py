"""What happened: requests by kind and status, how long they took, answers that were checked, and what was wrong."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

MAX_ALIKE = 2  # failures of one kind that are kept in words; all are counted


@dataclass
class Journal:
    """One for each server of a soak.

    Attributes:
        requests: (kind, status) -> how many; a status is HTTP's or `left`, the client's own hang-up.
        checked: kind of check -> answers that passed it.
        failures: what was wrong, the first of each kind in words.
        alike: kind of failure -> how many.
    """

    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    checked: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    alike: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    began: float = field(default_factory=time.monotonic)

    def request(self, kind: str, status: int | str, seconds: float) -> None:
        self.requests[kind, str(status)] += 1
        if status != "left":
            self.seconds[kind].append(seconds)

    def passed(self, kind: str) -> None:
        self.checked[kind] += 1

    def fail(self, what: str, kind: str | None = None) -> None:
        self.failed += 1
        kind = kind or what.split(":")[0]
        self.alike[kind] += 1
        if self.alike[kind] <= MAX_ALIKE:
            self.failures.append(f"[{time.monotonic() - self.began:.1f} s] {what}")

    @property
    def answers(self) -> int:
        """Answers that were checked and right."""
        return sum(self.checked.values())

    def summary(self) -> dict[str, Any]:
        """All of it, for JSON."""
        by_kind: dict[str, dict[str, Any]] = {}
        for (kind, status), count in sorted(self.requests.items()):
            by_kind.setdefault(kind, {"statuses": {}})["statuses"][status] = count
        for kind, seconds in self.seconds.items():
            by_kind[kind] |= {
                "median_s": round(percentile(seconds, 0.5), 3),
                "p99_s": round(percentile(seconds, 0.99), 3),
                "longest_s": round(max(seconds), 3),
            }
        every = [value for values in self.seconds.values() for value in values]
        return {
            "requests": sum(self.requests.values()),
            "answers_checked": self.answers,
            "checks": dict(sorted(self.checked.items())),
            "median_s": round(percentile(every, 0.5), 3),
            "p99_s": round(percentile(every, 0.99), 3),
            "kinds": by_kind,
            "failures": self.failed,
            "failures_by_kind": dict(self.alike.most_common(40)),
            "first_failures": self.failures[:40],
        }


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the others lie; 0 of none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0
