"""Decayed column sums of the attention on a GPU: a program owns a block of columns and passes over the queries once.

Every logit is computed anew and its probability taken from the log-sum-exp, so the cost is that of the first half of
flash attention, one matrix product and one exponential a logit, and nothing quadratic is stored. The decay is part of
the exponent: w_t·exp(x - lse_t) = exp2(log2(e)·x + bias_t), with the biases of all rows computed first, by a small
kernel of its own: a logit then costs one multiply-add, one exponential and one addition. Only blocks on the diagonal
are masked. Programs of the columns that most rows see come first, so that the short ones fill the last wave.

Grids depend on shapes alone, counts are read on the device: a launch can be part of a CUDA graph. Long strides on
Hopper go to `hopper_impl`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from sglang_ext.kernels.score_update import hopper_impl
from sglang_ext.kernels.score_update.types import CountedQueries, KeptScores, check, check_target
from sglang_ext.kernels.shared import shared_memory

LOG2_E = math.log2(math.e)
BIASES = 128
"""Queries whose biases a program computes, a multiple of every tile's rows."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


ROOM = 112 * 1024
"""Bytes of shared memory that the larger tiles take."""


@dataclass(frozen=True)
class ScoreTuning:
    """What may be tuned: columns and query rows a tile, warps, stages of the pipeline over the rows, registers."""

    columns: int = 128
    rows: int = 64
    warps: int = 4
    stages: int = 3
    registers: int | None = None


PREFILL = ScoreTuning(columns=256, warps=8, registers=128)  # two programs a multiprocessor of 227 KiB
SMALLER = ScoreTuning()
DECODE = ScoreTuning(columns=64, rows=16, warps=4, stages=1)  # few rows: the keys are read once and that is the time


