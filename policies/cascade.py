"""Cascading KV cache: a window in sub-caches that accept ever fewer tokens (Willette et al., 2024, section 3.2).

The window of W tokens is split into c sub-caches. The newest takes every token; each further one takes, of what the one
before evicts, every second token, and where it does not it keeps the better attended of the evicted token and its own
newest. So old tokens thin out instead of falling off, and with c = 1 the cache is StreamingLLM.

Here are the settings, the rule itself one token at a time (`Stream`, which the fast implementations in
`sglang_ext.kernels.cascade_update` must equal) and the decay of the scores. "Seen" is counted over the whole sequence:
a token that reaches sub-cache i is judged by the step in which it arrives there, not by its own number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from sglang_ext.kernels.cascade_update import Rings

HEAD_REDUCTIONS = ("mean", "max")
HEADS = ("independent", "homogeneous")


@dataclass(frozen=True)
class Cascade:
    """Settings of a cascading cache.

    Attributes:
        window: tokens kept behind the sinks, a multiple of `cascades`.
        cascades: number of sub-caches (the paper: 4; 8 for passkeys); 1 is StreamingLLM.
        sinks: first tokens, never evicted and not counted in the window (the paper: 64).
        stride: tokens attended to and added together (section 3.1; the paper: 4,096 for passkeys, 1,024 for PG19, 512
            for LongBench). Strides begin at multiples of it, counted from the sequence's first token.
        beta: decay of the scores a query, at least 0 and below 1.
        score_every: every how many queries one counts in the scores (the paper: 1): that of the tokens n - 1, 2n - 1,
            ... of the sequence, with the decay of n queries. Fewer products for an average over fewer samples.
        head_reduction: how the attention of the query heads that share a score becomes one number, `mean` or `max`.
            It is reduced query by query, before the decayed sum, so that a score does not depend on how the queries
            were cut into strides.
        heads: `independent`, each key-value head keeps its own tokens (Appendix B: better), or `homogeneous`, one
            decision for all.
        selection: False drops what a sub-cache does not accept, whatever the scores (Table 3's ablation).

    Raises:
        ValueError: a value out of its range.
    """

    window: int
    cascades: int = 4
    sinks: int = 64
    stride: int = 4096
    beta: float = 0.9999
    score_every: int = 1
    head_reduction: str = "mean"
    heads: str = "independent"
    selection: bool = True

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("cascades", 1), ("sinks", 0), ("stride", 1), ("score_every", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}: expected a whole number of at least {least}")
        if self.window % self.cascades:
            below = self.window // self.cascades * self.cascades
            raise ValueError(
                f"window={self.window}, cascades={self.cascades}: expected a multiple, sub-caches are of one size; "
                f"take window={below + self.cascades}" + (f" or {below}" if below else "")
            )
        if isinstance(self.beta, bool) or not isinstance(self.beta, (int, float)) or not 0 <= self.beta < 1:
            raise ValueError(f"beta={self.beta!r}: expected a number of at least 0 and below 1; the paper takes 0.9999")
        if self.head_reduction not in HEAD_REDUCTIONS:
            raise ValueError(f"head_reduction={self.head_reduction!r}: expected one of {', '.join(HEAD_REDUCTIONS)}")
        if self.heads not in HEADS:
            raise ValueError(f"heads={self.heads!r}: expected one of {', '.join(HEADS)}")
        if not isinstance(self.selection, bool):
            raise ValueError(f"selection={self.selection!r}: expected True or False")

    @property
    def size(self) -> int:
        """Tokens a sub-cache."""
        return self.window // self.cascades

    @property
    def rings(self) -> Rings:
        """The sizes, as the kernels take them."""
        return Rings(self.sinks, self.size, self.cascades, self.stride)

    @property
    def slots(self) -> int:
        """KV slots a request ever needs: sinks + window + stride."""
        return self.sinks + self.window + self.stride

    @property
    def token_span(self) -> int:
        """Tokens between the oldest kept and the newest, about: (W/c) (2^c - 1), eq. 4."""
        return self.size * (2**self.cascades - 1)

    @property
    def sparsity(self) -> float:
        """Share of the span that is not kept: 1 - W / span (section 3.2)."""
        return 1 - self.window / self.token_span

    @property
    def decay(self) -> float:
        """Of the scores, from a query that counts to the next."""
        return self.beta**self.score_every

    def counted(self, begin: int, end: int) -> range:
        """Those of the tokens [begin, end) of a sequence whose queries count in the scores."""
        return range(begin + (-begin - 1) % self.score_every, end, self.score_every)

    def lanes(self, kv_heads: int) -> int:
        """How many different token sets a layer keeps."""
        return kv_heads if self.heads == "independent" else 1

    def accepts(self, sub_cache: int, seen: int) -> bool:
        """Whether a sub-cache (0 = newest) accepts in the step that adds token number `seen` (counted from 1).

        Section 3.2 and Algorithm 2: `(seen - 1 - sinks) mod 2^i == 0`, and always while the window is not full.
        """
        step = seen - 1 - self.sinks
        return step < self.window or step % 2**sub_cache == 0

    def strides(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Cut the tokens [begin, end) of a sequence where strides end, at absolute multiples of `stride`."""
        cuts = range((begin // self.stride + 1) * self.stride, end, self.stride)
        bounds = [begin, *cuts, end]
        return [(a, b) for a, b in pairwise(bounds) if a < b]


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
    """One token in a `Stream`: its number in the sequence, the cell of its key and value, its score."""

    token: int
    cell: int
    score: float


class Stream:
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
