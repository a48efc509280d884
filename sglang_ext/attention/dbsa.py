"""DBSA's views: block-sparse while blocks are encoded; while a question is answered, blocks at new positions.

A question that sees its blocks where they were written (`rebase: false`) has no view: only the positions of its own
tokens differ from their columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from sglang_ext.attention.branches import branch_positions, branch_runs, branch_view
from sglang_ext.attention.policy import LayerView, Policy, Request, RequestRows, RowViews
from sglang_ext.attention.seen import RowRuns, Run, segments, told_apart, view_of
from sglang_ext.cache.rows import NewBlock, Row
from sglang_ext.config import policy_options
from sglang_ext.kernels.view_attention import View
from sglang_ext.policies.options import DbsaOptions

MANY = 64
"""Pieces of a row beside rows with views: more are not read once for all requests, but as a part of the row, since each
would be a run of its own, and CUDA graphs have room for few."""


class DbsaPolicy(Policy):
    """Views of demonstration blocks (DBSA, section 2).

    Attributes:
        options: the server's.
        host_gb: host memory for blocks that are evicted, in GiB; None where there is none.
    """

    options: type = DbsaOptions
    as_written = True
    host_gb: float | None = None

    def __init__(self) -> None:
        self.host_gb = policy_options(DbsaOptions).host_gb

    def positions(self, request: Request, begin: int, end: int) -> list[int] | None:
        row = request.row
        if row is None or (not row.new and not row.shift):
            return None
        if not row.new:
            return list(range(begin + row.shift, end + row.shift))
        if begin >= row.prefix_tokens + (row.own or 0) + sum(block.tokens for block in row.new):
            return None  # the step that overlap scheduling runs past the end of an encoding; nobody reads it
        if row.own is not None:
            return branch_positions(row, begin, end)
        positions: list[int] = []
        for block, start in _new_blocks(row):
            low, high = max(begin, start), min(end, start + block.tokens)
            positions.extend(range(block.position + low - start, block.position + high - start))
        if len(positions) != end - begin:
            raise ValueError(f"columns [{begin}, {end}) are not all columns of new blocks of the row")
        return positions

    def runs(self, request: Request, begin: int, end: int) -> Sequence[RowRuns] | None:
        row = request.row
        if row is None or (row.as_written and len(row.prefix) > MANY):
            return None
        if row.encodes:
            return self._encoding(row, request.written, begin, end)
        pieces = []
        column = 0
        for piece, written in zip(row.prefix, request.written, strict=True):
            seen = column if row.follows is None else written
            pieces.append(Run(column, piece.tokens, seen, written, (piece.key, piece.start, piece.end)))
            column += piece.tokens
        if row.own is not None:
            return branch_runs(row, told_apart(pieces), begin, end)
        return [RowRuns(begin, end, told_apart(pieces), tail=column)]

    def views(self, rows: RequestRows) -> RowViews | None:
        runs = self.runs(rows.request, rows.begin, rows.end)
        if runs is None:
            return None
        row = rows.row
        if row is not None and row.own is not None:
            return self._branches(row, rows, runs)
        if row is not None and not row.new and all(run.delta == 0 for run in runs[0].runs):
            return None  # every key is seen where it was written: plain attention over the row
        return [(seen.begin, seen.end, view_of(rows.slots, seen)) for seen in runs]

    def _branches(self, row: Row, rows: RequestRows, runs: Sequence[RowRuns]) -> RowViews:
        """Views of a row with branches: these are one, and not one each."""
        first = row.prefix_tokens + (row.own or 0)
        last = first + sum(block.tokens for block in row.new)
        views: list[tuple[int, int, View | LayerView]] = [
            (seen.begin, seen.end, view_of(rows.slots, seen)) for seen in runs if not first <= seen.begin < last
        ]
        inside = [seen for seen in runs if first <= seen.begin < last]
        if inside:
            begin, end = inside[0].begin, inside[-1].end
            common = View(segments(rows.slots, inside[0].runs[: len(row.prefix) + bool(row.own)]))
            views.append((begin, end, branch_view(row, common, rows, begin, end)))
        return views

    def _encoding(self, row: Row, written: Sequence[int], begin: int, end: int) -> list[RowRuns]:
        lengths = [part.tokens for part in row.prefix] + [block.tokens for block in row.new]
        bounds = [0, *accumulate(lengths)]
        positions = [*written, *(block.position for block in row.new)]
        keys = [(piece.key, piece.start, piece.end) for piece in row.prefix]
        keys += [(block.key, 0, block.tokens) for block in row.new]
        found = []
        for block, start in _new_blocks(row):
            low, high = max(begin, start), min(end, start + block.tokens)
            if low >= high:
                continue
            seen = [
                Run(bounds[other], lengths[other], position, positions[other], keys[other])
                for other, position in block.seen
            ]
            found.append(RowRuns(low, high, told_apart(seen), tail=start))
        past = max(begin, bounds[-1])
        if past < end:  # see `positions`
            found.append(RowRuns(past, end, (), tail=past))
        return found


def _new_blocks(row: Row) -> Iterator[tuple[NewBlock, int]]:
    """(block, its first column) for every block the row encodes."""
    start = row.prefix_tokens
    for block in row.new:
        yield block, start
        start += block.tokens
