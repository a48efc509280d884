"""The report of benchmark results: text, a document's section, plots, and what is refused."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.launch import cli
from sglang_ext.launch.bench import _headlines, _markdown, _pages, _record, report
from sglang_ext.launch.bench._record import Curve, Timing, at_least, at_most, save
from sglang_ext.launch.bench._results_files import read_folder

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MACHINE = {
    "gpu": "NVIDIA H200",
    "sglang": "0.5.17",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "flashinfer-python": "0.6.15",
    "transformers": "5.12.1",
}
HEADING = (
    "**NVIDIA H200**, commit 0123456, 2026-11-21, sglang 0.5.17, torch 2.11.0, triton 3.6.0, flashinfer 0.6.15: "
    "`sglang-ext bench dbsa`"
)
HEADER = "| what | ours, ms (p10 to p90) | baseline, ms | ratio | aim | met |\n|---|---|---|---|---|---|\n"
ROWS = (
    "| zebra | 2 (1-3) | dense: 8 | 4x | at least 3x | yes |\n"
    "| apple | 2 (1-3) | floor, bytes: 1 | 2x | at most 1.5x | no |\n"
    "| mango | 2 (1-3) | dense: 8 | 4x |  |  |\n"
    "| bare | 2 (1-3) |  |  |  |  |"
)
REPORT = f"{HEADING}\n\n{HEADER}{ROWS}"
DOCUMENT = f"# Title\n\n{_markdown.BEGIN}\nold\n{_markdown.END}\n\nThe end.\n"


def timing(milliseconds: float) -> dict[str, Any]:
    return {
        "median": milliseconds / 1e3,
        "low": (milliseconds - 1) / 1e3,
        "high": (milliseconds + 1) / 1e3,
        "samples": 9,
    }


def row(name: str, **more: Any) -> dict[str, Any]:
    empty = {"baseline": "", "baseline_timing": None, "ratio": None, "aim": "", "met": None}
    return {"name": name, "timing": timing(2), **empty, "floor": None, "floor_of": "", "notes": {}, **more}


def rows() -> list[dict[str, Any]]:
    dense = {"baseline": "dense", "baseline_timing": timing(8), "ratio": 4.0}
    floor = {"baseline": "bytes", "floor": 0.001, "floor_of": "bytes", "ratio": 2.0}
    return [
        row("zebra", **dense, aim="at least 3x", met=True),
        row("apple", **floor, aim="at most 1.5x", met=False),
        row("mango", **dense),
        row("bare"),
    ]


def record(**changes: Any) -> dict[str, Any]:
    made = {"date": "2026-11-21T18:51:48+00:00", "commit": COMMIT, "command": "sglang-ext bench dbsa"}
    return {**made, "machine": MACHINE, "engine": {}, "figures": rows(), **changes}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A results folder with one file."""
    found = tmp_path / "results"
    found.mkdir()
    (found / "dbsa.json").write_text(json.dumps(record()))
    return found


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "README.md"
    path.write_text(DOCUMENT)
    return path


def run(*arguments: object) -> int:
    return cli.main(["bench", "report", *map(str, arguments)])


# -- text ---------------------------------------------------------------------------------------------------------


def test_it_is_a_benchmark_of_the_console_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert "report" in cli.benchmarks()
    with pytest.raises(SystemExit) as end:
        run("--help")
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--results", "--markdown", "--check", "--plots"))


