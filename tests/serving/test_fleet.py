"""Two servers on one folder: one change of two wins everywhere, and what is served is what the folder has.

Their schedulers are imitated, and let go of control at random points; both run on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.serving.errors import PoolError, UnknownPool
from sglang_ext.serving.fleet import SharedFolder
from sglang_ext.serving.layouts import ChatHeader
from sglang_ext.serving.pools import PoolService
from sglang_ext.serving.versions import VersionStore
from tests.oracle import models
from tests.serving.imitated import Service, quiet
from tests.serving.test_pool_life import NAMES, Client, check_books

SCAN = 0.02
LEAVES = 0.05  # of the clients in the storm; what they ask for waits for the disk, too
SETTINGS: dict[str, Any] = {"pool_scan_seconds": SCAN, "max_version_seconds": 1}
BLOCKS = {"block_size": 3, "positions": "local"}


@contextlib.asynccontextmanager
async def servers(manager: Any, folder: Path, seed: int = 0, count: int = 2) -> AsyncIterator[list[Service]]:
    """Servers on one folder, which have looked into it; they are stopped at the end."""
    found = [Service(manager, random.Random(f"{seed} {number}"), str(folder)) for number in range(count)]
    try:
        for each in found:
            await each.restored()
        yield found
    finally:
        for each in found:
            await stop(each)


async def stop(service: PoolService) -> None:
    """End the server's looking, as its end would."""
    assert isinstance(service.folder, SharedFolder) and service.folder._watching is not None
    service.folder._watching.cancel()
    await quiet(service)  # type: ignore[arg-type]


def run(work: Awaitable[None], seconds: float = 60) -> None:
    asyncio.run(asyncio.wait_for(work, seconds))


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_EXT_SETTINGS", json.dumps(SETTINGS))


