"""Double-P: two-stage top-p over clusters of keys (Ni et al., "Double-P: Hierarchical Top-P Sparse Attention").

The middle tokens of a request (all but the sinks and the window) are clustered by their keys. A decoding step estimates
each cluster's attention mass from its centroid, keeps the smallest set that reaches p1, computes the smallest set that
reaches p2 token by token and the rest of the kept ones by their centroid, all in one softmax with sinks and window.

The functions follow the paper's equations in order. Shapes: `query` [kv_heads, group, head_dim] is one request's query
row, its heads grouped by the key-value head that they read; clusters [kv_heads, clusters, ...]; tokens
[kv_heads, tokens, ...]. All tensors of a call are on one device; float32 or float64, integers int32 or int64. A cluster
of size 0 is padding: its centroid and value are not looked at.
"""

from __future__ import annotations

import torch

from sglang_ext.kernels.top_p import top_p_mask
from sglang_ext.policies.options import DoubleP


def cluster_values(values: torch.Tensor, labels: torch.Tensor, clusters: int) -> torch.Tensor:
    """Equation 2: the mean value of each cluster.

    Args:
        values: [kv_heads, tokens, value_dim].
        labels: [kv_heads, tokens] int64, the cluster of each token.
        clusters: how many there are.

    Returns:
        [kv_heads, clusters, value_dim], 0 for an empty cluster.
    """
    sums = values.new_zeros(values.shape[0], clusters, values.shape[2])
    sums.scatter_add_(1, labels.unsqueeze(-1).expand_as(values), values)
    return sums / cluster_sizes(labels, clusters).clamp(min=1).unsqueeze(-1).to(values.dtype)


def cluster_sizes(labels: torch.Tensor, clusters: int) -> torch.Tensor:
    """[kv_heads, clusters] int64 tokens of each cluster."""
    return torch.zeros(labels.shape[0], clusters, dtype=torch.int64, device=labels.device).scatter_add_(
        1, labels, torch.ones_like(labels)
    )


