"""SIGTERM to a server that has work: it finishes what it has, takes nothing new, and loses nothing."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.server import Server, error_of, model, until
from tests.oracle import models

KEY = "key-of-users"
TOKENS = 1500  # of an answer that goes on while the server is looked at

pytestmark = pytest.mark.timeout(600)


def ready(server: Server) -> tuple[int, Any]:
    """What /ready says to who shows no key."""
    answer = requests.get(server.url + "/ready", timeout=60)
    return answer.status_code, answer.json()


def test_what_is_under_way_is_finished(tmp_path: Path) -> None:
    env = {"SGLANG_EXT_POOL_DIR": str(tmp_path)}
    long = model(max_position_embeddings=4096)
    with Server(long, env=env, api_key=KEY, max_total_tokens=9000, chunked_prefill_size=64) as server:
        assert until(lambda: ready(server)[0] == 200)
        server.put("early", models.demonstrations(12), block_size=4)
        with ThreadPoolExecutor(2) as threads:
            body = server.payload("how do i activate my card?", TOKENS, pool="early")
            seen: list[Any] = []
            events = threads.submit(lambda: [seen.append(event) for event in server.stream(body)])
            assert until(lambda: seen or events.done()) and seen, events.result()
            late = {"demonstrations": models.demonstrations(60, seed=1), "block_size": 3, "wait": False}
            assert server.json("PUT", "/v1/pools/late", json=late)["status"] == "encoding"
            assert server.process is not None
            os.kill(server.process.pid, signal.SIGTERM)

            def refused() -> list[requests.Response]:
                answer = server.call("POST", "/generate", json=server.payload("hello", 1))
                return [answer] if answer.status_code != 200 else []

            (answer,) = until(refused)
            assert answer.status_code == 503 and "told to end" in error_of(answer)
            assert answer.headers["Retry-After"] == "1" and answer.headers["Connection"] == "close"
            told = {"ready": False, "why": "the server is told to end", "pools_not_served": 0}
            assert ready(server) == (503, told)
            assert server.call("GET", "/health").status_code == 503
            assert not events.done(), "the stream goes on meanwhile"
            events.result()
        assert seen[-1]["meta_info"]["completion_tokens"] == TOKENS
        server.wait_for_exit()
        assert {path.name for path in tmp_path.iterdir()} == {"early.json", "late.json"}
        assert server.faults() == []
