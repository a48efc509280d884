"""What an HTTP server does as soon as it answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sglang_ext.serving import http


@pytest.mark.parametrize("fails", ["", "freeze", "pools"])
def test_collections_leave_alone_what_is_there_to_stay(fails: str, caplog: pytest.LogCaptureFixture) -> None:
    """First what was imported, then the pools of --pool-dir, whatever fails."""
    done: list[str] = []

    def do(what: str) -> None:
        done.append(what)
        if what == fails:
            raise OSError("not today")

    class Manager:
        async def freeze_gc(self) -> None:
            do("freeze")

    class Service:
        async def restored(self) -> None:
            do("pools")

    manager: Any = Manager()
    services: list[Any] = [Service(), Service()]
    asyncio.run(http._settle(manager, services))
    assert done == ["freeze", "pools", "pools", "freeze"]
    assert ("not today" in caplog.text) == (fails == "freeze")
