"""`sglang-ext demo`: one pool, five ways to answer from it, one table. Every figure in it is measured in the run.

The server is a real one (`sglang-ext serve` in a process of its own, asked over HTTP). The five methods get the same
questions, the same demonstrations in the same tokens, the same grammar of labels and the same number of requests at a
time:

- DBSA: a share of the pool's blocks, retrieved and stitched by the server;
- Fixed ICL: the whole pool as one dense prompt, whose prefix SGLang's radix cache keeps;
- RetICL by example: the demonstrations that BM25 finds for the question, as many as the share has, as a dense prompt,
  nothing cached; it is what the DBSA paper calls RetICL;
- RetICL by block: the demonstrations of the blocks that DBSA selects, as a dense prompt, nothing cached;
- zero-shot: the question alone, nothing cached.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ext.launch import demo_data
from sglang_ext.launch.answers import counted
from sglang_ext.launch.demo_data import DemoTask, Example
from sglang_ext.launch.demo_methods import Bench, MethodRow
from sglang_ext.launch.demo_server import served
from sglang_ext.launch.serve import REFERENCE_MODEL
from sglang_ext.types import JsonObject

if TYPE_CHECKING:
    from sglang_ext.names import Tokenizer


Log = Callable[[str], None]


# ---- the task -------------------------------------------------------------------------------------------------------


def fill(candidates: Sequence[Example], tokenizer: Tokenizer, pool_tokens: int) -> list[Example]:
    """The first candidates that fit in `pool_tokens` tokens together; at least one.

    Raises:
        ValueError: not even the first one fits.
    """
    from sglang_ext.config import PoolOptions

    options = PoolOptions()
    texts = [options.render(item["input"], item["output"]) + options.separator for item in candidates]
    chosen, total = [], 0
    for item, ids in zip(candidates, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True):
        total += len(ids)
        if total > pool_tokens:
            break
        chosen.append(item)
    if not chosen:
        raise ValueError(f"the first demonstration has {total} tokens, --pool-tokens is {pool_tokens}: raise it")
    return chosen


def make_task(data: str | None, queries: int, pool_tokens: int, seed: int, tokenizer: Tokenizer) -> DemoTask:
    """The generated task, or one from a JSON-lines file split by `seed`.

    Queries whose label no demonstration shows are left out and counted.
    """
    if data is None:
        name = "generated: questions to a library, 12 intents"
        candidates, asked = demo_data.generate(40 * len(demo_data.INTENTS), queries, seed)
        candidates = demo_data.take_turns(candidates)
    else:
        name = Path(data).name
        # Twice as many as wanted, since those without a demonstration of their label go.
        candidates, asked = demo_data.split(demo_data.read(data), 2 * queries, seed)
    demonstrations = fill(candidates, tokenizer, pool_tokens)
    shown = {example["output"] for example in demonstrations}
    possible = [example for example in asked if example["output"] in shown]
    if not possible:
        raise ValueError(
            f"{name}: no query has a label that a demonstration shows; raise --pool-tokens ({pool_tokens})"
        )
    return DemoTask(name, demonstrations, possible[:queries], len(asked) - len(possible))


# ---- output ---------------------------------------------------------------------------------------------------------

HEADER = ("method", "accuracy", "requests/s", "prompt tokens", "cached tokens", "setup (s)")


def table(rows: Sequence[MethodRow]) -> str:
    """The rows as one table, in Markdown with aligned columns."""
    cells = [HEADER] + [
        (
            row.method,
            f"{row.accuracy:.3f}",
            f"{row.requests_per_second:.1f}",
            f"{row.prompt_tokens:,.0f}",
            f"{row.cached_tokens:,.0f}",
            f"{row.setup_seconds:.2f}",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADER))]

    def line(values: Sequence[str]) -> str:
        padded = [values[0].ljust(widths[0])] + [
            text.rjust(width) for text, width in zip(values[1:], widths[1:], strict=True)
        ]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2)] + ["-" * (width + 1) + ":" for width in widths[1:]]) + "|"
    return "\n".join([line(cells[0]), rule, *(line(values) for values in cells[1:])])


def machine() -> str:
    """Versions and the device, in one line."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"no GPU, {os.cpu_count()} cores"
    names = ("sglang-ext", "sglang", "torch", "transformers")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return f"{versions}, Python {platform.python_version()}, {platform.machine()}, {device}"


