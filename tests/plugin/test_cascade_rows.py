"""Streams in rows of the kernels' memory, beside the same streams in plain PyTorch: two layers, without an engine."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.attention import cascade_rows
from sglang_ext.attention.cascade import CascadePolicy
from sglang_ext.attention.cascade_rows import KEPT, OwnRows, Rows, RowStream
from sglang_ext.attention.policy import Caches, Request
from sglang_ext.attention.readers import cells
from sglang_ext.attention.readers.cells import CellReader, warm_up
from sglang_ext.cache.budget import KVShape
from sglang_ext.compat import AttentionShape
from sglang_ext.config import POLICY_ENV
from sglang_ext.kernels.cells import Rotation, reference
from sglang_ext.kernels.rope import Rope
from sglang_ext.policies.cascade import Cascade

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POLICY = {"sinks": 2, "window": 12, "cascades": 3, "stride": 5, "beta": 0.9}  # 19 slots
LAYERS, HEADS, KV_HEADS, DIM = (4, 5), 4, 2, 16
SHAPE = AttentionShape(HEADS, KV_HEADS, DIM, DIM, torch.float32, 0.25, 2)
ROPE = Rope((1.7 ** -torch.arange(DIM // 2)).to(DEVICE))
TOLERANCE = 1e-5


class Twins:
    """Each stream twice: in the policy's PyTorch, and in rows; the same slots in caches of their own."""

    def __init__(self, policy: CascadePolicy, rows: Rows) -> None:
        self.policy, self.rows = policy, rows
        self.plain, self.ours = ({layer: self._caches() for layer in LAYERS} for _ in range(2))
        policy.bind(lambda: self.plain, torch.float32)
        self.gen = torch.Generator().manual_seed(0)
        self.table = (torch.randperm(99, generator=self.gen)[:95] + 1).view(5, 19).int().to(DEVICE)
        self.streams: dict[int, RowStream] = {}

    def _caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (torch.full((100, KV_HEADS, DIM), float("nan"), device=DEVICE) for _ in range(2))
        return keys, values

    def start(self, slot: int, home: Rows | None = None, **options: Any) -> None:
        self.policy.start(Request(slot, str(slot), None, options, ()))
        self.streams[slot] = (home or self.rows).begin()

    def draw(self, count: int) -> list[torch.Tensor]:
        return [torch.randn(count, heads, DIM, generator=self.gen).to(DEVICE) for heads in (HEADS, KV_HEADS, KV_HEADS)]

    def wanted(self, slot: int, layer: int, begin: int, drawn: list[torch.Tensor]) -> torch.Tensor:
        caches = Caches(layer, *self.plain[layer], torch.empty(0), ROPE, SHAPE.scale)
        request = Request(slot, str(slot), None, {}, ())
        return self.policy.attend(request, caches, self.table[slot], begin, *drawn)

    def prefill(self, slot: int, begin: int, end: int) -> None:
        """Tokens of a prompt in both, compared."""
        stream = self.streams[slot]
        home, slots = stream.home, self.table[slot : slot + 1, : stream.cascade.slots]
        steps = stream.steps(stream.offset + begin, stream.offset + end)
        told = [home.show(step) for step in steps]
        home.open(stream.row, steps[0], told[0], slots)
        for layer in LAYERS:
            drawn, out = self.draw(end - begin), []
            for step, shown in zip(steps, told, strict=True):
                if step is not steps[0]:
                    home.open(stream.row, step, shown, slots, layer)
                at = slice(step.first - stream.offset - begin, step.last - stream.offset - begin)
                query, keys, values = (each[at] for each in drawn)
                out.append(
                    home.prefill(
                        layer, stream.row, step, shown, query, (keys, values), self.ours[layer], 0.25, reference.attend
                    )
                )
            torch.testing.assert_close(
                torch.cat(out), self.wanted(slot, layer, begin, drawn), atol=TOLERANCE, rtol=TOLERANCE
            )

    def decode(self, at: dict[int, int], padding: int = 0, home: Rows | None = None) -> None:
        """A token each of some streams, in one batch with padding in the middle and at the end, compared."""
        home = home or self.rows
        batch: list[Any] = []
        for slot, begin in at.items():
            stream = self.streams[slot]
            (step,) = stream.steps(stream.offset + begin, stream.offset + begin + 1)
            if step.lists:
                slots = self.table[slot : slot + 1, : stream.cascade.slots]
                home.open(stream.row, step, home.show(step), slots)
            batch += [(stream.row, step), *[None] * padding]
        home.decoding.load(batch, len(batch))
        for layer in LAYERS:
            drawn = self.draw(len(batch))
            out = home.decode(layer, drawn[0], (drawn[1], drawn[2]), self.ours[layer], 0.25)
            for index, (slot, begin) in enumerate(at.items()):
                row = index * (1 + padding)
                wanted = self.wanted(slot, layer, begin, [each[row : row + 1] for each in drawn])
                torch.testing.assert_close(out[row : row + 1], wanted, atol=TOLERANCE, rtol=TOLERANCE)
                assert not bool(out[row + 1 : row + 1 + padding].any())

    def same_state(self, slot: int) -> None:
        """Tokens, cells and scores of both, in every layer, and the keys and values."""
        ours = self.streams[slot]
        states: Any = self.policy.stream(slot)
        for number, layer in enumerate(LAYERS):
            state = states.layers[layer].state
            for name in ("token", "cell"):
                assert torch.equal(getattr(ours.home.state, name)[number, ours.row], getattr(state, name)[0, 0])
            settled = ours.home.rings.settled(ours.added)  # kernels leave out the scores that decide nothing
            shown = ours.home.rings.columns(*(torch.tensor([n], device=DEVICE) for n in (ours.added, ours.scored)), 19)
            at = shown[0, settled:][shown[0, settled:] >= 0].long()
            torch.testing.assert_close(ours.home.state.score[number, ours.row][:, at], state.score[0, 0][:, at])
            for mine, theirs in zip(self.ours[layer], self.plain[layer], strict=True):
                torch.testing.assert_close(mine, theirs, equal_nan=True)


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Twins]:
    monkeypatch.setenv(POLICY_ENV, json.dumps(POLICY))
    policy = CascadePolicy()
    yield Twins(policy, make(policy.config, 3))


