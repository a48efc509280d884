"""The attention backend of a system on this machine: what reads its views, over which of SGLang's own backends."""

from __future__ import annotations

import pkgutil

import torch

from sglang_ext import compat
from sglang_ext.attention.backend import ViewBackend
from sglang_ext.attention.choice import KERNELS_ENV, PLAIN_ENV, kernels, kinds, plain_attention
from sglang_ext.attention.model import Machine
from sglang_ext.attention.policy import Policy
from sglang_ext.config import DRAFTING
from sglang_ext.kernels.float8 import FLOAT8
from sglang_ext.names import ModelRunner, ServerArgs
from sglang_ext.systems.registry import System

_BACKENDS = {
    "fa3": "sglang_ext.attention.on_fa3:Fa3Views",
    "flashinfer": "sglang_ext.attention.on_flashinfer:FlashInferViews",
    "torch": "sglang_ext.attention.on_torch:TorchViews",
}
"""What serves batches without views -> the backend that is mixed over it, imported where it serves."""


def make_backend(model_runner: ModelRunner, system: System) -> ViewBackend:
    """The backend that serves `system` on this machine.

    Raises:
        ValueError: the model is none that the system or its kernels serve, or the environment asks for kernels or for
            plain attention that there are not; says what to change.
    """
    compat.refuse_model(model_runner, system.float8, kinds(system))
    float8 = model_runner.kv_cache_dtype == FLOAT8
    chosen = kernels(system, model_runner.server_args.dtype, float8=float8)
    plain = "torch"
    if chosen != "torch" and torch.cuda.is_available():
        in_float16 = float8 and model_runner.dtype == torch.float16
        plain = plain_attention(system, lambda: compat.default_attention(model_runner), float8_in_float16=in_float16)
    if torch.cuda.is_available():
        _refuse_untried(model_runner, plain)
    Backend: type[ViewBackend] = pkgutil.resolve_name(_BACKENDS[plain])
    make = pkgutil.resolve_name(system.reader_of(kernels=chosen != "torch"))
    policy = server_policy(model_runner.server_args, system)
    return Backend(model_runner, policy, lambda model, policy, base: make(model, policy, Machine(chosen, base)))


def _refuse_untried(model_runner: ModelRunner, plain: str) -> None:
    """Raise ValueError where SGLang's `plain` attention would serve layers or passes beside ours that no GPU has run.

    With fa3 they have run (`choice.beside_sglang`), and layers beside plain PyTorch. Which of them serves is known when
    the model is loaded.
    """
    remedy = f"set {PLAIN_ENV} and {KERNELS_ENV} to auto and --dtype to bfloat16"
    states, _ = compat.listed_states(model_runner.model_config)
    if plain == "flashinfer" and (states or compat.window_layers(model_runner)):
        name = model_runner.model_config.hf_config.architectures[0]
        raise ValueError(
            f"{name} where FlashInfer serves plain attention on a GPU: --attention-backend"
            f" {model_runner.server_args.attention_backend} has read its layers beside fa3 alone; {remedy}, or serve it"
            " with one of SGLang's own attention backends"
        )
    if plain != "fa3" and compat.resolved(model_runner.server_args).speculative_algorithm == DRAFTING:
        raise ValueError(
            f"--speculative-algorithm {DRAFTING} where {plain} serves dense attention on a GPU: drafts have been"
            f" verified on fa3 alone; {remedy}, or leave out --speculative-algorithm"
        )


def server_policy(server_args: ServerArgs, system: System) -> Policy:
    """A new policy as a server was told to run it: with its options, on its ranks, drafting or not.

    Raises:
        ValueError: what of that the policy does not allow.
    """
    server_args = compat.resolved(server_args)
    policy = system.make_policy(server_args.tp_size)
    if server_args.speculative_algorithm == DRAFTING:
        policy.draft(server_args.speculative_num_draft_tokens)
    return policy
