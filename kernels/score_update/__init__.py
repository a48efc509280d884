"""How much attention each token received, decayed over the queries: column sums from the log-sum-exp, in float32."""

from __future__ import annotations

import torch

from sglang_ext.kernels.score_update import reference
from sglang_ext.kernels.score_update.types import CountedQueries, KeptScores

__all__ = ["CountedQueries", "KeptScores", "column_sums", "update_scores"]


def column_sums(
    queries: CountedQueries, *, beta: float, reduction: str = "mean", homogeneous: bool = False
) -> torch.Tensor:
    """`reference.column_sums` (see there), by the Triton kernel where the keys live on a GPU."""
    sums = reference.column_sums
    if queries.keys.is_cuda:
        from sglang_ext.kernels.score_update.triton_impl import column_sums as sums
    return sums(queries, beta=beta, reduction=reduction, homogeneous=homogeneous)


def update_scores(scores: KeptScores, queries: CountedQueries, *, beta: float, reduction: str = "mean") -> None:
    """`reference.update_scores` (see there), by Triton kernels where the scores live on a GPU."""
    update = reference.update_scores
    if scores.score.is_cuda:
        from sglang_ext.kernels.score_update.triton_impl import update_scores as update
    update(scores, queries, beta=beta, reduction=reduction)
