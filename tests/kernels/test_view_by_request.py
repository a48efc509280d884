"""Attention of requests that read their runs one by one, against `view_attention` in float64; poisons as next door."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_ext.kernels.view_attention.by_request import BLOCK_N, block_for, plan_by_request
from sglang_ext.kernels.view_attention.by_request_impl import LoadedRequests, attend_by_request, load
from tests.kernels import sm90
from tests.kernels.test_view_triton import (
    DEVICE,
    LSE_TOLERANCE,
    NOWHERE,
    TOLERANCE,
    Asked,
    Piece,
    World,
    batch,
    close,
)


def loaded(world: World, workers: int = 4, part_dtype: torch.dtype = torch.float32) -> LoadedRequests:
    """A plan on the device: what it does not write is poisoned."""
    plan = plan_by_request(world.runs(), group=world.group, workers=workers)
    found = load(plan, world.table(), world.rope, world.kv_heads, world.value_dim, part_dtype)
    found.part.fill_(float("nan"))
    found.part_lse.fill_(float("nan"))
    return found


def verify(world: World, workers: int = 4, part_dtype: torch.dtype = torch.float32) -> LoadedRequests:
    query, found = world.query(), loaded(world, workers, part_dtype)
    rows, heads = query.shape[:2]
    out = torch.full((rows, heads, world.value_dim), float("nan"), dtype=world.dtype, device=DEVICE)
    lse = torch.full((rows, heads), float("nan"), device=DEVICE)
    assert attend_by_request(query, found, world.keys, world.values, world.head_dim**-0.5, out, lse) is out
    want, want_lse = world.expected(query)
    close(out, want, TOLERANCE[world.dtype])
    error = (lse.double() - want_lse).abs().max().item()
    assert error <= LSE_TOLERANCE[world.dtype] * max(1.0, want_lse.abs().max().item()), error
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
def test_equals_the_reference(neox: bool, dtype: torch.dtype) -> None:
    world = batch(World(neox=neox, dtype=dtype), requests=4, rows=5)
    verify(world, part_dtype=dtype)


@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize(
    ("head_dim", "value_dim", "rotary_dim"), [(32, 32, 32), (80, 48, 20), (96, 16, 96), (16, 64, 0)]
)
def test_head_shapes(head_dim: int, value_dim: int, rotary_dim: int, group: int) -> None:
    world = World(head_dim=head_dim, value_dim=value_dim, rotary_dim=rotary_dim, group=group, kv_heads=1, seed=group)
    verify(batch(world, requests=3, rows=4))


@pytest.mark.parametrize("workers", [1, 3, 40])
@pytest.mark.parametrize("rows", [1, 9, 70])
def test_tiles_of_rows_and_shares_of_runs(rows: int, workers: int) -> None:
    """Requests of several tiles, the last of which is not full; cut where there are more programs than tiles."""
    world = batch(World(size=2000, group=3, kv_heads=1), requests=2, blocks=9, chosen=7, rows=rows)
    found = verify(world, workers)
    shares = found.plan.shares
    assert block_for(rows * 3, 3) == found.plan.block_m and found.plan.block_m // 3 <= 42
    tiles = {(first, count) for first, count, *_ in shares.tolist()}
    assert len(tiles) == 2 * -(-rows // (found.plan.block_m // 3))
    assert (len(shares) > len(tiles)) == (workers > len(tiles))


def test_every_row_reads_every_run_once() -> None:
    world = batch(World(size=2000), requests=3, blocks=9, chosen=7, rows=6)
    plan = plan_by_request(world.runs(), group=world.group, workers=11)
    read: dict[int, list[tuple[int, int]]] = {}
    for first, count, low, high, *_ in plan.shares.tolist():
        for row in range(first, first + count):
            read.setdefault(row, []).append((low, high))
    for row, ranges in read.items():
        request = row // 6
        bounds = [request * 8, *(high for _, high in sorted(ranges))]
        assert sorted(ranges) == list(pairwise(bounds)) and bounds[-1] == request * 8 + 8
        parts = plan.row_parts[plan.row_ptr[row] : plan.row_ptr[row + 1]]
        assert len(parts) == len(ranges)
    assert sorted(plan.row_parts.tolist()) == list(range(len(plan.row_parts)))
    cost = -(-plan.runs[:, 1] // BLOCK_N) + 1
    assert max(cost[low:high].sum() for _, _, low, high, *_ in plan.shares.tolist()) <= 2 * cost.sum() / 11 + cost.max()


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 130])
def test_runs_around_the_edge_of_a_step(tokens: int) -> None:
    world = World()
    pieces = [Piece(0, world.write(tokens, 3), 7), Piece(1, world.write(2, 200), -90)]
    world.requests = [
        Asked(pieces, world.write(max(tokens, 5), 300), rows=5, own_delta=-1),
        Asked([], world.write(3), 3),
    ]
    verify(world)


@pytest.mark.parametrize("delta", [1_000_000, -1_000_000, 0])
def test_large_and_negative_distances(delta: int) -> None:
    world = World()
    world.requests = [Asked([Piece(0, world.write(19, max(0, -delta)), delta)], world.write(3, max(0, delta) + 40), 3)]
    verify(world)


def test_many_runs() -> None:
    """As a question sees that selects hundreds of small blocks."""
    world = World(size=1400, kv_heads=1)
    pieces = [Piece(k, world.write(1 + k % 3, 5 * k), k % 11 - 5) for k in range(400)]
    world.requests = [Asked(pieces, world.write(20, 3000), rows=20), Asked(pieces[::2], world.write(4, 1000), rows=4)]
    found = verify(world, workers=6)
    assert len(found.plan.row_parts) < 6 * 24, "a row has few partial outputs, and not one for each run"


def test_what_does_not_fit_is_refused() -> None:
    world = batch(World(), requests=2, rows=3)
    runs = world.runs()
    with pytest.raises(ValueError, match="expected the last one alone"):
        plan_by_request([replace(runs[0], own=())], group=2, workers=4)
    with pytest.raises(ValueError, match="no requests"):
        plan_by_request([], group=2, workers=4)
    found, query = loaded(world), world.query()
    out = torch.empty_like(query)
    with pytest.raises(ValueError, match=r"expected \[6, 4, head_dim\] into \[6, 4, 16\]"):
        attend_by_request(query[:5], found, world.keys, world.values, 1.0, out[:5])
    for table, words in ((world.table().long(), "row of int32"), (world.table()[:9], "expected at least")):
        with pytest.raises(ValueError, match=words):
            load(found.plan, table, world.rope, 2, 16, torch.float32)
    assert world.table().max() < NOWHERE


COMPILE = """
import torch
from sglang_ext.kernels.rope import Rope
from sglang_ext.kernels.rope import triton_impl as angles
from sglang_ext.kernels.view_attention import buffers, by_request_impl as kernels, triton_impl
from sglang_ext.kernels.view_attention.by_request import plan_by_request
from sglang_ext.kernels.view_attention.plan import PlanRows
from tests.kernels.sm90 import compiled, stand_in
import numpy as np

