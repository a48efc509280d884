"""Options and pools on /v1/responses and /v1/messages, whose requests have no `custom_params` in SGLang.

Both turn a request into a chat request. What they were sent beside it is read again from the body, travels in a
subclass of SGLang's request, and comes into the chat request where SGLang makes it.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection

import fastapi
from pydantic import BaseModel
from starlette.datastructures import QueryParams
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_ext.cache import carried
from sglang_ext.names import (
    AnthropicRequest,
    Handler,
    OpenAIAnswer,
    OpenAIHandler,
    OpenAIRequest,
    Passed,
    RequestInput,
    TokenizerManager,
)
from sglang_ext.serving.answers import FIELD, extra_of, with_extra, with_last
from sglang_ext.serving.chat import wants_labels
from sglang_ext.serving.errors import error_response
from sglang_ext.serving.tenancy import pools_of
from sglang_ext.serving.texts import is_long, run_beside
from sglang_ext.types import Json, JsonObject

CUSTOM = "custom_params"


async def custom_of(raw_request: fastapi.Request | None) -> JsonObject | None:
    """The custom_params beside what SGLang reads of a body.

    Raises:
        ValueError: they are no object.
    """
    body = await raw_request.json() if raw_request is not None else {}
    return check_custom(body.get(CUSTOM) if isinstance(body, dict) else None)


def check_custom(custom: Json) -> JsonObject | None:
    """`custom` if it is an object or nothing, else ValueError."""
    if custom is not None and not isinstance(custom, dict):
        raise ValueError(f"custom_params is a {type(custom).__name__}; expected an object of options")
    return custom


def ours(manager: TokenizerManager) -> bool:
    """Whether this is a server of ours."""
    return getattr(manager, "ext_facts", None) is not None


# ---- bodies that SGLang cannot read ----


def guard(app: fastapi.FastAPI) -> None:
    """Have `app` answer 400 where SGLang's own reading of a body raises what it raises for no other reason."""
    for kind in (AttributeError, IndexError, KeyError, TypeError):
        app.add_exception_handler(kind, _unreadable)


class QueryOptions:
    """ASGI middleware: options in the query of a request that has them in its body are refused, and not overlooked."""

    def __init__(self, app: ASGIApp, options: Collection[str]) -> None:
        self.app = app
        self.options = frozenset(options) | {CUSTOM}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in ("POST", "PUT") and not scope["path"].startswith("/v1/pools"):
            found = sorted(self.options.intersection(QueryParams(scope["query_string"])))
            if found:
                await error_response(
                    f"query parameters {', '.join(found)}: expected these options in custom_params of the body", 400
                )(scope, receive, send)
                return
        await self.app(scope, receive, send)


async def _unreadable(request: fastapi.Request, error: Exception) -> fastapi.Response:
    if not while_reading(error):
        raise error
    return error_response(
        f"the body is not what {request.url.path} takes: {error}; look at the types of its fields", 400
    )


