"""Attention with clamped distances in plain PyTorch: every logit is written down, and one softmax goes over all.

A row sees the tokens of its window up to itself, all sinks, and all of the memory. A token at a distance below `width`
is seen at that distance, and any other at the distance `width` - 1, as InfLLM does (Xiao et al., 2024) and Ltri-LLM
after it (Tang et al., 2024, section 3).
"""

from __future__ import annotations

import torch

from sglang_ext.kernels.clamped_attention.types import ChunkQuery, FarKeys, SeenKeys, check


def attend(
    query: ChunkQuery, window: SeenKeys, sinks: SeenKeys, memory: FarKeys, *, width: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a chunk.

    Args:
        query: of the chunk.
        window: of the tokens before the chunk, and of the chunk itself.
        sinks: of tokens before the window.
        memory: what else is seen.
        width: distances below it are true; any other is `width` - 1.
        scale: factor of the logits.

    Returns:
        (output [rows, heads, value_dim] in the query's dtype; natural log-sum-exp [rows, heads] over the window alone,
        float32 or wider).

    Raises:
        ValueError: shapes, dtypes, devices or places do not fit.
    """
    check(query, window, sinks, memory, width)
    local = seen_logits(query, window, width, scale)
    far = _products(query.far, memory.keys) * scale
    weights = torch.cat([local, seen_logits(query, sinks, width, scale), far], -1).softmax(-1)
    values = torch.cat([window.values, sinks.values, memory.values]).to(weights.dtype)
    grouped = values.repeat_interleave(query.near.shape[1] // values.shape[1], 1)
    out = torch.einsum("hrt,thd->rhd", weights, grouped)
    return out.to(query.near.dtype), local.logsumexp(-1).transpose(0, 1).contiguous()


def seen_logits(query: ChunkQuery, seen: SeenKeys, width: int, scale: float) -> torch.Tensor:
    """[heads, rows, tokens] logits, each at its distance, float32 or wider; -inf behind the row."""
    rows, device = torch.arange(query.near.shape[0], device=query.near.device), query.near.device
    tokens = torch.arange(seen.near.shape[0], device=device) + seen.first
    distance = (rows + query.begin).unsqueeze(1) - tokens
    logits = torch.where(distance < width, _products(query.near, seen.near), _products(query.far, seen.far)) * scale
    return logits.masked_fill(distance < 0, float("-inf"))


def _products(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[heads, rows, tokens], float32 or wider."""
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = keys.to(wide).repeat_interleave(query.shape[1] // keys.shape[1], 1)
    return torch.einsum("rhd,thd->hrt", query.to(wide), grouped)
