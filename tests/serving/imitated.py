"""Schedulers that are imitated, and the pools of a server beside them, without a server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any

from sglang_ext.serving.errors import BlocksLost, PoolError
from sglang_ext.serving.pools import PoolService

TOTAL = 2000


class Schedulers:
    """What the schedulers hold: blocks by name, each with its length and its owners."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        self.owners: dict[str, set[str]] = {}

    def held(self) -> int:
        return sum(self.tokens[key] for key, owners in self.owners.items() if owners)

    def answer(self, op: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        keys, owner = payload.get("keys"), payload.get("owner", "")
        if op == "state":
            return {
                "total_tokens": TOTAL, "held_tokens": self.held(), "held_by_pools": self.held(), "bytes_per_token": 1,
                "max_req_input_len": 10**6, "chunked_prefill_size": 64,
            }  # fmt: skip
        if op == "hold":
            for key in keys or ():
                if key in self.tokens:
                    self.owners[key].add(owner)
            return {"missing": [key for key in keys or () if key not in self.tokens]}
        if op == "release":
            for key in list(self.owners) if keys is None else keys:
                owners = self.owners.get(key, set())
                owners.discard(owner)
                if payload.get("drop") and not owners:
                    self.tokens.pop(key, None)
                    self.owners.pop(key, None)
            return {"freed_tokens": 0}
        return {"resident": [key in self.tokens for key in keys or ()], "hits": [0] * len(keys or ())}

    def write(self, row: Any) -> None:
        """An encoding request has ended; what it attends to must be there."""
        if any(piece.key not in self.tokens for piece in row.prefix):
            raise BlocksLost
        for block in row.new:
            self.tokens[block.key] = block.tokens
            self.owners.setdefault(block.key, set()).add(row.owner)


class Service(PoolService):
    """Beside schedulers that are imitated; every wait takes a random number of turns of the event loop.

    Attributes:
        fails: the share of encoding requests that do.
    """

    fails = 0.03

    def __init__(self, manager: Any, dice: random.Random, directory: str | None) -> None:
        super().__init__(manager, directory)
        self.schedulers, self.dice = Schedulers(), dice
        self.channel._exchange = self._exchange
        self.encoder._encode_run = self._encode_run
        self.workers.apart = self._apart

    async def turns(self, most: int = 6) -> None:
        for _ in range(self.dice.randint(0, most)):
            await asyncio.sleep(0)

    async def _exchange(self, op: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        async with self.channel._lock:  # one after the other, in the order in which they were asked
            await self.turns()
            answer = self.schedulers.answer(op, payload)
            await self.turns()
            return answer

    async def _encode_run(self, run: Any) -> None:
        await self.turns(12)
        if self.dice.random() < self.fails:
            raise PoolError("aborted: everything was", 503)
        self.schedulers.write(run.row)
        await self.turns()

    async def _apart(self, work: Callable[..., Any], *args: Any) -> Any:
        await self.turns()
        found = work(*args)
        await self.turns()
        return found

    def flush(self) -> None:
        """SGLang's flush_cache, which empties the tree while nothing runs."""
        self.encoder.flushed()
        self.schedulers.tokens.clear()
        self.schedulers.owners.clear()
        self.encoder.flushed()


async def quiet(service: Service) -> None:
    """Wait until nothing goes on in the background."""
    while service.workers.tasks:
        await asyncio.wait(set(service.workers.tasks))
