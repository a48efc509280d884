"""How many blocks a request reads, and which (DBSA: the sinks and the best by score). Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from numbers import Integral, Real

import numpy as np
from numpy.typing import NDArray

from sglang_ext.retrievers.base import Scores
from sglang_ext.retrievers.ordering import arrange, by_relevance


def budget(ratio: float | None = None, blocks: int | None = None, *, total: int, sinks: int) -> int:
    """Number of blocks in the view, the sinks among them.

    From a ratio: round-half-up(ratio x total), at least the sinks and at least one. The product is taken in
    decimal, so that 0.145 of 100 is 14.5 and rounds to 15. From `blocks`: that number.

    Args:
        ratio: share of the pool, in (0, 1].
        blocks: number of blocks; exactly one of the two is given.
        total: blocks in the pool.
        sinks: blocks at its start that are always selected, 0..total.
    Raises:
        ValueError: any of these is out of range or of another type, both or neither of ratio and blocks is
            given, or `blocks` is fewer than the sinks (or none) or more than the total.
    """
    _check_sinks(total, sinks)
    if (ratio is None) == (blocks is None):
        got = "neither" if ratio is None else f"both (ratio={ratio!r}, blocks={blocks!r})"
        raise ValueError(f"got {got} of ratio and blocks; expected exactly one: drop or add one of them")
    floor = max(sinks, 1)
    if ratio is not None:
        if not _is_number(ratio) or not 0 < ratio <= 1:
            raise ValueError(f"ratio is {ratio!r}; expected a number in (0, 1], such as 0.3 for 30% of the pool")
        return max(floor, int((Decimal(str(float(ratio))) * total).to_integral_value(ROUND_HALF_UP)))
    if blocks is None or not _is_int(blocks):
        raise ValueError(f"blocks is {blocks!r}; expected a whole number from {floor} to {total}")
    if blocks < floor:
        raise ValueError(
            f"blocks is {blocks}; expected at least {floor}, for the {sinks} sink block(s) count inside "
            f"the budget: ask for {floor} to {total}"
        )
    if blocks > total:
        raise ValueError(f"blocks is {blocks}; the pool has {total}: ask for {floor} to {total}, or ratio 1")
    return int(blocks)


def example_budget(
    ratio: float | None = None, blocks: int | None = None, *, block_sizes: Sequence[int], sinks: int
) -> int:
    """Number of demonstrations at example granularity, those of the sink blocks among them.

    From a ratio: round-half-up(ratio x demonstrations). From `blocks`: as many demonstrations as that number
    of full blocks holds (full = the largest size), at most all of them. Either way at least the sink blocks.

    Args:
        ratio, blocks: as in `budget`.
        block_sizes: demonstrations in each block, in pool order.
        sinks: sink blocks.
    Raises:
        ValueError: as `budget`; also a block size that is not a positive integer.
    """
    sizes = _check_sizes(block_sizes)
    m = budget(ratio, blocks, total=len(sizes), sinks=sinks)  # all checks, and the bounds in blocks
    examples, sink_examples = sum(sizes), sum(sizes[:sinks])
    if ratio is not None:
        return budget(ratio, total=examples, sinks=sink_examples)
    return max(sink_examples, min(m * max(sizes), examples))


def select(scores: Scores | Sequence[float], m: int, sinks: int, order: str = "pool") -> list[int]:
    """The `m` indices of a view, in view order: the sinks 0..sinks-1, then the best m - sinks of the rest.

    Ties go to the lower index; `order` (see `ordering`) applies to the rest only, the sinks stay first.

    Args:
        scores: float [total], higher is better, finite.
        m: from `budget`; sinks <= m <= total.
        sinks: number of sinks, 0..total.
        order: "pool", "low_to_high", "high_to_low" or "reversed".
    Raises:
        ValueError: anything out of range, scores that are not finite or not a vector, an unknown order.
    """
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim != 1:
        raise ValueError(f"scores has shape {scores.shape}; expected one score a block, [total]")
    if not np.isfinite(scores).all():
        raise ValueError("scores holds NaN or infinity; expected finite numbers: fix the retriever")
    total = len(scores)
    _check_sinks(total, sinks)
    if not _is_int(m) or not sinks <= m <= total:
        raise ValueError(f"m is {m!r}; expected a whole number from {sinks} (the sinks) to {total} (all): use budget()")
    best = by_relevance(range(sinks, total), scores)[: m - sinks]
    return [*range(sinks), *arrange(best, scores, order)]


def select_examples(
    scores: Scores | Sequence[float], block_sizes: Sequence[int], m: int, sinks: int, order: str = "pool"
) -> list[tuple[int, int]]:
    """Single demonstrations cut out of their blocks (DBSA, Table 6): whole sinks, then the best others.

    Demonstrations are numbered as encoded: those of block 0 first, and inside a block in its own order.

    Args:
        scores: float [demonstrations], in that numbering.
        block_sizes: demonstrations in each block.
        m: demonstrations in the view, those of the sinks included, from `example_budget`.
        sinks: sink *blocks*.
        order: as in `select`, over demonstrations.
    Returns:
        (block, index inside the block) of each, in view order.
    Raises:
        ValueError: as `select`; also sizes that do not add up to the number of scores.
    """
    sizes = _check_sizes(block_sizes)
    _check_sinks(len(sizes), sinks)
    if len(scores) != sum(sizes):
        raise ValueError(f"got {len(scores)} scores for blocks of {sum(sizes)} demonstrations; expected one score each")
    chosen = np.array(select(scores, m, sum(sizes[:sinks]), order), dtype=np.intp)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    blocks = np.searchsorted(starts, chosen, side="right") - 1
    return list(zip(blocks.tolist(), (chosen - starts[blocks]).tolist(), strict=True))


def starts_of(block_sizes: Sequence[int]) -> NDArray[np.intp]:
    """The number of each block's first demonstration, [blocks]; ValueError: a size that is not a positive integer."""
    return np.cumsum([0, *_check_sizes(block_sizes)[:-1]], dtype=np.intp)


def block_scores(scores: Scores | Sequence[float], starts: NDArray[np.intp]) -> Scores:
    """How relevant blocks are, by their demonstrations: each block as its most relevant one.

    Args:
        scores: float [demonstrations], higher is better, those of block 0 first.
        starts: [blocks], from `starts_of`.
    Returns:
        float64 [blocks].
    Raises:
        ValueError: there are fewer scores than demonstrations.
    """
    scores = np.asarray(scores, dtype=np.float64)
    if len(scores) <= starts[-1]:
        raise ValueError(
            f"got {len(scores)} scores, the last block begins at {starts[-1]}; expected one for each of all"
        )
    best: Scores = np.maximum.reduceat(scores, starts)
    return best


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_sinks(total: int, sinks: int) -> None:
    if not _is_int(total) or total < 1:
        raise ValueError(f"total is {total!r}; expected at least one block: add demonstrations to the pool first")
    if not _is_int(sinks) or not 0 <= sinks <= total:
        raise ValueError(f"sinks is {sinks!r}; expected a whole number from 0 to {total}, the blocks of the pool")


def _check_sizes(block_sizes: Sequence[int]) -> list[int]:
    sizes = list(block_sizes)
    if not all(_is_int(size) and size >= 1 for size in sizes):
        raise ValueError(f"block_sizes is {sizes!r}; expected a positive whole number for each block")
    return sizes
