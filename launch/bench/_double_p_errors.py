"""Where centroids err on captured keys, how many clusters must be exact, and what other settings would cost.

These are the questions of Double-P's Figures 2, 6, 7 and 10, asked of a model's own heads: the attention of single
heads and decoding steps, without a kernel, so that they need no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from sglang_ext.kernels.cluster_attention.pool import centroid_dtype, narrowed
from sglang_ext.kernels.kmeans import ClusterPlan, Clusters
from sglang_ext.kernels.kmeans import kmeans as kmeans_reference
from sglang_ext.kernels.top_p import top_p_mask
from sglang_ext.launch.bench._double_p_rows import WIDTH
from sglang_ext.launch.bench._double_p_texts import STEPS, Text
from sglang_ext.policies import double_p
from sglang_ext.policies.double_p import DoubleP

P1S, P2S = (0.8, 0.9, 0.95, 0.99), (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
"""Thresholds whose costs and errors are drawn (Double-P, Figure 10)."""
DEFAULT = "as set"
"""What the settings are called that variants stand beside."""
WITHIN = (0.02, 0.05, 0.1)
"""Errors of a head's output within which exact clusters are counted (Double-P, Figure 7)."""


@dataclass(frozen=True)
class ErrorVariant:
    """Double-P with one thing changed.

    Attributes:
        config: how keys are clustered, and clusters chosen.
        unit: whether k-means clusters keys of length 1, with centroids of length 1 (as RetroInfer's does).
    """

    config: DoubleP
    unit: bool = False


def variants(config: DoubleP) -> dict[str, ErrorVariant]:
    """What is compared; the first one is the default."""
    found = {
        DEFAULT: ErrorVariant(config),
        "keys go to the nearest centroid (`assignment: l2`)": ErrorVariant(replace(config, assignment="l2")),
        "keys and centroids of length 1": ErrorVariant(config, unit=True),
        "a group's mean (`group: mean`)": ErrorVariant(replace(config, group="mean")),
        "all other clusters by their centroids (`tail: centroid`)": ErrorVariant(replace(config, tail="centroid")),
        "centroids in float8": ErrorVariant(replace(config, centroids="float8")),
        "no centroids (`p2` as `p1`)": ErrorVariant(replace(config, p2=config.p1, tail="drop")),
    }
    return {name: each for name, each in found.items() if name == DEFAULT or each != found[DEFAULT]}


