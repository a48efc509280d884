"""The engine's half of ``sglang-ext bench dbsa``: one engine in one process, its measurements as JSON.

Run by `launch.bench.dbsa`, once for stock SGLang and once with the plugin, because two engines do not fit into one
process. Weights are random: what is measured does not depend on their values.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import sglang_ext
from sglang_ext.config import PoolOptions
from sglang_ext.launch.bench._stages import profiled
from sglang_ext.launch.demo_data import INTENTS, sentence

HOST_STAGES = ("retrieval", "tokenization")
TOKENIZER = Path(sglang_ext.__file__).resolve().parent / "assets" / "reference"
POOL, OPTIONS = "bench", PoolOptions()
SHAPES: dict[str, dict[str, int]] = {
    "llama-3.1-8b": dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
    ),
    # For trying the benchmark itself on a machine without a GPU.
    "tiny": dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=0,  # the tokenizer's
    ),
}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write_model(folder: Path, shape: str, context: int) -> None:
    """A model folder without weights: Llama's configuration in `shape`, the reference model's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in TOKENIZER.glob("*token*"):
        shutil.copy(path, folder / path.name)
    own = json.loads((TOKENIZER / "config.json").read_text())
    sizes = {**SHAPES[shape]}
    sizes["vocab_size"] = sizes["vocab_size"] or own["vocab_size"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16" if shape != "tiny" else "float32",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": context,
        "bos_token_id": own.get("bos_token_id"),
        "eos_token_id": own.get("eos_token_id"),
        "rope_scaling": ROPE,
        "rope_theta": ROPE["rope_theta"],
        **sizes,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def examples(count: int, seed: int) -> list[dict[str, str]]:
    """Numbered sentences with their labels, of real lengths, no two alike."""
    dice, labels = random.Random(seed), list(INTENTS)
    made = []
    for number in range(count):
        label = labels[number % len(labels)]
        made.append({"input": f"{seed + number}: {sentence(label, dice)}", "output": label})
    return made


def text_of(example: dict[str, str]) -> str:
    """A demonstration as the pool's default template renders it."""
    return OPTIONS.render(example["input"], example["output"]) + OPTIONS.separator


def demonstrations(tokens: int, seed: int = 0) -> list[dict[str, str]]:
    """The first examples that make `tokens` tokens of pool."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(TOKENIZER))
    made, total = examples(tokens // 10, seed), 0
    for number, ids in enumerate(tokenizer([text_of(e) for e in made], add_special_tokens=False)["input_ids"]):
        total += len(ids)
        if total >= tokens:
            return made[: number + 1]
    raise ValueError(f"{len(made)} examples make {total} tokens, fewer than the {tokens} asked for")


class Loop:
    """A closed loop of questions: `concurrency` of them are always under way."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def run(self, requests: Sequence[dict[str, Any]], concurrency: int) -> dict[str, Any]:
        """Seconds of all, and of one (quantiles); of retrieval and tokenization where pools are asked."""
        host: dict[str, float] = {}

        async def everything() -> list[float]:
            gate = asyncio.Semaphore(concurrency)

            async def one(request: dict[str, Any]) -> float:
                async with gate:
                    begin = time.perf_counter()
                    answer = await self.engine.async_generate(**request)
                    seconds = time.perf_counter() - begin
                    for stage in HOST_STAGES:
                        spent = answer["meta_info"].get("sglang_ext", {}).get(f"{stage}_ms", 0.0)
                        host[stage] = host.get(stage, 0.0) + spent * 1e-3
                    return seconds

            return list(await asyncio.gather(*(one(request) for request in requests)))

        begin = time.perf_counter()
        latencies = self.engine.loop.run_until_complete(everything())
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "requests": len(requests), "latency": _quantiles(latencies), "host": host}


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(seconds, q)) for q in (10, 50, 90, 99)}


def stages(loop: Loop, make: Callable[[int], dict[str, Any]], concurrency: int, first: int) -> dict[str, float]:
    """Seconds a request by stage, of one profiled round of `concurrency` questions from number `first` on, asked anew.

    What the host does happens beside the GPU's work, so that the parts add up to more than `wall`.
    """
    requests = [make(first + index) for index in range(max(2, concurrency))]
    result: dict[str, Any] = {}
    before = _stitched(loop.engine)
    gpu = profiled(loop.engine, lambda: result.update(loop.run(requests, concurrency)))
    found = {**result["host"], "stitch": _stitched(loop.engine) - before, **gpu, "wall": result["seconds"]}
    return {name: seconds / len(requests) for name, seconds in found.items()}