def test_a_file_is_a_heading_and_its_rows_in_their_order(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--results", folder) == 0
    assert capsys.readouterr().out == f"{REPORT}\n"


def test_files_come_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.json").write_text(json.dumps(record(command="first")))
    (folder / "z.json").write_text(json.dumps(record(command="last")))
    (folder / "notes.txt").write_text("no results")
    assert run("--results", folder) == 0
    shown = capsys.readouterr().out
    assert [line.rpartition(": ")[2] for line in shown.splitlines() if line.startswith("**")] == [
        "`first`",
        "`sglang-ext bench dbsa`",
        "`last`",
    ]


def test_what_save_writes_is_read_back(tmp_path: Path) -> None:
    figures = [
        at_least("b", Timing.of([0.1, 0.2, 0.3]), "dense", Timing.of([0.5]), 2.0, notes={"batch": 3}),
        at_most("a", Timing.of([0.1]), 0.05, "bytes", None),
    ]
    save(tmp_path / "x.json", figures, commit="unknown", command="made up", engine={"any": 1})
    (results,), others = read_folder(tmp_path)
    assert list(results.figures) == figures and not others
    assert (results.commit, results.command) == ("unknown", "made up")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"commit": f"{COMMIT}-dirty"}, "commit 0123456-dirty, "),
        ({"commit": "unknown"}, "commit unknown, "),
        ({"date": "2026-11-20"}, ", 2026-11-20, "),
        ({"command": "echo `date`"}, ": `` echo `date` ``"),
        ({"command": "one\ntwo"}, ": `one two`"),
        ({"machine": {**MACHINE, "triton": None}}, "triton not installed, flashinfer 0.6.15"),
        ({"machine": {**MACHINE, "gpu": None, "processor": "x86_64"}}, "**no GPU, x86_64**, commit"),
    ],
)
def test_headings(folder: Path, changes: dict[str, Any], expected: str) -> None:
    (folder / "dbsa.json").write_text(json.dumps(record(**changes)))
    (results,), _ = read_folder(folder)
    line = _markdown.heading(results)
    assert expected in line and "\n" not in line


def test_names_do_not_break_the_table(folder: Path) -> None:
    (folder / "dbsa.json").write_text(json.dumps(record(figures=[row("p(a|b)\nnext")])))
    (results,), _ = read_folder(folder)
    assert _markdown.render([results]).splitlines()[-1] == r"| p(a\|b) next | 2 (1-3) |  |  |  |  |"


def test_layouts_of_other_benchmarks_are_left_out_aloud(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = folder / "demo.json"
    other.write_text(json.dumps({"bench": "demo", "rows": []}))
    assert run("--results", folder) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{REPORT}\n"
    assert str(other) in shown.err and "bench demo" in shown.err
    (folder / "dbsa.json").unlink()
    assert run("--results", folder) == 2
    assert "demo.json" in capsys.readouterr().err.splitlines()[-1]


# -- what is refused ----------------------------------------------------------------------------------------------


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in record().items() if name != key}


def one_row(**changes: Any) -> dict[str, Any]:
    return record(figures=[row("fine"), {**row("broken"), **changes}])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "Expecting"),
        ("[]", "expected an object"),
        ("{}", "got no"),
        *[(json.dumps(without(key)), f"got no {key}") for key in ("date", "commit", "command", "machine", "figures")],
        (json.dumps(record(date="yesterday")), "date: got 'yesterday'"),
        (json.dumps(record(machine="x86_64")), "machine: got 'x86_64'"),
        (json.dumps(record(machine={**MACHINE, "gpu": 5})), "machine, gpu: got 5"),
        (json.dumps(record(figures={})), "figures: got {}"),
        (json.dumps(record(figures=[row("fine"), 3])), "row 2: got 3"),
        (json.dumps(record(figures=[{"name": "no timing"}])), "row 1: got no timing"),
        (json.dumps(one_row(colour="red")), "row 2: got unknown colour"),
        (json.dumps(one_row(name=None)), "row 2, name: got None"),
        (json.dumps(one_row(timing={"median": 1.0})), "row 2, timing: got no low"),
        (json.dumps(one_row(timing={**timing(2), "median": "fast"})), "row 2, timing, median: got 'fast'"),
        (json.dumps(one_row(baseline_timing=[])), "row 2, baseline_timing: got []"),
        (json.dumps(one_row(ratio=float("nan"))), "row 2, ratio: got nan"),
        (json.dumps(one_row(ratio=0)), "row 2, ratio: got 0"),
        (json.dumps(one_row(met="yes")), "row 2, met: got 'yes'"),
    ],
)
def test_a_malformed_file_is_named(
    folder: Path, document: Path, capsys: pytest.CaptureFixture[str], text: str, expected: str
) -> None:
    bad = folder / "zz.json"
    bad.write_text(text)
    with pytest.raises(ValueError, match="is no results file") as raised:
        read_folder(folder)
    assert str(bad) in str(raised.value) and expected in str(raised.value)
    assert run("--results", folder, "--markdown", document) == 2
    assert str(bad) in capsys.readouterr().err
    assert document.read_text() == DOCUMENT


