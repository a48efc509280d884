"""Rows and plots of where centroids err on captured keys (Double-P, Figures 2, 6, 7 and 10)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from sglang_ext.kernels.kmeans import Clusters
from sglang_ext.launch.bench._double_p_errors import DEFAULT, P1S, P2S, WITHIN, CentroidErrors, errors_of
from sglang_ext.launch.bench._double_p_texts import Text
from sglang_ext.launch.bench._record import Curve, Figure, Timing
from sglang_ext.policies.double_p import DoubleP

SHARES = tuple(x / 100 for x in (1, 2, 3, 5, 7, 10, 15, 20, 30, 40, 50, 70, 100))
"""Shares of the tokens at which is drawn how many heads and steps need no more (Double-P, Figure 2)."""
RANKED = 128
"""Clusters of a head whose errors are drawn by their rank (Double-P, Figure 6)."""


def figures_of(found: CentroidErrors, config: DoubleP, words: str, length: int) -> list[Figure]:
    """The rows: variants beside the first one, then what heads need.

    Args:
        found: by `errors_of`.
        config: the same.
        words: `TextSource.words`.
        length: tokens of a text.
    """
    of, figures = f"{words}, {length} tokens", list[Figure]()
    first: Timing | None = None
    for name, each in found.variants.items():
        timing = Timing.of(each.error.tolist())
        notes = {
            "error_mean": float(each.error.mean()),
            "recovered_p5": float(each.recovered.double().quantile(0.05)),
            "recovered_median": float(each.recovered.median()),
            "exact_tokens": float(each.exact.mean()),
            "approximated_tokens": float(each.approx.mean()),
            "bytes_read": float(each.read.mean()),
            "largest_cluster": int(each.largest.max()),
            "largest_cluster_median": float(each.largest.double().median()),
        }
        title = (
            f"error of a head's output, {of}: {name} ({notes['bytes_read']:.0%} of the bytes read, "
            f"{notes['exact_tokens']:.0%} of the tokens exact, {notes['approximated_tokens']:.0%} by centroids, "
            f"5th percentile of recovered attention {notes['recovered_p5']:.2f}, largest cluster "
            f"{notes['largest_cluster']})"
        )
        baseline = "" if name == DEFAULT else DEFAULT
        figures.append(Figure(title, timing, baseline, first, unit="%", notes=notes))
        first = first or timing
    return [*figures, *_needed_tokens(found, of), *_needed_clusters(found, config, of)]


def _needed_tokens(found: CentroidErrors, of: str) -> list[Figure]:
    """How many tokens hold a share of the attention, and what a fixed number of them would miss."""
    figures = []
    for p in P1S:
        by_head = torch.cat([layer.tokens[p] for text in found.needs for layer in text], 1)  # [steps, heads]
        mean = float(by_head.mean())
        missed = float((by_head > mean).double().mean())
        notes = {"mean": mean, "above_mean": missed, "steps": by_head.shape[0], "heads": by_head.shape[1]}
        notes["most_by_least_of_steps"] = float((by_head.amax(0) / by_head.amin(0)).median())
        title = (
            f"tokens that hold {p:g} of a head's attention to the middle, {of} (their mean, {mean:.1%}, is too few in "
            f"{missed:.0%} of heads and steps; a head's most are {notes['most_by_least_of_steps']:.1f} times its least)"
        )
        figures.append(Figure(title, Timing.of(by_head.flatten().tolist()), unit="%", notes=notes))
    return figures


def _needed_clusters(found: CentroidErrors, config: DoubleP, of: str) -> list[Figure]:
    """How many clusters must be exact, beside those that are; and where the errors of the others are."""
    layers = [layer for text in found.needs for layer in text]
    chosen = torch.cat([(layer.chosen / layer.count).flatten() for layer in layers])
    baseline = f"exact by p2 = {config.p2:g}, each head by itself"
    figures = []
    for most in WITHIN:
        needed = torch.cat([(layer.clusters[most] / layer.count).flatten() for layer in layers])
        fewer = float((chosen < needed).double().mean())
        title = (
            f"clusters that must be exact for an error of at most {most:.0%}, all others by centroids, {of} (fewer are "
            f"in {fewer:.0%} of heads and steps)"
        )
        sides = Timing.of(needed.tolist()), Timing.of(chosen.tolist())
        figures.append(Figure(title, sides[0], baseline, sides[1], unit="%", notes={"chosen_too_few": fewer}))
    held = torch.cat([_held(layer.mass_errors, max(1, layer.count // 10)).flatten() for layer in layers])
    title = f"errors of masses that lie in the first tenth of the clusters by rank, {of}"
    return [*figures, Figure(title, Timing.of(held.tolist()), unit="%")]


def _held(errors: torch.Tensor, first: int) -> torch.Tensor:
    """Share of errors [..., clusters] that the first ones have; 0 where there is no error."""
    return errors[..., :first].sum(-1) / errors.sum(-1).clamp(min=torch.finfo(errors.dtype).tiny)


def curves_of(found: CentroidErrors, config: DoubleP, words: str, length: int) -> list[Curve]:
    """The plots, in the order of the paper's figures; arguments as of `figures_of`."""
    of = f"{words}, {length} tokens"
    tokens = {
        f"{p:g} of the attention": torch.cat([layer.tokens[p].flatten() for text in found.needs for layer in text])
        for p in P1S
    }
    by_layer = [list(layers) for layers in zip(*found.needs, strict=True)]
    shown = sorted({len(by_layer) * part // 4 for part in range(4)} | {len(by_layer) - 1})
    ranked = {f"layer {number}": _by_rank([each.mass_errors for each in by_layer[number]]) for number in shown}
    counts = {f"for {most:.0%}": [_median([x.clusters[most] for x in each]) for each in by_layer] for most in WITHIN}
    counts[f"exact by p2 = {config.p2:g}"] = [_median([x.chosen for x in each]) for each in by_layer]
    cost = {
        f"p1 = {p1:g}": [
            (float(each.read.mean()), float(each.error.mean()))
            for (own, _), each in found.thresholds.items()
            if own == p1
        ]
        for p1 in P1S
    }
    return [
        Curve(
            f"Tokens that a head needs, {of}",
            "share of the middle tokens",
            "share of heads and steps that need no more",
            {name: [(x, float((each <= x).double().mean())) for x in SHARES] for name, each in tokens.items()},
        ),
        Curve(
            f"Errors of clusters, {of}",
            "rank of the cluster by its estimated mass",
            "error of its mass, in shares of all",
            {name: [(float(x + 1), y) for x, y in enumerate(each)] for name, each in ranked.items()},
            doubling=True,
        ),
        Curve(
            f"Clusters that must be exact, all others by centroids, {of}",
            "layer",
            "clusters, median of heads and steps",
            {name: [(float(x), y) for x, y in enumerate(each)] for name, each in counts.items()},
        ),
        Curve(
            f"Bytes and errors, p2 from {min(P2S):g} on, {of}",
            "share of the middle's bytes that is read",
            "mean error of a head's output",
            cost,
        ),
    ]


def _by_rank(parts: Sequence[torch.Tensor]) -> list[float]:
    """The mean over texts of [steps, heads, clusters], for the first `RANKED` clusters."""
    padded = [F.pad(each.flatten(0, 1).mean(0)[:RANKED], (0, max(0, RANKED - each.shape[-1]))) for each in parts]
    return [float(each) for each in torch.stack(padded).mean(0)]


def _median(parts: Sequence[torch.Tensor]) -> float:
    return float(torch.cat([each.flatten() for each in parts]).double().median())


def measure(
    texts: Sequence[Text], config: DoubleP, words: str, cluster: Callable[..., Clusters]
) -> tuple[list[Figure], list[Curve]]:
    """All rows and plots; arguments as of `errors_of` and `figures_of`."""
    found, length = errors_of(texts, config, cluster), texts[0].keys.shape[2]
    return figures_of(found, config, words, length), curves_of(found, config, words, length)
