"""Decoding steps of streams: the reference against formulas written out, and Triton's kernels against the reference.

Everything that nobody may read is NaN: slots that no cell names, ways that a stream does not see, and workspaces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.kernels.cells import Rotation
from sglang_ext.kernels.rope import Rope, rotate
from sglang_ext.kernels.stream_decode import (
    MapState,
    NewToken,
    StepNumbers,
    StreamCaches,
    StreamSizes,
    StreamWorkspace,
    dispatch,
    reference,
    triton_impl,
)
from tests.kernels import sm90

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
HALVES = [torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16]
"""Triton's interpreter multiplies the bits of bfloat16 as integers."""
SCALE = 0.3
SIZES = StreamSizes(sinks=5, cells=5 + 45, width=23, block=8)
ROWS, WAYS, MOST = 6, 4, 3
# (row, token, first token of the window, fresh) of each request
STEPS = {
    "a first token": [(2, 0, 0, 1)],
    "within the sinks": [(0, 3, 3, 1)],
    "no block has left": [(0, 30, 5, 1), (4, 7, 5, 1)],
    "long streams": [(1, 245, 5 + 8 * 26, 1), (3, 1004, 5 + 8 * 121, 1), (-1, 0, 0, 0), (5, 260, 5 + 8 * 28, 1)],
    "computed anew": [(1, 245, 5 + 8 * 26, 0)],
    "the first of a block": [(1, 5 + 8 * 30, 5 + 8 * 26, 1)],
    "the last of a block": [(1, 4 + 8 * 30, 5 + 8 * 26, 1)],
}


