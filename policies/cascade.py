"""Cascading KV cache: a window in sub-caches that accept ever fewer tokens (Willette et al., 2024, section 3.2).

The window of W tokens is split into c sub-caches. The newest takes every token; each further one takes, of what the one
before evicts, every second token, and where it does not it keeps the better attended of the evicted token and its own
newest. So old tokens thin out instead of falling off, and with c = 1 the cache is StreamingLLM.

Here are the settings, the rule itself one token at a time (`ReferenceStream`, which the fast implementations in
`sglang_ext.kernels.cascade_update` must equal) and the decay of the scores. "Seen" is counted over the whole sequence:
a token that reaches sub-cache i is judged by the step in which it arrives there, not by its own number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_ext.policies.options import Cascade


def decay(score: torch.Tensor, attention: torch.Tensor, beta: float) -> torch.Tensor:
    """The scores after the queries of a stride: β^S·score + Σ_t (1-β) β^(S-1-t)·a_t (section 3.2's average, S times).

    Args:
        score: [..., tokens], float32 or float64; 0 for the tokens of the stride itself.
        attention: [S, ..., tokens] attention each query gave to each token, same dtype and device.
        beta: decay.

    Returns:
        A tensor like `score`. S calls with one query each give the same.
    """
    queries = attention.shape[0]
    age = torch.arange(queries - 1, -1, -1, dtype=torch.float64, device=score.device)
    weight = ((1 - beta) * beta**age).to(score.dtype)
    return beta**queries * score + torch.tensordot(weight, attention, dims=1)


@dataclass
class Kept:
    """One token in a `ReferenceStream`: its number in the sequence, the cell of its key and value, its score."""

    token: int
    cell: int
    score: float


class ReferenceStream:
    """One lane by the rule, a token at a time, in Python floats (float64): the definition.

    A token's cell is its own number while nothing was dropped; token n + stride is written into the cell of the token
    that step n drops, or into cell n + stride if it drops none. So cells are numbers below sinks + window + stride.
    """

    def __init__(self, cascade: Cascade) -> None:
        self.cascade = cascade
        self.seen = 0
        self.sinks: list[Kept] = []
        self.sub_caches: list[deque[Kept]] = [deque() for _ in range(cascade.cascades)]
        self.dropped: list[int] = []
        self.cells = list(range(cascade.stride))

    def kept(self) -> list[Kept]:
        """Sinks, then the cached tokens from oldest to newest: the view order. A token's position is its place here."""
        return [*self.sinks, *(k for sub_cache in reversed(self.sub_caches) for k in sub_cache)]

    def add(self, scores: Sequence[float]) -> None:
        """Add the next tokens, with the scores that their own stride gave them."""
        for score in scores:
            new = Kept(self.seen, self.cells[self.seen], float(score))
            self.seen += 1
            freed = self._step(new)
            if freed is None:
                self.cells.append(new.token + self.cascade.stride)
            else:
                self.cells.append(freed.cell)
                self.dropped.append(freed.token)

    def _step(self, moving: Kept) -> Kept | None:
        """Put one token in; the token that is dropped for it, or None."""
        if self.seen <= self.cascade.sinks:
            self.sinks.append(moving)
            return None
        for i, sub_cache in enumerate(self.sub_caches):
            if self.cascade.accepts(i, self.seen):
                sub_cache.append(moving)
                if len(sub_cache) <= self.cascade.size:
                    return None
                moving = sub_cache.popleft()
            elif not sub_cache:
                sub_cache.append(moving)
                return None
            elif self.cascade.selection and moving.score >= sub_cache[-1].score:
                moving, sub_cache[-1] = sub_cache[-1], moving
                return moving
            else:
                return moving
        return moving
