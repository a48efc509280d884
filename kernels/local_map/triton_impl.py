"""A chunk's attention to its window on a GPU: what each token received, in three launches, and tiles, in one.

Every logit is computed anew and its probability taken from the log-sum-exp, so the cost is that of the first half of
flash attention. A program of `_columns_kernel` owns some columns and some of the query heads of a key-value head. It
keeps the columns' keys in shared memory and passes over the rows, so that sums over rows stay in its registers. It does
so twice: first with the keys as they are seen near, over the rows that see one of the columns there, and then with the
keys as they are seen far. Tiles of rows that lie wholly on one side are neither masked nor computed twice; most tiles
do. The chunk's last row is left out of these passes; its heads are multiplied together, as if they were rows.

Sums over key-value heads are left to `_fold_kernel`, in a fixed order and without atomics. Grids depend on shapes
alone and counts are read on the device: a launch can be part of a CUDA graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from sglang_ext.kernels.local_map.types import BlockTiles, LocalMap, Received, check, check_tiles
from sglang_ext.kernels.shared import shared_memory

LOG2_E = math.log2(math.e)
BIASES = 128
"""Rows whose biases a program computes, a multiple of every tile's rows."""

FOLD = 128
"""Columns, and rows, whose sums one program of `_fold_kernel` adds up."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

ROOM = 112 * 1024
"""Bytes of shared memory of a program from which on `PREFILL` is taken."""


@dataclass(frozen=True, slots=True)
class MapTuning:
    """What may be tuned.

    Attributes:
        columns, rows: of a tile, powers of two of at least 16.
        warps: of a program.
        stages: of the pipeline over the rows.
        splits: programs that share the query heads of a key-value head, at most.
        registers: of a thread, at most; None leaves it to the compiler.
    """

    columns: int = 128
    rows: int = 64
    warps: int = 4
    stages: int = 3
    splits: int = 4
    registers: int | None = None


SMALLER = MapTuning()
PREFILL = MapTuning(stages=2, registers=168)  # three programs a multiprocessor of 227 KiB
DECODE = MapTuning(columns=64, rows=16, stages=1, splits=1)  # few rows: the keys are read once and that is the time


@dataclass(frozen=True, slots=True)
class TileTuning:
    """What may be tuned of the tiles' kernel: the rows, and columns, of a program's piece of a tile; its warps."""

    piece: int = 64
    warps: int = 4


TILES = TileTuning()


def tuning_for(rows: int, head_dim: int, itemsize: int, shared: int = 99 * 1024) -> MapTuning:
    """Sizes for 128 components of 16 bits, and smaller tiles where heads are larger.

    Args:
        rows: rows of a chunk, at most.
        head_dim: components of a head.
        itemsize: bytes of one.
        shared: bytes of shared memory that a program may have; 99 KiB is what the smaller GPUs of a generation have.
    """
    tuning = DECODE if rows <= DECODE.rows else PREFILL if shared >= ROOM else SMALLER
    larger = max(1, _padded(head_dim) * itemsize // 256)
    return replace(tuning, columns=max(16, tuning.columns // larger), rows=max(16, tuning.rows // larger))


def received(chunks: LocalMap, *, out: Received | None = None, tuning: MapTuning | None = None) -> Received:
    """`reference.received` on the device, without synchronisation (Ltri-LLM, section 3, equation 6).

    Args:
        chunks: as in the reference, [batch, rows, heads, head_dim] and [batch, kv_heads, columns, head_dim], in
            float32, bfloat16 or float16; the last dimension is contiguous.
        out: what to write to; made where not given.
        tuning: see `MapTuning`; chosen where not given.

    Returns:
        As the reference (`out` where given). Counts out of range cannot be refused here.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not fit.
    """
    check(chunks, out)
    _check_served(chunks)
    found = Received.empty(chunks) if out is None else out
    query, far, keys, keys_far, lse = (
        chunks.query_near, chunks.query_far, chunks.keys_near, chunks.keys_far, chunks.lse
    )  # fmt: skip
    batch, rows, heads, head_dim = query.shape
    kv_heads, columns = keys.shape[1:3]
    if batch == 0 or rows == 0 or columns == 0:
        for tensor in (found.received, found.last, found.chunk_received):
            tensor.zero_()
        return found
    if tuning is None:
        room = [shared_memory(query.device)] if query.is_cuda else []
        tuning = tuning_for(rows, head_dim, query.element_size(), *room)
    group = heads // kv_heads
    splits = next(n for n in range(min(tuning.splits, group), 0, -1) if group % n == 0)
    width = triton.cdiv(rows, BIASES) * BIASES  # whole tiles of rows, so that biases are loaded without masks
    bias = torch.empty(batch, heads, width, dtype=torch.float32, device=query.device)
    _bias_kernel[(width // BIASES, batch)](
        lse, chunks.count, bias, width, *lse.stride(), HEADS=heads, HEADS_PAD=triton.next_power_of_2(heads),
        BLOCK=BIASES, num_warps=4,
    )  # fmt: skip
    parts = torch.empty(batch, kv_heads * splits, 2, columns, dtype=torch.float32, device=query.device)
    _columns_kernel[(kv_heads * splits, triton.cdiv(columns, tuning.columns), batch)](
        query, far, keys, keys_far, lse, bias, chunks.before, chunks.count, parts, columns, width,
        min(chunks.window, columns), chunks.scale * LOG2_E, *query.stride()[:3], *far.stride()[:3],
        *keys.stride()[:3], *keys_far.stride()[:3], *lse.stride(),
        SPLITS=splits, HEADS=group // splits, HEADS_PAD=max(16, triton.next_power_of_2(group // splits)),
        HEAD_DIM=head_dim, BLOCK_D=_padded(head_dim), COLUMNS=tuning.columns, ROWS=tuning.rows,
        num_warps=tuning.warps, num_stages=tuning.stages, maxnreg=tuning.registers,
    )  # fmt: skip
    _fold_kernel[(triton.cdiv(max(columns, rows), FOLD), batch)](
        parts, chunks.before, chunks.count, found.received, found.last, found.chunk_received, columns, rows,
        PARTS=kv_heads * splits, BLOCK=FOLD, num_warps=4,
    )  # fmt: skip
    return found


def fill_tiles(chunks: LocalMap, blocks: BlockTiles, *, tuning: TileTuning = TILES) -> None:
    """`reference.fill_tiles` on the device, in one launch and without synchronisation (Ltri-LLM, equation 5).

    Args:
        chunks: as for `received`.
        blocks: as in the reference, [batch, blocks]; a place that is there twice makes its tile undefined, and one
            beyond the last tile is an access out of bounds.
        tuning: see `TileTuning`.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not fit.
    """
    check(chunks, None)
    check_tiles(chunks, blocks)
    _check_served(chunks)
    query, far, keys, keys_far, lse = (
        chunks.query_near, chunks.query_far, chunks.keys_near, chunks.keys_far, chunks.lse
    )  # fmt: skip
    heads, head_dim = query.shape[2:]
    kv_heads, columns = keys.shape[1:3]
    size = blocks.tiles.shape[3]
    if query.shape[1] == 0 or columns == 0 or blocks.first.numel() == 0:
        return
    larger = max(1, _padded(head_dim) * query.element_size() // 256)
    piece = min(max(16, tuning.piece // larger), max(16, triton.next_power_of_2(size)))
    pieces = triton.cdiv(size, piece)
    _tiles_kernel[(heads * pieces * pieces, blocks.first.shape[1], query.shape[0])](
        query, far, keys, keys_far, lse, chunks.before, chunks.count, blocks.first, blocks.place, blocks.tiles,
        min(chunks.window, columns), chunks.scale * LOG2_E, *query.stride()[:3], *far.stride()[:3],
        *keys.stride()[:3], *keys_far.stride()[:3], *lse.stride(), *blocks.tiles.stride()[:3],
        GROUP=heads // kv_heads, HEAD_DIM=head_dim, BLOCK_D=_padded(head_dim), SIZE=size, PIECES=pieces, PIECE=piece,
        FAR=size > chunks.window, num_warps=tuning.warps,
    )  # fmt: skip


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _check_served(chunks: LocalMap) -> None:
    """Raise ValueError for dtypes and strides that the kernels do not take."""
    if chunks.query_near.dtype not in DTYPES:
        raise ValueError(
            f"query_near is {chunks.query_near.dtype}: expected one of {DTYPES}; take the reference for float64"
        )
    for name, tensor in (
        ("query_near", chunks.query_near), ("query_far", chunks.query_far), ("keys_near", chunks.keys_near),
        ("keys_far", chunks.keys_far),
    ):  # fmt: skip
        if tensor.stride(3) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: expected a contiguous last dimension")


@triton.jit
def _bias_kernel(
    lse, count, bias, width, stride_request, stride_row, stride_head,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """bias[request, head, t] = -log2(e) * lse of row t; -inf for the chunk's last row and where there is none."""
    request = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    head = tl.arange(0, HEADS_PAD)[None, :]
    on = (t < tl.load(count + request) - 1) & (head < HEADS)
    place = lse + request * stride_request + t.to(tl.int64) * stride_row + head * stride_head
    level = tl.load(place, mask=on, other=float("inf"))
    tl.store(bias + (request * HEADS + head) * width + t, level * -1.4426950408889634, mask=head < HEADS)


