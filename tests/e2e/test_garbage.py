"""Garbage collections of a server that has warmed up leave alone what it started with, in all of its processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.e2e.server import Server, model, until
from tests.oracle import models


def frozen(log: str) -> set[str]:
    """Names of the processes that say so."""
    return set(re.findall(r"Freezing GC in (\w+)", log))


def test_a_server_that_is_warm_has_frozen_its_objects(tmp_path: Path) -> None:
    """Also behind the pools of its folder, which are read when it starts."""
    options: dict[str, Any] = {"skip_server_warmup": False, "log_level": "debug"}
    env = {"SGLANG_EXT_POOL_DIR": str(tmp_path)}
    with Server(model("llama"), env=env, **options) as server:
        until(lambda: frozen(server.log()) == {"Scheduler", "Tokenizer", "Detokenizer"}, 60)
        server.json("PUT", "/v1/pools/p", json={"demonstrations": models.demonstrations(4, 1), "block_size": 2})
        server.kill()
        before = server.log().count("Freezing GC in Scheduler")
        server.start()
        until(lambda: server.log().count("Freezing GC in Scheduler") >= before + 2, 60)
        assert server.json("GET", "/v1/pools")["pools"][0]["name"] == "p"
