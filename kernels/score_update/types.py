"""What scores are updated from: queries whose attention is counted, and the scores that keep it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

REDUCTIONS = ("mean", "max")


@dataclass(frozen=True, slots=True)
class CountedQueries:
    """Runs of queries, one a request, and what their attention follows from.

    Attributes:
        query: [batch, rows, heads, head_dim], rotated at view positions; only the first `count` rows are read.
        keys: [batch, kv_heads, columns, head_dim] in view order, rotated to view positions, query's dtype. Columns
            that no query sees may hold anything.
        lse: [batch, rows, heads] log-sum-exp (natural) of each row's whole attention; float32, or float64 with float64
            queries.
        before: [batch] integer, columns before the first row's own; row t sees the columns up to before + every·t.
        count: [batch] integer, rows that count, 0 to `rows`.
        scale: factor of the logits.
        every: columns from the token of one row to that of the next; the rows between are not counted.
    """

    query: torch.Tensor
    keys: torch.Tensor
    lse: torch.Tensor
    before: torch.Tensor
    count: torch.Tensor
    scale: float
    every: int = 1


@dataclass(frozen=True, slots=True)
class KeptScores:
    """The scores of one layer, and which of them some requests' columns have.

    Attributes:
        score: [rows of the state, kv_heads, entries] float32, one layer of `CascadeState.score`; with one head, all
            heads share a score.
        entries: [batch, columns] int32, the entry of each view column (`Rings.columns`); only those seen are used.
        rows: [batch] integer, row of the state of each request.
        skip: [batch] integer, first columns whose scores stay as they are, for nobody will read them
            (`Rings.settled`); None skips none.
    """

    score: torch.Tensor
    entries: torch.Tensor
    rows: torch.Tensor
    skip: torch.Tensor | None = None


def check(queries: CountedQueries, beta: float, reduction: str) -> None:
    """Raise ValueError where shapes, dtypes, devices or settings do not fit; values on the device are not looked at."""
    query, keys, lse = queries.query, queries.keys, queries.lse
    if query.dim() != 4 or keys.dim() != 4 or query.shape[0] != keys.shape[0] or query.shape[3] != keys.shape[3]:
        raise ValueError(
            f"query {tuple(query.shape)}, keys {tuple(keys.shape)}: expected [batch, rows, heads, head_dim] and "
            "[batch, kv_heads, columns, head_dim]"
        )
    batch, rows, heads, _ = query.shape
    if keys.shape[1] == 0 or heads == 0 or heads % keys.shape[1]:
        raise ValueError(f"{heads} query heads over {keys.shape[1]} key-value heads: expected a multiple")
    if query.dtype != keys.dtype or not query.is_floating_point():
        raise ValueError(f"query is {query.dtype}, keys are {keys.dtype}: expected one floating dtype")
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    if lse.shape != (batch, rows, heads) or lse.dtype != wide:
        raise ValueError(f"lse is {lse.dtype} {tuple(lse.shape)}: expected {wide} {(batch, rows, heads)}")
    for name, tensor in (("before", queries.before), ("count", queries.count)):
        if tensor.shape != (batch,) or tensor.is_floating_point():
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}: expected integers, {(batch,)}")
    devices = {t.device for t in (query, keys, lse, queries.before, queries.count)}
    if len(devices) > 1:
        raise ValueError(f"tensors on {', '.join(sorted(map(str, devices)))}: expected one device")
    if not 0 <= beta < 1:
        raise ValueError(f"beta={beta!r}: expected at least 0 and below 1")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r}: expected one of {', '.join(REDUCTIONS)}")
    if queries.every < 1:
        raise ValueError(f"every={queries.every}: expected at least 1")


def check_target(scores: KeptScores, keys: torch.Tensor) -> None:
    """The same for the scores that are updated."""
    score, entries, rows = scores.score, scores.entries, scores.rows
    skip = rows if scores.skip is None else scores.skip
    batch, kv_heads, columns, _ = keys.shape
    if score.dim() != 3 or score.shape[1] not in (1, kv_heads) or score.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"score is {score.dtype} {tuple(score.shape)}: expected float32 [rows, {kv_heads} or 1, entries]"
        )
    if entries.shape != (batch, columns) or entries.dtype != torch.int32:
        raise ValueError(f"entries is {entries.dtype} {tuple(entries.shape)}: expected int32 {(batch, columns)}")
    for name, tensor in (("rows", rows), ("skip", skip)):
        if tensor.shape != (batch,) or tensor.is_floating_point():
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}: expected integers, {(batch,)}")
    devices = {t.device for t in (score, entries, rows, keys, skip)}
    if len(devices) > 1 or not score.is_contiguous():
        raise ValueError(
            f"score (contiguous: {score.is_contiguous()}), entries, rows and keys on "
            f"{', '.join(sorted(map(str, devices)))}: expected one device and a contiguous score"
        )
