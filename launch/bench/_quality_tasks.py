"""What the quality studies ask, and how answers are scored; knows no engine.

- banking77 under its own 77 names, in lower case: demonstrations first, one query after them. Held out: no training saw
  any of it.
- A passkey somewhere in filler sentences.
- For systems that fetch back blocks of a row: a passkey at a depth that is drawn, and within one block or over two; one
  of 16 passkeys that have names; a passkey among texts of banking77.
- A text that the user names, from its beginning on, for perplexity.
- A stream of banking77's demonstrations without end, for perplexity. The reference model was trained to predict labels
  that it has seen and hardly anything else, so the perplexity of the labels is given beside that of all tokens.

A decoding step reads sparsely, a prompt is read densely by every method, and the first token of an answer comes from
the prompt's pass. So the colon of "Label:" is left out of the prompt and forced by the grammar: what decides between
labels is a decoding step. Of a passkey's digits only those after the first count where prompts are dense.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sglang_ext.launch.bench._reference_reader import PREFIX, SEPARATOR, Writer
from sglang_ext.launch.bench.reference import FILLER, MODEL, Suite, demonstrations, passkey_prompt, suite_data, word_ids
from sglang_ext.launch.reference.corpus import read_rows
from sglang_ext.serving.grammar import label_grammar
from sglang_ext.types import Options

CLASSES = Suite("banking77", False, 0.8, lower=True)
FILLERS = ("sentences", "words")
"""What a passkey is hidden among: five sentences over and over, or words at random (the cascade paper's)."""
DIGITS = 5
PARTS = 16
"""Of a stream."""
CHARACTERS = 10
"""Of a token of a book, at most, in the mean: so much of a file is read."""


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
        places: of each prompt, (first token, end token) of what its question asks for; empty where nobody asks.
        ends: whether an answer ends where the model says so, and not after `new_tokens` in any case.
        chance: the share of right answers that chance gives; None where nobody asks.
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
    places: list[tuple[int, int]] = field(default_factory=list)
    ends: bool = False
    chance: float | None = None

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

    def marks(self, said: Sequence[str]) -> tuple[list[int], list[float]]:
        """Of each answer, of which `said` counts: 1 if it is right, else 0; and what share of it is right."""
        exact = [int(text == right) for text, right in zip(said, self.wanted, strict=True)]
        if "passkey" not in self.name:
            return exact, [float(one) for one in exact]
        return exact, [digits_right(text, right) for text, right in zip(said, self.wanted, strict=True)]


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


def passkeys(
    writer: Writer, length: int, trials: int, skip: int = 0, seed: int = 0, filler: str = FILLERS[0]
) -> QualityTask:
    """A key at every tenth of depth, `trials` times each, so that prompt and answer are `length` tokens together.

    Args:
        skip: how many first digits do not count.
        filler: what it is hidden among, one of `FILLERS`.

    Raises:
        ValueError: the prompt is too short for the key, or words are asked of a tokenizer that has none.
    """
    prompts, keys, cells = [], [], []
    words = word_ids(writer) if filler == "words" else []
    if filler == "words" and not words:
        raise ValueError(f"filler={filler!r}: the tokenizer has no token that is one word with the space before it")
    for tenth in range(10):
        rng = random.Random(1000 * length + tenth + 100_000_000 * seed)
        for _ in range(trials):
            prompt, key = passkey_prompt(writer, length - DIGITS, (tenth + rng.random()) / 10, rng, words)
            prompts.append(prompt)
            keys.append(key)
            cells.append(tenth)
    name = f"passkey{' among words' if words else ''}, {length} tokens"
    return QualityTask(name, prompts, keys, new_tokens=DIGITS, skip=skip, cells=cells)


# ---- keys among blocks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hidden:
    """How keys are hidden in a row.

    Attributes:
        title: what results call it.
        keys: how many keys there are; where there are several, each has a name.
        texts: whether they stand among texts of banking77, and not among filler sentences.
        blocks: over how many memory blocks the sentences of a key lie; 0: that is left to chance.
    """

    title: str
    keys: int = 1
    texts: bool = False
    blocks: int = 0


HIDDEN = {
    "plain": Hidden("passkey"),
    "named": Hidden("16 named passkeys", keys=16),
    "texts": Hidden("passkey in banking77 texts", texts=True),
    "block": Hidden("passkey within one block", blocks=1),
    "split": Hidden("passkey over two blocks", blocks=2),
}
BLOCK = 32  # tokens of a memory block, unless others are asked for


def hidden_keys(
    writer: Writer, data: str, kind: str, length: int, prompts: int, sinks: int, seed: int, block: int = BLOCK
) -> QualityTask:
    """Prompts that ask for a key at a depth that is drawn uniformly; prompt and answer are `length` tokens together.

    A key stands behind a whole piece of the row: filler sentences, or a text. Of these places it takes the nearest to
    its depth where it lies over as many blocks as the kind says.

    Args:
        data: folder of the classification sets; read for `texts` alone.
        kind: one of `HIDDEN`.
        prompts: how many; a prompt depends on its number, and not on how many there are.
        sinks: tokens before the first memory block.
        seed: of keys, names, depths and texts.
        block: tokens of a memory block.

    Raises:
        ValueError: the row is too short for its keys, or no place in it is as the kind says.
    """
    hidden = HIDDEN[kind]
    task = QualityTask(f"{hidden.title}, {length} tokens", [], [], new_tokens=DIGITS)
    texts = [text.lower() for text, _ in read_rows(data, CLASSES.name, "train")] if hidden.texts else []
    lines = writer.tokenizer([f"{text}\n" for text in texts], add_special_tokens=False)["input_ids"] if texts else []
    first, later = writer.encode(FILLER), writer.encode(f" {FILLER}")
    words = one_token_words(writer)
    for number in range(prompts):
        rng = random.Random(f"{kind} {length} {seed} {number}")
        pieces = _without_end(lines, rng) if lines else itertools.chain([first], itertools.repeat(later))
        names = rng.sample(words, hidden.keys) if hidden.keys > 1 else [""]
        keys = [(name, "".join(rng.choices("0123456789", k=DIGITS)), rng.random()) for name in names]
        asked = rng.choice(keys)
        try:
            prompt, place = _row(writer, hidden, pieces, keys, asked, length - DIGITS, (sinks, block))
        except ValueError as error:
            raise ValueError(f"{task.name}: {error}") from error
        task.prompts.append(prompt)
        task.answers.append(asked[1])
        task.cells.append(10 * place[0] // len(prompt))
        task.places.append(place)
    return task


Key = tuple[str, str, float]  # (name, digits, depth)


def _row(
    writer: Writer,
    hidden: Hidden,
    pieces: Iterator[list[int]],
    keys: Sequence[Key],
    asked: Key,
    length: int,
    sizes: tuple[int, int],
) -> tuple[list[int], tuple[int, int]]:
    """A prompt of `length` tokens with keys among pieces, and (first token, end token) of the one that is asked for.

    `sizes` are the tokens of the sinks, and of a memory block behind them.
    """

    def of(name: str) -> str:
        return f" of {name}" if name else ""

    begin, end = ("", "\n") if hidden.texts else (" ", "")
    needles = {
        key: writer.encode(
            f"{begin}The pass key{of(key[0])} is {key[1]}. Remember it. {key[1]} is the pass key{of(key[0])}.{end}"
        )
        for key in keys
    }
    question = writer.encode(f"\n\nWhat is the pass key{of(asked[0])}? The pass key{of(asked[0])} is")
    room = length - 1 - len(question) - sum(map(len, needles.values()))
    if room < 0:
        raise ValueError(f"expected at least {length + DIGITS - room} tokens")
    filler, stops = list[int](), [0]
    while len(filler) < room:
        filler += next(pieces)
        stops.append(min(len(filler), room))
    tokens, place, done = [writer.tokenizer.bos_token_id], (0, 0), 0
    for key in sorted(keys, key=lambda each: each[2]):
        size, shift = len(needles[key]), len(tokens) - done
        fitting = [stop for stop in stops if stop >= done and _lies_over(hidden.blocks, stop + shift, size, *sizes)]
        if not fitting:
            raise ValueError(f"no place where {size} tokens lie over {hidden.blocks} blocks; expected a longer row")
        stop = min(fitting, key=lambda each: abs(each - key[2] * room))
        tokens += [*filler[done:stop], *needles[key]]
        done = stop
        if key is asked:
            place = (len(tokens) - size, len(tokens))
    return [*tokens, *filler[done:room], *question], place


def _lies_over(blocks: int, first: int, size: int, sinks: int, block: int) -> bool:
    """Whether `size` tokens from `first` on lie over so many blocks behind the sinks; 0: any number."""
    return not blocks or (first >= sinks and len(blocks_of((first, first + size), sinks, block)) == blocks)


def _without_end(lines: Sequence[list[int]], rng: random.Random) -> Iterator[list[int]]:
    """All lines in random order, and then again."""
    while True:
        yield from rng.sample(lines, len(lines))


def one_token_words(writer: Writer) -> list[str]:
    """Words that are one token behind a space, in the vocabularies of byte-level BPE and of SentencePiece."""
    words = (token[1:] for token in writer.tokenizer.get_vocab() if token[0] in "Ġ▁")
    return sorted(word for word in words if len(word) > 4 and word.isascii() and word.isalpha() and word.islower())


def block_of(settings: Options) -> int:
    """Tokens of a memory block. Files of earlier versions do not say them, and suites without keys have none."""
    return int(settings.get("block", BLOCK))


def filler_of(settings: Options) -> str:
    """What passkeys are hidden among. Files of earlier versions, and other suites, do not say it."""
    return str(settings.get("filler", FILLERS[0]))


def blocks_of(place: tuple[int, int], sinks: int, block: int) -> list[int]:
    """The memory blocks of `block` tokens that hold the tokens [first, end) of a row; sinks are in none."""
    return sorted({(token - sinks) // block for token in range(max(place[0], sinks), place[1])})


def key_tasks(writer: Writer, settings: Options, length: int) -> list[QualityTask]:
    """The tasks of a suite that ask for keys in rows of `length` tokens."""
    seed = settings["seed"]
    if settings["suite"] != "ltri":
        skip, filler = int(settings["suite"] == "double_p"), filler_of(settings)
        return [passkeys(writer, length, settings["trials"], skip, seed, filler)]
    data, prompts, sinks = settings["data"], settings["prompts"][str(length)], settings["sinks"]
    block = block_of(settings)
    return [hidden_keys(writer, data, kind, length, prompts, sinks, seed, block) for kind in settings["hidden"]]


def digits_right(said: str, key: str) -> float:
    """Share of the key's digits that stand at their place (the cascade paper's measure; chance is 0.1)."""
    return sum(a == b for a, b in zip(said, key, strict=False)) / len(key)


@dataclass(frozen=True)
class StreamTask:
    """A text to be read from its beginning to its end.

    Attributes:
        tokens: token ids, BOS first.
        labels: of each token, whether it is one of a label.
        part: tokens of a part that has a perplexity of its own; 0: there are `PARTS` of them.
    """

    tokens: list[int]
    labels: list[bool]
    part: int = 0

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


def of_model(settings: Options) -> str:
    """What names of tasks begin with: the model's where it is not the embedded one."""
    model = Path(settings["model"])
    return "" if model == MODEL else f"{model.name}, "


def books(writer: Writer, settings: Options) -> dict[str, StreamTask]:
    """The first tokens of each of `--books`, by the name of their task, which has the model's where it is another one.

    Raises:
        ValueError: a file cannot be read as text, has fewer tokens than `--stream` says, or is called like another; or
            `--stream` leaves nothing to predict.
    """
    found, tokens = dict[str, StreamTask](), settings["stream"]
    if tokens < 2:
        raise ValueError(f"--stream {tokens}: expected at least 2 tokens of a book, of which the first is given")
    for path in settings["books"]:
        try:
            with open(path, encoding="utf-8", errors="strict") as file:
                text = file.read(CHARACTERS * tokens)
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--books {path}: {error}; expected a text file in UTF-8") from error
        ids = [writer.tokenizer.bos_token_id, *writer.encode(text)][:tokens]
        if len(ids) < tokens:
            raise ValueError(f"--books {path}: {len(ids)} tokens; expected {tokens}, or a smaller --stream")
        name = f"{of_model(settings)}{Path(path).stem}, {tokens} tokens"
        if name in found:
            raise ValueError(f"--books {path}: another one has this name, too; results call books by their names")
        found[name] = StreamTask(ids, [False] * tokens, settings["part"])
    return found


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
