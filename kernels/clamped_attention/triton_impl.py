"""What stands around a chunk's attention on a GPU, one launch each: rotated queries, merged parts, moved keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ext.kernels.cells.lists import Rotation, rows_of
from sglang_ext.kernels.cells.triton_impl import _cos_sin, _pairs, padded
from sglang_ext.kernels.clamped_attention.types import LayerRows, Part, check_layers, check_parts

ROWS = 4
"""Rows of a program that rotates, or merges, one head of them."""

PIECE = 4096
"""Elements of a row that a program moves, at most."""


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


def merge(one: Part, other: Part, dtype: torch.dtype, *, out: torch.Tensor | None = None) -> Part:
    """`reference.merge` in one launch, in the dtype of the log-sum-exps.

    Raises:
        ValueError: the parts do not fit each other, or `out` does not fit them; their outputs are not contiguous.
    """
    check_parts(one, other, dtype, out)
    if not one.out.is_contiguous() or not other.out.is_contiguous():
        raise ValueError("outputs of parts are not contiguous: expected contiguous ones")
    rows, heads, dim = one.out.shape
    if out is None:
        out = torch.empty(rows, heads, dim, dtype=dtype, device=one.out.device)
    lse = torch.empty(rows, heads, dtype=one.lse.dtype, device=one.out.device)
    if rows:
        _merge_kernel[(triton.cdiv(rows * heads, ROWS),)](
            one.out, one.lse, other.out, other.lse, out, lse, rows * heads, rows - other.out.shape[0], heads,
            *one.lse.stride(), *other.lse.stride(),
            DIM=dim, TILE=ROWS, COLUMNS=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip
    return Part(out, lse)


# Strides are other ones for every number of rows.
@triton.jit(do_not_specialize=["count", "before", "heads", "one_row", "one_head", "other_row", "other_head"])
def _merge_kernel(
    one, one_lse, other, other_lse, out, lse, count, before, heads, one_row, one_head, other_row, other_head,
    DIM: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """TILE of the `count` rows of heads; the other part has none of the first `before` rows."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    row, head = at // heads, at % heads
    on = at < count
    both = on & (row >= before)
    a = tl.load(one_lse + row * one_row + head * one_head, mask=on, other=0.0)
    b = tl.load(other_lse + (row - before) * other_row + head * other_head, mask=both, other=float("-inf"))
    top = tl.maximum(a, b)
    # A part that sees nothing has -inf, and counts nothing.
    base = tl.where(top > float("-inf"), top, 0.0)
    weight_a, weight_b = tl.exp(a - base), tl.exp(b - base)
    total = weight_a + weight_b
    some = tl.where(total > 0, total, 1.0)
    d = tl.arange(0, COLUMNS)[None, :]
    wide = lse.dtype.element_ty
    x = tl.load(one + at[:, None] * DIM + d, mask=on[:, None] & (d < DIM), other=0.0).to(wide)
    place = at - before * heads
    y = tl.load(other + place[:, None] * DIM + d, mask=both[:, None] & (d < DIM), other=0.0).to(wide)
    merged = (x * weight_a[:, None] + y * weight_b[:, None]) / some[:, None]
    tl.store(out + at[:, None] * DIM + d, merged.to(out.dtype.element_ty), mask=on[:, None] & (d < DIM))
    tl.store(lse + at, tl.where(total > 0, base + tl.log(some), float("-inf")), mask=on)


def move(
    source: tuple[torch.Tensor, torch.Tensor],
    target: tuple[torch.Tensor, torch.Tensor],
    *,
    read: torch.Tensor | None = None,
    write: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
) -> None:
    """`reference.move` in one launch.

    Raises:
        ValueError: neither index is given; dtypes or rows do not fit; a row is not contiguous.
    """
    index = read if read is not None else write
    if index is None:
        raise ValueError("neither read nor write is given: expected one, [rows] integer")
    sizes, rows = _sizes(source, target), index.shape[0]
    if not rows:
        return
    piece = min(PIECE, triton.next_power_of_2(max(sizes)))
    _move_kernel[(rows, triton.cdiv(max(sizes), piece))](
        *source, *target, index if read is None else read, index if write is None else write,
        index if base is None else base, *(each.stride(0) for each in (*source, *target)),
        KEYS=sizes[0], VALUES=sizes[1], READ=read is not None, WRITE=write is not None, BASE=base is not None,
        PIECE=piece, num_warps=4,
    )  # fmt: skip


