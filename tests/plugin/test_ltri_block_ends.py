"""Ends of blocks between decoding steps of Ltri-LLM: what is replayed leaves what is launched layer by layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.attention.ltri_decode import DecodeRows
from sglang_ext.attention.ltri_plan import Seat
from sglang_ext.attention.ltri_state import KernelMemory
from sglang_ext.attention.policy import Request
from sglang_ext.attention.step import BatchRows, LayerCall
from tests.plugin.test_ltri_kernels import DIM, HEADS, KV_HEADS, LAYERS, ROPE, World, both, text

PROMPT, ANSWERED = 70, 90
VARIANTS: dict[str, dict[str, Any]] = {
    "all heads": {},
    "one head a layer": {"heads": "file", "similarity": "max"},
    "a window of no whole blocks": {"window": 40, "similarity": "mass"},
    "sinks that are no blocks": {"sinks": 5},
    "InfLLM": {"index": "infllm", "vote": "off"},
    "means": {"index": "mean"},
    "at random": {"index": "random"},
}


class Decoding:
    """Decoding steps of the first stream of a world."""

    def __init__(self, world: World) -> None:
        shape = SimpleNamespace(heads=HEADS, kv_heads=KV_HEADS, value_dim=DIM, scale=DIM**-0.5, num_sms=4)
        table = torch.stack([torch.zeros_like(world.slots(1)), world.slots(1)])
        model: Any = SimpleNamespace(
            table=table, caches=lambda: world.caches, rope=ROPE, shape=shape, device=table.device
        )
        self.world, self.rows = world, DecodeRows(model, world.policy, world.chunks)
        self.request: Request | None = None

    def prompt(self, given: torch.Tensor) -> None:
        self.request = self.world.begin(1, PROMPT)
        for out in self.world.run(self.request, given, 0, PROMPT):
            assert torch.isfinite(out).all()

    @property
    def seat(self) -> Seat:
        seat = self.world.chunks.seat_of(self.world.policy._streams[1].lease)
        assert seat is not None
        return seat

    def step(self, given: torch.Tensor, token: int) -> torch.Tensor:
        """[layers, heads, dim]."""
        assert self.request is not None
        req: Any = None
        loaded, out = self.rows.load([BatchRows(self.request, req, 0, token, token + 1)], 1), []
        for layer, caches in self.world.caches.items():
            new = given[layer, 1:, token : token + 1, :KV_HEADS]
            call = LayerCall(layer, given[layer, 0, token : token + 1], (new[0], new[1]), caches, DIM**-0.5, loaded, {})
            out.append(self.rows.decode(call)[0])
        return torch.stack(out)

    def remembered(self, layer: int) -> dict[str, torch.Tensor]:
        """What a layer remembers of the stream, wherever it lies."""
        stream, store = self.world.policy._streams[1], self.world.chunks.stores[layer]
        memory, seat = stream.layers[layer], self.seat
        assert isinstance(memory, KernelMemory) and seat.known == memory.stored
        ids = torch.tensor(stream.lease.ids)
        assert seat.host_ids[: seat.known].tolist() == seat.ids[: seat.known].tolist() == ids.tolist()
        found = {"keys": store.region.keys[ids], "values": store.region.values[ids]}
        if store.index is not None:
            found |= {"counts": store.index.counts[ids], "vectors": store.index.vectors[ids]}
        if store.state is not None and store.ring is not None:
            settings = self.world.policy.config
            spans = store.ring.of_row(settings, seat.row)
            found |= {"received": store.state.received[seat.row], "last": store.state.last[seat.row]}
            found |= {"span counts": spans.counts, "tile": store.state.tile[seat.row]}
            found["bounds"] = spans.bounds.masked_fill((spans.counts == 0).unsqueeze(-1), -1)
            assert memory.last is not None
            assert set(memory.tiles) <= {max(memory.tiles, default=0)}, "no complete block waits"
            found["newest"] = torch.tensor([memory.last[0], *memory.tiles])
        found["ways"] = store.ways[seat.row]
        return found


@pytest.mark.parametrize("places", [0, 2])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_replayed_ends_leave_what_launched_ones_do(
    changes: dict[str, Any], places: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Behind a prompt that was launched, and behind one that was replayed, of which nothing waits."""
    (_, first), (_, second) = (both(monkeypatch, tmp_path, changes, places) for _ in range(2))
    launched, replayed = Decoding(first), Decoding(second)
    replayed.rows.record()
    given = text(3)
    for each in (launched, replayed):
        each.prompt(given)
    settings = second.policy.config
    tiles = {block for memory in second.policy._streams[1].layers.values() for block in memory.tiles}
    begun = replayed.seat.settled == PROMPT and all(settings.first(block + 1) > PROMPT for block in tiles)
    assert begun == (settings.sinks % settings.block == 0 or not tiles)
    launched.seat.settled = None  # as if something waited
    for token in range(PROMPT, PROMPT + ANSWERED):
        wanted, found = (each.step(given, token) for each in (launched, replayed))
        assert torch.isfinite(wanted).all() and torch.equal(wanted, found), token
    ends = launched.rows.block_ends["launched"]
    assert launched.rows.block_ends == {"replayed": 0, "launched": ends}
    assert replayed.rows.block_ends == {"replayed": ends - 1, "launched": 0 if begun else 1}
    assert ends > ANSWERED / settings.block * (1 if settings.window % settings.block == 0 else 2)
    for layer in range(LAYERS):
        one, other = launched.remembered(layer), replayed.remembered(layer)
        assert one.keys() == other.keys() and len(one["keys"]) > 4
        for name, value in one.items():
            assert torch.equal(value.nan_to_num(7), other[name].nan_to_num(7)), (layer, name)


def test_nothing_is_recorded_where_nothing_leaves_a_window(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Then blocks that are complete are settled layer by layer."""
    _, world = both(monkeypatch, tmp_path, {})
    lease = world.policy.blocks_on_host.lease(world.policy.blocks_on_host.available)
    decoding = Decoding(world)
    decoding.rows.record()
    lease.release()
    given = text(3)
    decoding.prompt(given)
    for token in range(PROMPT, PROMPT + 20):
        decoding.step(given, token)
    assert decoding.rows.block_ends["replayed"] == 0 < decoding.rows.block_ends["launched"]
