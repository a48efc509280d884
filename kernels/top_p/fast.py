"""The top-p kernel for a device: CUDA's where it runs, Triton's elsewhere."""

from __future__ import annotations

from typing import Any

import torch

from sglang_ext.kernels.top_p import cuda_impl, triton_impl
from sglang_ext.kernels.top_p.selection import Expansion, Selection


def select(
    logits: torch.Tensor,
    sizes: torch.Tensor,
    starts: torch.Tensor,
    cells: torch.Tensor,
    p: torch.Tensor,
    *,
    group: str = "union",
    by_count: bool = False,
    run: int = 1,
    align: int = 1,
    out: Selection | None = None,
    expansion: Expansion | None = None,
    workspace: triton_impl.TopPWorkspace | None = None,
    tuning: triton_impl.TopPTuning = triton_impl.TUNING,
) -> Selection:
    """`triton_impl.select`, or the same in CUDA where that kernel runs.

    `workspace` and `tuning` are Triton's. `expansion` is CUDA's: the selection's `expanded` says whether it
    was followed.
    """
    options: dict[str, Any] = dict(group=group, by_count=by_count, run=run, align=align, out=out)
    heads, width = logits.shape[2:]
    refused = cuda_impl.refusal(logits.device, heads, width, group=group, run=run, align=align)
    if refused is None and logits.dtype == torch.float32:
        return cuda_impl.select(logits, sizes, starts, cells, p, expansion=expansion, **options)
    return triton_impl.select(logits, sizes, starts, cells, p, workspace=workspace, tuning=tuning, **options)
