"""At which positions a question sees what it selects, and what refuses to leave it where it was written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.cache.rows import Piece, Row
from sglang_ext.config import RequestOptions
from sglang_ext.serving.labels import check_labels_fit
from sglang_ext.serving.placing import check_fits, check_rebase, row_of
from sglang_ext.systems.registry import ours

WRITTEN = RequestOptions("p", rebase=False)


def service(backend: str = "dbsa") -> Any:
    args = SimpleNamespace(attention_backend=backend)
    return SimpleNamespace(
        manager=SimpleNamespace(server_args=args), as_written=ours()[backend].make_policy().as_written
    )


def version(pattern: str = "sink+previous+self") -> Any:
    return SimpleNamespace(name="p", definition=SimpleNamespace(options=SimpleNamespace(pattern=pattern)))


@pytest.mark.parametrize(
    ("served", "pool", "message"),
    [
        (service("dbsa+double_p"), version(), "rebase false with --attention-backend dbsa\\+double_p, which reads"),
        (service("double_p"), version(), "rebase false with --attention-backend double_p, which reads"),
        (service(), version("self"), "rebase false over pool 'p' with pattern 'self': its blocks are shared"),
    ],
)
def test_what_refuses(served: Any, pool: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rebase(served, pool, WRITTEN)
    check_rebase(served, pool, RequestOptions("p"))


def test_who_leaves_blocks_where_they_were_written() -> None:
    check_rebase(service(), version(), WRITTEN)
    assert [name for name, system in ours().items() if not system.streams and system.make_policy().as_written] == [
        "dbsa"
    ]


def test_a_question_follows_the_last_selected_token() -> None:
    """Of local positions, too, which several blocks share: whichever of them reaches farthest."""
    layout: Any = SimpleNamespace(positions={"a": 0, "b": 40, "c": 25})
    selection: Any = SimpleNamespace(pieces=(Piece("a", 0, 9), Piece("b", 3, 10), Piece("c", 0, 20)))
    row = row_of(selection, layout, WRITTEN)
    assert (row.prefix_tokens, row.follows, row.shift, row.as_written) == (36, 50, 14, True)
    rebased = row_of(selection, layout, RequestOptions("p"))
    assert (rebased.follows, rebased.shift, rebased.as_written) == (None, 0, False)
    assert row.namespace(None) != rebased.namespace(None)
    assert [Row.load(each.dump()) for each in (row, rebased)] == [row, rebased]
    manager: Any = SimpleNamespace(context_len=60)
    check_fits(manager, row, 3), check_fits(manager, rebased, 23)
    with pytest.raises(ValueError, match="4 tokens and with rebase false follows position 50, the highest of what"):
        check_fits(manager, row, 4)
    with pytest.raises(ValueError, match="the question has 24 tokens and the selected blocks 36; together"):
        check_fits(manager, rebased, 24)


def test_blocks_of_local_positions_may_reach_less_far_than_they_are_long() -> None:
    """Then the number of tokens is what the context bounds."""
    layout: Any = SimpleNamespace(positions={"a": 0, "b": 10, "c": 10})
    pieces = (Piece("a", 0, 10), Piece("b", 0, 15), Piece("c", 0, 20))
    row = row_of(SimpleNamespace(pieces=pieces), layout, WRITTEN)  # type: ignore[arg-type]
    assert (row.prefix_tokens, row.follows, row.shift, row.reach) == (45, 30, -15, 45)
    check_fits(SimpleNamespace(context_len=60), row, 14)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the question has 15 tokens and the selected blocks 45"):
        check_fits(SimpleNamespace(context_len=60), row, 15)  # type: ignore[arg-type]


def test_nothing_is_selected_of_blocks_that_are_deleted_whole() -> None:
    row = row_of(SimpleNamespace(pieces=()), SimpleNamespace(positions={"a": 0}), WRITTEN)  # type: ignore[arg-type]
    assert (row.follows, row.shift, row.reach) == (0, 0, 0)


def test_labels_must_fit_too() -> None:
    row = Row((Piece("a", 0, 30),), follows=50)
    check_labels_fit(row, 4, 6, 60)
    with pytest.raises(ValueError, match="4 tokens behind 50 of blocks, and the longest label 7; together they must"):
        check_labels_fit(row, 4, 7, 60)
