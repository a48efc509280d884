"""Attention over clusters against equations (3), (5), (8) and (9), summed up one token and one cluster at a time.

Slots that no token owns are NaN in both caches; so are the centroids and values of empty clusters, tiles that nobody
lists, and every output and scratch buffer before a call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from sglang_ext.kernels.cluster_attention import (
    ClusterPool,
    ClusterReads,
    ClusterRows,
    DenseTokens,
    reference,
    triton_impl,
)
from sglang_ext.kernels.cluster_attention.pool import FLOAT8, narrowed
from sglang_ext.kernels.cluster_attention.types import TUNING, ClusterTuning, ClusterWorkspace, aligned
from sglang_ext.kernels.kmeans import ClusterPlan
from sglang_ext.kernels.kmeans.triton_impl import kmeans
from sglang_ext.kernels.top_p import Numbering, SearchedClusters, Selection, SetRule
from sglang_ext.kernels.top_p import select as select_by_sorting
from sglang_ext.kernels.top_p import triton_impl as top_p
from sglang_ext.kernels.top_p.types import WITHOUT_GAPS, TopPTuning
from sglang_ext.policies import quest
from tests.kernels import sm90

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 3e-3,
    torch.bfloat16: 2e-2,
}  # beside outputs of order one
# The interpreter multiplies bfloat16 matrices wrongly (by their bits); the products are the same code for both halves.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
SMALL = {"programs": 7, "summaries": 16, "merge_parts": 4, "registers": None}
TUNINGS = {"triton": ClusterTuning(**SMALL), "level": ClusterTuning(**SMALL, token_tile=1)}
WIDTH, TILE = 16, 16
SEPARATE = TopPTuning(joint=False)  # the interpreter runs a joint reduction element by element


@dataclass
class World:
    """A layer's caches, its clusters, and three requests of which two share a tile."""

    query: torch.Tensor  # [batch, rotations, heads, head_dim]
    keys: torch.Tensor
    values: torch.Tensor
    pool: ClusterPool
    rows: ClusterRows
    dense: DenseTokens
    scale: float

    @property
    def group(self) -> int:
        return self.query.shape[2] // self.keys.shape[1]

    def reading(
        self, selection: Selection, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, ClusterPool, ClusterReads, float]:
        """What `cluster_attention` is given."""
        reads = ClusterReads(self.rows, self.dense, selection, logits)
        return self.query, self.keys, self.values, self.pool, reads, self.scale

    def to(self, dtype: torch.dtype, device: str) -> World:
        def move(x: torch.Tensor | int | None) -> torch.Tensor | int | None:
            return x if not isinstance(x, torch.Tensor) else (x.to(dtype) if x.is_floating_point() else x).to(device)

        parts = {k: move(v) for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        for name in ("pool", "rows", "dense"):
            part = getattr(self, name)
            parts[name] = type(part)(**{k: move(v) for k, v in vars(part).items()})
        return replace(self, **parts)


def make_world(
    group: int = 4, kv_heads: int = 2, dim: int = 20, value_dim: int = 24, rotations: int = 1, seed: int = 0
) -> World:
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64).bfloat16().double()

    slots, tiles, clustered, own = 900, 5, [[0, 1], [2, 1, 3], []], [9, 37, 20]
    free = torch.randperm(slots - 1, generator=gen)  # the last slot is nobody's
    keys = torch.full((slots, kv_heads, dim), math.nan, dtype=torch.float64)
    values = torch.full((slots, kv_heads, value_dim), math.nan, dtype=torch.float64)
    shape = (tiles, kv_heads, WIDTH)
    sizes = torch.zeros(shape, dtype=torch.int32)
    starts = torch.full(shape, 10**6, dtype=torch.int32)
    centroids = torch.full((*shape, dim), math.nan, dtype=torch.float64)
    means = torch.full((*shape, value_dim), math.nan, dtype=torch.float64)
    members: list[list[int]] = [[] for _ in range(kv_heads)]
    for tile in range(4):  # the fifth belongs to nobody
        tokens, free = free[:150], free[150:]
        keys[tokens], values[tokens] = normal(150, kv_heads, dim), normal(150, kv_heads, value_dim)
        for head in range(kv_heads):
            label = torch.randint(0, WIDTH, (150,), generator=gen)
            label[torch.isin(label, torch.tensor([2, 11]))] = 5  # two empty clusters and a large one
            for cluster in range(WIDTH):
                mine = tokens[label == cluster]
                if len(mine):
                    sizes[tile, head, cluster], starts[tile, head, cluster] = len(mine), len(members[head])
                    members[head] += mine.tolist()
                    centroids[tile, head, cluster] = keys[mine, head].mean(0)
                    means[tile, head, cluster] = values[mine, head].mean(0)
    batch, most = len(clustered), 4
    listed = torch.full((batch, most), 4, dtype=torch.int32)
    dense = torch.full((batch, 40), slots - 1, dtype=torch.int32)
    for b, (row, count) in enumerate(zip(clustered, own, strict=True)):
        listed[b, : len(row)] = torch.tensor(row, dtype=torch.int32)
        tokens, free = free[:count], free[count:]
        dense[b, :count] = tokens.int()
        keys[tokens], values[tokens] = normal(count, kv_heads, dim), normal(count, kv_heads, value_dim)
        dense[b, 1:count:5] = -1
    rotation = None if rotations == 1 else torch.randint(0, rotations, (batch, most), generator=gen, dtype=torch.int32)
    runs = None if rotations == 1 else torch.randint(0, rotations, (batch, 3), generator=gen, dtype=torch.int32)
    return World(
        normal(batch, rotations, kv_heads * group, dim),
        keys,
        values,
        ClusterPool(centroids, means, sizes, starts, torch.tensor(members, dtype=torch.int32)),
        ClusterRows(listed, torch.tensor([len(row) for row in clustered], dtype=torch.int32), rotation),
        DenseTokens(dense, torch.tensor(own, dtype=torch.int32), runs, TILE),
        scale=0.4,
    )


