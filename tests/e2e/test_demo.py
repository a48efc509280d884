"""The demo, run as users run it: a real server on the embedded model, five methods, one table."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.launch import cli, demo, demo_data, demo_server

METHODS = ("DBSA 30%", "Fixed ICL", "RetICL by example", "RetICL by block", "zero-shot")
QUERIES = 16

# Least accuracy of DBSA and Fixed ICL over QUERIES queries, by task: far above chance (0.083) and far below what the
# embedded model reaches (launch/bench/results/demo.json). None: not checked; 3,072 tokens of banking77 are two or three
# demonstrations a label.
ACCURACY_FLOOR: dict[str, float | None] = {"generated": 0.25, "banking77": None}


def banking77() -> Path:
    """The folder of banking77, which is not part of the repository."""
    places = [Path(os.environ["SGLANG_EXT_DATA"])] if "SGLANG_EXT_DATA" in os.environ else []
    root = Path(__file__).resolve().parents[2]
    places += [root / "shared" / "data", root.parent / "shared" / "data"]
    for place in places:
        if (place / "banking77" / "test.jsonl").is_file():
            return place / "banking77"
    pytest.skip(f"no banking77 in {', '.join(map(str, places))}; name its parent folder in SGLANG_EXT_DATA")


def run(capsys: pytest.CaptureFixture[str], json_file: Path, *given: str) -> tuple[dict[str, Any], str]:
    """(what --json wrote, what was printed) of one run."""
    status = cli.main(["demo", "--queries", str(QUERIES), "--json", str(json_file), *given])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    return json.loads(json_file.read_text(encoding="utf-8")), printed.out


def check(result: dict[str, Any], printed: str, floor: float | None) -> None:
    rows = {row["method"]: row for row in result["rows"]}
    assert tuple(rows) == METHODS

    lines = [line for line in printed.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert tuple(cells[0]) == demo.HEADER
    assert [line[0] for line in cells[2:]] == list(METHODS)
    assert len({len(line) for line in lines}) == 1  # aligned
    for line in cells[2:]:
        assert line[1] == f"{rows[line[0]]['accuracy']:.3f}"
    assert "sglang 0.5" in printed and f"{result['pool_tokens']:,} tokens" in printed

    for row in rows.values():
        assert row["queries"] == len(row["predictions"]) == result["queries"]
        assert row["seconds"] > 0 and row["requests_per_second"] > 0
        assert set(row["predictions"]) <= set(result["labels"])  # the constraint holds in every row
        assert 0 <= row["correct"] <= row["queries"]

    dbsa, fixed, found, retrieved, zero = (rows[name] for name in METHODS)
    assert 0 < dbsa["cached_tokens"] < dbsa["prompt_tokens"]
    assert fixed["cached_tokens"] >= result["pool_tokens"] > dbsa["prompt_tokens"]
    assert found["cached_tokens"] == retrieved["cached_tokens"] == zero["cached_tokens"] == 0
    assert zero["prompt_tokens"] < found["prompt_tokens"] < 0.5 * fixed["prompt_tokens"]
    # The same retrieval on both sides of the wire, hence the same prompts.
    assert dbsa["blocks"] == retrieved["blocks"] and all(blocks[0] == 0 for blocks in dbsa["blocks"])
    assert dbsa["prompt_tokens"] == retrieved["prompt_tokens"]
    assert dbsa["setup_seconds"] > 0 and fixed["setup_seconds"] > 0 and zero["setup_seconds"] == 0
    if floor is not None:
        assert dbsa["accuracy"] >= floor and fixed["accuracy"] >= floor


@pytest.mark.usefixtures("forked_engines")
def test_demo_on_its_own_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result, printed = run(capsys, tmp_path / "out.json", "--pool-tokens", "2048")
    assert result["queries"] == QUERIES and result["left_out"] == 0
    assert set(result["labels"]) == set(demo_data.INTENTS)
    check(result, printed, ACCURACY_FLOOR["generated"])


@pytest.mark.usefixtures("forked_engines")
def test_demo_on_banking77(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = banking77() / "train.jsonl"
    result, printed = run(capsys, tmp_path / "out.json", "--data", str(data), "--pool-tokens", "3072")
    assert result["data"] == "train.jsonl" and len(result["labels"]) > 60
    check(result, printed, ACCURACY_FLOOR["banking77"])


def test_failed_answers_are_counted_and_named(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """A server without grammars answers no question whose answer is constrained to labels."""
    command = demo_server._server_command
    monkeypatch.setattr(demo_server, "_server_command", lambda *given: [*command(*given), "--grammar-backend", "none"])
    assert cli.main(["demo", "--queries", "4", "--pool-tokens", "1024"]) == cli.FAILED
    said = capsys.readouterr().err
    assert "all 4 answers failed" in said and "--grammar-backend none" in said and "(4 times)" in said, said


# ---- without a server ----------------------------------------------------------------------------------------------


def test_generated_data_is_the_same_every_time_and_disjoint() -> None:
    demonstrations, queries = demo_data.generate(480, 250)
    assert (demonstrations, queries) == demo_data.generate(480, 250)
    assert demo_data.generate(100, 250)[1] == queries  # a smaller pool is asked the same
    assert demo_data.generate(480, 250, seed=1)[1] != queries
    texts = [example["input"] for example in demonstrations + queries]
    assert len(set(texts)) == len(texts) == 730
    assert {example["output"] for example in queries} == set(demo_data.INTENTS)
    assert all(text == text.lower() for text in texts)


def test_generated_data_says_when_it_cannot_be_that_large() -> None:
    with pytest.raises(ValueError, match="--data"):
        demo_data.generate(2000, 250)


def test_own_data_is_read_and_split(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    lines = [{"text": f"question {i}", "label": f"label {i % 3}"} for i in range(30)]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    examples = demo_data.read(file)
    demonstrations, queries = demo_data.split(examples, queries=10, seed=3)
    assert (demonstrations, queries) == demo_data.split(examples, queries=10, seed=3)
    assert len(queries) == 10 and len(demonstrations) == 20
    assert not {item["input"] for item in queries} & {item["input"] for item in demonstrations}
    assert {item["output"] for item in demonstrations[:3]} == {"label 0", "label 1", "label 2"}  # labels take turns


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a", "label": "b"}\nnot json\n', "line 2"),
        ('{"text": "a"}\n', "demonstration 1"),
        ("", "no demonstrations"),
        ('{"text": "a", "label": "b"}\n', "different texts"),
    ],
)
def test_bad_data_is_refused_before_a_server_starts(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text, encoding="utf-8")
    assert cli.main(["demo", "--data", str(file)]) == cli.BAD_INPUT
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("given", [("--queries", "0"), ("--ratio", "0"), ("--ratio", "1.5"), ("--concurrency", "-1")])
def test_bad_options_are_refused(given: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", *given]) == cli.BAD_INPUT
    assert given[0] in capsys.readouterr().err


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--data", "no/such/file.jsonl"]) == cli.BAD_INPUT
    assert "no/such/file.jsonl" in capsys.readouterr().err


def test_a_server_that_cannot_start_shows_its_log(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    command = [sys.executable, "-c", "print('no room for the model'); raise SystemExit(3)"]
    monkeypatch.setattr(demo_server, "_server_command", lambda *_: command)
    assert cli.main(["demo", "--queries", "5"]) == cli.FAILED
    said = capsys.readouterr().err
    assert "ended with status 3" in said and "no room for the model" in said
