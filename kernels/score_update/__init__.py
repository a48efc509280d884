"""How much attention each token received, decayed over the queries: column sums from the log-sum-exp, in float32."""

from __future__ import annotations

import torch

from sglang_ext.kernels.score_update import reference
from sglang_ext.kernels.score_update.reference import check

__all__ = ["check", "column_sums", "update_scores"]


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
    """`reference.column_sums` (see there), by the Triton kernel where the keys live on a GPU."""
    if keys.is_cuda:
        from sglang_ext.kernels.score_update.triton_impl import column_sums as fast

        return fast(
            query,
            keys,
            lse,
            before,
            count,
            scale=scale,
            beta=beta,
            reduction=reduction,
            homogeneous=homogeneous,
            every=every,
        )
    return reference.column_sums(
        query,
        keys,
        lse,
        before,
        count,
        scale=scale,
        beta=beta,
        reduction=reduction,
        homogeneous=homogeneous,
        every=every,
    )


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
    """`reference.update_scores` (see there), by Triton kernels where the scores live on a GPU."""
    update = reference.update_scores
    if score.is_cuda:
        from sglang_ext.kernels.score_update.triton_impl import update_scores as update
    update(
        score,
        entries,
        rows,
        query,
        keys,
        lse,
        before,
        count,
        scale=scale,
        beta=beta,
        reduction=reduction,
        skip=skip,
        every=every,
    )