async def until(condition: Callable[[], object], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(SCAN / 4)


def at(service: PoolService, name: str) -> int:
    """The version that is served; 0 for none."""
    pool = service.pools.get(name)
    return pool.current.number if pool is not None and pool.current is not None else 0


def inputs(service: PoolService, name: str) -> list[str]:
    return [item.input for item in service.version(name).definition.live()]


def demos(count: int, seed: int = 0) -> list[dict[str, Any]]:
    return models.demonstrations(count, seed=seed)


# --------------------------------------------------------------------------- put here, served there


def test_a_pool_is_encoded_where_it_is_needed(manager: Any, tmp_path: Path) -> None:
    async def work() -> None:
        async with servers(manager, tmp_path) as (one, two):
            info = await one.put("a", demos(7), BLOCKS)
            assert (info["version"], info["newest"], info["status"]) == (1, 1, "ready")
            version = await two.needed("a")  # it looks for a name that it does not know
            assert version.number == 1 and version.definition.dump() == one.version("a").definition.dump()
            await one.put("b", demos(3), BLOCKS)
            await until(lambda: "b" in two.pools)
            assert two.list()[1]["status"] == "stored" and two.list()[1]["newest"] == 1 and at(two, "b") == 0
            answers = await asyncio.gather(*(two.needed("b") for _ in range(5)))
            assert len({id(each) for each in answers}) == 1, "it is encoded once"
            with pytest.raises(UnknownPool):
                await two.needed("c")

    run(work())


def test_a_pool_is_encoded_at_once_where_that_is_set(
    manager: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_EXT_SETTINGS", json.dumps({**SETTINGS, "encode_at_once": True}))

    async def work() -> None:
        async with servers(manager, tmp_path) as (one, two):
            await one.put("a", demos(7), BLOCKS)
            await until(lambda: at(two, "a") == 1)
        async with servers(manager, tmp_path, count=1) as (again,):  # and after a restart
            await until(lambda: at(again, "a") == 1)

    run(work())


def test_a_served_pool_follows_changes(manager: Any, tmp_path: Path) -> None:
    async def work() -> None:
        async with servers(manager, tmp_path) as (one, two):
            await one.put("a", demos(7), BLOCKS)
            before = await two.needed("a")
            two.lease(before)
            await one.put("a", demos(9, 1), BLOCKS)
            await until(lambda: at(two, "a") == 2)
            assert two.version("a@1") is before, "a request runs on it"
            (line,) = two.list()
            assert [each["version"] for each in line["versions"]] == [1, 2]
            assert line["versions"][0] == {"version": 1, "requests": 1, "requests_in_flight": 1}
            two.end_lease(before)
            with pytest.raises(PoolError, match="version 1 of pool 'a' is not served here, it is at version 2") as told:
                await two.needed("a@1")
            assert told.value.status_code == 409
            await one.append("a", [{"id": "new", "input": "one more", "output": "y"}])
            await until(lambda: at(two, "a") == 3)
            assert inputs(one, "a") == inputs(two, "a") and "one more" in inputs(two, "a")
            await one.delete_demonstration("a", "new", purge=True)
            await until(lambda: at(two, "a") == 4)
            assert "one more" not in inputs(two, "a")

    run(work())


def test_a_change_replaces_the_newest_version(manager: Any, tmp_path: Path) -> None:
    """Also one that this server has not seen, or not encoded: no change is lost."""

    async def work() -> None:
        async with servers(manager, tmp_path) as (one, two):
            await one.put("a", demos(7), BLOCKS)
            for number in range(6):
                server = (two, one)[number % 2]
                added = [{"id": f"n{number}", "input": f"new {number}", "output": "y"}]
                assert (await server.append("a", added))["version"] == number + 2
            assert {f"new {number}" for number in range(6)} <= set(inputs(one, "a"))
            assert (await two.put("a", demos(3), BLOCKS))["version"] == 8
            with pytest.raises(PoolError, match="no demonstration 'n0'"):
                await one.delete_demonstration("a", "n0")

    run(work())


def test_a_deletion_is_seen_and_numbers_go_on(manager: Any, tmp_path: Path) -> None:
    async def work() -> None:
        async with servers(manager, tmp_path) as (one, two):
            await one.put("a", demos(7), BLOCKS)
            running = await two.needed("a")
            two.lease(running)
            await one.delete("a")
            await until(lambda: "a" not in two.pools)
            assert running.users == 1 and set(two.schedulers.owners) and running.retired
            two.end_lease(running)
            with pytest.raises(UnknownPool):
                await one.delete("a")
            assert (await two.put("a", demos(3), BLOCKS))["version"] == 3, "1 and 2, the deletion, are taken"
            assert (await one.needed("a@3")).number == 3
        assert [path.name for path in sorted(tmp_path.iterdir())] == ["a@1.json", "a@2.json", "a@3.json"]

    run(work())


def test_a_named_version_is_waited_for(manager: Any, tmp_path: Path) -> None:
    async def work() -> None:
        async with servers(manager, tmp_path) as (one, two):
            await one.put("a", demos(3), BLOCKS)
            await two.needed("a")
            waiting = asyncio.ensure_future(two.needed("a@2"))
            new = asyncio.ensure_future(two.needed("b@1"))
            await asyncio.sleep(5 * SCAN)
            assert not waiting.done() and not new.done()
            await one.put("a", demos(7), BLOCKS)
            await one.put("b", demos(3), BLOCKS)
            assert (await waiting).number == 2 and (await new).number == 1
            begin = time.monotonic()
            with pytest.raises(PoolError, match="--max-version-seconds") as told:
                await two.needed("a@3")
            assert told.value.status_code == 409 and 1 <= time.monotonic() - begin < 5
            with pytest.raises(ValueError, match="names have no '@'"):
                await two.needed("a@x")

    run(work())


def test_a_chat_is_not_answered_by_another_version_than_it_was_rendered_for(manager: Any, tmp_path: Path) -> None:
    async def work() -> None:
        async with servers(manager, tmp_path, count=1) as (one,):
            await one.put("a", demos(3), BLOCKS)
            header = ChatHeader((1, 2), one.version("a").definition.options)
            assert await one.layouts.variant(one.version("a"), header) == "chat"
            await one.append("a", [{"id": "new", "input": "one more", "output": "y"}])
            assert await one.layouts.variant(one.version("a"), header) == "chat"
            await one.put("a", demos(3), {**BLOCKS, "template": "Q: {input} A: {output}"})
            with pytest.raises(PoolError, match="replaced while the chat was rendered") as told:
                await one.layouts.variant(one.version("a"), header)
            assert told.value.status_code == 409

    run(work())


# --------------------------------------------------------------------------- changes at once


def test_of_two_changes_at_once_one_wins_everywhere(manager: Any, tmp_path: Path) -> None:
    changes: dict[str, Callable[[Service, int], Awaitable[Any]]] = {
        "put": lambda server, n: server.put("a", demos(4, n % 5), BLOCKS),
        "append": lambda server, n: server.append("a", [{"id": f"x{n}", "input": f"new {n}", "output": "y"}]),
        "purge": lambda server, _: server.delete_demonstration("a", "d1", purge=True),
        "delete": lambda server, _: server.delete("a"),
    }

    async def work() -> None:
        conflicts = 0
        async with servers(manager, tmp_path) as both:
            for each in both:
                each.fails = 0.0
            for number in range(40):
                await both[0].put("a", demos(6), BLOCKS)
                await both[1].needed("a")
                await both[1].folder.look()
                first = VersionStore(tmp_path).newest()["a"]
                await until(lambda n=first: [at(each, "a") for each in both] == [n, n])
                kinds = random.Random(number).choices(sorted(changes), k=2)
                pairs = zip(kinds, both, strict=True)
                told = await asyncio.gather(
                    *(changes[kind](server, 2 * number + place) for place, (kind, server) in enumerate(pairs)),
                    return_exceptions=True,
                )
                refused = [each for each in told if isinstance(each, BaseException)]
                made = VersionStore(tmp_path).newest()["a"] - first
                # Where they did not meet, the second one knew of the first.
                assert made == 2 - len(refused) and made >= 1, (kinds, told)
                for each in refused:
                    assert isinstance(each, PoolError) and each.status_code in (404, 409), each
                conflicts += any("at the same time" in str(each) for each in refused)
                for each in both:
                    await each.folder.look()
                if "a" in both[0].pools:
                    both_at = [(await each.needed("a")).definition.dump() for each in both]
                    await until(lambda: at(both[0], "a") == at(both[1], "a"))
                    both_at = [each.version("a").definition.dump() for each in both]
                    assert both_at[0] == both_at[1]
                else:
                    assert "a" not in both[1].pools
        assert conflicts > 10, "they hardly ever met"

    run(work())


@pytest.mark.parametrize("first", range(0, 9, 3))
def test_a_storm_on_two_servers_leaves_what_the_folder_has(manager: Any, tmp_path: Path, first: int) -> None:
    """Everything ends, books balance, a number means one definition everywhere, and both serve the newest."""

    made = 0

    async def work(seed: int) -> None:
        nonlocal made
        folder = tmp_path / str(seed)
        meant: dict[tuple[str, int], Any] = {}
        async with servers(manager, folder, seed) as both:
            for server in both:
                switch = server._switch

                async def noted(pool: Any, version: Any, *args: Any, _switch: Any = switch) -> None:
                    dumped = version.definition.dump()
                    assert meant.setdefault((version.name, version.number), dumped) == dumped
                    assert pool.current is None or pool.current.number < version.number, "an older one takes its place"
                    await _switch(pool, version, *args)

                server._switch = noted  # type: ignore[method-assign]
            clients = [
                Client(server, random.Random(f"{seed} {number} {place}"), 10 * place + number, 40, LEAVES)
                for place, server in enumerate(both)
                for number in range(3)
            ]
            await asyncio.gather(*(client.live() for client in clients))
            for server in both:
                server.fails = 0.0
                await quiet(server)
            for server in both:
                await server.folder.look()
                await until(lambda each=server: not each.folder._failed)
                for name in list(server.pools):
                    with contextlib.suppress(PoolError):  # a pool whose first change failed is no pool
                        await server.needed(name)
                await quiet(server)
                check_books(server)
            store = VersionStore(folder)
            for name, number in store.newest().items():
                kept = store.read(name, number)
                for server in both:
                    pool = server.pools.get(name)
                    if pool is not None and "tokens of KV cache" in (pool.failure or ""):
                        continue  # the storm may leave more than fits
                    assert at(server, name) == (0 if kept is None else number), (name, pool)
                    if kept is not None:
                        assert server.version(name).definition.dump() == kept
        made += len(meant)

    for seed in range(first, first + 3):
        run(work(seed))
    assert made > 40, "hardly anything was made: the storm tests nothing"


def test_the_storm_knows_more_than_one_pool() -> None:
    assert len(NAMES) > 1


# --------------------------------------------------------------------------- faults


def test_a_full_disk_changes_nothing_and_says_so(manager: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with servers(manager, tmp_path) as (one, two):
            await one.put("a", demos(3), BLOCKS)
            await two.needed("a")

            def fail(*_args: Any) -> None:
                raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path))

            with monkeypatch.context() as patched:
                patched.setattr(os, "fsync", fail)
                for change in (one.put("a", demos(7), BLOCKS), one.put("b", demos(7), BLOCKS), one.delete("a")):
                    with pytest.raises(PoolError, match=r"cannot be written .*No space left on device.*make room") as e:
                        await change
                    assert e.value.status_code == 503 and str(tmp_path) not in str(e.value)
            for server in (one, two):
                assert at(server, "a") == 1 and "b" not in server.pools
            assert (await one.put("a", demos(7), BLOCKS))["version"] == 2
            assert (await two.needed("a@2")).number == 2

    run(work())


def test_a_version_that_cannot_be_read_here_is_not_replaced_by_an_older_one(manager: Any, tmp_path: Path) -> None:
    async def work() -> None:
        async with servers(manager, tmp_path) as (one, two):
            await one.put("a", demos(3), BLOCKS)
            await two.needed("a")
            path = tmp_path / "a@2.json"
            path.write_text('{"format": 2, "name": "a"', encoding="utf-8")
            await until(lambda: two.pools["a"].failure is not None)
            for asked in ("a", "a@2"):
                with pytest.raises(PoolError, match=r"a@2\.json is not a pool definition.*put it again") as told:
                    await two.needed(asked)
                assert told.value.status_code == 503 and str(tmp_path) not in str(told.value)
            (problem,) = two.folder.damaged
            assert str(path) in problem and path.exists()  # for operators
            assert "a@2.json" in two.list()[0]["error"] and str(tmp_path) not in two.list()[0]["error"]
            text = (tmp_path / "a@1.json").read_text(encoding="utf-8").replace('"version": 1', '"version": 2')
            path.write_text(text, encoding="utf-8")  # it is mended
            await until(lambda: "a" not in two.folder._failed)
            assert (await two.needed("a")).number == 2 and two.folder.damaged == []
            path = tmp_path / "a@3.json"
            path.write_text("{", encoding="utf-8")
            await until(lambda: two.pools["a"].failure is not None)
            info = await two.put("a", demos(5), BLOCKS)
            assert (info["version"], info["error"]) == (4, None) and two.folder.damaged == []
            assert (await one.needed("a@4")).number == 4

    run(work())


def test_a_file_that_is_not_shown_yet_is_waited_for(
    manager: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS may show a name before the file: the version that is served stays, and the new one comes later."""

    async def work() -> None:
        async with servers(manager, tmp_path) as (one, two):
            await one.put("a", demos(3), BLOCKS)
            await two.needed("a")

            def stale(*_args: Any) -> None:
                raise OSError(errno.ESTALE, "Stale file handle", str(tmp_path))

            with monkeypatch.context() as patched:
                patched.setattr(two.folder._store, "read", stale)
                await one.put("a", demos(7), BLOCKS)
                await until(lambda: two.folder.damaged)
                assert (await two.needed("a")).number == 1 and "(Stale file handle)" in two.folder.damaged[0]
            await until(lambda: at(two, "a") == 2)
            assert two.folder.damaged == []

    run(work())


def test_a_version_that_was_seen_and_cannot_be_read_again_is_not_passed_over(
    manager: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request that names it is answered from an older one, and no change is made of an older one."""

    async def work() -> None:
        async with servers(manager, tmp_path) as (one, two):
            await one.put("a", demos(3), BLOCKS)
            await two.needed("a")
            store, reads = two.folder._store, []

            def once(name: str, number: int) -> Any:
                reads.append(number)
                if len(reads) > 1:
                    raise OSError(errno.EIO, "Input/output error")
                return type(store).read(store, name, number)

            with monkeypatch.context() as patched:
                patched.setattr(store, "read", once)
                await one.put("a", demos(7), BLOCKS)
                await until(lambda: two.pools["a"].failure)
                assert (await two.needed("a")).number == 1
                with pytest.raises(PoolError, match="Input/output error") as named:
                    await two.needed("a@2")
                with pytest.raises(PoolError, match="Input/output error") as changed:
                    await two.append("a", demos(1, 50))
                assert named.value.status_code == changed.value.status_code == 503
            await until(lambda: at(two, "a") == 2)
            assert len(inputs(one, "a")) == len(inputs(two, "a")) == 7

    run(work())


def test_a_folder_that_cannot_be_read_leaves_what_was_seen(
    manager: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with servers(manager, tmp_path) as (one, two):
            await one.put("a", demos(3), BLOCKS)
            await two.needed("a")

            def fail(*_args: Any) -> None:
                raise OSError(errno.EIO, "Input/output error")

            with monkeypatch.context() as patched:
                patched.setattr(two.folder._store, "newest", fail)
                await until(lambda: two.folder.damaged)
                assert "Input/output error" in two.folder.damaged[0]
                assert (await two.needed("a")).number == 1
            await until(lambda: not two.folder.damaged)

    run(work())


def test_a_pool_that_does_not_fit_here_is_refused_here(
    manager: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with servers(manager, tmp_path) as (one, two):
            await one.put("a", demos(3), BLOCKS)
            await two.needed("a")
            answer = two.schedulers.answer
            small = lambda op, payload: {**answer(op, payload), **({"total_tokens": 300} if op == "state" else {})}  # noqa: E731
            monkeypatch.setattr(two.schedulers, "answer", small)
            await one.put("a", demos(30), BLOCKS)
            await until(lambda: two.pools["a"].failure is not None)
            assert at(two, "a") == 0, "version 1 was replaced: it is not what was asked for"
            with pytest.raises(PoolError, match=r"version 2 .* cannot be served here: .* tokens of KV cache") as told:
                await two.needed("a")
            assert told.value.status_code == 503 and (await one.needed("a")).number == 2
            await one.put("a", demos(4), BLOCKS)
            assert (await two.needed("a@3")).number == 3 and two.pools["a"].failure is None

    run(work())


# --------------------------------------------------------------------------- start


def test_servers_take_over_the_folder_of_one(manager: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def alone() -> Any:
        monkeypatch.delenv("SGLANG_EXT_SETTINGS")
        server = Service(manager, random.Random(0), str(tmp_path))
        for seed in range(3):
            await server.put("a", demos(4 + seed, seed), BLOCKS)
        return server.version("a").definition.dump()

    async def together(before: Any) -> None:
        monkeypatch.setenv("SGLANG_EXT_SETTINGS", json.dumps(SETTINGS))
        async with servers(manager, tmp_path) as both:
            for each in both:
                version = await each.needed("a@3")
                assert version.definition.dump() == before
            assert (await both[1].put("a", demos(3), BLOCKS))["version"] == 4
            assert (await both[0].needed("a@4")).number == 4
        async with servers(manager, tmp_path, count=1) as (again,):
            assert (await again.needed("a")).number == 4, "not what the one server had"

    before = asyncio.run(alone())
    run(together(before))
    monkeypatch.delenv("SGLANG_EXT_SETTINGS")
    with pytest.raises(ValueError, match="is a folder that servers share"):
        PoolService(manager, str(tmp_path))


def test_a_strict_server_refuses_a_damaged_folder(
    manager: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a@1.json").write_text("{", encoding="utf-8")
    PoolService(manager, str(tmp_path))
    monkeypatch.setenv("SGLANG_EXT_SETTINGS", json.dumps({**SETTINGS, "strict_pool_dir": True}))
    with pytest.raises(ValueError, match=r"a@1\.json is not a pool definition.*mend them or move them away"):
        PoolService(manager, str(tmp_path))


def test_settings_that_do_not_go_together_are_refused(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="without --pool-dir"):
        PoolService(manager, None)
    for wrong in (0, -1, 3601):
        monkeypatch.setenv("SGLANG_EXT_SETTINGS", json.dumps({"pool_scan_seconds": wrong}))
        with pytest.raises(ValueError, match="expected a number of seconds above 0"):
            PoolService(manager, None)
