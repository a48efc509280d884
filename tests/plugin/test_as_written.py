"""What the rows of a question see that leaves its selection where it was written, beside others and alone."""

from __future__ import annotations

import pytest

from sglang_ext.attention.dbsa import MANY, DbsaPolicy
from sglang_ext.attention.policy import Request
from sglang_ext.attention.seen import Run
from sglang_ext.cache.rows import Piece, Row


def asked(pieces: int, follows: int | None) -> Request:
    """Over every other run of three tokens of one block, which was written from position 5 on."""
    row = Row(tuple(Piece("b", 6 * n, 6 * n + 3) for n in range(pieces)), follows=follows)
    return Request(1, "r", row, {}, tuple(5 + 6 * n for n in range(pieces)))


@pytest.mark.parametrize("pieces", [3, MANY])
def test_few_pieces_are_read_once_for_all_requests(pieces: int) -> None:
    request, columns = asked(pieces, 500), 3 * pieces
    (seen,) = DbsaPolicy().runs(request, columns, columns + 2) or ()
    assert seen.tail == columns and len(seen.runs) == pieces and not any(run.delta for run in seen.runs)
    assert seen.runs[1] == Run(3, 3, 11, 11, ("b", 6, 9))
    (rebased,) = DbsaPolicy().runs(asked(pieces, None), columns, columns + 2) or ()
    assert [run.delta for run in rebased.runs] == [3 * n - (5 + 6 * n) for n in range(pieces)]


def test_of_many_pieces_a_row_sees_all_before_it() -> None:
    assert DbsaPolicy().runs(asked(MANY + 1, 500), 300, 301) is None
    assert DbsaPolicy().runs(asked(MANY + 1, None), 300, 301) is not None


def test_its_own_tokens_follow_what_was_written() -> None:
    policy = DbsaPolicy()
    assert policy.positions(asked(3, 500), 9, 12) == [500, 501, 502]
    assert policy.positions(asked(3, 4), 9, 12) == [4, 5, 6], "local positions of blocks may overlap"
    assert policy.positions(asked(3, 9), 9, 12) is policy.positions(asked(3, None), 9, 12) is None
