"""Random retrieval and the stable random numbers under it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from sglang_ext.retrievers.random_order import RandomOrder
from sglang_ext.retrievers.registry import get
from sglang_ext.retrievers.stable_random import permutation, uniform


def test_the_seed_and_the_query_decide() -> None:
    texts = [str(i) for i in range(50)]
    base = RandomOrder.build(texts, seed=1).score("a")
    np.testing.assert_array_equal(base, RandomOrder.build(texts, seed=1).score("a"))
    np.testing.assert_array_equal(base, RandomOrder.build(["x"] * 50, seed=1).score("a"))
    for other in [RandomOrder.build(texts, seed=2).score("a"), RandomOrder.build(texts, seed=1).score("b")]:
        assert not np.array_equal(base, other)
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.6


def test_registry_seed() -> None:
    texts = ["a", "b", "c"]
    np.testing.assert_array_equal(get("random:7").build(texts).score("q"), RandomOrder.build(texts, 7).score("q"))
    np.testing.assert_array_equal(get("random").build(texts).score("q"), RandomOrder.build(texts, 0).score("q"))
    assert RandomOrder.default_seed == 0  # the configured class is another one


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_other_processes_agree(hash_seed: str) -> None:
    code = (
        "from sglang_ext.retrievers.random_order import RandomOrder; "
        "print(RandomOrder.build(['a'] * 5, 3).score('wie geht es?').tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONHASHSEED": hash_seed}, check=True
    )
    assert done.stdout.strip() == str(RandomOrder.build(["a"] * 5, 3).score("wie geht es?").tolist())


def test_every_text_is_equally_likely_to_be_best() -> None:
    retriever = RandomOrder.build(["t"] * 5)
    best = np.bincount([retriever.score(f"query {i}").argmax() for i in range(2000)], minlength=5)
    assert (abs(best - 400) < 5 * np.sqrt(400)).all()


def test_uniform() -> None:
    draw = uniform(10_000, "test", 0)
    assert draw.min() >= 0
    assert draw.max() < 1
    assert abs(draw.mean() - 0.5) < 0.02
    np.testing.assert_array_equal(uniform(7, "test", 0), draw[:7])


def test_keys_are_told_apart() -> None:
    keys: list[tuple[int | str, ...]] = [(1,), ("1",), (1, 2), (12,), ("1", 2), ("a", "b"), ("ab",), (-1,), ()]
    assert len({uniform(1, *key)[0] for key in keys}) == len(keys)


def test_recorded_value() -> None:
    """Pools on disk are regrouped after upgrades: these numbers must never change."""
    assert permutation(8, "recorded", 0) == [0, 4, 6, 5, 7, 2, 1, 3]


@pytest.mark.parametrize("n", [0, 1, 2, 17, 1000])
def test_permutation(n: int) -> None:
    order = permutation(n, "p", n)
    assert sorted(order) == list(range(n))
    if n >= 17:
        assert order != permutation(n, "p", n + 1)
        assert order != list(range(n))
