"""The cache in front of host memory on a GPU: one program looks up a request, and others copy its blocks.

Every grid depends on shapes alone and every id is read on the device, so that launches can be part of a CUDA graph and
the host waits for nothing. A look-up compares all wanted blocks with all ways at once, and ranks the ways by comparing
each with each.

The copies address the host region directly through PCIe (zero copy), in pieces of a block's keys and the same pieces of
its values: each thread issues all of its loads of a piece, of 16 bytes where sizes and addresses allow
that, before its first store, because the latency of PCIe has to be hidden by requests in flight.

A fetch has few large programs. Attention's kernels take whole multiprocessors: wherever a program waits for PCIe, none
of theirs can begin, and 512 queries of 32 heads are 128 of them, for 132 multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_ext.kernels.host_fetch.types import (
    BlockCache,
    Found,
    FreshBlocks,
    HostRegion,
    check_fetch,
    check_look_up,
    check_store,
)

MAX_WAYS = 128
"""Ways of a row, at most: a program compares each with each in its registers."""


@dataclass(frozen=True)
class CopyTuning:
    """What may be tuned.

    Attributes:
        size: bytes of keys, and of values, of a piece; rounded down to a power of two of elements.
        warps: of a program.
        programs: of a fetch, at most; a store has one for each piece.
    """

    size: int
    warps: int
    programs: int = 4


# Four loads of 16 bytes a thread of keys, and four of values.
FETCH = CopyTuning(size=32768, warps=16)
STORE = CopyTuning(size=8192, warps=4)


def look_up(wanted: torch.Tensor, rows: torch.Tensor, cache: BlockCache, *, out: Found | None = None) -> Found:
    """`reference.look_up` (Ltri-LLM, section 3.4) on the device, in one launch and without synchronisation.

    Args, Returns: As in the reference, with [batch, count] int32 `wanted`. Values are not looked at: a row or an id
        that is there twice makes the results undefined, and a row beyond the last one is an access out of bounds.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit; there are more than `MAX_WAYS` ways.
    """
    check_look_up(wanted, rows, cache, out)
    batch, count = wanted.shape
    ways = cache.held.shape[1]
    if ways > MAX_WAYS:
        raise ValueError(f"{ways} ways: expected at most {MAX_WAYS}")
    if out is None:
        out = Found.empty(batch, count, wanted.device)
    if batch and count:
        pad = triton.next_power_of_2(ways)
        _look_up_kernel[(batch,)](
            wanted, rows, cache.held, cache.used, cache.clock, cache.counters, out.places, out.missing,
            wanted.stride(0), COUNT=count, WAYS=ways, COUNT_PAD=triton.next_power_of_2(count),
            WAYS_PAD=pad, num_warps=max(4, pad // 8),
        )  # fmt: skip
    return out


def fetch(
    host: HostRegion,
    found: Found,
    rows: torch.Tensor,
    cache: BlockCache,
    *,
    fresh: FreshBlocks | None = None,
    tuning: CopyTuning = FETCH,
) -> None:
    """`reference.fetch` (Ltri-LLM, section 3.4) on the device, in one launch and without synchronisation.

    Args: As in the reference, with [batch, count] int32 tensors in `found`; ids beyond the region are accesses out of
        bounds.
        tuning: what may be tuned.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    check_fetch(host, found, rows, cache, fresh)
    count, ways = found.places.shape[1], cache.held.shape[1]
    sizes = host.keys[:1].numel(), host.values[:1].numel()
    if not found.places.numel() or not max(sizes):
        return
    piece = _piece(max(sizes), host.keys, tuning)
    pieces = triton.cdiv(max(sizes), piece)
    programs = min(found.places.numel() * pieces, tuning.programs)
    _fetch_kernel[(programs,)](
        host.keys, host.values, found.places, found.missing, rows, cache.keys, cache.values,
        *((found.places, host.keys, host.values) if fresh is None else (fresh.ids, fresh.keys, fresh.values)),
        found.places.numel() * pieces, count, ways, host.keys.stride(0), host.values.stride(0), KEY_SIZE=sizes[0],
        VALUE_SIZE=sizes[1], PROGRAMS=programs, PIECES=pieces, PIECE=piece,
        FRESH=0 if fresh is None else fresh.ids.shape[0],
        FRESH_PAD=1 if fresh is None else triton.next_power_of_2(fresh.ids.shape[0]), num_warps=tuning.warps,
    )  # fmt: skip


