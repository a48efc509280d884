"""Pools in /server_info, and what they learn of a flush of the KV cache."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sglang_ext.names import Passed, TokenizerManager
from sglang_ext.serving.access import may_see_definitions
from sglang_ext.serving.pools import PoolService
from sglang_ext.types import JsonObject


async def around_flush_cache(
    original: Callable[..., Awaitable[Passed]], manager: TokenizerManager, *args: Passed, **kwargs: Passed
) -> Passed:
    """AROUND TokenizerManager.flush_cache: blocks are looked up again before they are used."""
    service: PoolService | None = getattr(manager, "ext_pools", None)
    if service is not None:
        service.encoder.flushed()
    result = await original(manager, *args, **kwargs)
    if service is not None:
        service.encoder.flushed()
    return result


async def around_get_internal_state(
    original: Callable[..., Awaitable[list[JsonObject]]], manager: TokenizerManager
) -> list[JsonObject]:
    """AROUND TokenizerManager.get_internal_state: pools and counters beside the schedulers' in /server_info."""
    states = await original(manager)
    service: PoolService | None = getattr(manager, "ext_pools", None)
    if service is not None:
        shown = {"pools": service.list()} if may_see_definitions(manager) else {}
        for state in states:
            counts = {**service.counters, "num_pools": len(service.pools)}
            state["sglang_ext"] = {**state.get("sglang_ext", {}), **counts, **shown}
    return states
