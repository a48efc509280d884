"""Two servers that share one folder of pools: put on one, answered by the other, whatever happens to either."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.server import Server, answer_logprobs, answer_tokens, error_of, model, until
from tests.oracle import models

DEMOS = models.demonstrations(24)
QUESTION = "how do i activate my card?"
SCAN = 0.25
WAIT = 2

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def both(folder: Path) -> Iterator[tuple[Server, Server]]:
    settings = {"pool_scan_seconds": SCAN, "max_version_seconds": WAIT}
    env = {"SGLANG_EXT_POOL_DIR": str(folder), "SGLANG_EXT_SETTINGS": json.dumps(settings)}
    limits: dict[str, Any] = {"max_total_tokens": 6000, "chunked_prefill_size": 64}
    with Server(model(), env=env, **limits) as one, Server(model(), env=env, **limits) as two:
        yield one, two


def used(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer["meta_info"]["sglang_ext"]
    return found


def refused(server: Server, pool: str) -> requests.Response:
    return server.call("POST", "/generate", json=server.payload(QUESTION, pool=pool))


def names(server: Server) -> list[str]:
    return [pool["name"] for pool in server.json("GET", "/v1/pools")["pools"]]


def test_put_on_one_and_answered_by_the_other(both: tuple[Server, Server]) -> None:
    one, two = both
    version = one.put("shared", DEMOS, block_size=6)["version"]
    assert version == 1
    answers = [server.generate(QUESTION, pool=f"shared@{version}", ratio=0.5) for server in (two, one)]
    assert answer_tokens(answers[0]) == answer_tokens(answers[1])
    assert answer_logprobs(answers[0]) == pytest.approx(answer_logprobs(answers[1]), abs=1e-4)
    assert [used(each)["version"] for each in answers] == [1, 1]
    assert used(answers[0])["blocks"] == used(answers[1])["blocks"] and used(answers[0])["pool"] == "shared"
    more = [{"id": "more", "input": "one more about a card", "output": "card"}]
    grown = two.json("POST", "/v1/pools/shared/demonstrations", json={"demonstrations": more})
    assert grown["version"] == grown["newest"] == 2
    assert used(one.generate(QUESTION, pool="shared@2", ratio=1.0))["version"] == 2
    until(lambda: used(two.generate(QUESTION, pool="shared"))["version"] == 2)
    assert [block["key"] for block in one.pool("shared")["blocks"]] == [b["key"] for b in two.pool("shared")["blocks"]]


def test_a_pool_is_listed_before_it_is_encoded(both: tuple[Server, Server]) -> None:
    one, two = both
    one.put("listed", DEMOS[:6], block_size=3)
    assert two.pool("listed")["status"] == "stored" and two.pool("listed")["newest"] == 1
    chat = {
        "model": "default",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 4,
        "custom_params": {"pool": "listed@1"},
    }
    told = two.json("POST", "/v1/chat/completions", json=chat)  # it waits for the encoding, too
    assert told["choices"][0]["sglang_ext"]["version"] == 1
    assert two.pool("listed")["status"] == "ready"
    (line,) = two.pool("listed")["versions"]
    assert line["version"] == 1 and line["requests"] >= 1
    one.json("DELETE", "/v1/pools/listed")
    until(lambda: "listed" not in names(two))
    assert refused(two, "listed").status_code == 404


def test_a_version_that_is_not_there_is_409(both: tuple[Server, Server]) -> None:
    one, two = both
    number = one.put("numbered", DEMOS[:6], block_size=3)["version"]
    answer = refused(two, f"numbered@{number + 1}")
    assert answer.status_code == 409 and f"{WAIT} s after it" in error_of(answer)
    one.put("numbered", DEMOS[:9], block_size=3)
    assert used(two.generate(QUESTION, pool=f"numbered@{number + 1}"))["version"] == number + 1
    answer = refused(two, f"numbered@{number}")
    assert answer.status_code == 409 and f"it is at version {number + 1}" in error_of(answer)
    for wrong in ("numbered@", "numbered@0", "numbered@new"):
        answer = refused(two, wrong)
        assert answer.status_code == 400 and "names have no '@'" in error_of(answer)
    assert two.call("PUT", "/v1/pools/a@1", json={"demonstrations": DEMOS}).status_code == 400


def test_of_two_puts_at_once_one_wins(both: tuple[Server, Server]) -> None:
    def put(server: Server, seed: int) -> requests.Response:
        body = {"demonstrations": models.demonstrations(12, seed=seed), "block_size": 3}
        return server.call("PUT", "/v1/pools/raced", json=body)

    conflicts = 0
    for trial in range(8):
        with ThreadPoolExecutor(2) as threads:
            told = list(threads.map(put, both, (2 * trial, 2 * trial + 1)))
        made = [each.json()["version"] for each in told if each.status_code == 200]
        conflicts += sum(each.status_code == 409 and "at the same time" in error_of(each) for each in told)
        assert made and len(set(made)) == len(made), [each.text for each in told]
        newest = max(made)
        answers = [server.generate(QUESTION, pool=f"raced@{newest}", ratio=0.5) for server in both]
        assert answer_tokens(answers[0]) == answer_tokens(answers[1])
        keys = [[block["key"] for block in server.pool("raced")["blocks"]] for server in both]
        assert keys[0] == keys[1]
    assert conflicts, "they never met"


def test_a_killed_server_comes_back_with_the_pools(both: tuple[Server, Server], folder: Path) -> None:
    one, two = both
    one.put("kept", DEMOS, block_size=6)
    before = two.generate(QUESTION, pool="kept@1", ratio=0.5)
    one.put("gone", DEMOS[:6])
    two.kill()
    one.json("DELETE", "/v1/pools/gone")
    assert one.put("kept", DEMOS[:12], block_size=6)["version"] == 2
    (folder / "odd@1.json").write_text('{"format": 2', encoding="utf-8")
    two.start()
    listed = two.json("GET", "/v1/pools")
    assert "gone" not in [pool["name"] for pool in listed["pools"]]
    assert any("odd@1.json is not a pool definition" in problem for problem in listed["damaged"])
    answer = refused(two, "odd")
    assert answer.status_code == 503 and "odd@1.json" in error_of(answer)
    after = [server.generate(QUESTION, pool="kept", ratio=0.5) for server in both]
    assert [used(each)["version"] for each in after] == [2, 2]
    assert answer_tokens(after[0]) == answer_tokens(after[1])
    assert one.put("kept", DEMOS, block_size=6)["version"] == 3
    again = two.generate(QUESTION, pool="kept@3", ratio=0.5)
    assert answer_tokens(again) == answer_tokens(before)
    assert two.put("odd", DEMOS[:3])["version"] == 2, "a pool that is put again is mended"
    assert used(one.generate(QUESTION, pool="odd@2"))["version"] == 2
