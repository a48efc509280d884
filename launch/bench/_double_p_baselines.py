"""Double-P's attention and its baselines, in the same kernels, where they recover as much of the true attention.

Recovered is what is read, exactly or by centroid; `read_p5` is what is read exactly, which no budget is set by: fixed
budgets of RetroInfer's proportions may recover as much with far fewer exact tokens, and the rows say so.

A baseline's budget is the least one with which the 5th percentile of the recovered attention, over the query heads of
all rows, is at least Double-P's; of Quest with top-p, which has two knobs, the fastest of a few pairs counts. Keys are
captured from the reference model's trained heads; all times are of one run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from sglang_ext.kernels.top_p import SetRule
from sglang_ext.launch.bench._double_p_captured import Captured
from sglang_ext.launch.bench._double_p_pages import Pages, QuestTopP, paged
from sglang_ext.launch.bench._double_p_rows import ClusteredLayer, cluster_on, layers
from sglang_ext.launch.bench._double_p_step import ClusterBenchStep, DenseStep
from sglang_ext.launch.bench._double_p_texts import Text
from sglang_ext.launch.bench._gpu import time_turns
from sglang_ext.launch.bench._record import Figure, Timing, at_least, thousands
from sglang_ext.policies.double_p import DoubleP
from sglang_ext.policies.retroinfer import RetroInfer
from sglang_ext.policies.twilight import Twilight
from sglang_ext.types import JsonObject

AIMS = {"RetroInfer": 1.3, "Quest+top-p": 1.5}
"""How many times faster than each Double-P is to be."""


SHARES = (0.85, 0.9, 0.93, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0)
"""Quest with top-p: the p that are tried, each with the least budget of pages that will do."""

ROUNDING = 1e-6
"""Of a mass that sums up to 1."""


def least(reaches: Callable[[int], bool], most: int) -> int | None:
    """The least of 1 .. most that reaches, by halving; None where not even `most` does.

    Args:
        reaches: true from some number on.
        most: the largest number.
    """
    if most < 1 or not reaches(most):
        return None
    low, high = 0, most  # high reaches, low does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


class RetroInferStep(ClusterBenchStep):
    """RetroInfer: the first clusters by the mean share of a group, in the shares of exact ones that its authors have.

    The clusters, and all kernels, are Double-P's.
    """

    def __init__(self, rows: Captured, batch: int, copies: Sequence[ClusteredLayer]) -> None:
        super().__init__(rows, batch, copies, rule=SetRule("mean", by_count=True))
        self.clusters = sum(rows.plan.clusters)
        recommended = RetroInfer()
        self.share = recommended.exact + recommended.approx
        self._exact = recommended.exact / self.share
        self.keep_clusters(recommended.budgets(self.clusters)[0])

    def keep_clusters(self, count: int) -> None:
        """Keep so many clusters of each row and head, exact ones among them."""
        kept = count / self.clusters
        exact = kept * self._exact
        budget = RetroInfer(exact=exact, approx=kept - exact)
        self.keep(*(float(n) for n in budget.budgets(self.clusters)))


@dataclass(frozen=True)
class Timed:
    """One method on the captured rows.

    Attributes:
        name: which.
        timing: seconds a layer.
        shares: from `ClusterBenchStep.shares`, of all rows.
        notes: its budget, errors against the references, seconds by stage.
    """

    name: str
    timing: Timing
    shares: dict[str, float]
    notes: JsonObject = field(default_factory=dict)

    @property
    def words(self) -> str:
        s = self.shares
        return f"{self.name}, {s['exact']:.3f} exact, 5th percentile {s['recovered_p5']:.3f} ({s['read_p5']:.3f} exact)"


def _timed(name: str, step: ClusterBenchStep | QuestTopP, notes: JsonObject) -> Timed:
    errors, shares = step.check(), step.shares(step.batch)
    timing = time_turns(step.run, len(step.copies), step.planted.device)
    return Timed(name, timing, shares, {**notes, "errors": errors})


def retroinfer(
    rows: Captured, batch: int, copies: Sequence[ClusteredLayer], target: float
) -> tuple[Timed, ClusterBenchStep]:
    """RetroInfer with the least budget that reaches the target."""
    step = RetroInferStep(rows, batch, copies)

    def reaches(count: int) -> bool:
        step.keep_clusters(count)
        return step.shares(batch)["recovered_p5"] >= target

    count = least(reaches, step.clusters)
    if count is None:
        raise ValueError(f"RetroInfer recovers less than {target} with all clusters: its kernels are wrong")
    share = count / step.clusters
    step.keep_clusters(round(step.share * step.clusters))
    recommended = _brief(_timed("", step, {}))
    step.keep_clusters(count)
    notes = {"clusters_kept": share, "times_recommended": share / step.share, "recommended": recommended}
    return _timed("RetroInfer", step, notes), step


def quest_top_p(rows: Captured, batch: int, copies: Sequence[ClusteredLayer], target: float) -> tuple[Timed, QuestTopP]:
    """Quest with token top-p inside its candidates: the fastest of `SHARES` that reaches the target."""
    twilight = Twilight(p=rows.config.p1)
    pages = Pages.of(rows, twilight.candidates.page)
    own = paged(rows, batch, copies, pages)

    def step(budget: int, p: float) -> QuestTopP:
        return QuestTopP(rows, batch, own, pages, budget, p)

    def reaches(p: float, budget: int) -> bool:
        return step(budget, p).shares(batch)["recovered_p5"] >= target

    tried: list[dict[str, float]] = []
    found: list[tuple[Timed, QuestTopP]] = []
    for p in SHARES:
        budget = least(partial(reaches, p), pages.count)
        if budget is None:
            tried.append({"p": p})  # all pages are not enough
            continue
        there = step(budget, p)
        found.append((_timed("Quest+top-p", there, {"p": p, "pages_kept": budget / pages.count}), there))
        tried.append({"p": p, **_brief(found[-1][0])})
    if not found:
        raise ValueError(f"Quest+top-p recovers less than {target} with all pages: its kernels are wrong")
    fastest, best = min(found, key=lambda one: one[0].timing.median)
    recommended = step(twilight.candidates.pages(pages.end - pages.begin), twilight.p)
    fastest.notes.update(tried=tried, recommended=_brief(_timed("", recommended, {})))
    return fastest, best


def _brief(timed: Timed) -> dict[str, float]:
    return {"ms": timed.timing.median * 1e3, **timed.shares}


def figures_of(ours: Timed, dense: tuple[str, Timing], baselines: Sequence[Timed], where: str) -> list[Figure]:
    """Double-P beside dense attention and beside each baseline."""
    mass = f"recovered {ours.shares['recovered']:.3f}, 5th percentile {ours.shares['recovered_p5']:.3f}"
    mass += f" ({ours.shares['read_p5']:.3f} exact)"
    kept = f"{ours.shares['exact']:.3f} exact, {ours.shares['approx']:.3f} by centroid"
    name = f"decode attention, one layer, {where} ({kept}, {mass})"
    found = [at_least(name, ours.timing, dense[0], dense[1], None, notes={**ours.shares, **ours.notes})]
    name = f"decode attention, one layer, {where}: beside a baseline with the same 5th percentile"
    for other in baselines:
        notes = {"double_p": ours.shares, other.name: {**other.shares, **other.notes}}
        found.append(at_least(name, ours.timing, other.words, other.timing, AIMS[other.name], notes=notes))
    return found


def measure(
    device: torch.device, texts: Sequence[Text], config: DoubleP, length: int, batch: int, words: str
) -> list[Figure]:
    """All times on captured rows: Double-P, dense attention, and the baselines at equal recovered mass.

    Args:
        device: of everything; without a GPU the times say nothing.
        texts: from `_double_p_texts.capture`, enough for `Captured`.
        config: Double-P's.
        length, batch: of the rows.
        words: `TextSource.words`.

    Raises:
        ValueError: as `Captured`; kernels that are wrong.
    """
    # Triton's interpreter multiplies bfloat16 matrices wrongly.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    rows = Captured(length, batch, texts, config, device, cluster_on(device), dtype)
    copies = layers(rows, batch)
    step = ClusterBenchStep(rows, batch, copies)
    dense = DenseStep(step).time()
    ours = _timed("Double-P", step, {"p": list(config.stages), "layers": len(copies)})
    target = ours.shares["recovered_p5"] - ROUNDING
    found = [method(rows, batch, copies, target) for method in (retroinfer, quest_top_p)]
    where = f"{words}, batch {batch}, {thousands(length)}"
    return figures_of(ours, dense, [timed for timed, _ in found], where)
