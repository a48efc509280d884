"""SGLang's names and fields that a new SGLang version is known or likely to move, in one package.

The cache, the scheduler hooks and the backend are written against SGLang's classes and read their fields directly.

Verified against the lines of SGLang in `sglang_ext.lines`. A port to another version starts and, mostly, ends here.
"""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput, UpdateWeightFromDiskReqInput
from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.managers.scheduler import NextBatchPlan
from sglang.srt.mem_cache.allocation import alloc_req_slots
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode
from sglang.srt.observability.req_time_stats import monotonic_time
from sglang.utils import TypeBasedDispatcher

from sglang_ext.compat.aborts import (
    abort,
    abort_unscheduled,
    blocks_were_missing,
    grammar_failed,
    is_aborted,
    is_missing_message,
    keep_first_abort,
    missing_message,
)
from sglang_ext.compat.graphs import (
    as_steps,
    breaks_at_attention,
    capture_steps,
    capture_whole,
    capturing_views,
    graph_variant,
    graphs_attention,
    keep_graph_sizes,
    record_both_variants,
    replay_whole,
    verifies,
    whole_graph_size,
)
from sglang_ext.compat.kv import (
    first_layer,
    kv_by_layer,
    kv_bytes_per_token,
    num_kv_slots,
    num_request_slots,
    write_kv,
)
from sglang_ext.compat.layers import (
    attention_layers,
    attention_output,
    has_window,
    listed_states,
    listed_windows,
    window_layers,
)
from sglang_ext.compat.line import (
    LEAVES_OUT_ENDING,
    LENGTH_HIDES_STOPS,
    REQUEUES_PREEMPTED,
    RadixTree,
    TreelessCache,
    charge_slots,
    computed,
    decide,
    default_attention,
    extend_end,
    has_row,
    is_resolved,
    protected,
    request_slot,
    resolved,
    set_extend,
    set_reserved,
    set_written,
    slots_ahead,
    verified_logprobs,
)
from sglang_ext.compat.manager import (
    abort_was_asked,
    answer_index,
    freeze_objects,
    generate,
    is_told_to_end,
    key_opens,
    listen,
    log_request,
    logical_rid,
    logical_rids,
    logs_json,
    must_end_at_once,
    prompt_index,
    requests_under_way,
    route_path,
    streams_parts,
    takes_requests,
)
from sglang_ext.compat.models import refuse_config, refuse_model, serves_states
from sglang_ext.compat.nodes import node_begin, path_slots, tree_nodes
from sglang_ext.compat.priorities import first_priority, preempts, sort_waiting
from sglang_ext.compat.rows import as_prompt, new_rows, step_tokens
from sglang_ext.compat.scales import UNSCALED, KVScales, kv_scales
from sglang_ext.compat.slots import after_forward, take_slots

