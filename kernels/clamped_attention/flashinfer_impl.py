"""Attention with clamped distances of FlashInfer's dense kernels, whose outputs are merged by their log-sum-exps.

- *Near:* rows see the window through a sliding window of `width` tokens, causal.
- *Far in the window:* row r sees the tokens up to begin + r - width. That is causal attention again, over fewer
  columns: FlashInfer aligns its mask at the end.
- *Beyond:* all rows see all of the memory. Sinks are part of it as soon as they are far from every row. In the first
  chunks of a stream they are near to every row; in between the logits of their few tokens are written down.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from sglang_ext.kernels.clamped_attention import reference
from sglang_ext.kernels.clamped_attention.dispatch import merge
from sglang_ext.kernels.clamped_attention.types import (
    ChunkQuery,
    FarKeys,
    Part,
    SeenKeys,
    check_beyond,
    check_window,
)

Prefill = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""FlashInfer's `single_prefill_with_kv_cache`."""
EVERYTHING = -1
"""FlashInfer's `window_left` for no sliding window."""


def attend_window(
    query: ChunkQuery, window: SeenKeys, *, width: int, scale: float, prefill: Prefill | None = None
) -> Part:
    """`reference.attend_window` in half precision, without synchronisation.

    Args:
        query, window, width, scale: as for the reference.
        prefill: stands for FlashInfer's function in tests.
    """
    check_window(query, window, width)
    rows = query.near.shape[0]
    near = _run(prefill, query.near, window.near, window.values, scale, causal=True, left=width - 1)
    far = query.begin + rows - width - window.first
    if far <= 0:
        return near
    before = max(0, rows - far)  # so many rows see nothing far away
    part = _run(prefill, query.far[before:], window.far[:far], window.values[:far], scale, causal=True)
    return merge(near, part, near.lse.dtype)  # it is merged once more


def attend_beyond(
    query: ChunkQuery,
    sinks: SeenKeys,
    memory: FarKeys,
    *,
    width: int,
    scale: float,
    prefill: Prefill | None = None,
) -> Part:
    """`reference.attend_beyond`, likewise."""
    check_beyond(query, sinks, memory, width)
    count = sinks.near.shape[0]
    near = count > 0 and query.begin - (sinks.first + count - 1) < width  # some sink, to the first row
    if not near and count:
        memory = FarKeys(torch.cat([sinks.far, memory.keys]), torch.cat([sinks.values, memory.values]))
    parts = []
    if memory.keys.shape[0]:
        parts.append(_run(prefill, query.far, memory.keys, memory.values, scale, causal=False))
    if near and query.begin + query.near.shape[0] - 1 - sinks.first < width:
        parts.append(_run(prefill, query.near, sinks.near, sinks.values, scale, causal=False))
    elif near:
        nothing = FarKeys(memory.keys[:0], memory.values[:0])
        parts.append(reference.attend_beyond(query, sinks, nothing, width=width, scale=scale))
    return parts[0] if len(parts) == 1 else merge(parts[0], parts[1], parts[0].lse.dtype)


def _run(
    prefill: Prefill | None,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    causal: bool,
    left: int = EVERYTHING,
) -> Part:
    run = _flashinfer() if prefill is None else prefill
    out, lse = run(
        query, keys, values, causal=causal, kv_layout="NHD", sm_scale=scale, window_left=left, return_lse=True
    )
    return Part(out, lse * math.log(2.0))  # FlashInfer's is to base 2


def _flashinfer() -> Prefill:
    from flashinfer import single_prefill_with_kv_cache

    found: Prefill = single_prefill_with_kv_cache
    return found
