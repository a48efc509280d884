"""Attention of a strided prefill on NVIDIA GPUs: FlashInfer's dense kernel over the contiguous window."""

from __future__ import annotations

import math

import torch

HEAD_SIZES = (64, 128, 256)
"""That FlashInfer has kernels for."""


def serves(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `attend` takes such heads."""
    return device.type == "cuda" and head_dim in HEAD_SIZES and dtype in (torch.float16, torch.bfloat16)


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.attend` in half precision, without synchronisation; float32 log-sum-exp.

    FlashInfer's causal mask of fewer queries than keys is aligned at the end: what a stride behind its window sees.

    Args:
        query, keys, values, scale: as for the reference.
        backend: FlashInfer's kernel family, `fa2`, `fa3`, or `auto`, which takes the one for the GPU.
    """
    from flashinfer import single_prefill_with_kv_cache

    out, lse = single_prefill_with_kv_cache(
        query, keys, values, causal=True, kv_layout="NHD", sm_scale=scale, return_lse=True, backend=backend
    )
    return out, lse * math.log(2.0)  # FlashInfer's is to base 2
