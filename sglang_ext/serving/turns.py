"""Fair turns: between two chunks of a long prompt, others are admitted and running requests decode.

Every decision here follows from messages that all tensor-parallel ranks receive in the same order, so all ranks decide
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto

from sglang_ext import compat
from sglang_ext.cache import carried
from sglang_ext.compat import NextBatchPlan
from sglang_ext.names import Req, ScheduleBatch, Scheduler
from sglang_ext.serving.modes import mode_of


class Turn(Enum):
    """What runs next while a long prompt is prefilled in chunks: one of each, over and over."""

    ADMIT = auto()
    DECODE = auto()
    CHUNK = auto()


def around_get_new_batch_prefill(
    original: Callable[..., NextBatchPlan], scheduler: Scheduler, running_batch: ScheduleBatch
) -> NextBatchPlan:
    """AROUND Scheduler.get_new_batch_prefill: between two chunks of an encoding or of a stream others have their turns.

    SGLang lets prefill win every time, and the prompt that it has begun before others; a pool of many chunks would stop
    every running answer, and every new request, for its whole length. So requests that fit are prefilled after a chunk,
    then running requests decode once.
    """
    mode_of(scheduler.tree_cache).between_passes(scheduler)
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
                return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        scheduler.ext_turn = Turn.ADMIT
    plan = original(scheduler, running_batch)
    if plan.batch_to_run is None and _stuck(scheduler, plan.running_batch):
        mode_of(scheduler.tree_cache).make_room(scheduler)
        plan.running_batch.batch_is_full = False  # SGLang clears it only when something that runs ends
        plan = original(scheduler, plan.running_batch)
    return plan


def _admit(
    original: Callable[..., NextBatchPlan], scheduler: Scheduler, running_batch: ScheduleBatch
) -> NextBatchPlan | None:
    """A batch of waiting requests, while a long prompt waits for its next chunk; None where there is none.

    SGLang cuts one prompt at a time: only requests that together fit one chunk are shown to it.
    """
    with compat.compiled_grammars(scheduler):
        compat.sort_waiting(scheduler, running_batch)
        first = _fitting(scheduler, running_batch.reqs)
        return _of(first, original, scheduler, running_batch) if first else None


def _of(
    first: list[Req], original: Callable[..., NextBatchPlan], scheduler: Scheduler, running_batch: ScheduleBatch
) -> NextBatchPlan | None:
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


def _fitting(scheduler: Scheduler, running: Sequence[Req]) -> list[Req]:
    """Waiting requests that fit one chunk, and leave the long prompt the room that it was admitted with.

    Args:
        running: requests that decode, each of them a step after each chunk; mixed chunks take those, too.
    """
    size, room = scheduler.chunked_prefill_size, mode_of(scheduler.tree_cache).room_beside(scheduler, running)
    tokens = size - (len(running) if compat.mixes_chunks(scheduler) else 0)
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


def _takes_turns(scheduler: Scheduler) -> bool:
    """Whether the prompt that is prefilled in chunks may be so long that running requests must not wait for it."""
    chunked = scheduler.chunked_req
    return chunked is not None and mode_of(scheduler.tree_cache).takes_turns(chunked)


def _stuck(scheduler: Scheduler, running_batch: ScheduleBatch) -> bool:
    """Whether requests wait, none runs, and so nothing will become free by itself."""
    return (
        mode_of(scheduler.tree_cache).ours
        and bool(scheduler.waiting_queue)
        and running_batch.is_empty()
        and scheduler.chunked_req is None
        and scheduler.last_batch is None
    )
