"""From demonstrations to blocks of tokens: grouping, rendering, tokenizing. Pure functions, no server."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglang_ext.cache.rows import Piece
from sglang_ext.config import PoolOptions, check_text
from sglang_ext.names import Tokenizer
from sglang_ext.policies.dbsa import block_identities
from sglang_ext.retrievers.grouping import group
from sglang_ext.retrievers.selection import starts_of
from sglang_ext.serving.errors import PoolError
from sglang_ext.types import Json, Options

if TYPE_CHECKING:
    import tokenizers

MOST_CHARACTERS = 1 << 20  # of one text of a demonstration: a tokenizer takes some hundred bytes for each
READ_AHEAD = 1 << 20  # characters that are tokenized before the first of them are taken

T = TypeVar("T")


@dataclass(frozen=True)
class Demonstration:
    """One example of the task."""

    id: str
    input: str
    output: str


def parse_demonstrations(
    items: Iterable[Json], taken: Collection[str] = (), most: int | None = None
) -> list[Demonstration]:
    """Demonstrations from JSON-like objects; those without an id get `d0`, `d1`, ...; a number as id becomes its text.

    Args:
        items: the objects.
        taken: ids that are not to be used again; names go on from how many they are. Looked up, never walked over.
        most: how many there may be.

    Raises:
        ValueError: an item is not an object with `input` and `output` strings, a text is too long or holds a lone
            surrogate, an id is taken twice, or there are none. Says which item (counted from 1).
        PoolError: (413) there are more than `most`.
    """
    used: set[str] = set()
    result: list[Demonstration] = []
    fresh = len(taken)
    for number, item in enumerate(items, start=1):
        if most is not None and number > most:
            sent = f"more than {most} demonstrations were sent" if most > 0 else "demonstrations were sent"
            raise PoolError(
                f"{sent}, and {len(taken)} are there: a pool holds at most"
                f" {most + len(taken)} (--max-demonstrations); use fewer, or several pools",
                413,
            )
        text, label, name = _fields(item, number)
        if name is None:
            while f"d{fresh}" in used or f"d{fresh}" in taken:
                fresh += 1
            name = f"d{fresh}"
        if name in used or name in taken:
            raise ValueError(f"demonstration {number}: id {name!r} is taken; ids are unique in a pool")
        used.add(name)
        result.append(Demonstration(name, text, label))
    if not result:
        raise ValueError("no demonstrations: a pool needs at least one")
    return result


def _fields(item: Json, number: int) -> tuple[str, str, str | None]:
    """(input, output, id) of one demonstration; None for an id that is not given."""
    if not isinstance(item, Mapping):
        raise ValueError(f"demonstration {number} is a {type(item).__name__}: expected an object with input and output")
    # The data sets people have use these names; nothing else is guessed.
    text, label = item.get("input", item.get("text")), item.get("output", item.get("label"))
    if not isinstance(text, str) or not isinstance(label, str) or not label:
        raise ValueError(
            f"demonstration {number}: got {_shown(item)}; expected strings"
            ' "input" and "output" ("text" and "label" do too), the output not empty'
        )
    name = item.get("id")
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    if name is not None and (not isinstance(name, str) or not name):
        raise ValueError(f"demonstration {number}: id {name!r}: expected a non-empty string, or a whole number")
    for what, value in (("input", text), ("output", label), ("id", name or "")):
        check_text(value, f"demonstration {number}: its {what}")
        if len(value) > MOST_CHARACTERS:
            raise ValueError(
                f"demonstration {number}: its {what} has {len(value)} characters; expected at most {MOST_CHARACTERS}"
            )
    return text, label, name


def _shown(item: Options) -> str:
    """The beginning of an item, for an error."""
    return reprlib.repr(dict(item))[:200]


def parse_jsonl(text: str) -> list[Json]:
    """Objects of a JSON-lines text; ValueError names the line that is not JSON."""
    items = []
    # Not splitlines(): it also cuts at U+2028 and others, which JSON strings may hold as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                items.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} is not JSON ({error.msg}): {line[:120]!r}") from error
            except RecursionError as error:
                raise ValueError(f"line {number} is nested too deeply: {line[:120]!r}") from error
    return items


@dataclass(frozen=True)
class Block:
    """One block of demonstrations, tokenized.

    Attributes:
        key: the name of its states (policies.dbsa).
        token_ids: its tokens; the first block's begin with the header (BOS, or the chat template's).
        demonstrations: ids in order.
        spans: (first token, end token) of each demonstration, its separator included.
        position: position of the first token when encoded.
    """

    key: str
    token_ids: tuple[int, ...]
    demonstrations: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    position: int


@dataclass(frozen=True)
class Layout:
    """A pool's demonstrations in blocks, tokenized behind one header."""

    header: tuple[int, ...]
    blocks: tuple[Block, ...]

    @property
    def tokens(self) -> int:
        return sum(len(block.token_ids) for block in self.blocks)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(block.token_ids) for block in self.blocks)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Demonstrations of each block."""
        return tuple(len(block.demonstrations) for block in self.blocks)

    @cached_property
    def starts(self) -> NDArray[np.intp]:
        """The number of each block's first demonstration, [blocks]."""
        return starts_of(self.sizes)

    @cached_property
    def whole(self) -> tuple[Piece, ...]:
        """Each block as one piece."""
        return tuple(Piece(block.key, 0, len(block.token_ids)) for block in self.blocks)

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Name of each block -> position of its first token when encoded."""
        return {block.key: block.position for block in self.blocks}

    def tokens_of(self, pieces: Iterable[Piece]) -> list[int]:
        """Token ids of pieces of these blocks, one after the other."""
        named = {block.key: block.token_ids for block in self.blocks}
        return [token for piece in pieces for token in named[piece.key][piece.start : piece.end]]


def bos(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens a prompt of this tokenizer begins with: (BOS,), or nothing where it adds none."""
    ids = tokenizer("", add_special_tokens=True)["input_ids"]
    if tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]:
        return (tokenizer.bos_token_id,)
    return ()


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], take: Callable[[tokenizers.Encoding], T], offsets: bool = False
) -> Iterator[T]:
    """What `take` takes of the `tokenizers.Encoding` of each text, in order, without special tokens.

    In threads: SGLang turns the library's own parallelism off for its whole process. An encoding takes some hundred
    bytes a token and is forgotten at once; no more than `READ_AHEAD` characters are encoded before they are taken.

    Args:
        take: called in a thread.
        offsets: whether the encodings have character offsets.

    Raises:
        ValueError: the tokenizer has no offsets (it is not a fast one), so that demonstrations cannot be told apart.
    """
    backend = _backend(tokenizer)
    encode = backend.encode_batch if offsets else backend.encode_batch_fast
    threads = min(8, os.cpu_count() or 1)

    def part_of(part: list[str]) -> list[T]:
        return [take(encoding) for encoding in encode(part, add_special_tokens=False)]

    with ThreadPoolExecutor(threads) as executor:
        for batch in _parts(texts, READ_AHEAD):
            size = max(1, -(-len(batch) // (4 * threads)))
            parts = [batch[first : first + size] for first in range(0, len(batch), size)]
            for found in executor.map(part_of, parts):
                yield from found


def _parts(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Texts one after the other in lists of at most so many characters, or of one text."""
    part: list[str] = []
    total = 0
    for text in texts:
        if part and total + len(text) > characters:
            yield part
            part, total = [], 0
        part.append(text)
        total += len(text)
    if part:
        yield part


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of one text, without special tokens: what calling the tokenizer gives, in half the time.

    Raises:
        ValueError: as `encode_texts`.
    """
    ids: list[int] = _backend(tokenizer).encode(text, add_special_tokens=False).ids
    return ids


def _backend(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The `tokenizers.Tokenizer` of a fast tokenizer, whatever the last call of it asked for."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"tokenizer {type(tokenizer).__name__} is not a fast one: pools need its character offsets;"
            " convert it with transformers (AutoTokenizer.from_pretrained(..., use_fast=True))"
        )
    backend = tokenizer.backend_tokenizer
    if backend.padding is not None or backend.truncation is not None:
        backend.no_padding()
        backend.no_truncation()
    if backend.encode_special_tokens != tokenizer.split_special_tokens:
        backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def group_demonstrations(
    demonstrations: Sequence[Demonstration], options: PoolOptions, tokenizer: Tokenizer, limit: int | None = None
) -> list[list[str]]:
    """Ids of the demonstrations of each block.

    Raises:
        PoolError: (413) they have more than `limit` tokens; the rest of them is not counted.
    """
    texts = [options.render(item.input, item.output) + options.separator for item in demonstrations]
    lengths: list[int] = []
    total = 0
    for length in encode_texts(tokenizer, texts, len):
        lengths.append(length)
        total += length
        if limit is not None and total > limit:
            raise PoolError(
                f"the first {len(lengths)} of {len(texts)} demonstrations have {total} tokens already, and more than"
                f" {limit} never fit in this server's KV cache: use fewer demonstrations",
                413,
            )
    chosen = group(texts, lengths, options.block_size, options.grouping, options.seed)
    return [[demonstrations[index].id for index in block] for block in chosen]


def lay_out(
    groups: Sequence[Sequence[str]],
    demonstrations: Mapping[str, Demonstration],
    options: PoolOptions,
    tokenizer: Tokenizer,
    header: Sequence[int],
    model: str,
    known: Sequence[Block] = (),
) -> Layout:
    """Tokenize every block once, alone, and name it (ALGORITHMS: block boundaries are token boundaries).

    Args:
        known: the first blocks, where they were laid out before with the same options, header and model.

    Raises:
        ValueError: the tokenizer is not a fast one.
    """
    rendered = [
        [options.render(demonstrations[id].input, demonstrations[id].output) + options.separator for id in ids]
        for ids in groups[len(known) :]
    ]
    joined = ["".join(texts) for texts in rendered]
    encoded = encode_texts(tokenizer, joined, lambda encoding: (encoding.ids, encoding.offsets), offsets=True)
    token_ids, spans = [block.token_ids for block in known], [block.spans for block in known]
    for number, (texts, (ids, offsets)) in enumerate(zip(rendered, encoded, strict=True), len(known)):
        lead = len(header) if number == 0 else 0
        token_ids.append((*header, *ids) if number == 0 else tuple(ids))
        spans.append(_spans(texts, offsets, lead))
    keys = block_identities(model, options.block_sparse, token_ids, [block.key for block in known])
    lengths = [len(ids) for ids in token_ids]
    blocks = list(known)
    for number in range(len(known), len(groups)):
        start = options.block_sparse.starts(number, lengths)[number]
        blocks.append(Block(keys[number], token_ids[number], tuple(groups[number]), spans[number], start))
    return Layout(tuple(header), tuple(blocks))


def _spans(texts: Sequence[str], offsets: Sequence[tuple[int, int]], lead: int) -> tuple[tuple[int, int], ...]:
    """Token span of each text; a token belongs to the text in which its first character lies."""
    ends, total = [], 0
    for text in texts:
        total += len(text)
        ends.append(total)
    spans, token = [], 0
    for end in ends:
        first = token
        while token < len(offsets) and offsets[token][0] < end:
            token += 1
        spans.append((first + lead, token + lead))
    return tuple(spans)
