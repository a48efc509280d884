"""Baselines of `sglang-ext bench double_p` at equal recovered mass: budgets that are least, kernels that keep them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_ext.kernels.top_p import Selection
from sglang_ext.kernels.top_p import select as select_by_sorting
from sglang_ext.launch.bench import _double_p_baselines as baselines
from sglang_ext.launch.bench import _double_p_captured as captured
from sglang_ext.launch.bench import _double_p_pages as pages_of
from sglang_ext.launch.bench import _double_p_rows as rows_of
from sglang_ext.launch.bench import _double_p_step as steps
from sglang_ext.launch.bench import _double_p_texts as texts_of
from sglang_ext.launch.bench._record import Timing
from sglang_ext.policies import double_p, quest, twilight
from sglang_ext.policies import retroinfer as policy
from sglang_ext.policies.double_p import DoubleP
from sglang_ext.policies.quest import Quest
from sglang_ext.policies.twilight import Twilight

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTH, BATCH, SHORT = 512, 2, 256
CONFIG = DoubleP(segment=256, window=32)


@pytest.fixture(scope="module")
def texts() -> list[texts_of.Text]:
    return texts_of.capture(DEVICE, 1, LENGTH)


@pytest.fixture(scope="module")
def rows(texts: list[texts_of.Text]) -> captured.Captured:
    return captured.Captured(LENGTH, BATCH, texts, CONFIG, DEVICE, dtype=torch.float16)


@pytest.fixture(scope="module")
def short() -> list[texts_of.Text]:
    """For what takes many steps."""
    return texts_of.capture(DEVICE, 1, SHORT)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selection by sorting, for what takes many steps: a threshold search takes seconds in Triton's interpreter."""

    def select(
        *arguments: Any, out: Selection, workspace: Any, tuning: Any, expansion: Any = None, **options: Any
    ) -> Selection:
        found = select_by_sorting(*arguments, **options)
        for name, tensor in vars(out).items():
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(getattr(found, name))
        return out

    monkeypatch.setattr(pages_of.dispatch, "select", select)


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
    step = baselines.RetroInferStep(rows, BATCH, rows_of.layers(rows, BATCH))
    step.keep_clusters(12)
    step.check()
    mass, read = [], []
    for row in range(BATCH):
        tiles = slice(row * rows.tiles, (row + 1) * rows.tiles)
        centroids = rows.pool.centroids[tiles].transpose(0, 1).flatten(1, 2).float()
        sizes = rows.pool.sizes[tiles].transpose(0, 1).flatten(1)
        query = rows.queries()[row].float().view(8, 4, 64)
        share = double_p.distribution(double_p.estimated_log_mass(query, centroids, sizes))
        shares = 12 / step.clusters
        exact, approx = policy.select(share, policy.RetroInfer(0.072 * shares, shares - 0.072 * shares))
        assert exact.sum(-1).tolist() == [1] * 8 and approx.sum(-1).tolist() == [11] * 8
        x = rows_of.true_logits(rows, rows.queries(), row)
        dense = torch.cat([x[..., : rows.begin], x[..., rows.end :]], -1)
        middle = x[..., rows.begin : rows.end]
        mass.append(double_p.recovered_mass(middle, rows.labels[row].long(), exact | approx, dense).flatten())
        read.append(double_p.recovered_mass(middle, rows.labels[row].long(), exact, dense).flatten())
    selection, _ = step.buffers.chosen(BATCH)
    assert selection.counts[..., 0].unique().tolist() == [1] and selection.counts[..., 2].unique().tolist() == [11]
    wanted = torch.cat(mass)
    found = step.shares(BATCH)
    assert found["recovered_p5"] == pytest.approx(float(wanted.quantile(0.05)), abs=2e-3)
    assert found["recovered_least"] == pytest.approx(float(wanted.min()), abs=2e-3)
    assert found["read_p5"] == pytest.approx(float(torch.cat(read).quantile(0.05)), abs=2e-3)
    assert found["read_p5"] < found["recovered_p5"] - 0.01


