"""Options that users set, as frozen dataclasses: the HTTP API, the Python API and the command line all read these."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import reprlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from sglang_ext.policies.clustering import CHOICES
from sglang_ext.policies.dbsa import PATTERNS, POSITIONS, BlockSparse
from sglang_ext.retrievers.registry import RETRIEVERS, reads_text
from sglang_ext.types import JsonObject, Options

ATTENTION_BACKEND = "dbsa"
RADIX_CACHE_BACKEND = "sglang_ext"
DRAFTING = "SPARSE_DRAFT"
"""Name of our `--speculative-algorithm` (`sglang_ext.drafting`)."""

POLICY_ENV = "SGLANG_EXT_POLICY"
"""Environment variable of the server: options of the policy that `--attention-backend` names, a JSON object."""

NAMES = "names"
"""In a field's metadata: what its value is, or begins with, which the command line shows."""

GROUPINGS = ("length_balanced", "random", "cluster", "cluster_diverse")
ORDERS = ("pool", "low_to_high", "high_to_low", "reversed")
GRANULARITIES = ("block", "example")
BLOCK_SCORES = ("best", "text")
CONSTRAINTS = ("labels",)
CHOOSERS = ("likely",)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_NUMBER = re.compile(r"[1-9][0-9]{0,17}")
_FIELDS = ("{input}", "{output}")
_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "None": (type(None),),
    "tuple[int, ...]": (list, tuple),
}


def check_name(name: str) -> str:
    """A pool's name, or ValueError: it stands in URLs and file names."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"pool name {name!r}: expected 1 to 128 letters, digits, '_', '-' and '.', starting with a letter or digit"
        )
    return name


def split_name(asked: str) -> tuple[str, int | None]:
    """(a pool's name, the number of the version) of what a request names: `tickets`, or `tickets@7`.

    No pool has an "@" in its name (`check_name`), so what stands behind it is always a version.

    Raises:
        ValueError: it is no version.
    """
    name, at, number = asked.partition("@")
    if not at:
        return asked, None
    if not _NUMBER.fullmatch(number):
        raise ValueError(
            f"pool {asked!r}: expected a name, or a name and the number of a version, which is at least 1, like"
            " 'tickets@7'; names have no '@'"
        )
    return name, int(number)


def check_text(text: str, what: str) -> str:
    """A text that UTF-8 can spell, or ValueError: a lone surrogate would end whatever writes or sends it later."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} holds a lone surrogate (U+{ord(text[error.start]):04X} at character {error.start}):"
            " expected text that UTF-8 can spell; send both halves of the pair, or leave it out"
        ) from None
    return text


CONVERSATION_OPTIONS = frozenset({"conversation", "continue", "conversation_key"})
"""Names in `custom_params` of a request to a server of streams, beside those of its policy."""


TOLD = 8
"""Unknown names that an error lists, at most."""


def unknown_names(found: Iterable[str], known: Collection[str], what: str) -> ValueError | None:
    """The error for names in `found` that are not in `known`, with the nearest known name of each; None without any."""
    unknown = sorted(set(found) - set(known))
    if not unknown:
        return None
    told = unknown[:TOLD]  # to look for near names takes long
    near = dict.fromkeys(match for name in told for match in difflib.get_close_matches(name, known, 1))
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    more = f" and {len(unknown) - TOLD} more" if len(unknown) > TOLD else ""
    return ValueError(f"{what}: unknown option {', '.join(told)}{more}; known are {', '.join(sorted(known))}{hint}")


def typed(cls: type, values: Options, what: str) -> JsonObject:
    """`values` checked against the dataclass `cls`: unknown names, wrong types and lone surrogates are errors."""
    fields = {each.name: each for each in dataclasses.fields(cls)}
    problem = unknown_names(values, fields, what)
    if problem:
        raise problem
    for name, value in values.items():
        accepted = [kind for part in str(fields[name].type).split("|") for kind in _KINDS[part.strip()]]
        # bool is a subclass of int, and 1 token is not "true".
        if not isinstance(value, tuple(accepted)) or (isinstance(value, bool) and bool not in accepted):
            raise ValueError(
                f"{what}: {name}={reprlib.repr(value)} is a {type(value).__name__}; expected {fields[name].type}"
            )
        if isinstance(value, str):
            check_text(value, f"{what}: {name}")
    return dict(values)


OptionsT = TypeVar("OptionsT")


def options_in(variable: str, cls: type[OptionsT]) -> OptionsT:
    """The frozen dataclass `cls` from a JSON object in an environment variable; defaults for what is left out.

    Raises:
        ValueError: the variable holds no JSON object, an option that `cls` does not have, or a value of a wrong type.
    """
    return cls(**typed(cls, json_object(os.environ.get(variable) or "{}", variable), variable))


