"""The other work list of view attention: each program takes rows of one request, and reads their runs one by one.

`plan` has every run read once for the whole batch, and each query row leaves a partial output for every run that it
sees. Where requests have many rows and see hundreds of short runs, there are more of them than a list holds: 32
questions of 24 tokens over 211 blocks leave 163,000, in each layer, and the GPU waits while the host prepares and
launches eleven lists. Here a tile of a request's rows keeps one softmax over all runs of its share, as a dense prefill
does, and a row has as many partial outputs as its request has shares. Runs that several requests see are read by each
of them.

- *share*: a tile of rows over runs that follow one another in a request's list: what one program does, for one
  key-value head. A request is cut into several only where there are too few of them for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sglang_ext.kernels.view_attention.plan import Ints, PlanRows, copies_of

BLOCK_N = 64
"""Tokens of one step of a program."""

RUN_COST = 1
"""What a run costs beside its tokens (rotating the queries), in steps."""


@dataclass(frozen=True, eq=False)
class RequestPlan:
    """A work list; `by_request_impl.load` brings it to the device. Every array is int64 and on the host.

    Attributes:
        block_m: (query row, head of the group) pairs of a share.
        group: query heads a key-value head.
        num_rows: query rows of the batch: 1 + the last one named.
        shares: [shares, 6]: first query row, rows, first run, end of its runs, first partial output, rows of the
            request before the share's.
        runs: [runs, 4]: first token in the plan's slots, tokens, index into `angles`, how many of the tokens the
            request's first row sees; each further row sees one more, up to all.
        angles: [angles] distinct distances (seen - written position).
        row_ptr: [num_rows + 1], row_parts: [parts]: the partial outputs of each row (CSR).
        copies: [copies, 3]: first token in the plan's slots, offset in the caller's slot table, slots.
        num_slots: tokens of all runs.
        table_size: slots that the caller's table must hold at least.
    """

    block_m: int
    group: int
    num_rows: int
    shares: Ints
    runs: Ints
    angles: Ints
    row_ptr: Ints
    row_parts: Ints
    copies: Ints
    num_slots: int
    table_size: int


def plan_by_request(requests: Sequence[PlanRows], *, group: int, workers: int) -> RequestPlan:
    """Plan attention of a prefill: every row sees all runs of its request, and its own tail causally.

    Args:
        requests: what the rows of each request see, at least one.
        group: query heads a key-value head (G).
        workers: programs that each key-value head has on the device at once.

    Raises:
        ValueError: no request, or one whose only own run is not its last one.
    """
    for each in requests:
        if each.own != (len(each.keys) - 1,):
            raise ValueError(f"own runs {each.own} of {len(each.keys)} runs: expected the last one alone")
    if not requests:
        raise ValueError("no requests: expected at least one")
    block_m = block_for(max(each.num_rows for each in requests) * group, group)
    tile_rows = block_m // group
    lengths = np.concatenate([each.lengths for each in requests]).astype(np.int64)
    source = np.concatenate([each.source for each in requests]).astype(np.int64)
    angles, angle = np.unique(np.concatenate([each.deltas for each in requests]), return_inverse=True)
    ends = np.cumsum([len(each.keys) for each in requests])
    limit = lengths.copy()
    limit[ends - 1] -= np.array([each.num_rows for each in requests]) - 1
    begin = lengths.cumsum() - lengths
    cost = -(-lengths // BLOCK_N) + RUN_COST
    tiles = np.array([-(-each.num_rows // tile_rows) for each in requests])
    costs = np.add.reduceat(cost, np.concatenate(([0], ends[:-1])))
    share = max(1.0, float((costs * tiles).sum()) / workers)
    shares: list[tuple[int, int, int, int, int, int]] = []
    parts = 0
    for number, each in enumerate(requests):
        first, end = int(ends[number]) - len(each.keys), int(ends[number])
        cuts = _cuts(cost[first:end], max(1, round(float(costs[number]) / share)))
        for row in range(0, each.num_rows, tile_rows):
            rows = min(tile_rows, each.num_rows - row)
            for low, high in pairwise(cuts):
                shares.append((each.first_row + row, rows, first + low, first + high, parts, row))
                parts += rows
    made = np.array(shares, dtype=np.int64)
    part_row = np.repeat(made[:, 0] - made[:, 4], made[:, 1]) + np.arange(parts)
    num_rows = max(each.first_row + each.num_rows for each in requests)
    row_ptr = np.zeros(num_rows + 1, dtype=np.int64)
    np.bincount(part_row, minlength=num_rows).cumsum(out=row_ptr[1:])
    return RequestPlan(
        block_m=block_m,
        group=group,
        num_rows=num_rows,
        shares=made,
        runs=np.stack((begin, lengths, angle, limit), axis=1),
        angles=angles.astype(np.int64),
        row_ptr=row_ptr,
        row_parts=part_row.argsort(kind="stable"),
        copies=copies_of(begin, source, lengths),
        num_slots=int(lengths.sum()),
        table_size=int((source + lengths).max()),
    )


def block_for(pairs: int, group: int) -> int:
    """Pairs of (query row, head of the group) of a share, where a request has at most `pairs`: 16 to 128."""
    wanted = min(128, max(16, group, pairs))
    return 1 << (wanted - 1).bit_length()


def _cuts(cost: Ints, shares: int) -> list[int]:
    """[shares + 1] ascending indices that cut runs into shares of about equal cost; fewer where runs are few."""
    ends = cost.cumsum()
    wanted = np.arange(1, shares) * (int(ends[-1]) / shares)
    inner = ends.searchsorted(wanted, side="left") + 1
    return [0, *np.unique(inner[inner < len(cost)]).tolist(), len(cost)]
