"""`view_attention` against dense attention written from the definition, from keys and queries before rotation.

The oracle knows no cache, no slots' positions and no rebasing: it rotates every query and key, by complex
multiplication in float64, to the positions at which the view says they are seen, and takes one softmax a row.
Every slot that no view names is NaN in both caches, so a single read outside the view shows.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch

from sglang_ext.kernels.rope import Rope, rotate
from sglang_ext.kernels.view_attention import (
    Consecutive,
    Positions,
    Ranks,
    Segment,
    SharedDistance,
    View,
    Written,
    merge_states,
    runs,
    view_attention,
)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}  # beside values of order one
SLOTS = 97


def rotated(vector: torch.Tensor, position: int, rope: Rope) -> torch.Tensor:
    """One float64 vector rotated to `position`."""
    half = len(rope.inv_freq)
    head, rest = vector[: 2 * half], vector[2 * half :]
    pairs = torch.complex(*head.reshape(2, half)) if rope.neox else torch.complex(*head.reshape(half, 2).T)
    angle = position * rope.inv_freq.double()
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    head = torch.cat([pairs.real, pairs.imag]) if rope.neox else torch.view_as_real(pairs).reshape(-1)
    return torch.cat([head, rest])


def all_rotated(vectors: torch.Tensor, positions: torch.Tensor, rope: Rope) -> torch.Tensor:
    """[n, heads, head_dim] float64, vector n of every head rotated to positions[n]."""
    each = zip(vectors, positions.tolist(), strict=True)
    return torch.stack([torch.stack([rotated(v, p, rope) for v in row]) for row, p in each])


@dataclass
class World:
    """A model's queries, keys and values before rotation (float64), and the caches as an engine would hold them."""

    rope: Rope
    query: torch.Tensor  # [rows, heads, head_dim]
    query_pos: torch.Tensor  # [rows]
    keys: torch.Tensor  # [slots, kv_heads, head_dim]
    values: torch.Tensor  # [slots, kv_heads, value_dim]
    slot_pos: torch.Tensor  # [slots] int32
    scale: float

    @classmethod
    def make(
        cls,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 8,
        value_dim: int = 8,
        rotary_dim: int | None = None,
        neox: bool = True,
        query_pos: tuple[int, ...] = (40, 41, 42, 43, 44),
        far: int = 60,
        seed: int = 0,
    ) -> World:
        gen = torch.Generator().manual_seed(seed)
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        inv_freq = (100.0 ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)).float()

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=gen, dtype=torch.float64)

        return cls(
            rope=Rope(inv_freq, neox),
            query=randn(len(query_pos), heads, head_dim),
            query_pos=torch.tensor(query_pos),
            keys=randn(SLOTS, kv_heads, head_dim),
            values=randn(SLOTS, kv_heads, value_dim),
            slot_pos=torch.randint(0, far, (SLOTS,), generator=gen, dtype=torch.int32),
            scale=head_dim**-0.5,
        )

    def attend(self, view: View, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
        """What is tested, on caches that hold rotated keys in the view's cells and NaN everywhere else."""
        key_cache, value_cache = torch.full_like(self.keys, math.nan), torch.full_like(self.values, math.nan)
        for head in range(self.keys.shape[1]):
            for slot, _ in self._cells(view, head, row=0):
                key_cache[slot, head] = rotated(self.keys[slot, head], int(self.slot_pos[slot]), self.rope)
                value_cache[slot, head] = self.values[slot, head]
        return view_attention(
            all_rotated(self.query, self.query_pos, self.rope).to(dtype),
            self.query_pos,
            view,
            key_cache.to(dtype),
            value_cache.to(dtype),
            self.slot_pos,
            self.rope,
            self.scale,
        )

    def expected(self, view: View) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, log-sum-exp) from the definition, float64."""
        rows, heads, _ = self.query.shape
        group = heads // self.keys.shape[1]
        out = torch.zeros(rows, heads, self.values.shape[-1], dtype=torch.float64)
        lse = torch.full((rows, heads), -math.inf, dtype=torch.float64)
        for row in range(rows):
            position = int(self.query_pos[row])
            for head in range(heads):
                named = self._cells(view, head // group, row, visible=True)
                cells = [(slot, seen) for slot, seen in named if seen is not None]
                if not cells:
                    continue
                query = rotated(self.query[row, head], position, self.rope)
                keys = torch.stack([rotated(self.keys[slot, head // group], seen, self.rope) for slot, seen in cells])
                logits = keys @ query * self.scale
                values = torch.stack([self.values[slot, head // group] for slot, _ in cells])
                out[row, head], lse[row, head] = torch.softmax(logits, 0) @ values, torch.logsumexp(logits, 0)
        return out, lse

    def _cells(self, view: View, kv_head: int, row: int, visible: bool = False) -> list[tuple[int, int | None]]:
        """(slot, position at which row sees it) of every cell of a head; None with `visible` where it is masked."""
        found: list[tuple[int, int | None]] = []
        position = int(self.query_pos[row])
        for segment in view.segments:
            slots = segment.slots if segment.slots.dim() == 1 else segment.slots[kv_head]
            for index, slot in enumerate(slots.tolist()):
                if slot < 0:
                    continue
                rule = segment.positions
                if isinstance(rule, Consecutive):
                    seen = rule.start + index
                elif isinstance(rule, Written):
                    seen = int(self.slot_pos[slot])
                elif isinstance(rule, Ranks):
                    seen = int(rule.ranks[index] if rule.ranks.dim() == 1 else rule.ranks[kv_head, index])
                else:
                    seen = position - rule.distance
                hidden = visible and segment.causal and seen > position
                found.append((slot, None if hidden else seen))
        return found


def check(world: World, view: View, dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)) -> None:
    expected_out, expected_lse = world.expected(view)
    for dtype in dtypes:
        out, lse = world.attend(view, dtype)
        assert out.dtype == dtype and out.isfinite().all()
        torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=TOLERANCE[dtype])
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=TOLERANCE[dtype])


def slots(*parts: tuple[int, int] | int) -> torch.Tensor:
    """Slots named one by one or as (first, end) runs."""
    named = [list(range(*p)) if isinstance(p, tuple) else [p] for p in parts]
    return torch.tensor([slot for part in named for slot in part])


PADDED_CELLS = torch.tensor([[11, 3, 60, 7, -1, -1], [5, 90, 3, 12, 44, 11]])  # head 0 keeps four, head 1 six
RULES: dict[str, tuple[torch.Tensor, Positions]] = {
    "consecutive": (slots((10, 21), 3, 70), Consecutive(33)),
    "consecutive from 0": (slots(9, (50, 57)), Consecutive(0)),
    "written": (slots((30, 47)), Written()),
    "ranks": (slots((80, 87)), Ranks(torch.tensor([40, 0, 45, 3, 3, 41, 99]))),
    "ranks per head": (slots((80, 85)), Ranks(torch.tensor([[40, 0, 45, 3, 3], [7, 60, 41, 44, 0]]))),
    "shared distance": (slots((20, 33)), SharedDistance(17)),
    "shared distance 0": (slots((20, 23)), SharedDistance(0)),
    "shared distance ahead": (slots((20, 24)), SharedDistance(-2)),  # causal: nobody sees it
    "cells, consecutive": (PADDED_CELLS, Consecutive(40)),
    "cells, written": (PADDED_CELLS, Written()),
    "cells, ranks": (PADDED_CELLS, Ranks(torch.tensor([44, 39, 42, 0, 41, 100]))),
    "cells, ranks per head": (PADDED_CELLS, Ranks(torch.tensor([[0, 1, 43, 3, 4, 5], [45, 3, 42, 41, 0, 9]]))),
    "cells, shared distance": (PADDED_CELLS, SharedDistance(8)),
}


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("rule", RULES)
def test_every_position_rule(rule: str, causal: bool) -> None:
    named, positions = RULES[rule]
    check(World.make(), View((Segment(named, positions, causal),)))


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "value_dim", "rotary_dim"),
    [(1, 1, 2, 1, 2), (3, 1, 6, 5, 6), (5, 5, 7, 3, 4), (6, 2, 10, 10, 10), (12, 3, 16, 9, 4)],
)
def test_odd_sizes_groups_and_partial_rotary(
    heads: int, kv_heads: int, head_dim: int, value_dim: int, rotary_dim: int, neox: bool
) -> None:
    world = World.make(heads, kv_heads, head_dim, value_dim, rotary_dim, neox, query_pos=(29, 30, 31))
    view = View(
        (
            Segment(slots((1, 8)), Consecutive(0)),
            Segment(slots((40, 45), 20), SharedDistance(9)),
            Segment(slots((60, 73)), Consecutive(19), causal=True),
        )
    )
    check(world, view)


def test_mixed_segments_of_every_kind_in_one_view() -> None:
    cells = torch.tensor([[50, 51, -1], [51, 52, 53]])
    view = View(
        (
            Segment(slots((1, 6)), Consecutive(0)),
            Segment(torch.empty(0, dtype=torch.int64), Consecutive(5)),
            Segment(slots((30, 38)), Written(), causal=True),
            Segment(cells, Ranks(torch.tensor([[20, 21, 22], [25, 20, 43]])), causal=True),
            Segment(slots((70, 75)), SharedDistance(30)),
            Segment(slots((80, 85)), Consecutive(40), causal=True),
        )
    )
    check(World.make(), view)


def test_rows_need_not_be_in_order_of_position() -> None:
    world = World.make(query_pos=(44, 3, 1000, 44, 0))
    check(world, View((Segment(slots((1, 40)), Consecutive(2), causal=True),)))


def test_far_positions_are_rotated_back_exactly() -> None:
    world = World.make(query_pos=(999_990, 999_991), far=1_000_000)
    view = View((Segment(slots((1, 9)), Consecutive(0)), Segment(slots((20, 29)), Consecutive(999_985), causal=True)))
    # Angles of 1e6 rad carry 1e-10 in float64; the float32 caches carry 1e-7.
    out, lse = world.attend(view)
    expected = world.expected(view)
    torch.testing.assert_close((out, lse), expected, rtol=0, atol=1e-9)
    check(world, view, dtypes=(torch.float32,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_caches_are_read_in_float32(dtype: torch.dtype) -> None:
    world = World.make()
    view = View((Segment(slots((1, 20)), Consecutive(10)), Segment(slots((30, 38)), Consecutive(40), causal=True)))
    out, lse = world.attend(view, dtype)
    expected_out, expected_lse = world.expected(view)
    assert out.dtype == dtype and lse.dtype == torch.float32
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=4 * eps)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=4 * eps)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("view", [(), (torch.empty(0, dtype=torch.int32),), (torch.full((2, 3), -1),)], ids=repr)
def test_a_view_of_nothing_merges_as_nothing(view: tuple[torch.Tensor, ...], causal: bool) -> None:
    world = World.make(value_dim=5)
    out, lse = world.attend(View(tuple(Segment(named, Consecutive(0), causal) for named in view)))
    assert out.shape == (5, 4, 5) and torch.equal(out, torch.zeros_like(out))
    assert lse.shape == (5, 4) and torch.equal(lse, torch.full_like(lse, -math.inf))


def test_rows_and_heads_that_see_nothing() -> None:
    """Rows before the segment, and a head that keeps no cell, get zeros and -inf; their neighbours are not touched."""
    world = World.make(query_pos=(4, 5, 6, 7))
    view = View((Segment(torch.tensor([[-1, -1, -1], [30, 31, 32]]), Consecutive(6), causal=True),))
    out, lse = world.attend(view)
    assert torch.isneginf(lse[:, :2]).all() and torch.isneginf(lse[:2]).all()
    assert torch.equal(out[:, :2], torch.zeros_like(out[:, :2])) and torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert lse[2:, 2:].isfinite().all()
    check(world, view)


def test_heads_must_be_a_multiple_of_the_key_value_heads() -> None:
    with pytest.raises(ValueError, match="5 query heads over 2 key-value heads"):
        World.make(heads=5).attend(View((Segment(slots(1), Consecutive(0)),)))


def test_an_unknown_position_rule_is_an_error() -> None:
    world = World.make()
    ones = torch.ones(SLOTS, 2, 8)
    view = View((Segment(slots(1), "linear"),))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="position rule 'linear': expected Consecutive"):
        view_attention(world.query, world.query_pos, view, ones, ones, world.slot_pos, world.rope, 1.0)


# ---- merging -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(8))
def test_merged_random_partitions_equal_the_whole(seed: int, dtype: torch.dtype) -> None:
    """Any cut of a view into disjoint parts, empty and invisible ones included, merges to attention over the union."""
    world = World.make(heads=6, kv_heads=3, head_dim=10, query_pos=tuple(range(30, 39)), seed=seed)
    gen = torch.Generator().manual_seed(seed)
    tokens = torch.randperm(SLOTS - 1, generator=gen)[:50] + 1
    ranks = torch.randint(0, 60, (50,), generator=gen)
    owner = torch.randint(0, 7, (50,), generator=gen)
    owner[owner == 3] = 2  # part 3 is empty
    parts = [View((Segment(tokens[owner == p], Ranks(ranks[owner == p]), causal=True),)) for p in range(7)]
    parts.append(View((Segment(slots(0), Consecutive(1000), causal=True),)))  # seen by nobody
    states = [world.attend(part, dtype) for part in parts]
    out, lse = merge_states(torch.stack([o for o, _ in states]), torch.stack([s for _, s in states]))
    whole = View((Segment(tokens, Ranks(ranks), causal=True),))
    for reference in (world.attend(whole, dtype), world.expected(whole)):
        torch.testing.assert_close(out.double(), reference[0].double(), rtol=0, atol=TOLERANCE[dtype])
        torch.testing.assert_close(lse.double(), reference[1].double(), rtol=0, atol=TOLERANCE[dtype])
    assert out.dtype == dtype


def test_merging_is_associative_and_keeps_nothing_as_nothing() -> None:
    gen = torch.Generator().manual_seed(0)
    outputs = torch.randn(4, 3, 2, 5, generator=gen, dtype=torch.float64)
    lses = torch.randn(4, 3, 2, generator=gen, dtype=torch.float64) * 30
    lses[:, 0, 0], outputs[:, 0, 0] = -math.inf, 0.0
    lses[1, 1], outputs[1, 1] = -math.inf, 0.0
    whole = merge_states(outputs, lses)
    left, right = merge_states(outputs[:2], lses[:2]), merge_states(outputs[2:], lses[2:])
    twice = merge_states(torch.stack([left[0], right[0]]), torch.stack([left[1], right[1]]))
    torch.testing.assert_close(twice, whole, rtol=0, atol=1e-12)
    assert torch.equal(whole[0][0, 0], torch.zeros(5, dtype=torch.float64)) and torch.isneginf(whole[1][0, 0])


# ---- runs --------------------------------------------------------------------------------------------------


def test_runs_by_hand() -> None:
    slot_pos = torch.tensor([9, 10, 11, 0, 1, 2, 5, 7], dtype=torch.int32)
    row = torch.tensor([3, 4, 5, 0, 1, 2, 6, 7])
    # seen at 0..7, written at 0 1 2 | 9 10 11 | 5 | 7
    assert runs(row, slot_pos) == [(0, 3, 0), (3, 6, -6), (6, 7, 1), (7, 8, 0)]
    assert runs(row, slot_pos, start=100) == [(0, 3, 100), (3, 6, 94), (6, 7, 101), (7, 8, 100)]
    assert runs(row[:0], slot_pos) == []
    assert runs(row[3:4].to(torch.int32), slot_pos, start=2) == [(0, 1, -7)]


@pytest.mark.parametrize("seed", range(4))
def test_runs_are_maximal_and_cover_the_row(seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    slot_pos = torch.arange(60, dtype=torch.int32) + torch.randint(0, 2, (60,), generator=gen).cumsum(0).int()
    row = torch.randperm(60, generator=gen)[:40].sort().values
    found = runs(row, slot_pos, start=5)
    assert [first for first, _, _ in found] == [0, *(end for _, end, _ in found[:-1])] and found[-1][1] == 40
    for first, end, delta in found:
        assert all(5 + t - int(slot_pos[row[t]]) == delta for t in range(first, end))
    assert all(a[2] != b[2] for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("seed", range(3))
def test_rotating_the_query_by_run_equals_rotating_the_keys(seed: int) -> None:
    """DESIGN's identity, end to end: per run, an unrotated cache read by a query moved by -delta, then merged."""
    world = World.make(query_pos=(40, 41), seed=seed)
    world.slot_pos[1:30] = torch.cat([torch.arange(7, 20), torch.arange(2, 12), torch.arange(0, 6)]).int()
    row = torch.arange(1, 30)
    whole = View((Segment(row, Consecutive(0)),))
    states = []
    keys = all_rotated(world.keys, world.slot_pos, world.rope)
    query = all_rotated(world.query, world.query_pos, world.rope)
    cut = runs(row, world.slot_pos)
    assert len(cut) == 3
    for first, end, delta in cut:
        view = View((Segment(row[first:end], Written()),))
        moved = rotate(query, torch.tensor(-delta), world.rope)
        states.append(
            view_attention(
                moved, world.query_pos - delta, view, keys, world.values, world.slot_pos, world.rope, world.scale
            )
        )
    merged = merge_states(torch.stack([o for o, _ in states]), torch.stack([s for _, s in states]))
    torch.testing.assert_close(merged, world.expected(whole), rtol=0, atol=1e-12)