def store(
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    ids: torch.Tensor,
    host: HostRegion,
    *,
    tuning: CopyTuning = STORE,
) -> None:
    """`reference.store` (Ltri-LLM, section 3.4) on the device, in one launch and without synchronisation.

    Args: As in the reference, with [batch, block] integer `slots`; slots and ids out of range are accesses out of
        bounds.
        tuning: what may be tuned.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    check_store(keys, values, slots, ids, host)
    block = host.keys.shape[1]
    widths = host.keys.shape[2:].numel(), host.values.shape[2:].numel()
    if not ids.numel() or not block or not max(widths):
        return
    # A piece is some whole tokens, or a part of one that is wider.
    columns = _piece(max(widths), keys, tuning)
    tokens = min(max(1, tuning.size // keys.element_size() // columns), triton.next_power_of_2(block))
    parts = triton.cdiv(max(widths), columns)
    pieces = triton.cdiv(block, tokens) * parts
    _store_kernel[(ids.numel() * pieces,)](
        keys, values, slots, ids, host.keys, host.values,
        keys.stride(0), values.stride(0), slots.stride(0), host.keys.stride(0), host.values.stride(0),
        BLOCK=block, KEY_WIDTH=widths[0], VALUE_WIDTH=widths[1], PIECES=pieces, PARTS=parts, TOKENS=tokens,
        COLUMNS=columns, num_warps=tuning.warps,
    )  # fmt: skip


def _piece(most: int, of: torch.Tensor, tuning: CopyTuning) -> int:
    """Elements of a piece: a power of two, no more than needed for `most` and at least one."""
    room = max(1, tuning.size // of.element_size())
    return min(triton.next_power_of_2(most), 1 << (room.bit_length() - 1))


@triton.jit
def _look_up_kernel(
    wanted, rows, held, used, clock, counters, places, missing, stride_wanted,
    COUNT: tl.constexpr, WAYS: tl.constexpr, COUNT_PAD: tl.constexpr, WAYS_PAD: tl.constexpr,
):  # fmt: skip
    """The request program_id(0)."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request).to(tl.int64)
    c, w = tl.arange(0, COUNT_PAD), tl.arange(0, WAYS_PAD)
    inside = (w < WAYS) & (row >= 0)
    asked = tl.load(wanted + request * stride_wanted + c, mask=(c < COUNT) & (row >= 0), other=-1)
    wants = asked >= 0
    holds = tl.load(held + row * WAYS + w, mask=inside, other=-1)
    last = tl.load(used + row * WAYS + w, mask=inside, other=0)
    now = tl.load(clock + row, mask=row >= 0, other=0) + 1

    same = (asked[:, None] == holds[None, :]) & wants[:, None]
    hit_way = tl.max(tl.where(same, w[None, :], -1), 1)
    kept = tl.max(same.to(tl.int32), 0) > 0
    miss = wants & (hit_way < 0)
    # Ways that may be given away, in one order: empty ones first, then by the clock, then by number.
    key = tl.where(holds < 0, 0, last.to(tl.int64) + 1) * WAYS_PAD + w
    key = tl.where(inside & (kept == 0), key, 1 << 62)
    rank = tl.sum((key[:, None] > key[None, :]).to(tl.int32), 1)
    turn = tl.sum(((c[None, :] < c[:, None]) & miss[None, :]).to(tl.int32), 1)
    takes = miss[:, None] & (turn[:, None] == rank[None, :]) & (key < (1 << 62))[None, :]
    place = tl.max(tl.where(takes, w[None, :], hit_way[:, None]), 1)
    taken = tl.max(tl.where(takes, asked[:, None], -1), 0)

    # Threads share these small tensors: all of them must have read before one of them writes.
    tl.debug_barrier()
    tl.store(places + request * COUNT + c, place, mask=c < COUNT)
    tl.store(missing + request * COUNT + c, tl.where(miss, asked, -1), mask=c < COUNT)
    tl.store(held + row * WAYS + w, taken, mask=inside & (taken >= 0))
    tl.store(used + row * WAYS + w, tl.zeros([WAYS_PAD], tl.int32) + now, mask=inside & (kept | (taken >= 0)))
    misses = tl.sum(miss.to(tl.int64), 0)
    hits = tl.sum(wants.to(tl.int64), 0) - misses
    if hits + misses > 0:
        of_row = counters + row * 2
        all_hits, all_misses = tl.load(of_row) + hits, tl.load(of_row + 1) + misses
        tl.debug_barrier()
        tl.store(clock + row, now)
        tl.store(of_row, all_hits)
        tl.store(of_row + 1, all_misses)


