"""Plain requests on our server: exactly stock SGLang's tokens, log-probabilities and prefix reuse.

The stock server runs first and its answers are kept, so that one server at a time is up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.server import Server, answer_logprobs, answer_tokens, input_logprobs, model
from tests.oracle import models

SHARED = " ".join(d["input"] for d in models.demonstrations(14, seed=2))  # a long common beginning
PROMPTS = [
    "hello",
    "how do i activate my card?",
    SHARED + " first",
    SHARED + " second question, please",  # reuses the one before
    SHARED + " first and then more",  # reuses two before
    " ".join(d["input"] for d in models.demonstrations(20, seed=3)),
    "hello",
]
# Float32 log-probabilities around -5: where a prefix or an earlier chunk is read back, our plain prefill computes new
# rows only (attention.backend), PyTorch takes another kernel for that shape, so that the last bits differ.
LAST_BITS = 5e-6
CHUNK = 48  # cuts the long prompts several times
SETTINGS: dict[str, dict[str, Any]] = {"chunks": {}, "mixed": {"enable_mixed_chunk": True}}
Answers = list[dict[str, Any]]

pytestmark = pytest.mark.timeout(600)  # two server starts


def body(server: Server, prompt: str, start: int = 0) -> dict[str, Any]:
    request = server.payload(prompt, 24)
    # Log-probabilities of the whole prompt would switch prefix reuse off: then only the last tokens'.
    request["logprob_start_len"] = start
    return request


def one_by_one(server: Server) -> tuple[Answers, Answers]:
    """(answers with log-probabilities of the whole prompt, answers that reuse prefixes)."""
    whole = [server.json("POST", "/generate", json=body(server, prompt)) for prompt in PROMPTS]
    server.call("POST", "/flush_cache", params={"timeout": 10}).raise_for_status()
    reuse = [server.json("POST", "/generate", json=body(server, prompt, -1)) for prompt in PROMPTS]
    return whole, reuse


def together(server: Server) -> Answers:
    """All prompts in the server at once, none in its cache."""
    server.call("POST", "/flush_cache", params={"timeout": 10}).raise_for_status()
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        return list(threads.map(lambda p: server.json("POST", "/generate", json=body(server, p, -1)), PROMPTS))


def run(server: Server) -> dict[str, Any]:
    whole, reuse = one_by_one(server)
    return {"whole": whole, "reuse": reuse, "together": together(server)}


@pytest.fixture(scope="module", params=list(SETTINGS))
def answers(request: pytest.FixtureRequest) -> Iterator[dict[str, dict[str, Any]]]:
    """What a stock server and ours say to the same plain requests."""
    options = {"max_total_tokens": 8000, "chunked_prefill_size": CHUNK, **SETTINGS[request.param]}
    with Server(model(), stock=True, **options) as server:
        stock = run(server)
    with Server(model(), **options) as server:
        ours = run(server)
        # Once more beside pool requests: they are in the same batches all the while.
        server.put("busy", models.demonstrations(30), block_size=5)
        stop = threading.Event()
        count = [0]

        def load() -> None:
            while not stop.is_set():
                server.generate("why is my card frozen?", 40, pool="busy", ratio=0.5)
                count[0] += 1

        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()
        beside = [server.json("POST", "/generate", json=body(server, prompt)) for prompt in PROMPTS]
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            reuse = list(pool.map(lambda p: server.json("POST", "/generate", json=body(server, p, -1)), PROMPTS))
        stop.set()
        for thread in threads:
            thread.join()
        assert count[0] >= 3, "there was no load beside"
        assert server.faults() == []
    yield {"stock": stock, "ours": ours, "beside": {"whole": beside, "together": reuse}}


def test_tokens_and_log_probabilities_are_equal(answers: dict[str, dict[str, Any]]) -> None:
    for stock, ours in zip(answers["stock"]["whole"], answers["ours"]["whole"], strict=True):
        assert answer_tokens(ours) == answer_tokens(stock)
        assert answer_logprobs(ours) == pytest.approx(answer_logprobs(stock), abs=LAST_BITS)
        assert input_logprobs(ours) == pytest.approx(input_logprobs(stock), abs=LAST_BITS)
        assert ours["text"] == stock["text"]


def test_prefix_reuse_is_equal(answers: dict[str, dict[str, Any]]) -> None:
    stock, ours = answers["stock"]["reuse"], answers["ours"]["reuse"]
    cached = [answer["meta_info"]["cached_tokens"] for answer in ours]
    assert cached == [answer["meta_info"]["cached_tokens"] for answer in stock]
    assert cached[3] > 100 and cached[4] > cached[3], "the prompts must share long beginnings"
    for left, right in zip(stock, ours, strict=True):
        assert answer_tokens(right) == answer_tokens(left)
        assert answer_logprobs(right) == pytest.approx(answer_logprobs(left), abs=LAST_BITS)


def test_answers_given_together_are_equal(answers: dict[str, dict[str, Any]]) -> None:
    """Batches form by chance, and sums over another batch differ in the last bits."""
    for stock, ours in zip(answers["stock"]["together"], answers["ours"]["together"], strict=True):
        assert answer_tokens(ours) == answer_tokens(stock)
        assert answer_logprobs(ours) == pytest.approx(answer_logprobs(stock), abs=1e-4)


def test_plain_requests_beside_pool_requests_are_equal(answers: dict[str, dict[str, Any]]) -> None:
    for kind in ("whole", "together"):
        for stock, ours in zip(answers["stock"][kind], answers["beside"][kind], strict=True):
            assert answer_tokens(ours) == answer_tokens(stock)
            assert answer_logprobs(ours) == pytest.approx(answer_logprobs(stock), abs=1e-4)
            if kind == "whole":
                assert input_logprobs(ours) == pytest.approx(input_logprobs(stock), abs=1e-4)