@pytest.mark.usefixtures("quick")
def test_retroinfer_at_equal_mass(short: list[texts_of.Text]) -> None:
    rows = captured.Captured(SHORT, 1, short, CONFIG, DEVICE, dtype=torch.float16)
    copies = rows_of.layers(rows, 1)
    target = steps.ClusterBenchStep(rows, 1, copies).shares()["recovered_p5"]
    timed, step = baselines.retroinfer(rows, 1, copies, target)
    assert isinstance(step, baselines.RetroInferStep)
    assert timed.shares["recovered_p5"] >= target
    kept = round(timed.notes["clusters_kept"] * step.clusters)
    step.keep_clusters(kept - 1)
    assert step.shares()["recovered_p5"] < target, "one cluster less would do"
    with pytest.raises(ValueError, match=r"less than 1\.1"):
        baselines.retroinfer(rows, 1, copies, 1.1)


def test_rows_of_the_figures() -> None:
    shares = {"exact": 0.05, "approx": 0.3, "recovered": 0.97, "recovered_p5": 0.93, "read_p5": 0.7}
    ours = baselines.Timed("Double-P", Timing.of([0.1]), shares, {"p": [0.95, 0.7]})
    other = baselines.Timed("RetroInfer", Timing.of([0.14]), {**shares, "exact": 0.2}, {"clusters_kept": 0.4})
    dense, retro = baselines.figures_of(ours, ("dense FlashInfer", Timing.of([0.3])), [other], "keys")
    assert (dense.ratio, dense.aim) == (pytest.approx(3.0), "")
    assert (retro.ratio, retro.aim, retro.met) == (pytest.approx(1.4), "at least 1.3x", True)
    assert retro.baseline == "RetroInfer, 0.200 exact, 5th percentile 0.930 (0.700 exact)"
    assert retro.notes["RetroInfer"]["clusters_kept"] == 0.4


