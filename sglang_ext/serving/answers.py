"""What `meta_info` says of an answer beyond SGLang's own fields, for routes whose answers have no `meta_info`.

The OpenAI routes put it into each choice, as `sglang_ext`; /v1/responses, /v1/messages and Ollama's routes, whose
answers have no choices, into the answer. A stream says it in the chunk that ends the choice.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING

from sglang_ext.attention.sparse import REPORT
from sglang_ext.cache import carried
from sglang_ext.names import OpenAIAnswer, OpenAIHandler, OpenAIRequest, RequestInput
from sglang_ext.types import Json, JsonObject, Options

if TYPE_CHECKING:
    import fastapi
    from pydantic import BaseModel

FIELD = "sglang_ext"


def extra_of(meta: Options) -> JsonObject | None:
    """What an answer's `meta_info` says that SGLang's own answers do not; None for nothing."""
    found = dict(meta.get(FIELD) or {})
    if any(meta.get(REPORT) or ()):
        found[REPORT] = meta[REPORT]
    return found or None


def noting(answers: AsyncGenerator[Json, None], obj: RequestInput) -> AsyncGenerator[Json, None]:
    """SGLang's answers to `obj`; whoever asked for notes (`carried.take_notes`) finds the extras of each there."""
    notes = carried.notes_of(obj)
    return answers if notes is None else _noting(answers, notes)


async def _noting(
    answers: AsyncGenerator[Json, None], notes: dict[int, JsonObject | None]
) -> AsyncGenerator[Json, None]:
    async with aclosing(answers):
        async for out in answers:
            for place, item in enumerate(out if isinstance(out, list) else [out]):
                notes[item.get("index", place)] = extra_of(item["meta_info"])
            yield out


# ---- answers as objects ----


def around_build_response(
    original: Callable[..., OpenAIAnswer],
    handler: OpenAIHandler,
    request: OpenAIRequest,
    ret: JsonObject | list[JsonObject],
    created: int,
) -> OpenAIAnswer:
    """AROUND _build_completion_response and _build_chat_response: each choice says what its answer used."""
    response = original(handler, request, ret, created)
    extras = [extra_of(item["meta_info"]) for item in (ret if isinstance(ret, list) else [ret])]
    if not any(extras) or not hasattr(response, "choices"):
        return response
    pairs = zip(response.choices, extras, strict=True)
    choices = [choice if extra is None else with_extra(choice, extra) for choice, extra in pairs]
    kind = _any_choices(response.__class__, response.choices[0].__class__)
    return kind.model_construct(**{**dict(response), "choices": choices})


def with_extra(answer: BaseModel, extra: JsonObject) -> BaseModel:
    """A pydantic model's fields, and `sglang_ext`."""
    added: JsonObject = {FIELD: extra}
    return _extended(answer.__class__).model_construct(**dict(answer), **added)


@functools.cache
def _extended(kind: type[BaseModel]) -> type[BaseModel]:
    from pydantic import create_model

    fields: Options = {FIELD: (JsonObject | None, None)}
    return create_model(kind.__name__, __base__=kind, **fields)


@functools.cache
def _any_choices(kind: type[BaseModel], choice: type[BaseModel]) -> type[BaseModel]:
    """`kind`, whose choices are written out with all their fields, those of `_extended` among them."""
    from pydantic import SerializeAsAny, create_model

    return create_model(kind.__name__, __base__=kind, choices=(list[SerializeAsAny[choice]], ...))  # type: ignore[valid-type]


# ---- streams ----


def around_stream(
    original: Callable[..., AsyncGenerator[str, None]],
    handler: OpenAIHandler,
    adapted_request: RequestInput,
    request: OpenAIRequest,
    raw_request: fastapi.Request,
) -> AsyncGenerator[str, None]:
    """AROUND _generate_completion_stream and _generate_chat_stream: the chunk that ends a choice says what it used."""
    return _stream(original(handler, adapted_request, request, raw_request), carried.take_notes(adapted_request))


async def _stream(
    chunks: AsyncGenerator[str, None], notes: Mapping[int, JsonObject | None]
) -> AsyncGenerator[str, None]:
    async with aclosing(chunks):
        async for chunk in chunks:
            yield last_chunk(chunk, notes) if any(notes.values()) and '"finish_reason":"' in chunk else chunk


async def with_last(
    events: AsyncGenerator[str, None], kinds: Collection[str], add: Callable[[JsonObject], None]
) -> AsyncGenerator[str, None]:
    """A stream of typed events: `add` changes the data of the event of one of `kinds`, which ends the answer."""
    begins = [f"event: {kind}\ndata: " for kind in kinds]
    async with aclosing(events):
        async for event in events:
            begin = next((each for each in begins if event.startswith(each)), None)
            if begin is not None:
                data = json.loads(event.removeprefix(begin))
                add(data)
                event = f"{begin}{json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
            yield event


def last_chunk(chunk: str, notes: Mapping[int, JsonObject | None]) -> str:
    """A chunk of a stream whose choices end, with what their answers used."""
    data = json.loads(chunk.removeprefix("data: "))
    for choice in data.get("choices", ()):
        if choice.get("finish_reason") and notes.get(choice["index"]):
            choice[FIELD] = notes[choice["index"]]
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"
