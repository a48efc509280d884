"""The reader of rows through clusters: score the clusters, select them, attend; three steps a layer, in CUDA graphs.

For policies whose decoding steps read clusters. Prefills, of blocks and of questions over them too, are planned as
those of `readers.planned`. So are decoding steps that read no cluster, where clusters are not for pools and no CUDA
graph holds the step. In other decoding batches with views, every row goes through the kernels here: a dense one has
exact tokens only, a view's runs are exact tokens that a rotated query reads.

The host knows which runs a row reads, and says so when that changes; which clusters of them are read, how, is chosen on
the device in every layer. A step in between only appends its newest slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from sglang_ext.attention.clustered import Placed
from sglang_ext.attention.clustered_report import MeasuredRow
from sglang_ext.attention.double_p import DoublePPolicy
from sglang_ext.attention.model import Machine, Model
from sglang_ext.attention.policy import Caches, RequestRows
from sglang_ext.attention.readers.cluster_rows import HEADROOM, KnownRow, known_row
from sglang_ext.attention.readers.cluster_warm_up import warm_up
from sglang_ext.attention.readers.planned import DecodeStep, LoadedPlan, PlannedDecodes
from sglang_ext.attention.readers.plans import ROOM, PlanMemory, Planner
from sglang_ext.attention.readers.prefill import Prefill, Prefills
from sglang_ext.attention.readers.reader import DecodeGraphs, Reader
from sglang_ext.attention.step import Batch, BatchRows, Forward, LayerCall, LoadedT
from sglang_ext.cache.cluster_pool import ClusterMemory, tiles_of
from sglang_ext.compat.ranks import mean_over_ranks
from sglang_ext.kernels.cluster_attention.buffers import RowBuffers
from sglang_ext.kernels.cluster_attention.rows import COPY, PlannedRow, RowCapacity
from sglang_ext.kernels.cluster_attention.types import TUNING, ClusterTuning, HeadShape
from sglang_ext.kernels.kmeans import Clusters, kmeans_layers
from sglang_ext.kernels.top_p.types import TUNING as SEARCH
from sglang_ext.kernels.top_p.types import SetRule
from sglang_ext.types import JsonObject

GRAPH_TOKENS = 131072
"""Tokens of a row for which buffers of CUDA graphs have room; a batch with a longer one decodes without a graph."""

GRAPH_ROTATIONS = 64
"""Rotations of a row likewise: distances by which its blocks are seen away from where they were written.