__all__ = [
    "LEAVES_OUT_ENDING",
    "LENGTH_HIDES_STOPS",
    "REQUEUES_PREEMPTED",
    "UNSCALED",
    "AbortReq",
    "AddReqResult",
    "AttentionShape",
    "GenerateReqInput",
    "InsertParams",
    "KVScales",
    "MatchPrefixParams",
    "MatchResult",
    "NextBatchPlan",
    "RadixKey",
    "RadixTree",
    "TorchNativeAttnBackend",
    "TreeNode",
    "TreelessCache",
    "abort",
    "abort_unscheduled",
    "abort_was_asked",
    "add_dispatch",
    "after_forward",
    "answer_index",
    "answer_note",
    "as_prompt",
    "as_steps",
    "attention_output",
    "attention_shape",
    "blocks_were_missing",
    "breaks_at_attention",
    "capture_steps",
    "capture_whole",
    "capturing_views",
    "charge_slots",
    "chunked_prefill_size",
    "compiled_grammars",
    "computed",
    "context_length",
    "decide",
    "default_attention",
    "extend_end",
    "first_layer",
    "first_priority",
    "freeze_objects",
    "generate",
    "grammar_failed",
    "graph_variant",
    "graphs_attention",
    "has_row",
    "is_aborted",
    "is_missing_message",
    "is_probe",
    "is_resolved",
    "is_told_to_end",
    "keep_first_abort",
    "keep_graph_sizes",
    "key_opens",
    "kv_by_layer",
    "kv_bytes_per_token",
    "kv_scales",
    "listed_states",
    "listed_windows",
    "listen",
    "load_weights",
    "log_request",
    "logical_rid",
    "logical_rids",
    "logs_json",
    "metrics_enabled",
    "missing_message",
    "mixes_chunks",
    "monotonic_time",
    "must_end_at_once",
    "new_rows",
    "node_begin",
    "now",
    "num_kv_slots",
    "num_request_slots",
    "own_ids",
    "path_slots",
    "pending_requests",
    "preempts",
    "prompt_index",
    "protected",
    "record_both_variants",
    "refuse_config",
    "refuse_model",
    "replay_whole",
    "request_rows",
    "request_slot",
    "requests_under_way",
    "resolved",
    "route_path",
    "serves_states",
    "set_extend",
    "set_reserved",
    "set_written",
    "slots_ahead",
    "sort_waiting",
    "step_tokens",
    "streams_parts",
    "take_slots",
    "takes_requests",
    "tree_nodes",
    "verified_logprobs",
    "verifies",
    "whole_graph_size",
    "window_layers",
    "write_kv",
]


def is_probe(req: Any) -> bool:
    """Whether a request is SGLang's own, which asks whether the server still answers."""
    return str(req.rid).startswith(HEALTH_CHECK_RID_PREFIX)


def own_ids(req: Any, begin: int, end: int) -> array[int]:
    """Tokens [begin, end) of a scheduler request's prompt and answer; its prompt is longer than `begin`."""
    ids = req.full_untruncated_fill_ids
    found: array[int] = (
        ids[begin:end] if len(ids) >= end else (req.origin_input_ids[begin:] + req.output_ids)[: end - begin]
    )
    return found


def pending_requests(scheduler: Any) -> set[int]:
    """`id` of every request of which a step was launched whose tokens the scheduler has not seen yet."""
    return {id(req) for batch, _ in getattr(scheduler, "result_queue", ()) for req in batch.reqs}


def mixes_chunks(scheduler: Any) -> bool:
    """Whether decoding steps run in one batch with chunks of a prompt."""
    return bool(scheduler.is_mixed_chunk)


@contextlib.contextmanager
def compiled_grammars(scheduler: Any) -> Iterator[None]:
    """Requests whose grammar is compiled join the waiting queue now, and no more of them within the context.

    SGLang has them join while it chooses a batch, all at once, however long their prompts are.
    """
    manager = scheduler.grammar_manager
    if manager.has_waiting_grammars():
        for req in manager.get_ready_grammar_requests():
            scheduler._add_request_to_queue(req)
    held, manager.grammar_queue = manager.grammar_queue, []
    try:
        yield
    finally:
        manager.grammar_queue = [*held, *manager.grammar_queue]


def now() -> float:
    """The clock of the radix tree's access times, in seconds."""
    return time.monotonic()


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of a model's attention on one rank, and of the device it runs on.

    Attributes:
        heads, kv_heads: query and key-value heads.
        head_dim, value_dim: size of a key and of a value.
        dtype: of queries, keys and values.
        scale: factor of the logits.
        num_sms: multiprocessors; 1 on the CPU.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    scale: float
    num_sms: int

    @property
    def group(self) -> int:
        """Query heads a key-value head."""
        return self.heads // self.kv_heads


