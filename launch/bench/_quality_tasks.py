"""What the quality studies ask, and how answers are scored; knows no engine.

- banking77 under its own 77 names, in lower case: demonstrations first, one query after them. Held out: no training saw
  any of it.
- A passkey somewhere in filler sentences.
- A stream of banking77's demonstrations without end, for perplexity. The reference model was trained to predict labels
  that it has seen and hardly anything else, so the perplexity of the labels is given beside that of all tokens.

A decoding step reads sparsely, a prompt is read densely by every method, and the first token of an answer comes from
the prompt's pass. So the colon of "Label:" is left out of the prompt and forced by the grammar: what decides between
labels is a decoding step. Of a passkey's digits only those after the first count where prompts are dense.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_ext.launch.bench._reference_reader import PREFIX, SEPARATOR, Writer
from sglang_ext.launch.bench.reference import Suite, demonstrations, passkey_prompt, suite_data
from sglang_ext.launch.reference.corpus import read_rows
from sglang_ext.serving.grammar import label_grammar

CLASSES = Suite("banking77", False, 0.8, lower=True)
DIGITS = 5


@dataclass(frozen=True)
class QualityTask:
    """Prompts with their right answers.

    Attributes:
        name: what it is called in results.
        prompts: token ids.
        answers: what is to be said after `lead`.
        new_tokens: how many tokens an answer may take.
        lead: text that the grammar forces before the answer; empty without a grammar.
        grammar: EBNF, or None.
        stop: text that ends an answer, or None.
        skip: first characters of an answer that do not count.
        cells: of each prompt, what it is grouped by in results (a passkey's tenth of depth).
        shared: how many first tokens all prompts have in common.
    """

    name: str
    prompts: list[list[int]]
    answers: list[str]
    new_tokens: int
    lead: str = ""
    grammar: str | None = None
    stop: str | None = None
    skip: int = 0
    cells: list[int] = field(default_factory=list)
    shared: int = 0

    @property
    def length(self) -> int:
        return max(map(len, self.prompts))

    def said(self, text: str) -> str:
        """What counts of a generated text."""
        return text.strip().removeprefix(self.lead.strip()).strip()[self.skip :]

    @property
    def wanted(self) -> list[str]:
        """What counts of the answers."""
        return [answer[self.skip :] for answer in self.answers]


def classification(writer: Writer, data: str, shots: int, queries: int, seed: int, context: int) -> QualityTask:
    """banking77 with `shots` demonstrations a class; 0: as many as the context holds.

    Raises:
        ValueError: they do not fit; says how many tokens there are.
    """
    pool, asked = suite_data(writer, data, CLASSES, queries, seed)
    labels = list(pool)
    begin, lead = PREFIX[:-1], f"{PREFIX[-1]} "
    longest = max(len(writer.encode(f"{PREFIX[-1]} {label}{SEPARATOR}")) for label in labels)
    room = context - longest - 4 - max(len(writer.encode(text + begin)) for text, _ in asked)
    if shots == 0:
        while len(writer.prompt(demonstrations(pool, shots + 1, seed))) <= room:
            shots += 1
    shown = writer.prompt(demonstrations(pool, shots, seed))
    if not shots or len(shown) > room:
        raise ValueError(
            f"banking77, {shots} demonstrations a class: {len(shown)} tokens, expected at most {room}; ask for fewer"
            " (--shots), or raise --context"
        )
    return QualityTask(
        name=f"banking77, {shots} a class",
        prompts=[[*shown, *writer.encode(text + begin)] for text, _ in asked],
        answers=[label for _, label in asked],
        new_tokens=longest + 4,  # a label may be spelled in a few more tokens than the tokenizer's own choice
        lead=lead,
        grammar=label_grammar(labels, lead, SEPARATOR),
        stop=SEPARATOR,
        shared=len(shown),
    )


def passkeys(writer: Writer, length: int, trials: int, skip: int = 0, seed: int = 0) -> QualityTask:
    """A key at every tenth of depth, `trials` times each, so that prompt and answer are `length` tokens together.

    Args:
        skip: how many first digits do not count.

    Raises:
        ValueError: the prompt is too short for the key.
    """
    prompts, keys, cells = [], [], []
    for tenth in range(10):
        rng = random.Random(1000 * length + tenth + 100_000_000 * seed)
        for _ in range(trials):
            prompt, key = passkey_prompt(writer, length - DIGITS, (tenth + rng.random()) / 10, rng)
            prompts.append(prompt)
            keys.append(key)
            cells.append(tenth)
    return QualityTask(f"passkey, {length} tokens", prompts, keys, new_tokens=DIGITS, skip=skip, cells=cells)


def digits_right(said: str, key: str) -> float:
    """Share of the key's digits that stand at their place (the cascade paper's measure; chance is 0.1)."""
    return sum(a == b for a, b in zip(said, key, strict=False)) / len(key)


@dataclass(frozen=True)
class StreamTask:
    """A text to be read from its beginning to its end.

    Attributes:
        tokens: token ids, BOS first.
        labels: of each token, whether it is one of a label.
    """

    tokens: list[int]
    labels: list[bool]

    def chunks(self, size: int) -> list[list[int]]:
        """The tokens without BOS in runs that fit `size` tokens with a BOS before each: what dense attention reads."""
        bos, rest = self.tokens[0], self.tokens[1:]
        return [[bos, *rest[at : at + size - 1]] for at in range(0, len(rest), size - 1)]


def stream(writer: Writer, data: str, tokens: int, seed: int) -> StreamTask:
    """banking77's training texts with their labels, in random order, over again where they do not suffice."""
    rows = [(text.lower(), label) for text, label in read_rows(data, CLASSES.name, "train")]
    rng = random.Random(seed)
    ids, labels = [writer.tokenizer.bos_token_id], [False]
    while len(ids) < tokens:
        rng.shuffle(rows)
        for text, label in rows:
            for part, is_label in ((f"{text}{PREFIX}", False), (f" {label}", True), (SEPARATOR, False)):
                new = writer.encode(part)
                ids += new
                labels += [is_label] * len(new)
            if len(ids) >= tokens:
                break
    return StreamTask(ids[:tokens], labels[:tokens])


def perplexity(logprobs: Sequence[float]) -> float:
    """exp of the mean negative log-probability.

    Raises:
        ValueError: there are none.
    """
    if not logprobs:
        raise ValueError("no log-probabilities: a perplexity needs at least one")
    return math.exp(-sum(logprobs) / len(logprobs))


def by_bins(values: Sequence[float], chosen: Sequence[bool], size: int) -> list[float]:
    """Perplexity of the chosen values in each run of `size` values; runs without any are left out."""
    runs = (range(at, min(at + size, len(values))) for at in range(0, len(values), size))
    picked = ([values[i] for i in run if chosen[i]] for run in runs)
    return [perplexity(each) for each in picked if each]
