"""No retrieval: every text is as good as any other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_ext.retrievers.base import Scores, check_query, check_texts


class AllBlocks:
    """Equal scores, so that selection takes the first blocks up to the budget: all of them with ratio 1."""

    def __init__(self, num_texts: int) -> None:
        self._num_texts = num_texts

    @property
    def num_texts(self) -> int:
        return self._num_texts

    @classmethod
    def build(cls, texts: Sequence[str]) -> AllBlocks:
        """Counts `texts`. Raises ValueError (`base.check_texts`)."""
        return cls(len(check_texts(texts)))

    def score(self, query: str) -> Scores:
        """Zeros: float64 [num_texts]."""
        check_query(query)
        return np.zeros(self._num_texts)
