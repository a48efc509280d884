"""Entry point of the group `sglang.srt.plugins`: hooks into SGLang, checked one by one.

SGLang only logs an exception in a plugin and goes on without it; a server that answers without its views would answer
wrongly. So every hook target is resolved here, and what cannot be resolved ends the process with a plain message.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from sglang_ext import lines
from sglang_ext.config import RADIX_CACHE_BACKEND
from sglang_ext.hooks import HOOKS, Hook, check_arguments, check_called, noted
from sglang_ext.lines import installed_sglang, line_of
from sglang_ext.names import ModelRunner, Passed
from sglang_ext.systems.registry import System, system_of, systems

if TYPE_CHECKING:
    import torch
    from sglang.srt.distributed.device_communicators.pynccl import PyNcclCommunicator
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from torch import Tensor

    from sglang_ext.attention.backend import ViewBackend
    from sglang_ext.cache.radix import BlockRadixCache
    from sglang_ext.cache.streams import StreamCache

    _LogProbs: TypeAlias = tuple[list[Tensor | list[float] | list[list[float]]], Passed]
    """(those of each request, the tokens that they are of)."""


def check_version(found: str) -> str | None:
    """None for a supported SGLang version, else what is wrong with it."""
    if line_of(found) is not None:
        return None
    needed = " or ".join(f"sglang{line}" for line in lines.LINES)
    return f"sglang {found} is installed, sglang_ext needs {needed}: pip install sglang=={lines.OLDER.tried}"


def unresolved() -> list[str]:
    """Hook targets that this SGLang does not have, and hooks of ours that do not import."""
    problems = []
    for hook in HOOKS:
        for name, what in ((hook.target, "hook target"), (hook.ours, "hook")):
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError) as error:
                problems.append(f"{what} {name}: {error}")
    return problems


def not_installed(hooks: Iterable[Hook]) -> list[str]:
    """Hooks that their target does not go through in this process, in which plugins are loaded.

    A target resolves also where SGLang failed to wrap it (it only logs that), or where something replaced it since.
    """
    return [f"hook {each.ours} is not installed on {each.target}" for each in hooks if not _wraps(each)]


def _wraps(hook: Hook) -> bool:
    ours = noted(hook)
    found = pkgutil.resolve_name(hook.target)
    # SGLang nests one wrapper for each hook, and each holds its hook as a variable of the function around it.
    while found is not None:
        if any(cell.cell_contents is ours for cell in getattr(found, "__closure__", None) or ()):
            return True
        found = getattr(found, "__wrapped__", None)
    return False


def register() -> None:
    """Load the plugin in one process of the server.

    Raises:
        SystemExit: this SGLang is not supported or lacks a hook target. SGLang catches exceptions but not this one.
    """
    problem = check_version(installed_sglang())
    problems = [problem] if problem else unresolved()
    if problems:
        raise SystemExit(
            f"sglang_ext cannot work with sglang {installed_sglang()}:\n  "
            + "\n  ".join(problems)
            + "\nInstall a supported version, or uninstall sglang_ext to run stock SGLang."
        )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_ext.compat.propagation import look_once

    _register_backends()
    for hook in HOOKS:
        HookRegistry.register(hook.target, noted(hook), HookType(hook.kind))
    look_once()


def _register_backends() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.managers.io_struct import hook_custom_types
    from sglang.srt.managers.tokenizer_control_mixin import _COMMUNICATOR_SPECS
    from sglang.srt.mem_cache.registry import register_radix_cache_backend, registered_radix_cache_backends
    from sglang.srt.server_args import add_attention_backend_choices

    from sglang_ext.drafting.algorithm import register as register_drafting
    from sglang_ext.serving.messages import ExtAdminReqInput, ExtAdminReqOutput

    register_drafting()
    add_attention_backend_choices(list(systems()))
    for name, system in systems().items():
        if name not in ATTENTION_BACKENDS:
            register_attention_backend(name)(_BackendFactory(system))
        elif not isinstance(ATTENTION_BACKENDS[name], _BackendFactory):
            raise SystemExit(
                f"sglang_ext: a system is called {name}, which is an attention backend of SGLang: rename it"
            )
    if RADIX_CACHE_BACKEND not in registered_radix_cache_backends():
        register_radix_cache_backend(RADIX_CACHE_BACKEND, _build_radix_cache)
    hook_custom_types(ExtAdminReqInput, ExtAdminReqOutput)
    spec = ("ext_admin", ExtAdminReqOutput)
    if spec not in _COMMUNICATOR_SPECS:
        _COMMUNICATOR_SPECS.append(spec)


@dataclass(frozen=True)
class _BackendFactory:
    """What SGLang makes the attention backend of a system with."""

    system: System

    def __call__(self, model_runner: ModelRunner) -> ViewBackend:
        from sglang_ext.attention.select import make_backend

        check_arguments(model_runner.server_args)
        return make_backend(model_runner, self.system)


def _build_radix_cache(context: TreeCacheBuildContext) -> StreamCache | BlockRadixCache:
    from sglang_ext.attention.backend import view_backend
    from sglang_ext.attention.compiles import watch
    from sglang_ext.attention.dbsa import DbsaPolicy
    from sglang_ext.cache.host_blocks import host_bytes
    from sglang_ext.cache.host_tier import HostTier
    from sglang_ext.cache.radix import BlockRadixCache
    from sglang_ext.cache.streams import StreamCache
    from sglang_ext.settings import server_settings

    backend = view_backend(context.tp_worker.model_runner)
    if backend is None:
        raise ValueError(
            "--radix-cache-backend sglang_ext needs one of our attention backends for both prefill and decoding; got"
            f" {type(context.tp_worker.model_runner.attn_backend).__name__}"
        )
    policy: Any = backend.policy
    server_args = context.tp_worker.model_runner.server_args
    if systems()[server_args.attention_backend].streams:
        streams = StreamCache(context.params, policy, server_settings().open_conversations)
        streams.release_hooks += [backend.release, _check_scheduler, watch]
        return streams
    cache = BlockRadixCache(context.params)
    cache.serve(server_args)
    cache.hooks.extend(policy.node_hooks())
    cache.release_hooks += [backend.release, _check_scheduler, watch]
    cache.on_rewrite.append(backend.rewritten)
    cache.on_restore.append(backend.restored)
    if isinstance(policy, DbsaPolicy) and policy.host_gb is not None:
        cache.host = HostTier(backend.caches(), host_bytes(policy.host_gb) // server_args.tp_size)
    return cache


def _check_scheduler(_slot: int) -> None:
    check_called("scheduler")


def around_support_triton(original: Callable[[str], bool], backend: str) -> bool:
    """AROUND support_triton: it goes by name, and would send our names to Triton on a machine without a GPU."""
    import torch

    return original("torch_native" if not torch.cuda.is_available() and backend in systems() else backend)


def around_allocate_token_bitmask(original: Callable[[int, int], Tensor], vocab_size: int, batch_size: int) -> Tensor:
    """AROUND xgrammar's _allocate_token_bitmask: it pins memory for a GPU, which fails where there is none."""
    import torch

    if torch.cuda.is_available():
        return original(vocab_size, batch_size)
    import xgrammar

    return xgrammar.allocate_token_bitmask(batch_size, vocab_size)


