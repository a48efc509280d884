"""Clusters of keys as property of the radix tree: computed once, found by whoever shares the prefix, freed with it.

A run is tokens that were clustered together. It belongs to the node that holds its last token, because whoever has that
node in its prefix has all tokens of the run. Where a node is cut inside a run, the tail keeps the run and the head gets
it up to the cut: of its clusters, those wholly before the cut serve there. They are what remains when the tail goes.
Clusters are spread over the whole run, so a cut goes through most of them. If many tokens are then in no whole cluster,
and would be attended to exactly, the request that finds the cut run clusters its remaining tokens anew
(`Clustering.anew`), and gives the new run to the head (`ClusterStore.add`).

A run knows its tokens by their order, not by their slots: the same tokens may come to lie in other slots (when two
requests computed them at once, one of the copies is freed), and their summaries stay what they are. What lists slots
all the same is told of it (`TokenRun.moved`).

There are two kinds of run: `ClusteredRun` holds tensors of its own, for plain PyTorch; `cluster_pool.PooledRun` names a
place in memory that kernels read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import pad

from sglang_ext import compat
from sglang_ext.compat import TreeNode
from sglang_ext.kernels.cluster_attention.pool import centroid_dtype, narrowed
from sglang_ext.kernels.float8 import widened
from sglang_ext.kernels.kmeans import ClusterPlan, kmeans
from sglang_ext.policies.double_p import cluster_sizes


@dataclass(frozen=True)
class Summary:
    """Clusters of one run in one layer.

    Attributes:
        centroids: [kv_heads, clusters, head_dim] mean keys, as they were written, in the KV cache's dtype; in the
            queries', where that is float8.
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

    def cut(self, tokens: int) -> Summary:
        """The first `tokens` tokens, with the clusters wholly among them; tokens of others go to an empty one."""
        labels = self.labels[:, :tokens].long()
        whole = (cluster_sizes(labels, self.sizes.shape[1]) == self.sizes) & (self.sizes > 0)
        most = int(whole.sum(1).max())
        order = torch.sort(~whole, dim=1, stable=True).indices[:, :most]  # whole clusters first, in their order
        kept = whole.gather(1, order)
        number = torch.arange(most, device=order.device).expand_as(order)
        place = torch.full_like(self.sizes, most, dtype=torch.int64)
        place.scatter_(1, order, torch.where(kept, number, most))
        cells = order.unsqueeze(-1)
        return Summary(
            pad(self.centroids.gather(1, cells.expand(-1, -1, self.centroids.shape[2])), (0, 0, 0, 1)),
            pad(self.values.gather(1, cells.expand(-1, -1, self.values.shape[2])), (0, 0, 0, 1)),
            pad(self.sizes.gather(1, order) * kept, (0, 1)).int(),
            place.gather(1, labels).to(self.labels.dtype),
        )


@dataclass(frozen=True, eq=False)
class TokenRun(ABC):
    """Tokens that were clustered together, in all layers; base class.

    Attributes:
        begin: number of the first token in what the owner counts from: the row for prefix nodes, the block for blocks.
        tokens: how many.
        lost: how many behind them were clustered with them and are gone.
    """

    begin: int
    tokens: int
    lost: int = field(default=0, kw_only=True)

    @property
    def end(self) -> int:
        return self.begin + self.tokens

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Memory of the clusters, all layers."""

    @abstractmethod
    def cut(self, end: int) -> TokenRun:
        """The run up to token `end`, with the clusters wholly before it."""

    def moved(self, slots: torch.Tensor) -> None:
        """The tokens lie in other slots now: [tokens] integer, in token order."""
        return


@dataclass(frozen=True, eq=False)
class ClusteredRun(TokenRun):
    """Clusters as tensors of their own.

    Attributes:
        layers: summary by layer.
    """

    layers: Mapping[int, Summary]

    @property
    def bytes(self) -> int:
        return sum(summary.bytes for summary in self.layers.values())

    def cut(self, end: int) -> ClusteredRun:
        """The run up to token `end`, with the clusters wholly before it."""
        tokens = end - self.begin
        layers = {layer: each.cut(tokens) for layer, each in self.layers.items()}
        return ClusteredRun(self.begin, tokens, layers, lost=self.lost + self.end - end)


@dataclass(frozen=True)
class Held:
    """A run as far as a node has it.

    Attributes:
        run: the run.
        end: end of the tokens that the node's path has; `run.end` unless the path was cut inside the run.
    """

    run: TokenRun
    end: int

    @property
    def tokens(self) -> int:
        """Of the run, on the node's path."""
        return self.end - self.run.begin

    @property
    def lost(self) -> int:
        """Tokens that were clustered with these, behind them, and are not on the path."""
        return self.run.lost + self.run.end - self.end


