"""Dense retrieval with injected encoders, and with a real SentenceTransformer where that is installed."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.retrievers.base import Retriever
from sglang_ext.retrievers.dense import MODEL_VARIABLE, Dense, _load
from sglang_ext.retrievers.passages import passages
from sglang_ext.retrievers.registry import get


class LetterEncoder:
    """Counts letters a to z, not normalised."""

    def encode(self, sentences: list[str], *, show_progress_bar: bool) -> np.ndarray:
        assert not show_progress_bar
        return np.array([[s.count(chr(97 + i)) for i in range(26)] for s in sentences], dtype=np.float32)


class ShortEncoder(LetterEncoder):
    """Reads four words and, like sentence-transformers, ignores what follows."""

    max_seq_length = 4

    def tokenizer(self, text: str, **_: Any) -> dict[str, list[str]]:
        return {"input_ids": text.split()}

    def encode(self, sentences: list[str], *, show_progress_bar: bool) -> np.ndarray:
        cut = [" ".join(s.split()[: self.max_seq_length]) for s in sentences]
        return super().encode(cut, show_progress_bar=show_progress_bar)


@pytest.fixture(autouse=True)
def no_loaded_models(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv(MODEL_VARIABLE, raising=False)
    _load.cache_clear()
    yield
    _load.cache_clear()


def test_scores_are_cosines() -> None:
    texts = ["aab", "abc", "zzz", "a", "!"]
    retriever = Dense.build(texts, encoder=LetterEncoder())
    assert isinstance(retriever, Retriever)
    assert retriever.num_texts == 5
    scores = retriever.score("a" * 9)
    assert scores.dtype == np.float64
    np.testing.assert_allclose(scores, [2 / 5**0.5, 1 / 3**0.5, 0, 1, 0], atol=1e-12)
    np.testing.assert_array_equal(retriever.score("!"), np.zeros(5))  # an all-zero embedding, not NaN
    np.testing.assert_array_equal(scores, Dense.build(texts, encoder=LetterEncoder()).score("a" * 9))


def test_the_end_of_a_long_text_counts() -> None:
    texts = ["b b b b b b b q", "b b", "b b b b\n\nq q q q\nb"]
    scores = Dense.build(texts, encoder=ShortEncoder()).score("q")
    np.testing.assert_allclose(scores, [1 / 10**0.5, 0, 1], atol=1e-12)  # passages: bbbb bbbq; bb; bbbb qqqq b
    # A query that is too long is cut as well.
    np.testing.assert_allclose(Dense.build(["q"], encoder=ShortEncoder()).score("b b b b q q q q"), [1])


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
def test_passages_fit_and_lose_nothing(limit: int) -> None:
    text = "\n\n".join(" ".join(f"l{i}w{j}" for j in range(i % 9)) + "\nLabel: x" for i in range(23))
    parts = passages(text, words, limit)
    assert all(1 <= words(part) <= limit for part in parts)
    assert " ".join(parts).split() == text.split()
    # No two neighbours would have fitted into one.
    assert all(words(a) + words(b.splitlines()[0]) > limit for a, b in pairwise(parts))


def test_passages_prefer_line_ends() -> None:
    assert passages("a b c\nd e\nf g h", words, 5) == ["a b c\nd e", "f g h"]
    assert passages("short", words, 5) == ["short"]
    assert passages("", words, 5) == [""]


def test_passages_halve_long_words() -> None:
    parts = passages("x" * 10 + " yy", len, 3)
    assert "".join(parts).replace(" ", "") == "x" * 10 + "yy"
    assert all(len(part) <= 3 for part in parts)


def test_passages_refuse_what_cannot_fit() -> None:
    with pytest.raises(ValueError, match="limit is 0"):
        passages("a b", words, 0)
    with pytest.raises(ValueError, match="alone is 3 tokens, more than the limit of 2"):
        passages("ab", lambda text: len(text) + 2, 2)


def test_no_model_named() -> None:
    with pytest.raises(ValueError, match=rf"dense:MODEL.*{MODEL_VARIABLE}"):
        get("dense").build(["a"])


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ValueError, match=r"pip install sglang_ext\[dense\]"):
        get("dense:some/model").build(["a"])


class FakeModule:
    """Stands for the package; records which models were loaded."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def SentenceTransformer(self, model: str) -> LetterEncoder:
        if model == "missing":
            raise OSError("no such model")
        self.loaded.append(model)
        return LetterEncoder()


