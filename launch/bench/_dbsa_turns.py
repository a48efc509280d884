"""The engine's half of ``sglang-ext bench dbsa``: which of the engines does what, and when.

Stock SGLang runs on each of some attention backends, an engine each. All engines are resident on one GPU and take
turns: every run of ours stands beside one of each of them, with the same questions. Where the memory is not enough for
all, `--apart` has them do the same one after the other. The larger pool has an engine of its own, behind the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sglang_ext.attention.choice import KERNELS_ENV
from sglang_ext.launch.bench import _dbsa_engine
from sglang_ext.launch.bench._dbsa_engine import EXAMPLES, LABELLED, LARGER, POOL, WRITTEN
from sglang_ext.launch.bench._record import arguments_of_ranks
from sglang_ext.launch.bench._shapes import SHAPES, write_model
from sglang_ext.launch.bench._turns import STOCK, Process, say
from sglang_ext.serving.plan import ROOM_FOR_REQUESTS
from sglang_ext.types import JsonObject, Options

STOCK_ROLE, OURS, LARGE = "stock", "ours", "larger"
"""Who does what: stock SGLang on all of its backends; our engine; and our engine with room for the larger pool."""
IN_TURNS, APART = "in turns", "one engine after the other"
TURN = (
    ("stock", "zero-shot"),
    ("ours", "zero-shot"),
    ("stock", "fixed"),
    ("ours", "dbsa"),
    ("ours", EXAMPLES),
    ("ours", WRITTEN),
    ("ours", "all blocks"),
)
"""What is asked in a turn, by whom: what is compared stands side by side."""

DECODE_STAGES = "decode stages"
STAGES = {"stages": "dbsa", "stages over single demonstrations": EXAMPLES, DECODE_STAGES: "dbsa"}
"""What is profiled of our engine, by kind of question. Answers of `DECODE_STAGES` have `--decode-tokens` tokens."""

BESIDE_RETRIEVAL = "dbsa, beside retrieval"
"""Our runs that were in turns with RetICL's."""

LIGHT = 4
"""Questions of a run that takes seconds a question."""

LABEL_ROOM = 24
"""Tokens of a label, at most."""

APPENDED = ("append", "append larger")
"""Appends to the pool and to the larger one."""

APPENDS = 6
"""Blocks that are appended to a pool, at least; the first is not counted."""

QUESTION, DEMONSTRATION = 40, 32
"""Tokens of one, at most."""

STATIC = 0.95
"""SGLang's `mem_fraction_static`: it leaves room for what is allocated later, of the memory that is free at the start.

Capacities are stated, so that it only must not be in their way: of two engines the second finds the first one's memory
taken."""


@dataclass(frozen=True)
class TurnStep:
    """One thing that an engine is asked for.

    Attributes:
        role: which engine, or engines.
        do: a method of `_dbsa_engine.Stock` or `Ours`.
        options: its keywords.
        keep: where the answer goes in what is found of the engine; empty where it is a warm-up.
        part: the part of the answer that is kept; empty for all of it.
        several: whether answers of other steps go to the same place: a list of them.
    """

    role: str
    do: str
    options: Options = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    part: str = "seconds"
    several: bool = True

    def run(self, process: Process, found: JsonObject) -> None:
        """Have it done by an engine of its role, and keep the answer in `found`."""
        answer = process.ask(self.do, **self.options)
        words = [process.name, self.do, *(f"{name} {value}" for name, value in self.options.items())]
        seconds = answer.get("seconds", answer.get("wall"))
        say(f"{', '.join(words)}: {seconds:.4g} s{'' if self.keep else ' (warm-up)'}")
        if not self.keep:
            return
        *path, last = self.keep
        for name in path:
            found = found.setdefault(name, {})
        value = answer[self.part] if self.part else answer
        if self.several:
            found.setdefault(last, []).append(value)
        else:
            found[last] = value


@dataclass(frozen=True)
class Wanted:
    """An engine that is to be started.

    Attributes:
        role: what it does.
        backend: attention backend of stock SGLang; empty for ours.
    """

    role: str
    backend: str = ""

    @property
    def name(self) -> str:
        return f"{self.role} on {self.backend}" if self.backend else self.role

    def found(self, raw: JsonObject) -> JsonObject:
        """Where what it measures is kept."""
        kept: JsonObject = raw[STOCK_ROLE][self.backend] if self.backend else raw[OURS]
        return kept


def phases(args: argparse.Namespace) -> list[list[Wanted]]:
    """Engines that are resident together, one group after the other."""
    stock = [Wanted(STOCK_ROLE, backend) for backend in args.stock_backend]
    together = [*stock, Wanted(OURS)]
    found = [[each] for each in together] if args.apart else [together]
    return [*found, [Wanted(LARGE)]] if args.larger else found


