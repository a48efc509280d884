"""Hooks reach all names of what they replace, as they do where SGLang looks once for each of them."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ext.compat.propagation import NOTED, _share_an_original, look_once
from sglang_ext.hooks import HOOKS


class Closed(ModuleType):
    """A module whose names cannot be set."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A module, others with names of their own for what is in it, no hooks, and SGLang's own way to apply them."""
    apply = HookRegistry.__dict__["apply_hooks"].__func__
    while hasattr(apply, NOTED):  # another test has loaded the plugin
        apply = apply.__wrapped__
    monkeypatch.setattr(HookRegistry, "apply_hooks", classmethod(apply))
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    first, closed, other = ModuleType("tests_first"), Closed("tests_closed"), ModuleType("tests_other")
    exec("def one(): return 1\ndef two(): return 2\nclass Kind:\n    def three(self): return 3\n", vars(first))
    vars(closed).update(one=first.one)
    vars(other).update(one=first.one, again=first.one, two=first.two, Kind=first.Kind)
    for module in (first, closed, other):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return {"first": first, "closed": closed, "other": other}


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what SGLang looks for."""
    found, look = list[str](), hook_registry._propagate_patch

    def noted(original: Any, wrapped: Any, source: Any) -> int:
        found.append(original.__name__)
        return int(look(original, wrapped, source))

    monkeypatch.setattr(hook_registry, "_propagate_patch", noted)
    return found


def more(by: int) -> Any:
    return lambda found, *_: found + by


def answers(modules: dict[str, Any]) -> list[int]:
    first, other = modules["first"], modules["other"]
    kinds = [module.Kind().three() for module in (first, other)]
    return [first.one(), other.one(), other.again(), first.two(), other.two(), *kinds]


@pytest.mark.parametrize("ours", [False, True])
def test_all_names_are_found(ours: bool, modules: dict[str, Any], looks: list[str]) -> None:
    class Kind:
        def three(self) -> int:
            return 5

    if ours:
        look_once()
    assert answers(modules) == [1, 1, 1, 2, 2, 3, 3]
    HookRegistry.register("tests_first.one", more(10), HookType.AFTER)
    HookRegistry.register("tests_first.Kind", Kind, HookType.REPLACE)
    HookRegistry.register("tests_other.Kind.three", more(10), HookType.AFTER)
    HookRegistry.apply_hooks()
    assert answers(modules) == [11, 11, 11, 2, 2, 15, 15] and modules["closed"].one() == 1
    # A class is looked for at once, because hooks of its methods may be named by the other name.
    assert looks == (["Kind"] if ours else ["Kind", "one", "three"])


@pytest.mark.parametrize("ours", [False, True])
def test_two_hooks_of_one_function(ours: bool, modules: dict[str, Any], looks: list[str]) -> None:
    """Each is there whichever module's name it was given by; SGLang leaves alone other names in the module itself."""
    if ours:
        look_once()
    HookRegistry.register("tests_first.one", more(10), HookType.AFTER)
    HookRegistry.register("tests_other.one", more(100), HookType.AFTER)
    HookRegistry.apply_hooks()
    assert answers(modules)[:3] == [111, 111, 11] and len(looks) == 2


def test_it_is_done_once(modules: dict[str, Any]) -> None:
    theirs = HookRegistry.__dict__["apply_hooks"]
    look_once()
    once = HookRegistry.__dict__["apply_hooks"]
    look_once()
    assert HookRegistry.__dict__["apply_hooks"] is once is not theirs
    look = hook_registry._propagate_patch
    HookRegistry.register("tests_first.nowhere", more(1), HookType.AFTER)
    HookRegistry.register("tests_first.two", more(10), HookType.AFTER)
    HookRegistry.apply_hooks()  # SGLang logs what it cannot hook, and goes on
    assert hook_registry._propagate_patch is look and answers(modules) == [1, 1, 1, 12, 12, 3, 3]


def test_no_two_hooks_of_ours_have_one_function() -> None:
    """They would have SGLang look once for each again."""
    assert not _share_an_original({hook.target for hook in HOOKS})
