"""`sglang-ext doctor`: what it reports, and its exit status when something essential is broken."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

from sglang_ext import lines, plugin
from sglang_ext.hooks import noted
from sglang_ext.launch import cli, doctor
from sglang_ext.serving.checks import _REFUSED
from sglang_ext.systems.registry import systems

ALIVE = {
    "platform": "sglang_ext.platform_cpu.TorchCpuPlatform",
    "attention_backends": list(systems()),
    "stock_attention_backends": ["triton"],
    "radix_cache_backends": ["sglang_ext"],
    "dead_hooks": [],
}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, on which all is well; plugins are not loaded into this process."""
    monkeypatch.setattr(doctor, "devices", lambda: [])
    monkeypatch.setattr(doctor, "active", lambda: dict(ALIVE))
    for name in ("SGLANG_PLUGINS", "SGLANG_PLATFORM"):
        monkeypatch.delenv(name, raising=False)


def report(capsys: pytest.CaptureFixture[str], status: int) -> dict:
    assert cli.main(["doctor", "--json"]) == status
    found: dict = json.loads(capsys.readouterr().out)
    return found


def test_all_is_well(capsys) -> None:
    found = report(capsys, 0)
    assert found["problems"] == [] and found["hooks"]["unresolved"] == []
    assert len(found["hooks"]["targets"]) == len(plugin.HOOKS)
    assert found["versions"]["sglang"] == plugin.installed_sglang()
    assert found["active"] == ALIVE
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for text in ("all is well", "dbsa", "none unresolved", "no GPU", found["versions"]["torch"]):
        assert text in printed


def test_everything_refused_is_there_with_a_reason(capsys) -> None:
    rows = report(capsys, 0)["refused"]
    assert [row["argument"] for row in rows] == ["--" + name.replace("_", "-") for name, _, _ in _REFUSED]
    assert set(doctor.WHY) == {name for name, _, _ in _REFUSED}
    assert all(row["why"] and row["instead"] for row in rows)


def test_a_missing_hook_target(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = plugin.Hook("sglang.srt.managers.scheduler.Scheduler.gone", "after", "sglang_ext.plugin:gone_too")
    monkeypatch.setattr(plugin, "HOOKS", (*plugin.HOOKS, missing))
    monkeypatch.setattr(doctor, "active", lambda: pytest.fail("a plugin that cannot work ends the process"))
    found = report(capsys, 1)
    assert len(found["problems"]) == 2
    assert "hook target sglang.srt.managers.scheduler.Scheduler.gone" in found["problems"][0]
    assert "hook sglang_ext.plugin:gone_too" in found["problems"][1]
    assert cli.main(["doctor"]) == 1
    assert "PROBLEMS" in capsys.readouterr().out


def test_an_unsupported_sglang(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    here = lines.current()
    monkeypatch.setattr(
        lines, "LINES", (replace(here, first="9.0", below="9.1"), replace(here, first="9.5", below="9.6"))
    )
    problem = report(capsys, 1)["problems"][0]
    assert f"needs sglang>=9.0,<9.1 or sglang>=9.5,<9.6: pip install sglang=={lines.OLDER.tried}" in problem


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("SGLANG_PLUGINS", "another", "leaves sglang_ext out"),
        ("SGLANG_PLUGINS", "sglang_ext", "leaves sglang_ext_cpu out"),
        ("SGLANG_PLUGINS", " sglang_ext , sglang_ext_cpu", None),
        ("SGLANG_PLATFORM", "sglang_ext_cpu", None),
        ("SGLANG_PLATFORM", "another", "SGLANG_PLATFORM=another"),
    ],
)
def test_variables_that_leave_us_out(capsys, monkeypatch, name: str, value: str, problem: str | None) -> None:
    monkeypatch.setenv(name, value)
    found = report(capsys, 1 if problem else 0)
    assert found["environment"][name] == value
    assert any(problem in each for each in found["problems"]) if problem else not found["problems"]


def test_a_gpu_needs_no_platform(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"name": "A GPU", "memory_bytes": 80 * 2**30, "capability": "9.0"}
    monkeypatch.setattr(doctor, "devices", lambda: [gpu])
    monkeypatch.setattr(doctor, "active", lambda: {**ALIVE, "platform": "sglang.srt.platforms.cuda.CudaSRTPlatform"})
    monkeypatch.setenv("SGLANG_PLUGINS", "sglang_ext")
    assert report(capsys, 0)["gpus"] == [gpu]
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "80.0 GiB" in printed and ("no GPU has run" in printed) == (not lines.ran_on_gpus())
    monkeypatch.setenv("SGLANG_PLATFORM", "sglang_ext_cpu")
    assert "this one has one" in report(capsys, 1)["problems"][0]


