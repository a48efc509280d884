"""What runs inside SGLang's scheduler processes: each hook asks the server's mode (`modes.mode_of`).

Every decision follows from messages that all tensor-parallel ranks receive in the same order: all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext import compat
from sglang_ext.attention.backend import view_backend
from sglang_ext.cache import carried
from sglang_ext.serving.admin import Admin, show_metrics
from sglang_ext.serving.messages import ExtAdminReqInput
from sglang_ext.serving.modes import mode_of

# ---- requests ----


def before_handle_generate_request(scheduler: Any, message: Any) -> None:
    """BEFORE Scheduler.handle_generate_request: what the message leaves out takes its place in it."""
    mode_of(scheduler.tree_cache).received(scheduler, message)


def after_req_init(_result: Any, req: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER Req.__init__: the row of the request, from its sampling parameters."""
    carried.set_request_row(req, carried.sent_row(req))


def after_set_finish_with_abort(_result: Any, req: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER Req.set_finish_with_abort: what is left of the request is one plain token."""
    carried.set_request_row(req, None)
    compat.keep_first_abort(req)


def around_init_req_max_new_tokens(original: Callable[..., None], scheduler: Any, req: Any) -> None:
    """AROUND Scheduler.init_req_max_new_tokens: how much a request may generate, and whether it can ever run."""
    mode = mode_of(scheduler.tree_cache)
    if mode.ours:
        show_metrics(scheduler)
    mode.limit(original, scheduler, req)


# ---- admission ----


def around_add_one_req(
    original: Callable[..., Any], adder: Any, req: Any, has_chunked_req: bool, truncation_align_size: int | None
) -> Any:
    """AROUND PrefillAdder.add_one_req."""
    return mode_of(adder.tree_cache).add(original, adder, req, has_chunked_req, truncation_align_size)


def around_add_chunked_req(original: Callable[..., Any], adder: Any, req: Any) -> Any:
    """AROUND PrefillAdder.add_chunked_req."""
    return mode_of(adder.tree_cache).add_chunk(original, adder, req)


def around_running_offset(original: Callable[..., float], adder: Any, req: Any) -> float:
    """AROUND PrefillAdder._get_running_request_total_token_offset."""
    return mode_of(adder.tree_cache).offset(original, adder, req)


# ---- slots ----


def around_alloc_for_extend(original: Callable[..., Any], batch: Any) -> Any:
    """AROUND alloc_for_extend."""
    return mode_of(batch.tree_cache).slots_for_extend(original, batch)


def around_alloc_for_decode(original: Callable[..., Any], batch: Any, token_per_req: int) -> Any:
    """AROUND alloc_for_decode."""
    return mode_of(batch.tree_cache).slots_for_decode(original, batch, token_per_req)


def around_check_decode_mem(original: Callable[..., bool], batch: Any, *args: Any, **kwargs: Any) -> bool:
    """AROUND ScheduleBatch.check_decode_mem."""
    return mode_of(batch.tree_cache).decode_fits(original, batch, *args, **kwargs)


# ---- admin ----


def after_init_request_dispatcher(_result: Any, scheduler: Any) -> None:
    """AFTER Scheduler.init_request_dispatcher: our messages."""
    compat.add_dispatch(scheduler._request_dispatcher, ExtAdminReqInput, Admin(scheduler).handle)


def after_get_internal_state(result: Any, scheduler: Any, *_args: Any) -> Any:
    """AFTER Scheduler.get_internal_state: our counters, and what serves the views, in /server_info."""
    counters = mode_of(scheduler.tree_cache).stats(scheduler)
    if counters:
        backend = view_backend(scheduler.tp_worker.model_runner)
        if backend is not None:
            counters["attention_backend"], counters["reader"] = type(backend).__name__, type(backend.reader).__name__
            counters.update(backend.reader.stats())
    result.internal_state["sglang_ext"] = counters
    return result


# ---- forward batches ----


def after_forward_batch_init_new(result: Any, _cls: Any, batch: Any, model_runner: Any, **_kwargs: Any) -> None:
    """AFTER ForwardBatch.init_new: rows and positions for the attention backend."""
    backend = view_backend(model_runner)
    if backend is not None:
        backend.prepare(batch, result)
