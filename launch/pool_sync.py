"""`sglang-ext pool sync`: pools from one folder to another, while servers use both."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from sglang_ext.launch.output import table

REFUSED = 1  # the exit status where a pool was
WORDS = "copy the newest version of each pool to a folder that servers share; both may be in use"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the action."""
    parser.add_argument("source", metavar="FROM", type=Path, help="a --pool-dir, which is only read")
    parser.add_argument(
        "target", metavar="TO", type=Path, help="a folder that servers share (--pool-scan-seconds), or a new one"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object a line instead of a table")


def run(args: argparse.Namespace) -> int:
    """Copy what TO lacks; the exit status says whether a pool was refused."""
    from sglang_ext.serving.sync import sync

    done = []
    for each in sync(args.source, args.target):
        done.append(each)
        if args.json:
            print(json.dumps(dataclasses.asdict(each), ensure_ascii=False), flush=True)
    if not args.json:
        named = [f"{each.tenant}/{each.pool}" if each.tenant else each.pool for each in done]
        rows = [(name, each.version, each.outcome, each.words) for name, each in zip(named, done, strict=True)]
        print(table(("pool", "version", "outcome", ""), rows) if rows else f"{args.source} has no pools")
    return REFUSED if any(each.outcome == "refused" for each in done) else 0