def json_object(text: str, what: str) -> JsonObject:
    """The JSON object that an operator wrote as `what`, or ValueError."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{what}={text}: expected a JSON object ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{what}={text}: expected a JSON object, like {{}}; got a {type(values).__name__}")
    return values


def policy_options(cls: type[OptionsT]) -> OptionsT:
    """The server's options of its policy (`POLICY_ENV`): see `options_in`."""
    return options_in(POLICY_ENV, cls)


@dataclass(frozen=True)
class PoolOptions:
    """How a pool of demonstrations is written, cut into blocks and encoded (DBSA, sections 2.1 and 3).

    Attributes:
        template: text of one demonstration; must contain `{input}` and `{output}`, may contain `{label_prefix}`.
        label_prefix: what stands before an output.
        separator: text after every demonstration.
        block_size: demonstrations in a block (the paper: 50).
        sink_blocks: first blocks that every block attends to and every request selects (the paper: 1).
        previous_blocks: blocks just before it that a block attends to (the paper: 2).
        grouping: how demonstrations are dealt into blocks.
        pattern: attention pattern of encoding.
        positions: `sequential` (the paper) or `local`, which pools longer than the context need.
        seed: of the grouping.
        pinned: keep the blocks in memory; an unpinned pool's evicted blocks are encoded again when next needed, or
            come back from host memory where the server has some.
        system: system prompt of chat requests that use the pool.
        readable: any client may have its texts returned word by word (`return_prompt_token_ids`); else only those who
            may see pools' definitions.
    """

    template: str = "{input}\n{label_prefix}{output}"
    label_prefix: str = "Label: "
    separator: str = "\n\n"
    block_size: int = 50
    sink_blocks: int = 1
    previous_blocks: int = 2
    grouping: str = field(default="length_balanced", metadata={CHOICES: GROUPINGS})
    pattern: str = field(default="sink+previous+self", metadata={CHOICES: PATTERNS})
    positions: str = field(default="sequential", metadata={CHOICES: POSITIONS})
    seed: int = 0
    pinned: bool = True
    system: str | None = None
    readable: bool = False

    def __post_init__(self) -> None:
        for place in _FIELDS:
            if place not in self.template:
                raise ValueError(f"template {self.template!r} lacks {place}; it must contain {' and '.join(_FIELDS)}")
        if self.template.index("{input}") > self.template.index("{output}"):
            raise ValueError(f"template {self.template!r}: {{output}} must come after {{input}}: it is generated")
        tail = self.template.split("{output}", 1)[1]
        if any(place in tail for place in _FIELDS):
            raise ValueError(
                f"template {self.template!r}: {{input}} and {{output}} stand once, the output last of them"
            )
        if self.block_size < 1:
            raise ValueError(f"block_size={self.block_size}: expected at least 1 demonstration a block")
        if self.grouping not in GROUPINGS:
            raise ValueError(f"grouping {self.grouping!r}: expected one of {', '.join(GROUPINGS)}")
        self.block_sparse  # noqa: B018  its own checks

    @property
    def block_sparse(self) -> BlockSparse:
        """The attention pattern these options ask for."""
        return BlockSparse(self.pattern, self.sink_blocks, self.previous_blocks, self.positions)

    @classmethod
    def parse(cls, values: Options) -> PoolOptions:
        """Options from JSON-like values; ValueError names an unknown option, a wrong type or a wrong value."""
        return cls(**typed(cls, values, "pool options"))

    @property
    def answer_end(self) -> str:
        """What follows an output in the demonstrations: the rest of the template, and the separator."""
        return self._fill(self.template.split("{output}", 1)[1], input="", output="") + self.separator

    def render(self, input: str, output: str) -> str:
        """One demonstration as text, without the separator."""
        return self._fill(self.template, input=input, output=output)

    def render_query(self, input: str) -> tuple[str, str]:
        """(prompt of a question, the white space its answer starts with).

        The prompt is the template up to the output with trailing white space taken off, because a tokenizer puts a
        space at the beginning of the next word.
        """
        text = self._fill(self.template.split("{output}")[0], input=input, output="")
        stripped = text.rstrip()
        return stripped, text[len(stripped) :]

    def _fill(self, template: str, **values: str) -> str:
        values["label_prefix"] = self.label_prefix
        # One pass, so that a field's name inside a demonstration's text stays text.
        return re.sub(r"\{(input|output|label_prefix)\}", lambda match: values[match[1]], template)


