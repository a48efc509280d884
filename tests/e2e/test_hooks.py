"""Hooks that SGLang never calls: a server whose answers may be wrong gives none."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests

from sglang_ext import hooks
from sglang_ext.hooks import HOOKS, Hook, check_arguments, check_called, never_called, noted
from sglang_ext.serving.checks import after_server_args
from tests.e2e.patching import sitecustomize
from tests.e2e.server import Server, model, until

DROPPED = "SGLANG_EXT_TEST_DROPS"  # environment: `ours` of hooks that SGLang registers, but does not call

_CODE = sitecustomize(
    "sglang.srt.plugins.hook_registry",
    f"""
    original = module.HookRegistry.register.__func__

    def register(cls, target, hook, *args, **kwargs):
        ours = f"{{hook.__module__}}:{{hook.__name__}}"
        if ours not in os.environ.get({DROPPED!r}, "").split():
            original(cls, target, hook, *args, **kwargs)

    module.HookRegistry.register = classmethod(register)
    """,
)


def dropping(name: str, folder: Path) -> dict[str, str]:
    """Environment of a server whose hook `name` is never called."""
    (folder / "sitecustomize.py").write_text(_CODE, encoding="utf-8")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, DROPPED: f"sglang_ext.serving.{name}"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_whose_arguments_nobody_looked_at_does_not_start(tmp_path: Path) -> None:
    env = dropping("checks:after_server_args", tmp_path)
    with Server(model("llama"), env=env, max_total_tokens=6000, wait=False, warm=False) as server:
        assert server.wait_for_exit() == 1
        assert "has not called the plugin's hook on ServerArgs" in server.log()


@pytest.mark.parametrize(
    ("dropped", "target"),
    [
        ("turns:around_get_new_batch_prefill", "Scheduler.get_new_batch_prefill"),
        ("access:around_dispatch", "TokenizerManager._dispatch_to_scheduler"),
    ],
)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_without_one_of_its_hooks_answers_nothing(dropped: str, target: str, tmp_path: Path) -> None:
    body = {"text": "a b c", "sampling_params": {"max_new_tokens": 2}}
    words, statuses = f"{target} (around, sglang_ext.serving.{dropped})", set[int]()

    with Server(
        model("llama"), env=dropping(dropped, tmp_path), max_total_tokens=6000, wait=False, warm=False
    ) as server:

        def said() -> bool:
            with contextlib.suppress(requests.ConnectionError):  # not up yet, or stopped, as where a scheduler finds it
                statuses.add(requests.post(f"{server.url}/generate", json=body, timeout=60).status_code)
            return words in server.log()

        until(said, 120)
        assert not statuses - {500, 503}  # 503 until SGLang takes requests; none where a scheduler stops the server


def test_what_must_be_called_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_called", set())
    monkeypatch.setattr(hooks, "_checked", set())
    own = Hook("a.target", "around", "os.path:basename", "main")
    monkeypatch.setattr(hooks, "HOOKS", (own, Hook("b.target", "around", "os.path:dirname")))
    assert never_called("main") == [own] and never_called("scheduler") == []
    with pytest.raises(RuntimeError, match=r"not called hooks .* a\.target \(around, os\.path:basename\)"):
        check_called("main")
    check_called("scheduler")
    assert noted(own)("/a/b") == "b"
    check_called("main")
    assert hooks.was_checked("main")


def test_arguments_that_nobody_looked_at() -> None:
    arguments = SimpleNamespace(attention_backend="torch_native", radix_cache_backend=None)
    with pytest.raises(RuntimeError, match="hook on ServerArgs"):
        check_arguments(arguments)
    after_server_args(None, arguments)
    check_arguments(arguments)


def test_both_processes_have_hooks_that_must_be_called() -> None:
    for process in ("main", "scheduler"):
        assert len([hook for hook in HOOKS if hook.called_in == process]) >= 6
