"""Every place of SGLang's that we wrap, and what wraps it: names alone, nothing is imported.

A target that resolves may still never be called: SGLang goes on without our hook then, and would answer wrongly. So
hooks note that they were called, and those without which an answer may be wrong are looked at when the first request
has ended (`check_called`).
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sglang_ext import lines
from sglang_ext.names import Passed

Process = Literal["", "main", "scheduler"]
LOOKED_AT = "_sglang_ext_looked_at"
"""Attribute of a server's arguments, which goes with them to the processes that are started."""


@dataclass(frozen=True)
class Hook:
    """One patch.

    Attributes:
        target: a dotted name of SGLang's.
        kind: how it is wrapped: before, after, around.
        ours: `module:function` of ours, imported when needed.
        called_in: in which process it was called when the first request has ended; empty where that depends on the
            request or on the server's flags.
    """

    target: str
    kind: str
    ours: str
    called_in: Process = ""

    def load(self) -> Callable[..., Passed]:
        return pkgutil.resolve_name(self.ours)

    def __str__(self) -> str:
        return f"{self.target} ({self.kind}, {self.ours})"


_called: set[Hook] = set()
_checked: set[Process] = set()


@functools.cache
def noted(hook: Hook) -> Callable[..., Passed]:
    """What SGLang calls for a hook."""
    ours = hook.load()

    @functools.wraps(ours)
    def call(*args: Passed, **kwargs: Passed) -> Passed:
        _called.add(hook)
        return ours(*args, **kwargs)

    return call


def never_called(process: Process) -> list[Hook]:
    """Hooks that should have been called in this process, and were not."""
    return [hook for hook in HOOKS if hook.called_in == process and hook not in _called]


def was_checked(process: Process) -> bool:
    """Whether all hooks that a request goes through in this process are known to have been called."""
    return process in _checked


def check_called(process: Process) -> None:
    """Look once, when a request has ended, whether all hooks that it goes through in this process were called.

    Raises:
        RuntimeError: some were not.
    """
    if was_checked(process):
        return
    if silent := never_called(process):
        raise RuntimeError(
            "sglang_ext: a request has ended, and SGLang has not called hooks of the plugin, without which answers may"
            f" be wrong: {'; '.join(map(str, silent))}. Install a supported version of SGLang (see sglang-ext doctor)"
        )
    _checked.add(process)


def check_arguments(server_args: object) -> None:
    """Look whether a server's arguments were looked at when they were resolved.

    Raises:
        RuntimeError: they were not: nothing that the plugin does not support was refused.
    """
    if not getattr(server_args, LOOKED_AT, False):
        raise RuntimeError(
            "sglang_ext: SGLang has not called the plugin's hook on ServerArgs, so that no argument was looked at;"
            " install a supported version of SGLang (see sglang-ext doctor)"
        )


_SRT = "sglang.srt."
_OURS = "sglang_ext.serving."
_RUNNER = _SRT + "model_executor.runner."
_BREAKABLE = _SRT + "model_executor.runner_backend.breakable_cuda_graph_backend.BreakableCudaGraphBackend."
_ADDER = _SRT + "managers.schedule_policy.PrefillAdder."
_GRAPHS = "sglang_ext.attention.graphs:"
_MANAGER = _SRT + "managers.tokenizer_manager.TokenizerManager."
_LINEAR = "sglang_ext.attention.linear:"
_FUSED = "sglang.kernels.ops."
_FROM_17 = lines.at_least("0.5.17")
_SPLIT = _FUSED + "attention.triton_gdn_fused_proj." if _FROM_17 else "sglang.jit_kernel.triton.gdn_fused_proj."
_GATES = _FUSED + ("elementwise.elementwise." if _FROM_17 else "layernorm.elementwise.")
_OPENAI = _SRT + "entrypoints.openai."
_CHAT = _OPENAI + "serving_chat.OpenAIServingChat."
_COMPLETIONS = _OPENAI + "serving_completions.OpenAIServingCompletion."
_RESPONSES = _OPENAI + "serving_responses.OpenAIServingResponses."
_MESSAGES = _SRT + "entrypoints.anthropic.serving.AnthropicServing."
_OLLAMA = _SRT + "entrypoints.ollama.serving.OllamaServing."

