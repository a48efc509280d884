"""KV slots: those of a request, as SGLang counts them, and those that are written between passes."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.base_prefix_cache import EvictParams


def take_slots(cache: Any, tokens: int) -> torch.Tensor | None:
    """So many KV slots, [tokens] int64, for which the radix tree evicts what it must; None where there is no room."""
    allocator = cache.token_to_kv_pool_allocator
    short = tokens - allocator.available_size()
    if short > 0:
        cache.evict(EvictParams(num_tokens=short))
    slots: torch.Tensor | None = allocator.alloc(tokens)
    return slots


def after_forward(scheduler: Any) -> None:
    """What is launched from now on runs behind the pass at hand, which may still write to slots that are free by now.

    That is the step which overlap scheduling runs past the end of an answer.
    """
    if torch.device(scheduler.device).type != "cpu":
        scheduler.device_module.current_stream().wait_stream(scheduler.forward_stream)


def set_reserved(req: Any, slots: int) -> None:
    """Tell SGLang that a scheduler request has so many KV slots, and that the cache accounts for all of them."""
    req.kv = ReqKvInfo(kv_allocated_len=slots, swa_evicted_seqlen=0)
    req.cache_protected_len = slots


def set_released(req: Any, tokens: int) -> None:
    """Tell SGLang that a request of so many tokens has no KV slots any more, beyond what the cache handled."""
    req.kv.kv_allocated_len = tokens
    req.cache_protected_len = 0
