"""The order of what was selected, inside a view (DBSA section 5.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from sglang_ext.retrievers.base import Scores


def by_relevance(indices: Iterable[int], scores: Scores | Sequence[float]) -> list[int]:
    """Best first; of equal scores, the lower index first."""
    ascending = np.array(sorted(indices), dtype=np.intp)
    best: list[int] = ascending[np.argsort(-np.asarray(scores)[ascending], kind="stable")].tolist()
    return best


def pool(indices: Iterable[int], scores: Scores | Sequence[float]) -> list[int]:
    """As encoded: ascending index."""
    return sorted(indices)


def high_to_low(indices: Iterable[int], scores: Scores | Sequence[float]) -> list[int]:
    """Most relevant first, farthest from the query; of equal scores, the lower index first."""
    return by_relevance(indices, scores)


def low_to_high(indices: Iterable[int], scores: Scores | Sequence[float]) -> list[int]:
    """Most relevant last, next to the query: exactly high_to_low backwards, ties too."""
    return by_relevance(indices, scores)[::-1]


def reversed_pool(indices: Iterable[int], scores: Scores | Sequence[float]) -> list[int]:
    """Pool order backwards: descending index."""
    return sorted(indices, reverse=True)


ORDERS: dict[str, Callable[[Iterable[int], Scores | Sequence[float]], list[int]]] = {
    "pool": pool,
    "low_to_high": low_to_high,
    "high_to_low": high_to_low,
    "reversed": reversed_pool,
}


def arrange(indices: Iterable[int], scores: Scores | Sequence[float], order: str) -> list[int]:
    """`indices` in the named order; `scores` is indexed by them. Raises ValueError if unknown."""
    if not isinstance(order, str) or order not in ORDERS:
        raise ValueError(f"unknown order {order!r}; expected one of {', '.join(ORDERS)}")
    return ORDERS[order](indices, scores)
