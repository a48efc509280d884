"""Cells on a GPU: lists of a stride for all layers at once, the rotated window, new tokens into their cells.

Grids depend on shapes and on what the host knows; nothing is read back. Keys are rotated by an integer product that
wraps around with the angle (`Rotation.phase`), in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ext.kernels.cascade_update import CascadeState, Rings
from sglang_ext.kernels.cells.lists import Rotation, check_cells, rows_of
from sglang_ext.kernels.cells.reference import check_lists, check_pair

COLUMNS = 1024
"""Columns of a program that writes lists."""

TOKENS = 32
"""Tokens of a program that moves keys and values."""

RADIANS = tl.constexpr(1.4629180792671596e-09)  # 2 pi / 2^32


@triton.jit
def _cos_sin(rotations, FAST: tl.constexpr):
    """cos and sin of rotations in units of 2^-32 of a whole one, int32: positions times `Rotation.phase`."""
    angle = rotations.to(tl.float32) * RADIANS
    if FAST:  # good to 2^-20 between -pi and pi, where the angle lies
        cos = tl.inline_asm_elementwise("cos.approx.ftz.f32 $0, $1;", "=f,f", [angle], tl.float32, is_pure=True, pack=1)
        sin = tl.inline_asm_elementwise("sin.approx.ftz.f32 $0, $1;", "=f,f", [angle], tl.float32, is_pure=True, pack=1)
    else:
        cos, sin = tl.cos(angle), tl.sin(angle)
    return cos, sin


@triton.jit
def _pairs(HALF: tl.constexpr, PAIRS: tl.constexpr, NEOX: tl.constexpr):
    """Components of every pair: (first, second), each [PAIRS]."""
    i = tl.arange(0, PAIRS)
    if NEOX:
        return i, i + HALF
    return 2 * i, 2 * i + 1


@triton.jit
def _columns_kernel(
    added, seen, out, columns,
    SINKS: tl.constexpr, SIZE: tl.constexpr, CASCADES: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    WINDOW: tl.constexpr = SIZE * CASCADES
    request = tl.program_id(1)
    before = tl.load(added + request).to(tl.int32)
    now = tl.load(seen + request).to(tl.int32)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = column - SINKS
    behind = tl.maximum(before - SINKS, 0)
    filling = behind < WINDOW
    # Quotients of negative numbers belong to columns that are something else, below.
    level = tl.where(filling, behind - 1 - v, WINDOW - 1 - v) // SIZE
    step = 1 << tl.minimum(tl.maximum(level, 0), CASCADES - 1)
    head = (behind + step - 1) // step - (WINDOW + step - 1) // step
    index = tl.where(filling, v, head + v) % SIZE
    entry = tl.where(column < SINKS, column, SINKS + level * SIZE + index)
    kept = tl.minimum(before, SINKS + WINDOW)
    entry = tl.where(column < kept, entry, SINKS + WINDOW + (before + column - kept) % STRIDE)
    entry = tl.where(column < kept + now - before, entry, -1)
    tl.store(out + request.to(tl.int64) * columns + column, entry, mask=column < columns)


def columns(rings: Rings, added: torch.Tensor, seen: torch.Tensor, number: int) -> torch.Tensor:
    """`Rings.columns` in one launch; see there."""
    out = torch.empty(added.numel(), number, dtype=torch.int32, device=added.device)
    if out.numel():
        _columns_kernel[(triton.cdiv(number, COLUMNS), added.numel())](
            added, seen, out, number, SINKS=rings.sinks, SIZE=rings.size, CASCADES=rings.cascades,
            STRIDE=rings.stride, BLOCK=COLUMNS, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _list_kernel(
    cell, slot, rows, entries, slots, batch, lanes, num_rows, stride_slots, cells,
    ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(0)
    request = (lane // lanes) % batch
    row = tl.load(rows + request).to(tl.int64)
    base = (((lane // (lanes * batch)).to(tl.int64) * num_rows + row) * lanes + lane % lanes) * ENTRIES
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < ENTRIES
    entry = tl.load(entries + request.to(tl.int64) * ENTRIES + column, mask=inside, other=-1)
    place = tl.load(cell + base + entry, mask=entry >= 0, other=-1)
    there = (entry >= 0) & (place >= 0) & (place < cells)
    found = tl.load(slots + request.to(tl.int64) * stride_slots + place, mask=there, other=0)
    tl.store(slot + base + column, found, mask=inside)


@triton.jit(do_not_specialize=["columns"])  # it is another one in every pass
def _gather_kernel(
    keys, values, slot, phase, out_keys, out_values, columns,
    stride_key, stride_value, stride_out_key, stride_out_value,
    LANES: tl.constexpr, ENTRIES: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HALF: tl.constexpr,
    NEOX: tl.constexpr, FAST: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    lane = head if LANES > 1 else 0
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    on = column < columns
    at = tl.load(slot + lane * ENTRIES + column, mask=on, other=0).to(tl.int64)
    v = tl.arange(0, VALUES)
    both = on[:, None] & (v < VALUE_DIM)[None, :]
    moved = tl.load(values + at[:, None] * stride_value + head * VALUE_DIM + v[None, :], mask=both, other=0.0)
    target = column.to(tl.int64)
    i = tl.arange(0, PAIRS)
    first, second = _pairs(HALF, PAIRS, NEOX)
    two = on[:, None] & (i < HALF)[None, :]
    source = keys + at[:, None] * stride_key + head * DIM
    x = tl.load(source + first[None, :], mask=two, other=0.0).to(tl.float32)
    y = tl.load(source + second[None, :], mask=two, other=0.0).to(tl.float32)
    cos, sin = _cos_sin(column[:, None] * tl.load(phase + i, mask=i < HALF, other=0)[None, :], FAST)
    place = out_keys + target[:, None] * stride_out_key + head * DIM
    tl.store(place + first[None, :], (x * cos - y * sin).to(out_keys.dtype.element_ty), mask=two)
    tl.store(place + second[None, :], (y * cos + x * sin).to(out_keys.dtype.element_ty), mask=two)
    if REST > 0:
        r = 2 * HALF + tl.arange(0, REST)
        three = on[:, None] & (r < DIM)[None, :]
        tl.store(place + r[None, :], tl.load(source + r[None, :], mask=three, other=0.0), mask=three)
    tl.store(out_values + target[:, None] * stride_out_value + head * VALUE_DIM + v[None, :], moved, mask=both)


@triton.jit(do_not_specialize=["first_column", "rows"])
def _store_kernel(
    new_keys, new_values, slot, phase, keys, values, out_keys, out_values, first_column, rows,
    stride_new_key, stride_new_value, stride_key, stride_value, stride_out_key, stride_out_value,
    LANES: tl.constexpr, ENTRIES: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HALF: tl.constexpr,
    NEOX: tl.constexpr, FAST: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr,
    REST: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    lane = head if LANES > 1 else 0
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)
    on = t < rows
    column = first_column + t
    at = tl.load(slot + lane * ENTRIES + column, mask=on, other=0).to(tl.int64)[:, None]
    row, behind = t.to(tl.int64)[:, None], column.to(tl.int64)[:, None]
    i, v = tl.arange(0, PAIRS), tl.arange(0, VALUES)
    first, second = _pairs(HALF, PAIRS, NEOX)
    first, second = head * DIM + first[None, :], head * DIM + second[None, :]
    two = on[:, None] & (i < HALF)[None, :]
    x = tl.load(new_keys + row * stride_new_key + first, mask=two, other=0.0)
    y = tl.load(new_keys + row * stride_new_key + second, mask=two, other=0.0)
    if WINDOW:
        tl.store(out_keys + behind * stride_out_key + first, x.to(out_keys.dtype.element_ty), mask=two)
        tl.store(out_keys + behind * stride_out_key + second, y.to(out_keys.dtype.element_ty), mask=two)
    cos, sin = _cos_sin(column[:, None] * tl.load(phase + i, mask=i < HALF, other=0)[None, :], FAST)
    x, y = x.to(tl.float32), y.to(tl.float32)
    tl.store(keys + at * stride_key + first, (x * cos + y * sin).to(keys.dtype.element_ty), mask=two)
    tl.store(keys + at * stride_key + second, (y * cos - x * sin).to(keys.dtype.element_ty), mask=two)
    if REST > 0:
        r = 2 * HALF + tl.arange(0, REST)
        three = on[:, None] & (r < DIM)[None, :]
        r = head * DIM + r[None, :]
        z = tl.load(new_keys + row * stride_new_key + r, mask=three, other=0.0)
        tl.store(keys + at * stride_key + r, z.to(keys.dtype.element_ty), mask=three)
        if WINDOW:
            tl.store(out_keys + behind * stride_out_key + r, z.to(out_keys.dtype.element_ty), mask=three)
    whole = on[:, None] & (v < VALUE_DIM)[None, :]
    v = head * VALUE_DIM + v[None, :]
    w = tl.load(new_values + row * stride_new_value + v, mask=whole, other=0.0)
    tl.store(values + at * stride_value + v, w.to(values.dtype.element_ty), mask=whole)
    if WINDOW:
        tl.store(out_values + behind * stride_out_value + v, w.to(out_values.dtype.element_ty), mask=whole)


def list_columns(
    slot: torch.Tensor,
    state: CascadeState,
    rows: torch.Tensor,
    entries: torch.Tensor,
    slots: torch.Tensor,
    rings: Rings,
) -> None:
    """`reference.list_columns` in one launch, without synchronisation."""
    check_lists(slot, state, rows, entries, slots, rings)
    layers, num_rows, lanes, _ = state.cell.shape
    batch = rows.numel()
    if batch == 0:
        return
    _list_kernel[(layers * batch * lanes, triton.cdiv(rings.entries, COLUMNS))](
        state.cell, slot, rows, entries.contiguous(), slots, batch, lanes, num_rows, slots.stride(0), slots.shape[1],
        ENTRIES=rings.entries, BLOCK=COLUMNS, num_warps=4,
    )  # fmt: skip


def gather(
    keys: torch.Tensor,
    values: torch.Tensor,
    slot: torch.Tensor,
    rotation: Rotation,
    columns: int,
    out_keys: torch.Tensor,
    out_values: torch.Tensor,
) -> None:
    """`reference.gather` in one launch."""
    check_cells(slot, keys, values)
    _check_window(columns, keys, out_keys, values, out_values)
    if columns == 0:
        return
    dim, value_dim, half = keys.shape[2], values.shape[2], rotation.phase.numel()
    _gather_kernel[(triton.cdiv(columns, TOKENS), keys.shape[1])](
        keys, values, slot.contiguous(), rotation.phase, out_keys, out_values, columns,
        *rows_of(keys, values, out_keys, out_values),
        LANES=slot.shape[0], ENTRIES=slot.shape[1], DIM=dim, VALUE_DIM=value_dim, HALF=half, NEOX=rotation.rope.neox,
        FAST=keys.is_cuda, TILE=TOKENS, PAIRS=triton.next_power_of_2(half), REST=padded(dim - 2 * half),
        VALUES=triton.next_power_of_2(value_dim), num_warps=4,
    )  # fmt: skip


def store(
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    slot: torch.Tensor,
    rotation: Rotation,
    first: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    out_keys: torch.Tensor | None = None,
    out_values: torch.Tensor | None = None,
) -> None:
    """`reference.store` in one launch."""
    check_pair(out_keys, out_values)
    rows = new_keys.shape[0]
    if rows == 0:
        return
    dim, value_dim, half, window = keys.shape[2], values.shape[2], rotation.phase.numel(), out_keys is not None
    target_keys, target_values = keys if out_keys is None else out_keys, values if out_values is None else out_values
    if window:
        _check_window(first + rows, keys, target_keys, values, target_values)
    slot = slot.contiguous()
    _store_kernel[(triton.cdiv(rows, TOKENS), keys.shape[1])](
        new_keys, new_values, slot, rotation.phase, keys, values, target_keys, target_values, first, rows,
        *rows_of(new_keys, new_values, keys, values, target_keys, target_values),
        LANES=slot.shape[0], ENTRIES=slot.shape[1], DIM=dim, VALUE_DIM=value_dim, HALF=half, NEOX=rotation.rope.neox,
        FAST=keys.is_cuda, WINDOW=window, TILE=TOKENS, PAIRS=triton.next_power_of_2(half), REST=padded(dim - 2 * half),
        VALUES=triton.next_power_of_2(value_dim), num_warps=4,
    )  # fmt: skip


def padded(size: int) -> int:
    """The power of two that holds so many components, at least 16 for a matrix product; 0 for none."""
    return max(16, triton.next_power_of_2(size)) if size > 0 else 0


def _check_window(
    columns: int, keys: torch.Tensor, out_keys: torch.Tensor, values: torch.Tensor, out_values: torch.Tensor
) -> None:
    for cache, out in ((keys, out_keys), (values, out_values)):
        if out.dim() != 3 or out.shape[0] < columns or out.shape[1:] != cache.shape[1:]:
            raise ValueError(
                f"a window of {tuple(out.shape)}: expected [at least {columns}, {cache.shape[1]}, {cache.shape[2]}]"
            )
