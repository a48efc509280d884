"""Keys of conversations: whoever begins one is told its key, and the schedulers let nobody else go on from it.

A name is not a secret. The first turn of a name gets a key here, before it is sent; `cache.streams.StreamCache`, which
has the conversations, compares keys; every answer to a turn says the key of its conversation.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable

import fastapi

from sglang_ext import compat
from sglang_ext.attention.stream_policy import CONVERSATION_KEY_BYTES
from sglang_ext.names import RequestInput, TokenizerManager
from sglang_ext.serving.tenancy import pools_of
from sglang_ext.types import Json, JsonObject


def around_generate_request(
    original: Callable[..., AsyncGenerator[Json, None]],
    manager: TokenizerManager,
    obj: RequestInput,
    request: fastapi.Request | None = None,
) -> AsyncGenerator[Json, None]:
    """AROUND TokenizerManager.generate_request: turns of conversations are sent and answered with their keys."""
    system = manager.ext_system
    if system is None or not system.streams or pools_of(manager).settings.open_conversations:
        return original(manager, obj, request)
    obj.sampling_params = with_keys(obj.sampling_params)
    if not any(key_of(params) for params in _listed(obj.sampling_params)):
        return original(manager, obj, request)
    return _generate(original, manager, obj, request)


async def _generate(
    original: Callable[..., AsyncGenerator[Json, None]],
    manager: TokenizerManager,
    obj: RequestInput,
    request: fastapi.Request | None,
) -> AsyncGenerator[Json, None]:
    params = _listed(obj.sampling_params)  # SGLang lists them once a prompt later on
    async for out in original(manager, obj, request):
        for place, item in enumerate(out if isinstance(out, list) else [out]):
            key = key_of(params[compat.prompt_index(obj, item, place) if len(params) > 1 else 0])
            if key is not None:
                meta = item["meta_info"]
                meta["sglang_ext"] = {**meta.get("sglang_ext", {}), "conversation_key": key}
        yield out


def with_keys(params: Json) -> Json:
    """Sampling parameters of one prompt or of a list of them, with a key in each first turn that brings none."""
    if isinstance(params, list):
        return [with_keys(each) for each in params]
    custom = _custom(params)
    if "conversation" not in custom or custom.get("continue") or custom.get("conversation_key") is not None:
        return params
    key = secrets.token_urlsafe(CONVERSATION_KEY_BYTES)
    return {**params, "custom_params": {**custom, "conversation_key": key}}


def key_of(params: Json) -> str | None:
    """The key of the conversation that a prompt's sampling parameters name."""
    custom = _custom(params)
    return custom.get("conversation_key") if "conversation" in custom else None


def _listed(params: Json) -> list[Json]:
    return params if isinstance(params, list) else [params]


def _custom(params: Json) -> JsonObject:
    """The custom_params in sampling parameters; none where they are not what they should be, which is refused later."""
    custom = params.get("custom_params") if isinstance(params, dict) else None
    return custom if isinstance(custom, dict) else {}
