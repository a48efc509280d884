"""``sglang-ext bench dbsa``: block-sparse encoding and answering over shared blocks, beside what they replace.

Two halves, both in Llama-3.1-8B's shape with random weights, bfloat16, on one NVIDIA GPU:

- kernels: attention of one layer, against FlashInfer and against what bandwidth and tensor cores allow;
- engine: encoding, appending and requests a second, against stock SGLang with FlashInfer (dense prefill, Fixed ICL from
  its cache, RetICL, zero-shot), each engine in a process of its own.

Every row names its baseline, measured in the same run. Nothing is timed whose output was not checked before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sglang_ext.attention.select import KERNELS, KERNELS_ENV
from sglang_ext.launch.bench import _stages
from sglang_ext.launch.bench._dbsa_engine import SHAPES, write_model
from sglang_ext.launch.bench._record import Figure, Timing, at_least, at_most, save, table

RESULTS = Path(__file__).resolve().parent / "results" / "dbsa.json"
HALVES = ("kernels", "engine")
# Concurrency -> what our requests a second are to be, as multiples of each baseline's.
ANSWER_AIMS: dict[int, dict[str, float]] = {
    1: {"fixed": 1.15, "retrieval": 30.0, "zero-shot": 0.78},
    32: {"fixed": 6.0, "all blocks": 1.5, "zero-shot": 0.45},
    128: {"all blocks": 1.8},
}
BASELINES = {
    "fixed": "Fixed ICL, cached, stock SGLang on {backend}",
    "all blocks": "Fixed ICL, pool read once for the batch (ours over all blocks)",
    "retrieval": "RetICL, dense, uncached, stock SGLang on {backend}",
    "zero-shot": "zero-shot, stock SGLang on {backend}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=HALVES, help="one half (default: both)")
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
        "--decode-tokens",
        type=int,
        default=64,
        help="tokens of the answers whose steps are profiled (0: none; default: 64)",
    )
    parser.add_argument(
        "--larger", type=int, default=540_000, help="tokens of a larger pool (0: none; default: 540000)"
    )
    parser.add_argument("--rounds", type=int, default=4, help="rounds of questions in a run (default: 4)")
    parser.add_argument("--repeats", type=int, default=3, help="measured runs of each (default: 3)")
    parser.add_argument("--stock-backend", default="flashinfer", help="the stock engine's attention backend")
    parser.add_argument(
        "--kernels", choices=KERNELS, help=f"of our engine, {KERNELS_ENV} (default: flashinfer on a GPU, torch without)"
    )
    parser.add_argument("--engine", type=json.loads, default={}, help="more arguments of both engines, as JSON")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file (default: launch/bench/results/dbsa.json)")
    parser.add_argument("--commit", default="", help="commit to record (default: ask git)")


def main(args: argparse.Namespace) -> int:
    figures: list[Figure] = []
    raw: dict[str, Any] = {}
    if args.only != "engine":
        from sglang_ext.launch.bench._dbsa_kernels import measure
        from sglang_ext.launch.bench._gpu import require_gpu

        figures += measure(require_gpu(), args.tokens, args.blocks, args.chosen, (1, 8, 32, 128))
        print(table(figures), flush=True)
    if args.only != "kernels":
        raw = engines(args)
        figures += compare(raw, args.concurrency)
    save(args.out, figures, engine=raw, commit=args.commit)
    print(table(figures))
    for name in ("stages", "decode stages"):
        if raw:
            print(f"\n{name}, ours:\n{_stages.table(raw['ours'][name])}")
    print(f"written: {args.out}")
    return 0


def engines(args: argparse.Namespace) -> dict[str, Any]:
    """Run both engines, one after the other: {"stock": ..., "ours": ...}.

    Raises:
        RuntimeError: one of them failed; its output is above.
    """
    found: dict[str, Any] = {}
    chosen = args.kernels or ("flashinfer" if torch.cuda.is_available() else "torch")
    with tempfile.TemporaryDirectory(prefix="sglang-ext-bench-") as temporary:
        folder = Path(temporary)
        # Positions are sequential over the larger pool too, so that both are encoded alike.
        write_model(folder / "model", args.shape, max(131_072, max(args.tokens, args.larger) + 16_384))
        for role in ("stock", "ours"):
            out = folder / f"{role}.json"
            options = {
                "role": role,
                "backend": args.stock_backend,
                "model": folder / "model",
                "out": out,
                "tokens": args.tokens,
                "block-size": args.block_size,
                "ratio": args.ratio,
                "rounds": args.rounds,
                "repeats": args.repeats,
                "larger": args.larger,
                "decode-tokens": args.decode_tokens,
                "engine": json.dumps(args.engine),
            }
            command = [sys.executable, "-m", "sglang_ext.launch.bench._dbsa_engine"]
            command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
            command += ["--concurrency", *map(str, args.concurrency)]
            command += ["--label-tokens", *map(str, args.label_tokens)]
            # SGLang loads every plugin that is installed: stock SGLang keeps the one that lets it run without a GPU.
            own = {KERNELS_ENV: chosen} if role == "ours" else {"SGLANG_PLUGINS": "sglang_ext_cpu"}
            if subprocess.run(command, check=False, env={**os.environ, **own}).returncode:
                raise RuntimeError(f"the {role} engine failed; its output is above")
            found[role] = json.loads(out.read_text())
    found["stock"]["backend"] = args.stock_backend
    return found


def compare(raw: dict[str, Any], concurrency: Sequence[int]) -> list[Figure]:
    """Rows from what the two engines measured."""
    stock, ours = raw["stock"], raw["ours"]
    tokens = {"pool_tokens": ours["tokens"], "dense_tokens": stock["tokens"]}
    dense = [seconds * ours["tokens"] / stock["tokens"] for seconds in stock["prefill"]]
    figures = [
        at_least(
            f"encoding a pool of {ours['tokens']} tokens in {ours['blocks']} blocks, whole engine",
            Timing.of(ours["encode"]),
            f"dense prefill, stock SGLang on {stock['backend']}",
            Timing.of(dense),
            2.5,
            notes=tokens,
        )
    ]
    for label, number in itertools.product(ours["answers"], concurrency):
        mine, theirs = ours["answers"][label], stock["answers"][label]
        measured = {"retrieval": {}, **theirs, "all blocks": mine["all blocks"]}
        notes = {"question_tokens": stock["question_tokens"], "label_tokens": int(label), "concurrency": number}
        for baseline, words in BASELINES.items():
            if str(number) not in measured[baseline]:
                continue
            aim = ANSWER_AIMS.get(number, {}).get(baseline)
            name = f"answering with {label} tokens, {number} at a time, time a request"
            words = words.format(backend=stock["backend"])
            times = _per_request(mine["dbsa"][str(number)]), _per_request(measured[baseline][str(number)])
            figures.append(at_least(name, times[0], words, times[1], aim, notes=notes))
        plain, other = (_per_request(side["zero-shot"][str(number)]) for side in (mine, theirs))
        name = f"a plain request with {label} tokens, {number} at a time"
        words = BASELINES["zero-shot"].format(backend=stock["backend"])
        figures.append(at_least(name, plain, words, other, 1 / 1.03, notes=notes))
    for number in concurrency:
        spent = ours["decode stages"].get(f"{number} at a time", {})
        if spent.get("rotation"):  # else it is part of the attention kernel, and cannot be told from it
            beside = Timing.of([sum(spent[stage] for stage in ("rotation", "merge", "planning"))])
            name = f"rotation, merge and planning while decoding, {number} at a time"
            figures.append(at_most(name, beside, spent["span"], "all of the time", 0.08, notes=spent))
    if "larger" in ours:
        larger = ours["larger"]
        growth = larger["tokens"] / ours["tokens"]
        times = statistics.median(ours["encode"]) * growth
        one, scaled = Timing.of([larger["seconds"]]), Timing.of([times])
        name = f"encoding {growth:.2f} times the pool, against that many times the time"
        figures.append(at_least(name, one, "linear growth", scaled, 6 / 6.3))
        small, large = Timing.of(ours["append"]), Timing.of(ours["append larger"])
        figures.append(at_least("appending a block to the larger pool", large, "to the smaller", small, 1 / 1.1))
    return figures


def _per_request(runs: Sequence[dict[str, Any]]) -> Timing:
    """Seconds a request that a closed loop takes: the reciprocal of requests a second, of each run."""
    return Timing.of(run["seconds"] / run["requests"] for run in runs)
