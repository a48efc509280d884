"""`sglang-ext batch` on a made-up engine: what is asked, what is written, and how a run is taken up again."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import HTTPException

import sglang_ext
from sglang_ext.launch import batch, cli
from sglang_ext.serving.errors import UnknownPool


class Engine:
    """Answers with the question in capitals; some questions have other effects."""

    made: list[Engine] = []  # noqa: RUF012

    def __init__(self, pool_dir: str | None = None, settings: Any = None, **arguments: Any) -> None:
        self.pool_dir, self.settings, self.arguments = pool_dir, settings, arguments
        self.loop = asyncio.new_event_loop()
        self.asked: list[dict[str, Any]] = []
        self.pools: dict[str, Any] = {}
        self.running = self.most = 0
        self.closed = False
        Engine.made.append(self)

    def create_pool(self, name: str, demonstrations: list[Any], **options: Any) -> dict[str, Any]:
        self.pools[name] = (demonstrations, options)
        return {"demonstrations": len(demonstrations), "num_blocks": 1, "tokens": 9, "setup_seconds": 0.1}

    async def async_generate(self, **request: Any) -> dict[str, Any]:
        self.asked.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.001 * (len(self.asked) % 3))
        self.running -= 1
        text = request.get("prompt", "")
        if text == "bad":
            raise ValueError("ratio is 3")
        if text == "lost":
            raise UnknownPool("x", [])
        if text == "big":
            raise HTTPException(400, "too long")
        if text == "odd":
            raise KeyError("nope")
        if text == "die":
            raise RuntimeError("the scheduler is gone")
        reason = {"type": "abort", "message": "no room"} if text == "abort" else {"type": "stop"}
        return {"text": text.upper(), "meta_info": {"finish_reason": reason}, "output_ids": [1]}

    def shutdown(self) -> None:
        self.closed = True


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the command over `in.jsonl` and `out.jsonl`; returns its status."""
    Engine.made.clear()
    monkeypatch.setattr(sglang_ext, "Engine", Engine, raising=False)
    monkeypatch.setattr(batch, "load_plugin", lambda: None)
    monkeypatch.chdir(tmp_path)

    def command(*line: str) -> int:
        return cli.main(["batch", "in.jsonl", "out.jsonl", *line])

    return command


def write(*lines: Any, file: str = "in.jsonl") -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    Path(file).write_text("".join(text + "\n" for text in texts), encoding="utf-8")


