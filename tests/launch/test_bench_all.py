"""`sglang-ext bench all`: which benchmarks run, in which order, and what happens when one fails or is cut short."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.launch import cli
from sglang_ext.launch.bench import _code, all
from sglang_ext.launch.bench._results_files import read_folder

FIRST = ["dbsa-kernels", "dbsa-engine", "dbsa-host"]
BESIDE = Path(all.__file__).resolve().parent / "results"


class Runs:
    """Stands for `subprocess.run`: notes what would run; benchmarks in `broken` fail."""

    def __init__(self) -> None:
        self.words: list[list[str]] = []
        self.broken: set[str] = set()

    def __call__(self, words: list[str], **_: Any) -> SimpleNamespace:
        self.words.append(words)
        return SimpleNamespace(returncode=int(words[words.index("--only") + 1] in self.broken))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    runs = Runs()
    monkeypatch.setattr(all.subprocess, "run", runs)
    return runs


def ask(*words: object) -> int:
    return cli.main(["bench", "all", *map(str, words)])


def test_every_command_is_one(tmp_path: Path) -> None:
    """The benchmarks take the words that they get."""
    for benchmark in all.BENCHMARKS:
        given = argparse.Namespace(data="DATA", model="MODEL", books=["A", "B"], out=tmp_path, commit="c0")
        words = all.command(benchmark, given)[4:]
        module, prog, arguments = cli._module("bench", list(words))
        parsed = cli._parse(module, prog, arguments)
        assert parsed.commit == "c0" and Path(parsed.out) == tmp_path / benchmark.out


def test_every_results_file_is_written_by_one_command() -> None:
    """Where the results folder itself is given, a file is named after the benchmark, its half and its GPUs."""

    def named(each: all.Benchmark) -> str:
        half, gpus = each.words[each.words.index("--only") + 1], f"_tp{each.gpus}" if each.gpus > 1 else ""
        return f"{each.words[0]}_{half}{gpus}.json"

    written = [each.out or named(each) for each in all.BENCHMARKS]
    assert len(set(written)) == len(written)
    assert {each.path.name for each in read_folder(BESIDE)[0]} <= set(written)


def test_it_goes_on_where_it_stopped(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.broken = {"engine"}
    assert ask("--only", *FIRST, "--out", tmp_path) == 1
    assert [words[words.index("--only") + 1] for words in runs.words] == ["kernels", "engine", "host"]
    runs.words.clear()
    runs.broken.clear()
    assert ask("--only", *FIRST, "--out", tmp_path) == 0
    assert [words[words.index("--only") + 1] for words in runs.words] == ["engine"]
    runs.words.clear()
    assert ask("--only", *FIRST, "--out", tmp_path) == 0 and not runs.words
    monkeypatch.setattr(all, "code_hash", lambda: "of other code")
    assert ask("--only", *FIRST, "--out", tmp_path) == 0 and len(runs.words) == 3


def test_a_run_that_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(all.subprocess, "run", interrupted)
    assert ask("--only", *FIRST, "--out", tmp_path) == cli.INTERRUPTED
    assert all.done(tmp_path / all.JOURNAL) == {}


def test_a_study_does_not_go_on_from_results_of_other_code(tmp_path: Path) -> None:
    results = tmp_path / "quality_ltri.json"
    all.put_aside(results, "now")  # there is none
    results.write_text('{"code": "now"}')
    all.put_aside(results, "now")
    assert [path.name for path in tmp_path.iterdir()] == ["quality_ltri.json"]
    all.put_aside(results, "later")
    assert [path.name for path in tmp_path.iterdir()] == ["quality_ltri.json.old"]


@pytest.mark.parametrize("name", ["fleet", "drafts"])
def test_benchmarks_that_go_on_lose_results_of_other_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    (tmp_path / f"{name}.json").write_text('{"code": "other"}')
    monkeypatch.setattr(all.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    assert ask("--only", name, "--data", "DATA", "--out", tmp_path) == 0
    assert (tmp_path / f"{name}.json.old").exists() == (name == "fleet")


def test_what_is_left(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("--list", "--out", tmp_path) == 0
    said = capsys.readouterr().out
    assert not runs.words and said.count("left out, because it needs --data") == 19
    assert said.count("left out, because it needs --books and --model") == 5
    assert "dbsa-engine-tp2: left out, because it needs 2 GPUs" in said
    assert "dbsa-host: sglang-ext bench dbsa --only host" in said
    assert not list(tmp_path.iterdir())


def test_a_journal_of_something_else(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / all.JOURNAL).write_text("[]")
    assert ask("--out", tmp_path) == 2 and not runs.words
    assert "delete the file" in capsys.readouterr().err


def test_a_report_leaves_the_journal_out(tmp_path: Path) -> None:
    record = BESIDE / "cascade_kernels.json"
    (tmp_path / record.name).write_text(record.read_text())
    all.note(tmp_path / all.JOURNAL, "dbsa-host", {"code": "x"})
    results, others = read_folder(tmp_path)
    assert [each.path.name for each in results] == [record.name]
    assert others == {tmp_path / all.JOURNAL: "all"}


def test_the_hash_is_that_of_the_products_sources(tmp_path: Path) -> None:
    files = {"kernels/one.cu": "1", "cache.py": "2", "launch/bench/some.py": "3", "notes.md": "4"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = _code.code_hash(tmp_path)
    for name, changes in {
        "kernels/one.cu": True,
        "cache.py": True,
        "launch/bench/some.py": False,
        "notes.md": False,
    }.items():
        (tmp_path / name).write_text("other")
        assert (_code.code_hash(tmp_path) != before) == changes, name
        (tmp_path / name).write_text(files[name])
    (tmp_path / "cache.py").rename(tmp_path / "moved.py")
    assert _code.code_hash(tmp_path) != before
    found = {path.relative_to(_code.PACKAGE).as_posix() for path in _code._sources(_code.PACKAGE)}
    assert {"plugin.py", "kernels/block.cuh", "policies/ltri.py"} <= found
    assert not [name for name in found if name.startswith("launch")]
