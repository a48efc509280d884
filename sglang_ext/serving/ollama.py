"""Ollama's routes: options, pools and refusals, which SGLang's handler of them does not know.

`custom_params` stands in the body, or among Ollama's `options`. Ollama's own names are taken at their word: without
`num_predict` the server's default length holds, `seed` is the seed, and a wrong request is answered with 400. The last
line of a stream has the last of the text, which SGLang leaves out.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from types import SimpleNamespace
from typing import TYPE_CHECKING

import fastapi
import orjson
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from sglang_ext import compat
from sglang_ext.cache import carried
from sglang_ext.names import Handler, OllamaRequest, Passed, RequestInput, TemplateManager, TokenizerManager
from sglang_ext.serving.answers import FIELD, extra_of, with_extra
from sglang_ext.serving.chat import compose_chat, rendered, wants_labels
from sglang_ext.serving.errors import error_response
from sglang_ext.serving.requests import check_characters
from sglang_ext.serving.routes import CUSTOM, check_custom, custom_of, ours
from sglang_ext.serving.tenancy import pools_of
from sglang_ext.serving.texts import beside, characters, is_long
from sglang_ext.types import JsonObject

if TYPE_CHECKING:
    from sglang.srt.entrypoints.ollama.protocol import OllamaMessage


async def around_handle(
    original: Callable[..., Awaitable[Passed]], handler: Handler, request: OllamaRequest, raw_request: fastapi.Request
) -> Passed:
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


async def _served(handler: Handler, request: OllamaRequest, raw_request: fastapi.Request) -> _Served:
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
    ids: list[int] = []
    if messages is not None:
        check_characters(characters([message.content for message in messages]), handler.tokenizer_manager.context_len)
        templates = raw_request.app.state.openai_serving_chat.template_manager

        def render(own: Handler) -> tuple[JsonObject, list[int]]:
            return _rendered(own.tokenizer_manager, templates, messages, custom)

        await pools_of(handler.tokenizer_manager).prepare(custom)
        long = is_long(handler.tokenizer_manager, [message.content for message in messages])
        custom, ids = await beside(handler, render) if long else render(handler)
    return _Served(handler, custom, ids)


def _rendered(
    manager: TokenizerManager, templates: TemplateManager, messages: list[OllamaMessage], custom: JsonObject
) -> tuple[JsonObject, list[int]]:
    """(options, token ids of its own) of a chat."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    said = [{"role": message.role, "content": message.content} for message in messages]
    if "pool" not in custom:
        return custom, rendered(manager.tokenizer, said, tokenize=True, add_generation_prompt=True)
    chat = ChatCompletionRequest(model="", messages=said, custom_params=dict(custom))
    compose_chat(manager, templates, chat)
    return chat.custom_params, chat.input_ids


class _Served:
    """SGLang's handler, for one request with options, whose chat was rendered before."""

    def __init__(self, handler: Handler, custom: JsonObject, ids: list[int]) -> None:
        self._handler, self._custom = handler, custom
        self.tokenizer_manager = SimpleNamespace(
            served_model_name=handler.tokenizer_manager.served_model_name,
            tokenizer=SimpleNamespace(apply_chat_template=lambda *_args, **_kwargs: ids),
        )

    def __getattr__(self, name: str) -> Passed:
        return getattr(self._handler, name)

    def _convert_options_to_sampling_params(self, options: JsonObject | None = None) -> JsonObject:
        given = options or {}
        params: JsonObject = self._handler._convert_options_to_sampling_params(given)
        if "num_predict" not in given:
            params["max_new_tokens"] = None
        if "seed" in params:
            params["sampling_seed"] = params.pop("seed")
        if self._custom:
            params[CUSTOM] = self._custom
            if wants_labels(self._custom):
                params.setdefault("temperature", 0.0)
        return params

    async def _generate_chat_response(self, request: RequestInput, *args: Passed) -> BaseModel:
        notes = carried.take_notes(request)
        return _noted(await self._handler._generate_chat_response(request, *args), notes)

    async def _generate_generate_response(self, request: RequestInput, *args: Passed) -> BaseModel:
        notes = carried.take_notes(request)
        return _noted(await self._handler._generate_generate_response(request, *args), notes)

    async def _stream_chat_response(
        self, request: RequestInput, raw_request: fastapi.Request, model: str
    ) -> StreamingResponse:
        return self._streamed(
            request, raw_request, model, lambda text: {"message": {"role": "assistant", "content": text}}
        )

    async def _stream_generate_response(
        self, request: RequestInput, raw_request: fastapi.Request, model: str
    ) -> StreamingResponse:
        return self._streamed(request, raw_request, model, lambda text: {"response": text})

    def _streamed(
        self, request: RequestInput, raw_request: fastapi.Request, model: str, said: Callable[[str], JsonObject]
    ) -> StreamingResponse:
        """A line of JSON for each part of an answer; the last one is `done`, and says what the answer used."""
        manager = self._handler.tokenizer_manager

        async def lines() -> AsyncIterator[bytes]:
            shown = 0
            async with aclosing(manager.generate_request(request, raw_request)) as parts:
                async for part in parts:
                    text, meta = part["text"], part["meta_info"]
                    new = text if compat.streams_parts(manager, request) else text[shown:]
                    shown = len(text)
                    line = {"model": model, "created_at": self._get_timestamp(), **said(new), "done": False}
                    if meta["finish_reason"] is not None:
                        extra = extra_of(meta)
                        line |= {"done": True, "done_reason": meta["finish_reason"]["type"]}
                        line |= {FIELD: extra} if extra else {}
                    yield orjson.dumps(line) + b"\n"

        # A client that hangs up: SGLang ends its request as it does on its other routes.
        ended = manager.create_abort_task(request)
        return StreamingResponse(lines(), media_type="application/x-ndjson", background=ended)


def _noted(answer: BaseModel, notes: Mapping[int, JsonObject | None]) -> BaseModel:
    extra = notes.get(0)
    return with_extra(answer, extra) if extra else answer


async def _begun(answer: Passed) -> Passed:
    """An answer; of a stream the first part is waited for, so that a refusal has its own status."""
    if not isinstance(answer, StreamingResponse):
        return answer
    parts: Passed = answer.body_iterator
    try:
        first = await anext(aiter(parts))
    except StopAsyncIteration:
        return answer

    async def rest() -> AsyncIterator[bytes]:
        async with aclosing(parts):
            yield first
            async for part in parts:
                yield part

    answer.body_iterator = rest()
    return answer
