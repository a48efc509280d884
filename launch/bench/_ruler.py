"""Prompts in the manner of RULER (Hsieh et al. 2024), each a function of a seed, a length and a tokenizer alone.

Six of RULER's tasks: a number among filler (single-key), one of four numbers that have names (multi-key), all four
numbers of one name (multi-value), all variables that hold a value through assignments (variable tracking), the ten most
frequent words of a list (common words), and questions over documents. The haystack of the second and third are texts of
a classification set, in the place of essays; the documents of the last are its texts with their labels, the question is
another text, and its label the answer.

Words are RULER's, in the model's chat template where it has one. The embedded model reads the sentences that it was
trained on, without a template. A score is RULER's string match: the share of the expected answers that occur in what
the model says, in any case of letters; of one expected answer that is 0 or 1.
"""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sglang_ext.launch.bench._reference_reader import PREFIX, SEPARATOR
from sglang_ext.launch.bench._ruler_pieces import (
    RulerPrompt,
    RulerSource,
    RulerWords,
    ends_of,
    fitting,
    hidden_in,
    mixed,
    noise,
    room_of,
    texts_of,
)
from sglang_ext.launch.bench.reference import FILLER
from sglang_ext.launch.demo_data import Example, take_turns

KEYS, VALUES = 4, 4
"""Names of a multi-key prompt; values of the name of a multi-value prompt."""
HOPS = 4
"""Assignments behind the first one of a chain."""
COMMON, OFTEN, SELDOM = 10, 30, 3
"""Frequent words, how often each of them occurs at most, and how often each other one where there are enough words."""
LABELS = 16
"""Classes whose texts are the documents of a question."""


def found(said: str, answers: Sequence[str]) -> float:
    """RULER's string match: the share of `answers` that occur in what is said, in any case of letters."""
    return sum(answer.lower() in said.lower() for answer in answers) / len(answers)


def ruler_prompt(source: RulerSource, kind: str, tokens: int, seed: int, number: int) -> RulerPrompt:
    """A prompt of a kind that has `tokens` tokens, or less by what of a whole piece of its haystack does not fit.

    Args:
        kind: one of `KINDS`.
        tokens: of the prompt, the template and the beginning of the answer among them.
        seed: of all prompts.
        number: of this one.

    Raises:
        ValueError: too few tokens for what the kind hides, or too few words or texts for so many tokens.
    """
    title, make = KINDS[kind].title, KINDS[kind].make
    try:
        return make(source, random.Random(f"ruler {kind} {tokens} {seed} {number}"), tokens)
    except ValueError as error:
        raise ValueError(f"{title}, {tokens} tokens of a prompt: {error}") from error


# ---- needles ---------------------------------------------------------------------------------------------------------


def _single_key(source: RulerSource, rng: random.Random, tokens: int) -> RulerPrompt:
    name = "" if source.frame.trained else rng.choice(source.words)
    (number,) = _numbers(source, rng, 1)
    return _needles(source, noise(), [(rng.random(), name, number)], name, tokens, ends=(" ", ""))


def _multi_key(source: RulerSource, rng: random.Random, tokens: int) -> RulerPrompt:
    names = rng.sample(source.words, KEYS)
    needles = [(rng.random(), name, number) for name, number in zip(names, _numbers(source, rng, KEYS), strict=True)]
    return _needles(source, texts_of(source, rng), needles, rng.choice(names), tokens)


def _multi_value(source: RulerSource, rng: random.Random, tokens: int) -> RulerPrompt:
    name = rng.choice(source.words)
    needles = [(rng.random(), name, number) for number in _numbers(source, rng, VALUES)]
    return _needles(source, texts_of(source, rng), needles, name, tokens)


def _numbers(source: RulerSource, rng: random.Random, count: int) -> list[str]:
    """Numbers of `PromptFrame.digits`, each another one."""
    least = 10 ** (source.frame.digits - 1)
    return [str(number) for number in rng.sample(range(least, 10 * least), count)]


