"""Grouping: what holds for every method, and what each is for."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import numpy as np
import pytest

from sglang_ext.retrievers.clusters import swap_between
from sglang_ext.retrievers.grouping import GROUPINGS, group

TOPICS = ["card lost stolen", "exchange rate euro", "pin code forgotten", "refund request late", "top up failed"]


def topical_pool(n: int, seed: int = 0) -> tuple[list[str], list[int], list[int]]:
    """Texts of five topics in mixed order, their lengths, and their topics."""
    rng = random.Random(seed)
    topics = [i % len(TOPICS) for i in range(n)]
    rng.shuffle(topics)
    texts = [
        " ".join(rng.choices(TOPICS[t].split(), k=3) + rng.choices([f"n{i}" for i in range(90)], k=rng.randint(1, 9)))
        for t in topics
    ]
    return texts, [len(text.split()) for text in texts], topics


@pytest.mark.parametrize("method", list(GROUPINGS))
@pytest.mark.parametrize(
    ("n", "block_size"), [(1, 1), (1, 50), (2, 1), (3, 2), (7, 7), (17, 5), (50, 50), (51, 50), (99, 50), (101, 10)]
)
def test_every_index_once_in_full_blocks(method: str, n: int, block_size: int) -> None:
    texts, lengths, _ = topical_pool(n)
    blocks = group(texts, lengths, block_size, method, seed=3)
    assert sorted(i for block in blocks for i in block) == list(range(n))
    assert [len(block) for block in blocks[:-1]] == [block_size] * (len(blocks) - 1)
    assert len(blocks) == -(-n // block_size)
    assert all(block == sorted(block) for block in blocks)  # pool order inside a block
    assert all(type(i) is int for block in blocks for i in block)


@pytest.mark.parametrize("method", list(GROUPINGS))
def test_the_seed_decides(method: str) -> None:
    texts, lengths, _ = topical_pool(103)
    first = group(texts, lengths, 10, method, seed=1)
    assert group(tuple(texts), np.array(lengths), np.int64(10), method, np.int64(1)) == first
    assert group(texts, lengths, 10, method, seed=2) != first
    assert group(texts, lengths, 10, method, seed=-1) != first


@pytest.mark.parametrize("method", list(GROUPINGS))
def test_other_processes_agree(method: str) -> None:
    texts, lengths, _ = topical_pool(103)
    code = f"from sglang_ext.retrievers.grouping import group; print(group({texts!r}, {lengths!r}, 10, {method!r}, 5))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONHASHSEED": "9"}, check=True
    )
    assert done.stdout.strip() == str(group(texts, lengths, 10, method, 5))


@pytest.mark.parametrize("method", [m for m in GROUPINGS if m != "random"])
def test_blocks_are_sorted_by_their_first_demonstration(method: str) -> None:
    texts, lengths, _ = topical_pool(104)
    firsts = [block[0] for block in group(texts, lengths, 10, method)]
    assert firsts[:-1] == sorted(firsts[:-1])


def test_default_is_length_balanced_in_fifties() -> None:
    texts, lengths, _ = topical_pool(120)
    assert group(texts, lengths) == group(texts, lengths, 50, "length_balanced", 0)


def spread(blocks: list[list[int]], lengths: list[int]) -> int:
    totals = [sum(lengths[i] for i in block) for block in blocks]
    return max(totals) - min(totals)


@pytest.mark.parametrize("n", [100, 500, 3000])
@pytest.mark.parametrize("shape", ["narrow", "long tail", "sorted"])
def test_length_balance(n: int, shape: str) -> None:
    rng = random.Random(n)
    lengths = [rng.randint(10, 60) for _ in range(n)]
    if shape == "long tail":
        lengths = [int(rng.lognormvariate(3, 0.6)) + 1 for _ in range(n)]
    if shape == "sorted":
        lengths.sort()
    texts = ["t"] * n
    balanced = spread(group(texts, lengths, 50, "length_balanced"), lengths)
    assert balanced <= 2
    assert balanced < spread(group(texts, lengths, 50, "random"), lengths) / 10


def test_length_balance_is_optimal_where_that_can_be_seen() -> None:
    lengths = [1, 2, 3, 4, 5, 6, 7, 8]
    assert spread(group(["t"] * 8, lengths, 4), lengths) == 0
    assert spread(group(["t"] * 8, lengths, 2), lengths) == 0
    lengths = [100, 1, 1, 1, 1, 1]
    assert spread(group(["t"] * 6, lengths, 3), lengths) == 99  # the long one has to be somewhere


def test_length_balance_includes_the_short_last_block() -> None:
    rng = random.Random(0)
    lengths = [rng.randint(10, 60) for _ in range(145)]
    blocks = group(["t"] * 145, lengths, 50)
    assert len(blocks[-1]) == 45
    assert spread(blocks, lengths) <= 2
    # Too short to be as long as the others: it is as long as it can be, and the others are equal.
    lengths[:] = lengths[:102]
    blocks = group(["t"] * 102, lengths, 50)
    assert sum(lengths[i] for i in blocks[-1]) == sum(sorted(lengths)[-2:])
    assert spread(blocks[:-1], lengths) <= 2


@pytest.mark.parametrize("n", [54, 253, 301, 617])
def test_a_last_block_too_short_to_balance_leaves_the_others_equal(n: int) -> None:
    rng = random.Random(n)
    lengths = [int(rng.lognormvariate(3, 0.8)) + 1 for _ in range(n)]
    blocks = group(["t"] * n, lengths, 50)
    assert len(blocks[-1]) < 20
    assert spread(blocks[:-1], lengths) <= 2


def test_length_balance_mixes_equal_lengths() -> None:
    blocks = group(["t"] * 100, [7] * 100, 10)
    assert blocks != [list(range(i, i + 10)) for i in range(0, 100, 10)]
    assert all(block[-1] - block[0] > 30 for block in blocks)


def purity(blocks: list[list[int]], topics: list[int]) -> float:
    """Share of demonstrations whose topic is their block's most frequent."""
    return sum(np.bincount([topics[i] for i in block]).max() for block in blocks) / len(topics)