@dataclass(frozen=True)
class RequestOptions:
    """What a request asks of a pool: the keys of `custom_params`.

    Attributes:
        pool: the pool's name, or its name and the number of a version: `tickets@7`.
        ratio: share of the pool's blocks (or demonstrations) to attend to, in (0, 1]; the paper: 0.3.
        blocks: how many blocks instead, sinks included.
        block_ids: the selection itself, in view order, for users with their own retriever.
        order: order of the selected blocks after the sinks.
        retriever: name in the registry of retrievers; `dense:MODEL` and `random:SEED` say which model or seed, and
            `bm25:stem`, `bm25:stop_words` and `bm25:stem+stop_words` that BM25's terms are stems of English words, or
            that English stop words are dropped, or both.
        granularity: `block`, or `example` for single demonstrations cut out of their blocks (Table 6).
        block_score: how relevant a block is: `best`, as its most relevant demonstration, or `text`, as its whole text,
            which is what the paper compares.
        rebase: `false` leaves each selected token at the position at which its block was encoded, and the question
            follows the highest of them: SGLang's own attention can answer, as if the tokens were a prompt's cached
            prefix. Else they are seen at consecutive positions from 0, as in the paper (section 2.2), which needs
            attention of its own.
        constrain: `labels` makes the answer one of the pool's labels: greedily, token by token among their spellings;
            sampled where a temperature is given; with `label_probs` and no temperature, the most likely label.
        choose: `likely` answers with the label whose whole text is the most likely one. The server searches for it in
            the tree of the labels' tokens, before the answer begins.
        label_probs: also return each label's probability: its share among all labels, each as a whole text. They are
            scored before the answer begins.
        query: text to retrieve with, when the request brings token ids.
        raw: take the request's text as it is instead of through the pool's template.
        explain: also return, as `selection`, the score and the demonstrations of each block that was selected. Only for
            those who may read the pool (`readable`, or the key that shows definitions).
    """

    pool: str
    ratio: float | None = None
    blocks: int | None = None
    block_ids: tuple[int, ...] | None = None
    order: str = field(default="pool", metadata={CHOICES: ORDERS})
    retriever: str = field(default="bm25", metadata={NAMES: tuple(RETRIEVERS)})
    granularity: str = field(default="block", metadata={CHOICES: GRANULARITIES})
    block_score: str = field(default="best", metadata={CHOICES: BLOCK_SCORES})
    rebase: bool = True
    constrain: str | None = field(default=None, metadata={CHOICES: CONSTRAINTS})
    choose: str | None = field(default=None, metadata={CHOICES: CHOOSERS})
    label_probs: bool = False
    query: str | None = None
    raw: bool = False
    explain: bool = False

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order {self.order!r}: expected one of {', '.join(ORDERS)}")
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"granularity {self.granularity!r}: expected one of {', '.join(GRANULARITIES)}")
        if self.block_score not in BLOCK_SCORES:
            raise ValueError(f"block_score {self.block_score!r}: expected one of {', '.join(BLOCK_SCORES)}")
        if self.constrain not in (None, *CONSTRAINTS):
            raise ValueError(f"constrain {self.constrain!r}: expected 'labels' or nothing")
        if self.choose not in (None, *CHOOSERS):
            raise ValueError(f"choose {self.choose!r}: expected 'likely' or nothing")
        if not self.rebase and self.order != "pool":
            raise ValueError(
                f"order {self.order!r} with rebase false: what stays where it was written has the order of the pool;"
                " leave one of them out"
            )
        given = [name for name in ("ratio", "blocks", "block_ids") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} given: expected at most one of ratio, blocks and block_ids")

    @property
    def scores_blocks(self) -> bool:
        """Whether the retriever scores whole blocks, not single demonstrations. One that reads no text always does."""
        return self.granularity == "block" and (self.block_score == "text" or not reads_text(self.retriever))

    @property
    def labelled(self) -> bool:
        """Whether the answer must be one of the pool's labels."""
        return self.constrain == "labels" or self.choose is not None

    @classmethod
    def parse(cls, values: Options) -> RequestOptions:
        """Options from `custom_params`; ValueError names an unknown option, a wrong type or a wrong value."""
        values = typed(cls, values, "custom_params")
        if values.get("block_ids") is not None:
            ids = values["block_ids"]
            if not all(isinstance(block, int) and not isinstance(block, bool) for block in ids):
                raise ValueError(f"custom_params: block_ids={ids!r}: expected whole numbers")
            values["block_ids"] = tuple(ids)
        return cls(**values)


DEFAULT_RATIO = 0.3  # DBSA, section 3: "we retrieve 30% of the total demonstration pool"
