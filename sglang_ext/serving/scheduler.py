"""What runs inside SGLang's scheduler processes: each hook asks the server's mode (`modes.mode_of`).

Every decision follows from messages that all tensor-parallel ranks receive in the same order: all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang_ext import compat
from sglang_ext.attention.backend import view_backend
from sglang_ext.attention.compiles import COMPILES
from sglang_ext.cache import carried
from sglang_ext.names import (
    ForwardBatch,
    ModelRunner,
    Passed,
    PrefillAdder,
    Req,
    ScheduleBatch,
    Scheduler,
    TokenizedInput,
)
from sglang_ext.serving.admin import Admin, show_metrics
from sglang_ext.serving.messages import ExtAdminReqInput
from sglang_ext.serving.modes import mode_of
from sglang_ext.types import JsonObject

# ---- requests ----


def before_handle_generate_request(scheduler: Scheduler, message: TokenizedInput, **_kwargs: Passed) -> None:
    """BEFORE Scheduler.handle_generate_request: what the message leaves out takes its place in it."""
    mode_of(scheduler.tree_cache).received(scheduler, message)


def after_req_init(_result: None, req: Req, *_args: Passed, **_kwargs: Passed) -> None:
    """AFTER Req.__init__: the row of the request, from its sampling parameters."""
    carried.set_request_row(req, carried.sent_row(req))


def after_set_finish_with_abort(_result: None, req: Req, *_args: Passed, **_kwargs: Passed) -> None:
    """AFTER Req.set_finish_with_abort: what is left of the request is one plain token."""
    carried.set_request_row(req, None)
    compat.keep_first_abort(req)


def around_init_req_max_new_tokens(original: Callable[..., None], scheduler: Scheduler, req: Req) -> None:
    """AROUND Scheduler.init_req_max_new_tokens: how much a request may generate, and whether it can ever run."""
    mode = mode_of(scheduler.tree_cache)
    if mode.ours:
        show_metrics(scheduler)
    mode.limit(original, scheduler, req)


# ---- admission ----


def around_add_one_req(
    original: Callable[..., Passed],
    adder: PrefillAdder,
    req: Req,
    has_chunked_req: bool,
    truncation_align_size: int | None,
) -> Passed:
    """AROUND PrefillAdder.add_one_req."""
    return mode_of(adder.tree_cache).add(original, adder, req, has_chunked_req, truncation_align_size)


def around_add_chunked_req(original: Callable[..., Passed], adder: PrefillAdder, req: Req) -> Passed:
    """AROUND PrefillAdder.add_chunked_req."""
    return mode_of(adder.tree_cache).add_chunk(original, adder, req)


def around_running_offset(original: Callable[..., float], adder: PrefillAdder, req: Req) -> float:
    """AROUND PrefillAdder._get_running_request_total_token_offset."""
    return mode_of(adder.tree_cache).offset(original, adder, req)


# ---- slots ----


def around_alloc_for_extend(original: Callable[..., Passed], batch: ScheduleBatch) -> Passed:
    """AROUND alloc_for_extend."""
    return mode_of(batch.tree_cache).slots_for_extend(original, batch)


def around_alloc_for_decode(original: Callable[..., Passed], batch: ScheduleBatch, token_per_req: int) -> Passed:
    """AROUND alloc_for_decode."""
    return mode_of(batch.tree_cache).slots_for_decode(original, batch, token_per_req)


def around_check_decode_mem(
    original: Callable[..., bool], batch: ScheduleBatch, *args: Passed, **kwargs: Passed
) -> bool:
    """AROUND ScheduleBatch.check_decode_mem."""
    return mode_of(batch.tree_cache).decode_fits(original, batch, *args, **kwargs)


# ---- admin ----


def after_init_request_dispatcher(_result: None, scheduler: Scheduler) -> None:
    """AFTER Scheduler.init_request_dispatcher: our messages."""
    compat.add_dispatch(scheduler._request_dispatcher, ExtAdminReqInput, Admin(scheduler).handle)


def after_get_internal_state(result: Passed, scheduler: Scheduler, *_args: Passed) -> Passed:
    """AFTER Scheduler.get_internal_state: our counters, and what serves the views, in /server_info."""
    counters: JsonObject = mode_of(scheduler.tree_cache).stats(scheduler)
    if counters:
        backend = view_backend(scheduler.tp_worker.model_runner)
        if backend is not None:
            counters["attention_backend"], counters["reader"] = type(backend).__name__, type(backend.reader).__name__
            counters.update(backend.reader.stats())
            counters["compiled"] = COMPILES.record()
    result.internal_state["sglang_ext"] = counters
    return result


# ---- forward batches ----


def after_forward_batch_init_new(
    result: ForwardBatch, _cls: type, batch: ScheduleBatch, model_runner: ModelRunner, **_kwargs: Passed
) -> None:
    """AFTER ForwardBatch.init_new: rows and positions for the attention backend."""
    backend = view_backend(model_runner)
    if backend is not None:
        backend.prepare(batch, result)
