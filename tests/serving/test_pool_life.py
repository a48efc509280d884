"""Pools are put, changed, deleted, cancelled, flushed and left at any moment: everything ends, and the books balance.

Clients run against schedulers that are imitated here, which let go of control at random points. A seed is one order of
events; it can be run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.config import RequestOptions
from sglang_ext.serving.errors import BlocksLost, PoolError
from sglang_ext.serving.pool import COMPLETION
from sglang_ext.serving.store import PoolStore
from tests.oracle import models
from tests.serving.imitated import Service, quiet

NAMES = ("a", "b", "c")
CLIENTS, STEPS, SEEDS = 5, 8, 150


class Client:
    """One that does everything, `steps` times, and in a share of them (`leaves`) goes away in the middle."""

    def __init__(
        self, service: Service, dice: random.Random, number: int, steps: int = STEPS, leaves: float = 0.25
    ) -> None:
        self.service, self.dice, self.number, self.steps, self.leaves = service, dice, number, steps, leaves
        self.count = itertools.count()

    async def live(self) -> None:
        for _ in range(self.steps):
            action = self.act()
            task = asyncio.ensure_future(action)
            if self.dice.random() < self.leaves:  # it goes away
                for _ in range(self.dice.randint(0, 40)):
                    await asyncio.sleep(0)
                task.cancel()
            with contextlib.suppress(PoolError, asyncio.CancelledError):
                await task
            await asyncio.sleep(0)

    async def act(self) -> None:
        dice, service, name = self.dice, self.service, self.dice.choice(NAMES)
        wait = dice.random() < 0.7
        what = dice.choices(
            ["put", "append", "less", "delete", "cancel", "flush", "ask", "many"], [6, 3, 2, 2, 5, 1, 4, 1]
        )[0]
        if what in ("put", "many"):
            items = models.demonstrations(400 if what == "many" else dice.choice([3, 7, 12]), seed=dice.randint(0, 3))
            options = {"block_size": 3, "pinned": dice.random() < 0.7, "positions": "local"}
            await service.put(name, items, options, wait)
        elif what == "append":
            mine = [{**each, "id": f"{self.number}-{next(self.count)}"} for each in models.demonstrations(2)]
            await service.append(name, mine, wait)
        elif what == "less":
            await service.delete_demonstration(name, f"d{dice.randint(0, 3)}", dice.random() < 0.5, wait)
        elif what == "delete":
            await service.delete(name)
            found = service.pools.get(name)  # another client has put it again, and a third may be deleting it by now
            assert found is None or found.deletion is None or not found.deletion.done()
        elif what == "cancel":
            await service.cancel(name)
        elif what == "flush":
            service.flush()
        else:
            await self.ask(name)

    async def ask(self, name: str) -> None:
        """A question: its version is leased, and its blocks are held, until it is answered."""
        service, owner = self.service, f"request:{self.number}-{next(self.count)}"
        version = service.version(name)
        service.lease(version)
        holds = not version.definition.options.pinned
        try:
            await service.encoder.ensure(version, "completion", version.layouts["completion"], [0], owner)
            await service.turns()
        finally:
            service.end_lease(version)
            if holds:
                service.channel.release_later(owner)


async def storm(service: Service, seed: int) -> None:
    clients = [Client(service, random.Random(f"{seed} {number}"), number) for number in range(CLIENTS)]
    await asyncio.gather(*(client.live() for client in clients))
    await quiet(service)


def check_books(service: Service) -> None:
    """Nothing is under way, and what is held is what pinned pools hold."""
    assert not service.encoder.promised and service.queue.taken == 0
    for pool in service.pools.values():
        assert pool.change is None and pool.deletion is None
        assert pool.current is not None or pool.error, "a pool without a version was left behind"
    current = {pool.current.owner: pool for pool in service.pools.values() if pool.current is not None}
    for key, owners in service.schedulers.owners.items():
        assert owners <= set(current), f"block {key} is held by {owners - set(current)}, which serve nothing"
    for pool in service.pools.values():
        version = pool.current
        if version is not None:
            assert version.users == 0 and not version.retired
            for variant in version.resident:
                for block in version.layouts[variant].blocks:
                    assert version.owner in service.schedulers.owners[block.key]


@pytest.mark.parametrize("first", range(0, SEEDS, 25))
def test_everything_ends_and_the_books_balance(manager: Any, first: int) -> None:
    changes = 0
    for seed in range(first, first + 25):
        service = Service(manager, random.Random(seed), None)
        asyncio.run(asyncio.wait_for(storm(service, seed), 60))
        check_books(service)
        changes += sum(pool.versions for pool in service.pools.values())
    assert changes > 25, "hardly anything was made: the storm tests nothing"


def test_what_is_on_disk_is_what_is_served(manager: Any, tmp_path: Path) -> None:
    for seed in range(12):
        folder = tmp_path / str(seed)
        service = Service(manager, random.Random(seed), str(folder))
        asyncio.run(asyncio.wait_for(storm(service, seed), 60))
        check_books(service)
        served = {name: pool.current for name, pool in service.pools.items() if pool.current is not None}
        stored, damaged = PoolStore(folder).load(strict=True)
        assert not damaged
        assert {name: each.version for name, each in stored.items()} == {n: v.number for n, v in served.items()}
        assert {n: each.definition for n, each in stored.items()} == {n: v.definition.dump() for n, v in served.items()}


def test_a_change_that_is_cancelled_before_its_first_step_ends(manager: Any) -> None:
    """Its task never runs: who waits must be told all the same."""

    async def run() -> None:
        service = Service(manager, random.Random(0), None)
        putting = asyncio.ensure_future(service.put("a", models.demonstrations(3), {}))
        await asyncio.sleep(0)
        while "a" not in service.pools:
            await asyncio.sleep(0)
        ends = [asyncio.ensure_future(service.cancel("a")) for _ in range(3)]
        with pytest.raises(PoolError, match="cancelled"):
            await putting
        await asyncio.gather(*ends)
        await quiet(service)
        assert not service.pools and service.queue.taken == 0

    asyncio.run(asyncio.wait_for(run(), 20))


def test_the_queue_of_changes_is_bounded(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_EXT_SETTINGS", '{"max_waiting_encodings": 2}')

    async def run() -> list[Any]:
        service = Service(manager, random.Random(0), None)
        puts = [service.put(f"p{number}", models.demonstrations(3, number), {}) for number in range(6)]
        found = await asyncio.gather(*puts, return_exceptions=True)
        await quiet(service)
        await service.put("later", models.demonstrations(3), {})
        return found

    found = asyncio.run(asyncio.wait_for(run(), 20))
    refused = [each for each in found if isinstance(each, PoolError)]
    assert len(refused) == 3
    assert all(each.status_code == 429 and "--max-waiting-encodings 2" in str(each) for each in refused)


def test_a_retriever_is_there_when_the_pool_is(manager: Any) -> None:
    async def run() -> None:
        service = Service(manager, random.Random(0), None)
        await service.put("a", models.demonstrations(9), {"block_size": 3})
        assert service.version("a").has_retriever(RequestOptions("a"))

    asyncio.run(run())


def test_a_flush_behind_the_look_at_what_is_missing_is_noticed(manager: Any) -> None:
    """All blocks of the new version were there when they were looked up, so none of them is encoded."""

    async def run() -> None:
        service = Service(manager, random.Random(0), None)
        service.fails = 0.0
        items = models.demonstrations(9)
        await service.put("a", items, {"block_size": 3})
        promise = service.encoder.promise

        async def then_flushed(*args: Any) -> None:
            await promise(*args)
            service.flush()

        service.encoder.promise = then_flushed  # type: ignore[method-assign]
        await service.put("a", items, {"block_size": 3})
        check_books(service)
        version = service.version("a")
        assert version.number == 2 and not version.resident
        assert not await service.encoder.ensure(version, COMPLETION, version.layouts[COMPLETION], [0], "request:1")
        assert version.resident == {COMPLETION} and len(service.schedulers.tokens) == 3
        await quiet(service)
        check_books(service)

    asyncio.run(run())


def test_a_flush_behind_a_second_look_is_noticed(manager: Any) -> None:
    """The look that follows a loss, of a pool whose blocks attend to none: no encoding finds what is gone."""

    async def run() -> None:
        service = Service(manager, random.Random(0), None)
        service.fails = 0.0
        items, options = models.demonstrations(9), {"block_size": 3, "pattern": "self"}
        await service.put("a", items[:6], options)
        encode, look, lost = service.encoder._encode_run, service.encoder.missing, [BlocksLost()]

        async def once_in_vain(run: Any) -> None:
            if lost:
                raise lost.pop()
            await encode(run)

        async def then_flushed(version: Any) -> Any:
            found = await look(version)
            if not lost:
                service.flush()
            return found

        service.encoder._encode_run, service.encoder.missing = once_in_vain, then_flushed  # type: ignore[method-assign]
        await service.append("a", items[6:])
        check_books(service)
        assert service.version("a").number == 2 and not service.version("a").resident
        await quiet(service)

    asyncio.run(run())


def test_a_change_that_was_waited_for_is_answered_as_made(manager: Any) -> None:
    """Also where the next one has begun before the answer is composed: with `encoding`, HTTP would answer 202."""

    async def run() -> None:
        service = Service(manager, random.Random(0), None)
        service.fails = 0.0
        items, options = models.demonstrations(9), {"block_size": 3}

        async def as_soon_as_it_may() -> Any:
            while (pool := service.pools.get("a")) is None or pool.current is None or pool.change is not None:
                await asyncio.sleep(0)
            return await service.put("a", items, options)

        answers = await asyncio.gather(service.put("a", items[:6], options), as_soon_as_it_may())
        assert [(each["version"], each["status"]) for each in answers] == [(1, "ready"), (2, "ready")]
        await quiet(service)

    asyncio.run(run())
