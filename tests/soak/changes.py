"""Changes of pools, one at a time and many at once, waited for, left, cancelled; the table is told of them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tests.soak.caller import ANSWER_SECONDS, Caller, Reply
from tests.soak.questions import STEADY
from tests.soak.table import Episode, PoolTable

# Busy with another change, no room, too many waiting, cancelled by somebody, made by the one before.
MAY = frozenset({200, 202, 404, 409, 413, 429, 499, 503})
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"pattern": "self"},
    {"pattern": "sink+self"},
    {"positions": "local", "pattern": "self"},
    {"grouping": "random", "seed": 3},
    {"system": "be brief"},
    {"separator": "\n"},
)


def path(name: str) -> str:
    return f"/v1/pools/{name}"


class Changes:
    """Clients with the admin key who change pools. One episode of a pool at a time, of any number of requests."""

    def __init__(self, caller: Caller, table: PoolTable, names: tuple[str, ...], unpinned: frozenset[str]) -> None:
        self.caller, self.table, self.names, self.unpinned = caller, table, names, unpinned
        self.journal = caller.journal
        self._busy: set[str] = set()
        self._last: dict[str, dict[str, Any]] = {}  # the body of the last PUT, to be put again

    async def put_steady(self) -> None:
        """The pool that nobody changes."""
        episode = self.table.begin(STEADY)
        demonstrations = self.table.demonstrations(STEADY, 24, 11, 3)
        body = {"demonstrations": demonstrations, "block_size": 6}
        reply = await self._send(episode, "put", "PUT", path(STEADY), {200}, json=body)
        self.table.end(episode, reply.json() if reply else None)

    async def put_all(self, dice: random.Random) -> None:
        """Every pool once, before the storm."""
        for name in self.names:
            await self._within(name, lambda episode: self._put(episode, dice))

    async def delete_all(self) -> None:
        """No pool is left but the steady one."""
        for name in self.names:
            await self._within(name, self._delete)

    async def episode(self, dice: random.Random) -> None:
        """Some changes of a pool that nobody else is changing."""
        free = [name for name in self.names if name not in self._busy]
        if not free:
            return
        ways: list[tuple[int, Callable[[Episode, random.Random], Awaitable[None]]]] = [
            (8, self._put),
            (3, self._put_again),
            (4, self._append),
            (4, self._delete_one),
            (2, lambda episode, _: self._delete(episode)),
            (5, self._leave_put),
            (2, self._leave_append),
            (3, self._cancel_storm),
            (2, self._put_and_cancel),
            (2, self._rivals),
            (2, self._put_and_delete),
            (2, self._put_and_flush),
            (1, self._flush),
        ]
        (way,) = dice.choices([way for _, way in ways], [weight for weight, _ in ways])
        await self._within(dice.choice(free), lambda episode: way(episode, dice))

    # ---- an episode ----

    async def _within(self, name: str, work: Callable[[Episode], Awaitable[None]]) -> None:
        if name in self._busy:
            return
        self._busy.add(name)
        episode = self.table.begin(name)
        info: dict[str, Any] | None = None
        try:
            await work(episode)
            info = await self._settled(name)
        finally:
            self.table.end(episode, info)
            self._busy.discard(name)

    async def _settled(self, name: str) -> dict[str, Any] | None:
        """The pool when no change of it is under way any more; None: there is none."""
        end = time.monotonic() + ANSWER_SECONDS
        while True:
            reply = await self.caller.call("show", "GET", path(name), {200, 404}, key="admin")
            if reply is None or reply.status == 404:
                return None
            info: dict[str, Any] = reply.json()
            if info["status"] != "encoding":
                return info if info["version"] else None
            if time.monotonic() > end:
                self.journal.fail(f"pool {name!r} is being encoded for ever: {reply.text[:400]}")
                return info if info["version"] else None
            await asyncio.sleep(0.05)

    async def _send(
        self, episode: Episode, kind: str, method: str, where: str, expect: Any = MAY, **kwargs: Any
    ) -> Reply | None:
        self.table.offer(episode, kwargs.get("json", {}).get("demonstrations", ()))
        reply = await self.caller.call(kind, method, where, expect, key="admin", **kwargs)
        if reply is not None and reply.status in (200, 202) and kind != "delete":
            self.table.saw(episode, reply.json())
        return reply

    def _body(self, episode: Episode, dice: random.Random) -> dict[str, Any]:
        name = episode.name
        demonstrations = self.table.demonstrations(
            name, dice.choice([6, 12, 24, 32]), dice.randrange(4), dice.randint(2, 4)
        )
        options = {"block_size": dice.choice([3, 6, 10]), "pinned": name not in self.unpinned, **dice.choice(OPTIONS)}
        return {"demonstrations": demonstrations, **options}

    # ---- changes, one at a time ----

    async def _put(self, episode: Episode, dice: random.Random) -> None:
        body = self._body(episode, dice)
        reply = await self._send(episode, "put", "PUT", path(episode.name), json=body | {"wait": dice.random() < 0.7})
        if reply is not None and reply.status == 200:
            self._last[episode.name] = body

    async def _put_again(self, episode: Episode, dice: random.Random) -> None:
        """The same pool once more: its blocks may be there."""
        body = self._last.get(episode.name)
        if body is not None:
            await self._send(episode, "put again", "PUT", path(episode.name), json=body)
        else:
            await self._put(episode, dice)

    async def _append(self, episode: Episode, dice: random.Random) -> None:
        demonstrations = self.table.demonstrations(episode.name, 4, dice.randrange(4, 8), 2)
        where = path(episode.name) + "/demonstrations"
        await self._send(episode, "append", "POST", where, json={"demonstrations": demonstrations})

    async def _delete_one(self, episode: Episode, dice: random.Random) -> None:
        query = f"?purge={'true' if dice.random() < 0.5 else 'false'}"
        where = f"{path(episode.name)}/demonstrations/d{dice.randrange(12)}{query}"
        await self._send(episode, "delete a demonstration", "DELETE", where)

    async def _delete(self, episode: Episode) -> None:
        await self._send(episode, "delete", "DELETE", path(episode.name))

    async def _leave_put(self, episode: Episode, dice: random.Random) -> None:
        """The client of a PUT hangs up."""
        await self._leave(episode, dice, "left PUT", "PUT", path(episode.name), self._body(episode, dice))

    async def _leave_append(self, episode: Episode, dice: random.Random) -> None:
        body = {"demonstrations": self.table.demonstrations(episode.name, 12, dice.randrange(4, 8), 2)}
        await self._leave(episode, dice, "left append", "POST", path(episode.name) + "/demonstrations", body)

    async def _leave(
        self, episode: Episode, dice: random.Random, kind: str, method: str, where: str, body: dict[str, Any]
    ) -> None:
        self.table.offer(episode, body["demonstrations"])
        reply = await self.caller.leave(kind, method, where, dice.random() ** 2 * 0.5, key="admin", json=body)
        if reply is not None and reply.status == 200:
            self.table.saw(episode, reply.json())
        elif reply is not None and reply.status not in MAY:
            self.journal.fail(f"{kind}: {reply.status} {reply.text[:300]}")

    # ---- changes at once ----

    async def _cancel_storm(self, episode: Episode, dice: random.Random) -> None:
        """One PUT while three clients cancel it again and again."""
        made = asyncio.ensure_future(self._put(episode, dice))

        async def cancel() -> None:
            for _ in range(40):
                await self._send(episode, "cancel", "POST", path(episode.name) + "/cancel")
                if made.done():
                    return

        await asyncio.gather(made, *(cancel() for _ in range(3)))

    async def _put_and_cancel(self, episode: Episode, dice: random.Random) -> None:
        made = asyncio.ensure_future(self._put(episode, dice))
        await asyncio.sleep(dice.random() * 0.3)
        await self._send(episode, "cancel", "POST", path(episode.name) + "/cancel")
        await made

    async def _rivals(self, episode: Episode, dice: random.Random) -> None:
        """Two PUTs and an append at once."""
        await asyncio.gather(self._put(episode, dice), self._put(episode, dice), self._append(episode, dice))

    async def _put_and_delete(self, episode: Episode, dice: random.Random) -> None:
        made = asyncio.ensure_future(self._put(episode, dice))
        await asyncio.sleep(dice.random() * 0.3)
        await self._delete(episode)
        await made

    async def _put_and_flush(self, episode: Episode, dice: random.Random) -> None:
        made = asyncio.ensure_future(self._put(episode, dice))
        await asyncio.sleep(dice.random() * 0.2)
        await self._flush(episode, dice)
        await made

    async def _flush(self, _episode: Episode, dice: random.Random) -> None:
        """SGLang empties the cache when nothing runs, and says no (400) else."""
        query = {"timeout": dice.choice([0, 0, 1])}
        await self.caller.call("flush_cache", "POST", "/flush_cache", {200, 400}, key="admin", params=query)
