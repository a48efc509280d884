"""Chunks of Ltri-LLM in kernels against plain PyTorch, over whole streams; on a CPU references stand for kernels."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.attention.ltri import LtriPolicy
from sglang_ext.attention.ltri_layer import Voter
from sglang_ext.attention.ltri_plan import SeatRows
from sglang_ext.attention.ltri_stores import KernelChunks
from sglang_ext.attention.ltri_warm_up import WarmUp
from sglang_ext.attention.policy import Caches, Request
from sglang_ext.attention.readers.ltri import LtriReader, check_kernels
from sglang_ext.attention.readers.streams import check_dense
from sglang_ext.cache.forks import Fork, Source
from sglang_ext.config import POLICY_ENV
from sglang_ext.kernels.block_votes.triton_impl import MAX_BLOCKS
from sglang_ext.kernels.cells import Rotation
from sglang_ext.kernels.clamped_attention import reference
from sglang_ext.kernels.rope import Rope
from sglang_ext.policies.heads import Heads
from sglang_ext.policies.ltri_options import Ltri

SIZES: dict[str, Any] = {"sinks": 16, "window": 48, "block": 16, "chunk": 32, "last": 7, "retrieved": 3}
SIZES |= {
    "spans": 2,
    "vectors": 16,
    "queries": 8,
    "theta": 0.6,
    "rate": 1.0,
    "early_rate": 4.0,
    "early_layers": 1,
    "heads": "all",
    "similarity": "sum",
}
LAYERS, HEADS, KV_HEADS, DIM = 3, 4, 2, 16
PROMPT, TOKENS = 300, 312
ROPE = Rope(0.6 ** torch.arange(DIM // 2))
ENDS = (3, 20, 27, 37, 64, 69, 74, 90, 101, 128, 143, 290, 295, 296, 298, 303, 304, 307, 311)
TOLERANCE = 2e-5
VARIANTS: dict[str, dict[str, Any]] = {
    "sum": {},
    "max": {"similarity": "max"},
    "mass": {"similarity": "mass", "ratio": "rowcol"},
    "few ask": {"askers": 3, "similarity": "max"},
    "spans ask": {"asking": "spans"},
    "spans ask by mass": {"asking": "spans", "similarity": "mass"},
    "preceding": {"vote": "preceding", "similarity": "max"},
    "off": {"vote": "off", "ratio": "col"},
    "true distances": {"far": True},
    "each token retrieves": {"persist": False, "similarity": "max"},
    "InfLLM": {"index": "infllm", "vote": "off"},
    "means": {"index": "mean"},
    "at random": {"index": "random"},
    "given": {"index": "given"},
    "nothing": {"retrieved": 0},
    "sinks that are no blocks": {"sinks": 5},
    "no sinks": {"sinks": 0},
    "sinks of more than a chunk": {"sinks": 48},
    "one head a layer": {"heads": "file"},
    "four bits": {"heads": "file", "similarity": "max", "four_bits": True},
    "keys' dtype": {"heads": "file", "similarity": "max", "four_bits": False},
    "four bits by mass": {"heads": "file", "similarity": "mass", "four_bits": True, "asking": "spans"},
    "blocks that are renewed": {"renewed": 2},
    "blocks that are renewed in recorded chunks": {"renewed": 2, "retrieved": 4},
}


class World:
    """A policy with one stream, and its KV cache.

    Attributes:
        chunks_of_a_pass: how many chunks of a prompt a pass has, at most.
    """

    chunks_of_a_pass = 2

    def __init__(self, policy: LtriPolicy) -> None:
        self.policy = policy
        count = policy.config.slots
        shape = (1 + 2 * count, KV_HEADS, DIM)
        self.caches = {layer: (torch.full(shape, torch.nan), torch.full(shape, torch.nan)) for layer in range(LAYERS)}
        policy.bind(lambda: self.caches, torch.float32)
        for tensor in (*policy.blocks_on_host.keys.values(), *policy.blocks_on_host.values.values()):
            tensor.fill_(torch.nan)

    def compute_in_kernels(self, places: int = 0) -> None:
        policy = self.policy
        voters = {layer: policy.voter(layer) for layer in self.caches}
        rotation, host = Rotation.of(ROPE), policy.blocks_on_host
        self.chunks = KernelChunks(policy.config, host, self.caches, voters, HEADS, 2, rotation, reference)
        for store in self.chunks.stores.values():
            for tensor in (store.cache.keys, store.cache.values, *vars(store.scratch).values()):
                tensor.fill_(torch.nan)
        policy.compute_in(self.chunks)
        if places:
            WarmUp(policy, self.chunks, self.caches, HEADS, ROPE, DIM**-0.5).read(places)
            for keys, values in self.caches.values():
                keys.fill_(torch.nan), values.fill_(torch.nan)

    def slots(self, slot: int) -> torch.Tensor:
        count = self.policy.config.slots
        return torch.arange(1 + (slot - 1) * count, 1 + slot * count, dtype=torch.int32).flip(0)

    def begin(self, slot: int, prompt: int, shared: int = 0) -> Request:
        held = self.policy.host_need(shared + 1) if shared else 0
        self.policy.host_reserve(slot, self.policy.host_need(TOKENS + 1) - held)
        options = {"blocks": [7, 2, 11]} if self.policy.config.index == "given" else {}
        request = Request(slot, f"r{slot}", None, options, prompt=prompt)
        self.policy.start(request)
        return request

    def run(self, request: Request, text: torch.Tensor, begin: int, end: int) -> Iterator[torch.Tensor]:
        """[layers, rows, heads, dim] of each pass: chunks of the prompt, or tokens of the answer."""
        for low, high in self.passes(request, begin, end):
            carry: dict[str, Any] = {}
            yield torch.stack([self.layer(request, text, low, high, layer, carry) for layer in self.caches])

    def passes(self, request: Request, begin: int, end: int) -> list[tuple[int, int]]:
        chunks, count = self.policy.config.chunks(begin, end, request.prompt), self.chunks_of_a_pass
        return [(chunks[at][0], chunks[at : at + count][-1][1]) for at in range(0, len(chunks), count)]

    def layer(
        self, request: Request, text: torch.Tensor, low: int, high: int, layer: int, carry: dict[str, Any]
    ) -> torch.Tensor:
        (keys, values), nowhere = self.caches[layer], torch.empty(0, dtype=torch.int32)
        caches = Caches(layer, keys, values, nowhere, ROPE, DIM**-0.5, carry)
        query, new = text[layer, 0, low:high], text[layer, 1:, low:high, :KV_HEADS]
        return self.policy.attend(request, caches, self.slots(request.slot), low, query, new[0], new[1]).clone()


def text(seed: int) -> torch.Tensor:
    """[layers, 3, tokens, heads, dim]: queries, keys and values, with some keys that stand out."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(LAYERS, 3, TOKENS, HEADS, DIM, generator=generator)
    found[:, 0] *= 1.5
    return found


