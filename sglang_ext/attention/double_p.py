"""Double-P in the engine: decoding steps read a long row through clusters of its keys.

Prompts are attended to densely, by SGLang itself; so are rows shorter than `DoubleP.min_tokens`. For the step that
decodes column c, the sinks [0, sink) and the window [c - window, c] are exact; clusters that lie wholly between are
read as the two stages of top-p say; every other token is exact again: those that no cluster has yet, and those of
clusters that the row, the sinks or the window cut.

Clusters are made between passes, never inside one: before each chunk of a prompt those segments that earlier chunks
have completed, the rest before the first decoding step, and `append` new tokens at a time afterwards. So no pass waits
for more clustering than the chunk or the tokens before it brought along, whoever else is in its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from sglang_ext import compat
from sglang_ext.attention.clustered import Placed, row_clusters
from sglang_ext.attention.dbsa import DbsaPolicy
from sglang_ext.attention.policy import Attended, Caches, Request, RequestRows, RowViews
from sglang_ext.attention.tokens import chosen_tokens, recovered, token_logits
from sglang_ext.cache.clusters import ClusteredRun, ClusterStore, cluster_run
from sglang_ext.cache.radix import NodeHooks
from sglang_ext.cache.rows import Piece
from sglang_ext.compat import TreeNode
from sglang_ext.config import policy_options
from sglang_ext.kernels.view_attention import View
from sglang_ext.policies import double_p
from sglang_ext.policies.double_p import DoubleP, summaries

REPORT = "double_p"  # in meta_info


@dataclass
class State:
    """What is known of one request.

    Attributes:
        config: with the request's own p1 and p2; None: the request wants dense attention.
        first: column of its first own token, behind stitched blocks.
        settled: own tokens [0, settled) are sinks or in a run.
        blocks: placed runs of stitched blocks; None until the first decoding step.
        own: placed runs of own tokens, one after the other.
        loose: those of them that no tree node holds yet.
        nodes: nodes of the stitched blocks, by name.
        last: the last tree node of the row when it was looked at.
        report: whether to measure.
        note: where to.
    """

    config: DoubleP | None
    first: int
    settled: int
    blocks: list[Placed] | None = None
    own: list[Placed] = field(default_factory=list)
    loose: list[ClusteredRun] = field(default_factory=list)
    nodes: dict[str, TreeNode] = field(default_factory=dict)
    last: Any = None
    report: bool = False
    note: dict[str, Any] | None = None


class DoublePPolicy(DbsaPolicy):
    """`--attention-backend double_p`: plain requests through their clusters, pools as DBSA serves them.

    Served by the PyTorch backend. Requests say `p1` and `p2` (the server's otherwise), `double_p: false` for dense
    attention, and `double_p_report: true` to have each decoding step measured against dense attention, which costs a
    dense pass: `meta_info["double_p"]` then holds, for each generated token but the first, lists with a figure a layer.
    """

    plans = False
    decodes_apart = True
    request_options = frozenset({"p1", "p2", "double_p", "double_p_report"})
    over_pools = False
    """Whether answers over pools read the blocks through their clusters too."""

    def __init__(self) -> None:
        self.config = policy_options(DoubleP)
        self.store = ClusterStore()
        self._states: dict[int, State] = {}
        self._caches: Callable[[], Mapping[int, tuple[torch.Tensor, torch.Tensor]]] = dict

    # ---- options and memory ----

    def check(self, options: Mapping[str, Any]) -> None:
        self._asked(options)

    def _asked(self, options: Mapping[str, Any]) -> DoubleP | None:
        """The request's configuration, None for dense attention; ValueError for a value that is none."""
        for name in ("double_p", "double_p_report"):
            if not isinstance(options.get(name, False), bool):
                raise ValueError(f"custom_params: {name}={options[name]!r}: expected true or false")
        given = {name: options[name] for name in ("p1", "p2") if name in options}
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"custom_params: {name}={value!r}: expected a number from 0 to 1")
        try:
            config = replace(self.config, **given)
        except ValueError as error:
            raise ValueError(f"custom_params: {error} (what is not given is the server's)") from error
        return config if options.get("double_p", True) else None

    def extra_bytes_per_token(self, *, layers: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
        """Centroid, mean value, size and first member of each cluster, and a member (int32) for each token.

        With 16 tokens a cluster and 128 components: 7.1% of a 16-bit KV cache, 6.7% of a 32-bit one.
        """
        cluster = 2 * head_dim * itemsize + 2 * 4
        return -(-layers * kv_heads * (cluster + 4 * self.config.cluster) // self.config.cluster)

    def bind(self, caches: Callable[[], Mapping[int, tuple[torch.Tensor, torch.Tensor]]]) -> None:
        self._caches = caches

    def node_hooks(self) -> Sequence[NodeHooks]:
        return (self.store,)

    def stats(self) -> Mapping[str, int]:
        loose = sum(run.tokens for state in self._states.values() for run in state.loose)
        return {**self.store.stats(), "cluster_tokens_loose": loose}

    # ---- requests ----

    def start(self, request: Request) -> None:
        row = request.row
        if row is not None and (row.new or not self.over_pools):
            return
        first = 0 if row is None else row.prefix_tokens
        # Behind stitched blocks the sinks are theirs.
        self._states[request.slot] = State(
            config=self._asked(request.options),
            first=first,
            settled=max(0, self.config.sink - first),
            report=bool(request.options.get("double_p_report", False)),
        )

    def finish(self, request: Request) -> None:
        """Clusters of tokens that the tree never got go with the request."""
        self._states.pop(request.slot, None)

    def before_pass(self, request: Request, req: Any, begin: int, end: int) -> None:
        state = self._states.get(request.slot)
        if state is None or state.config is None:
            return
        state.note = (
            compat.answer_note(req, REPORT, end) if state.report and begin >= len(req.origin_input_ids) else None
        )
        if req.last_node is state.last:
            return
        state.last = req.last_node
        blocks, path = compat.tree_nodes(req)
        if request.row is not None and state.blocks is None:
            state.nodes = dict(zip(dict.fromkeys(piece.key for piece in request.row.prefix), blocks, strict=False))
        # Where the tree has the same run of another request, both stay: this request's answer must not depend on when
        # the other one came.
        state.loose = [run for run in state.loose if self.store.give(path, 0, run) is None]
        for held in self.store.chain(path, state.settled):
            self._place(state, held.run, held.end)

    def _place(self, state: State, run: ClusteredRun, end: int) -> None:
        column = state.first + run.begin
        state.own.append(Placed(run, column, column, state.first + end))
        state.settled = end

    # ---- clusters ----

    def _cluster(self, slots: torch.Tensor, begin: int) -> ClusteredRun:
        config = self.config
        return self.store.count(
            cluster_run(
                self._caches(),
                slots,
                begin,
                cluster=config.cluster,
                iterations=config.iterations,
                assignment=config.assignment,
            )
        )

    def _cluster_own(self, state: State, rows: RequestRows) -> None:
        """Cluster those own tokens before the window whose turn it is."""
        middle = rows.begin - self.config.window - state.first
        for begin, end in self.config.due(state.settled, middle, rows.decode):
            run = self._cluster(rows.slots[state.first + begin : state.first + end], begin)
            state.loose.append(run)
            self._place(state, run, end)

    def _place_blocks(self, state: State, rows: RequestRows) -> None:
        """Clusters of the stitched blocks; those that no request has used yet are made now, once for all requests."""
        placed, column = [], 0
        pieces: Sequence[Piece] = () if rows.row is None else rows.row.prefix
        for piece, written in zip(pieces, rows.request.written, strict=True):
            start = written - piece.start  # position of the block's first token
            node = state.nodes[piece.key]
            begin = self.config.sink if start == 0 else 0  # the sinks are in the block that begins the pool
            if not self.store.of(node) and len(node.value) > begin:
                self.store.add(node, self._cluster(node.value[begin:], begin))
            for held in self.store.of(node):
                low, high = max(held.run.begin, piece.start), min(held.end, piece.end)
                if low < high:
                    zero = column - piece.start  # column of the block's first token
                    placed.append(Placed(held.run, zero + held.run.begin, zero + low, zero + high, zero - start))
            column += piece.tokens
        state.blocks = placed

    # ---- passes ----

    def views(self, rows: RequestRows) -> RowViews | None:
        state = self._states.get(rows.request.slot)
        if state is None or state.config is None or rows.begin < self.config.min_tokens:
            return super().views(rows)
        self._cluster_own(state, rows)
        if not rows.decode:
            return super().views(rows)
        if state.blocks is None:
            self._place_blocks(state, rows)
        placed = self._usable(state, rows.begin)
        if not placed:
            return super().views(rows)
        return [(rows.begin, rows.end, partial(self._attend, state, state.config, rows, placed))]

    def _attend(
        self,
        state: State,
        config: DoubleP,
        rows: RequestRows,
        placed: Sequence[Placed],
        caches: Caches,
        query: torch.Tensor,
        query_pos: torch.Tensor,
    ) -> Attended:
        """One layer of one decoding step: exact tokens as a view, approximated clusters as a part of their own."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        grouped = query[0].view(caches.keys.shape[1], -1, query.shape[2]).to(dtype)
        clusters = row_clusters(placed, rows.end, caches, grouped)
        exact, approx = self._choose(clusters.log_mass, config)
        read = clusters.columns(exact, others=True)
        if state.note is not None:
            kept = read | clusters.columns(approx, others=False)
            there = (clusters.log_mass[:, 0] > float("-inf")).sum(1)
            _measure(state.note, token_logits(rows, caches, grouped), read, kept, approx.sum(1) / there.clamp(min=1))
        out, lse = summaries(clusters.log_mass, clusters.values, approx)
        part = out.reshape(1, query.shape[1], -1).to(query.dtype), lse.reshape(1, -1)
        return Attended(View((chosen_tokens(rows, read),)), (part,))

    def _usable(self, state: State, column: int) -> list[Placed]:
        """The runs of a row, less its sinks and what is in the window of the step that decodes `column`."""
        window = column - self.config.window
        cut = [replace(each, begin=max(each.begin, self.config.sink)) for each in state.blocks or ()]
        cut += [replace(each, end=min(each.end, window)) for each in state.own]
        return [each for each in cut if each.begin < each.end]

    def _choose(self, log_mass: torch.Tensor, config: DoubleP) -> tuple[torch.Tensor, torch.Tensor]:
        """(exact, approximated) clusters, each [kv_heads, clusters] bool, by their estimated masses."""
        share = double_p.distribution(log_mass)
        # A share may round to 0 where there are tokens, and p = 1 means all of them.
        share = torch.where(log_mass > float("-inf"), share.clamp(min=torch.finfo(share.dtype).tiny), share)
        return double_p.select(share, config)


class DbsaDoublePPolicy(DoublePPolicy):
    """`--attention-backend dbsa+double_p`: answers over pools read the blocks through their clusters, too.

    A block's clusters belong to its node and serve every request that selects it, wherever it stands in the request's
    row. The question is prefilled as DBSA does it. The window lies in the request's own tokens, all of which are exact
    until `append` of them wait.
    """

    over_pools = True


def _measure(
    note: dict[str, Any], logits: torch.Tensor, read: torch.Tensor, kept: torch.Tensor, approximated: torch.Tensor
) -> None:
    """Add a layer's figures to a report.

    Args:
        note: name -> a figure a layer.
        logits: [kv_heads, group, columns] of dense attention.
        read, kept: [kv_heads, columns] bool: tokens computed one by one; those and the tokens of approximated clusters.
        approximated: [kv_heads] share of the clusters.
    """
    mass = recovered(logits, kept)
    figures = {
        "exact": read.float().mean(),
        "kept": kept.float().mean(),
        "approximated_clusters": approximated.float().mean(),
        "recovered": mass.mean(),
        "recovered_least": mass.min(),
    }
    for name, value in figures.items():
        note.setdefault(name, []).append(float(value))
