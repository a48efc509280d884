"""Server arguments that views do not serve yet are refused at start, by name, with what to change."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch

from sglang_ext import compat, lines
from sglang_ext.attention.choice import (
    KERNELS_ENV,
    PLAIN_ENV,
    asked_plain_attention,
    captures,
    drafts,
    kernels,
    kinds,
    kinds_beside_sglang,
)
from sglang_ext.config import DRAFTING, POLICY_ENV, RADIX_CACHE_BACKEND
from sglang_ext.hooks import LOOKED_AT
from sglang_ext.names import ServerArgs
from sglang_ext.serving.tenants import Tenants
from sglang_ext.settings import POOL_DIR_ENV, server_settings
from sglang_ext.systems.options import without_options
from sglang_ext.systems.registry import System, ours, system_of, systems
from sglang_ext.types import Json

logger = logging.getLogger(__name__)

FLOAT8 = "fp8_e4m3"
"""The `--kv-cache-dtype` of 8 bits that some systems read (`System.float8`)."""

# (argument, is it set to something views do not serve?, what to do). Some are SGLang 0.5.23's alone.
_REFUSED: tuple[tuple[str, Callable[[Json], bool], str], ...] = (
    ("page_size", lambda v: v not in (None, 1), "set --page-size 1"),
    (
        "speculative_algorithm",
        lambda v: v not in (None, DRAFTING),
        f"leave it out, or set --speculative-algorithm {DRAFTING}, whose drafts are sparse decoding steps",
    ),
    ("enable_hierarchical_cache", bool, "leave out --enable-hierarchical-cache"),
    ("disaggregation_mode", lambda v: v not in (None, "null"), "leave out --disaggregation-mode"),
    ("dp_size", lambda v: v > 1, "set --dp-size 1 and run several servers"),
    ("attn_dp_size", lambda v: v > 1, "leave out --attn-dp-size and --enable-dp-attention, and run several servers"),
    ("pp_size", lambda v: v > 1, "set --pp-size 1; --tp-size is supported"),
    ("dcp_size", lambda v: v > 1, "leave out --dcp-size; --tp-size is supported"),
    ("enable_lora", bool, "leave out --enable-lora and --lora-paths"),
    ("quantization_param_path", bool, "leave out --quantization-param-path: scales of keys are the checkpoint's own"),
    ("tokenizer_worker_num", lambda v: v > 1, "set --tokenizer-worker-num 1"),
    ("enable_tokenizer_batch_encode", bool, "leave out --enable-tokenizer-batch-encode"),
    ("disable_radix_cache", bool, "leave out --disable-radix-cache: blocks live in the radix tree"),
    ("enable_lmcache", bool, "leave out --enable-lmcache"),
    ("enable_streaming_session", bool, "leave out --enable-streaming-session: it keeps prefixes in a cache of its own"),
    ("enable_unified_cache_external_linker", bool, "leave out --enable-unified-cache-external-linker"),
    ("enable_session_radix_cache", bool, "leave out --enable-session-radix-cache"),
    ("prefill_attention_backend", bool, "leave out --prefill-attention-backend: both phases read the same views"),
    ("decode_attention_backend", bool, "leave out --decode-attention-backend: both phases read the same views"),
    ("schedule_policy", lambda v: v == "dfs-weight", "set --schedule-policy fcfs or lpm"),
    ("dllm_algorithm", bool, "leave out --dllm-algorithm"),
    ("enable_pdmux", bool, "leave out --enable-pdmux: it has several attention backends, views are planned for one"),
    ("allow_auto_truncate", bool, "leave out --allow-auto-truncate: it would cut questions that stand behind blocks"),
    ("enable_nvidia_megakernel", bool, "leave out --enable-nvidia-megakernel: it decodes without our attention"),
    ("smg_grpc_mode", bool, "leave out --smg-grpc-mode: SMG sends requests by HTTP, too"),
    ("enable_two_batch_overlap", bool, "leave out --enable-two-batch-overlap: it cuts batches after they are planned"),
)

_REFUSED_STREAMS: tuple[tuple[str, Callable[[Json], bool], str], ...] = (
    ("enable_mixed_chunk", bool, "leave out --enable-mixed-chunk"),
    ("enable_prefill_delayer", bool, "leave out --enable-prefill-delayer"),
    ("enable_hisparse", bool, "leave out --enable-hisparse"),
    ("radix_eviction_policy", lambda v: v not in (None, "lru"), "leave it out: streams leave no prefix to evict"),
)


def is_active(server_args: ServerArgs) -> bool:
    """Whether this server was asked to use one of our attention backends."""
    return system_of(server_args) is not None


def serves_streams(server_args: ServerArgs) -> bool:
    """Whether every request of this server is a stream (`attention.stream_policy.StreamPolicy`)."""
    system = system_of(server_args)
    return system is not None and system.streams


def page_size_of(server_args: ServerArgs) -> int:
    """KV slots that are given out together."""
    return getattr(compat.resolved(server_args), "page_size", None) or 1


def refusals(server_args: ServerArgs) -> list[str]:
    """What in `server_args` our backend does not serve, each with what to change; empty when all is well."""
    problems = []
    server_args = compat.resolved(server_args)
    streams = serves_streams(server_args)
    system = system_of(server_args)
    for name, refused, remedy in (*_REFUSED, *_REFUSED_STREAMS) if streams else _REFUSED:
        value = getattr(server_args, name, None)
        if name == "page_size" and system is not None and system.pages:
            continue  # `_of_pages` looks at it
        if value is not None and refused(value) and not (name == "disable_radix_cache" and _decided(server_args)):
            problems.append(
                f"{name}={value!r} is not supported with --attention-backend {server_args.attention_backend}: {remedy}"
            )
    if system is None:
        return problems
    problems += _of_cache_type(server_args, system)
    problems += _of_pages(server_args, system)
    problems += _of_drafts(server_args, system)
    if compat.preempts(server_args) and (streams or not compat.REQUEUES_PREEMPTED):
        why = "a turn of a conversation that gives way could not go on"
        if not streams:
            why = "this version of SGLang loses a request that gave way if the one it gave way to then does not fit"
        problems.append(
            f"enable_priority_scheduling without disable_priority_preemption is not supported with --attention-backend"
            f" {server_args.attention_backend}: set --disable-priority-preemption, too: {why}"
        )
    if os.environ.get(POLICY_ENV) and system.options is None:
        backend = f"--attention-backend {server_args.attention_backend}"
        problems.append(without_options(os.environ[POLICY_ENV], backend, f"--policy ({POLICY_ENV} in the environment)"))
    if getattr(server_args, "enable_mixed_chunk", False) and system.apart:
        problems.append(
            f"enable_mixed_chunk is not supported with --attention-backend {server_args.attention_backend}: leave out"
            " --enable-mixed-chunk: decoding steps would not be told from prompts"
        )
    try:
        asked_plain_attention()
    except ValueError as error:
        problems.append(str(error))
    problems += _of_tenants(server_args)
    policy = system.make_policy()
    try:
        policy.spread(server_args.tp_size)
        _check_ranks_of_kernels(server_args, system)
    except ValueError as error:
        problems.append(f"--attention-backend {server_args.attention_backend}: {error}")
    least, size = policy.least_chunk, server_args.chunked_prefill_size
    if size is not None and 0 < size < least:
        problems.append(
            f"chunked_prefill_size={size} is below the policy's chunk of {least} tokens, which are computed together:"
            f" set --chunked-prefill-size {least} or more, or make the chunk smaller (--policy)"
        )
    return problems


def _decided(server_args: ServerArgs) -> bool:
    """Whether a server of ours has no prefixes in the radix tree, which `before_model_adjustments` decides."""
    system = system_of(server_args)
    return system is not None and compat.serves_states(server_args, kinds(system))


def _check_ranks_of_kernels(server_args: ServerArgs, system: System) -> None:
    """Raise ValueError where kernels would serve a system on several ranks, and its kernels know one alone.

    An unknown name of kernels is a ValueError, too.
    """
    if server_args.tp_size == 1 or system.spreads:
        return
    chosen = kernels(system, server_args.dtype)
    if chosen != "torch":
        raise ValueError(
            f"tp_size={server_args.tp_size} with kernels ({chosen}): what comes back for a request depends on heads of"
            f" all ranks, whose products only plain PyTorch adds; set {KERNELS_ENV}=torch in the server's environment,"
            " or --tp-size 1"
        )


def _of_cache_type(server_args: ServerArgs, system: System) -> list[str]:
    """What is wrong with the type of the KV cache that is asked for, in words; nothing where the system reads it."""
    kind = str(getattr(server_args, "kv_cache_dtype", None))
    if ("fp8" not in kind and "fp4" not in kind) or (system.float8 and kind == FLOAT8):
        return []
    remedy = f"set --kv-cache-dtype auto{f' or {FLOAT8}' if system.float8 else ''}"
    if not system.float8:
        read_by = ", ".join(name for name, each in ours().items() if each.float8)
        remedy += f", or --attention-backend to one of {read_by}, which read {FLOAT8}"
    backend = f"--attention-backend {server_args.attention_backend}"
    return [f"kv_cache_dtype={kind!r} is not supported with {backend}: {remedy}"]


def _of_pages(server_args: ServerArgs, system: System) -> list[str]:
    """What is wrong with pages of several KV slots, in words; nothing where the system serves requests in them."""
    size = page_size_of(server_args)
    if size == 1 or not system.pages:  # `_REFUSED` has it
        return []
    said = f"page_size={size} is not supported"
    if torch.cuda.is_available():
        return [f"{said} on a GPU, where nobody has run it: set --page-size 1"]
    if os.environ.get(POOL_DIR_ENV):
        return [f"{said} with --pool-dir: set --page-size 1, or leave out --pool-dir; blocks of pools end at any token"]
    return []


def _of_drafts(server_args: ServerArgs, system: System) -> list[str]:
    """What is wrong with drafting tokens, in words; nothing where the system's steps do that here, or need not."""
    if getattr(server_args, "speculative_algorithm", None) != DRAFTING or not system.drafts:
        return []  # of a system that does not draft, the algorithm itself says so
    said = f"speculative_algorithm={DRAFTING!r} is not supported"
    if not lines.at_least("0.5.17"):
        return [
            f"{said} with SGLang {lines.installed_sglang()}, which cannot draft under a grammar: leave out"
            " --speculative-algorithm, or install SGLang 0.5.17 or later"
        ]
    if not drafts(system):
        return [
            f"{said} on this GPU, where nobody has run it: use a Hopper GPU with {PLAIN_ENV}=auto or fa3, or leave out"
            " --speculative-algorithm"
        ]
    problems = []
    if compat.serves_states(server_args, kinds(system)):
        problems.append(
            f"{said} with a model whose layers keep a state, from which no draft could be taken back: leave out"
            " --speculative-algorithm"
        )
    try:
        system.make_policy().draft(server_args.speculative_num_draft_tokens)
    except ValueError as error:
        problems.append(f"--speculative-algorithm {DRAFTING}: {error}")
    one_row = (
        "enable_custom_logit_processor",
        "enable_return_routed_experts",
        "enable_watermark",
    )
    problems += [
        f"{said} with --{name.replace('_', '-')}, which handles one row a request, and drafts have several: leave"
        " one of them out"
        for name in one_row
        if getattr(server_args, name, False)
    ]
    return problems


