"""Who takes part in the next decoding step, over fakes of SGLang's batch; the engine itself: e2e/test_exactness."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.cache.radix import BlockRadixCache
from sglang_ext.compat import LEAVES_OUT_ENDING
from sglang_ext.serving.last_step import around_update_running_batch, steps_saved


class Batch:
    """Requests and what SGLang does with them; `room` is how many fit into the next step."""

    def __init__(self, reqs: list[Any], room: int = 99) -> None:
        self.reqs, self.room, self.batch_is_full = list(reqs), room, True

    def filter_batch(self, keep_indices: list[int]) -> None:
        self.reqs = [self.reqs[index] for index in keep_indices]

    def check_decode_mem(self, selected_indices: list[int]) -> bool:
        assert not any(self.reqs[index].finished() for index in selected_indices)
        return len(selected_indices) <= self.room


def req(done: int, limit: int | None, finished: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        output_ids=[7] * done, sampling_params=SimpleNamespace(max_new_tokens=limit), finished=lambda: finished
    )


def scheduler(pending: list[Any] | None) -> SimpleNamespace:
    found = SimpleNamespace(tree_cache=BlockRadixCache.__new__(BlockRadixCache))
    if pending is not None:
        found.result_queue = [(SimpleNamespace(reqs=pending), "result")]
    return found


@pytest.mark.parametrize("overlap", [True, False])
def test_what_ends_by_its_length_is_left_out(overlap: bool) -> None:
    last, longer, endless, old = req(3, 4), req(2, 4), req(90, None), req(4, 4, finished=True)
    batch = Batch([last, longer, endless, old])
    running = scheduler(batch.reqs if overlap else None)
    result = around_update_running_batch(lambda _, b: b.reqs, running, batch)
    left_out = overlap and not LEAVES_OUT_ENDING  # a newer SGLang leaves them out itself, behind this
    assert result == ([longer, endless] if left_out else [last, longer, endless, old])
    assert steps_saved(running) == left_out and batch.batch_is_full == (not left_out)


def test_only_a_token_that_is_on_the_way_counts() -> None:
    """A request whose last step was seen has one more to go; one without a step on the way has not begun it."""
    waits = req(3, 4)
    batch = Batch([waits])
    assert around_update_running_batch(lambda _, b: b.reqs, scheduler([req(3, 4)]), batch) == [waits]


def test_nobody_is_left() -> None:
    both = [req(0, 1), req(3, 4)]
    batch = Batch(both)
    running = scheduler(batch.reqs)
    found = around_update_running_batch(lambda _, b: b.reqs, running, batch)
    assert (found, steps_saved(running)) == ((both, 0) if LEAVES_OUT_ENDING else ([], 2))


def test_where_memory_is_short_everything_is_sglangs() -> None:
    """Left alone, the other request would be ended for want of a slot that comes free in the same turn."""
    batch = Batch([req(3, 4), req(2, 9)], room=0)
    before = list(batch.reqs)
    running = scheduler(batch.reqs)
    assert around_update_running_batch(lambda _, b: b.reqs, running, batch) == before
    assert steps_saved(running) == 0 and batch.batch_is_full


def test_other_servers_are_left_alone() -> None:
    batch = Batch([req(3, 4)])
    stock = SimpleNamespace(tree_cache=object(), result_queue=[(batch, "result")])
    assert len(around_update_running_batch(lambda _, b: b.reqs, stock, batch)) == 1
