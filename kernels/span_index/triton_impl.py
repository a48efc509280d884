"""Spans of tiles on a GPU, in two launches, and their tokens in a third.

`_heads_kernel` reads the tiles twice, in programs that need nothing of each other. One program a tile and head finds
the head's threshold: the two entries around the quantile, by bisection over their float bits as integers, which are
ordered as the entries are. Counts are integers, so both entries are exact, and only their interpolation rounds. The
other programs each sum some rows of a tile over its heads.

`_cut_kernel` has one program a tile. The thresholds are summed over heads in the order in which the attention was, so
that a tile which is flat in every head has scores of exactly 0. Two scans make the scores of all spans, which then go
through the second-level cache once: read with one row's columns moved by the row's number, they lie with one
anti-diagonal in each column. Suppression takes one reduction a span, over integers that hold a candidate's score,
place and first token.

`sum_heads` and `cut_summed` are the two apart, so that ranks can add what each has of the heads in between.

Grids depend on shapes alone and rows are read on the device: a launch can be part of a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_ext.kernels.span_index.types import (
    HeadSums,
    SpanRule,
    Spans,
    SpanWorkspace,
    check,
    check_pick,
    check_sums,
    check_tiles,
    check_workspace,
)


@dataclass(frozen=True, slots=True)
class SpanTuning:
    """What may be tuned.

    Attributes:
        heads_warps: warps of a program of `_heads_kernel`.
        strip: rows that one of its programs sums over heads, a power of two up to 16.
        unroll: heads that it loads before it adds the first.
        cut_warps: warps of a program of `_cut_kernel`.
        chunk: rows of scores that it reads at once, a power of two up to 16.
        pick_warps: warps of a program of `_pick_kernel`.
    """

    heads_warps: int = 8
    strip: int = 4
    unroll: int = 16
    cut_warps: int = 8
    chunk: int = 16
    pick_warps: int = 4


TUNING = SpanTuning()


def cut_spans(
    tiles: torch.Tensor,
    rows: torch.Tensor,
    rule: SpanRule,
    *,
    out: Spans | None = None,
    workspace: SpanWorkspace | None = None,
    tuning: SpanTuning = TUNING,
) -> Spans:
    """`reference.cut_spans` on the device, without synchronisation (Ltri-LLM, sections 3.2 and 3.3.2, Appendix E).

    Args:
        tiles: as in the reference, float32; the last dimension is contiguous.
        rows: as in the reference; values out of range cannot be refused here, and count as 0 or `block`.
        rule: as in the reference. The kernels are compiled anew for other `spans`, `most`, `ratio` and `boxes`, and not
            for other numbers.
        out, workspace: buffers to use; needed under CUDA graphs, made otherwise.
        tuning: see `SpanTuning`.

    Returns:
        As the reference (`out` where given). Arithmetic is in float32: spans whose scores are within its rounding of
        each other may be chosen differently.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not fit.
    """
    check(tiles, rows, rule, out)
    _check_float32(tiles)
    batch, heads, block, _ = tiles.shape
    found = Spans.empty(batch, rule.spans, tiles.device) if out is None else out
    buffers = SpanWorkspace.empty(batch, heads, block, tiles.device) if workspace is None else workspace
    check_workspace(buffers, tiles)
    _sum(tiles, rows, rule.theta, buffers.thresholds, buffers.summed, tuning)
    _cut(buffers.thresholds, buffers.summed, buffers.scores, rows, rule, found, tuning)
    return found


def sum_heads(tiles: torch.Tensor, rows: torch.Tensor, theta: float) -> HeadSums:
    """`reference.sum_heads` on the device, in two launches without synchronisation (Ltri-LLM, equation 5).

    Args:
        tiles, rows: as in `cut_spans`.
        theta: of `SpanRule`.

    Returns:
        As the reference, float32.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    check_tiles(tiles, rows)
    _check_float32(tiles)
    batch, heads, block, _ = tiles.shape
    sums = HeadSums(tiles.new_empty(batch), tiles.new_zeros(batch, block, block))
    thresholds = tiles.new_empty(batch, heads)
    _sum(tiles, rows, theta, thresholds, sums.summed, TUNING)
    if batch:
        _levels_kernel[(batch,)](
            thresholds, rows, sums.levels, HEADS=heads, UNROLL=min(TUNING.unroll, heads), num_warps=1
        )
    return sums


