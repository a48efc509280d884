"""Hooks reach all names of what they replace, as they do where SGLang looks once for each of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ext.compat.propagation import look_once


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A module, another one with names of its own for what is in it, and no other hooks."""
    apply = HookRegistry.__dict__["apply_hooks"]
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    first, other = ModuleType("tests_first"), ModuleType("tests_other")
    exec("def one(): return 1\ndef two(): return 2\nclass Kind:\n    def three(self): return 3\n", vars(first))
    vars(other).update(one=first.one, again=first.one, two=first.two, Kind=first.Kind)
    for module in (first, other):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    yield {"first": first, "other": other}
    HookRegistry.apply_hooks = apply


def answers(modules: dict[str, Any]) -> list[int]:
    first, other = modules["first"], modules["other"]
    return [
        first.one(),
        other.one(),
        other.again(),
        first.two(),
        other.two(),
        first.Kind().three(),
        other.Kind().three(),
    ]


def register() -> None:
    class Kind:
        def three(self) -> int:
            return 5

    HookRegistry.register("tests_first.one", lambda found: found + 10, HookType.AFTER)
    HookRegistry.register("tests_first.Kind", Kind, HookType.REPLACE)
    HookRegistry.register("tests_other.Kind.three", lambda found, _self: found + 10, HookType.AFTER)


@pytest.mark.parametrize("ours", [False, True])
def test_all_names_are_found(ours: bool, modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    looks, look = [], hook_registry._propagate_patch
    monkeypatch.setattr(hook_registry, "_propagate_patch", lambda *given: looks.append(given) or look(*given))
    if ours:
        look_once()
    assert answers(modules) == [1, 1, 1, 2, 2, 3, 3]
    register()
    HookRegistry.apply_hooks()
    assert answers(modules) == [11, 11, 11, 2, 2, 15, 15]
    # A class is looked for at once, because hooks of its methods may be named by the other name.
    assert [given[0].__name__ for given in looks] == (["Kind"] if ours else ["Kind", "one", "three"])


def test_it_is_done_once(modules: dict[str, Any]) -> None:
    look_once()
    once = HookRegistry.__dict__["apply_hooks"]
    look_once()
    assert HookRegistry.__dict__["apply_hooks"] is once
    look = hook_registry._propagate_patch
    HookRegistry.register("tests_first.nowhere", lambda found: found, HookType.AFTER)
    HookRegistry.register("tests_first.two", lambda found: found + 10, HookType.AFTER)
    HookRegistry.apply_hooks()  # SGLang logs what it cannot hook, and goes on
    assert hook_registry._propagate_patch is look and answers(modules) == [1, 1, 1, 12, 12, 3, 3]
