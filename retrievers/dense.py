"""Dense retrieval: cosine similarity of sentence embeddings, by any sentence-transformers model."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_ext.retrievers.base import Scores, check_query, check_texts
from sglang_ext.retrievers.passages import passages

MODEL_VARIABLE = "SGLANG_EXT_DENSE_MODEL"
AT_ONCE = 32
"""Texts of a pool that are embedded before a question's turn comes."""
ENCODING = threading.Lock()
"""Whoever has a model encode: pools are indexed in one thread and asked in another, and its tokenizer serves one."""


class TextEncoder(Protocol):
    """The part of `sentence_transformers.SentenceTransformer` that is used.

    Long texts are cut into passages for one with `max_seq_length` (tokens) and a Hugging Face `tokenizer`.
    """

    def encode(self, sentences: list[str], *, show_progress_bar: bool) -> ArrayLike:
        """Embeddings, float [sentences, dimension]."""
        ...


class Dense:
    """Cosine of the query's and a text's embedding, in [-1, 1].

    A block of 50 demonstrations is longer than most sentence encoders read. Texts and queries that do not fit
    are cut into passages, and the best pair of passages gives the score (MaxP; Dai and Callan, 2019).

    The model comes from the registry name ("dense:MODEL", a hub name or a folder), from `build(model=...)`,
    or from the environment variable SGLANG_EXT_DENSE_MODEL. It is loaded once a process.
    """

    default_model: str | None = None

    def __init__(self, encoder: TextEncoder, embeddings: NDArray[np.float64], starts: NDArray[np.intp]) -> None:
        self._encoder = encoder
        self._embeddings = embeddings  # [passages, dimension], unit length
        self._starts = starts  # [texts]: first passage of each text

    @property
    def num_texts(self) -> int:
        return len(self._starts)

    @classmethod
    def configured(cls, argument: str) -> type[Dense]:
        """This class with a model. Raises ValueError when `argument` is empty."""
        if not argument:
            raise ValueError("retriever 'dense:' names no model; expected dense:MODEL, a sentence-transformers model")
        return type(cls.__name__, (cls,), {"default_model": argument})

    @classmethod
    def build(cls, texts: Sequence[str], model: str | None = None, encoder: TextEncoder | None = None) -> Dense:
        """Embed `texts`; `encoder` is used as it is, `model` (or the default) is loaded.

        Raises ValueError: sentence-transformers is not installed, no model is named or it cannot be loaded,
            the
        encoder returns something else than one finite vector a passage, or as `base.check_texts`.
        """
        texts = check_texts(texts)
        if encoder is None:
            encoder = _load(model or cls.default_model or _model_from_environment())
        cut, embeddings = list[list[str]](), list[NDArray[np.float64]]()
        for first in range(0, len(texts), AT_ONCE):
            with ENCODING:
                few = [_fitting(text, encoder) for text in texts[first : first + AT_ONCE]]
                embeddings.append(_embed(encoder, [part for parts in few for part in parts]))
            cut += few
        return cls(encoder, np.concatenate(embeddings), np.cumsum([0] + [len(parts) for parts in cut[:-1]]))

    def score(self, query: str) -> Scores:
        """Cosine of the best pair of passages: float64 [num_texts]. An all-zero embedding scores 0."""
        check_query(query)
        with ENCODING:
            queries = _embed(self._encoder, _fitting(query, self._encoder))
        best_for_passage = (self._embeddings @ queries.T).max(axis=1)
        scores: Scores = np.maximum.reduceat(best_for_passage, self._starts)
        return scores


def _model_from_environment() -> str:
    model = os.environ.get(MODEL_VARIABLE)
    if not model:
        raise ValueError(f"no model for the dense retriever; name one as 'dense:MODEL' or in {MODEL_VARIABLE}")
    return model


@lru_cache(maxsize=4)
def _load(model: str) -> TextEncoder:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ValueError(
            f"the dense retriever needs sentence-transformers ({error}); run: pip install sglang_ext[dense]"
        ) from error
    try:
        loaded: TextEncoder = SentenceTransformer(model)
    except OSError as error:
        raise ValueError(f"cannot load the sentence-transformers model {model!r}: {error}") from error
    return loaded


def _fitting(text: str, encoder: TextEncoder) -> list[str]:
    limit = getattr(encoder, "max_seq_length", None)
    tokenizer = getattr(encoder, "tokenizer", None)
    if limit is None or tokenizer is None:
        return [text]

    def count(part: str) -> int:  # with the special tokens, which count against the encoder's limit
        return len(tokenizer(part, truncation=False, verbose=False)["input_ids"])

    return passages(text, count, limit)


def _embed(encoder: TextEncoder, sentences: list[str]) -> NDArray[np.float64]:
    embeddings = np.asarray(encoder.encode(sentences, show_progress_bar=False), dtype=np.float64)
    if embeddings.ndim != 2 or len(embeddings) != len(sentences):
        raise ValueError(
            f"the encoder returned shape {embeddings.shape} for {len(sentences)} passages; "
            f"expected ({len(sentences)}, dimension): use a sentence embedding model"
        )
    if not np.isfinite(embeddings).all():
        raise ValueError("the encoder returned NaN or infinity; expected finite embeddings: check the model's weights")
    norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
    unit: NDArray[np.float64] = np.divide(embeddings, norms, out=np.zeros_like(embeddings), where=norms > 0)
    return unit