_ARGUMENTS = {
    lines.OLDER: (
        Hook(_SRT + "server_args.ServerArgs.__post_init__", "before", _OURS + "checks:before_server_args"),
        Hook(
            _SRT + "server_args.ServerArgs._handle_model_specific_adjustments",
            "before",
            _OURS + "checks:before_model_adjustments",
        ),
        Hook(_SRT + "server_args.ServerArgs.__post_init__", "after", _OURS + "checks:after_server_args"),
    ),
    lines.NEWER: (
        Hook(_SRT + "server_args.ServerArgs.resolve_once", "before", _OURS + "checks:before_server_args"),
        Hook(
            _SRT + "arg_groups.model_hook.handle_model_specific_adjustments",
            "before",
            _OURS + "checks:before_model_adjustments",
        ),
        Hook(_SRT + "server_args.ServerArgs.resolve_once", "after", _OURS + "checks:after_server_args"),
    ),
}
"""Where SGLang makes its decisions on a server's arguments: the one place that no two lines share."""

_PINNED_MASKS = (
    Hook(
        _SRT + "constrained.xgrammar_backend._allocate_token_bitmask",
        "around",
        "sglang_ext.plugin:around_allocate_token_bitmask",
    ),
)
"""Where SGLang pins memory for the masks of grammars. It does so from 0.5.17 on."""

_ABORTS = (Hook(_MANAGER + "abort_request", "before", "sglang_ext.compat.manager:before_abort_request"),)
"""Where SGLang is asked to abort requests. 0.5.16 and 0.5.18 do not note of which requests."""
_NOTES_ABORTS = lines.current() is lines.NEWER or lines.installed_release() == "0.5.17"

