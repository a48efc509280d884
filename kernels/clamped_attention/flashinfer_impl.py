"""Attention with clamped distances of FlashInfer's dense kernels, whose outputs are merged by their log-sum-exps.

- *Near:* rows see the window through a sliding window of `width` tokens, causal.
- *Far in the window:* row r sees the tokens up to begin + r - width. That is causal attention again, over fewer
  columns: FlashInfer aligns its mask at the end.
- *Memory:* all rows see all of it. Sinks are part of it as soon as they are far from every row; before that, in the
  first chunks of a stream, the logits of their few tokens are written down.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang_ext.kernels.clamped_attention.reference import seen_logits
from sglang_ext.kernels.clamped_attention.types import ChunkQuery, FarKeys, SeenKeys, check

Prefill = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""FlashInfer's `single_prefill_with_kv_cache`."""


@dataclass(frozen=True, slots=True)
class Part:
    """Attention over some of the tokens.

    Attributes:
        out: [rows, heads, value_dim].
        lse: [rows, heads] float32, natural.
    """

    out: torch.Tensor
    lse: torch.Tensor

    def merged(self, other: Part) -> Part:
        """Attention over the tokens of both, which share none; each sees some token in every row."""
        lse = torch.logaddexp(self.lse, other.lse)
        own, others = ((part.lse - lse).exp().unsqueeze(-1) * part.out for part in (self, other))
        return Part(own + others, lse)

    def with_last(self, last: Part) -> Part:
        """The same, where `last` is of the last rows alone."""
        before = self.lse.shape[0] - last.lse.shape[0]
        merged = Part(self.out[before:], self.lse[before:]).merged(last)
        out, lse = (
            torch.cat([self.out[:before].to(merged.out.dtype), merged.out]),
            torch.cat([self.lse[:before], merged.lse]),
        )
        return Part(out, lse)


@dataclass(frozen=True, slots=True)
class _Run:
    """FlashInfer's kernel, and the factor of the logits."""

    prefill: Prefill
    scale: float

    def __call__(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool, left: int) -> Part:
        out, lse = self.prefill(
            query, keys, values, causal=causal, kv_layout="NHD", sm_scale=self.scale, window_left=left, return_lse=True
        )
        return Part(out, lse * math.log(2.0))  # FlashInfer's is to base 2


EVERYTHING = -1
"""FlashInfer's `window_left` for no sliding window."""


def attend(
    query: ChunkQuery,
    window: SeenKeys,
    sinks: SeenKeys,
    memory: FarKeys,
    *,
    width: int,
    scale: float,
    prefill: Prefill | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.attend` in half precision, without synchronisation.

    Args:
        query, window, sinks, memory, width, scale: as for the reference.
        prefill: stands for FlashInfer's function in tests.
    """
    check(query, window, sinks, memory, width)
    if prefill is None:
        from flashinfer import single_prefill_with_kv_cache as prefill
    run, rows, count = _Run(prefill, scale), query.near.shape[0], sinks.near.shape[0]
    local = run(query.near, window.near, window.values, True, width - 1)
    far = query.begin + rows - width - window.first
    if far > 0:  # the last rows see so many tokens far away
        last = slice(max(0, rows - far), rows)
        local = local.with_last(run(query.far[last], window.far[:far], window.values[:far], True, EVERYTHING))
    found = local
    if count and query.begin - (sinks.first + count - 1) < width:
        found = found.merged(_written_down(query, sinks, width, scale))
    elif count:
        memory = FarKeys(torch.cat([sinks.far, memory.keys]), torch.cat([sinks.values, memory.values]))
    if memory.keys.shape[0]:
        found = found.merged(run(query.far, memory.keys, memory.values, False, EVERYTHING))
    return found.out.to(query.near.dtype), local.lse


def _written_down(query: ChunkQuery, seen: SeenKeys, width: int, scale: float) -> Part:
    logits = seen_logits(query, seen, width, scale)
    values = seen.values.to(logits.dtype).repeat_interleave(logits.shape[0] // seen.values.shape[1], 1)
    return Part(torch.einsum("hrt,thd->rhd", logits.softmax(-1), values), logits.logsumexp(-1).transpose(0, 1))
