"""Rows of `bench double_p`: caches with their clusters, keys planted in clusters, and copies that no cache holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sglang_ext.kernels.cluster_attention import ClusterPool
from sglang_ext.kernels.cluster_attention.rows import PlannedRow
from sglang_ext.kernels.cluster_attention.types import HeadShape
from sglang_ext.kernels.kmeans import Clusters
from sglang_ext.kernels.kmeans import kmeans as kmeans_reference
from sglang_ext.policies.double_p import DoubleP

SHAPES = {
    "llama-3.1-8b": HeadShape(heads=32, kv_heads=8, head_dim=128, value_dim=128, dtype=torch.bfloat16),
    # For trying the benchmark itself without a GPU: Triton's interpreter multiplies bfloat16 matrices wrongly.
    "tiny": HeadShape(heads=4, kv_heads=2, head_dim=32, value_dim=32, dtype=torch.float16),
}
WIDTH = 64
"""Clusters of a tile, as `cache.cluster_pool` has them."""

NOISE = 0.3
"""Standard deviation of a key around its planted centre, of the centre's own."""

COLD = 6
"""Times the L2 cache that the data of one round of calls must be."""

MOST_COPIES = 32


@dataclass(frozen=True)
class Level:
    """How peaked the attention over planted keys is.

    Attributes:
        deviation: standard deviation of the clusters' logits.
        shared: correlation of the logits of two heads of one group.
    """

    deviation: float
    shared: float


LEVELS = {"flat": Level(1.41, 0.9), "middle": Level(2.52, 0.55), "peaked": Level(2.87, 0.2)}
"""At (0.95, 0.7), 64K: 0.28, 0.08 and 0.05 of the tokens exact (union over a group of four), 0.43, 0.35 and 0.31 of the
clusters approximated."""


def cluster_on(device: torch.device) -> Callable[..., Clusters]:
    """k-means: kernels where there is a GPU, else plain PyTorch."""
    if device.type == "cuda":
        from sglang_ext.kernels.kmeans.dispatch import kmeans

        return kmeans
    return kmeans_reference


