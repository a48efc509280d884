"""BM25 (Robertson and Zaragoza, 2009; DBSA's retriever), with rank_bm25's BM25Okapi scores precomputed.

rank_bm25 walks over all texts in Python for every query term. A text's score for a term does not depend on
the query, though, so all of them are computed once, as a sparse matrix of texts by terms, and a query adds up
a few columns. rank_bm25 counts the words of each text; what follows from the counts is worked out here, in its
order of operations, so that the scores agree to the bit, and so that an index grows by counting new texts only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rank_bm25 import BM25Okapi
from scipy.sparse import csc_array

from sglang_ext.retrievers.base import Scores, check_query, check_texts
from sglang_ext.retrievers.terms import Analyzer

K1, B, EPSILON = 1.5, 0.75, 0.25  # BM25Okapi's own


@dataclass(frozen=True)
class Counts:
    """How often each text has each of its terms.

    Attributes:
        vocabulary: term -> column, in order of first appearance.
        columns, counts: [pairs] int32 and int64, one for each (text, term in it), text by text.
        distinct: [texts] int64, pairs of each text.
        lengths: [texts] int64, terms of each text, repetitions counted.
    """

    vocabulary: dict[str, int]
    columns: NDArray[np.int32]
    counts: NDArray[np.int64]
    distinct: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, texts: Sequence[str], analyzer: Analyzer) -> Counts:
        corpus = [analyzer(text) for text in texts]
        if not any(corpus):  # rank_bm25 divides by zero here
            zeros = np.zeros(len(corpus), dtype=np.int64)
            return cls({}, np.zeros(0, np.int32), np.zeros(0, np.int64), zeros, zeros)
        okapi = BM25Okapi(corpus)
        vocabulary = {term: column for column, term in enumerate(okapi.idf)}
        return cls(
            vocabulary,
            np.array([vocabulary[term] for freqs in okapi.doc_freqs for term in freqs], dtype=np.int32),
            np.array([count for freqs in okapi.doc_freqs for count in freqs.values()], dtype=np.int64),
            np.array([len(freqs) for freqs in okapi.doc_freqs], dtype=np.int64),
            np.array(okapi.doc_len, dtype=np.int64),
        )

    def followed_by(self, other: Counts) -> Counts:
        """The counts of these texts and, behind them, `other`'s."""
        vocabulary = dict(self.vocabulary)
        places = [vocabulary.setdefault(term, len(vocabulary)) for term in other.vocabulary]
        return Counts(
            vocabulary,
            np.concatenate((self.columns, np.array(places, dtype=np.int32)[other.columns])),
            np.concatenate((self.counts, other.counts)),
            np.concatenate((self.distinct, other.distinct)),
            np.concatenate((self.lengths, other.lengths)),
        )


class BM25:
    """Scores equal to `rank_bm25.BM25Okapi(corpus).get_scores(query)` (k1 1.5, b 0.75, epsilon 0.25).

    That includes its treatment of frequent terms: a term in more than half of the texts has a negative idf,
    which is replaced by epsilon times the mean idf over all terms. With very few texts (say two blocks) that
    mean can itself be negative, and texts that match then score below texts that do not.

    In the registry: "bm25", whose terms are the words, and "bm25:stem", "bm25:stop_words" and "bm25:stem+stop_words",
    for English, whose terms are stems, or without stop words, or both (`terms.Analyzer`).

    Attributes:
        analyzer: what makes terms of texts and queries.
        vocabulary: term -> column of `matrix`.
        matrix: float64 [num_texts, num_terms], sparse by columns: the score of each text for each term asked
            alone. Also the feature vectors of the paper's Appendix F (see `grouping`).
    """

    analyzer = Analyzer()

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self.vocabulary = counts.vocabulary
        self.matrix = _matrix(counts)
        # Plain arrays: slicing a scipy column costs a hundred times more than slicing these.
        self._starts: list[int] = self.matrix.indptr.tolist()
        self._rows: NDArray[np.integer] = self.matrix.indices
        self._values: Scores = self.matrix.data

    @property
    def num_texts(self) -> int:
        return int(self.matrix.shape[0])

    @classmethod
    def configured(cls, argument: str) -> type[BM25]:
        """This class with another analyzer. Raises ValueError when `argument` is none (`terms.Analyzer.parse`)."""
        try:
            analyzer = Analyzer.parse(argument)
        except ValueError as error:
            raise ValueError(f"retriever bm25:{argument}: {error}, such as bm25:stem or bm25:stem+stop_words") from None
        return type(cls.__name__, (cls,), {"analyzer": analyzer})

    @classmethod
    def build(cls, texts: Sequence[str]) -> BM25:
        """Index `texts`; linear in their total length.

        Texts without a single term are legal and score 0. Raises ValueError as `base.check_texts`, and where the
        analyzer needs a library that is not installed.
        """
        return cls(Counts.of(check_texts(texts), cls.analyzer))

    def extended(self, texts: Sequence[str]) -> BM25:
        """As if built from the texts so far and `texts`, of which alone the words are counted.

        Raises ValueError (`base.check_texts`).
        """
        return type(self)(self._counts.followed_by(Counts.of(check_texts(texts), self.analyzer)))

    def score(self, query: str) -> Scores:
        """BM25 score of every text: float64 [num_texts]. Repeated query terms count as often as they occur.

        Unknown terms add nothing. Cost: the number of (query term, text holding it) pairs.
        """
        asked = self.analyzer(check_query(query))
        columns = [column for column in map(self.vocabulary.get, asked) if column is not None]
        if not columns:
            return np.zeros(self.num_texts)
        parts = [slice(self._starts[column], self._starts[column + 1]) for column in columns]
        rows, values = (np.concatenate([x[part] for part in parts]) for x in (self._rows, self._values))
        # Adds term by term, as BM25Okapi; its annotation says whole numbers, as it gives without weights.
        return np.bincount(rows, values, self.num_texts).astype(np.float64, copy=False)


def _matrix(counts: Counts) -> csc_array:
    """[num_texts, num_terms] scores, in the order of operations of BM25Okapi.get_scores."""
    size, texts = len(counts.vocabulary), len(counts.lengths)
    if not size:
        return csc_array((texts, 0), dtype=np.float64)
    rows = np.repeat(np.arange(texts, dtype=np.int32), counts.distinct)
    idf = _idf(np.bincount(counts.columns, minlength=size), texts)
    norm = K1 * (1 - B + B * counts.lengths / (int(counts.lengths.sum()) / texts))
    values = idf[counts.columns] * (counts.counts * (K1 + 1) / (counts.counts + norm[rows]))
    return csc_array((values, (rows, counts.columns)), shape=(texts, size))


def _idf(frequency: NDArray[np.int64], texts: int) -> Scores:
    """[terms] BM25Okapi's idf of terms that are in `frequency` [terms] of the texts each."""
    different, which = np.unique(frequency, return_inverse=True)
    # math.log, as there: numpy's may differ in the last bit. Few terms differ in how many texts have them.
    idf = np.array([math.log(texts - n + 0.5) - math.log(n + 0.5) for n in different.tolist()])[which]
    mean = float(idf.cumsum()[-1]) / len(idf)  # one after the other, as there
    return np.where(idf < 0, EPSILON * mean, idf)
