"""Virtual requests through FlashInfer's paged prefill kernels (Ye et al., 2025), which compile at their first use."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import threshold

from sglang_ext.kernels.view_attention.virtual_requests import VirtualBatch

_LN2 = math.log(2.0)
_NO_KEY = -4.9e4  # FlashInfer writes -5e4, to base 2, where a row sees no key
WORKSPACE = 128 << 20
"""Bytes of scratch memory that FlashInfer recommends."""

SPLIT_ROWS = 128
"""Query rows of FlashInfer's largest tile."""


@dataclass(frozen=True)
class LayerHeads:
    """The heads of the layers that will run.

    Attributes:
        heads, kv_heads: query heads, and key-value heads.
        head_dim, value_dim: components of a key, and of a value.
        dtype: of queries, keys and values.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype

    def workspace(self, device: torch.device) -> torch.Tensor:
        """[bytes] uint8 on `device`, a CUDA device: scratch memory.

        It has room for two tiles of partial outputs for each SM, where keys are split. What FlashInfer recommends is
        not enough for wide groups on GPUs with many SMs.
        """
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        partial = self.heads // self.kv_heads * 2 * num_sms * SPLIT_ROWS * self.value_dim * 4
        return torch.empty(max(WORKSPACE, 2 * partial), dtype=torch.uint8, device=device)


class FlashInferRequests:
    """`VirtualRequests` through FlashInfer.

    Args:
        device: the KV cache's CUDA device.
        layer: heads of the layers that will run.
        backend: FlashInfer's kernel family, `fa2`, `fa3` or `auto`. Measured on an H200: `fa2` splits few rows over KV
            and wins while decoding, the default on Hopper does not.
    """

    def __init__(self, device: torch.device, layer: LayerHeads, backend: str) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._wrapper: Any = BatchPrefillWithPagedKVCacheWrapper(layer.workspace(device), "NHD", backend=backend)
        self._layer = layer
        self._batch: VirtualBatch | None = None

    def plan(self, batch: VirtualBatch) -> None:
        """Fix the batch. Host data only: nothing waits for the GPU."""
        self._batch, layer = batch, self._layer
        qo_indptr = torch.zeros(len(batch.rows) + 1, dtype=torch.int32)
        kv_indptr = torch.zeros(len(batch.rows) + 1, dtype=torch.int32)
        qo_indptr[1:] = torch.tensor(batch.rows, dtype=torch.int32).cumsum(0)
        kv_indptr[1:] = torch.tensor(batch.tokens, dtype=torch.int32).cumsum(0)
        self._wrapper.plan(
            qo_indptr,
            kv_indptr,
            batch.kv_slots,
            (torch.tensor(batch.tokens, dtype=torch.int32) > 0).to(torch.int32),  # in the last page, of one slot each
            layer.heads,
            layer.kv_heads,
            layer.head_dim,
            1,
            head_dim_vo=layer.value_dim,
            causal=batch.causal,
            sm_scale=batch.scale,
            q_data_type=layer.dtype,
            kv_data_type=layer.dtype,
        )

    def run(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one layer over the planned virtual requests: see `VirtualRequests.run`.

        Raises:
            ValueError: another number of rows than planned, or nothing was planned.
        """
        if self._batch is None:
            raise ValueError("no virtual requests are planned: call plan before run")
        self._batch.check_query(query)
        caches = (key_cache.unsqueeze(1), value_cache.unsqueeze(1))  # pages of one slot
        out, lse = self._wrapper.run(query, caches, out=out, return_lse=True)
        return out, threshold(lse, _NO_KEY, -torch.inf).mul_(_LN2)  # FlashInfer's is to base 2
