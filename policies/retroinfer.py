"""RetroInfer's fixed budgets over the same clusters (Chen et al., 2025): a baseline for Double-P.

The clusters of the highest estimated mass are computed token by token, the next ones by their centroid, the rest is
left out: numbers of clusters, whatever mass they hold. Clusters, summaries and attention are Double-P's.
"""

from __future__ import annotations

import torch

from sglang_ext.policies.options import RetroInfer


def select(share: torch.Tensor, config: RetroInfer) -> tuple[torch.Tensor, torch.Tensor]:
    """The clusters of the highest mean share in a group, lowest number first among equals.

    Args:
        share: [kv_heads, group, clusters] from `double_p.distribution`; 0 for empty clusters.
        config: the budgets, in shares of the non-empty clusters of each head.

    Returns:
        (exact, approx): [kv_heads, clusters] bool, disjoint.
    """
    mean = share.mean(1)
    rank = torch.sort(mean, dim=-1, descending=True, stable=True).indices.argsort(-1)
    filled = (mean > 0).sum(-1, keepdim=True)
    kept = torch.ceil(filled.double() * (config.exact + config.approx) - 1e-9)
    exact = torch.ceil(filled.double() * config.exact - 1e-9)
    first, second = rank < exact, rank < torch.maximum(kept, exact)
    return first & (mean > 0), second & ~first & (mean > 0)
