"""A stride into the cascade at once against the rule one token at a time (`ReferenceStream`): equal, not close.

Scores are drawn anew between strides, as attention changes them, often from few values so that ties are common. Entries
that hold nothing and rows that take no part are poisoned before the first call.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from sglang_ext.kernels.cascade_update import CascadeState, Rings, cascade_update, stride_update, token_update
from sglang_ext.kernels.cascade_update import triton_impl as triton
from sglang_ext.policies.cascade import Cascade, ReferenceStream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Update = Callable[[CascadeState, torch.Tensor, torch.Tensor, torch.Tensor, Rings, bool], None]
POISON = -77777


def small_tiles(state, rows, seen, count, rings, selection) -> None:
    """The Triton kernels in tiles so small that a stride takes several."""
    triton.cascade_update(state, rows, seen, count, rings, selection, triton.CascadeUpdateTuning(steps=4, warps=1))


@dataclass
class World:
    """Lanes of several requests, each with the stream that says what it must hold."""

    cascade: Cascade
    state: CascadeState
    streams: dict[int, list[list[ReferenceStream]]]  # row -> layer -> head
    rng: random.Random
    values: int | None  # scores are whole numbers below it, or any numbers

    @classmethod
    def make(cls, cascade: Cascade, seed: int, layers: int, heads: int, values: int | None) -> World:
        rng = random.Random(seed)
        used = [3, 1]
        state = CascadeState.empty(layers, 5, heads, cascade.rings, DEVICE)
        empty = state.cell < 0
        for array, poison in ((state.token, POISON), (state.cell, POISON), (state.score, float("nan"))):
            array[empty] = poison
            array[:, [0, 2, 4]] = poison
        streams = {row: [[ReferenceStream(cascade) for _ in range(heads)] for _ in range(layers)] for row in used}
        return cls(cascade, state, streams, rng, values)

    def draw(self) -> float:
        """A float32 score."""
        value = self.rng.random() if self.values is None else self.rng.randrange(self.values)
        return torch.tensor(value, dtype=torch.float32).item()

    def step(self, update: Update, counts: dict[int, int]) -> None:
        """Add tokens to every row, by the rule and by `update`."""
        rings, before = self.cascade.rings, {row: s[0][0].seen for row, s in self.streams.items()}
        for row, layers in self.streams.items():
            columns = rings.columns(*(torch.tensor([before[row] + i]) for i in (0, counts[row])), rings.entries)[0]
            for layer, heads in enumerate(layers):
                for head, stream in enumerate(heads):
                    new = [self.draw() for _ in range(counts[row])]
                    for kept in stream.kept():
                        kept.score = self.draw()
                    scores = [k.score for k in stream.kept()] + new
                    self.state.score[layer, row, head, columns[: len(scores)].long()] = torch.tensor(
                        scores, device=DEVICE
                    )
                    stream.add(new)
        rows = list(self.streams)
        batch = [torch.tensor([f[row] for row in rows], device=DEVICE, dtype=torch.int32) for f in (before, counts)]
        update(self.state, torch.tensor(rows, device=DEVICE), *batch, rings, self.cascade.selection)

    def check(self) -> None:
        rings, stride = self.cascade.rings, self.cascade.stride
        for row, layers in self.streams.items():
            seen = layers[0][0].seen
            ahead = torch.tensor([seen + stride])
            columns = rings.columns(torch.tensor([seen]), ahead, rings.entries + 3)[0]
            kept = rings.kept(seen)
            assert (columns >= 0).sum() == kept + stride and bool((columns[kept + stride :] == -1).all())
            columns = columns[: kept + stride].long()
            assert columns.unique().numel() == columns.numel()
            for layer, heads in enumerate(layers):
                for head, stream in enumerate(heads):
                    token, cell, score = (
                        a[layer, row, head].cpu()[columns].tolist()
                        for a in (self.state.token, self.state.cell, self.state.score)
                    )
                    expected = stream.kept()
                    assert token[:kept] == [k.token for k in expected]
                    assert token[:kept] == sorted(token[:kept])
                    assert cell[:kept] == [k.cell for k in expected]
                    assert score[:kept] == [k.score for k in expected]
                    assert token[kept:] == list(range(seen, seen + stride))
                    assert cell[kept:] == stream.cells[seen : seen + stride]
                    assert score[kept:] == [0.0] * stride
                    assert len(set(cell)) == len(cell) and max(cell) < rings.entries
                    # What the open stride may overwrite is nothing that is still kept.
                    assert not set(stream.cells[seen : seen + stride]) & {k.cell for k in expected}
        for array in (self.state.token, self.state.cell):
            assert bool((array[:, [0, 2, 4]] == POISON).all())
        assert bool(self.state.score[:, [0, 2, 4]].isnan().all())


def drawn(seed: int) -> Cascade:
    """Sizes where nothing divides anything, by a number."""
    rng = random.Random(seed)
    cascades = rng.randint(1, 5)
    return Cascade(
        window=cascades * rng.choice([1, 1, 2, 3, 4, 5, 7, 8, 11]),
        cascades=cascades,
        sinks=rng.choice([0, 1, 2, 3, 5, 9]),
        stride=rng.choice([1, 2, 3, 5, 6, 8, 13, 16, 21]),
        selection=rng.random() < 0.85,
    )


def run(
    cascade: Cascade, update: Update, seed: int, layers: int, heads: int, spans: float, whole: bool, most: int = 10**9
) -> int:
    """Stream `spans` token spans through, in whole strides or in random parts; how many streams that were.

    `update` takes at most the `most` calls that follow the filling of the window and some around it: the interpreter
    is slow.
    """
    world = World.make(cascade, seed, layers, heads, [None, 2, 3, 9][seed % 4])
    length = cascade.sinks + int(spans * min(cascade.token_span, 6 * cascade.window)) + 2 * cascade.stride
    first = calls = 0
    begin = 0 if most > length else max(0, cascade.sinks + cascade.window - most // 3 * cascade.stride)
    while first < length and calls < most:
        counts = {}
        for row in world.streams:
            counts[row] = cascade.stride if whole else world.rng.randint(0, cascade.stride)
        if not whole and seed % 2:
            counts[3] = 0  # one request waits while the other goes on
        calls += first >= begin
        world.step(update if first >= begin else stride_update, counts)
        if first >= begin:
            world.check()
        first += max(counts[1], 1)
    return len(world.streams) * layers * heads


@pytest.mark.parametrize("update", [token_update, stride_update], ids=["token", "stride"])
def test_a_thousand_streams_equal_the_rule(update):
    streams = sum(run(drawn(s), update, s, 2, 3, 1.1, whole=s % 3 != 0) for s in range(90))
    assert streams >= 1000


@pytest.mark.parametrize("update", [triton.cascade_update, small_tiles], ids=["one tile", "small tiles"])
@pytest.mark.parametrize("seed", range(1000, 1008))
def test_triton_equals_the_rule(update, seed):
    run(drawn(seed), update, seed, 1, 1, 1.1, whole=seed % 3 != 0, most=8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="an hour in Triton's interpreter")
def test_triton_equals_the_rule_on_a_thousand_streams():
    streams = sum(run(drawn(s), triton.cascade_update, s, 2, 3, 1.1, whole=s % 3 != 0) for s in range(90))
    assert streams >= 1000


def test_triton_finds_its_lane():
    run(Cascade(window=8, cascades=2, sinks=1, stride=4), triton.cascade_update, 2, 2, 3, 9.0, whole=True, most=3)


@pytest.mark.parametrize(
    "cascade",
    [
        Cascade(window=8 * 9, cascades=8, sinks=4, stride=12),  # the deepest period, 128, is beyond window and stride
        Cascade(window=6, cascades=6, sinks=2, stride=5),  # sub-caches of one token
        Cascade(window=3 * 7, cascades=3, sinks=0, stride=50),  # a stride of several windows
        Cascade(window=24, cascades=1, sinks=30, stride=7),  # sinks of several strides
    ],
    ids=["deep", "ones", "long stride", "many sinks"],
)
def test_extreme_sizes(cascade):
    for update in (token_update, stride_update):
        run(cascade, update, 5, 1, 1, 0.7, whole=True)
    for update in (triton.cascade_update, small_tiles):
        run(cascade, update, 5, 1, 1, 0.7, whole=True, most=9)


def test_the_split_into_calls_does_not_matter():
    cascade = Cascade(window=20, cascades=4, sinks=3, stride=16)
    at_once, split = (CascadeState.empty(1, 1, 2, cascade.rings, DEVICE) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    rows = torch.zeros(1, dtype=torch.long, device=DEVICE)
    for seen in range(0, 160, 16):
        scores = torch.rand(2, cascade.rings.entries, generator=generator).to(DEVICE)
        at_once.score[0, 0] = split.score[0, 0] = scores
        number = lambda n: torch.tensor([n], device=DEVICE)  # noqa: E731
        cascade_update(at_once, rows, number(seen), number(16), cascade.rings)
        for a, b in ((0, 5), (5, 6), (6, 16)):
            cascade_update(split, rows, number(seen + a), number(b - a), cascade.rings)
        for x, y in zip(vars(at_once).values(), vars(split).values(), strict=True):
            assert torch.equal(x, y)


def test_a_reset_row_is_as_new():
    cascade = Cascade(window=12, cascades=3, sinks=2, stride=5)
    state = CascadeState.empty(2, 3, 2, cascade.rings, DEVICE)
    new = [a.clone() for a in vars(state).values()]
    rows = torch.tensor([0, 2], device=DEVICE)
    for seen in range(0, 40, 5):
        state.score.uniform_()
        at, count = (torch.full((2,), v, device=DEVICE, dtype=torch.int32) for v in (seen, 5))
        cascade_update(state, rows, at, count, cascade.rings)
    state.reset(torch.tensor([2, 1], device=DEVICE), cascade.rings)
    for a, b in zip(vars(state).values(), new, strict=True):
        assert torch.equal(a[:, 1:], b[:, 1:])
        assert not torch.equal(a[:, 0], b[:, 0])


def test_counts_and_heads_say_where_tokens_lie():
    rings = Rings(sinks=2, size=3, cascades=3, stride=4)
    assert [rings.counts(n) for n in (0, 2, 4, 8, 11, 50)] == [[0] * 3, [0] * 3, [2, 0, 0], [3, 3, 0], [3] * 3, [3] * 3]
    assert rings.heads(2 + 9) == [0, 0, 0]
    # Steps 9..14: six tokens into the newest, three (10, 12, 14) into the next, one (12) into the last.
    assert rings.heads(2 + 15) == [0, 0, 1]
    assert [rings.kept(n) for n in (0, 5, 11, 99)] == [0, 5, 11, 11]


def test_bad_input_is_refused():
    rings = Rings(2, 3, 2, 4)
    state = CascadeState.empty(1, 2, 1, rings, DEVICE)
    one = torch.ones(1, dtype=torch.int32, device=DEVICE)
    for update in (token_update, stride_update, triton.cascade_update):
        with pytest.raises(ValueError, match=r"expected \[layers, rows, heads, 14\]"):
            update(state, one, one, one, Rings(2, 3, 2, 6))
        with pytest.raises(ValueError, match=r"count is .* expected integers"):
            update(state, one, one, one.float(), rings)
        with pytest.raises(ValueError, match=r"seen is .* as long as rows"):
            update(state, one, one.repeat(2), one, rings)
        with pytest.raises(ValueError, match=r"score is torch\.float64"):
            update(CascadeState(state.token, state.cell, state.score.double()), one, one, one, rings)
    with pytest.raises(ValueError, match="5 tokens to add behind 1; expected 0 to 4"):
        stride_update(state, one, one, one * 5, rings)
    with pytest.raises(ValueError, match="expected at most 13"):
        deep = Rings(0, 1, 14, 1)
        triton.cascade_update(CascadeState.empty(1, 2, 1, deep, DEVICE), one, one, one, deep)
    with pytest.raises(ValueError, match="expected a power of two"):
        triton.cascade_update(state, one, one, one, rings, tuning=triton.CascadeUpdateTuning(steps=12))
    with pytest.raises(ValueError, match="size, cascades and stride of at least 1"):
        Rings(0, 0, 1, 1)
