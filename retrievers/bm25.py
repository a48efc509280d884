"""BM25 (Robertson and Zaragoza, 2009; DBSA's retriever), with rank_bm25's BM25Okapi scores precomputed.

rank_bm25 walks over all texts in Python for every query term. A text's score for a term does not depend on
the query, though, so all of them are computed once, as a sparse matrix of texts by terms, and a query adds up
a few columns.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rank_bm25 import BM25Okapi
from scipy.sparse import csc_array

from sglang_ext.retrievers.base import Scores, check_query, check_texts
from sglang_ext.retrievers.terms import terms


class BM25:
    """Scores equal to `rank_bm25.BM25Okapi(corpus).get_scores(query)` (k1 1.5, b 0.75, epsilon 0.25).

    That includes its treatment of frequent terms: a term in more than half of the texts has a negative idf,
    which is replaced by epsilon times the mean idf over all terms. With very few texts (say two blocks) that
    mean can itself be negative, and texts that match then score below texts that do not.

    Attributes:
        vocabulary: term -> column of `matrix`.
        matrix: float64 [num_texts, num_terms], sparse by columns: the score of each text for each term asked
            alone. Also the feature vectors of the paper's Appendix F (see `grouping`).
    """

    def __init__(self, okapi: BM25Okapi | None, num_texts: int) -> None:
        self._okapi = okapi
        self.vocabulary: dict[str, int] = {}
        if okapi is None:  # no text has a word: rank_bm25 would divide by zero
            self.matrix = csc_array((num_texts, 0), dtype=np.float64)
        else:
            self.vocabulary = {term: column for column, term in enumerate(okapi.idf)}
            self.matrix = _matrix(okapi, self.vocabulary)
        # Plain arrays: slicing a scipy column costs a hundred times more than slicing these.
        self._starts: list[int] = self.matrix.indptr.tolist()
        self._rows: NDArray[np.integer] = self.matrix.indices
        self._values: Scores = self.matrix.data

    @property
    def num_texts(self) -> int:
        return int(self.matrix.shape[0])

    @classmethod
    def build(cls, texts: Sequence[str]) -> BM25:
        """Index `texts`; linear in their total length. Raises ValueError (`base.check_texts`).

        Texts without a single word are legal and score 0.
        """
        corpus = [terms(text) for text in check_texts(texts)]
        return cls(BM25Okapi(corpus) if any(corpus) else None, len(corpus))

    def extended(self, texts: Sequence[str]) -> BM25:
        """As if built from the texts so far and `texts`, of which alone the words are counted.

        Raises ValueError (`base.check_texts`). A pool grows block by block: counting all of it again each time took
        most of an append.
        """
        corpus = [terms(text) for text in check_texts(texts)]
        before = self._okapi
        if before is None:  # none of the texts so far has a word
            return type(self).build([""] * self.num_texts + list(texts))
        okapi = copy.copy(before)
        okapi.doc_freqs, okapi.doc_len, okapi.idf = list(before.doc_freqs), list(before.doc_len), {}
        new = okapi._initialize(corpus)  # appends to what is there; counts what is new
        held = np.diff(self.matrix.indptr).tolist()
        counts = dict(zip(self.vocabulary, held, strict=True))
        for term, number in new.items():
            counts[term] = counts.get(term, 0) + number
        okapi.avgdl = sum(okapi.doc_len) / okapi.corpus_size
        okapi._calc_idf(counts)
        return type(self)(okapi, okapi.corpus_size)

    def score(self, query: str) -> Scores:
        """BM25 score of every text: float64 [num_texts]. Repeated query terms count as often as they occur.

        Unknown terms add nothing. Cost: the number of (query term, text holding it) pairs.
        """
        scores = np.zeros(self.num_texts)
        for term in terms(check_query(query)):
            column = self.vocabulary.get(term)
            if column is not None:
                begin, end = self._starts[column], self._starts[column + 1]
                scores[self._rows[begin:end]] += self._values[begin:end]  # a column holds each row once
        return scores


def _matrix(okapi: BM25Okapi, vocabulary: dict[str, int]) -> csc_array:
    """[num_texts, num_terms] scores, in the order of operations of BM25Okapi.get_scores, so that the bits agree too."""
    columns = np.array([vocabulary[term] for freqs in okapi.doc_freqs for term in freqs], np.int32)
    counts = np.array([count for freqs in okapi.doc_freqs for count in freqs.values()], dtype=np.int64)
    rows = np.repeat(np.arange(okapi.corpus_size, dtype=np.int32), [len(freqs) for freqs in okapi.doc_freqs])
    idf = np.array(list(okapi.idf.values()), dtype=np.float64)
    k1, b, length = okapi.k1, okapi.b, np.array(okapi.doc_len)
    norm = k1 * (1 - b + b * length / okapi.avgdl)
    values = idf[columns] * (counts * (k1 + 1) / (counts + norm[rows]))
    return csc_array((values, (rows, columns)), shape=(okapi.corpus_size, len(vocabulary)))
