"""The engine's half of ``sglang-ext bench double_p``: time per output token, clustering, memory of the summaries.

Weights are random but for those of queries and keys, which are made so that keys lie in clusters (`planted_weights`):
over unstructured keys attention is flat, and nothing can be left out. Both engines have the same weights and prompts.

Each engine lives in a process of its own (`main`), so that the two can be resident together and measured in turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sglang_ext.attention.choice import KERNELS_ENV
from sglang_ext.config import DRAFTING
from sglang_ext.launch.answers import completed
from sglang_ext.launch.bench._double_p_planted import planted_weights, prompt_ids
from sglang_ext.launch.bench._double_p_rows import LEVELS
from sglang_ext.launch.bench._record import Figure, Timing, arguments_of_ranks, at_least, at_most, fastest, of_engines
from sglang_ext.launch.bench._shapes import SHAPES, write_model
from sglang_ext.launch.bench._turns import STOCK, Process, say, serve
from sglang_ext.policies.double_p import DoubleP
from sglang_ext.types import JsonObject

if TYPE_CHECKING:
    from sglang_ext.cache.cluster_pool import PooledRun
    from sglang_ext.names import Engine


SHORT = 16
"""Output tokens of the run whose time is taken off, with all that does not belong to a step."""
OURS = ""
"""Stands where the backend of a stock engine stands."""

TIME_AIM = {"flat": None, "middle": 2.4, "peaked": 2.4}
"""How many times faster than dense attention an output token is to be, by level, in the largest batch."""


# ---- one engine ----


class Served:
    """An engine and its prompts: what a process of this half does."""

    def __init__(self, engine: Engine, prompts: Sequence[list[int]]) -> None:
        self.engine, self.prompts = engine, prompts

    def prefill(self) -> JsonObject:
        """Seconds of each prompt, one after the other, each with one token of answer."""
        times = []
        for ids in self.prompts:
            begin = time.perf_counter()
            completed(self.engine.generate(input_ids=ids, sampling_params=_sampling(1)))
            times.append(time.perf_counter() - begin)
        return {"seconds": times}

    def decode(self, tokens: int, rows: int | None = None) -> JsonObject:
        """Seconds of answers of so many tokens to the first prompts (all) at once, and what of these was cached."""
        begin = time.perf_counter()
        answers = self.engine.generate(input_ids=list(self.prompts[:rows]), sampling_params=_sampling(tokens))
        seconds = time.perf_counter() - begin
        completed(answers)
        infos = [answer["meta_info"] for answer in answers]
        rounds = max(info.get("spec_verify_ct", 0) for info in infos)  # none on a server that does not draft
        return {"seconds": seconds, "cached": [info["cached_tokens"] for info in infos], "rounds": rounds}

    def weights(self, folder: str, flush: bool) -> JsonObject:
        from sglang_ext import compat

        compat.load_weights(self.engine, folder, flush=flush)
        return {}

    def state(self) -> JsonObject:
        """What the plugin says of itself in /server_info; empty for stock SGLang."""
        found: JsonObject = self.engine.get_server_info()["internal_states"][0].get("sglang_ext", {})
        return found


def _sampling(tokens: int) -> JsonObject:
    return {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--options", type=json.loads, required=True, help="arguments of the engine")
    parser.add_argument("--ours", action="store_true")
    parser.add_argument("--config", type=json.loads, required=True, help="of Double-P; stock SGLang has its prompts")
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--replies", type=int, required=True, help="file descriptor")
    args = parser.parse_args(argv)
    config = DoubleP(**args.config)
    prompts = [prompt_ids(args.length, args.vocabulary, config, seed) for seed in range(args.rows)]
    if args.ours:
        from sglang_ext import Engine as OurEngine

        engine: Engine = OurEngine(policy=args.config, **args.options)
    else:
        from sglang import Engine as SglangEngine

        engine = SglangEngine(**args.options)
    served = Served(engine, prompts)
    serve(served, args.replies)
    engine.shutdown()
    return 0


# ---- both ----


def measure(
    device: torch.device,
    args: argparse.Namespace,
    config: DoubleP,
) -> tuple[list[Figure], JsonObject]:
    """All rows of the engine's half, and what they were made of.

    Args:
        device: CUDA, or the CPU for trying the benchmark itself.
        args: of `launch.bench.double_p`.
        config: of the policy.
    """
    raw: JsonObject = {"clustering": clustering(device, args, config)}
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the engines' now
    raw |= engines(device, args, config)
    return of_engines(compare(raw), args), raw


def clustering(device: torch.device, args: argparse.Namespace, config: DoubleP) -> JsonObject:
    """Seconds of clustering one prompt's keys in all layers and heads, by what does it in the engine; and memory.

    Keys are normal(0, 1): k-means runs a fixed number of rounds, whatever the keys are. With several GPUs, the heads
    are those of one, as each clusters its own beside the others.
    """
    from sglang_ext.cache.cluster_pool import ClusterMemory
    from sglang_ext.kernels.kmeans import kmeans_layers as cluster

    shape = SHAPES[args.shape]
    count = args.layers or shape["num_hidden_layers"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cuda":
        from sglang_ext.kernels.kmeans.dispatch import kmeans_layers as cluster
    size = (args.engine_length, max(1, shape["num_key_value_heads"] // args.tp), shape["head_dim"])

    def cache() -> torch.Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    caches = {layer: (cache(), cache()) for layer in range(count)}
    memory = ClusterMemory(caches, config, cluster)
    slots = torch.arange(args.engine_length, dtype=torch.int32, device=device)
    begin, end = config.clustered(args.engine_length)
    segments = config.due(begin, end, True)
    times = []
    runs: list[PooledRun] = []
    for _ in range(args.repeats + 1):
        runs.clear()  # the memory has room for one prompt
        _wait(device)
        start = time.perf_counter()
        runs += filter(None, [memory.make(slots[low:high], low) for low, high in segments])
        if len(runs) < len(segments):
            raise ValueError(f"room for {len(runs)} of the {len(segments)} runs of a prompt's clusters: expected all")
        memory.settle()
        _wait(device)
        times.append(time.perf_counter() - start)
    kv = sum(tensor.numel() * tensor.element_size() for pair in caches.values() for tensor in pair)
    pools = memory.layers.values()
    held = sum(x.numel() * x.element_size() for pool in pools for x in vars(pool).values())
    return {
        "seconds": times[1:],
        "layers": count,
        "tokens": sum(run.tokens for run in runs),
        "summary_bytes": sum(run.bytes for run in runs),
        "allocated_bytes": held,
        "kv_bytes": kv,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def engines(device: torch.device, args: argparse.Namespace, config: DoubleP) -> JsonObject:
    """Prefill every prompt once in all engines, then decode over them from the cache.

    Stock SGLang runs on each of some attention backends, an engine each. One engine after the other, or, where the
    memory is enough for all (`--together`), in turns.
    """
    found: JsonObject = {
        "rows": max(args.engine_batch),
        "length": args.engine_length,
        "tokens": args.decode_tokens,
        "together": args.together,
        "drafted": args.drafted,
        "stock": {backend: {"decode": []} for backend in args.stock_backend},
        "ours": {"decode": {name: [] for name in args.levels}, "selected": {name: [] for name in args.levels}},
    }
    with tempfile.TemporaryDirectory(prefix="sglang-ext-bench-") as temporary, ExitStack() as stack:
        folders = _models(Path(temporary), args)
        first = args.levels[0]

        @contextmanager
        def started(backend: str) -> Iterator[Process]:
            """Stock SGLang's engine on a backend; ours for none."""
            name, kept = f"stock on {backend}" if backend else "ours", found["stock"].get(backend, found["ours"])
            process = Process(name, __name__, *_words(backend, folders[first], device, args, config))
            try:
                process.ask("weights", folder=str(folders[first]), flush=True)
                say(f"{name}: started")
                kept["prefill"] = process.ask("prefill")["seconds"]
                say(f"{name}: prefill {kept['prefill']}")
                compile_all(process)
                yield process
                kept["state"] = process.ask("state")
            finally:
                process.stop()

        def compile_all(process: Process) -> None:
            """Compile, cluster what is left, and capture what was not yet."""
            for rows in args.engine_batch:
                process.ask("decode", tokens=SHORT, rows=rows)

        def ask_for(level: str, process: Process) -> None:
            process.ask("weights", folder=str(folders[level]), flush=False)
            compile_all(process)

        def stock_turn(backend: str, process: Process) -> None:
            for rows in args.engine_batch:
                found["stock"][backend]["decode"].append(_turn(process, args.decode_tokens, rows))

        def our_turn(level: str, process: Process) -> None:
            for rows in args.engine_batch:
                found["ours"]["decode"][level].append(_turn(process, args.decode_tokens, rows))
                found["ours"]["selected"][level].append(process.ask("state").get("last_selection", {}))

        if args.together:
            stocks = {backend: stack.enter_context(started(backend)) for backend in args.stock_backend}
            ours = stack.enter_context(started(OURS))
            for level in args.levels:
                ask_for(level, ours)
                for _ in range(args.repeats):
                    for backend, stock in stocks.items():
                        stock_turn(backend, stock)
                    our_turn(level, ours)
        else:
            for backend in args.stock_backend:
                with started(backend) as stock:
                    for _ in range(args.repeats):
                        stock_turn(backend, stock)
            with started(OURS) as ours:
                for level in args.levels:
                    ask_for(level, ours)
                    for _ in range(args.repeats):
                        our_turn(level, ours)
    return found