def expected_logit(world: World, b: int, h: int, g: int, cell: int) -> float:
    """Equation 5 for one cluster and one query head."""
    place, inside = divmod(cell, WIDTH)
    tile = world.rows.tiles[b, place]
    size = int(world.pool.sizes[tile, h, inside])
    if place >= world.rows.counts[b] or size == 0:
        return -math.inf
    rotation = 0 if world.rows.rotation is None else world.rows.rotation[b, place]
    q = world.query[b, rotation, h * world.group + g]
    return float(q @ world.pool.centroids[tile, h, inside]) * world.scale + math.log(size)


def expected(world: World, exact: torch.Tensor, approx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Equations 8 and 9 by adding up weights; exact, approx: [batch, kv_heads, cells] bool."""
    batch, _, heads, _ = world.query.shape
    out = torch.zeros(batch, heads, world.values.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for head in range(heads):
            h, g = divmod(head, world.group)
            weights, seen = [], []

            def read(slot: int, rotation: int, b=b, head=head, h=h, weights=weights, seen=seen) -> None:
                weights.append(math.exp(float(world.query[b, rotation, head] @ world.keys[slot, h]) * world.scale))
                seen.append(world.values[slot, h])

            for entry in range(int(world.dense.counts[b])):
                slot = int(world.dense.slots[b, entry])
                if slot >= 0:
                    read(slot, 0 if world.dense.rotation is None else int(world.dense.rotation[b, entry // TILE]))
            for cell in exact[b, h].nonzero().flatten().tolist():
                tile = world.rows.tiles[b, cell // WIDTH]
                begin = int(world.pool.starts[tile, h, cell % WIDTH])
                for slot in world.pool.members[
                    h, begin : begin + int(world.pool.sizes[tile, h, cell % WIDTH])
                ].tolist():
                    read(slot, 0 if world.rows.rotation is None else int(world.rows.rotation[b, cell // WIDTH]))
            for cell in approx[b, h].nonzero().flatten().tolist():
                weights.append(math.exp(expected_logit(world, b, h, g, cell)))
                seen.append(world.pool.values[world.rows.tiles[b, cell // WIDTH], h, cell % WIDTH])
            if weights:
                total = math.fsum(weights)
                out[b, head] = sum(w * v for w, v in zip(weights, seen, strict=True)) / total
                lse[b, head] = math.log(total)
    return out, lse


def numbering(world: World) -> Numbering:
    """That of a selection: with rotations, the tokens of a cluster tile begin at a part of a tile."""
    return Numbering(WIDTH, aligned(TILE)) if world.query.shape[1] > 1 else WITHOUT_GAPS


def lists(world: World, exact: torch.Tensor, approx: torch.Tensor) -> Selection:
    """The selection that says these sets, written out one token at a time; stale entries name nothing valid."""
    batch, kv_heads, cells = exact.shape
    numbers = numbering(world)
    run, align = numbers.run, numbers.align
    got = Selection.empty(batch, kv_heads, cells, "cpu", numbers)
    for buffer in (got.exact, got.prefix, got.shift, got.approx):
        buffer.fill_(-(10**6))
    for b in range(batch):
        for h in range(kv_heads):
            chosen, rest = exact[b, h].nonzero().flatten().tolist(), approx[b, h].nonzero().flatten().tolist()
            tokens = total = 0
            for place, cell in enumerate(chosen):
                if place and cell // run != chosen[place - 1] // run:
                    tokens = -(-tokens // align) * align
                tile = world.rows.tiles[b, cell // WIDTH]
                got.exact[b, h, place], got.prefix[b, h, place] = cell, tokens
                got.shift[b, h, place] = world.pool.starts[tile, h, cell % WIDTH] - tokens
                tokens += int(world.pool.sizes[tile, h, cell % WIDTH])
                total += int(world.pool.sizes[tile, h, cell % WIDTH])
            got.approx[b, h, : len(rest)] = torch.tensor(rest, dtype=torch.int32)
            got.counts[b, h] = torch.tensor(
                [len(chosen), total, len(rest), 0, -(-tokens // align) * align], dtype=torch.int32
            )
    return got


def attend(
    world: World, selection: Selection, kind: str, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == "reference":
        logits, _, _ = reference.centroid_scores(world.query, world.pool, world.rows, world.scale)
        return reference.cluster_attention(*world.reading(selection, logits))
    w, tuning = world.to(dtype, DEVICE), TUNINGS[kind]
    selection = replace(selection, **{k: v.to(DEVICE) for k, v in vars(selection).items() if torch.is_tensor(v)})
    logits, _, _ = triton_impl.centroid_scores(w.query, w.pool, w.rows, w.scale, tuning=tuning)
    batch, _, heads, _ = w.query.shape
    kv_heads, value_dim = w.values.shape[1:]
    workspace = ClusterWorkspace.empty(
        batch, kv_heads, w.group, value_dim, w.rows.tiles.shape[1] * WIDTH, 700, DEVICE, tuning,
        align=selection.numbering.align,
    )  # fmt: skip
    out = torch.empty(batch, heads, value_dim, dtype=dtype, device=DEVICE)
    lse = torch.empty(batch, heads, device=DEVICE)
    for buffer in (out, lse, workspace.parts, workspace.part_lse):
        buffer.fill_(math.nan)
    for buffer in (workspace.slots, workspace.rotations, workspace.summaries):
        buffer.fill_(10**6)
    triton_impl.cluster_attention(*w.reading(selection, logits), out=(out, lse), workspace=workspace, tuning=tuning)
    return out.double().cpu(), lse.double().cpu()


def random_sets(world: World, seed: int, exact_share: float = 0.4) -> tuple[torch.Tensor, torch.Tensor]:
    """Disjoint random sets of non-empty clusters; rows differ much in how many they have."""
    gen = torch.Generator().manual_seed(seed)
    most = world.rows.tiles.shape[1]
    filled = world.pool.sizes[world.rows.tiles.long()].transpose(1, 2).flatten(2) > 0  # [batch, kv_heads, cells]
    filled &= (torch.arange(most * WIDTH) // WIDTH < world.rows.counts.unsqueeze(-1)).unsqueeze(1)
    draw = torch.rand(filled.shape, generator=gen)
    share = torch.tensor([exact_share, exact_share / 8]).view(1, -1, 1)
    return filled & (draw < share), filled & (draw > 0.6) & (draw >= share)


@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize(("group", "rotations"), [(1, 1), (4, 1), (4, 3)])
def test_scores(group: int, rotations: int, kind: str) -> None:
    world = make_world(group, rotations=rotations)
    cells = world.rows.tiles.shape[1] * WIDTH
    if kind == "reference":
        logits, sizes, starts = reference.centroid_scores(world.query, world.pool, world.rows, world.scale)
        tolerance = TOLERANCE[torch.float64]
        assert logits.dtype == torch.float64
    else:
        w = world.to(torch.float32, DEVICE)
        out = (
            torch.full((3, 2, group, cells), math.nan, device=DEVICE),
            torch.full((3, 2, cells), -7, dtype=torch.int32, device=DEVICE),
            torch.full((3, 2, cells), -7, dtype=torch.int32, device=DEVICE),
        )
        got = triton_impl.centroid_scores(w.query, w.pool, w.rows, w.scale, out=out, tuning=TUNING)
        logits, sizes, starts = (x.cpu() for x in got)
        tolerance = TOLERANCE[torch.float32]
    for b in range(3):
        n = int(world.rows.counts[b]) * WIDTH
        for h in range(2):
            want = [[expected_logit(world, b, h, g, cell) for cell in range(n)] for g in range(group)]
            want_logits = torch.tensor(want, dtype=torch.float64).view(group, n)
            torch.testing.assert_close(logits[b, h, :, :n].double(), want_logits, rtol=0, atol=tolerance)
            tiles = world.rows.tiles[b, : int(world.rows.counts[b])].long()
            assert torch.equal(sizes[b, h, :n], world.pool.sizes[tiles, h].flatten())
            assert torch.equal(starts[b, h, :n], world.pool.starts[tiles, h].flatten())
        if kind == "triton":
            assert logits[b, ..., n:].isnan().all()  # what lies behind the count is not touched


@pytest.mark.parametrize("query", [torch.float32, torch.float16], ids=str)
def test_scores_of_float8(query: torch.dtype) -> None:
    """Centroids of eight bits count as what they are; what has no such number becomes the largest."""
    world = make_world(dim=32)
    world.pool.centroids[0, 0, 0, :3] = torch.tensor([1e4, -1e4, 3e-4], dtype=torch.float64)
    few = narrowed(world.pool.centroids, FLOAT8)
    assert few[0, 0, 0, :3].float().tolist() == [448, -448, 0]
    w = world.to(query, DEVICE)
    pool = replace(w.pool, centroids=few.to(DEVICE))
    got, _, _ = triton_impl.centroid_scores(w.query, pool, w.rows, w.scale, tuning=TUNINGS["triton"])
    small, exact = (replace(world.pool, centroids=x) for x in (few, few.double()))
    want, again = (reference.centroid_scores(world.query, p, world.rows, world.scale)[0] for p in (exact, small))
    assert torch.equal(want, again)
    for b, count in enumerate(world.rows.counts.tolist()):
        cells = slice(count * WIDTH)
        # Sums of 32 products; half precision is exact in each.
        torch.testing.assert_close(got[b, ..., cells].cpu(), want[b, ..., cells].float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["reference", "triton", "level"])
@pytest.mark.parametrize(("group", "rotations"), [(1, 1), (4, 1), (3, 4)])
def test_exact_tokens_and_summaries(group: int, rotations: int, kind: str) -> None:
    world = make_world(group, rotations=rotations, seed=group)
    exact, approx = random_sets(world, seed=group)
    assert exact.any() and approx.any()
    want, want_lse = expected(world, exact, approx)
    got, lse = attend(world, lists(world, exact, approx), kind)
    tolerance = TOLERANCE[torch.float64 if kind == "reference" else torch.float32]
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=tolerance)


def test_half_precision() -> None:
    """Inputs are half precision numbers already, so only weights and sums are rounded."""
    world = make_world()
    halves = replace(
        world.pool, centroids=world.pool.centroids.to(HALF).double(), values=world.pool.values.to(HALF).double()
    )
    rounded = replace(world, pool=halves)
    exact, approx = random_sets(world, seed=3)
    want, want_lse = expected(rounded, exact, approx)
    got, lse = attend(rounded, lists(world, exact, approx), "triton", HALF)
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[HALF])
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=TOLERANCE[HALF])


@pytest.mark.parametrize("programs", [1, 3, 60], ids=str)
def test_any_number_of_programs(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program does all rows; with more programs than tiles, some have nothing."""
    monkeypatch.setitem(TUNINGS, "level", replace(TUNINGS["level"], programs=programs))
    world = make_world(group=2)
    exact, approx = random_sets(world, seed=11, exact_share=0.9)
    want, want_lse = expected(world, exact, approx)
    got, lse = attend(world, lists(world, exact, approx), "level")
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[torch.float32])
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=TOLERANCE[torch.float32])


