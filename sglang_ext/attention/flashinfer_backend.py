"""The attention backend on NVIDIA GPUs: SGLang's FlashInfer backend, and planned views beside it."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

from sglang_ext.attention.choice import KERNELS_ENV, kernels
from sglang_ext.attention.planned import PlannedViews
from sglang_ext.attention.policy import Policy
from sglang_ext.attention.requests import check_cache_type
from sglang_ext.kernels.cells.flashinfer_impl import HEAD_SIZES
from sglang_ext.kernels.view_attention.flashinfer_impl import VirtualRequests


class FlashInferViewBackend(PlannedViews, FlashInferAttnBackend):
    """Plain batches: FlashInfer, as stock. Blocks being encoded: FlashInfer's prefill over virtual requests.

    Raises:
        ValueError: FlashInfer does not serve the model's head size, or the KV cache has another type than the model.
    """

    def __init__(self, model_runner: Any, policy: Policy) -> None:
        super().__init__(model_runner, policy)
        if self.shape.head_dim not in HEAD_SIZES:
            raise ValueError(
                f"head size {self.shape.head_dim}: FlashInfer serves {', '.join(map(str, HEAD_SIZES))}; set "
                f"{KERNELS_ENV}=torch in the server's environment, which is slow but serves any"
            )
        check_cache_type(model_runner, self.shape.dtype)
        if kernels(policy) == "flashinfer":
            self.dense = VirtualRequests(self.rope.inv_freq.device, "auto", self.workspace_buffer)
        self.warm_up()
