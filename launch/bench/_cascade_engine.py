"""The engine's half of ``sglang-ext bench cascade``: one engine in one process, its measurements as JSON.

Run by `launch.bench.cascade`, once with the plugin and once for stock SGLang. Weights and tokens are random: what is
measured does not depend on their values.

How long a part of a long prompt takes is measured on turns of a conversation: each has as many tokens, goes on from
what the turns before left, and is answered with one token, which the next turn begins with. So turn n computes the
tokens [n · part, (n + 1) · part) of one stream, as a single long prompt does, which is measured besides. What scores
add is seen beside a stream of the same engine that keeps none (`selection` off); it has cache updates like the other,
which `launch.bench.cascade` measures alone.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ext.attention.stream_policy import CONVERSATION_KEY_BYTES
from sglang_ext.launch.answers import completed
from sglang_ext.policies.cascade import Cascade
from sglang_ext.types import Json, JsonObject

if TYPE_CHECKING:
    from sglang_ext.names import Engine


ROLES = ("ours", "stock")
PARTS: JsonObject = {"conversation": "parts", "conversation_key": secrets.token_urlsafe(CONVERSATION_KEY_BYTES)}
"""The conversation that is measured, begun anew with a key of its own."""
TOKENS = (50, 380)
"""Random tokens are drawn from here: inside every vocabulary."""
STEPPING = 5
"""Runs of what takes a second."""
ROOM = 1024
"""KV slots of stock SGLang's engine beyond those of its prompts."""
UNSCORED = 3
"""Parts of a stream without scores: what they add is the difference. In the first the window fills, kernels compile."""


def drawn(tokens: int, seed: int) -> list[int]:
    dice = random.Random(seed)
    return dice.choices(range(*TOKENS), k=tokens)


def timed(engine: Engine, tokens: Sequence[int], new_tokens: int = 1, **custom: Json) -> float:
    """Seconds until a prompt is answered.

    Raises:
        RuntimeError: the answer failed, or has another length, so that something else was measured.
    """
    params: JsonObject = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    if custom:
        params["custom_params"] = custom
    begin = time.perf_counter()
    answer = completed(engine.generate(input_ids=list(tokens), sampling_params=params))
    seconds = time.perf_counter() - begin
    if answer["meta_info"]["completion_tokens"] != new_tokens:
        raise RuntimeError(f"{answer['meta_info']}: expected an answer of {new_tokens} tokens")
    return seconds


def decoding(engine: Engine, steps: int, repeats: int, prompt: Sequence[int], **custom: Json) -> list[float]:
    """Seconds a decoding step, from answers of steps + 1 tokens and of one to the same prompt."""
    timed(engine, prompt, 1, **custom)
    found = []
    for _ in range(repeats):
        short = timed(engine, prompt, 1, **custom)
        found.append((timed(engine, prompt, steps + 1, **custom) - short) / steps)
    return found


def parts(engine: Engine, total: int, part: int, **custom: Json) -> list[float]:
    """Seconds of each part of one long stream, with the policy's settings in `custom`."""
    found = []
    for number in range(total // part):
        goes_on = number > 0  # it begins with the token of the answer before it
        tokens = drawn(part - goes_on, number)
        found.append(timed(engine, tokens, **PARTS, **custom, **({"continue": True} if goes_on else {})))
    return found


def ours(args: argparse.Namespace, cascade: Cascade, common: JsonObject) -> JsonObject:
    from sglang_ext import Engine

    policy = {name: getattr(cascade, name) for name in ("window", "cascades", "sinks", "stride")}
    engine = Engine(
        attention_backend="cascade",
        policy=policy,
        max_total_tokens=args.slots,
        chunked_prefill_size=cascade.stride,
        **common,
    )
    state = engine.get_server_info()["internal_states"][0]["sglang_ext"]
    timed(engine, drawn(cascade.slots + 2 * cascade.stride, 0), 3)  # compiles what was not warmed up
    found: JsonObject = {"attention_backend": state["attention_backend"]}
    found["parts"] = [parts(engine, args.tokens, args.part) for _ in range(args.repeats)]
    goes_on: JsonObject = {**PARTS, "continue": True}
    timed(engine, drawn(max(1, cascade.stride // 2 - 1), 7), **goes_on)  # to the middle of a stride
    found["decode"] = decoding(engine, args.decode_tokens, STEPPING, [60], **goes_on)
    found["whole"] = [timed(engine, drawn(args.tokens, 1 + n)) for n in range(args.repeats)]
    found["dense"] = [timed(engine, drawn(args.dense_tokens, 50 + n)) for n in range(args.repeats)]
    found["unscored"] = parts(engine, UNSCORED * args.part, args.part, selection=False)
    state = engine.get_server_info()["internal_states"][0]["sglang_ext"]
    found["conversation_slots"] = state["conversation_slots"]
    engine.shutdown()
    return found


def stock(args: argparse.Namespace, cascade: Cascade, common: JsonObject) -> JsonObject:
    """SGLang as it is: dense prefill of a prompt, decoding over as many tokens as a cascade keeps."""
    from sglang import Engine

    kept = cascade.sinks + cascade.window + cascade.stride // 2
    room = max(args.dense_tokens, kept + args.decode_tokens) + ROOM
    engine = Engine(attention_backend=args.backend, max_total_tokens=room, **common)
    timed(engine, drawn(kept, 98))  # compiles what was not warmed up
    dense = []
    for number in range(args.repeats):
        engine.flush_cache()
        dense.append(timed(engine, drawn(args.dense_tokens, 50 + number)))
    found = {"dense": dense, "decode": decoding(engine, args.decode_tokens, STEPPING, drawn(kept, 99))}
    engine.shutdown()
    return {**found, "kept": kept, "backend": args.backend}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=ROLES, required=True)
    parser.add_argument("--backend", required=True, help="attention backend of the stock engine")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    for name in (
        "tokens",
        "part",
        "slots",
        "window",
        "cascades",
        "sinks",
        "stride",
        "decode-tokens",
        "repeats",
        "dense-tokens",
    ):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--engine", type=json.loads, required=True, help="more arguments of the engine, as JSON")
    args = parser.parse_args(argv)
    cascade = Cascade(args.window, args.cascades, args.sinks, args.stride)
    common = {"model_path": str(args.model), "load_format": "dummy", "log_level": "warning", "page_size": 1}
    measure = ours if args.role == "ours" else stock
    args.out.write_text(json.dumps(measure(args, cascade, {**common, **args.engine})))
    return 0


if __name__ == "__main__":
    sys.exit(main())
