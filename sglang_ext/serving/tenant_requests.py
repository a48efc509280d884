"""Generation requests of tenants: each in the namespace of its tenant, and counted among what the tenant may ask."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

import fastapi

from sglang_ext.cache import carried
from sglang_ext.names import RequestInput, TokenizerManager
from sglang_ext.serving.access import tenant_at_hand
from sglang_ext.serving.errors import PoolError
from sglang_ext.serving.namespaces import put_into
from sglang_ext.serving.options import abort_none, in_answer
from sglang_ext.serving.pools import PoolService
from sglang_ext.serving.requests import count_answers
from sglang_ext.serving.tenancy import pools_of
from sglang_ext.serving.tenants import namespace
from sglang_ext.types import Json

Generate = Callable[..., AsyncGenerator[Json, None]]


def around_generate_request(
    original: Generate, manager: TokenizerManager, obj: RequestInput, request: fastapi.Request | None = None
) -> AsyncGenerator[Json, None]:
    """AROUND TokenizerManager.generate_request, of a request that was looked at; those of nobody's stay as they are."""
    tenant = tenant_at_hand()
    if not tenant or carried.is_internal(obj):
        return original(manager, obj, request)
    put_into(obj, namespace(tenant))
    return _counted(original, manager, pools_of(manager), obj, request)


async def _counted(
    original: Generate,
    manager: TokenizerManager,
    service: PoolService,
    obj: RequestInput,
    request: fastapi.Request | None,
) -> AsyncGenerator[Json, None]:
    answers = count_answers(obj)
    try:
        leave = service.quota.enter(answers)
    except PoolError as error:
        service.usage.refused()
        abort_none(obj)
        if request is None or in_answer(obj, request):
            raise
        # The OpenAI routes answer every ValueError with 400: keep the error's own status.
        raise fastapi.HTTPException(error.status_code, error.detail) from error

    def end() -> None:
        leave()
        service.usage.running(service.quota.running)

    service.usage.begun(answers, service.quota.running)
    streams = getattr(obj, "stream", False)
    try:
        async for out in original(manager, obj, request):
            for item in out if isinstance(out, list) else [out]:
                meta = item.get("meta_info") or {}
                if meta.get("finish_reason") is not None:
                    service.usage.answered(meta.get("prompt_tokens", 0), meta.get("completion_tokens", 0))
            if not streams:  # routes take the one answer and drop this generator: `finally` comes at some later time
                end()
            yield out
    finally:
        end()
