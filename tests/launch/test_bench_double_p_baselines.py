"""Baselines of `sglang-ext bench double_p` at equal recovered mass: budgets that are least, kernels that keep them."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.launch.bench import _double_p_baselines as baselines
from sglang_ext.launch.bench import _double_p_captured as captured
from sglang_ext.launch.bench import _double_p_kernels as kernels
from sglang_ext.launch.bench._record import Timing
from sglang_ext.policies import double_p
from sglang_ext.policies import retroinfer as policy
from sglang_ext.policies.double_p import DoubleP

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTH, BATCH = 512, 2
CONFIG = DoubleP(segment=256, window=32)


@pytest.fixture(scope="module")
def texts() -> list[captured.Text]:
    return captured.capture(DEVICE, 1, LENGTH)


@pytest.fixture(scope="module")
def rows(texts: list[captured.Text]) -> captured.Captured:
    return captured.Captured(LENGTH, BATCH, texts, CONFIG, DEVICE, dtype=torch.float16)


@pytest.mark.parametrize("threshold", [1, 2, 7, 12, 13])
def test_the_least_that_reaches(threshold: int) -> None:
    asked: list[int] = []

    def reaches(number: int) -> bool:
        asked.append(number)
        return number >= threshold

    assert baselines.least(reaches, 13) == threshold
    assert len(asked) <= 5 and min(asked) >= 1
    assert baselines.least(lambda number: number > 13, 13) is None
    assert baselines.least(lambda number: True, 0) is None


def test_retroinfer_keeps_what_the_policy_keeps(rows: captured.Captured) -> None:
    """Numbers of clusters, and recovered mass of all rows, against sorted mean shares."""
    step = baselines.RetroInferStep(rows, BATCH, kernels.layers(rows, BATCH))
    step.keep_clusters(12)
    step.check()
    mass = []
    for row in range(BATCH):
        tiles = slice(row * rows.tiles, (row + 1) * rows.tiles)
        centroids = rows.pool.centroids[tiles].transpose(0, 1).flatten(1, 2).float()
        sizes = rows.pool.sizes[tiles].transpose(0, 1).flatten(1)
        query = rows.queries()[row].float().view(8, 4, 64)
        share = double_p.distribution(double_p.estimated_log_mass(query, centroids, sizes))
        shares = 12 / step.clusters
        exact, approx = policy.select(share, policy.RetroInfer(0.072 * shares, shares - 0.072 * shares))
        assert exact.sum(-1).tolist() == [1] * 8 and approx.sum(-1).tolist() == [11] * 8
        x = kernels.true_logits(rows, rows.queries(), row)
        dense = torch.cat([x[..., : rows.begin], x[..., rows.end :]], -1)
        middle = x[..., rows.begin : rows.end]
        mass.append(double_p.recovered_mass(middle, rows.labels[row].long(), exact | approx, dense).flatten())
    selection, _ = step.buffers.chosen(BATCH)
    assert selection.counts[..., 0].unique().tolist() == [1] and selection.counts[..., 2].unique().tolist() == [11]
    wanted = torch.cat(mass)
    found = step.shares(BATCH)
    assert found["recovered_p5"] == pytest.approx(float(wanted.quantile(0.05)), abs=2e-3)
    assert found["recovered_least"] == pytest.approx(float(wanted.min()), abs=2e-3)


def test_retroinfer_at_equal_mass(rows: captured.Captured) -> None:
    copies = kernels.layers(rows, BATCH)
    target = kernels.Step(rows, BATCH, copies).shares(BATCH)["recovered_p5"]
    timed, step = baselines.retroinfer(rows, BATCH, copies, target)
    assert isinstance(step, baselines.RetroInferStep)
    assert timed.shares["recovered_p5"] >= target
    kept = round(timed.notes["clusters_kept"] * step.clusters)
    step.keep_clusters(kept - 1)
    assert step.shares(BATCH)["recovered_p5"] < target, "one cluster less would do"
    with pytest.raises(ValueError, match=r"less than 1\.1"):
        baselines.retroinfer(rows, BATCH, copies, 1.1)


def test_rows_of_the_figures() -> None:
    shares = {"exact": 0.05, "approx": 0.3, "recovered": 0.97, "recovered_p5": 0.93}
    ours = baselines.Timed("Double-P", Timing.of([0.1]), shares, {"p": [0.95, 0.7]})
    other = baselines.Timed("RetroInfer", Timing.of([0.14]), {**shares, "exact": 0.2}, {"clusters_kept": 0.4})
    dense, retro = baselines.figures_of(ours, ("dense FlashInfer", Timing.of([0.3])), [other], "keys")
    assert (dense.ratio, dense.aim) == (pytest.approx(3.0), "")
    assert (retro.ratio, retro.aim, retro.met) == (pytest.approx(1.4), "at least 1.3x", True)
    assert retro.baseline == "RetroInfer, 0.200 exact, 5th percentile 0.930"
    assert retro.notes["RetroInfer"]["clusters_kept"] == 0.4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_all_of_it_without_a_gpu(texts: list[captured.Text]) -> None:
    figures = baselines.measure(DEVICE, texts, CONFIG, LENGTH, 1)
    assert [figure.baseline.split(",")[0] for figure in figures] == ["dense PyTorch", "RetroInfer"]
