"""How long servers take to start: what is started with which caches, what logs say, and rows, without a server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.launch.bench import start
from sglang_ext.launch.bench.start import Starts, figures, parts

LOG = """[2026-11-26 15:00:01] Load weight end. elapsed=3.10 s, type=LlamaForCausalLM
[2026-11-26 15:00:02] Capture cuda graph end. Time elapsed: 14.21 s. mem usage=0.2 GB
[2026-11-26 15:00:03] Init torch distributed ends. elapsed=0.05 s, mem usage=0.00 GB
[2026-11-26 15:00:04] Load weight end. elapsed=1.00 s, type=LlamaForCausalLM
[2026-11-26 15:00:05] The server is fired up and ready to roll!
"""


def test_parts_of_a_log() -> None:
    assert parts(LOG) == {"Load weight": 4.1, "Capture cuda graph": 14.21, "Init torch distributed": 0.05}


def test_rows() -> None:
    """Beside the server of stock SGLang that starts fastest, which may be another one with warm caches."""
    ours = Starts("dbsa", 100.0, [33.0, 35.0], [{}])
    stock = [Starts("fa3", 60.0, [31.0], [{}]), Starts("flashinfer", 54.0, [40.0], [{}])]
    cold, warm = figures([ours], stock)
    assert (cold.baseline, cold.met, cold.aim) == ("flashinfer", False, "at most 45 s more")
    assert (warm.baseline, warm.met, warm.ratio) == ("fa3", True, pytest.approx(34 / 31))
    assert len(figures([Starts("dbsa", 99.0)], stock)) == 1  # a run that was cut short


def test_servers_take_turns_and_have_caches_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun = list[tuple[str, str, bool]]()

    @contextmanager
    def running(command: list[str], port: int, environment: dict[str, str]) -> Iterator[Any]:
        caches = {Path(environment[name]).parts[:-1] for name, folder in start.CACHES.items() if folder}
        assert len(caches) == 1 and str(port) in command
        backend = command[command.index("--attention-backend") + 1]
        assert ("SGLANG_PLUGINS" in environment) == (backend == "fa3")
        begun.append((backend, environment["XDG_CACHE_HOME"], "--trust-remote-code" in command))
        (tmp_path / "log").write_text(LOG)
        yield SimpleNamespace(log=str(tmp_path / "log"))

    monkeypatch.setattr(start, "running", running)
    parser = argparse.ArgumentParser()
    start.add_arguments(parser)
    words = ["--shape", "tiny", "--systems", "dbsa", "--stock-backend", "fa3", "--warm", "2", "--commit", "c"]
    words += ["--flags", "--trust-remote-code --tp 1", "--out", str(tmp_path / "start.json")]
    assert start.main(parser.parse_args(words)) == 0
    assert [backend for backend, _, _ in begun] == ["fa3", *["dbsa", "fa3"] * 3] and all(flag for *_, flag in begun)
    uncounted, ours, stock = begun[0][1], {each[1] for each in begun[1::2]}, {each[1] for each in begun[2::2]}
    assert len(ours) == len(stock) == 1 and uncounted not in ours | stock and ours.isdisjoint(stock)
    kept = json.loads((tmp_path / "start.json").read_text())
    assert len(kept["starts"]["dbsa"]["warm"]) == 2 and kept["starts"]["dbsa"]["parts"][0]["Load weight"] == 4.1
    with pytest.raises(ValueError, match="--warm 0: expected at least 1"):
        start.main(parser.parse_args([*words, "--warm", "0"]))
