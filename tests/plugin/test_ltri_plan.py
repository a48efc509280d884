"""Plans of chunks of Ltri-LLM: what is worked out on the CPU, and where a stream's tokens lie on the device."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.attention.ltri_frames import FramePlan, Nowhere, run_frames
from sglang_ext.attention.ltri_layer import LayerTokens, cells_between, cells_of
from sglang_ext.attention.ltri_plan import ALIGNMENT, PADDING_SLOT, ChunkPlan, Seat, SeatRows
from sglang_ext.kernels.span_index import Spans
from sglang_ext.policies.ltri_options import Ltri

SETTINGS = Ltri(sinks=16, window=48, block=16, chunk=32, last=7, retrieved=3)
ROW = 1


def seat_of(settings: Ltri, blocks: int) -> Seat:
    """A seat in the second of two rows, whose slots are in no order, with so many blocks on the host."""
    dice = torch.Generator().manual_seed(0)
    rows = SeatRows.empty(2, settings.slots, 64, torch.device("cpu"))
    slots = 1 + torch.randperm(500, generator=dice)[: settings.slots].int()
    seat = rows.seat(ROW, slots, 0)
    seat.host_ids[:blocks] = seat.ids[:blocks] = torch.randperm(64, generator=dice)[:blocks].int()
    return seat


def chunk_of(settings: Ltri, seat: Seat, begin: int, end: int) -> LayerTokens[Spans]:
    nothing: Any = None
    return LayerTokens(
        settings=settings,
        memory=nothing,
        host=nothing,
        caches=nothing,
        slots=seat.slots[1:],
        voter=None,
        heads=1,
        begin=begin,
        end=end,
        answers=False,
        ending=False,
        given=(),
        kept=False,
    )


@pytest.mark.parametrize(
    ("begin", "end"), [(0, 0), (0, 9), (9, 16), (9, 40), (16, 16), (16, 300), (100, 101), (50, 40)]
)
def test_cells_of_consecutive_tokens(begin: int, end: int) -> None:
    tokens = torch.arange(begin, max(begin, end))
    found = cells_between(SETTINGS, begin, end)
    assert found.tolist() == cells_of(SETTINGS, tokens).tolist() and found.dtype == "int64"


@pytest.mark.parametrize(("begin", "end"), [(0, 32), (0, 5), (32, 64), (96, 128), (103, 128), (320, 352), (330, 331)])
@pytest.mark.parametrize("renewed", [0, 2])
def test_a_plan_names_the_stream_s_slots(begin: int, end: int, renewed: int) -> None:
    settings = replace(SETTINGS, renewed=renewed)
    stored, first = settings.evicted(begin), settings.local(begin)
    seat = seat_of(settings, stored)
    before = max(0, stored - 2)
    plan = ChunkPlan.on_host(chunk_of(settings, seat, begin, end), seat, before).on(seat)
    slots = seat.slots[1:]

    def lie(tokens: Any, low: int, high: int) -> None:
        cells = cells_of(settings, torch.arange(low, high))
        assert tokens.first == low
        assert torch.equal(tokens.cells, cells + ROW * settings.slots)
        assert torch.equal(tokens.slots, slots[cells].long())

    lie(plan.rows, begin, end)
    lie(plan.window, first, end)
    lie(plan.sinks, 0, min(begin, settings.sinks))
    if plan.gone_tokens is None:
        assert stored == before
    else:
        lie(plan.gone_tokens, settings.first(before), settings.first(stored))
    listed = plan.listed[0].tolist()
    assert listed[: end - first] == plan.window.slots.tolist() and set(listed[end - first :]) <= {PADDING_SLOT}
    assert plan.gone_ids.tolist() == seat.ids[before:stored].tolist()
    assert [plan.before.item(), plan.count.item(), plan.blocks.item()] == [begin - first, end - begin, stored]
    firsts = [settings.first(block) - first for block in plan.tiles.blocks]
    assert plan.tiles.firsts[0, : len(firsts)].tolist() == firsts
    assert plan.tiles.places[0].tolist() == list(range(plan.tiles.firsts.shape[1]))
    assert (plan.renewed is not None) == bool(renewed)
    ints = {"listed", "gone_ids", "first_way", "before", "count", "blocks"}
    assert {name for name in ints if getattr(plan, name).dtype != torch.int32} == set()
    # Nobody may write to what the seat knows.
    plan.gone_ids.fill_(-7)
    assert -7 not in seat.host_ids.tolist()


def test_a_frame_s_plan_is_packed_and_unpacked() -> None:
    """All tensors of a plan are there again, each at an address that kernels take, and share nothing with the seat."""
    begin, end = 320, 338
    seat = seat_of(SETTINGS, SETTINGS.evicted(begin))
    frame = next(frames[0] for frames in run_frames(SETTINGS, 2) if not frames[0].anywhere)
    chunk = chunk_of(SETTINGS, seat, begin, end)
    plan = FramePlan.on_host(frame, chunk, seat, Nowhere(63, 99), SETTINGS.evicted(begin) - 1)
    packed = plan.packed()
    ids = torch.arange(64, dtype=torch.int32)
    found, slots = plan.unpacked(packed, ids)
    there = found.tensors()
    assert packed.data_ptr() % ALIGNMENT == 0
    for name, each in plan.tensors().items():
        assert torch.equal(there[name], each) and there[name].dtype == each.dtype, name
        assert (there[name].data_ptr() - packed.data_ptr()) % ALIGNMENT == 0, name
    assert found.plan.ids is ids
    rows = SimpleNamespace(cells=plan.plan.rows.cells.tolist(), slots=plan.plan.rows.slots.tolist())
    outside = plan.outside.tolist()
    assert outside == [False] * 18 + [True] * (frame.rows - 18)
    assert {slot for slot, out in zip(rows.slots, outside, strict=True) if out} == {PADDING_SLOT}
    assert {cell for cell, out in zip(rows.cells, outside, strict=True) if out} == {rows.cells[0]}
    wanted = cells_of(SETTINGS, torch.arange(begin, end))
    assert rows.cells[:18] == (wanted + ROW * SETTINGS.slots).tolist() and rows.slots[:18] == (wanted + 1).tolist()
    assert slots.data_ptr() >= packed.data_ptr()
