"""What a retriever is: built once from the texts of a pool version, then asked to score them for queries.

A text is a whole block (block granularity) or a single demonstration (example granularity); a retriever
cannot tell and need not. DBSA leaves the choice of retriever open ("any retrieval method of choice").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]


@runtime_checkable
class Retriever(Protocol):
    """Scores the texts it was built from against a query.

    Implementations are deterministic: equal texts and equal queries give equal scores, in every process.
    They are immutable after `build`, so one instance may serve several threads; new texts mean a new instance.
    """

    @property
    def num_texts(self) -> int:
        """Number of texts it was built from."""
        ...

    @classmethod
    def build(cls, texts: Sequence[str]) -> Retriever:
        """Index `texts`, in pool order. Raises ValueError when there are none or one is not a string."""
        ...

    def score(self, query: str) -> Scores:
        """Relevance of every text to `query`: float64 [num_texts], finite, higher is better (no unit).

        Only the order of the values has a meaning that retrievers share. Raises ValueError when `query`
        is not a string.
        """
        ...


def check_texts(texts: Sequence[str]) -> list[str]:
    """`texts` as a list. Raises ValueError for a bare string, for none and for items that are no strings."""
    if isinstance(texts, str):
        raise ValueError("texts is one string; expected a sequence of strings: pass [text]")
    texts = list(texts)
    if not texts:
        raise ValueError("texts is empty; expected at least one text to retrieve from: add demonstrations first")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"texts[{i}] is of type {type(text).__name__}; expected str: render it first")
    return texts


def check_query(query: str) -> str:
    """`query` itself. Raises ValueError when it is not a string."""
    if not isinstance(query, str):
        raise ValueError(
            f"query is of type {type(query).__name__}; expected str: pass the retrieval text, not token ids"
        )
    return query