def _turn(process: Process, tokens: int, rows: int) -> JsonObject:
    short, long = (process.ask("decode", tokens=count, rows=rows) for count in (SHORT, SHORT + tokens))
    rounds = long["rounds"] - short["rounds"]
    seconds = (long["seconds"] - short["seconds"]) / (rounds or tokens)
    say(f"{process.name}: {seconds * 1e3:.3f} ms a {'round' if rounds else 'token'} of {rows} requests")
    return {"seconds": seconds, "rows": rows, "short": short, "long": long}


def _models(folder: Path, args: argparse.Namespace) -> dict[str, Path]:
    """A model folder for each level; the first has the key projections."""
    found = {}
    for name in args.levels:
        found[name] = folder / name
        write_model(found[name], args.shape, max(131_072, 2 * args.engine_length), args.layers)
        planted_weights(found[name], LEVELS[name], keys=name == args.levels[0])
    return found


def _words(
    backend: str, model: Path, device: torch.device, args: argparse.Namespace, config: DoubleP
) -> tuple[list[str], dict[str, str]]:
    """(arguments, environment) of a process: stock SGLang's on a backend, or ours for none."""
    runs = (args.repeats + 2) * (2 * SHORT + args.decode_tokens) * len(args.levels) * len(args.engine_batch)
    options: JsonObject = {
        "model_path": str(model),
        "load_format": "dummy",
        "log_level": "warning",
        "page_size": 1,
        "random_seed": 0,
        "max_running_requests": max(args.engine_batch),
        "max_total_tokens": max(args.engine_batch) * (args.engine_length + runs + 64),
        "attention_backend": backend or "double_p",
        **({"cuda_graph_max_bs_decode": max(args.engine_batch)} if device.type == "cuda" else {}),
        **arguments_of_ranks(args),
    }
    if args.drafted and not backend:
        options |= {"speculative_algorithm": DRAFTING, "speculative_num_draft_tokens": args.drafted + 1}
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    given = {
        "options": json.dumps(options),
        "config": json.dumps(vars(config)),
        "length": args.engine_length,
        "rows": max(args.engine_batch),
        "vocabulary": vocabulary,
    }
    words = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    if not backend:
        return [*words, "--ours"], {KERNELS_ENV: args.kernels or ("flashinfer" if device.type == "cuda" else "triton")}
    return words, STOCK


