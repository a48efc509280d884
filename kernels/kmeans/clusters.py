"""What k-means is asked for, and what it gives: tiles of clusters that fit `cluster_attention`'s pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_ext.kernels.limits import ASSIGNMENTS


@dataclass(frozen=True)
class ClusterPlan:
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
    """Clusters of one layer's tokens; of several layers' with a dimension [layers] in front of each tensor.

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

    def layer(self, number: int) -> Clusters:
        """Those of one of several layers."""
        return Clusters(**{name: tensor[number] for name, tensor in vars(self).items()})

    @staticmethod
    def of_layers(layers: Sequence[Clusters]) -> Clusters:
        """Those of several layers, of equal plans, together."""
        return Clusters(**{name: torch.stack([vars(each)[name] for each in layers]) for name in vars(layers[0])})


def check(
    key_caches: Sequence[torch.Tensor],
    value_caches: Sequence[torch.Tensor],
    slots: torch.Tensor,
    plan: ClusterPlan,
    iterations: int,
    assignment: str,
) -> None:
    """Raise ValueError where the input of `kmeans_layers` does not fit."""
    if not key_caches or len(value_caches) != len(key_caches):
        raise ValueError(
            f"{len(key_caches)} layers of keys, {len(value_caches)} of values: expected as many, and at least one"
        )
    first, last = key_caches[0], value_caches[0]
    if first.dim() != 3 or last.dim() != 3 or last.shape[:2] != first.shape[:2]:
        raise ValueError(
            f"caches of shapes {tuple(first.shape)} and {tuple(last.shape)}: expected "
            "[num_slots, kv_heads, head_dim] and the same slots and heads"
        )
    for one, caches in ((first, key_caches), (last, value_caches)):
        for cache in caches:
            if cache.dtype.itemsize == 1:
                raise ValueError(f"caches of {cache.dtype}: k-means sums 16 bits or more; see `kernels.float8.widened`")
            if cache.shape != one.shape or cache.dtype != one.dtype:
                raise ValueError(
                    f"layers of {tuple(one.shape)} {one.dtype} and {tuple(cache.shape)} {cache.dtype}: expected caches "
                    "of one shape and type"
                )
    if tuple(slots.shape) != (plan.tokens,):
        raise ValueError(
            f"slots of shape {tuple(slots.shape)} for a plan of {plan.tokens} tokens: expected one a token"
        )
    if iterations < 1:
        raise ValueError(f"iterations={iterations}: expected at least 1")
    if assignment not in ASSIGNMENTS:
        raise ValueError(f"assignment={assignment!r}: expected one of {', '.join(ASSIGNMENTS)}")


def members(labels: torch.Tensor, cells: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group tokens by label, row by row.

    One stable sort of small integers, all rows at once: the same result in every run, without atomics.

    Args:
        labels: [..., tokens] int32 in [0, cells).
        cells: how many there are.

    Returns:
        (order [..., tokens], sizes [..., cells], starts [..., cells]), int32: tokens by label, ascending in each.
    """
    shape, tokens, device = labels.shape[:-1], labels.shape[-1], labels.device
    rows = shape.numel()
    wide = torch.int64 if rows * cells > torch.iinfo(torch.int32).max else torch.int32
    row = torch.arange(rows, device=device, dtype=wide).unsqueeze(1)
    found = torch.sort((labels.reshape(rows, tokens) + row * cells).flatten(), stable=True)
    edges = torch.searchsorted(found.values, torch.arange(rows * cells + 1, device=device, dtype=wide))
    order = (found.indices.view(rows, tokens) - row.long() * tokens).int()
    starts = (edges[:-1].view(rows, cells) - row.long() * tokens).int()
    sizes = (edges[1:] - edges[:-1]).int()
    return order.view(labels.shape), sizes.view(*shape, cells), starts.view(*shape, cells)


def bounds(lengths: Sequence[int]) -> list[int]:
    """First of each run, and the end of the last."""
    edges = [0]
    for length in lengths:
        edges.append(edges[-1] + length)
    return edges
