"""Requests that are about to end take part in no further step.

Under overlap scheduling SGLang launches a step before it has seen the tokens of the one before. A request whose answer
has its last token on the way would decode once more, for nobody: of a label of four tokens, every fifth step. What ends
by its length is known beforehand, and is left out.

Nothing else changes: the result that is on the way is processed right after the step is launched, in the same turn of
the scheduler's loop, and ends the request there. Until then its slots are its own.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang_ext import compat
from sglang_ext.names import Passed, Req, ScheduleBatch, Scheduler
from sglang_ext.serving.modes import mode_of
from sglang_ext.serving.tree import steps_saved


def around_update_running_batch(original: Callable[..., Passed], scheduler: Scheduler, batch: ScheduleBatch) -> Passed:
    """AROUND Scheduler.update_running_batch: the next decoding step goes without those that end before it."""
    if mode_of(scheduler.tree_cache).ends_early:
        pending = compat.pending_requests(scheduler)
        ending = {id(req) for req in batch.reqs if id(req) in pending and _ends(req)}
        kept = [index for index, req in enumerate(batch.reqs) if not req.finished() and id(req) not in ending]
        # Where memory is short everything is SGLang's: it retracts one of several requests, but ends the only one.
        if ending and (not kept or batch.check_decode_mem(selected_indices=kept)):
            scheduler.ext_steps_saved = steps_saved(scheduler) + len(ending)
            batch.filter_batch(keep_indices=kept)
            batch.batch_is_full = False
    return original(scheduler, batch)


def _ends(req: Req) -> bool:
    """Whether the token that is on the way is the request's last by its length."""
    limit = req.sampling_params.max_new_tokens
    return not req.finished() and limit is not None and len(req.output_ids) + 1 >= limit
