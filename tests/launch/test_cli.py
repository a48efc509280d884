"""The console script: its overview, its dispatch, its exit statuses, and errors in one plain line."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from sglang_ext.launch import cli
from sglang_ext.launch.client import ServerError
from sglang_ext.serving.errors import PoolError, UnknownPool


def command(run: object) -> types.ModuleType:
    """A subcommand's module whose main is `run`."""
    module = types.ModuleType("made_up", "Made up.")
    module.add_arguments = lambda parser: parser.add_argument("--number", type=int, default=0)
    module.main = run
    return module


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch):
    """Installs a function as what `sglang-ext doctor` runs."""

    def install(run: object, passes_on: bool = False) -> None:
        module = command(run)
        module.PASSES_ON = passes_on
        monkeypatch.setitem(sys.modules, "sglang_ext.launch.doctor", module)

    return install


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom sglang_ext.launch import cli\n"
        "try: cli.main(['--help'])\nexcept SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'sglang', 'transformers', 'numpy', 'requests'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in cli.COMMANDS:
        assert f"\n  {name}" in done.stdout


def test_every_command_is_a_module() -> None:
    for name, (module, _) in cli.COMMANDS.items():
        assert name == "bench" or (Path(cli.__file__).parent / f"{module}.py").is_file()


@pytest.mark.parametrize("name", ["serve", "pool", "batch", "doctor", "demo"])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"])
    assert end.value.code == 0
    assert f"usage: sglang-ext {name}" in capsys.readouterr().out


def test_benchmarks_are_the_modules_of_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("speed.py", "_shared.py", "notes.txt"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(cli, "BENCHMARKS", tmp_path)
    assert cli.benchmarks() == ["speed"]
    module = command(lambda args: args.number)
    monkeypatch.setitem(sys.modules, "sglang_ext.launch.bench.speed", module)
    assert cli.main(["bench", "speed", "--number", "7"]) == 7
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "absent"])
    assert end.value.code == 2


def test_a_commands_arguments_and_status(made_up) -> None:
    made_up(lambda args: args.number)
    assert cli.main(["doctor", "--number", "3"]) == 3


def test_what_a_command_does_not_know_is_passed_on_in_order(made_up) -> None:
    seen = []
    made_up(lambda args: seen.append((args.number, args.rest)) or 0, passes_on=True)
    assert cli.main(["doctor", "M", "--tp", "2", "--number", "1", "--flag", "--num=3"]) == 0
    assert seen == [(1, ["M", "--tp", "2", "--flag", "--num=3"])]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("ratio is 3"), 2),
        (FileNotFoundError(2, "No such file", "x.jsonl"), 2),
        (PermissionError(13, "Permission denied", "x"), 1),
        (PoolError("too large", 413), 1),
        (UnknownPool("x", ["y"]), 1),
        (ServerError("no server answers"), 1),
        (ConnectionRefusedError(111, "Connection refused"), 1),
    ],
)
def test_errors_are_one_plain_line(made_up, capsys, error: Exception, status: int) -> None:
    def run(_args: object) -> int:
        raise error

    made_up(run)
    assert cli.main(["doctor"]) == status
    printed = capsys.readouterr()
    assert printed.err == f"sglang-ext doctor: {error}\n" and printed.out == ""
    with pytest.raises(type(error)):
        cli.main(["--debug", "doctor"])


def test_a_defect_is_not_dressed_up(made_up) -> None:
    def run(_args: object) -> int:
        raise KeyError("ours")

    made_up(run)
    with pytest.raises(KeyError):
        cli.main(["doctor"])


def test_interrupted(made_up, capsys) -> None:
    def run(_args: object) -> int:
        raise KeyboardInterrupt

    made_up(run)
    assert cli.main(["doctor"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_unknown_command(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["polo"])
    assert end.value.code == 2
    assert "polo" in capsys.readouterr().err


def test_a_reader_that_has_enough_is_no_error() -> None:
    line = f"{sys.executable} -m sglang_ext.launch.cli pool put --help | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "usage" in done.stdout
