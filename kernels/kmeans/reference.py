"""k-means over keys in plain PyTorch (Double-P, section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_ext.kernels.kmeans.clusters import ClusterPlan, Clusters, bounds, check, members


def kmeans(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    plan: ClusterPlan,
    *,
    iterations: int = 10,
    assignment: str = "inner",
) -> Clusters:
    """Cluster the keys of one layer, each segment and key-value head on its own.

    A segment's K centroids start at its keys number j * n // K. In each iteration every token goes to the centroid of
    the highest score, the lowest number among equals, then every centroid becomes the mean of its tokens; one that has
    none stays where it is. With k' = k - mean of the segment's keys and c' likewise, the score is k' . c' for `inner`,
    and k' . c' - |c'|^2 / 2 for `l2` (the nearest centroid).

    Args:
        key_cache: [num_slots, kv_heads, head_dim], rotated keys, any floating dtype; sums are float32 (or float64).
        value_cache: [num_slots, kv_heads, value_dim].
        slots: [tokens] integer KV slots in token order, segment after segment.
        plan: lengths of the segments, tokens a cluster, clusters a tile.
        iterations: rounds of assignment and update (the paper: about 10).
        assignment: `inner` or `l2`.

    Returns:
        The clusters; centroids and values are means over exactly the tokens that `labels` names.

    Raises:
        ValueError: shapes that do not fit, no iterations, or an unknown assignment.
    """
    check([key_cache], [value_cache], slots, plan, iterations, assignment)
    kv_heads, device = key_cache.shape[1], key_cache.device
    dtype = torch.promote_types(key_cache.dtype, torch.float32)
    keys = key_cache[slots.long()].transpose(0, 1).to(dtype)  # [kv_heads, tokens, head_dim]
    values = value_cache[slots.long()].transpose(0, 1).to(dtype)
    token, tile = bounds(plan.lengths), bounds(plan.tiles)
    labels = torch.empty(kv_heads, plan.tokens, dtype=torch.int32, device=device)
    for segment, count in enumerate(plan.clusters):
        part = keys[:, token[segment] : token[segment + 1]]
        part = part - part.mean(1, keepdim=True)
        length = part.shape[1]
        centroids = part[:, torch.arange(count, device=device) * length // count]
        for _ in range(iterations):
            score = part @ centroids.transpose(1, 2)
            if assignment == "l2":
                score = score - centroids.square().sum(-1).unsqueeze(1) / 2
            own = score.argmax(-1)
            sums, sizes = _sums(part, own, count)
            centroids = torch.where(sizes > 0, sums / sizes.clamp(min=1), centroids)
        labels[:, token[segment] : token[segment + 1]] = (own + tile[segment] * plan.width).int()
    cells = tile[-1] * plan.width
    order, sizes, starts = members(labels, cells)
    means = []
    for source, cache in ((keys, key_cache), (values, value_cache)):
        sums, counted = _sums(source, labels.long(), cells)
        mean = (sums / counted.clamp(min=1)).to(cache.dtype)
        means.append(mean.view(kv_heads, tile[-1], plan.width, -1).transpose(0, 1).contiguous())
    sizes, starts = (x.view(kv_heads, tile[-1], plan.width).transpose(0, 1).contiguous() for x in (sizes, starts))
    return Clusters(means[0], means[1], sizes, starts, order, labels)


def kmeans_layers(
    key_caches: Sequence[torch.Tensor],
    value_caches: Sequence[torch.Tensor],
    slots: torch.Tensor,
    plan: ClusterPlan,
    *,
    iterations: int = 10,
    assignment: str = "inner",
) -> Clusters:
    """`kmeans` of several layers, whose caches are of one shape: tensors with layers in front."""
    check(key_caches, value_caches, slots, plan, iterations, assignment)
    return Clusters.of_layers(
        [
            kmeans(keys, values, slots, plan, iterations=iterations, assignment=assignment)
            for keys, values in zip(key_caches, value_caches, strict=True)
        ]
    )


def _sums(vectors: torch.Tensor, labels: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(sums [kv_heads, count, dim], sizes [kv_heads, count, 1]) of vectors [kv_heads, tokens, dim] by label."""
    sums = vectors.new_zeros(vectors.shape[0], count, vectors.shape[2])
    sums.scatter_add_(1, labels.unsqueeze(-1).expand_as(vectors), vectors)
    sizes = vectors.new_zeros(vectors.shape[0], count)
    return sums, sizes.scatter_add_(1, labels, torch.ones_like(labels, dtype=vectors.dtype)).unsqueeze(-1)
