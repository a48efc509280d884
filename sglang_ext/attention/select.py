"""The attention backend of a system on this machine: what reads its views, over which of SGLang's own backends."""

from __future__ import annotations

import pkgutil

import torch

from sglang_ext.attention.backend import ViewBackend
from sglang_ext.attention.choice import kernels
from sglang_ext.attention.model import Machine
from sglang_ext.names import ModelRunner
from sglang_ext.systems.registry import System


def make_backend(model_runner: ModelRunner, system: System) -> ViewBackend:
    """The backend that serves `system` on this machine.

    Raises:
        ValueError: the model is none that the system or its kernels serve; says what to change.
    """
    chosen = kernels(system, model_runner.server_args.dtype)
    if chosen != "torch" and torch.cuda.is_available():
        from sglang_ext.attention.on_flashinfer import FlashInferViews as Backend
    else:
        from sglang_ext.attention.on_torch import TorchViews as Backend
    make = pkgutil.resolve_name(system.reader_of(kernels=chosen != "torch"))
    policy = system.make_policy(model_runner.server_args.tp_size)
    return Backend(model_runner, policy, lambda model, policy, base: make(model, policy, Machine(chosen, base)))
