"""``sglang-ext bench reference``: does the reference model learn in context?

Three questions, asked of the model in transformers (GPU or CPU), demonstrations first and cached, queries after:

- held-out classes under random names: accuracy against demonstrations a class, label set fixed;
- banking77 under its own 77 names, which no training ever saw;
- a passkey, at every tenth of depth in 4K, 8K and 16K tokens.

Answers are constrained to the label set, token by token, the way a grammar constrains them in serving. The baseline is
the label of the demonstration nearest by BM25 (rank-bm25's Okapi weights, words of letters and digits in lower case)
among the same demonstrations; the tf-idf cosine neighbour is reported beside it.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import platform
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import sglang_ext
from sglang_ext.launch.bench._record import commit, json_file
from sglang_ext.launch.bench._reference_reader import PREFIX, SEPARATOR, Demo, ModelReader, Writer
from sglang_ext.launch.reference.corpus import held_out_classes, read_rows
from sglang_ext.types import JsonObject

MODEL = Path(sglang_ext.__file__).resolve().parent / "assets" / "reference"
RESULTS = Path(__file__).resolve().parent / "results"
NEEDLE = " The pass key is {key}. Remember it. {key} is the pass key."
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@dataclass(frozen=True)
class Suite:
    """One classification measurement."""

    name: str  # the set's folder
    held_out: bool  # only every third class, under random names; else all classes, under their own
    aim: float  # share of the neighbour's accuracy to reach with the most demonstrations
    lower: bool = False  # texts in lower case, as the neighbour reads them in any case; else as written

    @property
    def key(self) -> str:
        """What ``--suites`` calls it."""
        return f"{self.name}-lower" if self.lower else self.name

    @property
    def title(self) -> str:
        """What the table calls it."""
        names = "held-out classes, random names" if self.held_out else "own names"
        return f"{self.name}{', lower case' if self.lower else ''}, {names}"


SUITES = (
    Suite("clinc150", True, 1.0),  # written in lower case
    Suite("nlu", True, 1.0, lower=True),
    Suite("nlu", True, 1.0),  # train in lower case, test not
    Suite("banking77", False, 0.8, lower=True),
    Suite("banking77", False, 0.8),
)


# -- baselines ----------------------------------------------------------------------------------------------------


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def bm25_neighbour(demos: Sequence[Demo], queries: Sequence[Demo], k1: float = 1.5, b: float = 0.75) -> float:
    """Accuracy of the label of the best BM25 demonstration (rank-bm25's BM25Okapi: negative idf floored)."""
    docs = [Counter(_words(text)) for text, _ in demos]
    sizes = [sum(d.values()) for d in docs]
    mean = sum(sizes) / len(docs)
    frequency = Counter(w for d in docs for w in d)
    idf = {w: math.log(len(docs) - n + 0.5) - math.log(n + 0.5) for w, n in frequency.items()}
    floor = 0.25 * sum(idf.values()) / len(idf)
    idf = {w: v if v >= 0 else floor for w, v in idf.items()}
    right = 0
    for text, label in queries:
        score = [0.0] * len(docs)
        for w in _words(text):
            if w in idf:
                for i, d in enumerate(docs):
                    if w in d:
                        tf = d[w]
                        score[i] += idf[w] * tf * (k1 + 1) / (tf + k1 * (1 - b + b * sizes[i] / mean))
        right += demos[max(range(len(docs)), key=score.__getitem__)][1] == label
    return right / len(queries)


def tfidf_neighbour(demos: Sequence[Demo], queries: Sequence[Demo]) -> float:
    """Accuracy of the label of the nearest demonstration by tf-idf cosine (scikit-learn, sublinear tf)."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(sublinear_tf=True)
    pool = vectorizer.fit_transform([text for text, _ in demos])
    nearest = (vectorizer.transform([text for text, _ in queries]) @ pool.T).toarray().argmax(1)
    return sum(demos[int(i)][1] == label for i, (_, label) in zip(nearest, queries, strict=True)) / len(queries)


# -- measurements -------------------------------------------------------------------------------------------------


def random_names(reader: Writer, count: int, seed: int) -> list[str]:
    """``count`` names of one or two words drawn from the tokenizer's whole words; no two share a word."""
    words = sorted(t[1:] for t in reader.tokenizer.get_vocab() if t[0] == "Ġ" and t[1:].isalpha() and len(t) > 4)
    rng = random.Random(seed)
    drawn = iter(rng.sample([w for w in words if w.isascii()], 2 * count))
    return [next(drawn) if rng.random() < 0.5 else f"{next(drawn)} {next(drawn)}" for _ in range(count)]


def suite_data(
    reader: Writer, data: str, suite: Suite, queries: int, seed: int
) -> tuple[dict[str, list[str]], list[Demo]]:
    """Texts by label, shuffled, and the test queries; labels are renamed where the suite says so."""
    train, test = read_rows(data, suite.name, "train"), read_rows(data, suite.name, "test")
    if suite.lower:
        train, test = ([(text.lower(), label) for text, label in rows] for rows in (train, test))
    labels = sorted({label for _, label in train})
    if suite.held_out:
        labels = sorted(held_out_classes(labels))
    names = random_names(reader, len(labels), seed) if suite.held_out else labels
    renamed = dict(zip(labels, names, strict=True))
    rng = random.Random(seed)
    pool: dict[str, list[str]] = {name: [] for name in names}
    for text, label in train:
        if label in renamed:
            pool[renamed[label]].append(text)
    for texts in pool.values():
        rng.shuffle(texts)
    asked = [(text, renamed[label]) for text, label in test if label in renamed]
    return pool, rng.sample(asked, min(queries, len(asked)))


def demonstrations(pool: dict[str, list[str]], shots: int, seed: int) -> list[Demo]:
    """The first ``shots`` texts of every label, in random order; more shots contain fewer."""
    demos = [(text, label) for label, texts in pool.items() for text in texts[:shots]]
    random.Random(seed).shuffle(demos)
    return demos


def measure_suite(reader: ModelReader, args: argparse.Namespace, suite: Suite) -> list[JsonObject]:
    """Accuracy against 1, 2, 4, ... demonstrations a class and, last, as many as the context holds."""
    points: dict[int, list[dict[str, float]]] = {}
    for seed in range(args.seeds):
        pool, queries = suite_data(reader, args.data, suite, args.queries, seed)
        longest = max(len(reader.encode(f"{t}{PREFIX} {label}{SEPARATOR}")) for t, label in queries)
        room = min(reader.context, args.context) - longest
        most = 0
        while most < max(map(len, pool.values())) and len(reader.prompt(demonstrations(pool, most + 1, seed))) <= room:
            most += 1
        if not most:
            raise ValueError(f"one demonstration a class of {suite.key}: over {room} tokens; raise --context")
        for shots in sorted({*(2**i for i in range(12) if 2**i <= most), most}):
            demos = demonstrations(pool, shots, seed)
            started = time.perf_counter()
            answers = reader.classify(demos, [text for text, _ in queries], list(pool))
            seconds = time.perf_counter() - started
            # the last point of every seed is "full", however many demonstrations a class that is
            points.setdefault(0 if shots == most else shots, []).append(
                {
                    "shots": shots,
                    "demonstrations": len(demos),
                    "tokens": len(reader.prompt(demos)),
                    "accuracy": sum(a == label for a, (_, label) in zip(answers, queries, strict=True)) / len(queries),
                    "bm25": bm25_neighbour(demos, queries),
                    "tfidf": tfidf_neighbour(demos, queries),
                    "queries": len(queries),
                    "seconds": seconds,
                }
            )
            p = points[0 if shots == most else shots][-1]
            print(
                f"{suite.key:15} seed {seed} {len(pool)} labels, {shots:3} a class, {len(demos):4} demonstrations, "
                f"{p['tokens']:5} tokens: {p['accuracy']:.3f}  BM25 {p['bm25']:.3f}  tf-idf {p['tfidf']:.3f}",
                flush=True,
            )
    return summarise(suite, points)


def summarise(suite: Suite, points: dict[int, list[dict[str, float]]]) -> list[JsonObject]:
    """Medians over the seeds by demonstrations a class (0: as many as fit), the aim, and whether the curve rises."""
    results: list[JsonObject] = []
    for shots in sorted(points, key=lambda s: s or 1 << 30):
        runs = points[shots]
        value, baseline = (statistics.median(r[k] for r in runs) for k in ("accuracy", "bm25"))
        last = shots == 0
        results.append(
            {
                "name": f"{suite.title}, "
                + (f"full context ({runs[0]['shots']} a class)" if last else f"{shots} a class"),
                "value": round(value, 4),
                "baseline": round(baseline, 4),
                "ratio": round(value / baseline, 4) if baseline else None,
                "aim": suite.aim if last else None,
                "met": value >= suite.aim * baseline if last else None,
                "median": round(value, 4),
                "spread": [
                    round(min(r["accuracy"] for r in runs), 4),
                    round(max(r["accuracy"] for r in runs), 4),
                ],
                "runs": runs,
            }
        )
    curve = [r["value"] for r in results]
    results.append(
        {
            "name": f"{suite.title}: rises with the demonstrations",
            "value": sum(b > a for a, b in itertools.pairwise(curve)),
            "baseline": len(curve) - 1,
            "ratio": None,
            "aim": len(curve) - 1,
            "met": all(b > a for a, b in itertools.pairwise(curve)),
        }
    )
    return results


def word_ids(reader: Writer) -> list[int]:
    """The tokens that are a word in lower case, with a space before it: a dictionary that each model has."""
    words = reader.tokenizer.batch_decode([[token] for token in range(len(reader.tokenizer))])
    return [token for token, word in enumerate(words) if re.fullmatch(" [a-z]{3,}", word)]


def passkey_prompt(
    reader: Writer, length: int, depth: float, rng: random.Random, words: Sequence[int] = ()
) -> tuple[list[int], str]:
    """A prompt of exactly ``length`` tokens with a five-digit key at ``depth`` of it, and the key.

    Args:
        words: tokens that the key is hidden among, drawn at random; none: it is hidden among sentences.
    """
    key = "".join(rng.choice("0123456789") for _ in range(5))
    needle = reader.encode(NEEDLE.format(key=key))
    question = reader.encode("\n\nWhat is the pass key? The pass key is")
    room = length - 1 - len(needle) - len(question)
    if room < 0:
        raise ValueError(f"a passkey prompt of {length} tokens; expected at least {length - room}")
    if words:
        drawn = rng.choices(words, k=room)
        at = round(depth * room)
        return [reader.tokenizer.bos_token_id, *drawn[:at], *needle, *drawn[at:], *question], key
    filler = reader.encode(FILLER)
    more = reader.encode(" " + FILLER)
    filler += more * (room // len(more) + 1)
    stops = [i + 1 for i, t in enumerate(filler[:room]) if t == filler[len(reader.encode(FILLER)) - 1]] or [room]
    at = min(stops, key=lambda stop: abs(stop - depth * room))
    return [reader.tokenizer.bos_token_id, *filler[:at], *needle, *filler[at:room], *question], key


def measure_passkey(reader: ModelReader, args: argparse.Namespace) -> list[JsonObject]:
    """Exact recall of the key by length and depth."""
    results = []
    trials = args.passkey_trials * (len(args.passkey_lengths) if len(args.passkey_trials) == 1 else 1)
    for length, count in zip(args.passkey_lengths, trials, strict=True):
        cells = []
        for tenth in range(10):
            rng = random.Random(1000 * length + tenth)
            right = 0
            for begin in range(0, count, args.passkey_batch):
                rows = [
                    passkey_prompt(reader, length - 8, (tenth + rng.random()) / 10, rng)
                    for _ in range(min(args.passkey_batch, count - begin))
                ]
                out = reader.continue_greedily([ids for ids, _ in rows], 5)
                right += sum(
                    str(reader.tokenizer.decode(ids)).strip() == key for ids, (_, key) in zip(out, rows, strict=True)
                )
            cells.append(right / count)
        print(
            f"passkey {length:6} tokens, by tenth of depth: " + " ".join(f"{c:.2f}" for c in cells),
            flush=True,
        )
        results.append(
            {
                "name": f"passkey, {length} tokens, worst tenth of depth ({count} prompts each)",
                "value": min(cells),
                "baseline": None,
                "ratio": None,
                "aim": 0.95,
                "met": min(cells) >= 0.95,
                "median": statistics.median(cells),
                "spread": [min(cells), max(cells)],
                "runs": cells,
                "prompts_a_depth": count,
            }
        )
    return results


def machine(device: torch.device) -> str:
    """What the figures were measured on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def write(args: argparse.Namespace, reader: ModelReader, results: list[JsonObject]) -> None:
    """Write the JSON; called after every suite, so that a run that is cut short leaves what it measured."""
    import transformers

    report = {
        "bench": "reference",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": args.commit or commit(),
        "machine": machine(reader.device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "command": "sglang-ext bench reference "
        + " ".join(
            f"--{k.replace('_', '-')} {' '.join(map(str, v)) if isinstance(v, list) else v}"
            for k, v in vars(args).items()
            if k in ("suites", "queries", "seeds", "passkey_lengths", "passkey_trials")
        ),
        "baseline": "label of the BM25 nearest demonstration among the same demonstrations",
        "results": results,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``sglang-ext bench reference``."""
    parser.add_argument("--data", required=True, help="directory of the classification sets, one folder a set")
    parser.add_argument("--model", default=str(MODEL), help="model directory (default: the embedded one)")
    parser.add_argument("--device", default=None, help="cuda or cpu (default: cuda where there is one)")
    parser.add_argument("--suites", nargs="*", default=[s.key for s in SUITES], help="sets to measure")
    parser.add_argument("--queries", type=int, default=250, help="queries a point")
    parser.add_argument("--seeds", type=int, default=3, help="draws of demonstrations, names and queries")
    parser.add_argument("--context", type=int, default=1 << 30, help="use at most this many tokens")
    parser.add_argument("--passkey-lengths", type=int, nargs="*", default=[4096, 8192, 16384], help="tokens")
    parser.add_argument(
        "--passkey-trials", type=int, nargs="*", default=[20], help="prompts a depth, for each length or for all"
    )
    parser.add_argument("--passkey-batch", type=int, default=10, help="prompts at once")
    parser.add_argument("--commit", default="", help="commit to record (default: ask git)")
    parser.add_argument("--out", type=json_file, default=RESULTS / "reference.json", help="JSON file to write")


def main(args: argparse.Namespace) -> int:
    """Measure, print the table, write the JSON; 0 whether or not the aims are met."""
    known = {s.key: s for s in SUITES}
    if set(args.suites) - set(known):
        raise ValueError(f"--suites {args.suites}; expected some of {sorted(known)}")
    reader = ModelReader(args.model, args.device)
    results: list[JsonObject] = []
    for name in args.suites:
        results += measure_suite(reader, args, known[name])
        write(args, reader, results)
    results += measure_passkey(reader, args)
    write(args, reader, results)
    print(f"\n{'measurement':68} {'value':>7} {'BM25 1-NN':>9} {'ratio':>6} {'aim':>5} met")
    for r in results:
        cell = [("" if r[k] is None else f"{r[k]:.3f}") for k in ("value", "baseline", "ratio", "aim")]
        met = "" if r["met"] is None else "yes" if r["met"] else "NO"
        print(f"{r['name']:68} {cell[0]:>7} {cell[1]:>9} {cell[2]:>6} {cell[3]:>5} {met}")
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(_parser)
    sys.exit(main(_parser.parse_args()))
