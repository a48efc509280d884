"""Decayed column sums of the attention in plain PyTorch.

A token's score is the moving average of the attention it receives (Cascading KV cache, section 3.2). For a run of m
queries it becomes `β^m·score + Σ_t (1-β)·β^(m-1-t)·a_t`, with a_t the attention that query t gave the token, reduced
over the query heads that share the score. The reduction comes before the sum, so that one run of m queries and m runs
of one give the same score, with `max` too. Flash attention keeps no a_t; it is recomputed from the log-sum-exp:
`a_t = exp(scale·q_t·k - lse_t)`. No normaliser is extrapolated, and nothing is kept in half precision.
"""

from __future__ import annotations

import torch

from sglang_ext.kernels.score_update.types import CountedQueries, KeptScores, check, check_target


def column_sums(
    queries: CountedQueries, *, beta: float, reduction: str = "mean", homogeneous: bool = False
) -> torch.Tensor:
    """Σ_t (1-β)·β^(count-1-t)·a_t for every column a run of queries sees.

    Args:
        queries: the runs.
        beta: decay a query.
        reduction: of the query heads that share a score, `mean` or `max`, query by query.
        homogeneous: one score for all heads instead of one a key-value head.

    Returns:
        [batch, kv_heads or 1, columns] in lse's dtype; 0 where nothing is seen.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not fit.
    """
    check(queries, beta, reduction)
    query, keys, lse, every = queries.query, queries.keys, queries.lse, queries.every
    batch, _, heads, head_dim = query.shape
    kv_heads, columns = keys.shape[1:3]
    out = lse.new_zeros(batch, 1 if homogeneous else kv_heads, columns)
    for b, (seen, rows) in enumerate(zip(queries.before.tolist(), queries.count.tolist(), strict=True)):
        end = _end(seen, rows, every)
        if not 0 <= rows <= query.shape[1] or seen < 0 or end > columns:
            raise ValueError(
                f"request {b}: {seen} columns before {rows} rows of {query.shape[1]}, each {every} from the next; "
                f"expected both in {columns} columns, and the rows in the query"
            )
        grouped = query[b, :rows].to(lse.dtype).view(rows, kv_heads, heads // kv_heads, head_dim)
        visible = keys[b, :, :end].to(lse.dtype)
        logits = torch.einsum("thgd,hcd->thgc", grouped, visible) * queries.scale
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


def update_scores(scores: KeptScores, queries: CountedQueries, *, beta: float, reduction: str = "mean") -> None:
    """`score ← β^count·score + column_sums(...)` for every token that the queries see, in place.

    A token begins with score 0, so after its own stride it has the decayed sum of that stride.

    Args:
        scores: the scores, to be written.
        queries, beta, reduction: as for `column_sums`.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not fit.
    """
    check_target(scores, queries.keys)
    score, rows = scores.score, scores.rows.tolist()
    sums = column_sums(queries, beta=beta, reduction=reduction, homogeneous=score.shape[1] != queries.keys.shape[1])
    first = [0] * len(rows) if scores.skip is None else scores.skip.tolist()
    for b, (row, seen, new) in enumerate(zip(rows, queries.before.tolist(), queries.count.tolist(), strict=True)):
        columns = slice(first[b], _end(seen, new, queries.every))
        at = scores.entries[b, columns].long()
        score[row][:, at] = beta**new * score[row][:, at] + sums[b, :, columns].to(score.dtype)
