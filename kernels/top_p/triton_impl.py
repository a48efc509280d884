"""Top-p by threshold search, in Triton.

Masses become integers, in units of 2^-30 of a head's (or group's) sum. Integer sums do not depend on their order, so
the set is exactly minimal for these masses and the same in every run; against the real masses, the error of a set's
mass is below cells * 2^-30 (8e-6 at 8,192 clusters). The search looks for the largest threshold t with mass(>= t) >= p,
on the float bits of the masses, so that thresholds lie at equal ratios: a round tries three thresholds of each stage
over the clusters, and the search ends when one cluster is left between the bounds. It starts from the true maximum and
from the bound below which the clusters together cannot matter, (1 - p) / cells: 8 to 9 rounds on normal logits of
standard deviation 3 to 1.4.

A round costs integer operations, and few clusters stay between the bounds: after `TopPTuning.rounds` rounds those that
do are listed, and the other rounds go over the list. Masses lie in the first-level cache, not in registers, so that a
round costs what a head's clusters are, whatever the buffers have room for.

Two kernels: `_search` (a program for each head, or for each group with `mean`) writes two bits a cluster; `_compact`
(programs for each run of clusters of a group) joins the heads' bits and writes the lists with one scan of packed
counts. One kernel whose last program of a group compacts was slower on an H200.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ext.kernels.top_p.checks import check, check_buffers, check_memory
from sglang_ext.kernels.top_p.types import (
    TUNING,
    UNION,
    WITHOUT_GAPS,
    Numbering,
    SearchedClusters,
    Selection,
    SetRule,
    TopPTuning,
    TopPWorkspace,
)

MAX_CELLS = (1 << 20) - 1  # lists are scanned with 20 bits for a place


@triton.jit
def _add6(a1, a2, a3, a5, a6, a7, b1, b2, b3, b5, b6, b7):
    return a1 + b1, a2 + b2, a3 + b3, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def _add8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def _softmax_of(logits, base, n, CHUNK: tl.constexpr):
    """(maximum, sum of exponentials) of one head."""
    c = tl.arange(0, CHUNK)
    tops = tl.full([CHUNK], float("-inf"), tl.float32)
    for begin in range(0, n, CHUNK):
        x = tl.load(logits + base + begin + c, mask=begin + c < n, other=float("-inf")).to(tl.float32)
        tops = tl.maximum(tops, x)
    top = tl.max(tops, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    sums = tl.zeros([CHUNK], tl.float32)
    for begin in range(0, n, CHUNK):
        x = tl.load(logits + base + begin + c, mask=begin + c < n, other=float("-inf")).to(tl.float32)
        sums += tl.exp(x - top)
    return top, tl.maximum(tl.sum(sums, 0), 1.0)


@triton.jit
def _least(bits, BY_COUNT: tl.constexpr):
    """The smallest key that a threshold, given in the order of the search, lets in."""
    if BY_COUNT:
        return bits
    else:
        return tl.ceil(bits.to(tl.float32, bitcast=True)).to(tl.int32)


@triton.jit
def _value_from(key, at, BY_COUNT: tl.constexpr):
    """What clusters from a key on count for: their mass, or 1."""
    if BY_COUNT:
        return (key >= at).to(tl.int32)
    else:
        return tl.where(key >= at, key, 0)


@triton.jit
def _sums(
    keys, n, low1, high1, low2, high2,
    CHUNK: tl.constexpr, BY_COUNT: tl.constexpr, COUNTED: tl.constexpr, JOINT: tl.constexpr,
):  # fmt: skip
    """Of both stages: clusters between the bounds (counted, or 2), and the mass from each of three thresholds on."""
    step1, step2 = (high1 - low1 + 3) // 4, (high2 - low2 + 3) // 4
    u0, u4 = _least(low1, BY_COUNT), _least(high1, BY_COUNT)
    v0, v4 = _least(low2, BY_COUNT), _least(high2, BY_COUNT)
    u1 = _least(tl.minimum(low1 + step1, high1), BY_COUNT)
    u2 = _least(tl.minimum(low1 + 2 * step1, high1), BY_COUNT)
    u3 = _least(tl.minimum(low1 + 3 * step1, high1), BY_COUNT)
    v1 = _least(tl.minimum(low2 + step2, high2), BY_COUNT)
    v2 = _least(tl.minimum(low2 + 2 * step2, high2), BY_COUNT)
    v3 = _least(tl.minimum(low2 + 3 * step2, high2), BY_COUNT)
    c = tl.arange(0, CHUNK)
    a0 = tl.zeros([CHUNK], tl.int32)
    a1, a2, a3, b0, b1, b2, b3 = a0, a0, a0, a0, a0, a0, a0
    for begin in range(0, n, CHUNK):
        key = tl.load(keys + begin + c, mask=begin + c < n, other=-1)
        if COUNTED:
            a0 += ((key >= u0) & (key < u4)).to(tl.int32)
            b0 += ((key >= v0) & (key < v4)).to(tl.int32)
        a1 += _value_from(key, u1, BY_COUNT)
        a2 += _value_from(key, u2, BY_COUNT)
        a3 += _value_from(key, u3, BY_COUNT)
        b1 += _value_from(key, v1, BY_COUNT)
        b2 += _value_from(key, v2, BY_COUNT)
        b3 += _value_from(key, v3, BY_COUNT)
    s0 = tl.full([], 2, tl.int32)
    t0 = s0
    if JOINT:
        if COUNTED:
            s0, s1, s2, s3, t0, t1, t2, t3 = tl.reduce((a0, a1, a2, a3, b0, b1, b2, b3), 0, _add8)
        else:
            s1, s2, s3, t1, t2, t3 = tl.reduce((a1, a2, a3, b1, b2, b3), 0, _add6)
    else:
        s1, s2, s3, t1, t2, t3 = (
            tl.sum(a1, 0),
            tl.sum(a2, 0),
            tl.sum(a3, 0),
            tl.sum(b1, 0),
            tl.sum(b2, 0),
            tl.sum(b3, 0),
        )
        if COUNTED:
            s0, t0 = tl.sum(a0, 0), tl.sum(b0, 0)
    return s0, s1, s2, s3, t0, t1, t2, t3


@triton.jit
def _narrow(low, high, need, beyond, count, m1, m2, m3):
    """The quarter of [low, high) that holds the threshold, its width (0 where one cluster is left), mass(>= high)."""
    step = (high - low + 3) // 4
    t1, t2, t3 = tl.minimum(low + step, high), tl.minimum(low + 2 * step, high), tl.minimum(low + 3 * step, high)
    new_high = tl.where(m1 < need, t1, tl.where(m2 < need, t2, tl.where(m3 < need, t3, high)))
    beyond = tl.where(m1 < need, m1, tl.where(m2 < need, m2, tl.where(m3 < need, m3, beyond)))
    new_low = tl.where(m3 >= need, t3, tl.where(m2 >= need, t2, tl.where(m1 >= need, t1, low)))
    return new_low, new_high, tl.where((count > 1) & (need > 0), new_high - new_low, 0), beyond


@triton.jit
def _search(
    logits, cells, p, keys, few, levels, kv_heads, width,
    GROUP: tl.constexpr, SEARCHES: tl.constexpr, BY_COUNT: tl.constexpr, CHUNK: tl.constexpr, ROUNDS: tl.constexpr,
    JOINT: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)  # row: a request's key-value head
    request = row // kv_heads
    n = tl.load(cells + request)
    c = tl.arange(0, CHUNK)
    base = (row * SEARCHES + head) * width
    # Keys: masses, whole numbers of at most 24 significant bits, or the order of the masses where clusters are counted;
    # -1 where there is none.
    HEADS: tl.constexpr = GROUP // SEARCHES  # the mean over the group, or one head
    most = tl.full([CHUNK], -1, tl.int32)
    sums = tl.zeros([CHUNK], tl.int32)
    for other in range(HEADS):
        of_head = (row * GROUP + head + other) * width
        top, weight = _softmax_of(logits, of_head, n, CHUNK)
        for begin in range(0, n, CHUNK):
            cell = begin + c
            x = tl.load(logits + of_head + cell, mask=cell < n, other=float("-inf")).to(tl.float32)
            share = tl.exp(x - top) / weight
            if HEADS > 1:
                known = tl.load(keys + base + cell, mask=(cell < n) & (other > 0), other=0)
                share += known.to(tl.float32, bitcast=True)
            key = share.to(tl.int32, bitcast=True)
            if other == HEADS - 1:
                if HEADS > 1:
                    share = share / HEADS
                key = share.to(tl.int32, bitcast=True) + 1 if BY_COUNT else (share * 1073741824.0).to(tl.int32)
                key = tl.where(x > float("-inf"), key, -1)
                most = tl.maximum(most, key)
                sums += _value_from(key, 0, BY_COUNT)
            tl.store(keys + base + cell, key, mask=cell < n)
        tl.debug_barrier()
    total = tl.sum(sums, 0)
    p1 = tl.load(p + request * 2)
    p2 = tl.load(p + request * 2 + 1)
    if BY_COUNT:
        need1 = tl.minimum(tl.ceil(tl.maximum(p1, 0.0)).to(tl.int32), total)
        need2 = tl.minimum(tl.ceil(tl.maximum(p2, 0.0)).to(tl.int32), total)
        low1 = tl.full([], 1, tl.int32)
        low2 = low1
        high1 = tl.max(most, 0) + 1
    else:
        # A float32 holds each mass exactly, and its bits are ordered as it is.
        need1 = tl.minimum(tl.maximum(tl.ceil(p1.to(tl.float64) * total), 0.0).to(tl.int32), total)
        need2 = tl.minimum(tl.maximum(tl.ceil(p2.to(tl.float64) * total), 0.0).to(tl.int32), total)
        # n clusters below slack / n weigh less than what may be left out; rounded down to be safe.
        slack = 0.999999 / tl.maximum(n, 1).to(tl.float32)
        low1 = tl.maximum((total - need1).to(tl.float32) * slack, 1.0).to(tl.int32, bitcast=True)
        low2 = tl.maximum((total - need2).to(tl.float32) * slack, 1.0).to(tl.int32, bitcast=True)
        high1 = tl.maximum(tl.max(most, 0), 0).to(tl.float32).to(tl.int32, bitcast=True) + 1
    high2 = high1
    low1 = tl.minimum(low1, high1 - 1)
    low2 = tl.minimum(low2, high2 - 1)
    # Always: mass(>= low) >= need > mass(>= high) = beyond.
    beyond1 = tl.full([], 0, tl.int32)
    beyond2 = beyond1
    open1 = tl.where(need1 > 0, high1 - low1, 0)
    open2 = tl.where(need2 > 0, high2 - low2, 0)
    keys += base
    few += base
    for _ in range(ROUNDS):
        s0, s1, s2, s3, t0, t1, t2, t3 = _sums(keys, n, low1, high1, low2, high2, CHUNK, BY_COUNT, False, JOINT)
        low1, high1, open1, beyond1 = _narrow(low1, high1, need1, beyond1, s0, s1, s2, s3)
        low2, high2, open2, beyond2 = _narrow(low2, high2, need2, beyond2, t0, t1, t2, t3)
    u0, u4 = _least(low1, BY_COUNT), _least(high1, BY_COUNT)
    v0, v4 = _least(low2, BY_COUNT), _least(high2, BY_COUNT)
    found = tl.full([], 0, tl.int32)
    a0 = tl.zeros([CHUNK], tl.int32)
    b0 = a0
    for begin in range(0, n, CHUNK):
        key = tl.load(keys + begin + c, mask=begin + c < n, other=-1)
        between = ((open1 > 1) & (key >= u0) & (key < u4)) | ((open2 > 1) & (key >= v0) & (key < v4))
        listed = between.to(tl.int32)
        tl.store(few + found + tl.cumsum(listed, 0) - listed, key, mask=between)
        a0 += tl.where(between, _value_from(key, u4, BY_COUNT), 0)
        b0 += tl.where(between, _value_from(key, v4, BY_COUNT), 0)
        found += tl.sum(listed, 0)
    tl.debug_barrier()
    # Of the mass from a threshold on, what is not in the list.
    rest1, rest2 = beyond1 - tl.sum(a0, 0), beyond2 - tl.sum(b0, 0)
    while tl.maximum(open1, open2) > 1:
        s0, s1, s2, s3, t0, t1, t2, t3 = _sums(few, found, low1, high1, low2, high2, CHUNK, BY_COUNT, True, JOINT)
        low1, high1, open1, beyond1 = _narrow(low1, high1, need1, beyond1, s0, rest1 + s1, rest1 + s2, rest1 + s3)
        low2, high2, open2, beyond2 = _narrow(low2, high2, need2, beyond2, t0, rest2 + t1, rest2 + t2, rest2 + t3)
    # All keys that are left between the bounds are equal: how many there are, and how many of them are needed.
    u0, u4 = _least(low1, BY_COUNT), _least(high1, BY_COUNT)
    v0, v4 = _least(low2, BY_COUNT), _least(high2, BY_COUNT)
    a0 = tl.zeros([CHUNK], tl.int32)
    a1, b0, b1 = a0, a0, a0
    for begin in range(0, n, CHUNK):
        key = tl.load(keys + begin + c, mask=begin + c < n, other=-1)
        left1, left2 = (key >= u0) & (key < u4), (key >= v0) & (key < v4)
        a0 = tl.maximum(a0, tl.where(left1, key, 0))
        b0 = tl.maximum(b0, tl.where(left2, key, 0))
        a1 += left1.to(tl.int32)
        b1 += left2.to(tl.int32)
    at1, at2, equal1, equal2 = tl.max(a0, 0), tl.max(b0, 0), tl.sum(a1, 0), tl.sum(b1, 0)
    unit1, unit2 = tl.maximum(at1, 1), tl.maximum(at2, 1)
    if BY_COUNT:
        unit1 = tl.full([], 1, tl.int32)
        unit2 = unit1
    wanted1 = (need1 - beyond1 + unit1 - 1) // unit1
    wanted2 = (need2 - beyond2 + unit2 - 1) // unit2
    ties = (wanted1 < equal1) | (wanted2 < equal2)  # rare: of equal clusters, only the first are taken
    seen1 = tl.full([], 0, tl.int32)
    seen2 = seen1
    for begin in range(0, n, CHUNK):
        cell = begin + c
        key = tl.load(keys + cell, mask=cell < n, other=-1)
        rank1 = tl.zeros([CHUNK], tl.int32)
        rank2 = tl.zeros([CHUNK], tl.int32)
        if ties:
            packed = tl.cumsum((key == at1).to(tl.int64) + ((key == at2).to(tl.int64) << 32), 0)
            rank1 = seen1 + (packed & 0xFFFFFFFF).to(tl.int32)
            rank2 = seen2 + (packed >> 32).to(tl.int32)
            seen1 += tl.sum((key == at1).to(tl.int32), 0)
            seen2 += tl.sum((key == at2).to(tl.int32), 0)
        taken1 = (need1 > 0) & ((key > at1) | ((key == at1) & (rank1 <= wanted1)))
        taken2 = (need2 > 0) & ((key > at2) | ((key == at2) & (rank2 <= wanted2)))
        if not BY_COUNT:  # p = 1 is everything, what weighs less than a unit included
            taken1 = tl.where(p1 >= 1.0, True, taken1)
            taken2 = tl.where(p2 >= 1.0, True, taken2)
        level = (taken1 & (key >= 0)).to(tl.int8) + (taken2 & (key >= 0)).to(tl.int8) * 2
        tl.store(levels + base + cell, level, mask=cell < n)


@triton.jit
def _packed(levels, sizes, row, cell, n, width, SEARCHES: tl.constexpr):
    """(is exact, is approximated, size) of cells, and the three numbers that are summed up in one: 20, 20, 24 bits."""
    level = tl.zeros_like(cell)
    for head in tl.static_range(SEARCHES):
        level = level | tl.load(levels + (row * SEARCHES + head) * width + cell, mask=cell < n, other=0).to(tl.int32)
    size = tl.load(sizes + row * width + cell, mask=cell < n, other=0)
    # Of a cut cluster the tokens that are there are exact; having no mass, it has no level.
    is_exact = (((level & 2) != 0) | (size < 0)).to(tl.int32)
    is_approx = (level == 1).to(tl.int32)
    tokens = tl.abs(size) * is_exact
    packed = is_exact.to(tl.int64) + (is_approx.to(tl.int64) << 20) + (tokens.to(tl.int64) << 40)
    return is_exact, is_approx, size, packed


@triton.jit
def _aligned(tokens, BLOCK: tl.constexpr, RUN: tl.constexpr, ALIGN: tl.constexpr):
    """(numbers before each cell's tokens, numbers of all), where those of each run begin at a multiple of ALIGN."""
    by_run = tl.reshape(tokens, [BLOCK // RUN, RUN])
    room = (tl.sum(by_run, 1) + ALIGN - 1) // ALIGN * ALIGN
    before = (tl.cumsum(room, 0) - room)[:, None] + tl.cumsum(by_run, 1) - by_run
    return tl.reshape(before, [BLOCK]), tl.sum(room, 0)


@triton.jit
def _compact(
    levels, sizes, starts, cells, counts, exact, prefix, shift, approx, kv_heads, width,
    SEARCHES: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    n = tl.load(cells + row // kv_heads)
    begin = tl.program_id(0) * BLOCK
    last = tl.maximum(tl.cdiv(n, BLOCK) - 1, 0) == tl.program_id(0)
    if (begin < n) | last:
        sums = tl.zeros([BLOCK], tl.int64)
        filled = tl.zeros([BLOCK], tl.int32)
        extent = tl.full([], 0, tl.int32)
        for before in range(0, begin, BLOCK):  # what the programs of the cells before find as well
            is_exact, _, size, packed = _packed(levels, sizes, row, before + tl.arange(0, BLOCK), n, width, SEARCHES)
            sums += packed
            filled += (size != 0).to(tl.int32)
            if ALIGN > 1:
                _, more = _aligned(tl.abs(size) * is_exact, BLOCK, RUN, ALIGN)
                extent += more
        cell = begin + tl.arange(0, BLOCK)
        is_exact, is_approx, size, packed = _packed(levels, sizes, row, cell, n, width, SEARCHES)
        start = tl.load(starts + row * width + cell, mask=cell < n, other=0)
        known = tl.sum(sums, 0)
        at = known + tl.cumsum(packed, 0) - packed
        total = known + tl.sum(packed, 0)
        if ALIGN > 1:
            token, more = _aligned(tl.abs(size) * is_exact, BLOCK, RUN, ALIGN)
            token += extent
            extent += more
        else:
            token = (at >> 40).to(tl.int32)
            extent = (total >> 40).to(tl.int32)
        out = row * width
        place = (at & 0xFFFFF).to(tl.int32)
        tl.store(exact + out + place, cell, mask=is_exact != 0)
        tl.store(prefix + out + place, token, mask=is_exact != 0)
        tl.store(shift + out + place, start - token, mask=is_exact != 0)
        tl.store(approx + out + ((at >> 20) & 0xFFFFF).to(tl.int32), cell, mask=is_approx != 0)
        if last:
            tl.store(counts + row * 5, (total & 0xFFFFF).to(tl.int32))
            tl.store(counts + row * 5 + 1, (total >> 40).to(tl.int32))
            tl.store(counts + row * 5 + 2, ((total >> 20) & 0xFFFFF).to(tl.int32))
            tl.store(counts + row * 5 + 3, tl.sum(filled + (size != 0).to(tl.int32), 0))
            tl.store(counts + row * 5 + 4, extent)


def select(
    logits: torch.Tensor,
    clusters: SearchedClusters,
    p: torch.Tensor,
    *,
    rule: SetRule = UNION,
    numbering: Numbering = WITHOUT_GAPS,
    out: Selection | None = None,
    workspace: TopPWorkspace | None = None,
    tuning: TopPTuning = TUNING,
) -> Selection:
    """`reference.select` on the device: fixed grids, counts and p read from tensors, no synchronisation.

    Args:
        logits: as in the reference, any floating dtype, contiguous; searched in float32.
        clusters: as in the reference, contiguous.
        p: [batch, 2] float32.
        rule, numbering: as in the reference.
        out, workspace: buffers to use; needed under CUDA graphs, made otherwise.
        tuning: see `TopPTuning`.

    Returns:
        The selection (`out` where given).

    Raises:
        ValueError: as in the reference; more than MAX_CELLS clusters; tensors that are not contiguous.
    """
    check(logits, clusters, p, rule)
    batch, kv_heads, heads, width = logits.shape
    if width > MAX_CELLS:
        raise ValueError(f"{width} clusters of a request: expected at most {MAX_CELLS}; use larger clusters")
    check_memory(logits, clusters, p, logits.dtype)
    out = out or Selection.empty(batch, kv_heads, width, logits.device, numbering)
    check_buffers(out, numbering)
    workspace = workspace or TopPWorkspace.empty(batch, kv_heads, heads, width, logits.device)
    searches = 1 if rule.group == "mean" else heads
    _search[(searches, batch * kv_heads)](
        logits, clusters.cells, p, workspace.keys, workspace.few, workspace.levels, kv_heads, width,
        GROUP=heads, SEARCHES=searches, BY_COUNT=rule.by_count, CHUNK=tuning.chunk, ROUNDS=tuning.rounds,
        JOINT=tuning.joint, num_warps=tuning.warps,
    )  # fmt: skip
    listed = max(tuning.compact_chunk, numbering.run)  # whatever the width: each size is code of its own
    _compact[(max(1, triton.cdiv(width, listed)), batch * kv_heads)](
        workspace.levels, clusters.sizes, clusters.starts, clusters.cells, out.counts, out.exact, out.prefix, out.shift,
        out.approx, kv_heads, width, SEARCHES=searches, BLOCK=listed, RUN=numbering.run, ALIGN=numbering.align,
        num_warps=tuning.compact_warps,
    )  # fmt: skip
    return out