@pytest.mark.parametrize("kind", ["reference", "triton", "level"])
def test_a_row_that_sees_nothing(kind: str) -> None:
    world = make_world(group=2)
    world.dense.counts[1:] = 0
    world.rows.counts[2] = 0
    world.dense.slots[0] = -1  # and one whose dense tokens are all skipped
    nothing = torch.zeros(3, 2, 4 * WIDTH, dtype=torch.bool)
    approx = nothing.clone()
    approx[1, 0, 3] = True  # one head of one request sees one summary
    got, lse = attend(world, lists(world, nothing, approx), kind)
    seen = torch.zeros(3, 4, dtype=torch.bool)
    seen[1, :2] = True
    assert torch.equal(lse.isfinite(), seen) and (lse[~seen] == -math.inf).all()
    assert not got[~seen].any()
    torch.testing.assert_close(got[1, 0], world.pool.values[2, 0, 3], rtol=0, atol=1e-6)


def test_without_room_for_clusters() -> None:
    """Dense tokens alone, and not one cluster tile in the buffers."""
    world = make_world(group=2, seed=3)
    world = replace(world, rows=ClusterRows(world.rows.tiles[:, :0], torch.zeros_like(world.rows.counts)))
    none = torch.zeros(3, 2, 0, dtype=torch.bool)
    want, _ = expected(world, none, none)
    w, tuning = world.to(torch.float32, DEVICE), TUNINGS["triton"]
    logits, sizes, starts = triton_impl.centroid_scores(w.query, w.pool, w.rows, w.scale, tuning=tuning)
    p = torch.ones(3, 2, device=DEVICE)
    chosen = top_p.select(logits, SearchedClusters(sizes, starts, w.rows.counts), p, tuning=SEPARATE)
    got, _ = triton_impl.cluster_attention(*w.reading(chosen, logits), tuning=tuning)
    torch.testing.assert_close(got.double().cpu(), want, rtol=0, atol=TOLERANCE[torch.float32])


