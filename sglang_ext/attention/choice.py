"""Which kernels serve a policy on this machine: what an operator asked for, or what was measured to be best."""

from __future__ import annotations

import os

import torch

from sglang_ext.attention.policy import Policy

KERNELS_ENV = "SGLANG_EXT_KERNELS"
"""Environment variable:

- `auto`, the default: what has been measured for this machine: `flashinfer` on Hopper GPUs in half precision, `torch`
  elsewhere and for policies that have no kernels.
- `torch`: the reference, on any device, without CUDA graphs.
- `triton`: the work list of `attention.planned` for every batch with views; CUDA graphs on a GPU, Triton's interpreter
  (slow) without one. Policies with clusters decode in the kernels of `attention.clustered_backend`, streams run in
  those of `attention.cascade_backend`.
- `flashinfer`: the same, and blocks being encoded, or the strides of a prompt, in FlashInfer's prefill kernels. Needs a
  GPU.
"""
KERNELS = ("auto", "torch", "triton", "flashinfer")


FLOAT32 = ("float32", "float")


def kernels(policy: Policy) -> str:
    """What serves `policy` here: `torch`, `triton` or `flashinfer`.

    Args:
        policy: one that neither plans nor has clusters or cells for kernels (`Policy.plans`, `Policy.clusters`,
            `Policy.cells`) is served by `torch`. FlashInfer has no float32 (`Policy.dtype`).

    Raises:
        ValueError: the environment asks for something else, or for FlashInfer without a GPU.
    """
    chosen = os.environ.get(KERNELS_ENV, "auto")
    if chosen not in KERNELS:
        raise ValueError(f"{KERNELS_ENV}={chosen}: expected one of {', '.join(KERNELS)}")
    if chosen == "flashinfer" and not torch.cuda.is_available():
        raise ValueError(f"{KERNELS_ENV}=flashinfer needs an NVIDIA GPU and there is none: use torch or triton")
    if not (policy.plans or policy.clusters or policy.cells):
        return "torch"
    if chosen == "auto":
        return "flashinfer" if _hopper() and policy.dtype not in FLOAT32 else "torch"
    return chosen


def captures(policy: Policy) -> bool:
    """Whether the backend that serves `policy` here runs inside CUDA graphs."""
    return torch.cuda.is_available() and kernels(policy) != "torch"


def _hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
