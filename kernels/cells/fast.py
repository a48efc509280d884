"""The decoding kernel over cells for a device: CUDA's where it runs, Triton's elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.cells import cuda_impl, decode_impl
from sglang_ext.kernels.cells.lists import Rotation


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
    query: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot: torch.Tensor,
    rows: torch.Tensor,
    seen: torch.Tensor,
    rotation: Rotation,
    scale: float,
    **options: Any,
) -> torch.Tensor:
    """`cuda_impl.decode` where it runs, or `decode_impl.decode`."""
    chosen: Callable[..., torch.Tensor] = decode_impl.decode
    if _refusal(query.shape[1], keys, values, rotation) is None:
        processors, workspace = nvrtc.multiprocessors(nvrtc.index_of(query.device)), options.get("workspace")
        lanes = keys.shape[1] if options.get("score") is None else slot.shape[1]
        shares = 1 if workspace is None else workspace.parts.shape[2]
        if cuda_impl.rows_at_once(query.shape[0], keys.shape[1], lanes, shares, processors):
            chosen = cuda_impl.decode
    return chosen(query, new_keys, new_values, keys, values, slot, rows, seen, rotation, scale, **options)


def _refusal(heads: int, keys: torch.Tensor, values: torch.Tensor, rotation: Rotation) -> str | None:
    group = heads // keys.shape[1]
    return cuda_impl.refusal(keys.device, keys.dtype, keys.shape[2], values.shape[2], group, rotation)