def make(cascade: Cascade, rows: int, window: Any = None) -> Rows:
    return Rows(cascade, rows, (len(LAYERS), LAYERS[0]), SHAPE, Rotation.of(ROPE), DEVICE, window)


def test_prompts_in_chunks_and_decoding_in_batches(twins: Twins) -> None:
    """Chunks end inside strides and span several; then rows decode together over the ends of their strides."""
    twins.rows.decoding = twins.rows.buffers(6)
    for slot, ends in ((0, (3, 4, 21, 22)), (3, (40,)), (4, (1, 9))):
        twins.start(slot)
        for begin, end in zip((0, *ends), ends, strict=False):
            twins.prefill(slot, begin, end)
    lengths = {0: 22, 3: 40, 4: 9}
    for step in range(4):
        twins.decode({slot: length + step for slot, length in lengths.items()}, padding=step % 2)
    twins.decode({3: 44})  # another batch, no stride's end: its entries are its own
    for slot in lengths:
        twins.same_state(slot)


def test_a_turn_goes_on_with_a_token_that_was_computed(twins: Twins) -> None:
    """The step past the end added a stride and counted its query: neither happens twice."""
    twins.start(1)
    twins.prefill(1, 0, 24)
    twins.decode({1: 24})
    twins.decode({1: 25})  # past the end
    for tokens, end in ((25, 3), (28, 1)):
        state = twins.policy.park(1)
        twins.policy.resume(1, state, tokens)
        twins.policy.start(Request(1, "next", None, {}, ()))
        twins.streams[1] = twins.streams[1].resumed(tokens)
        twins.prefill(1, 0, end)
    twins.same_state(1)


