"""The queries of a chunk at both of their rotations on a GPU, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ext.kernels.cells.lists import Rotation, rows_of
from sglang_ext.kernels.cells.triton_impl import _cos_sin, _pairs, padded

ROWS = 4
"""Rows of a program, which takes all of their heads."""


def rotate_queries(
    query: torch.Tensor, rotation: Rotation, *, first: int, edge: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.rotate_queries` in one launch; computed in float32.

    Args, Returns: as in the reference; a row of `query` is contiguous.

    Raises:
        ValueError: a row of `query` is not contiguous.
    """
    rows, heads, dim = query.shape
    near, far = (torch.empty(rows, heads, dim, dtype=query.dtype, device=query.device) for _ in range(2))
    half = rotation.phase.numel()
    if rows:
        _rotate_kernel[(triton.cdiv(rows, ROWS), heads)](
            query, rotation.phase, near, far, first, edge, rows, *rows_of(query),
            HEADS=heads, DIM=dim, HALF=half, NEOX=rotation.rope.neox, FAST=query.is_cuda, TILE=ROWS,
            PAIRS=triton.next_power_of_2(half), REST=padded(dim - 2 * half), num_warps=1,
        )  # fmt: skip
    return near, far


@triton.jit(do_not_specialize=["first", "edge", "rows"])  # they are others in every chunk
def _rotate_kernel(
    query, phase, near, far, first, edge, rows, stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, NEOX: tl.constexpr, FAST: tl.constexpr,
    TILE: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """TILE rows of the head program_id(1)."""
    head = tl.program_id(1)
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)
    on = (t < rows)[:, None]
    source = query + t.to(tl.int64)[:, None] * stride + head * DIM
    target = (t.to(tl.int64)[:, None] * HEADS + head) * DIM
    i = tl.arange(0, PAIRS)
    one, other = _pairs(HALF, PAIRS, NEOX)
    two = on & (i < HALF)[None, :]
    x = tl.load(source + one[None, :], mask=two, other=0.0).to(tl.float32)
    y = tl.load(source + other[None, :], mask=two, other=0.0).to(tl.float32)
    steps = tl.load(phase + i, mask=i < HALF, other=0)[None, :]
    cos, sin = _cos_sin((first + t)[:, None] * steps, FAST)
    tl.store(near + target + one[None, :], (x * cos - y * sin).to(near.dtype.element_ty), mask=two)
    tl.store(near + target + other[None, :], (y * cos + x * sin).to(near.dtype.element_ty), mask=two)
    cos, sin = _cos_sin(edge * steps, FAST)
    tl.store(far + target + one[None, :], (x * cos - y * sin).to(far.dtype.element_ty), mask=two)
    tl.store(far + target + other[None, :], (y * cos + x * sin).to(far.dtype.element_ty), mask=two)
    if REST > 0:
        r = 2 * HALF + tl.arange(0, REST)
        three = on & (r < DIM)[None, :]
        rest = tl.load(source + r[None, :], mask=three, other=0.0)
        tl.store(near + target + r[None, :], rest, mask=three)
        tl.store(far + target + r[None, :], rest, mask=three)
