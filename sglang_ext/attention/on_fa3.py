"""The attention backend on Hopper GPUs: SGLang's FlashAttention-3 backend, and a reader of ours for views."""

from __future__ import annotations

from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

from sglang_ext.attention.backend import ViewBackend


class Fa3Views(ViewBackend, FlashAttentionBackend):
    """Batches without views run as with `--attention-backend fa3`."""
