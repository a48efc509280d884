"""BM25 against rank_bm25 itself, and its latency."""

from __future__ import annotations

import random
import statistics
import time

import numpy as np
import pytest
from rank_bm25 import BM25Okapi

from sglang_ext.retrievers.bm25 import BM25
from sglang_ext.retrievers.terms import terms


def zipf_texts(n: int, words: int, seed: int, vocabulary: int = 3000) -> list[str]:
    """Texts whose word frequencies fall off as in natural language, lengths from 1 to twice `words`."""
    rng = random.Random(seed)
    population = [f"w{i}" for i in range(vocabulary)]
    weights = [1 / (i + 1) for i in range(vocabulary)]
    return [" ".join(rng.choices(population, weights, k=rng.randint(1, 2 * words))) for _ in range(n)]


def expected(texts: list[str], query: str) -> np.ndarray:
    return BM25Okapi([terms(text) for text in texts]).get_scores(terms(query))


@pytest.mark.parametrize("n", [1, 2, 3, 7, 60, 61, 503])
@pytest.mark.parametrize("words", [1, 13, 200])
def test_scores_equal_rank_bm25(n: int, words: int) -> None:
    texts = zipf_texts(n, words, seed=n)
    retriever = BM25.build(texts)
    assert retriever.num_texts == n
    for query in [*zipf_texts(5, 9, seed=n + 1), texts[-1], "w0 w0 w0 w1", "unknown", "w2 unknown w2", "", "?!"]:
        scores = retriever.score(query)
        assert scores.shape == (n,)
        assert scores.dtype == np.float64
        np.testing.assert_allclose(scores, expected(texts, query), rtol=0, atol=1e-9)


@pytest.mark.parametrize("parts", [[1, 1], [5, 60], [30, 1, 4], [0, 3], [4, 0, 2]], ids=str)
def test_an_extended_index_equals_one_built_at_once(parts: list[int]) -> None:
    """Bit for bit, as a pool's answers must not depend on how it grew; a part of 0 is a text without a word."""
    found = [zipf_texts(n, 20, seed=n, vocabulary=200) if n else ["?!"] for n in parts]
    retriever = BM25.build(found[0])
    for texts in found[1:]:
        before = retriever.score("w0 w3 w7")
        retriever, smaller = retriever.extended(texts), retriever
        np.testing.assert_array_equal(smaller.score("w0 w3 w7"), before)
    texts = [text for part in found for text in part]
    whole = BM25.build(texts)
    assert retriever.num_texts == len(texts) and retriever.vocabulary == whole.vocabulary
    for query in ["w0 w1 w2 w9", "w0", *texts[:3], "unknown w4"]:
        np.testing.assert_array_equal(retriever.score(query), whole.score(query))
    with pytest.raises(ValueError, match="texts is empty"):
        retriever.extended([])


def test_repeated_query_terms_count_each_time() -> None:
    texts = ["red card", "blue card", "green tea", "tea time"]
    retriever = BM25.build(texts)
    once, thrice = retriever.score("red"), retriever.score("red red red")
    assert once[0] > 0
    np.testing.assert_allclose(thrice, 3 * once, rtol=1e-12)
    np.testing.assert_allclose(thrice, expected(texts, "red red red"), rtol=0, atol=1e-9)


def test_unknown_terms_add_nothing() -> None:
    retriever = BM25.build(["red card", "blue card", "green tea"])
    np.testing.assert_array_equal(retriever.score("red zebra"), retriever.score("red"))
    np.testing.assert_array_equal(retriever.score("zebra"), np.zeros(3))


def test_frequent_terms_get_the_epsilon_floor() -> None:
    texts = ["the red card", "the blue card", "the green tea", "the tea time", "the end"]
    retriever = BM25.build(texts)
    okapi = BM25Okapi([terms(text) for text in texts])
    plain_idf = np.log(5 - 5 + 0.5) - np.log(5 + 0.5)
    assert plain_idf < 0 < okapi.idf["the"]  # the case really occurs
    assert (retriever.score("the") > 0).all()
    np.testing.assert_allclose(retriever.score("the"), expected(texts, "the"), rtol=0, atol=1e-9)


def test_texts_without_words_score_zero() -> None:
    np.testing.assert_array_equal(BM25.build(["", "!?", "  "]).score("card"), np.zeros(3))
    mixed = ["", "red card", "...", "blue", "green"]
    np.testing.assert_allclose(BM25.build(mixed).score("card"), expected(mixed, "card"), rtol=0, atol=1e-9)


def test_equal_texts_tie_exactly() -> None:
    texts = zipf_texts(40, 20, seed=5)
    scores = BM25.build(texts + texts).score(" ".join(texts[3:6]))
    np.testing.assert_array_equal(scores[:40], scores[40:])


def test_finds_the_block_that_holds_the_query() -> None:
    texts = zipf_texts(60, 400, seed=9)
    texts[37] += " my contactless payment was declined"
    assert BM25.build(texts).score("Contactless payment DECLINED!").argmax() == 37


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("How do I activate my card?", ["how", "do", "i", "activate", "my", "card"]),
        ("card_arrival, e-mail; 3.5%", ["card_arrival", "e", "mail", "3", "5"]),
        ("Straße ÉCOLE", ["strasse", "école"]),
        ("東京タワーで2 days", ["東", "京", "タ", "ワ", "ー", "で", "2", "days"]),
        ("?!", []),
    ],
)
def test_terms(text: str, found: list[str]) -> None:
    assert terms(text) == found


@pytest.mark.parametrize("granularity", ["block", "example"])
def test_latency_of_a_3000_demonstration_pool(granularity: str) -> None:
    """At most 1 ms median a query; about 0.03 ms (blocks) and 0.05 ms (examples) on one core.

    No margin for noise is added: the limit is 20 times what it takes.
    """
    demonstrations = zipf_texts(3000, 15, seed=1)
    texts = demonstrations
    if granularity == "block":
        texts = ["\n\n".join(demonstrations[i : i + 50]) for i in range(0, 3000, 50)]
        assert len(texts) == 60
    retriever = BM25.build(texts)
    seconds = []
    for query in zipf_texts(200, 15, seed=2):
        start = time.thread_time()
        retriever.score(query)
        seconds.append(time.thread_time() - start)
    assert statistics.median(seconds) <= 1e-3


def test_building_a_3000_demonstration_pool_is_quick() -> None:
    """Appending rebuilds the index: about 0.03 s for 3,000 examples; 1 s here is for loaded machines."""
    demonstrations = zipf_texts(3000, 15, seed=1)
    start = time.thread_time()
    BM25.build(demonstrations)
    assert time.thread_time() - start < 1