@pytest.mark.parametrize(("on_gpus", "tried"), [(True, True), (False, True), (True, False)])
def test_a_release_of_sglang_that_no_gpu_has_run_is_warned_of(capsys, monkeypatch, on_gpus: bool, tried: bool) -> None:
    gpu = {"name": "A GPU", "memory_bytes": 80 * 2**30, "capability": "9.0"}
    monkeypatch.setattr(doctor, "devices", lambda: [gpu])
    release = lines.installed_sglang()
    found = replace(lines.current(), on_gpus=on_gpus, tried=release if tried else "0.5.0")
    monkeypatch.setattr(lines, "current", lambda: found)
    warnings = report(capsys, 0)["warnings"]
    assert len(warnings) == (not (on_gpus and tried))
    assert all(f"use SGLang {lines.OLDER.tried} on GPUs" in each and release in each for each in warnings)
    monkeypatch.setattr(doctor, "devices", lambda: [])
    assert report(capsys, 0)["warnings"] == []


@pytest.mark.parametrize("part", ["platform", "attention_backends", "radix_cache_backends", "dead_hooks"])
def test_what_was_not_registered(capsys, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    broken = {
        "platform": "a.b",
        "attention_backends": list(systems())[1:],
        "radix_cache_backends": [],
        "dead_hooks": ["hook a is not installed on b"],
    }[part]
    monkeypatch.setattr(doctor, "active", lambda: {**ALIVE, part: broken})
    assert len(report(capsys, 1)["problems"]) == 1


def test_entry_points_that_are_not_installed(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "entry_points", lambda group: ())
    assert all("is not installed" in each for each in report(capsys, 1)["problems"])


def test_the_installed_package() -> None:
    """All of it in a process of its own, plugins loaded."""
    command = [sys.executable, "-m", "sglang_ext.launch.cli", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert {"dbsa", "double_p", "dbsa+double_p"} <= set(found["active"]["attention_backends"])
    assert "sglang_ext" in found["active"]["radix_cache_backends"]
    assert found["active"]["dead_hooks"] == []
    assert "UserWarning" not in done.stderr and "CUDA" not in done.stderr, done.stderr


def target(value: int) -> int:
    """Something to hook."""
    return value


def around(original: object, value: int) -> int:
    """A hook that is not registered anywhere."""
    return value


def test_a_hook_that_resolves_and_is_not_installed(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    here = types.ModuleType("made_up_target")
    here.target, here.around = target, around
    monkeypatch.setitem(sys.modules, "made_up_target", here)
    hook = plugin.Hook("made_up_target.target", "around", "made_up_target:around")
    dead = ["hook made_up_target:around is not installed on made_up_target.target"]
    assert plugin.not_installed([hook]) == dead
    here.target = _wrap_fn(_wrap_fn(target, noted(hook), HookType.AROUND), lambda *_: None, HookType.BEFORE)
    assert plugin.not_installed([hook]) == []
    monkeypatch.setattr(doctor, "active", lambda: {**ALIVE, "dead_hooks": dead})
    assert report(capsys, 1)["problems"] == dead
    assert cli.main(["doctor"]) == 1
    assert "1 resolved but not installed" in capsys.readouterr().out


def test_quick_imports_neither_sglang_nor_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys, time\nfrom sglang_ext.launch import cli\nstatus = cli.main(['doctor', '--quick', '--json'])\n"
        "heavy = {'torch', 'sglang', 'transformers'} & set(sys.modules)\n"
        "assert not heavy and time.process_time() < 5, (heavy, time.process_time())\nsys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["versions"]["sglang"] == plugin.installed_sglang() and "active" not in found and not found["problems"]
    monkeypatch.setenv("SGLANG_EXT_SETTINGS", '{"max_pool": 1}')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "did you mean max_pools" in json.loads(done.stdout)["problems"][0]


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("SGLANG_PLUGINS", "another", "leaves sglang_ext out"),
        ("SGLANG_PLATFORM", "another", "SGLANG_PLATFORM=another"),
        ("SGLANG_EXT_POLICY", "{", "expected a JSON object"),
        (
            "SGLANG_EXT_SETTINGS",
            '{"tenants": "/nowhere/tenants.json"}',
            "--tenants /nowhere/tenants.json: it cannot be",
        ),
    ],
)
def test_quick_names_what_is_wrong(capsys, monkeypatch, name: str, value: str, problem: str) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor, "devices", lambda: pytest.fail("quick asks torch for nothing"))
    monkeypatch.setattr(doctor, "REFERENCE_MODEL", Path("/nowhere"))
    assert cli.main(["doctor", "--quick"]) == 1
    printed = capsys.readouterr().out
    assert problem in printed and "/nowhere/config.json is missing" in printed and "quick: GPUs" in printed
