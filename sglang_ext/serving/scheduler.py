"""What runs inside SGLang's scheduler processes: admission, admin operations, fair turns between encoding and decoding.

Every decision here follows from messages that all tensor-parallel ranks receive in the same order, so all ranks decide
alike.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from sglang_ext import compat
from sglang_ext.attention.requests import view_backend
from sglang_ext.cache import carried
from sglang_ext.cache.radix import BlockRadixCache, MissingBlocks
from sglang_ext.cache.rows import INTERNAL, Row
from sglang_ext.cache.streams import StreamCache
from sglang_ext.serving.last_step import steps_saved
from sglang_ext.serving.messages import ExtAdminReqInput, ExtAdminReqOutput
from sglang_ext.serving.metrics import SchedulerMetrics

# ---- requests ----


def before_handle_generate_request(scheduler: Any, message: Any) -> None:
    """BEFORE Scheduler.handle_generate_request: the tokens of a row's prefix take their place before the request's own.

    They are not sent (cache.rows). Where a block is missing the request stays short, and is refused with 503 as soon as
    it is admitted (`after_init_req_max_new_tokens`).
    """
    row = carried.sent_row(message)
    if row is None or not isinstance(scheduler.tree_cache, BlockRadixCache):
        return
    with contextlib.suppress(MissingBlocks):
        message.input_ids = scheduler.tree_cache.stitched_ids(row, message.input_ids)


def after_req_init(_result: Any, req: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER Req.__init__: the row of the request, from its sampling parameters."""
    carried.set_request_row(req, carried.sent_row(req))