def _stitched(engine: Any) -> float:
    state = engine.get_server_info()["internal_states"][0]
    return float(state["sglang_ext"]["stitch_seconds"])


def measure(loop: Loop, make: Callable[[int], dict[str, Any]], args: argparse.Namespace, light: bool = False) -> Any:
    """Requests a second at each concurrency: a warm-up, then `--repeats` runs of questions never asked before.

    `light` is for what takes seconds a request: a few of them, at the first concurrency only.
    """
    found: dict[str, Any] = {}
    number = next(args.fresh)
    for concurrency in args.concurrency[:1] if light else args.concurrency:
        count = 4 if light else _questions_a_run(args, concurrency)
        runs = []
        for repeat in range(args.repeats + 1):
            requests = [make(number + index) for index in range(count)]
            number += count
            result = loop.run(requests, concurrency)
            if repeat:
                runs.append(result)
        found[str(concurrency)] = runs
    return found


def _questions_a_run(args: argparse.Namespace, concurrency: int) -> int:
    return int(max(args.min_requests, args.rounds * concurrency))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=("stock", "ours"), required=True)
    parser.add_argument("--backend", default="flashinfer", help="attention backend of the stock engine")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--block-size", type=int, required=True)
    parser.add_argument("--ratio", type=float, required=True)
    parser.add_argument("--label-tokens", type=int, nargs="+", default=[4])
    parser.add_argument("--concurrency", type=int, nargs="+", required=True)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--min-requests", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--larger", type=int, default=0, help="tokens of a second, larger pool to encode (0: none)")
    parser.add_argument("--decode-tokens", type=int, default=64, help="tokens of the answers whose steps are profiled")
    parser.add_argument("--engine", type=json.loads, default={}, help="more arguments of the engine, as JSON")
    args = parser.parse_args(argv)
    # Where each measurement's questions begin: what was asked before would be cached.
    args.fresh = itertools.count(0, (args.repeats + 1) * sum(_questions_a_run(args, n) for n in args.concurrency))

    found = _stock(args) if args.role == "stock" else _ours(args)
    args.out.write_text(json.dumps(found))
    return 0


def empty(engine: Any) -> None:
    """Flush the KV cache. SGLang refuses while the last step of an answered request is still under way.

    Raises:
        RuntimeError: it refused for ten seconds; what follows would have been measured on a warm cache.
    """
    for _ in range(100):
        if engine.flush_cache().success:
            return
        time.sleep(0.1)
    raise RuntimeError("the engine's cache could not be flushed: requests are pending")


def _common(args: argparse.Namespace) -> dict[str, Any]:
    return dict(model_path=str(args.model), load_format="dummy", log_level="warning", page_size=1, **args.engine)


def _questions(seed: int) -> list[str]:
    """More than are ever asked: at 128 at a time, a measurement of four runs takes 2,600."""
    return [example["input"] for example in examples(60_000, 10_000_000 * seed)]


def _sampling(tokens: int, **custom: Any) -> dict[str, Any]:
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return {**params, **({"custom_params": custom} if custom else {})}


def _stock(args: argparse.Namespace) -> dict[str, Any]:
    """SGLang as it is: dense prefill of the pool, Fixed ICL from its cache, RetICL, zero-shot."""
    from sglang import Engine
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(args.model))
    demos = demonstrations(args.tokens)
    pool = [tokenizer(text_of(demo), add_special_tokens=False)["input_ids"] for demo in demos]
    whole = [token for ids in pool for token in ids]
    questions = [tokenizer(OPTIONS.render_query(q)[0], add_special_tokens=False)["input_ids"] for q in _questions(1)]
    engine = Engine(attention_backend=args.backend, **_common(args))
    loop = Loop(engine)
    found: dict[str, Any] = {"tokens": len(whole), "question_tokens": sum(map(len, questions)) / len(questions)}
    one = dict(sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True})
    times = []
    for _ in range(args.repeats + 1):
        empty(engine)
        begin = time.perf_counter()
        engine.generate(input_ids=whole, **one)
        times.append(time.perf_counter() - begin)
    found["prefill"] = times[1:]
    dice = random.Random(0)
    retrieved = max(1, round(args.ratio * len(pool)))

    def fixed(number: int, sampling: dict[str, Any]) -> dict[str, Any]:
        return dict(input_ids=whole + questions[number % len(questions)], sampling_params=sampling)

    def retrieval(number: int, sampling: dict[str, Any]) -> dict[str, Any]:
        chosen = dice.sample(pool, retrieved)
        ids = [token for demo in chosen for token in demo] + questions[number % len(questions)]
        return dict(input_ids=ids, sampling_params=sampling)

    def zero(number: int, sampling: dict[str, Any]) -> dict[str, Any]:
        return dict(input_ids=[7 + number % 50, *questions[number % len(questions)]], sampling_params=sampling)

    found["answers"] = {str(tokens): {} for tokens in args.label_tokens}
    for tokens in args.label_tokens:
        found["answers"][str(tokens)]["zero-shot"] = measure(loop, _asking(zero, _sampling(tokens)), args)
    engine.generate(input_ids=whole, **one)
    for tokens in args.label_tokens:
        found["answers"][str(tokens)]["fixed"] = measure(loop, _asking(fixed, _sampling(tokens)), args)
    tokens = args.label_tokens[0]  # seconds a request, whatever its answer
    found["answers"][str(tokens)]["retrieval"] = measure(loop, _asking(retrieval, _sampling(tokens)), args, light=True)
    engine.shutdown()
    return found