def cluster_run(
    caches: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
    slots: torch.Tensor,
    begin: int,
    *,
    cluster: int,
    iterations: int,
    assignment: str,
    centroids: str = "same",
    dtype: torch.dtype | None = None,
) -> ClusteredRun:
    """Cluster tokens in all layers (Double-P, section 4.1).

    Args:
        caches: (keys [num_slots, kv_heads, head_dim], values [num_slots, kv_heads, value_dim]) by layer.
        slots: [tokens] integer KV slots in token order, at least one.
        begin: number of the first token.
        cluster: about how many tokens make a cluster.
        iterations, assignment: see `kernels.kmeans`.
        centroids: type whose precision they have, of `CENTROIDS`; here they stand in the clusters' type all the same.
        dtype: of the clusters, where the KV cache is in float8; None: of the KV cache.
    """
    count = -(-slots.numel() // cluster)
    plan = ClusterPlan((slots.numel(),), cluster, width=count)
    kind = torch.int16 if count <= torch.iinfo(torch.int16).max else torch.int32
    layers = {}
    for layer, (keys, values) in caches.items():
        (wide,), (wide_values,), at = widened([keys], [values], slots, dtype)
        found = kmeans(wide, wide_values, at, plan, iterations=iterations, assignment=assignment)
        kept = narrowed(found.centroids[0], centroid_dtype(centroids, wide.dtype)).to(wide.dtype)
        layers[layer] = Summary(kept, found.values[0], found.sizes[0], found.labels.to(kind))
    return ClusteredRun(begin, slots.numel(), layers)


class ClusterStore:
    """The runs of every tree node; follows the nodes as `cache.stitch.NodeHooks`.

    Attributes:
        computed: runs that were ever clustered.
        computed_tokens: their tokens.
    """

    def __init__(self) -> None:
        self._held: dict[int, list[Held]] = {}
        self._leaving: list[tuple[TokenRun, torch.Tensor]] = []
        self.computed = 0
        self.computed_tokens = 0

    def of(self, node: TreeNode) -> Sequence[Held]:
        """The runs that end in `node`, or were cut with it."""
        return self._held.get(node.id, ())

    def count(self, run: TokenRun) -> TokenRun:
        """Note that a run was computed."""
        self.computed += 1
        self.computed_tokens += run.tokens
        return run

    def add(self, node: TreeNode, run: TokenRun) -> TokenRun:
        """Give a run to the node that holds its last token; returns the one the node has had of the same tokens.

        It takes the place of what a cut left the node of a longer one, if that has the same tokens.
        """
        held = self._held.setdefault(node.id, [])
        for at, known in enumerate(held):
            if (known.run.begin, known.end) == (run.begin, run.end):
                if known.lost:
                    held[at] = Held(run, run.end)
                return held[at].run
        held.append(Held(run, run.end))
        return run

    def give(self, path: Sequence[TreeNode], run: TokenRun) -> TokenRun | None:
        """`add` a run to the node that holds its last token, of a path from the root down; None while none does."""
        before = 0
        for node in path:
            before += len(node.key)
            if run.end <= before:
                return self.add(node, run)
        return None

    def leave(self, runs: Iterable[tuple[TokenRun, torch.Tensor]]) -> None:
        """Runs of a request that ends; what the tree is given of its tokens, it is given next, or not at all.

        Args:
            runs: with the KV slot of each one's last token, [] integer: that the tree got these very tokens, and not
                others' like them, is seen by it.
        """
        self._leaving = list(runs)

    def find(self, path: Iterable[TreeNode], begin: int, end: int) -> TokenRun | None:
        """The run of tokens [begin, end) that a path has whole, or None."""
        held = (held for node in path for held in self.of(node))
        return next((each.run for each in held if (each.run.begin, each.end) == (begin, end) and not each.lost), None)

    def chain(self, path: Iterable[TreeNode], begin: int, exact: Callable[[Held], int] = lambda held: 0) -> list[Held]:
        """Runs of a path that follow each other without a gap from token `begin` on, with the most tokens in clusters.

        Nothing else of the path is used: a run that begins inside another one is none of this chain's.

        Args:
            exact: about how many tokens of a run are in no cluster that the path has wholly. Among chains that are
                equal in this, whole runs come before cut ones, and long ones before short ones.
        """
        starting: dict[int, list[Held]] = {}
        for held in (held for node in path for held in self.of(node)):
            starting.setdefault(held.run.begin, []).append(held)
        best: dict[int, tuple[int, Held]] = {}  # (tokens in clusters from there on, the first run)

        def clustered(held: Held) -> int:
            further = best.get(held.end)
            return held.tokens - exact(held) + (further[0] if further else 0)

        for start in sorted(starting, reverse=True):
            first = max(starting[start], key=lambda held: (clustered(held), not held.lost, held.end))
            best[start] = clustered(first), first
        chain = []
        while begin in best:
            chain.append(best[begin][1])
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
        """A new node has no clusters but those of a request that ends with it."""
        if not self._leaving:
            return
        part, begin = node, compat.node_begin(node)
        for run, slot in sorted(self._leaving, key=lambda each: -each[0].end):
            while run.end <= begin:
                part = part.parent
                begin -= len(part.key)
            if run.end <= begin + len(part.key) and int(part.value[run.end - 1 - begin]) == int(slot):
                # Its first tokens may be others' like them, which the tree has had.
                run.moved(compat.path_slots(part, run.begin, run.end))
                self.add(part, run)

    def on_split(self, head: TreeNode, tail: TreeNode) -> None:
        held = self._held.pop(tail.id, None)
        if not held:
            return
        cut = compat.node_begin(tail)
        self._held[head.id] = [Held(each.run, min(each.end, cut)) for each in held if each.run.begin < cut]
        self._held[tail.id] = [each for each in held if each.end > cut]

    def on_evict(self, node: TreeNode) -> None:
        """Of a run that nodes above have a part of, only that is kept."""
        for gone in self._held.pop(node.id, ()):
            rest = [
                (held, at)
                for held in self._above(node)
                for at, each in enumerate(held)
                if each.run is gone.run and each.end < gone.end
            ]
            if rest:
                run = gone.run.cut(max(held[at].end for held, at in rest))
                for held, at in rest:
                    held[at] = Held(run, held[at].end)

    def _above(self, node: TreeNode) -> Iterator[list[Held]]:
        parent = node.parent
        while parent is not None:
            if parent.id in self._held:
                yield self._held[parent.id]
            parent = parent.parent

    def on_reset(self) -> None:
        self._held.clear()
        self._leaving = []