def engines(args: argparse.Namespace) -> JsonObject:
    """Measure all engines: {"stock": {backend: ...}, "ours": ..., "order": ..., "memory": ...}.

    Raises:
        RuntimeError: one of them failed (its output is above), or has less KV cache than it needs.
    """
    sizes = capacities(args)
    found: JsonObject = {
        STOCK_ROLE: {backend: {"backend": backend} for backend in args.stock_backend},
        OURS: {name: {} for name in STAGES},
        "order": APART if args.apart else IN_TURNS,
        "memory": {role: {"tokens": size, "kv_bytes": size * token_bytes(args)} for role, size in sizes.items()},
    }
    with tempfile.TemporaryDirectory(prefix="sglang-ext-bench-") as temporary:
        model = Path(temporary) / "model"
        # Positions are sequential over the larger pool too, so that both are encoded alike.
        write_model(model, args.shape, max(131_072, *sizes.values()), args.layers)
        for group in phases(args):
            with ExitStack() as stack:
                processes = {}
                for wanted in group:
                    words, environment = _words(wanted, model, args, sizes[wanted.role])
                    process = Process(wanted.name, _dbsa_engine.__name__, words, environment)
                    processes[wanted] = stack.enter_context(process)
                    if torch.cuda.is_available():  # the next one finds the memory of this one taken
                        process.wait()
                for wanted, process in processes.items():
                    about = _about(process, sizes[wanted.role])
                    if wanted.role != LARGE:
                        wanted.found(found).update(about)
                for step in steps(args):
                    for wanted, process in processes.items():
                        if step.role == wanted.role:
                            step.run(process, wanted.found(found))
    ours = found[OURS]
    ours |= {name: ours["encode"][0][name] for name in ("tokens", "blocks")}
    ours["append encoding"] = {name: [each["encoding"] for each in ours[name]] for name in APPENDED if name in ours}
    for name in ("encode", *ours["append encoding"]):
        ours[name] = [each["seconds"] for each in ours[name]]
    return found


def _about(process: Process, size: int) -> JsonObject:
    """What an engine says of itself; RuntimeError when its KV cache is too small."""
    about = process.ask("about")
    say(f"{process.name}: started, {about['capacity']} tokens of KV cache")
    if about["capacity"] < size:
        raise RuntimeError(
            f"the {process.name} engine has a KV cache of {about['capacity']} tokens, {size} are needed: measure one"
            " engine after the other (--apart), make --larger smaller or raise mem_fraction_static (--engine)"
        )
    return about


def steps(args: argparse.Namespace) -> Iterator[TurnStep]:
    """All that the engines do, in order. The first of several runs of one thing is a warm-up."""
    asked = 0  # questions so far: one that was asked before would be cached
    repeats = range(args.repeats + 1)
    for repeat in repeats:
        yield TurnStep("stock", "prefill", keep=("prefill",) if repeat else ())
        yield TurnStep("ours", "encode", {"pool": POOL}, ("encode",) if repeat else (), part="")
    for tokens, concurrency in itertools.product(args.label_tokens, args.concurrency):
        count = questions_a_run(args, concurrency)
        for repeat in repeats:
            for role, kind in TURN:
                yield _asking(role, kind, tokens, concurrency, asked, count, kind if repeat else None)
            asked += count
    for concurrency in () if args.no_labels else args.concurrency:
        count = questions_a_run(args, concurrency)
        for repeat in repeats:
            for role in (STOCK_ROLE, OURS):
                options = {"kind": LABELLED, "tokens": LABEL_ROOM, "concurrency": concurrency}
                options |= {"first": asked, "count": count}
                yield TurnStep(role, "run", options, ("labelled", str(concurrency)) if repeat else (), part="")
            asked += count
    tokens, concurrency = args.label_tokens[0], args.concurrency[0]  # seconds a request, whatever its answer
    count = questions_a_run(args, concurrency)
    for repeat in repeats:  # behind the others: it drives the pool out of the stock engine's cache
        kept = ("retrieval", BESIDE_RETRIEVAL) if repeat else (None, None)
        yield _asking("stock", "retrieval", tokens, concurrency, asked, min(LIGHT, count), kept[0])
        yield _asking("ours", "dbsa", tokens, concurrency, asked, count, kept[1])
        asked += count
    if not args.larger:
        yield from _appending(args, OURS, POOL, APPENDED[0])
    yield TurnStep("ours", "encode", {"pool": POOL})
    # Last: a profiler that has run goes on slowing launches down.
    for name, kind in STAGES.items():
        tokens = args.decode_tokens if name == DECODE_STAGES else args.label_tokens[0]
        for concurrency in args.concurrency if tokens else ():
            count = max(2, concurrency)
            options = {"kind": kind, "tokens": tokens, "concurrency": concurrency, "first": asked, "count": count}
            asked += count
            yield TurnStep("ours", "stages", options, (name, f"{concurrency} at a time"), part="", several=False)
    if args.larger:  # appends to either pool are measured in one engine
        yield TurnStep(LARGE, "encode", {"pool": POOL})
        yield from _appending(args, LARGE, POOL, APPENDED[0])
        yield TurnStep(LARGE, "encode", {"pool": LARGER}, ("larger",), part="", several=False)
        yield from _appending(args, LARGE, LARGER, APPENDED[1])


