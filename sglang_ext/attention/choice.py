"""What serves a system on this machine: what an operator asked for, or what was measured to be best.

Two questions have an answer each: which kernels read rows with views (`kernels`), and which of SGLang's own attention
backends serves batches without views (`plain_attention`).
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from sglang_ext.kinds import Kinds
from sglang_ext.systems.registry import System

KERNELS_ENV = "SGLANG_EXT_KERNELS"
"""Environment variable:

- `auto`, the default: what has been measured for this machine: `flashinfer` on Hopper GPUs in half precision, `torch`
  elsewhere, and for systems that have no kernels or whose kernels must be asked for (`System.automatic`). With a KV
  cache in float8 `triton` takes the place of `flashinfer`.
- `torch`: the reference, on any device, without CUDA graphs.
- `triton`: the system's kernels (`System.kernels`), with CUDA graphs on a GPU and in Triton's interpreter (slow)
  without one.
- `flashinfer`: the same, and blocks being encoded, or the strides and chunks of a prompt, in dense kernels of the
  libraries that SGLang brings (`kernels.dense_attention.library_of` says which one). Needs a GPU.
"""
KERNELS = ("auto", "torch", "triton", "flashinfer")

PLAIN_ENV = "SGLANG_EXT_PLAIN_ATTENTION"
"""Environment variable: what serves batches without views on a GPU, where kernels serve the others.

- `auto`, the default: `fa3` where SGLang itself would choose it (Hopper GPUs), `flashinfer` elsewhere.
- `fa3`: SGLang's attention backend `fa3`, which serves GPUs of compute capability 8 and 9.
- `flashinfer`: SGLang's attention backend `flashinfer`.
"""
PLAIN = ("auto", "fa3", "flashinfer")

FLOAT32 = ("float32", "float")


def kernels(system: System, dtype: str, float8: bool = False) -> str:
    """What serves a system here: `torch`, `triton` or `flashinfer`.

    Args:
        system: one that has no kernels is served by `torch`.
        dtype: the server's `--dtype`; FlashInfer has no float32.
        float8: whether the KV cache is in float8, which dense prefill kernels are not given here.

    Raises:
        ValueError: the environment asks for something else, or for FlashInfer without a GPU or for float8.
    """
    chosen = os.environ.get(KERNELS_ENV, "auto")
    if chosen not in KERNELS:
        raise ValueError(f"{KERNELS_ENV}={chosen}: expected one of {', '.join(KERNELS)}")
    if chosen == "flashinfer" and not torch.cuda.is_available():
        raise ValueError(f"{KERNELS_ENV}=flashinfer needs an NVIDIA GPU and there is none: use torch or triton")
    if chosen == "flashinfer" and float8:
        raise ValueError(
            f"{KERNELS_ENV}=flashinfer with a KV cache in float8: dense prefill kernels do not read it here; use triton"
            " or auto"
        )
    if system.kernels is None:
        return "torch"
    if chosen == "auto":
        fast = "triton" if float8 else "flashinfer"
        return fast if system.automatic and _hopper() and dtype not in FLOAT32 else "torch"
    return chosen


def asked_plain_attention() -> str:
    """What the environment asks for: one of `PLAIN`.

    Raises:
        ValueError: it asks for something else, or for what does not run on this GPU.
    """
    chosen = os.environ.get(PLAIN_ENV, "auto")
    if chosen not in PLAIN:
        raise ValueError(f"{PLAIN_ENV}={chosen}: expected one of {', '.join(PLAIN)}")
    if chosen == "fa3" and torch.cuda.is_available() and (major := torch.cuda.get_device_capability()[0]) not in (8, 9):
        raise ValueError(
            f"{PLAIN_ENV}=fa3 on a GPU of compute capability {major}: it serves 8 and 9; set it to auto or flashinfer"
        )
    return chosen


def plain_attention(system: System, default: Callable[[], str], *, float8_in_float16: bool = False) -> str:
    """SGLang's attention backend that serves batches without views on a GPU: `fa3` or `flashinfer`.

    Args:
        system: on a server of streams every batch has views, so that nothing runs on this backend. It is FlashInfer's
            then, with which these servers were measured.
        default: says which backend SGLang would choose for the model on this machine.
        float8_in_float16: whether the model is in float16 and its cache in float8. FlashAttention-3 gives bfloat16 over
            such a cache, and SGLang then fails when it captures its graphs.

    Raises:
        ValueError: what `asked_plain_attention` raises; or fa3 is asked for where it fails.
    """
    chosen = asked_plain_attention()
    if system.streams:
        return "flashinfer"
    if float8_in_float16 and chosen == "fa3":
        raise ValueError(
            f"{PLAIN_ENV}=fa3 with a model in float16 and a KV cache in float8: FlashAttention-3 gives bfloat16 over"
            f" such a cache; set --dtype bfloat16, or {PLAIN_ENV} to auto or flashinfer"
        )
    if chosen == "auto":
        return "fa3" if default() == "fa3" and not float8_in_float16 else "flashinfer"
    return chosen


def captures(system: System, dtype: str) -> bool:
    """Whether a system's batches run inside CUDA graphs here; arguments as of `kernels`."""
    return torch.cuda.is_available() and kernels(system, dtype) != "torch"


def beside_sglang() -> bool:
    """Whether SGLang's own code may serve some layers or some decoding passes beside ours on this machine.

    A pass needs the metadata of both then, and CUDA graphs are captured for both. That has run without a GPU, and on
    Hopper GPUs beside SGLang's `fa3`. `select` knows which attention serves in the end, and refuses FlashInfer's.
    """
    return not torch.cuda.is_available() or (_hopper() and os.environ.get(PLAIN_ENV) != "flashinfer")


def kinds(system: System) -> Kinds:
    """Layers beside which a system reads the others of a model, on this machine."""
    return kinds_beside_sglang(system) if beside_sglang() else Kinds()


def kinds_beside_sglang(system: System) -> Kinds:
    """The same on a machine where SGLang's own code may serve the others (`beside_sglang`)."""
    return Kinds(windows=system.mixed, states=system.hybrid)


def drafts(system: System) -> bool:
    """Whether a system's decoding steps may draft tokens for dense attention to verify, on this machine."""
    return system.drafts and beside_sglang()


def _hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
