"""A server that is told to end (SIGTERM): it answers what it has, refuses what comes, and then ends.

SGLang alone takes new requests until it sees, every five seconds, that its schedulers have none, and then ends in the
middle of whatever schedulers do not know of: requests that wait for a pool or are being composed, changes of pools,
answers that are still being sent. Here the whole of a request counts, from its first byte to the last of its answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import fastapi
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_ext import compat
from sglang_ext.cache.rows import INTERNAL
from sglang_ext.names import TokenizerManager
from sglang_ext.serving import ready
from sglang_ext.serving.errors import error_response

if TYPE_CHECKING:
    from sglang_ext.serving.pools import PoolService

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1  # between looks whether the server is told to end, and whether everything has ended
TELL_SECONDS = 5.0  # between lines of the log while the server waits
RETRY_SECONDS = 1
PROBES = ("/health", "/health_generate", "/metrics", ready.PATH)
"""Routes that are asked whether and how the server works: they do not keep it from ending."""
_READING = ("GET", "HEAD", "OPTIONS")
_HELPING = ("/abort_request", "/cancel", "/continue_generation", "/resume_memory_occupation")
"""Ends of the paths of routes that let what is under way go on or end: a server that ends takes them until it has."""


class Drain:
    """Which requests keep a server from ending, and which ones it takes.

    Args:
        manager: SGLang's, which knows whether the server is told to end.
        seconds: for so long the server takes requests after that, so that routers see first that it is going.
    """

    def __init__(self, manager: TokenizerManager, seconds: float) -> None:
        self._manager, self._seconds = manager, seconds
        self._told_at: float | None = None  # by time.monotonic
        self.under_way = 0

    def listen(self) -> None:
        """SIGTERM drains the server from now on; called in its event loop."""
        compat.listen(self._manager)

    @property
    def ends(self) -> bool:
        """Whether the server is told to end."""
        return compat.is_told_to_end(self._manager)

    @property
    def refuses(self) -> bool:
        """Whether new requests are refused."""
        return self._told_at is not None and time.monotonic() - self._told_at >= self._seconds

    async def over(self, service: PoolService) -> None:
        """From now on the server is to end: wait until nobody waits for it any more, or it cannot answer anyway."""
        self._told_at, told = time.monotonic(), 0.0
        while not compat.must_end_at_once(self._manager):
            left = self._left(service)
            if self.refuses and not left:
                return
            if time.monotonic() - told >= TELL_SECONDS:
                told = time.monotonic()
                logger.warning("sglang_ext: the server is told to end, and finishes: %s", left or "nothing for now")
            if self.refuses and not self._is_asked(service):
                for each in service.shared.services.values():
                    each.folder.stop()
            await asyncio.sleep(LOOK_SECONDS)

    def _is_asked(self, service: PoolService) -> bool:
        """Whether somebody still needs the server's pools: an answer in the background has no connection."""
        return bool(self.under_way or _changes(service)) or compat.others_run(self._manager, INTERNAL)

    def _left(self, service: PoolService) -> str:
        """What is still to be finished, in words; empty where nothing is."""
        counts = {
            "requests": self.under_way,
            "changes of pools": _changes(service),
            "requests in the schedulers": compat.requests_under_way(self._manager),
        }
        return ", ".join(f"{count} {words}" for words, count in counts.items() if count)


def _changes(service: PoolService) -> int:
    """Changes of pools that were taken and have not ended, of all tenants."""
    return sum(each.queue.taken for each in service.shared.services.values())


class DrainMiddleware:
    """ASGI middleware: counts requests, and refuses new ones where the server is ending.

    SGLang handles SIGTERM, and has an event loop for others to use, from its first request on only. A server that is
    not ready before its pools are encoded may wait for that in vain, so here both are there when the server starts.
    """

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self.app, self.drain = app, drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        drain = self.drain
        if scope["type"] == "lifespan":
            drain.listen()
        if scope["type"] != "http" or scope["path"] in PROBES:
            return await self.app(scope, receive, send)
        if drain.refuses and not _is_taken_to_the_end(scope):
            return await _refuse(scope, receive, send)

        async def send_and_part(message: Message) -> None:
            if message["type"] == "http.response.start" and drain.ends:
                # A client that keeps its connection would send the next request here, too.
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        drain.under_way += 1
        try:
            await self.app(scope, receive, send_and_part)
        finally:
            drain.under_way -= 1


def _is_taken_to_the_end(scope: Scope) -> bool:
    """Whether a request is no new work for the server."""
    method: str = scope["method"]
    return method in _READING or (method == "POST" and scope["path"].endswith(_HELPING))


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    answer = error_response("the server is told to end and takes no new requests: send this one again", 503)
    answer.headers["Retry-After"], answer.headers["Connection"] = str(RETRY_SECONDS), "close"
    await answer(scope, receive, send)


def guard(app: fastapi.FastAPI, manager: TokenizerManager, seconds: float) -> None:
    """Have `app` count its requests, around all that it does with them."""
    manager.ext_drain = Drain(manager, seconds)
    app.add_middleware(DrainMiddleware, drain=manager.ext_drain)


async def around_sigterm_watchdog(original: Callable[..., Awaitable[None]], manager: TokenizerManager) -> None:
    """AROUND TokenizerManager.sigterm_watchdog: SGLang ends the server only when it is done."""
    while not compat.is_told_to_end(manager):
        await asyncio.sleep(LOOK_SECONDS)
    drain: Drain | None = getattr(manager, "ext_drain", None)
    if drain is not None:  # an engine in one's own process takes no requests over HTTP
        await drain.over(manager.ext_pools)
    await original(manager)
