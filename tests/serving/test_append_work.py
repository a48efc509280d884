"""What an append does in the tokenizer process: it grows with what is new, hardly with the pool it is appended to."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from sglang_ext.serving.layout import parse_demonstrations
from sglang_ext.serving.pools import PoolService
from tests.oracle import models

SIZE = 50
THREADS = {"threading", "concurrent.futures.thread"}


class Service(PoolService):
    """Beside schedulers that hold whatever was encoded, and work done where it is asked for, so that it is counted."""

    def __init__(self, manager: Any) -> None:
        super().__init__(manager)
        self.resident: set[str] = set()
        self.order: list[str] = []
        self.channel._exchange = self._exchange
        self.encoder._encode_run = self._encode_run
        self.workers.apart = self._apart

    async def _exchange(self, op: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        keys = payload.get("keys") or []
        return {
            "state": {
                "total_tokens": 10**7, "held_tokens": 0, "held_by_pools": 0, "bytes_per_token": 1,
                "max_req_input_len": 10**6, "chunked_prefill_size": 8192,
            },
            "hold": {"missing": [key for key in keys if key not in self.resident]},
            "release": {"freed_tokens": 0},
            "blocks": {"resident": [True] * len(keys), "hits": [0] * len(keys)},
        }[op]  # fmt: skip

    async def _encode_run(self, run: Any) -> None:
        self.order.append("encoded")
        self.resident.update(block.key for block in run.row.new)

    async def _apart(self, work: Callable[..., Any], *args: Any) -> Any:
        await asyncio.sleep(0)
        self.order.append(getattr(work, "__name__", ""))
        return work(*args)


@pytest.fixture
def service(manager: Any) -> Callable[[], Service]:
    return lambda: Service(manager)


@contextmanager
def lines() -> Iterator[list[int]]:
    """Counts the lines of Python that are run, each turn of a loop anew, but for those that start threads.

    Whether a thread of an executor is started depends on how soon another one is idle.
    """
    count = [0]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_globals.get("__name__") in THREADS:
            return None
        count[0] += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def test_an_append_costs_what_is_new(service: Callable[[], Service]) -> None:
    more = [{"input": f"freeze my card {number}", "output": "freeze"} for number in range(SIZE)]
    again = [{**item, "input": item["input"] + "!"} for item in more]

    async def appending(blocks: int) -> int:
        pools = service()
        await pools.put("pool", models.demonstrations(blocks * SIZE), {"block_size": SIZE})
        await pools.append("pool", more)  # what an append keeps for the next one is there
        with lines() as count:
            info = await pools.append("pool", again)
        assert info["num_blocks"] == blocks + 2
        return count[0]

    small, large = asyncio.run(appending(4)), asyncio.run(appending(24))
    growth = (large - small) / 20
    assert growth < 0.8 * SIZE, f"{growth:.1f} lines more a block of {SIZE} demonstrations that the pool has"


def test_blocks_are_indexed_while_they_are_encoded(service: Callable[[], Service]) -> None:
    pools = service()
    asyncio.run(pools.put("pool", models.demonstrations(9), {"block_size": 3}))
    assert pools.order.index("retriever") < pools.order.index("encoded")


def test_names_go_on_from_how_many_are_taken() -> None:
    class Taken(dict[str, int]):
        def __iter__(self) -> Any:
            raise AssertionError("walked over")

    taken = Taken({"d0": 1, "mine": 2, "d3": 3})
    assert [each.id for each in parse_demonstrations([{"input": "a", "output": "b"}] * 2, taken)] == ["d4", "d5"]
    with pytest.raises(ValueError, match="'mine' is taken"):
        parse_demonstrations([{"input": "a", "output": "b", "id": "mine"}], taken)


def test_labels_of_a_pool_that_grew(service: Callable[[], Service]) -> None:
    async def made() -> dict[str, Any]:
        pools = service()
        await pools.put("pool", [{"input": "x", "output": each} for each in "abac"], {"block_size": 2})
        await pools.delete_demonstration("pool", "d1")
        return await pools.append("pool", [{"input": "y", "output": each} for each in "dab"])

    assert asyncio.run(made())["labels"] == ["a", "c", "d", "b"]