def around_apply_vocab_mask(original: Callable[..., None], grammar: Passed, logits: Tensor, vocab_mask: Tensor) -> None:
    """AROUND XGrammarGrammar.apply_vocab_mask: SGLang masks on accelerators only, xgrammar on the CPU too."""
    if logits.device.type != "cpu":
        return original(grammar, logits, vocab_mask)
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)


def after_get_token_ids_logprobs(result: _LogProbs, logprobs: Tensor, *_args: Passed, **_kwargs: Passed) -> _LogProbs:
    """AFTER get_token_ids_logprobs_raw: what a batch's requests without `token_ids_logprob` get is a tensor, too.

    SGLang has an empty list for them, and ends when it converts the batch's tensors to lists.
    """
    import torch

    values, ids = result
    if any(isinstance(value, torch.Tensor) for value in values):
        values = [value if isinstance(value, torch.Tensor) else logprobs.new_empty(0) for value in values]
    return values, ids


def around_pynccl_init(
    original: Callable[..., None],
    communicator: PyNcclCommunicator,
    group: Passed,
    device: int | str | torch.device,
    *args: Passed,
    **kwargs: Passed,
) -> None:
    """AROUND PyNcclCommunicator.__init__: NCCL's library is installed without a GPU too, and cannot serve the CPU."""
    if str(device) != "cpu":
        return original(communicator, group, device, *args, **kwargs)
    communicator.group, communicator.available, communicator.disabled = group, False, True


def after_compute_cell_size(result: int, _configurator: Passed, kvc: KVCacheConfigurator, num_layers: int) -> int:
    """AFTER _compute_cell_size: a policy's own bytes a token count in SGLang's memory budget."""
    from sglang.srt.runtime_context import get_parallel

    from sglang_ext.attention.choice import kernels
    from sglang_ext.attention.model import layers_read
    from sglang_ext.cache.budget import KVShape

    system = system_of(kvc.server_args)
    if system is None:
        return result
    config = kvc.model_config
    kv_heads = config.get_num_kv_heads(get_parallel().attn_tp_size)
    itemsizes = kvc.kv_cache_dtype.itemsize, kvc.model_dtype.itemsize
    shape = KVShape(layers_read(config, num_layers), kv_heads, config.head_dim, config.v_head_dim, *itemsizes)
    in_kernels = kernels(system, kvc.server_args.dtype) != "torch"
    return result + system.make_policy(kvc.server_args.tp_size).extra_bytes_per_token(shape, in_kernels)
