"""Chats over pools with instructions and tools of their own: where a template puts them, and which are kept."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

from sglang_ext.serving.chat import compose_chat, rendered
from sglang_ext.serving.errors import PoolError
from sglang_ext.serving.layouts import ChatHeader
from sglang_ext.serving.requests import CHAT_KEY
from sglang_ext.settings import SETTINGS_ENV
from tests.serving.imitated import Service, quiet

USER = "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
EACH = "{% for message in messages %}" + USER + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
LISTED = "{% for tool in tools %}{{ tool['function'] | tojson }}{% endfor %}"
BEFORE = "{{ bos_token }}{% if tools %}<|tools|>" + LISTED + "{% endif %}" + EACH
BEHIND = EACH + "{% if tools %}<|tools|>" + LISTED + "{% endif %}"
LAST = (
    "{{ bos_token }}{% for message in messages %}{% if tools and loop.last %}<|tools|>" + LISTED + "{% endif %}"
    "{% if message.tool_calls %}<|calls|>{{ message.tool_calls[0]['function']['arguments']['city'] }}{% endif %}"
    + USER
    + "{% endfor %}"
)
NO_DEVELOPER = "{% for message in messages %}{% if message['role'] != 'developer' %}" + USER + "{% endif %}{% endfor %}"
LATE_SYSTEM = (
    "{% for message in messages %}{% if message['role'] == 'user' %}" + USER + "{% endif %}{% endfor %}"
    "{% for message in messages %}{% if message['role'] == 'system' %}" + USER + "{% endif %}{% endfor %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system messages') }}{% endif %}" + EACH
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
ASKED = {"role": "user", "content": "is it raining?"}
DEMOS = [{"input": f"demonstration {n}", "output": f"label {n % 2}"} for n in range(6)]


def run(
    manager: Any, work: Callable[[Service], Awaitable[None]], monkeypatch: pytest.MonkeyPatch, settings: str = "{}"
) -> None:
    """`work` on a service with the pools "plain" and "brief"."""
    monkeypatch.setenv(SETTINGS_ENV, settings)

    async def whole() -> None:
        service = Service(manager, random.Random(1), None)
        service.fails = 0.0
        monkeypatch.setattr(manager, "ext_pools", service, raising=False)
        await service.put("plain", DEMOS, {"block_size": 2})
        await service.put("brief", DEMOS, {"block_size": 2, "system": "be brief"})
        await work(service)
        await quiet(service)

    asyncio.run(asyncio.wait_for(whole(), 60))


def composed(
    manager: Any, messages: list[Any], template: str = BEFORE, pool: str = "plain", **more: Any
) -> tuple[ChatHeader, str, str]:
    """(the header, its text, the text behind the blocks) of a chat."""
    request = ChatCompletionRequest(model="m", messages=messages, custom_params={"pool": pool}, **more)
    before, manager.tokenizer.chat_template = manager.tokenizer.chat_template, template
    try:
        compose_chat(manager, SimpleNamespace(chat_template_name=None), request)
    finally:
        manager.tokenizer.chat_template = before
    header = manager.ext_pools.layouts.header(request.custom_params[CHAT_KEY])
    decoded = [manager.tokenizer.decode(ids) for ids in (header.token_ids, request.input_ids)]
    return header, decoded[0], decoded[1]


# --------------------------------------------------------------------------- templates


def test_what_stands_before_the_first_question_is_the_header(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    system, developer = ({"role": role, "content": f"a {role} speaks"} for role in ("system", "developer"))

    async def work(_: Service) -> None:
        header, before, after = composed(manager, [ASKED])
        assert not header.own and before.endswith("<|user|>") and after.startswith("is it raining?")
        for pool in ("plain", "brief"):
            header, before, after = composed(manager, [system, developer, ASKED], pool=pool)
            assert header.own and after.startswith("is it raining?") and "be brief" not in before
            assert before.endswith("<|system|>a system speaks<|end|><|developer|>a developer speaks<|end|><|user|>")
        header, before, _ = composed(manager, [ASKED], pool="brief")
        same = composed(manager, [{"role": "system", "content": "be brief"}, ASKED], pool="brief")[0]
        assert same == header and not header.own and "be brief" in before
        header, before, after = composed(manager, [ASKED], tools=[TOOL])
        assert header.own and before.count('"weather"') == 1 and before.endswith("<|user|>") and "weather" not in after
        assert not composed(manager, [ASKED], tools=[TOOL], tool_choice="none")[0].own
        turns = [ASKED, {"role": "assistant", "content": "no"}, {"role": "user", "content": "and now?"}]
        assert composed(manager, turns, tools=[TOOL])[0] == header

    run(manager, work, monkeypatch)


def test_calls_of_tools_are_the_request_s_own_tokens(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "paris"}'}}
    turns = [
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "it rains"},
    ]

    async def work(_: Service) -> None:
        assert "<|calls|>paris<|assistant|><|end|><|tool|>it rains" in composed(manager, turns, LAST)[2]
        turns[1]["tool_calls"][0]["function"]["arguments"] = "{"
        with pytest.raises(ValueError, match="arguments of a call of 'weather' are not JSON"):
            composed(manager, turns, LAST)

    run(manager, work, monkeypatch)


@pytest.mark.parametrize(
    ("template", "role", "tools", "message"),
    [
        (NO_DEVELOPER, "developer", None, "not place a developer message before .*: send it as a system message, or"),
        (LATE_SYSTEM, "system", None, "does not place a system message before .*: leave it out"),
        (NO_SYSTEM, "system", None, "cannot render this chat"),
        (BEHIND, None, [TOOL], "does not place tools before"),
        (EACH, None, [TOOL], "does not place tools before"),
    ],
)
def test_what_a_template_does_not_place_there_is_refused_by_name(
    manager: Any, monkeypatch: pytest.MonkeyPatch, template: str, role: str | None, tools: Any, message: str
) -> None:
    async def work(_: Service) -> None:
        instructions = [{"role": role, "content": "mind the gap"}] if role else []
        with pytest.raises(ValueError, match=message):
            composed(manager, [*instructions, ASKED], template, **({"tools": tools} if tools else {}))

    run(manager, work, monkeypatch)


def test_tools_beside_the_last_question_are_served_while_it_is_the_first(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(_: Service) -> None:
        assert composed(manager, [ASKED], LAST, tools=[TOOL])[0].own
        turns = [ASKED, {"role": "assistant", "content": "no"}, {"role": "user", "content": "and now?"}]
        with pytest.raises(ValueError, match="does not place tools before"):
            composed(manager, turns, LAST, tools=[TOOL])

    run(manager, work, monkeypatch)


def test_a_chat_of_many_instructions_is_rendered_as_often_as_one_of_one(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(tokenizer: Any, messages: list[Any], *args: Any, **variables: Any) -> Any:
        calls.append(len(messages))
        return rendered(tokenizer, messages, *args, **variables)

    async def work(_: Service) -> None:
        monkeypatch.setattr("sglang_ext.serving.chat.rendered", counted)
        numbers = []
        for count in (1, 12):
            many = [{"role": "system", "content": f"mind {n}"} for n in range(count)]
            assert composed(manager, [*many, ASKED])[0].own
            numbers.append(len(calls))
            calls.clear()
        assert numbers[0] == numbers[1]
        late = [{"role": "developer" if n == 7 else "system", "content": "mind"} for n in range(12)]
        with pytest.raises(ValueError, match="does not place a developer message before"):
            composed(manager, [*late, ASKED], NO_DEVELOPER)

    run(manager, work, monkeypatch)


def test_instructions_behind_the_first_question_are_refused(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(_: Service) -> None:
        for role in ("system", "developer"):
            with pytest.raises(ValueError, match=f"a {role} message stands behind the first user message"):
                composed(manager, [ASKED, {"role": role, "content": "mind"}])

    run(manager, work, monkeypatch)


def test_a_server_may_serve_none(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(_: Service) -> None:
        own = [{"role": "system", "content": "mind"}, ASKED]
        with pytest.raises(ValueError, match=r"--max-headers 0.*is 'be brief'"):
            composed(manager, own, pool="brief")
        assert not composed(manager, [{"role": "system", "content": "be brief"}, ASKED], pool="brief")[0].own

    monkeypatch.setattr("sglang_ext.serving.chat.may_read", lambda *_: True)
    run(manager, work, monkeypatch, '{"max_headers": 0}')


# --------------------------------------------------------------------------- what is kept


def test_headers_are_bounded_and_the_one_longest_unused_gives_way(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(service: Service) -> None:
        version = service.version("plain")
        held = set(service.schedulers.tokens)
        headers = [ChatHeader((1, 5 + n), version.definition.options, own=True) for n in range(3)]

        async def use(header: ChatHeader, owner: str) -> str:
            service.lease(version)
            variant = await service.layouts.variant(version, header)
            layout = version.layouts[variant]
            assert await service.encoder.ensure(version, variant, layout, [0, 2], owner)
            assert all(owner in service.schedulers.owners[layout.blocks[block].key] for block in (0, 2))
            return variant

        async def end(variant: str, owner: str) -> None:
            service.end_lease(version, variant)
            await service.channel.release(owner)

        first, second = await asyncio.gather(use(headers[0], "request:a"), use(headers[1], "request:b"))
        assert first != second and set(version.headers) == {first, second}
        with pytest.raises(PoolError, match=r"on 2 headers of their own.*'plain'.*--max-headers 2") as told:
            await use(headers[2], "request:c")
        assert told.value.status_code == 429
        service.end_lease(version)  # of the refused one
        await end(first, "request:a")
        assert await use(headers[0], "request:a") == first and version.headers[first].requests == 2
        await end(second, "request:b")
        await end(first, "request:a")
        third = await use(headers[2], "request:c")  # the second was used before the first was used again
        assert set(version.headers) == {first, third} and second not in version.layouts
        await end(third, "request:c")
        await quiet(service)
        gone = {(1, 6)} & {block.token_ids[:2] for layout in version.layouts.values() for block in layout.blocks}
        assert not gone and version.users == 0 and all(use.users == 0 for use in version.headers.values())
        shown = next(pool for pool in service.list() if pool["name"] == "plain")["headers"]
        assert shown == [
            {"tokens": 2, "requests": 2, "requests_in_flight": 0},
            {"tokens": 2, "requests": 1, "requests_in_flight": 0},
        ]
        for key in held:  # what the pools themselves hold is as it was: these two have the same blocks
            assert service.schedulers.owners[key] == {version.owner, service.version("brief").owner}
        assert not service.encoder.promised and version.resident == {"completion"}

    run(manager, work, monkeypatch, '{"max_headers": 2}')


def test_a_header_that_is_too_long_is_refused(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(service: Service) -> None:
        version = service.version("plain")
        with pytest.raises(PoolError, match=r"has 9 tokens.*at most 8 \(--max-header-tokens\)") as told:
            service.layouts.keep_header(ChatHeader((1,) * 9, version.definition.options, own=True))
        assert told.value.status_code == 413
        for header in (
            ChatHeader((1,) * 9, version.definition.options),
            ChatHeader((1,), version.definition.options, True),
        ):
            assert service.layouts.header(service.layouts.keep_header(header)) == header
        for name in ("header:1", 7, None):
            with pytest.raises(ValueError, match="unknown option"):
                service.layouts.header(name)
        monkeypatch.setattr("sglang_ext.serving.layouts.KEPT_HEADER_TOKENS", 20)
        names = [service.layouts.keep_header(ChatHeader((n,) * 8, version.definition.options)) for n in (1, 2, 1, 3)]
        with pytest.raises(ValueError, match="unknown option"):
            service.layouts.header(names[1])
        assert service.layouts.header(names[0]).token_ids == (1,) * 8

    run(manager, work, monkeypatch, '{"max_header_tokens": 8}')


def test_a_header_is_found_while_another_thread_keeps_it_once_more(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(service: Service) -> None:
        layouts, found = service.layouts, list[ChatHeader]()
        header = ChatHeader((1, 2), service.version("plain").definition.options)
        name = layouts.keep_header(header)
        threads = [threading.Thread(target=lambda: found.append(layouts.header(name)))]

        class Watched(dict[str, ChatHeader]):
            """Is looked into while the header is out of it."""

            def pop(self, *args: Any) -> Any:
                out = super().pop(*args)
                threads[0].start()
                threads[0].join(0.2)  # it waits, or has looked
                return out

        monkeypatch.setattr(layouts, "_headers", Watched(layouts._headers))
        layouts.keep_header(header)
        threads[0].join(60)
        assert found == [header]

    run(manager, work, monkeypatch)


def test_a_pool_whose_blocks_see_nothing_else_shares_them_with_every_header(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header that gives way takes no block with it that others have, too."""

    async def work(service: Service) -> None:
        await service.put("alone", DEMOS, {"block_size": 2, "pattern": "self", "positions": "local"})
        version = service.version("alone")
        for number in range(3):
            header = ChatHeader((1, 5 + number), version.definition.options, own=True)
            variant = await service.layouts.variant(version, header)
            blocks, known = version.layouts[variant].blocks, version.layouts["completion"].blocks
            assert blocks[0].key != known[0].key
            assert [block.key for block in blocks[1:]] == [block.key for block in known[1:]]
            version.headers[variant].users -= 1
        for _ in range(2):  # the same of the header of the pool's own chats, which a template may change every day
            await service.layouts.variant(version, ChatHeader((1, 9), version.definition.options))
            await service.layouts.variant(version, ChatHeader((1, 8), version.definition.options))
        await quiet(service)
        for block in version.layouts["completion"].blocks:
            assert version.owner in service.schedulers.owners[block.key]

    run(manager, work, monkeypatch, '{"max_headers": 1}')
