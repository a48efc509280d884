"""Random retrieval: the baseline that any other retriever has to beat."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_ext.retrievers.base import Scores, check_query, check_texts
from sglang_ext.retrievers.stable_random import uniform


class RandomOrder:
    """Uniform scores in [0, 1) drawn from (seed, query): the same query always gets the same selection.

    They do not depend on the texts. In the registry: "random" (seed 0) or "random:SEED".
    """

    default_seed = 0

    def __init__(self, num_texts: int, seed: int) -> None:
        self._num_texts = num_texts
        self.seed = seed

    @property
    def num_texts(self) -> int:
        return self._num_texts

    @classmethod
    def configured(cls, argument: str) -> type[RandomOrder]:
        """This class with another seed. Raises ValueError when `argument` is not an integer."""
        try:
            seed = int(argument)
        except ValueError:
            raise ValueError(f"retriever random:{argument}: expected an integer seed, such as random:7") from None
        return type(cls.__name__, (cls,), {"default_seed": seed})

    @classmethod
    def build(cls, texts: Sequence[str], seed: int | None = None) -> RandomOrder:
        """Counts `texts`. Raises ValueError (`base.check_texts`)."""
        return cls(len(check_texts(texts)), cls.default_seed if seed is None else seed)

    def score(self, query: str) -> Scores:
        """Uniform in [0, 1): float64 [num_texts]."""
        return uniform(self._num_texts, "random_order", self.seed, check_query(query))
