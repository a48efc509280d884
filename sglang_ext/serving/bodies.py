"""Bodies of requests are refused while they arrive: by Content-Length, by what came, and by how long it took."""

from __future__ import annotations

import asyncio
import time

import fastapi
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_ext.serving.errors import error_response
from sglang_ext.settings import ServerSettings

AT_ONCE = 4  # bodies of the largest size that may be in memory at one time
EXEMPT = 1 << 20  # bytes of every body that do not count among them: large bodies turn no small one away

MIB = 1 << 20


class BodyLimit:
    """ASGI middleware: a body that is larger than its route takes is answered with 413 before it is in memory.

    A client that sends its body too slowly gets 408, and one whose body finds no memory beside those of others 429.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app = app
        self.settings = settings
        self._arriving = 0  # bytes of bodies whose requests have not been answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = _Body(self, scope, receive)
        answered = False

        async def answer(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            body.check_announced()
            await self.app(scope, body.receive, answer)
        except _Refused as error:
            if answered:
                raise
            await error_response(str(error.detail), error.status_code)(scope, receive, send)
        finally:
            self._arriving -= body.taken

    def limit(self, path: str) -> tuple[int, str]:
        """(bytes that the body of a request to `path` may have, the flag that says so)."""
        parts = path.split("/")
        question = len(parts) == 5 and parts[4] == "select"  # /v1/pools/{name}/select holds no pool
        if path.startswith("/v1/pools") and not question:
            return self.settings.max_pool_mb * MIB, f"--max-pool-mb {self.settings.max_pool_mb}"
        return self.settings.max_request_mb * MIB, f"--max-request-mb {self.settings.max_request_mb}"

    def take(self, count: int) -> None:
        """Count bytes that arrived; _Refused (429) where there is no memory for them beside those of other requests."""
        room = AT_ONCE * max(self.settings.max_pool_mb, self.settings.max_request_mb) * MIB
        if self._arriving + count > room:
            raise _Refused(429, f"request bodies take {room // MIB} MiB of memory already, which is the limit: retry")
        self._arriving += count


class _Refused(fastapi.HTTPException):
    """A body that is not read to its end; an HTTPException, so that whoever reads the body lets it pass."""


class _Body:
    """The body of one request while it arrives.

    Attributes:
        bytes: what came so far.
        taken: how much of it counts among the bodies that are in memory.
    """

    def __init__(self, guard: BodyLimit, scope: Scope, receive: Receive) -> None:
        self._guard, self._receive = guard, receive
        self._limit, self._flag = guard.limit(scope["path"])
        self._seconds = guard.settings.max_body_seconds
        self._announced = dict(scope["headers"]).get(b"content-length", b"0")
        self._deadline: float | None = None  # from the moment on at which the body is asked for
        self._complete = False
        self.bytes = self.taken = 0

    def check_announced(self) -> None:
        """_Refused (413) for a Content-Length beyond the limit."""
        if self._announced.isdigit() and int(self._announced) > self._limit:
            raise self._too_large(f"{int(self._announced)} bytes")

    async def receive(self) -> Message:
        """The next ASGI message; _Refused where the body has become too large, or comes too late."""
        if self._complete:
            return await self._receive()
        now = time.monotonic()
        self._deadline = self._deadline or now + self._seconds
        try:
            message = await asyncio.wait_for(self._receive(), self._deadline - now)
        except asyncio.TimeoutError:
            raise _Refused(
                408,
                f"the body was not there after {self._seconds} s: send it faster, or raise --max-body-seconds",
            ) from None
        if message["type"] != "http.request":
            return message
        self.bytes += len(message.get("body", b""))
        taken = max(0, self.bytes - EXEMPT)
        self._guard.take(taken - self.taken)
        self.taken = taken
        if self.bytes > self._limit:
            raise self._too_large(f"more than {self._limit} bytes")
        self._complete = not message.get("more_body", False)
        return message

    def _too_large(self, found: str) -> _Refused:
        return _Refused(
            413,
            f"the body has {found}; expected at most {self._limit} ({self._flag}): send less, or raise the limit",
        )
