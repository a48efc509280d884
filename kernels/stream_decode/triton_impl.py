"""Decoding steps of streams of Ltri-LLM on a GPU: keys rotated as they are read, columns cut into shares.

Two launches a layer, three where something votes. In the first a program takes one key-value head of one request and a
share of its columns: of the window, whose last share also stores the new token and attends to it, or of the sinks and
the blocks that came back. A key is rotated backwards by its distance; blocks that came back are at one distance, so
that the query is rotated for all of them. The second launch merges the shares. The third knows the log-sum-exp over the
window, takes the probabilities from the logits that the first one left, and counts them.

Grids depend on shapes alone, and numbers are read on the device: launches can be part of a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from sglang_ext.kernels.cells.decode_impl import _join
from sglang_ext.kernels.cells.lists import Rotation, rows_of
from sglang_ext.kernels.cells.triton_impl import _cos_sin, _pairs, padded
from sglang_ext.kernels.stream_decode.types import (
    LOG2_E,
    MAX_SHARES,
    MapState,
    NewToken,
    StepNumbers,
    StreamCaches,
    StreamSizes,
    StreamWorkspace,
    check,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class StreamTuning:
    """What may be tuned: columns a tile, warps and stages, programs a multiprocessor, cells a program of the map."""

    columns: int = 64
    warps: int = 4
    stages: int = 2
    programs: int = 4
    cells: int = 64


TUNING = StreamTuning()


def tuning_for(head_dim: int, value_dim: int, itemsize: int) -> StreamTuning:
    """What goes with 128 components of 16 bits, and less at a time where heads are larger."""
    size = (padded(head_dim) + padded(value_dim)) * itemsize
    if size <= 512:
        return TUNING
    return replace(TUNING, stages=2, columns=max(16, TUNING.columns * 512 // size // (itemsize // 2)))


def shares_of(
    batch: int,
    kv_heads: int,
    sizes: StreamSizes,
    beyond: int,
    multiprocessors: int,
    tuning: StreamTuning = TUNING,
) -> tuple[int, int]:
    """Into how many shares the window, and what lies beyond it, are cut: together as many as run at once.

    Args:
        batch: requests.
        kv_heads: key-value heads.
        sizes: of the streams.
        beyond: sinks and tokens of the blocks that come back.
        multiprocessors: of the device.
        tuning: see there.
    """
    window = sizes.cells - sizes.sinks
    wanted = min(MAX_SHARES, max(2, multiprocessors * tuning.programs // max(1, batch * kv_heads)))
    most = max(1, beyond // (2 * tuning.columns)), max(1, window // (2 * tuning.columns))
    behind = max(1, min(most[0], round(wanted * beyond / (beyond + window))))
    return max(1, min(most[1], wanted - behind)), behind


def decode(
    tokens: NewToken,
    caches: StreamCaches,
    step: StepNumbers,
    sizes: StreamSizes,
    rotation: Rotation,
    scale: float,
    *,
    state: MapState | None = None,
    out: torch.Tensor | None = None,
    workspace: StreamWorkspace | None = None,
) -> torch.Tensor:
    """`reference.decode` on the device, without synchronisation.

    Args:
        tokens, caches, step, sizes, rotation, scale, state: as there, in float32, bfloat16 or float16.
        out: [batch, heads, value_dim] contiguous, to write to; made here when None.
        workspace: made here when None.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check(tokens, caches, step, sizes, state)
    query, keys, values = tokens.query, caches.keys, caches.values
    if keys.dtype not in DTYPES:
        raise ValueError(f"keys are {keys.dtype}: expected {', '.join(map(str, DTYPES))}")
    batch, heads, dim = query.shape
    kv_heads, value_dim, half = keys.shape[1], values.shape[2], rotation.phase.numel()
    most = caches.ways.shape[1]
    tuning = tuning_for(dim, value_dim, keys.element_size())
    if workspace is None:
        sms = torch.cuda.get_device_properties(query.device).multi_processor_count if query.is_cuda else 2
        shares = shares_of(batch, kv_heads, sizes, sizes.sinks + most * sizes.block, sms, tuning)
        workspace = StreamWorkspace.empty(batch, heads, value_dim, sizes.cells, shares, query.device)
    out = query.new_empty(batch, heads, value_dim) if out is None else out
    if batch == 0:
        return out
    (near, far), mapped = workspace.shares, state is not None
    _share_kernel[(near + far, kv_heads, batch)](
        query, tokens.keys, tokens.values, keys, values, caches.slot, caches.block_keys, caches.block_values,
        caches.ways, step.numbers, rotation.phase, workspace.parts, workspace.part_lse, workspace.logits,
        batch, near, far, scale * LOG2_E, *rows_of(query, tokens.keys, tokens.values, keys, values),
        SINKS=sizes.sinks, CELLS=sizes.cells, WIDTH=sizes.width, BLOCK=sizes.block,
        WAYS=caches.block_keys.shape[1], MOST=most, KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim,
        VALUE_DIM=value_dim, HALF=half, NEOX=rotation.rope.neox, FAST=keys.is_cuda, TILE=tuning.columns,
        QUERIES=padded(heads // kv_heads), PAIRS=padded(half), REST=padded(dim - 2 * half), VALUES=padded(value_dim),
        MAPPED=mapped, num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
    _join_kernel[(heads, batch)](
        workspace.parts, workspace.part_lse, out, near + far,
        HEADS=heads, VALUE_DIM=value_dim, PARTS=triton.next_power_of_2(near + far),
        VALUES=triton.next_power_of_2(value_dim), num_warps=4,
    )  # fmt: skip
    if state is not None:
        _map_kernel[(triton.cdiv(sizes.cells, tuning.cells) + heads, batch)](
            workspace.part_lse, workspace.logits, state.received, state.last, state.tile, step.numbers,
            batch, near, near + far,
            SINKS=sizes.sinks, CELLS=sizes.cells, BLOCK=sizes.block, HEADS=heads, EACH=tuning.cells,
            COLUMNS=triton.next_power_of_2(sizes.block), PARTS=triton.next_power_of_2(near),
            GROUPS=triton.next_power_of_2(heads), num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _ring(token, SINKS: tl.constexpr, CELLS: tl.constexpr):
    """The cells of tokens (`StreamSizes.cell`)."""
    return tl.where(token < SINKS, token, SINKS + (token - SINKS) % (CELLS - SINKS))


@triton.jit
def _softmax(top, total, acc, s, w):
    """One tile of logits [queries, columns] and values [columns, values] more."""
    higher = tl.maximum(top, tl.max(s, 1))
    base = tl.where(higher > float("-inf"), higher, 0.0)
    shrink = tl.exp2(top - base)
    p = tl.exp2(s - base[:, None])
    acc = tl.dot(p.to(w.dtype), w, acc * shrink[:, None], input_precision="ieee")
    return higher, total * shrink + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=["batch", "near", "far"])  # they are others for every size of a batch
def _share_kernel(
    query, new_keys, new_values, keys, values, slot, block_keys, block_values, ways, numbers, phase,
    parts, part_lse, logits, batch, near, far, scale,
    stride_query, stride_new_key, stride_new_value, stride_key, stride_value,
    SINKS: tl.constexpr, CELLS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
    MOST: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr, NEOX: tl.constexpr, FAST: tl.constexpr, TILE: tl.constexpr, QUERIES: tl.constexpr,
    PAIRS: tl.constexpr, REST: tl.constexpr, VALUES: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    share, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.load(numbers + request).to(tl.int64)
    token = tl.load(numbers + batch + request)
    opened = tl.load(numbers + 2 * batch + request)
    there = row >= 0
    row = tl.maximum(row, 0)

    g, i, v = tl.arange(0, QUERIES), tl.arange(0, PAIRS), tl.arange(0, VALUES)
    first, second = _pairs(HALF, PAIRS, NEOX)
    in_group, in_half, in_value = g < GROUP, i < HALF, v < VALUE_DIM
    rest = 2 * HALF + tl.arange(0, REST if REST > 0 else 16)
    in_rest = rest < DIM
    q = query + request * stride_query + (head * GROUP + g)[:, None] * DIM
    halves = in_group[:, None] & in_half[None, :]
    q_first = tl.load(q + first[None, :], mask=halves, other=0.0)
    q_second = tl.load(q + second[None, :], mask=halves, other=0.0)
    q_rest = tl.load(q + rest[None, :], mask=in_group[:, None] & in_rest[None, :], other=0.0)
    phases = tl.load(phase + i, mask=in_half, other=0)
    logit = logits + ((request * KV_HEADS + head) * GROUP + g)[:, None] * CELLS
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, VALUES], tl.float32)

    # Columns in KV slots: of the window without the new token, or of the sinks.
    window = share < near
    base = tl.where(window, opened, 0)
    count = tl.where(window, token - opened, tl.minimum(token, SINKS))
    splits = tl.where(window, near, far)
    number = tl.where(window, share, share - near)
    begin, end = 0, 0
    if window:
        each = tl.cdiv(tl.cdiv(count, TILE), splits) * TILE
        begin = number * each
        end = tl.minimum(begin + each, count)
    else:
        end = tl.where(number == 0, count, 0)
    end = tl.where(there, end, 0)
    for start in tl.range(begin, end, TILE):
        column = start + tl.arange(0, TILE)
        on = column < end
        at = base + column
        place = tl.load(slot + row * CELLS + _ring(at, SINKS, CELLS), mask=on, other=0).to(tl.int64)
        source = keys + place[:, None] * stride_key + head * DIM
        both = on[:, None] & in_half[None, :]
        x = tl.load(source + first[None, :], mask=both, other=0.0).to(tl.float32)
        y = tl.load(source + second[None, :], mask=both, other=0.0).to(tl.float32)
        cos, sin = _cos_sin(-tl.minimum(token - at, WIDTH - 1)[:, None] * phases[None, :], FAST)
        k_first, k_second = (x * cos - y * sin).to(q_first.dtype), (y * cos + x * sin).to(q_first.dtype)
        s = tl.dot(q_first, tl.trans(k_first), input_precision="ieee")
        s = tl.dot(q_second, tl.trans(k_second), s, input_precision="ieee")
        if REST > 0:
            k_rest = tl.load(source + rest[None, :], mask=on[:, None] & in_rest[None, :], other=0.0)
            s = tl.dot(q_rest, tl.trans(k_rest), s, input_precision="ieee")
        s = tl.where(on[None, :], s * scale, float("-inf"))
        if MAPPED:
            tl.store(logit + column[None, :], s, mask=in_group[:, None] & (on & window)[None, :])
        w = tl.load(
            values + place[:, None] * stride_value + head * VALUE_DIM + v[None, :],
            mask=on[:, None] & in_value[None, :],
            other=0.0,
        )
        top, total, acc = _softmax(top, total, acc, s, w)

    if (share >= near) & there:
        # Blocks that came back, all of them at one distance.
        cos, sin = _cos_sin((WIDTH - 1) * phases, FAST)
        wide_first, wide_second = q_first.to(tl.float32), q_second.to(tl.float32)
        far_first = (wide_first * cos[None, :] - wide_second * sin[None, :]).to(q_first.dtype)
        far_second = (wide_second * cos[None, :] + wide_first * sin[None, :]).to(q_first.dtype)
        each = tl.cdiv(tl.cdiv(MOST * BLOCK, TILE), far) * TILE
        low = number * each
        for start in tl.range(low, tl.minimum(low + each, MOST * BLOCK), TILE):
            column = start + tl.arange(0, TILE)
            inside = column < MOST * BLOCK
            way = tl.load(ways + row * MOST + column // BLOCK, mask=inside, other=-1).to(tl.int64)
            on = way >= 0
            place = ((row * WAYS + way) * BLOCK + column % BLOCK) * KV_HEADS + head
            source = block_keys + place[:, None] * DIM
            both = on[:, None] & in_half[None, :]
            k_first = tl.load(source + first[None, :], mask=both, other=0.0)
            k_second = tl.load(source + second[None, :], mask=both, other=0.0)
            s = tl.dot(far_first, tl.trans(k_first), input_precision="ieee")
            s = tl.dot(far_second, tl.trans(k_second), s, input_precision="ieee")
            if REST > 0:
                k_rest = tl.load(source + rest[None, :], mask=on[:, None] & in_rest[None, :], other=0.0)
                s = tl.dot(q_rest, tl.trans(k_rest), s, input_precision="ieee")
            s = tl.where(on[None, :], s * scale, float("-inf"))
            w = tl.load(
                block_values + place[:, None] * VALUE_DIM + v[None, :],
                mask=on[:, None] & in_value[None, :],
                other=0.0,
            )
            top, total, acc = _softmax(top, total, acc, s, w)

    if (share == near - 1) & there:
        # The new token, at distance 0: stored and attended to.
        place = tl.load(slot + row * CELLS + _ring(token, SINKS, CELLS)).to(tl.int64)
        k, target = new_keys + request * stride_new_key + head * DIM, keys + place * stride_key + head * DIM
        x = tl.load(k + first, mask=in_half, other=0.0)
        y = tl.load(k + second, mask=in_half, other=0.0)
        tl.store(target + first, x, mask=in_half)
        tl.store(target + second, y, mask=in_half)
        s = tl.sum(q_first.to(tl.float32) * x.to(tl.float32)[None, :], 1)
        s += tl.sum(q_second.to(tl.float32) * y.to(tl.float32)[None, :], 1)
        if REST > 0:
            z = tl.load(k + rest, mask=in_rest, other=0.0)
            tl.store(target + rest, z, mask=in_rest)
            s += tl.sum(q_rest.to(tl.float32) * z.to(tl.float32)[None, :], 1)
        s *= scale
        w = tl.load(new_values + request * stride_new_value + head * VALUE_DIM + v, mask=in_value, other=0.0)
        tl.store(values + place * stride_value + head * VALUE_DIM + v, w, mask=in_value)
        if MAPPED:
            own = logits + ((request * KV_HEADS + head) * GROUP + g) * CELLS + token - opened
            tl.store(own, s, mask=in_group)
        higher = tl.maximum(top, s)
        shrink, p = tl.exp2(top - higher), tl.exp2(s - higher)
        total = total * shrink + p
        acc = acc * shrink[:, None] + p[:, None] * w.to(tl.float32)[None, :]
        top = higher

    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    level = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf"))
    part = ((request * KV_HEADS + head) * GROUP + g) * (near + far) + share
    tl.store(parts + part[:, None] * VALUE_DIM + v[None, :], acc, mask=in_group[:, None] & in_value[None, :])
    tl.store(part_lse + part, level, mask=in_group)


@triton.jit(do_not_specialize=["shares"])
def _join_kernel(
    parts, part_lse, out, shares,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, PARTS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64) * HEADS + tl.program_id(0)
    _, weight = _join(part_lse, head, shares, PARTS)
    share, v = tl.arange(0, PARTS), tl.arange(0, VALUES)
    part = tl.load(
        parts + (head * shares + share)[:, None] * VALUE_DIM + v[None, :],
        mask=(share < shares)[:, None] & (v < VALUE_DIM)[None, :],
        other=0.0,
    )
    joined = tl.sum(part * weight[:, None], 0)
    tl.store(out + head * VALUE_DIM + v, joined.to(out.dtype.element_ty), mask=v < VALUE_DIM)


@triton.jit
def _level(part_lse, head, near, shares, PARTS: tl.constexpr):
    """Log-sum-exp of a head over its shares of the window."""
    share = tl.arange(0, PARTS)
    level = tl.load(part_lse + head * shares + share, mask=share < near, other=float("-inf"))
    top = tl.max(level, 0)
    return top + tl.log2(tl.sum(tl.exp2(level - top), 0))


@triton.jit
def _levels(part_lse, head, there, near, shares, PARTS: tl.constexpr):
    """`_level` of several heads; 0 for those that are not there."""
    share = tl.arange(0, PARTS)
    on = there[:, None] & (share < near)[None, :]
    level = tl.load(part_lse + head[:, None] * shares + share[None, :], mask=on, other=float("-inf"))
    top = tl.where(there, tl.max(level, 1), 0.0)
    total = tl.sum(tl.exp2(level - top[:, None]), 1)
    return tl.where(there, top + tl.log2(tl.where(there, total, 1.0)), 0.0)


@triton.jit(do_not_specialize=["batch", "near", "shares"])
def _map_kernel(
    part_lse, logits, received, last, tile, numbers, batch, near, shares,
    SINKS: tl.constexpr, CELLS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, EACH: tl.constexpr,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Some cells of a stream, or one head's row of its tile."""
    number, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(numbers + request).to(tl.int64)
    if row >= 0:
        token = tl.load(numbers + batch + request)
        opened = tl.load(numbers + 2 * batch + request)
        if number < HEADS:
            if token >= SINKS:
                head = request * HEADS + number
                own = (token - SINKS) % BLOCK
                i = tl.arange(0, COLUMNS)
                column = token - own + i - opened
                seen = (i <= own) & (column >= 0)
                x = tl.load(logits + head * CELLS + column, mask=seen, other=float("-inf"))
                p = tl.exp2(x - _level(part_lse, head, near, shares, PARTS))
                target = tile + ((row * HEADS + number) * BLOCK + own) * BLOCK + i
                tl.store(target, tl.where(seen, p, 0.0), mask=i <= own)
        else:
            cell = (number - HEADS) * EACH + tl.arange(0, EACH)
            inside = cell < CELLS
            fresh = tl.load(numbers + 3 * batch + request) > 0
            # The newest token in a cell of the ring; the sinks' cells have theirs.
            back = (token - cell) % (CELLS - SINKS)
            back = tl.where(back < 0, back + (CELLS - SINKS), back)
            at = tl.where(cell < SINKS, cell, tl.where(token - back < SINKS, -1, token - back))
            seen = inside & (at >= opened) & (at <= token)
            one = tl.arange(0, GROUPS)
            head, there = request * HEADS + one, one < HEADS
            level = _levels(part_lse, head, there, near, shares, PARTS)
            both = there[:, None] & seen[None, :]
            x = tl.load(logits + head[:, None] * CELLS + (at - opened)[None, :], mask=both, other=float("-inf"))
            given = tl.sum(tl.exp2(x - level[:, None]), 0)
            place = row * CELLS + cell
            before = tl.load(received + place, mask=inside, other=0.0)
            before += tl.where(fresh, tl.load(last + place, mask=inside, other=0.0), 0.0)
            tl.store(received + place, tl.where(at == token, 0.0, before), mask=inside)
            tl.store(last + place, given, mask=inside)
