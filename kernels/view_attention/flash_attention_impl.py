"""Virtual requests through SGLang's FlashAttention-3 (Shah et al., 2024), which comes compiled, for Hopper GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_ext.kernels.view_attention.virtual_requests import VirtualBatch

FULL = 2**16
"""Query rows, of all heads together, that keep a GPU busy without keys being split: 512 tiles of 128."""


class FlashAttentionRequests:
    """`VirtualRequests` over a table of pages, each of one slot, as SGLang's own backend `fa3` has it.

    Args:
        device: the KV cache's CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._batch: VirtualBatch | None = None

    def plan(self, batch: VirtualBatch) -> None:
        """Fix the batch; nothing waits for the GPU.

        The table takes 4 bytes for each virtual request and token of the longest one. The kernel may split the keys of
        batches with fewer rows than `FULL`; it then takes 4 bytes for each split and component of the output, too.
        """
        self._batch = batch
        parts = batch.kv_slots.split(list(batch.tokens))
        self._pages = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
        ends = torch.tensor([0, *batch.rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self._ends, self._tokens = self._sent(ends), self._sent(batch.tokens)

    def _sent(self, numbers: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """int32 numbers on the device, by a copy that nothing waits for."""
        held = torch.as_tensor(numbers, dtype=torch.int32)
        if self._device.type == "cuda":
            held = held.pin_memory()
        return held.to(self._device, non_blocking=True)

    def run(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one layer over the planned virtual requests: see `VirtualRequests.run`.

        Raises:
            ValueError: another number of rows than planned, or nothing was planned.
        """
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        batch = self._batch
        if batch is None:
            raise ValueError("no virtual requests are planned: call plan before run")
        batch.check_query(query)
        out, lse, *_ = flash_attn_with_kvcache(
            query,
            key_cache.unsqueeze(1),
            value_cache.unsqueeze(1),
            cache_seqlens=self._tokens,
            page_table=self._pages,
            cu_seqlens_q=self._ends,
            max_seqlen_q=max(batch.rows),
            softmax_scale=batch.scale,
            causal=batch.causal,
            num_splits=1 if query.shape[0] * query.shape[1] >= FULL else 0,  # 0: as many as it chooses
            return_softmax_lse=True,
            out=out,
        )
        return out, lse.transpose(0, 1)  # one row of numbers a head
