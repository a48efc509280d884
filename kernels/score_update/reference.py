"""Decayed column sums of the attention in plain PyTorch.

A token's score is the moving average of the attention it receives (Cascading KV cache, section 3.2). For a run of m
queries it becomes `β^m·score + Σ_t (1-β)·β^(m-1-t)·a_t`, with a_t the attention that query t gave the token, reduced
over the query heads that share the score. The reduction comes before the sum, so that one run of m queries and m runs
of one give the same score, with `max` too. Flash attention keeps no a_t; it is recomputed from the log-sum-exp:
`a_t = exp(scale·q_t·k - lse_t)`. No normaliser is extrapolated, and nothing is kept in half precision.
"""

from __future__ import annotations

import torch

REDUCTIONS = ("mean", "max")


def check(
    query: torch.Tensor,
    keys: torch.Tensor,
    lse: torch.Tensor,
    before: torch.Tensor,
    count: torch.Tensor,
    beta: float,
    reduction: str,
    every: int = 1,
) -> None:
    """Raise ValueError where shapes, dtypes, devices or settings do not fit; values on the device are not looked at."""
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
    for name, tensor in (("before", before), ("count", count)):
        if tensor.shape != (batch,) or tensor.is_floating_point():
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}: expected integers, {(batch,)}")
    devices = {t.device for t in (query, keys, lse, before, count)}
    if len(devices) > 1:
        raise ValueError(f"tensors on {', '.join(sorted(map(str, devices)))}: expected one device")
    if not 0 <= beta < 1:
        raise ValueError(f"beta={beta!r}: expected at least 0 and below 1")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r}: expected one of {', '.join(REDUCTIONS)}")
    if every < 1:
        raise ValueError(f"every={every}: expected at least 1")


def check_target(
    score: torch.Tensor, entries: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, skip: torch.Tensor | None
) -> None:
    """The same for the scores that are updated."""
    batch, kv_heads, columns, _ = keys.shape
    if score.dim() != 3 or score.shape[1] not in (1, kv_heads) or score.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"score is {score.dtype} {tuple(score.shape)}: expected float32 [rows, {kv_heads} or 1, entries]"
        )
    if entries.shape != (batch, columns) or entries.dtype != torch.int32:
        raise ValueError(f"entries is {entries.dtype} {tuple(entries.shape)}: expected int32 {(batch, columns)}")
    for name, tensor in (("rows", rows), ("skip", rows if skip is None else skip)):
        if tensor.shape != (batch,) or tensor.is_floating_point():
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}: expected integers, {(batch,)}")
    devices = {t.device for t in (score, entries, rows, keys, rows if skip is None else skip)}
    if len(devices) > 1 or not score.is_contiguous():
        raise ValueError(
            f"score (contiguous: {score.is_contiguous()}), entries, rows and keys on "
            f"{', '.join(sorted(map(str, devices)))}: expected one device and a contiguous score"
        )


