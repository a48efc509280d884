"""The requests of ``sglang-ext bench serve``: what clients ask of our servers, and the same of stock SGLang's.

Tokens and weights are random, and all answers have the length that was asked for: what is measured does not depend on
what the model says. Questions over pools are the exception to random tokens, because retrieval reads their text.
"""

from __future__ import annotations

import itertools
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from sglang_ext.launch.bench._cascade_engine import drawn
from sglang_ext.launch.bench._dbsa_engine import OPTIONS, demonstrations, examples, text_of
from sglang_ext.launch.bench._serve_load import LoadRequest
from sglang_ext.launch.bench._shapes import TOKENIZER
from sglang_ext.launch.demo_server import Server
from sglang_ext.names import Tokenizer
from sglang_ext.types import Json, JsonObject

CHAT_PROMPT, CHAT_ANSWER = 161, 338
"""Mean tokens of a prompt and of an answer of ShareGPT's conversations (Kwon et al. 2023, Figure 11)."""
SPREAD = 1.0
"""Standard deviation of the logarithm of these lengths."""
LONGEST = 1024
"""Tokens of one of them, at most."""
SEEDS = 1_000_000
"""Questions of one seed, at most."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything there is.

    Attributes:
        pools: that questions are asked about; the n-th is asked 1/n times as often as the first (Zipf).
        pool_tokens: of each.
        block_size: demonstrations of a block.
        ratio: share of a pool that a question selects.
        answer: tokens of an answer over a pool.
        encoded: tokens of the pool that is encoded under load.
        long: tokens of a long prompt, at least and at most.
        decoded: tokens of the answer to a long prompt.
    """

    pools: int = 8
    pool_tokens: int = 30_000
    block_size: int = 74
    ratio: float = 0.3125
    answer: int = 8
    encoded: int = 90_000
    long: tuple[int, int] = (32_768, 65_536)
    decoded: int = 512


class Mix(ABC):
    """Requests of one kind.

    Args:
        sizes: of everything.

    Attributes:
        name: of it, in ``--mixes``.
        words: what it is, in rows.
        backend: `--attention-backend` of the server of ours that answers it.
        aim: how many times stock SGLang's goodput ours should be; None where nothing is aimed at.
    """

    name: str
    words: str
    backend = "dbsa"
    aim: float | None = None

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def prepare(self, server: Server, *, ours: bool) -> None:
        """Have a server know what requests name."""
        return

    def clean_up(self, server: Server, *, ours: bool) -> None:
        """Have a server forget that."""
        return

    @abstractmethod
    def requests(self, seed: int, *, ours: bool) -> Iterator[LoadRequest]:
        """Requests without end, the same for both servers where the seed is the same."""


class Questions(Mix):
    """Questions over pools; on stock SGLang the pool is a cached prefix of each."""

    name = "questions"
    words = "questions over pools"
    aim = 3.0

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from transformers import AutoTokenizer

        found: Tokenizer = AutoTokenizer.from_pretrained(str(TOKENIZER))
        return found

    @cached_property
    def pools(self) -> list[list[JsonObject]]:
        """Demonstrations of each pool."""
        return [self.made(number) for number in range(self.sizes.pools)]

    @cached_property
    def prefixes(self) -> list[list[int]]:
        """Each pool as tokens of a prompt."""
        return [self.ids("".join(map(text_of, pool))) for pool in self.pools]

    def made(self, number: int) -> list[JsonObject]:
        """Demonstrations of a pool that has nothing in common with others."""
        return [{**each} for each in demonstrations(self.sizes.pool_tokens, seed=number * 1_000_000)]

    def ids(self, text: str) -> list[int]:
        """Tokens of a text within a prompt."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def prepare(self, server: Server, *, ours: bool) -> None:
        for number in range(self.sizes.pools):
            if ours:
                body = {"demonstrations": self.pools[number], "block_size": self.sizes.block_size}
                server.call("PUT", f"/v1/pools/{pool_name(number)}", body)
            else:
                server.call("POST", "/generate", plain(self.prefixes[number], 1).body)

    def clean_up(self, server: Server, *, ours: bool) -> None:
        for number in range(self.sizes.pools if ours else 0):
            server.call("DELETE", f"/v1/pools/{pool_name(number)}")

    def requests(self, seed: int, *, ours: bool) -> Iterator[LoadRequest]:
        dice, sizes = random.Random(seed), self.sizes
        weights = [1 / (number + 1) for number in range(sizes.pools)]
        for number in itertools.count(seed * SEEDS):
            [pool] = dice.choices(range(sizes.pools), weights)
            question = examples(1, 100_000_000 + number)[0]["input"]
            if ours:
                custom: JsonObject = {"pool": pool_name(pool), "ratio": sizes.ratio}
                params = {**sampling(sizes.answer), "custom_params": custom}
                yield LoadRequest({"text": question, "sampling_params": params}, sizes.answer)
            else:
                asked = self.ids(OPTIONS.render_query(question)[0])
                yield plain(self.prefixes[pool] + asked, sizes.answer)


class Chat(Mix):
    """Plain requests with the lengths of ShareGPT's conversations."""

    name = "chat"
    words = "plain chat of ShareGPT's lengths"
    aim = 0.98

    def requests(self, seed: int, *, ours: bool) -> Iterator[LoadRequest]:
        dice = random.Random(seed)
        for number in itertools.count(seed * SEEDS):
            prompt, answer = (length(dice, mean) for mean in (CHAT_PROMPT, CHAT_ANSWER))
            yield plain(drawn(prompt, number), answer)


class Long(Mix):
    """Long prompts with long answers."""

    name = "long"
    words = "long prompts and answers"
    backend = "double_p"

    def requests(self, seed: int, *, ours: bool) -> Iterator[LoadRequest]:
        dice = random.Random(seed)
        for number in itertools.count(seed * SEEDS):
            yield plain(drawn(dice.randint(*self.sizes.long), number), self.sizes.decoded)


class LongStreams(Long):
    """The same on a server of streams."""

    name = "streams"
    words = "long prompts and answers as streams"
    backend = "cascade"


MIXES: dict[str, type[Mix]] = {each.name: each for each in (Questions, Chat, Long, LongStreams)}


def pool_name(number: int) -> str:
    """Of one of the pools."""
    return f"load-{number}"


def length(dice: random.Random, mean: int) -> int:
    """Tokens of a prompt or an answer, from a log-normal distribution with such a mean."""
    return max(4, min(LONGEST, round(dice.lognormvariate(math.log(mean) - SPREAD**2 / 2, SPREAD))))


def sampling(tokens: int) -> JsonObject:
    """Parameters of an answer of so many tokens."""
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}


def plain(prompt: Sequence[int], tokens: int) -> LoadRequest:
    """A request that any server takes."""
    ids: list[Json] = [*prompt]
    return LoadRequest({"input_ids": ids, "sampling_params": sampling(tokens)}, tokens)
