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

from dataclasses import dataclass

import numpy as np

from sglang_ext.launch.reference.tokenizer import ASSISTANT, BOS, END, PAD, USER
from sglang_ext.launch.reference.tokens import Corpus, Ragged, join, runs
from sglang_ext.launch.reference.utterances import Utterances

PREFIXES = ("\nLabel:", "\nIntent:", "\nCategory:", "\nAnswer:", "\nType:", "\nTopic:", " =>", "\nOutput:")
FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
    " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
)
PASSKEY_WEIGHT = 3.0  # a row of 16K tokens has few digits to learn from
LATER_WEIGHT = 0.7
MIX = {"real": 0.34, "topic": 0.14, "exemplar": 0.28, "synthetic": 0.14, "passkey": 0.10}


@dataclass
class EpisodeRow:
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
        self.utterances = Utterances(corpus, self.rng)
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

    def sample(self, length: int) -> EpisodeRow:
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

    # -- whole episodes -----------------------------------------------------------------------------------------

    def classification(self, length: int, kind: str, classes: int | None = None, plain: bool = False) -> EpisodeRow:
        """A row of demonstrations. ``plain``: no augmentation, random word names, default template (validation)."""
        corpus, rng = self.corpus, self.rng
        k = classes or self._class_count(length)
        count = length // 11 + 8  # more than fit; the row is cut at its length
        permutation, text = None, None
        if kind == "synthetic":
            y, utterances, names = self.utterances.synthetic(k, count)
        else:
            kinds = self.utterances
            draw = {"real": kinds.real, "topic": kinds.topic, "exemplar": kinds.exemplar}[kind]
            y, text, names = draw(k, count)
            if not plain:
                permutation = self._permutation()
            # a permutation of tokens would part a word from its capitalised spelling
            table = corpus.plain if plain else self.utterances.spelled(text, permutation is None)
            utterances = table.take(text) if plain else table
            if not plain and rng.random() < 0.12:  # many an utterance has a second, unrelated part
                other = rng.integers(0, len(corpus.plain.size), count)
                second = corpus.plain.take(other)
                second.size[rng.random(count) < 0.5] = 0
                pair = np.stack([np.arange(count), np.arange(count) + count], 1)
                pair = np.take_along_axis(pair, rng.random((count, 2)).argsort(1), 1).ravel()
                joined = join(utterances, second).take(pair)
                size = joined.size.reshape(count, 2).sum(1)
                utterances = Ragged(joined.flat, np.cumsum(size) - size, size)
        if kind == "exemplar":
            utterances = self.utterances.drop(utterances, float(rng.choice([0.1, 0.25, 0.4, 0.55])))
        elif not plain and kind != "synthetic" and rng.random() < 0.4:
            utterances = self.utterances.drop(utterances, float(rng.choice([0.08, 0.15, 0.3])))
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

    def passkey(self, length: int, keys: int | None = None) -> EpisodeRow:
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
            both = join(texts, ends)
            order = np.stack([np.arange(count), np.arange(count) + count], 1).ravel()
            flat = both.take(order).flat
            size = texts.size + ends.size
            sentences = Ragged(flat, np.cumsum(size) - size, size)
        fit = int(np.searchsorted(np.cumsum(sentences.size), room, side="right"))
        return sentences.take(np.arange(fit))


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
) -> EpisodeRow:
    """Lay the items out in one row of ``length + 1`` tokens and weigh the targets.

    The first token of a label weighs ``label_weight`` if its class occurred before, its others ``LATER_WEIGHT``
    times that (they follow from the first more often than not), the token after a label 0.3, other tokens of utterances
    ``lm``; the first demonstration of a class weighs nothing: nobody can know its name.
    """
    count = len(y)
    store = join(join(utterances, prefixes), join(labels, separators))
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
    return EpisodeRow(tokens, weight[1:].astype(np.float32), label_at[inside], sizes[inside, 2], shots[inside])


def _earlier(y: np.ndarray) -> np.ndarray:
    """For each item, how many earlier items have its class."""
    order = np.argsort(y, kind="stable")
    _, groups = runs(y[order], order)
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
