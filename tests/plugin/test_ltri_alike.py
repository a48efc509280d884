"""A prompt of Ltri-LLM that is read again is read alike to the last bit, in all layers; on a GPU, in kernels.

Chunks of one pass run beside each other there, in rows and on the host where other streams were before. If one read
what another one writes, or what a stream before has left, readings would differ. What they compute is compared
elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sglang_ext.attention.ltri import LtriPolicy
from sglang_ext.attention.ltri_layer import Voter
from sglang_ext.attention.ltri_plan import on_device
from sglang_ext.attention.ltri_state import Lanes
from sglang_ext.attention.ltri_stores import KernelChunks
from sglang_ext.attention.ltri_warm_up import WarmUp
from sglang_ext.attention.policy import Caches, Request
from sglang_ext.config import POLICY_ENV
from sglang_ext.kernels.cells import Rotation
from sglang_ext.kernels.clamped_attention import dense_impl, reference
from sglang_ext.kernels.rope import Rope


@dataclass(frozen=True)
class Shape:
    """What is read, and where.

    Attributes:
        policy: settings, but the heads.
        layers, heads, kv_heads, dim: of the model.
        tokens: of the prompt.
        pass_chunks: chunks of a pass.
        dtype, device: of the KV cache.
    """

    policy: dict[str, Any]
    layers: int
    heads: int
    kv_heads: int
    dim: int
    tokens: int
    pass_chunks: int
    dtype: torch.dtype
    device: str


SMALL = Shape(
    {"sinks": 16, "window": 48, "block": 16, "chunk": 32, "last": 7, "retrieved": 3, "spans": 2, "vectors": 16}
    | {"host_gb": 0.01},
    3, 4, 2, 16, 523, 4, torch.float32, "cpu",
)  # fmt: skip
WIDE = Shape({"host_gb": 2}, 6, 32, 8, 128, 40_000, 8, torch.float16, "cuda")
ON_GPU = pytest.param(
    WIDE, id="wide", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
)
ROUNDS = 4


@dataclass(frozen=True)
class Reading:
    """What a pass found in a layer.

    Attributes:
        first: token of the pass.
        layer: number of it.
        out: [rows, heads, dim] attention.
        left: what the layer keeps -> its checksum.
    """

    first: int
    layer: int
    out: torch.Tensor
    left: dict[str, torch.Tensor]

    def apart(self, other: Reading) -> str:
        """How another reading differs; empty where it does not."""
        left = [name for name, each in self.left.items() if not torch.equal(each, other.left[name])]
        if torch.equal(self.out, other.out) and not left:
            return ""
        rows = int((self.out != other.out).flatten(1).any(1).sum())
        most = float((self.out.double() - other.out.double()).abs().max())
        what = (
            f"{rows} of {len(self.out)} rows by at most {most:.3g}, and {', '.join(left) or 'nothing'} of what is kept"
        )
        return f"tokens from {self.first}, layer {self.layer}: {what}"


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A number that differs where a bit does, but by chance."""
    words = tensor.contiguous().view(torch.uint8).flatten().to(torch.int64)
    return (words * (torch.arange(len(words), device=words.device) * 2654435761 % 4294967291)).sum()