def after_set_finish_with_abort(_result: Any, req: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER Req.set_finish_with_abort: what is left of the request is one plain token."""
    carried.set_request_row(req, None)
    compat.keep_first_abort(req)


def after_init_req_max_new_tokens(_result: Any, scheduler: Any, req: Any) -> None:
    """AFTER Scheduler.init_req_max_new_tokens: admit what can run, refuse with numbers what never can."""
    cache = scheduler.tree_cache
    if not isinstance(cache, BlockRadixCache):
        return
    row = carried.request_row(req)
    show_metrics(scheduler)
    if row is not None:
        absent = cache.missing(piece.key for piece in row.prefix)
        if absent:
            compat.abort(req, compat.missing_message(len(absent)), 503)
            return
        if not str(req.rid).startswith(INTERNAL):
            cache.count_hits(row)
    if row is None or not row.encodes:
        fit(scheduler, req, row)


def fit(scheduler: Any, req: Any, row: Row | None) -> None:
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
    if own + 2 > free:
        compat.abort(
            req,
            f"the request needs {own} tokens of KV cache, {max(free, 0)} of {scheduler.max_total_num_tokens} are not"
            " taken by demonstration pools; shorten it, delete a pool or raise --max-total-tokens",
            400,
        )
        return
    params, limit = req.sampling_params, generated + free - own - 2
    if params.max_new_tokens is not None and params.max_new_tokens > limit:
        params.max_new_tokens = limit
        params.min_new_tokens = min(params.min_new_tokens, limit)


# ---- turns ----


class Turn(Enum):
    """What runs next while a long prompt is prefilled in chunks: one of each, over and over."""

    ADMIT = auto()
    DECODE = auto()
    CHUNK = auto()


def around_get_new_batch_prefill(original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    """AROUND Scheduler.get_new_batch_prefill: between two chunks of an encoding or of a stream others have their turns.

    SGLang lets prefill win every time, and the prompt that it has begun before others; a pool of many chunks would stop
    every running answer, and every new request, for its whole length. So requests that fit are prefilled after a chunk,
    then running requests decode once.
    """
    if _takes_turns(scheduler):
        turn = getattr(scheduler, "ext_turn", Turn.ADMIT)
        if turn is Turn.ADMIT:
            turn = scheduler.ext_turn = Turn.DECODE
            plan = _admit(original, scheduler, running_batch)
            if plan is not None:
                return plan
        if turn is Turn.DECODE:
            scheduler.ext_turn = Turn.CHUNK
            if not running_batch.is_empty() and not running_batch.is_prefill_only:
                return compat.NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        scheduler.ext_turn = Turn.ADMIT
    plan = original(scheduler, running_batch)
    if plan.batch_to_run is None and _stuck(scheduler, plan.running_batch):
        if isinstance(scheduler.tree_cache, BlockRadixCache):
            make_room(scheduler)
        plan.running_batch.batch_is_full = False  # SGLang clears it only when something that runs ends
        plan = original(scheduler, plan.running_batch)
    return plan


def _admit(original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any | None:
    """A batch of waiting requests, while a long prompt waits for its next chunk; None where there is none.

    SGLang cuts one prompt at a time: only requests that together fit one chunk are shown to it.
    """
    with compat.compiled_grammars(scheduler):
        first = _fitting(scheduler, len(running_batch.reqs))
        return _of(first, original, scheduler, running_batch) if first else None


def _of(first: list[Any], original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any | None:
    """A batch that SGLang makes of some of the waiting requests, with no prompt in chunks."""
    chunked, queue = scheduler.chunked_req, scheduler.waiting_queue
    scheduler.chunked_req, scheduler.waiting_queue = None, first
    try:
        plan = original(scheduler, running_batch)
        if scheduler.chunked_req is not None:
            raise RuntimeError(f"request {scheduler.chunked_req.rid} was cut beside a prompt that is cut already")
    finally:
        # What ran left the queue, and what gave way to it joined the queue.
        shown, left = {id(req) for req in first}, scheduler.waiting_queue
        behind = [req for req in queue if id(req) not in shown]
        scheduler.chunked_req, scheduler.waiting_queue = chunked, [*left, *behind]
    return plan if plan.batch_to_run is not None else None


def _fitting(scheduler: Any, running: int) -> list[Any]:
    """Waiting requests that fit one chunk, and leave the long prompt the room that it was admitted with.

    Args:
        running: how many requests decode, each of them a token after each chunk; mixed chunks take those, too.
    """
    cache, size = scheduler.tree_cache, scheduler.chunked_prefill_size
    tokens, room = size - (running if compat.mixes_chunks(scheduler) else 0), None
    if isinstance(cache, BlockRadixCache):  # a stream has all of its slots
        left = chunked_left(scheduler)
        room = free_tokens(scheduler) - left - running * (2 + -(-left // size)) - CHUNK_MARGIN
    found = []
    for req in scheduler.waiting_queue:
        row, own = carried.request_row(req), len(req.origin_input_ids) + len(req.output_ids)
        if row is not None:
            if row.encodes:
                break
            own -= row.prefix_tokens
        if own > size:
            continue  # it waits for its own chunks
        # What is found in the cache is locked then, and can no longer be evicted: it counts as if it were computed.
        needed = own + (req.sampling_params.max_new_tokens or 0)
        if own > tokens or (room is not None and needed > room):
            break
        tokens -= own
        room = None if room is None else room - needed
        found.append(req)
    return found


def chunked_left(scheduler: Any) -> int:
    """Tokens that the prompt which is prefilled in chunks has yet to compute."""
    chunked = scheduler.chunked_req
    return len(chunked.full_untruncated_fill_ids) - len(chunked.prefix_indices)


def free_tokens(scheduler: Any) -> int:
    """KV slots that are free or can be evicted."""
    return int(scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size())


def _takes_turns(scheduler: Any) -> bool:
    """Whether the prompt that is prefilled in chunks may be so long that running requests must not wait for it."""
    chunked = scheduler.chunked_req
    if chunked is None:
        return False
    row = carried.request_row(chunked)
    return isinstance(scheduler.tree_cache, StreamCache) or (row is not None and bool(row.new))


def around_check_decode_mem(original: Callable[..., bool], batch: Any, *args: Any, **kwargs: Any) -> bool:
    """AROUND ScheduleBatch.check_decode_mem: waiting requests let go of blocks before a running one is retracted.

    Streams have all their slots already.
    """
    if isinstance(batch.tree_cache, StreamCache):
        return True
    enough = original(batch, *args, **kwargs)
    if enough or not isinstance(batch.tree_cache, BlockRadixCache):
        return enough
    batch.tree_cache.release_requests(keep=[req.rid for req in batch.reqs])
    return original(batch, *args, **kwargs)


def _stuck(scheduler: Any, running_batch: Any) -> bool:
    """Whether requests wait, none runs, and so nothing will become free by itself."""
    return (
        isinstance(scheduler.tree_cache, (BlockRadixCache, StreamCache))
        and bool(scheduler.waiting_queue)
        and running_batch.is_empty()
        and scheduler.chunked_req is None
        and scheduler.last_batch is None
    )


def make_room(scheduler: Any) -> None:
    """Let the first waiting request run, or end it: blocks that were held since it was admitted leave it no room.

    What pools hold stays, and the request's answer is capped by what is left. What other requests hold for themselves
    is let go of; their blocks may be evicted then, and they are asked again.
    """
    cache, first = scheduler.tree_cache, scheduler.waiting_queue[0]
    cache.release_requests(keep=[first.rid])
    row = carried.request_row(first)
    if row is None or not row.encodes:
        fit(scheduler, first, row)


# ---- admin ----


CHUNK_MARGIN = 64  # tokens that requests which run beside a chunked prompt generate until it is through


class Admin:
    """Operations on the blocks of one scheduler. Each takes and returns JSON-like values."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    @property
    def cache(self) -> BlockRadixCache:
        cache = self.scheduler.tree_cache
        if isinstance(cache, StreamCache):
            raise ValueError("every request of this server is a stream: serve pools with another --attention-backend")
        if not isinstance(cache, BlockRadixCache):
            raise ValueError(f"the radix cache is {type(cache).__name__}: pools need --radix-cache-backend sglang_ext")
        return cache

    def handle(self, message: ExtAdminReqInput) -> ExtAdminReqOutput:
        operation = getattr(self, "op_" + message.op, None)
        try:
            if operation is None:
                raise ValueError(f"unknown operation {message.op!r}")
            result = operation(**json.loads(message.payload))
        except Exception as error:  # the answer carries it: an admin request must never stop the scheduler
            result = {"error": f"{type(error).__name__}: {error}"}
        show_metrics(self.scheduler)
        return ExtAdminReqOutput(payload=json.dumps(result))

    def op_state(self) -> dict[str, Any]:
        """Capacity in tokens, and what is held."""
        cache, scheduler = self.cache, self.scheduler
        return {
            "total_tokens": scheduler.max_total_num_tokens,
            "held_tokens": cache.held_tokens,
            "held_by_pools": cache.held_by_pools,
            "max_req_input_len": scheduler.max_req_input_len,
            "chunked_prefill_size": scheduler.chunked_prefill_size,
            "bytes_per_token": compat.kv_bytes_per_token(scheduler),
        }

    def op_hold(self, owner: str, keys: list[str]) -> dict[str, Any]:
        """Hold those of `keys` that are resident; says which are missing, or that it must be asked again (`busy`).

        A prompt that is being prefilled in chunks was admitted with the room that evictable blocks leave. Holding them
        would take it away, and SGLang has no way back from there.
        """
        absent = set(self.cache.missing(keys))
        there = [key for key in keys if key not in absent]
        scheduler, chunked = self.scheduler, self.scheduler.chunked_req
        if chunked is not None:
            left = chunked_left(scheduler)
            left += len(scheduler.running_batch.reqs) * (2 + -(-left // (scheduler.chunked_prefill_size or left + 1)))
            if free_tokens(scheduler) - self.cache.unlocked_tokens(there) < left + CHUNK_MARGIN:
                return {"missing": [], "busy": True}
        self.cache.hold(owner, there)
        return {"missing": [key for key in keys if key in absent]}

    def op_release(self, owner: str, keys: list[str] | None = None, drop: bool = False) -> dict[str, Any]:
        """Let go of an owner's blocks; with `drop`, free at once those that nobody else holds or uses."""
        held = [key for key, owners in self.cache.owners.items() if owner in owners] if keys is None else keys
        self.cache.release(owner, held)
        return {"freed_tokens": self.cache.drop(held) if drop else 0}

    def op_blocks(self, keys: list[str]) -> dict[str, Any]:
        """Residency and hits of blocks."""
        return {
            "resident": [key in self.cache.blocks for key in keys],
            "hits": [self.cache.hits[key] for key in keys],
        }


def stats(scheduler: Any) -> dict[str, Any]:
    """Counters of one scheduler, for /server_info and /metrics."""
    cache = scheduler.tree_cache
    if isinstance(cache, StreamCache):
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
    if not isinstance(cache, BlockRadixCache):
        return {}
    backend = view_backend(scheduler.tp_worker.model_runner)
    return {
        "blocks_resident": len(cache.blocks),
        "block_tokens_resident": cache.block_tokens,
        "held_tokens": cache.held_tokens,
        "block_hits": cache.total_hits,
        "saved_tokens": cache.saved_tokens,
        "stitch_seconds": round(cache.stitch_seconds, 6),
        "steps_saved": steps_saved(scheduler),
        **(backend.policy.stats() if backend is not None else {}),
    }


def show_metrics(scheduler: Any) -> None:
    """Bring the gauges on /metrics up to date, where metrics are enabled."""
    if not compat.metrics_enabled(scheduler):
        return
    metrics = getattr(scheduler, "ext_metrics", None)
    if metrics is None:
        metrics = scheduler.ext_metrics = SchedulerMetrics(scheduler.server_args.served_model_name)
    metrics.show(stats(scheduler))


def after_init_request_dispatcher(_result: Any, scheduler: Any) -> None:
    """AFTER Scheduler.init_request_dispatcher: our messages."""
    compat.add_dispatch(scheduler._request_dispatcher, ExtAdminReqInput, Admin(scheduler).handle)


def after_get_internal_state(result: Any, scheduler: Any, *_args: Any) -> Any:
    """AFTER Scheduler.get_internal_state: our counters, and what serves the views, in /server_info."""
    counters = stats(scheduler)
    if counters:
        backend = view_backend(scheduler.tp_worker.model_runner)
        counters["attention_backend"] = type(backend).__name__
        counters["view_prefills"] = dict(getattr(backend, "prefills", {}))
        steps = getattr(backend, "decoding_steps", None)
        if steps is not None:
            counters["decoding_steps"] = dict(steps)
        selected = getattr(backend, "selected", None)
        if selected is not None:
            counters["last_selection"] = selected()
    result.internal_state["sglang_ext"] = counters
    return result


# ---- forward batches ----


def after_forward_batch_init_new(result: Any, _cls: Any, batch: Any, model_runner: Any, **_kwargs: Any) -> None:
    """AFTER ForwardBatch.init_new: rows and positions for the attention backend."""
    backend = view_backend(model_runner)
    if backend is not None:
        backend.prepare(batch, result)
