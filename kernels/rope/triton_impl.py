"""Query rows in all the rotations at which their keys are seen, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ext.kernels.rope.reference import Rope


@triton.jit
def _angle_tables(deltas, inv_freq, cos, sin, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Tables of the rotation by -deltas[program]; float64 angles, as in the reference."""
    row = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    angle = -tl.load(deltas + row).to(tl.float64) * tl.load(inv_freq + pair, mask=inside, other=0.0).to(tl.float64)
    tl.store(cos + row * HALF + pair, tl.cos(angle).to(tl.float32), mask=inside)
    tl.store(sin + row * HALF + pair, tl.sin(angle).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["most"])
def _rotate(
    query, cos, sin, counts, out, most, stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, NEOX: tl.constexpr,
    HEADS_PAD: tl.constexpr, PAIRS_PAD: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    row, rotation = tl.program_id(1).to(tl.int64), tl.program_id(0)
    if rotation < tl.load(counts + row):
        h, i, d = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, PAIRS_PAD)[None, :], tl.arange(0, DIM_PAD)[None, :]
        source = query + row * stride + h * DIM
        target = out + (row * most + rotation) * HEADS * DIM + h * DIM
        first, second = 2 * i, 2 * i + 1
        if NEOX:
            first, second = i, i + HALF
        table = (row * most + rotation) * HALF + i
        inside = (h < HEADS) & (i < HALF)
        x = tl.load(source + first, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(source + second, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + table, mask=i < HALF, other=0.0)
        s = tl.load(sin + table, mask=i < HALF, other=0.0)
        tl.store(target + first, (x * c - y * s).to(out.dtype.element_ty), mask=inside)
        tl.store(target + second, (y * c + x * s).to(out.dtype.element_ty), mask=inside)
        rest = (h < HEADS) & (d >= 2 * HALF) & (d < DIM)
        tl.store(target + d, tl.load(source + d, mask=rest, other=0.0), mask=rest)


def angle_tables(deltas: torch.Tensor, rope: Rope, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Tables for `rotate_queries`: of the rotations by -deltas.

    Args:
        deltas: [n] int32 positions by which keys are seen away from where they were written.
        rope: the model's rotation.
        cos, sin: [n, rotary_dim / 2] float32 on the same device, to write to.
    """
    half = rope.inv_freq.numel()
    _angle_tables[(deltas.numel(),)](
        deltas, rope.inv_freq, cos, sin, HALF=half, BLOCK=triton.next_power_of_2(half), num_warps=1
    )


def rotate_queries(
    query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, counts: torch.Tensor, rope: Rope, out: torch.Tensor
) -> torch.Tensor:
    """Every query row in each of its rotations; a fixed grid, counts are read on the device.

    Args:
        query: [batch, heads, head_dim], each row contiguous, rotated at its own position.
        cos, sin: [batch * rotations, rotary_dim / 2] float32 from `angle_tables`.
        counts: [batch] int32 rotations of each row; what lies behind is not written.
        rope: the model's rotation.
        out: [batch, rotations, heads, head_dim] contiguous, in any floating dtype; computed in float32.

    Returns:
        `out`.

    Raises:
        ValueError: tensors that do not fit each other or are not contiguous.
    """
    batch, heads, dim = query.shape
    half, most = rope.inv_freq.numel(), out.shape[1]
    if tuple(out.shape) != (batch, most, heads, dim) or tuple(cos.shape) != (batch * most, half):
        raise ValueError(
            f"queries {tuple(query.shape)} into {tuple(out.shape)} by tables {tuple(cos.shape)}: expected [batch, "
            "rotations, heads, head_dim] and [batch * rotations, rotary_dim / 2]"
        )
    if not (query[:1].is_contiguous() and out.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("queries, rotations or tables are not contiguous: expected contiguous tensors")
    _rotate[(most, batch)](
        query, cos, sin, counts, out, most, query.stride(0), HEADS=heads, DIM=dim, HALF=half, NEOX=rope.neox,
        HEADS_PAD=triton.next_power_of_2(heads), PAIRS_PAD=triton.next_power_of_2(half),
        DIM_PAD=triton.next_power_of_2(dim), num_warps=4,
    )  # fmt: skip
    return out
