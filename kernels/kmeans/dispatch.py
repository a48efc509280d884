"""k-means for a device: in Triton, with CUDA's sums where they run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_ext.kernels.kmeans import cuda_impl, triton_impl
from sglang_ext.kernels.kmeans.clusters import ClusterPlan, Clusters


def kmeans_layers(
    key_caches: Sequence[torch.Tensor],
    value_caches: Sequence[torch.Tensor],
    slots: torch.Tensor,
    plan: ClusterPlan,
    **options: Any,
) -> Clusters:
    """`triton_impl.kmeans_layers`, with `cuda_impl.update` where that kernel runs."""
    if key_caches and value_caches and key_caches[0].dtype == value_caches[0].dtype:
        keys, values = key_caches[0], value_caches[0]
        if cuda_impl.refusal(keys.device, keys.dtype, keys.shape[-1], values.shape[-1]) is None:
            options.setdefault("update", cuda_impl.update)
    return triton_impl.kmeans_layers(key_caches, value_caches, slots, plan, **options)


def kmeans(
    key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor, plan: ClusterPlan, **options: Any
) -> Clusters:
    """`kmeans_layers` of one layer, as `reference.kmeans`."""
    return kmeans_layers([key_cache], [value_cache], slots, plan, **options).layer(0)
