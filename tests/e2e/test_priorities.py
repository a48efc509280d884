"""Priority scheduling: who comes first, who gives way, and that no answer changes by it.

The engines run one request at a time. Who waits is fixed before anything runs: the scheduler is paused until it has
been sent every request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput, TokenizedGenerateReqInput

from sglang_ext import compat
from tests.e2e.test_ltri import OF_KERNELS
from tests.oracle import models

LONG, SHORT = 250, 6  # tokens of the answer that gives way, or does not, and of the others
FIRST = 2**63 - 1  # the highest priority that can be sent
CLUSTERS = {"window": 16, "sink": 4, "cluster": 4, "segment": 64, "append": 32, "min_tokens": 64, "iterations": 2}
SYSTEMS: dict[str, dict[str, Any]] = {
    "dbsa+double_p": {"policy": CLUSTERS, "disable_priority_preemption": not compat.REQUEUES_PREEMPTED},
    "cascade": {"policy": {"sinks": 4, "window": 32, "stride": 16}, "disable_priority_preemption": True},
    "ltri": {
        "policy": {name: value for name, value in asdict(OF_KERNELS).items() if name not in ("everything", "heads")},
        "disable_priority_preemption": True,
    },
}

pytestmark = pytest.mark.timeout(600)


class Served:
    """An engine whose scheduler can be paused.

    Attributes:
        pools: whether the system has pools; then there is one.
        preempts: whether running requests give way.
        sent: requests that the scheduler was sent, each with its priority.
    """

    def __init__(self, engine: Any, pools: bool, preempts: bool) -> None:
        self.engine, self.pools, self.preempts = engine, pools, preempts
        self.sent: list[Any] = []
        manager, dispatch = engine.tokenizer_manager, engine.tokenizer_manager._dispatch_to_scheduler

        def noted(message: Any) -> Any:
            if isinstance(message, TokenizedGenerateReqInput):
                self.sent.append(message)
            return dispatch(message)

        manager._dispatch_to_scheduler = noted
        self._dispatch = dispatch

    async def ask(
        self, seed: int, new_tokens: int, priority: int | None = None, begun: asyncio.Event | None = None
    ) -> dict[str, Any]:
        """An answer to a prompt of its own, over a pool where the server has one; under p = 1, which is exact.

        `begun` is set as soon as it has a token.
        """
        prompt = torch.randint(50, 380, (60,), generator=torch.Generator().manual_seed(seed)).tolist()
        custom = {"pool": "p", "raw": True, "block_ids": [0, 2], "p1": 1, "p2": 1} if self.pools else None
        params = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "custom_params": custom}
        answer: dict[str, Any] = {}
        async for part in await self.engine.async_generate(
            input_ids=prompt, sampling_params=params, priority=priority, stream=True
        ):
            answer = part
            if begun is not None:
                begun.set()
        return answer

    def alone(self, seed: int, new_tokens: int) -> list[int]:
        answer = self.engine.loop.run_until_complete(self.ask(seed, new_tokens))
        ids: list[int] = answer["output_ids"]
        return ids

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Nothing runs within the context; what is sent there is there when it ends."""
        self._dispatch(PauseGenerationReqInput(mode="in_place"))
        try:
            yield
        finally:
            self._dispatch(ContinueGenerationReqInput())

    async def were_sent(self, count: int) -> None:
        """Wait until so many requests were sent."""
        while len(self.sent) < count:
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module", params=list(SYSTEMS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from sglang_ext import Engine

    folder: Path = models.save_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=2048)
    threads, pools = torch.get_num_threads(), "double_p" in request.param
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1")
        engine = Engine(
            model_path=str(folder),
            attention_backend=request.param,
            dtype="float32",
            max_total_tokens=8000,
            max_running_requests=1,
            chunked_prefill_size=128,
            enable_priority_scheduling=True,
            random_seed=0,
            log_level="error",
            **SYSTEMS[request.param],
        )
        try:
            served = Served(engine, pools, not SYSTEMS[request.param]["disable_priority_preemption"])
            if pools:
                engine.create_pool("p", models.demonstrations(18), block_size=6)
            yield served
        finally:
            engine.shutdown()
            torch.set_num_threads(threads)


def test_encodings_are_sent_with_the_first_priority(served: Served) -> None:
    """An answer of a high priority may wait for them."""
    encodings = [message.priority for message in served.sent if message.rid.startswith("sglang-ext-encode-")]
    assert bool(encodings) == served.pools and set(encodings) <= {FIRST}


def test_a_high_priority_overtakes_and_no_answer_changes(served: Served) -> None:
    """A is running, B to E wait; with preemption, A gives way to the first of them and begins again."""
    priorities = {"A": 0, "B": 0, "C": None, "D": 5, "E": 50}
    expected = {name: served.alone(seed, LONG if name == "A" else SHORT) for seed, name in enumerate(priorities)}
    ended: list[str] = []

    async def one(name: str, begun: asyncio.Event | None = None) -> dict[str, Any]:
        seed = list(priorities).index(name)
        answer = await served.ask(seed, LONG if name == "A" else SHORT, priorities[name], begun)
        ended.append(name)
        return answer

    async def together() -> list[dict[str, Any]]:
        begun, before = asyncio.Event(), len(served.sent)
        tasks = [asyncio.create_task(one("A", begun))]
        await begun.wait()
        async with served.paused():
            tasks += [asyncio.create_task(one(name)) for name in "BCDE"]
            await served.were_sent(before + len(priorities))
        return await asyncio.gather(*tasks)

    answers = served.engine.loop.run_until_complete(together())
    assert ended == list("EDBAC" if served.preempts else "AEDBC")
    assert [each["meta_info"]["num_retractions"] for each in answers] == [int(served.preempts), 0, 0, 0, 0]
    assert dict(zip(priorities, [each["output_ids"] for each in answers], strict=True)) == expected
