"""This module reads the JSON files that `_record.save` wrote into a folder, as rows and curves with the machine, the
commit and the command that they come from, and it refuses a malformed file with a message that names the file and the
field.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import textwrap
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TypeVar

from sglang_ext.launch.bench._record import UNITS, Curve, Figure, Timing
from sglang_ext.types import Json, JsonObject

# What the heading calls a package: what the record calls it.
VERSIONS = {"sglang": "sglang", "torch": "torch", "triton": "triton", "flashinfer": "flashinfer-python"}

KindT = TypeVar("KindT")


@dataclass(frozen=True)
class Results:
    """One results file.

    Attributes:
        path: the file.
        date: the day of the run.
        commit: as recorded: a hash, perhaps with ``-dirty``, or "unknown".
        command: what made the file.
        machine: what `_record.machine` found.
        figures: the rows, in the file's order.
        curves: likewise.
    """

    path: Path
    date: datetime.date
    commit: str
    command: str
    machine: JsonObject
    figures: tuple[Figure, ...]
    curves: tuple[Curve, ...] = ()

    @property
    def device(self) -> str:
        """The GPU's name; without one, the processor's."""
        return self.machine.get("gpu") or f"no GPU, {self.machine.get('processor') or 'unknown processor'}"

    @property
    def short_commit(self) -> str:
        """Seven digits of the hash; ``-dirty`` stays."""
        return re.sub(r"^([0-9a-f]{7})[0-9a-f]*", r"\1", self.commit)


def read_folder(folder: Path) -> tuple[list[Results], dict[Path, str]]:
    """The results of a folder by file name, and {path: bench} of the files with another benchmark's own layout.

    Raises:
        ValueError: no such folder, no results in it, or a malformed file.
    """
    if not folder.is_dir():
        raise ValueError(f"results folder {folder}: there is no such folder; give one that holds JSON files, --results")
    results: list[Results] = []
    others: dict[Path, str] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            record = _typed(json.loads(read_text(path)), dict, "the file")
            if "figures" not in record and isinstance(record.get("bench"), str):
                others[path] = record["bench"]
            else:
                results.append(_results(path, record))
        except ValueError as error:
            message = f"{path} is no results file: {error}; mend it, or run the benchmark that writes it again"
            raise ValueError(message) from error
    if not results:
        left_out = f", only layouts of other benchmarks: {', '.join(path.name for path in others)}" if others else ""
        raise ValueError(
            f"results folder {folder}: got no JSON file with figures{left_out}; "
            "expected at least one (sglang-ext bench dbsa writes one)"
        )
    return results, others


def read_text(path: Path) -> str:
    """A file's text, with its line ends as they are.

    Raises:
        ValueError: its bytes are not UTF-8.
    """
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: got bytes that are not UTF-8, expected text: {error}") from error


def _results(path: Path, record: JsonObject) -> Results:
    date = _of(record, "date", str)
    try:
        day = datetime.datetime.fromisoformat(date).date()
    except ValueError as error:
        raise ValueError(f"date: got {date!r}, expected ISO 8601") from error
    rows = _of(record, "figures", list)
    machine = _of(record, "machine", dict)
    for key in ("gpu", "processor", *VERSIONS.values()):
        if machine.get(key) is not None:
            _typed(machine[key], str, f"machine, {key}")
    return Results(
        path=path,
        date=day,
        commit=_of(record, "commit", str),
        command=_of(record, "command", str),
        machine=machine,
        figures=tuple(figure_of(row, f"row {index}") for index, row in enumerate(rows, 1)),
        curves=tuple(
            curve_of(each, f"curve {index}")
            for index, each in enumerate(_typed(record.get("curves", []), list, "curves"), 1)
        ),
    )


def curve_of(value: Json, where: str) -> Curve:
    """Curves of a results file; `where` names them in errors.

    Raises:
        ValueError: a field is missing, unknown or not what `Curve` says.
    """
    found = _fields(Curve, value, where)
    for key in ("title", "x", "y"):
        _typed(found[key], str, f"{where}, {key}")
    _typed(found["doubling"], bool, f"{where}, doubling")
    series: dict[str, list[tuple[float, float]]] = {}
    for name, points in _typed(found["series"], dict, f"{where}, series").items():
        series[name] = []
        for point in _typed(points, list, f"{where}, {name}"):
            if len(_typed(point, list, f"{where}, {name}")) != 2:
                raise ValueError(f"{where}, {name}: got {point!r}, expected two numbers")
            series[name].append((_number(point[0], f"{where}, {name}"), _number(point[1], f"{where}, {name}")))
    return Curve(found["title"], found["x"], found["y"], series, found["doubling"])


def figure_of(row: Json, where: str) -> Figure:
    """A row of a results file as the `Figure` it was; `where` names it in errors.

    Raises:
        ValueError: a field is missing, unknown or not what `Figure` says.
    """
    found = _fields(Figure, row, where)
    found["timing"] = _timing(found["timing"], f"{where}, timing")
    if found["baseline_timing"] is not None:
        found["baseline_timing"] = _timing(found["baseline_timing"], f"{where}, baseline_timing")
    for key in ("name", "baseline", "aim", "floor_of", "unit"):
        _typed(found[key], str, f"{where}, {key}")
    if found["unit"] not in UNITS:
        raise ValueError(f"{where}, unit: got {found['unit']!r}, expected one of {', '.join(UNITS)}")
    for key in ("ratio", "floor"):
        if found[key] is not None and _number(found[key], f"{where}, {key}") <= 0:
            raise ValueError(f"{where}, {key}: got {found[key]!r}, expected a number above 0, or null")
    if found["met"] is not None:
        _typed(found["met"], bool, f"{where}, met")
    _typed(found["notes"], dict, f"{where}, notes")
    return Figure(**found)


def _timing(value: Json, where: str) -> Timing:
    found = _fields(Timing, value, where)
    for key in ("median", "low", "high", "samples"):
        _number(found[key], f"{where}, {key}")
    return Timing(**found)


def _fields(kind: type[Figure] | type[Timing] | type[Curve], value: Json, where: str) -> JsonObject:
    """The fields of a dataclass in a JSON object; those that have a default may be absent."""
    given = dict(_typed(value, dict, where))
    if unknown := given.keys() - {field.name for field in fields(kind)}:
        raise ValueError(f"{where}: got unknown {', '.join(sorted(unknown))}, expected the fields of {kind.__name__}")
    for field in fields(kind):
        if field.name not in given and field.default is not MISSING:
            given[field.name] = field.default
        elif field.name not in given and field.default_factory is not MISSING:
            given[field.name] = field.default_factory()
        elif field.name not in given:
            raise ValueError(f"{where}: got no {field.name}, expected the fields of {kind.__name__}")
    return given


def _of(record: JsonObject, key: str, kind: type[KindT]) -> KindT:
    if key not in record:
        raise ValueError(f"got no {key}, expected one")
    return _typed(record[key], kind, key)


def _typed(value: Json, kind: type[KindT], where: str) -> KindT:
    if not isinstance(value, kind):
        names = {dict: "an object", list: "a list", str: "a string", bool: "true, false or null"}
        raise ValueError(f"{where}: got {textwrap.shorten(repr(value), 60)}, expected {names[kind]}")
    return value


def _number(value: Json, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{where}: got {textwrap.shorten(repr(value), 60)}, expected a finite number")
    return value
