"""DBSA's views: block-sparse while blocks are encoded, rebased blocks while a question is answered."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch

from sglang_ext.attention.policy import Policy, Request, RequestRows, RowViews
from sglang_ext.cache.rows import NewBlock, Row
from sglang_ext.kernels.view_attention import Consecutive, Segment, View


class DbsaPolicy(Policy):
    """Views of demonstration blocks (DBSA, section 2)."""

    def positions(self, request: Request, begin: int, end: int) -> list[int] | None:
        row = request.row
        if row is None or not row.new:
            return None
        if begin >= row.prefix_tokens + sum(block.tokens for block in row.new):
            return None  # the step that overlap scheduling runs past the end of an encoding; nobody reads it
        positions: list[int] = []
        for block, start in _new_blocks(row):
            low, high = max(begin, start), min(end, start + block.tokens)
            positions.extend(range(block.position + low - start, block.position + high - start))
        if len(positions) != end - begin:
            raise ValueError(f"columns [{begin}, {end}) are not all columns of new blocks of the row")
        return positions

    def views(self, rows: RequestRows) -> RowViews | None:
        if rows.row is not None and rows.row.new:
            return self._encoding(rows, rows.row)
        # Column t is position t. Keys that were written there need nothing of us: that is a plain request.
        written = rows.slot_pos[rows.slots.long()]
        columns = torch.arange(rows.end, device=written.device)
        if bool((written == columns).all()):
            return None
        return [(rows.begin, rows.end, View((Segment(rows.slots, Consecutive(0), causal=True),)))]

    def _encoding(self, rows: RequestRows, row: Row) -> RowViews:
        lengths = [part.tokens for part in row.prefix] + [block.tokens for block in row.new]
        bounds = [0, *accumulate(lengths)]
        views = []
        for block, start in _new_blocks(row):
            low, high = max(rows.begin, start), min(rows.end, start + block.tokens)
            if low >= high:
                continue
            seen = [
                Segment(rows.slots[bounds[other] : bounds[other + 1]], Consecutive(position))
                for other, position in block.seen
            ]
            itself = Segment(rows.slots[start:high], Consecutive(block.position), causal=True)
            views.append((low, high, View((*seen, itself))))
        past = max(rows.begin, bounds[-1])
        if past < rows.end:  # see `positions`
            views.append((past, rows.end, View((Segment(rows.slots[past:], Consecutive(past), causal=True),))))
        return views


def _new_blocks(row: Row) -> Iterator[tuple[NewBlock, int]]:
    """(block, its first column) for every block the row encodes."""
    start = row.prefix_tokens
    for block in row.new:
        yield block, start
        start += block.tokens
