"""Blocks of keys and values in host memory, and the least-recently-used cache on the GPU in front of them.

`reference` is the definition, on any device; `triton_impl` has its kernels; `dispatch` chooses between them.
"""

from sglang_ext.kernels.host_fetch.dispatch import fetch, look_up, store
from sglang_ext.kernels.host_fetch.types import BlockCache, Found, FreshBlocks, HostRegion

__all__ = ["BlockCache", "Found", "FreshBlocks", "HostRegion", "fetch", "look_up", "store"]
