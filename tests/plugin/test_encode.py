"""Encoding requests: which blocks each holds, and when they are long."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_ext import compat
from sglang_ext.policies.dbsa import BlockSparse
from sglang_ext.serving.encode import plan_runs
from sglang_ext.serving.encoder import ENCODING
from sglang_ext.serving.layout import Block, Layout

LENGTHS = (5, 9, 10, 10, 4, 30, 6)


def layout() -> Layout:
    blocks = [Block(f"b{n}", tuple(range(100 * n, 100 * n + length)), (), (), 0) for n, length in enumerate(LENGTHS)]
    return Layout((), tuple(blocks))


def sizes(run_tokens: list[int], row_limit: int = 1000) -> list[list[int]]:
    """Tokens of the new blocks of each request, for the sizes that are asked for one after the other."""
    asked = iter(run_tokens)
    runs = plan_runs(layout(), BlockSparse(), range(len(LENGTHS)), "o", lambda: next(asked), row_limit)
    return [[block.tokens for block in run.row.new] for run in runs]


def test_a_run_is_as_long_as_it_may_be_when_it_begins() -> None:
    assert sizes([10] * 7) == [[5], [9], [10], [10], [4], [30], [6]], "at least one block"
    assert sizes([24] * 7) == [[5, 9, 10], [10, 4], [30], [6]]
    assert sizes([10, 10, 60, 10]) == [[5], [9], [10, 10, 4, 30, 6]], "a client came, and went"


def test_every_block_is_written_once_behind_what_it_sees() -> None:
    for size in (1, 20, 1000):
        runs = list(plan_runs(layout(), BlockSparse(), range(len(LENGTHS)), "o", lambda size=size: size, 1000))  # type: ignore[misc]
        assert [block.key for run in runs for block in run.row.new] == [f"b{n}" for n in range(len(LENGTHS))]
        for run in runs:
            assert list(run.token_ids) == [
                token for block in run.row.new for token in layout().blocks[int(block.key[1:])].token_ids
            ]
            assert all(
                0 <= at < len(run.row.prefix) + number
                for number, block in enumerate(run.row.new)
                for at, _ in block.seen
            )


def test_the_row_limits_a_run() -> None:
    assert sizes([1000] * 7, row_limit=60)[0] == [5, 9, 10, 10, 4]
    with pytest.raises(ValueError, match="block 5 and the blocks it attends to take 49 tokens"):
        sizes([10] * 7, row_limit=48)


def test_who_counts_as_a_client() -> None:
    """Scoring labels is part of an answer; another encoding is not."""
    for rids, expected in (
        ((), False),
        ((ENCODING + "1",), False),
        ((ENCODING + "1", "user"), True),
        (("sglang-ext-label-1",), True),
    ):
        assert compat.others_run(SimpleNamespace(rid_to_state=dict.fromkeys(rids)), ENCODING) is expected
