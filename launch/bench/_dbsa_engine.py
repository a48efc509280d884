"""One engine of ``sglang-ext bench dbsa`` in one process, which does what `launch.bench._dbsa_turns` asks it for.

Weights are random: what is measured does not depend on their values.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sglang_ext.config import PoolOptions
from sglang_ext.launch.answers import completed
from sglang_ext.launch.bench._shapes import TOKENIZER
from sglang_ext.launch.bench._stages import profiled
from sglang_ext.launch.bench._turns import serve
from sglang_ext.launch.demo_data import INTENTS, sentence
from sglang_ext.serving.grammar import label_grammar
from sglang_ext.types import Json, JsonObject

if TYPE_CHECKING:
    from sglang_ext.names import Engine


HOST_STAGES = ("retrieval", "tokenization")
LABELLED = "a label"
"""Kind of the requests whose answer is a label of the pool, and ends with it."""
EXAMPLES = "examples"
"""Kind of the requests that read single demonstrations, cut out of their blocks: as many as others read in blocks."""
WRITTEN = "examples as written"
"""The same, but each is seen where it was written (`rebase: false`)."""
POOL, LARGER, OPTIONS = "bench", "larger", PoolOptions()


def examples(count: int, seed: int) -> list[dict[str, str]]:
    """Numbered sentences with their labels, of real lengths, no two alike."""
    dice, labels = random.Random(seed), list(INTENTS)
    made = []
    for number in range(count):
        label = labels[number % len(labels)]
        made.append({"input": f"{seed + number}: {sentence(label, dice)}", "output": label})
    return made


def text_of(example: dict[str, str]) -> str:
    """A demonstration as the pool's default template renders it."""
    return OPTIONS.render(example["input"], example["output"]) + OPTIONS.separator


def demonstrations(tokens: int, seed: int = 0) -> list[dict[str, str]]:
    """The first examples that make `tokens` tokens of pool."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(TOKENIZER))
    made, total = examples(tokens // 10, seed), 0
    for number, ids in enumerate(tokenizer([text_of(e) for e in made], add_special_tokens=False)["input_ids"]):
        total += len(ids)
        if total >= tokens:
            return made[: number + 1]
    raise ValueError(f"{len(made)} examples make {total} tokens, fewer than the {tokens} asked for")


class Loop:
    """A closed loop of questions: `concurrency` of them are always under way."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, requests: Sequence[JsonObject], concurrency: int) -> JsonObject:
        """Seconds of all, and of one (quantiles); of retrieval and tokenization where pools are asked.

        With the fewest tokens of a prompt that were cached (`cached`), and the tokens of an answer on average (`said`).

        Raises:
            FailedAnswers: some answer failed.
        """
        host: dict[str, float] = {}
        cached: list[int] = []
        said: list[int] = []
        answers: list[JsonObject] = []

        async def everything() -> list[float]:
            gate = asyncio.Semaphore(concurrency)

            async def one(request: JsonObject) -> float:
                async with gate:
                    begin = time.perf_counter()
                    answer = await self.engine.async_generate(**request)
                    seconds = time.perf_counter() - begin
                    answers.append(answer)
                    cached.append(answer["meta_info"]["cached_tokens"])
                    said.append(answer["meta_info"]["completion_tokens"])
                    for stage in HOST_STAGES:
                        spent = answer["meta_info"].get("sglang_ext", {}).get(f"{stage}_ms", 0.0)
                        host[stage] = host.get(stage, 0.0) + spent * 1e-3
                    return seconds

            return list(await asyncio.gather(*(one(request) for request in requests)))

        begin = time.perf_counter()
        latencies = self.engine.loop.run_until_complete(everything())
        seconds = time.perf_counter() - begin
        completed(answers)
        return {
            "seconds": seconds,
            "requests": len(requests),
            "latency": _quantiles(latencies),
            "host": host,
            "cached": min(cached),
            "said": sum(said) / len(said),
        }


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(seconds, q)) for q in (10, 50, 90, 99)}


def stages(loop: Loop, requests: Sequence[JsonObject], concurrency: int) -> dict[str, float]:
    """Seconds a request by stage, of one profiled round of questions that were not asked before.

    What the host does happens beside the GPU's work, so that the parts add up to more than `wall`.
    """
    result: JsonObject = {}
    before = _stitched(loop.engine)
    gpu = profiled(loop.engine, lambda: result.update(loop.run(requests, concurrency)))
    found = {**result["host"], "stitch": _stitched(loop.engine) - before, **gpu, "wall": result["seconds"]}
    return {name: seconds / len(requests) for name, seconds in found.items()}


