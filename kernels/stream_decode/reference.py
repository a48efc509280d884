"""Decoding steps of streams of Ltri-LLM in plain PyTorch (sections 3 and 4), one stream at a time.

A stream sees its sinks, its window and the blocks that came back for the last chunk of its prompt, in one softmax. A
token is seen at its distance, but never farther than `width` - 1; a block that came back at that distance. What its
attention to the window says, within a softmax over the window alone, is remembered as in a prompt.
"""

from __future__ import annotations

import torch

from sglang_ext.kernels.cells.lists import Rotation
from sglang_ext.kernels.rope import rotate
from sglang_ext.kernels.stream_decode.types import (
    MapState,
    NewToken,
    StepNumbers,
    StreamCaches,
    StreamSizes,
    check,
)


def decode(
    tokens: NewToken,
    caches: StreamCaches,
    step: StepNumbers,
    sizes: StreamSizes,
    rotation: Rotation,
    scale: float,
    *,
    state: MapState | None = None,
) -> torch.Tensor:
    """One new token of each stream: stored in its cell, attended from, and counted in what is remembered.

    Args:
        tokens: the new tokens, [batch, heads or kv_heads, dim], in the caches' dtype and on their device.
        caches: of the layer; the new keys and values are written to `keys` and `values`.
        step: which streams, [4, batch]; no row twice.
        sizes: of all streams.
        rotation: the model's.
        scale: factor of the logits.
        state: of the layer, to be written; None where nothing votes.

    Returns:
        [batch, heads, value_dim] in the query's dtype; zeros for padding.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check(tokens, caches, step, sizes, state)
    query, wide = tokens.query, torch.promote_types(tokens.query.dtype, torch.float32)
    out = query.new_zeros(*query.shape[:2], caches.values.shape[2])
    for request, (row, token, first, fresh) in enumerate(step.numbers.t().tolist()):
        if row < 0:
            continue
        slots = caches.slot[row].long()
        at = slots[sizes.cell(token)]
        caches.keys[at], caches.values[at] = tokens.keys[request], tokens.values[request]
        seen = [*range(min(token, sizes.sinks)), *range(first, token + 1)]
        cells = torch.tensor([sizes.cell(each) for each in seen], device=query.device)
        ways = caches.ways[row][caches.ways[row] >= 0].long()
        keys = torch.cat([caches.keys[slots[cells]], caches.block_keys[row, ways].flatten(0, 1)]).to(wide)
        values = torch.cat([caches.values[slots[cells]], caches.block_values[row, ways].flatten(0, 1)]).to(wide)
        distance = torch.full((len(keys),), sizes.width - 1, device=query.device)
        distance[: len(seen)] = (token - torch.tensor(seen, device=query.device)).clamp(max=sizes.width - 1)
        rotated = rotate(keys.transpose(0, 1), -distance, rotation.rope).repeat_interleave(
            query.shape[1] // keys.shape[1], 0
        )
        logits = torch.einsum("hd,hnd->hn", query[request].to(wide), rotated) * scale
        grouped = values.repeat_interleave(query.shape[1] // keys.shape[1], 1)
        out[request] = torch.einsum("hn,nhd->hd", logits.softmax(-1), grouped).to(query.dtype)
        if state is not None:
            window = slice(len(seen) - (token + 1 - first), len(seen))
            _remember(state, row, token, bool(fresh), logits[:, window].softmax(-1), cells[window], sizes)
    return out


def _remember(
    state: MapState,
    row: int,
    token: int,
    fresh: bool,
    attention: torch.Tensor,
    cells: torch.Tensor,
    sizes: StreamSizes,
) -> None:
    """Count a new token's attention [heads, window] to the tokens in `cells`, the new one's the last."""
    if fresh:
        state.received[row] += state.last[row]
    state.received[row, cells[-1]] = 0
    state.last[row] = 0
    state.last[row, cells] = attention.sum(0).to(state.last.dtype)
    if token < sizes.sinks:
        return  # it is in no block
    own = (token - sizes.sinks) % sizes.block
    there = min(own + 1, attention.shape[1])
    state.tile[row, :, own, : own + 1] = 0
    state.tile[row, :, own, own + 1 - there : own + 1] = attention[:, attention.shape[1] - there :].to(state.tile.dtype)
