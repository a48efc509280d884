"""The short form of `make soak`: the same clients, servers and checks, for a minute and a half."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from tests.soak.run import parse, show, soak

# Memory of a server this young still grows (libraries, arenas): only the long form can hold it to 5%.
SHORT = ["--minutes", "1.2", "--clients", "32", "--memory", "0.15", "--answers", "150"]


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    options: argparse.Namespace = parse(SHORT)
    found = soak(options)
    show(found)
    return found


@pytest.mark.timeout(1500)
def test_every_answer_is_right_and_the_books_are_clean(summary: dict[str, Any]) -> None:
    failures = [line for each in summary["servers"].values() for line in each["first_failures"]]
    assert failures == []
    assert summary["passed"] and summary["answers_checked"] >= summary["answers_wanted"]


def test_the_soak_did_what_it_is_for(summary: dict[str, Any]) -> None:
    """It cannot pass by asking little: every kind of client was there, on both servers."""
    pools, streams = summary["servers"]["pools"], summary["servers"]["streams"]
    for kind in ("put", "show", "label", "label stream", "label batch", "steady", "chat", "completion", "bad input"):
        assert pools["kinds"][kind]["statuses"], kind
    assert {"label", "batch", "steady", "label_probs"} <= pools["checks"].keys()
    assert {"turn of a conversation", "long prompt"} <= streams["checks"].keys()
    assert any("left" in row["statuses"] for row in pools["kinds"].values())
