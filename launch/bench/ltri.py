"""``sglang-ext bench ltri``: Ltri-LLM beside StreamingLLM with as many visible tokens, and beside stock SGLang.

Two halves, both in Llama-3.1-8B's shape, bfloat16, on one NVIDIA GPU:

- kernels: a chunk behind a long stream in one layer, and its parts: fetch, spans, scores and election, the index;
- engine: one engine after the other. What leaves a window lies in host memory: 512K tokens of this shape take 64 GiB.

Every row names its baseline, measured in the same run. Each half has a results file of its own. What a chunk gets back
from the host is decided by votes, which are random, as the weights are: `--policy '{"renewed": 8}'` makes 8 blocks of
each chunk new, whatever is voted for, and is the default. The engine `voted` reads the long prompt once more with the
blocks that the votes give.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sglang_ext.attention.choice import KERNELS, KERNELS_ENV
from sglang_ext.launch.bench._ltri_engine import ROLES, write_heads
from sglang_ext.launch.bench._record import (
    Figure,
    Timing,
    arguments_of_ranks,
    at_least,
    at_most,
    fastest,
    of_engines,
    results_folder,
    stock_backends,
    stock_engines,
    tensor_parallel,
)
from sglang_ext.launch.bench._shapes import SHAPES, write_model
from sglang_ext.launch.bench.cascade import HALVES, finish
from sglang_ext.policies.ltri_options import Ltri
from sglang_ext.types import JsonObject

RESULTS = Path(__file__).resolve().parent / "results"
WHOLE_SECONDS, WHOLE_TOKENS = 20.0, 2**19
"""What a prompt of 512K tokens may take; of other lengths, in proportion."""
FORK_SECONDS = 0.03
GRAPHS = {"cuda_graph_max_bs_decode": 8}
"""All engines record decoding steps of at most 8 requests; their other graphs are those that a user has."""
DECODING = {1: 1.05, 8: 1.15}
"""Requests that decode together -> how many times stock SGLang's step ours may take."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=HALVES, help="one half (default: both)")
    parser.add_argument("--tokens", type=int, default=2**19, help="tokens of the long prompt (default: 524288)")
    parser.add_argument("--whole-runs", type=int, default=5, help="long prompts that are read (default: 5)")
    parser.add_argument("--part", type=int, default=2**16, help="tokens of a part that is timed (default: 65536)")
    parser.add_argument("--parts", type=int, default=8, help="parts of the long prompt (default: 8)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], metavar="N", help="requests that decode")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b", help="the engines' model")
    parser.add_argument(
        "--policy",
        type=json.loads,
        default={"renewed": 8},
        help='settings of Ltri-LLM, as JSON (default: {"renewed": 8})',
    )
    parser.add_argument("--streams", type=int, default=10, help="streams that the KV pool has room for (default: 10)")
    parser.add_argument("--chunks", type=int, default=8, help="chunks of a prompt in a pass (default: 8)")
    parser.add_argument("--host-gb", type=float, default=70.0, help="host memory of the engine, GiB (default: 70)")
    parser.add_argument("--decode-tokens", type=int, default=128, help="decoding steps of a run (default: 128)")
    parser.add_argument(
        "--fork-tokens",
        type=int,
        default=2**16,
        help="of a document that stock SGLang has cached, too (default: 65536)",
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of what takes seconds (default: 3)")
    parser.add_argument("--forks", type=int, default=21, help="questions about a document that was read (default: 21)")
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES), help="engines (default: all)")
    stock_backends(parser)
    tensor_parallel(parser)
    parser.add_argument(
        "--kernels", choices=KERNELS, default="flashinfer", help=f"of our engines, {KERNELS_ENV} (default: flashinfer)"
    )
    parser.add_argument("--engine", type=json.loads, default={}, help="more arguments of all engines, as JSON")
    parser.add_argument(
        "--out", type=results_folder, default=RESULTS, help="folder of the JSON files (default: launch/bench/results)"
    )
    parser.add_argument("--commit", default="", help="commit to record (default: ask git)")


def main(args: argparse.Namespace) -> int:
    from sglang_ext.launch.bench._gpu import require_gpu
    from sglang_ext.launch.bench._ltri_kernels import measure

    if args.only != "engine":
        figures = measure(require_gpu(), Ltri(**args.policy), args.tokens)
        finish(args.out / "ltri_kernels.json", figures, args.commit)
    if args.only != "kernels":
        name = f"ltri_engine_tp{args.tp}.json" if args.tp > 1 else "ltri_engine.json"
        for raw in engines(args):  # a run that is cut short keeps what it has
            finish(args.out / name, of_engines(compare(raw, args), args), args.commit, engine=raw)
    return 0


