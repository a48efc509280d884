"""Packing of index vectors in plain PyTorch."""

from __future__ import annotations

import torch

from sglang_ext.kernels.packed_vectors.types import LARGEST, PackedSpans, blocks_of, check, check_spans, hadamard


def rounded(vectors: torch.Tensor, rotation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The vectors of one span in 4 bits a component.

    Args:
        vectors: [vectors, dim], floating.
        rotation: [dim, dim] of `hadamard`, in vectors' dtype.

    Returns:
        (whole numbers from -7 to 7 [vectors, dim], scale [] by which they are multiplied), float32, or float64 where
        the vectors are. Halves are rounded to the even number; the scale of a span of zeros is 0.
    """
    wide = torch.promote_types(vectors.dtype, torch.float32)
    mixed = vectors.to(wide) @ rotation.to(wide)
    largest = mixed.abs().max() if mixed.numel() else mixed.new_zeros(())
    steps = mixed * torch.where(largest > 0, LARGEST / largest, 0)
    return steps.round(), largest / (LARGEST * blocks_of(rotation.shape[0]))


def pack(
    states: torch.Tensor, tokens: torch.Tensor, at: torch.Tensor, rotation: torch.Tensor, *, out: PackedSpans
) -> None:
    """Write the vectors of spans, packed.

    Args:
        states: [blocks, tokens, dim] of the tokens of some blocks, floating, any device.
        tokens: [blocks, spans, most] int32 of `kernels.span_index.pick`: which tokens stand for each span, -1 behind
            the last of them.
        at: [blocks] int64, the entry of each block.
        rotation: [dim, dim] of `hadamard`, in states' dtype.
        out: written at these entries alone. The scale of a span without tokens is 0; its vectors, and those behind a
            span's last, may hold anything.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    check(states, tokens, at, rotation, out)
    vectors, scales = (each.new_zeros(len(at), *each.shape[1:]) for each in (out.vectors, out.scales))
    for block, spans in enumerate(tokens.long()):
        for span, chosen in enumerate(spans):
            steps, scale = rounded(states[block, chosen[chosen >= 0]], rotation)
            low, high = (steps.nan_to_num() + LARGEST + 1).to(torch.uint8).chunk(2, 1)
            vectors[block, span, : len(steps)], scales[block, span] = low | high << 4, scale
    out.vectors.index_copy_(0, at, vectors)
    out.scales.index_copy_(0, at, scales)


def rotate(states: torch.Tensor, tokens: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """The vectors of spans, multiplied as packed ones are, and not rounded: what these are compared with.

    Args:
        states, tokens, rotation: as for `pack`.

    Returns:
        [blocks, spans, most, dim] in states' dtype and on their device; what lies behind a span's last vector may be
        anything.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    check_spans(states, tokens, rotation)
    (blocks, spans, most), dim = tokens.shape, states.shape[2]
    wide = torch.promote_types(states.dtype, torch.float32)
    at = tokens.clamp(min=0).long().view(blocks, spans * most, 1).expand(-1, -1, dim)
    mixed = states.gather(1, at).to(wide) @ rotation.to(wide)
    return mixed.view(blocks, spans, most, dim).to(states.dtype)


def in_four_bits(vectors: torch.Tensor) -> torch.Tensor:
    """[vectors, dim] of a span, float32 or float64: what is left of them in 4 bits a component, rotated back."""
    rotation = hadamard(vectors.shape[1], vectors.dtype, vectors.device)
    steps, scale = rounded(vectors, rotation)
    return steps * scale @ rotation.T if vectors.numel() else vectors


def unpack(vectors: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., spans, most, dim] in `dtype`, the rotated vectors that were packed.

    Args:
        vectors: [..., spans, most, dim / 2] uint8.
        scales: [..., spans] float32.
        dtype: floating.
    """
    halves = torch.cat([vectors & 15, vectors >> 4], -1).to(dtype) - (LARGEST + 1)
    return halves * scales.to(dtype)[..., None, None]
