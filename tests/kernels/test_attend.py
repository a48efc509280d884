"""Attention and merge in one CUDA kernel, against the equations in float64: on the GPU, or on this CPU (`on_host`).

Slots that no list names are NaN in both caches, so are the values and logits of clusters that are not approximated;
lists end in slots that do not exist; outputs and parts hold NaN before a call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.cluster_attention import (
    ClusterPool,
    ClusterReads,
    ClusterRows,
    DenseTokens,
    attend_impl,
    reference,
)
from sglang_ext.kernels.cluster_attention.types import ClusterWorkspace
from sglang_ext.kernels.top_p import Selection
from tests.kernels import on_host, sm90

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NO_CUDA = "no GPU" if DEVICE == "cpu" else attend_impl._unusable(torch.cuda.current_device(), 128, 4, 8, True)
pytestmark = pytest.mark.skipif(NO_CUDA is not None and not on_host.STANDS_IN, reason=f"{NO_CUDA}; there is no g++")
SCALE, WIDTH, NOBODY = 0.13, 16, 10**6
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # beside outputs of order one; log-sum-exps are float32


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    with on_host.cuda(attend_impl):
        yield


@dataclass
class World:
    """Of each request so many (exact, approximated) clusters a head, about, and tokens outside the clusters."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    pool: ClusterPool
    rows: ClusterRows
    dense: DenseTokens
    selection: Selection
    logits: torch.Tensor
    workspace: ClusterWorkspace

    def run(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        batch, _, heads, dim = self.query.shape
        out = self.query.new_full((batch, heads, dim), math.nan)
        lse = torch.full((batch, heads), math.nan, device=DEVICE)
        given = self.query, self.keys, self.values, self.pool, self.reads, SCALE
        return attend_impl.cluster_attention(*given, out=(out, lse), workspace=self.workspace, **options)

    @property
    def reads(self) -> ClusterReads:
        return ClusterReads(self.rows, self.dense, self.selection, self.logits)


def world(
    chosen: list[tuple[int, int]], own: list[int], group: int = 4, dim: int = 128, kv_heads: int = 2,
    dtype: torch.dtype = torch.bfloat16, seed: int = 0,
) -> World:  # fmt: skip
    gen = torch.Generator().manual_seed(seed)
    batch, tiles = len(chosen), -(-max(sum(each) + 2 for each in chosen) // WIDTH)
    cells = tiles * WIDTH
    sizes = torch.randint(1, 30, (tiles, kv_heads, WIDTH), generator=gen, dtype=torch.int32)
    flat = sizes.transpose(0, 1).flatten(1)
    starts = (flat.cumsum(1) - flat).view(kv_heads, tiles, WIDTH).transpose(0, 1).int().contiguous()
    clustered, slots = int(flat.sum(1).max()), 4 * int(flat.sum(1).max()) + sum(own)
    free = torch.randperm(slots, generator=gen).int()
    members = torch.stack([free[torch.randperm(2 * clustered, generator=gen)[:clustered]] for _ in range(kv_heads)])
    listed = torch.stack([torch.randperm(tiles, generator=gen) for _ in range(batch)]).int()
    drawn = [torch.randn(*shape, dim, generator=gen) for shape in ((slots, kv_heads),) * 2]
    means = torch.randn(tiles, kv_heads, WIDTH, dim, generator=gen)
    logits = torch.full((batch, kv_heads, group, cells), math.nan)
    selection = Selection.empty(batch, kv_heads, cells, "cpu")
    workspace = ClusterWorkspace.empty(
        batch, kv_heads, group, dim, cells, 30 * cells, DEVICE, programs=attend_impl.PROGRAMS
    )
    read, averaged = (
        torch.zeros(slots, kv_heads, dtype=torch.bool),
        torch.zeros(tiles, kv_heads, WIDTH, dtype=torch.bool),
    )
    expanded, summaries = (torch.full(x.shape, NOBODY) for x in (workspace.slots, workspace.summaries))
    for b, (exact, approx) in enumerate(chosen):
        for h in range(kv_heads):
            few = h * exact // 2  # heads differ
            order = torch.randperm(cells, generator=gen)
            first, second = order[: exact - few].sort()[0].int(), order[exact : exact + approx].sort()[0].int()
            row, tile = b * kv_heads + h, listed[b].long()
            tokens = [
                members[h, starts[t, h, c] : starts[t, h, c] + sizes[t, h, c]]
                for t, c in ((tile[each // WIDTH], each % WIDTH) for each in first.tolist())
            ]
            some = torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int32)
            expanded[row, : len(some)] = some.long()
            read[some.long(), h] = True
            place = tile[second.long() // WIDTH]
            summaries[row, : len(second)] = (place * kv_heads + h) * WIDTH + second % WIDTH
            averaged[place, h, second.long() % WIDTH] = True
            selection.exact[b, h, : len(first)], selection.approx[b, h, : len(second)] = first, second
            selection.counts[b, h] = torch.tensor([len(first), len(some), len(second), 0, len(some)])
            logits[b, h, :, second.long()] = 4 * torch.randn(group, len(second), generator=gen)
    outside = torch.full((batch, max(own) + 3), NOBODY, dtype=torch.int32)
    for b, tokens in enumerate(own):
        outside[b, :tokens] = free[2 * clustered :][sum(own[:b]) : sum(own[: b + 1])]
        read[outside[b, :tokens].long()] = True
        outside[b, 1:tokens:5] = -1
    for cache in drawn:
        cache[~read] = math.nan
    means[~averaged] = math.nan
    workspace.slots.copy_(expanded), workspace.summaries.copy_(summaries)
    for buffer in (workspace.parts, workspace.part_lse):
        buffer.fill_(math.nan)
    pool = ClusterPool(torch.empty(tiles, kv_heads, WIDTH, dim), means, sizes, starts, members)
    moved = ClusterPool(*(x.to(DEVICE, dtype if x.is_floating_point() else x.dtype) for x in vars(pool).values()))
    ints = {name: x.to(DEVICE) for name, x in vars(selection).items() if torch.is_tensor(x)}
    return World(
        # More components between two requests than one has, as in a slice of a larger tensor.
        torch.randn(batch, 2, kv_heads * group, dim, generator=gen).to(dtype).to(DEVICE)[:, :1],
        *(cache.to(dtype).to(DEVICE) for cache in drawn), moved,
        ClusterRows(listed.to(DEVICE), torch.full((batch,), tiles, dtype=torch.int32, device=DEVICE)),
        DenseTokens(outside.to(DEVICE), torch.tensor(own, dtype=torch.int32, device=DEVICE)),
        replace(selection, expanded=True, **ints), logits.to(DEVICE), workspace,
    )  # fmt: skip


def check(case: World, **options: Any) -> None:
    w = case
    pool = replace(w.pool, centroids=w.pool.centroids.double(), values=w.pool.values.double())
    want, levels = reference.cluster_attention(
        w.query.double(), w.keys.double(), w.values.double(), pool, w.reads, SCALE
    )
    for _ in range(2):  # counters are zero again
        out, lse = case.run(**options)
        torch.testing.assert_close(out.double(), want, rtol=0, atol=TOLERANCE[w.query.dtype])
        # float32: sums of up to 128 products of 16 bits, and the GPU's exponentials
        torch.testing.assert_close(lse.double(), levels, rtol=0, atol=2e-4)
        assert not case.workspace.arrived.any()


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", attend_impl.DIMS)
def test_tokens_and_summaries(group: int, dim: int, dtype: torch.dtype) -> None:
    check(world([(9, 40), (3, 5), (0, 33)], [17, 80, 1], group=group, dim=dim, dtype=dtype, seed=group))


@pytest.mark.parametrize("blocks", [1, 2, 6])
@pytest.mark.parametrize("least", [1, 3, 1000])
def test_any_number_of_programs(blocks: int, least: int) -> None:
    """Runs shorter than a row, over several rows, and one over all."""
    tuning = attend_impl.AttendTuning(blocks=blocks, least=least)
    check(world([(20, 70), (0, 1), (1, 0), (2, 100)], [3, 16, 0, 65], dim=64, seed=blocks), tuning=tuning)


@pytest.mark.parametrize("stages", [1, 3])
def test_units_on_their_way(stages: int) -> None:
    tuning = attend_impl.AttendTuning(stages=stages, blocks=2)
    check(world([(12, 70)], [40], dim=64, kv_heads=3), tuning=tuning)


@pytest.mark.parametrize("own", [[0, 0], [0, 40], [2, 0]])
def test_rows_that_see_nothing(own: list[int]) -> None:
    """No cluster is chosen; of two tokens one is skipped."""
    case = world([(0, 0), (0, 0)], own, dim=64)
    check(case)
    out, lse = case.run()
    for b, tokens in enumerate(own):
        assert bool(out[b].any()) is bool(tokens) and bool(lse[b].isinf().all()) is not bool(tokens)


def test_many_rows() -> None:
    """More than a block has threads."""
    check(world([(1, 3)] * 23, [2] * 23, group=2, dim=64, kv_heads=3))


def test_as_many_blocks_as_there_is_room_for() -> None:
    case = world([(20, 70), (2, 100)], [3, 65], dim=64)
    few = {name: getattr(case.workspace, name)[:9] for name in ("parts", "part_lse")}
    check(replace(case, workspace=replace(case.workspace, **few)))


def test_a_row_in_many_parts() -> None:
    """More than are merged side by side, and more blocks than there is to merge for."""
    tuning = attend_impl.AttendTuning(least=1)
    check(world([(5, 30)], [2000], group=2, dim=64, kv_heads=1), tuning=tuning)
    check(world([(0, 0), (5, 30)], [700, 900], group=1, dim=64, kv_heads=1), tuning=tuning)


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = world([(2, 3)], [4], dim=64)
    with pytest.raises(ValueError, match="not expanded: expected one whose lists are in the workspace"):
        replace(case, selection=replace(case.selection, expanded=False)).run()
    with pytest.raises(ValueError, match=r"logits of shape \(1, 2, 4, 15\): expected \(1, 2, 4, 16\)"):
        replace(case, logits=case.logits[..., :-1]).run()
    with pytest.raises(ValueError, match=r"logits is torch\.float64"):
        replace(case, logits=case.logits.double()).run()
    with pytest.raises(ValueError, match=r"workspace of 2 parts: expected more than the 2 rows"):
        few = {name: getattr(case.workspace, name)[:2] for name in ("parts", "part_lse")}
        replace(case, workspace=replace(case.workspace, **few)).run()
    with pytest.raises(ValueError, match=r"workspace.part_lse of shape \(9, 4\): expected \(\d+, 4\)"):
        replace(case, workspace=replace(case.workspace, part_lse=case.workspace.part_lse[:9])).run()
    with pytest.raises(ValueError, match=r"keys of torch\.bfloat16, strides .*contiguous, in the query's type"):
        replace(case, keys=case.keys.transpose(0, 1).contiguous().transpose(0, 1)).run()
    with pytest.raises(ValueError, match=r"stages=3 of heads of 128: .* expected at most 49152"):
        attend_impl.AttendTuning(stages=3).constants(128, 4, 8, True)
    with pytest.raises(ValueError, match=r"query of torch\.float32: float16 or bfloat16; use triton_impl"):
        replace(case, query=case.query.float()).run()
    with pytest.raises(ValueError, match="groups of 9 heads: at most 8"):
        world([(2, 3)], [4], dim=64, group=9).run()


@pytest.mark.parametrize("dim", attend_impl.DIMS)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_compiles_for_hopper(dim: int, group: int, tmp_path: Path) -> None:
    """And as many blocks as it asks for have room on a multiprocessor: 228 KiB, one of them a block's own."""
    tuning = attend_impl.TUNING
    assert tuning.blocks * (tuning.memory(dim, group) + 1024) <= 228 << 10
    sm90.check_copies(attend_impl.compiled(nvrtc.HOPPER, dim, group, 8).code, tmp_path)
