"""Cells in plain PyTorch: lists of a stride, the window they show, writing, and attention of prefill and decoding.

Cascading KV cache (Willette et al., 2024), section 3.1: a stride of queries attends to [sinks | cache | itself,
causal], positions applied again from 0 over what is kept. Here keys lie in their cells as at position 0, rotated back
when they are written, and are rotated to the number of their column when they are read (RoPE is a rotation). So what a
column shows is a slot and nothing else, and neighbours are one position apart.
"""

from __future__ import annotations

import torch

from sglang_ext.kernels.cascade_update import CascadeState, Rings
from sglang_ext.kernels.cells.lists import Rotation, check_cells
from sglang_ext.kernels.cells.types import Cells, CountedScores, NewTokens, check_decode
from sglang_ext.kernels.rope import rotate
from sglang_ext.kernels.score_update.reference import update_scores
from sglang_ext.kernels.score_update.types import CountedQueries, KeptScores

ROWS = 256
"""Query rows that `attend` computes at a time."""


def check_lists(
    slot: torch.Tensor,
    state: CascadeState,
    rows: torch.Tensor,
    entries: torch.Tensor,
    slots: torch.Tensor,
    rings: Rings,
) -> None:
    """Raise ValueError where shapes or dtypes do not fit; values on the device are not looked at."""
    state.check(rows, rows, rows, rings)
    if slot.shape != state.cell.shape or slot.dtype != torch.int32:
        raise ValueError(
            f"lists are {slot.dtype} {tuple(slot.shape)}: expected int32 {tuple(state.cell.shape)}, as the state"
        )
    if entries.shape != (rows.numel(), rings.entries) or entries.dtype != torch.int32:
        raise ValueError(
            f"entries is {entries.dtype} {tuple(entries.shape)}: expected int32 {(rows.numel(), rings.entries)}, from "
            "Rings.columns with the whole open stride"
        )
    if slots.dim() != 2 or slots.shape[0] != rows.numel() or slots.dtype != torch.int32:
        raise ValueError(f"slots is {slots.dtype} {tuple(slots.shape)}: expected int32 [{rows.numel()}, cells]")


def list_columns(
    slot: torch.Tensor,
    state: CascadeState,
    rows: torch.Tensor,
    entries: torch.Tensor,
    slots: torch.Tensor,
    rings: Rings,
) -> None:
    """Write down what the lanes of some requests see in the stride that begins, in all layers.

    Args:
        slot: `empty_lists` of the state, to be written at `rows`.
        state: of which every stride before was added.
        rows: [batch] integer, rows of the state.
        entries: [batch, entries] int32, `Rings.columns(added, added + stride, entries)`: the same for all lanes.
        slots: [batch, at least as many as cells in use] int32, KV slot of each cell.
        rings: sizes of the cascade.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check_lists(slot, state, rows, entries, slots, rings)
    for row, shown, table in zip(rows.tolist(), entries, slots, strict=True):
        cell = state.cell[:, row][..., shown.long().clamp(min=0)].long()
        there = (shown >= 0) & (cell >= 0)
        slot[:, row] = torch.where(there, table[cell.clamp(0, table.numel() - 1)], 0)


def _cells(slot: torch.Tensor, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots, heads) of the cells in [lanes, columns] slots, [kv_heads, columns] and [kv_heads, 1] int64."""
    return slot.long().expand(kv_heads, -1), torch.arange(kv_heads, device=slot.device).unsqueeze(1)


