"""Budget, selection and order."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction
from math import floor

import numpy as np
import pytest

from sglang_ext.retrievers.ordering import ORDERS, arrange
from sglang_ext.retrievers.selection import block_scores, budget, example_budget, select, select_examples, starts_of


@pytest.mark.parametrize(
    ("ratio", "total", "sinks", "m"),
    [
        (0.3, 60, 1, 18),
        (0.3, 5, 1, 2),  # 1.5: a half goes up, though Python's round() makes 2.5 a 2
        (0.5, 5, 1, 3),  # 2.5
        (0.1, 5, 1, 1),  # 0.5
        (0.145, 100, 1, 15),  # 14.5, which in binary is 14.499999999999998
        (0.01, 60, 1, 1),
        (0.01, 60, 4, 4),  # at least the sinks
        (1, 7, 1, 7),
        (1.0, 1, 1, 1),
        (0.01, 10, 0, 1),  # never an empty view
        (0.5, 3, 3, 3),
        (np.float64(0.3), 5, 1, 2),
    ],
)
def test_budget_from_ratio(ratio: float, total: int, sinks: int, m: int) -> None:
    got = budget(ratio=ratio, total=total, sinks=sinks)
    assert got == m
    assert type(got) is int


def test_budget_is_round_half_up_of_the_decimal_ratio() -> None:
    for hundredths, total in itertools.product(range(1, 101), [1, 2, 7, 50, 60, 61, 333]):
        exact = floor(Fraction(hundredths, 100) * total + Fraction(1, 2))
        assert budget(hundredths / 100, total=total, sinks=1) == max(1, exact)


def test_budget_from_blocks() -> None:
    for m in range(2, 8):
        assert budget(blocks=m, total=7, sinks=2) == m


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ratio": 0, "total": 5, "sinks": 1}, r"ratio is 0; expected a number in \(0, 1\]"),
        ({"ratio": -0.1, "total": 5, "sinks": 1}, "ratio is -0.1"),
        ({"ratio": 1.01, "total": 5, "sinks": 1}, "ratio is 1.01"),
        ({"ratio": float("nan"), "total": 5, "sinks": 1}, "ratio is nan"),
        ({"ratio": "0.3", "total": 5, "sinks": 1}, "ratio is '0.3'"),
        ({"ratio": True, "total": 5, "sinks": 1}, "ratio is True"),
        ({"total": 5, "sinks": 1}, "neither of ratio and blocks"),
        ({"ratio": 0.3, "blocks": 2, "total": 5, "sinks": 1}, "both .*ratio=0.3, blocks=2"),
        ({"blocks": 1, "total": 5, "sinks": 2}, "blocks is 1; expected at least 2.*sink"),
        ({"blocks": 0, "total": 5, "sinks": 0}, "blocks is 0; expected at least 1"),
        ({"blocks": -3, "total": 5, "sinks": 1}, "blocks is -3"),
        ({"blocks": 6, "total": 5, "sinks": 1}, "blocks is 6; the pool has 5"),
        ({"blocks": 2.0, "total": 5, "sinks": 1}, "blocks is 2.0; expected a whole number"),
        ({"blocks": True, "total": 5, "sinks": 1}, "blocks is True"),
        ({"blocks": 2, "total": 0, "sinks": 0}, "total is 0"),
        ({"blocks": 2, "total": 5, "sinks": 6}, "sinks is 6"),
        ({"ratio": 0.5, "total": 5, "sinks": -1}, "sinks is -1"),
    ],
)
def test_budget_refuses(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        budget(**arguments)  # type: ignore[arg-type]


def test_orders() -> None:
    scores = [9.0, 2.0, 5.0, 2.0, 7.0]
    chosen = [4, 1, 3, 2]
    assert arrange(chosen, scores, "pool") == [1, 2, 3, 4]
    assert arrange(chosen, scores, "reversed") == [4, 3, 2, 1]
    assert arrange(chosen, scores, "high_to_low") == [4, 2, 1, 3]
    assert arrange(chosen, scores, "low_to_high") == [3, 1, 2, 4]
    assert chosen == [4, 1, 3, 2]


@pytest.mark.parametrize("order", ["", "Pool", None, ["pool"]])
def test_unknown_order_lists_the_orders(order: str) -> None:
    with pytest.raises(ValueError, match="pool, low_to_high, high_to_low, reversed"):
        arrange([0], [1.0], order)
    with pytest.raises(ValueError, match="pool, low_to_high, high_to_low, reversed"):
        select([1.0, 2.0], 2, 1, order)


@pytest.mark.parametrize(
    ("order", "chosen"),
    [
        ("pool", [0, 2, 4, 5]),
        ("high_to_low", [0, 4, 2, 5]),
        ("low_to_high", [0, 5, 2, 4]),
        ("reversed", [0, 5, 4, 2]),
    ],
)
def test_select(order: str, chosen: list[int]) -> None:
    # The sink scores worst and stays first; 5 and 6 tie for the last place.
    assert select(np.array([-1.0, 0.1, 0.8, 0.2, 0.9, 0.5, 0.5]), 4, 1, order) == chosen


def test_select_with_ties_everywhere_takes_the_lowest() -> None:
    assert select(np.zeros(9), 5, 2) == [0, 1, 2, 3, 4]
    assert select(np.zeros(9), 2, 2) == [0, 1]
    assert select(np.zeros(9), 0, 0) == []


@pytest.mark.parametrize("seed", range(200))
def test_select_properties(seed: int) -> None:
    rng = random.Random(seed)
    total = rng.randint(1, 37)
    sinks = rng.randint(0, total)
    m = rng.randint(sinks, total)
    scores = [float(rng.randint(-3, 3)) for _ in range(total)]  # many ties
    views = {order: select(scores, m, sinks, order) for order in ORDERS}
    for view in views.values():
        assert len(set(view)) == len(view) == m
        assert view[:sinks] == list(range(sinks))
        assert all(type(i) is int for i in view)
        assert set(view) == set(views["pool"])
    chosen, left = set(views["pool"][sinks:]), set(range(sinks, total)) - set(views["pool"])
    assert all((scores[i], -i) > (scores[j], -j) for i in chosen for j in left)
    assert views["pool"] == sorted(views["pool"])
    assert views["reversed"][sinks:] == views["pool"][sinks:][::-1]
    assert views["low_to_high"][sinks:] == views["high_to_low"][sinks:][::-1]
    ranked = [scores[i] for i in views["high_to_low"][sinks:]]
    assert ranked == sorted(ranked, reverse=True)


@pytest.mark.parametrize(
    ("scores", "m", "sinks", "message"),
    [
        ([1.0, 2.0], 3, 1, "m is 3"),
        ([1.0, 2.0], 0, 1, "m is 0"),
        ([1.0, 2.0], 1.5, 1, "m is 1.5"),
        ([1.0, 2.0], 2, 3, "sinks is 3"),
        ([], 0, 0, "total is 0"),
        ([1.0, float("nan")], 1, 1, "NaN"),
        ([1.0, float("inf")], 1, 1, "NaN or infinity"),
        ([[1.0, 2.0]], 1, 0, r"shape \(1, 2\)"),
    ],
)
def test_select_refuses(scores: list[float], m: int, sinks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select(scores, m, sinks)


def test_example_budget() -> None:
    sizes = [50, 50, 50, 7]
    assert example_budget(0.5, block_sizes=sizes, sinks=1) == 79  # 78.5
    assert example_budget(0.1, block_sizes=sizes, sinks=1) == 50  # the sink is whole
    assert example_budget(1, block_sizes=sizes, sinks=1) == 157
    assert example_budget(blocks=2, block_sizes=sizes, sinks=1) == 100
    assert example_budget(blocks=4, block_sizes=sizes, sinks=1) == 157
    assert example_budget(blocks=1, block_sizes=[3], sinks=1) == 3
    for arguments in ({"blocks": 5}, {"blocks": 0}, {"ratio": 2}, {}, {"blocks": 2, "ratio": 0.5}):
        with pytest.raises(ValueError, match=r"blocks|ratio"):
            example_budget(block_sizes=sizes, sinks=1, **arguments)
    with pytest.raises(ValueError, match="block_sizes"):
        example_budget(0.5, block_sizes=[50, 0], sinks=1)


def test_select_examples() -> None:
    scores = [0.0, 0.0, 0.0, 5.0, 1.0, 4.0, 9.0, 4.0]
    sizes = [3, 3, 2]
    sink = [(0, 0), (0, 1), (0, 2)]
    assert select_examples(scores, sizes, 3, 1) == sink
    assert select_examples(scores, sizes, 6, 1) == [*sink, (1, 0), (1, 2), (2, 0)]  # (1, 2) ties with (2, 1)
    assert select_examples(scores, sizes, 6, 1, "high_to_low") == [*sink, (2, 0), (1, 0), (1, 2)]
    assert select_examples(scores, sizes, 6, 1, "low_to_high") == [*sink, (1, 2), (1, 0), (2, 0)]
    assert select_examples(scores, sizes, 6, 1, "reversed") == [*sink, (2, 0), (1, 2), (1, 0)]
    assert select_examples(scores, sizes, 1, 0) == [(2, 0)]


@pytest.mark.parametrize("seed", range(20))
def test_a_block_is_as_relevant_as_its_best_demonstration(seed: int) -> None:
    rng = random.Random(seed)
    blocks = [[rng.choice([-1.5, 0.0, 2.0, rng.random()]) for _ in range(rng.randint(1, 6))] for _ in range(7)]
    scores = block_scores([score for block in blocks for score in block], starts_of([len(block) for block in blocks]))
    assert scores.tolist() == [max(block) for block in blocks]


def test_block_scores_refuse_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="got 2 scores, the last block begins at 2"):
        block_scores([1.0] * 2, starts_of([2, 3]))
    with pytest.raises(ValueError, match="block_sizes is"):
        starts_of([2, 0])


@pytest.mark.parametrize("seed", range(100))
def test_select_examples_properties(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.randint(1, 6) for _ in range(rng.randint(1, 9))]
    sinks = rng.randint(0, len(sizes))
    scores = [rng.random() for _ in range(sum(sizes))]
    ratio = rng.randint(1, 100) / 100
    m = example_budget(ratio, block_sizes=sizes, sinks=sinks)
    view = select_examples(scores, sizes, m, sinks, rng.choice(list(ORDERS)))
    whole = [(b, i) for b in range(sinks) for i in range(sizes[b])]
    assert view[: len(whole)] == whole
    assert len(set(view)) == len(view) == m
    assert all(0 <= i < sizes[b] for b, i in view)
    flat = {(b, i): scores[sum(sizes[:b]) + i] for b in range(len(sizes)) for i in range(sizes[b])}
    rest = set(flat) - set(view)
    picked = set(view) - set(whole)
    assert max((flat[p] for p in rest), default=-1) <= min((flat[p] for p in picked), default=2)


@pytest.mark.parametrize(
    ("scores", "sizes", "m", "sinks", "message"),
    [
        ([1.0] * 4, [2, 3], 3, 1, "4 scores for blocks of 5"),
        ([1.0] * 5, [2, 3], 1, 1, "m is 1"),
        ([1.0] * 5, [2, 3], 6, 1, "m is 6"),
        ([1.0] * 5, [2, 3], 5, 3, "sinks is 3"),
        ([1.0] * 5, [5, 0], 5, 1, "block_sizes"),
    ],
)
def test_select_examples_refuses(scores: list[float], sizes: list[int], m: int, sinks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_examples(scores, sizes, m, sinks)
