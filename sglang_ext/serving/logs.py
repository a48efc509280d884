"""Pools in SGLang's log of requests, where that has JSON (`--log-requests --log-requests-format json`).

SGLang's own line of an answer has what a request was composed to, and no longer the pool that it named.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from sglang_ext import compat
from sglang_ext.names import RequestInput, TokenizerManager
from sglang_ext.serving.access import tenant_at_hand
from sglang_ext.serving.answers import FIELD
from sglang_ext.types import Json, JsonObject

ANSWERED, FAILED = "sglang_ext.answered", "sglang_ext.failed"
"""Events of the log."""
_OF_ANSWER = ("prompt_tokens", "cached_tokens", "completion_tokens", "e2e_latency")


def logged(
    answers: AsyncGenerator[Json, None], manager: TokenizerManager, obj: RequestInput
) -> AsyncGenerator[Json, None]:
    """SGLang's answers to `obj`, of which the log of requests gets a line for each that ends, where it has JSON.

    It names the tenant whose pool it is, where it is one's: two may have pools of one name.
    """
    tenant = tenant_at_hand()
    whose: JsonObject = {"tenant": tenant} if tenant else {}
    return _logged(answers, manager, obj, whose) if compat.logs_json(manager) else answers


async def _logged(
    answers: AsyncGenerator[Json, None], manager: TokenizerManager, obj: RequestInput, whose: JsonObject
) -> AsyncGenerator[Json, None]:
    pool, sent_as = _pool_of(obj), obj.rid
    try:
        async with aclosing(answers):
            async for out in answers:
                for item in out if isinstance(out, list) else [out]:
                    if line := _answered(item["meta_info"]):
                        compat.log_request(manager, ANSWERED, line | whose)
                yield out
    except Exception as error:
        if pool is not None:
            rid = obj.rid or sent_as  # a quota that refuses a request takes its id away
            compat.log_request(manager, FAILED, {"rid": rid, "pool": pool, "error": str(error), **whose})
        raise


def _pool_of(obj: RequestInput) -> str | None:
    """The pool that a request names, before it is composed; None for none, and for several prompts with their own."""
    params = getattr(obj, "sampling_params", None)
    custom = params.get("custom_params") if isinstance(params, dict) else None
    return custom.get("pool") if isinstance(custom, dict) else None


def _answered(meta: JsonObject) -> JsonObject | None:
    """What the log says of an answer over a pool that has ended; None for every other one."""
    used, reason = meta.get(FIELD) or {}, meta.get("finish_reason")
    if "pool" not in used or not reason:
        return None
    line = {"rid": meta["id"], "pool": used["pool"], "version": used["version"], "blocks": len(used["blocks"])}
    numbers = {name: meta[name] for name in _OF_ANSWER if name in meta}
    return {**line, "finish_reason": reason["type"], "retrieval_ms": used.get("retrieval_ms"), **numbers}
