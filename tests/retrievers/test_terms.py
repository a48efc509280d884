"""Stems and stop words of BM25, against counts by hand, and what is said where there is no stemmer."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sglang_ext.retrievers import english
from sglang_ext.retrievers.bm25 import BM25
from sglang_ext.retrievers.english import LONGEST, STOP_WORDS, stem
from sglang_ext.retrievers.registry import get
from sglang_ext.retrievers.terms import Analyzer, terms

K1, B, EPSILON = 1.5, 0.75, 0.25

# Word -> its stem, as the description of Snowball's English stemmer gives them.
STEMS = {
    "consign": "consign", "consigned": "consign", "consigning": "consign", "consignment": "consign",
    "consistency": "consist", "consistent": "consist", "consolation": "consol", "consolatory": "consolatori",
    "knack": "knack", "knackeries": "knackeri", "kneeling": "kneel", "knightly": "knight", "knots": "knot",
    "cards": "card", "activated": "activ", "activating": "activ",
}  # fmt: skip
STOPPED = {"the", "a", "my", "is", "what", "how", "do", "don", "t", "i"}
"""Some of what is dropped."""


def by_hand(corpus: list[list[str]], query: list[str]) -> list[float]:
    """BM25Okapi's scores of texts that are lists of terms, straight from its formulas."""
    counts = [Counter(words) for words in corpus]
    mean = sum(map(len, corpus)) / len(corpus)
    idf = {}
    for term in dict.fromkeys(term for words in corpus for term in words):
        having = sum(term in each for each in counts)
        idf[term] = math.log(len(corpus) - having + 0.5) - math.log(having + 0.5)
    floor = EPSILON * sum(idf.values()) / len(idf)
    scores = []
    for words, count in zip(corpus, counts, strict=True):
        norm = K1 * (1 - B + B * len(words) / mean)
        weights = {term: floor if value < 0 else value for term, value in idf.items()}
        scores.append(sum(weights.get(q, 0.0) * count[q] * (K1 + 1) / (count[q] + norm) for q in query))
    return scores


def made(words: int, dice: random.Random) -> list[tuple[str, str]]:
    """(word, its stem) of a text of English words, capitals and stop words among them."""
    found = []
    for _ in range(words):
        if dice.random() < 0.4:
            word = dice.choice(sorted(STOPPED))
            found.append((word.upper() if dice.random() < 0.3 else word, word))
        else:
            word = dice.choice(sorted(STEMS))
            found.append((word.title() if dice.random() < 0.3 else word, STEMS[word]))
    return found


@pytest.mark.parametrize("name", ["bm25:stem", "bm25:stop_words", "bm25:stem+stop_words", "bm25:stop_words+stem"])
@pytest.mark.parametrize("n", [3, 40])
def test_scores_are_those_of_the_terms_counted_by_hand(name: str, n: int) -> None:
    def analyzed(text: list[tuple[str, str]]) -> list[str]:
        kept = [pair for pair in text if "stop_words" not in name or pair[0].lower() not in STOPPED]
        return [root if "stem" in name else word.lower() for word, root in kept]

    dice = random.Random(n)
    texts = [made(dice.randint(1, 20), dice) for _ in range(n)]
    joined = [" ".join(word for word, _ in text) for text in texts]
    retriever = get(name).build(joined)
    for query in [made(6, dice) for _ in range(10)] + texts[:2]:
        found = retriever.score(" ".join(word for word, _ in query))
        expected = by_hand([analyzed(text) for text in texts], analyzed(query))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
    grown = get(name).build(joined[:2]).extended(joined[2:])  # type: ignore[attr-defined]
    np.testing.assert_array_equal(grown.score("activating my Cards"), retriever.score("activating my Cards"))


def test_what_a_query_finds() -> None:
    texts = ["I activated the cards", "what is my balance", "tea with cake"]
    plain, stemmed = get("bm25").build(texts), get("bm25:stem").build(texts)
    assert not plain.score("activating a card").any() and stemmed.score("activating a card").argmax() == 0
    without = get("bm25:stop_words").build(texts)
    assert plain.score("what is the time").any() and not without.score("what is the time").any()
    assert not without.score("Don't").any() and get("bm25:stop_words").build(["don't", "the"]).vocabulary == {}
    assert BM25.build(texts).vocabulary == plain.vocabulary  # configured ones leave the class as it is


@pytest.mark.parametrize(
    ("analyzer", "found"),
    [
        (Analyzer(), ["what", "s", "the", "status", "of", "my", "transfers", "i", "can", "t", "see", "them"]),
        (Analyzer(stem=True), ["what", "s", "the", "status", "of", "my", "transfer", "i", "can", "t", "see", "them"]),
        (Analyzer(stop_words=True), ["status", "transfers", "see"]),
        (Analyzer(stem=True, stop_words=True), ["status", "transfer", "see"]),
    ],
)
def test_analyzers(analyzer: Analyzer, found: list[str]) -> None:
    text = "What's the status of my transfers? I can't see them!"
    assert analyzer(text) == found
    assert Analyzer()(text) == terms(text)


def test_analyses_in_any_order() -> None:
    assert Analyzer.parse("stop_words+stem") == Analyzer.parse("stem+stop_words") == Analyzer(True, True)
    assert Analyzer.parse("stem") == Analyzer(stem=True) and Analyzer.parse("stop_words") == Analyzer(stop_words=True)


def test_stems() -> None:
    assert {word: stem(word) for word in STEMS} == STEMS
    assert stem("東") == "東" and stem("") == "" and stem("3") == "3"


def test_a_client_cannot_fill_the_memory_with_long_words() -> None:
    before = english._stem.cache_info()
    assert stem("cats" * LONGEST) == "cats" * LONGEST
    assert english._stem.cache_info() == before and before.maxsize == 65536


def test_threads_may_stem_at_the_same_time() -> None:
    words = [f"{word}{suffix}" for word in STEMS for suffix in ("s", "ing", "ed", "ly", "ness", "ment")] * 20
    alone = [english._new_stemmer().stemWord(word) for word in words]
    english._stem.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(stem, words)) == alone


def test_stop_words_are_words_in_lower_case() -> None:
    assert len(STOP_WORDS) == 174 and {"i", "the", "what", "can't", "yourselves"} <= STOP_WORDS
    assert all(word == word.casefold().strip() for word in STOP_WORDS)


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "snowballstemmer", None)
    english._stem.cache_clear()
    retriever = get("bm25:stem")  # as with other retrievers, nothing is loaded before there are texts
    with pytest.raises(ValueError, match=r"needs snowballstemmer .*pip install sglang_ext\[stem\]"):
        retriever.build(["red card"])
    assert get("bm25:stop_words").build(["red card", "the tea", "cake"]).score("a red one").argmax() == 0