def compare(raw: JsonObject) -> list[Figure]:
    """Rows from what was measured.

    Raises:
        ValueError: prompts were not in the cache while decoding, or a step did not read clusters.
    """
    ours, clusters = raw["ours"], raw["clustering"]
    # Files of one stock engine name its backend beside it.
    stocks = {raw["stock backend"]: raw["stock"]} if "stock backend" in raw else raw["stock"]
    length, most = raw["length"], raw["rows"]
    turns = "in turns" if raw["together"] else "one engine after the other"
    runs = [run for stock in stocks.values() for run in stock["decode"]]
    _check_cached([*runs, *(run for runs in ours["decode"].values() for run in runs)], length)
    figures = []
    for rows in sorted({run.get("rows", most) for run in runs}, reverse=True):
        where = f"{rows} requests of {length} tokens, {clusters['layers']} layers"
        of_stock = {backend: _seconds(each["decode"], rows, most) for backend, each in stocks.items()}
        name, dense, others = fastest(of_stock)
        for level, runs in ours["decode"].items():
            selected = [each for run, each in zip(runs, ours["selected"][level], strict=True)
                        if run.get("rows", most) == rows]  # fmt: skip
            if not all(each.get("rows") == rows for each in selected):
                raise ValueError(
                    f"level {level}: steps over clusters had {selected} rows, expected {rows}: not compared"
                )
            exact, approx = (
                sum(each[key] for each in selected) / len(selected) for key in ("exact_tokens", "approximated_clusters")
            )
            kept = f"{level} planted keys, {exact:.2f} exact, {approx:.2f} by centroid"
            notes = {"exact": exact, "approx": approx, "output_tokens": raw["tokens"], "order": turns, **others}
            mine, aim = Timing.of(_seconds(runs, rows, most)), TIME_AIM[level] if rows == most else None
            if drafted := raw.get("drafted"):  # how many tokens a round gives, random weights do not say
                words = f"a round of {drafted} drafts and their verification, which gives 1 to {drafted + 1} tokens"
                step = f"a step, which gives one, {name}"
                figures.append(at_most(f"{words}, {where} ({kept})", mine, dense.median, step, None, notes=notes))
            else:
                words = f"time per output token, {where} ({kept})"
                figures.append(at_least(words, mine, name, dense, aim, notes=notes))
    # The first prompt waits for compilers.
    mine = Timing.of(ours["prefill"][1:] or ours["prefill"])
    name, theirs, others = fastest({backend: each["prefill"][1:] or each["prefill"] for backend, each in
                                     stocks.items()})  # fmt: skip
    note = {"clustered_meanwhile": "all segments but the last, which the first decoding step clusters", **others}
    words = f"prefill of {length} tokens with their clustering, {clusters['layers']} layers, whole engine"
    figures.append(at_least(words, mine, name, theirs, None, notes=note))
    words = f"clustering {length} tokens, {clusters['layers']} layers, all heads"
    spent = Timing.of(clusters["seconds"])
    figures.append(at_most(words, spent, theirs.median, f"prefill of the same, {name}", 0.03))
    words = f"memory of the clusters of {length} tokens"
    note = {"allocated_share": clusters["allocated_bytes"] / clusters["kv_bytes"]}
    held = Timing.of([float(clusters["summary_bytes"])])
    figures.append(
        at_most(words, held, float(clusters["kv_bytes"]), "their keys and values", 0.08, unit="MiB", notes=note)
    )
    return figures


def _seconds(runs: Sequence[JsonObject], rows: int, most: int) -> list[float]:
    """Those of the runs of so many requests; a run that does not say how many had `most`."""
    return [run["seconds"] for run in runs if run.get("rows", most) == rows]


def _check_cached(runs: Sequence[JsonObject], length: int) -> None:
    for run in runs:
        for part in ("short", "long"):
            if min(run[part]["cached"]) < length - 1:
                raise ValueError(
                    f"of prompts of {length} tokens, {run[part]['cached']} were cached: expected all but the last token"
                )


if __name__ == "__main__":
    sys.exit(main())
