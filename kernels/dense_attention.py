"""Dense attention of prompts on NVIDIA GPUs, by kernels that are installed with SGLang.

On a Hopper GPU this is SGLang's own FlashAttention-3 (Shah et al., 2024), which comes compiled, and cuts the keys of
few rows among all multiprocessors. Elsewhere it is FlashInfer, which chooses a kernel for the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch

HEAD_SIZES = (64, 128, 256)
"""That both libraries have kernels for."""

FLASH_ATTENTION_3, FLASHINFER = "FlashAttention-3", "FlashInfer"
"""The libraries, as their users call them."""

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""`attend`, or what stands for it in tests."""


def serves(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `attend` takes such heads."""
    return device.type == "cuda" and head_dim in HEAD_SIZES and dtype in (torch.float16, torch.bfloat16)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    causal: bool,
    width: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of some rows to some tokens, without synchronisation.

    Args:
        query: [rows, heads, head_dim], float16 or bfloat16, on a CUDA device.
        keys, values: [tokens, kv_heads, head_dim] each, likewise; components of a head are contiguous.
        scale: factor of the logits.
        causal: whether the last row is the last token, and rows see nothing behind them; then there are at least as
            many tokens as rows.
        width: tokens that a row sees, itself included; None for all of them. Given, `causal` is, too.

    Returns:
        (output [rows, heads, head_dim] in the query's dtype, natural log-sum-exp [rows, heads] in float32), the second
        of any strides.

    Raises:
        ValueError: the width is below 1, or given without `causal`; there are fewer tokens than causal rows.
    """
    if width is not None and (width < 1 or not causal):
        raise ValueError(f"width={width}, causal={causal}: expected at least 1, with causal=True; or None")
    if causal and keys.shape[0] < query.shape[0]:
        raise ValueError(
            f"{query.shape[0]} rows over {keys.shape[0]} tokens: expected at least as many tokens as causal rows"
        )
    return _library(query.device)(query, keys, values, scale, causal, -1 if width is None else width - 1)


def library_of(device: torch.device) -> str:
    """Which of the libraries computes dense attention on a GPU."""
    return FLASH_ATTENTION_3 if _library(device) is _flash_attention_3 else FLASHINFER


@lru_cache
def _library(device: torch.device) -> Attend:
    """What computes attention on a GPU."""
    from sglang_ext.kernels.hopper import is_hopper

    return _flash_attention_3 if is_hopper(device) else _flashinfer


def _flash_attention_3(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool, left: int
) -> tuple[torch.Tensor, torch.Tensor]:
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    out, lse, *_ = flash_attn_with_kvcache(
        query.unsqueeze(0),
        keys.unsqueeze(0),
        values.unsqueeze(0),
        softmax_scale=scale,
        causal=causal,
        window_size=(left, -1),
        return_softmax_lse=True,
    )
    return out.squeeze(0), lse.squeeze(0).transpose(0, 1)


def _flashinfer(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool, left: int
) -> tuple[torch.Tensor, torch.Tensor]:
    from flashinfer import single_prefill_with_kv_cache

    out, lse = single_prefill_with_kv_cache(
        query, keys, values, causal=causal, kv_layout="NHD", sm_scale=scale, window_left=left, return_lse=True
    )
    return out, lse * math.log(2.0)  # FlashInfer's is to base 2
