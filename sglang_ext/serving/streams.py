"""Servers whose requests are streams: SGLang counts the slots that one reserves where it would count its tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sglang_ext import compat
from sglang_ext.cache import carried
from sglang_ext.cache.radix import BlockRadixCache
from sglang_ext.cache.streams import MAX_TOKENS, StreamCache
from sglang_ext.compat import AddReqResult
from sglang_ext.names import (
    Passed,
    PrefillAdder,
    PrefixCache,
    Req,
    ScheduleBatch,
    Scheduler,
    TokenizedInput,
    TokenizerManager,
)
from sglang_ext.serving.checks import serves_streams
from sglang_ext.serving.mode import Mode, SlotsAndRows

# ---- lengths ----


def after_init_tokenizer(_result: None, manager: TokenizerManager, *_args: Passed, **_kwargs: Passed) -> None:
    """AFTER TokenizerManager.__init__: prompts may be longer than the model's context."""
    if serves_streams(manager.server_args):
        manager.context_len = MAX_TOKENS


def after_init_model_worker(_result: None, scheduler: Scheduler) -> None:
    """AFTER Scheduler.init_model_worker: prompts may be longer than the context and the KV pool."""
    if serves_streams(scheduler.server_args):
        scheduler.max_req_len, scheduler.max_req_input_len = MAX_TOKENS, MAX_TOKENS - 1


# ---- the scheduler ----


class StreamMode(Mode):
    """Each request has a bounded set of slots of its own, from its first chunk to its end."""

    ours = True

    def received(self, scheduler: Scheduler, message: TokenizedInput) -> None:
        """A turn begins with the last token of the answer before it.

        It finds the conversation only with its key. Whether it may go on is looked at when it is about to run
        (`StreamCache.match_prefix`).
        """
        options = carried.request_options(message)
        if options.get("continue"):
            turn = scheduler.tree_cache.conversation(options)
            carried.set_sent_turn(message, turn, turn.last if turn else None)

    def limit(self, original: Callable[..., None], scheduler: Scheduler, req: Req) -> None:
        """An answer's length is not limited by the KV pool.

        A request that asks for no limit gets the model's context, as behind an empty prompt.
        """
        params, given = req.sampling_params, scheduler.max_new_tokens_limit
        wanted = scheduler.model_config.context_len if params.max_new_tokens is None else params.max_new_tokens
        most, turn = scheduler.tree_cache.most_tokens, carried.sent_turn(req)
        limit = min(given, most) if given else most
        before = (turn.tokens if turn else 0) + len(req.origin_input_ids)
        if before + min(1, wanted) >= most:
            compat.abort(req, _too_long(scheduler.tree_cache, before), 413)
        params.max_new_tokens = max(0, min(wanted, limit, most - before - 1))
        params.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)

    def takes_turns(self, chunked: Req) -> bool:
        return True

    # ---- admission ----

    def between_passes(self, scheduler: Scheduler) -> None:
        """What waiting requests begin from is the last to give way."""
        scheduler.tree_cache.waiting = scheduler.waiting_queue

    def add(
        self,
        original: Callable[..., AddReqResult],
        adder: PrefillAdder,
        req: Req,
        has_chunked_req: bool,
        alignment: int | None,
    ) -> AddReqResult:
        """A request runs when its reservation fits."""
        cache = adder.tree_cache
        if not req.full_untruncated_fill_ids:  # it would wait for ever, and everybody behind it
            compat.abort_unscheduled(req, "the prompt is empty: send at least one token", 400)
        most = adder.prefill_max_requests
        if most is not None and len(adder.can_run_list) >= most:
            return AddReqResult.OTHER
        if not _fits(adder, req) and not (cache.begin_whole(req) and _fits(adder, req)):
            return AddReqResult.NO_TOKEN
        begin, stop, end = _chunk(adder, req)
        if stop <= begin or (stop < end and (has_chunked_req or adder.new_chunked_req is not None)):
            return AddReqResult.OTHER  # SGLang cuts one prompt at a time
        if adder.rem_chunk_tokens is None and adder.can_run_list and stop - begin >= adder.rem_input_tokens:
            return AddReqResult.OTHER
        _add(adder, req, begin, stop)
        if stop < end:
            adder.new_chunked_req = req
        state: AddReqResult = adder.budget_state()
        return state

    def add_chunk(self, original: Callable[..., Req | None], adder: PrefillAdder, req: Req) -> Req | None:
        """The next chunk of a stream, which has its slots already."""
        begin, stop, end = _chunk(adder, req)
        _add(adder, req, begin, stop)
        return req if stop < end else None

    def offset(self, original: Callable[..., float], adder: PrefillAdder, req: Req) -> float:
        """A running stream takes no more slots."""
        return 0

    # ---- slots ----

    def slots_for_extend(self, original: Callable[..., SlotsAndRows], batch: ScheduleBatch) -> SlotsAndRows:
        """New requests get all their slots, and the tokens of the batch none of their own."""
        rows = torch.tensor(compat.request_rows(batch), dtype=torch.int64)
        batch.tree_cache.make_room(batch.reqs)
        for req in batch.reqs:
            batch.tree_cache.reserve(req)
            compat.set_written(req, compat.extend_end(req))
        return _nowhere(batch, batch.extend_num_tokens), rows.to(batch.device, non_blocking=True), rows

    def slots_for_decode(
        self, original: Callable[..., torch.Tensor], batch: ScheduleBatch, token_per_req: int
    ) -> torch.Tensor:
        """Likewise."""
        for req, tokens in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            compat.set_written(req, tokens + token_per_req)
        return _nowhere(batch, len(batch.reqs) * token_per_req)

    def decode_fits(self, original: Callable[..., bool], batch: ScheduleBatch, *args: Passed, **kwargs: Passed) -> bool:
        """Streams have all their slots already."""
        return True

    # ---- for operators ----

    def blocks(self, cache: PrefixCache) -> BlockRadixCache:
        raise ValueError("every request of this server is a stream: serve pools with another --attention-backend")

    def stats(self, scheduler: Scheduler) -> dict[str, float]:
        cache = scheduler.tree_cache
        named = [each for each in cache.conversations.values() if each.whole is None]
        ended = [each for each in cache.conversations.values() if each.whole is not None]
        return {
            **cache.policy.stats(),
            "reserved_slots": sum(cache.reserved.values()),
            "conversations": len(named),
            "conversation_slots": sum(len(each.slots) for each in named),
            "ended_streams": len(ended),
            "ended_stream_slots": sum(len(each.slots) for each in ended),
        }


