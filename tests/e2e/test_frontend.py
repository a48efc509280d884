"""SGLang's frontend language over a pool: `gen` and `select` through sglang_ext.RuntimeEndpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sglang as sgl

import sglang_ext
from tests.e2e.server import Server, model
from tests.oracle import models

DEMOS = models.demonstrations(24)
QUESTION = "how do i activate my card?"
CHOICES = ["card", "card issue", "money", "other", "lost item"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(model(), max_total_tokens=6000, chunked_prefill_size=128) as running:
        running.put("p", DEMOS, block_size=6)
        yield running
        assert running.faults() == []


@pytest.fixture(scope="module")
def backend(server: Server) -> Any:
    return sglang_ext.RuntimeEndpoint(server.url)


@sgl.function
def answer(s: Any, question: str) -> Any:
    s += question + "\nLabel:"
    s += sgl.gen("answer", max_tokens=8, temperature=0, ignore_eos=True)


@sgl.function
def choose(s: Any, question: str) -> Any:
    s += question + "\nLabel: "
    s += sgl.select("label", choices=CHOICES)


@sgl.function
def both(s: Any, question: str) -> Any:
    s += question + "\nLabel: "
    s += sgl.select("label", choices=CHOICES)
    s += "\n\nand why?\n"
    s += sgl.gen("why", max_tokens=6, temperature=0, ignore_eos=True)


def by_hand(server: Server, blocks: list[int], question: str) -> tuple[str, dict[str, float]]:
    """The choice whose tokens have the highest mean log-probability after the prompt, as `select` defines it."""
    tokenizer = models.load_tokenizer(model())
    prompt = question + "\nLabel: "
    scores = {}
    for choice in CHOICES:
        ids = tokenizer(prompt + choice, add_special_tokens=False)["input_ids"]
        body = server.payload(ids, 0, pool="p", block_ids=blocks)
        values = server.json("POST", "/generate", json=body)["meta_info"]["input_token_logprobs"]
        start = max(len(tokenizer(prompt, add_special_tokens=False)["input_ids"]) - 2, 0)
        part = [value for value, *_ in values[-len(ids) :]][start:]
        part = [value for value in part if value is not None]
        scores[choice] = sum(part) / len(part)
    return max(scores, key=scores.get), scores


def test_gen_is_generate(server: Server, backend: Any) -> None:
    state = answer.run(question=QUESTION, backend=backend.with_pool("p", ratio=0.5))
    expected = server.generate(QUESTION + "\nLabel:", 8, pool="p", ratio=0.5, raw=True)
    assert state["answer"] == expected["text"]
    meta = state.get_meta_info("answer")["sglang_ext"]
    assert meta["blocks"] == expected["meta_info"]["sglang_ext"]["blocks"]


def test_gen_streams(server: Server, backend: Any) -> None:
    bound = backend.with_pool("p", ratio=0.5)
    state = answer.run(question=QUESTION, backend=bound, stream=True)
    streamed = "".join(state.text_iter("answer"))
    assert streamed == answer.run(question=QUESTION, backend=bound)["answer"]


@pytest.mark.parametrize("question", [d["input"] for d in models.demonstrations(4, seed=6)])
def test_select_scores_as_by_hand(server: Server, backend: Any, question: str) -> None:
    prompt = question + "\nLabel: "
    blocks = server.generate(prompt, 1, pool="p", ratio=0.5, raw=True)["meta_info"]["sglang_ext"]["blocks"]
    state = choose.run(question=question, backend=backend.with_pool("p", ratio=0.5))
    best, scores = by_hand(server, blocks, question)
    ordered = sorted(scores.values())
    if ordered[-1] - ordered[-2] > 0.05:  # nearer ones may turn on how the boundary is tokenized
        assert state["label"] == best, scores
    assert state["label"] in CHOICES


def test_select_then_gen(backend: Any) -> None:
    state = both.run(question=QUESTION, backend=backend.with_pool("p", ratio=0.5))
    assert state["label"] in CHOICES and state["why"]


def test_without_a_pool_it_is_the_stock_endpoint(server: Server, backend: Any) -> None:
    stock = sgl.RuntimeEndpoint(server.url)
    for program in (answer, choose):
        ours, theirs = program.run(question=QUESTION, backend=backend), program.run(question=QUESTION, backend=stock)
        assert ours.text() == theirs.text()


def test_options_are_checked_at_once(backend: Any) -> None:
    with pytest.raises(ValueError, match="order"):
        backend.with_pool("p", order="odd")
    with pytest.raises(ValueError, match="nonsense"):
        backend.with_pool("p", nonsense=1)
