"""Which attention backend serves a policy on this machine."""

from __future__ import annotations

import os
from typing import Any

import torch

from sglang_ext.attention.policy import Policy

KERNELS_ENV = "SGLANG_EXT_KERNELS"
"""Environment variable: `auto` (the fastest that serves the policy), `torch` (the reference, on any device), `triton`
(the work list for everything but plain batches; without a GPU in Triton's interpreter, which is slow)."""
KERNELS = ("auto", "torch", "triton")


def kernels() -> str:
    """What the environment asks for.

    Raises:
        ValueError: it asks for something else than `KERNELS`.
    """
    chosen = os.environ.get(KERNELS_ENV, "auto")
    if chosen not in KERNELS:
        raise ValueError(f"{KERNELS_ENV}={chosen}: expected one of {', '.join(KERNELS)}")
    return chosen


def captures(policy: Policy) -> bool:
    """Whether the backend that serves `policy` here runs inside CUDA graphs."""
    return torch.cuda.is_available() and policy.plans and kernels() != "torch"


def backend_class(policy: Policy) -> Any:
    """The backend's class; an instance takes (model_runner, policy)."""
    chosen = kernels()
    if policy.plans and chosen != "torch":
        if torch.cuda.is_available():
            from sglang_ext.attention.flashinfer_backend import FlashInferViewBackend

            return FlashInferViewBackend
        if chosen == "triton":
            from sglang_ext.attention.planned import PlannedViews
            from sglang_ext.attention.torch_base import TorchBackend

            return type("TritonViewBackend", (PlannedViews, TorchBackend), {})
    from sglang_ext.attention.backend import ViewAttnBackend

    return ViewAttnBackend