def unit_labels(keys: torch.Tensor, plan: ClusterPlan, iterations: int) -> torch.Tensor:
    """k-means over directions: keys less their mean, and centroids, all of length 1 (as RetroInfer's).

    Args:
        keys: [kv_heads, tokens, head_dim] float32, the middle tokens'.
        plan: the segments, and how many clusters each has; numbered as `kmeans` numbers them.
        iterations: rounds.

    Returns:
        [kv_heads, tokens] int64, the cluster of each.
    """
    labels, token, cell = [], 0, 0
    for length, count, tiles in zip(plan.lengths, plan.clusters, plan.tiles, strict=True):
        part = keys[:, token : token + length]
        part = F.normalize(part - part.mean(1, keepdim=True), dim=-1)
        centroids = part[:, torch.arange(count, device=keys.device) * length // count]
        for _ in range(iterations):
            own = (part @ centroids.transpose(1, 2)).argmax(-1)
            mean = double_p.cluster_values(part, own, count)
            there = double_p.cluster_sizes(own, count).unsqueeze(-1) > 0
            centroids = F.normalize(torch.where(there, mean, centroids), dim=-1)
        labels.append(own + cell)
        token, cell = token + length, cell + tiles * plan.width
    return torch.cat(labels, 1)


def labels_of(text: Text, number: int, variant: ErrorVariant, cluster: Callable[..., Clusters]) -> torch.Tensor:
    """[kv_heads, middle tokens] int64, the clusters of layer `number` of a text, found as `variant` says.

    Raises:
        ValueError: a text without middle tokens.
    """
    config = variant.config
    begin, end = config.clustered(text.keys.shape[2])
    plan = config.plan(begin, end, WIDTH)
    if variant.unit:
        return unit_labels(text.keys[number, :, begin:end].float(), plan, config.iterations)
    cached = (x[number].transpose(0, 1).contiguous() for x in (text.keys, text.values))
    slots = torch.arange(begin, end, dtype=torch.int32, device=text.keys.device)
    return cluster(*cached, slots, plan, iterations=config.iterations, assignment=config.assignment).labels.long()


@dataclass(frozen=True)
class CapturedLayer:
    """One layer of one text, in float32, and its clusters.

    Attributes:
        keys, values: [kv_heads, tokens, head_dim] of all tokens.
        begin, end: of the middle tokens.
        labels: [kv_heads, end - begin] int64.
        centroids, means: [kv_heads, clusters, head_dim]: mean keys, as they are kept, and mean values.
        sizes: [kv_heads, clusters] int64.
    """

    keys: torch.Tensor
    values: torch.Tensor
    begin: int
    end: int
    labels: torch.Tensor
    centroids: torch.Tensor
    means: torch.Tensor
    sizes: torch.Tensor

    @classmethod
    def of(cls, text: Text, number: int, labels: torch.Tensor, config: DoubleP) -> CapturedLayer:
        """Layer `number` of a text, in the clusters of `labels_of`."""
        keys, values = text.keys[number].float(), text.values[number].float()
        begin, end = config.clustered(keys.shape[1])
        count = int(labels.max()) + 1
        centroids, means = (double_p.cluster_values(x[:, begin:end], labels, count) for x in (keys, values))
        centroids = narrowed(centroids, centroid_dtype(config.centroids, keys.dtype)).to(keys.dtype)
        return cls(keys, values, begin, end, labels, centroids, means, double_p.cluster_sizes(labels, count))


@dataclass(frozen=True)
class CapturedStep:
    """One decoding step of a layer: what dense attention answers, and what is estimated of its clusters.

    Attributes:
        layer: its keys and clusters.
        inside, outside: [kv_heads, group, ...] logits of the middle tokens, and of sinks and window up to the step's.
        outside_values: [kv_heads, m, head_dim].
        log_mass: [kv_heads, group, clusters] estimated.
        dense: [kv_heads, group, head_dim] the output of dense attention.
    """

    layer: CapturedLayer
    inside: torch.Tensor
    outside: torch.Tensor
    outside_values: torch.Tensor
    log_mass: torch.Tensor
    dense: torch.Tensor

    @classmethod
    def of(cls, layer: CapturedLayer, query: torch.Tensor, seen: int) -> CapturedStep:
        """The step of a query [kv_heads, group, head_dim] that sees the first `seen` tokens."""
        x = double_p.logits(query, layer.keys[:, :seen])
        dense = x.softmax(-1) @ layer.values[:, :seen]
        begin, end = layer.begin, layer.end
        outside = torch.cat([x[..., :begin], x[..., end:]], -1)
        outside_values = torch.cat([layer.values[:, :begin], layer.values[:, end:seen]], 1)
        log_mass = double_p.estimated_log_mass(query, layer.centroids, layer.sizes)
        return cls(layer, x[..., begin:end], outside, outside_values, log_mass, dense)

    @property
    def share(self) -> torch.Tensor:
        """[kv_heads, group, clusters], the clusters' estimated shares of their mass (equation 6)."""
        return double_p.distribution(self.log_mass)

    def error(self, output: torch.Tensor) -> torch.Tensor:
        """How far outputs [..., head_dim] are from dense attention's, in lengths of that."""
        return (output - self.dense).norm(dim=-1) / self.dense.norm(dim=-1)

    def attend(self, exact: torch.Tensor, approx: torch.Tensor) -> torch.Tensor:
        """Output of Double-P (equations 8 and 9), [kv_heads, group, head_dim]."""
        own = self.layer
        middle = own.values[:, own.begin : own.end]
        inputs = (self.inside, middle, own.labels, self.log_mass, own.means, exact, approx)
        return double_p.attend(*inputs, self.outside, self.outside_values)[0]

    def needed_tokens(self, p: float) -> torch.Tensor:
        """[kv_heads, group] share of the middle tokens that a head needs at least for p of its attention to them."""
        shares = self.inside.softmax(-1).sort(-1, descending=True).values.cumsum(-1)
        # Rounding may leave the whole below p = 1.
        return ((shares < p).sum(-1) + 1).clamp(max=shares.shape[-1]).double() / shares.shape[-1]

    def mass_errors(self) -> torch.Tensor:
        """[kv_heads, group, clusters] |true - estimated mass|, in shares of all true mass, by estimated rank."""
        count = self.log_mass.shape[-1]
        exact = double_p.exact_log_mass(self.inside, self.layer.labels, count)
        whole = torch.cat([self.inside, self.outside], -1).logsumexp(-1, keepdim=True)
        off = ((exact - whole).exp() - (self.log_mass - whole).exp()).abs()
        return off.gather(-1, self.log_mass.argsort(-1, descending=True))

    def errors_by_count(self) -> torch.Tensor:
        """Errors of each head's output where its k clusters of the highest estimates are exact, all others centroids.

        Returns:
            [kv_heads, group, clusters + 1], k from 0 on.
        """
        own, count = self.layer, self.log_mass.shape[-1]
        top = torch.cat([self.inside, self.outside, self.log_mass], -1).amax(-1, keepdim=True)
        weight = (self.inside - top).exp()
        labels = own.labels.unsqueeze(1).expand_as(weight)
        empty = weight.new_zeros(*weight.shape[:-1], count)
        mass = empty.scatter_add(-1, labels, weight)
        middle = (weight.unsqueeze(-1) * own.values[:, None, own.begin : own.end]).flatten(0, 1)
        exact = torch.stack([_sums(x, each, count) for x, each in zip(middle, labels.flatten(0, 1), strict=True)])
        exact = exact.unflatten(0, weight.shape[:2])
        guessed = (self.log_mass - top).exp()
        order = self.log_mass.argsort(-1, descending=True)
        more = (mass - guessed).gather(-1, order)
        better = (exact - guessed.unsqueeze(-1) * own.means.unsqueeze(1)).take_along_dim(order.unsqueeze(-1), 2)
        outside = (self.outside - top).exp()
        first = guessed.sum(-1, keepdim=True) + outside.sum(-1, keepdim=True)
        summed = guessed @ own.means + outside @ self.outside_values
        denominator = torch.cat([first, first + more.cumsum(-1)], -1)
        numerator = torch.cat([summed.unsqueeze(2), summed.unsqueeze(2) + better.cumsum(2)], 2)
        off = numerator / denominator.unsqueeze(-1) - self.dense.unsqueeze(2)
        return off.norm(dim=-1) / self.dense.norm(dim=-1).unsqueeze(-1)


def _sums(vectors: torch.Tensor, labels: torch.Tensor, count: int) -> torch.Tensor:
    """[count, dim] sums of vectors [tokens, dim] by label [tokens]."""
    return vectors.new_zeros(count, vectors.shape[1]).index_add_(0, labels, vectors)


@dataclass(frozen=True)
class SettingCost:
    """What one setting costs and errs in a step of a layer.

    Attributes:
        error, recovered: [heads] of the output; share of the attention to the middle tokens that is kept.
        exact, approx: [kv_heads] share of the middle tokens that is read, or stands behind a centroid that is.
        read: [kv_heads] bytes that are read of the middle, in shares of all its keys and values.
        largest: [kv_heads] tokens of the largest cluster.
    """

    error: torch.Tensor
    recovered: torch.Tensor
    exact: torch.Tensor
    approx: torch.Tensor
    read: torch.Tensor
    largest: torch.Tensor

    @classmethod
    def by(cls, step: CapturedStep, config: DoubleP) -> SettingCost:
        """By the sets that `config` chooses."""
        own = step.layer
        exact, approx = double_p.select(step.share, config)
        tokens = own.labels.shape[1]
        behind, beyond = ((own.sizes * chosen).sum(-1).double() / tokens for chosen in (exact, approx))
        scanned = (own.sizes > 0).sum(-1) / (2 if config.centroids == "float8" else 1)
        return cls(
            error=step.error(step.attend(exact, approx)).flatten(),
            recovered=double_p.recovered_mass(step.inside, own.labels, exact | approx).flatten(),
            exact=behind,
            approx=beyond,
            read=behind + (scanned + approx.sum(-1)) / (2 * tokens),
            largest=own.sizes.amax(-1),
        )

    @classmethod
    def joined(cls, parts: Sequence[SettingCost]) -> SettingCost:
        """Those of several layers, end to end."""
        return cls(*(torch.cat([getattr(each, name) for each in parts]) for name in cls.__dataclass_fields__))


@dataclass(frozen=True)
class HeadNeeds:
    """What the heads of a layer need in each step.

    Attributes:
        tokens: share of attention -> [steps, heads] share of the middle tokens that holds it.
        clusters: error -> [steps, heads] clusters that must be exact for it.
        chosen: [steps, heads] clusters that the second stage makes exact, each head by itself.
        mass_errors: [steps, heads, clusters] by rank.
        count: clusters that have tokens, at most.
    """

    tokens: dict[float, torch.Tensor]
    clusters: dict[float, torch.Tensor]
    chosen: torch.Tensor
    mass_errors: torch.Tensor
    count: int

    @classmethod
    def of(cls, steps: Sequence[CapturedStep], p2: float) -> HeadNeeds:
        """Of one layer's steps, with the second stage's threshold."""
        by_count = torch.stack([step.errors_by_count().flatten(0, 1) for step in steps])
        return cls(
            tokens={p: torch.stack([step.needed_tokens(p).flatten() for step in steps]) for p in P1S},
            clusters={most: (by_count <= most).double().argmax(-1) for most in WITHIN},
            chosen=torch.stack([top_p_mask(step.share, p2).sum(-1).flatten() for step in steps]),
            mass_errors=torch.stack([step.mass_errors().flatten(0, 1) for step in steps]),
            count=int((steps[0].layer.sizes > 0).sum(-1).max()),
        )


@dataclass(frozen=True)
class CentroidErrors:
    """All that is found of some texts.

    Attributes:
        variants: name of a variant -> what its last steps cost and err.
        thresholds: (p1, p2) -> the same.
        needs: [text][layer].
    """

    variants: dict[str, SettingCost]
    thresholds: dict[tuple[float, float], SettingCost]
    needs: list[list[HeadNeeds]]


def check_window(config: DoubleP) -> None:
    """Raise ValueError where the window is too short for `STEPS` steps that have the same middle tokens."""
    if config.window < STEPS:
        raise ValueError(f"window={config.window}: expected at least {STEPS}, so that all steps have the same middle")


def _layers_of(
    text: Text, number: int, asked: Mapping[str, ErrorVariant], cluster: Callable[..., Clusters]
) -> dict[str, CapturedLayer]:
    """Layer `number` of a text as each variant clusters it; those that differ in nothing else share the labels."""
    labels: dict[tuple[str, bool], torch.Tensor] = {}
    found = {}
    for name, variant in asked.items():
        key = (variant.config.assignment, variant.unit)
        if key not in labels:
            labels[key] = labels_of(text, number, variant, cluster)
        found[name] = CapturedLayer.of(text, number, labels[key], variant.config)
    return found


def errors_of(
    texts: Sequence[Text], config: DoubleP, cluster: Callable[..., Clusters] = kmeans_reference
) -> CentroidErrors:
    """Ask everything of every layer of the texts.

    Args:
        texts: captured.
        config: of Double-P, whose variants are compared.
        cluster: k-means.

    Raises:
        ValueError: a window that is too short for the steps, or texts without middle tokens.
    """
    check_window(config)
    asked = variants(config)
    pairs = [(p1, p2) for p1 in P1S for p2 in P2S if p2 <= p1]
    changed: dict[str, list[SettingCost]] = {name: [] for name in asked}
    thresholds: dict[tuple[float, float], list[SettingCost]] = {pair: [] for pair in pairs}
    needs: list[list[HeadNeeds]] = []
    for text in texts:
        kv_heads, length = text.keys.shape[1:3]
        needs.append([])
        for number in range(text.keys.shape[0]):
            queries = text.queries[number].unflatten(0, (kv_heads, -1))
            clustered = _layers_of(text, number, asked, cluster)
            for name, variant in asked.items():
                step = CapturedStep.of(clustered[name], queries[:, :, -1], length)
                changed[name].append(SettingCost.by(step, variant.config))
            own = clustered[DEFAULT]
            steps = [CapturedStep.of(own, queries[:, :, s], length - STEPS + 1 + s) for s in range(STEPS)]
            for p1, p2 in pairs:
                thresholds[p1, p2].append(SettingCost.by(steps[-1], replace(config, p1=p1, p2=p2)))
            needs[-1].append(HeadNeeds.of(steps, config.p2))
    return CentroidErrors(
        {name: SettingCost.joined(parts) for name, parts in changed.items()},
        {pair: SettingCost.joined(parts) for pair, parts in thresholds.items()},
        needs,
    )