def test_where_the_model_name_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    package = FakeModule()
    monkeypatch.setitem(sys.modules, "sentence_transformers", package)
    monkeypatch.setenv(MODEL_VARIABLE, "from-environment")
    get("dense").build(["a"])
    get("dense:from/name:v2").build(["a"])
    Dense.build(["a"], model="from-argument")
    get("dense:from/name:v2").build(["b"])  # loaded once a process
    assert package.loaded == ["from-environment", "from/name:v2", "from-argument"]
    assert Dense.default_model is None


def test_a_model_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", FakeModule())
    with pytest.raises(ValueError, match=r"cannot load.*'missing'.*no such model"):
        get("dense:missing").build(["a"])


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (np.zeros(4), r"shape \(4,\) for 2 passages"),
        (np.zeros((3, 4)), r"shape \(3, 4\)"),
        (np.full((2, 4), np.nan), "NaN"),
    ],
)
def test_an_encoder_that_misbehaves(output: np.ndarray, message: str) -> None:
    class Broken:
        def encode(self, sentences: list[str], *, show_progress_bar: bool) -> np.ndarray:
            return output

    with pytest.raises(ValueError, match=message):
        Dense.build(["a", "b"], encoder=Broken())


@pytest.mark.parametrize("texts", [[], "abc", ["a", 1]])
def test_bad_texts(texts: list[str]) -> None:
    with pytest.raises(ValueError, match="texts"):
        Dense.build(texts, encoder=LetterEncoder())


def tiny_sentence_transformer(folder: Path) -> str:
    """A random BERT of 16 positions with mean pooling, saved where SentenceTransformer can load it."""
    import torch
    from sentence_transformers import SentenceTransformer
    from transformers import BertConfig, BertModel, BertTokenizerFast

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "blue", "green", "card", "tea", "time", "lost"]
    vocabulary += [chr(c) for c in range(97, 123)] + [f"##{chr(c)}" for c in range(97, 123)]
    (folder / "bert").mkdir()
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=16).save_pretrained(folder / "bert")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    BertModel(config).save_pretrained(folder / "bert")
    SentenceTransformer(str(folder / "bert"), device="cpu").save(str(folder / "model"))
    return str(folder / "model")


def test_real_sentence_transformer(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    model = tiny_sentence_transformer(tmp_path)
    encoder = _load(model)
    texts = ["red card lost", "green tea time", "\n\n".join(["blue card"] * 30 + ["green tea time"])]
    retriever = get(f"dense:{model}").build(texts)
    scores = retriever.score("green tea time")
    raw = np.asarray(encoder.encode([*texts[:2], "green tea time"], show_progress_bar=False), dtype=np.float64)
    raw /= np.linalg.norm(raw, axis=1, keepdims=True)
    np.testing.assert_allclose(scores[:2], raw[:2] @ raw[2], atol=1e-5)
    assert scores[1] == pytest.approx(1, abs=1e-5)
    # The long text is cut, and its last passage is read: without that it scores as thirty times "blue card".
    truncated = np.asarray(encoder.encode(texts[2:], show_progress_bar=False), dtype=np.float64)[0]
    assert scores[2] > truncated @ raw[2] / np.linalg.norm(truncated) + 1e-3
    assert len(retriever._embeddings) > 4  # type: ignore[attr-defined]


def test_one_thread_at_a_time_has_a_model_encode() -> None:
    """The tokenizer of a model serves one thread: a pool that is indexed and a question that is asked take turns."""
    inside, most = [0], [0]

    class Counted(LetterEncoder):
        def encode(self, sentences: list[str], *, show_progress_bar: bool) -> Any:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.002)
            found = super().encode(sentences, show_progress_bar=show_progress_bar)
            inside[0] -= 1
            return found

    retriever = Dense.build(["a", "b"], encoder=Counted())
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(retriever.score, "a") for _ in range(8)]
        made = [threads.submit(Dense.build, ["a", "b"], None, Counted()) for _ in range(8)]
        assert all(len(each.result()) == 2 for each in asked) and all(each.result().num_texts == 2 for each in made)
    assert most == [1]
