"""Virtual requests through FlashInfer's paged prefill kernels.

A virtual request is what the kernels take as a request: query rows that follow each other, a list of KV slots, causal
or not. A block that is being encoded is one (the slots of the blocks it attends to, then its own, causal), so that
block-sparse encoding is one batched call without any mask (DBSA, section 2.1). All rows of a batch that see one block
are one too: its KV is then read once for the batch. Outputs over disjoint segments merge by log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

_LN2 = math.log(2.0)
WORKSPACE = 128 << 20
"""Bytes of scratch memory that FlashInfer recommends."""


class VirtualRequests:
    """One planned batch of virtual requests; `plan` once for a batch, `run` in every layer.

    Args:
        device: the KV cache's CUDA device.
        backend: FlashInfer's kernel family, `fa2`, `fa3` or `auto`. Measured on an H200: `fa2` splits few rows over KV
            and wins while decoding, the default on Hopper does not.
        workspace: [bytes] uint8 on `device`, FlashInfer's scratch memory; made here when None (`WORKSPACE`).
    """

    def __init__(self, device: torch.device, backend: str = "fa2", workspace: torch.Tensor | None = None) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        if workspace is None:
            workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self._wrapper: Any = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)
        self._device = device
        self._rows = 0

    def plan(
        self,
        rows: Sequence[int],
        tokens: Sequence[int],
        kv_slots: torch.Tensor,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        causal: bool,
        scale: float,
    ) -> None:
        """Fix the batch. Host data only: nothing waits for the GPU.

        Args:
            rows: query rows of each virtual request, in the order in which the rows stand in `run`'s query.
            tokens: KV tokens of each; 0 for rows that see nothing here (they get zeros and -inf).
            kv_slots: [sum(tokens)] int32 on the device, the slots of all virtual requests one after the other.
            heads, kv_heads, head_dim, value_dim, dtype: of the layers that will run.
            causal: whether the last row of a request sees all its tokens, the row before all but one, and so on.
            scale: factor of the logits.

        Raises:
            ValueError: lengths do not match, or a causal request has more rows than tokens.
        """
        if len(rows) != len(tokens):
            raise ValueError(f"{len(rows)} row counts and {len(tokens)} token counts: expected as many")
        if kv_slots.numel() < sum(tokens):
            raise ValueError(f"{kv_slots.numel()} KV slots for {sum(tokens)} tokens: expected one each")
        short = [(r, t) for r, t in zip(rows, tokens, strict=True) if causal and 0 < t < r]
        if short:
            raise ValueError(
                f"a causal virtual request has {short[0][0]} rows and {short[0][1]} tokens: its own are missing"
            )
        self._rows = sum(rows)
        qo_indptr = torch.zeros(len(rows) + 1, dtype=torch.int32)
        kv_indptr = torch.zeros(len(rows) + 1, dtype=torch.int32)
        qo_indptr[1:] = torch.tensor(rows, dtype=torch.int32).cumsum(0)
        kv_indptr[1:] = torch.tensor(tokens, dtype=torch.int32).cumsum(0)
        self._wrapper.plan(
            qo_indptr,
            kv_indptr,
            kv_slots,
            (torch.tensor(tokens, dtype=torch.int32) > 0).to(torch.int32),  # tokens in the last page, of one slot each
            heads,
            kv_heads,
            head_dim,
            1,
            head_dim_vo=value_dim,
            causal=causal,
            sm_scale=scale,
            q_data_type=dtype,
            kv_data_type=dtype,
        )

    def run(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one layer over the planned virtual requests.

        Args:
            query: [rows, heads, head_dim], rotated to where each virtual request's keys were written.
            key_cache: [num_slots, kv_heads, head_dim].
            value_cache: [num_slots, kv_heads, value_dim].
            out: [rows, heads, value_dim] to write to; made here when None.

        Returns:
            (output [rows, heads, value_dim], natural log-sum-exp [rows, heads] float32).

        Raises:
            ValueError: another number of rows than planned.
        """
        if query.shape[0] != self._rows:
            raise ValueError(f"{query.shape[0]} query rows, {self._rows} were planned: plan again")
        caches = (key_cache.unsqueeze(1), value_cache.unsqueeze(1))  # pages of one slot
        out, lse = self._wrapper.run(query, caches, out=out, return_lse=True)
        return out, lse * _LN2  # FlashInfer's is to base 2
