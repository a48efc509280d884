"""`sglang-ext pool` against a made-up server, the offline plan, and files of demonstrations."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, LlamaConfig

from sglang_ext.config import PoolOptions
from sglang_ext.launch import cli, client, demo_data, pool
from sglang_ext.launch.serve import REFERENCE_MODEL
from sglang_ext.serving.plan import ROOM_FOR_REQUESTS, kv_bytes_per_token

DEMONSTRATIONS = [{"input": f"where is item {at}", "output": ("red", "green")[at % 2]} for at in range(10)]


def info(version: int, status: str, error: str | None = None, done: int = 0) -> dict[str, Any]:
    progress = {"blocks": 2, "tokens": 100, "blocks_done": done, "tokens_done": 50 * done}
    counts = {"demonstrations": 10, "num_blocks": 2, "tokens": 100, "bytes": 2048}
    state = {"name": "p", "version": version, "status": status, "error": error, "setup_seconds": 0.5}
    return {**state, **counts, "progress": progress}


class Script:
    """A server that gives answers in the order they were written down, and keeps what it was asked."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = []
        self.asked: list[tuple[str, str, Any, str | None]] = []
        self.tenants: list[str | None] = []
        self.hold: tuple[str, threading.Event] | None = None  # which requests wait for what, before their answer
        script = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                key = self.headers.get("Authorization")
                script.tenants.append(self.headers.get("X-SGLang-Ext-Tenant"))
                script.asked.append((self.command, self.path, json.loads(body) if body else None, key))
                status, value = script.answers.pop(0)
                if script.hold is not None and script.hold[0] == self.command:
                    script.hold[1].wait(60)
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_DELETE = answer

            def log_message(self, *_: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    monkeypatch.setattr(client, "POLL_SECONDS", 0.0)
    monkeypatch.delenv(pool.API_KEY_ENV, raising=False)
    made = Script()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(item) + "\n" for item in DEMONSTRATIONS), encoding="utf-8")
    return str(path)


def test_put_waits_until_the_pool_is_ready(script: Script, file: str, capsys) -> None:
    listed = [{"pools": [info(0, "encoding", done=1)]}, {"pools": [info(1, "ready", done=2)]}]
    script.answers = [(202, info(0, "encoding")), *((200, each) for each in listed)]
    assert cli.main(["pool", "put", "p", file, "--block-size", "5", "--no-pinned", "--url", script.url]) == 0
    method, path, body, key = script.asked[0]
    assert (method, path, key) == ("PUT", "/v1/pools/p", None)
    assert body == {"demonstrations": DEMONSTRATIONS, "wait": False, "block_size": 5, "pinned": False}
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].split() == ["p", "1", "ready", "10", "2", "100", "2.0", "KiB", "0.5"]
    assert printed.err == ""  # no progress bar where nobody watches