def _of_tenants(server_args: ServerArgs) -> list[str]:
    """What is wrong with the file of tenants, or with having one, in words."""
    path = server_settings().tenants
    if path is None:
        return []
    keys = server_args.api_key, server_args.admin_api_key
    if not any(keys):
        return [
            f"--tenants {path} without --api-key and --admin-api-key: whoever shows no key would operate the server;"
            " set --admin-api-key, which is the operator's"
        ]
    try:
        Tenants.read(path, keys)
    except ValueError as error:
        return [str(error)]
    return []


def before_server_args(server_args: ServerArgs) -> None:
    """BEFORE SGLang decides on a server's arguments: set what our backend needs."""
    system = system_of(server_args)
    if system is None or compat.is_resolved(server_args):
        return
    policy = system.make_policy()  # first of all: wrong options are refused before anything is set
    if server_args.radix_cache_backend is None:
        server_args.radix_cache_backend = RADIX_CACHE_BACKEND
    if server_args.page_size is None:
        server_args.page_size = 1
    _share_cores()
    in_kernels = captures(system, server_args.dtype)
    if not (in_kernels and policy.captured):
        # Views are built on the host in every layer: there is nothing to capture.
        server_args.disable_cuda_graph = True
    if server_args.chunked_prefill_size is None:
        server_args.chunked_prefill_size = policy.pass_tokens(in_kernels)