def while_reading(error: Exception) -> bool:
    """Whether an exception was raised by a request model of a route, or where /vertex_generate fills one."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    path = frame.filename.replace("\\", "/")
    return "/srt/entrypoints/" in path and (path.endswith("/protocol.py") or frame.name == "vertex_generate")


# ---- /v1/responses ----


@functools.cache
def _responses_request() -> type[BaseModel]:
    from sglang.srt.entrypoints.openai.protocol import ResponsesRequest

    class OptionsRequest(ResponsesRequest):  # type: ignore[misc]
        custom_params: JsonObject | None = None

        def to_sampling_params(self, default_max_tokens: int | None, *args: Passed, **kwargs: Passed) -> JsonObject:
            params: JsonObject = super().to_sampling_params(default_max_tokens, *args, **kwargs)
            # SGLang takes two tokens off what was asked for, and fills the context where nothing was. 0.5.23 does not
            # know here how much room there is.
            asked = self.max_output_tokens
            if asked is not None and default_max_tokens is not None:
                asked = min(asked, default_max_tokens - 2)
            params["max_new_tokens"] = asked
            if self.custom_params:
                params[CUSTOM] = self.custom_params
                if wants_labels(self.custom_params) and self.temperature is None:
                    params["temperature"] = 0.0
            return params

    return OptionsRequest


async def around_create_responses(
    original: Callable[..., Awaitable[Passed]],
    handler: OpenAIHandler,
    request: OpenAIRequest,
    raw_request: fastapi.Request | None = None,
) -> Passed:
    """AROUND OpenAIServingResponses.create_responses: the request brings its options and its own limit along."""
    if not ours(handler.tokenizer_manager):
        return await original(handler, request, raw_request)
    try:
        custom = await custom_of(raw_request)
        if not request.input:
            raise ValueError("input is empty: send a text, or at least one message")
    except ValueError as error:
        return handler.create_error_response(str(error))
    values = {**dict(request), CUSTOM: custom}
    return await original(
        handler, _responses_request().model_construct(_fields_set=request.model_fields_set, **values), raw_request
    )


async def around_make_request(
    original: Callable[..., Awaitable[Passed]],
    handler: OpenAIHandler,
    request: OpenAIRequest,
    previous: OpenAIAnswer | None,
    *args: Passed,
    **kwargs: Passed,
) -> Passed:
    """AROUND OpenAIServingResponses._make_request: a request over a pool is rendered as a chat over it.

    A long one is rendered in a thread, and so is each that goes on from an answer, however long that was.
    """

    async def make(handler: OpenAIHandler) -> Passed:
        return await original(handler, request, previous, *args, **kwargs)

    try:
        if _names_pool(request) and ours(handler.tokenizer_manager):
            await pools_of(handler.tokenizer_manager).prepare(getattr(request, CUSTOM))
        if is_long(handler.tokenizer_manager, request.input, request.instructions, request.tools) or (
            previous is not None and ours(handler.tokenizer_manager)
        ):
            return await run_beside(handler, lambda own: make(_over_pool(own, request)))
        return await make(_over_pool(handler, request))
    except ValueError as error:
        if not _names_pool(request):
            raise
        # SGLang would answer it with the name of its cause behind it, and always with 400.
        raise fastapi.HTTPException(getattr(error, "status_code", 400), str(error)) from error


def _over_pool(handler: OpenAIHandler, request: OpenAIRequest) -> OpenAIHandler:
    return _OverPool(handler, request) if _names_pool(request) else handler


def _names_pool(request: OpenAIRequest) -> bool:
    return "pool" in (getattr(request, CUSTOM, None) or {})


class _OverPool:
    """A handler of /v1/responses whose chat requests have the options of one request."""

    def __init__(self, handler: OpenAIHandler, request: OpenAIRequest) -> None:
        self._handler, self._request = handler, request

    def __getattr__(self, name: str) -> Passed:
        return getattr(self._handler, name)

    def _process_messages(self, chat: OpenAIRequest, is_multimodal: bool, **kwargs: Passed) -> Passed:
        chat.custom_params = dict(self._request.custom_params)
        processed = self._handler._process_messages(chat, is_multimodal, **kwargs)
        self._request.custom_params = chat.custom_params  # which name the chat's header now
        return processed


_ENDS = ("response.completed", "response.incomplete")
"""Events that end a stream of /v1/responses; SGLang 0.5.23 sends the latter of an answer that its limit ended."""


async def around_full_response(
    original: Callable[..., Awaitable[Passed]],
    handler: OpenAIHandler,
    request: OpenAIRequest,
    sampling_params: JsonObject,
    results: AsyncIterator[Passed],
    *args: Passed,
    **kwargs: Passed,
) -> Passed:
    """AROUND OpenAIServingResponses.responses_full_generator: the answer says what it used, a stored one too."""
    notes: JsonObject = {}
    response = await original(handler, request, sampling_params, _noted(results, notes), *args, **kwargs)
    if not notes or not hasattr(response, "output"):
        return response
    return _stored(handler, response, with_extra(response, notes))


def around_response_stream(
    original: Callable[..., AsyncGenerator[str, None]],
    handler: OpenAIHandler,
    request: OpenAIRequest,
    sampling_params: JsonObject,
    results: AsyncIterator[Passed],
    *args: Passed,
    **kwargs: Passed,
) -> AsyncGenerator[str, None]:
    """AROUND the generators of OpenAIServingResponses' streams: the event that ends one says what the answer used."""
    notes: JsonObject = {}

    def add(data: JsonObject) -> None:
        if notes:
            data["response"][FIELD] = notes
            kept = handler.response_store.get(data["response"]["id"])
            if kept is not None:
                _stored(handler, kept, with_extra(kept, notes))

    events = original(handler, request, sampling_params, _noted(results, notes), *args, **kwargs)
    return with_last(events, _ENDS, add)


