"""What an update of k-means works on, in Triton or in CUDA."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_ext.kernels.kmeans.clusters import ClusterPlan


@dataclass(frozen=True)
class KmeansTuning:
    """What `triton_impl` has chosen by measurement.

    Attributes:
        tokens, centroids: tile of an assignment.
        assign_warps, assign_stages: of `_assign`.
        sum_clusters, sum_tokens: tile of an update, and of the other kernels.
        sum_warps, sum_stages: of them.
    """

    tokens: int = 128
    centroids: int = 32
    assign_warps: int = 4
    assign_stages: int = 4
    sum_clusters: int = 64
    sum_tokens: int = 64
    sum_warps: int = 4
    sum_stages: int = 3


@dataclass(frozen=True)
class Sums:
    """What an update works on; equal for keys and values but for `caches`, `largest` and the width of a vector.

    Attributes:
        caches: [layers] int64 addresses of [num_slots, kv_heads, dim] of `dtype`.
        slots: [tokens] integer.
        segments: [segments, 4] int32: first token, tokens, first cell, clusters.
        labels: [layers, kv_heads, tokens] int32 cells.
        largest: [layers, segments, kv_heads, dim] float32 largest magnitude of a component.
        means: [layers, segments, kv_heads, dim] float32 of a segment.
        centres: [layers, kv_heads, cells, head_dim] and
        biases: [layers, kv_heads, cells] float32: the next ones, unless it is the last update.
        out: [layers, tiles, kv_heads, width, dim] of `dtype`: the results of the last one.
        l2: whether centroids are scored by distance.
        plan: lengths.
        tuning: of the Triton form.
    """

    caches: torch.Tensor
    slots: torch.Tensor
    segments: torch.Tensor
    labels: torch.Tensor
    largest: torch.Tensor
    means: torch.Tensor
    centres: torch.Tensor
    biases: torch.Tensor
    out: torch.Tensor
    l2: bool
    plan: ClusterPlan
    tuning: KmeansTuning

    @property
    def cells(self) -> int:
        return self.biases.shape[2]

    @property
    def grid(self) -> tuple[int, int]:
        """(kv_heads, segments of all layers)."""
        return self.labels.shape[1], len(self.plan.lengths) * self.caches.shape[0]