def test_a_file_of_bytes_is_named(folder: Path) -> None:
    (folder / "zz.json").write_bytes(b'{"name": "\xff"}')
    with pytest.raises(ValueError, match=r"zz\.json.*UTF-8"):
        read_folder(folder)


def test_folders_without_results(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        read_folder(tmp_path / "absent")
    with pytest.raises(ValueError, match="got no JSON file with figures; expected at least one"):
        read_folder(tmp_path)


@pytest.mark.parametrize("more", [[], ["--markdown", "x.md", "--plots", "plots"]])
def test_check_is_for_a_document_alone(folder: Path, capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    assert run("--results", folder, "--check", *more) == 2
    assert "--check" in capsys.readouterr().err


# -- a document's section -----------------------------------------------------------------------------------------


def test_the_section_is_replaced_and_nothing_else(folder: Path, document: Path) -> None:
    for _ in range(2):  # the second time it is up to date
        assert run("--results", folder, "--markdown", document) == 0
        assert document.read_text() == f"# Title\n\n{_markdown.BEGIN}\n\n{REPORT}\n\n{_markdown.END}\n\nThe end.\n"


def test_line_ends_stay(folder: Path, document: Path) -> None:
    document.write_bytes(DOCUMENT.replace("\n", "\r\n").encode())
    assert run("--results", folder, "--markdown", document) == 0
    raw = document.read_bytes()
    assert raw.count(b"\n") == raw.count(b"\r\n") and raw.endswith(b"The end.\r\n")
    assert run("--results", folder, "--markdown", document, "--check") == 0


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("nothing\n", f"no line {_markdown.BEGIN}; no line {_markdown.END}"),
        (f"{_markdown.BEGIN}\n", f"{_markdown.BEGIN} on line 1; no line {_markdown.END}"),
        (f"a\n{_markdown.END}\n", f"no line {_markdown.BEGIN}; {_markdown.END} on line 2"),
        (f"{_markdown.END}\n{_markdown.BEGIN}\n", f"{_markdown.BEGIN} on line 2; {_markdown.END} on line 1"),
        (
            f"{_markdown.BEGIN}\n{_markdown.BEGIN}\n{_markdown.END}\n",
            f"{_markdown.BEGIN} on lines 1, 2; {_markdown.END} on line 3",
        ),
        (
            f"a line with {_markdown.BEGIN} in it\n{_markdown.END}\n",
            f"no line {_markdown.BEGIN}; {_markdown.END} on line 2",
        ),
    ],
)
@pytest.mark.parametrize("check", [False, True])
def test_markers_missing_or_out_of_order(
    folder: Path, document: Path, capsys: pytest.CaptureFixture[str], text: str, got: str, check: bool
) -> None:
    document.write_text(text)
    with pytest.raises(ValueError) as raised:
        _markdown.replace_section(text, "report", document)
    assert f"{document}: got {got}; expected" in str(raised.value)
    plots = [] if check else ["--plots", document.parent / "plots"]
    assert run("--results", folder, "--markdown", document, *(["--check"] if check else plots)) == 2
    assert got in capsys.readouterr().err
    assert document.read_text() == text and not (document.parent / "plots").exists()