Only where blocks are read through clusters (`over_pools`). Elsewhere graphs know one, since kernels for several cost a
quarter more; answers over blocks that are rotated decode without graphs there.
"""

GRAPH_SPANS = 256
"""Spans of exact tokens a row likewise."""

PROGRAMS = 2
"""Programs of attention on each multiprocessor."""


def graph_capacity(rows: int, tokens: int, tile: int, over_pools: bool) -> RowCapacity:
    """Room of the CUDA graphs for `rows` rows of up to `tokens` tokens, in tiles of `tile`."""
    return RowCapacity(
        rows=rows,
        tiles=tiles_of(tokens, tile),
        tokens=tokens,
        dense=tokens + ROOM,
        rotations=GRAPH_ROTATIONS if over_pools else 1,
        copies=rows * (tokens // COPY + GRAPH_SPANS),
    ).rounded()


@dataclass(frozen=True)
class ClusterStep:
    """A decoding step, as the host knows it.

    Attributes:
        batch: the requests.
        known: what each of them reads.
        notes: of each, where its figures go; None where it is not to be measured.
    """

    batch: Batch
    known: tuple[KnownRow, ...]
    notes: tuple[JsonObject | None, ...]

    @property
    def rows(self) -> list[PlannedRow]:
        return [each.row for each in self.known]

    @property
    def seq_lens(self) -> list[int]:
        return [rows.end for rows in self.batch.rows]

    @property
    def measured(self) -> bool:
        return any(note is not None for note in self.notes)

    @property
    def capacity(self) -> RowCapacity:
        """What the step needs."""
        return RowCapacity.of(self.rows, self.seq_lens)


@dataclass(frozen=True)
class LoadedRows:
    """A decoding step whose rows are in `buffers`.

    Attributes:
        buffers: kernels read them.
        memory: the clusters.
        model: whose attention it is.
        measured: rows whose figures are wanted.
    """

    buffers: RowBuffers
    memory: ClusterMemory
    model: Model
    measured: tuple[MeasuredRow, ...] = ()

    def read(self, call: LayerCall[LoadedT]) -> torch.Tensor:
        """[rows, heads, value_dim]: attention of one layer."""
        out = self.buffers.attend(call.query, *call.caches, self.memory.layers[call.layer], call.scale)
        for row in self.measured:
            caches = Caches(call.layer, *call.caches, row.rows.slot_pos, self.model.rope, call.scale)
            row.measure(caches, call.query, self.buffers.chosen(call.query.shape[0])[0], self.memory)
        return out


@dataclass
class _Last:
    """What was loaded last: rows up to `seq_lens`; `stale` once one of them was rewritten."""

    buffers: RowBuffers
    rows: list[PlannedRow]
    seq_lens: list[int]
    stale: bool = False


class ClusterDecodes(DecodeGraphs[ClusterStep, LoadedRows]):
    """Decoding steps over clusters.

    Attributes:
        memory: the clusters.
    """

    def __init__(self, planner: Planner, policy: DoublePPolicy) -> None:
        self.planner, self.model, self.policy = planner, planner.model, policy
        device, shape = self.model.device, planner.shape
        cluster: Callable[..., Clusters] = kmeans_layers
        if device.type == "cuda":
            from sglang_ext.kernels.kmeans.dispatch import kmeans_layers as cluster
        self.memory = ClusterMemory(dict(self.model.caches()), policy.config, cluster, shape.dtype)
        policy.keep_in(self.memory)
        self._shape = HeadShape(shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim, shape.dtype)
        registers = TUNING.registers if device.type == "cuda" else None
        self._tuning = replace(TUNING, programs=PROGRAMS * shape.num_sms, registers=registers)  # of CUDA graphs
        self._tuning_outside = replace(self._tuning, any_size=True)
        # Triton's interpreter reduces several numbers at once element by element, one number by NumPy.
        self._search = replace(SEARCH, joint=SEARCH.joint and device.type == "cuda")
        self._known: dict[int, KnownRow] = {}
        self._eager: RowBuffers | None = None
        self._graph: RowBuffers | None = None
        self._last: _Last | None = None
        if device.type == "cuda":
            self.warm_up()

    def warm_up(self) -> None:
        """Compile what steps outside of CUDA graphs need."""
        warm_up(self.planner, self.policy, self.memory, self._tuning_outside, self._rows_for)

    # ---- the host's side ----

    def step(self, batch: Batch, placed: Sequence[list[Placed]]) -> ClusterStep:
        """What a batch reads, of which `placed` are each request's clusters."""
        known = tuple(self._row(rows, clusters) for rows, clusters in zip(batch.rows, placed, strict=True))
        notes = tuple(self.policy.note(each.request.slot) if each.placed else None for each in known)
        return ClusterStep(batch, known, notes)

    def _row(self, rows: BatchRows, placed: list[Placed]) -> KnownRow:
        """What a decoding request reads: kept, because mostly only its length changes."""
        known = self._known.get(rows.request.slot)
        if known is None or known.request is not rows.request or known.placed != placed:
            (seen,) = self.planner.seen(rows)
            columns, p = self.model.table.shape[1], self.policy.stages(rows.request.slot)
            known = self._known[rows.request.slot] = known_row(rows.request, seen, placed, columns, p)
        return known

    def forget(self, slot: int) -> None:
        """The request in `slot` ended."""
        self._known.pop(slot, None)

    def rewritten(self, slot: int) -> None:
        """The row of the request in `slot` names other KV slots: what was loaded holds a copy of what it was."""
        if self._last is not None and slot in self._known:
            self._last.stale = True

    # ---- buffers ----

    def _rows_for(self, capacity: RowCapacity, tuning: ClusterTuning) -> RowBuffers:
        return RowBuffers(
            capacity,
            self._shape,
            self.model.rope,
            self.memory.width,
            rule=SetRule(self.policy.config.group),
            tuning=tuning,
            search=self._search,
        )

    def load(self, step: ClusterStep, forward: Forward) -> LoadedRows:
        """Have a step in buffers, outside of CUDA graphs, with every step before it."""
        # A batch that is measured needs no buffers beside those of the graphs, where it fits.
        buffers = self._graph if step.measured and self._holds(step) else self._eager
        return LoadedRows(self._load(step, forward, buffers), self.memory, self.model, tuple(self._measured(step)))

    def _load(self, step: ClusterStep, forward: Forward, buffers: RowBuffers | None) -> RowBuffers:
        rows, seq_lens = step.rows, step.seq_lens
        if buffers is None or not self._goes_on(buffers, rows, seq_lens):
            if buffers is None or not buffers.capacity.holds(step.capacity):
                # Never for a graph: `fits` was asked before.
                grown = RowCapacity.of(rows, [n + ROOM for n in seq_lens], headroom=HEADROOM).rounded()
                if buffers is not None:
                    grown = grown.joined(buffers.capacity)
                buffers = self._eager = self._rows_for(grown, self._tuning_outside)
            buffers.load(rows, seq_lens, self.model.table.view(-1))
        self._last = _Last(buffers, rows, seq_lens)
        buffers.advance(forward.seq_lens[: len(rows)], forward.slots[: len(rows)])
        return buffers

    def _goes_on(self, buffers: RowBuffers, rows: Sequence[PlannedRow], seq_lens: Sequence[int]) -> bool:
        """Whether `buffers` hold these rows up to the step before."""
        last = self._last
        return (
            last is not None
            and last.buffers is buffers
            and not last.stale
            and len(rows) == len(last.rows)
            and all(row is then for row, then in zip(rows, last.rows, strict=True))
            and all(now - then == 1 for now, then in zip(seq_lens, last.seq_lens, strict=True))
            and all(row.dense(n) <= buffers.capacity.dense for row, n in zip(rows, seq_lens, strict=True))
        )

    # ---- CUDA graphs ----

    def allocate(self, rows: int) -> None:
        tokens = min(GRAPH_TOKENS, self.model.table.shape[1], self.model.slots)
        tile = self.policy.config.cluster * self.memory.width
        self._graph = self._rows_for(graph_capacity(rows, tokens, tile, self.policy.over_pools), self._tuning)

    def capture(self, rows: int) -> LoadedRows:
        if self._graph is None:
            raise ValueError(f"a graph of {rows} rows is captured and has no buffers: expected `allocate` before")
        self._graph.load([], [], self.model.table.view(-1))
        self._last = _Last(self._graph, [], [])
        return LoadedRows(self._graph, self.memory, self.model)

    def fits(self, step: ClusterStep | DecodeStep) -> bool:
        return isinstance(step, ClusterStep) and not step.measured and self._holds(step)

    def _holds(self, step: ClusterStep) -> bool:
        return self._graph is not None and self._graph.capacity.holds(step.capacity)

    def before_replay(self, step: ClusterStep, forward: Forward, rows: int) -> LoadedRows:
        if self._graph is None:
            raise ValueError(f"a graph of {rows} rows has no buffers: expected `allocate` before")
        return LoadedRows(self._load(step, forward, self._graph), self.memory, self.model)

    def selected(self) -> dict[str, float]:
        """What the last layer of the last decoding step over clusters read, for /server_info; waits for the device.

        Returns:
            `rows` of the step, and means over its rows and the key-value heads of all ranks: `exact_tokens`, the share
            of the clustered tokens that are read one by one, and `approximated_clusters`, the share of the clusters
            that are read by their centroid. Empty before the first such step.
        """
        last = self._last
        if last is None or not last.rows or len(last.rows) != last.buffers.rows:
            return {}
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        selection, _ = last.buffers.chosen(last.buffers.rows)
        _, tokens, approx, clusters, _ = selection.counts.double().cpu().unbind(-1)
        clustered = torch.tensor([row.tokens for row in last.rows], dtype=torch.float64).unsqueeze(1)
        shares = (tokens / clustered.clamp(min=1)).mean(), (approx / clusters.clamp(min=1)).mean()
        exact, approximated = mean_over_ranks(torch.stack(shares)).tolist()
        return {"rows": float(len(last.rows)), "exact_tokens": exact, "approximated_clusters": approximated}

    # ---- reports ----

    def _measured(self, step: ClusterStep) -> list[MeasuredRow]:
        """The rows of a step that want to be measured."""
        if not step.measured:
            return []
        table, measured = self.model.table, list[MeasuredRow]()
        positions = torch.zeros(self.model.slots, dtype=torch.int32, device=table.device)
        for at, (rows, known, note) in enumerate(zip(step.batch.rows, step.known, step.notes, strict=True)):
            if note is None:
                continue
            (seen,) = self.planner.seen(rows)
            slots = table[rows.request.slot, : rows.end]
            written = torch.arange(rows.end, dtype=torch.int32, device=slots.device)
            for run in seen.runs:
                written[run.column : run.column + run.tokens] -= run.delta
            positions[slots.long()] = written
            found = RequestRows(rows.request, slots, rows.begin, positions, decode=True)
            measured.append(MeasuredRow(at, note, found, known.read))
        return measured


