"""What query rows see, as the host knows it: the one encoding, from which each reader makes what its kernels read.

A policy says it once a pass (`Policy.runs`). Work lists are made of it in `readers.plans`, rows of clusters in
`readers.cluster_rows`, and views for plain PyTorch here. What only the device knows is no part of it: clusters that are
selected in the step itself, and the cells of a cascade, which are lists on the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from sglang_ext.kernels.view_attention import Consecutive, Segment, View, Written


@dataclass(frozen=True)
class Run:
    """Columns of a request's row that some query rows see, one after the other, as they were written.

    Attributes:
        column: the first column.
        tokens: how many columns.
        seen: position at which the first token is seen.
        written: position at which it was written.
        key: equal keys of two requests name equal KV slots (a block's tokens), which are then read once for both; None
            for tokens that are the request's own.
    """

    column: int
    tokens: int
    seen: int
    written: int
    key: Hashable = None

    @property
    def delta(self) -> int:
        """By how many positions every key of the run is rotated."""
        return self.seen - self.written


@dataclass(frozen=True)
class RowRuns:
    """What the query rows at columns [begin, end) of a request see; all of it is known on the host.

    Attributes:
        runs: seen whole by every row.
        tail: first column of the request's own tokens, seen causally up to each row's own column, not rotated.
    """

    begin: int
    end: int
    runs: tuple[Run, ...]
    tail: int


def told_apart(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Runs whose keys differ: blocks of equal demonstrations are one block, and a row may begin with it twice."""
    if len({run.key for run in runs}) == len(runs):
        return tuple(runs)
    times: Counter[Hashable] = Counter()
    found = []
    for run in runs:
        found.append(replace(run, key=(run.key, times[run.key])) if times[run.key] else run)
        times[run.key] += 1
    return tuple(found)


def view_of(slots: torch.Tensor, seen: RowRuns) -> View:
    """The runs as segments, one for those that follow each other, and the request's own tokens."""
    own = Segment(slots[seen.tail : seen.end], Written(), causal=True)
    return View((*segments(slots, seen.runs), own))


def segments(slots: torch.Tensor, runs: Sequence[Run]) -> tuple[Segment, ...]:
    """The runs as segments, one for those that follow each other."""
    joined: list[tuple[int, int, int]] = []  # (column, end column, position)
    for run in runs:
        if joined and joined[-1][1] == run.column and run.column - joined[-1][0] == run.seen - joined[-1][2]:
            joined[-1] = (joined[-1][0], run.column + run.tokens, joined[-1][2])
        else:
            joined.append((run.column, run.column + run.tokens, run.seen))
    return tuple(Segment(slots[low:high], Consecutive(position)) for low, high, position in joined)
