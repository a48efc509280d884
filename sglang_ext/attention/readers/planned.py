"""The reader of views that are planned on the host: one work list serves every layer, two launches a layer.

For policies that say what rows see from host data alone (`Policy.runs`). A batch is planned before it runs: nothing
waits for the GPU. While the same requests decode, a step only appends its slots to the plan's. Decoding steps and small
prefills run inside CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.attention.model import Machine, Model
from sglang_ext.attention.policy import Policy, Request
from sglang_ext.attention.readers.plans import ROOM, PlanMemory, Planner, largest
from sglang_ext.attention.readers.prefill import Prefill, Prefills
from sglang_ext.attention.readers.reader import DecodeGraphs, Reader
from sglang_ext.attention.step import Batch, BatchRows, Forward, LayerCall, LoadedT
from sglang_ext.kernels.view_attention import plan as planning
from sglang_ext.kernels.view_attention.buffers import PlanBuffers, PlanCapacity
from sglang_ext.kernels.view_attention.config import Config
from sglang_ext.kernels.view_attention.plan import Plan
from sglang_ext.kernels.view_attention.planned import view_attention_plan

GRAPH_RUNS = 96
"""Runs a row for which buffers of CUDA graphs have room; a batch that has more decodes without a graph."""


@dataclass
class Planned:
    """A plan of decoding steps, for as long as the same requests decode.

    Attributes:
        requests: of the batch.
        plan: what they read.
        seq_lens: [requests] of the newest step.
        loaded: buffers that hold the plan with every step so far; None before the first.
    """

    requests: list[Request]
    plan: Plan
    seq_lens: npt.NDArray[np.int64]
    loaded: PlanBuffers | None = None

    def grows_to(self, requests: Sequence[Request], seq_lens: npt.NDArray[np.int64]) -> bool:
        """Whether a batch is the next step of this plan's.

        Each step tells the buffers its newest slots only, so that a plan holds for the very next step alone.
        """
        if len(requests) != len(self.requests) or any(a is not b for a, b in zip(requests, self.requests, strict=True)):
            return False
        return bool((seq_lens - self.seq_lens == 1).all()) and self.plan.steps_left(seq_lens) >= 0


@dataclass(frozen=True)
class DecodeStep:
    """A decoding step with views, and the plan that it belongs to."""

    batch: Batch
    planned: Planned


@dataclass(frozen=True)
class LoadedPlan:
    """A decoding step whose plan is in `buffers`."""

    buffers: PlanBuffers

    def read(self, call: LayerCall[LoadedT]) -> torch.Tensor:
        """[rows, heads, value_dim]: attention of one layer."""
        return view_attention_plan(call.query, self.buffers, *call.caches, call.scale)


class PlannedDecodes(DecodeGraphs[DecodeStep, LoadedPlan]):
    """Plans decoding steps with views.

    Attributes:
        graph_sizes: batch sizes that have a CUDA graph, in ascending order.
    """

    def __init__(self, planner: Planner, memory: PlanMemory) -> None:
        self.planner, self.memory = planner, memory
        self.graph_sizes: list[int] = []
        self._kept: dict[int, tuple[Request, planning.PlanRows]] = {}  # what decoding requests see
        self._last: Planned | None = None
        self._graph: PlanBuffers | None = None

    def step(self, batch: Batch) -> DecodeStep:
        """The batch with its plan: that of the step before, where it still holds."""
        requests, seq_lens = [rows.request for rows in batch.rows], np.array([rows.end for rows in batch.rows])
        if self._last is None or not self._last.grows_to(requests, seq_lens):
            self._last = self._plan(batch)
        self._last.seq_lens = seq_lens
        return DecodeStep(batch, self._last)

    def _plan(self, batch: Batch) -> Planned:
        requests, seq_lens = [rows.request for rows in batch.rows], np.array([rows.end for rows in batch.rows])
        plan = self.planner.plan(
            [self._rows(rows) for rows in batch.rows],
            self.config(self._padded(len(requests))),
            first_rows=np.arange(len(requests)),
            seq_lens=seq_lens,
            room=ROOM,
        )
        return Planned(requests, plan, seq_lens)

    def _rows(self, rows: BatchRows) -> planning.PlanRows:
        """What a decoding request sees: kept, because only its length changes."""
        known = self._kept.get(rows.request.slot)
        if known is None or known[0] is not rows.request:
            (seen,) = self.planner.seen(rows)
            known = self._kept[rows.request.slot] = (rows.request, self.planner.rows(rows.request, seen, 0))
        return known[1]

    def _padded(self, batch_size: int) -> int:
        """The batch size of the graph that serves this one; without a graph too, so that both give equal tokens."""
        return next((size for size in self.graph_sizes if size >= batch_size), batch_size)

    def config(self, batch_size: int) -> Config:
        """How the kernel is cut for decoding: by the batch size alone, which is what a CUDA graph is captured for."""
        return self.planner.config(max(1.0, batch_size / 3))

    def forget(self, slot: int) -> None:
        """The request in `slot` ended."""
        self._kept.pop(slot, None)

    def forget_all(self) -> None:
        """What was planned before no longer holds."""
        self._kept.clear()
        self._last = None

    def rewritten(self, slot: int) -> None:
        """The row of the request in `slot` names other KV slots: a plan holds a copy of what it was."""
        if self._last is not None and any(request.slot == slot for request in self._last.requests):
            self._last = None

    # ---- buffers ----

    def load(self, step: DecodeStep, forward: Forward) -> LoadedPlan:
        """Have a step in buffers that no graph uses, with every step before it."""
        return self._load(step, forward, None)

    def _load(self, step: DecodeStep, forward: Forward, buffers: PlanBuffers | None) -> LoadedPlan:
        planned, into = step.planned, buffers or self.memory.first
        if planned.loaded is not into:
            if planned.loaded is not None:  # the steps before ran from other buffers: these lack their slots
                planned = self._last = self._plan(step.batch)
            if buffers is None:
                into = self.memory.load(planned.plan, 0)
            else:
                self.memory.fill(into, planned.plan)
            planned.loaded = into
        rows = len(step.batch.rows)
        into.advance(forward.seq_lens[:rows], forward.slots[:rows])
        return LoadedPlan(into)

    # ---- CUDA graphs ----

    def sizes(self, sizes: Sequence[int]) -> list[int]:
        self.graph_sizes = sorted(sizes)
        return list(sizes)

    def allocate(self, rows: int) -> None:
        shape, slots = self.planner.shape, self.planner.model.slots + rows * ROOM
        bounds = [
            PlanCapacity.bound(rows, GRAPH_RUNS, slots, config, shape.group, shape.kv_heads)
            for config in {self.config(size) for size in range(1, rows + 1)}
        ]
        self._graph = self.memory.allocate(largest(bounds), share=self.memory.first)

    def capture(self, rows: int) -> LoadedPlan:
        if self._graph is None:
            raise ValueError(f"a graph of {rows} rows is captured and has no buffers: expected `allocate` before")
        self._last = None
        self.memory.fill(self._graph, self.planner.plan([], self.config(rows)))
        return LoadedPlan(self._graph)

    def fits(self, step: DecodeStep) -> bool:
        return self._graph is not None and not self._graph.capacity.lacks(step.planned.plan)

    def before_replay(self, step: DecodeStep, forward: Forward, rows: int) -> LoadedPlan:
        if self._graph is None:
            raise ValueError(f"a graph of {rows} rows has no buffers: expected `allocate` before")
        return self._load(step, forward, self._graph)


class PlannedReader(Reader[Batch | DecodeStep, Prefill | LoadedPlan]):
    """Views of a policy that plans.

    Args:
        model: whose attention it is.
        policy: says what rows see.
        machine: which kernels there are.
    """

    def __init__(self, model: Model, policy: Policy, machine: Machine) -> None:
        self.planner = Planner(model, policy)
        self.memory = PlanMemory(self.planner)
        self.prefills = self.prefill_graphs = Prefills(self.planner, self.memory, machine)
        self.decodes = self.graphs = PlannedDecodes(self.planner, self.memory)
        if model.device.type == "cuda":
            self.prefills.warm_up()

    def step(self, batch: Batch) -> Batch | DecodeStep | None:
        rows = [each.request.row for each in batch.rows]
        if all(row is None or row.as_written for row in rows):
            return None
        return self.decodes.step(batch) if batch.decode else batch

    def before_layers(self, step: Batch | DecodeStep, forward: Forward, graph_rows: int | None) -> Prefill | LoadedPlan:
        if isinstance(step, Batch):
            return self.prefills.plan(step, graph_rows)
        return self.decodes.load(step, forward)

    def read(self, call: LayerCall[Prefill | LoadedPlan]) -> torch.Tensor:
        return call.loaded.read(call)

    def release(self, slot: int) -> None:
        self.decodes.forget(slot)
        if self.planner.forget():
            self.decodes.forget_all()

    def rewritten(self, slot: int) -> None:
        self.decodes.rewritten(slot)

    def stats(self) -> Mapping[str, Mapping[str, float]]:
        return {"view_prefills": dict(self.prefills.ran)}
