"""Policies that read a long row through clusters of its keys.

For the step that decodes column c, sinks [0, sink) and window [c - window, c] are exact. Clusters that lie wholly
between them are exact, approximated by their centroid or left out, as the policy chooses. Every other token is exact
again: those that no cluster has yet, and those of clusters that the row, the sinks or the window cut. A run that
reaches into the window of the first decoding step (it was found in the tree) is cut there until the window has left it:
so what a row reads changes from run to run, not at every step.

Clusters are made between passes, never inside one: before each chunk of a prompt those segments that earlier chunks
have completed, the rest before the first decoding step, and `append` new tokens at a time afterwards. So a pass waits
for no more clustering than the chunk or the tokens before it brought along. What is used for the first time is
clustered then: a demonstration block, and a prefix that only dense requests have used. Once is enough, but where a
prefix ends inside a run: what it has of the run is clustered anew, for all who share it. A request keeps the clusters
that it finds in the tree when it begins: what others bring there later does not change its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar
from weakref import WeakSet

import torch

from sglang_ext import compat
from sglang_ext.attention.clustered import Placed, row_clusters
from sglang_ext.attention.policy import Attended, Caches, LayerView, Request, RequestRows
from sglang_ext.attention.sparse import Asked, SparsePolicy, grouped, measure
from sglang_ext.attention.tokens import chosen_tokens
from sglang_ext.cache.budget import SLACK, ClusterBytes, KVShape
from sglang_ext.cache.cluster_pool import ClusterMemory
from sglang_ext.cache.clusters import ClusterStore, Held, TokenRun, cluster_run
from sglang_ext.cache.stitch import NodeHooks, StitchNode
from sglang_ext.compat import TreeNode
from sglang_ext.kernels.view_attention import View
from sglang_ext.names import Req
from sglang_ext.policies.clustering import Clustering
from sglang_ext.policies.double_p import summaries

ClusteringT = TypeVar("ClusteringT", bound=Clustering)

NO_CLUSTERS = "the row has no clusters yet: too few of its tokens lie between the sinks and the window"
REFUSED = "the row has no clusters: there was no room for them"


@dataclass
class ClusteredRow:
    """The clusters of one request.

    Attributes:
        first: column of its first own token, behind stitched blocks.
        settled: own tokens [0, settled) are sinks or in a run.
        blocks: placed runs of the stitched blocks; None until the first decoding step.
        found: runs that the tree had of them when the request began, until the row's first pass.
        own: placed runs of own tokens, one after the other.
        loose: those of them that no tree node holds yet.
        nodes: nodes of the stitched blocks, by name.
        last: the last tree node of the row when it was looked at.
        slots: [columns] KV slots of the last pass, in the request's own row.
        window: first column of the window in the first decoding step; None before it.
        refused: whether there was no room for a run: the request's tokens are exact from there on.
    """

    first: int
    settled: int
    blocks: list[Placed] | None = None
    found: list[Held] = field(default_factory=list)
    own: list[Placed] = field(default_factory=list)
    loose: list[TokenRun] = field(default_factory=list)
    nodes: dict[str, TreeNode] = field(default_factory=dict)
    last: TreeNode | StitchNode | None = None
    slots: torch.Tensor | None = None
    window: int | None = None
    refused: bool = False

    def place(self, run: TokenRun, end: int) -> None:
        """The next run of own tokens, which the row has up to its own token `end`."""
        column = self.first + run.begin
        self.own.append(Placed(run, column, column, self.first + end))
        self.settled = end

    def read(self, sink: int, window: int) -> list[Placed]:
        """What a step reads of each run, the last one's window beginning at column `window`."""
        if self.window is None:
            self.window = window
        # The window of an answer over blocks lies in its own tokens.
        cut = [replace(each, begin=max(each.begin, sink)) for each in self.blocks or ()]
        cut += [each if each.end <= window else replace(each, end=min(each.end, self.window)) for each in self.own]
        return [each for each in cut if each.begin < each.end]


