"""Adding a stride to the cascading cache on a GPU: a program a lane and tile of steps, all sub-caches in one pass.

See `reference.py` for the rule and why a whole stride can be added at once. A tile is aligned to the period of the
deepest sub-cache, 2^(cascades - 1) steps, so that every entry meets its challenger inside one tile; tiles touch
disjoint ring indices, and nothing is exchanged between programs. Inside a tile the sub-caches are taken from the
deepest to the newest, each reading what the next newer one is about to evict, with a barrier between reading and
overwriting.

The grid depends on shapes alone and counts are read on the device, so a launch can be part of a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_ext.kernels.cascade_update.state import CascadeState, Rings
from sglang_ext.kernels.limits import MAX_CASCADES


@dataclass(frozen=True)
class CascadeUpdateTuning:
    """What may be tuned: steps a program, warps a program."""

    steps: int = 512
    warps: int = 4


TUNING = CascadeUpdateTuning()


def cascade_update(
    state: CascadeState,
    rows: torch.Tensor,
    seen: torch.Tensor,
    count: torch.Tensor,
    rings: Rings,
    selection: bool = True,
    tuning: CascadeUpdateTuning = TUNING,
) -> None:
    """`stride_update` on the device, without synchronisation: counts out of range cannot be refused here.

    Args, Raises: as `sglang_ext.kernels.cascade_update.stride_update`; also ValueError for more than `MAX_CASCADES`
        sub-caches, or for a tile that is not a power of two.
    """
    state.check(rows, seen, count, rings)
    if rings.cascades > MAX_CASCADES:
        raise ValueError(f"{rings.cascades} cascades: expected at most {MAX_CASCADES}; the last one's period is a tile")
    if tuning.steps < 1 or tuning.steps & (tuning.steps - 1):
        raise ValueError(f"{tuning.steps} steps a program: expected a power of two")
    layers, num_rows, heads, _ = state.cell.shape
    batch = rows.numel()
    lanes = layers * batch * heads
    if lanes == 0:
        return
    run = min(rings.size, rings.stride)  # steps that have no order among them
    tile = max(tuning.steps, 1 << (rings.cascades - 1))
    while tile > 1 << (rings.cascades - 1) and tile // 2 >= run:
        tile //= 2
    shape = {
        "SINKS": rings.sinks,
        "SIZE": rings.size,
        "CASCADES": rings.cascades,
        "STRIDE": rings.stride,
        "RUN": run,
        "TILE": tile,
        "num_warps": tuning.warps,
    }
    args = (state.token, state.cell, state.score, rows, seen, count)
    for start in range(0, rings.stride, run):
        _fill_kernel[(lanes, triton.cdiv(run, tile))](*args, start, batch, heads, num_rows, **shape)
        # One tile more: the first step may lie anywhere in its tile.
        grid = (lanes, triton.cdiv(run + (1 << (rings.cascades - 1)) - 1, tile))
        _cascade_kernel[grid](*args, start, batch, heads, num_rows, SELECTION=selection, **shape)


@triton.jit
def _lane(rows, batch, heads, num_rows, ENTRIES: tl.constexpr):
    """(offset of this program's lane, its request in the batch)."""
    lane = tl.program_id(0)
    head = lane % heads
    request = (lane // heads) % batch
    layer = lane // (heads * batch)
    row = tl.load(rows + request).to(tl.int64)
    return ((layer.to(tl.int64) * num_rows + row) * heads + head) * ENTRIES, request


@triton.jit
def _fill_kernel(
    token,
    cell,
    score,
    rows,
    seen,
    count,
    start,
    batch,
    heads,
    num_rows,
    SINKS: tl.constexpr,
    SIZE: tl.constexpr,
    CASCADES: tl.constexpr,
    STRIDE: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Steps before the window is full: a column of ring indices moves down, one thread a column."""
    offset, request = _lane(rows, batch, heads, num_rows, SINKS + CASCADES * SIZE + STRIDE)
    before = tl.load(seen + request).to(tl.int32)
    end = tl.minimum(before + tl.minimum(tl.load(count + request).to(tl.int32), start + RUN), SINKS + CASCADES * SIZE)
    first = before + start + tl.program_id(1) * TILE
    if first >= end:
        return
    n = first + tl.arange(0, TILE)
    on = n < end
    waiting = offset + SINKS + CASCADES * SIZE + n % STRIDE
    a_token = n
    a_cell = tl.load(cell + waiting, mask=on, other=0)
    a_score = tl.load(score + waiting, mask=on, other=0.0)
    sink = on & (n < SINKS)
    tl.store(token + offset + n, a_token, mask=sink)
    tl.store(cell + offset + n, a_cell, mask=sink)
    tl.store(score + offset + n, a_score, mask=sink)
    step = n - SINKS
    for level in range(CASCADES):
        takes = on & (step >= level * SIZE) & (step >= 0)
        evicts = on & (step >= (level + 1) * SIZE)
        place = offset + SINKS + level * SIZE + (step + SIZE) % SIZE
        b_token = tl.load(token + place, mask=evicts, other=0)
        b_cell = tl.load(cell + place, mask=evicts, other=0)
        b_score = tl.load(score + place, mask=evicts, other=0.0)
        tl.store(token + place, a_token, mask=takes)
        tl.store(cell + place, a_cell, mask=takes)
        tl.store(score + place, a_score, mask=takes)
        a_token, a_cell, a_score = b_token, b_cell, b_score
    tl.store(token + waiting, n + STRIDE, mask=on)
    tl.store(cell + waiting, n + STRIDE, mask=on)
    tl.store(score + waiting, tl.zeros([TILE], tl.float32), mask=on)


@triton.jit
def _place(step, offset, LEVEL: tl.constexpr, SINKS: tl.constexpr, SIZE: tl.constexpr, CASCADES: tl.constexpr):
    """Where the accepting `step` (a multiple of 2^LEVEL) writes in ring LEVEL, and whose oldest token it evicts."""
    filled: tl.constexpr = (CASCADES * SIZE + (1 << LEVEL) - 1) >> LEVEL
    # The step before the first one after the fill gives -1, hence + SIZE.
    return offset + SINKS + LEVEL * SIZE + ((step >> LEVEL) - filled + SIZE) % SIZE


@triton.jit
def _pass_on(
    token,
    cell,
    score,
    offset,
    base,
    begin,
    end,
    LEVEL: tl.constexpr,
    SINKS: tl.constexpr,
    SIZE: tl.constexpr,
    CASCADES: tl.constexpr,
    STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    SELECTION: tl.constexpr,
):
    """What sub-cache LEVEL - 1 evicts in this tile meets sub-cache LEVEL."""
    HALF: tl.constexpr = 1 << (LEVEL - 1)
    # This sub-cache accepts in step a, and the token that comes half a period later, in step c, challenges that one.
    a = base + tl.arange(0, TILE // (2 * HALF)) * (2 * HALF)
    c = a + HALF
    a_on = (a >= begin) & (a < end)
    c_on = (c >= begin) & (c < end)
    some = a_on | c_on
    here = _place(a, offset, LEVEL, SINKS, SIZE, CASCADES)
    # Where step a lies before these steps, its token already is this ring's newest entry.
    at = tl.where(a_on, _place(a, offset, LEVEL - 1, SINKS, SIZE, CASCADES), here)
    from_c = _place(c, offset, LEVEL - 1, SINKS, SIZE, CASCADES)
    token_a = tl.load(token + at, mask=some, other=0)
    cell_a = tl.load(cell + at, mask=some, other=0)
    score_a = tl.load(score + at, mask=some, other=0.0)
    token_c = tl.load(token + from_c, mask=c_on, other=0)
    cell_c = tl.load(cell + from_c, mask=c_on, other=0)
    score_c = tl.load(score + from_c, mask=c_on, other=0.0)
    wins = c_on & (score_c >= score_a) if SELECTION else c_on & (c < 0)
    # Small tensors live in several threads at once: all must have read before one of them writes.
    tl.debug_barrier()
    tl.store(token + here, tl.where(wins, token_c, token_a), mask=some)
    tl.store(cell + here, tl.where(wins, cell_c, cell_a), mask=some)
    tl.store(score + here, tl.where(wins, score_c, score_a), mask=some)
    freed = offset + SINKS + CASCADES * SIZE + (c + SINKS) % STRIDE
    tl.store(cell + freed, tl.where(wins, cell_a, cell_c), mask=c_on)


@triton.jit
def _cascade_kernel(
    token,
    cell,
    score,
    rows,
    seen,
    count,
    start,
    batch,
    heads,
    num_rows,
    SINKS: tl.constexpr,
    SIZE: tl.constexpr,
    CASCADES: tl.constexpr,
    STRIDE: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
    SELECTION: tl.constexpr,
):
    """Steps behind a full window, at most SIZE of them over all tiles."""
    WINDOW: tl.constexpr = CASCADES * SIZE
    PERIOD: tl.constexpr = 1 << (CASCADES - 1)
    offset, request = _lane(rows, batch, heads, num_rows, SINKS + WINDOW + STRIDE)
    before = tl.load(seen + request).to(tl.int32)
    begin = tl.maximum(before + start - SINKS, WINDOW)
    end = before + tl.minimum(tl.load(count + request).to(tl.int32), start + RUN) - SINKS
    base = begin // PERIOD * PERIOD + tl.program_id(1) * TILE
    if base >= end:
        return

    waiting_part = offset + SINKS + WINDOW
    step = base + tl.arange(0, TILE)
    on = (step >= begin) & (step < end)
    waiting = waiting_part + (step + SINKS) % STRIDE
    new_cell = tl.load(cell + waiting, mask=on, other=0)
    new_score = tl.load(score + waiting, mask=on, other=0.0)

    # Steps that go all the way down: the last sub-cache's oldest token is dropped.
    deep = base + tl.arange(0, TILE // PERIOD) * PERIOD
    deep_on = (deep >= begin) & (deep < end)
    last = _place(deep, offset, CASCADES - 1, SINKS, SIZE, CASCADES)
    out_cell = tl.load(cell + last, mask=deep_on, other=0)
    tl.debug_barrier()
    tl.store(cell + waiting_part + (deep + SINKS) % STRIDE, out_cell, mask=deep_on)

    for back in tl.static_range(CASCADES - 1):
        _pass_on(
            token,
            cell,
            score,
            offset,
            base,
            begin,
            end,
            CASCADES - 1 - back,
            SINKS,
            SIZE,
            CASCADES,
            STRIDE,
            TILE,
            SELECTION,
        )

    # All that the newest ring evicts was read before the last barrier.
    place = _place(step, offset, 0, SINKS, SIZE, CASCADES)
    tl.store(token + place, step + SINKS, mask=on)
    tl.store(cell + place, new_cell, mask=on)
    tl.store(score + place, new_score, mask=on)
    tl.store(token + waiting, step + SINKS + STRIDE, mask=on)
    tl.store(score + waiting, tl.zeros([TILE], tl.float32), mask=on)