class Reader:
    """A policy that reads prompts in kernels.

    Args:
        shape: of what it reads.
        one_head: whether one head of a layer votes, but none of the first layer, which gets no block, and none of the
            last one, which gets what those before vote for; else all heads of all layers vote.
        places: whole chunks of a run that is recorded; 0: chunks are launched one by one.
    """

    def __init__(self, shape: Shape, one_head: bool, places: int) -> None:
        self.shape, self.policy = shape, LtriPolicy()
        if one_head:
            found = {layer: Voter(0.5, layer % shape.heads) for layer in range(1, shape.layers - 1)}
            self.policy._voters = dict[int, Voter | None](found)
        else:
            self.policy.config = self.policy.config.of_all_heads()  # as `LtriPolicy.meet` does
        settings, room = self.policy.config, (1 + 2 * self.policy.config.slots, shape.kv_heads, shape.dim)
        self.caches = {
            layer: tuple(torch.zeros(room, dtype=shape.dtype, device=shape.device) for _ in range(2))
            for layer in range(shape.layers)
        }
        self.policy.bind(lambda: self.caches, torch.float32)
        self.rope = Rope((0.6 ** torch.arange(shape.dim // 2)).to(shape.device))
        voters = {layer: self.policy.voter(layer) for layer in self.caches}
        attention = dense_impl if shape.device == "cuda" else reference
        host, rotation = self.policy.blocks_on_host, Rotation.of(self.rope)
        self.chunks = KernelChunks(settings, host, self.caches, voters, shape.heads, 2, rotation, attention)
        self.policy.compute_in(self.chunks)
        if places:
            WarmUp(self.policy, self.chunks, self.caches, shape.heads, self.rope, shape.dim**-0.5).read(places)

    def passes(self, text: torch.Tensor, slot: int) -> Iterator[Reading]:
        """Each pass and layer of a stream that is read in KV slots, one after the other."""
        shape, settings, count = self.shape, self.policy.config, text.shape[2]
        self.policy.host_reserve(slot, self.policy.host_need(count + 1))
        request = Request(slot, f"r{slot}", None, {}, prompt=count)
        self.policy.start(request)
        chunks = settings.chunks(0, count, count)
        slots = torch.arange(1, 1 + settings.slots, dtype=torch.int32, device=shape.device)
        slots = (slots + (slot - 1) * settings.slots).flip(0)
        for at in range(0, len(chunks), shape.pass_chunks):
            low, high = chunks[at][0], chunks[at : at + shape.pass_chunks][-1][1]
            carry: dict[str, Any] = {}
            for layer, (keys, values) in self.caches.items():
                nowhere = torch.empty(0, dtype=torch.int32, device=shape.device)
                caches = Caches(layer, keys, values, nowhere, self.rope, shape.dim**-0.5, carry)
                query, new = text[layer, 0, low:high], text[layer, 1:, low:high, : shape.kv_heads]
                out = self.policy.attend(request, caches, slots, low, query, new[0], new[1]).clone()
                yield Reading(low, layer, out, self._left(slot, layer, slots))
        self.policy.finish(request)

    def _left(self, slot: int, layer: int, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """Checksums of what a layer of a stream has left, each a tensor of one number."""
        store, memory = self.chunks.stores[layer], self.policy._streams[slot].layers[layer]
        ids = self.policy._streams[slot].lease.ids[: memory.stored]
        (keys, values), host = self.caches[layer], self.policy.blocks_on_host
        left = {"received": memory.received}
        if memory.stored > len(slots) // self.policy.config.block:  # all slots have tokens of this stream
            left |= {"keys": keys[slots.long()], "values": values[slots.long()]}
        if store.index is not None:
            there = on_device(ids, keys.device).long()
            counts, vectors = store.index.counts[there], store.index.vectors[there]
            real = torch.arange(vectors.shape[2], device=vectors.device) < counts.unsqueeze(2)
            # What lies behind a span's last vector may be anything.
            left |= {"index": vectors.masked_fill(~real.unsqueeze(3), 0), "numbers of vectors": counts}
            if store.index.scales is not None:
                left |= {"scales": store.index.scales[there]}
        if self.shape.device == "cpu":  # else it would wait for the device, and so would all that follows
            left |= {"host": torch.stack([host.keys[layer][list(ids)], host.values[layer][list(ids)]])}
        return {name: checksum(each) for name, each in left.items()}


def text_of(shape: Shape, seed: int) -> torch.Tensor:
    """[layers, 3, tokens, heads, dim]: queries, keys and values."""
    generator = torch.Generator(shape.device).manual_seed(seed)
    size = (shape.layers, 3, shape.tokens, shape.heads, shape.dim)
    return torch.randn(size, generator=generator, device=shape.device, dtype=shape.dtype)


@pytest.mark.parametrize("one_head", [False, True], ids=["all heads vote", "one head votes"])
@pytest.mark.parametrize("how", ["launched", "recorded", "recorded, beside each other"])
@pytest.mark.parametrize("shape", [pytest.param(SMALL, id="small"), ON_GPU])
def test_a_prompt_is_read_alike_each_time(
    shape: Shape, how: str, one_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shape.device == "cpu" and how == "recorded":
        pytest.skip("nothing runs beside anything on a CPU: the next case is the same")
    monkeypatch.setenv(POLICY_ENV, json.dumps({**shape.policy, "heads": "all"}))
    if how == "recorded":
        monkeypatch.setattr(Lanes, "beside", lambda device: Lanes())
    reader = Reader(shape, one_head, 0 if how == "launched" else shape.pass_chunks)
    text, another = text_of(shape, 1), text_of(shape, 2)
    readings = []
    for number in range(ROUNDS):
        if number == 2:  # another prompt has the row, and the blocks of the host, in between
            list(reader.passes(another, 1))
        readings.append(list(reader.passes(text, 1 + number % 2)))
    assert (reader.chunks.prompts["replayed"] > reader.chunks.prompts["launched"]) == (how != "launched")
    assert all(bool(torch.isfinite(each.out).all()) for each in readings[0])
    for number, reading in enumerate(readings):
        found = [apart for one, other in zip(readings[0], reading, strict=True) if (apart := one.apart(other))]
        assert not found, f"reading {number}, {len(found)} of {len(reading)} differ: {'; '.join(found[:4])}"