@triton.jit(do_not_specialize=["items"])
def _fetch_kernel(
    host_keys, host_values, places, missing, rows, keys, values, fresh_ids, fresh_keys, fresh_values, items, count,
    ways, stride_keys, stride_values, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, PROGRAMS: tl.constexpr,
    PIECES: tl.constexpr, PIECE: tl.constexpr, FRESH: tl.constexpr, FRESH_PAD: tl.constexpr,
):  # fmt: skip
    """Every PROGRAMS-th piece of the wanted blocks: PIECE elements of the keys of each, and of its values."""
    number = tl.arange(0, FRESH_PAD)
    ids = tl.load(fresh_ids + number, mask=number < FRESH, other=-1)
    for item in range(tl.program_id(0), items, PROGRAMS):
        asked = item // PIECES
        block = tl.load(missing + asked).to(tl.int64)
        place = tl.load(places + asked)
        row = tl.load(rows + asked // count).to(tl.int64)
        if (block >= 0) & (place >= 0) & (row >= 0):
            at = item % PIECES * PIECE + tl.arange(0, PIECE)
            way = row * ways + place
            in_keys, in_values = at < KEY_SIZE, at < VALUE_SIZE
            new = tl.max(tl.where(ids.to(tl.int64) == block, number, -1), 0)  # which of the fresh blocks it is
            old = new < 0
            some_keys = tl.load(host_keys + block * stride_keys + at, mask=in_keys & old)
            some_values = tl.load(host_values + block * stride_values + at, mask=in_values & old)
            if FRESH > 0:
                new_keys = tl.load(fresh_keys + new.to(tl.int64) * KEY_SIZE + at, mask=in_keys & (new >= 0))
                new_values = tl.load(fresh_values + new.to(tl.int64) * VALUE_SIZE + at, mask=in_values & (new >= 0))
                some_keys, some_values = tl.where(old, some_keys, new_keys), tl.where(old, some_values, new_values)
            tl.store(keys + way * KEY_SIZE + at, some_keys, mask=in_keys)
            tl.store(values + way * VALUE_SIZE + at, some_values, mask=in_values)


@triton.jit
def _store_kernel(
    keys, values, slots, ids, host_keys, host_values,
    stride_keys, stride_values, stride_slots, stride_host_keys, stride_host_values,
    BLOCK: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PIECES: tl.constexpr,
    PARTS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One piece of a block that leaves: TOKENS tokens, COLUMNS elements of the keys of each, and of its values."""
    request = (tl.program_id(0) // PIECES).to(tl.int64)
    block = tl.load(ids + request).to(tl.int64)
    if block < 0:
        return
    piece = tl.program_id(0) % PIECES
    token = piece // PARTS * TOKENS + tl.arange(0, TOKENS)
    d = piece % PARTS * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < BLOCK)[:, None]
    slot = tl.load(slots + request * stride_slots + token, mask=token < BLOCK, other=0).to(tl.int64)[:, None]
    in_keys, in_values = inside & (d < KEY_WIDTH)[None, :], inside & (d < VALUE_WIDTH)[None, :]
    some_keys = tl.load(keys + slot * stride_keys + d[None, :], mask=in_keys)
    some_values = tl.load(values + slot * stride_values + d[None, :], mask=in_values)
    of_keys, of_values = host_keys + block * stride_host_keys, host_values + block * stride_host_values
    tl.store(of_keys + token[:, None] * KEY_WIDTH + d[None, :], some_keys, mask=in_keys)
    tl.store(of_values + token[:, None] * VALUE_WIDTH + d[None, :], some_values, mask=in_values)
