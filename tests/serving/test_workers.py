"""Threads of the tokenizer process: memory goes back when a request's work is done and forgotten, not before."""

from __future__ import annotations

import asyncio
import weakref
from types import SimpleNamespace

import pytest

from sglang_ext.serving import workers


class Body:
    """What a client submitted."""


@pytest.mark.parametrize("way", ["read", "beside"])
def test_memory_is_given_back_when_the_request_has_been_forgotten(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    given: list[bool] = []

    async def requested() -> weakref.ref[Body]:
        work = getattr(workers.Workers(SimpleNamespace()), way)
        body = await work(Body)
        await asyncio.sleep(0.05)  # the answer is written
        return weakref.ref(body)

    async def served() -> None:
        body = await requested()
        assert not given and body() is None
        await asyncio.sleep(0.3)

    monkeypatch.setattr(workers, "GIVE_BACK_SECONDS", 0.2)
    monkeypatch.setattr(workers, "give_back", lambda: given.append(True))
    asyncio.run(served())
    assert given == [True]
