"""The engine of ``sglang-ext bench dbsa --only host``: a pool that leaves the KV cache for host memory, and comes back.

It does what `launch.bench._dbsa_host` asks it for. Weights are random.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ext.launch.answers import completed
from sglang_ext.launch.bench._cascade_engine import drawn
from sglang_ext.launch.bench._dbsa_engine import POOL, Ours, _sampling, empty
from sglang_ext.launch.bench._turns import serve
from sglang_ext.types import JsonObject

if TYPE_CHECKING:
    from sglang_ext.names import Engine

SECONDS = 60.0
"""Longest that blocks may take to be copied, or to be evicted."""


class Hosted(Ours):
    """An engine with host memory, and one unpinned pool."""

    def __init__(self, engine: Engine, args: argparse.Namespace) -> None:
        super().__init__(engine, args)
        self.options = {**self.options, "pinned": False}
        self.prompts = 0

    def encode(self, pool: str = POOL) -> JsonObject:
        """Seconds of making the pool in an empty cache, its tokens and blocks; all blocks are on the host then."""
        found = super().encode(pool)
        self._until(lambda: self._state("host_blocks") >= found["blocks"], "were copied to the host")
        return {**found, "ahead": self._state("host_stored_ahead")}

    def evict(self) -> JsonObject:
        """Fill the KV cache with prompts, until no block of the pool is left in it."""
        self._until(lambda: not self._push(), "left the KV cache")
        return {}

    def back(self) -> JsonObject:
        """Seconds of a question over all blocks, answered with one token; how many came back, or were encoded."""
        names = ("host_returned", "reencoded_blocks")
        before = [self._state(name) for name in names]
        self.prompts += 1
        begin = time.perf_counter()
        completed(self.engine.generate(**self.everything(self.prompts, 1)))
        seconds = time.perf_counter() - begin
        returned, encoded = (self._state(name) - was for name, was in zip(names, before, strict=True))
        return {"seconds": seconds, "returned": returned, "encoded": encoded}

    def decoding(self, context: int, tokens: int, prompt: int) -> JsonObject:
        """Times between the tokens of an answer while prompts are read, one behind the other.

        Args:
            context: tokens of the answer's prompt.
            tokens: of the answer.
            prompt: tokens of each of the prompts, which are answered with one token.

        Returns:
            `gaps` [tokens - 1] in seconds, and how many blocks of the pool left the KV cache meanwhile.
        """
        before, times = self._resident(), list[float]()

        async def answer() -> None:
            asked = dict(input_ids=self._prompt(context), sampling_params=_sampling(tokens))
            async for _ in await self.engine.async_generate(**asked, stream=True):
                times.append(time.perf_counter())

        async def together() -> None:
            running = asyncio.ensure_future(answer())
            while not running.done():
                await self.engine.async_generate(input_ids=self._prompt(prompt), sampling_params=_sampling(1))
            await running

        self.engine.loop.run_until_complete(together())
        gaps = [late - early for early, late in pairwise(times)]
        return {"gaps": gaps, "evicted": before - self._resident()}

    def _push(self) -> int:
        """Read a prompt that nobody has read; blocks of the pool that are in the KV cache behind it."""
        completed(self.engine.generate(input_ids=self._prompt(self.capacity() // 8), sampling_params=_sampling(1)))
        return self._resident()

    def _prompt(self, tokens: int) -> list[int]:
        self.prompts += 1
        return list(drawn(tokens, 1000 + self.prompts))

    def _resident(self) -> int:
        return sum(block["resident"] for block in self.engine.pool(POOL)["blocks"])

    def _state(self, name: str) -> int:
        return int(self.engine.get_server_info()["internal_states"][0]["sglang_ext"][name])

    def _until(self, there: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + SECONDS
        while not there():
            if time.monotonic() > end:
                raise RuntimeError(f"not all blocks of the pool {what} within {SECONDS:.0f} s")


def main(argv: Sequence[str] | None = None) -> int:
    from sglang_ext import Engine

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--block-size", type=int, required=True)
    parser.add_argument("--engine", type=json.loads, required=True, help="arguments of the engine, as JSON")
    parser.add_argument("--replies", type=int, required=True, help="file descriptor")
    args = parser.parse_args(argv, argparse.Namespace(ratio=1.0, larger=0))
    options = dict(model_path=str(args.model), load_format="dummy", log_level="warning", page_size=1, **args.engine)
    engine = Engine(**options)
    empty(engine)
    serve(Hosted(engine, args), args.replies)
    engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