def column_sums(
    query: torch.Tensor,
    keys: torch.Tensor,
    lse: torch.Tensor,
    before: torch.Tensor,
    count: torch.Tensor,
    *,
    scale: float,
    beta: float,
    reduction: str = "mean",
    homogeneous: bool = False,
    every: int = 1,
) -> torch.Tensor:
    """Σ_t (1-β)·β^(count-1-t)·a_t for every column a run of queries sees.

    Args:
        query: [batch, rows, heads, head_dim], rotated at view positions; only the first `count` rows are read.
        keys: [batch, kv_heads, columns, head_dim] in view order, rotated to view positions, query's dtype. Columns
            that no query sees may hold anything.
        lse: [batch, rows, heads] log-sum-exp (natural) of each row's whole attention; float32, or float64 with float64
            queries.
        before: [batch] integer, columns before the first row's own; row t sees the columns up to before + every·t.
        count: [batch] integer, rows that count, 0 to `rows`.
        scale: factor of the logits.
        beta: decay a query.
        reduction: of the query heads that share a score, `mean` or `max`, query by query.
        homogeneous: one score for all heads instead of one a key-value head.
        every: columns from the token of one row to that of the next; the rows between are not counted.

    Returns:
        [batch, kv_heads or 1, columns] in lse's dtype; 0 where nothing is seen.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not fit.
    """
    check(query, keys, lse, before, count, beta, reduction, every)
    batch, _, heads, head_dim = query.shape
    kv_heads, columns = keys.shape[1:3]
    out = lse.new_zeros(batch, 1 if homogeneous else kv_heads, columns)
    for b, (seen, rows) in enumerate(zip(before.tolist(), count.tolist(), strict=True)):
        end = _end(seen, rows, every)
        if not 0 <= rows <= query.shape[1] or seen < 0 or end > columns:
            raise ValueError(
                f"request {b}: {seen} columns before {rows} rows of {query.shape[1]}, each {every} from the next; "
                f"expected both in {columns} columns, and the rows in the query"
            )
        grouped = query[b, :rows].to(lse.dtype).view(rows, kv_heads, heads // kv_heads, head_dim)
        visible = keys[b, :, :end].to(lse.dtype)
        logits = torch.einsum("thgd,hcd->thgc", grouped, visible) * scale
        attention = torch.exp(logits - lse[b, :rows].view(rows, kv_heads, heads // kv_heads, 1))
        last = seen + every * torch.arange(rows, device=query.device)
        hidden = torch.arange(end, device=query.device) > last.unsqueeze(1)
        attention = attention.masked_fill(hidden.unsqueeze(1).unsqueeze(1), 0.0)
        if homogeneous:
            attention = attention.flatten(1, 2).unsqueeze(1)
        reduced = attention.mean(2) if reduction == "mean" else attention.amax(2)
        age = torch.arange(rows - 1, -1, -1, dtype=torch.float64, device=query.device)
        weight = ((1 - beta) * beta**age).to(lse.dtype)
        out[b, :, :end] = torch.einsum("t,thc->hc", weight, reduced)
    return out


def _end(before: int, rows: int, every: int) -> int:
    """Columns that the last row sees."""
    return before + every * (rows - 1) + 1 if rows else before


def update_scores(
    score: torch.Tensor,
    entries: torch.Tensor,
    rows: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    lse: torch.Tensor,
    before: torch.Tensor,
    count: torch.Tensor,
    *,
    scale: float,
    beta: float,
    reduction: str = "mean",
    skip: torch.Tensor | None = None,
    every: int = 1,
) -> None:
    """`score ← β^count·score + column_sums(...)` for every token that the queries see, in place.

    A token begins with score 0, so after its own stride it has the decayed sum of that stride.

    Args:
        score: [rows of the state, kv_heads, entries] float32, one layer of `CascadeState.score`; with one head, all
            heads share a score.
        entries: [batch, columns] int32, the entry of each view column (`Rings.columns`); only those seen are used.
        rows: [batch] integer, row of the state of each request.
        query, keys, lse, before, count, scale, beta, reduction, every: as for `column_sums`.
        skip: [batch] integer, first columns whose scores stay as they are, for nobody will read them
            (`Rings.settled`); None skips none.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not fit.
    """
    check_target(score, entries, rows, keys, skip)
    sums = column_sums(
        query,
        keys,
        lse,
        before,
        count,
        scale=scale,
        beta=beta,
        reduction=reduction,
        homogeneous=score.shape[1] != keys.shape[1],
        every=every,
    )
    first = [0] * rows.numel() if skip is None else skip.tolist()
    for b, (row, seen, new) in enumerate(zip(rows.tolist(), before.tolist(), count.tolist(), strict=True)):
        columns = slice(first[b], _end(seen, new, every))
        at = entries[b, columns].long()
        score[row][:, at] = beta**new * score[row][:, at] + sums[b, :, columns].to(score.dtype)