class ClusterReader(Reader[Batch | ClusterStep | DecodeStep, Prefill | LoadedRows | LoadedPlan]):
    """Prefills as they are planned, decoding steps through clusters.

    Steps of a batch that reads no cluster are planned, too, where clusters are not for pools and no CUDA graph holds
    them: blocks that requests share are read once for all of them then, and the kernels of clusters read them for each.

    Args:
        model: whose attention it is.
        policy: which clusters a row has, and what is made of them.
        machine: which kernels there are.
    """

    def __init__(self, model: Model, policy: DoublePPolicy, machine: Machine) -> None:
        self.model, self.policy = model, policy
        self.planner = Planner(model, policy)
        memory = PlanMemory(self.planner)
        self.prefills = self.prefill_graphs = Prefills(self.planner, memory, machine)
        self.decodes = self.graphs = ClusterDecodes(self.planner, policy)
        self.planned = PlannedDecodes(self.planner, memory)
        self._no_positions = model.table.new_empty(0)
        if model.device.type == "cuda":
            self.prefills.warm_up()

    def step(self, batch: Batch) -> Batch | ClusterStep | DecodeStep | None:
        for rows in batch.rows:
            self.policy.before_pass(rows.request, rows.req, rows.begin, rows.end, batch.decode)
        placed = [self.policy.placed(self._rows(rows, batch.decode)) for rows in batch.rows]
        if not any(placed) and all(rows.request.row is None for rows in batch.rows):
            return None
        if not batch.decode:
            return batch
        step = self.decodes.step(batch, placed)
        clustered = self.policy.over_pools or any(placed) or self.decodes.fits(step)
        return step if clustered else self.planned.step(batch)

    def _rows(self, rows: BatchRows, decode: bool) -> RequestRows:
        slots = self.model.table[rows.request.slot, : rows.end]
        return RequestRows(rows.request, slots, rows.begin, self._no_positions, decode)  # kernels know it by the runs

    def before_pass(self) -> None:
        self.decodes.memory.settle()

    def before_layers(
        self, step: Batch | ClusterStep | DecodeStep, forward: Forward, graph_rows: int | None
    ) -> Prefill | LoadedRows | LoadedPlan:
        if isinstance(step, ClusterStep):
            return self.decodes.load(step, forward)
        if isinstance(step, DecodeStep):
            return self.planned.load(step, forward)
        return self.prefills.plan(step, graph_rows)

    def read(self, call: LayerCall[Prefill | LoadedRows | LoadedPlan]) -> torch.Tensor:
        return call.loaded.read(call)

    def release(self, slot: int) -> None:
        self.decodes.forget(slot)
        self.planned.forget(slot)
        if self.planner.forget():
            self.planned.forget_all()

    def rewritten(self, slot: int) -> None:
        self.decodes.rewritten(slot)
        self.planned.rewritten(slot)
        self.policy.rewritten(slot, self.model.table[slot])

    def stats(self) -> Mapping[str, Mapping[str, float]]:
        return {"view_prefills": dict(self.prefills.ran), "last_selection": self.decodes.selected()}