@pytest.mark.parametrize("rotations", [1, 2])
@pytest.mark.parametrize("rule", ["union", "mean"])
def test_p1_equals_p2_equals_1_is_dense(rule: str, rotations: int) -> None:
    """Scores, selection and attention together: all clusters are exact, so the result is softmax attention."""
    world = make_world(group=2, rotations=rotations, seed=9)
    filled, none = random_sets(world, seed=0, exact_share=16.0)
    assert not none[0].any()
    want, want_lse = expected(world, filled, none & False)
    w = world.to(torch.float32, DEVICE)
    p = torch.ones(3, 2, device=DEVICE)
    cells = w.rows.counts * WIDTH
    tuning = TUNINGS["triton"]
    logits, sizes, starts = triton_impl.centroid_scores(w.query, w.pool, w.rows, w.scale, tuning=tuning)
    clusters, numbers = SearchedClusters(sizes, starts, cells), numbering(world)
    chosen = top_p.select(logits, clusters, p, rule=SetRule(rule), numbering=numbers, tuning=SEPARATE)
    got, lse = triton_impl.cluster_attention(*w.reading(chosen, logits), tuning=tuning)
    torch.testing.assert_close(got.double().cpu(), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double().cpu(), want_lse, rtol=0, atol=1e-5)


def cut_world(world: World) -> World:
    """Where the second request has a piece of its second tile only: whole clusters, beginnings and ends of others."""
    tile = int(world.rows.tiles[1, 1])
    sizes, starts = world.pool.sizes.clone(), world.pool.starts.clone()
    lost = sizes[tile] // 3 * (torch.arange(WIDTH) % 3)  # of every third cluster nothing, or up to two thirds
    late = torch.arange(WIDTH) % 2
    sizes[4] = torch.where(lost > 0, lost - sizes[tile], sizes[tile])
    starts[4] = starts[tile] + lost * late
    sized = world.rows.tiles.clone()
    sized[1, 1] = 4
    pool = replace(world.pool, sizes=sizes, starts=starts)
    return replace(world, pool=pool, rows=replace(world.rows, sized=sized))