def gather(
    keys: torch.Tensor,
    values: torch.Tensor,
    slot: torch.Tensor,
    rotation: Rotation,
    columns: int,
    out_keys: torch.Tensor,
    out_values: torch.Tensor,
) -> None:
    """One request's first `columns` columns in one layer, keys rotated to where they are seen, one after the other.

    Args:
        keys, values: [slots, kv_heads, head_dim or value_dim], the layer's caches.
        slot: [lanes, entries] int32, the request's lists.
        rotation: the model's.
        columns: how many, at most `entries`.
        out_keys, out_values: [at least columns, kv_heads, head_dim or value_dim], to write to.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    check_cells(slot, keys, values)
    at, head = _cells(slot[:, :columns], keys.shape[1])
    out_keys[:columns] = (
        rotate(keys[at, head], torch.arange(columns, device=at.device), rotation.rope)
        .transpose(0, 1)
        .to(out_keys.dtype)
    )
    out_values[:columns] = values[at, head].transpose(0, 1).to(out_values.dtype)


def store(
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    slot: torch.Tensor,
    rotation: Rotation,
    first: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    out_keys: torch.Tensor | None = None,
    out_values: torch.Tensor | None = None,
) -> None:
    """Write new tokens of one request, columns `first`, `first` + 1, ..., to their cells, and behind a gathered window.

    Into the cells keys go rotated back to position 0, into the window as they are.

    Args:
        new_keys, new_values: [rows, kv_heads, head_dim or value_dim], rotated at their columns.
        slot: [lanes, entries] int32, the request's lists.
        rotation: the model's.
        first: column of the first.
        keys, values: [slots, kv_heads, ...], the layer's caches.
        out_keys, out_values: as for `gather`, at least first + rows long; None writes to the cells only.

    Raises:
        ValueError: one of out_keys and out_values is None and the other is not.
    """
    check_pair(out_keys, out_values)
    at, head = _cells(slot[:, first : first + new_keys.shape[0]], keys.shape[1])
    back = -torch.arange(first, first + new_keys.shape[0], device=at.device)
    keys[at, head] = rotate(new_keys.transpose(0, 1), back, rotation.rope).to(keys.dtype)
    values[at, head] = new_values.transpose(0, 1).to(values.dtype)
    if out_keys is not None and out_values is not None:
        out_keys[first : first + new_keys.shape[0]] = new_keys.to(out_keys.dtype)
        out_values[first : first + new_keys.shape[0]] = new_values.to(out_values.dtype)


def check_pair(out_keys: torch.Tensor | None, out_values: torch.Tensor | None) -> None:
    """Raise ValueError where a window has keys or values only."""
    if (out_keys is None) != (out_values is None):
        raise ValueError("one of out_keys and out_values: expected both, or none to write to the cells only")


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of the last rows of a gathered window: row t of m sees all but the last m - 1 - t columns.

    Args:
        query: [rows, heads, head_dim], rotated at their columns.
        keys, values: [columns, kv_heads, head_dim or value_dim]; the last `rows` are the queries' own.
        scale: factor of the logits.

    Returns:
        (output [rows, heads, value_dim] in query's dtype, natural log-sum-exp [rows, heads], float32 or wider).
    """
    rows, columns = query.shape[0], keys.shape[0]
    if columns < rows or query.shape[1] % keys.shape[1]:
        raise ValueError(
            f"query {tuple(query.shape)} over keys {tuple(keys.shape)}: expected at least as many columns as rows and "
            "a multiple of the key-value heads"
        )
    wide = torch.promote_types(query.dtype, torch.float32)
    column = torch.arange(columns, device=query.device)
    found, levels = [], []
    for begin in range(0, rows, ROWS):
        q = query[begin : begin + ROWS].to(wide).unflatten(1, (keys.shape[1], -1))
        logits = torch.einsum("thgd,chd->thgc", q, keys.to(wide)) * scale
        last = torch.arange(begin, begin + q.shape[0], device=query.device) + columns - rows
        logits = logits.masked_fill((column > last.unsqueeze(1))[:, None, None], float("-inf"))
        levels.append(logits.logsumexp(-1).flatten(1))
        found.append(torch.einsum("thgc,chd->thgd", logits.softmax(-1), values.to(wide)).flatten(1, 2))
    return torch.cat(found).to(query.dtype), torch.cat(levels)


def decode(
    tokens: NewTokens,
    cells: Cells,
    rows: torch.Tensor,
    seen: torch.Tensor,
    rotation: Rotation,
    scale: float,
    *,
    scores: CountedScores | None = None,
) -> torch.Tensor:
    """One new token of each request: stored in its cell, attended from, and counted in the scores.

    Args:
        tokens: the new tokens, each in column seen - 1.
        cells: the layer's, to be written.
        rows: [batch] integer, the requests' rows of the state; different ones.
        seen: [batch] integer, columns that a request sees, the new token's the last; 0 for a row that is padding.
        rotation: the model's.
        scale: factor of the logits.
        scores: the layer's, to be written; None where nobody reads them.

    Returns:
        [batch, heads, value_dim] in query's dtype; zeros for padding.
    """
    check_decode(tokens, cells, rows, seen)
    query, keys, values = tokens.query, cells.keys, cells.values
    out = query.new_zeros(*query.shape[:2], values.shape[-1])
    kv_heads, wide = keys.shape[1], torch.promote_types(query.dtype, torch.float32)
    for b, (row, columns) in enumerate(zip(rows.tolist(), seen.tolist(), strict=True)):
        if columns == 0:
            continue
        one, slot = slice(b, b + 1), cells.slot[row]
        store(tokens.keys[one], tokens.values[one], slot, rotation, columns - 1, keys, values)
        at, head = _cells(slot[:, :columns], kv_heads)
        rotated = rotate(keys[at, head].to(wide), torch.arange(columns, device=at.device), rotation.rope)
        found, lse = attend(
            query[one].to(wide), rotated.transpose(0, 1), values[at, head].to(wide).transpose(0, 1), scale
        )
        out[b] = found[0].to(query.dtype)
        if scores is not None:
            update_scores(
                KeptScores(scores.score, scores.entries[one, :columns].contiguous(), rows[one], scores.skip[one]),
                CountedQueries(
                    query[one].unsqueeze(0).to(wide),
                    rotated.unsqueeze(0),
                    lse.unsqueeze(0),
                    rows.new_full((1,), columns - 1),
                    scores.fresh[one],
                    scale,
                ),
                beta=scores.beta,
                reduction=scores.reduction,
            )
    return out
