"""What stands around a chunk's attention on a device: Triton's kernels on a GPU, plain PyTorch elsewhere."""

from __future__ import annotations

import torch

from sglang_ext.kernels.cells.lists import Rotation
from sglang_ext.kernels.clamped_attention.types import LayerRows, Part


def rotate_queries(
    query: torch.Tensor, rotation: Rotation, *, first: int, edge: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.rotate_queries` (see there), by the Triton kernel where the queries lie on a GPU."""
    if query.is_cuda:
        from sglang_ext.kernels.clamped_attention.triton_impl import rotate_queries as run
    else:
        from sglang_ext.kernels.clamped_attention.reference import rotate_queries as run
    return run(query, rotation, first=first, edge=edge)


def gather_keys(
    keys: torch.Tensor,
    values: torch.Tensor,
    slot: torch.Tensor,
    rotation: Rotation,
    columns: int,
    out_keys: torch.Tensor,
    out_values: torch.Tensor,
) -> None:
    """`cells.reference.gather` (see there), by its Triton kernel where the keys lie on a GPU."""
    if keys.is_cuda:
        from sglang_ext.kernels.cells.triton_impl import gather as run
    else:
        from sglang_ext.kernels.cells.reference import gather as run
    run(keys, values, slot, rotation, columns, out_keys, out_values)


def merge(one: Part, other: Part, dtype: torch.dtype, *, out: torch.Tensor | None = None) -> Part:
    """`reference.merge` (see there), by the Triton kernel where the parts lie on a GPU."""
    if one.out.is_cuda:
        from sglang_ext.kernels.clamped_attention.triton_impl import merge as run
    else:
        from sglang_ext.kernels.clamped_attention.reference import merge as run
    return run(one, other, dtype, out=out)


def move(
    source: tuple[torch.Tensor, torch.Tensor],
    target: tuple[torch.Tensor, torch.Tensor],
    *,
    read: torch.Tensor | None = None,
    write: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
) -> None:
    """`reference.move` (see there), by the Triton kernel where the source lies on a GPU."""
    if source[0].is_cuda:
        from sglang_ext.kernels.clamped_attention.triton_impl import move as run
    else:
        from sglang_ext.kernels.clamped_attention.reference import move as run
    run(source, target, read=read, write=write, base=base)


def move_layers(source: LayerRows, target: LayerRows, *, read: torch.Tensor, write: torch.Tensor) -> None:
    """`reference.move_layers` (see there), by the Triton kernel where the rows lie on a GPU."""
    if target.addresses.is_cuda:
        from sglang_ext.kernels.clamped_attention.triton_impl import move_layers as run
    else:
        from sglang_ext.kernels.clamped_attention.reference import move_layers as run
    run(source, target, read=read, write=write)
