"""Recorded chunks of Ltri-LLM on several streams: no launch may disturb one that would run beside it on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sglang_ext.attention import ltri_graphs
from sglang_ext.attention.ltri_graphs import GraphRecorder
from sglang_ext.attention.ltri_recorded import RecordedRun
from sglang_ext.attention.ltri_state import Lane
from tests.plugin.lane_races import LANES, FakeStream, Races, watch
from tests.plugin.test_ltri_kernels import PROMPT, both, replayed, text


def record_with(races: Races, streams: list[FakeStream], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have replays be watched. What is recorded is not: all chunks of a run are the same one then."""

    def record(recorder: GraphRecorder, body: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            races.begin(streams)
            with races:
                body()
            races.end(streams)

        body()
        return replay

    monkeypatch.setattr(GraphRecorder, "record", record)


def read(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, changes: dict[str, Any]) -> None:
    """Read prompts in runs of five chunks, and of three, where the last tokens follow a short chunk in their run."""
    for places, prompts in ((5, (PROMPT, 275)), (3, (311, 298))):
        _, kernels = both(monkeypatch, tmp_path, changes, places)
        for slot, prompt in enumerate(prompts, 1):
            for _ in kernels.run(kernels.begin(slot, prompt), text(slot), 0, prompt):
                pass
        assert replayed(kernels) > 30


CASES: dict[str, dict[str, Any]] = {
    "all heads": {},
    "heads": {"heads": "file"},
    "mass, preceding": {"heads": "file", "similarity": "mass", "vote": "preceding"},
    "spans ask": {"heads": "file", "asking": "spans", "similarity": "max"},
    "renewed": {"heads": "file", "renewed": 2, "retrieved": 4},
    "a small cache": {"heads": "file", "renewed": 3, "retrieved": 4, "cached": 4},
    "a large cache": {"heads": "file", "renewed": 3, "retrieved": 4, "cached": 13},
    "means": {"index": "mean"},
    "no votes": {"heads": "file", "vote": "off"},
    "no sinks": {"heads": "file", "sinks": 0},
    "keys' dtype": {"heads": "file", "similarity": "max", "four_bits": False},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_no_races(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    races, streams = watch(monkeypatch)
    record_with(races, streams, monkeypatch)
    read(monkeypatch, tmp_path, changes)
    assert not races.found, races.found[:5]
    idle = {"tiles"} if changes.get("index") == "mean" else set()
    assert {name for name in ("main", *LANES) if races.launches.get(name, 0) < 20} == idle, races.launches


def break_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers wait for nothing."""
    monkeypatch.setattr(Lane, "wait", lambda lane, *marks: None)


def break_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a lane reads is let go of before it has read it."""
    monkeypatch.setattr(Lane, "join", lambda lane: lane._held.clear())


def break_hold_of_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a lane has read is never let go of."""
    monkeypatch.setattr(Lane, "join", Lane.follow)


def break_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores do not wait for the index vectors of the blocks that leave."""
    monkeypatch.setattr(Lane, "follow", lambda lane: None)


class Forgetful:
    """A deque that keeps nothing."""

    def __class_getitem__(cls, of: object) -> type[Forgetful]:
        return cls

    def __init__(self, maxlen: int) -> None:
        """Keep nothing."""

    def append(self, each: object) -> None:
        """Keep nothing."""


def break_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a chunk has seen is let go of as soon as the answer is launched."""
    monkeypatch.setattr("sglang_ext.attention.ltri_recorded.deque", Forgetful)


def break_rooms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks take turns in three stores that have one room."""
    before = ltri_graphs.ChunkGraphs._in_layer

    def in_layer(*given: Any) -> RecordedRun:
        run = before(*given)
        return RecordedRun(**{**vars(run), "stores": [run.stores[0]] * 3})

    monkeypatch.setattr(ltri_graphs.ChunkGraphs, "_in_layer", in_layer)


def break_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks replace others in the cache before those were read."""
    monkeypatch.setattr(RecordedRun, "chunks_in_cache", property(lambda run: 3))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (break_wait, "on main"),
        (break_join, "may get memory"),
        (break_hold_of_index, "for ever"),
        (break_follow, "on choice"),
        (break_rooms, "on gather"),
        (break_hold, "may get memory"),
        (break_cache, "on back"),
    ],
)
def test_races_are_found(
    spoil: Callable[[pytest.MonkeyPatch], None], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    races, streams = watch(monkeypatch)
    record_with(races, streams, monkeypatch)
    spoil(monkeypatch)
    read(monkeypatch, tmp_path, CASES["a small cache"])
    assert any(message in each for each in races.found), races.found[:5]


def test_what_is_a_race() -> None:
    """An element that two launches touch, one of which writes it, and that are in no order."""
    races, other = Races(), FakeStream("other")
    rows, at = torch.zeros(4, 3), torch.tensor([1, 3])
    races.begin([other])
    with races:
        rows.index_copy_(0, at, torch.ones(2, 3))
        with races.stream(other):
            rows.index_select(0, torch.tensor([0, 2]))
            (rows[:1] + 1).sum()
    assert not races.found
    with races, races.stream(other):
        rows.index_select(0, torch.tensor([2, 3]))
    assert len(races.found) == 1 and "index_select" in races.found[0] and "index_copy_" in races.found[0]
    races.end([other])
    assert races.found[1:] == ["nobody waits for the end of other"]
    races.current.wait_stream(other)
    races.end([other])
    with races:
        rows[3].zero_()
    assert len(races.found) == 2
