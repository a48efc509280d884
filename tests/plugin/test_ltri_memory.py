"""Ltri-LLM's streams without an engine: blocks that nobody holds any more are never read, whoever held them before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from sglang_ext.attention import ltri_chunk
from sglang_ext.attention.ltri import LtriPolicy
from sglang_ext.attention.policy import Caches, Request
from sglang_ext.cache.forks import Fork, Source
from sglang_ext.config import POLICY_ENV
from sglang_ext.kernels.rope import Rope

POLICY = {"sinks": 8, "window": 16, "block": 8, "chunk": 16, "last": 5, "retrieved": 2, "heads": "all"}
LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 16
SLOTS = 8 + 16 + 8 + 16
BLOCKS = 24
ROPE = Rope(0.5 ** torch.arange(DIM // 2))


class World:
    """A policy with room for two streams, and the KV cache, which holds NaN where nothing was written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        block_bytes = LAYERS * 8 * KV_HEADS * DIM * 2 * 4
        monkeypatch.setenv(POLICY_ENV, json.dumps({**POLICY, "host_gb": (BLOCKS + 0.5) * block_bytes / 2**30}))
        self.policy = LtriPolicy()
        shape = (1 + 2 * SLOTS, KV_HEADS, DIM)
        self.caches = {layer: (torch.full(shape, torch.nan), torch.full(shape, torch.nan)) for layer in range(LAYERS)}
        self.policy.bind(lambda: self.caches, torch.float32)
        assert self.policy.host is not None
        self.host = self.policy.host
        assert self.host.total == BLOCKS
        self.poison()

    def poison(self) -> None:
        """NaN into every block that nobody holds."""
        free = self.host._free
        for tensor in (*self.host.keys.values(), *self.host.values.values()):
            tensor[free] = torch.nan

    def slots(self, slot: int) -> torch.Tensor:
        return torch.arange(1 + (slot - 1) * SLOTS, 1 + slot * SLOTS, dtype=torch.int32)

    def begin(self, slot: int, prompt: int, tokens: int, shared: int = 0) -> Request:
        """Admit and start a request of so many tokens, of which the first `shared` were copied."""
        held = self.policy.host_need(shared + 1) if shared else 0
        self.policy.host_reserve(slot, self.policy.host_need(tokens + 1) - held)
        request = Request(slot, f"r{slot}", None, {}, prompt=prompt)
        self.policy.start(request)
        return request

    def run(self, request: Request, text: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """The answers of both layers to tokens [begin, end) of a stream, whole chunks, each followed by poison."""
        outs = []
        for low, high in self.policy.config.chunks(begin, end, request.prompt):
            carry: dict[str, Any] = {}
            for layer, (keys, values) in self.caches.items():
                empty = torch.empty(0, dtype=torch.int32)
                caches = Caches(layer, keys, values, empty, ROPE, DIM**-0.5, carry)
                query, new = text[layer, 0, low:high], text[layer, 1:, low:high, :KV_HEADS]
                outs.append(self.policy.attend(request, caches, self.slots(request.slot), low, query, new[0], new[1]))
            self.poison()
        return torch.cat(outs)


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> tuple[World, World]:
    return World(monkeypatch), World(monkeypatch)


def text(seed: int, tokens: int = 160) -> torch.Tensor:
    """[layers, 3, tokens, heads, dim]: queries, keys and values."""
    return torch.randn(LAYERS, 3, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


def test_blocks_of_streams_that_ended(worlds: tuple[World, World]) -> None:
    """A stream answers as in a world where it is alone, whoever held its blocks before and holds others meanwhile."""
    used, fresh = worlds
    alone = fresh.run(fresh.begin(1, 120, 130), text(1), 0, 126)
    first = used.begin(2, 150, 155)
    used.run(first, text(2), 0, 150)
    used.policy.finish(first)
    assert used.host.used == used.host.promised == 0
    used.poison()
    beside = used.begin(2, 80, 90)
    request = used.begin(1, 120, 130)
    outs = [used.run(request, text(1), 0, 48)]
    used.run(beside, text(3), 0, 80)
    used.policy.finish(beside)
    outs.append(used.run(request, text(1), 48, 126))
    assert torch.isfinite(alone).all()
    assert torch.equal(torch.cat(outs), alone)
    used.policy.finish(request)
    assert used.host.available == BLOCKS


def test_a_fork_outlives_its_source(worlds: tuple[World, World]) -> None:
    """The source goes on, ends, and its own blocks are poisoned; what both held stays with the fork."""
    used, fresh = worlds
    other = text(4)
    other[:, :, :100] = text(1)[:, :, :100]
    alone = fresh.run(fresh.begin(1, 140, 150), other, 0, 145)
    source = used.begin(2, 120, 130)
    used.run(source, text(1), 0, 122)
    state = used.policy.state_of(2)
    at = used.policy.fork_point(state, 100, 140)
    assert at == 96
    used.policy.fork(1, Fork(Source([], None, state, used.slots(2)), at), used.slots(1))
    request = used.begin(1, 140, 150, shared=at)
    outs = [used.run(request, other, at, 112)]
    used.run(source, text(1), 122, 128)
    used.policy.finish(source)
    used.poison()
    for keys, values in used.caches.values():
        keys[used.slots(2).long()] = values[used.slots(2).long()] = torch.nan
    outs.append(used.run(request, other, 112, 145))
    whole: Mapping[int, int] = {low: high for low, high in fresh.policy.config.chunks(0, 145, 140)}
    skipped = sum(LAYERS * (high - low) for low, high in whole.items() if low < at)
    assert torch.equal(torch.cat(outs), alone[skipped:])
    used.policy.finish(request)
    assert used.host.available == BLOCKS


def test_a_source_that_was_parked(worlds: tuple[World, World]) -> None:
    """It has ended, and its slots and blocks are kept; then it is dropped, and the fork goes on."""
    used, fresh = worlds
    alone = fresh.run(fresh.begin(1, 130, 140), text(1), 0, 133)
    used.run(used.begin(2, 120, 130), text(1), 0, 121)
    state = used.policy.park(2)
    assert used.host.promised == 0 and used.policy.state_of(2) is None
    at = used.policy.fork_point(state, 120, 130)
    assert at == 112
    used.policy.fork(1, Fork(Source([], None, state, used.slots(2)), at), used.slots(1))
    used.policy.drop(state)
    used.poison()
    request = used.begin(1, 130, 140, shared=at)
    out = used.run(request, text(1), at, 133)
    assert torch.equal(out, alone[-len(out) :])


@pytest.mark.parametrize("most", [1, 900, 1900, 4000])
def test_a_softmax_in_pieces_of_heads(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one key-value head, of two, of all but the last, of all."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(10, 7, tokens, generator=generator, dtype=torch.float64) for tokens in (13, 19)]
    values = torch.randn(5, 32, 3, generator=generator, dtype=torch.float64)
    wanted = torch.cat(parts, -1).softmax(-1) @ values.repeat_interleave(2, 0)
    monkeypatch.setattr(ltri_chunk, "LOGITS_AT_ONCE", most)
    assert (ltri_chunk._weighted(parts, values) - wanted).abs().max() < 1e-12
