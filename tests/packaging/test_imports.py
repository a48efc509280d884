"""Which modules import which: no circles, no arrow that points up, SGLang only where it is met.

Imports inside functions count as much as others; those for type checkers alone do not. Folders that are symbolic links
are walked like others.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from sglang_ext import lines

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "sglang_ext"

BELOW: dict[str, set[str]] = {
    "lines": set(),
    "kinds": set(),
    "compat": {"kinds", "lines"},
    "hooks": {"lines"},
    "kernels": set(),
    "quiet": set(),
    "retrievers": set(),
    "policies": {"kernels"},
    "config": {"policies", "retrievers"},
    "settings": {"config"},
    "systems": {"config", "policies"},
    "cache": {"compat", "config", "kernels", "policies"},
    "attention": {"cache", "compat", "config", "kernels", "kinds", "policies", "systems"},
    "drafting": {"attention", "compat", "config", "systems"},
    "serving": {
        "attention",
        "cache",
        "compat",
        "config",
        "hooks",
        "lines",
        "policies",
        "retrievers",
        "settings",
        "systems",
    },
    "plugin": {
        "attention",
        "cache",
        "compat",
        "config",
        "drafting",
        "hooks",
        "lines",
        "serving",
        "settings",
        "systems",
    },
    "platform_cpu": {"compat", "lines", "quiet"},
    "": {"serving"},  # the package itself
    "assets": set(),
}
"""Part of the package -> those that it may import. `launch`, at the top, may import all."""

ANYWHERE = {"names", "types"}
"""Names for annotations, which every part may import; they import nothing."""

MEETS_SGLANG = {"attention", "compat", "drafting", "plugin", "platform_cpu", "serving"}
STARTS = {"launch.doctor", "launch.serve", "launch.bench._cascade_engine", "launch.bench._dbsa_engine"}
STARTS |= {"launch.bench._double_p_engine", "launch.bench._ltri_engine", "launch.bench._dbsa_host_engine"}
"""Commands that start SGLang, or look at it."""

ADAPTERS = [ROOT / PACKAGE / "compat" / f"v{line.first.replace('.', '_')}.py" for line in lines.LINES]
"""One of each line of SGLang that we serve."""


@cache
def modules() -> dict[str, Path]:
    """Name within the package -> file, of every module."""
    found: dict[str, Path] = {}
    top = ROOT / PACKAGE
    for folder, names, files in os.walk(top, followlinks=True):
        names[:] = [name for name in names if name != "__pycache__"]
        for file in files:
            if file.endswith(".py"):
                parts = (Path(folder) / file).relative_to(top).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = Path(folder) / file
    return found


def part(module: str) -> str:
    return module.split(".")[0]


def imported(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """(module, name in it) of every import that runs: `import a.b` is (a.b, None)."""
    for node in running(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((node.module or "", alias.name) for alias in node.names)


def running(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all below it, without what only type checkers read."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from running(child)


@cache
def graph() -> dict[str, set[str]]:
    """Module -> modules of ours that it imports."""
    return {name: set(_ours(name, path)) for name, path in modules().items()}


def _ours(module: str, path: Path) -> Iterator[str]:
    for name, member in imported(ast.parse(path.read_text(encoding="utf-8"))):
        if name.split(".")[0] != PACKAGE:
            continue
        within = name.removeprefix(PACKAGE).removeprefix(".")
        whole = f"{within}.{member}".strip(".") if member else within
        target = whole if whole in modules() else within
        if target != module and not (target == "" and whole != ""):
            yield target


def test_every_module_is_seen() -> None:
    assert {part(name) for name in modules()} == {*BELOW, *ANYWHERE, "launch"}
    assert "kernels.rope" in modules() and "policies.dbsa" in graph()["config"]


def test_there_is_no_circle() -> None:
    try:
        list(TopologicalSorter(graph()).static_order())
    except CycleError as error:
        raise AssertionError("a circle: " + " -> ".join(reversed(error.args[1]))) from None


def test_arrows_point_down() -> None:
    wrong = [
        f"{name} imports {target}"
        for name, targets in graph().items()
        for target in targets
        if part(name) != "launch" and part(target) not in {part(name), *ANYWHERE, *BELOW.get(part(name), ())}
    ]
    assert wrong == []
    assert not any(graph()[name] for name in ANYWHERE)


def test_sglang_is_met_in_few_places() -> None:
    elsewhere = [
        f"{name} imports {target}"
        for name, path in modules().items()
        for target, _ in imported(ast.parse(path.read_text(encoding="utf-8")))
        if target.split(".")[0] == "sglang" and part(name) not in MEETS_SGLANG and name not in STARTS
    ]
    assert elsewhere == []


def test_sglangs_kernels_are_met_in_few_places() -> None:
    meets = {
        name
        for name, path in modules().items()
        for target, _ in imported(ast.parse(path.read_text(encoding="utf-8")))
        if target.split(".")[0] == "sgl_kernel"
    }
    ours = {"kernels.dense_attention", "kernels.view_attention.flash_attention_impl"}
    assert meets == {*ours, "launch.bench.verification"}


def test_what_is_wrong_would_be_found(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from sglang_ext.serving import pools\n"
        "def hidden():\n    from sglang_ext.attention import policy\n"
    )
    assert set(_ours("compat", file)) == {"attention.policy"}


def test_no_two_public_classes_have_one_name() -> None:
    found: dict[str, set[Path]] = {}
    for path in set(map(Path.resolve, modules().values())):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, set()).add(path)
    adapters = set(ADAPTERS)  # the same names by design
    assert {name: paths for name, paths in found.items() if len(paths) > 1 and paths != adapters} == {}


def _interface(path: Path) -> dict[str, str]:
    """Name -> signature of what an adapter defines, classes and constants by kind; no private constants."""
    found: dict[str, str] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = ast.unparse(node.args)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = "class"
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name == "__all__" or not name.startswith("_"):
                found[name] = ast.unparse(node.value) if name == "__all__" else "constant"
    return found


def test_adapters_of_all_lines_have_one_interface() -> None:
    older, newer = (_interface(path) for path in ADAPTERS)
    assert older == newer and len(older) > 10
    offered = ast.literal_eval(older.pop("__all__"))
    assert {*older} <= {*offered} and {*offered} - {*older} == {"capture_scope", "capture_variant", "replay_scope"}
