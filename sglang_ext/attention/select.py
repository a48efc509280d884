"""Which attention backend serves a policy on this machine."""

from __future__ import annotations

from typing import Any

import torch

from sglang_ext.attention.choice import kernels
from sglang_ext.attention.policy import Policy


def backend_class(policy: Policy) -> Any:
    """The backend's class; an instance takes (model_runner, policy)."""
    if policy.streams:
        return _stream_class(policy)
    if kernels(policy) == "torch":
        from sglang_ext.attention.backend import ViewAttnBackend

        return ViewAttnBackend
    if torch.cuda.is_available():
        from sglang_ext.attention.flashinfer_backend import FlashInferViewBackend

        if policy.clusters:
            from sglang_ext.attention.clustered_backend import ClusteredViews

            return type("FlashInferClusterBackend", (ClusteredViews, FlashInferViewBackend), {})
        return FlashInferViewBackend
    from sglang_ext.attention.torch_base import TorchBackend

    if policy.clusters:
        from sglang_ext.attention.clustered_backend import ClusteredViews

        return type("TritonClusterBackend", (ClusteredViews, TorchBackend), {})
    from sglang_ext.attention.planned import PlannedViews

    return type("TritonViewBackend", (PlannedViews, TorchBackend), {})


def _stream_class(policy: Policy) -> Any:
    if kernels(policy) == "torch":
        from sglang_ext.attention.streams import StreamAttnBackend

        return StreamAttnBackend
    from sglang_ext.attention.cascade_backend import CascadeStreams

    if torch.cuda.is_available():
        from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

        return type("FlashInferStreamBackend", (CascadeStreams, FlashInferAttnBackend), {})
    from sglang_ext.attention.torch_base import TorchBackend

    return type("TritonStreamBackend", (CascadeStreams, TorchBackend), {})
