"""This module asks a running server the demo's questions with each of the five methods that `launch.demo` names,
measures the time that this takes, and makes a row of the table from each method's answers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from sglang_ext.launch.answers import completed, counted, failure
from sglang_ext.launch.client import ServerError
from sglang_ext.launch.demo_data import DemoTask
from sglang_ext.launch.demo_server import Server
from sglang_ext.types import Json, JsonObject

if TYPE_CHECKING:
    from sglang_ext.names import Tokenizer


POOL = "demo"

Ask = Callable[[str, str], tuple[JsonObject, list[int]]]  # (question, cache key) -> (answer, blocks selected)


@dataclass(frozen=True)
class MethodRow:
    """One line of the table. Means are over the queries; times are wall-clock seconds.

    Attributes:
        setup_seconds: what is done once: encoding the pool (DBSA), prefilling it (Fixed ICL), indexing it (RetICL).
        predictions: the answer to every query, in order; None where there is none.
        failures: why there is none, of each query without an answer. They count as wrong.
        passes: how many it took to find the most likely label; None where it was not searched for.
        blocks: the blocks each query selected, in view order; empty for methods that select none.
    """

    method: str
    correct: int
    queries: int
    seconds: float
    prompt_tokens: float
    cached_tokens: float
    setup_seconds: float
    predictions: list[str | None] = field(repr=False)
    blocks: list[list[int]] = field(repr=False)
    failures: list[str] = field(default_factory=list)
    passes: float | None = None

    @property
    def accuracy(self) -> float:
        return self.correct / self.queries

    @property
    def requests_per_second(self) -> float:
        return self.queries / self.seconds


class Bench:
    """One task on one server: the pool's tokens, the label constraint, and the clock.

    Creating it encodes the pool (and times that).

    Args:
        server: the running one.
        task: what is asked over which demonstrations.
        tokenizer: the model's.
        ratio: share of the blocks, or of the demonstrations, that methods read which choose.
        concurrency: requests at a time.
        pool: options of the pool, as `PUT /v1/pools` takes them.
    """

    def __init__(
        self,
        server: Server,
        task: DemoTask,
        tokenizer: Tokenizer,
        ratio: float,
        concurrency: int,
        **pool: Json,
    ) -> None:
        from sglang_ext.config import PoolOptions
        from sglang_ext.serving.grammar import label_grammar

        self.server, self.task, self.tokenizer = server, task, tokenizer
        self.ratio, self.concurrency = ratio, concurrency
        options = PoolOptions(**pool)
        begin = time.perf_counter()
        body = {"demonstrations": task.demonstrations, **pool}
        server.call("PUT", f"/v1/pools/{POOL}", body)
        self.encode_seconds = time.perf_counter() - begin

        self.info = server.call("GET", f"/v1/pools/{POOL}?tokens=true")
        self.blocks: list[list[int]] = [block["token_ids"] for block in self.info["blocks"]]
        self.options = options
        self.lead = options.render_query("")[1]
        self.end = options.answer_end
        self.grammar = label_grammar(self.info["labels"], self.lead, self.end)
        longest = max(len(self._ids(self.lead + label + self.end)) for label in self.info["labels"])
        # A label may also be spelled in more tokens than the tokenizer's own choice: each is at least one character.
        self.new_tokens = max(2 * longest, longest + 8)
        header = len(self.blocks[0]) - sum(self._demonstration_lengths(0))
        self.header = self.blocks[0][:header]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _demonstration_lengths(self, block: int) -> list[int]:
        return [end - start for start, end in self.info["blocks"][block]["spans"]]

    def _query_ids(self, query: str) -> list[int]:
        return self._ids(self.options.render_query(query)[0])

    def _dense(self, prefix: list[int], query: str, extra_key: str | None) -> JsonObject:
        """A plain request of stock SGLang; with an `extra_key` of its own nothing of it is cached."""
        sampling = {"temperature": 0.0, "max_new_tokens": self.new_tokens, "ebnf": self.grammar, "stop": [self.end]}
        body: JsonObject = {"input_ids": prefix + self._query_ids(query), "sampling_params": sampling}
        if extra_key is not None:
            body["extra_key"] = extra_key
        answer: JsonObject = self.server.call("POST", "/generate", body)
        return answer

    def dbsa(self, ratio: float | None = None, **options: Json) -> MethodRow:
        """A share of the blocks, retrieved and stitched by the server.

        Args:
            ratio: the share, or None for that of all methods.
            options: more of the request's (`sglang_ext.config.RequestOptions`).
        """
        share = self.ratio if ratio is None else ratio

        def ask(query: str, _key: str) -> tuple[JsonObject, list[int]]:
            custom = {"pool": POOL, "ratio": share, "constrain": "labels", **options}
            sampling = {"temperature": 0.0, "max_new_tokens": self.new_tokens, "custom_params": custom}
            body: JsonObject = {"text": query, "sampling_params": sampling}
            if options:  # else a question that was asked with other options would be cached already
                body["extra_key"] = json.dumps(options, sort_keys=True)
            answer = self.server.call("POST", "/generate", body)
            return answer, answer["meta_info"].get("sglang_ext", {}).get("blocks", [])

        return self._measure(f"DBSA {share:.0%}", ask, self.encode_seconds)

    def fixed_icl(self) -> MethodRow:
        """The whole pool as a dense prompt, kept by the radix cache."""
        prefix = [token for block in self.blocks for token in block]
        begin = time.perf_counter()
        once = {"max_new_tokens": 1}
        completed(self.server.call("POST", "/generate", {"input_ids": prefix, "sampling_params": once}))
        prefill = time.perf_counter() - begin
        return self._measure("Fixed ICL", lambda query, _key: (self._dense(prefix, query, None), []), prefill)

    def _texts(self) -> dict[str, str]:
        """What is searched: the name of each demonstration -> its text."""
        return {
            f"d{at}": self.options.render(item["input"], item["output"])
            for at, item in enumerate(self.task.demonstrations)
        }

    def _searched(
        self, texts: Sequence[str], sizes: Sequence[int], sinks: int, retriever: str = "bm25"
    ) -> tuple[Callable[[str], list[int]], float]:
        """Index texts.

        Args:
            texts: of the pool's demonstrations, in its order.
            sizes: demonstrations of each candidate: 1, or those of a block, which is as relevant as its best one.
            sinks: how many of the first candidates every question gets.
            retriever: with which, by its name in the registry.

        Returns:
            (what gives the numbers of a question's candidates, the best `ratio` of all in the pool's order; the
            seconds that indexing took).
        """
        from sglang_ext.retrievers import registry
        from sglang_ext.retrievers.selection import block_scores, budget, select, starts_of

        begin = time.perf_counter()
        built = registry.get(retriever).build(texts)
        indexing = time.perf_counter() - begin
        chosen = budget(self.ratio, None, total=len(sizes), sinks=sinks)
        starts = starts_of(sizes)
        return lambda query: select(block_scores(built.score(query), starts), chosen, sinks, "pool"), indexing

    def ret_icl_by_example(self, retriever: str = "bm25") -> MethodRow:
        """The best demonstrations by `retriever` as a dense prompt, prefilled anew for each question.

        As many as the same share of the pool has (DBSA, section 4, "Baselines": RetICL). They stand in the pool's
        order: with the best one first or last the embedded model answers fewer of the demo's questions.
        """
        tokens: dict[str, list[int]] = {}
        for ids, block in zip(self.blocks, self.info["blocks"], strict=True):
            for name, (start, end) in zip(block["demonstrations"], block["spans"], strict=True):
                tokens[name] = ids[start:end]
        texts = self._texts()
        names = list(texts)
        search, indexing = self._searched(list(texts.values()), [1] * len(texts), 0, retriever)

        def ask(query: str, key: str) -> tuple[JsonObject, list[int]]:
            prefix = [*self.header, *(token for at in search(query) for token in tokens[names[at]])]
            return self._dense(prefix, query, key), []

        return self._measure("RetICL by example", ask, indexing)

    def ret_icl_by_block(self) -> MethodRow:
        """The selected blocks' demonstrations as a dense prompt, prefilled anew for each question."""
        texts, sinks = self._texts(), min(self.options.sink_blocks, len(self.blocks))
        blocks = [block["demonstrations"] for block in self.info["blocks"]]
        search, indexing = self._searched(
            [texts[id] for ids in blocks for id in ids], [len(ids) for ids in blocks], sinks
        )

        def ask(query: str, key: str) -> tuple[JsonObject, list[int]]:
            blocks = search(query)
            return self._dense([token for block in blocks for token in self.blocks[block]], query, key), blocks

        return self._measure("RetICL by block", ask, indexing)

    @property
    def methods(self) -> tuple[Callable[[], MethodRow], ...]:
        """All of them, in the table's order."""
        return self.dbsa, self.fixed_icl, self.ret_icl_by_example, self.ret_icl_by_block, self.zero_shot

    def zero_shot(self) -> MethodRow:
        """The question alone."""
        return self._measure("zero-shot", lambda query, key: (self._dense(self.header, query, key), []), 0.0)

    def _measure(self, method: str, ask: Ask, setup: float) -> MethodRow:
        """Answer every query, `concurrency` at a time, after a warm-up that is not counted.

        Raises:
            ServerError: not one query was answered.
        """
        queries = [example["input"] for example in self.task.queries]
        keys = [f"demo-{method}-{at}" for at in range(len(queries))]
        with ThreadPoolExecutor(self.concurrency) as pool:
            warm = [f"warm up {at}" for at in range(self.concurrency)]
            list(pool.map(partial(_answered, ask), warm, [f"demo-{method}-{text}" for text in warm]))
            begin = time.perf_counter()
            answers = list(pool.map(partial(_answered, ask), queries, keys))
            seconds = time.perf_counter() - begin
        reasons = [failure(answer) for answer, _ in answers]
        predictions = [
            answer["text"].strip() if reason is None else None
            for (answer, _), reason in zip(answers, reasons, strict=True)
        ]
        correct = sum(
            said == example["output"].strip() for said, example in zip(predictions, self.task.queries, strict=True)
        )
        metas = [answer["meta_info"] for (answer, _), reason in zip(answers, reasons, strict=True) if reason is None]
        searched = [meta["sglang_ext"]["choice"] for meta in metas if "choice" in meta.get("sglang_ext", {})]
        passes = [each["passes"] for each in searched]
        failures = [reason for reason in reasons if reason is not None]
        if not metas:
            raise ServerError(f"{method}: all {len(failures)} answers failed: {counted(failures)}")
        return MethodRow(
            method,
            correct,
            len(queries),
            seconds,
            sum(meta["prompt_tokens"] for meta in metas) / len(metas),
            sum(meta["cached_tokens"] for meta in metas) / len(metas),
            setup,
            predictions,
            [blocks for _, blocks in answers],
            failures,
            sum(passes) / len(passes) if passes else None,
        )


def _answered(ask: Ask, query: str, key: str) -> tuple[JsonObject, list[int]]:
    """What `ask` gives; where the server refuses, that as its answer."""
    try:
        return ask(query, key)
    except ServerError as error:
        return {"error": str(error)}, []
