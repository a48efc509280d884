"""What prompts of `_ruler` are made of: words and texts, what stands around them, and needles in a haystack."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sglang_ext.launch.bench._quality_tasks import CLASSES, one_token_words
from sglang_ext.launch.bench._reference_reader import Demo, Writer
from sglang_ext.launch.bench.reference import FILLER
from sglang_ext.launch.reference.corpus import read_rows

MARK = "USERS-WORDS"

ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class RulerPrompt:
    """A prompt and what is to be said.

    Attributes:
        tokens: token ids.
        answers: what is to be found in the model's answer, each once.
        places: (first token, end token) of each sentence that the answer needs; empty where that is the whole prompt.
        chance: the share of `answers` that somebody finds who draws as many among what the prompt offers.
    """

    tokens: list[int]
    answers: list[str]
    places: list[tuple[int, int]]
    chance: float = 0.0


@dataclass(frozen=True)
class PromptFrame:
    """What stands around the words of a prompt.

    Attributes:
        head: text before them.
        tail: text behind them, up to where the answer begins.
        chat: whether both are of a chat template.
        trained: whether words are those that the embedded model was trained on.
    """

    head: str
    tail: str
    chat: bool
    trained: bool

    @property
    def digits(self) -> int:
        """Of a number that is hidden."""
        return 5 if self.trained else 7


@dataclass(frozen=True)
class RulerSource:
    """What prompts are made of.

    Attributes:
        writer: the tokenizer.
        frame: what stands around all prompts.
        words: that are one token behind a space, none of which is a part of another one.
        labels: of the texts, none of which is a part of another one.
        shown: texts with their labels, for haystacks and documents.
        asked: further texts with their labels.
    """

    writer: Writer
    frame: PromptFrame
    words: list[str]
    labels: list[str]
    shown: list[Demo]
    asked: list[Demo]


def frame_of(writer: Writer, trained: bool) -> PromptFrame:
    """The model's chat template, or BOS alone where it has none, or was not `trained` with it."""
    tokenizer = writer.tokenizer
    if trained or not tokenizer.chat_template:
        return PromptFrame(tokenizer.bos_token or "", "", False, trained)
    message = [{"role": "user", "content": MARK}]
    text = str(
        tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    )
    head, _, tail = text.partition(MARK)
    return PromptFrame(head, tail, True, False)


def ruler_source(writer: Writer, data: str, trained: bool) -> RulerSource:
    """Words of the tokenizer's vocabulary and rows of the set that no training saw, in lower case.

    Labels have spaces for underscores, and those that are a part of another label are left out: an answer with the
    other one would count.
    """
    shown, asked = (
        [(text.lower(), label.replace("_", " ").lower()) for text, label in read_rows(data, CLASSES.name, split)]
        for split in ("train", "test")
    )
    labels = apart(sorted({label for _, label in shown}))
    shown, asked = ([row for row in rows if row[1] in labels] for rows in (shown, asked))
    return RulerSource(writer, frame_of(writer, trained), apart(one_token_words(writer)), labels, shown, asked)


def apart(words: Sequence[str]) -> list[str]:
    """The words that are no part of another one."""
    text = " " + "  ".join(words) + " "
    return [word for word in words if text.count(word) == 1]


# ---- pieces ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RulerWords:
    """What a task says around its haystack: before it, behind it, and the first words of the answer."""

    begin: str
    question: str
    lead: str


def ends_of(source: RulerSource, words: RulerWords) -> tuple[list[int], list[int]]:
    """Tokens before and behind a haystack."""
    frame, encode = source.frame, source.writer.encode
    lead = words.lead.lstrip() if frame.chat else words.lead
    return encode(frame.head + words.begin), encode(words.question + frame.tail + lead)


def room_of(tokens: int, *parts: Sequence[int]) -> int:
    """Tokens that parts of a prompt leave.

    Raises:
        ValueError: there are more of theirs.
    """
    taken = sum(map(len, parts))
    if taken > tokens:
        raise ValueError(f"expected at least {taken}, which it takes without any haystack; ask for longer rows")
    return tokens - taken


def fitting(pieces: Iterable[list[int]], room: int) -> list[list[int]]:
    """The first pieces that have no more than `room` tokens together."""
    kept = list[list[int]]()
    for piece in pieces:
        room -= len(piece)
        if room < 0:
            break
        kept.append(piece)
    return kept


def hidden_in(
    source: RulerSource, words: RulerWords, pieces: Iterable[str], needles: Sequence[tuple[float, str]], tokens: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """A prompt with needles among the pieces of a haystack, and the places of these in the order of their depths.

    Args:
        needles: (depth from 0 to 1, text), sorted.
    """
    before, behind = ends_of(source, words)
    encoded = [(depth, source.writer.encode(text)) for depth, text in needles]
    room = room_of(tokens, before, behind, *(needle for _, needle in encoded))
    straw = fitting(map(_cached(source.writer), pieces), room)
    prompt, places, done = before, list[tuple[int, int]](), 0
    for depth, needle in encoded:
        stop = round(depth * len(straw))
        prompt = [*prompt, *itertools.chain(*straw[done:stop])]
        places.append((len(prompt), len(prompt) + len(needle)))
        prompt, done = [*prompt, *needle], stop
    return [*prompt, *itertools.chain(*straw[done:]), *behind], places


def _cached(writer: Writer) -> Callable[[str], list[int]]:
    """`Writer.encode`, once for each text."""
    known: dict[str, list[int]] = {}

    def encode(text: str) -> list[int]:
        if text not in known:
            known[text] = writer.encode(text)
        return known[text]

    return encode


def noise() -> Iterator[str]:
    return itertools.chain([FILLER], itertools.repeat(f" {FILLER}"))


def texts_of(source: RulerSource, rng: random.Random) -> Iterator[str]:
    """All texts in random order, a line each, and then again."""
    while True:
        yield from (f"{text}\n" for text, _ in rng.sample(source.shown, len(source.shown)))


def mixed(items: Sequence[ItemT], rng: random.Random) -> list[ItemT]:
    return rng.sample(items, len(items))
