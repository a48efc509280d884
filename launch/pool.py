"""The pools of a running server, and what a pool would take before there is one.

FILE.jsonl holds one demonstration a line: {"input": ..., "output": ...}, with an "id" if you like; - is standard input.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from sglang_ext.config import PoolOptions, check_name
from sglang_ext.launch import pool_fleet, pool_sync
from sglang_ext.launch.client import PoolClient
from sglang_ext.launch.options import add_flags, given
from sglang_ext.launch.output import Cell, encoding_bar, size, table
from sglang_ext.types import JsonObject

URL = "http://127.0.0.1:30000"
API_KEY_ENV = "SGLANG_EXT_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `sglang-ext pool` and of each of its actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, run: Callable[[argparse.Namespace], int], words: str) -> argparse.ArgumentParser:
        sub: argparse.ArgumentParser = actions.add_parser(name, help=words, description=words, allow_abbrev=False)
        sub.set_defaults(run=run)
        if name != "plan":
            sub.add_argument("--url", default=URL, help=f"of the server (default: {URL})")
        sub.add_argument("--api-key", help=f"of the server, if it has one (default: the variable {API_KEY_ENV})")
        sub.add_argument("--tenant", metavar="NAME", help="whose pools are meant; only the operator may name a tenant")
        sub.add_argument("--json", action="store_true", help="print the server's answer instead of a table")
        return sub

    put = action("put", _put, "create or replace a pool")
    put.add_argument("name", metavar="NAME")
    put.add_argument("file", metavar="FILE.jsonl")
    add_flags(put, PoolOptions, "options of the pool")

    action("ls", _ls, "a line for each pool")

    show = action("show", _show, "one pool: its options, labels and blocks")
    show.add_argument("name", metavar="NAME")
    show.add_argument("--tokens", action="store_true", help="each block's token ids too")

    append = action("append", _append, "add demonstrations; only the new blocks are encoded")
    append.add_argument("name", metavar="NAME")
    append.add_argument("file", metavar="FILE.jsonl")

    rm = action("rm", _rm, "delete a pool, or one demonstration of it")
    rm.add_argument("name", metavar="NAME")
    rm.add_argument("id", metavar="ID", nargs="?", help="take only this demonstration out of retrieval")
    rm.add_argument("--demonstration", metavar="ID", help="the same as ID")
    rm.add_argument("--purge", action="store_true", help="and encode again every block it reached through attention")

    cancel = action("cancel", _cancel, "stop the encoding under way")
    cancel.add_argument("name", metavar="NAME")

    copy = actions.add_parser("sync", help=pool_sync.WORDS, description=pool_sync.WORDS, allow_abbrev=False)
    copy.set_defaults(run=pool_sync.run)
    pool_sync.add_arguments(copy)

    plan = action("plan", _plan, "tokens, bytes and blocks a pool would take, and how many such pools fit")
    plan.add_argument("file", metavar="FILE.jsonl", nargs="?")
    where = plan.add_mutually_exclusive_group()
    where.add_argument("--model", help="compute with this model's tokenizer and configuration, without a server")
    where.add_argument("--url", help="ask this server, for its model and its KV cache")
    plan.add_argument("--memory-tokens", type=int, metavar="N", help="with --model: size of the KV cache in tokens")
    plan.add_argument("--dtype", help="with --model: as SGLang's --dtype (default: auto)")
    plan.add_argument("--tp-size", type=int, metavar="N", help="with --model: bytes are those of each GPU (default: 1)")
    plan.add_argument("--trust-remote-code", action="store_true", help="with --model: as SGLang's")
    add_flags(plan, PoolOptions, "options of the pool")
    pool_fleet.add_arguments(plan)


def main(args: argparse.Namespace) -> int:
    """Run one action."""
    status: int = args.run(args)
    return status


def read_demonstrations(file: str) -> list[JsonObject]:
    """The demonstrations of a JSON-lines file, checked.

    Raises:
        ValueError: names the file and the line.
        OSError: the file cannot be read.
    """
    from sglang_ext.serving.layout import parse_demonstrations, parse_jsonl

    shown = "standard input" if file == "-" else file
    try:
        text = (sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()).decode("utf-8-sig")
        items = parse_jsonl(text)
        parse_demonstrations(items)
    except UnicodeDecodeError as error:
        raise ValueError(f"{shown} is not UTF-8 ({error.reason} at byte {error.start})") from error
    except ValueError as error:
        message = str(error)
        found = re.match(r"demonstration (\d+)", message)
        if found:
            lines = [number for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
            message = f"line {lines[int(found[1]) - 1]}: {message}"
        raise ValueError(f"{shown}: {message}") from error
    return items


def _client(args: argparse.Namespace) -> PoolClient:
    return PoolClient(args.url, args.api_key or os.environ.get(API_KEY_ENV), args.tenant)


def _print_json(value: JsonObject | list[JsonObject]) -> int:
    print(json.dumps(value, ensure_ascii=False, indent=1))
    return 0


_SUMMARY = ("name", "version", "status", "demonstrations", "blocks", "tokens", "memory", "setup (s)")


def _summary(pool: JsonObject) -> list[Cell]:
    status = pool["status"]
    progress = pool.get("progress")
    if status == "encoding" and progress and progress["tokens"]:
        status = f"encoding {progress['tokens_done'] / progress['tokens']:.0%}"
    if pool["error"]:
        status += f" (last change failed: {pool['error']})"
    counts = [pool.get(name, 0) for name in ("demonstrations", "num_blocks", "tokens")]
    version, newest = pool["version"], pool.get("newest", pool["version"])
    shown = version if newest == version else f"{version} (newest: {newest})"
    return [pool["name"], shown, status, *counts, size(pool.get("bytes", 0)), pool["setup_seconds"]]


def _report(args: argparse.Namespace, info: JsonObject) -> int:
    if args.json:
        return _print_json(info)
    print(table(_SUMMARY, [_summary(info)]))
    return 0


def _watched(args: argparse.Namespace, change: Callable[[PoolClient, Callable[[JsonObject], None]], JsonObject]) -> int:
    """Make a change and wait for it under a progress bar."""
    client = _client(args)
    try:
        with encoding_bar(args.name) as watch:
            info = change(client, watch)
    except KeyboardInterrupt:
        print(
            f"\nthe server goes on encoding; to stop it: sglang-ext pool cancel {args.name} --url {args.url}",
            file=sys.stderr,
        )
        raise
    return _report(args, info)


def _put(args: argparse.Namespace) -> int:
    check_name(args.name)
    options = given(args, PoolOptions)
    PoolOptions.parse(options)
    items = read_demonstrations(args.file)
    return _watched(args, lambda client, watch: client.put(args.name, items, options, watch))


def _append(args: argparse.Namespace) -> int:
    items = read_demonstrations(args.file)
    return _watched(args, lambda client, watch: client.append(args.name, items, watch))


def _rm(args: argparse.Namespace) -> int:
    if args.id is not None and args.demonstration is not None:
        raise ValueError(f"two demonstrations, {args.id} and --demonstration {args.demonstration}: give one")
    id = args.id if args.id is not None else args.demonstration
    if id == "":
        raise ValueError("the ID of a demonstration is empty: leave it out to delete the whole pool")
    if id is not None:
        return _watched(args, lambda client, watch: client.delete_demonstration(args.name, id, args.purge, watch))
    if args.purge:
        raise ValueError("--purge goes with the ID of a demonstration; a whole pool leaves nothing behind anyway")
    answer = _client(args).delete(args.name)
    if args.json:
        return _print_json(answer)
    print(f"{answer['name']}: {answer['status']}")
    return 0


def _cancel(args: argparse.Namespace) -> int:
    answer = _client(args).cancel(args.name)
    if args.json:
        return _print_json(answer)
    print(f"{answer['name']}: {answer['status']}")
    return 0


def _ls(args: argparse.Namespace) -> int:
    pools = _client(args).pools()
    if args.json:
        return _print_json(pools)
    print(table(_SUMMARY, [_summary(pool) for pool in pools]) if pools else "no pools")
    return 0


def _show(args: argparse.Namespace) -> int:
    info = _client(args).pool(args.name, args.tokens)
    if args.json:
        return _print_json(info)
    print(table(_SUMMARY, [_summary(info)]))
    if "blocks" not in info:
        return 0
    options = " ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in info["options"].items())
    print(f"\noptions: {options}")
    print(f"labels ({len(info['labels'])}): {json.dumps(info['labels'], ensure_ascii=False)}")
    if info["deleted"]:
        print(f"deleted ({len(info['deleted'])}): {' '.join(info['deleted'])}")
    rows = [
        [
            block["id"],
            block["key"][:12],
            block["tokens"],
            block["position"],
            "yes" if block["resident"] else "no",
            block["hits"],
            len(block["demonstrations"]),
            _shortened(block["demonstrations"]),
        ]
        for block in info["blocks"]
    ]
    print("\n" + table(("block", "key", "tokens", "position", "resident", "hits", "demos", "ids"), rows))
    if args.tokens:
        for block in info["blocks"]:
            print(f"\nblock {block['id']}: {' '.join(map(str, block['token_ids']))}")
    return 0


def _shortened(ids: list[str]) -> str:
    return " ".join(ids) if len(ids) <= 4 else f"{ids[0]} {ids[1]} ... {ids[-1]}"


def offline_plan(args: argparse.Namespace, items: list[JsonObject]) -> JsonObject:
    """The plan by the model's tokenizer and configuration alone (`sglang_ext.serving.plan.describe`)."""
    # Not SGLang's own loaders: its import alone takes longer than everything here.
    from transformers import AutoConfig, AutoTokenizer

    from sglang_ext.serving.layout import bos, group_demonstrations, lay_out, parse_demonstrations
    from sglang_ext.serving.plan import describe, kv_bytes_per_token

    options = PoolOptions.parse(given(args, PoolOptions))
    config = AutoConfig.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    per_token = kv_bytes_per_token(config, args.dtype or "auto", 1 if args.tp_size is None else args.tp_size)
    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    demonstrations = parse_demonstrations(items)
    groups = group_demonstrations(demonstrations, options, tokenizer)
    by_id = {item.id: item for item in demonstrations}
    layout = lay_out(groups, by_id, options, tokenizer, bos(tokenizer), args.model)
    context = config.get_text_config().max_position_embeddings
    return describe(layout, options, per_token, context, args.memory_tokens)


def _plan(args: argparse.Namespace) -> int:
    pool_fleet.check(args)
    if args.fleet:
        return pool_fleet.run(args)
    if args.memory_tokens is not None and args.memory_tokens < 1:
        raise ValueError(f"--memory-tokens {args.memory_tokens}: expected a positive number")
    items = read_demonstrations(args.file)
    plan = _client(args).plan(items, given(args, PoolOptions)) if args.url else offline_plan(args, items)
    if args.json:
        return _print_json(plan)
    lengths = plan["tokens_per_block"]
    spread = f"{min(lengths)} to {max(lengths)}" if min(lengths) < max(lengths) else str(lengths[0])
    rows = [
        ("demonstrations", f"{plan['demonstrations']:,}"),
        ("blocks", f"{plan['blocks']:,}, of {spread} tokens"),
        ("tokens", f"{plan['tokens']:,}"),
        ("keys and values", size(plan["bytes"])),
    ]
    if "fits" in plan:
        rows.append(("such pools that fit", f"{plan['fits']:,} (room for {plan['capacity_tokens']:,} tokens)"))
    for name, value in rows:
        print(f"{name:<20} {value}")
    if plan.get("problem"):
        print(f"cannot be put: {plan['problem']}")
    return 0
