"""Evicted blocks of unpinned pools wait in host memory, and come back with the same bytes: nothing is encoded again."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import Server, answer_logprobs, answer_tokens, model, until
from tests.oracle import models

QUESTION = "how do i activate my card?"
POLICY = "SGLANG_EXT_POLICY"
HOST_GB = 0.05
TOTAL = 1200
NAMES = ("a", "b", "c", "d")


def demos(seed: int, n: int = 24) -> list[dict[str, str]]:
    """Demonstrations that no other pool here has."""
    return [{**each, "input": f"{seed} {each['input']}"} for each in models.demonstrations(n, seed)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    env = {POLICY: json.dumps({"host_gb": HOST_GB}), "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}
    with Server(model(), env=env, max_total_tokens=TOTAL, chunked_prefill_size=128) as running:
        yield running
        assert running.faults() == []


def stats(server: Server) -> dict[str, int]:
    return server.state()["sglang_ext"]


def said(answer: Any) -> tuple[list[int], list[int], list[float]]:
    return answer["meta_info"]["sglang_ext"]["blocks"], answer_tokens(answer), answer_logprobs(answer)


def ask(server: Server, name: str, **options: Any) -> tuple[list[int], list[int], list[float]]:
    return said(server.generate(QUESTION, pool=name, **{"ratio": 0.8, **options}))


def evict(server: Server) -> None:
    """Push everything that nobody holds out of the KV cache."""
    for seed in range(4):
        server.generate([7 + (seed * 37 + k * 11) % 300 for k in range(900)], 2)


def flush(server: Server) -> None:
    until(lambda: server.call("POST", "/flush_cache").status_code == 200)


def resident(server: Server, name: str) -> list[bool]:
    return [block["resident"] for block in server.pool(name)["blocks"]]


@pytest.fixture
def pools(server: Server) -> Iterator[dict[str, Any]]:
    """Four unpinned pools, together larger than the KV cache, and what each answers right after it was encoded."""
    flush(server)  # an answer begins with what is there of its question: what earlier tests left was another's
    first = {}
    for seed, name in enumerate(NAMES):
        server.put(name, demos(seed), block_size=4, pinned=False)
        first[name] = ask(server, name)
    assert sum(pool["tokens"] for pool in server.json("GET", "/v1/pools")["pools"]) > TOTAL
    yield first
    for pool in server.json("GET", "/v1/pools")["pools"]:
        server.json("DELETE", f"/v1/pools/{pool['name']}")
    server.idle()
    until(lambda: stats(server)["held_tokens"] == 0)
    assert stats(server)["host_blocks"] == stats(server)["host_pages"] == 0, "what no pool has left the host"


def test_pools_take_turns_and_nothing_is_encoded_again(server: Server, pools: dict[str, Any]) -> None:
    assert len({tuple(answer[1]) for answer in pools.values()}) > 1, "equal answers would show little"
    before = stats(server)
    for _ in range(2):
        for name in NAMES:
            assert ask(server, name) == pools[name], name
    after = stats(server)
    assert after["reencoded_blocks"] == before["reencoded_blocks"]
    assert after["host_returned"] > before["host_returned"] + 8
    assert after["host_pages"] <= after["host_pages_total"]
    assert 0 < after["host_stored_ahead"] <= after["host_stored"]
    stored = after["host_stored"]
    for name in NAMES:
        assert ask(server, name) == pools[name]
    assert stats(server)["host_stored"] == stored, "evicted again, they are there already"
    assert stats(server)["host_blocks"] >= 12


def test_many_at_once(server: Server, pools: dict[str, Any]) -> None:
    dice = random.Random(3)
    asked = [dice.choice(NAMES) for _ in range(40)]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda name: ask(server, name), asked))
    for name, (blocks, tokens, values) in zip(asked, answers, strict=True):
        assert (blocks, tokens) == pools[name][:2]
        assert values == pytest.approx(pools[name][2], abs=1e-4)


def test_an_appended_pool_and_one_that_is_put_again(server: Server, pools: dict[str, Any]) -> None:
    more = demos(40, 8)
    evict(server)
    before = stats(server)
    assert not any(resident(server, "a"))
    info = server.json("POST", "/v1/pools/a/demonstrations", json={"demonstrations": more})
    old = len(info["blocks"]) - 2
    assert stats(server)["host_returned"] == before["host_returned"] + old, "the new blocks alone were encoded"
    appended = ask(server, "a")
    evict(server)
    assert ask(server, "a") == appended
    assert stats(server)["reencoded_blocks"] == before["reencoded_blocks"]
    # The same blocks, all of them encoded now.
    keys = [block["key"] for block in server.pool("a")["blocks"]]
    flush(server)
    blocks, tokens, values = ask(server, "a")
    assert (blocks, tokens) == appended[:2] and values == pytest.approx(appended[2], abs=1e-4)
    # A pinned pool takes from the host what an unpinned one has left there.
    ask(server, "a", ratio=1.0)
    evict(server)
    before = stats(server)
    server.put("again", demos(0), block_size=4, pinned=True)
    assert [block["key"] for block in server.pool("again")["blocks"]] == keys[:old]
    assert stats(server)["host_returned"] == before["host_returned"] + old
    assert ask(server, "again")[:2] == pools["a"][:2]


def test_deleted_and_purged_blocks_leave_the_host(server: Server, pools: dict[str, Any]) -> None:
    evict(server)
    before = stats(server)["host_blocks"]
    server.put("twin", demos(0), block_size=4, pinned=False)  # the blocks of `a`
    server.json("DELETE", "/v1/pools/a")
    assert stats(server)["host_blocks"] == before, "another pool has them"
    evict(server)
    assert ask(server, "twin") == pools["a"]
    blocks = len(server.pool("b")["blocks"])
    server.json("DELETE", "/v1/pools/b")
    assert stats(server)["host_blocks"] == before - blocks
    last = server.pool("c")["blocks"][-1]["demonstrations"][0]
    keys = {block["key"] for block in server.pool("c")["blocks"]}
    server.json("DELETE", f"/v1/pools/c/demonstrations/{last}?purge=true")
    gone = keys - {block["key"] for block in server.pool("c")["blocks"]}
    assert len(gone) == 1
    until(lambda: stats(server)["host_blocks"] == before - blocks)  # the block in its place was copied ahead


def test_a_flush_empties_the_host(server: Server, pools: dict[str, Any]) -> None:
    evict(server)
    before = stats(server)
    assert before["host_blocks"] > 8
    flush(server)
    assert stats(server)["host_blocks"] == stats(server)["host_pages"] == 0
    for name in NAMES:
        blocks, tokens, values = ask(server, name)
        assert (blocks, tokens) == pools[name][:2] and values == pytest.approx(pools[name][2], abs=1e-4)
    after = stats(server)
    assert after["reencoded_blocks"] > before["reencoded_blocks"] + 8
    assert after["host_returned"] == before["host_returned"]
    evict(server)
    assert stats(server)["host_blocks"] > 8
    server.json("POST", "/update_weights_from_disk", json={"model_path": str(model()), "flush_cache": True})
    assert stats(server)["host_blocks"] == stats(server)["host_pages"] == 0, "new weights write other keys and values"
    assert ask(server, "a")[:2] == pools["a"][:2]


def test_two_ranks_keep_their_own_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_ext import Engine

    folder = models.save_model("llama", tmp_path / "llama")
    cores = os.cpu_count() or 1
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"0|{min(1, cores - 1)}")
    options: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 600, "chunked_prefill_size": 128, "tp_size": 2}
    engine = Engine(model_path=str(folder), policy={"host_gb": HOST_GB}, **options)

    def answers(name: str) -> Any:
        custom = {"pool": name, "ratio": 0.8}
        parameters = {"max_new_tokens": 6, "temperature": 0, "custom_params": custom}
        return [
            engine.generate(f"{number} {QUESTION}", parameters, return_logprob=True)["meta_info"][
                "output_token_logprobs"
            ]
            for number in range(2)
        ]

    try:
        first = {}
        for seed, name in enumerate(NAMES):
            engine.create_pool(name, demos(seed, 12), block_size=3, pinned=False)
            first[name] = answers(name)
        assert {name: answers(name) for name in NAMES} == first
        shown = engine.get_server_info()["internal_states"][0]["sglang_ext"]
        assert shown["reencoded_blocks"] == 0 and shown["host_returned"] > 4
    finally:
        engine.shutdown()
