"""The engine's half of ``sglang-ext bench ltri``: one engine in one process, its measurements as JSON.

Run by `launch.bench.ltri` for Ltri-LLM, for StreamingLLM with as many visible tokens, and for stock SGLang. Weights and
tokens are random. Such a model has no retrieval heads, so a list of heads is named here: one in each of 14 layers.

Parts of a long prompt are measured on turns of a conversation, as in `_cascade_engine`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ext.launch.answers import completed
from sglang_ext.launch.bench._cascade_engine import drawn, parts, timed
from sglang_ext.launch.bench._turns import say
from sglang_ext.policies.heads import Heads
from sglang_ext.policies.ltri_options import Ltri
from sglang_ext.types import Json, JsonObject

if TYPE_CHECKING:
    from sglang_ext.names import Engine

ROLES = ("ltri", "voted", "streaming_llm", "stock")
VOTING = {1: 10, 5: 11, 8: 1, 10: 14, 13: 6, 14: 18, 15: 30, 16: 1, 17: 29, 20: 14, 22: 8, 24: 27, 27: 7, 30: 3}
"""Layer -> the head that votes in it, counted around where a model has fewer."""
SCORE = 0.5
"""Score of each of these heads."""
LONG = 1000
"""Seed of the first of the long prompts."""


def write_heads(path: Path, layers: int, heads: int) -> None:
    """A heads file of `VOTING` for a model of this size."""
    voting = {layer: head % heads for layer, head in VOTING.items()}
    rows = tuple(tuple(SCORE if voting.get(layer) == head else 0.0 for head in range(heads)) for layer in range(layers))
    Heads("random weights", "", rows, {"what": "chosen for a benchmark"}).save(path)


def stepping(engine: Engine, steps: int, repeats: int, batch: int, tokens: int) -> list[float]:
    """Seconds a decoding step of so many requests, each with a prompt of its own of so many tokens.

    A run is measured from the first token of the request that begins last. All run then, and stay for as many steps.

    Raises:
        RuntimeError: one had so many tokens before the last began that it would not run all the while: the engine does
            not run so many at once; or tokens came in parts larger than what is measured.
    """
    prompts = [drawn(tokens, 100 + number) for number in range(batch)]
    params: JsonObject = {"temperature": 0, "max_new_tokens": 4 * steps, "ignore_eos": True}

    def seconds() -> float:
        """Of a step: one run."""
        counts, marks = dict[int, int](), list[tuple[float, int]]()
        for part in engine.generate(input_ids=prompts, sampling_params=[params] * batch, stream=True):
            number, count = part.get("index", 0), completed(part)["meta_info"]["completion_tokens"]
            if number not in counts and max(counts.values(), default=0) > 2 * steps:
                raise RuntimeError(f"{batch} requests do not run at once: {counts} tokens came before request {number}")
            begins = number not in counts and len(counts) == batch - 1
            counts[number] = count
            if begins or (len(counts) == batch and number == list(counts)[-1]):
                marks.append((time.perf_counter(), count))
        begun, first = marks[0]
        behind = [mark for mark in marks if mark[1] >= first + steps]
        if not behind:
            raise RuntimeError(f"tokens came in parts too large to measure {steps} steps: at {[at for _, at in marks]}")
        ended, last = behind[0]
        return (ended - begun) / (last - first)

    seconds()
    return [seconds() for _ in range(repeats)]


def forked(engine: Engine, prompt: Sequence[int], repeats: int) -> JsonObject:
    """Seconds until another question about a document that was read is answered with one token.

    Returns:
        `end to end`, and `from the queue`: from when the scheduler put the request into its queue.
    """
    found: JsonObject = {"end to end": [], "from the queue": [], "cached_tokens": []}
    for number in range(repeats):
        begin = time.perf_counter()
        params: JsonObject = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        asked = [*prompt, *drawn(64, 200 + number)]
        meta = completed(engine.generate(input_ids=asked, sampling_params=params))["meta_info"]
        found["end to end"].append(time.perf_counter() - begin)
        queued = meta["forward_entry_time"] - meta["queue_time"]
        found["from the queue"].append(meta["prefill_finished_time"] - queued)
        found["cached_tokens"].append(meta["cached_tokens"])
    return found


def serving(args: argparse.Namespace, policy: JsonObject, common: JsonObject) -> Engine:
    """An engine of the method, which has compiled what it launches."""
    from sglang_ext import Engine

    settings = Ltri(**policy)
    engine = Engine(
        attention_backend="ltri",
        policy={**policy, "heads": str(args.heads), "host_gb": args.host_gb},
        max_total_tokens=args.streams * settings.slots,
        chunked_prefill_size=settings.chunk * args.chunks,
        enable_metrics=True,  # answers say when the scheduler got them
        **common,
    )
    timed(engine, drawn(settings.slots + 4 * settings.chunk, 0), 3)
    return engine


def reading(engine: Engine, args: argparse.Namespace) -> JsonObject:
    """Seconds of the long prompt, each time another one, and what /server_info says before and after the last."""
    found: JsonObject = {"whole": []}
    for number in range(args.whole_runs):
        engine.flush_cache()
        found["before"] = state_of(engine)
        found["whole"].append(timed(engine, drawn(args.tokens, LONG + number)))
        said("a long prompt", found["whole"][-1])
    return {**found, "after": state_of(engine)}


def voted(args: argparse.Namespace, policy: JsonObject, common: JsonObject) -> JsonObject:
    """The long prompt, whose blocks come back as the votes fall."""
    engine = serving(args, {**policy, "renewed": 0}, common)
    found = reading(engine, args)
    engine.shutdown()
    return found


def ltri(args: argparse.Namespace, policy: JsonObject, common: JsonObject) -> JsonObject:
    engine, settings = serving(args, policy, common), Ltri(**policy)
    found = reading(engine, args)
    found["fork"] = said("forks", forked(engine, drawn(args.tokens, LONG + args.whole_runs - 1), args.forks))
    engine.flush_cache()
    document = drawn(args.fork_tokens, 2)
    timed(engine, document)
    found["short_fork"] = said("forks of a shorter document", forked(engine, document, args.forks))
    found["parts"] = []
    for _ in range(args.repeats if args.parts else 0):
        engine.flush_cache()
        found["parts"].append(said("parts", parts(engine, args.parts * args.part, args.part)))
    engine.flush_cache()
    tokens = settings.slots + 2 * settings.chunk
    found["decode"] = {n: stepping(engine, args.decode_tokens, args.repeats, n, tokens) for n in args.batch}
    said("decoding steps", found["decode"])
    engine.shutdown()
    return found


def said(what: str, figures: Json) -> Json:
    """Some figures, which are said as soon as they are there: a run that is cut short has them in no file."""
    say(f"{what}: {json.dumps(figures)}")
    return figures


def state_of(engine: Engine) -> Json:
    """What /server_info says of the plugin."""
    return engine.get_server_info()["internal_states"][0]["sglang_ext"]


def streaming_llm(args: argparse.Namespace, policy: JsonObject, common: JsonObject) -> JsonObject:
    """Sinks and a window of as many tokens as a chunk sees of window and blocks."""
    from sglang_ext import Engine

    settings = Ltri(**policy)
    window = settings.window + settings.retrieved * settings.block
    own = {"sinks": settings.sinks, "window": window, "stride": settings.chunk}
    slots = settings.sinks + window + settings.chunk
    engine = Engine(
        attention_backend="streaming_llm",
        policy=own,
        max_total_tokens=args.streams * slots,
        chunked_prefill_size=settings.chunk * args.chunks,
        **common,
    )
    timed(engine, drawn(slots + 4 * settings.chunk, 0), 3)
    found = reading(engine, args)
    engine.shutdown()
    return found


def stock(args: argparse.Namespace, policy: JsonObject, common: JsonObject) -> JsonObject:
    """SGLang as it is, over as many tokens as an answer sees."""
    from sglang import Engine

    settings = Ltri(**policy)
    kept = settings.sinks + settings.window + settings.retrieved * settings.block
    room = max((max(args.batch) + 1) * (kept + 512), args.fork_tokens + 1024)
    engine = Engine(attention_backend=args.backend, max_total_tokens=room, enable_metrics=True, **common)
    found: JsonObject = {"decode": {n: stepping(engine, args.decode_tokens, args.repeats, n, kept) for n in args.batch}}
    said("decoding steps", found["decode"])
    engine.flush_cache()
    document = drawn(args.fork_tokens, 2)
    timed(engine, document)
    found["short_fork"] = said("forks of a shorter document", forked(engine, document, args.forks))
    engine.shutdown()
    return {**found, "kept": kept, "backend": args.backend}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=ROLES, required=True)
    parser.add_argument("--backend", required=True, help="attention backend of the stock engine")
    for name in ("model", "heads", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in (
        "tokens",
        "part",
        "parts",
        "streams",
        "chunks",
        "decode-tokens",
        "repeats",
        "forks",
        "fork-tokens",
        "whole-runs",
    ):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--batch", type=int, nargs="+", required=True)
    parser.add_argument("--host-gb", type=float, required=True)
    parser.add_argument("--policy", type=json.loads, required=True, help="settings of Ltri-LLM, as JSON")
    parser.add_argument("--engine", type=json.loads, required=True, help="more arguments of the engine, as JSON")
    args = parser.parse_args(argv)
    common = {"model_path": str(args.model), "load_format": "dummy", "log_level": "warning", "page_size": 1}
    measure = {"ltri": ltri, "voted": voted, "streaming_llm": streaming_llm, "stock": stock}[args.role]
    args.out.write_text(json.dumps(measure(args, args.policy, {**common, **args.engine})))
    return 0


if __name__ == "__main__":
    sys.exit(main())
