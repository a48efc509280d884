"""The attention backend of a policy on this machine: what reads its views, over which of SGLang's own backends."""

from __future__ import annotations

from typing import Any

import torch

from sglang_ext.attention.backend import ViewBackend
from sglang_ext.attention.choice import KERNELS_ENV, kernels
from sglang_ext.attention.model import Model
from sglang_ext.attention.policy import Policy
from sglang_ext.attention.readers.reader import Reader
from sglang_ext.kernels.cells.flashinfer_impl import HEAD_SIZES


def make_backend(model_runner: Any, policy: Policy) -> ViewBackend:
    """The backend that serves `policy` on this machine.

    Raises:
        ValueError: the model is none that the policy or its kernels serve; says what to change.
    """
    if kernels(policy) != "torch" and torch.cuda.is_available():
        from sglang_ext.attention.on_flashinfer import FlashInferViews

        return FlashInferViews(model_runner, policy, _reader)
    from sglang_ext.attention.on_torch import TorchViews

    return TorchViews(model_runner, policy, _reader)


def _reader(model: Model, policy: Any, base: Any) -> Reader[Any, Any]:
    chosen = kernels(policy)
    if chosen == "torch":
        return _torch_reader(model, policy, base)
    if policy.cells:
        from sglang_ext.attention.readers.cells import CellReader

        return CellReader(model, policy, chosen)
    dense = _dense_kernel(model, chosen, base)
    if policy.clusters:
        from sglang_ext.attention.readers.clusters import ClusterReader

        found: Any = ClusterReader(model, policy, dense)
    else:
        from sglang_ext.attention.readers.planned import PlannedReader

        found = PlannedReader(model, policy, dense)
    if model.device.type == "cuda":
        found.prefills.warm_up()
    return found  # type: ignore[no-any-return]


def _torch_reader(model: Model, policy: Any, base: Any) -> Reader[Any, Any]:
    if policy.streams:
        from sglang_ext.attention.readers.streams import StreamReader

        return StreamReader(model, policy)
    from sglang_ext.attention.readers.views import ViewReader

    return ViewReader(model, policy, base)


def _dense_kernel(model: Model, chosen: str, base: Any) -> Any:
    """The prefill kernel over virtual requests, where there is one."""
    if model.device.type != "cuda":
        return None
    if model.shape.head_dim not in HEAD_SIZES:
        raise ValueError(
            f"head size {model.shape.head_dim}: FlashInfer serves {', '.join(map(str, HEAD_SIZES))}; set"
            f" {KERNELS_ENV}=torch in the server's environment, which is slow but serves any"
        )
    model.check_cache_type()
    if chosen != "flashinfer":
        return None
    from sglang_ext.kernels.view_attention.flashinfer_impl import VirtualRequests

    return VirtualRequests(model.device, "auto", base.workspace_buffer)
