"""Streams in a real engine: a small pool, SGLang's strict checks, and what an answer must be.

The pool has 160 slots and the model 128 positions; a request takes 52 of both, however long it is. SGLang's own strict
checks of its accounting run while it is busy and when it is idle, and end the scheduler when a slot is missing.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.server import until
from tests.e2e.warm import SPAWN
from tests.oracle import models
from tests.oracle.streams import CascadeOracle, Sizes

TOLERANCE = 1e-4  # on log-probabilities; another selection, sink or stride moves them by more than 1e-2
CONTEXT, POOL, CHUNK, NEW_TOKENS = 128, 160, 50, 40
SINKS, WINDOW, STRIDE, BETA = 4, 32, 16, 0.95
SLOTS = SINKS + WINDOW + STRIDE
POLICY = {"sinks": SINKS, "window": WINDOW, "stride": STRIDE, "beta": BETA}
CASCADES = Sizes(SINKS, WINDOW, STRIDE, 4, BETA)
STREAMING = Sizes(SINKS, WINDOW, STRIDE, 1)


class Served:
    """One engine, and its model in `transformers`."""

    def __init__(self, engine: Any, folder: Path) -> None:
        self.engine = engine
        self.cascades, self.model = CascadeOracle(folder), models.load_model(folder)

    def params(self, options: dict[str, Any], new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
        return {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "custom_params": options or None}

    def generate(
        self, prompts: Sequence[Sequence[int]], options: Sequence[dict[str, Any]], new_tokens: int = NEW_TOKENS
    ) -> list[dict[str, Any]]:
        """Answers to prompts that are sent together."""
        answers: list[dict[str, Any]] = self.engine.generate(
            input_ids=[list(prompt) for prompt in prompts],
            sampling_params=[self.params(each, new_tokens) for each in options],
            return_logprob=True,
            logprob_start_len=0,
        )
        return answers

    def one(self, prompt: Sequence[int], new_tokens: int = NEW_TOKENS, **options: Any) -> dict[str, Any]:
        return self.generate([prompt], [options], new_tokens)[0]

    def together(self, prompts: Sequence[Sequence[int]], options: Sequence[dict[str, Any]]) -> list[Any]:
        """Answers, or what was raised instead, to requests that run beside each other and end by themselves."""

        async def ask() -> list[Any]:
            answers = [
                self.engine.async_generate(input_ids=list(prompt), sampling_params=self.params(each))
                for prompt, each in zip(prompts, options, strict=True)
            ]
            return await asyncio.gather(*answers, return_exceptions=True)

        return self.engine.loop.run_until_complete(ask())

    def stats(self) -> dict[str, int]:
        return self.engine.get_server_info()["internal_states"][0]["sglang_ext"]

    def idle(self) -> None:
        """Wait until no stream is left; SGLang checks its accounting as soon as nothing runs."""
        until(lambda: self.stats()["streams"] == 0)
        assert self.stats()["reserved_slots"] == 0


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(50, 380, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def sequence(prompt: Sequence[int], answer: dict[str, Any]) -> list[int]:
    return [*prompt, *answer["output_ids"]]


def deviation(prompt: Sequence[int], answer: dict[str, Any], table: torch.Tensor) -> float:
    """Largest error of a log-probability of the prompt's or the answer's tokens, or of a choice, which was greedy."""
    tokens, meta = sequence(prompt, answer), answer["meta_info"]
    got = [value for value, *_ in [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]]
    want = table[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert len(got) == len(want)
    chosen = slice(len(prompt) - 1, len(tokens) - 1)
    choice = (table[chosen].amax(1) - want[chosen]).max()
    return float(max((torch.tensor(got, dtype=want.dtype) - want).abs().max(), choice))


@contextmanager
def serving(folder: Path, **arguments: Any) -> Iterator[Served]:
    """An engine with the pool and the policy above. One at a time: the end of one ends all of the process."""
    from sglang_ext import Engine

    settings = {
        "policy": POLICY,
        "dtype": "float32",
        "max_total_tokens": POOL,
        "max_running_requests": 8,
        "chunked_prefill_size": CHUNK,  # no multiple of the stride
        "random_seed": 0,
        "log_level": "error",
    }
    if torch.cuda.is_available():
        settings["cuda_graph_backend_prefill"] = "disabled"  # graphs of attention that no stream uses
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
        patch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1")
        engine = Engine(model_path=str(folder), **{**settings, **arguments})
        try:
            yield Served(engine, folder)
        finally:
            engine.shutdown()
            torch.set_num_threads(threads)


def retract_often(patch: pytest.MonkeyPatch) -> None:
    """Have the engines that start from now on retract requests every few steps."""
    patch.setenv(SPAWN, "1")  # SGLang reads the next two when it is imported
    patch.setenv("SGLANG_TEST_RETRACT", "1")
    patch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "7")


def save(folder: Path) -> Path:
    """The model, with fewer positions than any of the prompts that are called long has tokens."""
    return models.save_model("llama", folder, max_position_embeddings=CONTEXT)


TURNS = ((40, 9), (23, 12), (1, 5), (130, 4), (16, 30))
"""(tokens of a prompt, of its answer): the last token of the first begins a stride; the fourth prompt takes chunks."""


def goes_on(name: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Options of the turn after `answer`; without a key where the server gave none."""
    key = answer["meta_info"].get("sglang_ext", {}).get("conversation_key")
    return {"conversation": name, "continue": True} | ({} if key is None else {"conversation_key": key})


