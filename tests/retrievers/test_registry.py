"""The registry and what all retrievers have in common."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from sglang_ext.retrievers.base import Retriever
from sglang_ext.retrievers.registry import RETRIEVERS, get

TEXTS = ["red card", "blue card", "green tea", "", "tea time with cake"]
LIGHT = ["bm25", "bm25:stem", "bm25:stop_words", "random", "random:7", "all"]


def test_names() -> None:
    assert set(RETRIEVERS) == {"bm25", "dense", "random", "all"}
    for name in RETRIEVERS:
        assert callable(get(name).build)


@pytest.mark.parametrize("name", LIGHT)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_protocol(name: str, n: int) -> None:
    retriever = get(name).build(TEXTS[:n])
    assert isinstance(retriever, Retriever)
    assert retriever.num_texts == n
    for query in ["card", "", "\ud800 lone surrogate", "card " * 1000]:
        scores = retriever.score(query)
        assert scores.shape == (n,)
        assert scores.dtype == np.float64
        assert np.isfinite(scores).all()
        np.testing.assert_array_equal(scores, get(name).build(tuple(TEXTS[:n])).score(query))


@pytest.mark.parametrize("name", LIGHT)
def test_scores_belong_to_the_caller(name: str) -> None:
    retriever = get(name).build(TEXTS)
    before = retriever.score("card").copy()
    retriever.score("card")[:] = 99
    np.testing.assert_array_equal(retriever.score("card"), before)


@pytest.mark.parametrize("name", ["bm52", "", "BM25", "dense2:x", ":x"])
def test_unknown_name_lists_the_names(name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown retriever.*bm25, dense, random, all"):
        get(name)


def test_a_name_that_is_no_string() -> None:
    with pytest.raises(ValueError, match=r"type int.*bm25, dense, random, all"):
        get(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bm25:x", "unknown analysis 'x'; expected one or more of stem, stop_words, such as bm25:stem"),
        ("bm25:", "unknown analysis ''"),
        ("bm25:stem+", "unknown analysis ''"),
        ("bm25:stem+x", "retriever bm25:stem.x: unknown analysis 'x'"),
        ("bm25:Stem", "unknown analysis 'Stem'"),
        ("bm25:stem+stop_words+stem", "names an analysis twice"),
        ("all:", "takes no argument"),
        ("random:x", "integer seed"),
        ("random:", "integer seed"),
        ("dense:", "names no model"),
    ],
)
def test_bad_argument(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get(name)


@pytest.mark.parametrize("name", LIGHT)
@pytest.mark.parametrize(
    ("texts", "message"), [([], "empty"), ("one string", r"pass \[text\]"), (["a", 3], r"texts\[1\].*int")]
)
def test_bad_texts(name: str, texts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get(name).build(texts)


@pytest.mark.parametrize("name", LIGHT)
def test_bad_query(name: str) -> None:
    with pytest.raises(ValueError, match="query is of type list"):
        get(name).build(TEXTS).score([1, 2])  # type: ignore[arg-type]


def test_the_registry_loads_nothing_before_it_is_asked() -> None:
    code = (
        "import sys; import sglang_ext.retrievers.registry as r; "
        "heavy = {'torch', 'sentence_transformers', 'sklearn', 'scipy', 'rank_bm25', 'snowballstemmer'}; "
        "assert not heavy & set(sys.modules), heavy & set(sys.modules); "
        "r.get('dense:some/model'); assert 'sentence_transformers' not in sys.modules; "
        "r.get('bm25:stem'); assert 'snowballstemmer' not in sys.modules; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_adding_a_retriever_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RETRIEVERS, "mine", "sglang_ext.retrievers.all_blocks:AllBlocks")
    np.testing.assert_array_equal(get("mine").build(["a", "b"]).score("q"), np.zeros(2))
