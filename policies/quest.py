"""Quest: top-k pages by an upper bound of their logits (Tang et al., 2024, section 3.3): a baseline for Double-P.

A page is `page` tokens one after the other. Per channel it keeps the smallest and the largest key component; a page's
score is the largest logit that a key inside these bounds could have.
"""

from __future__ import annotations

import torch

from sglang_ext.policies.options import Quest


def page_bounds(keys: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest component of every channel in every page.

    Args:
        keys: [kv_heads, tokens, head_dim], at least one token.
        page: tokens of a page; the last may be shorter.

    Returns:
        (low, high), each [kv_heads, pages, head_dim].
    """
    missing = -keys.shape[1] % page
    # Repeating the last token changes no bound.
    padded = torch.cat([keys, keys[:, -1:].expand(-1, missing, -1)], dim=1)
    paged = padded.view(keys.shape[0], -1, page, keys.shape[2])
    return paged.amin(2), paged.amax(2)


def page_scores(query: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Upper bound of q . k over each page: per channel the larger of q low and q high, summed.

    Args:
        query: [kv_heads, group, head_dim].
        low, high: [kv_heads, pages, head_dim] from `page_bounds`.

    Returns:
        [kv_heads, group, pages], unscaled.
    """
    return torch.einsum("hgd,hnd->hgn", query.clamp(min=0), high) + torch.einsum(
        "hgd,hnd->hgn", query.clamp(max=0), low
    )


def as_centroids(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Bounds as centroids of twice the dimension, so that the kernels of Double-P score pages.

    `page_scores` is one product: (max(q, 0), min(q, 0)) . (high, low). A page is then a cluster of consecutive tokens.

    Args:
        low, high: [..., head_dim].

    Returns:
        [..., 2 * head_dim].
    """
    return torch.cat([high, low], dim=-1)


def as_query(query: torch.Tensor) -> torch.Tensor:
    """The query that belongs to `as_centroids`: [..., head_dim] to [..., 2 * head_dim]."""
    return torch.cat([query.clamp(min=0), query.clamp(max=0)], dim=-1)


def select(scores: torch.Tensor, tokens: int, config: Quest) -> torch.Tensor:
    """The pages of the highest score, the best of the heads of a group counting; lowest number first among equals.

    Args:
        scores: [kv_heads, group, pages].
        tokens: how many tokens the pages hold.
        config: page and budget.

    Returns:
        [kv_heads, tokens] bool, the tokens that are read.
    """
    rank = torch.sort(scores.amax(1), dim=-1, descending=True, stable=True).indices.argsort(-1)
    return (rank < config.pages(tokens)).repeat_interleave(config.page, dim=-1)[:, :tokens]


def attend(
    x: torch.Tensor, values: torch.Tensor, chosen: torch.Tensor, dense_x: torch.Tensor, dense_values: torch.Tensor
) -> torch.Tensor:
    """Softmax attention over chosen tokens and those that are always read.

    Args:
        x: [kv_heads, group, tokens] logits; values: [kv_heads, tokens, value_dim].
        chosen: [kv_heads, tokens] bool, shared by a group, or [kv_heads, group, tokens].
        dense_x, dense_values: logits [kv_heads, group, m] and values [kv_heads, m, value_dim] of sinks and window.

    Returns:
        [kv_heads, group, value_dim].
    """
    chosen = chosen.unsqueeze(1) if chosen.dim() == 2 else chosen
    scores = torch.cat([dense_x, x.masked_fill(~chosen, float("-inf"))], dim=-1)
    return torch.nan_to_num(torch.softmax(scores, dim=-1)) @ torch.cat([dense_values, values], dim=1)
