"""SGLang's look for other names of what a plugin has replaced: once for all hooks, and not once for each.

`from module import function` binds a name of its own, which SGLang finds by looking at every name of every module that
was imported. For one hook that takes 30 to 50 ms, and there are about ninety, in every process of a server.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry

NOTED = "_sglang_ext_looks_once"
"""Attribute of the function that stands in the place of SGLang's."""


def look_once() -> None:
    """Have SGLang apply hooks, those of all plugins, with one such look."""
    apply = HookRegistry.__dict__["apply_hooks"].__func__
    if hasattr(apply, NOTED):
        return

    @functools.wraps(apply)
    def apply_hooks(registry: type[HookRegistry]) -> None:
        if _share_an_original(registry._hooks):  # the second has to find what the first one has put there
            apply(registry)
            return
        replaced, look = dict[int, tuple[Any, Any, Any]](), hook_registry._propagate_patch

        def note(original: Any, wrapped: Any, source: Any) -> int:
            if isinstance(original, type):  # hooks of its methods may be named by another module's name of the class
                return int(look(original, wrapped, source))
            replaced[id(original)] = original, wrapped, source  # which also keeps the number from another object
            return 0

        hook_registry._propagate_patch = note
        try:
            apply(registry)
        finally:
            hook_registry._propagate_patch = look
        _propagate(replaced)

    setattr(apply_hooks, NOTED, True)
    HookRegistry.apply_hooks = classmethod(apply_hooks)


def _share_an_original(targets: Iterable[str]) -> bool:
    """Whether two of some dotted names are names of one object; what cannot be found is SGLang's to report."""
    found = list[Any]()  # held, so that no two have one number
    for target in targets:
        try:
            found.append(pkgutil.resolve_name(target))
        except (ImportError, AttributeError, ValueError):
            continue
    return len({id(each) for each in found}) < len(found)


def _propagate(replaced: dict[int, tuple[Any, Any, Any]]) -> None:
    """Have all modules' names of what was replaced mean what replaces it, but for names that cannot be set.

    Args:
        replaced: number of the original -> (original, what replaces it, where that was set).
    """
    modules: list[object] = list(sys.modules.values())  # some packages put other things there
    for module in modules:
        if not isinstance(module, ModuleType):
            continue
        for name, value in list(vars(module).items()):
            original, wrapped, source = replaced.get(id(value), (None, None, None))
            if original is None or value is not original or module is source:
                continue
            try:
                setattr(module, name, wrapped)
            except (AttributeError, TypeError):  # as SGLang does
                continue
