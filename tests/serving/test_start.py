"""What an HTTP server does as soon as it answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sglang_ext.serving import http


@pytest.mark.parametrize("fails", [False, True])
def test_collections_leave_alone_what_is_there_to_stay(fails: bool) -> None:
    """First what was imported, then the pools of --pool-dir, whatever becomes of them."""
    done: list[str] = []

    class Manager:
        async def freeze_gc(self) -> None:
            done.append("freeze")

    class Service:
        async def restored(self) -> None:
            done.append("pools")
            if fails:
                raise OSError("no such folder")

    manager: Any = Manager()
    services: list[Any] = [Service(), Service()]
    asyncio.run(http._settle(manager, services))
    assert done == ["freeze", "pools", "pools", "freeze"]