def _sizes(source: tuple[torch.Tensor, torch.Tensor], target: tuple[torch.Tensor, torch.Tensor]) -> tuple[int, int]:
    """Elements of a row of keys, and of one of values, that are moved.

    Raises:
        ValueError: dtypes or rows do not fit; a row is not contiguous.
    """
    for each, into in zip(source, target, strict=True):
        if each.dtype != into.dtype or each.shape[1:] != into.shape[1:]:
            raise ValueError(
                f"{each.dtype} {tuple(each.shape)} into {into.dtype} {tuple(into.shape)}: expected rows of one shape"
                " and dtype"
            )
        if not (each[:1].is_contiguous() and into[:1].is_contiguous()):
            raise ValueError("keys or values are not contiguous: expected rows that are contiguous each")
    keys, values = source
    return keys.shape[1:].numel(), values.shape[1:].numel()


def move_layers(source: LayerRows, target: LayerRows, *, read: torch.Tensor, write: torch.Tensor) -> None:
    """`reference.move_layers` in one launch.

    Raises:
        ValueError: the numbers of layers differ; dtypes or rows do not fit; a row is not contiguous.
    """
    check_layers(source, target)
    pair, into = source.pairs[0], target.pairs[0]
    layers, sizes, rows = len(source.pairs), _sizes(pair, into), read.shape[0]
    if not rows:
        return
    piece = min(PIECE, triton.next_power_of_2(max(sizes)))
    _move_layers_kernel[(rows, triton.cdiv(max(sizes), piece), layers)](
        source.addresses, target.addresses, read, write, *pair, *(each.stride(0) for each in (*pair, *into)),
        KEYS=sizes[0], VALUES=sizes[1], PIECE=piece, ALIGNED=source.aligned and target.aligned, num_warps=4,
    )  # fmt: skip


@triton.jit
def _at(addresses, number, like, ALIGNED: tl.constexpr):
    """The pointer that is written down under a number, to elements such as `like` points to."""
    found = tl.cast(tl.load(addresses + number), tl.pointer_type(like.dtype.element_ty))
    return tl.multiple_of(found, 16) if ALIGNED else found


@triton.jit
def _move_layers_kernel(
    source, target, read, write, keys, values, stride_key, stride_value, stride_to_key, stride_to_value,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PIECE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A piece of one row's keys, and of its values, in one layer."""
    row, number = tl.program_id(0), 2 * tl.program_id(2)
    old, new = tl.load(read + row).to(tl.int64), tl.load(write + row).to(tl.int64)
    at = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    from_keys = _at(source, number, keys, ALIGNED) + old * stride_key + at
    from_values = _at(source, number + 1, values, ALIGNED) + old * stride_value + at
    some_keys = tl.load(from_keys, mask=at < KEYS, other=0.0)
    some_values = tl.load(from_values, mask=at < VALUES, other=0.0)
    tl.store(_at(target, number, keys, ALIGNED) + new * stride_to_key + at, some_keys, mask=at < KEYS)
    tl.store(_at(target, number + 1, values, ALIGNED) + new * stride_to_value + at, some_values, mask=at < VALUES)


@triton.jit
def _move_kernel(
    keys, values, to_keys, to_values, read, write, base, stride_key, stride_value, stride_to_key, stride_to_value,
    KEYS: tl.constexpr, VALUES: tl.constexpr, READ: tl.constexpr, WRITE: tl.constexpr, BASE: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """A piece of one row's keys, and of its values."""
    row = tl.program_id(0).to(tl.int64)
    source, target = row, row
    if READ:
        source = tl.load(read + row).to(tl.int64)
    if WRITE:
        target = tl.load(write + row).to(tl.int64)
    at = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    there = source >= 0
    if BASE:
        source += tl.load(base).to(tl.int64)
    some_keys = tl.load(keys + source * stride_key + at, mask=there & (at < KEYS), other=0.0)
    some_values = tl.load(values + source * stride_value + at, mask=there & (at < VALUES), other=0.0)
    tl.store(to_keys + target * stride_to_key + at, some_keys, mask=at < KEYS)
    tl.store(to_values + target * stride_to_value + at, some_values, mask=at < VALUES)
