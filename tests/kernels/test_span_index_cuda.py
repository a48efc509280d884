"""Spans in CUDA: as Triton's at the paper's sizes, what they refuse, and that they compile (see `test_span_index`)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.span_index import SpanRule, SpanWorkspace, cuda_impl
from sglang_ext.kernels.span_index import triton_impl as triton
from sglang_ext.kernels.span_index.cuda_impl import refusal
from tests.kernels import on_host
from tests.kernels.test_span_index import DEVICE, batch_of, cut, listed, tile_of


@pytest.fixture(autouse=True)
def launches() -> Iterator[None]:
    """Let the kernels in CUDA run, on this CPU where there is no GPU."""
    with on_host.cuda(cuda_impl):
        yield


@pytest.mark.parametrize("heads", [1, 5, 33])
@pytest.mark.parametrize("block, tokens", [(128, (128, 97)), (64, (64, 33))])
@on_host.needed
def test_cuda_cuts_as_triton_does(block: int, tokens: tuple[int, ...], heads: int) -> None:
    """The paper's sizes: thresholds to the bit, and numbers that are many times the same."""
    generator = np.random.default_rng(heads)
    given = [tile_of(heads, count, count) for count in tokens]
    given += [np.tril(generator.integers(0, 5, (heads, tokens[1], tokens[1])) / 8)]
    given[0][0] = np.tril(np.exp(generator.normal(-9, 3, given[0][0].shape)))
    tiles, rows = batch_of(given, block)
    rule = SpanRule(theta=0.77, spans=4, most=12, rate=0.5, ratio="rowcol")
    found = []
    for module in (cuda_impl, triton):
        workspace = SpanWorkspace(
            *(each.fill_(math.nan) for each in fields_of(SpanWorkspace.empty(3, heads, block, DEVICE)))
        )
        found.append((listed(module.cut_spans(tiles, rows, rule, workspace=workspace)), workspace))
    (one, sums), (other, wanted) = found
    assert one == other
    assert torch.equal(sums.thresholds, wanted.thresholds) and torch.equal(sums.summed, wanted.summed)


@on_host.needed
def test_many_spans_and_rows_out_of_range() -> None:
    """So many that each is ordered among others; fewer rows than none, and more than a tile has."""
    block = 32
    tiles, _ = batch_of([tile_of(3, block, seed) for seed in (0, 1, 2)], block)
    rows = torch.tensor([-3, block + 7, block], dtype=torch.int32, device=DEVICE)
    rule = SpanRule(theta=0.3, phi=0.95, spans=64, most=5, rate=0.5)
    found = cut(cuda_impl, tiles, rows, rule)
    assert listed(found) == listed(cut(triton, tiles, rows.clamp(0, block), rule))
    counts = [len(spans) for spans in listed(found)]
    assert counts[0] == 0 and max(counts) > 32, counts


def fields_of(workspace: SpanWorkspace) -> tuple[torch.Tensor, ...]:
    return workspace.thresholds, workspace.summed, workspace.scores


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("source", [cuda_impl.HEADS, cuda_impl.CUT])
def test_cuda_compiles_for_hopper(source: str, block: int) -> None:
    """Without a GPU, where NVRTC is installed."""
    pytest.importorskip("cuda.core")
    assert nvrtc.compiled(source, nvrtc.HOPPER, cuda_impl.constants(source, block)).code


def test_what_cuda_does_not_cut() -> None:
    tiles, gpu = torch.zeros(1, 2, 16, 16), torch.device("cuda")
    for says, given in (
        ("written in CUDA", (torch.device("meta"), tiles, SpanRule())),
        ("tiles are torch.float64", (gpu, tiles.double(), SpanRule())),
        ("the last dimension contiguous", (gpu, tiles.transpose(2, 3), SpanRule())),
        ("spans=65: expected at most 64", (gpu, tiles, SpanRule(spans=65))),
    ):
        assert says in (refusal(*given) or "")