def cut_summed(sums: HeadSums, rows: torch.Tensor, rule: SpanRule) -> Spans:
    """`reference.cut_summed` on the device, in one launch without synchronisation.

    Args:
        sums: as in the reference, float32 and contiguous.
        rows, rule: as in `cut_spans`.

    Returns:
        As the reference, in float32.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not fit.
    """
    check_sums(sums, rows, rule)
    if sums.summed.dtype != torch.float32 or not (sums.summed.is_contiguous() and sums.levels.is_contiguous()):
        raise ValueError(
            f"sums are {sums.summed.dtype}, strides {sums.levels.stride()} and {sums.summed.stride()}: expected"
            " contiguous float32; take the reference for float64"
        )
    found = Spans.empty(rows.shape[0], rule.spans, rows.device)
    _cut(sums.levels.unsqueeze(1), sums.summed, torch.empty_like(sums.summed), rows, rule, found, TUNING)
    return found


def _check_float32(tiles: torch.Tensor) -> None:
    if tiles.dtype != torch.float32:
        raise ValueError(f"tiles are {tiles.dtype}: expected float32; take the reference for float64")
    if tiles.stride(3) != 1:
        raise ValueError(f"tiles have strides {tiles.stride()}: expected a contiguous last dimension")


def _sum(
    tiles: torch.Tensor,
    rows: torch.Tensor,
    theta: float,
    thresholds: torch.Tensor,
    summed: torch.Tensor,
    tuning: SpanTuning,
) -> None:
    """Write the heads' thresholds, and their attention summed (`SpanWorkspace`)."""
    batch, heads, block, _ = tiles.shape
    if batch == 0:
        return
    strip = min(tuning.strip, block)
    # Without fused multiplication and addition, so that the rank of the quantile is rounded as torch.quantile does.
    _heads_kernel[(heads + block // strip, batch)](
        tiles, rows, thresholds, summed, float(theta), *tiles.stride()[:3],
        HEADS=heads, BLOCK=block, LANES=min(32 * tuning.heads_warps, block * block // 2), STRIP=strip,
        UNROLL=min(tuning.unroll, heads), num_warps=tuning.heads_warps, enable_fp_fusion=False,
    )  # fmt: skip


def _cut(
    thresholds: torch.Tensor,
    summed: torch.Tensor,
    scores: torch.Tensor,
    rows: torch.Tensor,
    rule: SpanRule,
    found: Spans,
    tuning: SpanTuning,
) -> None:
    """Cut spans out of summed attention (`SpanWorkspace`); thresholds of several heads are summed first."""
    (batch, heads), block = thresholds.shape, summed.shape[-1]
    if batch == 0:
        return
    _cut_kernel[(batch,)](
        thresholds, summed, scores, rows, found.bounds, found.counts, float(rule.phi),
        float(rule.rate), HEADS=heads, BLOCK=block, UNROLL=min(tuning.unroll, heads), SPANS=rule.spans,
        SPANS_PAD=max(2, triton.next_power_of_2(rule.spans)), MOST=rule.most, ROW="row" in rule.ratio,
        COL="col" in rule.ratio, BOXES=rule.boxes, CHUNK=min(tuning.chunk, block), num_warps=tuning.cut_warps,
    )  # fmt: skip


def pick(
    spans: Spans, received: torch.Tensor, most: int, *, out: torch.Tensor | None = None, tuning: SpanTuning = TUNING
) -> torch.Tensor:
    """`reference.pick` on the device, in one launch without synchronisation (Ltri-LLM, equation 6).

    Args:
        spans, most: as in the reference; bounds out of range cannot be refused here, and are cut off at the tile's.
        received: as in the reference, float32 and contiguous.
        out: buffer to use; needed under CUDA graphs, made otherwise.
        tuning: see `SpanTuning`.

    Returns:
        As the reference (`out` where given), the same tokens.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
    """
    check_pick(spans, received, most, out)
    if received.dtype != torch.float32 or not received.is_contiguous():
        raise ValueError(
            f"received is {received.dtype}, strides {received.stride()}: expected contiguous float32; take the "
            "reference for float64"
        )
    batch, block = received.shape
    shape = (batch, spans.counts.shape[1], most)
    found = torch.empty(shape, dtype=torch.int32, device=received.device) if out is None else out
    if found.numel():
        _pick_kernel[(shape[1], batch)](
            spans.bounds, spans.counts, received, found,
            BLOCK=block, MOST=most, MOST_PAD=max(2, triton.next_power_of_2(most)), num_warps=tuning.pick_warps,
        )  # fmt: skip
    return found


@triton.jit
def _heads_kernel(
    tiles, rows, thresholds, summed, theta, stride_tile, stride_head, stride_row,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, STRIP: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Thresholds of the heads, in the first `HEADS` programs of a tile; its sums over heads, in the others."""
    part, tile = tl.program_id(0), tl.program_id(1).to(tl.int64)
    there = tl.minimum(tl.load(rows + tile).to(tl.int32), BLOCK)
    tiles += tile * stride_tile
    if there > 0:
        if part < HEADS:
            found = _threshold(tiles + part.to(tl.int64) * stride_head, there, theta, stride_row, BLOCK, LANES)
            tl.store(thresholds + tile * HEADS + part, found)
        else:
            first = (part - HEADS) * STRIP
            total = _sum_heads(tiles, first, there, stride_head, stride_row, HEADS, BLOCK, STRIP, UNROLL)
            place = (first + tl.arange(0, STRIP))[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            tl.store(summed + tile * (BLOCK * BLOCK) + place, total)


@triton.jit
def _keys(tile, row, column, on, stride_row):
    """Entries as integers, in the order of the numbers; the largest integer where there is none."""
    x = tl.load(tile + row * stride_row + column, mask=on, other=0.0)
    bits = tl.where(x == x, x, 0.0).to(tl.int32, bitcast=True)
    return tl.where(on, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _number(key):
    """The number that an integer stands for."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _threshold(tile, there, theta, stride_row, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """The quantile of a head's entries on and below the diagonal, interpolated as torch.quantile does.

    Row r and row BLOCK - 1 - r together have one entry more than a whole row: its place is taken by the longer row's
    entries and then the shorter one's, whose entry on the diagonal is left for a list of its own.
    """
    NONE: tl.constexpr = 0x7FFFFFFF
    SIZE: tl.constexpr = BLOCK * BLOCK // 2
    lane = tl.arange(0, LANES)
    # Lanes are the first dimension, which Triton gives to the threads: the sum over the second stays in a thread.
    entry = lane[:, None] + tl.arange(0, SIZE // LANES)[None, :] * LANES
    short, place = entry // BLOCK, entry % BLOCK
    second = place >= BLOCK - short
    row = tl.where(second, short, BLOCK - 1 - short)
    column = tl.where(second, place - (BLOCK - short), place)
    keys = _keys(tile, row, column, row < there, stride_row)
    rest = _keys(tile, lane, lane, (lane < BLOCK // 2) & (lane < there), stride_row)

    entries = there * (there + 1) // 2
    rank = theta * (entries - 1).to(tl.float32)
    share = rank - tl.floor(rank)
    index = tl.floor(rank).to(tl.int32)
    # Always: at most `index` keys are below `low`, which is `below`, and more are not above `high`, which is `within`.
    low = tl.min(tl.minimum(tl.min(keys, 1), rest), 0)
    high = tl.maximum(tl.max(tl.where(keys == NONE, low, keys), 1), tl.where(rest == NONE, low, rest))
    high = tl.max(high, 0)
    below, within = tl.full([], 0, tl.int32), entries
    while (low < high) & (within - below > 1):
        middle = (low & high) + ((low ^ high) >> 1)  # rounded down, without overflow
        count = tl.sum(tl.sum((keys <= middle).to(tl.int32), 1) + (rest <= middle).to(tl.int32), 0)
        enough = count > index
        high, within = tl.where(enough, middle, high), tl.where(enough, count, within)
        low, below = tl.where(enough, low, middle + 1), tl.where(enough, below, count)
    # Whatever ended the search: `within` keys are at most the one that was looked for.
    key = tl.min(tl.minimum(tl.min(tl.where(keys >= low, keys, NONE), 1), tl.where(rest >= low, rest, NONE)), 0)
    above = tl.min(tl.minimum(tl.min(tl.where(keys > key, keys, NONE), 1), tl.where(rest > key, rest, NONE)), 0)
    above = tl.where((within > index + 1) | (share == 0.0), key, above)
    least, most = _number(key), _number(above)
    apart = most - least
    return tl.where(share < 0.5, least + share * apart, most - (1.0 - share) * apart)


@triton.jit
def _sum_heads(
    tiles, first, there, stride_head, stride_row,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, STRIP: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """[STRIP, BLOCK]: rows first, first + 1, ... summed over heads, in their order."""
    row, column = first + tl.arange(0, STRIP)[:, None], tl.arange(0, BLOCK)[None, :]
    on = (row < there) & (column <= row)
    at = tiles + row * stride_row + column
    total = tl.zeros([STRIP, BLOCK], tl.float32)
    for begin in range(0, HEADS, UNROLL):
        for step in tl.static_range(UNROLL):
            x = tl.load(at + step * stride_head, mask=on & (begin + step < HEADS), other=0.0)
            total += tl.where(x == x, x, 0.0)
        at += UNROLL * stride_head
    return total


@triton.jit
def _levels_kernel(thresholds, rows, levels, HEADS: tl.constexpr, UNROLL: tl.constexpr):
    """One tile: its heads' thresholds, summed; 0 where there is no tile."""
    tile = tl.program_id(0).to(tl.int64)
    total = tl.full([], 0.0, tl.float32)
    if tl.load(rows + tile) > 0:
        total = _sum_thresholds(thresholds + tile * HEADS, HEADS, UNROLL)
    tl.store(levels + tile, total)


@triton.jit
def _cut_kernel(
    thresholds, summed, scores, rows, bounds, counts, phi, rate,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, SPANS: tl.constexpr, SPANS_PAD: tl.constexpr,
    MOST: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, BOXES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One tile: scores, candidates, suppression, ratios and counts."""
    tile = tl.program_id(0).to(tl.int64)
    there = tl.minimum(tl.load(rows + tile).to(tl.int32), BLOCK)
    bounds += tile * SPANS * 2
    counts += tile * SPANS
    slot = tl.arange(0, SPANS_PAD)
    if there <= 0:
        tl.store(counts + slot, tl.zeros([SPANS_PAD], tl.int32), mask=slot < SPANS)
    else:
        level = _sum_thresholds(thresholds + tile * HEADS, HEADS, UNROLL)
        scores += tile * (BLOCK * BLOCK)
        by_row, by_column = _score(summed + tile * (BLOCK * BLOCK), scores, level, there, BLOCK)
        tl.debug_barrier()  # the scores are in memory
        candidates = _candidates(scores, there, BLOCK, CHUNK)
        first, end, score, number = _suppress(candidates, there, phi, BLOCK, SPANS, SPANS_PAD, BOXES)

        # Equation 7. The diagonal is the triangle's edge: what a span's rows attend to before it is what they attend
        # to, less what they attend to in the span, and likewise for columns.
        tokens = end - first
        own = score + level * (tokens * (tokens + 1) // 2).to(tl.float32)
        token = tl.arange(0, BLOCK)[None, :]
        inside = (token >= first[:, None]) & (token < end[:, None])
        beside = tl.zeros([SPANS_PAD], tl.float32)
        if ROW:
            seen = tl.sum(tl.where(inside, by_row[None, :], 0.0), 1)
            beside += tl.where(first > 0, tl.maximum(seen - own, 0.0), 0.0)
        if COL:
            given = tl.sum(tl.where(inside, by_column[None, :], 0.0), 1)
            beside += tl.where(end < there, tl.maximum(given - own, 0.0), 0.0)
        some = beside > 0.0
        ratio = tl.where(some, tl.minimum(tl.maximum(tl.div_rn(own, tl.where(some, beside, 1.0)), 0.0), 1.0), 1.0)
        count = (tokens.to(tl.float32) * tl.exp(-rate * (1.0 - ratio))).to(tl.int32)
        count = tl.maximum(tl.minimum(tl.minimum(count, MOST), tokens), 1)

        # In the order of first tokens.
        kept = slot < number
        order = first * (2 * BLOCK) + end
        earlier = (order[None, :] < order[:, None]) & kept[None, :]
        place = tl.sum(earlier.to(tl.int32), 1)
        tl.store(bounds + place * 2, first, mask=kept)
        tl.store(bounds + place * 2 + 1, end, mask=kept)
        tl.store(counts + place, count, mask=kept)
        tl.store(counts + slot, tl.zeros([SPANS_PAD], tl.int32), mask=(slot >= number) & (slot < SPANS))


@triton.jit
def _sum_thresholds(thresholds, HEADS: tl.constexpr, UNROLL: tl.constexpr):
    """The sum over heads, in the order of `_sum_heads`."""
    total = tl.full([], 0.0, tl.float32)
    for begin in range(0, HEADS, UNROLL):
        for step in tl.static_range(UNROLL):
            total += tl.load(thresholds + begin + step, mask=begin + step < HEADS, other=0.0)
    return total


@triton.jit
def _score(summed, scores, level, there, BLOCK: tl.constexpr):
    """Write the score of every span (equations 4 and 5); return the sums of all rows and of all columns."""
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    x = tl.load(summed + row * BLOCK + column)
    above = tl.where((row < there) & (column <= row), x - level, 0.0)
    found = tl.cumsum(tl.cumsum(above, 0), 1, reverse=True)
    tl.store(scores + row * BLOCK + column, found)
    return tl.sum(x, 1), tl.sum(x, 0)


@triton.jit
def _candidates(scores, there, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """[2 BLOCK] int64: the best span of each anti-diagonal x + y, as a number to be compared; 0 without a score > 0.

    The number is (bits of the score, 8 bits by which the first anti-diagonal comes first, 8 bits of the first token).
    """
    line, step = tl.arange(0, 2 * BLOCK), tl.arange(0, CHUNK)[:, None]
    best = tl.zeros([CHUNK, 2 * BLOCK], tl.float32)
    best_row = tl.zeros([CHUNK, 2 * BLOCK], tl.int32)
    for begin in range(0, BLOCK, CHUNK):
        row = begin + step
        column = line[None, :] - row
        valid = (column >= 0) & (column <= row) & (row < there)
        score = tl.load(scores + row * BLOCK + column, mask=valid, other=0.0)
        better = score > best  # of equals the first row, which is the shortest span
        best, best_row = tl.where(better, score, best), tl.where(better, row, best_row)
    bits = best.to(tl.int32, bitcast=True).to(tl.int64)
    packed = tl.where(best > 0.0, bits << 8 | (BLOCK - 1 - best_row).to(tl.int64), 0)
    top = tl.max(packed, 0)
    first = line - (BLOCK - 1 - (top & 0xFF).to(tl.int32))
    return tl.where(top > 0, top >> 8 << 16 | (2 * BLOCK - 1 - line).to(tl.int64) << 8 | first.to(tl.int64), 0)


@triton.jit
def _unpack(packed, BLOCK: tl.constexpr):
    """(first token, end token, score) of candidates."""
    first = (packed & 0xFF).to(tl.int32)
    line = 2 * BLOCK - 1 - (packed >> 8 & 0xFF).to(tl.int32)
    return first, line - first + 1, (packed >> 16).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _suppress(
    candidates, there, phi, BLOCK: tl.constexpr, SPANS: tl.constexpr, SPANS_PAD: tl.constexpr, BOXES: tl.constexpr
):
    """(first tokens, end tokens, scores) [SPANS_PAD] of the best spans of which no two overlap by more, their number.

    One span that is the whole tile, where there is no candidate.
    """
    slot = tl.arange(0, SPANS_PAD)
    first = tl.zeros([SPANS_PAD], tl.int32)
    end = tl.where(slot == 0, there, 1)
    score = tl.zeros([SPANS_PAD], tl.float32)
    number = tl.full([], 0, tl.int32)
    own_first, own_end, _ = _unpack(candidates, BLOCK)
    # Anything that has a length, where there is no candidate.
    own_first, own_end = tl.where(candidates > 0, own_first, 0), tl.where(candidates > 0, own_end, 1)
    own_size = own_end - own_first
    if BOXES:
        own_size = own_size * own_size
    for turn in range(SPANS):
        top = tl.max(candidates, 0)
        top_first, top_end, top_score = _unpack(top, BLOCK)
        here = (slot == turn) & (top > 0)
        first, end = tl.where(here, top_first, first), tl.where(here, top_end, end)
        score = tl.where(here, top_score, score)
        number += (top > 0).to(tl.int32)
        size = top_end - top_first
        common = tl.maximum(tl.minimum(own_end, top_end) - tl.maximum(own_first, top_first), 0)
        if BOXES:
            size = size * size
            common = common * common
        union = tl.where(top > 0, own_size + size - common, 1)
        # Rounded to nearest: a threshold of 0.1 is met by one token in ten.
        overlap = tl.div_rn(common.to(tl.float32), union.to(tl.float32))
        candidates = tl.where((overlap <= phi) & (candidates != top), candidates, 0)
    return first, end, score, tl.maximum(number, 1)


@triton.jit
def _pick_kernel(
    bounds, counts, received, out, BLOCK: tl.constexpr, MOST: tl.constexpr, MOST_PAD: tl.constexpr
):  # fmt: skip
    """One span: a token is picked if fewer than `count` tokens come before it, by attention and then by number."""
    span = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    count = tl.minimum(tl.load(counts + span), MOST)
    out += span * MOST
    chosen = tl.full([], 0, tl.int32)
    if count > 0:
        first, end = tl.load(bounds + span * 2), tl.load(bounds + span * 2 + 1)
        token = tl.arange(0, BLOCK)
        inside = (token >= first) & (token < end)
        x = tl.load(received + tl.program_id(1).to(tl.int64) * BLOCK + token, mask=inside, other=0.0)
        x = tl.where(x == x, x, 0.0)
        x = tl.where(inside, x, float("-inf"))
        larger = x[None, :] > x[:, None]
        equal_before = (x[None, :] == x[:, None]) & (token[None, :] < token[:, None])
        before = tl.sum((larger | (equal_before & inside[None, :])).to(tl.int32), 1)
        takes = inside & (before < count)
        place = tl.cumsum(takes.to(tl.int32), 0) - 1
        chosen = tl.sum(takes.to(tl.int32), 0)
        tl.store(out + place, token, mask=takes)
    place = tl.arange(0, MOST_PAD)
    tl.store(out + place, tl.full([MOST_PAD], -1, tl.int32), mask=(place >= chosen) & (place < MOST))
