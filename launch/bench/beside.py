"""sglang-ext bench beside: another checkout of this package beside the installed one, in turns, on one machine.

It shows whether a change made anything slower. The engines of both checkouts are resident and do the same things
alternately; the kernels' halves of the other benchmarks run alternately, each in a process of its own. A row's ratio
is the other checkout's time over ours, the median of the pairs. A row is met when the interval of its pairs' ratios
reaches 1.00 and the median is at least 0.95.

The other checkout is a folder that holds its `sglang_ext`, for example made by ``git worktree add ../before COMMIT``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

import sglang_ext
from sglang_ext.attention.choice import KERNELS, KERNELS_ENV
from sglang_ext.launch.bench._dbsa_engine import POOL
from sglang_ext.launch.bench._dbsa_turns import STATIC
from sglang_ext.launch.bench._double_p_engine import SHORT
from sglang_ext.launch.bench._double_p_planted import planted_weights
from sglang_ext.launch.bench._double_p_rows import LEVELS
from sglang_ext.launch.bench._record import Figure, Timing, in_turns, json_file, save, table
from sglang_ext.launch.bench._shapes import SHAPES, write_model
from sglang_ext.launch.bench._turns import Process, say
from sglang_ext.policies.double_p import DoubleP
from sglang_ext.types import Json, JsonObject

RESULTS = Path(__file__).resolve().parent / "results" / "beside.json"
HERE = Path(sglang_ext.__file__).resolve().parents[1]
OTHER, OURS = "the other checkout", "ours"
SLOWEST = 0.95
"""A median ratio below this is a regression, whatever the spread."""
BLOCK = 74
"""Demonstrations of a block, of at most 32 tokens each."""
LEVEL = "middle"
"""How peaked the planted attention of Double-P's prompts is."""
KERNEL_COMMANDS = {
    "double_p": "double_p --only kernels --lengths 65536 --batches 1 8 32",
    "cascade": "cascade --only kernels",
}


@dataclass(frozen=True)
class Task:
    """Something that both engines do in turns.

    Attributes:
        name: of its row.
        seconds: does it in one engine, given that and the number of the repetition; returns what the row shows.
        step: it is a decoding step: short, and measured in more pairs (`--step-repeats`).
    """

    name: str
    seconds: Callable[[Process, int], float]
    step: bool = False


