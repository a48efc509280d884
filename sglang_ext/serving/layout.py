"""From demonstrations to blocks of tokens: grouping, rendering, tokenizing. Pure functions, no server."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sglang_ext.cache.rows import Piece
from sglang_ext.config import PoolOptions
from sglang_ext.policies.dbsa import block_identities
from sglang_ext.retrievers.grouping import group


@dataclass(frozen=True)
class Demonstration:
    """One example of the task."""

    id: str
    input: str
    output: str


def parse_demonstrations(items: Iterable[Any], taken: Collection[str] = ()) -> list[Demonstration]:
    """Demonstrations from JSON-like objects; those without an id get `d0`, `d1`, ...

    Args:
        items: the objects.
        taken: ids that are not to be used again; names go on from how many they are. Looked up, never walked over.

    Raises:
        ValueError: an item is not an object with `input` and `output` strings, an id is taken twice, or there are none.
            Says which item (counted from 1).
    """
    used: set[str] = set()
    result: list[Demonstration] = []
    fresh = len(taken)
    for number, item in enumerate(items, start=1):
        if not isinstance(item, Mapping):
            raise ValueError(
                f"demonstration {number} is a {type(item).__name__}: expected an object with input and output"
            )
        # The data sets people have use these names; nothing else is guessed.
        text, label = item.get("input", item.get("text")), item.get("output", item.get("label"))
        if not isinstance(text, str) or not isinstance(label, str) or not label:
            raise ValueError(
                f"demonstration {number}: got {json.dumps(item, ensure_ascii=False)[:200]}; expected strings"
                ' "input" and "output" ("text" and "label" do too), the output not empty'
            )
        name = item.get("id")
        if name is None:
            while f"d{fresh}" in used or f"d{fresh}" in taken:
                fresh += 1
            name = f"d{fresh}"
        elif not isinstance(name, str) or not name:
            raise ValueError(f"demonstration {number}: id {name!r}: expected a non-empty string")
        if name in used or name in taken:
            raise ValueError(f"demonstration {number}: id {name!r} is taken; ids are unique in a pool")
        used.add(name)
        result.append(Demonstration(name, text, label))
    if not result:
        raise ValueError("no demonstrations: a pool needs at least one")
    return result


def parse_jsonl(text: str) -> list[Any]:
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
    def whole(self) -> tuple[Piece, ...]:
        """Each block as one piece."""
        return tuple(Piece(block.key, 0, len(block.token_ids)) for block in self.blocks)

    def tokens_of(self, pieces: Iterable[Piece]) -> list[int]:
        """Token ids of pieces of these blocks, one after the other."""
        named = {block.key: block.token_ids for block in self.blocks}
        return [token for piece in pieces for token in named[piece.key][piece.start : piece.end]]


def bos(tokenizer: Any) -> tuple[int, ...]:
    """The tokens a prompt of this tokenizer begins with: (BOS,), or nothing where it adds none."""
    ids = tokenizer("", add_special_tokens=True)["input_ids"]
    if tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]:
        return (tokenizer.bos_token_id,)
    return ()


def encode_texts(tokenizer: Any, texts: Sequence[str], offsets: bool = False) -> list[Any]:
    """`tokenizers.Encoding` of each text, without special tokens; with `offsets`, character offsets too.

    In threads: SGLang turns the library's own parallelism off for its whole process.

    Raises:
        ValueError: the tokenizer has no offsets (it is not a fast one), so that demonstrations cannot be told apart.
    """
    backend = _backend(tokenizer)
    encode = backend.encode_batch if offsets else backend.encode_batch_fast
    threads = min(8, os.cpu_count() or 1)
    size = max(1, -(-len(texts) // (4 * threads)))
    parts = [list(texts[first : first + size]) for first in range(0, len(texts), size)]
    with ThreadPoolExecutor(threads) as executor:
        found = executor.map(lambda part: encode(part, add_special_tokens=False), parts)
        return [encoding for part in found for encoding in part]


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Tokens of one text, without special tokens: what calling the tokenizer gives, in half the time.

    Raises:
        ValueError: as `encode_texts`.
    """
    ids: list[int] = _backend(tokenizer).encode(text, add_special_tokens=False).ids
    return ids


def _backend(tokenizer: Any) -> Any:
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
    demonstrations: Sequence[Demonstration], options: PoolOptions, tokenizer: Any
) -> list[list[str]]:
    """Ids of the demonstrations of each block."""
    texts = [options.render(item.input, item.output) + options.separator for item in demonstrations]
    lengths = [len(encoding) for encoding in encode_texts(tokenizer, texts)]
    chosen = group(texts, lengths, options.block_size, options.grouping, options.seed)
    return [[demonstrations[index].id for index in block] for block in chosen]


def lay_out(
    groups: Sequence[Sequence[str]],
    demonstrations: Mapping[str, Demonstration],
    options: PoolOptions,
    tokenizer: Any,
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
    encoded = encode_texts(tokenizer, ["".join(texts) for texts in rendered], offsets=True)
    token_ids, spans = [block.token_ids for block in known], [block.spans for block in known]
    for number, (texts, encoding) in enumerate(zip(rendered, encoded, strict=True), len(known)):
        lead = len(header) if number == 0 else 0
        ids = encoding.ids
        token_ids.append((*header, *ids) if number == 0 else tuple(ids))
        spans.append(_spans(texts, encoding.offsets, lead))
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
