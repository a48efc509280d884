"""How many tokens of a pool one pass encodes, and who runs between two of its chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.cache import carried
from sglang_ext.cache.rows import NewBlock, Piece, Row
from sglang_ext.serving import turns
from sglang_ext.serving.tree import TreeMode

ENCODES = Row((Piece("a", 0, 10),), (NewBlock("b", 0, 4000, ()),), owner="pool")
ANSWERS = Row((Piece("a", 0, 10),))


def added(row: Row | None, wanted: int, room: int | None, running: int, chunk: bool = False) -> tuple[int, int | None]:
    """(tokens that a pass takes of a request, room that it leaves to others)."""
    req, taken = SimpleNamespace(), []
    carried.set_request_row(req, row)
    batch = SimpleNamespace(is_empty=lambda: running == 0)
    adder: Any = SimpleNamespace(rem_chunk_tokens=room, running_batch=batch if running >= 0 else None)

    def original(adder: Any, *_: Any) -> str:
        taken.append(wanted if adder.rem_chunk_tokens is None else min(wanted, adder.rem_chunk_tokens))
        if adder.rem_chunk_tokens is not None:
            adder.rem_chunk_tokens -= taken[-1]
        return "added"

    mode: Any = TreeMode()
    found = mode.add_chunk(original, adder, req) if chunk else mode.add(original, adder, req, False, None)
    assert found == "added"
    return taken[0], adder.rem_chunk_tokens


@pytest.mark.parametrize("chunk", [False, True])
def test_an_encoding_takes_little_of_a_pass_while_others_decode(chunk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert added(ENCODES, 4000, 8192, running=3, chunk=chunk) == (512, 0), "what is cut ends the batch"
    assert added(ENCODES, 100, 8192, running=3, chunk=chunk) == (100, 8092)
    assert added(ENCODES, 4000, 64, running=3, chunk=chunk) == (64, 0)
    assert added(ENCODES, 4000, 8192, running=0, chunk=chunk) == (4000, 4192)
    assert added(ENCODES, 4000, 8192, running=-1, chunk=chunk) == (4000, 4192)
    assert added(ENCODES, 4000, None, running=3, chunk=chunk) == (4000, None), "SGLang cuts nothing"
    for row in (ANSWERS, None):
        assert added(row, 4000, 8192, running=3, chunk=chunk) == (4000, 4192)
    monkeypatch.setenv("SGLANG_EXT_SETTINGS", '{"encoding_tokens": 2048}')
    assert added(ENCODES, 4000, 8192, running=3, chunk=chunk) == (2048, 0)


@pytest.mark.parametrize("priorities", [False, True])
def test_a_high_priority_runs_first_beside_a_long_prompt(priorities: bool) -> None:
    """Of two requests of 60 tokens each, one fits a chunk of 100."""
    low, high = (
        SimpleNamespace(priority=priority, origin_input_ids=[1] * 60, output_ids=[], sampling_params=params)
        for priority, params in ((0, SimpleNamespace(max_new_tokens=4)), (5, SimpleNamespace(max_new_tokens=4)))
    )
    shown: list[list[Any]] = []

    def original(scheduler: Any, running: Any) -> Any:
        shown.append(list(scheduler.waiting_queue))
        return SimpleNamespace(batch_to_run=None, running_batch=running)

    def calc_priority(queue: list[Any], _running: Any) -> None:
        queue.sort(key=lambda req: -req.priority)

    scheduler: Any = SimpleNamespace(
        waiting_queue=[low, high],
        chunked_req=object(),
        chunked_prefill_size=100,
        is_mixed_chunk=False,
        enable_priority_scheduling=priorities,
        policy=SimpleNamespace(calc_priority=calc_priority),
        grammar_manager=SimpleNamespace(has_waiting_grammars=lambda: False, grammar_queue=[]),
        tree_cache=None,
    )
    batch: Any = SimpleNamespace(reqs=[])
    assert turns._admit(original, scheduler, batch) is None
    assert shown == [[high if priorities else low]]
    assert set(map(id, scheduler.waiting_queue)) == {id(low), id(high)}
