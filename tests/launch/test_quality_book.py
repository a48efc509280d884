"""The study of perplexity along books: its texts, methods, aims and curves, and two methods in real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.launch import cli
from sglang_ext.launch.bench import _quality_book as book
from sglang_ext.launch.bench import _quality_figures as rows
from sglang_ext.launch.bench import _quality_tasks as tasks
from sglang_ext.launch.bench import quality
from sglang_ext.launch.bench._reference_reader import Writer
from sglang_ext.launch.bench.reference import MODEL
from tests.launch.test_quality import arguments

SIZES = (1024, 128, 64, 16384)


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer(MODEL)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text("".join(f"Then the {n}th card was lost — and nobody knew where.\n" for n in range(200)), "utf-8")
    return path


def settings(path: Path, tokens: int = 500) -> dict[str, Any]:
    return {"suite": "book", "books": [str(path)], "stream": tokens, "part": 200, "model": str(MODEL)}


def test_a_book_is_read_from_its_beginning(writer: Writer, text: Path) -> None:
    ((name, found),) = tasks.books(writer, settings(text)).items()
    assert (name, found.part, len(found.tokens), len(found.labels)) == ("story, 500 tokens", 200, 500, 500)
    assert found.tokens[0] == writer.tokenizer.bos_token_id
    assert text.read_text("utf-8").startswith(writer.tokenizer.decode(found.tokens[1:]))
    assert list(tasks.books(writer, {**settings(text), "model": "/models/Other"})) == ["Other, story, 500 tokens"]


def test_what_is_no_book_is_refused(writer: Writer, tmp_path: Path, text: Path) -> None:
    with pytest.raises(ValueError, match=r"--books .*story.txt: \d+ tokens; expected 99999, or a smaller --stream"):
        tasks.books(writer, settings(text, 99_999))
    with pytest.raises(ValueError, match=r"--books .*none.txt: .*No such file.*; expected a text file in UTF-8"):
        tasks.books(writer, settings(tmp_path / "none.txt"))
    (tmp_path / "more").mkdir()
    same = {**settings(text), "books": [str(text), str(text.rename(tmp_path / "more" / "story.txt"))]}
    (tmp_path / "story.txt").write_bytes((tmp_path / "more" / "story.txt").read_bytes())
    with pytest.raises(ValueError, match=r"--books .*more/story.txt: another one has this name"):
        tasks.books(writer, same)
    with pytest.raises(ValueError, match=r"--stream 1: expected at least 2 tokens"):
        tasks.books(writer, settings(text, 1))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"--books .*binary: .*; expected a text file in UTF-8"):
        tasks.books(writer, settings(tmp_path / "binary"))


@pytest.mark.parametrize(("suite", "missing"), [("book", "--books"), ("cascade", "--data"), ("dbsa", "--data")])
def test_a_suite_says_what_it_reads(suite: str, missing: str) -> None:
    with pytest.raises(ValueError, match=rf"--suite {suite} needs {missing}"):
        quality.main(arguments("--suite", suite))


def test_all_see_as_many_tokens() -> None:
    methods = book.book_methods(*SIZES, None)
    for name, each in methods.items():
        policy = each.policy
        if name != "dense":
            retrieved = policy.get("retrieved", 0) * policy.get("block", 0)
            assert policy["window"] + retrieved == 1024 and policy["sinks"] == 64
            assert policy.get("stride", policy.get("chunk")) == 128
    assert "heads" not in methods["ltri-max"].policy and set(book.PLOTTED) < set(methods) and len(book.PLOTTED) == 6
    assert book.book_methods(*SIZES, "all")["ltri-sum"].policy["heads"] == "all"
    small = book.book_methods(600, 128, 64, 16384, None)
    assert "streaming_llm" in small and not {"infllm", "ltri-max"} & set(small)


def measured(method: str, bins: list[float]) -> dict[str, Any]:
    return {
        "method": method,
        "task": "story, 500 tokens",
        "tokens": 500,
        "perplexity": {"all": sum(bins) / len(bins)},
        "bin": 200,
        "bins": {"all": bins},
    }


def test_cascades_are_to_be_better_in_every_part(text: Path) -> None:
    methods = book.book_methods(*SIZES, None)
    found = [
        measured("streaming_llm", [8.0, 9.0, 9.0]),
        measured("cascade-2", [7.0, 8.0, 8.9]),
        measured("cascade-4", [4.0, 5.0, 9.0]),
        measured("cascade-4-unselected", [7.0, 8.0, 8.0]),
        measured("ltri-max", [7.0, 8.0, 8.0]),
    ]
    lines = rows.figures(settings(text), methods, found)
    assert [(row.aim, row.met) for row in lines] == [
        ("below StreamingLLM in every part", True),
        ("below StreamingLLM in every part", False),
        ("", None),
        ("", None),
    ]
    assert {row.unit for row in lines} == {"perplexity"} and {row.baseline for row in lines} == {"StreamingLLM"}
    (curve,) = rows.curves(settings(text), methods, found)
    assert curve.title == "story, 500 tokens"
    assert curve.series["4 cascades"] == [(200.0, 4.0), (400.0, 5.0), (600.0, 9.0)]
    assert "4 cascades, no selection" not in curve.series


@pytest.mark.usefixtures("forked_engines")
def test_books_in_engines(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A window that holds the whole text reads it as dense attention does; another book is added to the file."""
    out = tmp_path / "book.json"
    words = ["bench", "quality", "--suite", "book", "--stream", "400", "--part", "150", "--window", "512"]
    words += ["--stride", "64", "--methods", "dense", "streaming_llm", "--out", str(out), "--commit", "none"]
    assert cli.main([*words, "--books", str(text)]) == 0, capsys.readouterr()
    record = json.loads(out.read_text())
    dense, streaming = record["measurements"]
    assert dense["bins"]["all"] == pytest.approx(streaming["bins"]["all"], rel=1e-4) and len(dense["bins"]["all"]) == 3
    assert record["settings"]["books"] == ["story"] and record["curves"]

    other = text.rename(tmp_path / "other.txt")
    assert cli.main([*words, "--books", str(other)]) == 0
    again = json.loads(out.read_text())
    assert again["settings"]["books"] == ["story", "other"] and len(again["measurements"]) == 4
    with pytest.raises(ValueError, match=r"part=150; expected part=99: measure --anew"):
        quality.Study(arguments(*words[2:], "--books", other, "--part", 99))
