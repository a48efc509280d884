"""Decoding over clusters in kernels: score the clusters, select them, attend; three steps a layer, in CUDA graphs.

For policies whose decoding steps read clusters (`Policy.clusters`). Prefills, of blocks and of questions over them too,
are those of `attention.planned`. In a decoding batch that has a row with clusters or a view, every row goes through the
kernels here: a dense one has exact tokens only, a view's runs are exact tokens that a turned query reads.

The host knows which runs a row reads, and says so when that changes; which clusters of them are read, how, is chosen on
the device in every layer. A step in between only appends its newest slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sglang_ext import compat
from sglang_ext.attention.clustered import Placed
from sglang_ext.attention.clustered_report import MeasuredRow, Read
from sglang_ext.attention.double_p import DoublePPolicy
from sglang_ext.attention.planned import ROOM, BatchRows, PlannedViews
from sglang_ext.attention.policy import Caches, Request, RequestRows, RowRuns
from sglang_ext.cache.cluster_pool import ClusterMemory, Cut, PooledRun, tiles_of
from sglang_ext.kernels.cluster_attention import joint_impl
from sglang_ext.kernels.cluster_attention import triton_impl as attention
from sglang_ext.kernels.cluster_attention.buffers import COPY, TILE, Capacity, PlannedRow, RowBuffers, Shape
from sglang_ext.kernels.kmeans import kmeans_layers
from sglang_ext.kernels.top_p import cuda_impl
from sglang_ext.kernels.top_p import triton_impl as top_p

GRAPH_TOKENS = 131072
"""Tokens of a row for which buffers of CUDA graphs have room; a batch with a longer one decodes without a graph."""

GRAPH_TURNS = 64
"""Rotations of a row likewise: distances by which its blocks are seen away from where they were written.

