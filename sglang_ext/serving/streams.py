"""Streams in SGLang's scheduler: it counts the slots that a request reserves where it would count its tokens.

Each hook leaves every server alone whose cache is not a `StreamCache`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_ext import compat
from sglang_ext.cache import carried
from sglang_ext.cache.streams import MAX_TOKENS, StreamCache
from sglang_ext.compat import AddReqResult
from sglang_ext.serving.checks import serves_streams

# ---- lengths ----


def after_init_tokenizer(_result: Any, manager: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER TokenizerManager.__init__: prompts may be longer than the model's context."""
    if serves_streams(manager.server_args):
        manager.context_len = MAX_TOKENS


def after_init_model_worker(_result: Any, scheduler: Any) -> None:
    """AFTER Scheduler.init_model_worker: prompts may be longer than the context and the KV pool."""
    if serves_streams(scheduler.server_args):
        scheduler.max_req_len, scheduler.max_req_input_len = MAX_TOKENS, MAX_TOKENS - 1


def around_init_req_max_new_tokens(original: Callable[..., None], scheduler: Any, req: Any) -> None:
    """AROUND Scheduler.init_req_max_new_tokens: an answer's length is not limited by the KV pool.

    A request that asks for no limit gets the model's context, as behind an empty prompt.
    """
    if not isinstance(scheduler.tree_cache, StreamCache):
        return original(scheduler, req)
    params, given = req.sampling_params, scheduler.max_new_tokens_limit
    wanted = scheduler.model_config.context_len if params.max_new_tokens is None else params.max_new_tokens
    most, turn = scheduler.tree_cache.most_tokens, carried.sent_turn(req)
    limit = min(given, most) if given else most
    before = (turn.tokens if turn else 0) + len(req.origin_input_ids)
    params.max_new_tokens = max(0, min(wanted, limit, most - before - 1))
    params.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)


# ---- conversations ----


def before_handle_generate_request(scheduler: Any, message: Any) -> None:
    """BEFORE Scheduler.handle_generate_request: a turn begins with the last token of the answer before it.

    It finds the conversation only with its key. Whether it may go on is looked at when it is about to run
    (`StreamCache.match_prefix`).
    """
    if isinstance(scheduler.tree_cache, StreamCache):
        options = carried.request_options(message)
        if options.get("continue"):
            turn = scheduler.tree_cache.conversation(options)
            carried.set_sent_turn(message, turn, turn.last if turn else None)


# ---- admission ----


def around_running_offset(original: Callable[..., float], adder: Any, req: Any) -> float:
    """AROUND PrefillAdder._get_running_request_total_token_offset: a running stream takes no more slots."""
    return 0 if isinstance(adder.tree_cache, StreamCache) else original(adder, req)


def around_add_one_req(
    original: Callable[..., Any], adder: Any, req: Any, has_chunked_req: bool, truncation_align_size: int | None
) -> Any:
    """AROUND PrefillAdder.add_one_req: a request runs when its reservation fits."""
    cache = adder.tree_cache
    if not isinstance(cache, StreamCache):
        return original(adder, req, has_chunked_req, truncation_align_size)
    if not req.full_untruncated_fill_ids:  # it would wait for ever, and everybody behind it
        compat.abort_unscheduled(req, "the prompt is empty: send at least one token", 400)
    most = adder.prefill_max_requests
    if most is not None and len(adder.can_run_list) >= most:
        return AddReqResult.OTHER
    missing = cache.need(req) - adder.rem_total_tokens
    if missing > 0 and not cache.make_room(missing, req):
        return AddReqResult.NO_TOKEN
    begin, stop, end = _chunk(adder, req)
    if stop <= begin or (stop < end and (has_chunked_req or adder.new_chunked_req is not None)):
        return AddReqResult.OTHER  # SGLang cuts one prompt at a time
    if adder.rem_chunk_tokens is None and adder.can_run_list and stop - begin >= adder.rem_input_tokens:
        return AddReqResult.OTHER
    _add(adder, req, begin, stop)
    if stop < end:
        adder.new_chunked_req = req
    return adder.budget_state()


def around_add_chunked_req(original: Callable[..., Any], adder: Any, req: Any) -> Any:
    """AROUND PrefillAdder.add_chunked_req: the next chunk of a stream, which has its slots already."""
    if not isinstance(adder.tree_cache, StreamCache):
        return original(adder, req)
    begin, stop, end = _chunk(adder, req)
    _add(adder, req, begin, stop)
    return req if stop < end else None


def _chunk(adder: Any, req: Any) -> tuple[int, int, int]:
    """(first token, where this chunk ends, where the prompt ends)."""
    begin, end = len(req.prefix_indices), len(req.full_untruncated_fill_ids)
    room = adder.rem_chunk_tokens
    if room is None or end - begin <= room:
        return begin, end, end
    return begin, adder.tree_cache.cut(req, begin, begin + max(room, 0)), end


def _add(adder: Any, req: Any, begin: int, stop: int) -> None:
    """Put the tokens [begin, stop) of a request into the batch."""
    slots = adder.tree_cache.need(req)
    total, current = adder.rem_total_token_offset + slots, adder.cur_rem_token_offset + slots
    adder.tree_cache.claim(req)
    req.set_extend_range(begin, stop)
    adder.can_run_list.append(req)
    adder._update_prefill_budget(begin, stop - begin, 0, req.retracted_stain)
    adder.rem_total_token_offset, adder.cur_rem_token_offset = total, current  # slots, not tokens


# ---- slots ----


def around_alloc_for_extend(original: Callable[..., Any], batch: Any) -> Any:
    """AROUND alloc_for_extend: new requests get all their slots, and the tokens of the batch none of their own."""
    cache = batch.tree_cache
    if not isinstance(cache, StreamCache):
        return original(batch)
    rows = torch.tensor(compat.request_rows(batch), dtype=torch.int64)
    for req in batch.reqs:
        cache.reserve(req)
    return _nowhere(batch, batch.extend_num_tokens), rows.to(batch.device, non_blocking=True), rows


def around_alloc_for_decode(original: Callable[..., Any], batch: Any, token_per_req: int) -> Any:
    """AROUND alloc_for_decode: likewise."""
    if not isinstance(batch.tree_cache, StreamCache):
        return original(batch, token_per_req)
    return _nowhere(batch, len(batch.reqs) * token_per_req)


def _nowhere(batch: Any, tokens: int) -> torch.Tensor:
    """SGLang's padding slot for each token: the policy knows where they go, head by head."""
    return torch.zeros(tokens, dtype=torch.int64, device=batch.device)