def test_cut_clusters_are_read_token_by_token() -> None:
    """All clusters of the piece left out: its cut ones remain, as tokens."""
    world = cut_world(make_world(group=2, seed=4))
    none = torch.zeros(3, 2)
    logits, sizes, starts = reference.centroid_scores(world.query, world.pool, world.rows, world.scale)
    chosen = select_by_sorting(logits, SearchedClusters(sizes, starts, world.rows.counts * WIDTH), none)
    got, _ = reference.cluster_attention(*world.reading(chosen, logits))
    own = world.dense.slots[1, : int(world.dense.counts[1])]
    for head in range(4):
        slots = own[own >= 0].tolist()
        for cluster in range(WIDTH):
            size, begin = int(world.pool.sizes[4, head // 2, cluster]), int(world.pool.starts[4, head // 2, cluster])
            slots += world.pool.members[head // 2, begin : begin - size].tolist() if size < 0 else []
        keys, values = world.keys[slots, head // 2], world.values[slots, head // 2]
        weights = torch.softmax(keys @ world.query[1, 0, head] * world.scale, 0)
        torch.testing.assert_close(got[1, head], weights @ values, rtol=0, atol=TOLERANCE[torch.float64])


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("rule", ["union", "mean"])
def test_the_whole_step_equals_the_reference(rule: str, cut: bool) -> None:
    world = make_world(group=3, seed=21)
    world = cut_world(world) if cut else world
    w = world.to(torch.float32, DEVICE)
    p = torch.tensor([[0.9, 0.5], [0.95, 0.7], [0.5, 0.5]])
    cells = world.rows.counts * WIDTH
    logits, sizes, starts = reference.centroid_scores(world.query, world.pool, world.rows, world.scale)
    chosen = select_by_sorting(logits, SearchedClusters(sizes, starts, cells), p, rule=SetRule(rule))
    assert chosen.counts[:2, :, [0, 2]].min() > 0  # both kinds in every row that has clusters
    want, _ = reference.cluster_attention(*world.reading(chosen, logits))
    logits, sizes, starts = triton_impl.centroid_scores(w.query, w.pool, w.rows, w.scale)
    clusters = SearchedClusters(sizes, starts, cells.to(DEVICE))
    fast = top_p.select(logits, clusters, p.to(DEVICE), rule=SetRule(rule), tuning=SEPARATE)
    got, _ = triton_impl.cluster_attention(*w.reading(fast, logits), tuning=TUNINGS["level"])
    torch.testing.assert_close(got.double().cpu(), want, rtol=0, atol=TOLERANCE[torch.float32])


def test_from_keys_to_output() -> None:
    """k-means, pool, scores, selection and attention on planted clusters, against softmax attention over all tokens."""
    gen = torch.Generator().manual_seed(2)
    planted, each, dim, kv_heads = 14, 11, 16, 2
    n = planted * each
    truth = torch.arange(n) // each
    slots = torch.randperm(300, generator=gen)[:n].int()
    keys, values = torch.full((300, kv_heads, dim), math.nan), torch.full((300, kv_heads, dim), math.nan)
    directions = torch.eye(dim)[:planted] * 8
    keys[slots.long()] = directions[truth].unsqueeze(1) + torch.randn(n, kv_heads, dim, generator=gen) * 0.2
    values[slots.long()] = torch.randn(n, kv_heads, dim, generator=gen)
    plan = ClusterPlan((88, 66), cluster=11, width=WIDTH)
    keys, values, slots = keys.to(DEVICE), values.to(DEVICE), slots.to(DEVICE)
    pool = ClusterPool.empty(6, kv_heads, dim, dim, 500, torch.float32, DEVICE, WIDTH)
    for buffer in (pool.centroids, pool.values):
        buffer.fill_(math.nan)
    places = torch.tensor([4, 1], device=DEVICE)
    pool.write(places, 77, kmeans(keys, values, slots, plan, iterations=2), slots)
    query = torch.stack([directions[3], directions[9], directions[0] + directions[12], directions[3] * 0.9])
    query = query.view(1, 1, 4, dim).to(DEVICE)
    rows = ClusterRows(places.int().view(1, 2), torch.tensor([2], dtype=torch.int32, device=DEVICE))
    nothing = DenseTokens(
        torch.full((1, 1), -1, dtype=torch.int32, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    )
    logits, sizes, starts = triton_impl.centroid_scores(query, pool, rows, 0.25)
    p = torch.tensor([[0.99, 0.98]], device=DEVICE)
    chosen = top_p.select(logits, SearchedClusters(sizes, starts, rows.counts * WIDTH), p, tuning=SEPARATE)
    # Head 0 serves directions 3 and 9, head 1 directions 0, 12 and 3; the second segment's clusters are cells 16 on.
    assert chosen.exact[0, 0, :2].tolist() == [3, WIDTH + 1] and chosen.exact[0, 1, :3].tolist() == [0, 3, WIDTH + 4]
    assert chosen.counts[0, :, :4].tolist() == [[2, 22, 0, 14], [3, 33, 0, 14]]
    reads = ClusterReads(rows, nothing, chosen, logits)
    got, _ = triton_impl.cluster_attention(query, keys, values, pool, reads, 0.25, tuning=TUNINGS["level"])
    own = slots.long()
    x = torch.einsum("hgd,nhd->hgn", query.view(2, 2, dim), keys[own]) * 0.25
    dense = torch.einsum("hgn,nhd->hgd", torch.softmax(x, -1), values[own]).reshape(1, 4, dim)
    torch.testing.assert_close(got, dense, rtol=0, atol=1e-3)  # what is left out weighs 1e-5
    with pytest.raises(ValueError, match="expected as many places as tiles"):
        pool.write(places[:1], 0, kmeans(keys, values, slots, plan, iterations=1), slots)
    with pytest.raises(ValueError, match="and room for all"):
        pool.write(places, 400, kmeans(keys, values, slots, plan, iterations=1), slots)


def test_pages_by_their_bounds_in_the_same_kernels() -> None:
    """Quest: pages are clusters, bounds are centroids of twice the dimension, and the best six are read."""
    gen = torch.Generator().manual_seed(6)
    page, pages, dim, kv_heads = 4, 21, 12, 2
    n = page * pages
    keys, values = torch.randn(n, kv_heads, dim, generator=gen), torch.randn(n, kv_heads, dim, generator=gen)
    query = torch.randn(kv_heads, 1, dim, generator=gen)  # one head a group: then its best pages are the group's
    low, high = quest.page_bounds(keys.transpose(0, 1), page)
    pool = ClusterPool.empty(2, kv_heads, 2 * dim, dim, n, torch.float32, "cpu", WIDTH)
    pool.centroids.fill_(math.nan)
    pool.sizes.zero_()
    for number in range(pages):
        tile, inside = divmod(number, WIDTH)
        pool.centroids[tile, :, inside] = quest.as_centroids(low[:, number], high[:, number])
        pool.sizes[tile, :, inside], pool.starts[tile, :, inside] = page, number * page
    pool.members[:] = torch.arange(n)
    world = World(
        query.view(1, 1, kv_heads, dim), keys, values, pool,
        ClusterRows(torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)),
        DenseTokens(torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)), 0.3,
    ).to(torch.float32, DEVICE)  # fmt: skip
    asked = quest.as_query(world.query)
    logits, sizes, starts = triton_impl.centroid_scores(asked, world.pool, world.rows, world.scale)
    k = torch.tensor([[6.0, 6.0]], device=DEVICE)
    clusters = SearchedClusters(sizes, starts, world.rows.counts * WIDTH)
    chosen = top_p.select(logits, clusters, k, rule=SetRule(by_count=True), tuning=SEPARATE)
    got, _ = triton_impl.cluster_attention(*world.reading(chosen, logits), tuning=TUNINGS["level"])
    want = torch.zeros(kv_heads, dim)
    for h in range(kv_heads):
        q = query[h, 0]
        bounds = [torch.maximum(q * low[h, i], q * high[h, i]).sum().item() for i in range(pages)]
        best = sorted(range(pages), key=lambda i, bounds=bounds: -bounds[i])[:6]
        read = [i * page + j for i in best for j in range(page)]
        want[h] = torch.softmax(keys[read, h] @ q * 0.3, 0) @ values[read, h]
    assert chosen.counts[0, :, :4].tolist() == [[6, 24, 0, 21]] * 2
    torch.testing.assert_close(got[0].cpu(), want, rtol=0, atol=TOLERANCE[torch.float32])


def test_refusals() -> None:
    world = make_world().to(torch.float32, DEVICE)
    for module in (reference, triton_impl):
        with pytest.raises(ValueError, match="expected \\[batch, rotations, heads, head_dim\\]"):
            module.centroid_scores(world.query[:, 0], world.pool, world.rows, 1.0)
        with pytest.raises(ValueError, match="7 query heads over 2 key-value heads"):
            module.centroid_scores(world.query[:, :, :7], world.pool, world.rows, 1.0)
        with pytest.raises(ValueError, match="2 rotations of the query but none named"):
            module.centroid_scores(world.query.expand(-1, 2, -1, -1), world.pool, world.rows, 1.0)
        with pytest.raises(ValueError, match="clusters of 3 requests for 2 queries"):
            module.centroid_scores(world.query[:2], world.pool, world.rows, 1.0)
        with pytest.raises(ValueError, match="query head_dim 18, centroids' 20"):
            module.centroid_scores(world.query[..., :18].contiguous(), world.pool, world.rows, 1.0)
    with pytest.raises(ValueError, match="expected contiguous tensors of one dtype"):
        triton_impl.centroid_scores(world.query.bfloat16(), world.pool, world.rows, 1.0)
    nothing = torch.zeros(3, 2, 4 * WIDTH, dtype=torch.bool)
    logits, _, _ = triton_impl.centroid_scores(world.query, world.pool, world.rows, 1.0)
    world = replace(world, scale=1.0)
    none = lists(world, nothing, nothing)
    small = ClusterWorkspace.empty(3, 2, 4, 24, 4 * WIDTH, 600, DEVICE, TUNINGS["triton"])
    with pytest.raises(ValueError, match="make it for this tuning"):
        triton_impl.cluster_attention(*world.reading(none, logits), workspace=small)
    with pytest.raises(ValueError, match="expected contiguous float32"):
        triton_impl.cluster_attention(*world.reading(none, logits.double()))
    expanded = replace(none, expanded=True)
    with pytest.raises(ValueError, match="expected the workspace that was filled with it"):
        triton_impl.cluster_attention(*world.reading(expanded, logits))


COMPILE = """
import torch
from sglang_ext.kernels.cluster_attention import ClusterPool, ClusterReads, ClusterRows, DenseTokens
from sglang_ext.kernels.cluster_attention import buffers, triton_impl as attention
from sglang_ext.kernels.cluster_attention.types import aligned
from sglang_ext.kernels.kmeans import ClusterPlan, triton_impl as kmeans
from sglang_ext.kernels.rope import Rope, triton_impl as rope
from sglang_ext.kernels.top_p import Numbering, SearchedClusters, SetRule, triton_impl as top_p
from tests.kernels.sm90 import compiled, stand_in

stand_in(attention, "_scores", "_expand", "_attend", "_merge")
stand_in(top_p, "_search", "_compact")
stand_in(kmeans, "_measure", "_begin", "_assign", "_update")
stand_in(buffers, "_copy_slots", "_advance")
stand_in(rope, "_angle_tables", "_rotate")

def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)

half, batch, heads, dim = torch.bfloat16, 8, 8, 128
for rotated, group in ((False, "union"), (True, "mean")):
    query = torch.zeros(batch, 4 if rotated else 1, 4 * heads, dim, dtype=half)
    pool = ClusterPool.empty(2, heads, dim, dim, 32, half, "cpu")
    lists = (ints(batch, 64), ints(batch, 64)) if rotated else (None, None)
    rows = ClusterRows(ints(batch, 64), ints(batch), *lists)
    dense = DenseTokens(ints(batch, 1024), ints(batch), ints(batch, 16) if rotated else None)
    logits, sizes, starts = attention.centroid_scores(query, pool, rows, 0.1)
    numbering = Numbering(64, aligned(64)) if rotated else Numbering()
    clusters = SearchedClusters(sizes, starts, ints(batch))
    chosen = top_p.select(logits, clusters, torch.zeros(batch, 2), rule=SetRule(group), numbering=numbering)
    cache = torch.zeros(16, heads, dim, dtype=half)
    attention.cluster_attention(query, cache, cache, pool, ClusterReads(rows, dense, chosen, logits), 0.1)
cache = torch.zeros(8192, heads, dim, dtype=half)
kmeans.kmeans(cache, cache, ints(8192), ClusterPlan((8192,)), iterations=2)
table = Rope(torch.zeros(64))
rope.angle_tables(ints(12), table, torch.zeros(12, 64), torch.zeros(12, 64))
rope.rotate_queries(query[:3, 0], torch.zeros(12, 64), torch.zeros(12, 64), ints(3), table, query[:3])
longs = torch.zeros(8, dtype=torch.int64)
buffers._copy_slots[(1,)](longs, ints(64), ints(8, 64), BLOCK=buffers.COPY, num_warps=4)
buffers._advance[(1,)](longs, longs, *(ints(8) for _ in range(4)), ints(8, 64), 8, 64, BLOCK=128, num_warps=4)
assert len(compiled) == 14, compiled
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests compile the kernels and run them")
def test_compiles_for_hopper(tmp_path: Path) -> None:
    """What the interpreter takes, the compiler may not: all kernels, at the shapes of Llama-3.1-8B, without a GPU."""
    sm90.run(COMPILE, tmp_path)