class ClusteredPolicy(SparsePolicy[ClusteringT]):
    """Base class: makes, finds and reads clusters; says nothing of which are exact, approximated and left out."""

    def __init__(self) -> None:
        super().__init__()
        self.store = ClusterStore()
        self.memory: ClusterMemory | None = None
        self._rows: dict[int, ClusteredRow] = {}
        self._anew: WeakSet[TokenRun] = WeakSet()
        self._caches: Callable[[], Mapping[int, tuple[torch.Tensor, torch.Tensor]]] = dict
        self._dtype: torch.dtype | None = None

    def choose(self, log_mass: torch.Tensor, config: ClusteringT) -> tuple[torch.Tensor, torch.Tensor]:
        """Which clusters a step computes token by token, and which by their centroid.

        Args:
            log_mass: [kv_heads, group, clusters] estimated (Double-P, equation 5), -inf for what is no cluster.
            config: of the request.

        Returns:
            (exact, approximated), each [kv_heads, clusters] bool, disjoint.
        """
        raise NotImplementedError

    # ---- memory ----

    def keep_in(self, memory: ClusterMemory) -> None:
        """Keep clusters where kernels read them; called once, before the first pass."""
        self.memory = memory

    def extra_bytes_per_token(self, shape: KVShape, kernels: bool) -> int:
        centroid = 1 if kernels and self.config.centroids == "float8" else shape.summary_itemsize
        return ClusterBytes.of(shape, centroid).per_token(self.config.cluster, in_tiles=kernels)

    def bind(self, caches: Callable[[], Mapping[int, tuple[torch.Tensor, torch.Tensor]]], dtype: torch.dtype) -> None:
        self._caches, self._dtype = caches, dtype

    def node_hooks(self) -> Sequence[NodeHooks]:
        return (self.store,)

    def stats(self) -> Mapping[str, int]:
        loose = sum(run.tokens for row in self._rows.values() for run in row.loose)
        pooled = {} if self.memory is None else self.memory.stats()
        return {
            **self.store.stats(),
            **pooled,
            "cluster_tokens_loose": loose,
            "cluster_tokens_anew": self._tokens_anew(),
        }

    # ---- requests ----

    def start(self, request: Request) -> None:
        super().start(request)
        if request.slot in self._asked and not self._asked[request.slot].dense:
            first = 0 if request.row is None else request.row.prefix_tokens
            # Behind stitched blocks the sinks are theirs.
            self._rows[request.slot] = ClusteredRow(first, max(0, self.config.sink - first))

    def finish(self, request: Request) -> None:
        """Clusters of tokens that the tree does not get now go with the request."""
        super().finish(request)
        row = self._rows.pop(request.slot, None)
        if row is not None and row.slots is not None:
            slots = row.slots
            self.store.leave([(run, slots[row.first + run.end - 1].clone()) for run in row.loose])

    def before_pass(self, request: Request, req: Req, begin: int, end: int, decode: bool) -> None:
        super().before_pass(request, req, begin, end, decode)
        self.store.leave(())  # slots of requests that ended are written again from now on
        row = self._rows.get(request.slot)
        if row is None or req.last_node is row.last:
            return
        begins, row.last = row.last is None, req.last_node
        blocks, path = compat.tree_nodes(req.last_node)
        if request.row is not None and not row.nodes:
            row.nodes = dict(zip(dict.fromkeys(piece.key for piece in request.row.prefix), blocks, strict=True))
        # Where another request has put the same run into the tree, this one keeps its own besides, for as long as it
        # runs.
        row.loose = [run for run in row.loose if self.store.give(path, run) is None]
        if begins:
            row.found = self.store.chain(path, row.settled, lambda held: self.config.left_exact(held.tokens, held.lost))

    def rewritten(self, slot: int, slots: torch.Tensor) -> None:
        """The row of the request in `slot` names other KV slots of the same tokens now.

        Args:
            slot: in SGLang's request pool.
            slots: [context length] the row, as it is now.
        """
        row = self._rows.get(slot)
        if row is None:
            return
        for run in row.loose:
            run.moved(slots[row.first + run.begin : row.first + run.end].clone())

    # ---- clusters ----

    def before_views(self, asked: Asked[ClusteringT], rows: RequestRows) -> None:
        row = self._rows.get(rows.request.slot)
        if row is None:
            return
        row.slots = rows.slots
        for held in row.found:
            row.place(self._whole(row, held, rows.slots), held.end)
        row.found = []
        if rows.decode and row.blocks is None:
            row.blocks = self._blocks(row, rows)
        if row.refused:
            return
        middle = rows.begin - self.config.window - row.first
        for begin, end in self.config.due(row.settled, middle, rows.decode):
            run = self._cluster(rows.slots[row.first + begin : row.first + end], begin)
            if run is None:
                row.refused = True
                return
            row.loose.append(run)
            row.place(run, end)

    def _whole(self, row: ClusteredRow, held: Held, slots: torch.Tensor) -> TokenRun:
        """A run that the tree has; where a cut went through too much of it, one of its tokens up to there alone.

        That is another request's, or made and given to the tree at once: the tokens are there, and locked.
        """
        if not self.config.anew(held.tokens, held.lost):
            return held.run
        begin, end = held.run.begin, held.end
        _, path = compat.tree_nodes(row.last)
        known = self.store.find(path, begin, end)
        if known is not None:
            return known
        if self._tokens_anew() + held.tokens > self._slots() // (2 * SLACK):
            return held.run
        made = self._cluster(slots[row.first + begin : row.first + end], begin)
        if made is None:
            return held.run
        self._anew.add(made)
        return self.store.give(path, made) or made

    def _tokens_anew(self) -> int:
        return sum(run.tokens for run in self._anew)

    def _slots(self) -> int:
        """Of the KV cache."""
        if self.memory is not None:
            return self.memory.slots
        keys, _ = next(iter(self._caches().values()))
        return int(keys.shape[0])

    def _cluster(self, slots: torch.Tensor, begin: int) -> TokenRun | None:
        config = self.config
        if self.memory is not None:
            made = self.memory.make(slots, begin)
            return None if made is None else self.store.count(made)
        return self.store.count(
            cluster_run(
                self._caches(),
                slots,
                begin,
                cluster=config.cluster,
                iterations=config.iterations,
                assignment=config.assignment,
                centroids=config.centroids,
                dtype=self._dtype,
            )
        )

    def _blocks(self, row: ClusteredRow, rows: RequestRows) -> list[Placed]:
        """Clusters of the stitched blocks; those that no request has used yet are made now, once for all requests."""
        placed: list[Placed] = []
        if rows.row is None:
            return placed
        column = 0
        for piece, written in zip(rows.row.prefix, rows.request.written, strict=True):
            node, zero = row.nodes[piece.key], column - piece.start  # column of the block's first token, were it there
            start = written - piece.start  # position it was written at
            begin = self.config.sink if start == 0 else 0  # the sinks are in the block that begins the pool
            if not self.store.of(node) and len(node.value) > begin:
                for low, high in self.config.segments(begin, len(node.value)):
                    run = self._cluster(node.value[low:high], low)
                    if run is not None:
                        self.store.add(node, run)
            for held in self.store.of(node):
                low, high = max(held.run.begin, piece.start), min(held.end, piece.end)
                if low < high:
                    placed.append(Placed(held.run, zero + held.run.begin, zero + low, zero + high, zero - start))
            column += piece.tokens
        return placed

    # ---- steps ----

    def step(self, asked: Asked[ClusteringT], rows: RequestRows) -> LayerView | None:
        placed = self._read(asked, rows)
        return partial(self._attend, asked, rows, placed) if placed else None

    def _read(self, asked: Asked[ClusteringT], rows: RequestRows) -> list[Placed]:
        """What a decoding step reads through clusters; for nothing, the report says why."""
        row = self._rows.get(rows.request.slot)
        placed = [] if row is None else row.read(self.config.sink, rows.begin - self.config.window)
        if not placed:
            self.read_all(asked, REFUSED if row is not None and row.refused else NO_CLUSTERS)
        return placed

    def placed(self, rows: RequestRows) -> list[Placed]:
        """What kernels read of the row's clusters; before a prompt's pass, clusters are made and none is read.

        Empty for a pass that is dense.
        """
        asked = self._asked.get(rows.request.slot)
        if asked is None or asked.dense or rows.begin < self.config.min_tokens:
            return []
        self.before_views(asked, rows)
        return self._read(asked, rows) if rows.decode else []

    def _attend(
        self,
        asked: Asked[ClusteringT],
        rows: RequestRows,
        placed: Sequence[Placed],
        caches: Caches,
        query: torch.Tensor,
        query_pos: torch.Tensor,
    ) -> Attended:
        """One layer of one step: exact tokens as a view, approximated clusters as a part of their own."""
        heads = grouped(query, caches)
        clusters = row_clusters(placed, rows.end, caches, heads)
        exact, approx = self.choose(clusters.log_mass, asked.config)
        read = clusters.columns(exact, others=True)
        if asked.note is not None:
            kept = read | clusters.columns(approx, others=False)
            there = (clusters.log_mass[:, 0] > float("-inf")).sum(1)
            measure(asked.note, rows, caches, heads, read, kept, approx.sum(1) / there.clamp(min=1))
        out, lse = summaries(clusters.log_mass, clusters.values, approx)
        part = out.reshape(1, query.shape[1], -1).to(query.dtype), lse.reshape(1, -1)
        return Attended(View((chosen_tokens(rows, read),)), (part,))
