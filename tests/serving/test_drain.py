"""A server that is told to end: which requests it takes, what it waits for; and when it is ready for requests."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fastapi
import pytest
from sglang.srt.managers.tokenizer_manager import ServerStatus

from sglang_ext.cache.rows import INTERNAL
from sglang_ext.serving import drain, ready
from sglang_ext.serving.drain import Drain, DrainMiddleware, around_sigterm_watchdog
from sglang_ext.serving.errors import PoolError
from sglang_ext.settings import ServerSettings
from tests.oracle import models
from tests.serving.imitated import Service, quiet
from tests.serving.test_fleet import BLOCKS, SCAN, servers, until

LONG = 60.0


def server(**changed: Any) -> SimpleNamespace:
    """A manager of a server that has started, and its pools, which nobody changes."""
    folder = SimpleNamespace(waits_for=lambda: None, stop=lambda: None)
    pools = SimpleNamespace(queue=SimpleNamespace(taken=0), folder=folder, pools={})
    pools.shared = SimpleNamespace(services={"": pools})
    fields = {"gracefully_exit": False, "server_status": ServerStatus.Up, "is_pause": False, "rid_to_state": {}}
    return SimpleNamespace(**{**fields, "ext_pools": pools, **changed})


def run(work: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(work, LONG))


async def answer(app: Any, path: str = "/generate", method: str = "POST") -> tuple[int, dict[bytes, bytes]]:
    """(status, headers) of a request to an ASGI app."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nobody reads a body")

    await app({"type": "http", "path": path, "method": method, "headers": [], "query_string": b""}, receive, send)
    return sent[0]["status"], dict(sent[0]["headers"])


