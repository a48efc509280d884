"""The table that the soak trusts: it takes what a version may say, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.soak.table import PoolTable, Said


class Clock:
    """`time.monotonic` of the table."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("tests.soak.table.time.monotonic", made)
    return made


def change(table: PoolTable, version: int, labels: Iterable[str]) -> None:
    """A change that is waited for."""
    episode = table.begin("a")
    table.end(episode, {"version": version, "labels": list(labels)})


def judge(table: PoolTable, version: int | None, label: str, began: float, ended: float) -> bool:
    """Whether the table takes an answer."""
    before = len(table.verdicts.wrong)
    table.look_up(Said("label", "a", version, frozenset({label}), False, began, ended))
    return len(table.verdicts.wrong) == before


def test_a_version_says_its_own_labels_while_it_is_served(clock: Clock) -> None:
    table = PoolTable()
    change(table, 1, ["x", "y"])
    change(table, 2, ["z"])
    now = clock()
    assert judge(table, 2, "z", now, now)
    assert not judge(table, 2, "x", now, now)  # another version's
    assert not judge(table, 1, "x", now, now)  # not served any more
    assert judge(table, 1, "x", 1.5, now)  # asked while it was
    assert not judge(table, 2, "", now, now)
    assert judge(table, None, "z", now, now) and not judge(table, None, "y", now, now)  # a route that names no version


def test_another_pool_s_label_is_wrong(clock: Clock) -> None:
    table = PoolTable()
    change(table, 1, ["x"])
    other = table.begin("b")
    table.end(other, {"version": 1, "labels": ["w"]})
    now = clock()
    assert not judge(table, 1, "w", now, now)


def test_an_answer_amid_a_change_waits_for_what_came_of_it(clock: Clock) -> None:
    table = PoolTable()
    change(table, 1, ["x"])
    episode = table.begin("a")
    table.offer(episode, [{"output": "new"}])
    now = clock()
    assert judge(table, 2, "new", now, now) and table.verdicts.passed == {}  # nobody knows yet
    table.end(episode, {"version": 2, "labels": ["new"]})
    assert table.verdicts.passed == {"label": 1} and table.verdicts.weak == 0


def test_an_answer_of_a_change_that_was_cancelled_is_wrong(clock: Clock) -> None:
    table = PoolTable()
    change(table, 1, ["x"])
    episode = table.begin("a")
    table.offer(episode, [{"output": "new"}])
    now = clock()
    table.look_up(Said("label", "a", 1, frozenset({"new"}), False, now, now))
    table.end(episode, {"version": 1, "labels": ["x"]})
    assert len(table.verdicts.wrong) == 1


def test_a_pool_that_is_gone_says_nothing(clock: Clock) -> None:
    table = PoolTable()
    change(table, 1, ["x"])
    table.end(table.begin("a"), None)
    now = clock()
    assert not judge(table, 1, "x", now, now)
