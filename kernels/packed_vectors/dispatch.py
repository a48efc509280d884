"""Who packs and rotates index vectors on a device: Triton's kernels on a GPU, plain PyTorch elsewhere."""

from __future__ import annotations

import torch

from sglang_ext.kernels.packed_vectors import reference
from sglang_ext.kernels.packed_vectors.types import PackedSpans


def pack(
    states: torch.Tensor, tokens: torch.Tensor, at: torch.Tensor, rotation: torch.Tensor, *, out: PackedSpans
) -> None:
    """`reference.pack` (see there), by the Triton kernel where the states live on a GPU.

    Raises:
        ValueError: as in the reference; on a GPU `triton_impl.pack` says what it refuses besides.
    """
    chosen = reference.pack
    if states.is_cuda:
        from sglang_ext.kernels.packed_vectors.triton_impl import pack as chosen
    chosen(states, tokens, at, rotation, out=out)


def rotate(states: torch.Tensor, tokens: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """`reference.rotate` (see there), by the Triton kernel where the states live on a GPU.

    Raises:
        ValueError: as in the reference; on a GPU `triton_impl.rotate` says what it refuses besides.
    """
    chosen = reference.rotate
    if states.is_cuda:
        from sglang_ext.kernels.packed_vectors.triton_impl import rotate as chosen
    return chosen(states, tokens, rotation)