def out() -> dict[Any, dict[str, Any]]:
    lines = Path("out.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert len({record["id"] for record in records}) == len(records)
    return {record["id"]: record for record in records}


def test_every_line_is_answered_once(run, capsys) -> None:
    write(*({"input": f"question {at}"} for at in range(50)))
    assert run("--concurrency", "4", "--max-new-tokens", "5") == 0
    engine = Engine.made[0]
    assert {id: record["text"] for id, record in out().items()} == {at + 1: f"QUESTION {at}" for at in range(50)}
    assert engine.most == 4 and engine.closed
    assert engine.asked[0]["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 5}
    assert set(out()[1]) == {"id", "text", "meta_info"}
    assert "out.jsonl: 50 answers, 0 errors" in capsys.readouterr().err


def test_lines_go_before_options(run) -> None:
    write({"input": "d", "output": "l"}, file="pool.jsonl")
    write(
        {"id": "a", "text": "one", "sampling_params": {"temperature": 1}, "custom_params": {"blocks": 3}},
        {"id": "b", "input_ids": [1, 2], "custom_params": {"pool": "other"}, "label": "kept aside"},
    )
    line = ["--pool", "p=pool.jsonl", "--block-size", "7", "--ratio", "0.5", "--constrain", "labels"]
    assert run(*line, "--dtype", "float32", "--max-total-tokens=900") == 0
    engine = Engine.made[0]
    assert engine.pools == {"p": ([{"input": "d", "output": "l"}], {"block_size": 7})}
    assert engine.arguments["dtype"] == "float32" and engine.arguments["max_total_tokens"] == 900
    assert set(engine.arguments) == {"dtype", "max_total_tokens", "model_path"}
    first, second = engine.asked
    assert first == {
        "prompt": "one",
        "sampling_params": {"temperature": 1, "custom_params": {"pool": "p", "constrain": "labels", "blocks": 3}},
    }
    custom = {"pool": "other", "constrain": "labels", "ratio": 0.5}
    assert second == {"input_ids": [1, 2], "sampling_params": {"temperature": 0.0, "custom_params": custom}}


def test_one_bad_line_does_not_stop_the_rest(run, capsys) -> None:
    write(
        {"input": "bad"},
        '{"input": ',
        {"input": "good"},
        {"question": "x"},
        {"input": "lost"},
        {"input": "big"},
        {"input": "abort"},
        [1],
        {"input": "x", "text": "y"},
        {"id": 1.5, "input": "x"},
        {"input_ids": ["a"]},
        {"input": "x", "sampling_params": 3},
        {"input": "odd"},
    )
    assert run() == 1
    found = out()
    assert found[13]["error"] == "SGLang cannot read sampling_params or custom_params (KeyError: 'nope')"
    assert len(found) == 13 and [id for id in found if "error" not in found[id]] == [3]
    assert found[1]["error"] == "ratio is 3" and found[6]["error"] == "too long" and found[7]["error"] == "no room"
    assert "unknown pool 'x'" in found[5]["error"]
    for id in (2, 4, 8, 9, 10, 11, 12):
        assert found[id]["error"].startswith(f"line {id}")
    said = capsys.readouterr().err
    assert "1 answers, 12 errors: " in said and "; and 7 for other reasons" in said


def test_a_question_without_a_pool_is_an_error_where_pools_are_used(run) -> None:
    write({"input": "d", "output": "l"}, file="pool.jsonl")
    write({"input": "one"}, {"input": "two", "custom_params": {"pool": "b"}})
    assert run("--pool", "a=pool.jsonl", "--pool", "b=pool.jsonl") == 1
    assert "which pool?" in out()[1]["error"] and out()[2]["text"] == "TWO"


def test_taking_up_a_run_that_was_killed(run, capsys) -> None:
    write(*({"id": f"q{at}", "input": f"é{at}"} for at in range(6)))
    assert run() == 0
    whole = Path("out.jsonl").read_bytes().splitlines(keepends=True)
    cut = whole[3][: whole[3].index("É".encode()) + 1]  # in the middle of a character
    Path("out.jsonl").write_bytes(b"".join(whole[:3]) + cut)
    capsys.readouterr()
    assert run() == 0
    said = capsys.readouterr().err
    assert "half written" in said and "3 of 6 are there already" in said
    assert Path("out.jsonl").read_bytes().startswith(b"".join(whole[:3]))
    assert {record["text"] for record in out().values()} == {f"É{at}" for at in range(6)}
    done = {json.loads(line)["id"] for line in whole[:3]}
    assert len(Engine.made[1].asked) == 3
    assert not {request["prompt"].replace("é", "q") for request in Engine.made[1].asked} & done


def test_a_finished_run_starts_no_engine(run) -> None:
    write({"input": "one"}, {"input": "bad"})
    assert run() == 1 and run() == 1
    assert len(Engine.made) == 1


def test_retrying_what_failed(run) -> None:
    write({"id": "a", "input": "one"}, {"id": "b", "input": "bad"}, {"id": "c", "input": "two"})
    assert run() == 1
    write({"id": "a", "input": "one"}, {"id": "b", "input": "mended"}, {"id": "c", "input": "two"})
    assert run("--retry-failed") == 0
    assert [request["prompt"] for request in Engine.made[1].asked] == ["mended"]
    assert out()["b"]["text"] == "MENDED" and len(out()) == 3
    assert sorted(path.name for path in Path().iterdir()) == ["in.jsonl", "out.jsonl"]


def test_what_is_not_a_questions_fault_ends_the_run_and_keeps_the_answers(run) -> None:
    write(*({"input": f"q{at}"} for at in range(5)), {"input": "die"}, *({"input": f"r{at}"} for at in range(50)))
    with pytest.raises(RuntimeError, match="scheduler is gone"):
        run("--concurrency", "1")
    assert len(out()) == 5 and Engine.made[0].closed
    write(*({"input": f"q{at}"} for at in range(56)))
    assert run() == 0 and len(out()) == 56


def test_two_runs_do_not_share_a_file(run, capsys) -> None:
    write({"input": "one"})
    file, _ = batch.open_output(Path("out.jsonl"), False)
    with file:
        assert run() == 2
    assert "another run is writing it" in capsys.readouterr().err
    assert run() == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"id": "other", "text": ""}\n', "'other' among them"),
        ("hello\n", "line 1 was not written by"),
        ('{"text": ""}\n', "line 1 was not written by"),
    ],
)
def test_a_file_of_something_else_is_left_alone(run, capsys, content: str, message: str) -> None:
    write({"input": "one"})
    Path("out.jsonl").write_text(content)
    assert run() == 2
    assert message in capsys.readouterr().err and Path("out.jsonl").read_text() == content
    assert not Engine.made


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--pool", "p"], "NAME=FILE.jsonl"),
        (["--pool", "a b=x"], "pool name 'a b'"),
        (["--pool", "p=absent.jsonl"], "absent.jsonl"),
        (["--pool", "p=d", "--pool", "p=d"], "given twice"),
        (["--ratio", "0.5"], "give --pool"),
        (["--block-size", "5"], "give its file"),
        (["--pool-dir", "x", "--ratio", "0.5", "--blocks", "3"], "at most one of"),
        (["--concurrency", "0"], "at least 1"),
        (["--polo", "3"], "not a flag"),
        (["--model", "m", "--model-path", "n"], "two models"),
    ],
)
def test_options_that_cannot_be(run, capsys, line: list[str], message: str) -> None:
    write({"input": "one"})
    assert run(*line) == 2
    assert message in capsys.readouterr().err
    assert not Engine.made and not Path("out.jsonl").exists()


