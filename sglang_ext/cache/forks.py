"""Streams that begin as a copy of another's beginning: which one, and how much of it.

The source is a stream that runs, or one that has ended and whose room nobody has needed yet. Both prompts begin with
the same tokens, and the source's policy says at which of these it can be copied (`attention.stream_policy`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

StreamState: TypeAlias = Any
"""What a policy keeps of a stream; only the policy knows what it is."""


@dataclass(frozen=True, eq=False)
class Source:
    """A stream that another may begin like.

    Attributes:
        prompt: its tokens, from the first.
        key: SGLang's `extra_key` of its request, which the other must share.
        state: the policy's.
        slots: [n] int32 on the device of the KV cache, its KV slots.
    """

    prompt: Sequence[int]
    key: str | None
    state: StreamState
    slots: torch.Tensor


@dataclass(frozen=True, eq=False)
class Fork:
    """The first `tokens` tokens of a stream are those of `source`."""

    source: Source
    tokens: int


def common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many equal tokens two sequences begin; of arrays, which SGLang has, a million take a millisecond."""
    size = min(len(one), len(other))
    differ = np.asarray(one)[:size] != np.asarray(other)[:size]
    first = int(differ.argmax()) if size else 0
    return first if size and differ[first] else size


def longest_fork(
    prompt: Sequence[int],
    key: str | None,
    sources: Sequence[Source],
    point: Callable[[StreamState, int], int],
    most: int | None = None,
) -> Fork | None:
    """The source that shares the most tokens.

    Args:
        prompt: of the new request.
        key: its `extra_key`.
        sources: the streams there are.
        point: the policy's `fork_point`.
        most: how many tokens of the prompt may be shared; None for all.
    """
    best: Fork | None = None
    most = len(prompt) if most is None else most
    for source in sources:
        least = best.tokens if best else 0
        # Of many streams that begin with one document, the first is as good as the rest, which need no comparison.
        if source.key != key or point(source.state, min(most, len(source.prompt))) <= least:
            continue
        tokens = point(source.state, min(most, common_tokens(prompt, source.prompt)))
        if tokens > least:
            best = Fork(source, tokens)
    return best
