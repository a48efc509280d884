"""The attention backend on NVIDIA GPUs: SGLang's FlashInfer backend, and a reader of ours for batches with views."""

from __future__ import annotations

from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

from sglang_ext.attention.backend import ViewBackend


class FlashInferViews(ViewBackend, FlashInferAttnBackend):
    """Batches without views run as with `--attention-backend flashinfer`."""