@dataclass(frozen=True)
class Pair:
    """The engines of one system, one of each checkout.

    Attributes:
        module: what is run in each process; it ends in `_turns.serve`.
        words: its command line.
        tasks: what they do in turns, in order.
    """

    module: str
    words: list[str]
    tasks: Sequence[Task]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("other", type=Path, help="folder of the other checkout; it holds sglang_ext")
    parser.add_argument("--systems", nargs="*", choices=sorted(PAIRS), default=sorted(PAIRS), help="engines to compare")
    parser.add_argument(
        "--kernels-of",
        nargs="*",
        choices=sorted(KERNEL_COMMANDS),
        default=[],
        help="kernels to compare",
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b", help="the engines' model")
    parser.add_argument("--layers", type=int, default=16, help="of the model for double_p: two of it fit (default: 16)")
    parser.add_argument("--tokens", type=int, default=90_000, help="tokens of the pool (default: 90000)")
    parser.add_argument("--length", type=int, default=65_536, help="tokens of a prompt of double_p (default: 65536)")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of double_p (default: 8)")
    parser.add_argument("--part", type=int, default=65_536, help="tokens that extend a stream (default: 65536)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 128], metavar="N")
    parser.add_argument("--steps", type=int, default=128, help="decoding steps of a run (default: 128)")
    parser.add_argument("--repeats", type=int, default=7, help="pairs of runs of each task (default: 7)")
    parser.add_argument("--step-repeats", type=int, default=21, help="the same of decoding steps (default: 21)")
    parser.add_argument("--kernels", choices=KERNELS, default="flashinfer", help=f"of both, {KERNELS_ENV}")
    parser.add_argument("--engine", type=json.loads, default={}, help="more arguments of all engines, as JSON")
    parser.add_argument("--out", type=json_file, default=RESULTS, help="JSON file (default: results/beside.json)")
    parser.add_argument("--commit", default="", help="commit to record (default: ask git)")


def main(args: argparse.Namespace) -> int:
    if not (args.other / "sglang_ext" / "__init__.py").is_file():
        raise ValueError(f"{args.other} holds no sglang_ext: expected the root of a checkout of this package")
    roots = {OTHER: args.other.resolve(), OURS: HERE}
    figures: list[Figure] = []
    for name in args.systems:
        with tempfile.TemporaryDirectory(prefix="sglang-ext-bench-") as temporary:
            figures += compare(PAIRS[name](Path(temporary), args), name, roots, Path(temporary), args)
        save(args.out, figures, commit=args.commit)  # what was measured stays if a later pair fails
    for name in args.kernels_of:
        figures += kernels(KERNEL_COMMANDS[name].split(), roots, args.repeats)
        save(args.out, figures, commit=args.commit)
    print(table(figures))
    print(f"written: {args.out}")
    return 0


# ---- engines ----


def compare(pair: Pair, name: str, roots: Mapping[str, Path], folder: Path, args: argparse.Namespace) -> list[Figure]:
    """The rows of one system. The first run of each task is a warm-up."""
    copied = folder / "copied"
    copied.mkdir()
    shutil.copy(Path(__file__).with_name("_beside_cascade.py"), copied / "beside_cascade.py")
    figures = []
    with ExitStack() as stack:
        processes = {}
        for role, root in roots.items():
            environment = {"PYTHONPATH": _path(root, copied), KERNELS_ENV: args.kernels}
            process = Process(f"{name}, {role}", pair.module, pair.words, environment)
            processes[role] = stack.enter_context(process)
            if torch.cuda.is_available():  # the next one finds the memory of this one taken
                process.wait()
                say(f"{process.name}: started")
        for task in pair.tasks:
            found: dict[str, list[float]] = {role: [] for role in roots}
            for repeat in range((args.step_repeats if task.step else args.repeats) + 1):
                for role in list(roots)[:: -1 if repeat % 2 else 1]:
                    seconds = task.seconds(processes[role], repeat)
                    if repeat:
                        found[role].append(seconds)
            figures.append(row(f"{name}: {task.name}", found))
            say(table([figures[-1]]).splitlines()[-1])
    return figures


def _path(root: Path, *more: Path) -> str:
    return os.pathsep.join([str(root), *map(str, more), *filter(None, [os.environ.get("PYTHONPATH")])])


def row(name: str, found: Mapping[str, Sequence[float]]) -> Figure:
    """The row of what was measured in pairs: seconds by checkout."""
    figure = in_turns(name, found[OURS], OTHER, found[OTHER], None)
    aim = f"interval reaches 1.00, median at least {SLOWEST}"
    met = figure.notes["spread"][1] >= 1 and (figure.ratio or 0) >= SLOWEST
    return dataclasses.replace(figure, aim=aim, met=met)


def _words(**options: Json) -> list[str]:
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}
    return [text for name, value in texts.items() for text in (f"--{name.replace('_', '-')}", value)]


def _common(args: argparse.Namespace) -> JsonObject:
    gpu = {"mem_fraction_static": STATIC} if torch.cuda.is_available() else {}
    return {**gpu, **args.engine}


def dbsa(folder: Path, args: argparse.Namespace) -> Pair:
    """Encoding, appending, answers over the selected blocks, plain requests."""
    write_model(folder / "model", args.shape, 131_072)
    most = max(args.concurrency)
    room = (args.repeats + 2) * BLOCK * 32 + 128 * most * 2 + 8192
    engine = {"max_total_tokens": args.tokens + room, "max_running_requests": most, **_common(args)}
    words = _words(
        role="ours",
        model=str(folder / "model"),
        tokens=args.tokens,
        block_size=BLOCK,
        ratio=0.3125,
        engine=engine,
    )

    def encode(process: Process, _: int) -> float:
        return float(process.ask("encode", pool=POOL)["seconds"])

    def append(process: Process, _: int) -> float:
        return float(process.ask("append", pool=POOL)["seconds"])

    tasks = [Task(f"encoding a pool of {args.tokens} tokens", encode)]
    first = 0
    for number in args.concurrency:
        for kind, words_of in (("dbsa", "an answer of 4 tokens"), ("zero-shot", "a plain request of 4 tokens")):
            count = max(8, 2 * number)
            ask = _Asking(kind, number, first, count)
            tasks.append(Task(f"{words_of}, {number} at a time", ask))
            first += count * (args.repeats + 1)
    return Pair("sglang_ext.launch.bench._dbsa_engine", words, [*tasks, Task("appending a block", append)])


@dataclass(frozen=True)
class _Asking:
    """A closed loop of questions that were not asked before, as the seconds of one of them."""

    kind: str
    concurrency: int
    first: int
    count: int

    def __call__(self, process: Process, repeat: int) -> float:
        options = {"kind": self.kind, "tokens": 4, "concurrency": self.concurrency, "count": self.count}
        found = process.ask("run", first=self.first + repeat * self.count, **options)
        return float(found["seconds"]) / self.count


def double_p(folder: Path, args: argparse.Namespace) -> Pair:
    """Prefill with clustering, and decoding over clusters, of prompts with planted keys."""
    model = folder / "model"
    write_model(model, args.shape, max(131_072, 2 * args.length))
    config = json.loads((model / "config.json").read_text())
    layers = min(args.layers, config["num_hidden_layers"])
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    planted_weights(model, LEVELS[LEVEL])
    runs = (args.step_repeats + 3) * (2 * SHORT + args.steps)
    options = {
        "model_path": str(model),
        "load_format": "dummy",
        "log_level": "warning",
        "page_size": 1,
        "random_seed": 0,
        "max_running_requests": args.prompts,
        "max_total_tokens": args.prompts * (args.length + runs + 64),
        "attention_backend": "double_p",
        **({"cuda_graph_max_bs_decode": args.prompts} if torch.cuda.is_available() else {}),
        **_common(args),
    }
    words = _words(
        options=options,
        config=vars(DoubleP()),
        length=args.length,
        rows=args.prompts,
        vocabulary=config["vocab_size"],
    )

    def prefill(process: Process, _: int) -> float:
        process.ask("weights", folder=str(model), flush=True)
        return float(sum(process.ask("prefill")["seconds"]))

    def step(process: Process, _: int) -> float:
        short, long = (process.ask("decode", tokens=count)["seconds"] for count in (SHORT, SHORT + args.steps))
        return float(long - short) / args.steps

    where = f"{args.prompts} prompts of {args.length} tokens, {layers} layers"
    tasks = [
        Task(f"prefill and clustering of {where}", prefill),
        Task(f"a decoding step over {where}", step, step=True),
    ]
    return Pair("sglang_ext.launch.bench._double_p_engine", [*words, "--ours"], tasks)


def cascade(folder: Path, args: argparse.Namespace) -> Pair:
    """A stream that grows, and decoding behind it."""
    write_model(folder / "model", args.shape, 131_072)
    options = {
        "model_path": str(folder / "model"),
        "load_format": "dummy",
        "log_level": "warning",
        "page_size": 1,
        "attention_backend": "cascade",
        "max_total_tokens": max(65_536, args.part),
        "chunked_prefill_size": 4096,
        "cuda_graph_backend_prefill": "disabled",
        **_common(args),
    }

    def extend(process: Process, _: int) -> float:
        return float(process.ask("extend")["seconds"])

    def step(process: Process, _: int) -> float:
        return float(process.ask("decode", steps=args.steps)["seconds"])

    tasks = [
        Task(f"{args.part} tokens of a stream", extend),
        Task("a decoding step of a stream, batch 1", step, step=True),
    ]
    return Pair("beside_cascade", _words(options=options, part=args.part), tasks)


PAIRS: dict[str, Callable[[Path, argparse.Namespace], Pair]] = {"dbsa": dbsa, "double_p": double_p, "cascade": cascade}


# ---- kernels ----


def kernels(command: Sequence[str], roots: Mapping[str, Path], repeats: int) -> list[Figure]:
    """The rows of a kernels' half that both checkouts have, each measured `repeats` times in turns."""
    found: dict[str, dict[str, list[float]]] = {role: {} for role in roots}
    for repeat in range(repeats):
        for role in list(roots)[:: -1 if repeat % 2 else 1]:
            for name, seconds in _rows(command, roots[role]):
                found[role].setdefault(name, []).append(seconds)
            say(f"{' '.join(command)}: {role}, run {repeat + 1} of {repeats}")
    both = [name for name in found[OURS] if len(found[OURS][name]) == len(found[OTHER].get(name, ())) == repeats]
    return [row(name, {role: found[role][name] for role in roots}) for name in both]


def _rows(command: Sequence[str], root: Path) -> Iterator[tuple[str, float]]:
    """(name, seconds) of the rows of a benchmark that one checkout runs."""
    with tempfile.TemporaryDirectory(prefix="sglang-ext-bench-") as folder:
        out = Path(folder) if command[0] == "cascade" else Path(folder) / "rows.json"
        words = [sys.executable, "-m", "sglang_ext.launch.cli", "bench", *command, "--out", str(out)]
        subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": _path(root)}, stdout=subprocess.DEVNULL)
        for path in sorted(Path(folder).glob("*.json")):
            for figure in json.loads(path.read_text())["figures"]:
                if figure["unit"] == "ms":
                    # What a name says in parentheses was measured, and differs from run to run.
                    yield re.sub(r" \(.*?\)", "", figure["name"]), Timing(**figure["timing"]).median
