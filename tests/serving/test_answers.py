"""What answers say of what they used, on routes without `meta_info`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from sglang.srt.entrypoints.openai.protocol import (
    CompletionResponse,
    CompletionResponseChoice,
    CompletionStreamResponse,
    UsageInfo,
)

from sglang_ext.cache import carried
from sglang_ext.serving.answers import around_build_response, extra_of, last_chunk, noting, with_extra
from sglang_ext.serving.routes import while_reading


def test_extras_are_what_sglang_does_not_say() -> None:
    assert extra_of({"id": "a"}) is None and extra_of({"attention_report": [None, None]}) is None
    assert extra_of({"sglang_ext": {"pool": "p"}, "attention_report": [{"dense": "why"}]}) == {
        "pool": "p",
        "attention_report": [{"dense": "why"}],
    }


def test_each_choice_says_what_its_answer_used() -> None:
    def build(_handler: Any, _request: Any, ret: Any, created: int) -> CompletionResponse:
        choices = [CompletionResponseChoice(index=at, text=item["text"]) for at, item in enumerate(ret)]
        return CompletionResponse(id="a", model="m", choices=choices, created=created, usage=UsageInfo())

    ret = [{"text": "x", "meta_info": {"sglang_ext": {"pool": "p"}}}, {"text": "y", "meta_info": {}}]
    answer = around_build_response(build, None, None, ret, 1)
    assert isinstance(answer, CompletionResponse)
    first, second = answer.model_dump()["choices"]
    assert first["sglang_ext"] == {"pool": "p"} and first["text"] == "x" and "sglang_ext" not in second
    plain = around_build_response(build, None, None, ret[1:], 1)
    assert type(plain) is CompletionResponse
    assert with_extra(plain, {"pool": "p"}).model_dump()["sglang_ext"] == {"pool": "p"}


def test_the_chunk_that_ends_a_choice_says_what_it_used() -> None:
    def chunk(reason: str | None) -> str:
        choice = {"index": 1, "text": 'a "finish_reason":"x" ü', "finish_reason": reason}
        return f"data: {CompletionStreamResponse(id='a', model='m', choices=[choice]).model_dump_json()}\n\n"

    notes = {1: {"pool": "p"}}
    assert json.loads(last_chunk(chunk("stop"), notes)[6:])["choices"][0]["sglang_ext"] == {"pool": "p"}
    assert "sglang_ext" not in last_chunk(chunk(None), notes)
    assert "sglang_ext" not in last_chunk(chunk("stop"), {0: {"pool": "p"}})


def test_notes_are_taken_for_who_asked() -> None:
    async def answers() -> AsyncIterator[Any]:
        yield {"index": 1, "meta_info": {"sglang_ext": {"pool": "p"}}}
        yield {"meta_info": {}}

    async def read(obj: Any) -> None:
        async for _ in noting(answers(), obj):  # type: ignore[arg-type]
            pass

    obj = SimpleNamespace()
    asyncio.run(read(obj))
    assert carried.notes_of(obj) is None
    notes = carried.take_notes(obj)
    asyncio.run(read(obj))
    assert notes == {1: {"pool": "p"}, 0: None}


def test_only_reading_a_body_is_the_clients_fault() -> None:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    for response_format in ("x", 5):
        try:
            ChatCompletionRequest(model="m", messages=[], response_format=response_format)
        except (AttributeError, TypeError) as error:
            assert while_reading(error)
    try:
        None.nothing  # type: ignore[attr-defined]  # noqa: B018
    except AttributeError as error:
        assert not while_reading(error)
