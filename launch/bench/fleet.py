"""``sglang-ext bench fleet``: several servers behind SMG, and pools that do not all fit one of them.

All servers share a folder of pools, and each has a KV cache of --max-total-tokens. Clients ask questions over the pools
through SMG in a closed loop, with each of its policies: `consistent_hashing`, `sticky_round_robin` (`round_robin` with
--sticky-sessions) and `manual` go by the header that names the pool, `cache_aware` goes by the question alone, and
`round_robin` by neither. Each load says which share of the selected blocks was in the KV cache, how long the first
token took, and how many answers came a second. Each load is compared with one server alone, which is asked about its
share of the pools by as many clients as a server of the fleet has: with 4 servers and 16 pools, about 4. Where the
fleet is one server, there is nothing to choose, and it is measured with the first policy only.

Shares of blocks depend on the sizes and on where pools have their homes, and not on the machine. Times do: servers
that share a GPU, or the processors, are slower than one alone.

Weights are random, and pools are generated. A load of --warm-up seconds, which is not measured, comes first. Servers
are spread over the GPUs; if there is one GPU, all servers share it. Results are written after each load; a run that is
cut short is taken up again where it stopped.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from sglang_ext.launch.bench._fleet_kept import FleetResults, FleetWanted
from sglang_ext.launch.bench._fleet_load import POPULARITIES, UNIFORM, Fleet, fleet
from sglang_ext.launch.bench._fleet_rows import shown
from sglang_ext.launch.bench._record import json_file
from sglang_ext.launch.bench._router import BY_KEY, KEYED, POLICIES, command, routed
from sglang_ext.launch.bench._serve_mixes import Sizes
from sglang_ext.launch.bench._shapes import SHAPES, write_model
from sglang_ext.launch.bench._turns import say
from sglang_ext.serving.plan import ROOM_FOR_REQUESTS

RESULTS = Path(__file__).resolve().parent / "results"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = Sizes()
    parser.add_argument(
        "--servers", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="numbers of servers (default: 1 2 4)"
    )
    parser.add_argument(
        "--pools", type=int, nargs="+", default=[8, 16, 32, 64], metavar="N", help="numbers of pools (default: 8 to 64)"
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
        default=230_000,
        metavar="N",
        help="size of each server's KV cache in tokens (default: 230000)",
    )
    parser.add_argument(
        "--pool-tokens", type=int, default=sizes.pool_tokens, help="tokens of each pool (default: 30000)"
    )
    parser.add_argument(
        "--block-size", type=int, default=sizes.block_size, help="demonstrations of a block (default: 74)"
    )
    parser.add_argument("--ratio", type=float, default=sizes.ratio, help="share that is selected (default: 0.3125)")
    parser.add_argument("--answer", type=int, default=sizes.answer, help="tokens of an answer (default: 8)")
    parser.add_argument(
        "--concurrency", type=int, default=8, metavar="N", help="number of clients for each server (default: 8)"
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a load (default: 30)")
    parser.add_argument(
        "--warm-up", type=float, default=15.0, metavar="SECONDS", help="length of the load before it (default: 15)"
    )
    parser.add_argument("--flags", default="", help="more flags of the servers, in one argument")
    parser.add_argument("--anew", action="store_true", help="measure again what the file of results has already")
    parser.add_argument(
        "--out",
        type=json_file,
        default=RESULTS / "fleet.json",
        help="file for the results (default: launch/bench/results/fleet.json)",
    )
    parser.add_argument("--commit", default="", help="commit to record (default: ask git)")


def main(args: argparse.Namespace) -> int:
    check(args)
    results = FleetResults(args)
    missing = FleetWanted.of(args).without(results)
    if missing:
        with tempfile.TemporaryDirectory(prefix="sglang-ext-bench-") as temporary:
            model, folder = Path(temporary) / "model", Path(temporary) / "pools"
            write_model(model, args.shape, max(131_072, args.max_total_tokens), args.layers)
            say(f"starting {missing.servers} servers")
            with fleet(model, folder, missing.servers, args) as servers:
                say(f"putting {missing.pools} pools")
                servers.put(missing.pools)
                measure(servers, missing, results)
    print(shown(results.compared()))
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


def measure(servers: Fleet, missing: FleetWanted, results: FleetResults) -> None:
    """Measure what is missing: first one server alone, then fleets, each behind one router after the other."""
    for asked in missing.alone:
        say(f"{asked.pools} pools ({asked.popularity}) on one server alone")
        results.add_alone(asked, servers.measure(servers.servers[0].url, 1, asked))
    for (count, name), loads in missing.loads.items():
        policy, *more = POLICIES[name]
        with routed([server.url for server in servers.servers[:count]], policy, more) as router:
            for asked in loads:
                say(f"{asked.pools} pools ({asked.popularity}), servers: {count}, {name}")
                found = servers.measure(router.url, count, asked)
                # Behind the load: policies that remember keys would keep the homes of pools that were asked in turn.
                homes = servers.homes(router.url, count, asked) if name in KEYED else []
                results.add(asked, count, name, {"homes": homes, **found})
