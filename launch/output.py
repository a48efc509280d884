"""Tables and progress bars of the commands."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sglang_ext.types import JsonObject

Cell = str | int | float | None  # of a table


def table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
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


TICK_SECONDS = 0.5
LINE_SECONDS = (1.0, 10.0)  # the first line where stderr is no terminal, and each further one

_SENT = "sent to the server"
_PHASES: dict[str | None, str] = {  # of the server
    "waiting": "waiting for its turn",
    "preparing": "demonstrations are read and tokenized",
}


class _Bar:
    """A bar over the tokens of a pool that is encoded, with the time so far."""

    def __init__(self, name: str) -> None:
        from tqdm import tqdm

        self.name = name
        self.bar = tqdm(desc=f"{name}: {_SENT}", unit=" tokens", file=sys.stderr)

    def watch(self, info: JsonObject) -> None:
        progress = info.get("progress")
        if not progress:
            self.bar.set_description_str(f"{self.name}: {_PHASES.get(info.get('phase'), _SENT)}")
            return
        self.bar.set_description_str(self.name, refresh=False)
        self.bar.total, self.bar.n = progress["tokens"], progress["tokens_done"]
        self.bar.set_postfix_str(f"block {progress['blocks_done']} of {progress['blocks']}", refresh=False)
        self.bar.refresh()

    def tick(self) -> None:
        self.bar.refresh()

    def close(self) -> None:
        self.bar.close()


class _Lines:
    """The same for a log: a line now and then."""

    def __init__(self, name: str) -> None:
        self.name, self.doing = name, _SENT
        self.begin = time.monotonic()
        self.due = LINE_SECONDS[0]

    def watch(self, info: JsonObject) -> None:
        progress = info.get("progress")
        if not progress:
            self.doing = _PHASES.get(info.get("phase"), _SENT)
        else:
            self.doing = (
                f"{progress['tokens_done']:,} of {progress['tokens']:,} tokens,"
                f" block {progress['blocks_done']} of {progress['blocks']}"
            )

    def tick(self) -> None:
        elapsed = time.monotonic() - self.begin
        if elapsed >= self.due:
            print(f"{self.name}: {self.doing} ({elapsed:.0f} s)", file=sys.stderr, flush=True)
            self.due = elapsed + LINE_SECONDS[1]

    def close(self) -> None:
        """Nothing is left open."""


@contextmanager
def encoding_bar(name: str) -> Iterator[Callable[[JsonObject], None]]:
    """What a change of a pool is at, from the first second on, also while the server has not answered yet.

    On a terminal this is a bar over the pool's tokens, with the time so far. Elsewhere it is a line after a second, and
    one every ten seconds.

    Yields:
        A function that is to see the pool's description again and again.
    """
    shown = _Bar(name) if sys.stderr.isatty() else _Lines(name)
    over = threading.Event()

    def keep_ticking() -> None:
        while not over.wait(TICK_SECONDS):
            shown.tick()

    ticker = threading.Thread(target=keep_ticking, daemon=True)
    ticker.start()
    try:
        yield shown.watch
    finally:
        over.set()
        ticker.join()
        shown.close()