class CachedRows:
    """KV caches of one layer, rows one after the other, and the clusters that k-means finds in them.

    Args:
        length: tokens of a row.
        batch: rows, each with slots one after the other.
        shape: heads and components.
        config: sinks, window and clustering.
        device: of everything.
        cluster: `kernels.kmeans.kmeans` or its Triton form.

    Attributes:
        keys, values: [batch * length, kv_heads, ...], filled by `fill`.
        pool: their clusters.
        labels: of each row that was filled, [kv_heads, clustered tokens], numbered as `Clusters.labels` are.
        words: what keys they are, for the names of figures.
    """

    words = ""

    def __init__(
        self,
        length: int,
        batch: int,
        shape: HeadShape,
        config: DoubleP,
        device: torch.device,
        cluster: Callable[..., Clusters] = kmeans_reference,
    ) -> None:
        self.length, self.batch, self.shape, self.config, self.device = length, batch, shape, config, device
        self.begin, self.end = config.clustered(length)
        self.plan = config.plan(self.begin, self.end, WIDTH)
        self.scale = shape.head_dim**-0.5
        self._cluster = cluster
        kv_heads, dim, tokens = shape.kv_heads, shape.head_dim, self.end - self.begin
        self.keys = torch.empty(batch * length, kv_heads, dim, dtype=shape.dtype, device=device)
        self.values = torch.empty(batch * length, kv_heads, shape.value_dim, dtype=shape.dtype, device=device)
        self.tiles = sum(self.plan.tiles)
        self.pool = ClusterPool.empty(
            batch * self.tiles,
            kv_heads,
            dim,
            shape.value_dim,
            batch * tokens,
            shape.dtype,
            device,
            WIDTH,
            config.centroids,
        )
        self.labels: list[torch.Tensor] = []

    def fill(self, row: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Keep the keys and values [length, kv_heads, ...] of a row, cluster them; returns the labels."""
        slots = torch.arange(row * self.length, (row + 1) * self.length, dtype=torch.int32, device=self.device)
        self.keys[slots.long()] = keys.to(self.shape.dtype)
        self.values[slots.long()] = values.to(self.shape.dtype)
        clustered = slots[self.begin : self.end].contiguous()
        found = self._cluster(
            self.keys,
            self.values,
            clustered,
            self.plan,
            iterations=self.config.iterations,
            assignment=self.config.assignment,
        )
        places = torch.arange(row * self.tiles, (row + 1) * self.tiles, device=self.device)
        self.pool.write(places, row * (self.end - self.begin), found, clustered)
        self.labels.append(found.labels)
        return found.labels

    def queries(self, level: Level | None = None) -> torch.Tensor:
        """[batch, heads, head_dim]: the same at every call."""
        raise NotImplementedError

    def row(self, number: int) -> PlannedRow:
        """What a decoding step of this row reads."""
        tiles = np.arange(number * self.tiles, (number + 1) * self.tiles, dtype=np.int32)
        base = number * self.length
        return PlannedRow(
            tiles=tiles,
            sized=tiles,
            rotations=np.zeros(self.tiles, dtype=np.int32),
            deltas=(0,),
            spans=((base, self.begin, 0),),
            tail=(base + self.end, self.end),
            p=self.config.stages,
            tokens=self.end - self.begin,
        )

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one row."""
        shape = self.shape
        return self.length * shape.kv_heads * (shape.head_dim + shape.value_dim) * shape.dtype.itemsize

    @property
    def summary_bytes(self) -> int:
        """Clusters of one row: centroids, mean values, sizes, starts, members."""
        tokens = self.end - self.begin
        parts = (self.pool.centroids, self.pool.values, self.pool.sizes, self.pool.starts)
        per_tile = sum(x[0].numel() * x.element_size() for x in parts)
        return self.tiles * per_tile + tokens * self.shape.kv_heads * 4


class Planted(CachedRows):
    """Rows whose keys lie in planted clusters.

    Each row and head has one centre for 16 middle tokens, components normal(0, 1); a key is its centre plus
    normal(0, `NOISE`^2). Which tokens of a segment belong to a centre is shuffled, but for one token each: that with
    which k-means starts. So it finds the planted clusters, and what is timed does not depend on how well it clusters;
    that is measured on captured keys. Values, and the keys of sinks and window, are normal(0, 1). Positions play no
    part: keys stand as if rotated.

    A query of level (t, r) is t sqrt(head_dim) times the unit vector along sqrt(r) u + sqrt(1 - r) v, u of its group
    and v its own, both normal: the logits of the clusters have standard deviation t, correlated by r in a group.

    Args: as `CachedRows`; seed: of all random numbers.

    Attributes:
        agreed: share of the tokens that k-means has in their planted cluster.
    """

    words = "planted keys"

    def __init__(
        self,
        length: int,
        batch: int,
        shape: HeadShape,
        config: DoubleP,
        device: torch.device,
        cluster: Callable[..., Clusters] = kmeans_reference,
        seed: int = 0,
    ) -> None:
        super().__init__(length, batch, shape, config, device, cluster)
        self._seed = seed
        self._dice = torch.Generator(device=device).manual_seed(seed)
        kv_heads, dim = shape.kv_heads, shape.head_dim
        agreed = []
        for row in range(batch):
            planted = self._planted_labels()
            centres = self._normal(kv_heads, self.tiles * WIDTH, dim)
            keys = self._normal(length, kv_heads, dim)
            middle = centres.gather(1, planted.unsqueeze(-1).expand(-1, -1, dim)).transpose(0, 1)
            keys[self.begin : self.end] = middle + NOISE * keys[self.begin : self.end]
            labels = self.fill(row, keys, self._normal(length, kv_heads, shape.value_dim))
            agreed.append((labels == planted).float().mean())
        self.agreed = float(torch.stack(agreed).mean())

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._dice, device=self.device)

    def _planted_labels(self) -> torch.Tensor:
        """[kv_heads, tokens] int64, numbered as `Clusters.labels` are."""
        labels, tile = [], 0
        for length, count, tiles in zip(self.plan.lengths, self.plan.clusters, self.plan.tiles, strict=True):
            own = torch.full((self.shape.kv_heads, length), -1, device=self.device)
            number = torch.arange(count, device=self.device)
            first = number * length // count
            own[:, first] = number
            rest = torch.ones(length, dtype=torch.bool, device=self.device)
            rest[first] = False
            free = rest.nonzero().flatten()
            drawn = torch.rand(self.shape.kv_heads, len(free), generator=self._dice, device=self.device).argsort(-1)
            own[:, free] = drawn % count
            labels.append(own + tile * WIDTH)
            tile += tiles
        return torch.cat(labels, 1)

    def queries(self, level: Level | None = None) -> torch.Tensor:
        """[batch, heads, head_dim] of a level, the first one where none is given: the same at every call."""
        level = level or next(iter(LEVELS.values()))
        shape = self.shape
        self._dice.manual_seed(self._seed + 1)
        common = self._normal(self.batch, shape.kv_heads, 1, shape.head_dim)
        own = self._normal(self.batch, shape.kv_heads, shape.group, shape.head_dim)
        x = math.sqrt(level.shared) * common + math.sqrt(1 - level.shared) * own
        x = x / x.norm(dim=-1, keepdim=True) * level.deviation * math.sqrt(shape.head_dim)
        return x.flatten(1, 2).to(shape.dtype)


@dataclass(frozen=True)
class ClusteredLayer:
    """Caches and clusters of one layer."""

    keys: torch.Tensor
    values: torch.Tensor
    pool: ClusterPool


def layers(planted: CachedRows, batch: int, touched: float = 0.08) -> list[ClusteredLayer]:
    """Copies of the first `batch` rows, so many that a round over them leaves nothing of a layer in the L2 cache.

    Args:
        planted: the rows.
        batch: how many of them.
        touched: the least share of keys and values that a step reads.
    """
    size = batch * planted.kv_bytes
    count = 1
    if planted.device.type == "cuda":
        cache = torch.cuda.get_device_properties(planted.device).L2_cache_size
        count = min(MOST_COPIES, math.ceil(COLD * cache / (touched * size)))
    slots, tiles = batch * planted.length, batch * planted.tiles
    members = batch * (planted.end - planted.begin)
    pool = planted.pool

    def one() -> ClusteredLayer:
        return ClusteredLayer(
            planted.keys[:slots].clone(),
            planted.values[:slots].clone(),
            ClusterPool(
                centroids=pool.centroids[:tiles].clone(),
                values=pool.values[:tiles].clone(),
                sizes=pool.sizes[:tiles].clone(),
                starts=pool.starts[:tiles].clone(),
                members=pool.members[:, :members].clone(memory_format=torch.contiguous_format),
            ),
        )

    if count == 1 and batch == planted.batch:
        return [ClusteredLayer(planted.keys, planted.values, pool)]
    return [one() for _ in range(count)]


def true_logits(rows: CachedRows, query: torch.Tensor, row: int) -> torch.Tensor:
    """[kv_heads, group, length] float32 logits of all tokens of a row; `query` is [batch, heads, head_dim]."""
    shape = rows.shape
    keys = rows.keys[row * rows.length : (row + 1) * rows.length].float()
    of_row = query[row].float().view(shape.kv_heads, shape.group, shape.head_dim)
    return torch.einsum("hgd,thd->hgt", of_row, keys) * rows.scale
