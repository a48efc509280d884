"""Packing of index vectors on a GPU, and rotating of those that are compared with them: one launch each.

A program that packs gathers a span's vectors, multiplies them by the rotation in two halves, whose components share
bytes, and rounds them by the largest magnitude of all. An entry is read and written by one program alone, which waits
for nothing. A program that rotates gathers a span's vectors, too, and computes some of their components.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ext.kernels.packed_vectors.types import LARGEST, PackedSpans, blocks_of, check, check_spans
from sglang_ext.kernels.shared import check_contiguous

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

MAX_MOST = 128
"""Vectors of a span, at most."""

MAX_DIM = 256
"""Components of a vector, at most."""

WIDTH = 32
"""Components that a program rotates to."""


def pack(
    states: torch.Tensor, tokens: torch.Tensor, at: torch.Tensor, rotation: torch.Tensor, *, out: PackedSpans
) -> None:
    """`reference.pack` on the device, without synchronisation: values out of their range cannot be refused here.

    Products with the rotation are added in float32 from the vectors' own dtype.

    Args:
        states, tokens, at, rotation, out: as in the reference; float32, bfloat16 or float16. All are contiguous but
            `states`, whose tokens may have any stride.

    Raises:
        ValueError: as in the reference; also for tensors of other dtypes or not contiguous, and for spans of more than
            MAX_MOST vectors or vectors of more than MAX_DIM components.
    """
    check(states, tokens, at, rotation, out)
    _check(states, tokens, rotation)
    check_contiguous({"at": at, "vectors": out.vectors, "scales": out.scales})
    blocks, spans, most = tokens.shape
    count, dim = states.shape[1:]
    if 0 in (blocks, spans, most, dim, count):
        return
    _pack_kernel[(blocks, spans)](
        states, tokens, at, rotation, out.vectors, out.scales, states.stride(0), states.stride(1), count,
        1 / (LARGEST * blocks_of(dim)), SPANS=spans, MOST=most, DIM=dim, MOST_PAD=max(16, triton.next_power_of_2(most)),
        INNER=16 if states.dtype == torch.float32 else 32, HALF_PAD=max(16, triton.next_power_of_2(dim // 2)),
        LARGEST=LARGEST, num_warps=8 if dim > 128 else 4,
    )  # fmt: skip


def _check(states: torch.Tensor, tokens: torch.Tensor, rotation: torch.Tensor) -> None:
    most, dim = tokens.shape[2], states.shape[2]
    if states.dtype not in DTYPES:
        raise ValueError(f"states are {states.dtype}: expected one of {DTYPES}; take the reference for float64")
    if most > MAX_MOST or dim > MAX_DIM:
        raise ValueError(
            f"spans of {most} vectors of {dim} components: expected at most {MAX_MOST} and {MAX_DIM}; set `vectors` "
            "lower or `four_bits` to false (--policy)"
        )
    check_contiguous({"tokens": tokens, "rotation": rotation})
    if states.stride(2) != 1 and dim > 1:
        raise ValueError(f"states have strides {states.stride()}: expected components beside each other")


def rotate(states: torch.Tensor, tokens: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """`reference.rotate` on the device, without synchronisation. Products are added in float32.

    Args:
        states, tokens, rotation: as for `pack`.

    Returns:
        [blocks, spans, most, dim] contiguous, zeros behind a span's last vector.

    Raises:
        ValueError: as in the reference, and as `pack`.
    """
    check_spans(states, tokens, rotation)
    _check(states, tokens, rotation)
    blocks, spans, most = tokens.shape
    count, dim = states.shape[1:]
    out = torch.empty(blocks, spans, most, dim, dtype=states.dtype, device=states.device)
    if 0 in (blocks, spans, most, dim, count):
        return out.zero_()
    _rotate_kernel[(blocks, spans, triton.cdiv(dim, WIDTH))](
        states, tokens, rotation, out, states.stride(0), states.stride(1), count, SPANS=spans, MOST=most, DIM=dim,
        MOST_PAD=max(16, triton.next_power_of_2(most)), INNER=16 if states.dtype == torch.float32 else 64, WIDTH=WIDTH,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _rounded(mixed, factor, LARGEST: tl.constexpr):
    """Whole numbers in the low bits of [rows, components] int32, each plus 8.

    Adding 1.5 * 2^23 leaves a float32 no bits below 1, so it is rounded to the nearest whole number, halves to even.
    """
    return (mixed * factor + 12582912.0 - 12582912.0).to(tl.int32) + (LARGEST + 1)


@triton.jit(do_not_specialize=["count"])
def _pack_kernel(
    states, tokens, at, rotation, vectors, scales, block_stride, token_stride, count, unit,
    SPANS: tl.constexpr, MOST: tl.constexpr, DIM: tl.constexpr, MOST_PAD: tl.constexpr, INNER: tl.constexpr,
    HALF_PAD: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = DIM // 2
    block, span = tl.program_id(0), tl.program_id(1)
    m, h = tl.arange(0, MOST_PAD), tl.arange(0, HALF_PAD)
    token = tl.load(tokens + (block * SPANS + span) * MOST + m, mask=m < MOST, other=-1)
    there = (token >= 0) & (token < count)
    place = block.to(tl.int64) * block_stride + token.to(tl.int64) * token_stride
    low = tl.zeros([MOST_PAD, HALF_PAD], tl.float32)
    high = tl.zeros([MOST_PAD, HALF_PAD], tl.float32)
    for first in range(0, DIM, INNER):
        d = first + tl.arange(0, INNER)
        x = tl.load(states + place[:, None] + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0)
        entries = rotation + d[:, None] * DIM + h[None, :]
        inside = (d < DIM)[:, None] & (h < HALF)[None, :]
        low = tl.dot(x, tl.load(entries, mask=inside, other=0.0), low, input_precision="ieee")
        high = tl.dot(x, tl.load(entries + HALF, mask=inside, other=0.0), high, input_precision="ieee")
    largest = tl.max(tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1), 0)
    factor = tl.where(largest > 0, LARGEST / largest, 0.0)
    packed = _rounded(low, factor, LARGEST) | (_rounded(high, factor, LARGEST) << 4)
    entry = tl.load(at + block) * SPANS + span
    tl.store(scales + entry, largest * unit)
    out = vectors + (entry * MOST + m[:, None]) * HALF + h[None, :]
    tl.store(out, packed.to(tl.uint8), mask=there[:, None] & (h < HALF)[None, :])


@triton.jit(do_not_specialize=["count"])
def _rotate_kernel(
    states, tokens, rotation, out, block_stride, token_stride, count,
    SPANS: tl.constexpr, MOST: tl.constexpr, DIM: tl.constexpr, MOST_PAD: tl.constexpr, INNER: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    block, span = tl.program_id(0), tl.program_id(1)
    m, n = tl.arange(0, MOST_PAD), tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    first = (block * SPANS + span) * MOST
    token = tl.load(tokens + first + m, mask=m < MOST, other=-1)
    there = (token >= 0) & (token < count)
    place = block.to(tl.int64) * block_stride + token.to(tl.int64) * token_stride
    mixed = tl.zeros([MOST_PAD, WIDTH], tl.float32)
    for begin in range(0, DIM, INNER):
        d = begin + tl.arange(0, INNER)
        x = tl.load(states + place[:, None] + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0)
        inside = (d < DIM)[:, None] & (n < DIM)[None, :]
        entries = tl.load(rotation + d[:, None] * DIM + n[None, :], mask=inside, other=0.0)
        mixed = tl.dot(x, entries, mixed, input_precision="ieee")
    tl.store(out + (first + m[:, None]) * DIM + n[None, :], mixed, mask=(m < MOST)[:, None] & (n < DIM)[None, :])