def _stitched(engine: Engine) -> float:
    state = engine.get_server_info()["internal_states"][0]
    return float(state["sglang_ext"]["stitch_seconds"])


class AskedBatch:
    """An engine that questions are asked in closed loops.

    Attributes:
        made: kind of a request -> what makes one of a question's number and the tokens of its answer.
    """

    made: Mapping[str, Callable[[int, int], JsonObject]]

    def __init__(self, engine: Engine, model: Path) -> None:
        from transformers import AutoTokenizer

        self.engine, self.loop = engine, Loop(engine)
        self.tokenizer = AutoTokenizer.from_pretrained(str(model))

    def run(self, kind: str, tokens: int, concurrency: int, first: int, count: int) -> JsonObject:
        """`Loop.run` of `count` requests of one kind, about the questions from number `first` on."""
        return self.loop.run(self._requests(kind, tokens, first, count), concurrency)

    def _requests(self, kind: str, tokens: int, first: int, count: int) -> list[JsonObject]:
        return [self.made[kind](number, tokens) for number in range(first, first + count)]

    @cached_property
    def questions(self) -> list[str]:
        """More than are ever asked."""
        return [example["input"] for example in examples(60_000, 10_000_000)]

    def question_ids(self, number: int) -> list[int]:
        """Tokens of a question as the pool's default template renders it."""
        return self._ids(OPTIONS.render_query(self.questions[number % len(self.questions)])[0])

    def plain(self, number: int, tokens: int) -> JsonObject:
        """A question alone."""
        return dict(input_ids=[7 + number % 50, *self.question_ids(number)], sampling_params=_sampling(tokens))

    def capacity(self) -> int:
        """Tokens of the KV cache."""
        return int(self.engine.get_server_info()["max_total_num_tokens"])

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


class Stock(AskedBatch):
    """SGLang as it is: dense prefill of the pool, Fixed ICL from its cache, RetICL, zero-shot."""

    def __init__(self, engine: Engine, args: argparse.Namespace) -> None:
        super().__init__(engine, args.model)
        self.pool = [self._ids(text_of(demo)) for demo in demonstrations(args.tokens)]
        self.whole = [token for ids in self.pool for token in ids]
        self.retrieved = max(1, round(args.ratio * len(self.pool)))
        self.dice = random.Random(0)
        self.made = {"zero-shot": self.plain, "fixed": self.fixed, "retrieval": self.retrieval, LABELLED: self.labelled}
        self.end = OPTIONS.answer_end
        self.grammar = label_grammar([*INTENTS], OPTIONS.render_query("")[1], self.end)

    def about(self) -> JsonObject:
        """Tokens of the pool, of the KV cache, and of a question on average."""
        few = [len(self.question_ids(number)) for number in range(1000)]
        return {"tokens": len(self.whole), "question_tokens": sum(few) / len(few), "capacity": self.capacity()}

    def prefill(self) -> JsonObject:
        """Seconds of prefilling the whole pool into an empty cache, where it stays."""
        empty(self.engine)
        begin = time.perf_counter()
        completed(self.engine.generate(input_ids=self.whole, sampling_params=_sampling(1)))
        return {"seconds": time.perf_counter() - begin}

    def fixed(self, number: int, tokens: int) -> JsonObject:
        """A question behind the whole pool."""
        return dict(input_ids=self.whole + self.question_ids(number), sampling_params=_sampling(tokens))

    def labelled(self, number: int, tokens: int) -> JsonObject:
        """A question behind the whole pool, answered with a label: a grammar says which there are."""
        request = self.fixed(number, tokens)
        params: JsonObject = {"temperature": 0, "max_new_tokens": tokens, "ebnf": self.grammar, "stop": [self.end]}
        return {**request, "sampling_params": params}

    def retrieval(self, number: int, tokens: int) -> JsonObject:
        """A question behind demonstrations of its own, in an order of its own."""
        ids = [token for demo in self.dice.sample(self.pool, self.retrieved) for token in demo]
        return dict(input_ids=ids + self.question_ids(number), sampling_params=_sampling(tokens))