# ---- command line ---------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sglang-ext demo`."""
    parser.add_argument(
        "--data", metavar="FILE.jsonl", help='your own examples, {"input", "output"} a line, split in two'
    )
    parser.add_argument("--queries", type=int, default=250, help="questions asked of each method (default: 250)")
    parser.add_argument("--pool-tokens", type=int, default=4096, help="size of the pool, at most (default: 4096)")
    parser.add_argument("--block-size", type=int, default=10, help="demonstrations in a block (default: 10)")
    parser.add_argument("--ratio", type=float, default=0.3, help="share of the blocks a question reads (default: 0.3)")
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time, in every method (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the generated data, or of the split (default: 0)")
    parser.add_argument(
        "--model", default=str(REFERENCE_MODEL), help="a model's folder or name (default: the embedded one)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures and every answer to FILE")


def _check(args: argparse.Namespace) -> None:
    for name in ("queries", "pool_tokens", "block_size", "concurrency"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least 1")
    if not 0 < args.ratio <= 1:
        raise ValueError(f"--ratio {args.ratio}: expected a share of the pool's blocks, above 0 and at most 1")


def run(args: argparse.Namespace, log: Log) -> JsonObject:
    """Run the demo; returns what `--json` writes."""
    from transformers import AutoTokenizer

    _check(args)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    task = make_task(args.data, args.queries, args.pool_tokens, args.seed, tokenizer)
    # Room for the pool twice (stitched blocks and the dense prompt) and for every request's own dense prompt.
    kv_tokens = max(32768, (2 + args.concurrency) * args.pool_tokens + 4096)
    log("starting the server ...")
    begin = time.perf_counter()
    with served(args.model, kv_tokens) as server:
        started = time.perf_counter() - begin
        log(f"server up after {started:.1f} s; encoding {len(task.demonstrations)} demonstrations ...")
        bench = Bench(server, task, tokenizer, args.ratio, args.concurrency, block_size=args.block_size)
        rows = []
        for method in bench.methods:
            row = method()
            log(f"{row.method}: {row.queries} queries in {row.seconds:.1f} s")
            rows.append(row)
    return {
        "model": "the embedded one" if args.model == str(REFERENCE_MODEL) else args.model,
        "data": task.name,
        "machine": machine(),
        "demonstrations": len(task.demonstrations),
        "labels": task.labels,
        "pool_tokens": bench.info["tokens"],
        "blocks": len(bench.blocks),
        "queries": len(task.queries),
        "left_out": task.left_out,
        "concurrency": args.concurrency,
        "server_start_seconds": started,
        "rows": [
            {**asdict(row), "accuracy": row.accuracy, "requests_per_second": row.requests_per_second} for row in rows
        ],
        "table": table(rows),
    }


def describe(result: JsonObject) -> str:
    """The table with what one must know to read it."""
    left_out = f" ({result['left_out']} more left out: no demonstration has their label)" if result["left_out"] else ""
    return (
        f"{result['machine']}\n"
        f"model: {result['model']}\n"
        f"data: {result['data']}; pool: {result['demonstrations']} demonstrations, {len(result['labels'])} labels,"
        f" {result['pool_tokens']:,} tokens in {result['blocks']} blocks; chance {1 / len(result['labels']):.3f}\n"
        f"{result['queries']} queries{left_out}, {result['concurrency']} at a time; in every row the answer is"
        " constrained to the pool's labels;\nRetICL and zero-shot prompts are sent uncached;"
        f" the server took {result['server_start_seconds']:.1f} s to start\n\n"
        f"{result['table']}"
    )


def main(args: argparse.Namespace) -> int:
    """Run the demo and print its table; 1 when some answer failed."""
    # Whoever ends the demo (a time limit, say) ends its server too: as an exception, not at once.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    result = run(args, lambda text: print(text, file=sys.stderr, flush=True))
    print(describe(result))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    failed = [row for row in result["rows"] if row["failures"]]
    for row in failed:
        count, queries = len(row["failures"]), row["queries"]
        print(
            f"{row['method']}: {count} of {queries} answers failed and count as wrong: {counted(row['failures'])}",
            file=sys.stderr,
        )
    return 1 if failed else 0
