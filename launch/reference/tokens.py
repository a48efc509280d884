"""This module holds the texts and words that episodes are made of, turned into tokens once: `Ragged` is token sequences
of different lengths in flat arrays, with functions that copy, join and split them, and the `Corpus` has the texts of
all classes in three spellings, words for labels and for synthetic classes, and the tables by which classes are chosen
and content words are permuted.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer

from sglang_ext.launch.reference.corpus import clean
from sglang_ext.launch.reference.tokenizer import ASSISTANT, BOS, END, PAD, USER, cased

FUNCTION_TOKENS = 80  # this many most frequent tokens of the texts count as function words: never permuted


@dataclass
class Ragged:
    """Token sequences of different lengths, end to end in ``flat``."""

    flat: np.ndarray  # int32 (total tokens,)
    start: np.ndarray  # int64 (items,)
    size: np.ndarray  # int64 (items,), tokens

    @classmethod
    def of(cls, lists: list[list[int]]) -> Ragged:
        size = np.array([len(x) for x in lists], np.int64)
        flat = np.array([t for x in lists for t in x], np.int32)
        return cls(flat, np.cumsum(size) - size, size)

    def take(self, index: np.ndarray) -> Ragged:
        """The sequences at ``index``, compacted."""
        return compact(self.flat, self.start[index], self.size[index])


def compact(flat: np.ndarray, start: np.ndarray, size: np.ndarray) -> Ragged:
    """Copy the runs ``flat[start[i] : start[i] + size[i]]`` end to end."""
    begin = np.cumsum(size) - size
    index = np.repeat(start - begin, size) + np.arange(int(size.sum()))
    return Ragged(flat[index], begin, size)


def join(a: Ragged, b: Ragged) -> Ragged:
    """``a``'s sequences, then ``b``'s."""
    return Ragged(
        np.concatenate([a.flat, b.flat]),
        np.concatenate([a.start, b.start + len(a.flat)]),
        np.concatenate([a.size, b.size]),
    )


def runs(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Split ``values`` by the sorted ``keys``: the distinct keys, and for each its values."""
    distinct, first = np.unique(keys, return_index=True)
    return distinct, np.split(values, first[1:])


@dataclass
class Corpus:
    """Pre-tokenised texts and words. ``classes[k]`` indexes a class's texts; each has three spellings."""

    tokenizer: Tokenizer
    texts: dict[str, dict[str, list[str]]]  # set -> class -> texts
    seed: int = 0
    names: list[str] = field(default_factory=list)  # class -> its own name
    sets: list[str] = field(default_factory=list)  # class -> its set
    classes: list[np.ndarray] = field(default_factory=list)  # class -> indices of its texts

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        index: dict[str, int] = {}
        for name, classes in self.texts.items():
            for label, texts in classes.items():
                ids = [index.setdefault(text, len(index)) for text in texts]
                self.names.append(label)
                self.sets.append(name)
                self.classes.append(np.array(ids))
        unique = list(index)
        plain = [clean(text) for text in unique]
        self.plain = self._encode(plain)
        self.cased = self._encode([cased(text, rng) for text in unique])
        self.wild = self._encode([_wild(text, rng) for text in unique])
        vocab = self.tokenizer.get_vocab()
        self.vocab_size = len(vocab)
        self.special = {name: vocab[name] for name in (BOS, PAD, USER, ASSISTANT, END)}
        counts = np.bincount(self.plain.flat, minlength=self.vocab_size)
        self.function = np.argsort(-counts, kind="stable")[:FUNCTION_TOKENS]
        self._word_tables(plain, rng)
        self._postings(counts)
        self._permutation_groups(vocab)
        self._centroids()

    def _encode(self, texts: list[str]) -> Ragged:
        return Ragged.of([e.ids for e in self.tokenizer.encode_batch(texts, add_special_tokens=False)])

    def _word_tables(self, texts: list[str], rng: random.Random) -> None:
        """Real words of the texts plus made-up ones (halves of two words), with and without a leading space."""
        words = sorted({w for text in texts for w in text.split() if w.isalpha() and len(w) > 2})
        made = {
            a[: rng.randint(2, 4)] + b[-rng.randint(2, 4) :]
            for a, b in zip(rng.choices(words, k=12000), rng.choices(words, k=12000), strict=True)
        }
        words += sorted(made - set(words))
        self.words = words
        self.spaced = self._encode([" " + w for w in words])
        self.bare = self._encode(words)

    def _postings(self, counts: np.ndarray) -> None:
        """For each content token that occurs in 6 to 400 texts: those texts."""
        owner = np.repeat(np.arange(len(self.plain.size)), self.plain.size)
        pairs = np.unique(np.stack([self.plain.flat.astype(np.int64), owner]), axis=1)
        token, first = np.unique(pairs[0], return_index=True)
        parts = np.split(pairs[1], first[1:])
        common = set(self.function.tolist())
        self.topics = [(int(t), p) for t, p in zip(token, parts, strict=True) if 6 <= len(p) <= 400 and t not in common]

    def _permutation_groups(self, vocab: dict[str, int]) -> None:
        """Tokens that may stand in for each other: words with both spellings (kept paired), spaced, inner pieces."""
        fixed = set(self.function.tolist())
        letters = {t: i for t, i in vocab.items() if t.removeprefix("Ġ").isalpha() and t.removeprefix("Ġ").isascii()}
        spaced = {t[1:]: i for t, i in letters.items() if t[0] == "Ġ" and len(t) > 2 and i not in fixed}
        bare = {t: i for t, i in letters.items() if t[0] != "Ġ" and len(t) > 1 and i not in fixed}
        both = sorted(set(spaced) & set(bare))
        self.pairs = np.array([[spaced[w], bare[w]] for w in both])
        self.groups = [
            np.array(sorted(i for w, i in spaced.items() if w not in bare)),
            np.array(sorted(i for w, i in bare.items() if w not in spaced)),
        ]

    def _centroids(self) -> None:
        """Unit tf-idf centroids of the classes (classes, vocabulary), to pick classes of one narrow domain."""
        counts = np.stack(
            [np.bincount(self.plain.take(c).flat, minlength=self.vocab_size).astype(np.float32) for c in self.classes]
        )
        weight = np.log1p(len(counts) / (1 + (counts > 0).sum(0)))
        vectors = np.log1p(counts) * weight
        self.centroids = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def _wild(text: str, rng: random.Random) -> str:
    """The same text with some words capitalised (names, titles), rarely all of it in capitals."""
    if rng.random() < 0.05:
        return clean(text).upper()
    share = rng.choice([0.1, 0.3])
    words = [w.capitalize() if rng.random() < share else w for w in cased(text, rng).split(" ")]
    return " ".join(words)
