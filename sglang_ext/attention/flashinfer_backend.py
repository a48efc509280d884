"""The attention backend on NVIDIA GPUs: SGLang's FlashInfer backend, and planned views beside it."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

from sglang_ext.attention.planned import PlannedViews
from sglang_ext.attention.policy import Policy
from sglang_ext.attention.select import kernels
from sglang_ext.kernels.view_attention.flashinfer_impl import VirtualRequests


class FlashInferViewBackend(PlannedViews, FlashInferAttnBackend):
    """Plain batches: FlashInfer, as stock. Blocks being encoded: FlashInfer's prefill over virtual requests."""

    def __init__(self, model_runner: Any, policy: Policy) -> None:
        super().__init__(model_runner, policy)
        if kernels(policy) == "flashinfer":
            self.dense = VirtualRequests(self.rope.inv_freq.device, "auto", self.workspace_buffer)
        self.warm_up()
