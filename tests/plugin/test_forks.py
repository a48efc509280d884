"""Which stream a prompt may begin as a copy of, without an engine."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from sglang_ext.cache.forks import Source, common_tokens, longest_fork
from sglang_ext.policies.ltri import KEPT_CHUNKS, kept_chunks
from sglang_ext.policies.ltri_options import Ltri

NO_SLOTS = torch.zeros(0, dtype=torch.int32)


def test_common_tokens() -> None:
    dice = random.Random(0)
    assert common_tokens([], [1]) == common_tokens([1], [2]) == 0 and common_tokens([1, 2], [1, 2]) == 2
    for _ in range(200):
        one, other = ([dice.randint(0, 1) for _ in range(dice.randint(0, 12))] for _ in range(2))
        expected = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
        assert common_tokens(one, other) == (min(len(one), len(other)) if expected is None else expected)


def test_the_source_with_the_most_in_common() -> None:
    def point(state: int, tokens: int) -> int:
        """Multiples of `state`."""
        return tokens // state * state

    prompt = [*range(20)]
    sources = [
        Source([*range(9), 7], None, 4, NO_SLOTS),  # 8
        Source([*range(11), 7], None, 10, NO_SLOTS),  # 10
        Source([*range(20)], None, 9, NO_SLOTS),  # 18
        Source([*range(20)], "another's", 1, NO_SLOTS),
    ]
    found: Any = longest_fork(prompt, None, sources, point)
    assert (found.source, found.tokens) == (sources[2], 18)
    assert longest_fork(prompt, "another's", sources, point).tokens == 20  # type: ignore[union-attr]
    assert longest_fork(prompt, None, sources[:2], point).tokens == 10  # type: ignore[union-attr]
    assert longest_fork([3, 4], None, sources, point) is None
    for most, tokens in ((19, 18), (17, 10), (8, 8), (100, 18)):  # of the prompt may be shared
        assert longest_fork(prompt, None, sources, point, most=most).tokens == tokens  # type: ignore[union-attr]
    assert longest_fork(prompt, None, sources, point, most=0) is None


class Unread(list[int]):
    """A prompt that nobody may look at."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a stream was compared that shares no more than the best")


def test_streams_that_cannot_share_more_are_not_compared() -> None:
    prompt, point = [*range(20)], lambda state, tokens: tokens // state * state
    best = Source([*range(17), 7], None, 8, NO_SLOTS)  # 16
    shorter, coarser = Source(Unread(range(15)), None, 1, NO_SLOTS), Source(Unread(range(20)), None, 16, NO_SLOTS)
    found: Any = longest_fork(prompt, None, [best, shorter, coarser], point)
    assert (found.source, found.tokens) == (best, 16)
    with pytest.raises(AssertionError, match="was compared"):
        longest_fork(prompt, None, [shorter, best], point)


def test_few_states_are_kept_and_none_that_was_given_up_is_wanted_again() -> None:
    before: set[int] = set()
    for newest in range(1, 3000):
        wanted = kept_chunks(newest)
        assert wanted <= before | {newest} and len(wanted) <= 3 * KEPT_CHUNKS
        assert {*range(max(1, newest - KEPT_CHUNKS + 1), newest + 1)} <= wanted and 0 not in wanted
        gaps = sorted({0, *wanted})
        assert max(high - low for low, high in itertools.pairwise(gaps)) <= max(1, newest // KEPT_CHUNKS)
        before = wanted


def test_where_streams_of_equal_tokens_are_equal() -> None:
    settings = Ltri(sinks=8, window=16, block=8, chunk=16, last=5)
    assert [begin for begin in range(100) if settings.alike(begin, 69)] == [16, 32, 48, 64]
    # Its last chunk of a whole size is cut by the end of the prompt.
    assert [begin for begin in range(100) if settings.alike(begin, 68)] == [16, 32, 48]
    # A block is cut by the end of every chunk.
    assert not any(Ltri(sinks=4, window=16, block=8, chunk=16, last=5).alike(begin, 69) for begin in range(100))
