"""Servers on one folder of pools, and loads on them through a router or alone; what ``sglang-ext bench fleet`` runs."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests

from sglang_ext.launch.bench._dbsa_engine import demonstrations, examples
from sglang_ext.launch.bench._router import ROUTED, ROUTING_KEY
from sglang_ext.launch.bench._serve_load import Limits, Load, LoadRequest, Measured
from sglang_ext.launch.bench._serve_mixes import pool_name, sampling
from sglang_ext.launch.client import TIMEOUT
from sglang_ext.launch.demo_server import Server, free_port, running
from sglang_ext.types import JsonObject

UNIFORM, ZIPF = "uniform", "zipf"
POPULARITIES = (UNIFORM, ZIPF)
SCAN_SECONDS = 1.0
"""Between two looks of a server into the folder."""
OTHER_QUESTIONS = 100_000_000
"""Numbers of questions, behind those of all demonstrations."""
COUNTED = ("block_hits", "missed_blocks", "reencoded_blocks", "requests")


@dataclass(frozen=True)
class PoolsAsked:
    """What is asked about.

    Attributes:
        pools: the first so many.
        popularity: `uniform`, or `zipf`: the n-th is asked about 1/n times as often as the first.
    """

    pools: int
    popularity: str

    def key(self, pool: int) -> str:
        """The routing key of a pool, which has a home of its own in each load: a router remembers keys."""
        return f"{pool_name(pool)}-{self.pools}-{self.popularity}"

    @property
    def weights(self) -> list[float]:
        """How often each pool is asked about."""
        return [1 / (number + 1) if self.popularity == ZIPF else 1.0 for number in range(self.pools)]


class Fleet:
    """Servers that share a folder of pools.

    Args:
        servers: which answer.
        args: of the command.
    """

    def __init__(self, servers: Sequence[Server], args: argparse.Namespace) -> None:
        self.servers, self.args = servers, args
        self._seeds = itertools.count()

    def put(self, pools: int) -> None:
        """Have all servers know so many pools, and encode each once; none stays when its room is needed."""
        for number in range(pools):
            made = demonstrations(self.args.pool_tokens, seed=number * 1_000_000)
            body: JsonObject = {"demonstrations": [{**each} for each in made], "block_size": self.args.block_size}
            version = self.servers[0].call("PUT", f"/v1/pools/{pool_name(number)}", {**body, "pinned": False})
            first = self.request(number, number, "").body
            named = {"pool": f"{pool_name(number)}@{version['version']}", "ratio": self.args.ratio}
            first["sampling_params"]["custom_params"] = named
            for server in self.servers[1:]:
                server.call("POST", "/generate", first)

    def request(self, pool: int, number: int, key: str) -> LoadRequest:
        """A question over a pool, for the home of a key."""
        question = examples(1, OTHER_QUESTIONS + number)[0]["input"]
        custom: JsonObject = {"pool": pool_name(pool), "ratio": self.args.ratio}
        params = {**sampling(self.args.answer), "custom_params": custom}
        return LoadRequest({"text": question, "sampling_params": params}, self.args.answer, {ROUTING_KEY: key})

    def requests(self, asked: PoolsAsked) -> Iterator[LoadRequest]:
        """Questions without end that were not asked before."""
        seed = next(self._seeds)
        dice = random.Random(seed)
        for number in itertools.count(seed * 1_000_000):
            [pool] = dice.choices(range(asked.pools), asked.weights)
            yield self.request(pool, number, asked.key(pool))

    def homes(self, url: str, servers: int, asked: PoolsAsked) -> list[int]:
        """How many of the pools a router sends to each server, the most first.

        It is asked with the pools' keys and without the pools, which changes nothing in the KV caches.

        Args:
            url: of the router.
            servers: the first so many, which it knows.
            asked: the pools.

        Raises:
            requests.HTTPError: a request failed.
        """
        found = Counter({server.url: 0 for server in self.servers[:servers]})
        for number in range(asked.pools):
            body: JsonObject = {"text": "where?", "sampling_params": {"max_new_tokens": 1}}
            headers = {ROUTING_KEY: asked.key(number)}
            answer = requests.post(f"{url}/generate", json=body, headers=headers, timeout=TIMEOUT)
            answer.raise_for_status()
            found[answer.headers[ROUTED]] += 1
        return sorted(found.values(), reverse=True)

    def measure(self, url: str, servers: int, asked: PoolsAsked) -> JsonObject:
        """One load, after one that brings the KV caches to where they stay; clients are --concurrency a server.

        Args:
            url: of what is asked.
            servers: the first so many answer.
            asked: about what.

        Returns:
            The load's record, with the share of the selected blocks that was there, and what the servers counted.

        Raises:
            RuntimeError: requests failed or were not finished, or none was answered.
        """
        load, clients = Load(url, Limits()), servers * self.args.concurrency
        self._sound(load.closed(self.requests(asked), clients, self.args.warm_up))
        before = self.counted(servers)
        found = load.closed(self.requests(asked), clients, self.args.seconds)
        self._sound(found)
        after = self.counted(servers)
        counts = {name: after[name] - before[name] for name in COUNTED}
        return {**found.record(), **counts, "found": 1 - counts["missed_blocks"] / max(1, counts["block_hits"])}

    def counted(self, servers: int) -> dict[str, int]:
        """What the first so many servers have counted so far, together."""
        states = [server.call("GET", "/server_info")["internal_states"][0] for server in self.servers[:servers]]
        return {name: sum(int(state["sglang_ext"][name]) for state in states) for name in COUNTED}

    def _sound(self, found: Measured) -> None:
        if found.failed or found.unfinished or found.miscounted or not found.first:
            raise RuntimeError(
                f"{found.failed} of {found.requests} requests failed, {found.unfinished} were not finished, and"
                f" {found.miscounted} answers have another number of tokens than was asked for:"
                f" {'; '.join(found.errors) or 'no message'}"
            )


@contextmanager
def fleet(model: Path, folder: Path, count: int, args: argparse.Namespace) -> Iterator[Fleet]:
    """So many servers of a model; each has a GPU in turn where there are several.

    Without a GPU, each computes with one thread, so that servers take turns on few processors and do not wait for each
    other's threads. Servers start at the same time, except where some of them share a GPU: SGLang looks at its memory
    while it starts.

    Raises:
        ServerError: one does not start, or fails.
    """
    import torch

    gpus = torch.cuda.device_count()

    def start(number: int) -> Server:
        port = free_port()
        environment = {"CUDA_VISIBLE_DEVICES": _gpu(number % gpus)} if gpus > 1 else {}
        environment |= {} if gpus else {"OMP_NUM_THREADS": "1"}
        return stack.enter_context(running(server_command(model, folder, port, args), port, environment))

    with ExitStack() as stack:
        with ThreadPoolExecutor(1 if 0 < gpus < count else count) as threads:
            servers = list(threads.map(start, range(count)))
        yield Fleet(servers, args)


def _gpu(number: int) -> str:
    """The name of one of the GPUs that this process may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[number] if named else str(number)


def server_command(model: Path, folder: Path, port: int, args: argparse.Namespace) -> list[str]:
    """What starts a server."""
    words = [sys.executable, "-m", "sglang_ext.launch.cli", "serve", str(model), "--host", "127.0.0.1"]
    words += ["--port", str(port), "--log-level", "warning", "--load-format", "dummy", "--page-size", "1"]
    words += ["--max-total-tokens", str(args.max_total_tokens), "--pool-dir", str(folder)]
    words += ["--pool-scan-seconds", json.dumps(SCAN_SECONDS)]
    return [*words, *shlex.split(args.flags)]
