"""How much of the attention each method recovers of captured keys, and rows that are tiled from them to be timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from sglang_ext.kernels.cluster_attention.pool import centroid_dtype, narrowed
from sglang_ext.kernels.cluster_attention.types import HeadShape
from sglang_ext.kernels.kmeans import Clusters
from sglang_ext.kernels.kmeans import kmeans as kmeans_reference
from sglang_ext.launch.bench._double_p_rows import WIDTH, CachedRows, Level
from sglang_ext.launch.bench._double_p_texts import MODEL, Text
from sglang_ext.launch.bench._record import Curve, Figure, Timing
from sglang_ext.policies import double_p, quest, retroinfer, twilight
from sglang_ext.policies.double_p import DoubleP

Selecting = DoubleP | retroinfer.RetroInfer | quest.Quest | twilight.Twilight | Literal["exact"]
"""A method; "exact" is Double-P with the clusters' true masses."""
GRID = tuple(x / 100 for x in range(50, 101, 2))
"""Shares of the attention at which the distribution of what is recovered is drawn."""


@dataclass(frozen=True)
class Tiling:
    """How rows with about as many heads as Llama-3.1-8B's are made of a smaller model's layers.

    Attributes:
        side: layers whose key-value heads stand side by side: as many as make eight heads or more.
        times: how often each query head stands in its group: as often as makes groups of at most four, or once.
        rows: rows that one text gives.
    """

    side: int
    times: int
    rows: int

    @classmethod
    def of(cls, layers: int, heads: int, kv_heads: int) -> Tiling:
        """Of a model with so many layers, query heads and key-value heads.

        Raises:
            ValueError: too few layers for one row.
        """
        side = -(-8 // kv_heads)
        if layers < side:
            raise ValueError(
                f"a model of {layers} layers with {kv_heads} key-value heads: expected at least {side} layers, whose"
                " heads make a row"
            )
        return cls(side, max(1, 4 * kv_heads // heads), layers // side)


def check_texts(
    count: int, tokens: int, length: int, batch: int, tiling: Tiling | None = None, model: Path = MODEL
) -> None:
    """Raise ValueError where `count` texts of so many tokens do not make `batch` rows of `length` (see `Captured`).

    Args:
        count, tokens: of the texts.
        length, batch: of the rows.
        tiling: of the rows; None: that of `model`.
        model: folder of a Llama.
    """
    if tiling is None:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(str(model))
        tiling = Tiling.of(config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads)
    needed = -(-batch // tiling.rows) * (length // tokens)
    if length < tokens or length % tokens or count < needed:
        raise ValueError(
            f"{batch} rows of {length} from {count} texts of {tokens} tokens: expected {needed} texts, of a length "
            "that divides the row's"
        )


class Captured(CachedRows):
    """Rows tiled from captured texts, with about as many heads as Llama-3.1-8B's (`Tiling`).

    A row's key-value heads are those of some layers side by side. Of the embedded model, with four key-value heads of
    two query heads each, these are two layers (row 0 layers 0 and 1, row 1 layers 2 and 3 and so on), and each query
    head stands twice: a group of four costs what one of Llama-3.1-8B does, and its union is that of two trained heads.
    Of SmolLM2-135M, with three of three, these are three layers, and each query head stands once. A row longer than a
    text is whole texts end to end, each at positions from 0 as it was captured; the query is the last text's. After all
    layers, further rows take the next texts.

    Args: as `CachedRows`; texts: enough of them, of a length that divides the row's.

    Raises:
        ValueError: too few texts, or of another length.
    """

    def __init__(
        self,
        length: int,
        batch: int,
        texts: Sequence[Text],
        config: DoubleP,
        device: torch.device,
        cluster: Callable[..., Clusters] = kmeans_reference,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        layers, kv_heads, tokens, dim = texts[0].keys.shape
        heads = texts[0].query.shape[1]
        tiling = Tiling.of(layers, heads, kv_heads)
        check_texts(len(texts), tokens, length, batch, tiling)
        each, side = length // tokens, tiling.side
        shape = HeadShape(
            heads=side * tiling.times * heads, kv_heads=side * kv_heads, head_dim=dim, value_dim=dim, dtype=dtype
        )
        super().__init__(length, batch, shape, config, device, cluster)
        queries = []
        for row in range(batch):
            own = texts[row // tiling.rows * each : (row // tiling.rows + 1) * each]
            chosen = slice(side * (row % tiling.rows), side * (row % tiling.rows + 1))
            keys, values = (
                torch.cat([getattr(text, which)[chosen].flatten(0, 1) for text in own], 1).transpose(0, 1)
                for which in ("keys", "values")
            )
            self.fill(row, keys, values)
            query = own[-1].query[chosen].unflatten(1, (kv_heads, -1))  # [side, kv_heads, group, head_dim]
            queries.append(query.repeat_interleave(tiling.times, 2).flatten(0, 2))
        self._queries = torch.stack(queries).to(device, dtype)

    def queries(self, level: Level | None = None) -> torch.Tensor:
        return self._queries


@dataclass(frozen=True)
class Recovered:
    """What one method recovers, over the query heads of all layers and texts.

    Attributes:
        mass: [heads] share of the true attention to the middle tokens, sinks and window left aside.
        whole: [heads] share of all of it, sinks and window counted as recovered.
        tokens: [key-value heads] share of the middle tokens that is kept, exactly or by centroid.
        exact: [key-value heads] share that is read token by token.
    """

    mass: torch.Tensor
    whole: torch.Tensor
    tokens: torch.Tensor
    exact: torch.Tensor

    def violations(self, p: float) -> float:
        """Share of the heads that recover less than p of the middle's attention."""
        return float((self.mass < p).double().mean())


def methods(config: DoubleP) -> dict[str, Selecting]:
    """Double-P and the baselines with the budgets that their authors recommend."""
    return {
        f"Double-P ({config.p1:g}, {config.p2:g})": config,
        "Double-P, centroids in float8": replace(config, centroids="float8"),
        "Double-P, exact cluster masses": "exact",
        "RetroInfer, 1.8% and 23.2% of the clusters": retroinfer.RetroInfer(),
        "Quest, 25% of the tokens": quest.Quest(),
        f"Quest with Twilight's top-p ({config.p1:g}) in 25%": twilight.Twilight(p=config.p1),
    }


def kept_tokens(
    method: Selecting, query: torch.Tensor, keys: torch.Tensor, labels: torch.Tensor, config: DoubleP
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which middle tokens of one layer a method reads: (exact, by centroid), each [kv_heads, tokens] bool.

    Args:
        method: one of `methods`.
        query: [kv_heads, group, head_dim] float32.
        keys: [kv_heads, tokens, head_dim] float32, the middle tokens'.
        labels: [kv_heads, tokens] int64, their clusters.
        config: of Double-P, for its p.
    """
    none = torch.zeros(keys.shape[:2], dtype=torch.bool, device=keys.device)
    if isinstance(method, quest.Quest):
        scores = quest.page_scores(query, *quest.page_bounds(keys, method.page))
        return quest.select(scores, keys.shape[1], method), none
    if isinstance(method, twilight.Twilight):
        return twilight.select(query, keys, method), none
    clusters = int(labels.max()) + 1
    sizes = double_p.cluster_sizes(labels, clusters)
    if method == "exact":
        log_mass = double_p.exact_log_mass(double_p.logits(query, keys), labels, clusters)
    else:
        centroids = double_p.cluster_values(keys, labels, clusters)
        if isinstance(method, DoubleP):
            centroids = narrowed(centroids, centroid_dtype(method.centroids, keys.dtype)).to(keys.dtype)
        log_mass = double_p.estimated_log_mass(query, centroids, sizes)
    share = double_p.distribution(log_mass)
    if isinstance(method, retroinfer.RetroInfer):
        exact, approx = retroinfer.select(share, method)
    else:
        exact, approx = double_p.select(share, config)
    return exact.gather(1, labels), approx.gather(1, labels)


def recovered(
    texts: Sequence[Text],
    chosen: dict[str, Selecting],
    config: DoubleP,
    cluster: Callable[..., Clusters] = kmeans_reference,
) -> dict[str, Recovered]:
    """What each method recovers of every text's last step, all layers; selections in float32, by the policies."""
    parts: dict[str, list[tuple[torch.Tensor, ...]]] = {name: [] for name in chosen}
    for text in texts:
        layers, kv_heads, length, _ = text.keys.shape
        begin, end = config.clustered(length)
        slots = torch.arange(begin, end, dtype=torch.int32, device=text.keys.device)
        for layer in range(layers):
            cached = text.keys[layer].transpose(0, 1).contiguous()
            values = text.values[layer].transpose(0, 1).contiguous()
            found = cluster(
                cached, values, slots, config.plan(begin, end, WIDTH), iterations=config.iterations,
                assignment=config.assignment,
            )  # fmt: skip
            labels = found.labels.long()
            keys = text.keys[layer].float()
            query = text.query[layer].float().unflatten(0, (kv_heads, -1))
            x = double_p.logits(query, keys)
            share, middle = x.softmax(-1)[..., begin:end], x[..., begin:end].softmax(-1)
            for name, method in chosen.items():
                exact, approx = kept_tokens(method, query, keys[:, begin:end], labels, config)
                kept = (exact | approx).unsqueeze(1)
                mass = (middle * kept).sum(-1)
                whole = 1 - (share * ~kept).sum(-1)
                tokens = kept.squeeze(1).double().mean(-1)
                parts[name].append((mass.flatten(), whole.flatten(), tokens, exact.double().mean(-1)))
    return {name: Recovered(*(torch.cat(each) for each in zip(*rows, strict=True))) for name, rows in parts.items()}


def figures_of(found: dict[str, Recovered], p: float, length: int, texts: int, words: str) -> list[Figure]:
    """A row for each method: its distribution of recovered mass (median, 10% to 90%), beside the first one's.

    Args:
        found: by `recovered`.
        p: share that is to be recovered.
        length, texts: tokens of a text, and how many there are.
        words: `TextSource.words`.
    """
    figures: list[Figure] = []
    first: Timing | None = None
    for name, each in found.items():
        mass = each.mass.double()
        timing = Timing.of(mass.tolist())
        low = each.violations(p)
        notes = {
            "recovered_p5": float(mass.quantile(0.05)),
            "recovered_mean": float(mass.mean()),
            "recovered_least": float(mass.min()),
            "whole_p5": float(each.whole.double().quantile(0.05)),
            "violations": low,
            "kept_tokens": float(each.tokens.mean()),
            "exact_tokens": float(each.exact.mean()),
            "texts": texts,
            "heads": len(mass),
        }
        title = (
            f"recovered attention to the middle, {words}, {length} tokens: {name} ({notes['kept_tokens']:.0%} of "
            f"the tokens kept, below {p:g} in {low:.0%} of the heads, 5th percentile {notes['recovered_p5']:.3f})"
        )
        baseline = "" if first is None else next(iter(found))
        figures.append(Figure(title, timing, baseline, first, unit="%", notes=notes))
        first = first or timing
    return figures


def curve_of(found: dict[str, Recovered], length: int, words: str) -> Curve:
    """Which share of the heads recovers less than x of the attention to the middle (the paper's Figures 2 and 3)."""
    return Curve(
        title=f"Heads that recover less, {words}, {length} tokens",
        x="share of the attention to the middle",
        y="share of the heads below it",
        series={name: [(x, each.violations(x)) for x in GRID] for name, each in found.items()},
    )


def measure(
    texts: Sequence[Text], config: DoubleP, words: str, cluster: Callable[..., Clusters] = kmeans_reference
) -> tuple[list[Figure], Curve]:
    """All rows of recovered mass, and their distributions.

    Args:
        texts: captured.
        config: of Double-P.
        words: `TextSource.words`.
        cluster: k-means.
    """
    found, length = recovered(texts, methods(config), config, cluster), texts[0].keys.shape[2]
    return figures_of(found, config.p1, length, len(texts), words), curve_of(found, length, words)