def before_model_adjustments(server_args: ServerArgs) -> None:
    """BEFORE SGLang looks at the model: refuse models that our backends do not serve.

    SGLang would refuse some of them for reasons of its own, in words that do not say what to use instead.

    Raises:
        ValueError: what `compat.refuse_config` raises.
    """
    system = system_of(server_args)
    if system is not None:
        others = {name: kinds_beside_sglang(each) for name, each in systems().items()}
        compat.refuse_config(server_args, system.float8, kinds(system), others)
        if _decided(server_args):
            compat.decide(server_args, disable_radix_cache=True)  # a prefix in the tree would need its states, too


def _share_cores() -> None:
    """Leave a core to the server's other processes, on a machine without a GPU.

    Three of them want one each: a torch thread that waits for a core holds up all the others of its parallel region.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) - 1)))


def after_server_args(_result: None, server_args: ServerArgs) -> None:
    """AFTER SGLang has decided on a server's arguments: refuse what is not supported.

    Raises:
        ValueError: every problem, a line each.
    """
    ours = is_active(server_args)
    warning = lines.warning_on_gpus()
    if warning and ours and LOOKED_AT not in server_args.__dict__ and torch.cuda.is_available():
        logger.warning("sglang_ext: %s", warning)
    cache = server_args.radix_cache_backend == RADIX_CACHE_BACKEND
    server_args.__dict__[LOOKED_AT] = True  # SGLang has sealed its resolved arguments
    if not ours and not cache:
        return
    if ours != cache:
        raise ValueError(
            f"--attention-backend {server_args.attention_backend} with --radix-cache-backend"
            f" {server_args.radix_cache_backend}: the two belong together; leave out --radix-cache-backend, and set"
            f" --attention-backend to one of {', '.join(systems())} for a server with pools"
        )
    problems = refusals(server_args)
    if problems:
        raise ValueError("sglang_ext:\n  " + "\n  ".join(problems))
