"""HTTP requests of the soak's clients: each ends with a status, or by the client's own hang-up, or is a failure."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.soak.journal import Journal

ANSWER_SECONDS = 150.0  # longer than the server's own waits for room (120 s): a request without an answer is a failure
USER_KEY, ADMIN_KEY = "user-key", "admin-key"
KEYS = {"user": USER_KEY, "admin": ADMIN_KEY, "wrong": "wrong-key"}


@dataclass(frozen=True)
class Reply:
    """An answer, with the time in which it was given."""

    status: int
    text: str
    began: float
    ended: float

    def json(self) -> Any:
        return json.loads(self.text)


def headers(key: str) -> dict[str, str]:
    """The headers of a client with that key; `none` has none."""
    return {"Authorization": f"Bearer {KEYS[key]}"} if key in KEYS else {}


class ServerEnded(Exception):
    """There is no server any more: what clients see of it is said once."""


class Caller:
    """Sends requests of one server's clients and keeps the journal.

    Args:
        alive: whether the server's main process is there.
    """

    def __init__(self, url: str, journal: Journal, alive: Callable[[], bool]) -> None:
        self.url, self.journal, self.alive = url, journal, alive
        self.session: aiohttp.ClientSession  # set while there is an event loop
        self.under_way = 0

    async def call(
        self, kind: str, method: str, path: str, expect: Collection[int], key: str = "user", **kwargs: Any
    ) -> Reply | None:
        """One request; None: it had no answer, or one with a status that it must not have, which was noted."""
        began = time.monotonic()
        self.under_way += 1
        try:
            async with self.session.request(
                method, self.url + path, headers={**headers(key), **kwargs.pop("headers", {})}, **kwargs
            ) as answer:
                text = (await answer.read()).decode("utf-8", "replace")
                status = answer.status
        except asyncio.TimeoutError:
            self.failed(kind, "no answer", began, f"{method} {path}: no answer within {ANSWER_SECONDS:.0f} s")
            return None
        except aiohttp.ClientError as error:
            await self.closed(kind, began, f"{method} {path}", error)
            return None
        finally:
            self.under_way -= 1
        reply = Reply(status, text, began, time.monotonic())
        # SGLang's answer to whoever aborts a request while its grammar is being compiled has no status of its own.
        if status == 400 and "Aborted by AbortReq" in text:
            reply = Reply(499, text, began, reply.ended)
        self.journal.request(kind, reply.status, reply.ended - began)
        if reply.status not in expect:
            sent = str(kwargs.get("json", kwargs.get("data", "")))[:300]
            self.journal.fail(f"{kind}: {method} {path} {sent}: {status} {text[:300]}", f"{kind}: {status}")
            return None
        return reply

    async def closed(self, kind: str, began: float, what: str, error: Exception) -> None:
        """A connection was closed without an answer: a failure, unless the server has ended.

        Raises:
            ServerEnded: it has.
        """
        await asyncio.sleep(0.3)
        if not self.alive():
            raise ServerEnded
        self.failed(kind, "closed", began, f"{what}: {type(error).__name__}: {error}")

    def failed(self, kind: str, status: str, began: float, what: str) -> None:
        self.journal.request(kind, status, time.monotonic() - began)
        self.journal.fail(f"{kind}: {what}")

    async def leave(
        self, kind: str, method: str, path: str, seconds: float, key: str = "user", **kwargs: Any
    ) -> Reply | None:
        """A request whose client hangs up after `seconds`; a reply that was there before that is returned."""
        began = time.monotonic()
        self.under_way += 1

        async def ask() -> tuple[int, str]:
            async with self.session.request(method, self.url + path, headers=headers(key), **kwargs) as answer:
                return answer.status, await answer.text()

        try:
            status, text = await asyncio.wait_for(ask(), max(seconds, 0.001))
            reply = Reply(status, text, began, time.monotonic())
            self.journal.request(kind, status, reply.ended - began)
            return reply
        except asyncio.TimeoutError:
            self.journal.request(kind, "left", 0.0)
            return None
        except aiohttp.ClientError as error:
            await self.closed(kind, began, f"{method} {path}", error)
            return None
        finally:
            self.under_way -= 1

    async def events(
        self, kind: str, path: str, body: Mapping[str, Any], expect: Collection[int], most: int | None = None
    ) -> tuple[list[Any], Reply] | None:
        """The events of a streaming request; the client hangs up after `most` of them."""
        began = time.monotonic()
        self.under_way += 1
        found: list[Any] = []
        try:
            async with self.session.post(
                self.url + path, json={**body, "stream": True}, headers=headers("user")
            ) as answer:
                status = answer.status
                if status != 200:
                    text = await answer.text()
                    self.journal.request(kind, status, time.monotonic() - began)
                    if status not in expect:
                        self.journal.fail(f"{kind}: POST {path} {str(body)[:300]}: {status} {text[:300]}")
                    return None
                while line := await answer.content.readline():
                    if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                        found.append(json.loads(line[6:]))
                        if most is not None and len(found) >= most:
                            answer.close()
                            self.journal.request(kind, "left", 0.0)
                            return None
        except asyncio.TimeoutError:
            self.failed(kind, "no answer", began, f"POST {path}: no end within {ANSWER_SECONDS:.0f} s")
            return None
        except aiohttp.ClientError as error:
            await self.closed(kind, began, f"POST {path}", error)
            return None
        finally:
            self.under_way -= 1
        reply = Reply(200, "", began, time.monotonic())
        self.journal.request(kind, 200, reply.ended - began)
        return found, reply
