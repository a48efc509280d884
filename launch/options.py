"""Command-line flags made from the option dataclasses, so that the command line has every option there is."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Callable, Collection

from sglang_ext.config import CHOICES, NAMES
from sglang_ext.types import Json, JsonObject, Options

_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}


def text(value: str) -> str:
    r"""A text option. Shells pass `\n` on as two characters: here `\n`, `\t` and `\\` are newline, tab, backslash."""
    return re.sub(r"\\[nt\\]", lambda match: _ESCAPES[match[0]], value)


def numbers(value: str) -> list[int]:
    """Whole numbers separated by commas."""
    return [int(part) for part in value.split(",")]


_TYPES: dict[str, Callable[[str], str | int | float | list[int]]] = {
    "str": text,
    "int": int,
    "float": float,
    "tuple[int, ...]": numbers,
}
_SHOWN = {"text": "TEXT", "int": "N", "float": "X", "numbers": "N,N,..."}


def described(cls: type) -> dict[str, str]:
    """What the `Attributes:` section of a dataclass's docstring says about each field."""
    section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:")[2]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in entries}


def flag(name: str) -> str:
    """The flag of the field `name`."""
    return "--" + name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser, cls: type, title: str, skip: Collection[str] = ()) -> None:
    """A flag for each field of `cls`; a flag that is not given leaves nothing in the namespace."""
    group = parser.add_argument_group(title)
    helps = described(cls)
    for field in dataclasses.fields(cls):
        if field.name not in skip:
            group.add_argument(flag(field.name), default=argparse.SUPPRESS, **_argument(field, helps))


def _argument(field: dataclasses.Field[Json], helps: dict[str, str]) -> Options:
    """How argparse is told of a field: its type, its choices and its help."""
    kind = str(field.type).split("|")[0].strip()
    words = helps.get(field.name, "").rstrip(".")
    if NAMES in field.metadata:
        words = f"{', '.join(field.metadata[NAMES])}: {words}"
    if field.default not in (None, dataclasses.MISSING):
        words += f" (default: {field.default!r})"
    words = words.replace("`", "").replace("%", "%%")
    if kind == "bool":
        return {"action": argparse.BooleanOptionalAction, "help": words}
    convert = _TYPES[kind]
    if CHOICES in field.metadata:  # argparse shows them in place of the type
        return {"type": convert, "choices": field.metadata[CHOICES], "help": words}
    return {"type": convert, "metavar": _SHOWN[convert.__name__], "help": words}


def given(args: argparse.Namespace, cls: type, skip: Collection[str] = ()) -> JsonObject:
    """The options of `cls` that the user gave, by name."""
    names = [field.name for field in dataclasses.fields(cls) if field.name not in skip]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}
