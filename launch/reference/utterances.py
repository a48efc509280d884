"""This module draws the classes and the utterances of each kind of episode: they are texts of seen classes, of classes
that a few content words define or of classes of unrelated texts, or they are put together from random words; it also
chooses how texts are spelled and leaves out some of their tokens.
"""

from __future__ import annotations

import numpy as np

from sglang_ext.launch.reference.tokens import Corpus, Ragged, compact, join, runs


class Utterances:
    """Draws the classes and utterances of one sampler's episodes, from that sampler's random numbers."""

    def __init__(self, corpus: Corpus, rng: np.random.Generator) -> None:
        self.corpus, self.rng = corpus, rng

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
        for c, at in zip(*runs(y[order], order), strict=True):
            texts = rng.permutation(members[c])
            text[at] = np.resize(texts, len(at))
        return y, text

    def real(self, k: int, count: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
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

    def topic(self, k: int, count: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
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
        members = {int(c): m for c, m in zip(*runs(owner[order], order), strict=True) if c >= 0 and len(m) >= 3}
        if len(members) < 2:
            return self.real(k, count)
        names = [self.corpus.tokenizer.decode(words[c]).strip().replace(" ", "_") for c in members]
        names = [f"{n}_{i}" if names.count(n) > 1 or not n else n for i, n in enumerate(names)]
        y, text = self._draw(list(members.values()), count)
        return y, text, names

    def exemplar(self, k: int, count: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
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

    def spelled(self, text: np.ndarray, mixed: bool) -> Ragged:
        """The texts in one spelling or, if ``mixed``, each in its own."""
        corpus, rng = self.corpus, self.rng
        tables = join(join(corpus.plain, corpus.cased), corpus.wild)
        share = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.7, 0.3), (0.5, 0.3, 0.2), (0.75, 0.2, 0.05)]
        which = rng.choice(5, p=[0.4, 0.08, 0.07, 0.25, 0.2] if mixed else [0.75, 0.25, 0.0, 0.0, 0.0])
        return tables.take(text + rng.choice(3, size=len(text), p=share[which]) * len(corpus.plain.size))

    def synthetic(self, k: int, count: int) -> tuple[np.ndarray, Ragged, list[str]]:
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
        both = join(corpus.bare, corpus.spaced)
        size = np.where(keep, both.size[index], 0)
        flat = compact(both.flat, both.start[index].ravel(), size.ravel())
        total = size.sum(1)
        names = ["_".join(corpus.words[w] for w in rng.permutation(table[c])[: min(own, 3)]) for c in range(k)]
        names = [f"{n}_{corpus.words[i]}" if names.count(n) > 1 else n for i, n in enumerate(names)]
        return y, Ragged(flat.flat, np.cumsum(total) - total, total), names

    def drop(self, utterances: Ragged, share: float) -> Ragged:
        """Leave out tokens at random, never all of an utterance."""
        keep = self.rng.random(len(utterances.flat)) >= share
        keep[utterances.start[utterances.size > 0]] = True
        owner = np.repeat(np.arange(len(utterances.size)), utterances.size)
        size = np.bincount(owner[keep], minlength=len(utterances.size))
        return Ragged(utterances.flat[keep], np.cumsum(size) - size, size)
