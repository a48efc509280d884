"""The demo's questions: a small data set made here from a seed, or a file of one's own, split in two.

The generated set is intent classification for a public library's help desk: twelve intents, and sentences put together
from patterns, slots and ways of asking. Sentences of one intent share words, and so do different intents ("book",
"card", "room"), so that neither a single keyword nor the label's own words give the answer away.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

Example = dict[str, str]  # "input" and "output"

OPENINGS = (
    "",
    "",
    "",
    "",
    "hi, ",
    "hello, ",
    "please help, ",
    "quick question, ",
    "sorry to ask but ",
    "good morning, ",
)
CLOSINGS = ("", "", "", "", "", " please", " thanks", " today", " if that is ok", " as soon as possible")

SLOTS: dict[str, tuple[str, ...]] = {
    "book": (
        "the novel",
        "my book",
        "the atlas",
        "this cookbook",
        "the biography",
        "a comic",
        "the dictionary",
        "two books",
    ),
    "topic": ("gardening", "space travel", "baking bread", "the roman empire", "knitting", "jazz", "birds", "chess"),
    "place": (
        "the city branch",
        "the east branch",
        "the main hall",
        "the branch by the river",
        "the children's corner",
    ),
    "day": ("monday", "friday", "sunday", "the holidays", "tomorrow", "next week", "the weekend"),
    "group": ("four people", "our study group", "six students", "a chess club", "my team"),
    "device": ("my phone", "my laptop", "my tablet", "an old computer"),
    "kid": ("my daughter", "my son", "my nephew", "a five year old", "our twins"),
    "when": ("last week", "yesterday", "two days ago", "in the spring", "on the bus"),
}

# Label -> patterns. Names in braces are slots.
INTENTS: dict[str, tuple[str, ...]] = {
    "renew loan": (
        "can i keep {book} for longer",
        "i need more time with {book}",
        "extend the due date of {book}",
        "{book} is due on {day} and i am not done reading",
        "may i hold on to {book} until after {day}",
    ),
    "reserve book": (
        "put {book} aside for me",
        "someone else has {book}, can i get in line",
        "hold {book} for me at {place}",
        "let me know when {book} comes back, i want it next",
        "i would like to be on the waiting list for {book}",
    ),
    "lost item": (
        "i lost {book} {when}",
        "i cannot find {book} anywhere",
        "{book} went missing {when}, what happens now",
        "i left {book} on a train and it is gone",
        "my dog ate {book}, how do i replace it",
    ),
    "late fees": (
        "how much do i owe for {book}",
        "why was i charged because {book} came back late",
        "what does each day of delay cost",
        "i got a bill for {book} from {when}",
        "can you cancel the fine for {book}",
    ),
    "opening hours": (
        "when does {place} open on {day}",
        "is {place} closed on {day}",
        "until what time can i come to {place}",
        "are you open during {day}",
        "how late is {place} open on {day}",
    ),
    "new card": (
        "how do i sign up for a card",
        "i just moved here and want to become a member {when}",
        "what papers do i need to join at {place}",
        "can {kid} get a card of their own",
        "register me as a new reader at {place}",
    ),
    "blocked card": (
        "my card does not scan at {place}",
        "the machine at {place} says my card is locked",
        "my card stopped working {when}",
        "why is my account suspended since {when}",
        "the gate at {place} will not accept my card",
    ),
    "room booking": (
        "i need a quiet room for {group} on {day}",
        "is there a meeting room free on {day}",
        "can {group} use a room at {place}",
        "reserve a study space at {place} for {group}",
        "how do i book a table for {group} on {day}",
    ),
    "wifi help": (
        "i cannot get online with {device} at {place}",
        "what is the wifi password at {place}",
        "the internet is slow on {device}",
        "how do i connect {device} to your network",
        "{device} keeps losing the signal at {place}",
    ),
    "reading tips": (
        "what should i read about {topic}",
        "suggest something good on {topic}",
        "{kid} loves {topic}, which book would you pick",
        "i am looking for an easy introduction to {topic}",
        "do you know a book like the one on {topic} i had {when}",
    ),
    "events": (
        "is there a talk about {topic} on {day}",
        "when is the next story time for {kid}",
        "what is going on at {place} on {day}",
        "how do i get tickets for the evening on {topic}",
        "do you run a workshop on {topic} for {group}",
    ),
    "printing": (
        "how do i print from {device}",
        "what does a page in color cost at {place}",
        "can i scan a few pages of {book}",
        "the copier at {place} is out of paper",
        "where do i pick up what i sent to the printer from {device}",
    ),
}


def sentence(label: str, rng: random.Random) -> str:
    """A sentence of one intent; it may have occurred before."""
    pattern = rng.choice(INTENTS[label])
    text = re.sub(r"\{(\w+)\}", lambda match: rng.choice(SLOTS[match[1]]), pattern)
    return rng.choice(OPENINGS) + text + rng.choice(CLOSINGS)


def generate(demonstrations: int, queries: int, seed: int = 0) -> tuple[list[Example], list[Example]]:
    """(demonstrations, queries): no sentence occurs twice, intents in turn, both lists shuffled.

    Args:
        demonstrations, queries: how many of each; at most 80 an intent together.
        seed: the same seed gives the same sentences.

    Raises:
        ValueError: more sentences asked for than are sure to be found.
    """
    per_intent = -(-demonstrations // len(INTENTS)) - (-queries // len(INTENTS))
    if demonstrations < 1 or queries < 1 or per_intent > 80:
        raise ValueError(
            f"{demonstrations} demonstrations and {queries} queries: expected at least 1 of each and at most"
            f" {80 * len(INTENTS)} together; use a file of your own (--data) for more"
        )
    rng = random.Random(seed)
    seen: set[str] = set()

    def draw(count: int) -> list[Example]:
        labels = [list(INTENTS)[index % len(INTENTS)] for index in range(count)]
        examples = []
        for label in labels:
            text = sentence(label, rng)
            while text in seen:
                text = sentence(label, rng)
            seen.add(text)
            examples.append({"input": text, "output": label})
        rng.shuffle(examples)
        return examples

    # The two draws share one stream: queries come first, so that a smaller pool leaves the queries as they are.
    test = draw(queries)
    return draw(demonstrations), test


def read(path: str | Path) -> list[Example]:
    """Examples of a JSON-lines file: objects with "input" and "output", or "text" and "label".

    Raises:
        ValueError: the file cannot be read, or a line is not such an object; names the line.
    """
    from sglang_ext.serving.layout import parse_demonstrations, parse_jsonl

    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as UTF-8 text ({error})") from error
    try:
        items = parse_demonstrations(parse_jsonl(text))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return [{"input": item.input, "output": item.output} for item in items]


def split(examples: Sequence[Example], queries: int, seed: int = 0) -> tuple[list[Example], list[Example]]:
    """(candidates for demonstrations, queries): a shuffled split without a text on both sides.

    At most half of the texts become queries, so that a small file keeps demonstrations. Among the candidates the
    labels take turns, so that any first part of them holds every label as often as it can.

    Raises:
        ValueError: fewer than two different texts.
    """
    unique = list({example["input"]: example for example in examples}.values())
    if len(unique) < 2:
        raise ValueError(f"{len(unique)} different texts: expected at least 2, one to show and one to ask")
    random.Random(seed).shuffle(unique)
    taken = min(queries, len(unique) // 2)
    return take_turns(unique[taken:]), unique[:taken]


def take_turns(examples: Sequence[Example]) -> list[Example]:
    """The examples with their labels in turn: first one of every label, then a second one, and so on."""
    rank: dict[str, int] = {}
    keyed = []
    for example in examples:
        rank[example["output"]] = rank.get(example["output"], -1) + 1
        keyed.append((rank[example["output"]], example))
    return [example for _, example in sorted(keyed, key=lambda pair: pair[0])]


@dataclass(frozen=True)
class DemoTask:
    """What is shown to the model and what it is asked."""

    name: str
    demonstrations: list[Example]
    queries: list[Example]
    left_out: int = 0  # queries whose label no demonstration has

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(example["output"] for example in self.demonstrations))