def test_pages_are_chosen_and_cut_as_the_policies_do(rows: captured.Captured) -> None:
    """Candidates and tokens of every row and head against Quest's and Twilight's own equations."""
    pages = pages_of.Pages.of(rows, 16)
    assert (pages.count, pages.tiles, pages.end) == ((LENGTH - 36) // 16, 1, 4 + 29 * 16)
    own = pages_of.paged(rows, BATCH, rows_of.layers(rows, BATCH), pages)
    step = pages_of.QuestTopP(rows, BATCH, own, pages, 8, 0.9)
    errors = step.check()
    assert set(errors) == {"page scores", "pages", "token scores", "places", "tokens", "output"}
    wrong = 0
    for row in range(BATCH):
        first = row * LENGTH
        keys = rows.keys[first + pages.begin : first + pages.end].transpose(0, 1).float()
        query = rows.queries()[row].float().view(8, 4, 64)
        config = Twilight(p=0.9, candidates=Quest(budget=8 / 29))
        wanted = twilight.select(query, keys, config)
        found = step.kept(row)
        assert found[:, : pages.begin].all() and found[:, pages.end :].all()
        wrong += int((found[:, pages.begin : pages.end] != wanted).sum())
        inside = quest.select(quest.page_scores(query, *quest.page_bounds(keys, 16)), keys.shape[1], config.candidates)
        assert not (found[:, pages.begin : pages.end] & ~inside).any(), "not of a candidate page"
        assert 8 < int(wanted.sum()) < 8 * 8 * 16
    assert wrong <= 0.01 * BATCH * 8 * 8 * 16  # 4-bit codes of ranges in half precision, products in half precision
    found = step.shares(BATCH)
    assert found["candidates"] == 8 / 29 and found["approx"] == 0
    assert 0 < found["exact"] < 8 / 29
    everything = pages_of.QuestTopP(rows, 1, own, pages, pages.count, 1.0)
    everything.check()
    assert everything.shares()["recovered_least"] == pytest.approx(1.0)
    for budget in (0, 30):
        with pytest.raises(ValueError, match=f"{budget} pages of 29"):
            pages_of.QuestTopP(rows, BATCH, own, pages, budget, 1.0)
    with pytest.raises(ValueError, match="expected a page of 500"):
        pages_of.Pages.of(rows, 500)


@pytest.mark.parametrize(
    ("name", "module", "broken"),
    [
        ("page scores", pages_of.attention, "centroid_scores"),
        ("token scores", pages_of.candidates, "token_scores"),
        ("tokens", pages_of.dispatch, "select"),
        ("output", pages_of.attention, "cluster_attention"),
    ],
)
def test_wrong_kernels_are_not_timed(
    rows: captured.Captured, monkeypatch: pytest.MonkeyPatch, name: str, module: Any, broken: str
) -> None:
    pages = pages_of.Pages.of(rows, 16)
    step = pages_of.QuestTopP(rows, 1, pages_of.paged(rows, 1, rows_of.layers(rows, 1), pages), pages, 8, 0.9)
    right = getattr(module, broken)

    def wrong(*args: Any, **options: Any) -> Any:
        if broken == "select":
            return right(*args[:-1], args[-1] * (1.0 if options["rule"].by_count else 0.7), **options)
        found = right(*args, **options)
        found[0][..., :3] += 0.5 * found[0][torch.isfinite(found[0])].abs().max()
        return found

    monkeypatch.setattr(module, broken, wrong)
    with pytest.raises(ValueError, match=f"the kernels' {name} are wrong"):
        step.check()


@pytest.mark.usefixtures("quick")
def test_quest_at_equal_mass(short: list[texts_of.Text], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = captured.Captured(SHORT, 1, short, CONFIG, DEVICE, dtype=torch.float16)
    monkeypatch.setattr(baselines, "SHARES", (0.3, 0.99))
    copies = rows_of.layers(rows, 1)
    target = steps.ClusterBenchStep(rows, 1, copies).shares(1)["recovered_p5"]
    timed, step = baselines.quest_top_p(rows, 1, copies, target)
    assert timed.shares["recovered_p5"] >= target and step.p == 0.99
    tried = timed.notes["tried"]
    assert tried[0] == {"p": 0.3} and tried[1]["candidates"] == step.budget / step.pages.count
    less = pages_of.QuestTopP(rows, 1, step.copies, step.pages, step.budget - 1, 0.99)
    assert less.shares(1)["recovered_p5"] < target, "one page less would do"
    assert timed.notes["recommended"]["candidates"] == 4 / 13
    with pytest.raises(ValueError, match=r"less than 1\.1"):
        baselines.quest_top_p(rows, 1, copies, 1.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.usefixtures("quick")
def test_all_of_it_without_a_gpu(short: list[texts_of.Text], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "SHARES", (1.0,))
    figures = baselines.measure(DEVICE, short, CONFIG, SHORT, 1, "captured keys")
    assert [figure.baseline.split(",")[0] for figure in figures] == ["dense PyTorch", "RetroInfer", "Quest+top-p"]


@pytest.mark.usefixtures("quick")
def test_baselines_of_three_heads_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2-135M's heads, of random numbers: all methods are checked against the references there too."""
    monkeypatch.setattr(baselines, "SHARES", (1.0,))
    dice = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(3, 3, SHORT, 64, generator=dice).bfloat16().to(DEVICE) for _ in range(2))
    queries = torch.randn(3, 9, texts_of.STEPS, 64, generator=dice).to(DEVICE)
    figures = baselines.measure(DEVICE, [texts_of.Text(keys, values, queries)], CONFIG, SHORT, 1, "drawn keys")
    assert all("drawn keys, batch 1" in figure.name for figure in figures)
    shares = figures[1].notes
    assert shares["RetroInfer"]["recovered_p5"] >= shares["double_p"]["recovered_p5"] - 1e-5