def test_settings_of_a_request(twins: Twins) -> None:
    options = {"window": 6, "stride": 4, "head_reduction": "max", "heads": "homogeneous", "score_every": 3}
    home = make(Cascade(**{**POLICY, **options}), 1, twins.rows.window)
    twins.start(2, home, **options)
    twins.prefill(2, 0, 19)
    for n in (19, 20):
        twins.decode({2: n}, home=home)
    lone = make(Cascade(**{**POLICY, "cascades": 1}), 1, twins.rows.window)  # no scores
    twins.start(0, lone, cascades=1)
    twins.prefill(0, 0, 17)
    twins.decode({0: 17}, home=lone)


@pytest.mark.parametrize("every", [2, 4, 7])
def test_some_queries_count(twins: Twins, every: int) -> None:
    """Chunks and steps with and without a query that counts, several and none in a stride."""
    home = make(Cascade(**{**POLICY, "score_every": every}), 1, twins.rows.window)
    twins.start(2, home, score_every=every)
    for begin, end in ((0, 4), (4, 5), (5, 13), (13, 14), (14, 15)):
        twins.prefill(2, begin, end)
    for n in range(15, 27):
        twins.decode({2: n}, home=home)
    twins.prefill(2, 27, 41)


def test_rows_with_settings_of_their_own_are_used_again(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request with equal settings allocates nothing; a few of what is no longer used are kept."""
    made: list[Any] = []

    def make_one(cascade: Cascade) -> Rows:
        home = make(cascade, 1, twins.rows.window)
        made.append(weakref.ref(home))
        return home

    own, settings = OwnRows(make_one), [Cascade(**{**POLICY, "stride": n}) for n in range(1, KEPT + 3)]
    first = own.begin(settings[0])
    first.home.state.score.fill_(7.0)
    beside = own.begin(settings[0])  # at the same time: a row of its own
    assert beside.home is not first.home and len(made) == 2
    first.close()
    monkeypatch.setattr(torch, "empty", None)  # no state, window or workspace
    again = own.begin(settings[0])
    monkeypatch.undo()
    assert again.home is first.home and len(made) == 2 and not again.home.state.score.any()
    again.close()
    beside.close()
    del first, beside, again
    assert all(one() is not None for one in made)
    gc.disable()  # nothing waits for the collector of cycles
    try:
        streams = [own.begin(setting) for setting in settings[1:]]
        assert [one() is None for one in made] == [True] * 2 + [False] * (KEPT + 1)
        for stream in streams:
            stream.close()
        del stream, streams
        assert sum(one() is not None for one in made) == KEPT
    finally:
        gc.enable()


def test_rows_are_given_back(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """By streams that end, and by conversations that are forgotten; as many slots are taken as rows are counted by."""
    policy, rows = twins.policy, twins.rows
    policy.keep_in(lambda _: rows.begin())
    for slot in range(3):
        policy.start(Request(slot, "", None, {}, ()))
    assert policy.slots({}, 1) == policy.slots({"window": 3}, 1) == 19 and not rows.free
    with pytest.raises(RuntimeError, match="3 streams run and there is no row"):
        rows.begin()
    policy.finish(Request(1, "", None, {}, ()))
    state = policy.park(2)
    policy.finish(Request(2, "", None, {}, ()))
    assert len(rows.free) == 1
    policy.resume(4, state, 7)
    policy.start(Request(4, "", None, {}, ()))
    assert policy.stream(4).offset == 7 and len(rows.free) == 1
    policy.drop(policy.park(4))
    policy.finish(Request(0, "", None, {}, ()))
    assert sorted(rows.free) == [0, 1, 2]
    with pytest.raises(ValueError, match="kernels keep this stream"):
        policy.start(Request(0, "", None, {}, ()))
        policy.attend(Request(0, "", None, {}, ()), None, None, 0, None, None, None)  # type: ignore[arg-type]
    shape = KVShape(3, 2, 8, 8, 2)
    assert policy.extra_bytes_per_token(shape, kernels=True) == 16 * 3 * 2
    assert policy.extra_bytes_per_token(shape, kernels=False) == 12 * 3 * 2


@pytest.mark.parametrize(
    ("sizes", "kept", "rows"), [([1, 2, 4, 8, 16], [1, 2, 4], 4), ([1, 2], [1, 2], 3), ([3, 9], [3], 3)]
)
def test_graphs_of_batches_that_can_come(twins: Twins, sizes: list[int], kept: list[int], rows: int) -> None:
    """Three streams: no graph for more rows than the next size above holds; buffers for all of them."""
    reader = CellReader.__new__(CellReader)
    reader.rows = twins.rows
    assert reader.sizes(sizes) == kept
    assert reader.rows.decoding.rows == rows
    assert reader.fits(reader.capture(max(kept)))
    drawn = twins.draw(max(kept))
    out = reader.rows.decode(LAYERS[0], drawn[0], (drawn[1], drawn[2]), twins.ours[LAYERS[0]], 0.25)
    assert not bool(out.any()) and all(bool(cache.isnan().all()) for cache in twins.ours[LAYERS[0]])


def test_all_variants_of_a_prompts_kernels_are_compiled(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Triton tells apart, in the warm-up and in every step that a prompt can have; each kernel runs."""
    cascade = Cascade(**{**POLICY, "stride": 34})
    kind = lambda number: 1 if number == 1 else number % 16 == 0  # noqa: E731
    of = lambda rows, columns: (rows <= 16, kind(rows), kind(columns))  # noqa: E731
    steps = warm_up(cascade)
    possible = {
        of(rows, before + rows) for rows in range(1, cascade.stride + 1) for before in range(cascade.slots - rows + 1)
    }
    assert {of(step.last, step.columns) for step in steps} == possible and all(step.grows for step in steps)
    assert [step.last for step in warm_up(Cascade(window=1, cascades=1, sinks=0, stride=1))] == [1]

    ran: list[Any] = []
    for name in ("cascade_update", "update_scores"):
        monkeypatch.setattr(cascade_rows, name, lambda *a, name=name, **_: ran.append((name, a)))
    caches = twins.ours[LAYERS[0]]
    reader = CellReader.__new__(CellReader)
    reader.rows, reader.shape, reader._device, reader._attend = make(cascade, 1), SHAPE, DEVICE, reference.attend
    reader._layers = 1, LAYERS[0]
    table = torch.ones(2, 99, dtype=torch.int32, device=DEVICE)
    reader.model = SimpleNamespace(table=table, caches=lambda: {LAYERS[0]: caches})  # type: ignore[assignment]
    monkeypatch.setattr(cells, "warm_up", lambda _: [steps[0], steps[-1]])
    reader._warm_up()
    assert [name for name, _ in ran] == ["cascade_update", "cascade_update", "update_scores"] * 2
    assert [arguments[1].query.shape[1] for name, arguments in ran if name == "update_scores"] == [1, 34]
    assert all(bool(cache[1:].isnan().all()) and not bool(cache[0].any()) for cache in caches)  # the padding slot
    assert reader.rows.free == [0]


def test_buffers_share_memory_among_batch_sizes(twins: Twins) -> None:
    """A graph of each size reads its own part of the numbers, which one copy fills."""
    buffers = twins.rows.buffers(4)
    one, four = buffers.workspace(1), buffers.workspace(4)
    assert one.parts.data_ptr() == four.parts.data_ptr() and four.logits.shape == (4, HEADS, 19)
    assert [each.shape for each in buffers.numbers(3)] == [(3,)] * 5
