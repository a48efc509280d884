"""``sglang-ext bench cascade``: the cascading KV cache beside dense attention and StreamingLLM.

Two halves, both in Llama-3.1-8B's shape, bfloat16, on one NVIDIA GPU:

- kernels: one attention layer, a long prompt stride by stride, the cache update alone, decoding with a full window;
- engine: a prompt of a million tokens through a KV pool of 64K slots, against stock SGLang's dense prefill.

Every row names its baseline, measured in the same run. No kernel is timed whose output was not checked before. Each
half has a results file of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from sglang_ext.attention.choice import KERNELS, KERNELS_ENV
from sglang_ext.launch.bench._cascade_engine import ROOM
from sglang_ext.launch.bench._record import (
    Figure,
    Timing,
    arguments_of_ranks,
    at_least,
    at_most,
    fastest,
    of_engines,
    results_folder,
    save,
    stock_backends,
    stock_engines,
    table,
    tensor_parallel,
)
from sglang_ext.launch.bench._shapes import SHAPES, write_model
from sglang_ext.policies.cascade import Cascade
from sglang_ext.types import Json, JsonObject

RESULTS = Path(__file__).resolve().parent / "results"
HALVES = ("kernels", "engine")
WHOLE_SECONDS, WHOLE_TOKENS = 75.0, 2**20
"""What a prompt of a million tokens may take; of other lengths, in proportion."""
GRAPHS = {"cuda_graph_max_bs_decode": 8, "cuda_graph_backend_prefill": "disabled"}
"""Both engines': one request at a time decodes, and chunks of a prompt are larger than any prefill graph."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=HALVES, help="one half (default: both)")
    parser.add_argument("--tokens", type=int, default=2**20, help="tokens of the long prompt (default: 1048576)")
    parser.add_argument("--window", type=int, default=16384, help="tokens kept behind the sinks (default: 16384)")
    parser.add_argument("--cascades", type=int, default=4, help="sub-caches (default: 4)")
    parser.add_argument("--sinks", type=int, default=64, help="first tokens, always kept (default: 64)")
    parser.add_argument("--stride", type=int, default=4096, help="tokens computed together (default: 4096)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64], metavar="N", help="rows that decode")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b", help="the engine's model")
    parser.add_argument("--slots", type=int, default=2**16, help="KV slots of the engine's pool (default: 65536)")
    parser.add_argument("--part", type=int, default=2**16, help="tokens of a part that is timed (default: 65536)")
    parser.add_argument("--decode-tokens", type=int, default=128, help="decoding steps of the engine (default: 128)")
    parser.add_argument("--repeats", type=int, default=2, help="long prompts (default: 2)")
    parser.add_argument(
        "--dense-tokens",
        type=int,
        default=2**19,
        help="of a prompt that stock SGLang reads, too; its KV cache must have room for them (default: 524288)",
    )
    stock_backends(parser)
    parser.add_argument(
        "--kernels", choices=KERNELS, default="flashinfer", help=f"of our engine, {KERNELS_ENV} (default: flashinfer)"
    )
    tensor_parallel(parser)
    parser.add_argument("--engine", type=json.loads, default={}, help="more arguments of both engines, as JSON")
    parser.add_argument(
        "--out", type=results_folder, default=RESULTS, help="folder of the JSON files (default: launch/bench/results)"
    )
    parser.add_argument("--commit", default="", help="commit to record (default: ask git)")


def main(args: argparse.Namespace) -> int:
    from sglang_ext.launch.bench._cascade_kernels import measure
    from sglang_ext.launch.bench._gpu import require_gpu

    cascade = Cascade(args.window, args.cascades, args.sinks, args.stride)
    if args.only != "engine":
        figures = measure(require_gpu(), cascade, args.tokens, args.batch)
        finish(args.out / "cascade_kernels.json", figures, args.commit)
    if args.only != "kernels":
        if args.tokens < 3 * args.part or args.tokens % args.part or args.part < cascade.sinks + cascade.window:
            raise ValueError(
                f"--tokens {args.tokens} in parts of {args.part}: expected at least three whole parts, each as long as"
                f" sinks + window ({cascade.sinks + cascade.window}), so that the window is full from the second on"
            )
        raw = {**engines(args), "stride_update": stride_updates(args, cascade)}
        name = f"cascade_engine_tp{args.tp}.json" if args.tp > 1 else "cascade_engine.json"
        finish(args.out / name, of_engines(compare(raw, args, cascade), args), args.commit, engine=raw)
    return 0


