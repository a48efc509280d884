"""Keys of conversations in the tokenizer process: who gets one, and which answers say it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.attention.policy import Policy
from sglang_ext.attention.stream_policy import StreamPolicy
from sglang_ext.serving.conversations import around_generate_request, key_of, with_keys
from sglang_ext.systems.registry import System

KEY = "k" * 43


def params(**custom: Any) -> dict[str, Any]:
    return {"max_new_tokens": 1, "custom_params": custom}


def test_first_turns_get_a_key_each() -> None:
    asked = [params(conversation="a"), params(conversation="b"), params(window=4), None, "odd", {"custom_params": 3}]
    asked += [params(conversation="a", conversation_key=KEY), params(conversation="a", **{"continue": True})]
    before = [repr(each) for each in asked]
    found = with_keys(asked)
    assert [repr(each) for each in asked] == before  # the caller's own dictionaries
    first, second = key_of(found[0]), key_of(found[1])
    assert first and second and first != second and len(first) == 43
    StreamPolicy().check(found[0]["custom_params"])
    assert found[2:] == asked[2:]
    assert [key_of(each) for each in found[2:]] == [None, None, None, None, KEY, None]
    assert key_of(params(conversation_key=KEY)) is None  # of no conversation


def answers(obj: Any, policy: Any, outs: list[Any], open_conversations: bool = False) -> list[Any]:
    settings = SimpleNamespace(open_conversations=open_conversations)
    system = None if policy is None else System("", "", streams=isinstance(policy, StreamPolicy))
    manager = SimpleNamespace(ext_system=system, ext_pools=SimpleNamespace(settings=settings))

    async def original(_manager: Any, _obj: Any, _request: Any) -> AsyncIterator[Any]:
        for out in outs:
            yield out

    async def collect() -> list[Any]:
        return [out async for out in around_generate_request(original, manager, obj)]

    return asyncio.run(collect())


def item(**more: Any) -> dict[str, Any]:
    return {"meta_info": {}, **more}


def test_every_answer_says_its_key() -> None:
    single = SimpleNamespace(rid="1", sampling_params=params(conversation="a"))
    chunks = answers(single, StreamPolicy(), [item(), item()])
    assert {chunk["meta_info"]["sglang_ext"]["conversation_key"] for chunk in chunks} == {
        key_of(single.sampling_params)
    }

    several = [params(conversation="a"), params(), params(conversation="c", conversation_key=KEY)]
    batch = SimpleNamespace(rid=["1", "2", "3"], sampling_params=several, parallel_sample_num=2)
    (out,) = answers(batch, StreamPolicy(), [[item(index=index) for index in range(6)]])
    keys = [each["meta_info"].get("sglang_ext", {}).get("conversation_key") for each in out]
    assert keys[0] == keys[1] == key_of(batch.sampling_params[0]) and keys[2:] == [None, None, KEY, KEY]


@pytest.mark.parametrize(("policy", "opened"), [(None, False), (Policy(), False), (StreamPolicy(), True)])
def test_servers_that_ask_for_no_keys(policy: Any, opened: bool) -> None:
    obj = SimpleNamespace(rid="1", sampling_params=params(conversation="a"))
    assert answers(obj, policy, [item()], opened) == [item()]
    assert key_of(obj.sampling_params) is None
