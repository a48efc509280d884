"""While a long prompt is prefilled in chunks, new requests begin between two of them, with the same answers."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.server import Server, model, until
from tests.oracle import models

CHUNK = 32
LARGE = [{**d, "input": f"large {d['input']}"} for d in models.demonstrations(260, 3)]
QUESTIONS = [f"question {number} about my card" for number in range(12)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    env = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}
    with Server(
        model("llama", max_position_embeddings=4096),
        env=env,
        max_total_tokens=9000,
        chunked_prefill_size=CHUNK,
        decode_log_interval=1,
    ) as running:
        running.put("base", models.demonstrations(24), block_size=6)
        yield running
        assert running.faults() == []


def batches(log: str) -> list[tuple[int, int]]:
    """(new requests, new tokens) of every prefill batch."""
    found = re.findall(r"Prefill batch,?[^\n]*?#new-seq: (\d+),[^\n]*?#new-token: (\d+)", log)
    return [(int(requests), int(tokens)) for requests, tokens in found]


def test_new_requests_begin_between_two_chunks_of_an_encoding(server: Server) -> None:
    """A block of 100 demonstrations is one request of some fifty chunks: nobody waits for it."""
    options: list[dict[str, Any]] = [{}, {"pool": "base"}, {"pool": "base", "granularity": "example"}]
    asked = [(text, options[number % 3]) for number, text in enumerate(QUESTIONS)]
    alone = [server.generate(text, 6, **each)["output_ids"] for text, each in asked]
    server.call("POST", "/flush_cache", params={"timeout": 20}).raise_for_status()
    server.generate("warm", 2, pool="base")
    mark = len(server.log())
    body = {"demonstrations": LARGE, "block_size": 130, "positions": "local", "pattern": "self", "wait": False}
    server.json("PUT", "/v1/pools/large", json=body)
    answers, beside = [], 0
    for text, each in asked:
        beside += server.pool("large")["status"] == "encoding"
        answers.append(server.generate(text, 6, **each)["output_ids"])
    assert beside > 3, "the encoding was over too soon: nothing was tested"
    until(lambda: server.pool("large")["status"] == "ready", 240)
    assert answers == alone
    sizes = [tokens for _, tokens in batches(server.log()[mark:])]
    own = [at for at, tokens in enumerate(sizes) if tokens < CHUNK]
    first, last = own[0], own[beside - 1]
    waited = sum(tokens == CHUNK for tokens in sizes[first:last])
    # An answer of six tokens is one prefill and five decoding steps, each of them after one chunk.
    assert waited <= 9 * beside, f"{beside} answers took {waited} chunks: they waited for the encoding"
    server.json("DELETE", "/v1/pools/large")


def test_many_at_once_beside_an_encoding_leave_clean_books(server: Server) -> None:
    body = {"demonstrations": LARGE, "block_size": 40, "positions": "local", "wait": False}
    alone = server.generate(QUESTIONS[0], 20, pool="base", ratio=1.0)["output_ids"]
    server.json("PUT", "/v1/pools/large", json=body)
    found: list[Any] = []

    def ask(number: int) -> None:
        for _ in range(3):
            plain = [7 + (number * 31 + k) % 300 for k in range(20 + 40 * (number % 4))]  # some longer than a chunk
            server.generate(plain, 12)
            found.append(server.generate(QUESTIONS[0], 20, pool="base", ratio=1.0)["output_ids"])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    until(lambda: server.pool("large")["status"] == "ready", 240)
    assert len(found) == 24 and all(each == alone for each in found)
    server.json("DELETE", "/v1/pools/large")
    server.idle()
    time.sleep(1)  # SGLang's own idle check comes then, and raises
    held = server.state()["sglang_ext"]["held_tokens"]
    assert held == server.pool("base")["tokens"]