async def ok(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body"})


def test_new_requests_are_refused_when_the_seconds_are_over() -> None:
    async def work() -> None:
        manager = server()
        draining = Drain(manager, LONG)
        app = DrainMiddleware(ok, draining)
        assert await answer(app) == (200, {})
        manager.gracefully_exit = True
        over = asyncio.ensure_future(draining.over(manager.ext_pools))
        await asyncio.sleep(0)
        assert await answer(app) == (200, {b"connection": b"close"}), "the next one is to go elsewhere"
        assert draining._told_at is not None and not over.done()
        draining._told_at -= LONG  # so much time passes
        await over
        status, headers = await answer(app)
        assert (status, headers[b"retry-after"], headers[b"connection"]) == (503, b"1", b"close")
        for path, method in (("/health", "GET"), ("/metrics", "GET"), ("/ready", "GET"), ("/v1/pools", "GET")):
            assert (await answer(app, path, method))[0] == 200
        for path in ("/abort_request", "/continue_generation", "/v1/pools/a/cancel", "/v1/responses/r/cancel"):
            assert (await answer(app, path))[0] == 200, "else what it waits for might never end"
        for path, method in (("/pause_generation", "POST"), ("/v1/pools/cancel", "PUT"), ("/v1/pools/a", "DELETE")):
            assert (await answer(app, path, method))[0] == 503

    run(work())


def test_it_ends_when_nobody_waits_for_it_any_more() -> None:
    async def work() -> None:
        manager, finish, order = server(), asyncio.Event(), []

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            await finish.wait()
            await ok(scope, receive, send)
            order.append("answered")

        async def end(_manager: Any) -> None:
            order.append("ended")

        manager.ext_drain = Drain(manager, 0.0)
        watchdog = asyncio.ensure_future(around_sigterm_watchdog(end, manager))
        request = asyncio.ensure_future(answer(DrainMiddleware(slow, manager.ext_drain)))
        await asyncio.sleep(3 * drain.LOOK_SECONDS)
        assert not watchdog.done(), "nobody told it to end"
        manager.gracefully_exit = True
        manager.ext_pools.queue.taken = 1
        manager.rid_to_state["a"] = object()
        await until(lambda: manager.ext_drain.refuses, LONG)
        await asyncio.sleep(3 * drain.LOOK_SECONDS)
        assert order == []
        finish.set()
        await request
        await asyncio.sleep(3 * drain.LOOK_SECONDS)
        assert order == ["answered"], "a change of a pool is under way"
        manager.ext_pools.queue.taken = 0
        await asyncio.sleep(3 * drain.LOOK_SECONDS)
        assert order == ["answered"], "the schedulers have a request"
        manager.rid_to_state.clear()
        await watchdog
        assert order == ["answered", "ended"] and manager.ext_drain.under_way == 0

    run(work())


def test_pools_are_encoded_until_nobody_needs_them() -> None:
    async def work() -> None:
        stopped: list[bool] = []
        manager = server(gracefully_exit=True, rid_to_state={"in the background": None})
        manager.ext_pools.folder.stop = lambda: stopped.append(True)
        over = asyncio.ensure_future(Drain(manager, 0.0).over(manager.ext_pools))
        await asyncio.sleep(3 * drain.LOOK_SECONDS)
        assert not stopped
        manager.rid_to_state = {INTERNAL + "encodes": None}
        await until(lambda: bool(stopped), LONG)
        manager.rid_to_state.clear()
        await over

    run(work())


@pytest.mark.parametrize("forced", [True, False])
def test_a_server_that_cannot_answer_ends_at_once(forced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = server(rid_to_state={"a": object()}, gracefully_exit=True)
    if forced:
        monkeypatch.setenv("SGL_FORCE_SHUTDOWN", "1")
    else:
        manager.server_status = ServerStatus.UnHealthy
    run(Drain(manager, LONG).over(manager.ext_pools))


def test_a_request_that_fails_counts_no_longer() -> None:
    async def work() -> None:
        async def fails(*_: Any) -> None:
            raise RuntimeError("of the app")

        draining = Drain(server(), 0.0)
        with pytest.raises(RuntimeError, match="of the app"):
            await answer(DrainMiddleware(fails, draining))
        assert draining.under_way == 0

    run(work())


def test_signals_are_handled_from_the_start_on() -> None:
    heard: list[str] = []
    manager = server(auto_create_handle_loop=lambda: heard.append("loop"))

    async def app(*_: Any) -> None:
        heard.append("lifespan")

    run(DrainMiddleware(app, Drain(manager, 0.0))({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert heard == ["loop", "lifespan"]


def test_an_engine_of_ones_own_ends_as_sglang_does() -> None:
    ended: list[Any] = []

    async def end(manager: Any) -> None:
        ended.append(manager)

    manager = server(gracefully_exit=True)
    run(around_sigterm_watchdog(end, manager))
    assert ended == [manager]


def test_the_setting() -> None:
    for value in (-1.0, 1e6, float("nan")):
        with pytest.raises(ValueError, match="drain_seconds="):
            ServerSettings(drain_seconds=value)
    assert ServerSettings().drain_seconds == 0.0 and ServerSettings(drain_seconds=2.5).drain_seconds == 2.5


# ---- ready ----


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"gracefully_exit": True}, "is told to end"),
        ({"server_status": ServerStatus.Starting}, "the server starts"),
        ({"server_status": ServerStatus.UnHealthy}, "failed its last health check"),
        ({"is_pause": True}, "is paused"),
    ],
)
def test_when_a_server_is_ready(changed: dict[str, Any], words: str | None) -> None:
    manager = server(**changed)
    why = ready.not_ready(manager, [manager.ext_pools])
    assert why is None if words is None else why is not None and words in why


def test_the_route_takes_the_place_of_sglangs_own() -> None:
    app, manager = fastapi.FastAPI(), server()

    @app.get(ready.PATH)
    async def theirs() -> str:
        raise AssertionError("theirs knows no pools")

    ready.add_route(app, manager, manager.ext_pools)
    assert asyncio.run(answer(app, ready.PATH, "GET"))[0] == 200
    manager.ext_pools.folder.waits_for = lambda: "pools"
    assert asyncio.run(answer(app, ready.PATH, "GET"))[0] == 503


def test_a_server_waits_for_the_tenants_that_it_starts_with_and_for_no_later_one() -> None:
    app, manager, busy = fastapi.FastAPI(), server(), SimpleNamespace(waits_for=lambda: "pools")
    services = manager.ext_pools.shared.services
    services["first"] = SimpleNamespace(folder=busy, pools={})
    ready.add_route(app, manager, manager.ext_pools)
    assert asyncio.run(answer(app, ready.PATH, "GET"))[0] == 503
    services["first"].folder = manager.ext_pools.folder
    services["late"] = SimpleNamespace(folder=busy, pools={})
    assert asyncio.run(answer(app, ready.PATH, "GET"))[0] == 200


def test_a_server_with_a_folder_of_its_own_is_ready_when_its_pools_are_encoded(manager: Any, tmp_path: Path) -> None:
    async def work() -> None:
        first = Service(manager, random.Random(1), str(tmp_path))
        first.fails = 0.0
        await first.restored()
        assert first.folder.waits_for() is None, "the folder is empty"
        for name in "ab":
            await first.put(name, models.demonstrations(5), BLOCKS)
        second = Service(manager, random.Random(1), str(tmp_path))
        second.fails = 0.0
        assert (second.folder.waits_for() or "").endswith("encoded: 2"), "before anybody has asked for them, too"
        await second.restored()
        assert second.folder.waits_for() is None and sorted(second.pools) == ["a", "b"]
        third = Service(manager, random.Random(1), str(tmp_path))
        restoring = asyncio.ensure_future(third.restored())
        await asyncio.sleep(0)
        third.folder.stop()
        with pytest.raises(asyncio.CancelledError):
            await restoring
        await quiet(third)
        assert (third.folder.waits_for() or "").endswith("2"), "it ends, and is not ready"
        with pytest.raises(PoolError, match="about to end") as refused:
            await third.restored()
        assert refused.value.status_code == 503

    run(work())


@pytest.mark.parametrize("at_once", [True, False])
def test_a_server_on_a_shared_folder_is_ready(
    manager: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    settings = {"pool_scan_seconds": SCAN, "encode_at_once": at_once}
    monkeypatch.setenv("SGLANG_EXT_SETTINGS", json.dumps(settings))

    async def work() -> None:
        async with servers(manager, tmp_path, count=1) as (one,):
            for name in "ab":
                await one.put(name, models.demonstrations(5), BLOCKS)
            two = Service(manager, random.Random(2), str(tmp_path))
            two.fails, blocked = 0.0, asyncio.Event()
            encode = two.encoder._encode_run

            async def held(run: Any) -> None:
                await blocked.wait()
                await encode(run)

            two.encoder._encode_run = held  # type: ignore[method-assign]
            assert "has not been read yet" in (two.folder.waits_for() or "")
            await two.restored()
            assert two.folder.waits_for() is None or at_once
            if at_once:
                assert (two.folder.waits_for() or "").endswith("encoded: 2")
                blocked.set()
                await until(lambda: two.folder.waits_for() is None, LONG)
                assert all(two.pools[name].current is not None for name in "ab")
                blocked.clear()
            await one.put("late", models.demonstrations(5), BLOCKS)
            await until(lambda: "late" in two.pools, LONG)
            assert two.folder.waits_for() is None, "a server that was ready stays it"
            two.folder.stop()
            blocked.set()
            await quiet(two)
            begin = time.monotonic()
            await one.put("later", models.demonstrations(5), BLOCKS)
            while time.monotonic() < begin + 5 * SCAN:
                await asyncio.sleep(SCAN)
            assert "later" not in two.pools, "it looks no more"

    run(work())
