"""Clusters of keys as property of the radix tree: computed once, found by whoever shares the prefix, freed with it.

A run is tokens that were clustered together. It belongs to the node that holds its last token, because whoever has that
node in its prefix has all tokens of the run. Where a node is cut inside a run, the tail keeps the run and the head gets
it up to the cut: of its clusters, those wholly before the cut serve there.

A run knows its tokens by their order, not by their slots: the same tokens may come to lie in other slots (when two
requests computed them at once, one of the copies is freed), and their summaries stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from sglang_ext import compat
from sglang_ext.compat import TreeNode
from sglang_ext.kernels.kmeans import Plan, kmeans


@dataclass(frozen=True)
class Summary:
    """Clusters of one run in one layer.

    Attributes:
        centroids: [kv_heads, clusters, head_dim] mean keys, as they were written, in the KV cache's dtype.
        values: [kv_heads, clusters, value_dim] mean values.
        sizes: [kv_heads, clusters] int32 tokens of each cluster; an empty cluster has none.
        labels: [kv_heads, tokens] int16 (int32 beyond 32,767 clusters), the cluster of each token.
    """

    centroids: torch.Tensor
    values: torch.Tensor
    sizes: torch.Tensor
    labels: torch.Tensor

    @property
    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.centroids, self.values, self.sizes, self.labels))


@dataclass(frozen=True, eq=False)
class ClusteredRun:
    """Tokens that were clustered together, in all layers.

    Attributes:
        begin: number of the first token in what the owner counts from: the row for prefix nodes, the block for blocks.
        tokens: how many.
        layers: summary by layer.
    """

    begin: int
    tokens: int
    layers: Mapping[int, Summary]

    @property
    def end(self) -> int:
        return self.begin + self.tokens

    @property
    def bytes(self) -> int:
        return sum(summary.bytes for summary in self.layers.values())


@dataclass(frozen=True)
class Held:
    """A run as far as a node has it.

    Attributes:
        run: the run.
        end: end of the tokens that the node's path has; `run.end` unless the path was cut inside the run.
    """

    run: ClusteredRun
    end: int


def cluster_run(
    caches: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    slots: torch.Tensor,
    begin: int,
    *,
    cluster: int,
    iterations: int,
    assignment: str,
) -> ClusteredRun:
    """Cluster tokens in all layers (Double-P, section 4.1).

    Args:
        caches: (keys [num_slots, kv_heads, head_dim], values [num_slots, kv_heads, value_dim]) by layer.
        slots: [tokens] integer KV slots in token order, at least one.
        begin: number of the first token.
        cluster: about how many tokens make a cluster.
        iterations, assignment: see `kernels.kmeans`.
    """
    count = -(-slots.numel() // cluster)
    plan = Plan((slots.numel(),), cluster, width=count)
    kind = torch.int16 if count <= torch.iinfo(torch.int16).max else torch.int32
    layers = {}
    for layer, (keys, values) in caches.items():
        found = kmeans(keys, values, slots, plan, iterations=iterations, assignment=assignment)
        layers[layer] = Summary(found.centroids[0], found.values[0], found.sizes[0], found.labels.to(kind))
    return ClusteredRun(begin, slots.numel(), layers)


class ClusterStore:
    """The runs of every tree node; follows the nodes as `cache.radix.NodeHooks`.

    Attributes:
        computed: runs that were ever clustered.
        computed_tokens: their tokens.
    """

    def __init__(self) -> None:
        self._held: dict[int, list[Held]] = {}
        self.computed = 0
        self.computed_tokens = 0

    def of(self, node: TreeNode) -> Sequence[Held]:
        """The runs that end in `node`, or were cut with it."""
        return self._held.get(node.id, ())

    def count(self, run: ClusteredRun) -> ClusteredRun:
        """Note that a run was computed."""
        self.computed += 1
        self.computed_tokens += run.tokens
        return run

    def add(self, node: TreeNode, run: ClusteredRun) -> ClusteredRun:
        """Give a run to the node that holds its last token; returns the one the node has had of the same tokens."""
        held = self._held.setdefault(node.id, [])
        for known in held:
            if known.run.begin == run.begin and known.end == known.run.end == run.end:
                return known.run
        held.append(Held(run, run.end))
        return run

    def give(self, path: Sequence[TreeNode], run: ClusteredRun) -> ClusteredRun | None:
        """`add` a run to the node that holds its last token, of a path from the root down; None while none does."""
        before = 0
        for node in path:
            before += len(node.key)
            if run.end <= before:
                return self.add(node, run)
        return None

    def chain(self, path: Iterable[TreeNode], begin: int) -> list[Held]:
        """Runs of a path that follow each other without a gap from token `begin` on, the longest among several.

        Nothing else of the path is used: a run that begins inside another one is none of this chain's.
        """
        longest: dict[int, Held] = {}
        for held in (held for node in path for held in self.of(node)):
            known = longest.get(held.run.begin)
            if known is None or known.end < held.end:
                longest[held.run.begin] = held
        chain = []
        while begin in longest:
            chain.append(longest[begin])
            begin = chain[-1].end
        return chain

    def stats(self) -> dict[str, int]:
        """What is resident and what was computed, for /server_info."""
        runs = {held.run for node in self._held.values() for held in node}
        return {
            "cluster_runs": len(runs),
            "cluster_tokens": sum(run.tokens for run in runs),
            "cluster_bytes": sum(run.bytes for run in runs),
            "cluster_runs_computed": self.computed,
            "cluster_tokens_computed": self.computed_tokens,
        }

    # ---- node life ----

    def on_insert(self, node: TreeNode) -> None:
        """A new node has no clusters yet: they are made by the first request that decodes over it."""

    def on_split(self, head: TreeNode, tail: TreeNode) -> None:
        held = self._held.pop(tail.id, None)
        if not held:
            return
        cut = compat.node_begin(tail)
        self._held[head.id] = [Held(each.run, min(each.end, cut)) for each in held if each.run.begin < cut]
        self._held[tail.id] = [each for each in held if each.end > cut]

    def on_evict(self, node: TreeNode) -> None:
        self._held.pop(node.id, None)

    def on_reset(self) -> None:
        self._held.clear()