def test_check_changes_nothing_and_names_the_command(
    folder: Path, document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--results", folder, "--markdown", document, "--check") == 1
    command = f"sglang-ext bench report --results {folder} --markdown {document}"
    assert capsys.readouterr().err.endswith(f"update: {command}\n")
    assert document.read_text() == DOCUMENT
    assert cli.main(command.split()[1:]) == 0
    before = document.read_bytes(), document.stat().st_mtime_ns
    assert run("--results", folder, "--markdown", document, "--check") == 0
    assert (document.read_bytes(), document.stat().st_mtime_ns) == before


def test_a_document_that_is_not_there(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--results", folder, "--markdown", tmp_path / "absent.md") == 2
    assert "absent.md" in capsys.readouterr().err


# -- headlines ----------------------------------------------------------------------------------------------------

ZEBRA = _headlines.Headline("dbsa", "zeb", "den", "A zebra", "a dense one")
PAIR = f"{_pages.HEADLINES[0]}\n{_pages.HEADLINES[1]}\n"


def test_headlines_are_a_section_of_their_own(folder: Path, document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = row("slow", baseline="dense", baseline_timing=timing(80000), ratio=40.0)
    (folder / "other.json").write_text(json.dumps(record(figures=[slow])))
    monkeypatch.setattr(_headlines, "HEADLINES", (ZEBRA, replace(ZEBRA, file="other", row="slow")))
    table = (
        f"{_headlines.HEADER}\n| A zebra | 2 ms | a dense one: 8 ms | **4x** |\n"
        "| A zebra | 2 ms | a dense one: 80 s | **40x** |"
    )
    expected = PAIR.replace("\n", f"\n\n{table}\n\n", 1)
    for text in (PAIR, PAIR + DOCUMENT):
        document.write_text(text)
        assert run("--results", folder, "--markdown", document) == 0
        assert document.read_text().startswith(expected)
        assert (REPORT in document.read_text()) == (text != PAIR)
        assert run("--results", folder, "--markdown", document, "--check") == 0


def test_a_headline_beside_another_row_than_its_baseline(
    folder: Path, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = row("slow", baseline="dense", baseline_timing=timing(80000), ratio=40.0)
    slower = row("another", baseline="dense", baseline_timing=timing(80000), ratio=1.6)
    slower["timing"] = timing(50)
    (folder / "other.json").write_text(json.dumps(record(figures=[slow, slower])))
    headline = replace(ZEBRA, file="other", row="slow", instead="another")
    monkeypatch.setattr(_headlines, "HEADLINES", (headline,))
    document.write_text(PAIR)
    assert run("--results", folder, "--markdown", document) == 0
    assert "| A zebra | 2 ms | a dense one: 50 ms | **25x** |" in document.read_text()
    slow["unit"] = slower["unit"] = "share"
    (folder / "other.json").write_text(json.dumps(record(figures=[slow, slower])))
    assert run("--results", folder, "--markdown", document) == 0
    assert "**0.04x** |" in document.read_text()


@pytest.mark.parametrize(
    ("headline", "got"),
    [
        (replace(ZEBRA, instead="lion"), "and one 'lion' (got 0)"),
        (replace(ZEBRA, row="lion"), "got 0 rows 'lion'"),
        (replace(ZEBRA, row=""), "got 2 rows ''"),  # zebra and mango
        (replace(ZEBRA, file="absent"), "in absent.json"),
        (replace(ZEBRA, row="apple", baseline="bytes"), "got 1 rows 'apple'"),  # a floor: nothing was timed beside it
    ],
)
def test_a_headline_without_its_row(
    folder: Path,
    document: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    headline: _headlines.Headline,
    got: str,
) -> None:
    monkeypatch.setattr(_headlines, "HEADLINES", (headline,))
    document.write_text(PAIR)
    assert run("--results", folder, "--markdown", document) == 2
    assert got in capsys.readouterr().err
    assert document.read_text() == PAIR


def test_half_a_pair_of_markers_for_headlines(
    folder: Path, document: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_headlines, "HEADLINES", (ZEBRA,))
    document.write_text(f"{_pages.HEADLINES[0]}\n{DOCUMENT}")
    assert run("--results", folder, "--markdown", document) == 2
    assert f"no line {_pages.HEADLINES[1]}" in capsys.readouterr().err


# -- plots --------------------------------------------------------------------------------------------------------


def test_plots_without_matplotlib(
    folder: Path, document: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    plots = document.parent / "plots"
    assert run("--results", folder, "--markdown", document, "--plots", plots) == 2
    assert "sglang-ext[bench]" in capsys.readouterr().err
    assert not plots.exists() and document.read_text() == DOCUMENT


def pixels(path: Path) -> Any:
    """(height, width, 3) in 0..255."""
    image = pytest.importorskip("matplotlib.image").imread(path)
    return (image[..., :3] * 255).round().astype(int)


def shows(image: Any, colour: str) -> bool:
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return bool((image == wanted).all(axis=-1).sum() > 100)


def test_each_file_gets_a_plot_that_shows_its_colours(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (folder / "other.json").write_text(json.dumps(record(figures=[row("plain", ratio=2.0)])))
    (folder / "demo.json").write_text(json.dumps({"bench": "demo"}))
    plots = tmp_path / "new" / "plots"
    assert run("--results", folder, "--plots", plots) == 0
    assert sorted(path.name for path in plots.iterdir()) == ["dbsa.png", "other.png"]
    for name, expected in (("dbsa", {True, False, None}), ("other", {None})):
        image = pixels(plots / f"{name}.png")
        assert image.std() > 1  # not blank
        assert {met for met, (colour, _) in report.COLOURS.items() if shows(image, colour)} == expected


def drawn(folder: Path, figures: list[dict[str, Any]]) -> Any:
    pytest.importorskip("matplotlib")
    (folder / "dbsa.json").write_text(json.dumps(record(figures=figures)))
    (results,), _ = read_folder(folder)
    drawing = report.draw(results)
    drawing.savefig(io.BytesIO(), format="png")  # lays it out
    return drawing


def test_bars_keep_their_order_and_aims_are_marks_on_their_lines(folder: Path) -> None:
    (axes,) = drawn(folder, rows()).axes
    assert [bar.get_x() + bar.get_width() for bar in axes.patches] == pytest.approx([4.0, 2.0, 4.0])
    middles = [bar.get_y() + bar.get_height() / 2 for bar in axes.patches]
    assert middles == sorted(middles, reverse=True)  # the first row on top
    marks = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "D"]
    assert marks == [(3.0, pytest.approx(middles[0])), (1.5, pytest.approx(middles[1]))]
    names = [text.get_text().splitlines()[0] for text in axes.texts if text.get_ha() == "right"]
    assert names == ["zebra", "apple", "mango", "bare"]
    assert "NVIDIA H200" in axes.get_title() and "commit 0123456" in axes.get_title()


def test_small_ratios_stay_visible_beside_large_ones(folder: Path) -> None:
    (axes,) = drawn(folder, [row("small", ratio=0.4), row("large", ratio=13.0, aim="at least 30x", met=False)]).axes
    assert axes.get_xscale() == "log"
    low, high = axes.get_xlim()
    assert low < 0.4 and high > 30
    assert all(bar.get_window_extent().width > 20 for bar in axes.patches)


@pytest.mark.parametrize("count", [1, 2, 30])
def test_labels_do_not_overlap(folder: Path, count: int) -> None:
    figures = [
        row(
            f"row {index}, $a _ {'with many words ' * (index % 12)}",
            baseline="W" * 40 * (index % 4 + 1),
            baseline_timing=timing(8),
            ratio=1.0 + index,
            aim="as fast as can be" if index % 2 else "at least 2.123456x",
            met=index > 2,
        )
        for index in range(count)
    ]
    (axes,) = drawn(folder, figures).axes
    texts = [*axes.texts, axes.title, axes.xaxis.label, *axes.get_legend().get_texts(), *axes.get_xticklabels()]
    left, right = axes.get_xlim()
    ticks = {label for at, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True) if left <= at <= right}
    texts = [text for text in texts if text.get_text() and (text not in axes.get_xticklabels() or text in ticks)]
    boxes = [text.get_window_extent() for text in texts]
    for one, other in combinations(range(len(boxes)), 2):
        assert not boxes[one].overlaps(boxes[other]), (texts[one].get_text(), texts[other].get_text())
    frame = axes.get_window_extent()
    assert not any(text.get_window_extent().overlaps(frame) for text in axes.texts)


def test_the_recorded_command_can_be_run() -> None:
    """Neither a word twice, nor where one machine put its results."""
    words = ["bench", "dbsa", "--only", "kernels", "--out", "/tmp/x.json", "--repeats", "2", "--commit=abc", "--out=y"]
    assert _record.command_line(words) == "sglang-ext bench dbsa --only kernels --repeats 2"
    words = ["bench", "quality", "--data", "../texts", "--suite", "cascade", "--data=../texts"]
    assert _record.command_line(words) == "sglang-ext bench quality --data DATA --suite cascade --data=DATA"
    words = [
        "bench",
        "quality",
        "--books",
        "/elsewhere/a.txt",
        "b.txt",
        "--stream",
        "9",
        "--heads",
        "/elsewhere/h.json",
    ]
    assert _record.command_line(words) == "sglang-ext bench quality --books BOOK BOOK --stream 9 --heads HEADS"
    assert (
        _record.command_line(["bench", "dbsa", "--engine", '{"a": 1}'])
        == """sglang-ext bench dbsa --engine '{"a": 1}'"""
    )


def test_rows_may_be_other_things_than_times() -> None:
    accuracy = Timing(0.75, 0.7, 0.8, 40)
    row_of = _record.Figure("zebra", accuracy, "dense", Timing(0.5, 0.4, 0.6, 40), 1.5, unit="share")
    head, _, line = _record.table([row_of]).splitlines()
    assert head == "| what | ours (p10 to p90) | baseline | ratio | aim | met |"
    assert line == "| zebra | 0.75 (0.7-0.8) | dense: 0.5 | 1.5x |  |  |"
    mixed = _record.table([row_of, _record.Figure("ape", Timing(0.002, 0.001, 0.003, 9))]).splitlines()
    assert mixed[0] == head and mixed[3] == "| ape | 2 ms (1-3) |  |  |  |  |"


CURVE = {"title": "t", "x": "tokens", "y": "share", "series": {"a": [[1024, 0.5], [2048, 1.0]], "b": [[1024, 0.1]]}}


def test_curves_are_read_and_drawn(folder: Path, tmp_path: Path) -> None:
    curve = Curve("t", "tokens", "share", {"a": [(1024, 0.5), (2048, 1.0)], "b": [(1024, 0.1)]})
    save(folder / "dbsa.json", [], curves=[curve], commit=COMMIT)
    (results,), _ = read_folder(folder)
    assert results.curves == (curve,)
    pytest.importorskip("matplotlib")
    assert run("--results", folder, "--plots", tmp_path / "plots") == 0
    assert pixels(tmp_path / "plots" / "dbsa-1.png").std() > 1
    (axes,) = report.draw_curve(results, replace(curve, doubling=True)).axes
    assert [line.get_label() for line in axes.lines] == ["a", "b"] and axes.get_xscale() == "log"
    assert axes.get_yscale() == "linear"
    tall = replace(curve, series={**curve.series, "c": [(2048, 0.1 * report.SPREAD + 1)]})
    assert report.draw_curve(results, tall).axes[0].get_yscale() == "log"


def test_committed_plots_have_few_lines() -> None:
    results, _ = read_folder(report.RESULTS)
    assert max(len(curve.series) for each in results for curve in each.curves) <= 6


def test_names_stand_where_lines_end() -> None:
    pytest.importorskip("matplotlib")
    ends = {"low": 100.0, "high": 200.0, "near": 199.0, "between": 150.0}
    curve = Curve("t", "tokens", "share", {name: [(1.0, 120.0), (2.0, y)] for name, y in ends.items()})
    (axes,) = report.draw_curve(read_folder(report.RESULTS)[0][0], curve).axes
    height = {text.get_text(): text.get_position()[1] for text in axes.texts}
    bottom, top = axes.get_ylim()
    of_ends = {name: (y - bottom) / (top - bottom) for name, y in ends.items()}
    assert height["low"] == pytest.approx(of_ends["low"]) and height["between"] == pytest.approx(of_ends["between"])
    assert height["high"] == pytest.approx(height["near"] + report.APART) and height["high"] <= 1
    assert abs(height["near"] - of_ends["near"]) < 0.01
    assert [_record.thousands(number) for number in (512, 4096, 5 << 19, 1 << 20, 1019)] == [
        "512",
        "4K",
        "2560K",
        "1M",
        "1019",
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"series": {"a": [[1, 2, 3]]}}, "expected two numbers"),
        ({"series": {"a": [["x", 2]]}}, "expected a finite number"),
        ({"colour": "red"}, "unknown colour"),
        ({"doubling": 1}, "expected true, false or null"),
    ],
)
def test_malformed_curves_are_refused(folder: Path, change: dict[str, Any], words: str) -> None:
    (folder / "dbsa.json").write_text(json.dumps(record(curves=[{**CURVE, **change}])))
    with pytest.raises(ValueError, match=f"curve 1.*{words}"):
        read_folder(folder)
