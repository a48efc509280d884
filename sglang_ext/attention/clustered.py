"""The clusters that one row reads in one layer, from runs that lie in it here and there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_ext.attention.policy import Caches
from sglang_ext.cache.clusters import ClusteredRun, Summary, TokenRun
from sglang_ext.kernels.rope.reference import rotate
from sglang_ext.policies.double_p import cluster_sizes, estimated_log_mass


@dataclass(frozen=True)
class Placed:
    """A run of clusters where a row has it.

    Attributes:
        run: the clusters.
        column: column of the run's first token; where the row has a piece of the run only, where it would be.
        begin, end: columns of what the row has of the run.
        delta: by how many positions its keys are seen away from where they were written.
    """

    run: TokenRun
    column: int
    begin: int
    end: int
    delta: int = 0

    def summary(self, layer: int) -> Summary:
        """The clusters as tensors; ValueError for those that only kernels read."""
        if not isinstance(self.run, ClusteredRun):
            raise ValueError(f"{type(self.run).__name__} has no tensors of its own: expected a ClusteredRun")
        return self.run.layers[layer]

    def labels(self, layer: int) -> torch.Tensor:
        """[kv_heads, end - begin] int64: the cluster of each token that the row has."""
        return self.summary(layer).labels[:, self.begin - self.column : self.end - self.column].long()

    def whole(self, layer: int) -> torch.Tensor:
        """[kv_heads, clusters] int32 sizes of the clusters that the row has wholly, 0 for the others."""
        sizes = self.summary(layer).sizes
        if self.end - self.begin == self.run.tokens:
            return sizes
        seen = cluster_sizes(self.labels(layer), sizes.shape[1])
        return torch.where(seen == sizes, sizes, 0)


@dataclass(frozen=True)
class RowClusters:
    """The clusters of a row in one layer, those of all its runs one after the other.

    Attributes:
        log_mass: [kv_heads, group, clusters] estimated (Double-P, equation 5), -inf for those the row has not wholly.
        values: [kv_heads, clusters, value_dim] mean values, in log_mass's dtype.
        labels: [kv_heads, columns] int64, the cluster of each column's token; `clusters` for those in none.
    """

    log_mass: torch.Tensor
    values: torch.Tensor
    labels: torch.Tensor

    def columns(self, clusters: torch.Tensor, others: bool) -> torch.Tensor:
        """[kv_heads, columns] bool: whether a token's cluster is in `clusters` [kv_heads, clusters] bool.

        Args:
            clusters: which.
            others: the answer for tokens that are in no cluster.
        """
        return columns_of(self.labels, clusters, others)


def columns_of(labels: torch.Tensor, clusters: torch.Tensor, others: bool) -> torch.Tensor:
    """[kv_heads, columns] bool: whether a token's cluster is in a set.

    Args:
        labels: [kv_heads, columns] int64, the cluster of each column's token; as many as there are for one in none.
        clusters: [kv_heads, clusters] bool.
        others: the answer for tokens that are in no cluster.
    """
    return torch.nn.functional.pad(clusters, (0, 1), value=others).gather(1, labels)


def row_clusters(placed: Sequence[Placed], columns: int, caches: Caches, query: torch.Tensor) -> RowClusters:
    """Put the clusters of a row together, and estimate their mass.

    Keys stay where they were written: where they are seen elsewhere, the query is rotated the other way.

    Args:
        placed: at least one run, disjoint.
        columns: tokens of the row.
        caches: of the layer.
        query: [kv_heads, group, head_dim], rotated at its own position; float32 or float64.
    """
    labels = torch.full((query.shape[0], columns), -1, device=query.device)
    masses, values, before = [], [], 0
    for each in placed:
        summary, size = each.summary(caches.layer), each.whole(caches.layer)
        rotated = rotate(query, torch.tensor(-each.delta, device=query.device), caches.rope) if each.delta else query
        masses.append(estimated_log_mass(rotated, summary.centroids.to(query.dtype), size, caches.scale))
        values.append(summary.values.to(query.dtype))
        own = each.labels(caches.layer)
        labels[:, each.begin : each.end] = torch.where(size.gather(1, own) > 0, own + before, -1)
        before += size.shape[1]
    return RowClusters(torch.cat(masses, -1), torch.cat(values, 1), torch.where(labels < 0, before, labels))
