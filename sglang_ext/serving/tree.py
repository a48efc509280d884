"""Servers whose requests are rows of the radix tree, with blocks of demonstrations in front."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TypeVar

from sglang_ext import compat
from sglang_ext.attention.backend import view_backend
from sglang_ext.cache import carried
from sglang_ext.cache.host_tier import back_up
from sglang_ext.cache.radix import BlockRadixCache
from sglang_ext.cache.rows import INTERNAL, Row
from sglang_ext.cache.stitch import MissingBlocks
from sglang_ext.compat import AddReqResult
from sglang_ext.names import Passed, PrefillAdder, PrefixCache, Req, ScheduleBatch, Scheduler, TokenizedInput
from sglang_ext.serving.mode import Mode
from sglang_ext.settings import server_settings

AddedT = TypeVar("AddedT")

CHUNK_MARGIN = 64  # tokens that requests which run beside a chunked prompt generate until it is through


class TreeMode(Mode):
    """Blocks are held, found and put in front of the requests' own tokens."""

    ours = True
    ends_early = not compat.LEAVES_OUT_ENDING

    @cached_property
    def encoding_tokens(self) -> int:
        """Tokens that one pass encodes at most while requests decode; read once a process."""
        return server_settings().encoding_tokens

    def received(self, scheduler: Scheduler, message: TokenizedInput) -> None:
        """The tokens of a row's prefix take their place before the request's own.

        They are not sent (cache.rows). Where a block is missing the request stays short, and is refused with 503 as
        soon as it is admitted (`limit`).
        """
        row = carried.sent_row(message)
        if row is not None:
            with contextlib.suppress(MissingBlocks):
                message.input_ids = scheduler.tree_cache.stitched_ids(row, message.input_ids)

    def limit(self, original: Callable[..., None], scheduler: Scheduler, req: Req) -> None:
        """Admit what can run, refuse with numbers what never can."""
        original(scheduler, req)
        cache, row = scheduler.tree_cache, carried.request_row(req)
        if row is not None:
            absent = cache.missing(piece.key for piece in row.prefix)
            if absent:
                compat.abort(req, compat.missing_message(len(absent)), 503)
                return
            if not str(req.rid).startswith(INTERNAL):
                cache.count_hits(row)
        if row is None or not row.encodes:
            fit(scheduler, req, row)

    def between_passes(self, scheduler: Scheduler) -> None:
        back_up(scheduler.tree_cache)

    def takes_turns(self, chunked: Req) -> bool:
        """An encoding may be of any length, a question fits the context."""
        row = carried.request_row(chunked)
        return row is not None and bool(row.new)

    def room_beside(self, scheduler: Scheduler, running: Sequence[Req]) -> int | None:
        left, chunk = chunked_left(scheduler), min(scheduler.chunked_prefill_size, self.encoding_tokens)
        # With mixed chunks, running requests get a token in each of the three passes that take turns.
        steps = (2 + -(-left // chunk)) * (3 if compat.mixes_chunks(scheduler) else 1)
        most, ahead = steps * scheduler.tree_cache.step_tokens, scheduler.tree_cache.slots_ahead
        taken = sum(min(most, req.sampling_params.max_new_tokens - len(req.output_ids)) + ahead for req in running)
        return free_tokens(scheduler) - left - taken - CHUNK_MARGIN

    def offset(self, original: Callable[..., float], adder: PrefillAdder, req: Req) -> float:
        return original(adder, req) + adder.tree_cache.slots_ahead

    def add(
        self,
        original: Callable[..., AddReqResult],
        adder: PrefillAdder,
        req: Req,
        has_chunked_req: bool,
        alignment: int | None,
    ) -> AddReqResult:
        return _bounded(partial(original, adder, req, has_chunked_req, alignment), adder, req, self.encoding_tokens)

    def add_chunk(self, original: Callable[..., Req | None], adder: PrefillAdder, req: Req) -> Req | None:
        return _bounded(partial(original, adder, req), adder, req, self.encoding_tokens)

    def make_room(self, scheduler: Scheduler) -> None:
        """Let the first waiting request run, or end it: blocks that were held since it was admitted leave it no room.

        What pools hold stays, and the request's answer is capped by what is left. What other requests hold for
        themselves is let go of; their blocks may be evicted then, and they are asked again.
        """
        first = scheduler.waiting_queue[0]
        scheduler.tree_cache.release_requests(keep=[first.rid])
        row = carried.request_row(first)
        if row is None or not row.encodes:
            fit(scheduler, first, row)

    def decode_fits(self, original: Callable[..., bool], batch: ScheduleBatch, *args: Passed, **kwargs: Passed) -> bool:
        """Waiting requests let go of blocks before a running one is retracted."""
        if original(batch, *args, **kwargs):
            return True
        batch.tree_cache.release_requests(keep=[req.rid for req in batch.reqs])
        return original(batch, *args, **kwargs)

    def blocks(self, cache: PrefixCache) -> BlockRadixCache:
        found: BlockRadixCache = cache
        return found

    def stats(self, scheduler: Scheduler) -> dict[str, float]:
        cache, backend = scheduler.tree_cache, view_backend(scheduler.tp_worker.model_runner)
        return {
            "blocks_resident": len(cache.blocks),
            "block_tokens_resident": cache.block_tokens,
            "held_tokens": cache.held_tokens,
            "block_hits": cache.total_hits,
            "saved_tokens": cache.saved_tokens,
            "stitch_seconds": round(cache.stitch_seconds, 6),
            "steps_saved": steps_saved(scheduler),
            **(cache.host.stats() if cache.host is not None else {}),
            **(backend.policy.stats() if backend is not None else {}),
        }


def _bounded(add: Callable[[], AddedT], adder: PrefillAdder, req: Req, limit: int) -> AddedT:
    """Call `add`, which puts a request into a batch: of one that encodes, `limit` tokens at most while others decode.

    An encoding that is cut here leaves the batch no room, as a prompt does that SGLang cuts: a batch may hold only one
    of them.
    """
    row, room = carried.request_row(req), adder.rem_chunk_tokens
    decoding = adder.running_batch is not None and not adder.running_batch.is_empty()
    if row is None or not row.encodes or room is None or not decoding:
        return add()
    most = adder.rem_chunk_tokens = min(room, limit)
    added = add()
    if adder.rem_chunk_tokens > 0:
        adder.rem_chunk_tokens += room - most
    return added


def fit(scheduler: Scheduler, req: Req, row: Row | None) -> None:
    """Cap what a request may generate by the KV cache it can ever have; end it, with numbers, when it has none."""
    cache = scheduler.tree_cache
    # What pools hold never leaves: it is not there for this request. What requests hold is waited for.
    free = scheduler.max_total_num_tokens - cache.held_by_pools
    shared = 0
    if row is not None:
        shared = row.prefix_tokens
        free -= cache.loose_tokens(piece.key for piece in row.prefix)
    generated = len(req.output_ids)
    own = len(req.origin_input_ids) + generated - shared
    # What SGLang wants free beside a request, to take it into a batch and to decode.
    ahead = cache.page_size + 1 + cache.slots_ahead
    if own + ahead > free:
        compat.abort(
            req,
            f"the request needs {own} tokens of KV cache and {ahead} beside them, {max(free, 0)} of"
            f" {scheduler.max_total_num_tokens} are not taken by demonstration pools; shorten it, delete a pool or"
            " raise --max-total-tokens",
            400,
        )
        return
    params, limit = req.sampling_params, generated + free - own - ahead
    if row is not None and row.shift > 0:  # SGLang has bounded columns, and positions lie behind these
        limit = min(limit, scheduler.model_config.context_len - 1 - row.shift - len(req.origin_input_ids))
    if params.max_new_tokens is not None and params.max_new_tokens > limit:
        params.max_new_tokens = limit
        params.min_new_tokens = min(params.min_new_tokens, limit)


def chunked_left(scheduler: Scheduler) -> int:
    """Tokens that the prompt which is prefilled in chunks has yet to compute."""
    chunked = scheduler.chunked_req
    return len(chunked.full_untruncated_fill_ids) - compat.computed(chunked)


def free_tokens(scheduler: Scheduler) -> int:
    """KV slots that are free or can be evicted."""
    return int(scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size())


def steps_saved(scheduler: Scheduler) -> int:
    """How many steps of single requests were not run (`last_step`)."""
    return int(getattr(scheduler, "ext_steps_saved", 0))
