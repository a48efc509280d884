"""Ollama's routes: options, pools and refusals, which SGLang's handler of them does not know.

`custom_params` stands in the body, or among Ollama's `options`. Ollama's own names are taken at their word: without
`num_predict` the server's default length holds, `seed` is the seed, and a wrong request is answered with 400.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import fastapi
from fastapi.responses import StreamingResponse

from sglang_ext import compat
from sglang_ext.serving.answers import with_extra
from sglang_ext.serving.chat import compose_chat, wants_labels
from sglang_ext.serving.errors import error_response
from sglang_ext.serving.routes import CUSTOM, check_custom, custom_of, ours


async def around_handle(original: Callable[..., Awaitable[Any]], handler: Any, request: Any, raw_request: Any) -> Any:
    """AROUND OllamaServing.handle_chat and handle_generate: see the module."""
    manager = handler.tokenizer_manager
    if not ours(manager):
        return await original(handler, request, raw_request)
    try:
        return await _begun(await original(await _served(handler, request, raw_request), request, raw_request))
    except fastapi.HTTPException as error:
        return error_response(str(error.detail), error.status_code)
    except ValueError as error:
        return error_response(str(error), 400)


async def _served(handler: Any, request: Any, raw_request: Any) -> _Served:
    """A handler for one request.

    Raises:
        ValueError: something in the request cannot be served; says what to change.
    """
    options = dict(request.options or {})
    custom = check_custom(options.pop(CUSTOM, None)) or await custom_of(raw_request) or {}
    messages = getattr(request, "messages", None)
    if messages is not None and not messages:
        raise ValueError("messages is empty: send at least one")
    pictured = any(getattr(item, "images", None) for item in (request, *(messages or ())))
    for name, given in (("images", pictured), ("format", request.format), ("suffix", getattr(request, "suffix", None))):
        if given:
            raise ValueError(f"{name} is not served on Ollama's routes: use /v1/chat/completions, or leave it out")
    ids = None
    if messages is not None and "pool" in custom:
        custom, ids = _over_pool(handler.tokenizer_manager, raw_request, messages, custom)
    return _Served(handler, custom, ids)


def _over_pool(
    manager: Any, raw_request: Any, messages: Any, custom: dict[str, Any]
) -> tuple[dict[str, Any], list[int]]:
    """(options, token ids of its own) of a chat over a pool."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    said = [{"role": message.role, "content": message.content} for message in messages]
    chat = ChatCompletionRequest(model="", messages=said, custom_params=dict(custom))
    compose_chat(manager, raw_request.app.state.openai_serving_chat.template_manager, chat)
    return chat.custom_params, chat.input_ids


class _Served:
    """SGLang's handler, for one request with options."""

    def __init__(self, handler: Any, custom: dict[str, Any], ids: list[int] | None) -> None:
        self._handler, self._custom, self._ids = handler, custom, ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def _convert_options_to_sampling_params(self, options: dict[str, Any] | None = None) -> dict[str, Any]:
        given = options or {}
        params: dict[str, Any] = self._handler._convert_options_to_sampling_params(given)
        if "num_predict" not in given:
            params["max_new_tokens"] = None
        if "seed" in params:
            params["sampling_seed"] = params.pop("seed")
        if self._custom:
            params[CUSTOM] = self._custom
            if wants_labels(self._custom):
                params.setdefault("temperature", 0.0)
        return params

    def _ready(self, request: Any) -> dict[int, Any]:
        """Have a GenerateReqInput name the chat's own tokens; returns where its answer will be noted."""
        if self._ids is not None:
            request.input_ids = self._ids
        elif request.input_ids is not None and not isinstance(request.input_ids, list):
            request.input_ids = request.input_ids["input_ids"]  # transformers' newer answer of a chat template
        return compat.take_notes(request)

    async def _generate_chat_response(self, request: Any, *args: Any) -> Any:
        notes = self._ready(request)
        return _noted(await self._handler._generate_chat_response(request, *args), notes)

    async def _generate_generate_response(self, request: Any, *args: Any) -> Any:
        notes = self._ready(request)
        return _noted(await self._handler._generate_generate_response(request, *args), notes)

    async def _stream_chat_response(self, request: Any, *args: Any) -> Any:
        self._ready(request)
        return await self._handler._stream_chat_response(request, *args)


def _noted(answer: Any, notes: dict[int, Any]) -> Any:
    extra = notes.get(0)
    return with_extra(answer, extra) if extra else answer


async def _begun(answer: Any) -> Any:
    """An answer; of a stream the first part is waited for, so that a refusal has its own status."""
    if not isinstance(answer, StreamingResponse):
        return answer
    parts = answer.body_iterator
    try:
        first = await anext(aiter(parts))
    except StopAsyncIteration:
        return answer

    async def rest() -> AsyncIterator[Any]:
        yield first
        async for part in parts:
            yield part

    answer.body_iterator = rest()
    return answer
