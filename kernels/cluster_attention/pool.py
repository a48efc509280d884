"""Where clusters are kept.

Clusters live in tiles of `width` clusters, as tokens live in pages: a prefix node owns whole tiles, a request is a list
of tiles, and any number of requests list the same tile. A cluster's *cell* is its number in the request's list,
`place of the tile * width + number inside the tile`. Cells without tokens have size 0.

A cluster stays where its keys were written. Where a tile is seen at other positions than it was written at, the query
is rotated instead (`ClusterRows.rotation`): one angle a tile, as all tokens of a block move together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_ext.kernels.cluster_attention.types import ClusterRows, DenseTokens
from sglang_ext.kernels.float8 import FLOAT8, bytes_of
from sglang_ext.kernels.kmeans.clusters import Clusters


def centroid_dtype(kind: str, dtype: torch.dtype) -> torch.dtype:
    """Of centroids of one of `CENTROIDS`, beside a KV cache in `dtype`."""
    return FLOAT8 if kind == "float8" else dtype


def narrowed(centroids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Centroids in `dtype`: float8 has no number beyond 448, which becomes the largest one instead of NaN."""
    if dtype != FLOAT8:
        return centroids.to(dtype)
    most = torch.finfo(FLOAT8).max
    return centroids.clamp(-most, most).to(FLOAT8)


@dataclass(frozen=True)
class ClusterPool:
    """Summaries and members of clusters, one layer; or several, with a dimension [layers] in front of each tensor.

    Attributes:
        centroids: [tiles, kv_heads, width, head_dim] mean keys C, rotated as their keys were; the KV cache's dtype, or
            float8 e4m3.
        values: [tiles, kv_heads, width, value_dim] mean values (Double-P, equation 2).
        sizes: [cell tiles, kv_heads, width] int32 tokens of each cluster, 0 for an empty one. -n: n tokens of a cluster
            that is cut: they are always read one by one, and their centroid stands for none of them.
        starts: [cell tiles, kv_heads, width] int32 index of each cluster's first token in `members`. There may be more
            tiles of sizes and starts than of centroids: for cuts (`ClusterRows.sized`).
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
        return self.centroids.shape[-2]

    def layers(self, which: int | slice) -> ClusterPool:
        """One or some of several layers: the same memory."""
        return ClusterPool(**{name: tensor[which] for name, tensor in vars(self).items()})

    @staticmethod
    def empty(
        tiles: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
        width: int = 64,
        centroids: str = "same",
    ) -> ClusterPool:
        """Uninitialised room for so many tiles and clustered tokens.

        With 16 tokens a cluster, head_dim 128 and bfloat16 this is 7.1% of the keys and values that it summarises, plus
        what the last tile of each segment leaves empty.
        """
        shape = (tiles, kv_heads, width)
        return ClusterPool(
            torch.empty(*shape, head_dim, dtype=centroid_dtype(centroids, dtype), device=device),
            torch.empty(*shape, value_dim, dtype=dtype, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty(kv_heads, tokens, dtype=torch.int32, device=device),
        )

    def write(self, tiles: torch.Tensor, begin: int, clusters: Clusters, slots: torch.Tensor) -> None:
        """Keep what `kmeans` returned.

        Args:
            tiles: [clusters' tiles] integer, where its tiles go, on the pool's device.
            begin: where its tokens go in `members`: [begin, begin + tokens), the same for all heads.
            clusters: of as many layers as the pool has, with tiles of the pool's width.
            slots: [tokens] the KV slots that were clustered.

        Raises:
            ValueError: tiles of another number or width, or no room in `members`.
        """
        count, _, width, _ = clusters.centroids.shape[-4:]
        if tiles.shape != (count,) or width != self.width:
            raise ValueError(
                f"{count} cluster tiles of {width} for {tuple(tiles.shape)} places of {self.width}: expected as many "
                "places as tiles, of one width"
            )
        end, room = begin + slots.numel(), self.members.shape[-1]
        if clusters.order.shape[-1] != slots.numel() or begin < 0 or end > room:
            raise ValueError(
                f"{slots.numel()} slots for {clusters.order.shape[-1]} clustered tokens at {begin} of {room}: expected "
                "one a token, and room for all"
            )
        if clusters.centroids.shape[:-4] != self.centroids.shape[:-4]:
            raise ValueError(
                f"clusters of {tuple(clusters.centroids.shape[:-4])} layers for a pool of "
                f"{tuple(self.centroids.shape[:-4])}: expected as many"
            )
        places = tiles.long()
        new = narrowed(clusters.centroids, self.centroids.dtype)
        bytes_of(self.centroids)[..., places, :, :, :] = bytes_of(new)
        self.values[..., places, :, :, :] = clusters.values.to(self.values.dtype)
        self.sizes[..., places, :, :] = clusters.sizes
        self.starts[..., places, :, :] = clusters.starts + begin
        self.members[..., begin:end] = slots.int()[clusters.order.long()]


def check(query: torch.Tensor, pool: ClusterPool, rows: ClusterRows, dense: DenseTokens | None = None) -> None:
    """Raise ValueError where the parts do not fit each other."""
    if query.dim() != 4:
        raise ValueError(f"query of shape {tuple(query.shape)}: expected [batch, rotations, heads, head_dim]")
    batch, rotations, heads, dim = query.shape
    kv_heads = pool.centroids.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads over {kv_heads} key-value heads: expected a multiple")
    if dense is None and pool.centroids.shape[3] != dim:  # attention reads no centroids: other scores may stand there
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
