"""Tables and progress bars of the commands."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns; a column whose values are all numbers is set to the right."""
    cells = [[str(value) for value in row] for row in rows]
    widths = [max(len(line[column]) for line in [list(header), *cells]) for column in range(len(header))]
    right = [
        bool(rows) and all(isinstance(row[column], (int, float)) and not isinstance(row[column], bool) for row in rows)
        for column in range(len(header))
    ]

    def line(values: Sequence[str]) -> str:
        padded = [
            value.rjust(width) if to_right else value.ljust(width)
            for value, width, to_right in zip(values, widths, right, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, cells)])


def size(count: int) -> str:
    """Bytes for people, in powers of 1,024."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


@contextmanager
def encoding_bar(name: str) -> Iterator[Callable[[Any], None]]:
    """A progress bar over the tokens of a pool being encoded; shown only where stderr is a terminal."""
    from tqdm import tqdm

    with tqdm(desc=name, unit=" tokens", disable=not sys.stderr.isatty()) as bar:

        def watch(info: Any) -> None:
            progress = info.get("progress")
            if progress and not bar.disable:
                bar.total = progress["tokens"]
                bar.n = progress["tokens_done"]
                bar.set_postfix_str(f"block {progress['blocks_done']} of {progress['blocks']}", refresh=False)
                bar.refresh()

        yield watch
