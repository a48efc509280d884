"""Top-p by threshold search, in Triton.

Masses become integers, in units of 2^-30 of a head's (or group's) sum. Integer sums do not depend on their order, so
the set is exactly minimal for these masses and the same in every run; against the real masses, the error of a set's
mass is below cells * 2^-30 (8e-6 at 8,192 clusters). The search looks for the largest threshold t with mass(>= t) >= p,
on the float bits of the masses: one program holds all clusters of a head in registers, tries three thresholds of each
stage in one joint reduction, and stops when one cluster is left between the bounds. It starts from the true maximum and
from the bound below which the clusters together cannot matter, (1 - p) / cells. What is serial is the reductions: 4 to
9 on normal logits of standard deviation 8 to 0.3, 14 at worst.

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

MAX_CELLS = 32768  # a program holds all of a head's clusters in registers


@dataclass(frozen=True)
class Tuning:
    """What is chosen by measurement.

    Attributes:
        cells_per_thread: clusters of a head in one thread's registers; sets the number of warps.
        chunk: clusters that are compacted at once; a request's count says how many chunks there are.
        compact_warps: of `_compact`.
        joint: one reduction for the eight sums of a step, instead of eight.
        fused: compact in the last search program of a group instead of in a second kernel.
    """

    cells_per_thread: int = 8
    chunk: int = 2048
    compact_warps: int = 8
    joint: bool = True
    fused: bool = False

    def warps(self, cells: int) -> int:
        return max(1, min(32, triton.next_power_of_2(cells) // (32 * self.cells_per_thread)))


TUNING = Tuning()


@triton.jit
def _add8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def _inside(key, low, high):
    return ((key >= low) & (key < high)).to(tl.int32)


@triton.jit
def _mass_from(key, mass, at):
    return tl.where(key >= at, mass, 0)


@triton.jit
def _narrow(low, high, step, need, count, m1, m2, m3):
    """The quarter of [low, high) that holds the threshold, and its width; width 0 where one cluster is left."""
    t1, t2, t3 = tl.minimum(low + step, high), tl.minimum(low + 2 * step, high), tl.minimum(low + 3 * step, high)
    new_high = tl.where(m1 < need, t1, tl.where(m2 < need, t2, tl.where(m3 < need, t3, high)))
    new_low = tl.where(m3 >= need, t3, tl.where(m2 >= need, t2, tl.where(m1 >= need, t1, low)))
    return new_low, new_high, tl.where(count > 1, new_high - new_low, 0)


@triton.jit
def _boundary(key, mass, low, need):
    """The threshold itself, how many of the clusters equal to it are needed, and how many there are."""
    at = tl.min(tl.where(key >= low, key, 0x7FFFFFFF), 0)
    beyond = tl.sum(tl.where(key > at, mass, 0), 0)
    equal = key == at
    unit = tl.maximum(tl.max(tl.where(equal, mass, 0), 0), 1)
    return at, (need - beyond + unit - 1) // unit, tl.sum(equal.to(tl.int32), 0)


@triton.jit
def _weights(logits, base, cell, n):
    """(logits, masses that sum to 1) of one head."""
    x = tl.load(logits + base + cell, mask=cell < n, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    weight = tl.exp(x - tl.where(top == float("-inf"), 0.0, top))
    return x, weight / tl.maximum(tl.sum(weight, 0), 1.0)


@triton.jit
def _compact_row(
    levels, sizes, starts, counts, exact, prefix, shift, approx, first, row, n, width, tiles,
    SEARCHES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
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
        # Tile t of the tokens begins in the cluster that holds token TILE * t: a long cluster begins several.
        tile = (token + TILE - 1) // TILE
        last = token + tokens
        for _ in range(0, (tl.max(tokens, 0) + TILE - 1) // TILE):
            tl.store(first + row * tiles + tile, place, mask=(tile * TILE < last) & (tile < tiles))
            tile += 1
        running += tl.sum(packed, 0)
        filled += tl.sum((size > 0).to(tl.int32), 0)
    one = tl.arange(0, 1)
    tl.store(counts + row * 4 + one, (running & 0xFFFFF).to(tl.int32))
    tl.store(counts + row * 4 + 1 + one, (running >> 40).to(tl.int32))
    tl.store(counts + row * 4 + 2 + one, ((running >> 20) & 0xFFFFF).to(tl.int32))
    tl.store(counts + row * 4 + 3 + one, filled)


@triton.jit
def _search(
    logits, sizes, starts, cells, p, levels, arrived, counts, exact, prefix, shift, approx, first,
    kv_heads, width, tiles,
    GROUP: tl.constexpr, SEARCHES: tl.constexpr, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    TILE: tl.constexpr, JOINT: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)  # row: a request's key-value head
    request = row // kv_heads
    n = tl.load(cells + request)
    cell = tl.arange(0, BLOCK)
    if SEARCHES == 1:  # the mean over the group, which is the head itself for a group of one
        x, share = _weights(logits, row * GROUP * width, cell, n)
        for other in tl.static_range(1, GROUP):
            _, weight = _weights(logits, (row * GROUP + other) * width, cell, n)
            share += weight
        share = share / GROUP
    else:
        x, share = _weights(logits, (row * GROUP + head) * width, cell, n)
    present = x > float("-inf")
    p1 = tl.load(p + request * 2)
    p2 = tl.load(p + request * 2 + 1)
    if BY_COUNT:
        mass = present.to(tl.int32)
        key = tl.where(present, share.to(tl.int32, bitcast=True) + 1, 0)
        total = tl.sum(mass, 0)
        need1 = tl.minimum(tl.maximum(p1, 0.0).to(tl.int32), total)
        need2 = tl.minimum(tl.maximum(p2, 0.0).to(tl.int32), total)
        low1 = 1
        low2 = 1
    else:
        # Whole numbers of at most 24 significant bits: a float32 holds each exactly, and its bits are ordered as it is.
        mass = (share * 1073741824.0).to(tl.int32)
        key = mass.to(tl.float32).to(tl.int32, bitcast=True)
        total = tl.sum(mass, 0)
        need1 = tl.minimum(tl.maximum(tl.ceil(p1.to(tl.float64) * total), 0.0).to(tl.int32), total)
        need2 = tl.minimum(tl.maximum(tl.ceil(p2.to(tl.float64) * total), 0.0).to(tl.int32), total)
        # n clusters below slack / n weigh less than what may be left out; rounded down to be safe.
        slack = 0.999999 / tl.maximum(n, 1).to(tl.float32)
        low1 = tl.maximum((total - need1).to(tl.float32) * slack, 1.0).to(tl.int32, bitcast=True)
        low2 = tl.maximum((total - need2).to(tl.float32) * slack, 1.0).to(tl.int32, bitcast=True)
    high1 = tl.max(key, 0) + 1
    high2 = high1
    low1 = tl.minimum(low1, high1 - 1)
    low2 = tl.minimum(low2, high2 - 1)
    # Always: mass(>= low) >= need > mass(>= high).
    open1 = tl.where(need1 > 0, high1 - low1, 0)
    open2 = tl.where(need2 > 0, high2 - low2, 0)
    while tl.maximum(open1, open2) > 1:
        step1 = (high1 - low1 + 3) // 4
        step2 = (high2 - low2 + 3) // 4
        a1 = _mass_from(key, mass, tl.minimum(low1 + step1, high1))
        a2 = _mass_from(key, mass, tl.minimum(low1 + 2 * step1, high1))
        a3 = _mass_from(key, mass, tl.minimum(low1 + 3 * step1, high1))
        b1 = _mass_from(key, mass, tl.minimum(low2 + step2, high2))
        b2 = _mass_from(key, mass, tl.minimum(low2 + 2 * step2, high2))
        b3 = _mass_from(key, mass, tl.minimum(low2 + 3 * step2, high2))
        a0, b0 = _inside(key, low1, high1), _inside(key, low2, high2)
        if JOINT:
            s0, s1, s2, s3, t0, t1, t2, t3 = tl.reduce((a0, a1, a2, a3, b0, b1, b2, b3), 0, _add8)
        else:
            s0, s1, s2, s3 = tl.sum(a0, 0), tl.sum(a1, 0), tl.sum(a2, 0), tl.sum(a3, 0)
            t0, t1, t2, t3 = tl.sum(b0, 0), tl.sum(b1, 0), tl.sum(b2, 0), tl.sum(b3, 0)
        low1, high1, open1 = _narrow(low1, high1, step1, need1, s0, s1, s2, s3)
        low2, high2, open2 = _narrow(low2, high2, step2, need2, t0, t1, t2, t3)
        open1 = tl.where(need1 > 0, open1, 0)
        open2 = tl.where(need2 > 0, open2, 0)
    at1, wanted1, equal1 = _boundary(key, mass, low1, need1)
    at2, wanted2, equal2 = _boundary(key, mass, low2, need2)
    rank1 = tl.zeros([BLOCK], tl.int32)
    rank2 = tl.zeros([BLOCK], tl.int32)
    if (wanted1 < equal1) | (wanted2 < equal2):  # rare: of equal clusters, only the first are taken
        packed = tl.cumsum((key == at1).to(tl.int64) + ((key == at2).to(tl.int64) << 32), 0)
        rank1 = (packed & 0xFFFFFFFF).to(tl.int32)
        rank2 = (packed >> 32).to(tl.int32)
    taken1 = (need1 > 0) & ((key > at1) | ((key == at1) & (rank1 <= wanted1)))
    taken2 = (need2 > 0) & ((key > at2) | ((key == at2) & (rank2 <= wanted2)))
    if not BY_COUNT:  # p = 1 is everything, what weighs less than a unit included
        taken1 = tl.where(p1 >= 1.0, True, taken1)
        taken2 = tl.where(p2 >= 1.0, True, taken2)
    level = (taken1 & present).to(tl.int8) + (taken2 & present).to(tl.int8) * 2
    tl.store(levels + (row * SEARCHES + head) * width + cell, level, mask=cell < n)
    if FUSED:
        tl.debug_barrier()  # all of this program's levels, before its arrival is told
        if tl.atomic_add(arrived + row, 1, sem="acq_rel") == SEARCHES - 1:
            tl.debug_barrier()
            tl.store(arrived + row, 0)  # for the next launch
            _compact_row(
                levels, sizes, starts, counts, exact, prefix, shift, approx, first, row, n, width, tiles,
                SEARCHES, CHUNK, TILE,
            )  # fmt: skip


@triton.jit
def _compact(
    levels, sizes, starts, cells, counts, exact, prefix, shift, approx, first, kv_heads, width, tiles,
    SEARCHES: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.load(cells + row // kv_heads)
    _compact_row(
        levels, sizes, starts, counts, exact, prefix, shift, approx, first, row, n, width, tiles, SEARCHES, BLOCK, TILE
    )


@dataclass(frozen=True)
class Workspace:
    """Buffers that `select` needs beside its output; allocate once, before a CUDA graph is captured.

    Attributes:
        levels: [batch, kv_heads, group, cells] int8.
        arrived: [batch, kv_heads] int32, zero between launches.
    """

    levels: torch.Tensor
    arrived: torch.Tensor

    @staticmethod
    def empty(batch: int, kv_heads: int, group: int, cells: int, device: torch.device | str) -> Workspace:
        levels = torch.empty(batch, kv_heads, group, cells, dtype=torch.int8, device=device)
        return Workspace(levels, torch.zeros(batch, kv_heads, dtype=torch.int32, device=device))


def select(
    logits: torch.Tensor,
    sizes: torch.Tensor,
    starts: torch.Tensor,
    cells: torch.Tensor,
    p: torch.Tensor,
    *,
    tokens: int,
    group: str = "union",
    by_count: bool = False,
    tile: int = 64,
    out: Selection | None = None,
    workspace: Workspace | None = None,
    tuning: Tuning = TUNING,
) -> Selection:
    """`reference.select` on the device: fixed grids, counts and p read from tensors, no synchronisation.

    Args:
        logits: as in the reference, any floating dtype, contiguous; searched in float32.
        sizes, starts, cells: as in the reference, contiguous int32.
        p: [batch, 2] float32.
        tokens, group, by_count, tile: as in the reference. A request must not have more clustered tokens than `tokens`.
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
    out = out or Selection.empty(batch, kv_heads, width, tokens, logits.device, tile)
    workspace = workspace or Workspace.empty(batch, kv_heads, heads, width, logits.device)
    searches = 1 if group == "mean" else heads
    block, warps = triton.next_power_of_2(width), tuning.warps(width)
    chunk = min(block, triton.next_power_of_2(tuning.chunk))
    tiles = out.first.shape[-1]
    lists = (out.counts, out.exact, out.prefix, out.shift, out.approx, out.first)
    _search[(searches, batch * kv_heads)](
        logits, sizes, starts, cells, p, workspace.levels, workspace.arrived, *lists, kv_heads, width, tiles,
        GROUP=heads, SEARCHES=searches, BY_COUNT=by_count, BLOCK=block, CHUNK=chunk, TILE=out.tile,
        JOINT=tuning.joint, FUSED=tuning.fused, num_warps=warps,
    )  # fmt: skip
    if not tuning.fused:
        _compact[(batch * kv_heads,)](
            workspace.levels, sizes, starts, cells, *lists, kv_heads, width, tiles,
            SEARCHES=searches, BLOCK=chunk, TILE=out.tile, num_warps=tuning.compact_warps,
        )  # fmt: skip
    return out
