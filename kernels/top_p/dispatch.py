"""The top-p kernel for a device: CUDA's where it runs, Triton's elsewhere."""

from __future__ import annotations

import torch

from sglang_ext.kernels.top_p import cuda_impl, triton_impl
from sglang_ext.kernels.top_p.types import (
    TUNING,
    UNION,
    WITHOUT_GAPS,
    Expansion,
    Numbering,
    SearchedClusters,
    Selection,
    SetRule,
    TopPTuning,
    TopPWorkspace,
)


def select(
    logits: torch.Tensor,
    clusters: SearchedClusters,
    p: torch.Tensor,
    *,
    rule: SetRule = UNION,
    numbering: Numbering = WITHOUT_GAPS,
    out: Selection | None = None,
    expansion: Expansion | None = None,
    workspace: TopPWorkspace | None = None,
    tuning: TopPTuning = TUNING,
) -> Selection:
    """`triton_impl.select`, or the same in CUDA where that kernel runs.

    `workspace` and `tuning` are Triton's. `expansion` is CUDA's: the selection's `expanded` says whether it
    was followed.
    """
    heads, width = logits.shape[2:]
    refused = cuda_impl.refusal(logits.device, heads, width, group=rule.group, numbering=numbering)
    if refused is None and logits.dtype == torch.float32:
        return cuda_impl.select(logits, clusters, p, rule=rule, numbering=numbering, out=out, expansion=expansion)
    return triton_impl.select(
        logits, clusters, p, rule=rule, numbering=numbering, out=out, workspace=workspace, tuning=tuning
    )
