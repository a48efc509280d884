"""The cache in front of host memory for a device: Triton's kernels on a GPU, plain PyTorch elsewhere."""

from __future__ import annotations

import torch

from sglang_ext.kernels.host_fetch.types import BlockCache, Found, FreshBlocks, HostRegion


def look_up(wanted: torch.Tensor, rows: torch.Tensor, cache: BlockCache, *, out: Found | None = None) -> Found:
    """`reference.look_up` (see there), by the Triton kernel where the cache lies on a GPU.

    Raises:
        ValueError: As the reference does; on a GPU, values are not looked at.
    """
    if not cache.held.is_cuda:
        from sglang_ext.kernels.host_fetch.reference import look_up as run
    else:
        from sglang_ext.kernels.host_fetch.triton_impl import look_up as run
    return run(wanted, rows, cache, out=out)


def fetch(
    host: HostRegion, found: Found, rows: torch.Tensor, cache: BlockCache, *, fresh: FreshBlocks | None = None
) -> None:
    """`reference.fetch` (see there), by the Triton kernel where the cache lies on a GPU."""
    if not cache.held.is_cuda:
        from sglang_ext.kernels.host_fetch.reference import fetch as run
    else:
        from sglang_ext.kernels.host_fetch.triton_impl import fetch as run
    run(host, found, rows, cache, fresh=fresh)


def store(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, ids: torch.Tensor, host: HostRegion) -> None:
    """`reference.store` (see there), by the Triton kernel where the layer's caches lie on a GPU."""
    if not keys.is_cuda:
        from sglang_ext.kernels.host_fetch.reference import store as run
    else:
        from sglang_ext.kernels.host_fetch.triton_impl import store as run
    run(keys, values, slots, ids, host)
