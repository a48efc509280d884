"""One architecture in a real engine of one system: are its answers those of `transformers`?

A plain prompt is compared for every system. Where a system has pools, so is a question behind blocks that each saw
themselves alone: in `transformers` that is one forward under a mask, at the positions that the view gives the blocks.
So nothing here knows how an architecture rotates its keys, and a layer that was rotated wrongly shows.

Where a model has layers with windows or states, a plain prompt is compared with clusters in use: all of them are read
token by token, so that the answer is that of `transformers` again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.systems.registry import systems
from tests.oracle import models

TOLERANCE = 2e-4  # on log-probabilities; a wrong mask or position moves them by more than 1e-2
PROMPT = torch.randint(50, 380, (60,), generator=torch.Generator().manual_seed(0)).tolist()
QUESTION = PROMPT[:20]
CHOSEN = [0, 3, 2]  # blocks out of their order: all but the first are rotated anew
TOP = 8
POLICIES: dict[str, dict[str, Any]] = {
    name: {"window": 128, "stride": 32} for name in ("cascade", "streaming_llm")
}  # the systems' own are for contexts of many thousands of tokens
MIXED_POLICY = {"min_tokens": 32, "sink": 2, "window": 8, "append": 8, "cluster": 4}
POLICIES |= {name: {"window": 128, "block": 16, "chunk": 32} for name in ("ltri", "infllm")}


@contextmanager
def serving(folder: Path, system: str, **arguments: Any) -> Iterator[Any]:
    """An engine of a system, or of SGLang's own `torch_native`."""
    from sglang import Engine as StockEngine

    from sglang_ext import Engine

    ours = system in systems()
    settings: dict[str, Any] = {
        "attention_backend": system,
        **({"policy": POLICIES.get(system)} if ours else {"disable_cuda_graph": True}),
        "dtype": "float32",
        "max_total_tokens": 2048,
        "max_running_requests": 4,
        "chunked_prefill_size": 64,
        "random_seed": 0,
        "log_level": "error",
        "skip_server_warmup": True,
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        engine = (Engine if ours else StockEngine)(model_path=str(folder), **{**settings, **arguments})
        try:
            yield engine
        finally:
            engine.shutdown()
            torch.set_num_threads(threads)


def error_of(folder: Path, system: str, wider: int | None = None) -> float:
    """Start an engine, ask it, and return the largest error of a log-probability.

    Args:
        folder: of the model.
        system: one of ours, or `torch_native`.
        wider: tokens by which SGLang's window is wider than that of `transformers`; None for a model of which
            every layer attends to the whole context.
    """
    if wider is None:
        with serving(folder, system) as engine:
            return deviation(engine, folder, system)
    arguments = {"policy": MIXED_POLICY} if system in systems() else {"disable_radix_cache": True}
    with serving(folder, system, **arguments) as engine:
        return mixed_deviation(engine, folder, wider)


def deviation(engine: Any, folder: Path, system: str) -> float:
    """The largest error of a log-probability in a plain answer, and in one over a pool where the system has pools."""
    model = models.load_model(folder)
    found = [_compared(model, [PROMPT], _ask(engine, PROMPT, None))]
    if system in systems() and not systems()[system].streams:
        pool = engine.create_pool("pool", models.demonstrations(10), block_size=2, pattern="self")
        assert pool["status"] == "ready"
        blocks = [list(block["token_ids"]) for block in engine.pool("pool", tokens=True)["blocks"]]
        answer = _ask(engine, QUESTION, {"pool": "pool", "raw": True, "block_ids": CHOSEN})
        found.append(_compared(model, [*(blocks[i] for i in CHOSEN), QUESTION], answer))
    return max(found)


def mixed_deviation(engine: Any, folder: Path, wider: int) -> float:
    """The largest error of a log-probability in a plain answer of a model that has layers with windows or states.

    Args:
        engine: a server of ours with `MIXED_POLICY`, or SGLang's own.
        wider: tokens by which SGLang's window is wider than that of `transformers`.

    Raises:
        ValueError: no clusters were made.
    """
    model = models.load_model(folder)
    if wider:
        model.config.sliding_window += wider
    ours = engine.server_args.attention_backend in systems()
    answer = _ask(engine, PROMPT, {"p1": 1, "p2": 1} if ours else None)
    if ours and not engine.get_server_info()["internal_states"][0]["sglang_ext"]["cluster_tokens_computed"]:
        raise ValueError(f"an answer to {len(PROMPT)} tokens made no clusters, with {MIXED_POLICY}")
    with torch.no_grad():
        out = model(input_ids=torch.tensor([[*PROMPT, *answer["output_ids"]]]), use_cache=False)
    return _largest(out.logits[0], answer)


def _ask(engine: Any, tokens: list[int], options: dict[str, Any] | None) -> dict[str, Any]:
    params = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True, "custom_params": options}
    return engine.generate(input_ids=tokens, sampling_params=params, return_logprob=True, top_logprobs_num=TOP)


def _compared(model: torch.nn.Module, parts: Sequence[list[int]], answer: dict[str, Any]) -> float:
    """The largest error of a log-probability.

    Args:
        parts: blocks that see themselves alone, and at the end the request's own tokens, which see all.
    """
    answered, last = answer["output_ids"], len(parts) - 1
    tokens = [*(token for part in parts for token in part), *answered]
    owner = torch.tensor([i for i, part in enumerate(parts) for _ in part] + [last] * len(answered))
    allowed = (owner[:, None] == owner) | (owner == last)[:, None]
    allowed &= torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))[None, None]
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor([tokens]),
            position_ids=torch.arange(len(tokens))[None],
            attention_mask=mask,
            use_cache=False,
        )
    return _largest(out.logits[0], answer)


def _largest(logits: torch.Tensor, answer: dict[str, Any]) -> float:
    """The largest error of a log-probability of an answer, beside logits [tokens, vocabulary] that end with its own."""
    meta = answer["meta_info"]
    table = torch.log_softmax(logits.float(), -1)[-len(answer["output_ids"]) - 1 : -1]
    errors = []
    for row, (value, token, *_), top in zip(
        table, meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True
    ):
        known = [(value, token), *((each, other) for each, other, *_ in top)]
        errors += [abs(each - row[other].item()) for each, other in known]
        errors.append(row.max().item() - row[token].item())
    return max(errors)