async def _noted(results: AsyncIterator[Passed], notes: JsonObject) -> AsyncGenerator[Passed, None]:
    """SGLang's results of one answer; `notes` takes what the answer used."""
    async for each in results:
        last = each if isinstance(each, dict) else getattr(each, "last_output", None)
        if isinstance(last, dict):
            notes.update(extra_of(last.get("meta_info") or {}) or {})
        yield each


def _stored(handler: OpenAIHandler, before: OpenAIAnswer, after: OpenAIAnswer) -> OpenAIAnswer:
    """`after`, which is read by its id from now on, if `before` was."""
    if handler.response_store.get(before.id) is before:
        handler.response_store[before.id] = after
    return after


# ---- /v1/messages ----


@functools.cache
def _messages_request() -> type[BaseModel]:
    from pydantic import create_model
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest

    fields: JsonObject = {CUSTOM: (JsonObject | None, None)}
    return create_model("OptionsRequest", __base__=AnthropicMessagesRequest, **fields)


async def around_handle_messages(
    original: Callable[..., Awaitable[Passed]],
    handler: Handler,
    request: AnthropicRequest,
    raw_request: fastapi.Request,
) -> Passed:
    """AROUND AnthropicServing.handle_messages: the request brings its options along."""
    if not ours(handler.openai_serving_chat.tokenizer_manager):
        return await original(handler, request, raw_request)
    try:
        custom = await custom_of(raw_request)
    except ValueError as error:
        return handler._error_response(status_code=400, error_type="invalid_request_error", message=str(error))
    if custom:
        values = {**dict(request), CUSTOM: custom}
        request = _messages_request().model_construct(_fields_set=request.model_fields_set, **values)
    return await original(handler, request, raw_request)


def around_convert_messages(
    original: Callable[..., OpenAIRequest], handler: Handler, request: AnthropicRequest
) -> OpenAIRequest:
    """AROUND AnthropicServing._convert_to_chat_completion_request: a chat request with the request's options."""
    chat, custom = original(handler, request), getattr(request, CUSTOM, None)
    if custom:
        chat.custom_params = dict(custom)
        if wants_labels(custom) and request.temperature is None:
            chat.temperature = 0.0
    return chat


def around_message_stream(
    original: Callable[..., AsyncGenerator[str, None]], handler: Handler, adapted_request: RequestInput, *args: Passed
) -> AsyncGenerator[str, None]:
    """AROUND AnthropicServing._generate_anthropic_stream: the event with the reason of its end says what was used."""

    def add(data: JsonObject) -> None:
        # The chat stream inside took notes of this request.
        extra = next((found for found in (carried.notes_of(adapted_request) or {}).values() if found), None)
        if extra:
            data[FIELD] = extra

    return with_last(original(handler, adapted_request, *args), ("message_delta",), add)


def around_convert_answer(original: Callable[..., Passed], handler: Handler, response: OpenAIAnswer) -> Passed:
    """AROUND AnthropicServing._convert_response: the answer says what it used."""
    extra = next((found for choice in response.choices if (found := getattr(choice, FIELD, None))), None)
    answer = original(handler, response)
    return answer if extra is None else with_extra(answer, extra)


def around_messages_error(
    original: Callable[..., Passed],
    handler: Handler,
    status_code: int,
    error_type: str,
    message: str,
    *args: Passed,
    **kwargs: Passed,
) -> Passed:
    """AROUND AnthropicServing._error_response: what is wrong with a request is said with its own status.

    SGLang answers every exception with 500 while it makes a chat request ready; a ValueError is the client's there, as
    it is on the chat route.
    """
    error = sys.exc_info()[1]  # it is called where the exception is caught
    if ours(handler.openai_serving_chat.tokenizer_manager) and isinstance(error, (ValueError, fastapi.HTTPException)):
        from sglang.srt.entrypoints.anthropic.serving import ERROR_TYPE_MAP

        status_code, message = getattr(error, "status_code", 400), str(getattr(error, "detail", error))
        error_type = ERROR_TYPE_MAP.get(status_code, "invalid_request_error" if status_code < 500 else "api_error")
    return original(handler, status_code, error_type, message, *args, **kwargs)