def _needles(
    source: RulerSource,
    haystack: Iterator[str],
    needles: Sequence[tuple[float, str, str]],
    asked: str,
    tokens: int,
    ends: tuple[str, str] = ("", "\n"),
) -> RulerPrompt:
    """A prompt that asks for the numbers of a name.

    Args:
        needles: (depth, name, number).
        ends: what stands before and behind the sentence of each.
    """
    ordered, say = sorted(needles), _passkey if source.frame.trained else _magic_number
    answers = [number for _, name, number in ordered if name == asked]
    words = (_passkey_words if source.frame.trained else _magic_number_words)(asked, len(answers))
    told = [(depth, f"{ends[0]}{say(name, number)}{ends[1]}") for depth, name, number in ordered]
    prompt, places = hidden_in(source, words, haystack, told, tokens)
    wanted = [place for place, (_, name, _) in zip(places, ordered, strict=True) if name == asked]
    return RulerPrompt(prompt, answers, wanted)


def _magic_number(name: str, number: str) -> str:
    return f"One of the special magic numbers for {name} is: {number}."


def _magic_number_words(name: str, count: int) -> RulerWords:
    begin = "{} hidden within the following text. Make sure to memorize it. I will quiz you about the {} afterwards.\n"
    if count == 1:
        asked = f"the special magic number for {name} mentioned in the provided text"
        return RulerWords(
            begin.format("A special magic number is", "number"), f"\nWhat is {asked}?", f" T{asked[1:]} is"
        )
    asked = f"the special magic numbers for {name} mentioned in the provided text"
    begin = begin.format("Some special magic numbers are", "numbers")
    return RulerWords(begin, f"\nWhat are all {asked}?", f" T{asked[1:]} are")


def _passkey(name: str, number: str) -> str:
    of = f" of {name}" if name else ""
    return f"The pass key{of} is {number}. Remember it. {number} is the pass key{of}."


def _passkey_words(name: str, count: int) -> RulerWords:
    of, many = f" of {name}" if name else "", count > 1
    asked = f"the pass key{'s' * many}{of}"
    return RulerWords("", f"\n\nWhat {'are' if many else 'is'} {asked}?", f" T{asked[1:]} {'are' if many else 'is'}")


# ---- chains, frequent words, questions -------------------------------------------------------------------------------


def assignments(rng: random.Random) -> tuple[str, list[str], list[str]]:
    """(value, names, sentences): variables that all hold the value, each from the one before it."""
    names = list[str]()
    while len(names) <= HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=5))
        names += [name] * (name not in names)
    value = str(rng.randrange(10_000, 100_000))
    held = [value, *(f"VAR {name}" for name in names)]
    return value, names, [f"VAR {name} = {source}" for name, source in zip(names, held, strict=False)]


def _chain_words(value: str) -> RulerWords:
    where = "chain(s) of variable assignment"
    said = f"According to the {where} in the text above, {HOPS + 1} variables are assigned the value {value}, they are:"
    return RulerWords(
        f"Memorize and track the {where} hidden in the following text.\n\n",
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above.",
        f" Answer: {said}",
    )


def _variables(source: RulerSource, rng: random.Random, tokens: int) -> RulerPrompt:
    """A prompt that asks for the variables of a chain, behind a short example of the same, with its answer."""
    (shown, names, sentences), (value, answers, told) = assignments(rng), assignments(rng)
    text = " ".join([FILLER, *(f"{sentence}. {FILLER}" for sentence in sentences)])
    words = _behind_example(_chain_words(shown), text, " ".join(names), _chain_words(value))
    depths = sorted(rng.random() for _ in told)
    needles = [(depth, f" {sentence}.") for depth, sentence in zip(depths, told, strict=True)]
    prompt, places = hidden_in(source, words, noise(), needles, tokens)
    return RulerPrompt(prompt, answers, places)


def _behind_example(shown: RulerWords, text: str, answer: str, asked: RulerWords) -> RulerWords:
    """The words of a task, behind an example of it whose answer is given."""
    example = f"{shown.begin}{text}{shown.question}{shown.lead} {answer}\n\n"
    return RulerWords(example + asked.begin, asked.question, asked.lead)


