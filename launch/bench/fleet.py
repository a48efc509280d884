"""``sglang-ext bench fleet``: several servers behind SMG, and pools that do not all fit one of them.

All servers share a folder of pools, and each has a KV cache of --max-total-tokens. Clients ask questions over the pools
through SMG in a closed loop, with each of its policies: `consistent_hashing` and `manual` go by the header that names
the pool, `cache_aware` goes by the question alone, and `round_robin` by neither. Each load says which share of the
selected blocks was in the KV cache, how long the first token took, and how many answers came a second. Each load is
compared with one server alone, which is asked about its share of the pools: with 4 servers and 16 pools, about 4.

Weights are random, and pools are generated. A load of --warm-up seconds, which is not measured, comes first. Servers
are spread over the GPUs; if there is one GPU, all servers share it.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

from sglang_ext.launch.bench._fleet_load import POPULARITIES, UNIFORM, Fleet, PoolsAsked, fleet
from sglang_ext.launch.bench._fleet_rows import KEYED, rows, shown
from sglang_ext.launch.bench._record import json_file, save
from sglang_ext.launch.bench._router import BY_KEY, MANUAL, command, routed
from sglang_ext.launch.bench._serve_mixes import Sizes
from sglang_ext.launch.bench._shapes import SHAPES, write_model
from sglang_ext.launch.bench._turns import say
from sglang_ext.serving.plan import ROOM_FOR_REQUESTS
from sglang_ext.types import JsonObject

RESULTS = Path(__file__).resolve().parent / "results"
POLICIES: dict[str, tuple[str, ...]] = {
    BY_KEY: (),
    MANUAL: ("--assignment-mode", "min_group"),
    "cache_aware": (),
    "round_robin": (),
}
"""Policy of the router -> its options. `manual` remembers the server of a key, which had the fewest keys under way."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = Sizes()
    parser.add_argument(
        "--servers", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="numbers of servers (default: 1 2 4)"
    )
    parser.add_argument(
        "--pools", type=int, nargs="+", default=[8, 16, 64], metavar="N", help="numbers of pools (default: 8 16 64)"
    )
    parser.add_argument(
        "--policies", nargs="+", choices=POLICIES, default=[*POLICIES], help="policies of SMG (default: all)"
    )
    parser.add_argument(
        "--popularity",
        nargs="+",
        choices=POPULARITIES,
        default=[UNIFORM],
        help="how often each pool is asked about (default: uniform)",
    )
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="llama-3.1-8b", help="shape of the model (default: llama-3.1-8b)"
    )
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="layers of the model (default: the shape's)")
    parser.add_argument(
        "--max-total-tokens",
        type=int,
        default=300_000,
        metavar="N",
        help="size of each server's KV cache in tokens (default: 300000)",
    )
    parser.add_argument(
        "--pool-tokens", type=int, default=sizes.pool_tokens, help="tokens of each pool (default: 30000)"
    )
    parser.add_argument(
        "--block-size", type=int, default=sizes.block_size, help="demonstrations of a block (default: 74)"
    )
    parser.add_argument("--ratio", type=float, default=sizes.ratio, help="share that is selected (default: 0.3125)")
    parser.add_argument("--answer", type=int, default=sizes.answer, help="tokens of an answer (default: 8)")
    parser.add_argument("--concurrency", type=int, default=16, metavar="N", help="number of clients (default: 16)")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a load (default: 30)")
    parser.add_argument(
        "--warm-up", type=float, default=15.0, metavar="SECONDS", help="length of the load before it (default: 15)"
    )
    parser.add_argument("--flags", default="", help="more flags of the servers, in one argument")
    parser.add_argument(
        "--out",
        type=json_file,
        default=RESULTS / "fleet.json",
        help="file for the results (default: launch/bench/results/fleet.json)",
    )
    parser.add_argument("--commit", default="", help="commit to record (default: ask git)")


def main(args: argparse.Namespace) -> int:
    check(args)
    loads: list[JsonObject] = []
    with tempfile.TemporaryDirectory(prefix="sglang-ext-bench-") as temporary:
        model, folder = Path(temporary) / "model", Path(temporary) / "pools"
        write_model(model, args.shape, max(131_072, args.max_total_tokens), args.layers)
        say(f"starting {max(args.servers)} servers")
        with fleet(model, folder, max(args.servers), args) as servers:
            say(f"putting {max(args.pools)} pools")
            servers.put(max(args.pools))
            for popularity in dict.fromkeys(args.popularity):
                measure(servers, popularity, args, loads)
    print(shown(loads))
    print(f"written: {args.out}", flush=True)
    return 0


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for sizes that do not go together, and where there is no router."""
    command(0, [], BY_KEY)
    if min(args.servers) < 1 or min(args.pools) < 1 or args.concurrency < 1 or min(args.seconds, args.warm_up) <= 0:
        raise ValueError("--servers, --pools, --concurrency, --seconds and --warm-up: expected numbers above 0")
    if args.pool_tokens + ROOM_FOR_REQUESTS > args.max_total_tokens:
        raise ValueError(
            f"--pool-tokens {args.pool_tokens}: a pool, and {ROOM_FOR_REQUESTS} tokens for requests, do not fit"
            f" --max-total-tokens {args.max_total_tokens}: set one of them otherwise"
        )


def measure(servers: Fleet, popularity: str, args: argparse.Namespace, loads: list[JsonObject]) -> None:
    """All loads of one popularity, into `loads`; the file is written after each number of pools."""
    alone: dict[int, JsonObject] = {}
    for pools in args.pools:
        for count in args.servers:
            share = math.ceil(pools / count)
            if share not in alone:
                say(f"{share} pools on one server alone")
                alone[share] = servers.measure(servers.servers[0].url, 1, PoolsAsked(share, popularity))
            for policy in args.policies:
                say(f"{pools} pools on {count} servers, {policy}")
                with routed([server.url for server in servers.servers[:count]], policy, POLICIES[policy]) as router:
                    found = servers.measure(router.url, count, PoolsAsked(pools, popularity))
                    # Behind the load: `manual` would remember where it sent pools that were asked about in turn.
                    homes = servers.homes(router.url, pools) if policy in KEYED else []
                about = {"pools": pools, "popularity": popularity, "servers": count, "policy": policy, "homes": homes}
                loads.append({**about, **found, "pools_alone": share, "alone": alone[share]})
        save(args.out, rows(loads), commit=args.commit, loads=[*loads])
