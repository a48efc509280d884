"""``sglang-ext bench serve``: our server and stock SGLang's under load, over HTTP, one after the other.

Both have a KV cache of as many tokens. Each mix of requests comes in closed loops first, and the fastest of them says
what a server can do. Then requests arrive at random, at rates that are shares of what our server can do (or `--rates`),
and on stock SGLang also at shares of what it can do itself. A good answer keeps to the limits of its first token and of
the others; *goodput* is the number of good answers a second. Both servers are told to leave out what they have from
collections of garbage (SGLang's `/freeze_gc`), during which they say nothing.

- questions: over pools, some of which are asked about much more often than others; stock SGLang has them as prefixes;
- chat: plain requests with the lengths of ShareGPT's conversations;
- long: prompts of 32K to 64K tokens with long answers;
- streams: the same on a server of streams;
- encoding: chat while a pool is encoded and another one is replaced, or while stock SGLang reads a prompt as long.

Weights and most tokens are random. An answer that has another number of tokens than were asked for ends the benchmark.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import requests

from sglang_ext.attention.choice import KERNELS, KERNELS_ENV
from sglang_ext.launch.bench._record import json_file, save, stock_backends, table
from sglang_ext.launch.bench._serve_load import Limits, Load, LoadRequest, Measured
from sglang_ext.launch.bench._serve_mixes import MIXES, Chat, Mix, Questions, Sizes, drawn, plain
from sglang_ext.launch.bench._serve_rows import compare, curves
from sglang_ext.launch.bench._serve_watch import settle, watched
from sglang_ext.launch.bench._shapes import SHAPES, write_model
from sglang_ext.launch.bench._turns import STOCK, say
from sglang_ext.launch.demo_server import Server, free_port, running
from sglang_ext.serving.plan import ROOM_FOR_REQUESTS
from sglang_ext.types import JsonObject

RESULTS = Path(__file__).resolve().parent / "results"
ENCODING = "encoding"
"""The mix in which something long is read beside others."""
SEEDS = 1000
"""Seeds of a mix; each load has one of its own, so that no prompt was sent before."""
FLUSH_SECONDS = 60.0
WARM_UP = 3.0
"""Seconds of a load that is not measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sizes, limits = Sizes(), Limits()
    names = [*MIXES, ENCODING]
    parser.add_argument("--mixes", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--roles", nargs="+", choices=("ours", "stock"), default=["ours", "stock"], help="(default: both)"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b", help="the servers' model")
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="of it (default: the shape's)")
    parser.add_argument(
        "--max-total-tokens", type=int, default=300_000, metavar="N", help="of the KV cache of either (default: 300000)"
    )
    parser.add_argument("--pools", type=int, default=sizes.pools, help=f"pools of questions (default: {sizes.pools})")
    parser.add_argument("--pool-tokens", type=int, default=sizes.pool_tokens, help="of each (default: 30000)")
    parser.add_argument("--block-size", type=int, default=sizes.block_size, help="demonstrations (default: 74)")
    parser.add_argument("--ratio", type=float, default=sizes.ratio, help="of a pool that is selected (default: 0.3125)")
    parser.add_argument("--answer", type=int, default=sizes.answer, help="tokens over a pool (default: 8)")
    parser.add_argument("--encoded", type=int, default=sizes.encoded, help="tokens that are encoded (default: 90000)")
    parser.add_argument("--long", type=int, nargs=2, default=list(sizes.long), help="tokens (default: 32768 65536)")
    parser.add_argument("--decoded", type=int, default=sizes.decoded, help="tokens behind them (default: 512)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a load (default: 30)")
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 8, 32, 128], metavar="N", help="clients of closed loops"
    )
    parser.add_argument(
        "--shares",
        type=float,
        nargs="+",
        default=[0.25, 0.5, 0.75, 0.9, 1.1],
        metavar="SHARE",
        help="of what our server can do, that arrives (default: 0.25 0.5 0.75 0.9 1.1)",
    )
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        metavar="RATE",
        help="requests a second that arrive at either server, in the place of shares of what ours can do",
    )
    parser.add_argument(
        "--first-limit", type=float, default=limits.first, help="seconds, of a good answer (default: 0.5)"
    )
    parser.add_argument("--token-limit", type=float, default=limits.token, help="seconds (default: 0.05)")
    parser.add_argument("--policy", default="", help="of the server of streams, JSON")
    parser.add_argument("--flags", default="", help="more flags of both servers, in one argument")
    stock_backends(parser)
    parser.add_argument(
        "--kernels", choices=KERNELS, default="auto", help=f"of our servers, {KERNELS_ENV} (default: auto)"
    )
    parser.add_argument(
        "--out", type=json_file, default=RESULTS / "serve.json", help="(default: launch/bench/results/serve.json)"
    )
    parser.add_argument("--commit", default="", help="commit to record (default: ask git)")


