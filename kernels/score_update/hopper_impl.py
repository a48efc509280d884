"""Decayed column sums of the attention for Hopper's tensor cores: one group of warps loads, four multiply.

The sums of `triton_impl`, for long strides. A program owns 256 columns of a key-value head and some of the query heads;
its keys stay in shared memory, the right operand of every product. A loading group brings tiles of 64 queries by TMA.
Each of the other four takes one half of the columns and every second tile: with four of them the tensor cores work for
some while others take exponentials (Shah et al., 2024, FlashAttention-3, section 3), which are as much work here as the
products. Columns lie along the rows of a thread's registers, so that a sum over queries stays in the thread until the
end, and all queries of a tile have their weight from two registers.

Written in Gluon, Triton's lower level, which has no interpreter: it runs on Hopper alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sglang_ext.kernels.hopper import TILES, is_hopper

COLUMNS = 256
"""Columns of a program, in two halves."""
ROWS = 64
"""Queries of a tile: as many as a group of warps multiplies at a time."""
LEAST_ROWS = 512
"""Query rows from which on the kernel is chosen."""

REGISTERS = (96, 112)
"""Registers a thread: on average, and of a group that multiplies; what is left, 32, is for the one that loads."""


@dataclass(frozen=True)
class HopperScoreTuning:
    """What may be tuned.

    Attributes:
        stages: tiles in flight.
        splits: programs that share the query heads of a key-value head, at most.
    """

    stages: int = 6
    splits: int = 2


TUNING = HopperScoreTuning()


@gluon.jit
def _load(query_tiles, ring, first, last, head, HEADS: gl.constexpr):
    """Fill the ring of query tiles: all heads of some rows, then the next rows."""
    q_smem, ready, free = ring
    STAGES: gl.constexpr = q_smem.type.shape[0]
    ROWS: gl.constexpr = q_smem.type.shape[1]
    DIM: gl.constexpr = q_smem.type.shape[2]
    for i in range(first, last):
        count = i - first
        stage = count % STAGES
        mbarrier.wait(free.index(stage), (count // STAGES + 1) & 1)
        arrived = ready.index(stage)
        mbarrier.expect(arrived, query_tiles.block_type.nbytes)
        at = [i // HEADS * ROWS, (head + i % HEADS) * DIM]
        tma.async_copy_global_to_shared(query_tiles, at, arrived, q_smem.index(stage))


@gluon.jit
def _load_keys(keys, k_smem, begin, end, stride_column):
    """Keys of the columns begin, begin + 1, ...; 0 behind the last."""
    DIM: gl.constexpr = k_smem.type.shape[1]
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    for number in gl.static_range(k_smem.type.shape[0] // 64):
        line = begin + number * 64 + gl.arange(0, 64, gl.SliceLayout(1, BLOCKED))
        d = gl.arange(0, DIM, gl.SliceLayout(0, BLOCKED))
        where = keys + line.to(gl.int64)[:, None] * stride_column + d[None, :]
        k_smem.slice(number * 64, 64).store(gl.load(where, mask=(line < end)[:, None], other=0.0))
    fence_async_shared()


@gluon.jit
def _sums(x, level, scale, t, first_column, rows, every, seen, MASKED: gl.constexpr):
    """Sums over the rows of a tile of logits [64, N] that a thread has: [4 warps, 8, N]."""
    LAYOUT: gl.constexpr = x.type.layout
    N: gl.constexpr = x.type.shape[1]
    p = gl.exp2(x * scale + level[:, None])
    if MASKED:
        row = t + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
        behind = first_column - seen + gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
        p = gl.where((behind[None, :] <= (row * every)[:, None]) & (row < rows)[:, None], p, 0.0)
    return gl.sum(p.reshape((4, 2, 8, N)), 1)


@gluon.jit
def _tiles(
    total, begin, end, first_column, bias, width, scale, place, k_smem, ring,
    TURN: gl.constexpr, HEADS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """`total` and the sums over every second of the tiles [begin, end) of queries."""
    _, seen, _, rows, every, first, _ = place
    q_smem, ready, free = ring
    STAGES: gl.constexpr = q_smem.type.shape[0]
    ROWS: gl.constexpr = q_smem.type.shape[1]
    N: gl.constexpr = k_smem.type.shape[0]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LOGITS))
    nothing = gl.zeros((ROWS, N), gl.float32, LOGITS)
    begin += (begin - first + TURN) & 1
    for i in range(begin, end, 2):
        count = i - first
        stage = count % STAGES
        t = i // HEADS * ROWS
        level = gl.load(bias + i % HEADS * width + t + row)  # -inf where there is no row
        mbarrier.wait(ready.index(stage), (count // STAGES) & 1)
        x = warpgroup_mma(q_smem.index(stage), k_smem.permute((1, 0)), nothing, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(0, [x])
        mbarrier.arrive(free.index(stage), count=1)
        total += _sums(x, level, scale, t, first_column, rows, every, seen, MASKED)
    return total


@gluon.jit
def _multiply(
    k_smem, bias, width, scale, sums, place, ring, WHICH: gl.constexpr, HEADS: gl.constexpr
):  # fmt: skip
    """Half of the columns, half of the tiles: group WHICH of those that multiply."""
    begin, seen, end, rows, every, first, last = place
    ROWS: gl.constexpr = ring[0].type.shape[1]
    COLUMNS: gl.constexpr = k_smem.type.shape[0]
    N: gl.constexpr = COLUMNS // 2
    TURN: gl.constexpr = WHICH // 2
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    column = begin + WHICH % 2 * N
    half = k_smem.slice(WHICH % 2 * N, N)
    # Tiles with rows that do not see all columns, whole tiles, and one that is not whole.
    sees = gl.cdiv(gl.maximum(begin + COLUMNS - 1 - seen, 0), every)
    middle = gl.minimum(gl.cdiv(sees, ROWS) * HEADS, last)
    whole = gl.maximum(rows // ROWS * HEADS, middle)
    total = gl.sum(gl.zeros((ROWS, N), gl.float32, LOGITS).reshape((4, 2, 8, N)), 1)
    total = _tiles(total, first, middle, column, bias, width, scale, place, half, ring, TURN, HEADS, True)
    total = _tiles(total, middle, whole, column, bias, width, scale, place, half, ring, TURN, HEADS, False)
    total = _tiles(total, whole, last, column, bias, width, scale, place, half, ring, TURN, HEADS, True)
    found = gl.sum(gl.sum(total, 1), 0)
    column += gl.arange(0, N, found.type.layout)
    gl.store(sums + column, found, mask=column < end)


@gluon.jit(do_not_specialize=["columns", "every"])  # columns are others in every pass
def _columns(
    query_tiles, keys, bias, before, count, skip, sums, columns, scale, stride_kv, stride_column, width, every,
    SPLITS: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr, SKIP: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One request's columns [COLUMNS * program_id(1), ...) for the `HEADS` query heads of part program_id(0)."""
    part = gl.program_id(0)
    begin = gl.program_id(1) * COLUMNS
    seen = gl.load(before).to(gl.int32)
    rows = gl.load(count).to(gl.int32)
    settled = gl.to_tensor(0)
    if SKIP:
        settled = gl.load(skip).to(gl.int32)
    end = gl.minimum(seen + (rows - 1) * every + 1, columns)
    if (begin < end) & (rows > 0) & (begin + COLUMNS > settled):
        q_smem = gl.allocate_shared_memory(query_tiles.dtype, [STAGES, ROWS, DIM], query_tiles.layout)
        k_smem = gl.allocate_shared_memory(query_tiles.dtype, [COLUMNS, DIM], query_tiles.layout)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(ready.index(stage), count=1)
            mbarrier.init(free.index(stage), count=2)
        _load_keys(keys + (part // SPLITS).to(gl.int64) * stride_kv, k_smem, begin, end, stride_column)
        lowest = gl.cdiv(gl.maximum(begin - seen, 0), every)  # the first row that sees a column of this program
        first = lowest // ROWS * HEADS
        last = gl.cdiv(rows, ROWS) * HEADS
        place = (begin, seen, end, rows, every, first, last)
        ring = (q_smem, ready, free)
        bias += part * HEADS * width
        sums += part.to(gl.int64) * 2 * columns
        gl.warp_specialize(
            [
                (_load, (query_tiles, ring, first, last, part * HEADS, HEADS)),
                (_multiply, (k_smem, bias, width, scale, sums, place, ring, 0, HEADS)),
                (_multiply, (k_smem, bias, width, scale, sums, place, ring, 1, HEADS)),
                (_multiply, (k_smem, bias, width, scale, sums + columns, place, ring, 2, HEADS)),
                (_multiply, (k_smem, bias, width, scale, sums + columns, place, ring, 3, HEADS)),
            ],
            [4, 4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS, REGISTERS],
        )


def serves(query: torch.Tensor, keys: torch.Tensor, heads: int, reduction: str) -> bool:
    """Whether the kernel takes such sums: a Hopper GPU, half precision, long runs of queries, a mean over a group.

    Args:
        query, keys: as in `CountedQueries`.
        heads: scores a token.
        reduction: of the query heads that share one.
    """
    return (
        is_hopper(query.device)
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[1] >= LEAST_ROWS
        and query.shape[3] in (64, 128)
        and heads == keys.shape[1]
        and reduction == "mean"
        and query.stride(3) == keys.stride(3) == 1
        and query.stride(2) == query.shape[3]
        and query.stride(1) % 8 == 0
        and query.stride(0) % 8 == 0
        and query.data_ptr() % 16 == 0
    )


def part_sums(
    query: torch.Tensor,
    keys: torch.Tensor,
    bias: torch.Tensor,
    before: torch.Tensor,
    count: torch.Tensor,
    skip: torch.Tensor | None,
    scale_log2: float,
    every: int,
    tuning: HopperScoreTuning = TUNING,
) -> torch.Tensor:
    """Sums over a key-value head's queries, of every column that counts, in parts that are to be added up.

    Args:
        query, keys, before, count, every: as in `CountedQueries`, where `serves` says yes.
        skip: as in `KeptScores`.
        bias: [batch, heads, width] float32, log2 of each query's weight less its log-sum-exp; -inf where there is none.
        scale_log2: factor of the logits, times log2(e).
        tuning: what may be tuned.

    Returns:
        [batch, kv_heads, parts, columns] float32; nothing is written to columns below `skip`, or that no query sees.
    """
    batch, most, heads, dim = query.shape
    kv_heads, columns = keys.shape[1:3]
    group = heads // kv_heads
    splits = next(n for n in range(min(tuning.splits, group), 0, -1) if group % n == 0)
    parts = torch.empty(batch, kv_heads, splits * 2, columns, dtype=torch.float32, device=query.device)
    average, multiplying = REGISTERS
    for request in range(batch):
        # A view of a row's queries: TMA reads nothing behind the last, and fills what is missing with zeros.
        shape, strides = [most, heads * dim], [query.stride(1), 1]
        tiles = TensorDescriptor(query[request], shape, strides, [ROWS, dim], TILES)
        _columns[(kv_heads * splits, triton.cdiv(columns, COLUMNS))](
            tiles, keys[request], bias[request], before[request:], count[request:],
            before if skip is None else skip[request:], parts[request], columns, scale_log2, *keys.stride()[1:3],
            bias.shape[2], every, SPLITS=splits, HEADS=group // splits, DIM=dim, ROWS=ROWS, COLUMNS=COLUMNS,
            STAGES=tuning.stages, SKIP=skip is not None, REGISTERS=multiplying, num_warps=4, maxnreg=average,
        )  # fmt: skip
    return parts
