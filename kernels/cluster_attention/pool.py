"""Where clusters are kept, and which of them a request reads.

Clusters live in tiles of `width` clusters, as tokens live in pages: a prefix node owns whole tiles, a request is a list
of tiles, and any number of requests list the same tile. A cluster's *cell* is its number in the request's list,
`place of the tile * width + number inside the tile`. Cells without tokens have size 0.

A cluster stays where its keys were written. Where a tile is seen at other positions than it was written at, the query
is rotated instead (`ClusterRows.rotation`): one angle a tile, as all tokens of a block move together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ClusterPool:
    """Summaries and members of clusters, one layer.

    Attributes:
        centroids: [tiles, kv_heads, width, head_dim] mean keys C, rotated as their keys were; the KV cache's dtype.
        values: [tiles, kv_heads, width, value_dim] mean values (Double-P, equation 2).
        sizes: [tiles, kv_heads, width] int32 tokens of each cluster, 0 for an empty one.
        starts: [tiles, kv_heads, width] int32 index of each cluster's first token in `members`.
        members: [kv_heads, tokens] int32 KV slots, cluster by cluster.
    """

    centroids: torch.Tensor
    values: torch.Tensor
    sizes: torch.Tensor
    starts: torch.Tensor
    members: torch.Tensor

    @property
    def width(self) -> int:
        """Clusters of a tile; a power of two."""
        return self.centroids.shape[2]


@dataclass(frozen=True)
class ClusterRows:
    """The clusters that each request of a batch reads; equal for all layers.

    Attributes:
        tiles: [batch, most tiles] int32 tiles of the pool.
        counts: [batch] int32 tiles of each request; 0 for one that has no clusters.
        rotation: [batch, most tiles] int32: which of the query's rotations reads the tile; None: the only one.
    """

    tiles: torch.Tensor
    counts: torch.Tensor
    rotation: torch.Tensor | None = None


@dataclass(frozen=True)
class DenseTokens:
    """Tokens that every head reads exactly: sinks, the window, new tokens, or all tokens of a dense request.

    Attributes:
        slots: [batch, most tokens] int32 KV slots, in any order; -1 is skipped.
        counts: [batch] int32 entries of each request, skipped ones counted.
        rotation: [batch, ceil(most tokens / tile)] int32: which of the query's rotations reads each run of `tile`
            entries (the tile of `Selection`); None: the only one.
    """

    slots: torch.Tensor
    counts: torch.Tensor
    rotation: torch.Tensor | None = None


def check(query: torch.Tensor, pool: ClusterPool, rows: ClusterRows, dense: DenseTokens | None = None) -> None:
    """Raise ValueError where the parts do not fit each other."""
    if query.dim() != 4:
        raise ValueError(f"query of shape {tuple(query.shape)}: expected [batch, rotations, heads, head_dim]")
    batch, rotations, heads, dim = query.shape
    kv_heads = pool.centroids.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads over {kv_heads} key-value heads: expected a multiple")
    if pool.centroids.shape[3] != dim:
        raise ValueError(f"query head_dim {dim}, centroids' {pool.centroids.shape[3]}: expected the same")
    if pool.width & (pool.width - 1) or pool.width < 16:
        raise ValueError(f"cluster tiles of {pool.width}: expected a power of two of at least 16")
    for what, entries in (("clusters", rows), ("dense tokens", dense)):
        if entries is None:
            continue
        if entries.counts.shape[0] != batch:
            raise ValueError(f"{what} of {entries.counts.shape[0]} requests for {batch} queries: expected the same")
        if entries.rotation is None and rotations != 1:
            raise ValueError(f"{rotations} rotations of the query but none named for the {what}: pass `rotation`")
