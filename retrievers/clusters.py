"""Blocks of lexically similar demonstrations (DBSA Appendix F), and their diverse variant."""

from __future__ import annotations

import numpy as np
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits

from sglang_ext.retrievers.bm25 import BM25
from sglang_ext.retrievers.stable_random import digest, permutation


def balanced_clusters(texts: list[str], block_size: int, seed: int) -> list[list[int]]:
    """k-means with one cluster a block, then every cluster brought to `block_size`, one to the remainder.

    Features (Appendix F): every term of the pool is asked as a BM25 query, and a demonstration's scores for
    all of them are its vector. Balancing goes through all pairs of demonstration and cluster, nearest first,
    and fills clusters up to their size; the paper does not say how it balances.

    Raises ValueError when the texts hold no word at all.
    """
    count = -(-len(texts) // block_size)
    if count == 1:
        return [list(range(len(texts)))]
    if count == len(texts):  # one demonstration a block: nothing to group
        return [[i] for i in range(len(texts))]
    features = BM25.build(texts).matrix.tocsr()
    if not features.shape[1]:
        raise ValueError("the texts hold no word to cluster by; use grouping 'length_balanced' or 'random'")
    distinct = len({(row.indices.tobytes(), row.data.tobytes()) for row in (features[[i]] for i in range(len(texts)))})
    k_means = KMeans(min(count, distinct), n_init=1, random_state=digest("k_means", seed) % 2**32)
    # One thread: sums of several would be added in the order in which they finish.
    with threadpool_limits(limits=1):
        distances = k_means.fit(features).transform(features)
    # With fewer distinct texts than blocks, blocks share centres.
    distances = distances[:, np.arange(count) % distances.shape[1]]
    room = np.full(count, block_size)
    smallest = np.bincount(distances.argmin(axis=1), minlength=count).argmin()
    room[smallest] -= count * block_size - len(texts)
    return _fill(distances, room.tolist())


def _fill(distances: np.ndarray, room: list[int]) -> list[list[int]]:
    """Assign rows to columns, nearest pairs first, at most room[c] to column c. The room sums to the rows."""
    blocks: list[list[int]] = [[] for _ in room]
    placed = [False] * len(distances)
    for pair in np.argsort(distances, axis=None, kind="stable").tolist():
        i, c = divmod(pair, len(room))
        if not placed[i] and len(blocks[c]) < room[c]:
            blocks[c].append(i)
            placed[i] = True
    return blocks


def swap_between(blocks: list[list[int]], fraction: float, seed: int) -> list[list[int]]:
    """`blocks` with a `fraction` of all demonstrations, drawn at random, swapped between blocks in pairs.

    Each moves at most once: the number of pairs is fraction x n / 2, rounded half up, or as many as
    there are when one block holds nearly everything.
    """
    block_of = {i: b for b, block in enumerate(blocks) for i in block}
    n = len(block_of)
    pairs = int(fraction * n / 2 + 0.5)
    moved: dict[int, int] = {}
    waiting: list[int] = []  # drawn, all of the same block, without a partner yet
    for i in permutation(n, "swap_between", seed):
        if len(moved) >= 2 * pairs:
            break
        if waiting and block_of[waiting[-1]] != block_of[i]:
            partner = waiting.pop()
            moved[i], moved[partner] = block_of[partner], block_of[i]
        else:
            waiting.append(i)
    swapped: list[list[int]] = [[] for _ in blocks]
    for i, b in block_of.items():
        swapped[moved.get(i, b)].append(i)
    return swapped