class Ours(AskedBatch):
    """The plugin: block-sparse encoding, appending, answers over the selected blocks, plain requests."""

    def __init__(self, engine: Engine, args: argparse.Namespace) -> None:
        super().__init__(engine, args.model)
        self.options = {"block_size": args.block_size}
        self.demonstrations = {POOL: demonstrations(args.tokens)}
        if args.larger:
            self.demonstrations[LARGER] = demonstrations(args.larger, seed=50_000)
        self.ratio = args.ratio
        self.appended = 0
        self.made = {
            "zero-shot": self.plain,
            "dbsa": self.selected,
            "all blocks": self.everything,
            EXAMPLES: self.cut,
            WRITTEN: self.written,
            LABELLED: self.labelled,
        }

    def about(self) -> JsonObject:
        """What serves it, and tokens of the KV cache."""
        state = self.engine.get_server_info()["internal_states"][0]["sglang_ext"]
        return {"attention_backend": state["attention_backend"], "capacity": self.capacity()}

    def encode(self, pool: str) -> JsonObject:
        """Seconds of making a pool in an empty cache, from which the others are gone; its tokens and blocks."""
        for other in self.engine.pools():
            self.engine.delete(other["name"])
        empty(self.engine)
        begin = time.perf_counter()
        info = self.engine.create_pool(pool, self.demonstrations[pool], **self.options)
        return {"seconds": time.perf_counter() - begin, "tokens": info["tokens"], "blocks": info["num_blocks"]}

    def append(self, pool: str) -> JsonObject:
        """Seconds of appending one block of demonstrations, each time another one; of them, of holding and encoding."""
        self.appended += 1
        more = examples(self.options["block_size"], 20_000_000 + 1_000_000 * self.appended)
        begin = time.perf_counter()
        info = self.engine.append(pool, more)
        return {"seconds": time.perf_counter() - begin, "encoding": info["setup_seconds"]}

    def selected(self, number: int, tokens: int) -> JsonObject:
        """A question over the blocks that are selected for it."""
        return self._over(number, tokens, self.ratio)

    def everything(self, number: int, tokens: int) -> JsonObject:
        """A question over all blocks."""
        return self._over(number, tokens, 1.0)

    def cut(self, number: int, tokens: int) -> JsonObject:
        """A question over the single demonstrations that are selected for it."""
        return self._over(number, tokens, self.ratio, granularity="example")

    def written(self, number: int, tokens: int) -> JsonObject:
        """A question over single demonstrations, which are seen where they were written."""
        return self._over(number, tokens, self.ratio, granularity="example", rebase=False)

    def labelled(self, number: int, tokens: int) -> JsonObject:
        """A question over the blocks that are selected for it, answered with a label of the pool."""
        request, custom = self.selected(number, tokens), {"pool": POOL, "ratio": self.ratio, "constrain": "labels"}
        params: JsonObject = {"temperature": 0, "max_new_tokens": tokens, "custom_params": custom}
        return {**request, "sampling_params": params}

    def stages(self, kind: str, tokens: int, concurrency: int, first: int, count: int) -> JsonObject:
        """`stages` of questions of one kind."""
        return stages(self.loop, self._requests(kind, tokens, first, count), concurrency)

    def _over(self, number: int, tokens: int, ratio: float, **custom: Json) -> JsonObject:
        question = self.questions[number % len(self.questions)]
        return dict(prompt=question, sampling_params=_sampling(tokens, pool=POOL, ratio=ratio, **custom))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=("stock", "ours"), required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--block-size", type=int, required=True)
    parser.add_argument("--ratio", type=float, required=True)
    parser.add_argument("--larger", type=int, default=0, help="tokens of a second, larger pool to encode (0: none)")
    parser.add_argument("--engine", type=json.loads, default={}, help="more arguments of the engine, as JSON")
    parser.add_argument("--replies", type=int, required=True, help="file descriptor")
    args = parser.parse_args(argv)
    options = dict(model_path=str(args.model), load_format="dummy", log_level="warning", page_size=1, **args.engine)
    if args.role == "stock":
        from sglang import Engine as SglangEngine

        engine: Engine = SglangEngine(**options)
        served: AskedBatch = Stock(engine, args)
    else:
        from sglang_ext import Engine as OurEngine

        engine = OurEngine(**options)
        served = Ours(engine, args)
    serve(served, args.replies)
    engine.shutdown()
    return 0


def empty(engine: Engine) -> None:
    """Flush the KV cache. SGLang refuses while the last step of an answered request is still under way.

    Raises:
        RuntimeError: it refused for ten seconds; what follows would have been measured on a warm cache.
    """
    for _ in range(100):
        if engine.flush_cache().success:
            return
        time.sleep(0.1)
    raise RuntimeError("the engine's cache could not be flushed: requests are pending")


def _sampling(tokens: int, **custom: Json) -> JsonObject:
    params: JsonObject = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {**params, **({"custom_params": custom} if custom else {})}


if __name__ == "__main__":
    sys.exit(main())