def _chunk(adder: PrefillAdder, req: Req) -> tuple[int, int, int]:
    """(first token, where this chunk ends, where the prompt ends)."""
    begin, end = compat.computed(req), len(req.full_untruncated_fill_ids)
    room = adder.rem_chunk_tokens
    if room is None or end - begin <= room:
        return begin, end, end
    return begin, adder.tree_cache.cut(req, begin, begin + max(room, 0)), end


def _add(adder: PrefillAdder, req: Req, begin: int, stop: int) -> None:
    """Put the tokens [begin, stop) of a request into the batch."""
    slots = adder.tree_cache.need(req)
    adder.tree_cache.claim(req)
    compat.set_extend(req, begin, stop)
    adder.can_run_list.append(req)
    compat.charge_slots(adder, req, stop - begin, slots)


def _fits(adder: PrefillAdder, req: Req) -> bool:
    """Whether a request has room beside those that come before it into the batch."""
    fits: bool = adder.tree_cache.fits(req, adder.rem_total_tokens, adder.can_run_list)
    return fits


def _too_long(cache: StreamCache, tokens: int) -> str:
    """What a request is told whose stream would be too long, with its answer's first token."""
    said = f"the stream has {tokens} tokens with this prompt: expected fewer than {cache.most_tokens}"
    if cache.policy.host is None:
        return said
    size = cache.policy.ranks * cache.policy.host.total * cache.policy.host.block_bytes / 2**30
    return f"{said}, for which the server's {size:.2f} GiB of host memory have room; set --policy host_gb higher"


def _nowhere(batch: ScheduleBatch, tokens: int) -> torch.Tensor:
    """SGLang's padding slot for each token: the policy knows where they go, head by head."""
    return torch.zeros(tokens, dtype=torch.int64, device=batch.device)