def _ours(args: argparse.Namespace) -> dict[str, Any]:
    """The plugin: block-sparse encoding, appending, answers over the selected blocks, plain requests."""
    from transformers import AutoTokenizer

    from sglang_ext import Engine

    engine = Engine(**_common(args))
    loop = Loop(engine)
    demos = demonstrations(args.tokens)
    questions = _questions(1)
    state = engine.get_server_info()["internal_states"][0]["sglang_ext"]
    found: dict[str, Any] = {"encode": [], "attention_backend": state["attention_backend"]}
    options = {"block_size": args.block_size}
    for repeat in range(args.repeats + 1):
        if repeat:
            engine.delete(POOL)
        empty(engine)
        begin = time.perf_counter()
        info = engine.create_pool(POOL, demos, **options)
        found["encode"].append(time.perf_counter() - begin)
    found["encode"] = found["encode"][1:]
    found["tokens"], found["blocks"] = info["tokens"], len(engine.pool(POOL)["blocks"])
    found["append"] = _append(engine, args, POOL)

    def over(number: int, sampling: dict[str, Any]) -> dict[str, Any]:
        return dict(prompt=questions[number % len(questions)], sampling_params=sampling)

    tokenizer = AutoTokenizer.from_pretrained(str(args.model))
    asked = [tokenizer(OPTIONS.render_query(q)[0], add_special_tokens=False)["input_ids"] for q in questions]

    def plain(number: int, sampling: dict[str, Any]) -> dict[str, Any]:
        return dict(input_ids=[7 + number % 50, *asked[number % len(asked)]], sampling_params=sampling)

    found["answers"] = {}
    for tokens in args.label_tokens:
        asks = {
            "zero-shot": _asking(plain, _sampling(tokens)),
            "dbsa": _asking(over, _sampling(tokens, pool=POOL, ratio=args.ratio)),
            "all blocks": _asking(over, _sampling(tokens, pool=POOL, ratio=1.0)),
        }
        found["answers"][str(tokens)] = {name: measure(loop, make, args) for name, make in asks.items()}
    if args.larger:
        engine.delete(POOL)
        empty(engine)
        many = demonstrations(args.larger, seed=50_000)
        begin = time.perf_counter()
        info = engine.create_pool("larger", many, **options)
        found["larger"] = {"tokens": info["tokens"], "seconds": time.perf_counter() - begin}
        found["append larger"] = _append(engine, args, "larger")
        engine.delete("larger")
        empty(engine)
        engine.create_pool(POOL, demos, **options)
    # Last: a profiler that has run goes on slowing launches down.
    for name, tokens in (("stages", args.label_tokens[0]), ("decode stages", args.decode_tokens)):
        make = _asking(over, _sampling(tokens, pool=POOL, ratio=args.ratio))
        found[name] = {f"{n} at a time": stages(loop, make, n, next(args.fresh)) for n in args.concurrency if tokens}
    engine.shutdown()
    return found


def _asking(make: Callable[..., dict[str, Any]], sampling: dict[str, Any]) -> Callable[[int], dict[str, Any]]:
    """Number of a question -> the request."""
    return lambda number: make(number, sampling)


def _append(engine: Any, args: argparse.Namespace, pool: str) -> list[float]:
    """Seconds of appending one block of demonstrations, each time another one."""
    times = []
    for repeat in range(args.repeats + 1):
        more = examples(args.block_size, 1_000_000 * (repeat + 1))
        begin = time.perf_counter()
        engine.append(pool, more)
        times.append(time.perf_counter() - begin)
    return times[1:]


if __name__ == "__main__":
    sys.exit(main())
