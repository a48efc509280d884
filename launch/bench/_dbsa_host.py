"""The part ``--only host`` of ``sglang-ext bench dbsa``: what leaves the KV cache for host memory, and comes back."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from sglang_ext.cache.host_blocks import GIB
from sglang_ext.launch.bench import _dbsa_host_engine
from sglang_ext.launch.bench._dbsa_turns import ROOM_FOR_REQUESTS, our_environment, token_bytes
from sglang_ext.launch.bench._record import Figure, Timing, arguments_of_ranks, at_least, at_most
from sglang_ext.launch.bench._shapes import write_model
from sglang_ext.launch.bench._turns import Process, say
from sglang_ext.types import JsonObject

SIZES, TINY = (4096, 512, 256), (128, 64, 64)
"""Tokens of the prompt of an answer, of the answer, and of each of the prompts that are read meanwhile."""
ROUNDING = 1.25
"""Host memory beside the bytes of the pool: blocks take whole pages."""


def host_tier(args: argparse.Namespace) -> JsonObject:
    """Measure one engine whose KV cache has room for the pool and little else.

    Returns:
        Seconds of encoding (`encode`), of a question whose blocks come back from the host (`back`) and of one whose
        blocks are there (`there`), a list of each; and times between tokens of an answer without and with evictions
        (`calm`, `evicting`), a list of runs.

    Raises:
        RuntimeError: the engine failed, or blocks did not come back.
    """
    context, tokens, prompt = TINY if args.shape == "tiny" else SIZES
    room = args.tokens + 2 * context + tokens + ROOM_FOR_REQUESTS
    options: JsonObject = {
        "max_total_tokens": room,
        "policy": {"host_gb": ROUNDING * args.tokens * token_bytes(args) / GIB},
        "attention_backend": "dbsa",
        **arguments_of_ranks(args),
    }
    words = {"tokens": args.tokens, "block-size": args.block_size, "engine": json.dumps(options)}
    found: JsonObject = {"encode": [], "back": [], "there": [], "calm": [], "evicting": []}
    with tempfile.TemporaryDirectory(prefix="sglang-ext-bench-") as folder:
        model = Path(folder) / "model"
        write_model(model, args.shape, max(131_072, room), args.layers)
        line = [text for name, value in {"model": model, **words}.items() for text in (f"--{name}", str(value))]
        with Process("host", _dbsa_host_engine.__name__, line, our_environment(args)) as engine:
            found["about"] = engine.ask("about")
            for number in range(args.repeats + 1):  # the first one compiles
                pool = engine.ask("encode", pool="bench")
                engine.ask("evict")
                back = engine.ask("back")
                there = engine.ask("back")
                if back["returned"] < pool["blocks"] or back["encoded"] or there["returned"]:
                    raise RuntimeError(f"of {pool['blocks']} blocks {back} came back, and {there} were not there")
                say(f"encoded in {pool['seconds']:.4g} s, back and answered in {back['seconds']:.4g} s")
                runs = {}
                for name in ("evicting", "calm"):  # the first one leaves no block of the pool that could be evicted
                    runs[name] = engine.ask("decoding", context=context, tokens=tokens, prompt=prompt)
                    engine.ask("evict")
                if not runs["evicting"]["evicted"]:
                    raise RuntimeError("prompts beside an answer evicted no block: measure a smaller pool (--tokens)")
                if number:
                    found["encode"].append(pool["seconds"])
                    found["back"].append(back["seconds"])
                    found["there"].append(there["seconds"])
                    for name, run in runs.items():
                        found[name].append(run)
    return {**found, "tokens": pool["tokens"], "blocks": pool["blocks"], "ahead": pool["ahead"]}


def host_figures(raw: JsonObject) -> list[Figure]:
    """Rows from what `host_tier` measured."""
    pool = f"a pool of {raw['tokens']} tokens in {raw['blocks']} blocks"
    notes = {"question_seconds": raw["there"], "copied_ahead": raw["ahead"]}
    name = f"{pool}: a question over all of it, for which it comes back from host memory"
    rows = [at_least(name, Timing.of(raw["back"]), "encoding it again", Timing.of(raw["encode"]), 8.0, notes=notes)]
    for kind, words, aim in (("evicting", "evict blocks", 2.0), ("calm", "evict none", None)):
        longest = [max(run["gaps"]) for run in raw[kind]]
        median = Timing.of(gap for run in raw[kind] for gap in run["gaps"]).median
        evicted = {"evicted": [run["evicted"] for run in raw[kind]]}
        name = f"the longest time between two tokens of an answer, while short prompts are read that {words}"
        rows.append(at_most(name, Timing.of(longest), median, "the median time", aim, notes=evicted))
    return rows
