"""``sglang-ext bench dbsa``: block-sparse encoding and answering over shared blocks, beside what they replace.

Two halves, and a part that is measured where it is asked for, all in Llama-3.1-8B's shape with random weights,
bfloat16, on one NVIDIA GPU:

- kernels: attention of one layer, against FlashInfer and against what bandwidth and tensor cores allow;
- engine: encoding, appending and requests a second, against stock SGLang (dense prefill, Fixed ICL from its cache,
  RetICL, zero-shot) on each of some attention backends, of which each row has the fastest; all engines are resident and
  are measured in turns;
- host: an unpinned pool that leaves the KV cache for host memory and comes back, against encoding it again.

Every row names its baseline, measured in the same run. Nothing is timed whose output was not checked before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sglang_ext.attention.choice import KERNELS, KERNELS_ENV
from sglang_ext.launch.bench import _stages
from sglang_ext.launch.bench._dbsa_engine import EXAMPLES, WRITTEN
from sglang_ext.launch.bench._dbsa_host import host_figures, host_tier
from sglang_ext.launch.bench._dbsa_turns import APART, BESIDE_RETRIEVAL, DECODE_STAGES, IN_TURNS, STAGES, engines
from sglang_ext.launch.bench._record import (
    Figure,
    Timing,
    at_least,
    at_most,
    in_turns,
    json_file,
    of_engines,
    save,
    stock_backends,
    stock_engines,
    table,
    tensor_parallel,
)
from sglang_ext.launch.bench._shapes import SHAPES
from sglang_ext.types import Json, JsonObject

RESULTS = Path(__file__).resolve().parent / "results" / "dbsa.json"
PARTS = ("kernels", "engine", "host")
AIMED_TOKENS = 80_000
"""Tokens of a pool from which the aims of encoding and of answers over it hold."""
# Concurrency -> what our requests a second are to be, as multiples of each baseline's.
ANSWER_AIMS: dict[int, dict[str, float]] = {
    1: {"fixed": 1.15, "retrieval": 30.0, "zero-shot": 0.78},
    32: {"fixed": 6.0, "all blocks": 1.5, "zero-shot": 0.45},
    128: {"all blocks": 1.8},
}
CUT_OUT = {EXAMPLES: "", WRITTEN: ", as written,"}
"""Kinds of answers over single demonstrations, and what their rows say of them."""
DENSE = "dense prefill, stock SGLang on {backend}"
BASELINES = {
    "fixed": "Fixed ICL, cached, stock SGLang on {backend}",
    "all blocks": "Fixed ICL, pool read once for the batch (ours over all blocks)",
    "retrieval": "RetICL, dense, uncached, stock SGLang on {backend}",
    "zero-shot": "zero-shot, stock SGLang on {backend}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=PARTS, help="one of them (default: kernels and engine)")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b", help="the engine's model")
    parser.add_argument("--tokens", type=int, default=90_000, help="tokens of the pool (default: 90000)")
    parser.add_argument("--blocks", type=int, default=48, help="blocks of the pool, kernels half (default: 48)")
    parser.add_argument("--chosen", type=int, default=15, help="blocks a request, kernels half (default: 15)")
    parser.add_argument(
        "--block-size", type=int, default=74, help="demonstrations a block (default: 74, which makes 48 blocks)"
    )
    parser.add_argument(
        "--ratio", type=float, default=0.3125, help="share of the pool a request selects (default: 0.3125)"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 128], metavar="N")
    parser.add_argument(
        "--label-tokens",
        type=int,
        nargs="+",
        default=[4, 8],
        metavar="N",
        help="tokens of an answer; each is measured (default: 4 8)",
    )
    parser.add_argument(
        "--no-labels",
        action="store_true",
        help="leave out answers that are labels of the pool: without a GPU stock SGLang cannot constrain an answer",
    )
    parser.add_argument(
        "--decode-tokens",
        type=int,
        default=64,
        help="tokens of the answers whose steps are profiled (0: none; default: 64)",
    )
    parser.add_argument(
        "--larger", type=int, default=540_000, help="tokens of a larger pool (0: none; default: 540000)"
    )
    parser.add_argument("--rounds", type=int, default=4, help="rounds of questions in a run (default: 4)")
    parser.add_argument("--min-requests", type=int, default=8, help="questions of a run, at least (default: 8)")
    parser.add_argument("--repeats", type=int, default=3, help="measured runs, or pairs of runs, of each (default: 3)")
    parser.add_argument(
        "--apart",
        action="store_true",
        help="one engine after the other, where the memory is not enough for all (default: all resident, in turns)",
    )
    stock_backends(parser)
    tensor_parallel(parser)
    parser.add_argument(
        "--layers", type=int, default=0, metavar="N", help="of the engines' model (default: the shape's)"
    )
    parser.add_argument(
        "--kernels", choices=KERNELS, help=f"of our engine, {KERNELS_ENV} (default: flashinfer on a GPU, torch without)"
    )
    parser.add_argument(
        "--engine",
        type=json.loads,
        default={},
        help='more arguments of all engines, as JSON; those of one under "stock", "ours" or "larger"'
        ' ({"larger": {"max_total_tokens": 580000}}; default: what --tokens and --larger need)',
    )
    parser.add_argument(
        "--out", type=json_file, default=RESULTS, help="JSON file (default: launch/bench/results/dbsa.json)"
    )
    parser.add_argument("--commit", default="", help="commit to record (default: ask git)")


def main(args: argparse.Namespace) -> int:
    figures: list[Figure] = []
    raw: JsonObject = {}
    if args.only == "host":
        raw = host_tier(args)
        figures = of_engines(host_figures(raw), args)
        save(args.out, figures, engine=raw, commit=args.commit)
        print(f"{table(figures)}\nwritten: {args.out}")
        return 0
    if args.only != "engine":
        from sglang_ext.launch.bench._dbsa_kernels import measure
        from sglang_ext.launch.bench._gpu import require_gpu

        figures += measure(require_gpu(), args.tokens, args.blocks, args.chosen, (1, 8, 32, 128))
        print(table(figures), flush=True)
    if args.only != "kernels":
        raw = engines(args)
        figures += of_engines(compare(raw, args.concurrency), args)
    save(args.out, figures, engine=raw, commit=args.commit)
    print(table(figures))
    for name in STAGES:
        if raw:
            print(f"\n{name}, ours:\n{_stages.table(raw['ours'][name])}")
    print(f"written: {args.out}")
    return 0


@dataclass(frozen=True)
class StockRows:
    """Makes rows of what was measured.

    Attributes:
        stocks: what each stock engine measured.
        order: how the engines were measured, `IN_TURNS` or `APART`.
    """

    stocks: Sequence[JsonObject]
    order: str

    def beside(
        self, name: str, mine: list[float], words: str, theirs: list[float], aim: float | None, **notes: Json
    ) -> Figure:
        """A row of seconds beside others."""
        if self.order == IN_TURNS:
            return in_turns(name, mine, words, theirs, aim, notes=notes)
        return at_least(name, Timing.of(mine), words, Timing.of(theirs), aim, notes=notes)

    def beside_stock(
        self,
        name: str,
        mine: list[float],
        words: str,
        theirs: Callable[[JsonObject], list[float]],
        aim: float | None,
        **notes: Json,
    ) -> Figure:
        """A row beside the fastest of the stock engines, which `words` name; `theirs` has the seconds of one."""
        times = {stock["backend"]: theirs(stock) for stock in self.stocks}
        fastest = min(times, key=lambda backend: statistics.median(times[backend]))
        others = {
            backend: statistics.median(found) / statistics.median(mine)
            for backend, found in times.items()
            if backend != fastest
        }
        more = {"ratios to others": others} if others else {}
        return self.beside(name, mine, words.format(backend=fastest), times[fastest], aim, **notes, **more)


def compare(raw: JsonObject, concurrency: Sequence[int]) -> list[Figure]:
    """Rows from what the engines measured, each beside the fastest of the stock engines.

    Raises:
        ValueError: a stock engine did not have the pool in its cache while it answered behind it.
    """
    ours, stocks = raw["ours"], stock_engines(raw["stock"])
    rows = StockRows(stocks, raw.get("order", APART))

    def prefill(stock: JsonObject) -> list[float]:
        return [seconds * ours["tokens"] / stock["tokens"] for seconds in stock["prefill"]]

    notes = {"pool_tokens": ours["tokens"], "dense_tokens": stocks[0]["tokens"], "order": rows.order}
    name = f"encoding a pool of {ours['tokens']} tokens in {ours['blocks']} blocks, whole engine"
    large = ours["tokens"] >= AIMED_TOKENS
    figures = [rows.beside_stock(name, ours["encode"], DENSE, prefill, 2.5 if large else None, **notes)]
    for label, number in itertools.product(ours["answers"], concurrency):
        aims = ANSWER_AIMS.get(number, {}) if large else {}
        figures += _answers(ours["answers"][label], rows, label, number, aims)
    for number in concurrency:
        if "labelled" in ours:
            figures.append(_labelled(ours, rows, number))
        spent = ours[DECODE_STAGES].get(f"{number} at a time", {})
        if spent.get("rotation"):  # else it is part of the attention kernel, and cannot be told from it
            part = Timing.of([sum(spent[stage] for stage in ("rotation", "merge", "planning"))])
            name = f"rotation, merge and planning while decoding, {number} at a time"
            figures.append(at_most(name, part, spent["span"], "all of the time", 0.08, notes=spent))
    return figures + (_of_larger(ours) if "larger" in ours else [])


def _answers(mine: JsonObject, rows: StockRows, label: str, number: int, aims: Mapping[str, float]) -> list[Figure]:
    """Rows of answers with `label` tokens, so many at a time, with the aim beside each baseline that has one."""
    at, first = str(number), rows.stocks[0]
    notes = {"question_tokens": first["question_tokens"], "label_tokens": int(label), "concurrency": number}
    notes["order"] = rows.order
    name, figures = f"answering with {label} tokens, {number} at a time, time a request", []
    for stock in rows.stocks:
        _check_cached(stock["answers"][label]["fixed"].get(at, []), stock["tokens"])
    for baseline, words in BASELINES.items():
        aim, theirs = aims.get(baseline), partial(_seconds, label=label, kind=baseline, at=at)
        if baseline == "all blocks":
            seconds = _per_request(mine["dbsa"][at])
            figures.append(rows.beside(name, seconds, words, _per_request(mine[baseline][at]), aim, **notes))
        elif at in first["answers"][label].get(baseline, {}):
            kept = BESIDE_RETRIEVAL if baseline == "retrieval" and BESIDE_RETRIEVAL in mine else "dbsa"
            figures.append(rows.beside_stock(name, _per_request(mine[kept][at]), words, theirs, aim, **notes))
    name, words = f"a plain request with {label} tokens, {number} at a time", BASELINES["zero-shot"]
    of, seconds = partial(_seconds, label=label, kind="zero-shot", at=at), _per_request(mine["zero-shot"][at])
    figures.append(rows.beside_stock(name, seconds, words, of, 1 / 1.03, **notes))
    for kind, how in CUT_OUT.items():
        if kind not in mine:  # what was measured before there was this kind
            continue
        name = f"answering over single demonstrations{how} with {label} tokens, {number} at a time, time a request"
        seconds = _per_request(mine[kind][at])
        figures.append(rows.beside(name, seconds, "over blocks", _per_request(mine["dbsa"][at]), None, **notes))
        of = partial(_seconds, label=label, kind="fixed", at=at)
        figures.append(rows.beside_stock(name, seconds, BASELINES["fixed"], of, None, **notes))
    # An answer gains twice: by fewer blocks, as the row beside all of them says, and by reading shared ones once.
    name, words = f"answering over all blocks with {label} tokens, {number} at a time", BASELINES["fixed"]
    of, seconds = partial(_seconds, label=label, kind="fixed", at=at), _per_request(mine["all blocks"][at])
    return [*figures, rows.beside_stock(name, seconds, words, of, None, **notes)]


def _labelled(ours: JsonObject, rows: StockRows, number: int) -> Figure:
    """The row of answers that are labels, so many at a time: as pools are used."""
    at = str(number)
    for stock in rows.stocks:
        _check_cached(stock["labelled"][at], stock["tokens"])
    said = {each.get("backend", "ours"): statistics.fmean(run["said"] for run in each["labelled"][at])
            for each in (ours, *rows.stocks)}  # fmt: skip
    notes = {"concurrency": number, "answer_tokens": said, "order": rows.order}
    name = f"answering with a label, {number} at a time, time a request"
    words = f"{BASELINES['fixed']}, a grammar of the labels"
    seconds = _per_request(ours["labelled"][at])
    return rows.beside_stock(name, seconds, words, lambda stock: _per_request(stock["labelled"][at]), None, **notes)


def _seconds(stock: JsonObject, label: str, kind: str, at: str) -> list[float]:
    """Seconds a request of a stock engine's runs."""
    return _per_request(stock["answers"][label][kind][at])


