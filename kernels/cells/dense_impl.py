"""Attention of a strided prefill on NVIDIA GPUs: a dense kernel over the contiguous window."""

from __future__ import annotations

import torch

from sglang_ext.kernels import dense_attention


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.attend` in half precision, without synchronisation; contiguous float32 log-sum-exps.

    The causal mask of fewer queries than keys is aligned at the end: what a stride behind its window sees.
    """
    out, lse = dense_attention.attend(query, keys, values, scale=scale, causal=True)
    return out, lse.contiguous()