Only where blocks are read through clusters (`over_pools`). Elsewhere graphs know one, since kernels for several cost a
quarter more; an answer over a pool decodes without graphs there.
"""

GRAPH_SPANS = 256
"""Spans of exact tokens a row likewise."""

HEADROOM = 1.25
"""How many times what a batch needs is allocated for it and those to come, where it runs outside of CUDA graphs."""

PROGRAMS = 2
"""Programs of attention on each multiprocessor."""


def graph_capacity(rows: int, tokens: int, tile: int, over_pools: bool) -> Capacity:
    """Room of the CUDA graphs for `rows` rows of up to `tokens` tokens, in tiles of `tile`."""
    return Capacity(
        rows=rows,
        tiles=tiles_of(tokens, tile),
        tokens=tokens,
        dense=tokens + ROOM,
        turns=GRAPH_TURNS if over_pools else 1,
        copies=rows * (tokens // COPY + GRAPH_SPANS),
    )


@dataclass
class _Known:
    """What a decoding request reads, for as long as nothing but its length changes.

    Attributes:
        request: whose.
        placed: its clusters, as the policy gave them.
        cuts: pieces of runs that it reads; they live as long as somebody has them.
        row: for the kernels.
        read: runs in it, as the kernels list them.
    """

    request: Request
    placed: list[Placed]
    cuts: list[Cut]
    row: PlannedRow
    read: list[Read]


class ClusteredViews(PlannedViews):
    """Mixin over a backend of SGLang's, like `PlannedViews`.

    Attributes:
        memory: the clusters.
    """

    policy: DoublePPolicy

    def __init__(self, model_runner: Any, policy: DoublePPolicy) -> None:
        super().__init__(model_runner, policy)
        caches = compat.kv_by_layer(self.token_to_kv_pool)  # type: ignore[attr-defined]
        device = self.rope.inv_freq.device
        cluster: Any = kmeans_layers
        if device.type == "cuda":
            from sglang_ext.kernels.kmeans.fast import kmeans_layers as cluster
        self.memory = ClusterMemory(caches, policy.config, cluster)
        policy.keep_in(self.memory)
        shape = self.shape
        self._shape = Shape(shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim, shape.dtype)
        self._tuning = replace(
            attention.TUNING,
            programs=PROGRAMS * shape.num_sms,
            registers=attention.TUNING.registers if device.type == "cuda" else None,
        )
        # Triton's interpreter reduces several numbers at once element by element, one number by NumPy.
        self._search = replace(top_p.TUNING, joint=top_p.TUNING.joint and device.type == "cuda")
        self._known: dict[int, _Known] = {}
        self._now: list[PlannedRow] = []
        self._placed: list[list[Placed]] = []
        self._eager_rows: RowBuffers | None = None
        self._graph_rows: RowBuffers | None = None
        self._loaded: RowBuffers | None = None
        self._no_positions = self._table.new_empty(0)
        self._reported: list[tuple[int, _Known, dict[str, Any]]] = []  # rows of the step that want to be measured
        self._measured: list[MeasuredRow] = []
        if device.type == "cuda":
            self._warm_up_clusters()

    # ---- the scheduler's side ----

    def _has_views(self, batch: Any, decode: bool) -> bool:
        for rows, req in zip(self._batch, batch.reqs, strict=True):
            self.policy.before_pass(rows.request, req, rows.begin, rows.end, decode)
        self._placed = [
            self.policy.placed(
                RequestRows(
                    request=rows.request,
                    slots=self._table[rows.request.slot, : rows.end],
                    begin=rows.begin,
                    slot_pos=self._no_positions,  # kernels know it by the runs
                    decode=decode,
                )
            )
            for rows in self._batch
        ]
        return super()._has_views(batch, decode) or any(self._placed)

    def release(self, slot: int) -> None:
        super().release(slot)
        self._known.pop(slot, None)
        self._placed, self._reported, self._measured = [], [], []  # of the batch before: its runs may have to go

    def rewritten(self, slot: int) -> None:
        super().rewritten(slot)
        self.policy.rewritten(slot, self._table[slot])

    # ---- plans ----

    def _row(self, rows: BatchRows, placed: list[Placed]) -> _Known:
        """What a decoding request reads: kept, because mostly only its length changes."""
        known = self._known.get(rows.request.slot)
        if known is None or known.request is not rows.request or known.placed != placed:
            (seen,) = self._seen(rows)
            known = self._known[rows.request.slot] = self._plan_row(rows, seen, placed)
        return known

    def _plan_row(self, rows: BatchRows, seen: RowRuns, placed: list[Placed]) -> _Known:
        deltas: dict[int, int] = {0: 0}
        tiles: list[int] = []
        sized: list[int] = []
        turns: list[int] = []
        cuts: list[Cut] = []
        read: list[Read] = []
        tokens = 0
        for each in placed:
            if not isinstance(each.run, PooledRun):
                raise ValueError(f"a {type(each.run).__name__} for kernels: expected a PooledRun")
            piece = each.run.piece(each.begin - each.column, each.end - each.column)
            if piece is None:
                continue  # no room: its tokens are exact
            if isinstance(piece, Cut):
                cuts.append(piece)
            cells = piece.cells if isinstance(piece, Cut) else piece
            tiles += each.run.place.tiles
            sized += cells
            turns += [deltas.setdefault(each.delta, len(deltas))] * len(cells)
            read.append(Read(each.run.place, cells, each))
            tokens += each.end - each.begin
        columns = [(each.placed.begin, each.placed.end) for each in read]
        base = rows.request.slot * self._table.shape[1]
        spans: list[tuple[int, int, int]] = []
        for run in seen.runs:
            for low, high in _without(columns, run.column, run.column + run.tokens):
                spans.append((base + low, high - low, deltas.setdefault(run.delta, len(deltas))))
        *own, (tail, _) = _without(columns, seen.tail, rows.end)
        spans += [(base + low, high - low, 0) for low, high in own]
        row = PlannedRow(
            tiles=np.array(tiles, dtype=np.int32),
            sized=np.array(sized, dtype=np.int32),
            turns=np.array(turns, dtype=np.int32),
            deltas=tuple(deltas),
            spans=tuple(spans),
            tail=(base + tail, tail),
            p=self.policy.stages(rows.request.slot),
            tokens=tokens,
        )
        return _Known(rows.request, placed, cuts, row, read)

    def _plan_decode(self, anew: bool = False) -> None:
        """The batch's next steps, unless what was loaded for the step before still holds."""
        known = [self._row(rows, placed) for rows, placed in zip(self._batch, self._placed, strict=True)]
        notes = [self.policy.note(each.request.slot) if each.placed else None for each in known]
        self._reported = [(at, known[at], note) for at, note in enumerate(notes) if note is not None]
        now = [each.row for each in known]
        seq_lens = np.array([rows.end for rows in self._batch])
        before, self._seq_lens = self._seq_lens, seq_lens
        if (
            self._loaded is not None
            and self._planned  # none once a row was rewritten
            and len(now) == len(self._now)
            and all(row is then for row, then in zip(now, self._now, strict=True))
            and (seq_lens - before == 1).all()
            and all(row.dense(n) <= self._loaded.capacity.dense for row, n in zip(now, seq_lens.tolist(), strict=True))
        ):
            return
        self._now, self._planned, self._loaded = now, [rows.request for rows in self._batch], None

    # ---- buffers ----

    def _rows_for(self, capacity: Capacity, tuning: attention.Tuning | None = None) -> RowBuffers:
        return RowBuffers(
            capacity,
            self._shape,
            self.rope,
            self.memory.width,
            group_rule=self.policy.config.group,
            tuning=tuning or self._tuning,
            search=self._search,
        )

    def _load_decode(self, in_graph: bool) -> None:
        """Have the batch in the buffers that this step reads, with every step so far."""
        seq_lens: Sequence[int] = self._seq_lens.tolist()
        # A batch that is measured needs no buffers beside those of the graphs, where it fits.
        buffers = self._graph_rows if in_graph or (self._reported and self._graphs_hold()) else self._eager_rows
        if buffers is not None and self._loaded is buffers:
            return
        if buffers is None or not buffers.capacity.holds(Capacity.of(self._now, seq_lens)):
            # Never for a graph: `fits_graph` was asked before.
            grown = Capacity.of(self._now, [n + ROOM for n in seq_lens], headroom=HEADROOM)
            if buffers is not None:
                grown = grown.joined(buffers.capacity)
            buffers = self._eager_rows = self._rows_for(grown)
        buffers.load(self._now, seq_lens, self._table.view(-1))
        self._loaded = buffers

    def _advance(self, forward_batch: Any) -> None:
        if self._loaded is None:
            raise ValueError("no buffers: a batch is loaded before it advances")
        rows = len(self._batch)
        self._loaded.advance(forward_batch.seq_lens[:rows], forward_batch.out_cache_loc[:rows])

    def _allocate_for_graphs(self, max_bs: int) -> None:
        tokens = min(GRAPH_TOKENS, self._table.shape[1], self.num_slots)
        self._graph_rows = self._rows_for(
            graph_capacity(max_bs, tokens, self.policy.config.cluster * self.memory.width, self.policy.over_pools)
        )

    def fits_graph(self) -> bool:
        return not self._reported and self._graphs_hold()

    def _graphs_hold(self) -> bool:
        return self._graph_rows is not None and self._graph_rows.capacity.holds(
            Capacity.of(self._now, self._seq_lens.tolist())
        )

    def _load_empty(self, batch_size: int) -> None:
        self._now, self._planned, self._loaded = [], [], self._graph_rows
        if self._graph_rows is not None:
            self._graph_rows.load([], [], self._table.view(-1))

    def _warm_up_clusters(self) -> None:
        """Run every kernel once: the first request is not to wait for a compiler."""
        config, layer = self.policy.config, compat.first_layer(self.token_to_kv_pool)  # type: ignore[attr-defined]
        run = self.memory.make(self._table[0, : min(config.append, self._table.shape[1])], 0)
        self.memory.settle()
        if run is None:
            raise ValueError("no room for one run of clusters: expected a larger KV cache")
        one = PlannedRow(
            tiles=np.array(run.place.tiles, dtype=np.int32),
            sized=np.array(run.place.tiles, dtype=np.int32),
            turns=np.zeros(len(run.place.tiles), dtype=np.int32),
            deltas=(0,),
            spans=(),
            tail=(0, 0),
            p=config.stages,
            tokens=run.tokens,
        )
        width, device = self.memory.width, self._table.device
        tiles = tiles_of(min(self._table.shape[1], self.num_slots), config.cluster * width)
        cells = int(tiles * HEADROOM) * width
        tunings = [self._tuning]
        if cells > cuda_impl.MAX_CELLS:  # the longest rows are scored and read in Triton
            tunings.insert(0, replace(self._tuning, joint=False, fused=False))
        step = torch.ones(1, dtype=torch.int64, device=device)
        keys = self.token_to_kv_pool.get_key_buffer(layer)  # type: ignore[attr-defined]
        values = self.token_to_kv_pool.get_value_buffer(layer)  # type: ignore[attr-defined]
        query = keys.new_zeros(1, self.shape.heads, self.shape.head_dim)
        for tuning in tunings:
            rows = self._eager_rows = self._rows_for(Capacity.of([one], [ROOM]), tuning)
            rows.load([one], [1], self._table.view(-1))
            rows.advance(step, step)
            rows.attend(query, keys, values, self.memory.layers[layer], self.shape.scale)
        if config.group == "union":
            # Longer rows come in other kernels, and those that see blocks from several distances.
            clusters = query.unsqueeze(1), self.memory.layers[layer], rows.clusters(1)
            if not (self._tuning.joint and joint_impl.warm_up(*clusters, cells)):
                cuda_impl.warm_up(device, self._shape.group, cells, 1, 1, width)
            cuda_impl.warm_up(device, self._shape.group, cells, width, attention.aligned(TILE))

    def selected(self) -> dict[str, float]:
        """What the last layer of the last decoding step over clusters read, for /server_info; waits for the device.

        Returns:
            `rows` of the step, and means over its rows and key-value heads: `exact_tokens`, the share of the clustered
            tokens that are read one by one, and `approximated_clusters`, the share of the clusters that are read by
            their centroid. Empty before the first such step.
        """
        if self._loaded is None or not self._loaded.rows or len(self._now) != self._loaded.rows:
            return {}
        if self._table.is_cuda:
            torch.cuda.synchronize()
        selection, _ = self._loaded.chosen(self._loaded.rows)
        _, tokens, approx, clusters, _ = selection.counts.double().cpu().unbind(-1)
        clustered = torch.tensor([row.tokens for row in self._now], dtype=torch.float64).unsqueeze(1)
        return {
            "rows": float(len(self._now)),
            "exact_tokens": float((tokens / clustered.clamp(min=1)).mean()),
            "approximated_clusters": float((approx / clusters.clamp(min=1)).mean()),
        }

    # ---- reports ----

    def _measured_rows(self) -> list[MeasuredRow]:
        """The rows of this step that want to be measured."""
        if not self._reported:
            return []
        positions = torch.zeros(self.num_slots, dtype=torch.int32, device=self._table.device)
        measured = []
        for at, known, note in self._reported:
            rows = self._batch[at]
            (seen,) = self._seen(rows)
            slots = self._table[rows.request.slot, : rows.end]
            written = torch.arange(rows.end, dtype=torch.int32, device=slots.device)
            for run in seen.runs:
                written[run.column : run.column + run.tokens] -= run.delta
            positions[slots.long()] = written
            step = RequestRows(rows.request, slots, rows.begin, positions, decode=True)
            measured.append(MeasuredRow(at, note, step, known.read))
        return measured

    # ---- SGLang's side ----

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.memory.settle()
        super().init_forward_metadata(forward_batch)
        decodes = self.viewing and forward_batch.forward_mode.is_decode()
        self._measured = self._measured_rows() if decodes else []

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self._measured = []
        if not in_capture:
            self.memory.settle()
        super().init_forward_metadata_out_graph(forward_batch, in_capture)

    def _attend_decode(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: Any) -> torch.Tensor:
        if self._loaded is None:
            raise ValueError("no buffers: a batch is loaded before the layers run")
        out = self._loaded.attend(query, keys, values, self.memory.layers[layer.layer_id], layer.scaling)
        for row in self._measured:
            caches = Caches(layer.layer_id, keys, values, row.rows.slot_pos, self.rope, layer.scaling)
            row.measure(caches, query, self._loaded.chosen(query.shape[0])[0], self.memory)
        return out


def _without(holes: Sequence[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """[begin, end) without disjoint ranges."""
    left = []
    for low, high in sorted(holes):
        if low >= end or high <= begin:
            continue
        if low > begin:
            left.append((begin, low))
        begin = max(begin, high)
    if begin < end:
        left.append((begin, end))
    return left
