"""Packed index vectors, and the matrix by which they are rotated beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

LARGEST = 7
"""The largest magnitude of a component in 4 bits."""


@dataclass(frozen=True, slots=True)
class PackedSpans:
    """Spans of packed index vectors, under the numbers of their blocks.

    A component is a whole number from -7 to 7, times the scale of its span. A byte holds two of them, each plus 8: the
    low four bits hold component j, and the high four bits component j + dim / 2. Products with vectors that are
    multiplied by the same matrix (`hadamard`) are those of the vectors before they were packed, up to rounding.

    Attributes:
        vectors: [entries, spans, most, dim / 2] uint8.
        scales: [entries, spans] float32.
    """

    vectors: torch.Tensor
    scales: torch.Tensor


def blocks_of(dim: int) -> int:
    """Components that are mixed with each other: the largest power of two that divides `dim`."""
    return dim & -dim


@cache
def hadamard(dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The matrix by which vectors are multiplied before they are packed, and queries before they are compared.

    It flips the signs of some components, and then mixes them by a Hadamard matrix (in blocks, where `dim` is no power
    of two), so that no component is much larger than others (QuaRot: Ashkboos et al., 2024, section 3). All entries are
    -1, 0 or 1, so that no dtype rounds them; products of two vectors become `blocks_of(dim)` times as large, which
    `pack` takes out of the scales.

    Args:
        dim: components of a vector.
        dtype: floating.
        device: any.

    Returns:
        [dim, dim].
    """
    mixed = torch.ones(1, 1, device="cpu")
    while len(mixed) < blocks_of(dim):
        mixed = torch.cat([torch.cat([mixed, mixed], 1), torch.cat([mixed, -mixed], 1)])
    whole = torch.block_diag(*[mixed] * (dim // len(mixed))) if dim else torch.zeros(0, 0, device="cpu")
    signs = torch.randint(2, (dim, 1), generator=torch.Generator().manual_seed(0), device="cpu") * 2 - 1
    return (whole * signs).to(dtype).to(device)


def check_spans(states: torch.Tensor, tokens: torch.Tensor, rotation: torch.Tensor) -> None:
    """Look at what `rotate` is given, but not at values on the device.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    if states.dim() != 3 or tokens.dim() != 3 or len(states) != len(tokens) or not states.is_floating_point():
        raise ValueError(
            f"states are {states.dtype} {tuple(states.shape)}, tokens {tuple(tokens.shape)}: expected floating "
            "[blocks, tokens, dim] and [blocks, spans, most]"
        )
    dim = states.shape[2]
    if tokens.dtype != torch.int32:
        raise ValueError(f"tokens are {tokens.dtype}: expected int32")
    if rotation.shape != (dim, dim) or rotation.dtype != states.dtype:
        raise ValueError(
            f"rotation is {rotation.dtype} {tuple(rotation.shape)}: expected {states.dtype} {(dim, dim)}, of `hadamard`"
        )
    _check_devices(states, tokens, rotation)


def check(
    states: torch.Tensor, tokens: torch.Tensor, at: torch.Tensor, rotation: torch.Tensor, out: PackedSpans
) -> None:
    """The same for `pack`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    dim = states.shape[-1]
    if dim % 2:
        raise ValueError(f"vectors have {dim} components: expected an even number, since a byte holds two")
    check_spans(states, tokens, rotation)
    blocks, spans, most = tokens.shape
    if at.dtype != torch.int64 or at.shape != (blocks,):
        raise ValueError(f"at is {at.dtype} {tuple(at.shape)}: expected int64 {(blocks,)}")
    entries = len(out.scales)
    for name, tensor, shape, dtype in (
        ("vectors", out.vectors, (entries, spans, most, dim // 2), torch.uint8),
        ("scales", out.scales, (entries, spans), torch.float32),
    ):
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(f"{name} are {tensor.dtype} {tuple(tensor.shape)}: expected {dtype} {shape}")
    _check_devices(states, at, out.vectors, out.scales)


def _check_devices(*tensors: torch.Tensor) -> None:
    devices = {each.device for each in tensors}
    if len(devices) > 1:
        raise ValueError(f"tensors on {', '.join(sorted(map(str, devices)))}: expected one device")
