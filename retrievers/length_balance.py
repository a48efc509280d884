"""Blocks of equal size and nearly equal numbers of tokens.

Partitioning into equal sums is NP-hard; a greedy deal followed by swaps ends within a few tokens of it for
real pools, because there are many demonstrations a block to swap.
"""

from __future__ import annotations

import numpy as np

from sglang_ext.retrievers.stable_random import permutation


def length_balanced(lengths: list[int], block_size: int, seed: int) -> list[list[int]]:
    """Indices in ceil(n / block_size) blocks, all of `block_size` but the last, nearly equal in tokens.

    The short last block is made as long as the others as far as its few demonstrations allow. Equal lengths
    are dealt in random order (`seed`), so that a pool sorted by label does not decide who shares a block.
    """
    n = len(lengths)
    shuffled = permutation(n, "length_balanced", seed)
    ascending = sorted(shuffled, key=lengths.__getitem__)  # stable: ties stay shuffled
    full, rest = divmod(n, block_size)
    last: list[int] = []
    if rest:
        last, ascending = _take(ascending, lengths, rest, target=sum(lengths) / (full + 1))
    blocks = _deal(ascending[::-1], lengths, full)
    _even_out(blocks, lengths)
    if last:
        blocks.append(last)
        _even_out(blocks, lengths)
    return blocks


def _take(ascending: list[int], lengths: list[int], count: int, target: float) -> tuple[list[int], list[int]]:
    """(`count` neighbours by length whose total is nearest to `target`, the others)."""
    sums = np.concatenate([[0], np.cumsum([lengths[i] for i in ascending])])
    start = int(np.argmin(np.abs(sums[count:] - sums[:-count] - target)))
    return ascending[start : start + count], ascending[:start] + ascending[start + count :]


def _deal(descending: list[int], lengths: list[int], count: int) -> list[list[int]]:
    """Deal rounds of one demonstration a block, the longest of a round to the shortest block so far."""
    blocks: list[list[int]] = [[] for _ in range(count)]
    totals = [0] * count
    for start in range(0, len(descending), max(count, 1)):
        shortest_first = sorted(range(count), key=lambda b: (totals[b], b))
        for b, i in zip(shortest_first, descending[start : start + count], strict=True):
            blocks[b].append(i)
            totals[b] += lengths[i]
    return blocks


def _even_out(blocks: list[list[int]], lengths: list[int]) -> None:
    """Swap between the longest and the shortest block until no swap of two brings them closer. In place.

    Every swap lowers the sum of squared totals, a whole number, so this ends.
    """
    members = [np.array([lengths[i] for i in block], dtype=np.int64) for block in blocks]
    totals = np.array([m.sum() for m in members])
    while len(blocks) > 1:
        high, low = int(totals.argmax()), int(totals.argmin())
        gap = totals[high] - totals[low]
        shift = members[high][:, None] - members[low][None, :]  # tokens that a swap would move
        after = np.where((shift > 0) & (shift < gap), np.abs(gap - 2 * shift), gap)
        a, b = np.unravel_index(int(after.argmin()), after.shape)
        if after[a, b] >= gap:
            return
        moved = shift[a, b]
        members[high][a], members[low][b] = members[low][b], members[high][a]
        blocks[high][a], blocks[low][b] = blocks[low][b], blocks[high][a]
        totals[high] -= moved
        totals[low] += moved