def word_list(words: Sequence[str], entries: int, often: int, rng: random.Random) -> tuple[list[str], list[str]]:
    """(frequent words, entries): `COMMON` words occur `often` times in a list, and others less than half so often.

    Args:
        words: to draw from.
        entries: of the list, at most: what is left of them over whole words is left out.

    Raises:
        ValueError: there are too few words, or entries, for that.
    """
    rest = entries - COMMON * often
    seldom = max(1, min(SELDOM, often // 3), -(-rest // (len(words) - COMMON)))
    if rest < seldom or 2 * seldom >= often:
        raise ValueError(f"{entries} entries of {len(words)} words: expected {COMMON} to be much more frequent")
    drawn = rng.sample(words, COMMON + rest // seldom)
    common, others = drawn[:COMMON], drawn[COMMON:]
    listed = common * often + others * seldom
    rng.shuffle(listed)
    return common, listed


def _numbered(words: Sequence[str]) -> str:
    return "".join(f" {number}. {word}" for number, word in enumerate(words, 1))


COMMON_WORDS = RulerWords(
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that"
    " appear most often.\n",
    f"\nQuestion: What are the {COMMON} most common words in the above list?",
    f" Answer: The top {COMMON} words that appear most often in the list are:",
)


def _common_words(source: RulerSource, rng: random.Random, tokens: int) -> RulerPrompt:
    """A prompt that asks for the most frequent words of a list, behind a short example of the same, with its answer."""
    usual, listed = word_list(source.words, 5 * COMMON, 3, rng)
    example = _behind_example(COMMON_WORDS, _numbered(listed), _numbered(usual).strip(), COMMON_WORDS)
    before, behind = ends_of(source, example)
    encode, room = source.writer.encode, room_of(tokens, before, behind)
    sizes = (encode(f" {number}. {source.words[0]}") for number in itertools.count(1))
    entries = len(fitting(sizes, room))
    free = [word for word in source.words if word not in listed]
    common, chosen = word_list(free, entries, min(OFTEN, entries // (2 * COMMON)), rng)
    prompt = [*before, *encode(_numbered(chosen)), *behind]
    return RulerPrompt(prompt, common, [], COMMON / len(set(chosen)))


def _question(source: RulerSource, rng: random.Random, tokens: int) -> RulerPrompt:
    """A prompt that asks for the label of a text, behind other texts of `LABELS` classes with theirs.

    The colon of "Label:" is left to the model: the first token of an answer comes from the prompt's pass, which every
    method of sparse decoding reads densely, and what decides between labels is to be a decoding step.
    """
    labels = rng.sample(source.labels, LABELS)
    text, answer = rng.choice([row for row in source.asked if row[1] in labels])
    rows = [Example(input=text, output=label) for text, label in source.shown if label in labels]
    texts = itertools.cycle(
        [f"{row['input']}{PREFIX} {row['output']}{SEPARATOR}" for row in take_turns(mixed(rows, rng))]
    )
    begin, asked = "", text
    if source.frame.chat:
        begin = "The texts below have labels. Memorize which texts have which label.\n\n"
        asked = f"What is the label of the following text? Say one of the labels above, and nothing else.\n\n{text}"
    before, behind = ends_of(source, RulerWords(begin, asked, PREFIX[:-1]))
    pieces = mixed(fitting(map(source.writer.encode, texts), room_of(tokens, before, behind)), rng)
    if len(pieces) < LABELS:
        raise ValueError(f"room for {len(pieces)} texts; expected {LABELS}, one of each class: ask for longer rows")
    return RulerPrompt([*before, *itertools.chain(*pieces), *behind], [answer], [], 1 / LABELS)


@dataclass(frozen=True)
class RulerKind:
    """A task of RULER.

    Attributes:
        title: what results call it.
        make: a prompt of (source, dice, tokens).
        new_tokens: that an answer may take.
        labelled: whether answers are labels.
    """

    title: str
    make: Callable[[RulerSource, random.Random, int], RulerPrompt]
    new_tokens: int
    labelled: bool = False


KINDS = {
    "single-key": RulerKind("single-key needle", _single_key, 16),
    "multi-key": RulerKind("multi-key needle", _multi_key, 16),
    "multi-value": RulerKind("multi-value needle", _multi_value, 64),
    "variables": RulerKind("variable tracking", _variables, 48),
    "words": RulerKind("common words", _common_words, 80),
    "questions": RulerKind("questions about banking77", _question, 24, labelled=True),
}
