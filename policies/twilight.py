"""Twilight: token top-p inside a fixed budget of candidates (Lin et al., 2025): a baseline for Double-P.

Quest chooses candidate tokens; their attention is estimated from keys of 4 bits; the smallest set of candidates that
reaches p of the *estimated mass of the candidates* is computed exactly. What the budget missed cannot come back, which
is why the mass that is really recovered may fall short of p (Double-P, Figure 3).
"""

from __future__ import annotations

import torch

from sglang_ext.kernels.top_p import top_p_mask
from sglang_ext.policies.options import Twilight
from sglang_ext.policies.quest import page_bounds, page_scores
from sglang_ext.policies.quest import select as select_pages


def quantise(keys: torch.Tensor) -> torch.Tensor:
    """Keys as 4 bits would give them back: each vector's range in 15 equal steps, rounded to the nearest.

    Args:
        keys: [..., head_dim].

    Returns:
        A tensor like `keys`.
    """
    low, high = keys.amin(-1, keepdim=True), keys.amax(-1, keepdim=True)
    step = (high - low) / 15
    return low + torch.round((keys - low) / torch.where(step > 0, step, torch.ones_like(step))) * step


def select(query: torch.Tensor, keys: torch.Tensor, config: Twilight, scale: float | None = None) -> torch.Tensor:
    """The tokens that are computed exactly.

    Args:
        query: [kv_heads, group, head_dim].
        keys: [kv_heads, tokens, head_dim], at least one token, sinks and window left out.
        config: candidates, estimate and p.
        scale: factor of the logits; None: head_dim ** -0.5.

    Returns:
        [kv_heads, tokens] bool.
    """
    tokens = keys.shape[1]
    scores = page_scores(query, *page_bounds(keys, config.candidates.page))
    candidate = select_pages(scores, tokens, config.candidates).unsqueeze(1)
    seen = quantise(keys) if config.estimate == "int4" else keys
    x = torch.einsum("hgd,hnd->hgn", query, seen) * (query.shape[-1] ** -0.5 if scale is None else scale)
    share = torch.softmax(x.masked_fill(~candidate, float("-inf")), dim=-1)
    if config.group == "mean":
        share = share.mean(1, keepdim=True)
    return top_p_mask(share, config.p).any(1)
