"""What a decoding request reads through clusters, and what it reads token by token, as kernels are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_ext.attention.clustered import Placed
from sglang_ext.attention.clustered_report import Read
from sglang_ext.attention.policy import Request
from sglang_ext.attention.seen import RowRuns
from sglang_ext.cache.cluster_pool import Cut, PooledRun
from sglang_ext.kernels.cluster_attention.rows import PlannedRow

HEADROOM = 1.25
"""How many times what a batch needs is allocated for it and those to come, where it runs outside of CUDA graphs."""


@dataclass
class KnownRow:
    """What a decoding request reads, for as long as nothing but its length changes.

    Attributes:
        request: whose.
        placed: its clusters, as the policy gave them.
        cuts: pieces of runs that it reads; they live as long as somebody has them.
        row: for the kernels.
        read: runs in it, as the kernels list them.
    """

    request: Request
    placed: list[Placed]
    cuts: list[Cut]
    row: PlannedRow
    read: list[Read]


def known_row(request: Request, seen: RowRuns, placed: list[Placed], columns: int, p: tuple[float, float]) -> KnownRow:
    """What a decoding request reads, as kernels are told.

    Args:
        request: whose row it is.
        seen: what its newest row sees, with and without clusters.
        placed: its clusters.
        columns: of a row of the table of requests.
        p: (p1, p2) of the request.

    Raises:
        ValueError: clusters that are not in the memory which kernels read.
    """
    deltas: dict[int, int] = {0: 0}
    tiles: list[int] = []
    sized: list[int] = []
    rotations: list[int] = []
    cuts: list[Cut] = []
    read: list[Read] = []
    tokens = 0
    for each in placed:
        if not isinstance(each.run, PooledRun):
            raise ValueError(f"a {type(each.run).__name__} for kernels: expected a PooledRun")
        piece = each.run.piece(each.begin - each.column, each.end - each.column)
        if piece is None:
            continue  # no room: its tokens are exact
        if isinstance(piece, Cut):
            cuts.append(piece)
        cells = piece.cells if isinstance(piece, Cut) else piece
        tiles += each.run.place.tiles
        sized += cells
        rotations += [deltas.setdefault(each.delta, len(deltas))] * len(cells)
        read.append(Read(each.run.place, cells, each))
        tokens += each.end - each.begin
    clustered = [(each.placed.begin, each.placed.end) for each in read]
    base = request.slot * columns
    spans: list[tuple[int, int, int]] = []
    for run in seen.runs:
        for low, high in _without(clustered, run.column, run.column + run.tokens):
            spans.append((base + low, high - low, deltas.setdefault(run.delta, len(deltas))))
    *own, (tail, _) = _without(clustered, seen.tail, seen.end)
    spans += [(base + low, high - low, 0) for low, high in own]
    row = PlannedRow(
        tiles=np.array(tiles, dtype=np.int32),
        sized=np.array(sized, dtype=np.int32),
        rotations=np.array(rotations, dtype=np.int32),
        deltas=tuple(deltas),
        spans=tuple(spans),
        tail=(base + tail, tail),
        p=p,
        tokens=tokens,
    )
    return KnownRow(request, placed, cuts, row, read)


def _without(holes: Sequence[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """[begin, end) without disjoint ranges."""
    left = []
    for low, high in sorted(holes):
        if low >= end or high <= begin:
            continue
        if low > begin:
            left.append((begin, low))
        begin = max(begin, high)
    if begin < end:
        left.append((begin, end))
    return left