def test_clusters_hold_similar_demonstrations() -> None:
    texts, lengths, topics = topical_pool(500)
    clustered = purity(group(texts, lengths, 20, "cluster"), topics)
    diverse = purity(group(texts, lengths, 20, "cluster_diverse"), topics)
    shuffled = purity(group(texts, lengths, 20, "random"), topics)
    assert shuffled < 0.45 < 0.6 < diverse < clustered


@pytest.mark.parametrize(("n", "pairs"), [(1000, 50), (500, 25), (110, 6), (105, 5), (30, 2), (20, 1)])
def test_diverse_swaps_a_tenth(n: int, pairs: int) -> None:
    """Round-half-up(n x 0.1 / 2) pairs, each demonstration moved at most once, sizes kept."""
    texts, lengths, _ = topical_pool(n)
    before = group(texts, lengths, 7, "cluster", seed=4)
    after = swap_between(before, 0.1, seed=4)
    assert [len(block) for block in after] == [len(block) for block in before]
    home = {i: b for b, block in enumerate(before) for i in block}
    assert sum(home[i] != b for b, block in enumerate(after) for i in block) == 2 * pairs
    diverse = group(texts, lengths, 7, "cluster_diverse", seed=4)
    assert sorted(map(sorted, after)) == sorted(diverse)


def test_diverse_with_nobody_to_swap_with() -> None:
    assert swap_between([list(range(40))], 0.1, 0) == [list(range(40))]
    after = swap_between([list(range(100)), [100]], 0.1, 0)
    assert [len(block) for block in after] == [100, 1]
    assert after[1] != [100]


@pytest.mark.filterwarnings("error::sklearn.exceptions.ConvergenceWarning", "error::RuntimeWarning")
@pytest.mark.parametrize("method", ["cluster", "cluster_diverse"])
def test_clusters_of_duplicates(method: str) -> None:
    """Fewer distinct texts than blocks: no warning, still full blocks."""
    texts = ["red card", "blue tea"] * 20 + ["!?"]
    blocks = group(texts, [2] * 41, 4, method)
    assert sorted(i for block in blocks for i in block) == list(range(41))
    assert [len(block) for block in blocks] == [4] * 10 + [1]


def test_clustering_without_words() -> None:
    with pytest.raises(ValueError, match=r"no word to cluster by.*length_balanced"):
        group(["!", "?", "..."] * 4, [1] * 12, 4, "cluster")


@pytest.mark.parametrize(("method", "limit"), [("random", 1), ("length_balanced", 2), ("cluster", 10)])
def test_speed_for_3000_demonstrations(method: str, limit: float) -> None:
    """About 0.01, 0.05 and 0.5 s on one core; the limits catch something quadratic, not a slow machine."""
    texts, lengths, _ = topical_pool(3000)
    start = time.thread_time()
    group(texts, lengths, 50, method)
    assert time.thread_time() - start < limit


GOOD = {"texts": ["a", "b", "c"], "lengths": [1, 2, 3], "block_size": 2, "method": "random", "seed": 0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"texts": [], "lengths": []}, "texts is empty"),
        ({"texts": "abc"}, "one string"),
        ({"texts": ["a", None, "c"]}, r"texts\[1\]"),
        ({"lengths": [1, 2]}, "2 lengths for 3 texts"),
        ({"lengths": [1, -2, 3]}, r"lengths\[1\] is -2"),
        ({"lengths": [1, 2.5, 3]}, r"lengths\[1\] is 2.5"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": 2.0}, "block_size is 2.0"),
        ({"block_size": True}, "block_size is True"),
        ({"method": "kmeans"}, "unknown grouping 'kmeans'.*random, length_balanced, cluster, cluster_diverse"),
        ({"method": None}, "unknown grouping None"),
        ({"seed": 0.5}, "seed is 0.5"),
    ],
)
def test_bad_input(change: dict[str, object], message: str) -> None:
    group(**GOOD)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        group(**{**GOOD, **change})  # type: ignore[arg-type]