def main(args: argparse.Namespace) -> int:
    check(args)
    raw: JsonObject = {}
    with tempfile.TemporaryDirectory(prefix="sglang-ext-bench-") as temporary:
        model = Path(temporary) / "model"
        write_model(model, args.shape, max(131_072, args.max_total_tokens), args.layers)
        for role, backend, mixes in servers(args):
            with served(role, backend, model, args) as server:
                loads = ServerLoads(server, args, ours=role == "ours")
                for mix in mixes:
                    loads.measure(mix, raw.setdefault(mix, {}), backend)
                    keep(raw, args)  # a run that is cut short keeps what it has
    print(table(compare(raw, args)))
    print(f"written: {args.out}", flush=True)
    return 0


def keep(raw: JsonObject, args: argparse.Namespace) -> None:
    """Write what there is so far."""
    save(args.out, compare(raw, args), curves(raw), commit=args.commit, loads=raw)


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for sizes that do not go together."""
    room = args.max_total_tokens
    needed = {
        "questions": (f"--pools {args.pools} of --pool-tokens {args.pool_tokens}", args.pools * args.pool_tokens),
        ENCODING: (f"--encoded {args.encoded}, which is replaced", 2 * args.encoded),
        **{
            name: (f"--long {args.long[0]} {args.long[1]} with --decoded {args.decoded}", args.long[1] + args.decoded)
            for name in ("long", "streams")
        },
    }
    for mix in args.mixes:
        what, tokens = needed.get(mix, ("", 0))
        if tokens + ROOM_FOR_REQUESTS > room:
            raise ValueError(
                f"{what} ({mix}): {tokens} tokens, and {ROOM_FOR_REQUESTS} for requests, do not fit"
                f" --max-total-tokens {room}: set one of them otherwise, or leave the mix out (--mixes)"
            )
    if args.long[0] > args.long[1]:
        raise ValueError(f"--long {args.long[0]} {args.long[1]}: expected the least tokens first")
    if min([*args.concurrency, *args.shares, *(args.rates or ()), args.seconds]) <= 0:
        raise ValueError("--concurrency, --shares, --rates and --seconds: expected numbers above 0")


def servers(args: argparse.Namespace) -> Iterator[tuple[str, str, list[str]]]:
    """(role, attention backend, mixes) of each server, ours first: what it can do says how much arrives at stock's."""
    if "ours" in args.roles:
        backends = {name: MIXES[name].backend if name in MIXES else Mix.backend for name in args.mixes}
        for backend in dict.fromkeys(backends.values()):
            yield "ours", backend, [name for name, its in backends.items() if its == backend]
    if "stock" in args.roles:
        for backend in args.stock_backend:
            yield "stock", backend, args.mixes


@contextmanager
def served(role: str, backend: str, model: Path, args: argparse.Namespace) -> Iterator[Server]:
    """A server of one role."""
    port = free_port()
    flags = ["--attention-backend", backend, "--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    flags += ["--load-format", "dummy", "--page-size", "1", "--max-total-tokens", str(args.max_total_tokens)]
    if role == "ours":
        command = [sys.executable, "-m", "sglang_ext.launch.cli", "serve", str(model), *flags]
        command += ["--policy", args.policy] if args.policy and backend == MIXES["streams"].backend else []
        environment = {KERNELS_ENV: args.kernels}
    else:
        command, environment = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *flags], STOCK
    say(f"starting {role} on {backend}")
    with running([*command, *shlex.split(args.flags)], port, environment) as server:
        yield server


