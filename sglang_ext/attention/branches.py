"""Texts that may follow a request's own tokens, computed side by side in its row (`cache.rows.Row.own`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang_ext.attention.policy import Attended, Caches, LayerView, RequestRows
from sglang_ext.attention.seen import RowRuns, Run
from sglang_ext.cache.rows import Row
from sglang_ext.kernels.view_attention import View

MAX_SCORES = 1 << 24  # logits of some rows that are in memory at one time, 64 MiB in float32


def branch_runs(row: Row, prefix: Sequence[Run], begin: int, end: int) -> list[RowRuns]:
    """What the columns [begin, end) of a row with branches see, on the host.

    Args:
        prefix: the runs of the row's prefix, as the request's own tokens see them.
    """
    first = row.prefix_tokens
    found = []
    if row.own and begin < first + row.own:
        found.append(RowRuns(begin, min(end, first + row.own), tuple(prefix), tail=first))
    common = [*prefix]
    if row.own:
        common.append(Run(first, row.own, first + row.shift, first + row.shift))
    starts = _starts(row)
    for block, start in zip(row.new, starts, strict=False):
        low, high = max(begin, start), min(end, start + block.tokens)
        if low < high:
            above = (Run(starts[other], row.new[other].tokens, at, at) for other, at in block.seen)
            found.append(RowRuns(low, high, (*common, *above), tail=start))
    past = max(begin, starts[-1])
    if past < end:  # the step that overlap scheduling runs past the end; nobody reads it
        found.append(RowRuns(past, end, (), tail=past))
    return found


def branch_positions(row: Row, begin: int, end: int) -> list[int]:
    """Positions at which columns [begin, end) of a row with branches are written."""
    first = row.prefix_tokens + (row.own or 0)
    positions = list(range(begin + row.shift, min(end, first) + row.shift))
    for block, start in zip(row.new, _starts(row), strict=False):
        low, high = max(begin, start), min(end, start + block.tokens)
        positions.extend(range(block.position + low - start, block.position + high - start))
    return positions


def branch_view(row: Row, common: View, rows: RequestRows, begin: int, end: int) -> LayerView:
    """The view of the branches' columns [begin, end): what all of them see, and their own tokens under a mask.

    The common part is read once for all branches, however many there are.
    """
    first = row.prefix_tokens + (row.own or 0)
    slots = rows.slots[first:end].long()
    mask = torch.from_numpy(_visible(row)[begin - first : end - first, : end - first]).to(slots.device)

    def view(caches: Caches, query: torch.Tensor, _positions: torch.Tensor) -> Attended:
        return Attended(common, (_masked(query, caches, slots, mask),))

    return view


def _starts(row: Row) -> list[int]:
    """First column of every branch, and the column behind the last."""
    starts = [row.prefix_tokens + (row.own or 0)]
    for block in row.new:
        starts.append(starts[-1] + block.tokens)
    return starts


def _visible(row: Row) -> np.ndarray:
    """bool [columns, columns] of the branches: which column (a row of it) sees which."""
    starts = [start - row.prefix_tokens - (row.own or 0) for start in _starts(row)]
    mask = np.zeros((starts[-1], starts[-1]), dtype=bool)
    for number, block in enumerate(row.new):
        low, high = starts[number], starts[number + 1]
        mask[low:high, low:high] = np.tri(block.tokens, dtype=bool)
        for other, _ in block.seen:
            mask[low:high, starts[other] : starts[other + 1]] = True
    return mask


def _masked(
    query: torch.Tensor, caches: Caches, slots: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [rows, heads, value_dim], log-sum-exp [rows, heads]) over `slots`, each as it was written."""
    rows, heads, _ = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    keys, values = (cache[slots].to(dtype) for cache in (caches.keys, caches.values))
    grouped = query.to(dtype).view(rows, keys.shape[1], heads // keys.shape[1], -1)
    step = max(1, MAX_SCORES // max(1, heads * keys.shape[0]))
    parts = [
        _softmax(grouped[at : at + step], keys, values, mask[at : at + step], caches.scale)
        for at in range(0, rows, step)
    ]
    out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    return out.reshape(rows, heads, -1).to(query.dtype), lse.reshape(rows, heads)


def _softmax(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output [rows, kv_heads, group, value_dim], log-sum-exp [rows, kv_heads, group]) of some rows' queries."""
    scores = torch.einsum("rhgd,thd->rhgt", query, keys) * scale
    scores = scores.masked_fill(~mask[:, None, None, :], float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)  # finite: a token sees itself
    return torch.einsum("rhgt,thd->rhgd", torch.exp(scores - lse.unsqueeze(-1)), values), lse