@triton.jit
def _load_keys(keys, column, seen, stride_column, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[columns, BLOCK_D]; 0 where nothing is seen, which is not read."""
    d = tl.arange(0, BLOCK_D)
    mask = seen[:, None] if HEAD_DIM == BLOCK_D else seen[:, None] & (d[None, :] < HEAD_DIM)
    return tl.load(keys + column.to(tl.int64)[:, None] * stride_column + d[None, :], mask=mask, other=0.0)


@triton.jit
def _attention(
    k, first, head, low, rows, query, bias, width, scale, stride_row, stride_head,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Attention [columns, ROWS] of the rows first, first + 1, ... in a head; rows below `low` may have any number."""
    r, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    on = (first + r >= low) & (first + r < rows)
    mask = on[None, :] if HEAD_DIM == BLOCK_D else on[None, :] & (d[:, None] < HEAD_DIM)
    # What differs from tile to tile is one number: the rest of the addresses is computed once, before the loop.
    begin = tl.minimum(first, rows).to(tl.int64)  # `first`; in the interpreter, a loop's number has no type
    at = query + (begin * stride_row + head * stride_head)
    q = tl.load(at + (r * stride_row)[None, :] + d[:, None], mask=mask, other=0.0)
    x = tl.dot(k, q, input_precision="ieee")
    level = tl.load(bias + tl.multiple_of(head * width + first, ROWS) + r)  # -inf where there is no row
    return tl.exp2(x * scale + level[None, :])


@triton.jit
def _sum_rows(
    sums, k, nearest, span, low, rows, tiles, query, bias, width, scale, stride_row, stride_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`sums` and the attention that columns receive from some rows.

    Args:
        nearest: [columns] number of the first row whose attention counts for a column.
        span: how many rows from there on count, int32.
        low, rows: the rows that are read are [low, rows).
        tiles: (begin, whole, part, end) numbers of tiles of rows; those in [whole, part) are not masked.
    """
    begin, whole, part, end = tiles
    leading = (whole - begin) * HEADS
    for i in range(0, leading + (end - part) * HEADS):
        # The tiles before those that are not masked, and then the tiles behind them.
        t = (tl.where(i < leading, begin, part - (whole - begin)) + i // HEADS) * ROWS
        p = _attention(
            k, t, i % HEADS, low, rows, query, bias, width, scale, stride_row, stride_head, HEAD_DIM, BLOCK_D, ROWS
        )
        # One comparison: a row before the nearest is a large number without a sign.
        behind = ((t + tl.arange(0, ROWS))[None, :] - nearest[:, None]).to(tl.uint32)
        sums += tl.sum(tl.where(behind < span.to(tl.uint32), p, 0.0), axis=1)
    for i in range(whole * HEADS, part * HEADS):
        t = i // HEADS * ROWS
        p = _attention(
            k, t, i % HEADS, low, rows, query, bias, width, scale, stride_row, stride_head, HEAD_DIM, BLOCK_D, ROWS
        )
        sums += tl.sum(p, axis=1)
    return sums


@triton.jit
def _one_row(
    k, nearest, span, low, row, query, lse, scale, stride_row, stride_head, stride_lse,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[columns] attention that columns receive from one row, where it counts as in `_sum_rows`."""
    h, d = tl.arange(0, HEADS_PAD), tl.arange(0, BLOCK_D)
    mask = (h < HEADS)[None, :] & (d < HEAD_DIM)[:, None] & (row >= low)
    at = query + row.to(tl.int64) * stride_row
    q = tl.load(at + (h * stride_head)[None, :] + d[:, None], mask=mask, other=0.0)
    level = tl.load(lse + h * stride_lse, mask=h < HEADS, other=float("inf"))
    p = tl.exp2(tl.dot(k, q, input_precision="ieee") * scale - (level * 1.4426950408889634)[None, :])
    return tl.where((row - nearest).to(tl.uint32) < span.to(tl.uint32), tl.sum(p, axis=1), 0.0)


@triton.jit(do_not_specialize=["columns", "window"])  # columns are others in every pass
def _columns_kernel(
    query, query_far, keys, keys_far, lse, bias, before, count, parts, columns, width, window, scale,
    stride_query, stride_row, stride_head, stride_query_far, stride_row_far, stride_head_far,
    stride_keys, stride_kv, stride_column, stride_keys_far, stride_kv_far, stride_column_far,
    stride_lse, stride_lse_row, stride_lse_head,
    SPLITS: tl.constexpr, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One request's columns [COLUMNS * program_id(1), ...) and `HEADS` query heads, part program_id(0) of them all."""
    part, request = tl.program_id(0), tl.program_id(2).to(tl.int64)
    first = tl.program_id(1) * COLUMNS
    seen = tl.load(before + request)
    last = tl.load(count + request) - 1
    end = seen + last + 1
    if (first < end) & (last >= 0):
        column = first + tl.arange(0, COLUMNS)
        own = column - seen
        kv, head = (part // SPLITS).to(tl.int64), part.to(tl.int64) * HEADS
        query += request * stride_query + head * stride_head
        query_far += request * stride_query_far + head * stride_head_far
        keys += request * stride_keys + kv * stride_kv
        keys_far += request * stride_keys_far + kv * stride_kv_far
        bias += (request * tl.num_programs(0) * HEADS + head) * width
        lse += request * stride_lse + head * stride_lse_head + last.to(tl.int64) * stride_lse_row

        # Tiles of rows, in order: some see columns of this program and not all, then all see all of them near, then
        # some see some of them far, then all see all of them far.
        tiles = tl.cdiv(last, ROWS)
        begin = tl.minimum(tl.maximum(first - seen, 0) // ROWS, tiles)
        near = tl.minimum(tl.maximum(tl.maximum(first - seen + window, 0) // ROWS, begin), tiles)
        whole = tl.minimum(tl.cdiv(tl.maximum(first + COLUMNS - 1 - seen, 0), ROWS), near)
        whole = tl.maximum(whole, begin)
        far = tl.cdiv(tl.maximum(first + COLUMNS - 1 - seen + window, 0), ROWS)
        far = tl.minimum(tl.maximum(far, near), tiles)

        sums = tl.zeros([COLUMNS], tl.float32)
        final = tl.zeros([COLUMNS], tl.float32)
        if first + COLUMNS - 1 > seen - window:
            k = _load_keys(keys, column, (column < end) & (own > -window), stride_column, HEAD_DIM, BLOCK_D)
            sums = _sum_rows(
                sums, k, own, window, 0, last, (begin, whole, near, far), query, bias, width, scale, stride_row,
                stride_head, HEADS, HEAD_DIM, BLOCK_D, ROWS,
            )  # fmt: skip
            final = _one_row(
                k, own, window, 0, last, query, lse, scale, stride_row, stride_head, stride_lse_head, HEADS,
                HEADS_PAD, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
        if first <= seen + last - window:
            k = _load_keys(keys_far, column, last - own >= window, stride_column_far, HEAD_DIM, BLOCK_D)
            low = window - seen  # the first row that sees anything far
            sums = _sum_rows(
                sums, k, own + window, end, low, last, (near, far, tiles, tiles), query_far, bias, width, scale,
                stride_row_far, stride_head_far, HEADS, HEAD_DIM, BLOCK_D, ROWS,
            )  # fmt: skip
            final += _one_row(
                k, own + window, end, low, last, query_far, lse, scale, stride_row_far, stride_head_far,
                stride_lse_head, HEADS, HEADS_PAD, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
        parts += (request * tl.num_programs(0) + part) * 2 * columns
        tl.store(parts + column, sums, mask=column < end)
        tl.store(parts + columns + column, final, mask=column < end)


@triton.jit
def _sum_parts(parts, column, on, columns, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """What some columns received from all rows but the last, and from the last."""
    sums, final = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        sums += tl.load(parts + part * 2 * columns + column, mask=on, other=0.0)
        final += tl.load(parts + (part * 2 + 1) * columns + column, mask=on, other=0.0)
    return sums, final


@triton.jit(do_not_specialize=["columns", "rows"])
def _fold_kernel(
    parts, before, count, received, last, chunk_received, columns, rows, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sums over all heads of the columns, and of the rows' own columns, [BLOCK * program_id(0), ...)."""
    request = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seen, there = tl.load(before + request), tl.load(count + request)
    parts += request * PARTS * 2 * columns
    some = (number < seen + there) & (there > 0)
    sums, final = _sum_parts(parts, number, some, columns, PARTS, BLOCK)
    tl.store(received + request * columns + number, sums, mask=number < columns)
    tl.store(last + request * columns + number, final, mask=number < columns)
    sums, final = _sum_parts(parts, seen + number, number < there, columns, PARTS, BLOCK)
    tl.store(chunk_received + request * rows + number, sums + final, mask=number < rows)


@triton.jit(do_not_specialize=["window"])
def _tiles_kernel(
    query, query_far, keys, keys_far, lse, before, count, first, place, tiles, window, scale,
    stride_query, stride_row, stride_head, stride_query_far, stride_row_far, stride_head_far,
    stride_keys, stride_kv, stride_column, stride_keys_far, stride_kv_far, stride_column_far,
    stride_lse, stride_lse_row, stride_lse_head, stride_tile, stride_tile_head, stride_tile_row,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SIZE: tl.constexpr, PIECES: tl.constexpr,
    PIECE: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """A square piece of the tile of a block and a head: rows and columns of the tile."""
    request, block = tl.program_id(2).to(tl.int64), tl.program_id(1)
    head = (tl.program_id(0) // (PIECES * PIECES)).to(tl.int64)
    i = tl.program_id(0) // PIECES % PIECES * PIECE + tl.arange(0, PIECE)
    j = tl.program_id(0) % PIECES * PIECE + tl.arange(0, PIECE)
    number = tl.load(place + request * tl.num_programs(1) + block).to(tl.int64)
    seen, rows = tl.load(before + request), tl.load(count + request)
    begin = tl.load(first + request * tl.num_programs(1) + block)
    own, column = begin + i - seen, begin + j
    there = (i < SIZE) & (own >= 0) & (own < rows)
    if (number >= 0) & (tl.max(there.to(tl.int32), 0) > 0):
        found = tl.zeros([PIECE, PIECE], tl.float32)
        distance = i[:, None] - j[None, :]
        if tl.program_id(0) // PIECES % PIECES >= tl.program_id(0) % PIECES:  # not wholly above the diagonal
            d = tl.arange(0, BLOCK_D)
            inside = (column >= 0) & (column < seen + rows)
            on = there[:, None] & (d < HEAD_DIM)[None, :]
            at = query + request * stride_query + head * stride_head
            q = tl.load(at + own.to(tl.int64)[:, None] * stride_row + d[None, :], mask=on, other=0.0)
            at = keys + request * stride_keys + head // GROUP * stride_kv
            k = _load_keys(at, column, inside & (column > seen - window), stride_column, HEAD_DIM, BLOCK_D)
            x = tl.dot(q, tl.trans(k), input_precision="ieee")
            if FAR:
                on = on & (own + seen >= window)[:, None]
                at = query_far + request * stride_query_far + head * stride_head_far
                q = tl.load(at + own.to(tl.int64)[:, None] * stride_row_far + d[None, :], mask=on, other=0.0)
                at = keys_far + request * stride_keys_far + head // GROUP * stride_kv_far
                seen_far = inside & (column <= seen + rows - 1 - window)
                k = _load_keys(at, column, seen_far, stride_column_far, HEAD_DIM, BLOCK_D)
                x = tl.where(distance >= window, tl.dot(q, tl.trans(k), input_precision="ieee"), x)
            at = lse + request * stride_lse + head * stride_lse_head
            level = tl.load(at + own.to(tl.int64) * stride_lse_row, mask=there, other=0.0)
            p = tl.exp2(x * scale - (level * 1.4426950408889634)[:, None])
            found = tl.where((distance >= 0) & inside[None, :], p, 0.0)
        at = tiles + number * stride_tile + head * stride_tile_head
        mask = there[:, None] & (j < SIZE)[None, :]
        tl.store(at + i.to(tl.int64)[:, None] * stride_tile_row + j[None, :], found, mask=mask)
