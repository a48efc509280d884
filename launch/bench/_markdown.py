"""Results as Markdown: the heading and the table of a file, and sections of a document between two marker lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sglang_ext.launch.bench._record import Figure, table
from sglang_ext.launch.bench._results_files import VERSIONS, Results

Markers = tuple[str, str]


def markers(section: str) -> Markers:
    """The lines before and after a section of a document."""
    return f"<!-- {section}:begin -->", f"<!-- {section}:end -->"


BENCH = BEGIN, END = markers("bench")


def render(results: Sequence[Results]) -> str:
    """Markdown: for each file a heading line, an empty line and the table of its rows; no line end at the end."""
    return "\n\n".join(f"{heading(each)}\n\n{figure_table(each.figures)}" for each in results)


def heading(results: Results) -> str:
    """One line: GPU, commit, day, versions and command."""
    versions = (f"{name} {results.machine.get(key) or 'not installed'}" for name, key in VERSIONS.items())
    return f"{', '.join([origin(results), *map(one_line, versions)])}: {_code(one_line(results.command))}"


def origin(results: Results) -> str:
    """GPU, commit and day."""
    return f"**{one_line(results.device)}**, commit {one_line(results.short_commit)}, {results.date.isoformat()}"


def _code(text: str) -> str:
    """A code span; its fence is longer than any run of backticks in the text."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if len(fence) > 1 else ""
    return f"{fence}{space}{text}{space}{fence}"


def one_line(text: str) -> str:
    """A text without line ends."""
    return " ".join(text.split())


def figure_table(figures: Sequence[Figure]) -> str:
    """The table of rows, whose words do not break it."""

    def cell(text: str) -> str:
        return one_line(text).replace("|", r"\|")

    return table(
        [
            replace(
                figure,
                name=cell(figure.name),
                baseline=cell(figure.baseline),
                aim=cell(figure.aim),
                floor_of=cell(figure.floor_of),
            )
            for figure in figures
        ]
    )


def has_section(text: str, section: Markers) -> bool:
    """Whether a document has a marker line of a section, if only one of the two."""
    return any(line.strip() in section for line in text.splitlines())


def replace_section(text: str, report: str, where: Path, section: Markers = BENCH) -> str:
    """`text` with `report` between the markers of a section, which stay; `where` names it in errors.

    Raises:
        ValueError: not exactly one line of each marker, or the end before the beginning.
    """
    lines = text.splitlines(keepends=True)
    begins, ends = ([at for at, line in enumerate(lines) if line.strip() == marker] for marker in section)
    if len(begins) != 1 or len(ends) != 1 or begins[0] > ends[0]:
        got = "; ".join(_found(marker, found) for marker, found in zip(section, (begins, ends), strict=True))
        raise ValueError(
            f"{where}: got {got}; expected one line {section[0]} and, after it, one line {section[1]}: add or mend them"
        )
    line_end = "\r\n" if lines[begins[0]].endswith("\r\n") else "\n"
    made = line_end.join(["", *report.split("\n"), "", ""])
    return "".join(lines[: begins[0] + 1]) + made + "".join(lines[ends[0] :])


def _found(marker: str, lines: Sequence[int]) -> str:
    """Where a marker stands, in words."""
    if not lines:
        return f"no line {marker}"
    return f"{marker} on line{'' if len(lines) == 1 else 's'} {', '.join(str(at + 1) for at in lines)}"
