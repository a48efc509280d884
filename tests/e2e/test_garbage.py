"""Garbage collections of a server that has warmed up leave alone what it started with, in all of its processes."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from sglang_ext import lines
from tests.e2e.server import Server, model, until
from tests.oracle import models

TIMES = 3 if lines.current() is lines.NEWER else 2
"""When the server has warmed up (SGLang 0.5.23 does it then by itself, too), and when its folder's pools are there."""


def frozen(log: str) -> Counter[str]:
    """How often each process says so."""
    return Counter(re.findall(r"Freezing GC in (\w+)", log))


def test_a_server_that_is_warm_has_frozen_its_objects(tmp_path: Path) -> None:
    options: dict[str, Any] = {"skip_server_warmup": False, "log_level": "debug"}
    env = {"SGLANG_EXT_POOL_DIR": str(tmp_path)}
    with Server(model("llama"), env=env, **options) as server:
        until(lambda: frozen(server.log()) == dict.fromkeys(("Scheduler", "Tokenizer", "Detokenizer"), TIMES), 60)
        server.json("PUT", "/v1/pools/p", json={"demonstrations": models.demonstrations(4, 1), "block_size": 2})
        server.kill()
        server.start()
        until(lambda: frozen(server.log())["Scheduler"] == 2 * TIMES, 60)
        assert server.json("GET", "/v1/pools")["pools"][0]["name"] == "p"
