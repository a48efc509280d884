"""Bodies on their way into memory: what is too large, too slow, or too much beside others is not read to its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_ext.serving.bodies import MIB, BodyLimit
from sglang_ext.settings import ServerSettings

SETTINGS = ServerSettings(max_pool_mb=4, max_request_mb=2, max_body_seconds=1)  # 16 MiB in memory at one time


class Client:
    """One request: its body comes in pieces, and its answer is read when the application has seen the whole body."""

    def __init__(self, pieces: Iterator[bytes], path: str = "/generate", announced: int | None = None) -> None:
        headers = [] if announced is None else [(b"content-length", str(announced).encode())]
        self.scope = {"type": "http", "path": path, "headers": headers}
        self.pieces, self.sent = pieces, []
        self.reading = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        self.reading.set()
        await asyncio.sleep(0)
        piece = next(self.pieces, None)
        if piece is None:
            await asyncio.sleep(3600)  # it stops sending
        return {"type": "http.request", "body": piece, "more_body": piece != b""}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def words(self) -> str:
        return str(json.loads(self.sent[1]["body"])["error"]["message"])


async def application(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def pieces(mib: float, whole: bool = True) -> Iterator[bytes]:
    yield from (b"x" * (64 << 10) for _ in range(int(mib * 16)))
    if whole:
        yield b""


def asked(*clients: Client, guard: BodyLimit | None = None) -> None:
    async def run() -> None:
        limit = guard or BodyLimit(application, SETTINGS)
        await asyncio.gather(*(limit(client.scope, client.receive, client.send) for client in clients))
        assert limit._arriving == 0

    asyncio.run(run())


@pytest.mark.parametrize(("path", "mib"), [("/generate", 2), ("/v1/pools/p", 4)])
def test_a_body_within_its_limit_is_read(path: str, mib: float) -> None:
    client = Client(pieces(mib), path)
    asked(client)
    assert client.status == 200


@pytest.mark.parametrize(("path", "flag"), [("/generate", "--max-request-mb 2"), ("/v1/pools/p", "--max-pool-mb 4")])
def test_a_body_beyond_its_limit_is_413(path: str, flag: str) -> None:
    for client in (Client(pieces(5), path), Client(pieces(0), path, announced=5 * MIB)):
        asked(client)
        assert client.status == 413 and flag in client.words


def test_a_slow_body_is_408() -> None:
    client = Client(pieces(1, whole=False))
    asked(client)
    assert client.status == 408 and "faster" in client.words


def test_large_bodies_turn_others_away_but_no_small_one() -> None:
    async def run() -> None:
        limit = BodyLimit(application, SETTINGS)
        stalled = [Client(pieces(3.9, whole=False), "/v1/pools/p") for _ in range(6)]
        waiting = [asyncio.ensure_future(limit(each.scope, each.receive, each.send)) for each in stalled]
        await asyncio.gather(*(each.reading.wait() for each in stalled))
        while sum(len(each.sent) > 0 for each in stalled) == 0:
            await asyncio.sleep(0)
        small = Client(pieces(0.5))
        await limit(small.scope, small.receive, small.send)
        assert small.status == 200
        await asyncio.gather(*waiting)
        assert sorted({each.status for each in stalled}) == [408, 429]
        assert limit._arriving == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "most"),
    [("/v1/pools/p", 64), ("/v1/pools/select", 64), ("/v1/pools/p/demonstrations", 64), ("/v1/pools/p/select", 8),
     ("/generate", 8)],
)  # fmt: skip
def test_a_question_about_a_pool_is_no_pool(path: str, most: int) -> None:
    count, flag = BodyLimit(None, ServerSettings()).limit(path)  # type: ignore[arg-type]
    assert count == most * 2**20 and str(most) in flag