HOOKS = (
    Hook(_SRT + "utils.common.support_triton", "around", "sglang_ext.plugin:around_support_triton"),
    *(_PINNED_MASKS if _FROM_17 else ()),
    Hook(
        _SRT + "constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
        "around",
        "sglang_ext.plugin:around_apply_vocab_mask",
    ),
    Hook(
        _SRT + "layers.logprob_processor.get_token_ids_logprobs_raw",
        "after",
        "sglang_ext.plugin:after_get_token_ids_logprobs",
    ),
    Hook(
        _SRT + "distributed.device_communicators.pynccl.PyNcclCommunicator.__init__",
        "around",
        "sglang_ext.plugin:around_pynccl_init",
    ),
    Hook(
        _SRT + "layers.attention.attention_registry.attn_backend_wrapper",
        "around",
        _LINEAR + "around_attn_backend_wrapper",
    ),
    Hook("torch.get_device_module", "around", _LINEAR + "around_get_device_module"),
    Hook(_FUSED + "attention.fla.fused_norm_gate.rms_norm_gated", "around", _LINEAR + "around_rms_norm_gated"),
    Hook(_FUSED + "attention.fla.layernorm_gated.rms_norm_gated", "around", _LINEAR + "around_layer_norm_gated"),
    Hook(_SPLIT + "fused_qkvzba_split_reshape_cat", "around", _LINEAR + "around_split_interleaved"),
    Hook(_SPLIT + "fused_qkvzba_split_reshape_cat_contiguous", "around", _LINEAR + "around_split_contiguous"),
    Hook(_GATES + "fused_sigmoid_mul", "around", _LINEAR + "around_sigmoid_mul"),
    Hook(_GATES + "fused_gate_sigmoid_mul_add", "around", _LINEAR + "around_gated_add"),
    *_ARGUMENTS[lines.current()],
    Hook(
        _SRT + "managers.scheduler.Scheduler.handle_generate_request",
        "before",
        _OURS + "scheduler:before_handle_generate_request",
        "scheduler",
    ),
    Hook(_SRT + "managers.schedule_batch.Req.__init__", "after", _OURS + "scheduler:after_req_init", "scheduler"),
    Hook(
        _SRT + "managers.schedule_batch.Req.set_finish_with_abort",
        "after",
        _OURS + "scheduler:after_set_finish_with_abort",
    ),
    Hook(
        _SRT + "managers.schedule_batch.ScheduleBatch.check_decode_mem",
        "around",
        _OURS + "scheduler:around_check_decode_mem",
    ),
    Hook(
        _SRT + "managers.scheduler.Scheduler.init_req_max_new_tokens",
        "around",
        _OURS + "scheduler:around_init_req_max_new_tokens",
        "scheduler",
    ),
    Hook(
        _SRT + "managers.scheduler.Scheduler.init_model_worker",
        "after",
        _OURS + "streams:after_init_model_worker",
        "scheduler",
    ),
    Hook(_SRT + "managers.scheduler.Scheduler.__init__", "around", _OURS + "watch:around_scheduler_work", "scheduler"),
    Hook(
        _SRT + "managers.scheduler.Scheduler.run_event_loop",
        "around",
        _OURS + "watch:around_scheduler_work",
        "scheduler",
    ),
    Hook(_ADDER + "add_one_req", "around", _OURS + "scheduler:around_add_one_req", "scheduler"),
    Hook(_ADDER + "add_chunked_req", "around", _OURS + "scheduler:around_add_chunked_req"),
    Hook(_ADDER + "_get_running_request_total_token_offset", "around", _OURS + "scheduler:around_running_offset"),
    Hook(
        _SRT + "mem_cache.allocation.alloc_for_extend",
        "around",
        _OURS + "scheduler:around_alloc_for_extend",
        "scheduler",
    ),
    Hook(_SRT + "mem_cache.allocation.alloc_for_decode", "around", _OURS + "scheduler:around_alloc_for_decode"),
    Hook(_SRT + "mem_cache.allocation.get_last_loc", "around", "sglang_ext.compat.pages:around_last_slot"),
    Hook(
        _SRT + "mem_cache.kv_cache_configurator.get_req_to_token_extra_context_len",
        "around",
        "sglang_ext.drafting.slots:around_row_headroom",
    ),
    Hook(
        _SRT + "mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup",
        "around",
        "sglang_ext.drafting.slots:around_init_copies",
    ),
    Hook(
        _SRT + "mem_cache.allocation.assign_req_to_token_pool_func",
        "around",
        "sglang_ext.drafting.slots:around_assign_slots",
    ),
    Hook(
        _SRT + "managers.scheduler.Scheduler.get_new_batch_prefill",
        "around",
        _OURS + "turns:around_get_new_batch_prefill",
        "scheduler",
    ),
    Hook(
        _SRT + "managers.scheduler.Scheduler.update_running_batch",
        "around",
        _OURS + "last_step:around_update_running_batch",
    ),
    Hook(
        _SRT + "managers.scheduler.Scheduler.init_request_dispatcher",
        "after",
        _OURS + "scheduler:after_init_request_dispatcher",
        "scheduler",
    ),
    Hook(
        _SRT + "managers.scheduler.Scheduler.get_internal_state",
        "after",
        _OURS + "scheduler:after_get_internal_state",
    ),
    Hook(
        _SRT + "model_executor.forward_batch_info.ForwardBatch.init_new",
        "after",
        _OURS + "scheduler:after_forward_batch_init_new",
        "scheduler",
    ),
    Hook(_RUNNER + "decode_cuda_graph_runner.DecodeCudaGraphRunner.capture", "before", _GRAPHS + "before_capture"),
    Hook(_RUNNER + "decode_cuda_graph_runner.DecodeCudaGraphRunner.capture", "after", _GRAPHS + "after_capture"),
    Hook(
        _RUNNER + "decode_cuda_graph_runner.DecodeCudaGraphRunner._resolve_lora_variant",
        "around",
        _GRAPHS + "around_resolve_variant",
    ),
    Hook(
        _RUNNER + "decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph",
        "around",
        _GRAPHS + "around_can_run_decode",
    ),
    Hook(
        _RUNNER + "prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_run_graph",
        "around",
        _GRAPHS + "around_can_run_prefill",
    ),
    Hook(
        _RUNNER + "prefill_cuda_graph_runner.PrefillCudaGraphRunner.capture",
        "before",
        _GRAPHS + "before_capture_prefill",
    ),
    Hook(
        _RUNNER + "prefill_cuda_graph_runner.PrefillCudaGraphRunner.execute",
        "around",
        _GRAPHS + "around_execute_prefill",
    ),
    Hook(_BREAKABLE + "capture_one", "around", _GRAPHS + "around_capture_breakable"),
    Hook(_BREAKABLE + "replay", "around", _GRAPHS + "around_replay_breakable"),
    Hook(
        _SRT + "model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        "after",
        "sglang_ext.plugin:after_compute_cell_size",
        "scheduler",
    ),
    *(() if _NOTES_ABORTS else _ABORTS),
    Hook(_MANAGER + "__init__", "after", _OURS + "tokenizer:after_init", "main"),
    Hook(_MANAGER + "__init__", "after", _OURS + "streams:after_init_tokenizer", "main"),
    Hook(_MANAGER + "__init__", "after", _OURS + "options:after_init", "main"),
    Hook(_MANAGER + "sigterm_watchdog", "around", _OURS + "drain:around_sigterm_watchdog"),
    Hook(_MANAGER + "generate_request", "around", _OURS + "entry:around_generate_request", "main"),
    Hook(_MANAGER + "_tokenize_one_request", "around", _OURS + "tokenizer:around_tokenize_one_request"),
    Hook(_MANAGER + "_validate_one_request", "around", _OURS + "tokenizer:around_validate_one_request"),
    Hook(_MANAGER + "_tokenize_texts", "around", _OURS + "texts:around_tokenize_texts"),
    Hook(_MANAGER + "_wait_one_response", "around", _OURS + "tokenizer:around_wait_one_response", "main"),
    Hook(_MANAGER + "_dispatch_to_scheduler", "around", _OURS + "access:around_dispatch", "main"),
    Hook(_MANAGER + "flush_cache", "around", _OURS + "service_info:around_flush_cache"),
    Hook(
        _SRT + "managers.tokenizer_control_mixin.TokenizerControlMixin.get_internal_state",
        "around",
        _OURS + "service_info:around_get_internal_state",
    ),
    Hook(
        _SRT + "managers.tokenizer_control_mixin.TokenizerControlMixin.open_session",
        "around",
        _OURS + "options:around_open_session",
    ),
    Hook(
        _OPENAI + "serving_tokenize.OpenAIServingTokenize._handle_non_streaming_request",
        "around",
        _OURS + "options:around_tokenize",
    ),
    Hook(
        _OPENAI + "serving_tokenize.OpenAIServingDetokenize._handle_non_streaming_request",
        "around",
        _OURS + "options:around_detokenize",
    ),
    Hook(
        _OPENAI + "serving_score.OpenAIServingScore._handle_non_streaming_request",
        "around",
        _OURS + "options:around_score",
    ),
    Hook(_CHAT + "_build_chat_response", "around", _OURS + "answers:around_build_response"),
    Hook(_CHAT + "_generate_chat_stream", "around", _OURS + "answers:around_stream"),
    Hook(_COMPLETIONS + "_build_completion_response", "around", _OURS + "answers:around_build_response"),
    Hook(_COMPLETIONS + "_generate_completion_stream", "around", _OURS + "answers:around_stream"),
    Hook(_CHAT + "handle_request", "around", _OURS + "texts:around_handle_chat"),
    Hook(_CHAT + "_convert_to_internal_request", "around", _OURS + "texts:around_convert_chat"),
    Hook(_RESPONSES + "create_responses", "around", _OURS + "routes:around_create_responses"),
    Hook(_RESPONSES + "_make_request", "around", _OURS + "routes:around_make_request"),
    Hook(_RESPONSES + "responses_full_generator", "around", _OURS + "routes:around_full_response"),
    Hook(_RESPONSES + "responses_stream_generator", "around", _OURS + "routes:around_response_stream"),
    Hook(_RESPONSES + "responses_stream_generator_non_harmony", "around", _OURS + "routes:around_response_stream"),
    Hook(_MESSAGES + "handle_messages", "around", _OURS + "routes:around_handle_messages"),
    Hook(_MESSAGES + "_convert_to_chat_completion_request", "around", _OURS + "routes:around_convert_messages"),
    Hook(_MESSAGES + "_convert_response", "around", _OURS + "routes:around_convert_answer"),
    Hook(_MESSAGES + "_handle_streaming", "around", _OURS + "texts:around_handle_message"),
    Hook(_MESSAGES + "_handle_non_streaming", "around", _OURS + "texts:around_handle_message"),
    Hook(_MESSAGES + "_generate_anthropic_stream", "around", _OURS + "routes:around_message_stream"),
    Hook(_MESSAGES + "handle_count_tokens", "around", _OURS + "texts:around_count_tokens"),
    Hook(_MESSAGES + "_error_response", "around", _OURS + "routes:around_messages_error"),
    Hook(_OLLAMA + "handle_chat", "around", _OURS + "ollama:around_handle"),
    Hook(_OLLAMA + "handle_generate", "around", _OURS + "ollama:around_handle"),
    Hook(_SRT + "utils.auth.decide_request_auth", "around", _OURS + "access:around_decide_request_auth"),
    Hook(_SRT + "utils.auth.add_api_key_middleware", "around", _OURS + "access:around_add_api_key_middleware"),
    Hook(
        _SRT + "entrypoints.openai.serving_chat.OpenAIServingChat._process_messages",
        "around",
        _OURS + "chat:around_process_messages",
    ),
    Hook(
        _SRT + "entrypoints.openai.serving_completions.OpenAIServingCompletion._build_sampling_params",
        "around",
        _OURS + "chat:around_build_sampling_params",
    ),
    Hook(_SRT + "entrypoints.engine._set_envs_and_config", "after", _OURS + "watch:after_set_envs_and_config"),
    Hook(_SRT + "entrypoints.engine.Engine._launch_subprocesses", "after", _OURS + "watch:after_launch_subprocesses"),
    Hook(
        _SRT + "managers.tokenizer_manager.SignalHandler.running_phase_sigquit_handler",
        "around",
        _OURS + "watch:around_running_phase_sigquit_handler",
    ),
    Hook(
        _SRT + "entrypoints.openai.serving_responses.OpenAIServingResponses.__init__",
        "after",
        _OURS + "responses:after_init",
    ),
    Hook(
        _SRT + "entrypoints.http_server._setup_and_run_http_server",
        "before",
        _OURS + "http:before_setup_and_run_http_server",
    ),
)
