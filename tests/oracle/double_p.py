"""What a decoding step of Double-P must be, inside ``transformers``' own model in float64.

The two stages of top-p and the shared softmax are written out here from the paper's equations (3 to 9), token by token.
Of this project only the reference k-means is used, for the step that sorts keys into clusters: where two centroids are
equally near, any other k-means would differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import AttentionInterface

from sglang_ext.kernels.kmeans import ClusterPlan, kmeans
from tests.oracle import models, oracle

Keys = list[torch.Tensor]
"""Of each layer [key-value heads, tokens, head_dim], rotated."""


@dataclass(frozen=True)
class Run:
    """Tokens that were clustered together.

    Attributes:
        begin, end: their columns; columns of another request's row where `keys` says so.
        keys: the keys that were clustered, one a column of [begin, end); None: those of the row itself.
        low, high: columns of the row that are there and may be read through a cluster (the rest: exact).
        since: the first decoded column that sees the clusters.
        shift: column of the row minus column of the run, for runs that stand elsewhere in the row.
    """

    begin: int
    end: int
    low: int
    high: int
    keys: Keys | None = None
    since: int = 0
    shift: int = 0


@dataclass(frozen=True)
class Config:
    """Of the step and of the clustering; as the server's."""

    cluster: int
    iterations: int
    p1: float
    p2: float
    window: int | None = None  # a run that reaches into the first step's is cut there until it is behind the window


class Oracle:
    """A model whose decoded rows follow Double-P, and whose other rows are dense: in layers without a window."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float64, answers: ModuleType = oracle) -> None:
        self.model, self.answers = models.load_model(folder, dtype), answers
        self.decode_from: int | None = None  # row of the pass
        self.runs: Sequence[Run] = ()
        self.config: Config | None = None
        self.seen: Keys = []
        self._labels: dict[tuple[int, int], torch.Tensor] = {}

        def attention(
            module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **kwargs: Any
        ) -> Any:
            q, k, v = query[0], key[0], value[0]
            self.seen.append(k)
            group = q.shape[0] // k.shape[0]
            logits = q @ k.repeat_interleave(group, 0).mT * scaling + attention_mask[0, 0]
            past, window = k.shape[1] - q.shape[1], kwargs.get("sliding_window")
            if window is not None:  # the row's own token is one of them
                ages = torch.arange(past, k.shape[1])[:, None] - torch.arange(k.shape[1])
                logits = logits.masked_fill(ages >= window, float("-inf"))
            out = torch.softmax(logits, -1) @ v.repeat_interleave(group, 0)
            if self.decode_from is not None and window is None:
                for row in range(self.decode_from, q.shape[1]):
                    out[:, row] = self._step(
                        module.layer_idx, q[:, row], k, v, past + row, past + self.decode_from, scaling
                    )
            return out.transpose(0, 1)[None], None

        AttentionInterface.register("double_p", attention)
        self.model.set_attn_implementation("double_p")

    def log_probs(
        self,
        tokens: Sequence[int],
        decode_from: int | None,
        runs: Sequence[Run] = (),
        config: Config | None = None,
        encoded: oracle.EncodedBlocks | None = None,
        pieces: Sequence[oracle.Piece] = (),
    ) -> torch.Tensor:
        """[tokens, vocabulary] log-probabilities of the next token.

        Args:
            tokens: the request's own, generated ones at the end.
            decode_from: number of the first generated token whose row is decoded; None: all dense.
            runs: in columns of the whole row, stitched pieces first.
            config: None where all is dense.
            encoded, pieces: stitched blocks.
        """
        self.decode_from, self.runs, self.config, self.seen, self._labels = decode_from, runs, config, [], {}
        nothing = oracle.EncodedBlocks([], [], [], [])
        table: torch.Tensor = self.answers.log_probs(self.model, encoded or nothing, pieces, tokens)
        return table

    def keys(self, tokens: Sequence[int]) -> Keys:
        """A plain row's keys."""
        self.log_probs(tokens, None)
        return self.seen

    def block_keys(self, encoded: oracle.EncodedBlocks, block: int) -> Keys:
        """A block's keys as they were written."""
        written: Keys = self.answers.written_keys(self.model, encoded, block)
        return written

    def _label(self, layer: int, number: int, run: Run, k: torch.Tensor) -> torch.Tensor:
        """[key-value heads, tokens of the run], the cluster of each."""
        if (layer, number) not in self._labels:
            source = k[:, run.begin : run.end] if run.keys is None else run.keys[layer]
            cache = source.transpose(0, 1).float().contiguous()
            tokens = run.end - run.begin
            plan = ClusterPlan((tokens,), self.config.cluster, width=-(-tokens // self.config.cluster))
            found = kmeans(cache, cache, torch.arange(tokens), plan, iterations=self.config.iterations)
            self._labels[layer, number] = found.labels
        return self._labels[layer, number]

    def _step(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, column: int, first: int, scale: float
    ) -> torch.Tensor:
        """[heads, head_dim]: attention of the token at `column`; the first decoded one is at `first`."""
        group = q.shape[0] // k.shape[0]
        out = torch.zeros(q.shape[0], v.shape[2], dtype=q.dtype)
        for head in range(k.shape[0]):
            clusters = []
            for number, run in enumerate(self.runs):
                if column < run.since:
                    continue
                high = run.high
                if self.config.window is not None and high > column - self.config.window:
                    high = min(high, first - self.config.window)
                labels = self._label(layer, number, run, k)[head].tolist()
                for cluster in sorted(set(labels)):
                    members = [run.begin + run.shift + t for t, label in enumerate(labels) if label == cluster]
                    if run.low <= min(members) and max(members) < high:
                        clusters.append(members)
            kept: tuple[set[int], set[int]] = (set(), set())
            logits = k[head, : column + 1] @ q[head * group : (head + 1) * group].mT * scale  # [tokens, group]
            means = [k[head, members].mean(0) for members in clusters]
            for g in range(group):
                x = [float(mean @ q[head * group + g]) * scale for mean in means]
                mass = [len(members) * math.exp(value) for members, value in zip(clusters, x, strict=True)]
                for chosen, p in zip(kept, (self.config.p1, self.config.p2), strict=True):
                    running = 0.0
                    for i in sorted(range(len(mass)), key=lambda i: -mass[i]):
                        if running >= p * sum(mass) and p < 1:
                            break
                        chosen.add(i)
                        running += mass[i]
            inside = {t for members in clusters for t in members}
            read = [t for t in range(column + 1) if t not in inside] + [t for i in kept[1] for t in clusters[i]]
            for g in range(group):
                terms = [(math.exp(float(logits[t, g])), v[head, t]) for t in read]
                for i in kept[0] - kept[1]:
                    weight = len(clusters[i]) * math.exp(float(means[i] @ q[head * group + g]) * scale)
                    terms.append((weight, v[head, clusters[i]].mean(0)))
                out[head * group + g] = sum(w * value for w, value in terms) / sum(w for w, _ in terms)
        return out