def logits(query: torch.Tensor, keys: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """Equation 3: x = q . k / sqrt(d), for tokens' keys and for centroids alike.

    Args:
        query: [kv_heads, group, head_dim].
        keys: [kv_heads, n, head_dim].
        scale: factor; None: head_dim ** -0.5.

    Returns:
        [kv_heads, group, n].
    """
    return torch.einsum("hgd,hnd->hgn", query, keys) * (query.shape[-1] ** -0.5 if scale is None else scale)


def exact_log_mass(x: torch.Tensor, labels: torch.Tensor, clusters: int) -> torch.Tensor:
    """Equation 4, its logarithm: log of the sum of exp(x) over the tokens of each cluster.

    Args:
        x: [kv_heads, group, tokens] logits of the tokens.
        labels: [kv_heads, tokens] int64.
        clusters: how many there are.

    Returns:
        [kv_heads, group, clusters], -inf for an empty cluster.
    """
    index = labels.unsqueeze(1).expand_as(x)
    empty = x.new_full((*x.shape[:-1], clusters), float("-inf"))
    top = empty.scatter_reduce(-1, index, x, "amax")
    safe = torch.where(torch.isinf(top), torch.zeros_like(top), top)
    sums = torch.zeros_like(top).scatter_add(-1, index, torch.exp(x - safe.gather(-1, index)))
    return safe + sums.log()


def estimated_log_mass(
    query: torch.Tensor, centroids: torch.Tensor, sizes: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Equation 5: log of s exp(x) = x + log s, x being the centroid's logit.

    Args:
        query: [kv_heads, group, head_dim].
        centroids: [kv_heads, clusters, head_dim].
        sizes: [kv_heads, clusters] integer.
        scale: as for `logits`.

    Returns:
        [kv_heads, group, clusters], -inf for an empty cluster.
    """
    x = logits(query, centroids, scale)
    return torch.where(sizes.unsqueeze(1) > 0, x + sizes.unsqueeze(1).to(x.dtype).log(), float("-inf"))


def distribution(log_mass: torch.Tensor) -> torch.Tensor:
    """Equation 6: the share of each cluster in the mass of all clusters, [kv_heads, group, clusters].

    Takes estimated masses, or exact ones (`exact_log_mass`), for which the guarantee is about true attention. A head
    without any token has no mass: all 0.
    """
    return torch.nan_to_num(torch.softmax(log_mass, dim=-1))


def select(share: torch.Tensor, config: DoubleP) -> tuple[torch.Tensor, torch.Tensor]:
    """Equation 7, both stages (section 4.3), for the heads of a group together.

    Args:
        share: [kv_heads, group, clusters] from `distribution`.
        config: p1, p2, the tail and the group rule.

    Returns:
        (exact, approx): [kv_heads, clusters] bool, disjoint.
    """
    p1, p2 = config.stages
    if config.group == "mean":
        share = share.mean(1, keepdim=True)
    kept, exact = top_p_mask(share, p1).any(1), top_p_mask(share, p2).any(1)
    return exact, kept & ~exact


def attend(
    x: torch.Tensor,
    values: torch.Tensor,
    labels: torch.Tensor,
    log_mass: torch.Tensor,
    mean_values: torch.Tensor,
    exact: torch.Tensor,
    approx: torch.Tensor,
    dense_x: torch.Tensor,
    dense_values: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Equations 8 and 9: exact tokens and summaries over one denominator, sinks and window among the exact tokens.

    Args:
        x: [kv_heads, group, tokens] logits of the clustered tokens.
        values: [kv_heads, tokens, value_dim].
        labels: [kv_heads, tokens] int64 cluster of each.
        log_mass: [kv_heads, group, clusters] estimated (equation 5).
        mean_values: [kv_heads, clusters, value_dim] (equation 2).
        exact, approx: [kv_heads, clusters] bool from `select`.
        dense_x: [kv_heads, group, m] logits of the tokens outside the clusters.
        dense_values: [kv_heads, m, value_dim].

    Returns:
        (output [kv_heads, group, value_dim], log of the denominator [kv_heads, group]).
    """
    tokens = exact.gather(1, labels).unsqueeze(1)
    scores = torch.cat(
        [
            dense_x,
            x.masked_fill(~tokens, float("-inf")),
            log_mass.masked_fill(~approx.unsqueeze(1), float("-inf")),
        ],
        dim=-1,
    )
    summaries = mean_values.masked_fill(~approx.unsqueeze(-1), 0.0)  # an unused one may hold anything
    seen = torch.cat([dense_values, values, summaries], dim=1)
    return torch.nan_to_num(torch.softmax(scores, dim=-1)) @ seen, torch.logsumexp(scores, dim=-1)


def summaries(
    log_mass: torch.Tensor, mean_values: torch.Tensor, approx: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Equations 8 and 9, the approximated clusters alone: to be merged with exact tokens by log-sum-exp.

    Args:
        log_mass: [kv_heads, group, clusters] estimated (equation 5).
        mean_values: [kv_heads, clusters, value_dim] (equation 2).
        approx: [kv_heads, clusters] bool from `select`.

    Returns:
        (output [kv_heads, group, value_dim], log of their mass [kv_heads, group], -inf where there are none).
    """
    scores = log_mass.masked_fill(~approx.unsqueeze(1), float("-inf"))
    seen = mean_values.masked_fill(~approx.unsqueeze(-1), 0.0)  # an unused one may hold anything
    return torch.nan_to_num(torch.softmax(scores, dim=-1)) @ seen, torch.logsumexp(scores, dim=-1)


def recovered_mass(
    x: torch.Tensor, labels: torch.Tensor, chosen: torch.Tensor, dense_x: torch.Tensor | None = None
) -> torch.Tensor:
    """Share of the true attention that falls on tokens of the chosen clusters and on those outside all clusters.

    Args:
        x: [kv_heads, group, tokens] logits of the clustered tokens.
        labels: [kv_heads, tokens] int64 cluster of each.
        chosen: [kv_heads, clusters] bool: kept (exact or approximated), or exact alone.
        dense_x: [kv_heads, group, m] logits of sinks and window, which count as recovered; None: clusters alone.

    Returns:
        [kv_heads, group], 0 to 1.
    """
    kept = chosen.gather(1, labels).unsqueeze(1)
    if dense_x is not None:
        x = torch.cat([dense_x, x], dim=-1)
        kept = torch.cat([kept.new_ones(kept.shape[0], 1, dense_x.shape[-1]), kept], dim=-1)
    return (torch.softmax(x, dim=-1) * kept).sum(-1)