stand_in(kernels, "_attend")
stand_in(triton_impl, "_merge")
stand_in(buffers, "_gather_slots")
stand_in(angles, "_angle_tables")
for dim, rows in ((128, 24), (128, 3), (64, 24), (256, 24)):
    one = PlanRows(0, rows, np.array([1, -1]), np.array([90, rows]), np.array([5, 0]), np.array([0, 90]), own=(1,))
    plan = plan_by_request([one], group=4, workers=33)
    rope = Rope(torch.zeros(dim // 2))
    found = kernels.load(plan, torch.zeros(200, dtype=torch.int32), rope, 8, dim, torch.bfloat16)
    query, cache = torch.zeros(rows, 32, dim, dtype=torch.bfloat16), torch.zeros(200, 8, dim, dtype=torch.bfloat16)
    kernels.attend_by_request(query, found, cache, cache, 1.0, torch.empty_like(query))
    code = compiled["view_attention_attend"]
    assert "wgmma" in code.asm["ptx"] or rows == 3, (dim, rows)
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests compile the kernels and run them")
def test_compiles_for_hopper(tmp_path: Path) -> None:
    sm90.run(COMPILE, tmp_path)


def test_sizes_of_tiles() -> None:
    assert [block_for(pairs, 4) for pairs in (1, 16, 17, 64, 96, 500)] == [16, 16, 32, 64, 128, 128]
    assert block_for(20, 20) == 32 and np.log2(block_for(7 * 3, 7)) % 1 == 0
