"""Tables of the documents that are written from the code: the options there are, and the systems.

python -m sglang_ext.launch.docs [--check]

README.md and docs/*.md hold pairs of lines, and what stands between the two of a pair is replaced:

    <!-- options: RequestOptions -->    a table of the options of one class, or of one system (`double_p`)
    <!-- systems -->                    a table of the systems that `--attention-backend` names
    <!-- fleet -->                      what fleets of servers carry (`sglang-ext pool plan --fleet`)
    <!-- end -->

The help of an option is what the `Attributes:` section of its dataclass says, which the command line shows too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from sglang_ext.config import CHOICES, DEFAULT_RATIO, NAMES, PoolOptions, RequestOptions
from sglang_ext.launch import capacity
from sglang_ext.launch.options import described
from sglang_ext.serving.tenants import TenantQuotas
from sglang_ext.settings import ServerSettings
from sglang_ext.systems.registry import System, ours
from sglang_ext.types import Json

ROOT = Path(__file__).resolve().parents[1]
OUTDATED = 1  # the exit status of --check

CLASSES = (PoolOptions, RequestOptions, ServerSettings, TenantQuotas)

STANDS_FOR: Mapping[tuple[type, str], float] = {(RequestOptions, "ratio"): DEFAULT_RATIO}
"""What a field that is None stands for, where that is a value."""

_TYPES = {
    "str": "text",
    "int": "whole number",
    "float": "number",
    "bool": "`true` or `false`",
    "tuple[int, ...]": "list of whole numbers",
}
_MARKED = re.compile(r"^<!-- (options: [^\n]+?|systems|fleet) -->\n(?:.*?\n)??<!-- end -->$", re.MULTILINE | re.DOTALL)
_BEGIN = re.compile(r"^<!-- (?:options: [^\n]+?|systems|fleet) -->$", re.MULTILINE)


def option_classes() -> dict[str, type]:
    """Name in a document's mark -> dataclass: the classes of options, and the options of each system that has some."""
    found: dict[str, type] = {cls.__name__: cls for cls in CLASSES}
    return found | {name: system.options for name, system in ours().items() if system.options is not None}


def documents(root: Path = ROOT) -> list[Path]:
    """README.md and docs/*.md of a checkout."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def own_fields_first(cls: type) -> Iterator[dataclasses.Field[Json]]:
    """The fields of a dataclass: those that it names itself, then those of its bases, each once."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for each in cls.__mro__:
        for name in vars(each).get("__annotations__", {}):
            if name in fields:
                yield fields.pop(name)


def helps(cls: type) -> dict[str, str]:
    """What the docstrings of a dataclass and of its bases say about each field."""
    return {name: words for each in reversed(cls.__mro__) for name, words in described(each).items()}


def choices(field: dataclasses.Field[Json]) -> tuple[str, ...]:
    """The values that a field takes; none where any of its type will do."""
    return tuple(field.metadata.get(CHOICES, ()))


def kind(field: dataclasses.Field[Json]) -> str:
    """The type of a field, or its choices, in words."""
    if choices(field):
        return ", ".join(f"`{choice}`" for choice in choices(field))
    if NAMES in field.metadata:
        return "text that is, or begins with, " + ", ".join(f"`{name}`" for name in field.metadata[NAMES])
    return _TYPES[str(field.type).split("|")[0].strip()]


def default(cls: type, field: dataclasses.Field[Json]) -> str:
    """The default of a field: as JSON spells it, but for choices, which stand without quotation marks."""
    value = STANDS_FOR.get((cls, field.name), field.default)
    if value is dataclasses.MISSING:
        return "required"
    if value is None:
        return "none"
    return f"`{value if choices(field) else json.dumps(value)}`"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def option_table(cls: type) -> str:
    """A row for each option of a dataclass.

    Raises:
        ValueError: the docstring says nothing about one of them.
    """
    words = helps(cls)
    rows = []
    for field in own_fields_first(cls):
        if field.name not in words:
            raise ValueError(f"{cls.__name__}.{field.name}: its docstring has no entry for it under Attributes:")
        rows.append((f"`{field.name}`", kind(field), default(cls, field), words[field.name]))
    return table(("option", "type or choices", "default", "meaning"), rows)


def system_table() -> str:
    """A row for each system of this package."""
    rows = [(f"`{name}`", system.summary, _kernels(system)) for name, system in ours().items()]
    return table(("`--attention-backend`", "what it does", "kernels for GPUs"), rows)


def _kernels(system: System) -> str:
    """Whether kernels serve a system, in words."""
    if system.kernels is None:
        return "no: plain PyTorch"
    return "yes" if system.automatic else "if asked for"


_TABLES: Mapping[str, Callable[[], str]] = {
    "systems": system_table,
    "fleet": lambda: capacity.markdown(capacity.measured(), capacity.fleets()),
}


def updated(text: str, name: str) -> str:
    """A document's text with its tables as the code has them.

    Args:
        name: the document, for messages.

    Raises:
        ValueError: a mark without an end, or one that names no class and no system.
    """
    known = option_classes()

    def section(match: re.Match[str]) -> str:
        what = match[1]
        return f"<!-- {what} -->\n\n{made(what)}\n\n<!-- end -->"

    def made(what: str) -> str:
        if what in _TABLES:
            return _TABLES[what]()
        wanted = what.removeprefix("options: ")
        if wanted not in known:
            raise ValueError(f"{name}: <!-- {what} -->: no such options; known are {', '.join(sorted(known))}")
        return option_table(known[wanted])

    ends = len(re.findall(r"^<!-- end -->$", text, re.MULTILINE))
    if not len(_BEGIN.findall(text)) == ends == len(_MARKED.findall(text)):
        raise ValueError(f"{name}: expected a line <!-- end --> behind each line <!-- options: ... --> or systems")
    return _MARKED.sub(section, text)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables of all documents; with --check only say which differ."""
    parser = argparse.ArgumentParser(prog="python -m sglang_ext.launch.docs", description="Tables of the documents.")
    parser.add_argument("--check", action="store_true", help=f"change nothing; exit {OUTDATED} when a table differs")
    args = parser.parse_args(argv)
    different = []
    for path in documents():
        before = path.read_text(encoding="utf-8")
        after = updated(before, path.name)
        if after != before:
            different.append(path)
            if not args.check:
                path.write_text(after, encoding="utf-8")
    for path in different:
        print(f"{'differs from the code' if args.check else 'written'}: {path}")
    if not different:
        print("up to date")
    elif args.check:
        print("write them: make docs", file=sys.stderr)
    return OUTDATED if args.check and different else 0


if __name__ == "__main__":
    sys.exit(main())
