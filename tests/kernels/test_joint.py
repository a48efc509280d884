"""Scores and selection in one kernel: against the plain scores, and against the selection kernel on what it scored.

On the GPU, or on this CPU (`on_host`). Buffers hold garbage before a call; centroids of empty clusters are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.cluster_attention import ClusterPool, ClusterRows, joint_impl, reference
from sglang_ext.kernels.cluster_attention.pool import FLOAT8, narrowed
from sglang_ext.kernels.top_p import Expansion, SearchedClusters, Selection, SetRule, cuda_impl
from tests.kernels import on_host

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NO_CUDA = cuda_impl.refusal(torch.device(DEVICE), 4, 100)
pytestmark = pytest.mark.skipif(NO_CUDA is not None and not on_host.STANDS_IN, reason=f"{NO_CUDA}; there is no g++")
SCALE = 0.09
GARBAGE = -(10**6)


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    with on_host.top_p():
        yield


@dataclass
class World:
    query: torch.Tensor
    pool: ClusterPool
    rows: ClusterRows
    cells: torch.Tensor
    p: torch.Tensor
    logits: torch.Tensor
    out: Selection
    expansion: Expansion

    def run(self, **options: Any) -> Selection:
        return joint_impl.score_and_select(
            self.query, self.pool, self.rows, self.cells, self.p, SCALE,
            logits=self.logits, out=self.out, expansion=self.expansion, **options,
        )  # fmt: skip


def world(
    counts: list[int], group: int = 4, dim: int = 128, width: int = 32, kv_heads: int = 2,
    dtype: torch.dtype = torch.bfloat16, sized: bool = True, seed: int = 0, float8: bool = False,
) -> World:  # fmt: skip
    """Requests of so many tiles; sizes from other tiles than the centroids where `sized`, some empty, some cut."""
    gen = torch.Generator().manual_seed(seed)
    batch, most, tiles = len(counts), max(counts) + 1, 7

    def ints(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=gen, dtype=torch.int32).to(DEVICE)

    def garbage(*shape: int) -> torch.Tensor:
        return torch.full(shape, GARBAGE, dtype=torch.int32, device=DEVICE)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen).to(dtype).to(DEVICE)

    sizes, centroids = ints(-4, 30, 2 * tiles, kv_heads, width), normal(tiles, kv_heads, width, dim)
    if not sized:
        centroids[sizes[:tiles] == 0] = math.nan
    if float8:
        centroids = narrowed(100 * centroids.float(), FLOAT8)
    pool = ClusterPool(
        centroids, normal(tiles, kv_heads, width, 8), sizes, ints(0, 900, 2 * tiles, kv_heads, width),
        ints(0, 2**31 - 1, kv_heads, 1000),
    )  # fmt: skip
    listed = ints(0, tiles, batch, most)
    rows = ClusterRows(listed, torch.tensor(counts, dtype=torch.int32, device=DEVICE))
    if sized:
        rows = replace(rows, sized=ints(0, 2 * tiles, batch, most))
    out = Selection.empty(batch, kv_heads, most * width, DEVICE)
    for buffer in (out.counts, out.exact, out.prefix, out.shift, out.approx):
        buffer.fill_(GARBAGE)
    return World(
        # More components between two requests than one has, as in a slice of a larger tensor.
        normal(batch, 2, kv_heads * group, dim)[:, :1], pool, rows, rows.counts * width,
        torch.tensor([[0.95, 0.7], [0.6, 0.2], [1.0, 0.99]], device=DEVICE)[:batch].contiguous(),
        torch.full((batch, kv_heads, group, most * width), math.nan, device=DEVICE), out,
        Expansion(pool.members, listed, width, garbage(batch * kv_heads, 30 * most * width),
                  garbage(batch * kv_heads, most * width)),
    )  # fmt: skip


def check(case: World, of_largest: bool = False, **options: Any) -> None:
    got = case.run(**options)
    assert got.expanded
    exact = replace(case.pool, centroids=case.pool.centroids.double())
    logits, sizes, starts = reference.centroid_scores(case.query.double(), exact, case.rows, SCALE)
    kept = 0
    for b, count in enumerate(case.cells.tolist()):
        # float32: sums of 128 products of 16 bits each, and the GPU's logarithm
        want = logits[b, ..., :count].float()
        most = float(want[want.isfinite()].abs().max()) if of_largest and count else 1.0
        torch.testing.assert_close(case.logits[b, ..., :count], want, rtol=1e-5, atol=1e-5 * max(1.0, most))
        assert case.logits[b, ..., count:].isnan().all()
        kept += count
    assert kept
    garbage = [torch.full_like(x, GARBAGE) for x in (case.expansion.slots, case.expansion.summaries)]
    expansion = replace(case.expansion, slots=garbage[0], summaries=garbage[1])
    clusters = SearchedClusters(sizes, starts, case.cells)
    want = cuda_impl.select(case.logits, clusters, case.p, expansion=expansion, **options)
    assert torch.equal(got.counts, want.counts) and got.counts[..., 0].any()
    for name, which in (("exact", 0), ("prefix", 0), ("shift", 0), ("approx", 2)):
        mine, theirs = getattr(got, name), getattr(want, name)
        for b in range(len(case.cells)):
            for h in range(mine.shape[1]):
                n = int(got.counts[b, h, which])
                assert torch.equal(mine[b, h, :n], theirs[b, h, :n]), name
    assert torch.equal(case.expansion.slots, expansion.slots)
    assert torch.equal(case.expansion.summaries, expansion.summaries)


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", joint_impl.DIMS)
def test_scores_and_sets(group: int, dim: int, dtype: torch.dtype) -> None:
    check(world([5, 0, 2], group=group, dim=dim, dtype=dtype, seed=group))


@pytest.mark.parametrize(("tiles", "width", "dim"), [(40, 16, 64), (70, 64, 128), (9, 256, 64)])
def test_widths_and_lengths(tiles: int, width: int, dim: int) -> None:
    check(world([tiles, tiles // 2], width=width, kv_heads=1, group=2, dim=dim, sized=False))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", joint_impl.DIMS)
@pytest.mark.parametrize("group", [1, 3, 8])
def test_centroids_of_float8(group: int, dim: int, dtype: torch.dtype) -> None:
    """Sums of hundreds: of numbers from the largest that there is to the least; a query beyond what float16 holds."""
    case = world([5, 0, 3], group=group, dim=dim, width=16, dtype=dtype, seed=group, float8=True)
    case.query[0] *= 0
    case.query[2] *= 1e-3 if dtype == torch.float16 else 3e5
    check(case, of_largest=True)


def test_numbers_of_clusters() -> None:
    case = world([6, 3], group=2, dim=64)
    case.p[:] = torch.tensor([[40.0, 7.0], [500.0, 3.0]])
    check(case, rule=SetRule(by_count=True))


@pytest.mark.parametrize("block", [0, 4, 7])
def test_blocks(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_impl, "block_for", lambda *_: cuda_impl.BLOCKS[block])
    check(world([9, 4], group=4, dim=64))


@pytest.mark.parametrize(("threads", "quads"), [(256, 10), (512, 8)])
def test_rows_that_take_different_code(threads: int, quads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 4, 8 and 10 groups of four clusters a thread; there is room for one tile more than the longest row has."""
    monkeypatch.setattr(cuda_impl, "block_for", lambda *_: cuda_impl.SearchBlock(threads, quads))
    check(world([threads * quads // 16 - 1, 20, 100], group=4, dim=64, width=64, kv_heads=1))


def test_rows_without_tiles_select_nothing() -> None:
    case = world([2, 1], dim=64, group=2)
    none = case.rows.tiles[:, :0].contiguous()
    rows = ClusterRows(none, torch.zeros_like(case.rows.counts))
    expansion = replace(case.expansion, tiles=none, summaries=case.expansion.summaries[:, :0])
    case = replace(case, rows=rows, cells=rows.counts, logits=case.logits[..., :0].contiguous(), expansion=expansion)
    assert (case.run().counts == 0).all()


def test_it_compiles_for_hopper() -> None:
    pytest.importorskip("cuda.core")
    for float8 in (False, True):
        assert joint_impl.compiled(nvrtc.HOPPER, 4, cuda_impl.SearchBlock(256, 10), 64, 128, True, float8).code


def test_refusals() -> None:
    case = world([2, 1], dim=64, group=2)
    for name, value, words in (
        ("query", case.query.float(), "query of torch.float32"),
        ("query", case.query.repeat(1, 2, 1, 1), "none named for the clusters"),
        ("logits", case.logits[..., 1:], "logits of shape"),
        ("p", case.p.double(), "p is torch.float64"),
        ("rows", replace(case.rows, sized=case.rows.tiles.long()), "rows.sized is torch.int64"),
        ("query", case.query.transpose(2, 3).contiguous().transpose(2, 3), "at multiples of 16"),
        ("query", case.query.half(), "centroids of torch.bfloat16"),
        ("expansion", replace(case.expansion, width=16), "clusters together"),
        ("expansion", replace(case.expansion, tiles=case.expansion.tiles.clone()), "over other tiles"),
    ):
        with pytest.raises(ValueError, match=words):
            replace(case, **{name: value}).run()
    with pytest.raises(ValueError, match="group='mean'"):
        case.run(rule=SetRule("mean"))
    rotated = replace(case.rows, rotation=torch.zeros_like(case.rows.tiles))
    with pytest.raises(ValueError, match="2 rotations"):
        replace(case, query=case.query.repeat(1, 2, 1, 1), rows=rotated).run()
    assert (case.out.counts == GARBAGE).all()