def _asking(role: str, kind: str, tokens: int, concurrency: int, first: int, count: int, keep: str | None) -> TurnStep:
    options = {"kind": kind, "tokens": tokens, "concurrency": concurrency, "first": first, "count": count}
    return TurnStep(role, "run", options, ("answers", str(tokens), keep, str(concurrency)) if keep else (), part="")


def _appending(args: argparse.Namespace, role: str, pool: str, name: str) -> Iterator[TurnStep]:
    for repeat in range(_appends(args) + 1):
        yield TurnStep(role, "append", {"pool": pool}, (name,) if repeat else (), part="")


def _appends(args: argparse.Namespace) -> int:
    return max(APPENDS, int(args.repeats))


def questions_a_run(args: argparse.Namespace, concurrency: int) -> int:
    """How many questions a run asks: `--rounds` of as many as are asked at a time, and at least `--min-requests`."""
    return int(max(args.min_requests, args.rounds * concurrency))


# ---- sizes ----


def capacities(args: argparse.Namespace) -> dict[str, int]:
    """Tokens of KV cache that each engine needs.

    Stock SGLang keeps the pool's prompt between two runs behind it, while the questions of both and of the zero-shot
    run between them are cached too; later one RetICL prompt. Ours holds a pool, what is appended to it and the requests
    under way.
    """
    most = max(args.concurrency)
    run = questions_a_run(args, most) * (QUESTION + max(*args.label_tokens, LABEL_ROOM))
    under_way = most * (QUESTION + max(*args.label_tokens, args.decode_tokens, LABEL_ROOM)) + ROOM_FOR_REQUESTS
    appended = (_appends(args) + 1) * args.block_size * DEMONSTRATION
    computed = {
        "stock": args.tokens + max(2 * run, round(args.ratio * args.tokens)) + run,
        "ours": args.tokens + appended + under_way,
        **({LARGE: args.larger + appended + under_way} if args.larger else {}),
    }
    # A pool ends behind the first demonstration that makes it long enough.
    return {role: _given(args, role).get("max_total_tokens", size + DEMONSTRATION) for role, size in computed.items()}


def _given(args: argparse.Namespace, role: str) -> JsonObject:
    """An engine's arguments of `--engine`: those of all, and its own, which stand under its role."""
    roles = (STOCK_ROLE, OURS, LARGE)
    given = arguments_of_ranks(args)
    return {name: value for name, value in given.items() if name not in roles} | given.get(role, {})


def our_environment(args: argparse.Namespace) -> dict[str, str]:
    """Environment of our engine: the kernels of `--kernels`, or those that this machine has."""
    return {KERNELS_ENV: args.kernels or ("flashinfer" if torch.cuda.is_available() else "torch")}


def token_bytes(args: argparse.Namespace) -> int:
    """Of keys and values, on all GPUs together."""
    shape = SHAPES[args.shape]
    numbers = 2 * (args.layers or shape["num_hidden_layers"]) * shape["num_key_value_heads"] * shape["head_dim"]
    return numbers * (4 if args.shape == "tiny" else 2)


def _words(wanted: Wanted, model: Path, args: argparse.Namespace, size: int) -> tuple[list[str], dict[str, str]]:
    """(arguments, environment) of a process."""
    stock = wanted.role == STOCK_ROLE
    options: JsonObject = {
        "max_total_tokens": size,
        "max_running_requests": max(args.concurrency),
        **({"mem_fraction_static": STATIC} if torch.cuda.is_available() else {}),
        **({"attention_backend": wanted.backend} if stock else {}),
        **_given(args, wanted.role),
    }
    words = {
        "role": STOCK_ROLE if stock else OURS,
        "model": model,
        "tokens": args.tokens,
        "block-size": args.block_size,
        "ratio": args.ratio,
        "larger": args.larger if wanted.role == LARGE else 0,
        "engine": json.dumps(options),
    }
    environment = STOCK if stock else our_environment(args)
    return [text for name, value in words.items() for text in (f"--{name}", str(value))], environment
