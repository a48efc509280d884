"""Tables, sizes and the progress bar."""

from __future__ import annotations

import io
import sys

import pytest

from sglang_ext.launch import output
from sglang_ext.launch.output import encoding_bar, size, table
from tests.e2e.server import until

PROGRESS = {"progress": {"tokens": 1000, "tokens_done": 400, "blocks": 5, "blocks_done": 2}}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_tables_are_aligned_and_numbers_stand_right() -> None:
    assert table(("name", "tokens"), [("a", 5), ("long name", 12345)]).splitlines() == [
        "name       tokens",
        "---------  ------",
        "a               5",
        "long name   12345",
    ]
    assert table(("name",), []).splitlines() == ["name", "----"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (80 * 2**30, "80.0 GiB"), (2**50, "1024.0 TiB")],
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


def test_the_bar_shows_tokens_and_blocks_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with encoding_bar("tickets") as watch:
        watch({"status": "encoding"})  # nothing is known yet
        watch(PROGRESS)
    shown = screen.getvalue()
    for words in ("tickets", "40%", "400/1000", "tokens", "block 2 of 5"):
        assert words in shown


def test_no_bar_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = io.StringIO()
    monkeypatch.setattr(sys, "stderr", plain)
    with encoding_bar("tickets") as watch:
        watch(PROGRESS)
    assert plain.getvalue() == ""


@pytest.mark.parametrize("screen", [Terminal(), io.StringIO()])
def test_something_is_shown_while_the_server_has_not_answered(
    monkeypatch: pytest.MonkeyPatch, screen: io.StringIO
) -> None:
    """A pool's text may take the server long to read: that is shown, too, with the time it has taken."""
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(output, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(output, "LINE_SECONDS", (0.02, 0.02))
    with encoding_bar("tickets") as watch:
        until(lambda: "tickets: sent to the server" in screen.getvalue())
        watch({"status": "encoding", "phase": "preparing"})
        until(lambda: "tickets: demonstrations are read and tokenized" in screen.getvalue())
        watch(PROGRESS)
        until(lambda: "block 2 of 5" in screen.getvalue())
