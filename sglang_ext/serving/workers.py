"""Threads and tasks of the tokenizer process, beside its event loop."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sglang_ext.names import Passed, Tokenizer, TokenizerManager
from sglang_ext.serving.errors import PoolError
from sglang_ext.serving.memory import give_back

T = TypeVar("T")

GIVE_BACK_SECONDS = 1.0  # an answer is sent, and its request forgotten, within milliseconds of its work's end


class Workers:
    """Two threads, one that prepares pools and one for requests, and the tasks that go on whoever waits for them.

    Each thread has a tokenizer of its own: two users of one fast tokenizer collide, and copying a large one takes a
    second.
    """

    def __init__(self, manager: TokenizerManager) -> None:
        tokenizer = getattr(manager, "tokenizer", None)
        self._own_tokenizer: Tokenizer | None = copy.deepcopy(tokenizer)
        self._thread = ThreadPoolExecutor(1, "sglang-ext-layout")
        self._request_tokenizer: Tokenizer | None = copy.deepcopy(tokenizer)
        self._request_thread = ThreadPoolExecutor(1, "sglang-ext-requests")
        self.tasks: set[asyncio.Task[Passed]] = set()

    async def apart(self, work: Callable[..., T], *args: Passed) -> T:
        """Tokenizing and grouping a pool takes up to seconds: done in a thread (one: tokenizers are not shared)."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    async def read(self, work: Callable[..., T], *args: Passed) -> T:
        """`apart`, of work that reads what a client submitted; the memory that it took and freed is given back."""
        try:
            return await self.apart(work, *args)
        finally:
            self._give_back_soon()

    async def with_tokenizer(self, work: Callable[[Tokenizer], T]) -> T:
        """What `work` makes of a text that is too long for the event loop, beside the thread that prepares pools."""
        self.tokenizer()  # or an error
        return await self.beside(work, self._request_tokenizer)

    async def beside(self, work: Callable[..., T], *args: Passed) -> T:
        """Work of a request that takes too long for the event loop, in a thread of its own."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._request_thread, work, *args)
        finally:
            self._give_back_soon()

    def _give_back_soon(self) -> None:
        """Give memory back once the request that held it has been answered, and what it submitted is free."""
        asyncio.get_running_loop().call_later(GIVE_BACK_SECONDS, self._request_thread.submit, give_back)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the thread that prepares pools.

        Raises:
            PoolError: the server has none.
        """
        if self._own_tokenizer is None:
            raise PoolError("the server runs with --skip-tokenizer-init: pools are text and need the tokenizer")
        return self._own_tokenizer

    def background(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        """Work that goes on whoever waits for it; the loop keeps only weak references to tasks."""
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task
