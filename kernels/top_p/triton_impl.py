"""Top-p by threshold search, in Triton.

Masses become integers, in units of 2^-30 of a head's (or group's) sum. Integer sums do not depend on their order, so
the set is exactly minimal for these masses and the same in every run; against the real masses, the error of a set's
mass is below cells * 2^-30 (8e-6 at 8,192 clusters). The search looks for the largest threshold t with mass(>= t) >= p,
on the float bits of the masses, so that thresholds lie at equal ratios: a program goes over a head's masses again and
again, tries three thresholds of each stage in one joint reduction, and stops when one cluster is left between the
bounds. It starts from the true maximum and from the bound below which the clusters together cannot matter,
(1 - p) / cells: 4 to 9 rounds on normal logits of standard deviation 8 to 0.3, 14 at worst. The masses lie in the
first-level cache, not in registers: a round costs what a head's clusters are, whatever the buffers have room for, and
several heads fit on a multiprocessor.

Two kernels: `_search` (a program for each head, or for each group with `mean`) writes two bits a cluster, `_compact` (a
program for each group) joins the heads' bits and writes the lists with one scan of packed counts. With
`Tuning.fused` the last search program of a group compacts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_ext.kernels.top_p.selection import Selection, check

MAX_CELLS = (1 << 20) - 1  # lists are scanned with 20 bits for a place


@dataclass(frozen=True)
class Tuning:
    """What is chosen by measurement.

    Attributes:
        chunk: clusters of a head that a search program takes at once.
        warps: of `_search`.
        compact_chunk: clusters that are compacted at once.
        compact_warps: of `_compact`.
        joint: one reduction for the eight sums of a round, instead of eight.
        fused: compact in the last search program of a group instead of in a second kernel.
    """

    chunk: int = 2048
    warps: int = 8
    compact_chunk: int = 2048
    compact_warps: int = 8
    joint: bool = True
    fused: bool = False


TUNING = Tuning()


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
def _narrow(low, high, step, need, beyond, count, m1, m2, m3):
    """The quarter of [low, high) that holds the threshold, its width (0 where one cluster is left), mass(>= high)."""
    t1, t2, t3 = tl.minimum(low + step, high), tl.minimum(low + 2 * step, high), tl.minimum(low + 3 * step, high)
    new_high = tl.where(m1 < need, t1, tl.where(m2 < need, t2, tl.where(m3 < need, t3, high)))
    beyond = tl.where(m1 < need, m1, tl.where(m2 < need, m2, tl.where(m3 < need, m3, beyond)))
    new_low = tl.where(m3 >= need, t3, tl.where(m2 >= need, t2, tl.where(m1 >= need, t1, low)))
    return new_low, new_high, tl.where((count > 1) & (need > 0), new_high - new_low, 0), beyond


@triton.jit
def _compact_row(
    levels, sizes, starts, counts, exact, prefix, shift, approx, row, n, width,
    SEARCHES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Three running sums in one number, and so in one scan: 20 bits, 20 bits, 24 bits.
    running = tl.zeros([1], tl.int64)
    filled = tl.zeros([1], tl.int32)
    out = row * width
    for begin in range(0, n, BLOCK):
        cell = begin + tl.arange(0, BLOCK)
        valid = cell < n
        level = tl.zeros([BLOCK], tl.int32)
        for head in tl.static_range(SEARCHES):
            at = levels + (row * SEARCHES + head) * width + cell
            # Written by other programs of the same launch when fused: past the first-level cache.
            level = level | tl.load(at, mask=valid, other=0, cache_modifier=".cg").to(tl.int32)
        size = tl.load(sizes + out + cell, mask=valid, other=0)
        start = tl.load(starts + out + cell, mask=valid, other=0)
        # Of a cut cluster the tokens that are there are exact; having no mass, it has no level.
        is_exact = (((level & 2) != 0) | (size < 0)).to(tl.int32)
        size = tl.abs(size)
        is_approx = (level == 1).to(tl.int32)
        tokens = size * is_exact
        packed = is_exact.to(tl.int64) + (is_approx.to(tl.int64) << 20) + (tokens.to(tl.int64) << 40)
        before = running + tl.cumsum(packed, 0) - packed
        place = (before & 0xFFFFF).to(tl.int32)
        token = (before >> 40).to(tl.int32)
        tl.store(exact + out + place, cell, mask=is_exact != 0)
        tl.store(prefix + out + place, token, mask=is_exact != 0)
        tl.store(shift + out + place, start - token, mask=is_exact != 0)
        tl.store(approx + out + ((before >> 20) & 0xFFFFF).to(tl.int32), cell, mask=is_approx != 0)
        running += tl.sum(packed, 0)
        filled += tl.sum((size > 0).to(tl.int32), 0)
    one = tl.arange(0, 1)
    tl.store(counts + row * 4 + one, (running & 0xFFFFF).to(tl.int32))
    tl.store(counts + row * 4 + 1 + one, (running >> 40).to(tl.int32))
    tl.store(counts + row * 4 + 2 + one, ((running >> 20) & 0xFFFFF).to(tl.int32))
    tl.store(counts + row * 4 + 3 + one, filled)


@triton.jit
def _search(
    logits, sizes, starts, cells, p, keys, levels, arrived, counts, exact, prefix, shift, approx,
    kv_heads, width,
    GROUP: tl.constexpr, SEARCHES: tl.constexpr, BY_COUNT: tl.constexpr, CHUNK: tl.constexpr, LISTED: tl.constexpr,
    JOINT: tl.constexpr, FUSED: tl.constexpr,
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
        need1 = tl.minimum(tl.maximum(p1, 0.0).to(tl.int32), total)
        need2 = tl.minimum(tl.maximum(p2, 0.0).to(tl.int32), total)
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
    while tl.maximum(open1, open2) > 1:
        step1 = (high1 - low1 + 3) // 4
        step2 = (high2 - low2 + 3) // 4
        u0, u4 = _least(low1, BY_COUNT), _least(high1, BY_COUNT)
        v0, v4 = _least(low2, BY_COUNT), _least(high2, BY_COUNT)
        u1 = _least(tl.minimum(low1 + step1, high1), BY_COUNT)
        u2 = _least(tl.minimum(low1 + 2 * step1, high1), BY_COUNT)
        u3 = _least(tl.minimum(low1 + 3 * step1, high1), BY_COUNT)
        v1 = _least(tl.minimum(low2 + step2, high2), BY_COUNT)
        v2 = _least(tl.minimum(low2 + 2 * step2, high2), BY_COUNT)
        v3 = _least(tl.minimum(low2 + 3 * step2, high2), BY_COUNT)
        a0 = tl.zeros([CHUNK], tl.int32)
        a1, a2, a3, b0, b1, b2, b3 = a0, a0, a0, a0, a0, a0, a0
        for begin in range(0, n, CHUNK):
            key = tl.load(keys + base + begin + c, mask=begin + c < n, other=-1)
            a0 += ((key >= u0) & (key < u4)).to(tl.int32)
            b0 += ((key >= v0) & (key < v4)).to(tl.int32)
            a1 += _value_from(key, u1, BY_COUNT)
            a2 += _value_from(key, u2, BY_COUNT)
            a3 += _value_from(key, u3, BY_COUNT)
            b1 += _value_from(key, v1, BY_COUNT)
            b2 += _value_from(key, v2, BY_COUNT)
            b3 += _value_from(key, v3, BY_COUNT)
        if JOINT:
            s0, s1, s2, s3, t0, t1, t2, t3 = tl.reduce((a0, a1, a2, a3, b0, b1, b2, b3), 0, _add8)
        else:
            s0, s1, s2, s3 = tl.sum(a0, 0), tl.sum(a1, 0), tl.sum(a2, 0), tl.sum(a3, 0)
            t0, t1, t2, t3 = tl.sum(b0, 0), tl.sum(b1, 0), tl.sum(b2, 0), tl.sum(b3, 0)
        low1, high1, open1, beyond1 = _narrow(low1, high1, step1, need1, beyond1, s0, s1, s2, s3)
        low2, high2, open2, beyond2 = _narrow(low2, high2, step2, need2, beyond2, t0, t1, t2, t3)
    # All keys that are left between the bounds are equal: how many there are, and how many of them are needed.
    u0, u4 = _least(low1, BY_COUNT), _least(high1, BY_COUNT)
    v0, v4 = _least(low2, BY_COUNT), _least(high2, BY_COUNT)
    a0 = tl.zeros([CHUNK], tl.int32)
    a1, b0, b1 = a0, a0, a0
    for begin in range(0, n, CHUNK):
        key = tl.load(keys + base + begin + c, mask=begin + c < n, other=-1)
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
        key = tl.load(keys + base + cell, mask=cell < n, other=-1)
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
    if FUSED:
        tl.debug_barrier()  # all of this program's levels, before its arrival is told
        if tl.atomic_add(arrived + row, 1, sem="acq_rel") == SEARCHES - 1:
            tl.debug_barrier()
            tl.store(arrived + row, 0)  # for the next launch
            _compact_row(levels, sizes, starts, counts, exact, prefix, shift, approx, row, n, width, SEARCHES, LISTED)


@triton.jit
def _compact(
    levels, sizes, starts, cells, counts, exact, prefix, shift, approx, kv_heads, width,
    SEARCHES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.load(cells + row // kv_heads)
    _compact_row(levels, sizes, starts, counts, exact, prefix, shift, approx, row, n, width, SEARCHES, BLOCK)


@dataclass(frozen=True)
class Workspace:
    """Buffers that `select` needs beside its output; allocate once, before a CUDA graph is captured.

    Attributes:
        keys: [batch, kv_heads, group, cells] int32.
        levels: [batch, kv_heads, group, cells] int8.
        arrived: [batch, kv_heads] int32, zero between launches.
    """

    keys: torch.Tensor
    levels: torch.Tensor
    arrived: torch.Tensor

    @staticmethod
    def empty(batch: int, kv_heads: int, group: int, cells: int, device: torch.device | str) -> Workspace:
        keys = torch.empty(batch, kv_heads, group, cells, dtype=torch.int32, device=device)
        arrived = torch.zeros(batch, kv_heads, dtype=torch.int32, device=device)
        return Workspace(keys, torch.empty_like(keys, dtype=torch.int8), arrived)


def select(
    logits: torch.Tensor,
    sizes: torch.Tensor,
    starts: torch.Tensor,
    cells: torch.Tensor,
    p: torch.Tensor,
    *,
    group: str = "union",
    by_count: bool = False,
    out: Selection | None = None,
    workspace: Workspace | None = None,
    tuning: Tuning = TUNING,
) -> Selection:
    """`reference.select` on the device: fixed grids, counts and p read from tensors, no synchronisation.

    Args:
        logits: as in the reference, any floating dtype, contiguous; searched in float32.
        sizes, starts, cells: as in the reference, contiguous int32.
        p: [batch, 2] float32.
        group, by_count: as in the reference.
        out, workspace: buffers to use; needed under CUDA graphs, made otherwise.
        tuning: see `Tuning`.

    Returns:
        The selection (`out` where given).

    Raises:
        ValueError: as in the reference; more than MAX_CELLS clusters; tensors that are not contiguous.
    """
    check(logits, sizes, starts, cells, p, group)
    batch, kv_heads, heads, width = logits.shape
    if width > MAX_CELLS:
        raise ValueError(f"{width} clusters of a request: expected at most {MAX_CELLS}; use larger clusters")
    for name, tensor, dtype in (
        ("logits", logits, logits.dtype),
        ("sizes", sizes, torch.int32),
        ("starts", starts, torch.int32),
        ("cells", cells, torch.int32),
        ("p", p, torch.float32),
    ):
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype}, strides {tensor.stride()}: expected contiguous {dtype}")
    out = out or Selection.empty(batch, kv_heads, width, logits.device)
    workspace = workspace or Workspace.empty(batch, kv_heads, heads, width, logits.device)
    searches = 1 if group == "mean" else heads
    block = triton.next_power_of_2(width)
    listed = min(block, tuning.compact_chunk)
    lists = (out.counts, out.exact, out.prefix, out.shift, out.approx)
    _search[(searches, batch * kv_heads)](
        logits, sizes, starts, cells, p, workspace.keys, workspace.levels, workspace.arrived, *lists, kv_heads, width,
        GROUP=heads, SEARCHES=searches, BY_COUNT=by_count, CHUNK=min(block, tuning.chunk), LISTED=listed,
        JOINT=tuning.joint, FUSED=tuning.fused, num_warps=tuning.warps,
    )  # fmt: skip
    if not tuning.fused:
        _compact[(batch * kv_heads,)](
            workspace.levels, sizes, starts, cells, *lists, kv_heads, width,
            SEARCHES=searches, BLOCK=listed, num_warps=tuning.compact_warps,
        )  # fmt: skip
    return out
