"""Episodes that can only be solved by reading the context: seeded, in numpy, fast enough to feed one GPU.

An episode is one row of tokens: BOS, then *items*, each ``utterance + prefix + label + separator``. By default an
item is a demonstration in the project's template, ``"{input}\\nLabel: {output}\\n\\n"``, and every label whose class
has occurred before in the row is a training target: a row of N demonstrations teaches N queries, from one shot to
hundreds. Kinds of episode:

- ``real``: seen classes of the sets, renamed at random; often with the content words of the vocabulary permuted
  (function words stay), so that word knowledge does not help and only matching does;
- ``topic``: real utterances, classes defined on the fly by a few content words: unlimited classes over natural text;
- ``exemplar``: a class is a few unrelated real utterances, its demonstrations noisy copies of them: what counts is
  which demonstration is nearest;
- ``synthetic``: each class a few random words, each utterance some of them among noise words;
- ``passkey``: numbers to be found again anywhere in the context, among filler or demonstrations.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer

from sglang_ext.launch.reference.corpus import clean
from sglang_ext.launch.reference.tokenizer import ASSISTANT, BOS, END, PAD, USER, cased

FUNCTION_TOKENS = 80  # this many most frequent tokens of the texts count as function words: never permuted
PREFIXES = ("\nLabel:", "\nIntent:", "\nCategory:", "\nAnswer:", "\nType:", "\nTopic:", " =>", "\nOutput:")
FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
    " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
)
PASSKEY_WEIGHT = 3.0  # a row of 16K tokens has few digits to learn from
LATER_WEIGHT = 0.7
MIX = {"real": 0.34, "topic": 0.14, "exemplar": 0.28, "synthetic": 0.14, "passkey": 0.10}


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


@dataclass
class Row:
    """One episode of ``T + 1`` tokens and what of it is a target.

    ``weight[p]`` is the loss weight of predicting ``tokens[p + 1]`` from position ``p``. ``label_at``, ``label_size``
    and ``shots`` describe the scored items: first label position, label tokens, earlier items of the same class.
    """

    tokens: np.ndarray  # int32 (T + 1,)
    weight: np.ndarray  # float32 (T,)
    label_at: np.ndarray  # int64 (items,)
    label_size: np.ndarray  # int64 (items,)
    shots: np.ndarray  # int64 (items,)


class EpisodeSampler:
    """Draws episodes; everything follows from ``(seed, stream)``."""

    def __init__(
        self,
        corpus: Corpus,
        seed: int,
        stream: int = 0,
        mix: dict[str, float] | None = None,
        lm_weight: float = 0.05,
    ) -> None:
        self.corpus = corpus
        self.rng = np.random.default_rng((seed, stream))
        self.mix = dict(mix or MIX)
        self.lm_weight = lm_weight
        unknown = set(self.mix) - set(MIX)
        if unknown or not self.mix:
            raise ValueError(f"mix has kinds {sorted(self.mix)}; expected some of {sorted(MIX)}")
        self.prefixes = [corpus.encode(p) for p in PREFIXES]
        self.blank, self.line = corpus.encode("x\n\nx")[1], corpus.encode("x\nx")[1]
        self.joiners = [[], corpus.encode("_"), corpus.encode("-"), corpus.encode("/")]
        self.filler = [corpus.encode(text) for text in FILLER]

    # -- choices ------------------------------------------------------------------------------------------------

    def sample(self, length: int) -> Row:
        """One episode of ``length + 1`` tokens, of a kind drawn from the mix."""
        kinds = list(self.mix)
        share = np.array([self.mix[k] for k in kinds])
        kind = kinds[self.rng.choice(len(kinds), p=share / share.sum())]
        return self.passkey(length) if kind == "passkey" else self.classification(length, kind)

    def _class_count(self, length: int) -> int:
        """Classes of an episode: log-uniform between 2 and about a third of its demonstrations, at most 150."""
        most = min(150.0, length / 50)
        least = min(max(2.0, length / 1600), most)
        return int(np.exp(self.rng.uniform(np.log(least), np.log(most + 0.99))))

    def _permutation(self) -> np.ndarray | None:
        """A token map (V,) that permutes content words among their like, or None."""
        share = self.rng.choice([0.0, 0.5, 1.0], p=[0.5, 0.2, 0.3])
        if share == 0.0:
            return None
        table = np.arange(self.corpus.vocab_size, dtype=np.int32)
        for group in self.corpus.groups:
            chosen = group[self.rng.random(len(group)) < share]
            table[chosen] = self.rng.permutation(chosen)
        pairs = self.corpus.pairs[self.rng.random(len(self.corpus.pairs)) < share]
        table[pairs] = self.rng.permutation(pairs)
        return table

    def _labels(self, count: int, own: list[str] | None) -> list[list[int]]:
        """``count`` different label names as tokens: random words (1 to 4, sometimes sharing words), or ``own``."""
        corpus, rng = self.corpus, self.rng
        if own is not None:
            return [corpus.encode(" " + name) for name in own]
        style = rng.choice(["word", "words", "shared", "symbol"], p=[0.45, 0.27, 0.25, 0.03])
        if style == "symbol" and count <= 26:
            return [corpus.encode(f" {s}") for s in rng.permutation(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))[:count]]
        pool = rng.permutation(len(corpus.words))
        most = 1
        if style == "words":
            most = 3
        elif style == "shared":
            pool, most = pool[: max(4, int(count**0.5 * rng.uniform(1.2, 4)))], 4
        joiner = self.joiners[rng.choice(4, p=[0.4, 0.5, 0.05, 0.05])]
        rest = corpus.bare if joiner else corpus.spaced
        out: dict[tuple[int, ...], None] = {}
        while len(out) < count:
            words = rng.choice(pool, size=int(rng.integers(1 if style != "shared" else 2, most + 1)))
            tokens = self._item(corpus.spaced, words[0])
            for word in words[1:]:
                tokens = tokens + joiner + self._item(rest, word)
            out[tuple(tokens)] = None
        return [list(t) for t in out]

    @staticmethod
    def _item(table: Ragged, i: int) -> list[int]:
        return table.flat[table.start[i] : table.start[i] + table.size[i]].tolist()

    # -- utterances ---------------------------------------------------------------------------------------------

    def _draw(self, members: list[np.ndarray], count: int) -> tuple[np.ndarray, np.ndarray]:
        """``count`` (class, text) pairs; a class repeats a text only after all of its texts have been used."""
        rng, k = self.rng, len(members)
        if rng.random() < 0.3:
            share = rng.dirichlet(np.full(k, 2.0))
            y = rng.choice(k, size=count, p=share)
        else:
            y = rng.permutation(np.arange(count) % k)
        text = np.empty(count, np.int64)
        order = np.argsort(y, kind="stable")
        for c, at in zip(*_runs(y[order], order), strict=True):
            texts = rng.permutation(members[c])
            text[at] = np.resize(texts, len(at))
        return y, text

    def _real(self, k: int, count: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Seen classes: of one set or of all, a narrow domain or any."""
        corpus, rng = self.corpus, self.rng
        names = np.array(corpus.sets)
        sizes = np.array([len(c) for c in corpus.classes])
        which = rng.choice(["clinc150", "nlu", "trec_fine", "all"], p=[0.35, 0.22, 0.05, 0.38])
        pool = np.flatnonzero((sizes >= 8) & ((names != "trec") if which == "all" else (names == which)))
        if len(pool) < 2:
            pool = np.flatnonzero(sizes >= 1)
        k = min(k, len(pool))
        if rng.random() < 0.35:
            near = corpus.centroids[pool] @ corpus.centroids[rng.choice(pool)] + rng.gumbel(size=len(pool)) * 0.03
            chosen = pool[np.argsort(-near)[:k]]
        else:
            chosen = rng.choice(pool, size=k, replace=False)
        y, text = self._draw([corpus.classes[c] for c in chosen], count)
        return y, text, [corpus.names[c] for c in chosen]

    def _topic(self, k: int, count: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Classes that a few content words define over all texts; a text of two classes belongs to neither."""
        corpus, rng = self.corpus, self.rng
        owner = np.full(len(corpus.plain.size), -1)
        picks = rng.permutation(len(corpus.topics))
        at = 0
        words: list[list[int]] = []
        for c in range(k):
            take = int(rng.choice([1, 2, 3], p=[0.5, 0.3, 0.2]))
            chosen = [corpus.topics[p] for p in picks[at : at + take]]
            at += take
            if not chosen:
                break
            for _, texts in chosen:
                owner[texts] = np.where((owner[texts] == -1) | (owner[texts] == c), c, -2)
            words.append([t for t, _ in chosen])
        order = np.argsort(owner, kind="stable")
        members = {int(c): m for c, m in zip(*_runs(owner[order], order), strict=True) if c >= 0 and len(m) >= 3}
        if len(members) < 2:
            return self._real(k, count)
        names = [self.corpus.tokenizer.decode(words[c]).strip().replace(" ", "_") for c in members]
        names = [f"{n}_{i}" if names.count(n) > 1 or not n else n for i, n in enumerate(names)]
        y, text = self._draw(list(members.values()), count)
        return y, text, names

    def _exemplar(self, k: int, count: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Classes of unrelated texts, each text several times; the caller makes the copies noisy."""
        rng, texts = self.rng, len(self.corpus.plain.size)
        each = int(np.exp(rng.uniform(0, np.log(max(1.0, min(count / 3, texts - 1) / k))))) if k else 1
        chosen = rng.choice(texts, size=k * max(1, each), replace=k * each > texts)
        pick = (
            rng.permutation(np.arange(count) % len(chosen))
            if rng.random() < 0.5
            else rng.integers(0, len(chosen), size=count)
        )
        return pick % k, chosen[pick], [f"{i}" for i in range(k)]

    def _spelled(self, text: np.ndarray, mixed: bool) -> Ragged:
        """The texts in one spelling or, if ``mixed``, each in its own."""
        corpus, rng = self.corpus, self.rng
        tables = _join(_join(corpus.plain, corpus.cased), corpus.wild)
        share = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.7, 0.3), (0.5, 0.3, 0.2), (0.75, 0.2, 0.05)]
        which = rng.choice(5, p=[0.4, 0.08, 0.07, 0.25, 0.2] if mixed else [0.75, 0.25, 0.0, 0.0, 0.0])
        return tables.take(text + rng.choice(3, size=len(text), p=share[which]) * len(corpus.plain.size))

    def _synthetic(self, k: int, count: int) -> tuple[np.ndarray, Ragged, list[str]]:
        """Random-word classes. Utterance: ``on`` of the class's words and ``off`` noise words, shuffled."""
        corpus, rng = self.corpus, self.rng
        own = int(rng.integers(1, 9))  # words a class has
        noise = rng.permutation(len(corpus.words))[: int(np.exp(rng.uniform(np.log(30), np.log(3000))))]
        if rng.random() < 0.4:  # classes share words: no single word decides
            pool = rng.permutation(len(corpus.words))[: max(2 * own, int(k * own * rng.uniform(0.3, 0.9)))]
        else:
            pool = rng.permutation(len(corpus.words))[: k * own + 2]
        table = np.stack([rng.choice(pool, size=own, replace=len(pool) < own) for _ in range(k)])
        if len(pool) >= k * own:
            table = pool[: k * own].reshape(k, own)
        on = int(rng.integers(1, min(own, 5) + 1))
        off = int(rng.integers(0, 13 - on))
        y = rng.integers(0, k, size=count) if rng.random() < 0.5 else rng.permutation(np.arange(count) % k)
        rank = rng.random((count, own)).argsort(1)[:, :on]
        zipf = 1.0 / (np.arange(len(noise)) + rng.choice([3.0, 30.0]))
        other = rng.choice(noise, size=(count, off), p=zipf / zipf.sum())
        picks = np.concatenate([np.take_along_axis(table[y], rank, 1), other], axis=1)
        picks = np.take_along_axis(picks, rng.random(picks.shape).argsort(1), 1)
        keep = rng.random(picks.shape) > rng.choice([0.0, 0.15])  # lengths differ
        keep[:, 0] |= ~keep.any(1)
        # the first word of an utterance has no space before it
        first = np.zeros(picks.shape, bool)
        first[np.arange(count), keep.argmax(1)] = True
        index = picks + np.where(first, 0, len(corpus.words))
        both = _join(corpus.bare, corpus.spaced)
        size = np.where(keep, both.size[index], 0)
        flat = compact(both.flat, both.start[index].ravel(), size.ravel())
        total = size.sum(1)
        names = ["_".join(corpus.words[w] for w in rng.permutation(table[c])[: min(own, 3)]) for c in range(k)]
        names = [f"{n}_{corpus.words[i]}" if names.count(n) > 1 else n for i, n in enumerate(names)]
        return y, Ragged(flat.flat, np.cumsum(total) - total, total), names

    def _drop(self, utterances: Ragged, share: float) -> Ragged:
        """Leave out tokens at random, never all of an utterance."""
        keep = self.rng.random(len(utterances.flat)) >= share
        keep[utterances.start[utterances.size > 0]] = True
        owner = np.repeat(np.arange(len(utterances.size)), utterances.size)
        size = np.bincount(owner[keep], minlength=len(utterances.size))
        return Ragged(utterances.flat[keep], np.cumsum(size) - size, size)

    # -- whole episodes -----------------------------------------------------------------------------------------

    def classification(self, length: int, kind: str, classes: int | None = None, plain: bool = False) -> Row:
        """A row of demonstrations. ``plain``: no augmentation, random word names, default template (validation)."""
        corpus, rng = self.corpus, self.rng
        k = classes or self._class_count(length)
        count = length // 11 + 8  # more than fit; the row is cut at its length
        permutation, text = None, None
        if kind == "synthetic":
            y, utterances, names = self._synthetic(k, count)
        else:
            draw = {"real": self._real, "topic": self._topic, "exemplar": self._exemplar}[kind]
            y, text, names = draw(k, count)
            if not plain:
                permutation = self._permutation()
            # a permutation of tokens would part a word from its capitalised spelling
            table = corpus.plain if plain else self._spelled(text, permutation is None)
            utterances = table.take(text) if plain else table
            if not plain and rng.random() < 0.12:  # many an utterance has a second, unrelated part
                other = rng.integers(0, len(corpus.plain.size), count)
                second = corpus.plain.take(other)
                second.size[rng.random(count) < 0.5] = 0
                pair = np.stack([np.arange(count), np.arange(count) + count], 1)
                pair = np.take_along_axis(pair, rng.random((count, 2)).argsort(1), 1).ravel()
                joined = _join(utterances, second).take(pair)
                size = joined.size.reshape(count, 2).sum(1)
                utterances = Ragged(joined.flat, np.cumsum(size) - size, size)
        if kind == "exemplar":
            utterances = self._drop(utterances, float(rng.choice([0.1, 0.25, 0.4, 0.55])))
        elif not plain and kind != "synthetic" and rng.random() < 0.4:
            utterances = self._drop(utterances, float(rng.choice([0.08, 0.15, 0.3])))
        if permutation is not None:
            utterances = Ragged(permutation[utterances.flat], utterances.start, utterances.size)
        own = names if not plain and kind != "exemplar" and permutation is None and rng.random() < 0.3 else None
        labels = Ragged.of(self._labels(len(names), own))
        prefix = self.prefixes[0] if plain or rng.random() < 0.88 else self.prefixes[rng.integers(len(self.prefixes))]
        separator = [self.blank] if plain or rng.random() < 0.93 else [self.line]
        head = [corpus.special[BOS]]
        tail = count
        prefixes, separators = [prefix], [separator]
        if not plain and rng.random() < 0.06:  # a chat: demonstrations in the first user turn, then one query a turn
            head.append(corpus.special[USER])
            tail = int(rng.integers(0, max(1, length // 20)))
            prefixes.append([*prefix, corpus.special[END], corpus.special[ASSISTANT]])
            separators.append([corpus.special[END], corpus.special[USER]])
        turn = (np.arange(count) >= tail).astype(np.int64)
        lm = self.lm_weight if kind in ("real", "topic") and permutation is None else 0.0
        return _assemble(
            length,
            head,
            corpus.special[PAD],
            y,
            utterances,
            Ragged.of(prefixes).take(turn),
            labels.take(y),
            Ragged.of(separators).take(turn),
            np.ones(count, bool),
            lm,
        )

    def passkey(self, length: int, keys: int | None = None) -> Row:
        """Numbers stated anywhere and asked for later, among filler sentences, utterances or demonstrations."""
        corpus, rng = self.corpus, self.rng
        most = max(1.0, length / 150)
        keys = keys or (1 if rng.random() < 0.25 else int(np.exp(rng.uniform(0, np.log(most + 1)))) + 1)
        digits = int(rng.choice([4, 5, 6, 7], p=[0.15, 0.6, 0.15, 0.1]))
        named = keys > 1
        owners = rng.choice(len(corpus.words), size=keys, replace=False)
        items: list[tuple[float, int, list[int], list[int], list[int], list[int], bool]] = []
        for key in range(keys):
            code = "".join(str(d) for d in rng.integers(0, 10, size=digits))
            of = f" of {corpus.words[owners[key]]}" if named else ""
            number = corpus.encode(" " + code)
            stated = rng.uniform(0, 0.98)
            end = corpus.encode(". Remember it.") + number + corpus.encode(f" is the pass key{of}.")
            lead = corpus.encode(rng.choice(["The pass key", " The pass key", "\nThe pass key"]))
            items.append((stated, key, lead, corpus.encode(f"{of} is"), number, end, False))
            asked = rng.uniform(stated, 1.0) if rng.random() < 0.5 else rng.uniform(max(stated, 0.85), 1.0)
            question = corpus.encode(rng.choice(["\n\nWhat", "\nWhat"]) + f" is the pass key{of}?")
            # a single key is asked for where the row ends, so that distances reach the whole row
            items.append(
                (
                    1.0 if not named else asked,
                    key,
                    question,
                    corpus.encode(f" The pass key{of} is"),
                    number,
                    [self.blank],
                    True,
                )
            )
        items.sort(key=lambda item: (item[0], item[6]))
        used = sum(sum(len(part) for part in item[2:6]) for item in items) + 1
        room = length + 1 - used
        if room < 0:
            return self.passkey(length, keys=1) if keys > 1 else self.classification(length, "synthetic")
        filler = self._filler(room)
        # spread the filler between the items according to their depths, never past the room there is
        bounds = np.searchsorted(np.cumsum(filler.size), [item[0] * room for item in items])
        bounds[-1] = len(filler.size) if items[-1][0] == 1.0 else bounds[-1]
        parts: list[tuple[list[int], list[int], list[int], list[int], int, bool]] = []
        done = 0
        for item, upto in zip(items, bounds, strict=True):
            if upto > done:
                run = filler.flat[filler.start[done] : filler.start[upto - 1] + filler.size[upto - 1]]
                parts.append((run.tolist(), [], [], [], keys, False))
            done = max(done, int(upto))
            parts.append((item[2], item[3], item[4], item[5], item[1], item[6]))
        if done < len(filler.size):
            parts.append((filler.flat[filler.start[done] :].tolist(), [], [], [], keys, False))
        return _assemble(
            length,
            [corpus.special[BOS]],
            corpus.special[PAD],
            np.array([p[4] for p in parts]),
            Ragged.of([p[0] for p in parts]),
            Ragged.of([p[1] for p in parts]),
            Ragged.of([p[2] for p in parts]),
            Ragged.of([p[3] for p in parts]),
            np.array([p[5] for p in parts]),
            0.0,
            PASSKEY_WEIGHT,
        )

    def _filler(self, room: int) -> Ragged:
        """Sentences of at most ``room`` tokens together."""
        corpus, rng = self.corpus, self.rng
        kind = rng.choice(["grass", "texts", "demonstrations"], p=[0.4, 0.3, 0.3])
        if kind == "grass":
            sentences = Ragged.of([self.filler[0]] + [self.filler[1]] * (room // len(self.filler[1])))
        else:
            count = room // 8 + 2
            texts = corpus.cased.take(rng.integers(0, len(corpus.cased.size), size=count))
            end = (
                [corpus.encode("\n")]
                if kind == "texts"
                else [
                    corpus.encode("\nLabel: ")[:3] + self._item(corpus.spaced, w) + [self.blank]
                    for w in rng.choice(len(corpus.words), size=40)
                ]
            )
            ends = Ragged.of(end).take(rng.integers(0, len(end), size=count))
            both = _join(texts, ends)
            order = np.stack([np.arange(count), np.arange(count) + count], 1).ravel()
            flat = both.take(order).flat
            size = texts.size + ends.size
            sentences = Ragged(flat, np.cumsum(size) - size, size)
        fit = int(np.searchsorted(np.cumsum(sentences.size), room, side="right"))
        return sentences.take(np.arange(fit))


def _runs(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Split ``values`` by the sorted ``keys``: the distinct keys, and for each its values."""
    distinct, first = np.unique(keys, return_index=True)
    return distinct, np.split(values, first[1:])


def _join(a: Ragged, b: Ragged) -> Ragged:
    """``a``'s sequences, then ``b``'s."""
    return Ragged(
        np.concatenate([a.flat, b.flat]),
        np.concatenate([a.start, b.start + len(a.flat)]),
        np.concatenate([a.size, b.size]),
    )


def _assemble(
    length: int,
    head: list[int],
    pad: int,
    y: np.ndarray,
    utterances: Ragged,
    prefixes: Ragged,
    labels: Ragged,
    separators: Ragged,
    scored: np.ndarray,
    lm: float,
    label_weight: float = 1.0,
) -> Row:
    """Lay the items out in one row of ``length + 1`` tokens and weigh the targets.

    The first token of a label weighs ``label_weight`` if its class occurred before, its others ``LATER_WEIGHT``
    times that (they follow from the first more often than not), the token after a label 0.3, other tokens of utterances
    ``lm``; the first demonstration of a class weighs nothing: nobody can know its name.
    """
    count = len(y)
    store = _join(_join(utterances, prefixes), _join(labels, separators))
    order = (np.arange(count)[:, None] + np.arange(4)[None] * count).ravel()
    body = store.take(order)
    sizes = body.size.reshape(count, 4)
    kind = np.repeat(np.tile(np.arange(4), count), body.size)
    first = np.zeros(count, bool)
    first[np.unique(y, return_index=True)[1]] = True
    known = scored & ~first
    weigh = np.repeat(np.repeat(known, 4), body.size)
    weight = np.where(kind == 2, weigh * np.float32(label_weight * LATER_WEIGHT), np.float32(0))
    begins = body.start.reshape(count, 4)
    weight[begins[:, 2][known]] = label_weight
    after = begins[:, 3][known & (sizes[:, 3] > 0)]
    weight[after] = 0.3
    if lm:
        weight[kind == 0] = lm
    tokens = np.concatenate([np.array(head, np.int32), body.flat])[: length + 1]
    weight = np.concatenate([np.zeros(len(head), np.float32), weight])[: length + 1]
    if len(tokens) < length + 1:
        short = length + 1 - len(tokens)
        tokens = np.concatenate([tokens, np.full(short, pad, np.int32)])
        weight = np.concatenate([weight, np.zeros(short, np.float32)])
    label_at = begins[:, 2] + len(head)
    shots = _earlier(y)
    inside = scored & (label_at + sizes[:, 2] <= length)
    return Row(tokens, weight[1:].astype(np.float32), label_at[inside], sizes[inside, 2], shots[inside])


def _earlier(y: np.ndarray) -> np.ndarray:
    """For each item, how many earlier items have its class."""
    order = np.argsort(y, kind="stable")
    _, groups = _runs(y[order], order)
    out = np.empty(len(y), np.int64)
    for group in groups:
        out[group] = np.arange(len(group))
    return out


def batch(sampler: EpisodeSampler, rows: int, length: int, targets: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``rows`` episodes as tokens (rows, length) plus at most ``targets`` positions a row to compute the loss at.

    Returns:
        tokens int32 (rows, length + 1), positions int64 (rows, targets), weights float32 (rows, targets). Where a
        row has more weighted positions than ``targets``, label positions come first and the rest is drawn at random.
    """
    tokens = np.zeros((rows, length + 1), np.int32)
    positions = np.zeros((rows, targets), np.int64)
    weights = np.zeros((rows, targets), np.float32)
    for r in range(rows):
        row = sampler.sample(length)
        at = np.flatnonzero(row.weight)
        if len(at) > targets:
            rank = (row.weight[at] >= 0.3) + sampler.rng.random(len(at)) * 0.9
            at = np.sort(at[np.argsort(-rank)[:targets]])
        tokens[r] = row.tokens
        positions[r, : len(at)] = at
        weights[r, : len(at)] = row.weight[at]
    return tokens, positions, weights
