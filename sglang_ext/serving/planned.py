"""What a pool would take of a running server, before it is put."""

from __future__ import annotations

from sglang_ext.config import PoolOptions
from sglang_ext.serving.plan import countable, describe
from sglang_ext.serving.pools import PoolService
from sglang_ext.serving.submitted import Source
from sglang_ext.types import JsonObject, Options


async def would_take(service: PoolService, source: Source) -> JsonObject:
    """Tokens, bytes and blocks a pool would take, and how many such pools fit in an empty KV cache.

    Raises:
        ValueError: what is submitted is no pool; `PoolError` where the server has none, or no place to read it.
    """
    service.refuse_poolless()
    with service.queue.place():
        state = await service.channel.ask("state")
        return await service.workers.read(_plan, service, source, state)


def _plan(service: PoolService, source: Source, state: Options) -> JsonObject:
    submitted = source()
    parsed = PoolOptions.parse(submitted.options)
    definition = service.layouts.define(submitted.demonstrations, parsed, countable(state))
    layout = service.layouts.lay_out(definition)
    return describe(layout, parsed, state["bytes_per_token"], service.manager.context_len, state["total_tokens"])
