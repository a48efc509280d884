"""Which pool may say what, and when: the answers of the soak are looked up here.

Every demonstration's output has the number of the change that brought it, so a label names the change it came from. A
version of a pool is known by its number and labels from the moment the change that made it was sent to the moment
another had taken its place.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.oracle import models

LETTERS = "xyzw"


@dataclass
class Known:
    """A version of a pool, and when requests may have been answered from it."""

    version: int
    labels: frozenset[str]
    since: float
    until: float = math.inf


@dataclass
class Said:
    """A constrained answer: what it claims to be from, and when it was given."""

    kind: str
    name: str
    version: int | None
    labels: frozenset[str]
    whole: bool
    began: float
    ended: float

    def fits(self, known: Known) -> bool:
        """Whether that version may have given it."""
        right = self.labels == known.labels if self.whole else self.labels <= known.labels
        number = self.version in (None, known.version)
        return right and number and known.since <= self.ended and self.began <= known.until


@dataclass
class Episode:
    """Changes of one pool that are made at once or one after the other, until the pool is settled again."""

    name: str
    since: float
    offered: set[str] = field(default_factory=set)
    waiting: list[Said] = field(default_factory=list)


@dataclass
class Verdicts:
    """What became of the answers that were looked up."""

    passed: dict[str, int] = field(default_factory=dict)
    weak: int = 0
    wrong: list[str] = field(default_factory=list)

    def note(self, kind: str) -> None:
        self.passed[kind] = self.passed.get(kind, 0) + 1


class PoolTable:
    """The versions of every pool, as the clients that change them learn of them."""

    def __init__(self) -> None:
        self._known: dict[str, list[Known]] = {}
        self._open: dict[str, Episode] = {}
        self._closed: list[tuple[Episode, float]] = []
        self._numbers = itertools.count(1)
        self.verdicts = Verdicts()

    # ---- changes ----

    def demonstrations(self, name: str, count: int, seed: int, labels: int) -> list[dict[str, str]]:
        """Demonstrations whose labels no other change has."""
        number = next(self._numbers)
        names = [f"{name}{number}{letter}" for letter in LETTERS[:labels]]
        drawn = models.demonstrations(count, seed)
        return [{"input": each["input"], "output": names[index % labels]} for index, each in enumerate(drawn)]

    def begin(self, name: str) -> Episode:
        """Changes of `name` begin; the caller makes them one episode at a time."""
        episode = self._open[name] = Episode(name, time.monotonic())
        return episode

    def offer(self, episode: Episode, demonstrations: Iterable[Mapping[str, str]]) -> None:
        """A change that brings these is about to be sent."""
        episode.offered.update(each["output"] for each in demonstrations)

    def saw(self, episode: Episode, info: Mapping[str, Any]) -> None:
        """The server has described the pool: its version, and its labels."""
        if not info.get("version") or "labels" not in info:
            return
        labels = frozenset(info["labels"])
        known = self._known.setdefault(episode.name, [])
        if not any(k.until == math.inf and (k.version, k.labels) == (info["version"], labels) for k in known):
            known.append(Known(info["version"], labels, episode.since))

    def end(self, episode: Episode, info: Mapping[str, Any] | None) -> None:
        """The pool is settled: as described, or gone."""
        now = time.monotonic()
        if info is not None:
            self.saw(episode, info)
        for known in self._known.get(episode.name, []):
            last = info is not None and (known.version, known.labels) == (info["version"], frozenset(info["labels"]))
            if known.until == math.inf and not last:
                known.until = now
        del self._open[episode.name]
        self._closed = [*self._closed[-200:], (episode, now)]
        self._known[episode.name] = self._known.get(episode.name, [])[-60:]
        for said in episode.waiting:
            self._judge(said)

    def known(self, name: str) -> list[Known]:
        """Versions that requests may be answered from now."""
        return [known for known in self._known.get(name, []) if known.until == math.inf]

    # ---- answers ----

    def look_up(self, said: Said) -> None:
        """Check an answer now, or when the changes under way are known."""
        episode = self._open.get(said.name)
        if episode is not None and not any(map(said.fits, self._known.get(said.name, []))):
            episode.waiting.append(said)
        else:
            self._judge(said)

    def _judge(self, said: Said) -> None:
        known = self._known.get(said.name, [])
        if any(map(said.fits, known)):
            self.verdicts.note(said.kind)
            return
        # Two changes one after the other, where nobody was told of the first: its labels are known, not its number.
        numbered = any(each.version == said.version and each.until >= said.began for each in known)
        for episode, ended in self._closed:
            overlaps = episode.since <= said.ended and said.began <= ended
            possible = episode.offered.union(*(each.labels for each in known))
            if episode.name == said.name and overlaps and not numbered and said.labels <= possible:
                self.verdicts.weak += 1
                self.verdicts.note(said.kind)
                return
        now = [f"version {k.version}: {sorted(k.labels)}" for k in known if k.until >= said.began]
        self.verdicts.wrong.append(
            f"{said.kind}: pool {said.name!r}, version {said.version}, said {sorted(said.labels)}; then it had"
            f" {'; '.join(now) or 'no version'}"
        )


class AnswerTable:
    """Greedy answers that do not depend on which pools there are: found out on the idle server, before the storm.

    An answer is only kept where every token was clearly the most likely, so that rounding cannot decide.
    """

    MARGIN = 0.02

    def __init__(self) -> None:
        self._answers: dict[tuple[str, int], Any] = {}

    def put(self, kind: str, index: int, answer: Any) -> None:
        self._answers[kind, index] = answer

    def indices(self, kind: str) -> list[int]:
        """The questions of that kind whose answers are known."""
        return [index for known, index in self._answers if known == kind]

    def get(self, kind: str, index: int) -> Any:
        return self._answers[kind, index]

    @property
    def size(self) -> int:
        return len(self._answers)


def clear(meta: Mapping[str, Any]) -> bool:
    """Whether each token of a /generate answer with two top log-probabilities was clearly the most likely."""
    tops = meta["output_top_logprobs"]
    return all(len(top) < 2 or top[0][0] - top[1][0] > AnswerTable.MARGIN for top in tops)