def converse(
    served: Served, name: str, options: dict[str, Any], sizes: Sizes, turns: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Turn after turn, others between them; each answer is that to the whole conversation as one prompt.

    Returns:
        The options with which the next turn would go on, but for `options`.
    """
    whole: list[int] = []
    turn: dict[str, Any] = {"conversation": name}
    for number, (length, new_tokens) in enumerate(turns):
        prompt = prompt_of(length, 100 + number)
        answer = served.generate([prompt], [{**options, **turn}], new_tokens)[0]
        turn = goes_on(name, answer)
        whole += prompt
        table = served.cascades.log_probs([*whole, *answer["output_ids"]], sizes)[len(whole) - 1 : -1]
        for (got, token, *_), row in zip(answer["meta_info"]["output_token_logprobs"], table, strict=True):
            assert abs(row[token] - got) <= TOLERANCE and row.max() - row[token] <= TOLERANCE, (name, number)
        assert answer["meta_info"]["prompt_tokens"] == length + bool(number)
        whole += answer["output_ids"]
        served.one(prompt_of(60, number), new_tokens=3)
    return turn


@dataclass(frozen=True)
class Beside:
    """A long stream with short requests beside it.

    Attributes:
        answer: the long one's.
        others: answers to the short ones, each sent when the one before was answered.
        reserved: slots that streams reserve, by our own counters, after each of `others`.
        used: slots that SGLang counts as used then: what has ended gives way to others, and is not.
    """

    answer: dict[str, Any]
    others: list[dict[str, Any]]
    reserved: list[int]
    used: list[int]


def beside(served: Served, long: Sequence[int], short: Sequence[int], **options: Any) -> Beside:
    """Answer a long prompt, with `options`, and up to three times a short one while it runs."""

    async def together() -> Beside:
        ask, manager = served.engine.async_generate, served.engine.tokenizer_manager
        params = served.params(options)
        stream = asyncio.create_task(
            ask(input_ids=list(long), sampling_params=params, return_logprob=True, logprob_start_len=0)
        )
        others, reserved, used = [], [], []
        while not stream.done() and len(others) < 3:
            others.append(await ask(input_ids=list(short), sampling_params=served.params({})))
            reserved.append((await manager.get_internal_state())[0]["sglang_ext"]["reserved_slots"])
            used += [load.num_used_tokens for load in await manager.get_loads()]
        return Beside(await stream, others, reserved, used)

    found: Beside = served.engine.loop.run_until_complete(together())
    return found


def abort_some(served: Served) -> None:
    """Streams that are ended while they wait, while their prompt is computed, and while they answer."""

    async def abort() -> None:
        ask, manager = served.engine.async_generate, served.engine.tokenizer_manager
        lengths = (60, 60, 4000, 4000, 70, 80, 3000)
        running = [
            asyncio.create_task(
                ask(input_ids=prompt_of(length, n), sampling_params=served.params({}, 3000), rid=f"stream-{n}")
            )
            for n, length in enumerate(lengths)
        ]
        for n in (2, 0, 5, 1, 3, 4, 6):
            await asyncio.sleep(0.15)
            manager.abort_request(rid=f"stream-{n}")
        for answer in await asyncio.gather(*running):
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"

    served.engine.loop.run_until_complete(abort())


class Mixed:
    """Many requests of every kind at once, some of which are aborted at any moment.

    Attributes:
        ends: how many ended how: `length`, `abort`, or `refused`.
    """

    AT_ONCE = 14
    KEY = "k" * 43  # of all conversations: what one request begins another goes on from

    def __init__(self, served: Served, seed: int) -> None:
        self.served, self.dice, self.ends = served, random.Random(seed), Counter[str]()

    def options(self) -> dict[str, Any]:
        kinds: list[dict[str, Any]] = [{}, {}, {"cascades": 1}, {"heads": "homogeneous"}, {"cascades": 16}]
        kinds += [{"window": 18, "cascades": 3, "sinks": 0, "stride": 7}, {"conversation": self.dice.choice("abc")}]
        chosen = dict(self.dice.choice(kinds))
        if "conversation" in chosen:
            chosen["conversation_key"] = self.KEY
            if self.dice.random() < 0.7:
                chosen["continue"] = True
        return chosen

    async def ask(self, number: int) -> None:
        dice, engine, options = self.dice, self.served.engine, self.options()
        length = dice.choice([1, 16, dice.randint(2, 60), dice.randint(60, 150), 400])
        aborted = dice.random() < 0.2
        params = self.served.params(options, 400 if aborted else dice.randint(1, 12))
        answer = asyncio.create_task(
            engine.async_generate(input_ids=prompt_of(length, number), sampling_params=params, rid=f"mixed-{number}")
        )
        if aborted:
            await asyncio.sleep(dice.random() * 0.3)
            engine.tokenizer_manager.abort_request(rid=f"mixed-{number}")
        try:
            self.ends[(await answer)["meta_info"]["finish_reason"]["type"]] += 1
        except ValueError as error:
            # Wrong options, a conversation that began with others, or one that gave way or was aborted.
            assert any(word in str(error) for word in ("cascades=16", "conversation", "homogeneous with tp_size")), (
                error
            )
            self.ends["refused"] += 1

    async def all(self, requests: int) -> None:
        left = iter(range(requests))

        async def worker() -> None:
            for number in left:
                await self.ask(number)

        await asyncio.gather(*(worker() for _ in range(self.AT_ONCE)))


def answer_mixed(served: Served, mixed: Mixed, count: int) -> None:
    """Send so many mixed requests, of which some end in each way, and leave an engine that can be flushed."""
    served.engine.loop.run_until_complete(mixed.all(count))
    assert sum(mixed.ends.values()) == count and min(mixed.ends.values()) > 5, mixed.ends
    served.idle()
    until(lambda: served.engine.flush_cache().success)


def five_hundred_leave_clean_books(served: Served) -> None:
    """Mixed requests, and then by all counters as if there had been none."""
    mixed = Mixed(served, seed=1)
    served.engine.loop.run_until_complete(mixed.all(500))
    assert sum(mixed.ends.values()) == 500 and set(mixed.ends) <= {"length", "abort", "refused"}, mixed.ends
    assert mixed.ends["length"] > 250 and min(mixed.ends["abort"], mixed.ends["refused"]) > 30, mixed.ends
    served.idle()
    until(lambda: served.engine.flush_cache().success)  # SGLang's strict check of every slot went before
    stats = served.stats()
    assert stats["conversations"] == stats["conversation_slots"] == stats["reserved_slots"] == 0
