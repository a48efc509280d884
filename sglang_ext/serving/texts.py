"""Long texts are tokenized in a thread: SGLang does it on the event loop, where everybody waits for it.

A text alone is tokenized by `TokenizerManager._tokenize_texts`. A chat is rendered and tokenized in the middle of what
each route does with it, without a place to wait: that part of SGLang's route runs in the thread as it is, on copies of
its handlers, with a tokenizer that no other thread uses.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from sglang_ext import compat
from sglang_ext.names import (
    AnthropicRequest,
    Handler,
    OpenAIHandler,
    OpenAIRequest,
    Passed,
    RequestInput,
    Tokenizer,
    TokenizerManager,
)
from sglang_ext.serving.tenancy import pools_of
from sglang_ext.types import Json

if TYPE_CHECKING:
    import fastapi

    from sglang_ext.serving.pools import PoolService

T = TypeVar("T")
H = TypeVar("H")  # a handler of routes

LONG = 1 << 14  # characters that take so long, some 10 ms, that others must not wait for them

_CHATS = ("chat_serving", "openai_serving_chat")  # handlers of chats that other handlers have


@dataclass(frozen=True)
class Converted:
    """What a thread made of a chat request, until SGLang asks for it.

    Attributes:
        request: the chat request, of which there is one object.
        made: what SGLang's own conversion of it returns.
        error: what it raised instead, or None.
    """

    request: OpenAIRequest
    made: Passed = None
    error: Exception | None = None


RECEIVED: contextvars.ContextVar[float | None] = contextvars.ContextVar("sglang_ext_received", default=None)
"""When a long chat was received, on SGLang's clock: SGLang takes the time when it was converted already."""

CONVERTED: contextvars.ContextVar[Converted | None] = contextvars.ContextVar("sglang_ext_converted", default=None)


def characters(value: Json, most: float = math.inf) -> int:
    """Characters of all texts in a value of a request: a text, a list, an object, a model, or nothing.

    Each element counts one, at least: it is looked at, and rendered where it is rendered. Counting ends beyond `most`.
    """
    found, left = 0, [value]
    while left and found <= most:
        each = left.pop()
        found += 1
        if isinstance(each, str):
            found += len(each)
        elif isinstance(each, dict):
            left += each.values()
        elif isinstance(each, (list, tuple)):
            left += each
        elif hasattr(each, "__pydantic_fields_set__"):
            left += vars(each).values()
    return found


def is_long(manager: TokenizerManager, *values: Json) -> bool:
    """Whether a server of ours must not handle these values of a request on its event loop."""
    return getattr(manager, "ext_pools", None) is not None and characters(values, LONG) > LONG


async def beside(handler: H, work: Callable[[H], T]) -> T:
    """`work(copy of handler)` in a thread; the copy has a tokenizer of its own, and `work` the caller's context."""
    context = contextvars.copy_context()

    def run(tokenizer: Tokenizer) -> T:
        return context.run(work, _with_tokenizer(handler, tokenizer))

    return await _pools(handler).workers.with_tokenizer(run)


async def run_beside(handler: H, work: Callable[[H], Coroutine[None, None, T]]) -> T:
    """The same of a coroutine which, as SGLang wrote it, waits for nothing of the server's event loop."""
    return await beside(handler, lambda own: asyncio.run(work(own)))


def _pools(handler: Handler) -> PoolService:
    manager = getattr(handler, "tokenizer_manager", None)
    return (manager or handler.openai_serving_chat.tokenizer_manager).ext_pools


def _with_tokenizer(handler: Handler, tokenizer: Tokenizer) -> Handler:
    own = copy.copy(handler)
    if hasattr(own, "tokenizer_manager"):
        own.tokenizer_manager = copy.copy(own.tokenizer_manager)
        own.tokenizer_manager.tokenizer = tokenizer
    for name in _CHATS:
        chats = getattr(own, name, None)
        if chats is not None:
            setattr(own, name, _with_tokenizer(chats, tokenizer))
    return own


# ---- texts ----


async def around_tokenize_texts(
    original: Callable[..., Passed],
    manager: TokenizerManager,
    texts: str | list[str | list[str]],
    is_cross_encoder: bool = False,
) -> Passed:
    """AROUND TokenizerManager._tokenize_texts: the same tokens, with a tokenizer of our own where a text is long.

    Returns:
        (token ids of the one text, None) where `texts` is one text; all else is SGLang's.
    """
    if manager.ext_pools is None or is_cross_encoder or not isinstance(texts, str) or len(texts) <= LONG:
        await asyncio.sleep(0)  # between two of many prompts others have their turn
        return await original(manager, texts, is_cross_encoder)
    return await manager.ext_pools.workers.with_tokenizer(lambda tokenizer: tokenizer([texts])["input_ids"][0]), None


# ---- chats ----


async def around_handle_chat(
    original: Callable[..., Passed], handler: OpenAIHandler, request: OpenAIRequest, raw_request: fastapi.Request
) -> Passed:
    """AROUND OpenAIServingChat.handle_request: a pool is waited for, and a long chat converted, before SGLang asks."""
    await _convert(handler, request, raw_request)
    return await original(handler, request, raw_request)


async def around_handle_message(
    original: Callable[..., Passed],
    handler: Handler,
    chat_request: OpenAIRequest,
    request: AnthropicRequest,
    raw_request: fastapi.Request,
) -> Passed:
    """AROUND AnthropicServing._handle_streaming and _handle_non_streaming: the same."""
    await _convert(handler.openai_serving_chat, chat_request, raw_request)
    return await original(handler, chat_request, request, raw_request)


async def _convert(handler: OpenAIHandler, request: OpenAIRequest, raw_request: fastapi.Request) -> None:
    if getattr(handler.tokenizer_manager, "ext_pools", None) is not None:
        await pools_of(handler.tokenizer_manager).prepare(request.custom_params)
    if not is_long(handler.tokenizer_manager, request):
        return
    RECEIVED.set(compat.monotonic_time())
    if handler._validate_request(request):  # it makes types of tools' parameters regular, too
        return
    try:
        made = await beside(handler, lambda own: own._convert_to_internal_request(request, raw_request))
        CONVERTED.set(Converted(request, made))
    except Exception as error:  # it is SGLang's to answer, where it asks
        CONVERTED.set(Converted(request, error=error))


def around_convert_chat(
    original: Callable[..., Passed],
    handler: OpenAIHandler,
    request: OpenAIRequest,
    raw_request: fastapi.Request | None = None,
) -> Passed:
    """AROUND OpenAIServingChat._convert_to_internal_request: what a thread has made of this request is returned."""
    found = CONVERTED.get()
    if found is None or found.request is not request:
        return original(handler, request, raw_request)
    CONVERTED.set(None)
    if found.error is not None:
        raise found.error
    return found.made


def keep_time(obj: RequestInput) -> None:
    """Have a request's waiting for the thread count in its times."""
    received = RECEIVED.get()
    if received is not None and getattr(obj, "received_time", None):
        obj.received_time = min(obj.received_time, received)


async def around_count_tokens(
    original: Callable[..., Passed], handler: Handler, request: AnthropicRequest, raw_request: fastapi.Request
) -> Passed:
    """AROUND AnthropicServing.handle_count_tokens: a long chat is counted in the thread."""
    if not is_long(handler.openai_serving_chat.tokenizer_manager, request):
        return await original(handler, request, raw_request)
    return await run_beside(handler, lambda own: original(own, request, raw_request))
