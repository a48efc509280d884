"""The decoding kernel over cells for a device: CUDA's where it runs, Triton's elsewhere."""

from __future__ import annotations

import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.cells import cuda_impl, decode_impl
from sglang_ext.kernels.cells.lists import Rotation
from sglang_ext.kernels.cells.types import Cells, CountedScores, DecodeWorkspace, NewTokens


def splits(
    batch: int,
    heads: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    rotation: Rotation,
    entries: int,
    multiprocessors: int,
) -> int:
    """Into how many shares `decode` is to cut the columns of a request.

    Args:
        batch: requests.
        heads: query heads.
        keys, values: the caches, or tensors of their shape, dtype and device.
        rotation: the model's.
        entries: columns of a request.
        multiprocessors: of the device.
    """
    kv_heads = keys.shape[1]
    if _refusal(heads, keys, values, rotation) is None:
        return cuda_impl.splits(batch, kv_heads, entries, multiprocessors)
    tuning = decode_impl.tuning_for(keys.shape[2], values.shape[2], keys.element_size())
    return decode_impl.splits(batch, kv_heads, entries, multiprocessors, tuning)


def decode(
    tokens: NewTokens,
    cells: Cells,
    rows: torch.Tensor,
    seen: torch.Tensor,
    rotation: Rotation,
    scale: float,
    *,
    scores: CountedScores | None = None,
    out: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """`cuda_impl.decode` where it runs, or `decode_impl.decode`."""
    batch, heads, kv_heads = tokens.query.shape[0], tokens.query.shape[1], cells.keys.shape[1]
    if _refusal(heads, cells.keys, cells.values, rotation) is None:
        processors = nvrtc.multiprocessors(nvrtc.index_of(tokens.query.device))
        lanes = kv_heads if scores is None else cells.slot.shape[1]
        shares = 1 if workspace is None else workspace.parts.shape[2]
        if cuda_impl.rows_at_once(batch, kv_heads, lanes, shares, processors):
            return cuda_impl.decode(
                tokens, cells, rows, seen, rotation, scale, scores=scores, out=out, workspace=workspace
            )
    return decode_impl.decode(tokens, cells, rows, seen, rotation, scale, scores=scores, out=out, workspace=workspace)


def _refusal(heads: int, keys: torch.Tensor, values: torch.Tensor, rotation: Rotation) -> str | None:
    group = heads // keys.shape[1]
    return cuda_impl.refusal(keys.device, keys.dtype, keys.shape[2], values.shape[2], group, rotation)
