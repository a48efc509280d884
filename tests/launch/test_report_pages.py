"""The page of results: its parts, the pages that it leads to, and that the committed ones are up to date."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.launch import cli
from sglang_ext.launch.bench import _markdown, _pages, _summary
from sglang_ext.launch.bench._record import Timing, at_least, at_most, save
from sglang_ext.launch.bench._results_files import read_folder
from sglang_ext.launch.bench._summary import FileSummary, ShownRow

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "launch" / "bench" / "results"
PAGES = ROOT / "docs" / "results"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FAST = FileSummary("fast", "A fast one", (ShownRow("zebra", "dense"), ShownRow("apple")))
GOOD = FileSummary("good", "A good one", (ShownRow("mango"),))
TEXT = "# Results\n\n{}\n{}\n\nBetween.\n\n{}\n{}\n\nThe end.\n".format(*_pages.SPEED_SUMMARY, *_pages.QUALITY_SUMMARY)
ROWS = [
    at_least("zebra", Timing.of([0.002]), "dense", Timing.of([0.008]), 3.0),
    at_least("zebra", Timing.of([0.002]), "sparse", Timing.of([0.008]), 5.0),
    at_most("apple", Timing.of([0.002]), 0.001, "bytes", None),
]


def write(path: Path, rows: list[Any]) -> None:
    save(path, rows, commit=COMMIT, command="sglang-ext bench made-up")
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "date": "2026-11-21", "machine": {"gpu": "NVIDIA H200"}}))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two results files, both of which are declared."""
    found = tmp_path / "json"
    write(found / "fast.json", ROWS)
    write(found / "good.json", [replace(ROWS[0], name="mango")])
    for module in (_pages, _summary):
        monkeypatch.setattr(module, "SPEED", (FAST,))
        monkeypatch.setattr(module, "QUALITY", (GOOD,))
    return found


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "docs" / "RESULTS.md"
    path.parent.mkdir()
    path.write_text(TEXT)
    return path


@pytest.fixture
def run(folder: Path, document: Path) -> Callable[..., int]:
    """The command for this folder and this document, with more arguments."""
    words = ["bench", "report", "--results", str(folder), "--markdown", str(document)]
    return lambda *more: cli.main([*words, *more])


def page(document: Path, name: str) -> Path:
    return document.parent / "results" / f"{name}.md"


# -- the committed pages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["README.md", "docs/RESULTS.md"])
def test_documents_hold_the_committed_results(name: str) -> None:
    found = _pages.documents(ROOT / name, read_folder(RESULTS)[0])
    outdated = [str(each.path.relative_to(ROOT)) for each in found if not each.current]
    assert outdated == [], "sglang-ext bench report --markdown README.md docs/RESULTS.md"
    assert (len(found) > 1) == (name != "README.md")


def test_every_results_file_with_rows_has_its_page_and_no_page_lacks_its_file() -> None:
    with_rows = {path.stem for path in RESULTS.glob("*.json") if json.loads(path.read_text()).get("figures")}
    of_their_own = {path.stem for path in PAGES.glob("*.json")}
    assert {path.stem for path in PAGES.glob("*.md")} == with_rows | of_their_own


def test_the_page_of_results_is_short_and_has_three_parts() -> None:
    path = ROOT / "docs" / "RESULTS.md"
    assert path.stat().st_size < 25_000
    headings = [line for line in path.read_text().splitlines() if line.startswith("## ")]
    assert headings == ["## Speed", "## Quality", "## How to read it"]


# -- what is written ----------------------------------------------------------------------------------------------


def test_the_parts_have_the_declared_rows(run: Callable[..., int], document: Path) -> None:
    assert run() == 0
    speed, quality = document.read_text().split("Between.")
    lines = speed.splitlines()
    at = lines.index("### A fast one")
    assert (
        lines[at + 2] == "[All rows (3)](results/fast.md), 1 of 2 aims met: **NVIDIA H200**, commit 0123456, 2026-11-21"
    )
    assert [line.split(" |")[0] for line in lines[at + 6 :]][:3] == ["| zebra", "| apple", ""]
    assert "sparse" not in speed and "A good one" not in speed
    assert "### A good one" in quality and quality.endswith("\n\nThe end.\n")


