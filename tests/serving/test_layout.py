"""Blocks of a pool that grows: what was laid out and indexed before is taken over, and nothing is different."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sglang_ext.config import PoolOptions, RequestOptions
from sglang_ext.serving import layout as layouts
from sglang_ext.serving.layout import encode_text, encode_texts, lay_out, parse_demonstrations
from sglang_ext.serving.pool import Definition, Version
from tests.oracle import models

OPTIONS = PoolOptions(block_size=3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return models.load_tokenizer(models.save_model("llama", tmp_path_factory.mktemp("llama")))


def definition(blocks: int, **change: Any) -> Definition:
    items = parse_demonstrations(models.demonstrations(3 * blocks))
    groups = tuple(tuple(item.id for item in items[3 * n : 3 * n + 3]) for n in range(blocks))
    return replace(Definition(OPTIONS, {item.id: item for item in items}, groups), **change)


def grown(base: Definition, blocks: int) -> Definition:
    """`base` as an append leaves it."""
    first = len(base.groups)
    items = list(definition(blocks).demonstrations.values())[3 * first :]
    return base.grown(items, definition(blocks).groups[first:])


@pytest.mark.parametrize("positions", ["sequential", "local"])
def test_known_blocks_are_taken_over(tokenizer: Any, monkeypatch: pytest.MonkeyPatch, positions: str) -> None:
    small, large = definition(5), definition(9)
    options = PoolOptions(block_size=3, positions=positions)

    def laid(of: Definition, known: Any = ()) -> layouts.Layout:
        return lay_out(of.groups, of.demonstrations, options, tokenizer, (1, 2), "model", known)

    before, whole = laid(small), laid(large)
    encoded: list[str] = []
    monkeypatch.setattr(
        layouts,
        "encode_texts",
        lambda t, texts, take, offsets=False: encoded.extend(texts) or encode_texts(t, texts, take, offsets),
    )
    again = laid(large, before.blocks)
    assert again == whole and all(a is b for a, b in zip(again.blocks, before.blocks, strict=False))
    assert len(encoded) == 4


def test_encodings_are_those_of_the_tokenizer(tokenizer: Any) -> None:
    texts = [f"{number} freeze my card{'!' * (number % 7)}" for number in range(101)]
    wanted = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    found = list(encode_texts(tokenizer, texts, lambda encoding: encoding, offsets=True))
    assert [encoding.ids for encoding in found] == wanted["input_ids"]
    assert [list(map(list, e.offsets)) for e in found] == [list(map(list, o)) for o in wanted["offset_mapping"]]
    assert list(encode_texts(tokenizer, texts, len)) == [len(ids) for ids in wanted["input_ids"]]
    assert list(encode_texts(tokenizer, [], len)) == []
    with pytest.raises(ValueError, match="not a fast one"):
        list(encode_texts(object(), texts, len))


def test_one_text_is_what_the_tokenizer_makes_of_it(tokenizer: Any) -> None:
    """Special tokens in it too, and whatever was asked of the tokenizer before."""
    special = tokenizer.eos_token or tokenizer.bos_token
    texts = ["", " ", "freeze my card!", f"a{special}b {special}", "\n\nlabel:", "naïve 咖啡 🙂"]
    wanted = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert tokenizer.convert_tokens_to_ids(special) in wanted[3]
    tokenizer("freeze my card", truncation=True, max_length=2, padding="max_length", split_special_tokens=True)
    assert [encode_text(tokenizer, text) for text in texts] == wanted


def test_what_extends_what() -> None:
    small = definition(5)
    assert grown(small, 9).extends(small) and small.extends(small)
    assert not small.extends(grown(small, 9))
    assert not definition(9).extends(small), "equal names may stand for other demonstrations"
    assert not replace(grown(small, 9), deleted=frozenset({small.groups[0][0]})).extends(small)
    assert not replace(grown(small, 9), options=PoolOptions(block_size=4)).extends(small)
    assert not replace(grown(small, 9), groups=definition(9).groups[1:]).extends(small)


@pytest.mark.parametrize(
    ("asked", "blocks"), [({}, False), ({"block_score": "text"}, True), ({"granularity": "example"}, False)]
)
def test_a_retriever_is_extended(asked: dict[str, Any], blocks: bool) -> None:
    options = RequestOptions("pool", **asked)
    old = Version("pool", 1, definition(5))
    old.retriever(options)
    new = Version("pool", 2, grown(old.definition, 9))
    found, wanted = new.retriever(options, old), Version("pool", 2, new.definition).retriever(options)
    query = "freeze my card 7"
    np.testing.assert_array_equal(found.score(query), wanted.score(query))
    assert found.num_texts == wanted.num_texts == (9 if blocks else 27)
    other = Version("pool", 3, definition(4))  # extends nothing: built anew
    assert other.retriever(options, old).num_texts == (4 if blocks else 12)
