"""KV slots: those of a request, as SGLang counts them, and those that are written between passes."""

from __future__ import annotations

from typing import Any

import torch
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