def test_a_part_without_rows_leads_to_its_page(
    run: Callable[..., int], document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (_pages, _summary):
        monkeypatch.setattr(module, "QUALITY", (replace(GOOD, rows=()),))
    assert run() == 0
    _, quality = document.read_text().split("Between.")
    assert "### A good one\n\n[All rows (1)](results/good.md), 1 of 1 aims met:" in quality and "mango" not in quality
    assert "mango" in page(document, "good").read_text()


def test_a_page_has_all_rows_and_leads_back(run: Callable[..., int], document: Path, folder: Path) -> None:
    assert run() == 0
    results, _ = read_folder(folder)
    text = page(document, "fast").read_text()
    assert text.startswith(f"{_pages.PAGE[0]}\n\n# A fast one\n\n[All results](../RESULTS.md)\n\n**NVIDIA H200**, ")
    assert _markdown.render(results[:1]) in text and "`sglang-ext bench made-up`" in text


def test_remarks_below_the_section_stay(run: Callable[..., int], document: Path, folder: Path) -> None:
    assert run() == 0
    remarks = "\n## Remarks\n\nBy hand.\n"
    with page(document, "fast").open("a") as file:
        file.write(remarks)
    write(folder / "fast.json", [replace(each, name=f"{each.name}, anew") for each in ROWS])
    assert run() == 0
    text = page(document, "fast").read_text()
    assert text.endswith(f"{_pages.PAGE[1]}\n{remarks}") and "zebra, anew" in text


def test_check_looks_at_the_pages_too(
    run: Callable[..., int], document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--check") == 1
    said = capsys.readouterr().err
    assert all(f"{path} differs" in said for path in (document, page(document, "fast"), page(document, "good")))
    assert document.read_text() == TEXT and not page(document, "fast").exists()
    assert run() == 0 and run("--check") == 0
    page(document, "good").unlink()
    capsys.readouterr()
    assert run("--check") == 1
    said = capsys.readouterr().err
    assert f"{page(document, 'good')} differs" in said and f"{document} differs" not in said


def test_several_documents_at_once(run: Callable[..., int], document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = document.parent / "other.md"
    other.write_text("\n".join([*_markdown.BENCH, ""]))
    assert run(str(other)) == 0
    assert "mango" in other.read_text() and page(document, "good").exists()
    capsys.readouterr()
    assert run(str(other), "--check") == 0
    assert capsys.readouterr().out == f"up to date: {document} {other}\n"


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "got"),
    [
        ((replace(FAST, rows=(ShownRow("lion"),)),), "the summary of fast.json: got 0 rows 'lion'"),
        ((replace(FAST, rows=(ShownRow("zebra"),)),), "got 2 rows 'zebra' beside ''"),
        ((FAST, replace(FAST, file="absent")), "got no absent.json"),
        ((), "fast.json: got no summary"),
    ],
)
def test_a_declaration_without_its_rows_and_rows_without_a_declaration(
    run: Callable[..., int],
    document: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    part: tuple[FileSummary, ...],
    got: str,
) -> None:
    for module in (_pages, _summary):
        monkeypatch.setattr(module, "SPEED", part)
    assert run() == 2
    assert got in capsys.readouterr().err
    assert document.read_text() == TEXT and not page(document, "good").exists()


def test_a_file_without_rows_needs_no_page(run: Callable[..., int], document: Path, folder: Path) -> None:
    write(folder / "empty.json", [])
    assert run() == 0
    assert not page(document, "empty").exists()


def test_a_page_without_results(run: Callable[..., int], document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    stray = page(document, "stray")
    stray.write_text(page(document, "fast").read_text())
    assert run("--check") == 2
    assert f"{stray}: got a page" in capsys.readouterr().err
    stray.write_text("Written by hand.\n")
    assert run("--check") == 0


def test_a_page_without_its_markers(
    run: Callable[..., int], document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page(document, "good").parent.mkdir()
    page(document, "good").write_text("No markers.\n")
    assert run() == 2
    assert f"{page(document, 'good')}: got no line {_pages.PAGE[0]}" in capsys.readouterr().err
    assert document.read_text() == TEXT