def tuning_for(rows: int, head_dim: int, itemsize: int, together: bool = False, shared: int = 99 * 1024) -> ScoreTuning:
    """What was tuned for 128 components of 16 bits, with smaller tiles where heads are larger.

    So that a program takes at most `shared` bytes of shared memory (compiled for sm_90); 99 KiB is what the smaller
    GPUs of a generation have. Where key-value heads share a score (`together`), keys go through the pipeline as well,
    which is shorter then.
    """
    tuning = DECODE if rows <= DECODE.rows else PREFILL if shared >= ROOM and not together else SMALLER
    if together:
        tuning = replace(tuning, stages=min(2, tuning.stages))
    larger = max(1, _padded(head_dim) * itemsize // 256)
    return replace(tuning, columns=max(16, tuning.columns // larger), rows=max(16, tuning.rows // larger))


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def column_sums(
    queries: CountedQueries,
    *,
    beta: float,
    reduction: str = "mean",
    homogeneous: bool = False,
    tuning: ScoreTuning | hopper_impl.HopperScoreTuning | None = None,
) -> torch.Tensor:
    """`reference.column_sums` on the device, without synchronisation: counts out of range cannot be refused here.

    Raises:
        ValueError: also for a dtype other than float32, bfloat16 and float16, or `hopper_impl.HopperScoreTuning` where
            that kernel does not serve.
    """
    check(queries, beta, reduction)
    batch, kv_heads, columns, _ = queries.keys.shape
    out = queries.lse.new_empty(batch, 1 if homogeneous else kv_heads, columns)
    _launch(out, None, queries, beta, reduction, tuning)
    return out


def update_scores(
    scores: KeptScores,
    queries: CountedQueries,
    *,
    beta: float,
    reduction: str = "mean",
    tuning: ScoreTuning | hopper_impl.HopperScoreTuning | None = None,
) -> None:
    """`reference.update_scores` on the device, in a few launches and without synchronisation.

    Raises:
        ValueError: also for a dtype other than float32, bfloat16 and float16, or scores that are not float32.
    """
    check(queries, beta, reduction)
    check_target(scores, queries.keys)
    if scores.score.dtype != torch.float32:
        raise ValueError(f"score is {scores.score.dtype}: expected float32 on the GPU")
    _launch(scores.score, scores, queries, beta, reduction, tuning)


def _launch(
    out: torch.Tensor,
    scores: KeptScores | None,
    queries: CountedQueries,
    beta: float,
    reduction: str,
    tuning: ScoreTuning | hopper_impl.HopperScoreTuning | None,
) -> None:
    """Sums into `out`; or, where `scores` are given, added to them, with `out` their tensor."""
    query, keys, lse, before, count = queries.query, queries.keys, queries.lse, queries.before, queries.count
    skip = None if scores is None else scores.skip
    if query.dtype not in DTYPES:
        raise ValueError(f"query is {query.dtype}: expected one of {DTYPES}; take the reference for float64")
    batch, most, heads, head_dim = query.shape
    kv_heads, columns = keys.shape[1:3]
    out_heads = out.shape[1]
    if out.numel() == 0 or keys.numel() == 0:
        return
    if query.stride(3) != 1:
        query = query.contiguous()
    if keys.stride(3) != 1:
        keys = keys.contiguous()
    served = hopper_impl.serves(query, keys, out_heads, reduction)
    if isinstance(tuning, hopper_impl.HopperScoreTuning) and not served:
        raise ValueError(
            f"query {query.dtype} {tuple(query.shape)}, strides {query.stride()}, for {out_heads} scores a token, "
            f"reduction {reduction!r}: not for Hopper's kernel; choose another tuning"
        )
    if tuning is None and served:
        tuning = hopper_impl.TUNING
    elif tuning is None:
        sizes = most, head_dim, query.element_size(), out_heads < kv_heads
        tuning = tuning_for(*sizes, *([shared_memory(query.device)] if query.is_cuda else []))
    # 0 queries later nothing has decayed, also with beta 0: so not minus infinity, which times 0 is not a number.
    log2_beta = math.log2(beta) if beta > 0 else -1e30
    if lse.stride(2) != 1:
        lse = lse.contiguous()
    width = triton.cdiv(most, BIASES) * BIASES  # whole tiles of rows, so that biases are loaded without masks
    bias = torch.empty(batch, heads, width, dtype=torch.float32, device=query.device)
    _bias_kernel[(width // BIASES, batch)](
        lse, count, bias, width, *lse.stride()[:2], math.log2(1 - beta), log2_beta,
        HEADS=heads, BLOCK_HEADS=triton.next_power_of_2(heads), BLOCK=BIASES, num_warps=4,
    )  # fmt: skip
    scale_log2, factor = queries.scale * LOG2_E, 1.0 / (heads // out_heads) if reduction == "mean" else 1.0
    unread = before  # kernels take addresses; they read no entries, rows or skipped columns without FOLD and SKIP
    entries, rows = (unread, unread) if scores is None else (scores.entries.contiguous(), scores.rows)
    target = (out, entries, rows, unread if skip is None else skip)
    kinds = {"OUT_HEADS": out_heads, "FOLD": scores is not None, "SKIP": skip is not None}
    if isinstance(tuning, hopper_impl.HopperScoreTuning):
        parts = hopper_impl.part_sums(query, keys, bias, before, count, skip, scale_log2, queries.every, tuning)
        _parts_kernel[(out_heads, triton.cdiv(columns, 1024), batch)](
            parts, before, count, *target, columns, out.shape[2], queries.every, log2_beta, factor,
            PARTS=parts.shape[2], BLOCK=1024, num_warps=4, **kinds,
        )  # fmt: skip
        return
    _columns_kernel[(out_heads, triton.cdiv(columns, tuning.columns), batch)](
        query, keys, bias, before, count, *target, columns, out.shape[2], scale_log2, log2_beta, factor,
        *query.stride()[:3], *keys.stride()[:3], width, queries.every,
        GROUP=heads // kv_heads, KV_HEADS=kv_heads // out_heads, HEAD_DIM=head_dim, BLOCK_D=_padded(head_dim),
        COLUMNS=tuning.columns, ROWS=tuning.rows, MAXIMUM=reduction == "max", num_warps=tuning.warps,
        num_stages=tuning.stages, maxnreg=tuning.registers, **kinds,
    )  # fmt: skip


@triton.jit
def _load_keys(keys, column, visible, stride_column, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[columns, BLOCK_D]; zero where nothing is seen: it may hold anything, and 0 * NaN would reach other columns."""
    d = tl.arange(0, BLOCK_D)
    mask = visible[:, None] if HEAD_DIM == BLOCK_D else visible[:, None] & (d[None, :] < HEAD_DIM)
    return tl.load(keys + column.to(tl.int64)[:, None] * stride_column + d[None, :], mask=mask, other=0.0)


@triton.jit
def _bias_kernel(
    lse, count, bias, width, stride_request, stride_row, log2_share, log2_beta,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """bias[request, head, t] = log2 of query t's weight, less its log-sum-exp; -inf where t is none."""
    request = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    head = tl.arange(0, BLOCK_HEADS)[None, :]
    rows = tl.load(count + request).to(tl.int32)
    on = (t < rows) & (head < HEADS)
    level = tl.load(lse + request * stride_request + t.to(tl.int64) * stride_row + head, mask=on, other=0.0)
    weight = log2_share + (rows - 1 - t).to(tl.float32) * log2_beta
    found = tl.where(on, weight - level * 1.4426950408889634, float("-inf"))
    tl.store(bias + (request * HEADS + head) * width + t, found, mask=head < HEADS)


@triton.jit
def _attention(
    k, first, head, rows, query, bias, width, scale, stride_row, stride_head,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Weighted attention [columns, ROWS] of the queries first, first + 1, ... in a head."""
    r, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    on = first + r < rows
    mask = on[None, :] if HEAD_DIM == BLOCK_D else on[None, :] & (d[:, None] < HEAD_DIM)
    # What differs from tile to tile is one number: the rest of the addresses is computed once, before the loop.
    begin = tl.minimum(first, rows).to(tl.int64)  # `first`; in the interpreter, a loop's number has no type
    at = query + (begin * stride_row + head * stride_head)
    q = tl.load(at + (r * stride_row)[None, :] + d[:, None], mask=mask, other=0.0)
    x = tl.dot(k, q, input_precision="ieee")
    level = tl.load(bias + tl.multiple_of(head * width + first, ROWS) + r)  # -inf where there is no row
    return tl.exp2(x * scale + level[None, :])


@triton.jit
def _columns_kernel(
    query, keys, bias, before, count, out, entries, state_rows, skip, columns, out_columns, scale, log2_beta, factor,
    stride_query, stride_row, stride_head, stride_keys, stride_kv, stride_column, width, every,
    OUT_HEADS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, MAXIMUM: tl.constexpr, FOLD: tl.constexpr,
    SKIP: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = KV_HEADS * GROUP
    request = tl.program_id(2)
    out_head = tl.program_id(0)
    first = tl.program_id(1) * COLUMNS
    seen = tl.load(before + request).to(tl.int32)
    rows = tl.load(count + request).to(tl.int32)
    end = seen + (rows - 1) * every + 1
    if FOLD and (first >= end or rows == 0):
        return  # nothing to fold where nothing is seen; plain sums are 0 there
    column = first + tl.arange(0, COLUMNS)
    visible = (column < end) & (rows > 0)
    if SKIP:
        settled = tl.load(skip + request).to(tl.int32)
        if first + COLUMNS <= settled:
            return
        visible = visible & (column >= settled)
    query += request.to(tl.int64) * stride_query + out_head * HEADS * stride_head
    keys += request.to(tl.int64) * stride_keys + out_head.to(tl.int64) * KV_HEADS * stride_kv
    bias += (request * OUT_HEADS + out_head).to(tl.int64) * HEADS * width
    k = _load_keys(keys, column, visible, stride_column, HEAD_DIM, BLOCK_D)
    lowest = tl.cdiv(tl.maximum(first - seen, 0), every)  # the first row that sees a column of this block
    whole = tl.cdiv(tl.maximum(first + COLUMNS - 1 - seen, 0), every)  # and the first that sees all of them
    tiles = tl.cdiv(rows, ROWS)

    sums = tl.zeros([COLUMNS], tl.float32)
    if KV_HEADS == 1 and not MAXIMUM:
        # Head by head within a tile of queries; only tiles on the diagonal are masked.
        middle = tl.minimum(tl.cdiv(whole, ROWS), tiles) * HEADS
        for i in range(lowest // ROWS * HEADS, middle):
            t = i // HEADS * ROWS
            p = _attention(
                k, t, i % HEADS, rows, query, bias, width, scale, stride_row, stride_head, HEAD_DIM, BLOCK_D, ROWS
            )
            sees = column[:, None] - seen <= ((t + tl.arange(0, ROWS)) * every)[None, :]
            sums += tl.sum(tl.where(sees, p, 0.0), axis=1)
        for i in range(middle, tiles * HEADS):
            t = i // HEADS * ROWS
            p = _attention(
                k, t, i % HEADS, rows, query, bias, width, scale, stride_row, stride_head, HEAD_DIM, BLOCK_D, ROWS
            )
            sums += tl.sum(p, axis=1)
    else:
        # All heads of one tile of queries before the next: their maximum is taken query by query.
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        for i in range(lowest // ROWS * HEADS, tiles * HEADS):
            head, t = i % HEADS, i // HEADS * ROWS
            if KV_HEADS > 1:
                k = _load_keys(keys + head // GROUP * stride_kv, column, visible, stride_column, HEAD_DIM, BLOCK_D)
            p = _attention(
                k, t, head, rows, query, bias, width, scale, stride_row, stride_head, HEAD_DIM, BLOCK_D, ROWS
            )
            total = tl.maximum(total, p) if MAXIMUM else total + p
            if head == HEADS - 1:
                sees = column[:, None] - seen <= ((t + tl.arange(0, ROWS)) * every)[None, :]
                sums += tl.sum(tl.where(sees, total, 0.0), axis=1)
                total = tl.zeros([COLUMNS, ROWS], tl.float32)
    _keep(
        sums * factor, visible, column, request.to(tl.int64), out_head, rows, out, entries, state_rows, columns,
        out_columns, log2_beta, OUT_HEADS, FOLD,
    )  # fmt: skip


@triton.jit(do_not_specialize=["columns", "every"])  # columns are others in every pass
def _parts_kernel(
    parts, before, count, out, entries, state_rows, skip, columns, out_columns, every, log2_beta, factor,
    OUT_HEADS: tl.constexpr, PARTS: tl.constexpr, FOLD: tl.constexpr, SKIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums that `hopper_impl` found in parts."""
    head, request = tl.program_id(0), tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(count + request).to(tl.int32)
    end = tl.load(before + request).to(tl.int32) + (rows - 1) * every + 1
    visible = (column < end) & (rows > 0) & (column < columns)
    if SKIP:
        visible = visible & (column >= tl.load(skip + request).to(tl.int32))
    sums = tl.zeros([BLOCK], tl.float32)
    parts += (request * OUT_HEADS + head) * PARTS * columns
    for part in tl.static_range(PARTS):
        sums += tl.load(parts + part * columns + column, mask=visible, other=0.0)
    _keep(
        sums * factor, visible, column, request, head, rows, out, entries, state_rows, columns, out_columns, log2_beta,
        OUT_HEADS, FOLD,
    )  # fmt: skip


@triton.jit
def _keep(
    sums, visible, column, request, head, rows, out, entries, state_rows, columns, out_columns, log2_beta,
    OUT_HEADS: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """Write the sums of some columns, 0 of one that nobody sees; or, with FOLD, add them to the decayed scores."""
    if FOLD:
        row = tl.load(state_rows + request).to(tl.int64)
        entry = tl.load(entries + request * columns + column, mask=visible, other=-1)
        place = out + (row * OUT_HEADS + head) * out_columns + entry
        some = visible & (entry >= 0)
        old = tl.load(place, mask=some, other=0.0)
        tl.store(place, old * tl.exp2(rows.to(tl.float32) * log2_beta) + sums, mask=some)
    else:
        place = out + (request * OUT_HEADS + head) * out_columns + column
        tl.store(place, tl.where(visible, sums, 0.0), mask=column < columns)