def _of_larger(ours: JsonObject) -> list[Figure]:
    """Rows of the larger pool."""
    larger = ours["larger"]
    growth = larger["tokens"] / ours["tokens"]
    one, scaled = Timing.of([larger["seconds"]]), Timing.of([statistics.median(ours["encode"]) * growth])
    name = f"encoding {growth:.2f} times the pool, against that many times the time"
    rows = [at_least(name, one, "linear growth", scaled, 6 / 6.3)]
    small, large = Timing.of(ours["append"]), Timing.of(ours["append larger"])
    # The rest is the host's: parsing, laying out, describing the pool.
    spent = {name: statistics.median(each) for name, each in ours.get("append encoding", {}).items()}
    notes = {"encoding": spent} if spent else {}
    name = "appending a block to the larger pool"
    return [*rows, at_least(name, large, "to the smaller", small, 1 / 1.1, notes=notes)]


def _per_request(runs: Sequence[JsonObject]) -> list[float]:
    """Seconds a request that a closed loop takes: the reciprocal of requests a second, of each run."""
    return [run["seconds"] / run["requests"] for run in runs]


def _check_cached(runs: Sequence[JsonObject], tokens: int) -> None:
    for run in runs:
        if run.get("cached", tokens) < tokens:
            raise ValueError(
                f"of {tokens} tokens of pool {run['cached']} were cached for a question of Fixed ICL: expected all of"
                ' them; give the stock engine more room (--engine \'{"stock": {"max_total_tokens": ...}}\')'
            )
