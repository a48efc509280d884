"""What k-means is asked for, and what it gives: tiles of clusters that fit `cluster_attention`'s pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ASSIGNMENTS = ("inner", "l2")


@dataclass(frozen=True)
class Plan:
    """How runs of tokens are cut into clusters; on the host, from lengths alone.

    Attributes:
        lengths: tokens of each segment, one after the other; a segment is clustered on its own.
        cluster: about how many tokens make a cluster (the paper: 16): a segment of n tokens gets ceil(n / cluster).
        width: clusters of a tile; each segment fills whole tiles, the last of them with empty clusters.
    """

    lengths: tuple[int, ...]
    cluster: int = 16
    width: int = 64

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"segments of {self.lengths} tokens: expected at least one, each of at least one token")
        if self.cluster < 1 or self.width < 1:
            raise ValueError(f"cluster={self.cluster}, width={self.width}: expected at least 1")

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def clusters(self) -> tuple[int, ...]:
        """Clusters of each segment, the padding of tiles not counted."""
        return tuple(-(-length // self.cluster) for length in self.lengths)

    @property
    def tiles(self) -> tuple[int, ...]:
        """Tiles of each segment."""
        return tuple(-(-clusters // self.width) for clusters in self.clusters)


@dataclass(frozen=True)
class Clusters:
    """Clusters of one layer's tokens.

    Attributes:
        centroids: [tiles, kv_heads, width, head_dim] mean keys, in the keys' dtype; 0 for an empty cluster.
        values: [tiles, kv_heads, width, value_dim] mean values, in the values' dtype; 0 for an empty cluster.
        sizes: [tiles, kv_heads, width] int32.
        starts: [tiles, kv_heads, width] int32 index of each cluster's first token in `order`.
        order: [kv_heads, tokens] int32 token numbers 0 .. tokens - 1, sorted by cluster, ascending in each. A segment's
            tokens stay inside the segment's range.
        labels: [kv_heads, tokens] int32: `tile * width + number in the tile` of each token's cluster.
    """

    centroids: torch.Tensor
    values: torch.Tensor
    sizes: torch.Tensor
    starts: torch.Tensor
    order: torch.Tensor
    labels: torch.Tensor


def check(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    plan: Plan,
    iterations: int,
    assignment: str,
) -> None:
    """Raise ValueError where the input of `kmeans` does not fit."""
    if key_cache.dim() != 3 or value_cache.shape[:2] != key_cache.shape[:2]:
        raise ValueError(
            f"caches of shapes {tuple(key_cache.shape)} and {tuple(value_cache.shape)}: expected "
            "[num_slots, kv_heads, head_dim] and the same slots and heads"
        )
    if tuple(slots.shape) != (plan.tokens,):
        raise ValueError(
            f"slots of shape {tuple(slots.shape)} for a plan of {plan.tokens} tokens: expected one a token"
        )
    if iterations < 1:
        raise ValueError(f"iterations={iterations}: expected at least 1")
    if assignment not in ASSIGNMENTS:
        raise ValueError(f"assignment={assignment!r}: expected one of {', '.join(ASSIGNMENTS)}")


def sorted_members(labels: torch.Tensor, cells: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group tokens by label: (order [kv_heads, tokens] int32, sizes and starts [kv_heads, cells] int32).

    A stable sort of small integers: the same result in every run, without atomics.
    """
    order = torch.sort(labels, dim=-1, stable=True)
    edges = torch.arange(cells + 1, device=labels.device, dtype=labels.dtype).expand(labels.shape[0], -1).contiguous()
    bounds = torch.searchsorted(order.values, edges, out_int32=True)
    return order.indices.int(), bounds[:, 1:] - bounds[:, :-1], bounds[:, :-1].contiguous()


def bounds(lengths: Sequence[int]) -> list[int]:
    """First of each run, and the end of the last."""
    edges = [0]
    for length in lengths:
        edges.append(edges[-1] + length)
    return edges
