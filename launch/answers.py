"""Whether an answer of SGLang is one: an aborted request is answered too, with what text there was until then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

from sglang_ext.types import JsonObject

SHOWN = 5  # reasons that a message names

AnswersT = TypeVar("AnswersT", JsonObject, list[JsonObject])


class FailedAnswers(RuntimeError):
    """Answers without which a measurement means nothing; says how many failed, and why."""


def failure(answer: JsonObject) -> str | None:
    """Why an answer of /generate or of `Engine.generate` is none; None for one that ended as it should."""
    if "error" in answer:
        error = answer["error"]
        return str(error.get("message", error) if isinstance(error, Mapping) else error)
    reason = answer["meta_info"].get("finish_reason")
    if not isinstance(reason, Mapping) or reason.get("type") != "abort":
        return None
    return str(reason.get("message") or "aborted, for a reason that the server's log may name")


def counted(reasons: Iterable[str]) -> str:
    """Reasons with how often each occurred, the most frequent first; the rare ones of many are only counted."""
    found = Counter(reasons).most_common()
    shown = [f"{reason} ({count} times)" if count > 1 else reason for reason, count in found[:SHOWN]]
    if len(found) > SHOWN:
        shown.append(f"and {sum(count for _, count in found[SHOWN:])} for other reasons")
    return "; ".join(shown)


def completed(answers: AnswersT) -> AnswersT:
    """An answer, or a list of them, none of which failed.

    Raises:
        FailedAnswers: some did.
    """
    listed: list[JsonObject] = answers if isinstance(answers, list) else [answers]
    reasons = [reason for reason in map(failure, listed) if reason is not None]
    if reasons:
        raise FailedAnswers(f"{len(reasons)} of {len(listed)} answers failed: {counted(reasons)}")
    return answers