def engines(args: argparse.Namespace) -> Iterator[JsonObject]:
    """Run the engines, one after the other: role -> what it measured, of those so far.

    Raises:
        RuntimeError: one of them failed; its output is above.
    """
    found: JsonObject = {}
    with tempfile.TemporaryDirectory(prefix="sglang-ext-bench-") as temporary:
        folder, shape = Path(temporary), SHAPES[args.shape]
        write_model(folder / "model", args.shape, 131_072)
        write_heads(folder / "heads.json", shape["num_hidden_layers"], shape["num_attention_heads"])
        sizes = ("tokens", "part", "parts", "streams", "chunks", "host_gb", "fork_tokens")
        names = (*sizes, "decode_tokens", "repeats", "forks", "whole_runs")
        stock = [("stock", backend) for backend in args.stock_backend] if "stock" in args.roles else []
        for role, backend in [*((role, "") for role in args.roles if role != "stock"), *stock]:
            out = folder / f"{role}.json"
            options = {
                "role": role,
                "backend": backend,
                "model": folder / "model",
                "heads": folder / "heads.json",
                "out": out,
                "policy": json.dumps(args.policy),
                "engine": json.dumps({**GRAPHS, **arguments_of_ranks(args)}),
                **{name.replace("_", "-"): getattr(args, name) for name in names},
            }
            command = [sys.executable, "-m", "sglang_ext.launch.bench._ltri_engine"]
            command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
            command += ["--batch", *map(str, args.batch)]
            # SGLang loads every plugin that is installed: stock SGLang keeps the one that lets it run without a GPU.
            own = {"SGLANG_PLUGINS": "sglang_ext_cpu"} if role == "stock" else {KERNELS_ENV: args.kernels}
            if subprocess.run(command, check=False, env={**os.environ, **own}).returncode:
                raise RuntimeError(f"the {role} engine failed; its output is above")
            measured = json.loads(out.read_text())
            found[role] = {**found.get(role, {}), backend: measured} if backend else measured
            yield found


def came_back(engine: JsonObject) -> JsonObject:
    """Of what layers asked for during the last long prompt: the share that lay on the GPU, and the bytes that did not.

    Args:
        engine: what `_ltri_engine.reading` found.

    Returns:
        Nothing for an engine without kernels, which keeps no blocks on the GPU.
    """
    if "host_cache" not in engine["after"]:
        return {}
    before, after = (engine[name]["host_cache"] for name in ("before", "after"))
    hits, misses, fetched = (after[name] - before[name] for name in ("hits", "misses", "fetched_bytes"))
    return {"hit_rate": hits / max(1, hits + misses), "fetched_bytes": fetched}


def compare(raw: JsonObject, args: argparse.Namespace) -> list[Figure]:
    """Rows from what the engines measured."""
    ours, settings, figures = raw.get("ltri"), Ltri(**args.policy), []
    if ours is None:
        return []
    sizes = f"window {settings.window}, {settings.retrieved} blocks of {settings.block}, chunk {settings.chunk}"
    name, whole = f"a prompt of {args.tokens} tokens, whole engine, {sizes}", Timing.of(ours["whole"])
    aim = WHOLE_SECONDS * args.tokens / WHOLE_TOKENS
    notes = came_back(ours)
    figures.append(at_most(name, whole, aim, f"{WHOLE_SECONDS:.0f} s of {WHOLE_TOKENS} tokens", 1.0, notes=notes))
    if "voted" in raw:
        seen = Timing.of(raw["voted"]["whole"])
        what = f"{settings.renewed} new blocks a chunk"
        figures.append(
            at_most(f"{name}, blocks as the votes give", seen, whole.median, what, None, notes=came_back(raw["voted"]))
        )
    if "streaming_llm" in raw:
        beside = Timing.of(raw["streaming_llm"]["whole"]).median
        figures.append(at_most(name, whole, beside, "StreamingLLM with as many visible tokens", 1.15))
    if len(ours["parts"]) > 1 and len(ours["parts"][0]) > 2:  # one conversation has no spread
        second, last = (Timing.of([run[number] for run in ours["parts"]]) for number in (1, -1))
        name = f"the last {args.part} of {args.part * args.parts} tokens, whole engine, {sizes}"
        first = f"the first {args.part} with a full window"
        figures.append(at_most(name, last, second.median, first, 1.05, notes={"parts_s": ours["parts"]}))
    name = f"another question about a document of {args.tokens} tokens, to the first token"
    queued, ends = (Timing.of(ours["fork"][key]) for key in ("from the queue", "end to end"))
    figures.append(
        at_most(f"{name}, from the scheduler's queue", queued, FORK_SECONDS, f"{FORK_SECONDS * 1e3:.0f} ms", 1.0)
    )
    figures.append(at_least(f"{name}, end to end", ends, "reading the document", whole, None))
    if "stock" in raw:
        stocks = stock_engines(raw["stock"])
        name = f"another question about a document of {args.fork_tokens} tokens, end to end"
        engine, ends, others = fastest({each["backend"]: each["short_fork"]["end to end"] for each in stocks})
        floor, mine = f"{engine}, which has all of it cached", Timing.of(ours["short_fork"]["end to end"])
        figures.append(at_most(name, mine, ends.median, floor, None, notes=others))
        for batch, seconds in ours["decode"].items():
            engine, step, others = fastest({each["backend"]: each["decode"][batch] for each in stocks})
            floor, aim = f"over {stocks[0]['kept']} tokens, {engine}", DECODING.get(int(batch))
            name = f"a decoding step, batch {batch}, whole engine, {sizes}"
            figures.append(at_most(name, Timing.of(seconds), step.median, floor, aim, notes=others))
    return figures