def test_equal_ids_are_refused(run, capsys) -> None:
    write({"input": "one"}, {"id": 1, "input": "two"})
    assert run() == 2
    assert "lines 1 and 2 both have the id 1" in capsys.readouterr().err


def test_pools_kept_on_disk_can_be_named(run, tmp_path: Path) -> None:
    write({"input": "one"})
    assert run("--pool", "p", "--pool-dir", "pools") == 0
    engine = Engine.made[0]
    assert engine.pool_dir == "pools" and engine.pools == {}
    assert engine.asked[0]["sampling_params"]["custom_params"] == {"pool": "p"}


def test_usage_names_both_files() -> None:
    parser = argparse.ArgumentParser()
    batch.add_arguments(parser)
    assert "IN.jsonl OUT.jsonl" in parser.format_usage()


def test_failures_are_counted_and_named(run, capsys) -> None:
    """An aborted answer has text, which is no answer."""
    write(*({"input": "abort"} for _ in range(3)), {"input": "fine"})
    assert run() == 1
    assert [record.get("error") for record in out().values()].count("no room") == 3
    assert "1 answers, 3 errors: no room (3 times)" in capsys.readouterr().err


def test_limits_reach_the_engine(run, capsys) -> None:
    write({"input": "a"})
    assert run("--max-demonstrations", "7", "--no-strict-pool-dir") == 0
    assert Engine.made[0].settings == {"max_demonstrations": 7, "strict_pool_dir": False}
    assert run("--max-pools", "0") == 2
    assert "max_pools=0" in capsys.readouterr().err and len(Engine.made) == 1


@pytest.mark.parametrize("words", [("--retriever", "absent"), ("--pool-dir", "in.jsonl")])
def test_what_cannot_work_is_refused_before_the_engine_starts(run, capsys, words: tuple[str, str]) -> None:
    write({"input": "a"})
    write({"input": "d", "output": "l"}, file="pool.jsonl")
    assert run("--pool", "p=pool.jsonl", *words) == 2
    assert words[1] in capsys.readouterr().err and not Engine.made


def test_files_with_a_byte_order_mark_and_numbers_as_ids(run) -> None:
    Path("in.jsonl").write_bytes('\ufeff{"id": 7, "input": "a"}\n'.encode())
    Path("pool.jsonl").write_bytes('\ufeff{"input": "d", "output": "l"}\n'.encode())
    assert run("--pool", "p=pool.jsonl") == 0
    assert out()[7]["text"] == "A"