def attention_shape(model_runner: Any) -> AttentionShape:
    """The sizes that a model's attention layers have on this rank, all alike; those with a window are left out.

    Raises:
        ValueError: layers differ.
    """
    layers = [layer for layer in attention_layers(model_runner) if not has_window(layer)]
    shapes = {(x.tp_q_head_num, x.tp_k_head_num, x.qk_head_dim, x.v_head_dim, x.scaling) for x in layers}
    if len(shapes) != 1:
        raise ValueError(f"attention layers of shapes {sorted(shapes)}: expected one shape for all layers")
    heads, kv_heads, head_dim, value_dim, scale = shapes.pop()
    cuda = torch.device(model_runner.device).type == "cuda"
    sms = torch.cuda.get_device_properties(model_runner.device).multi_processor_count if cuda else 1
    return AttentionShape(heads, kv_heads, head_dim, value_dim, model_runner.dtype, scale, sms)


def model_kv_heads(model_runner: Any) -> int:
    """Key-value heads of an attention layer, on all ranks together.

    Without a GPU, SGLang adds heads of zeros where ranks do not divide the model's; they are not counted.
    """
    config = model_runner.model_config
    own = getattr(config.hf_config, "original_total_num_kv_heads", None)
    return int(config.get_total_num_kv_heads() if own is None else own)


def context_length(model_runner: Any) -> int:
    """Positions that the model knows, as the server was told; a row of KV slots is that long."""
    return int(model_runner.model_config.context_len)


def chunked_prefill_size(model_runner: Any) -> int:
    """Tokens of prompts in one pass, at most, as the server was told; 0 for any number."""
    return max(0, resolved(model_runner.server_args).chunked_prefill_size or 0)


def model_path(model_runner: Any) -> tuple[str, bool]:
    """Where the model is, as the server was told, and whether its weights were loaded from there."""
    server_args = resolved(model_runner.server_args)
    return str(server_args.model_path), server_args.load_format != "dummy"


def request_rows(batch: Any) -> list[int]:
    """The request slot of every request of a batch; new requests get one.

    Raises:
        RuntimeError: more requests than slots.
    """
    found: list[int] = alloc_req_slots(batch.req_to_token_pool, batch.reqs, batch.tree_cache)
    return found


def others_run(manager: Any, prefix: str) -> bool:
    """Whether a request is under way whose id does not begin with `prefix`."""
    return any(not str(rid).startswith(prefix) for rid in manager.rid_to_state)


def answer_note(req: Any, name: str, end: int) -> dict[str, Any] | None:
    """What `meta_info[name]` will say of one generated token; to be filled before the pass is over.

    None for a part of a prompt, which gives no token.

    SGLang sends an entry of `customized_info` for each generated token along with it.

    Args:
        req: the scheduler's request.
        name: key in `meta_info`.
        end: columns of the row once the pass is over, whose last gives the token.
    """
    token = end - len(req.origin_input_ids)
    if token < 0:
        return None
    if req.customized_info is None:
        req.customized_info = {}
    notes = req.customized_info.setdefault(name, [])
    notes.extend([None] * (token + 1 - len(notes)))
    note: dict[str, Any] = {}
    notes[token] = note
    return note


def metrics_enabled(scheduler: Any) -> bool:
    """Whether this scheduler process reports to Prometheus (one rank of each group does)."""
    return bool(scheduler.metrics_reporter.enable_metrics)


def add_dispatch(dispatcher: Any, kind: type, handler: Any) -> None:
    """Route messages of `kind` to `handler`."""
    dispatcher += TypeBasedDispatcher([(kind, handler)])


def load_weights(engine: Any, folder: str, *, flush: bool) -> None:
    """Replace those weights of a running engine's model that a folder has (safetensors, names of the checkpoint).

    Args:
        engine: `sglang.Engine`.
        folder: with a configuration of the same model.
        flush: also forget the KV cache; without it, what is there stays as it was computed.

    Raises:
        RuntimeError: SGLang did not take them.
    """
    asked = UpdateWeightFromDiskReqInput(model_path=folder, load_format="safetensors", flush_cache=flush)
    done, message, *_ = engine.loop.run_until_complete(engine.tokenizer_manager.update_weights_from_disk(asked, None))
    if not done:
        raise RuntimeError(f"weights of {folder} were not loaded: {message}")
