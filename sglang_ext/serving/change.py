"""Changes of pools: the queue for them, and one under way.

A change says who may stop it, and tells everybody who waits for it of its end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass

from sglang_ext.serving.errors import PoolError

WAITING, PREPARING, ENCODING, ENDED = "waiting", "preparing", "encoding", "ended"


@dataclass
class Progress:
    """How far an encoding is."""

    blocks: int
    tokens: int
    blocks_done: int = 0
    tokens_done: int = 0


class Queue:
    """Places of those that have a pool read, tokenized or encoded.

    Args:
        waiting: how many may wait for the one that is under way.

    Attributes:
        taken: places.
    """

    def __init__(self, waiting: int) -> None:
        self._waiting = waiting
        self.taken = 0

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """One place, as long as it is needed; PoolError (429) where all are taken."""
        if self.taken >= 1 + self._waiting:
            raise PoolError(
                f"{self.taken} changes of pools are under way or wait, which is the limit (one, and"
                f" --max-waiting-encodings {self._waiting}): retry when GET /v1/pools shows fewer",
                429,
            )
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1


class Change:
    """A change of a pool, from the moment it is asked for until it is made or undone.

    Its work runs in a task that `cancel` may stop at any moment, before its first step too. What follows the work (to
    make the change, or to undo what the work did) runs in another task, which nobody stops; only then does the change
    end. It ends exactly once, and whoever waits for it goes on then, whatever happened.

    Attributes:
        phase: `waiting` for its turn, `preparing` (demonstrations are read and tokenized), `encoding`, `ended`.
        wait: whether who asked for it stays until it ends; None until that is known.
        progress: how far the encoding is, once it is known how large it is.
        error: why it was not made; None while it is under way and when it was made.
        cancelled: its work was stopped.
    """

    def __init__(self) -> None:
        self.phase = WAITING
        self.wait: bool | None = None
        self.progress: Progress | None = None
        self.error: PoolError | None = None
        self.cancelled = False
        self._left = False
        self._work: asyncio.Task[None] | None = None
        self._accepted, self._ended = asyncio.Event(), asyncio.Event()

    def start(
        self,
        work: Awaitable[None],
        settle: Callable[[], Awaitable[None]],
        explain: Callable[[BaseException], PoolError],
    ) -> Coroutine[None, None, None]:
        """Begin the work; returns what sees it to its end, to be run as a task of its own that nobody cancels.

        Args:
            work: prepares the change; calls `accept` once it is certain to be begun.
            settle: makes the change where `error` is None, else undoes the work. May set `error` itself.
            explain: what users are told of an exception of either.
        """
        self._work = asyncio.ensure_future(work)
        return self._see_through(self._work, settle, explain)

    async def _see_through(
        self,
        work: asyncio.Task[None],
        settle: Callable[[], Awaitable[None]],
        explain: Callable[[BaseException], PoolError],
    ) -> None:
        await asyncio.wait([work])
        self._work = None
        self.cancelled = work.cancelled()
        failure = asyncio.CancelledError() if self.cancelled else work.exception()
        if failure is not None:
            self.error = explain(failure).fresh()
        try:
            await settle()
        except BaseException as error:
            self.error = self.error or explain(error).fresh()
            raise
        finally:
            self.phase = ENDED
            self._accepted.set()
            self._ended.set()

    def accept(self, progress: Progress) -> None:
        """All checks are through, and the encoding begins."""
        self.phase, self.progress = ENCODING, progress
        self._accepted.set()

    def prepared(self, wait: bool) -> None:
        """It is known whether who asked stays until the end; a change that was left meanwhile is stopped."""
        self.wait = wait
        if self._left:
            self.leave()

    def leave(self) -> None:
        """Who asked for the change went away: nobody wants it any more, unless nobody was to wait for it."""
        self._left = True
        if self.wait:
            self.cancel()

    def cancel(self) -> None:
        """Stop the work; without effect once it is done."""
        if self._work is not None:
            self._work.cancel()

    async def accepted(self) -> None:
        """Wait until the change is certain to be begun.

        Raises:
            PoolError: it ended before; nothing was changed.
        """
        await self._accepted.wait()
        if self.phase == ENDED:
            self._raise()

    async def made(self) -> None:
        """Wait until the change is made.

        Raises:
            PoolError: it was undone.
        """
        await self.ended()
        self._raise()

    async def ended(self) -> None:
        """Wait until the change is made or undone; `error` tells which."""
        await self._ended.wait()

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error.fresh()
