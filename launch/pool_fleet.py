"""`sglang-ext pool plan --fleet`: what fleets of servers carry, on paper (`launch.capacity`)."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from sglang_ext.config import PoolOptions
from sglang_ext.launch import capacity
from sglang_ext.launch.options import add_flags, flag, given
from sglang_ext.launch.output import table

_COUNTS = ("gpus", "pools")
_OF_MODEL = ("memory_tokens", "dtype", "tp_size", "trust_remote_code")
"""Options of `pool plan` that go with --model: a server that is asked, or was measured, has its own."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `pool plan` that go with --fleet."""
    parser.add_argument(
        "--fleet",
        action="store_true",
        help="say what fleets of servers carry, instead of what a file of demonstrations takes",
    )
    for name, default in zip(_COUNTS, (capacity.GPUS, capacity.POOLS), strict=True):
        shown = " ".join(map(str, default))
        parser.add_argument(
            f"--{name}",
            type=int,
            nargs="+",
            metavar="N",
            help=f"with --fleet: numbers of {name.replace('gpu', 'GPU')}, with a row for each (default: {shown})",
        )
    parser.add_argument(
        "--rates",
        type=Path,
        metavar="FILE",
        help="with --fleet: results of sglang-ext bench dbsa --out (default: those that come with this package)",
    )
    add_flags(parser, capacity.FleetSize, "options of --fleet", skip=_COUNTS)


def check(args: argparse.Namespace) -> None:
    """ValueError where something was given that goes with --fleet or --model alone, or cannot go with it."""
    of_model = [flag(name) for name in _OF_MODEL if (value := getattr(args, name)) is not None and value is not False]
    named = [f"--{name}" for name in (*_COUNTS, "rates") if getattr(args, name) is not None]
    named += [flag(name) for name in given(args, capacity.FleetSize, skip=_COUNTS)]
    if args.fleet:
        others = [flag(name) for name in ("model", "url") if getattr(args, name) is not None]
        others += [*of_model, *(flag(name) for name in given(args, PoolOptions))]
        found = [args.file, *others] if args.file else others
        if found:
            raise ValueError(f"--fleet with {', '.join(found)}: it goes by rates that were measured; leave them out")
    elif named:
        raise ValueError(f"{', '.join(named)}: these go with --fleet")
    elif args.file is None or not (args.model or args.url):
        raise ValueError("expected FILE.jsonl with --model or --url, or --fleet")
    elif of_model and args.url:
        raise ValueError(f"{', '.join(of_model)}: these go with --model; the server of --url has its own")


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    rates = capacity.measured(args.rates or capacity.ENGINE)
    options = given(args, capacity.FleetSize, skip=_COUNTS)
    fleets = capacity.fleets(args.gpus or capacity.GPUS, args.pools or capacity.POOLS, options)
    found = [capacity.carried(rates, each) for each in fleets]
    if args.json:
        plan = {"rates": dataclasses.asdict(rates), "fleets": [dataclasses.asdict(each) for each in found]}
        print(json.dumps(plan, indent=1))
        return 0
    print("\n".join(capacity.sources(rates, fleets[0])) + "\n")
    print(table(capacity.header(fleets[0]), [capacity.row(each) for each in found]))
    return 0
