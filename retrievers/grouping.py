"""Which demonstrations share a block (DBSA section 5.3, Appendix F).

Common to all methods: every index lands in exactly one block, every block but the last holds exactly
`block_size` demonstrations, and inside a block they stand in pool order. Where a method leaves the order of
the blocks open (all but `random`), blocks are sorted by their first demonstration, the short one last. So the
result is a function of the arguments alone: equal pools get equal blocks, which lets them share cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral

from sglang_ext.retrievers.base import check_texts
from sglang_ext.retrievers.clusters import balanced_clusters, swap_between
from sglang_ext.retrievers.length_balance import length_balanced
from sglang_ext.retrievers.stable_random import permutation

Blocks = list[list[int]]


def _random(texts: list[str], lengths: list[int], block_size: int, seed: int) -> Blocks:
    order = permutation(len(texts), "grouping", seed)
    return [sorted(order[i : i + block_size]) for i in range(0, len(order), block_size)]


def _length_balanced(texts: list[str], lengths: list[int], block_size: int, seed: int) -> Blocks:
    return _in_order(length_balanced(lengths, block_size, seed))


def _cluster(texts: list[str], lengths: list[int], block_size: int, seed: int) -> Blocks:
    return _in_order(balanced_clusters(texts, block_size, seed))


def _cluster_diverse(texts: list[str], lengths: list[int], block_size: int, seed: int) -> Blocks:
    clusters = _in_order(balanced_clusters(texts, block_size, seed))
    return _in_order(swap_between(clusters, fraction=0.1, seed=seed))


def _in_order(blocks: Blocks) -> Blocks:
    full = max(len(block) for block in blocks)
    return sorted((sorted(block) for block in blocks), key=lambda block: (len(block) < full, block[0]))


GROUPINGS: dict[str, Callable[[list[str], list[int], int, int], Blocks]] = {
    "random": _random,
    "length_balanced": _length_balanced,
    "cluster": _cluster,
    "cluster_diverse": _cluster_diverse,
}


def group(
    texts: Sequence[str],
    lengths: Sequence[int],
    block_size: int = 50,
    method: str = "length_balanced",
    seed: int = 0,
) -> list[list[int]]:
    """Group demonstrations into blocks; see the module for what all methods share.

    Args:
        texts: the demonstrations, in pool order; used by the cluster methods.
        lengths: tokens of each; used by length_balanced.
        block_size: demonstrations a block.
        method: "random"; "length_balanced" (blocks as equal as possible in total tokens); "cluster" (k-means
            over BM25 term scores); "cluster_diverse" (the same with 10% of the demonstrations swapped between
            clusters).
        seed: any integer.
    Returns:
        ceil(n / block_size) blocks of indices into `texts`.
    Raises:
        ValueError: no texts, a length missing or negative, a block size below 1, an unknown method, a seed
            that is no integer, or clustering of texts without a single word.
    """
    texts = check_texts(texts)
    lengths = list(lengths)
    if len(lengths) != len(texts):
        raise ValueError(f"got {len(lengths)} lengths for {len(texts)} texts; expected one token count each")
    for i, length in enumerate(lengths):
        if not _is_int(length) or length < 0:
            raise ValueError(f"lengths[{i}] is {length!r}; expected a whole number of tokens, 0 or more")
    if not _is_int(block_size) or block_size < 1:
        raise ValueError(f"block_size is {block_size!r}; expected a whole number of demonstrations, at least 1")
    if not _is_int(seed):
        raise ValueError(f"seed is {seed!r}; expected an integer")
    if not isinstance(method, str) or method not in GROUPINGS:
        raise ValueError(f"unknown grouping {method!r}; expected one of {', '.join(GROUPINGS)}")
    # int() so that NumPy integers, whose repr differs, give the same random numbers.
    return GROUPINGS[method](texts, [int(length) for length in lengths], int(block_size), int(seed))


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
