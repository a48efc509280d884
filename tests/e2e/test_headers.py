"""Chats over pools with a system prompt, a developer message and tools of their own, beside ``transformers``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.entrypoints.openai.protocol import Tool

from sglang_ext.config import PoolOptions
from tests.e2e.server import Server, error_of, model, until
from tests.oracle import models, oracle

DEMOS = models.demonstrations(24)
QUESTION = "how do i activate my card?"
BLOCK = 6
TOLERANCE = 1e-4  # on log-probabilities, float32 beside float32
TOOL = {
    "type": "function",
    "function": {"name": "refund", "description": "pay money back", "parameters": {"type": "object", "properties": {}}},
}
TEMPLATE = models.CHAT_TEMPLATE.replace(
    "{{ bos_token }}",
    "{{ bos_token }}{% if tools %}{% for tool in tools %}{{ tool['function'] | tojson }}{% endfor %}{% endif %}",
)
SYSTEM: list[Any] = [{"role": "system", "content": "answer like a clerk"}]
DEVELOPER: list[Any] = [*SYSTEM, {"role": "developer", "content": "and be brief"}]


@cache
def folder() -> Path:
    path = model("llama")
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    env = {"SGLANG_EXT_SETTINGS": json.dumps({"pool_metrics": True, "max_headers": 2, "max_header_tokens": 400})}
    with Server(folder(), env=env, max_total_tokens=6000, chunked_prefill_size=128, enable_metrics=True) as running:
        running.put("p", DEMOS, block_size=BLOCK)
        yield running
        until(lambda: running.idle() is not None)
        assert running.faults() == []


def ask(server: Server, messages: list[Any], **more: Any) -> Any:
    """The one choice of a chat over all blocks of the pool, with what SGLang says of its tokens."""
    custom = {"pool": "p", "ratio": 1.0, **more.pop("custom_params", {})}
    body = {
        "model": "m",
        "messages": [*messages, {"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 4,
        "return_meta_info": True,
        "custom_params": custom,
        **more,
    }
    return server.json("POST", "/v1/chat/completions", json=body)["choices"][0]


def errors(server: Server, messages: list[Any], choice: Any, **variables: Any) -> list[float]:
    """Of each token of an answer: how far its log-probability is from that of the chat written out and masked."""
    reference, tokenizer = models.load_model(folder(), torch.float32), models.load_tokenizer(folder())
    shown = PoolOptions().render_query(QUESTION)[0]
    chat = [*messages, {"role": "user", "content": "MARK" + shown}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **variables)
    header, own = (tokenizer.encode(part, add_special_tokens=False) for part in text.split("MARK"))
    blocks = [list(block["token_ids"]) for block in server.pool("p", tokens=True)["blocks"]]
    blocks[0] = [*header, *blocks[0][1:]]  # behind the header, and not behind BOS alone
    encoded = oracle.encode(reference, blocks)
    meta = choice["meta_info"]
    tokens = [token for _, token, *_ in meta["output_token_logprobs"]]
    pieces = oracle.whole_blocks(blocks, meta["sglang_ext"]["blocks"])
    table = oracle.log_probs(reference, encoded, pieces, [*own, *tokens])
    return [
        max(abs(value - float(table[len(own) - 1 + at, token])), float(table[len(own) - 1 + at].max()) - value)
        for at, (value, token, *_) in enumerate(meta["output_token_logprobs"])
    ]


@pytest.mark.parametrize(
    ("messages", "tools"),
    [([], []), (SYSTEM, []), (DEVELOPER, []), ([], [TOOL]), (DEVELOPER, [TOOL])],
    ids=["none", "system", "developer", "tools", "all"],
)
def test_answers_are_those_of_the_chat_written_out(server: Server, messages: list[Any], tools: list[Any]) -> None:
    given = {"tools": tools} if tools else {}
    choice = ask(server, messages, **given)
    written = {"tools": [Tool(**tool).model_dump() for tool in tools]} if tools else {}  # as SGLang hands them on
    found = errors(server, messages, choice, **written)
    assert len(found) == 6 and max(found) < TOLERANCE
    if given or messages:
        assert max(errors(server, [], choice)) > 100 * TOLERANCE, "the header makes no difference to these answers"


def test_a_header_is_encoded_once_and_the_one_longest_unused_gives_way(server: Server) -> None:
    def encoded() -> float:
        lines = [line for line in server.call("GET", "/metrics").text.splitlines() if "pool_headers_total{" in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def blocks() -> int:
        return int(server.state()["sglang_ext"]["reencoded_blocks"])

    first, second, third = ([{"role": "system", "content": f"clerk number {n}"}] for n in range(3))
    before, written = encoded(), blocks()
    answers = [ask(server, messages)["message"]["content"] for messages in (first, second, first, second, first)]
    assert answers[0] == answers[2] == answers[4] and answers[1] == answers[3]
    assert encoded() == before + 2 and blocks() == written + 2 * len(DEMOS) // BLOCK
    shown = server.pool("p")["headers"]
    assert [each["requests"] for each in shown] == [2, 3] and all(not each["requests_in_flight"] for each in shown)
    ask(server, third)
    assert [each["requests"] for each in server.pool("p")["headers"]] == [3, 1]
    assert ask(server, second)["message"]["content"] == answers[1] and encoded() == before + 4


def test_the_second_turn_finds_the_first_and_a_label_is_chosen(server: Server) -> None:
    turn = ask(server, DEVELOPER, tools=[TOOL])
    body = {
        "model": "m",
        "messages": [
            *DEVELOPER,
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": turn["message"]["content"]},
            {"role": "user", "content": "and why is that?"},
        ],
        "tools": [TOOL],
        "max_tokens": 4,
        "temperature": 0,
        "custom_params": {"pool": "p", "ratio": 1.0},
    }
    usage = server.json("POST", "/v1/chat/completions", json=body)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= turn["meta_info"]["prompt_tokens"] - 1
    chosen = ask(server, SYSTEM, custom_params={"choose": "likely"}, logprobs=False, top_logprobs=None)
    probs = ask(server, SYSTEM, custom_params={"label_probs": True})["meta_info"]["sglang_ext"]["label_probs"]
    assert chosen["message"]["content"] == max(probs, key=probs.__getitem__)


def test_a_long_header_is_refused(server: Server) -> None:
    messages = [{"role": "system", "content": "clerk " * 500}, {"role": "user", "content": QUESTION}]
    body = {"model": "m", "messages": messages, "custom_params": {"pool": "p"}}
    answer = server.call("POST", "/v1/chat/completions", json=body)
    assert answer.status_code == 413 and "--max-header-tokens" in error_of(answer), answer.text
    assert server.pool("p")["requests_in_flight"] == 0
