"""Attention with clamped distances of dense kernels, whose outputs are merged by their log-sum-exps.

- *Near:* rows see the window through a sliding window of `width` tokens, causal.
- *Far in the window:* row r sees the tokens up to begin + r - width. That is causal attention again, over fewer
  columns: the mask is aligned at the end.
- *Beyond:* all rows see all of the memory, but for its last tokens, which are causal in the same way. Sinks are part of
  it as soon as they are far from every row. In the first chunks of a stream they are near to every row; in between the
  logits of their few tokens are written down.
"""

from __future__ import annotations

import torch

from sglang_ext.kernels import dense_attention
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


def attend_window(
    query: ChunkQuery,
    window: SeenKeys,
    *,
    width: int,
    scale: float,
    attend: dense_attention.Attend = dense_attention.attend,
) -> Part:
    """`reference.attend_window` in half precision, without synchronisation.

    Args:
        query, window, width, scale: as for the reference.
        attend: `dense_attention.attend`, or what stands for it in tests.

    Returns:
        With contiguous log-sum-exps.
    """
    near = attend_near(query, window, width=width, scale=scale, attend=attend)
    rows, wide = query.near.shape[0], torch.promote_types(query.near.dtype, torch.float32)
    far = query.begin + rows - width - window.first
    if far <= 0:
        return Part(near.out, near.lse.contiguous())
    before = max(0, rows - far)  # so many rows see nothing far away
    part = Part(*attend(query.far[before:], window.far[:far], window.values[:far], scale=scale, causal=True))
    return merge(near, part, wide)  # wide, since it is merged once more


def attend_near(
    query: ChunkQuery,
    window: SeenKeys,
    *,
    width: int,
    scale: float,
    attend: dense_attention.Attend = dense_attention.attend,
) -> Part:
    """`reference.attend_near`, likewise, but with log-sum-exps of any strides."""
    check_window(query, window, width)
    return Part(*attend(query.near, window.near, window.values, scale=scale, causal=True, width=width))


def attend_beyond(
    query: ChunkQuery,
    sinks: SeenKeys,
    memory: FarKeys,
    *,
    width: int,
    scale: float,
    attend: dense_attention.Attend = dense_attention.attend,
) -> Part:
    """`reference.attend_beyond`, likewise."""
    check_beyond(query, sinks, memory, width)
    count = sinks.near.shape[0]
    near = count > 0 and query.begin - (sinks.first + count - 1) < width  # some sink, to the first row
    if not near and count:
        keys, values = torch.cat([sinks.far, memory.keys]), torch.cat([sinks.values, memory.values])
        memory = FarKeys(keys, values, memory.late)
    parts = []
    if memory.keys.shape[0]:
        parts.append(Part(*attend(query.far, memory.keys, memory.values, scale=scale, causal=memory.late > 0)))
    if near and query.begin + query.near.shape[0] - 1 - sinks.first < width:
        parts.append(Part(*attend(query.near, sinks.near, sinks.values, scale=scale, causal=False)))
    elif near:
        nothing = FarKeys(memory.keys[:0], memory.values[:0])
        parts.append(reference.attend_beyond(query, sinks, nothing, width=width, scale=scale))
    return parts[0] if len(parts) == 1 else merge(parts[0], parts[1], parts[0].lse.dtype)
