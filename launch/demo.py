"""`sglang-ext demo`: one pool, four ways to answer from it, one table. Every figure in it is measured in the run.

The server is a real one (`sglang-ext serve` in a process of its own, asked over HTTP). The four methods get the same
questions, the same demonstrations in the same tokens, the same grammar of labels and the same number of requests at a
time:

- DBSA: a share of the pool's blocks, retrieved and stitched by the server;
- Fixed ICL: the whole pool as one dense prompt, whose prefix SGLang's radix cache keeps;
- RetICL: the demonstrations of the blocks that the same retriever selects, as a dense prompt, nothing cached;
- zero-shot: the question alone, nothing cached.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import requests

from sglang_ext.launch import demo_data
from sglang_ext.launch.answers import completed, counted, failure
from sglang_ext.launch.client import PoolClient, ServerError
from sglang_ext.launch.demo_data import Example, Task
from sglang_ext.launch.serve import REFERENCE_MODEL

POOL = "demo"
START_SECONDS = 600.0  # for the server; a model of many gigabytes takes minutes to load

Log = Callable[[str], None]
Ask = Callable[[str, str], tuple[dict[str, Any], list[int]]]  # (question, cache key) -> (answer, blocks selected)


@dataclass(frozen=True)
class Row:
    """One line of the table. Means are over the queries; times are wall-clock seconds.

    Attributes:
        setup_seconds: what is done once: encoding the pool (DBSA), prefilling it (Fixed ICL), indexing it (RetICL).
        predictions: the answer to every query, in order; None where there is none.
        failures: why there is none, of each query without an answer. They count as wrong.
        blocks: the blocks each query selected, in view order; empty for methods that select none.
    """

    method: str
    correct: int
    queries: int
    seconds: float
    prompt_tokens: float
    cached_tokens: float
    setup_seconds: float
    predictions: list[str | None] = field(repr=False)
    blocks: list[list[int]] = field(repr=False)
    failures: list[str] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        return self.correct / self.queries

    @property
    def requests_per_second(self) -> float:
        return self.queries / self.seconds


# ---- the server -----------------------------------------------------------------------------------------------------


class Server:
    """A running server, asked from several threads; each has its own connection."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._local = threading.local()

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """One request; JSON in, JSON out. Raises ServerError with the server's own words."""
        if not hasattr(self._local, "client"):
            self._local.client = PoolClient(self.url)
        return self._local.client.call(method, path, body)

    def is_up(self) -> bool:
        """Whether the server has loaded its model and finished its warm-up."""
        try:
            return requests.get(self.url + "/health", timeout=5).status_code == 200
        except requests.RequestException:
            return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _server_command(model: str, port: int, kv_tokens: int, extra: Sequence[str]) -> list[str]:
    import torch

    command = [sys.executable, "-m", "sglang_ext.launch.cli", "serve", model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    if not torch.cuda.is_available():
        command += ["--dtype", "float32", "--max-total-tokens", str(kv_tokens)]
    return [*command, *extra]


@contextmanager
def served(model: str, kv_tokens: int, extra: Sequence[str] = ()) -> Iterator[Server]:
    """A server in a process of its own, stopped with everything it started when the block ends.

    Args:
        kv_tokens: size of the KV cache in tokens on a machine without a GPU; on a GPU SGLang sizes it.
        extra: further SGLang flags.

    Raises:
        ServerError: the server ended, was not up in time, or failed at a request; with the end of its log.
    """
    port = _free_port()
    with tempfile.NamedTemporaryFile("w+", suffix=".log", prefix="sglang-ext-demo-", errors="replace") as log:
        process = subprocess.Popen(
            _server_command(model, port, kv_tokens, extra),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            server = Server(f"http://127.0.0.1:{port}")
            deadline = time.monotonic() + START_SECONDS
            while not server.is_up():
                ended = process.poll()
                if ended is not None or time.monotonic() > deadline:
                    what = (
                        f"ended with status {ended}" if ended is not None else f"is not up after {START_SECONDS:.0f} s"
                    )
                    raise ServerError(f"the server {what}; the end of its log:\n{_tail(log)}")
                time.sleep(0.3)
            try:
                yield server
            except ServerError as error:
                raise ServerError(f"{error}; the end of the server's log:\n{_tail(log)}") from error
        finally:
            _stop(process)


def _tail(log: IO[str]) -> str:
    """The last lines of a log that another process writes."""
    log.seek(0)
    return "".join(log.readlines()[-40:])


def _stop(process: subprocess.Popen[Any]) -> None:
    """End the server and its workers: they are one process group."""
    for sign, patience in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait(10)


# ---- the four methods -----------------------------------------------------------------------------------------------


class Bench:
    """One task on one server: the pool's tokens, the label constraint, and the clock.

    Creating it encodes the pool (and times that).
    """

    def __init__(
        self, server: Server, task: Task, tokenizer: Any, ratio: float, block_size: int, concurrency: int
    ) -> None:
        from sglang_ext.config import PoolOptions
        from sglang_ext.serving.grammar import label_grammar

        self.server, self.task, self.tokenizer = server, task, tokenizer
        self.ratio, self.concurrency = ratio, concurrency
        options = PoolOptions(block_size=block_size)
        begin = time.perf_counter()
        body = {"demonstrations": task.demonstrations, "block_size": block_size}
        server.call("PUT", f"/v1/pools/{POOL}", body)
        self.encode_seconds = time.perf_counter() - begin

        self.info = server.call("GET", f"/v1/pools/{POOL}?tokens=true")
        self.blocks: list[list[int]] = [block["token_ids"] for block in self.info["blocks"]]
        self.options = options
        self.lead = options.render_query("")[1]
        self.end = options.template.split("{output}", 1)[1] + options.separator
        self.grammar = label_grammar(self.info["labels"], self.lead, self.end)
        longest = max(len(self._ids(self.lead + label + self.end)) for label in self.info["labels"])
        # A label may also be spelled in more tokens than the tokenizer's own choice: each is at least one character.
        self.new_tokens = max(2 * longest, longest + 8)
        header = len(self.blocks[0]) - sum(self._demonstration_lengths(0))
        self.header = self.blocks[0][:header]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _demonstration_lengths(self, block: int) -> list[int]:
        return [end - start for start, end in self.info["blocks"][block]["spans"]]

    def _query_ids(self, query: str) -> list[int]:
        return self._ids(self.options.render_query(query)[0])

    def _dense(self, prefix: list[int], query: str, extra_key: str | None) -> dict[str, Any]:
        """A plain request of stock SGLang; with an `extra_key` of its own nothing of it is cached."""
        sampling = {"temperature": 0.0, "max_new_tokens": self.new_tokens, "ebnf": self.grammar, "stop": [self.end]}
        body: dict[str, Any] = {"input_ids": prefix + self._query_ids(query), "sampling_params": sampling}
        if extra_key is not None:
            body["extra_key"] = extra_key
        answer: dict[str, Any] = self.server.call("POST", "/generate", body)
        return answer

    def dbsa(self) -> Row:
        """A share of the blocks, retrieved and stitched by the server."""

        def ask(query: str, _key: str) -> tuple[dict[str, Any], list[int]]:
            custom = {"pool": POOL, "ratio": self.ratio, "constrain": "labels"}
            sampling = {"temperature": 0.0, "max_new_tokens": self.new_tokens, "custom_params": custom}
            answer = self.server.call("POST", "/generate", {"text": query, "sampling_params": sampling})
            return answer, answer["meta_info"].get("sglang_ext", {}).get("blocks", [])

        return self._measure(f"DBSA {self.ratio:.0%}", ask, self.encode_seconds)

    def fixed_icl(self) -> Row:
        """The whole pool as a dense prompt, kept by the radix cache."""
        prefix = [token for block in self.blocks for token in block]
        begin = time.perf_counter()
        once = {"max_new_tokens": 1}
        completed(self.server.call("POST", "/generate", {"input_ids": prefix, "sampling_params": once}))
        prefill = time.perf_counter() - begin
        return self._measure("Fixed ICL", lambda query, _key: (self._dense(prefix, query, None), []), prefill)

    def ret_icl(self) -> Row:
        """The selected blocks' demonstrations as a dense prompt, prefilled anew for each question."""
        from sglang_ext.retrievers import registry
        from sglang_ext.retrievers.selection import budget, select

        sinks = min(self.options.sink_blocks, len(self.blocks))
        texts = {
            f"d{at}": self.options.render(item["input"], item["output"])
            for at, item in enumerate(self.task.demonstrations)
        }
        begin = time.perf_counter()
        retriever = registry.get("bm25").build(
            [self.options.separator.join(texts[id] for id in block["demonstrations"]) for block in self.info["blocks"]]
        )
        indexing = time.perf_counter() - begin
        chosen = budget(self.ratio, None, total=len(self.blocks), sinks=sinks)

        def ask(query: str, key: str) -> tuple[dict[str, Any], list[int]]:
            blocks = [int(block) for block in select(retriever.score(query), chosen, sinks, "pool")]
            prefix = [token for block in blocks for token in self.blocks[block]]
            return self._dense(prefix, query, key), blocks

        return self._measure("RetICL", ask, indexing)

    def zero_shot(self) -> Row:
        """The question alone."""
        return self._measure("zero-shot", lambda query, key: (self._dense(self.header, query, key), []), 0.0)

    def _measure(self, method: str, ask: Ask, setup: float) -> Row:
        """Answer every query, `concurrency` at a time, after a warm-up that is not counted.

        Raises:
            ServerError: not one query was answered.
        """
        queries = [example["input"] for example in self.task.queries]
        keys = [f"demo-{method}-{at}" for at in range(len(queries))]
        with ThreadPoolExecutor(self.concurrency) as pool:
            warm = [f"warm up {at}" for at in range(self.concurrency)]
            list(pool.map(partial(_answered, ask), warm, [f"demo-{method}-{text}" for text in warm]))
            begin = time.perf_counter()
            answers = list(pool.map(partial(_answered, ask), queries, keys))
            seconds = time.perf_counter() - begin
        reasons = [failure(answer) for answer, _ in answers]
        predictions = [
            answer["text"].strip() if reason is None else None
            for (answer, _), reason in zip(answers, reasons, strict=True)
        ]
        correct = sum(
            said == example["output"].strip() for said, example in zip(predictions, self.task.queries, strict=True)
        )
        metas = [answer["meta_info"] for (answer, _), reason in zip(answers, reasons, strict=True) if reason is None]
        failures = [reason for reason in reasons if reason is not None]
        if not metas:
            raise ServerError(f"{method}: all {len(failures)} answers failed: {counted(failures)}")
        return Row(
            method,
            correct,
            len(queries),
            seconds,
            sum(meta["prompt_tokens"] for meta in metas) / len(metas),
            sum(meta["cached_tokens"] for meta in metas) / len(metas),
            setup,
            predictions,
            [blocks for _, blocks in answers],
            failures,
        )


def _answered(ask: Ask, query: str, key: str) -> tuple[dict[str, Any], list[int]]:
    """What `ask` gives; where the server refuses, that as its answer."""
    try:
        return ask(query, key)
    except ServerError as error:
        return {"error": str(error)}, []


# ---- the task -------------------------------------------------------------------------------------------------------


def fill(candidates: Sequence[Example], tokenizer: Any, pool_tokens: int) -> list[Example]:
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


def make_task(data: str | None, queries: int, pool_tokens: int, seed: int, tokenizer: Any) -> Task:
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
    return Task(name, demonstrations, possible[:queries], len(asked) - len(possible))


# ---- output ---------------------------------------------------------------------------------------------------------

HEADER = ("method", "accuracy", "requests/s", "prompt tokens", "cached tokens", "setup (s)")


def table(rows: Sequence[Row]) -> str:
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


def run(args: argparse.Namespace, log: Log) -> dict[str, Any]:
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
        bench = Bench(server, task, tokenizer, args.ratio, args.block_size, args.concurrency)
        rows = []
        for method in (bench.dbsa, bench.fixed_icl, bench.ret_icl, bench.zero_shot):
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


def describe(result: dict[str, Any]) -> str:
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
