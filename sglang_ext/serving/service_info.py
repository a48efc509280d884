"""Pools in /server_info, and what they learn of a flush of the KV cache."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sglang_ext.names import Passed, TokenizerManager
from sglang_ext.serving.access import is_operator
from sglang_ext.serving.pools import PoolService
from sglang_ext.serving.shared import Shared
from sglang_ext.serving.tenancy import standing, tenants_of
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
        shown: JsonObject = {"pools": service.list()} if is_operator(manager) else {}
        if shown and (theirs := tenants_of(service)):
            shown["tenants"] = [standing(each) for each in theirs.values()]
        for state in states:
            state["sglang_ext"] = {**state.get("sglang_ext", {}), **_counts(service.shared), **shown}
    return states


def _counts(shared: Shared) -> JsonObject:
    """Counters of all pools of a server."""
    services = list(shared.services.values())
    counts = {name: sum(each.counters[name] for each in services) for name in services[0].counters}
    return {**counts, "num_pools": sum(len(each.pools) for each in services)}
