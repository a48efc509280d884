"""RetroInfer's fixed budgets over the same clusters (Chen et al., 2025): a baseline for Double-P.

The clusters of the highest estimated mass are computed token by token, the next ones by their centroid, the rest is
left out: numbers of clusters, whatever mass they hold. Clusters, summaries and attention are Double-P's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RetroInfer:
    """How many clusters are exact and approximated.

    Attributes:
        exact: share of the clusters computed token by token (its authors: 1.8%).
        approx: share of the clusters computed by their centroid (23.2%).
    """

    exact: float = 0.018
    approx: float = 0.232

    def __post_init__(self) -> None:
        if min(self.exact, self.approx) < 0 or self.exact + self.approx > 1:
            raise ValueError(f"exact={self.exact}, approx={self.approx}: expected shares that sum to at most 1")

    def budgets(self, clusters: int) -> tuple[int, int]:
        """(clusters kept, clusters of them exact) out of so many non-empty ones; rounded up."""
        # Less 1e-9: a product that should be whole must not be rounded up for its last bit.
        exact = math.ceil(self.exact * clusters - 1e-9)
        return max(exact, math.ceil((self.exact + self.approx) * clusters - 1e-9)), exact


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