def test_put_looks_on_while_the_server_has_not_answered(
    script: Script, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request itself may take long: its turn comes late, or there is much to tokenize."""
    monkeypatch.setattr(client, "LOOK_SECONDS", 0.01)
    seen: list[Any] = []
    preparing = {**info(0, "encoding"), "progress": None, "phase": "preparing"}
    script.answers = [(200, info(1, "ready")), (200, {"pools": [preparing]}), (503, {"error": "busy"})]
    script.answers += [(200, {"pools": []})] * 1000
    script.hold = ("PUT", threading.Event())

    def watch(state: Any) -> None:
        seen.append(state)
        script.hold[1].set()

    assert client.PoolClient(script.url).put("p", DEMONSTRATIONS, {}, watch)["status"] == "ready"
    assert seen[0] == preparing and seen[-1]["status"] == "ready"


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({"pools": []}, "'p' is gone"),
        ({"pools": [info(1, "ready", "out of memory")]}, "out of memory"),
        ({"pools": [info(1, "ready")]}, "was cancelled; it is as it was before"),
    ],
)
def test_a_change_that_fails(script: Script, file: str, capsys, last: Any, message: str) -> None:
    script.answers = [(202, info(1, "encoding")), (200, last)]
    assert cli.main(["pool", "append", "p", file, "--url", script.url]) == 1
    assert script.asked[0][:2] == ("POST", "/v1/pools/p/demonstrations")
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and printed.out == ""


def test_api_key(script: Script, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    script.answers = [(200, {"pools": []}), (200, {"pools": []}), (401, {"error": "Unauthorized"})]
    assert cli.main(["pool", "ls", "--url", script.url, "--api-key", "one"]) == 0
    monkeypatch.setenv(pool.API_KEY_ENV, "two")
    assert cli.main(["pool", "ls", "--url", script.url]) == 0
    assert [asked[3] for asked in script.asked] == ["Bearer one", "Bearer two"]
    assert capsys.readouterr().out == "no pools\nno pools\n"
    assert cli.main(["pool", "ls", "--url", script.url]) == 1
    assert "refused the api key" in capsys.readouterr().err


def test_in_a_tenant_s_place(script: Script, capsys) -> None:
    script.answers = [(200, {"pools": []}), (200, {"pools": []})]
    assert cli.main(["pool", "ls", "--url", script.url, "--tenant", "acme"]) == 0
    assert cli.main(["pool", "ls", "--url", script.url]) == 0
    assert script.tenants == ["acme", None]
    capsys.readouterr()


def test_errors_of_the_server_in_its_own_words(script: Script, capsys) -> None:
    refusal = {"error": {"message": "unknown pool 'x'; pools on this server: p", "type": "not_found", "code": 404}}
    script.answers = [(404, refusal), (404, {"detail": "Not Found"})]
    assert cli.main(["pool", "show", "x", "--url", script.url]) == 1
    assert capsys.readouterr().err == "sglang-ext pool: HTTP 404: unknown pool 'x'; pools on this server: p\n"
    assert cli.main(["pool", "show", "x", "--url", script.url]) == 1
    assert "is this a server with pools" in capsys.readouterr().err


def test_removing(script: Script, capsys) -> None:
    changed = [(202, info(1, "encoding")), (200, {"pools": [info(2, "ready")]})]
    script.answers = [(200, {"name": "p", "status": "deleted"}), *changed, *changed]
    assert cli.main(["pool", "rm", "p", "--url", script.url]) == 0
    assert cli.main(["pool", "rm", "p", "a/b c", "--purge", "--url", script.url]) == 0
    assert cli.main(["pool", "rm", "p", "--demonstration", "7", "--url", script.url]) == 0
    assert script.asked[0][:2] == ("DELETE", "/v1/pools/p")
    assert script.asked[1][1] == "/v1/pools/p/demonstrations/a%2Fb%20c?purge=true&wait=false"
    assert script.asked[3][1] == "/v1/pools/p/demonstrations/7?purge=false&wait=false"
    capsys.readouterr()
    assert cli.main(["pool", "rm", "p", "a", "--demonstration", "b", "--url", script.url]) == 2
    assert "give one" in capsys.readouterr().err
    assert cli.main(["pool", "rm", "p", "", "--url", script.url]) == 2  # an unset variable of a shell, say
    assert "is empty" in capsys.readouterr().err
    assert cli.main(["pool", "rm", "p", "--purge", "--url", script.url]) == 2
    assert "--purge goes with the ID" in capsys.readouterr().err


def test_nobody_there(capsys) -> None:
    assert cli.main(["pool", "ls", "--url", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.startswith("sglang-ext pool: no server answers at http://127.0.0.1:9")
    assert cli.main(["pool", "ls", "--url", "127.0.0.1:9"]) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"input": "a", "output": "b"}\n\n{"input": \n', "d.jsonl: line 3 is not JSON"),
        (b'{"input": "a", "output": "b"}\n\n\n{"input": "a"}\n', "d.jsonl: line 4: demonstration 2"),
        (b'{"input": "a", "output": "b", "id": "x"}\n{"input": "c", "output": "b", "id": "x"}', "line 2: .*taken"),
        (b'{"input": "\xff"}', "is not UTF-8"),
        (b"\n\n", "no demonstrations"),
    ],
)
def test_bad_files_are_refused_before_the_server_is_asked(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=message):
        pool.read_demonstrations(str(path))
    assert cli.main(["pool", "put", "p", str(path), "--url", "http://127.0.0.1:9"]) == 2


def test_lines_end_at_line_feeds_only(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes('\ufeff{"input": "a\u2028b\u0085c", "output": "d"}\r\n'.encode())
    assert pool.read_demonstrations(str(path)) == [{"input": "a\u2028b\u0085c", "output": "d"}]


def test_numbers_are_ids(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(
        '\ufeff{"id": 7, "input": "a", "output": "b"}\n{"id": "8", "input": "c", "output": "b"}\n'.encode()
    )
    assert [item["id"] for item in pool.read_demonstrations(str(path))] == [7, "8"]
    assert [each["input"] for each in demo_data.read(path)] == ["a", "c"]
    path.write_text('{"id": 7, "input": "a", "output": "b"}\n{"id": "7", "input": "c", "output": "b"}\n')
    with pytest.raises(ValueError, match=r"line 2: .*taken"):
        pool.read_demonstrations(str(path))


def test_bad_options_are_refused_before_the_server_is_asked(file: str) -> None:
    for line in (["put", "a b", file], ["put", "p", file, "--block-size", "0"], ["put", "p", "absent.jsonl"]):
        assert cli.main(["pool", *line, "--url", "http://127.0.0.1:9"]) == 2
    for option in ("--pattern", "--grouping", "--positions"):
        with pytest.raises(SystemExit) as end:  # argparse knows the choices, and shows them
            cli.main(["pool", "put", "p", file, option, "x", "--url", "http://127.0.0.1:9"])
        assert end.value.code == 2


# ---- plan ----


def plan(capsys, file: str, *line: str) -> dict[str, Any]:
    assert cli.main(["pool", "plan", file, "--model", str(REFERENCE_MODEL), "--json", *line]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_offline_plan_counts_what_is_encoded(capsys, file: str) -> None:
    """10 demonstrations in blocks of 4: each tokenized by its own block, the first behind BOS."""
    found = plan(capsys, file, "--block-size", "4", "--dtype", "float32", "--memory-tokens", "1000")
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE_MODEL)
    options = PoolOptions()
    texts = [options.render(item["input"], item["output"]) + options.separator for item in DEMONSTRATIONS]
    starts = len(tokenizer("")["input_ids"])
    # The tokenizer starts a new word at every demonstration, so that a block's tokens are its demonstrations'.
    expected = starts + sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
    assert found["tokens"] == expected == sum(found["tokens_per_block"])
    assert found["demonstrations"] == 10 and found["blocks"] == 3 == len(found["tokens_per_block"])
    config = AutoConfig.from_pretrained(REFERENCE_MODEL)
    per_token = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * 4
    assert found["bytes"] == expected * per_token
    assert found["capacity_tokens"] == 1000 - ROOM_FOR_REQUESTS
    assert found["fits"] == (1000 - ROOM_FOR_REQUESTS) // expected
    assert found["problem"] is None
    assert "fits" not in plan(capsys, file)


def test_a_plan_beyond_the_context_says_so(capsys, tmp_path: Path) -> None:
    context = AutoConfig.from_pretrained(REFERENCE_MODEL).max_position_embeddings
    path = tmp_path / "long.jsonl"
    line = json.dumps({"input": "word " * 100, "output": "x"}) + "\n"
    path.write_text(line * (context // 100), encoding="utf-8")
    assert f"the model's context is {context} tokens" in plan(capsys, str(path))["problem"]
    assert plan(capsys, str(path), "--positions", "local", "--block-size", "10")["problem"] is None
    assert cli.main(["pool", "plan", str(path), "--model", str(REFERENCE_MODEL)]) == 0
    assert "cannot be put" in capsys.readouterr().out


def test_plan_asks_a_server_or_a_model(script: Script, file: str, capsys) -> None:
    answer = {"demonstrations": 10, "blocks": 1, "tokens": 100, "tokens_per_block": [100], "bytes": 1024}
    script.answers = [(200, {**answer, "capacity_tokens": 1000, "fits": 10, "problem": None})]
    assert cli.main(["pool", "plan", file, "--url", script.url, "--seed", "3"]) == 0
    assert script.asked[0][:3] == ("POST", "/v1/pools/plan", {"demonstrations": DEMONSTRATIONS, "seed": 3})
    assert "such pools that fit  10 (room for 1,000 tokens)" in capsys.readouterr().out
    assert cli.main(["pool", "plan", file]) == cli.BAD_INPUT
    with pytest.raises(SystemExit):
        cli.main(["pool", "plan", file, "--url", script.url, "--model", "M"])
    assert cli.main(["pool", "plan", file, "--url", script.url, "--memory-tokens", "5"]) == 2


@pytest.mark.parametrize(
    ("dtype", "tp_size", "expected"),
    [("float32", 1, 3 * 2 * 16 * 2 * 4), ("auto", 1, 3 * 2 * 16 * 2 * 2), ("bfloat16", 8, 3 * 1 * 16 * 2 * 2)],
)
def test_bytes_a_token(dtype: str, tp_size: int, expected: int) -> None:
    """3 layers, 2 KV heads (one at least a rank), head dimension 64 / 4 = 16, keys and values."""
    config = LlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
    assert kv_bytes_per_token(config, dtype, tp_size) == expected


def test_bytes_a_token_of_what_is_not_supported() -> None:
    config = LlamaConfig()
    config.kv_lora_rank = 512
    with pytest.raises(ValueError, match="MLA"):
        kv_bytes_per_token(config)
    with pytest.raises(ValueError, match="dtype 'int8'"):
        kv_bytes_per_token(LlamaConfig(), "int8")


def test_a_pool_of_a_shared_folder_shows_what_is_newer(script: Script, capsys) -> None:
    stored = {**info(0, "stored"), "newest": 7, "versions": []}
    script.answers = [(200, {"pools": [stored, {**info(7, "ready"), "newest": 7}]})]
    assert cli.main(["pool", "ls", "--url", script.url]) == 0
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first.split()[1:5] == ["0", "(newest:", "7)", "stored"] and second.split()[1:3] == ["7", "ready"]