def both(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, changes: dict[str, Any], places: int = 0
) -> tuple[World, World]:
    options = {**SIZES, **changes, "host_gb": 0.01}
    heads = ((0.1, 0.9, 0.0, 0.2), (0.1, 0.0, 0.0, 0.1), (0.3, 0.2, 0.15, 0.25))
    if options["heads"] == "file":
        options["heads"] = str(tmp_path / "heads.json")
        Heads("tiny", "", heads, {}).save(tmp_path / "heads.json")
    monkeypatch.setenv(POLICY_ENV, json.dumps(options))
    plain, kernels = World(LtriPolicy()), World(LtriPolicy())
    for world in (plain, kernels):
        if changes.get("heads") == "file":
            found = Heads("tiny", "", heads, {}).voters
            world.policy._voters = {layer: Voter(score, head) for layer, (head, score) in found.items()}
        world.chunks_of_a_pass = max(2, places)
    kernels.compute_in_kernels(places)
    return plain, kernels


def replayed(world: World) -> int:
    """Chunks that were replayed, in all layers and places."""
    graphs = world.chunks._graphs
    return 0 if graphs is None else graphs.replayed


def replayable(world: World, prompt: int, places: int) -> int:
    """Chunks of a prompt that are replayed: those behind one that was, or that was whole."""
    settings, found, settled = world.policy.config, 0, 0
    first = settings.alike_from
    if first is None or not places:
        return found
    for begin, end in settings.chunks(0, prompt, prompt):
        start = begin if begin >= first else max(begin // settings.chunk * settings.chunk, settings.sinks)
        same = begin >= start and settings.local(begin) == settings.local(start)
        last = end - begin <= settings.last and same
        fits = begin % settings.chunk == 0 or last
        if fits and begin == settled:
            found, settled = found + 1, end
        elif begin % settings.chunk == 0 and begin >= settings.sinks:
            settled = end
    return found


@pytest.mark.parametrize("places", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_whole_streams(changes: dict[str, Any], places: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Launched one by one, and replayed in runs of so many whole chunks at most, which are those of a pass."""
    plain, kernels = both(monkeypatch, tmp_path, changes, places)
    requests = [world.begin(1, PROMPT) for world in (plain, kernels)]
    outs = [world.run(request, text(1), 0, TOKENS) for world, request in zip((plain, kernels), requests, strict=True)]
    for number, (wanted, found) in enumerate(zip(*outs, strict=True)):
        assert torch.isfinite(found).all()
        assert (found - wanted).abs().max() <= TOLERANCE, number
    assert replayed(kernels) == LAYERS * replayable(kernels, PROMPT, places)
    assert kernels.policy.config.alike_from is None or replayable(kernels, PROMPT, 2) > 4
    one, other = (world.policy._streams[1].layers for world in (plain, kernels))
    for layer in range(LAYERS):
        assert one[layer].stored == other[layer].stored > 5
        assert set(one[layer].snapshots) == set(other[layer].snapshots)
        assert sum(kept.shares for kept in other[layer].snapshots.values()) <= places, (
            "older ones keep whole runs alive"
        )
        if plain.policy.voter(layer) is not None:
            assert torch.allclose(one[layer].received, other[layer].received, atol=1e-4)
    counted, stats, cache = plain.policy.stats(), kernels.policy.stats(), kernels.chunks.counters()
    assert counted["host_stored_bytes"] == stats["host_stored_bytes"] > 0
    assert (cache["fetched_bytes"] > 0) == (counted["host_fetched_bytes"] > 0)
    assert cache["fetched_bytes"] <= counted["host_fetched_bytes"], "blocks stay on the device for some time"


@pytest.mark.parametrize(
    "changes",
    [{"similarity": "max", "askers": 3}, {"index": "infllm", "vote": "off"}, {"heads": "file"}, {"asking": "spans"}],
    ids=lambda changes: "-".join(changes),
)
@pytest.mark.parametrize(
    "prompt", [3, 20, 27, 37, 64, 69, 74, 90, 101, 128, 143, 290, 295, 296, 298, 303, 304, 307, 311]
)
def test_ends_of_prompts(prompt: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The last tokens of a prompt begin anywhere in a block, and end in that block, at its end or in the next one."""
    plain, kernels = both(monkeypatch, tmp_path, changes, 2)
    requests = [world.begin(1, prompt) for world in (plain, kernels)]
    outs = [world.run(request, text(1), 0, TOKENS) for world, request in zip((plain, kernels), requests, strict=True)]
    for number, (wanted, found) in enumerate(zip(*outs, strict=True)):
        assert (found - wanted).abs().max() <= TOLERANCE, number
    assert replayed(kernels) == LAYERS * replayable(kernels, prompt, 2)
    one, other = (world.policy._streams[1].layers for world in (plain, kernels))
    for layer in range(LAYERS):
        assert one[layer].stored == other[layer].stored
        found = kernels.chunks.retrieved(other[layer])
        wanted = plain.policy._computing.retrieved(one[layer])
        if plain.policy.voter(layer) is not None:
            assert torch.allclose(one[layer].received, other[layer].received, atol=1e-4)
            for block, tile in one[layer].tiles.items() if plain.policy.config.index == "ltri" else ():
                assert torch.allclose(tile, other[layer].tiles[block], atol=1e-5), block
        assert sorted(found) == sorted(wanted) and (prompt < 200 or len(found) in (0, SIZES["retrieved"]))


@pytest.mark.parametrize(("prompt", "rows"), [(296, 16), (311, 16), (312, 32)])
def test_few_tokens_before_a_prompts_end_have_a_short_frame(
    prompt: int, rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """From 288 on there are 1, 16 and 17 tokens, and behind them the 7 that are a chunk of their own."""
    _, kernels = both(monkeypatch, tmp_path, {}, 2)
    kernels.chunks_of_a_pass, runs = 3, kernels.chunks._graphs._runs  # a pass begins at 288
    for run in runs:
        run.chunks = None
    list(kernels.run(kernels.begin(1, prompt), text(1), 0, prompt))
    used = [run for run in runs if run.chunks is not None and run.places[-1].frame.anywhere and len(run.places) == 2]
    assert [run.places[0].frame.rows for run in used] == [rows]


@pytest.mark.parametrize(("prompt", "places"), [(PROMPT, 0), (298, 2), (311, 4)])
def test_answers_are_written_where_they_are_wanted(
    prompt: int, places: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """What SGLang would copy lies there already, unless rows of a run are the answer as they are."""
    _, kernels = both(monkeypatch, tmp_path, {"similarity": "max"}, places)
    wanted = [*kernels.run(kernels.begin(1, prompt), text(1), 0, prompt)]
    attend, there = kernels.policy.attend, list[bool]()

    def into(*given: Any) -> torch.Tensor:
        query, values = given[4], given[6]
        out = torch.full((*query.shape[:2], values.shape[2]), torch.nan, dtype=query.dtype)
        found = attend(given[0], replace(given[1], out=out), *given[2:])
        there.append(found.data_ptr() == out.data_ptr())
        return found

    monkeypatch.setattr(kernels.policy, "attend", into)
    found = [*kernels.run(kernels.begin(2, prompt), text(1), 0, prompt)]
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert any(there), there


def test_a_fork_waits_for_passes_before_it_copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    _, kernels = both(monkeypatch, tmp_path, {}, 2)
    list(kernels.run(kernels.begin(2, 250), text(1), 0, 250))
    state, order = kernels.policy.state_of(2), list[object]()
    assert state is not None
    stream = SimpleNamespace(wait_stream=lambda other: order.append(other))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(type(state), "fork", lambda source, tokens: order.append("copy") or state)
    monkeypatch.setattr(KernelChunks, "begin", lambda chunks, beginning: order.append("begin"))
    kernels.chunks._passes = "passes"
    kernels.policy.fork(1, Fork(Source([], None, state, kernels.slots(2)), 192), kernels.slots(1))
    assert order == ["passes", "copy", "begin"]


@pytest.mark.parametrize("places", [0, 2, 4])
def test_forks(places: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """A fork in kernels is the stream that was computed whole, in kernels and in plain PyTorch; its source stays."""
    plain, kernels = both(monkeypatch, tmp_path, {"similarity": "max"}, places)
    other = text(2)
    other[:, :, :210] = text(1)[:, :, :210]
    whole = [*plain.run(plain.begin(1, PROMPT), other, 0, TOKENS)]
    source = kernels.begin(2, 250)
    list(kernels.run(source, text(1), 0, 250))
    state = kernels.policy.state_of(2)
    assert state is not None
    at = kernels.policy.fork_point(state, 210, PROMPT)
    assert at == 192
    snapshots = [memory.snapshots[at] for memory in state.layers.values()]
    kept = [each for shot in snapshots for each in (shot.received, shot.spans.bounds, shot.spans.counts)]
    before = [each.clone() for each in kept]
    host, settings = kernels.policy.blocks_on_host, kernels.policy.config
    gone = min(state.stored, settings.blocks(at)) - snapshots[0].stored
    kernels.policy.fork(1, Fork(Source([], None, state, kernels.slots(2)), at), kernels.slots(1))
    assert gone > 0 and host.fetched == gone * LAYERS
    copied = kernels.policy._admitted[1].lease
    rows = [seat.row for lease in (state.lease, copied) if (seat := kernels.chunks.seat_of(lease))]
    for layer, store in kernels.chunks.stores.items():
        old, new = (store.cache.held[row].tolist() for row in rows)
        assert new == [number if number in copied.ids else -1 for number in old]
        assert any(number >= 0 for number in new)
        for way, number in enumerate(new):
            assert number < 0 or torch.equal(store.cache.keys[rows[1], way], host.keys[layer][number])
            assert number < 0 or torch.equal(store.cache.values[rows[1], way], host.values[layer][number])
    kernels.policy.finish(source)
    counts = kernels.chunks.cached.counts()
    passes = kernels.run(kernels.begin(1, PROMPT, shared=at), other, at, TOKENS)
    found = [next(passes)]
    fork = kernels.policy.state_of(1)
    assert fork is not None
    # What its source had on the device it finds there, and what it begins with is not kept once more.
    assert kernels.chunks.cached.counts()[0] > counts[0]
    for memory, snapshot in zip(fork.layers.values(), snapshots, strict=True):
        assert memory.snapshots[at] is snapshot or not places
    found += passes
    got, wanted = torch.cat(found, 1), torch.cat(whole, 1)[:, at:]
    assert got.shape == wanted.shape and (got - wanted).abs().max() <= TOLERANCE
    assert sum(each.numel() for each in kept) > 0
    assert all(torch.equal(each, old) for each, old in zip(kept, before, strict=True))
    kernels.policy.finish(Request(1, "r1", None, {}, prompt=PROMPT))
    assert sorted(kernels.chunks._free) == [0, 1] and not kernels.chunks._seats and host.used == 0


@pytest.mark.parametrize(
    "changes", [{"similarity": "max"}, {"similarity": "max", "heads": "file"}, {"vote": "preceding"}]
)
def test_prompts_in_one_pass_share_places(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """In every layer one is computed behind the other, in the same graphs; each is what it is alone."""
    plain, kernels = both(monkeypatch, tmp_path, changes, 1)
    texts, lengths = {1: text(1), 2: text(2)}, {1: PROMPT, 2: PROMPT - 23}
    wanted = {}
    for slot, words in texts.items():
        request = plain.begin(slot, lengths[slot])
        wanted[slot] = [*plain.run(request, words, 0, lengths[slot])]
        plain.policy.finish(request)
    requests = {slot: kernels.begin(slot, lengths[slot]) for slot in texts}
    passes = {slot: kernels.passes(requests[slot], 0, lengths[slot]) for slot in texts}
    for number in range(max(map(len, passes.values()))):
        carry: dict[str, Any] = {}
        there = [slot for slot in texts if number < len(passes[slot])]
        for layer in kernels.caches:
            for slot in there:
                found = kernels.layer(requests[slot], texts[slot], *passes[slot][number], layer, carry)
                assert (found - wanted[slot][number][layer]).abs().max() <= TOLERANCE, (slot, number, layer)
    shared = [run for run in kernels.chunks._graphs._runs if run.chunks is not None and run.chunks.shared]
    assert len(shared) > 4
    assert replayed(kernels) == LAYERS * sum(replayable(kernels, length, 1) for length in lengths.values())


def test_what_kernels_do_not_take() -> None:
    check_kernels(Ltri())
    check_kernels(Ltri(vectors=132, similarity="sum"))  # one vector a span
    check_kernels(Ltri(block=40, chunk=520, index="random"))  # nothing is remembered of its blocks
    for changes, message in (
        ({"block": 40, "chunk": 520}, r"block=40 \(16, 32, 64, 128\)"),
        ({"block": 256}, r"block=256 \(16, 32, 64, 128\)"),
        ({"retrieved": 65}, r"retrieved=65 \(at most 64\); ways=130 \(at most 128\)"),
        ({"cached": 129}, r"ways=129 \(at most 128\)"),
        ({"vectors": 132}, r"vectors=132 of spans=1 \(at most 128, where"),
        ({"vectors": 100, "spans": 5}, r"vectors=100 of spans=5 \(at most 128, where"),
        ({"block": 40, "chunk": 520, "index": "infllm"}, r"block=40 \(16, 32, 64, 128\)"),
    ):
        with pytest.raises(ValueError, match=message + ".* set SGLANG_EXT_KERNELS=torch"):
            check_kernels(Ltri(**changes))


@pytest.mark.parametrize("places", [0, 2])
def test_rows_of_streams_that_ended_serve_others(places: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """There are two rows; nothing of an ended stream is seen in its row, nor where it was replayed: both hold NaN."""
    plain, kernels = both(monkeypatch, tmp_path, {"similarity": "max"}, places)
    for seed in (1, 2, 3):
        outs = []
        for world in (plain, kernels):
            request = world.begin(1, PROMPT)
            outs.append([*world.run(request, text(seed), 0, TOKENS)])
            world.policy.finish(request)
        for wanted, found in zip(*outs, strict=True):
            assert (found - wanted).abs().max() <= TOLERANCE
        for store in kernels.chunks.stores.values():
            store.cache.keys.fill_(torch.nan)
            store.cache.values.fill_(torch.nan)
        for run in kernels.chunks._graphs._runs if places else ():
            for tensor in vars(run.room).values():
                tensor.fill_(torch.nan)
    assert kernels.policy.blocks_on_host.used == 0


@pytest.mark.parametrize("places", [0, 5])
def test_a_stream_that_is_not_finite_disturbs_no_other(
    places: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Where no score is a number, an election finds fewer blocks than it looks for, or none."""
    _, kernels = both(monkeypatch, tmp_path, {"similarity": "max", "heads": "file"}, places)
    wanted = torch.cat([*kernels.run(kernels.begin(2, PROMPT), text(2), 0, TOKENS)], 1)
    _, kernels = both(monkeypatch, tmp_path, {"similarity": "max", "heads": "file"}, places)
    lost, first, second = text(1), kernels.begin(1, PROMPT), kernels.begin(2, PROMPT)
    lost[:, 0, 150:] = torch.nan
    broken, found = kernels.run(first, lost, 0, TOKENS), []
    for each in kernels.run(second, text(2), 0, TOKENS):
        found.append(each)
        next(broken)
    assert torch.equal(torch.cat(found, 1), wanted)
    assert replayed(kernels) > 0 or not places


def test_a_warm_up_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The reader reads a prompt of its own on SGLang's padding slot; streams after it are those of plain PyTorch."""
    plain, world = both(monkeypatch, tmp_path, {"similarity": "max", "heads": "file"})
    policy, shape = (
        world.policy,
        SimpleNamespace(heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, value_dim=DIM, num_sms=1),
    )
    shape.scale, shape.dtype = DIM**-0.5, torch.float32
    model = SimpleNamespace(
        caches=lambda: world.caches,
        table=torch.zeros(3, policy.config.slots, dtype=torch.int32),
        request_slots=2 * policy.config.slots,
        context=policy.config.slots,
        tokens_of_a_pass=2 * policy.config.chunk,
        shape=shape,
        device=torch.device("cpu"),
        rope=ROPE,
        served=None,
        check_cache_type=lambda: None,
    )
    monkeypatch.setattr(LtriPolicy, "meet", lambda *_: None)
    heads = policy._voters
    reader = LtriReader(model, policy, SimpleNamespace(kernels="triton", base=None))  # type: ignore[arg-type]
    assert policy._voters is heads and policy._chunks is reader._chunks
    for keys, values in world.caches.values():
        keys[0] = values[0] = torch.nan  # nobody may read what was there before
    reader.warm_up()
    assert policy.blocks_on_host.used == policy.blocks_on_host.promised == 0
    assert len(reader._chunks._free) == 2 and not any(reader._chunks.counters().values())
    assert any((store.cache.held >= 0).any() for store in reader._chunks.stores.values())  # blocks came back
    outs = [each.run(each.begin(1, PROMPT), text(1), 0, TOKENS) for each in (plain, world)]
    for wanted, found in zip(*outs, strict=True):
        assert (found - wanted).abs().max() <= TOLERANCE
    counted, shown = reader._chunks.counters(), reader.counters()
    assert shown == {f"host_cache_{name}": count for name, count in counted.items()} and counted["misses"] > 0


@pytest.mark.parametrize(
    ("size", "value_size", "dtype", "served"),
    [(64, 64, torch.float16, True), (128, 128, torch.bfloat16, True), (96, 96, torch.float16, False),
     (128, 64, torch.float16, False), (64, 64, torch.float32, False)],
)  # fmt: skip
def test_heads_that_dense_kernels_take(size: int, value_size: int, dtype: torch.dtype, served: bool) -> None:
    shape = SimpleNamespace(head_dim=size, value_dim=value_size, dtype=dtype)
    model: Any = SimpleNamespace(shape=shape, device=torch.device("cuda"))
    if served:
        check_dense(model)
        return
    with pytest.raises(ValueError, match=f"heads of size {size} in {dtype}: dense prefill kernels serve 64, 128, 256"):
        check_dense(model)


def test_streams_are_no_longer_than_an_election() -> None:
    """A stream that has all of its blocks at once, as a fork has, is told of as many as kernels take.

    What it is told them in is as wide for all streams of a server, since kernels are compiled for the width.
    """
    seat = SeatRows.empty(1, 0, MAX_BLOCKS, torch.device("cpu")).seat(0, torch.empty(0, dtype=torch.int32), 0)
    for count in (3, 16_385, 30_000, MAX_BLOCKS - 1):
        seat.learn(array("i", range(count)))
        assert seat.ids.shape == (MAX_BLOCKS,) and seat.known == count
        assert seat.ids[:count].tolist() == list(range(count)) and int(seat.ids[count:].max()) == -1


def test_host_memory_beyond_an_election_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    plain, kernels = both(monkeypatch, tmp_path, {})
    total = kernels.policy.blocks_on_host.total
    assert plain.policy.host_tokens() == kernels.policy.host_tokens() == plain.policy.config.longest(total)
    monkeypatch.setattr(KernelChunks, "most_blocks", total - 2)
    assert kernels.policy.host_tokens() == plain.policy.host_tokens() - 2 * SIZES["block"]


def test_tiles_that_wait_keep_no_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for changes in ({}, {"sinks": 5}):
        _, kernels = both(monkeypatch, tmp_path, changes)
        list(kernels.run(kernels.begin(1, 90), text(1), 0, 90))
        for layer, memory in kernels.policy._streams[1].layers.items():
            state = kernels.chunks.stores[layer].state
            assert state is not None and len(memory.tiles) >= 1
            each = [tile.untyped_storage() for tile in memory.tiles.values()]
            kept = {storage.data_ptr(): storage.nbytes() for storage in each}
            rows = kept.pop(state.tile.untyped_storage().data_ptr())
            assert rows == state.tile.untyped_storage().nbytes()
            assert all(size == HEADS * SIZES["block"] ** 2 * 4 for size in kept.values())


@pytest.mark.parametrize("places", [0, 2])
@pytest.mark.parametrize("asking", ["tokens", "spans"])
@pytest.mark.parametrize("prompt", [176, 180, 192, 203])
def test_a_prompts_last_tokens_may_complete_a_block(
    prompt: int, asking: str, places: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Its spans are cut, also where no spans ask: the answer is long enough to look for that block."""
    plain, kernels = both(monkeypatch, tmp_path, {"last": 16, "asking": asking, "persist": False}, places)
    requests = [world.begin(1, prompt) for world in (plain, kernels)]
    outs = [world.run(request, text(1), 0, TOKENS) for world, request in zip((plain, kernels), requests, strict=True)]
    for number, (wanted, found) in enumerate(zip(*outs, strict=True)):
        assert (found - wanted).abs().max() <= TOLERANCE, number
    assert replayed(kernels) == LAYERS * replayable(kernels, prompt, places)
