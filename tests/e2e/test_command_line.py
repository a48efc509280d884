"""The command line against a real server and a real engine: one of each."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e import commands
from tests.e2e.server import Server, model
from tests.oracle.models import demonstrations

LIMITS = ["--dtype", "float32", "--max-total-tokens", "20000"]


def run(*line: str, status: int = 0) -> str:
    """`sglang-ext` in a process of its own; what it printed (on stderr, when it should fail)."""
    command = [sys.executable, "-m", "sglang_ext.launch.cli", *line]
    env = {**os.environ, **commands.forking(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == status, f"{line}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stderr if status else done.stdout


def write(path: Path, items: list[Any]) -> str:
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def pool_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pools")


@pytest.fixture(scope="module")
def server(pool_dir: Path) -> Iterator[Server]:
    """`sglang-ext serve` on the tiny model, with nothing set that it should set itself."""
    served = Server(model(), api_key="secret", env=commands.forking(), warm=False)
    served.command = [sys.executable, "-m", "sglang_ext.launch.cli", "serve", str(model()), *LIMITS]
    served.command += [
        "--skip-server-warmup",
        "--pool-dir",
        str(pool_dir),
        "--port",
        str(served.port),
        "--api-key",
        "secret",
        "--max-pools",
        "2",
    ]
    with served:
        yield served


@pytest.fixture
def ask(server: Server, monkeypatch: pytest.MonkeyPatch):
    """`sglang-ext pool` on the server."""
    monkeypatch.setenv("SGLANG_EXT_API_KEY", "secret")

    def command(action: str, *line: str, status: int = 0) -> Any:
        printed = run("pool", action, *line, "--url", server.url, "--json", status=status)
        return printed if status else json.loads(printed)

    return command


def test_serve_sets_what_pools_need(server: Server) -> None:
    args = server.json("GET", "/server_info")
    assert args["attention_backend"] == "dbsa" and args["radix_cache_backend"] == "sglang_ext"
    assert args["page_size"] == 1 and args["dtype"] == "float32"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's warnings are shown")
def test_the_log_speaks_of_no_gpu(server: Server) -> None:
    log = server.log()
    assert "server is fired up" in log or "Uvicorn running" in log
    for word in ("CUDA runtime", "Triton is not supported", "AWQ", "GGUF", "AllReduce is disabled"):
        assert word not in log, [line for line in log.splitlines() if word in line]


def test_flags_are_limits_of_the_server(ask, tmp_path: Path) -> None:
    file = write(tmp_path / "d.jsonl", demonstrations(4))
    for name in ("a", "b"):
        assert ask("put", name, file)["status"] == "ready"
    assert "HTTP 413" in (said := ask("put", "c", file, status=1)) and "2" in said, said
    for name in ("a", "b"):
        ask("rm", name)


def test_the_life_of_a_pool(server: Server, ask, pool_dir: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "d.jsonl", demonstrations(40))
    assert ask("ls") == []
    plan = ask("plan", file, "--block-size", "10")
    offline = run("pool", "plan", file, "--model", str(model()), "--block-size", "10", "--dtype", "float32", "--json")
    offline = json.loads(offline)
    assert {name: plan[name] for name in offline} == offline
    assert plan["fits"] == plan["capacity_tokens"] // plan["tokens"] > 0

    made = ask("put", "p", file, "--block-size", "10", "--template", r"{input}\n{label_prefix}{output}")
    assert made["status"] == "ready" and made["version"] == 1 and made["demonstrations"] == 40
    assert (made["tokens"], made["bytes"]) == (plan["tokens"], plan["bytes"])
    assert made["options"]["block_size"] == 10 and made["options"]["template"] == "{input}\n{label_prefix}{output}"
    assert [pool["name"] for pool in ask("ls")] == ["p"]
    assert [path.name for path in pool_dir.iterdir()] == ["p.json"]

    shown = ask("show", "p", "--tokens")
    assert [len(block["token_ids"]) for block in shown["blocks"]] == plan["tokens_per_block"]
    table = run("pool", "show", "p", "--url", server.url)
    assert shown["blocks"][0]["key"][:12] in table and "labels (5)" in table

    more = write(tmp_path / "more.jsonl", [{"id": "a/b", "input": "one more", "output": "other"}])
    assert ask("append", "p", more)["demonstrations"] == 41
    assert "is taken" in ask("append", "p", more, status=1)
    assert ask("rm", "p", "a/b")["demonstrations"] == 40
    assert ask("show", "p")["deleted"] == ["a/b"]
    assert ask("rm", "p", "--demonstration", "d3", "--purge")["demonstrations"] == 39
    assert not any("d3" in block["demonstrations"] for block in ask("show", "p")["blocks"])
    assert ask("cancel", "p")["status"] == "ready"
    assert ask("rm", "p") == {"name": "p", "status": "deleted"}
    assert ask("ls") == [] and list(pool_dir.iterdir()) == []


def test_put_shows_progress_on_a_terminal(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGLANG_EXT_API_KEY", "secret")
    file = write(tmp_path / "d.jsonl", demonstrations(1000, 5))
    command = [sys.executable, "-m", "sglang_ext.launch.cli", "pool", "put", "slow", file, "--url", server.url]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with subprocess.Popen([*command, "--positions", "local", "--block-size", "1"], stderr=theirs) as put:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal's end
            while part := os.read(ours, 4096):
                shown += part
        assert put.wait(60) == 0, shown
    os.close(ours)
    assert b"slow" in shown and b"100%" in shown, shown
    run("pool", "rm", "slow", "--url", server.url)


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        (("serve", "MODEL", "--max-pools", "0"), 2, "max_pools=0"),
        (("serve", "MODEL", "--max-pool", "3"), 2, "--max-pools"),
        (("serve", "MODEL", "--attention-backend", "cascade", "--policy", '{"sink": 4}'), 2, "sinks"),
        (("pool", "put", "p", "none.jsonl", "--grouping", "luck"), 2, "length_balanced"),
        (("pool", "put", "p", "none.jsonl", "--pattern", "half"), 2, "sink+previous+self"),
        (("batch", "a", "b", "--model", "m", "--order", "odd"), 2, "low_to_high"),
    ],
)
def test_our_own_mistakes_are_refused_at_once(line: tuple[str, ...], status: int, words: str) -> None:
    begin = time.perf_counter()
    assert words in run(*line, status=status)
    assert time.perf_counter() - begin < 10, "neither torch nor SGLang was imported"


def test_the_doctor_checks_the_hooks() -> None:
    said = run("doctor")
    assert "none unresolved" in said and "none resolved but not installed" in said and "all is well" in said


def test_a_quick_doctor(tmp_path: Path) -> None:
    begin = time.perf_counter()
    assert "sglang" in run("doctor", "--quick")
    assert time.perf_counter() - begin < 10  # 1 s on an idle machine, 14 with SGLang imported


def test_refusals_are_one_plain_line(ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = write(tmp_path / "large.jsonl", demonstrations(1600))
    for line, words in (
        (("show", "absent"), "unknown pool 'absent'"),
        (("rm", "absent"), "unknown pool 'absent'"),
        (("put", "large", large, "--positions", "local", "--block-size", "5"), "tokens of KV cache"),
    ):
        said = ask(*line, status=1)
        assert words in said and said.count("\n") == 1 and said.startswith("sglang-ext pool: HTTP 4")
    monkeypatch.setenv("SGLANG_EXT_API_KEY", "wrong")
    assert "refused the api key" in ask("ls", status=1)


def test_batch_takes_up_a_run(tmp_path: Path) -> None:
    """The engine in earnest: a pool, labels, a bad line, and a file that an earlier run left half written."""
    pool = write(tmp_path / "d.jsonl", demonstrations(40))
    questions = [{"id": f"q{at}", **item} for at, item in enumerate(demonstrations(12, seed=3))]
    questions[5]["custom_params"] = {"ratio": 7}
    source = write(tmp_path / "in.jsonl", questions)
    out = tmp_path / "out.jsonl"
    out.write_text('{"id": "q0", "text": " card"}\n{"id": "q1", "te')
    line = ["batch", source, str(out), "--model", str(model()), "--pool", f"p={pool}", "--block-size", "10"]
    line += ["--blocks", "3", "--constrain", "labels", "--label-probs", "--max-new-tokens", "40", *LIMITS]
    said = run(*line, status=1)
    assert "half written" in said and "1 of 12 are there already" in said and "11 answers, 1 errors" in said

    records = {record["id"]: record for record in map(json.loads, out.read_text().splitlines())}
    assert set(records) == {f"q{at}" for at in range(12)}
    assert "ratio" in records.pop("q5")["error"]
    assert records.pop("q0") == {"id": "q0", "text": " card"}
    labels = {item["output"] for item in demonstrations(40)}
    for record in records.values():
        assert record["text"].strip() in labels
        used = record["meta_info"]["sglang_ext"]
        assert used["pool"] == "p" and len(used["blocks"]) == 3
        assert record["meta_info"]["cached_tokens"] >= used["stitched_tokens"] > 0
        assert sum(used["label_probs"].values()) == pytest.approx(1, abs=1e-3)
    before = out.read_bytes()
    run(*line, status=1)  # nothing is left to ask: no engine starts
    assert out.read_bytes() == before
