"""What the tokenizer process asks of the schedulers: operations on their blocks, and their counters."""

from __future__ import annotations

import json

from sglang_ext import compat
from sglang_ext.attention.backend import view_backend
from sglang_ext.cache.host_tier import bring_back
from sglang_ext.cache.radix import BlockRadixCache
from sglang_ext.names import Scheduler
from sglang_ext.serving.messages import ExtAdminReqInput, ExtAdminReqOutput
from sglang_ext.serving.metrics import SchedulerMetrics
from sglang_ext.serving.modes import mode_of
from sglang_ext.serving.tree import CHUNK_MARGIN, chunked_left, free_tokens
from sglang_ext.types import JsonObject


class Admin:
    """Operations on the blocks of one scheduler. Each takes and returns JSON-like values."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    @property
    def cache(self) -> BlockRadixCache:
        cache = self.scheduler.tree_cache
        return mode_of(cache).blocks(cache)

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

    def op_state(self) -> JsonObject:
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

    def op_hold(self, owner: str, keys: list[str], spare: int = 0) -> JsonObject:
        """Hold those of `keys` that are resident; says which are missing, or that it must be asked again (`busy`).

        A prompt that is being prefilled in chunks was admitted with the room that evictable blocks leave. Holding them
        would take it away, and SGLang has no way back from there.

        What is on the host comes back, as far as there is room at once beside what runs, and `spare` tokens are left
        that nobody holds.
        """
        absent = set(self.cache.missing(keys))
        there = [key for key in keys if key not in absent]
        scheduler, chunked = self.scheduler, self.scheduler.chunked_req
        running = len(scheduler.running_batch.reqs)
        left = running * CHUNK_MARGIN
        if chunked is not None:
            left = chunked_left(scheduler)
            left += running * (2 + -(-left // (scheduler.chunked_prefill_size or left + 1))) + CHUNK_MARGIN
            if free_tokens(scheduler) - self.cache.unlocked_tokens(there) < left:
                return {"missing": [], "busy": True}
        self.cache.hold(owner, there)
        if absent and self.cache.host is not None:
            compat.after_forward(scheduler)
            unheld = scheduler.max_total_num_tokens - self.cache.held_tokens - spare
            bring_back(self.cache, owner, keys, min(unheld, free_tokens(scheduler) - left))
            absent = set(self.cache.missing(keys))
        return {"missing": [key for key in keys if key in absent]}

    def op_release(
        self, owner: str, keys: list[str] | None = None, drop: bool = False, gone: list[str] | None = None
    ) -> JsonObject:
        """Let go of an owner's blocks; with `drop`, free at once those that nobody else holds or uses.

        No pool has the blocks named `gone` any more: they leave the host.
        """
        held = [key for key, owners in self.cache.owners.items() if owner in owners] if keys is None else keys
        self.cache.release(owner, held)
        self.cache.forget_hits(gone or ())
        if gone and self.cache.host is not None:
            self.cache.host.forget(gone)
            self.cache.drop(gone, keep=False)
        return {"freed_tokens": self.cache.drop(held) if drop else 0}

    def op_blocks(self, keys: list[str]) -> JsonObject:
        """Residency and hits of blocks."""
        return {
            "resident": [key in self.cache.blocks for key in keys],
            "hits": [self.cache.hits[key] for key in keys],
        }


def show_metrics(scheduler: Scheduler) -> None:
    """Bring the gauges on /metrics up to date, where metrics are enabled."""
    if not compat.metrics_enabled(scheduler):
        return
    metrics = getattr(scheduler, "ext_metrics", None)
    if metrics is None:
        metrics = scheduler.ext_metrics = SchedulerMetrics(compat.resolved(scheduler.server_args).served_model_name)
    backend = view_backend(scheduler.tp_worker.model_runner)
    read = {} if backend is None else backend.reader.counters()
    metrics.show({**mode_of(scheduler.tree_cache).stats(scheduler), **read})