class ServerLoads:
    """Loads on one server.

    Args:
        server: that answers.
        args: of the command.
        ours: whether it is ours.
    """

    def __init__(self, server: Server, args: argparse.Namespace, *, ours: bool) -> None:
        self.server, self.args, self.ours = server, args, ours
        self.sizes = Sizes(
            pools=args.pools,
            pool_tokens=args.pool_tokens,
            block_size=args.block_size,
            ratio=args.ratio,
            answer=args.answer,
            encoded=args.encoded,
            long=(args.long[0], args.long[1]),
            decoded=args.decoded,
        )
        self.load = Load(server.url, Limits(args.first_limit, args.token_limit))

    def measure(self, name: str, raw: JsonObject, backend: str) -> None:
        """All loads of a mix, into its record: role -> backend -> {"closed": [...], "open": [...], "own": [...]}.

        Both servers get the rates of `--rates`, or the shares of what ours can do (`open`), which come first; stock
        SGLang also the shares of what it can do itself (`own`).
        """
        first = SEEDS * [*MIXES, ENCODING].index(name)  # the same requests on both servers, whatever came before
        seeds = iter(range(first, first + SEEDS))
        role = "ours" if self.ours else "stock"
        found = raw.setdefault(role, {}).setdefault(backend, {})
        if name == ENCODING:
            self.freeze()
            found |= self.beside_encoding(seeds)
            return
        mix = MIXES[name](self.sizes)
        mix.prepare(self.server, ours=self.ours)
        self.freeze()
        self.load.closed(self.requests(mix, seeds), max(self.args.concurrency), WARM_UP)
        found["closed"] = [self.closed(mix, seeds, each) for each in self.args.concurrency]
        most = max(each["completed"] for each in found["closed"])
        if not most:
            raise RuntimeError(f"{name}: no answer ended within --seconds {self.args.seconds:g}: set it higher")
        own = [share * most for share in self.args.shares]
        rates = raw.setdefault("rates", self.args.rates or own)
        found["open"] = [self.open(mix, seeds, rate) for rate in rates]
        found["own"] = [self.open(mix, seeds, rate) for rate in own if rates is not own and not self.ours]
        mix.clean_up(self.server, ours=self.ours)
        self.forget()

    def freeze(self) -> None:
        """Have collections of garbage leave alone what a server, and this process, have by now.

        Stock SGLang 0.5.17 does not do so by itself.
        """
        gc.freeze()
        requests.post(f"{self.server.url}/freeze_gc", timeout=FLUSH_SECONDS).raise_for_status()

    def forget(self) -> None:
        """Have the server's cache empty for the next mix."""
        settle(self.server)
        requests.post(f"{self.server.url}/flush_cache", timeout=FLUSH_SECONDS).raise_for_status()  # answers in words

    def requests(self, mix: Mix, seeds: Iterator[int]) -> Iterator[LoadRequest]:
        """Requests that were not sent before."""
        return mix.requests(next(seeds), ours=self.ours)

    def closed(self, mix: Mix, seeds: Iterator[int], concurrency: int) -> JsonObject:
        """One closed loop, and what it cost."""
        settle(self.server)
        with watched(self.server) as cost:
            found = self.load.closed(self.requests(mix, seeds), concurrency, self.args.seconds)
        return kept(mix.name, found, cost.record(found.requests))

    def open(self, mix: Mix, seeds: Iterator[int], rate: float) -> JsonObject:
        """One open loop, and what it cost."""
        settle(self.server)
        with watched(self.server) as cost:
            found = self.load.open(self.requests(mix, seeds), rate, self.args.seconds, next(seeds))
        return kept(mix.name, found, cost.record(found.requests))

    def beside_encoding(self, seeds: Iterator[int]) -> JsonObject:
        """Chat alone, and chat while something long is read: {"alone": ..., "beside": ...}.

        Raises:
            RuntimeError: no token came meanwhile.
        """
        chat, concurrency = Chat(self.sizes), max(self.args.concurrency)
        alone, read = self.closed(chat, seeds, concurrency), self.reading()
        found = self.load.beside(self.requests(chat, seeds), concurrency, WARM_UP, read)
        self.forget()
        if not found.token:
            raise RuntimeError(f"{ENCODING}: no token came while {self.sizes.encoded} were read: set --encoded higher")
        return {"alone": alone, "beside": kept(ENCODING, found, {})}

    def reading(self) -> Callable[[], object]:
        """What reads something long: it encodes a pool and replaces it, or reads a prompt as long."""
        if not self.ours:
            return partial(self.server.call, "POST", "/generate", plain(drawn(self.sizes.encoded, 7), 1).body)
        longer = Questions(Sizes(pools=1, pool_tokens=self.sizes.encoded))
        bodies = [{"demonstrations": longer.made(number), "block_size": self.sizes.block_size} for number in (90, 91)]

        def encode() -> None:
            for body in bodies:
                self.server.call("PUT", "/v1/pools/encoded", body)
            self.server.call("DELETE", "/v1/pools/encoded")

        return encode


def kept(mix: str, found: Measured, cost: JsonObject) -> JsonObject:
    """A load's record.

    Raises:
        RuntimeError: a token was lost or counted twice, or no answer ended.
    """
    load = f"{found.rate:.3g} a second" if found.rate else f"{found.concurrency} at a time"
    say(f"{mix}, {load}: {found.good:.3g} good a second, {found.failed} failed, {found.unfinished} unfinished")
    if found.miscounted:
        raise RuntimeError(
            f"{mix}, {load}: {found.miscounted} answers have another number of tokens than was asked for"
        )
    if found.failed and not found.first:
        raise RuntimeError(f"{mix}, {load}: no request was answered: {'; '.join(found.errors)}")
    return {**found.record(), **cost}