def stride_updates(args: argparse.Namespace, cascade: Cascade) -> float:
    """Seconds of adding one stride to the sub-caches of all layers of a GPU: streams without scores do it too."""
    import torch

    from sglang_ext.launch.bench._cascade_kernels import stride_update_seconds

    shape, device = SHAPES[args.shape], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers, kv_heads = shape["num_hidden_layers"], max(1, shape["num_key_value_heads"] // args.tp)
    return stride_update_seconds(cascade, layers, kv_heads, device).median


def finish(path: Path, figures: list[Figure], commit: str, **more: Json) -> None:
    """Keep the rows of one half, and print them."""
    save(path, figures, commit=commit, **more)
    print(table(figures))
    print(f"written: {path}", flush=True)


def engines(args: argparse.Namespace) -> JsonObject:
    """Run the engines, one after the other: {"ours": ..., "stock": {backend: ...}}.

    Raises:
        RuntimeError: one of them failed; its output is above.
    """
    found: JsonObject = {"stock": {}}
    with tempfile.TemporaryDirectory(prefix="sglang-ext-bench-") as temporary:
        folder = Path(temporary)
        write_model(folder / "model", args.shape, max(131_072, args.part + args.slots, args.dense_tokens + ROOM))
        sizes = ("window", "cascades", "sinks", "stride")
        names = ("tokens", "part", "slots", *sizes, "decode_tokens", "repeats", "dense_tokens")
        for role, backend in [("ours", ""), *(("stock", backend) for backend in args.stock_backend)]:
            out = folder / f"{role}.json"
            options = {
                "role": role,
                "backend": backend,
                "model": folder / "model",
                "out": out,
                "engine": json.dumps({**GRAPHS, **arguments_of_ranks(args)}),
                **{name.replace("_", "-"): getattr(args, name) for name in names},
            }
            command = [sys.executable, "-m", "sglang_ext.launch.bench._cascade_engine"]
            command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
            # SGLang loads every plugin that is installed: stock SGLang keeps the one that lets it run without a GPU.
            own = {KERNELS_ENV: args.kernels} if role == "ours" else {"SGLANG_PLUGINS": "sglang_ext_cpu"}
            if subprocess.run(command, check=False, env={**os.environ, **own}).returncode:
                raise RuntimeError(f"the {role} engine failed; its output is above")
            measured = json.loads(out.read_text())
            found |= {role: measured} if role == "ours" else {role: {**found[role], backend: measured}}
    return found


def compare(raw: JsonObject, args: argparse.Namespace, cascade: Cascade) -> list[Figure]:
    """Rows from what the engines measured."""
    ours, stocks = raw["ours"], stock_engines(raw["stock"])
    dense, prefill, slower = fastest({stock["backend"]: stock["dense"] for stock in stocks})
    stepping, step, later = fastest({stock["backend"]: stock["decode"] for stock in stocks})
    sizes = f"window {cascade.window}, {cascade.cascades} cascades, stride {cascade.stride}, pool of {args.slots} slots"
    runs, whole = ours["parts"], Timing.of(ours["whole"])
    second, last = Timing.of(run[1] for run in runs).median, Timing.of(run[-1] for run in runs)
    scored = Timing.of(seconds for run in runs for seconds in run[1:]).median
    unscored = Timing.of(ours["unscored"][1:]).median
    updates = raw["stride_update"] * args.part / cascade.stride
    name, notes = f"a prompt of {args.tokens} tokens, whole engine, {sizes}", {"parts_s": ours["parts"]}
    aim = WHOLE_SECONDS * args.tokens / WHOLE_TOKENS
    return [
        at_most(
            f"the last {args.part} of {args.tokens} tokens, whole engine, {sizes}",
            last,
            second,
            f"the first {args.part} with a full window",
            1.1,
            notes=notes,
        ),
        at_most(
            f"scores and cache updates of {args.part} tokens with a full window, whole engine, {sizes}",
            Timing.of([scored - unscored + updates]),
            scored,
            "the strided prefill of these tokens",
            0.25,
            notes={"parts_s": ours["parts"], "unscored_s": ours["unscored"], "updates_s": updates},
        ),
        at_most(name, whole, aim, f"{WHOLE_SECONDS:.0f} s a million tokens", 1.0, notes=notes),
        at_least(
            f"a prompt of {args.dense_tokens} tokens, whole engine, {sizes}",
            Timing.of(ours["dense"]),
            f"dense prefill, {dense}",
            prefill,
            None,
            notes=slower,
        ),
        at_most(
            f"a decoding step with a full window, whole engine, batch 1, {sizes}",
            Timing.of(ours["decode"]),
            step.median,
            f"over {stocks[0]['kept']} tokens, dense, {stepping}",
            None,
            notes={"conversation_slots": ours["conversation_slots"], **later},
        ),
    ]