@dataclass
class World:
    """Streams with all that a step reads, random where it is read."""

    tokens: NewToken
    caches: StreamCaches
    step: StepNumbers
    state: MapState
    rotation: Rotation
    sizes: StreamSizes

    @classmethod
    def make(
        cls,
        dtype: torch.dtype,
        steps: list[tuple[int, int, int, int]],
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int, int] = (16, 16, 16),
        neox: bool = True,
        sizes: StreamSizes = SIZES,
    ) -> World:
        generator = torch.Generator().manual_seed(3)
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def draw(*shape: int, like: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, like)

        (count, kv_heads), (dim, rotary, value_dim), batch = heads, dims, len(steps)
        slots = 1 + ROWS * sizes.cells + 7
        slot = (torch.randperm(slots - 1, generator=generator)[: ROWS * sizes.cells] + 1).view(ROWS, sizes.cells)
        keys, values = draw(slots, kv_heads, dim), draw(slots, kv_heads, value_dim)
        unread = torch.ones(slots, dtype=torch.bool)
        for row, token, first, _ in steps:
            if row >= 0:
                seen = [*range(min(token, sizes.sinks)), *range(first, token)]
                unread[slot[row, [sizes.cell(each) for each in seen]]] = False
        for cache in (keys, values):
            cache[unread.to(DEVICE)] = torch.nan
        ways = torch.stack([torch.randperm(WAYS, generator=generator)[:MOST] for _ in range(ROWS)])
        ways[0], ways[3, 1] = -1, -1
        blocks = draw(ROWS, WAYS, sizes.block, kv_heads, dim), draw(ROWS, WAYS, sizes.block, kv_heads, value_dim)
        for row in range(ROWS):
            for way in set(range(WAYS)) - set(ways[row].tolist()):
                blocks[0][row, way] = blocks[1][row, way] = torch.nan
        state = MapState(
            draw(ROWS, sizes.cells, like=wide).abs(),
            draw(ROWS, sizes.cells, like=wide).abs(),
            torch.full((ROWS, count, sizes.block, sizes.block), torch.nan, dtype=wide, device=DEVICE),
        )
        ints = lambda tensor: tensor.to(DEVICE, torch.int32).contiguous()  # noqa: E731
        return cls(
            NewToken(draw(batch, count, dim), draw(batch, kv_heads, dim), draw(batch, kv_heads, value_dim)),
            StreamCaches(keys, values, ints(slot), *blocks, ints(ways)),
            StepNumbers(ints(torch.tensor(steps).t())),
            state,
            Rotation.of(Rope(0.6 ** torch.arange(rotary // 2, device=DEVICE), neox)),
            sizes,
        )

    def run(self, module: Any, mapped: bool = True, **more: Any) -> tuple[torch.Tensor, World]:
        """(output, the world afterwards); this one stays as it is."""
        copied = replace(self.caches, keys=self.caches.keys.clone(), values=self.caches.values.clone())
        state = MapState(self.state.received.clone(), self.state.last.clone(), self.state.tile.clone())
        given = state if mapped else None
        out = module.decode(self.tokens, copied, self.step, self.sizes, self.rotation, SCALE, state=given, **more)
        return out, replace(self, caches=copied, state=state)


def same(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Equal where both are NaN, and within a tolerance elsewhere."""
    return torch.equal(a.isnan(), b.isnan()) and bool(
        (a.double() - b.double()).nan_to_num().abs().max()
        <= tolerance * max(1.0, float(b.double().nan_to_num().abs().max()))
    )


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_the_reference_is_the_formulas(steps: list[tuple[int, int, int, int]]) -> None:
    """Each head by itself, each token at its own distance."""
    world = World.make(torch.float64, steps)
    out, after = world.run(reference)
    for request, (row, token, first, fresh) in enumerate(steps):
        if row < 0:
            assert not out[request].any()
            continue
        slots = [int(slot) for slot in world.caches.slot[row]]
        new = slots[SIZES.cell(token)]
        assert torch.equal(after.caches.keys[new], world.tokens.keys[request])
        assert torch.equal(after.caches.values[new], world.tokens.values[request])
        window = list(range(first, token + 1))
        seen = [*range(min(token, SIZES.sinks)), *window]
        given = torch.zeros(SIZES.cells, dtype=torch.float64)
        for head in range(4):
            query, kv = world.tokens.query[request, head], head // 2
            logits, values = {}, []
            for each in seen:
                place = slots[SIZES.cell(each)]
                distance = torch.tensor(min(token - each, SIZES.width - 1), device=DEVICE)
                key = after.caches.keys[place, kv]
                logits[each] = float(rotate(query, distance, world.rotation.rope) @ key) * SCALE
                values.append(after.caches.values[place, kv])
            far = []
            for way in world.caches.ways[row].tolist():
                for at in range(SIZES.block if way >= 0 else 0):
                    edge = torch.tensor(SIZES.width - 1, device=DEVICE)
                    key = world.caches.block_keys[row, way, at, kv]
                    far.append(float(rotate(query, edge, world.rotation.rope) @ key) * SCALE)
                    values.append(world.caches.block_values[row, way, at, kv])
            weights = torch.tensor([*logits.values(), *far], dtype=torch.float64).softmax(0).to(DEVICE)
            assert (out[request, head] - weights @ torch.stack(values)).abs().max() < 1e-12
            mass = sum(math.exp(logits[each]) for each in window)
            for each in window:
                given[SIZES.cell(each)] += math.exp(logits[each]) / mass
            own = (token - SIZES.sinks) % SIZES.block
            for column in range(SIZES.block if token >= SIZES.sinks else 0):
                each = token - own + column
                wanted = torch.nan if column > own else math.exp(logits[each]) / mass if each >= first else 0.0
                got = float(after.state.tile[row, head, own, column])
                assert math.isnan(got) if column > own else abs(got - wanted) < 1e-12
        before = world.state.received[row] + (world.state.last[row] if fresh else 0)
        before[SIZES.cell(token)] = 0
        assert torch.equal(after.state.received[row], before)
        assert (after.state.last[row].cpu() - given).abs().max() < 1e-12
    others = [row for row in range(ROWS) if row not in {step[0] for step in steps}]
    for name in ("received", "last"):
        assert torch.equal(getattr(after.state, name)[others], getattr(world.state, name)[others])


def assert_equal(world: World, dtype: torch.dtype, mapped: bool = True, **more: Any) -> None:
    """What Triton's kernels compute is what the reference computes of the same numbers, in float64."""
    wide = lambda tensor: tensor.double() if tensor.is_floating_point() else tensor  # noqa: E731
    of = lambda kind: type(kind)(*(wide(getattr(kind, name)) for name in kind.__slots__))  # noqa: E731
    exact = replace(world, tokens=of(world.tokens), caches=of(world.caches), state=of(world.state))
    (out, after), (wanted, then) = world.run(triton_impl, mapped, **more), exact.run(reference, mapped)
    tolerance = TOLERANCE[dtype]
    assert same(out, wanted, tolerance)
    assert same(after.caches.keys, then.caches.keys, 0) and same(after.caches.values, then.caches.values, 0)
    for name in ("received", "last", "tile"):
        assert same(getattr(after.state, name), getattr(then.state, name), tolerance), name


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_triton(steps: list[tuple[int, int, int, int]], dtype: torch.dtype) -> None:
    assert_equal(World.make(dtype, steps), dtype)


@pytest.mark.parametrize("heads", [(3, 1), (4, 4), (8, 2)], ids=str)
@pytest.mark.parametrize("dims", [(16, 16, 24), (24, 10, 16), (40, 40, 40)], ids=str)
def test_triton_with_other_heads(heads: tuple[int, int], dims: tuple[int, int, int]) -> None:
    for neox, mapped in ((True, True), (False, False)):
        assert_equal(World.make(torch.float32, STEPS["long streams"], heads, dims, neox), torch.float32, mapped)


@pytest.mark.parametrize("shares", [(1, 1), (3, 2), (7, 5)], ids=str)
def test_triton_with_other_shares(shares: tuple[int, int]) -> None:
    """More shares than there are columns, too; buffers hold NaN."""
    for steps in ("long streams", "no block has left"):
        world = World.make(torch.float32, STEPS[steps])
        space = StreamWorkspace.empty(len(STEPS[steps]), 4, 16, SIZES.cells, shares, torch.device(DEVICE))
        for buffer in (space.parts, space.part_lse, space.logits):
            buffer.fill_(torch.nan)
        assert_equal(world, torch.float32, workspace=space)


def test_triton_with_sizes_of_powers_of_two() -> None:
    sizes = StreamSizes(sinks=16, cells=16 + 96, width=32, block=16)
    steps = [(0, 300, 16 + 16 * 15, 1), (1, 90, 16 + 16 * 2, 1), (2, 4, 4, 1)]
    assert_equal(World.make(torch.float32, steps, sizes=sizes), torch.float32)


def test_wrong_input() -> None:
    world = World.make(torch.float32, STEPS["no block has left"])
    cases: list[tuple[World, str]] = [
        (replace(world, step=StepNumbers(world.step.numbers[:3])), r"numbers is torch\.int32 \(3, 2\): expected"),
        (replace(world, caches=replace(world.caches, ways=world.caches.ways.long())), r"ways is torch\.int64"),
        (replace(world, tokens=replace(world.tokens, keys=world.tokens.keys.half())), r"new keys is torch\.float16"),
        (replace(world, sizes=replace(SIZES, cells=49)), r"slot is torch\.int32 \(6, 50\): expected"),
        (replace(world, sizes=replace(SIZES, width=0)), "expected fewer sinks than cells"),
        (
            replace(world, state=replace(world.state, last=world.state.last[:, :-1])),
            r"last is torch\.float32 \(6, 49\)",
        ),
    ]
    for module in (reference, triton_impl):
        for wrong, message in cases:
            with pytest.raises(ValueError, match=message):
                module.decode(
                    wrong.tokens, wrong.caches, wrong.step, wrong.sizes, wrong.rotation, SCALE, state=wrong.state
                )


def test_a_device_s_own_implementation_runs() -> None:
    world = World.make(torch.float32, STEPS["long streams"])
    (out, _), (wanted, _) = world.run(dispatch), world.run(reference)
    assert same(out, wanted, TOLERANCE[torch.float32])


def test_shares_fill_the_device() -> None:
    sizes = StreamSizes(sinks=128, cells=4864, width=4096, block=128)
    for batch in (1, 2, 8, 64):
        near, far = triton_impl.shares_of(batch, 8, sizes, 128 + 16 * 128, 132)
        assert near >= 1 and far >= 1
        assert (near + far) * batch * 8 <= max(triton_impl.TUNING.programs * 132, 2 * batch * 8)


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_a_graph() -> None:
    """One capture serves all steps: numbers are read on the device."""
    world = World.make(torch.float16, STEPS["long streams"])
    space = StreamWorkspace.empty(4, 4, 16, SIZES.cells, (3, 2), torch.device(DEVICE))
    caches, state, graph = world.caches, world.state, torch.cuda.CUDAGraph()
    run = lambda: triton_impl.decode(  # noqa: E731
        world.tokens, caches, world.step, SIZES, world.rotation, SCALE, state=state, workspace=space
    )
    run()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(3):
        world.step.numbers[1] += 1
        wanted, then = world.run(reference)
        graph.replay()
        assert same(out, wanted, TOLERANCE[torch.float16])
        assert same(state.received, then.state.received, 1e-3) and same(state.last, then.state.last, 1e-3)


COMPILE = """
import torch
from sglang_ext.kernels.cells import Rotation
from sglang_ext.kernels.rope import Rope
from sglang_ext.kernels.stream_decode import MapState, NewToken, StepNumbers, StreamCaches, StreamSizes, triton_impl
from tests.kernels.sm90 import compiled, stand_in

stand_in(triton_impl, "_share_kernel", "_join_kernel", "_map_kernel", shared=113 * 1024)
for dim, dtype in ((128, torch.bfloat16), (64, torch.float16), (128, torch.float32), (256, torch.bfloat16)):
    sizes = StreamSizes(sinks=128, cells=4864, width=4096, block=128)
    empty = lambda *shape: torch.empty(shape, dtype=dtype)
    caches = StreamCaches(empty(9, 8, dim), empty(9, 8, dim), torch.zeros(2, 4864, dtype=torch.int32),
                          empty(2, 32, 128, 8, dim), empty(2, 32, 128, 8, dim), torch.zeros(2, 16, dtype=torch.int32))
    state = MapState(torch.zeros(2, 4864), torch.zeros(2, 4864), torch.zeros(2, 32, 128, 128))
    new = NewToken(empty(3, 32, dim), empty(3, 8, dim), empty(3, 8, dim))
    rotation = Rotation.of(Rope(0.6 ** torch.arange(dim // 2)))
    for given in (state, None):
        step = StepNumbers(torch.zeros(4, 3, dtype=torch.int32))
        triton_impl.decode(new, caches, step, sizes, rotation, 0.1, state=given)
assert len(compiled) == 3, compiled
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests compile the kernels and run them")
def test_compiles_for_hopper(tmp_path: Path) -> None:
    """What the interpreter takes, the compiler may not; two programs are to fit a multiprocessor."""
    sm90.run(COMPILE, tmp_path)
