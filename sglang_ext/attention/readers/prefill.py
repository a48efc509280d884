"""Prefills with views in kernels: dense virtual requests where nothing is rotated, work lists for all other rows.

- Many query rows that see keys where these were written (a block being encoded, a long plain prompt) are virtual
  requests of a dense prefill kernel, where there is one.
- All other rows go into the work lists (`kernels.view_attention.plan`): runs of equal keys are read once for the batch.
- Where one list does not hold them, because requests of many rows see many short runs, each request's rows read its
  runs one by one (`kernels.view_attention.by_request`).

The list of a small prefill may lie in buffers that a CUDA graph reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sglang_ext.attention.choice import KERNELS_ENV
from sglang_ext.attention.model import Machine, Model
from sglang_ext.attention.readers import plans
from sglang_ext.attention.readers.plans import PlanMemory, Planner
from sglang_ext.attention.readers.reader import Loaded, PrefillGraphs
from sglang_ext.attention.seen import RowRuns
from sglang_ext.attention.step import Batch, BatchRows, LayerCall, LoadedT
from sglang_ext.kernels.dense_attention import FLASH_ATTENTION_3, HEAD_SIZES, library_of
from sglang_ext.kernels.float8 import CAPABILITY, FLOAT8
from sglang_ext.kernels.shared import sent
from sglang_ext.kernels.view_attention import plan as planning
from sglang_ext.kernels.view_attention.buffers import PlanBuffers, PlanCapacity
from sglang_ext.kernels.view_attention.by_request import block_for, plan_by_request
from sglang_ext.kernels.view_attention.by_request_impl import LoadedRequests, attend_by_request, load
from sglang_ext.kernels.view_attention.config import Config
from sglang_ext.kernels.view_attention.flash_attention_impl import FlashAttentionRequests
from sglang_ext.kernels.view_attention.flashinfer_impl import FlashInferRequests, LayerHeads
from sglang_ext.kernels.view_attention.planned import view_attention_plan
from sglang_ext.kernels.view_attention.virtual_requests import VirtualBatch, VirtualRequests

DENSE_ROWS = 256
"""Query rows of a request from which a dense prefill kernel serves it, where nothing is rotated."""

QUESTION_ROWS = 1024
"""Query rows of the largest prefill whose attention is inside its CUDA graph: above, launches are hidden anyway."""

ONE_QUESTION = 24
"""Query rows of a question of usual length; a small prefill is one, and every run is seen by all of its rows."""


BY_REQUEST_PAIRS = 32
"""Pairs of (query row, head of the group) that a request must have in the mean to read its runs one by one: fewer fill
no tile."""

BY_REQUEST_TOKENS = 256
"""Tokens that these runs have in the mean, at most. Reading each run once for the batch is faster on the GPU, but the
host prepares one list after the other. Runs of 128 tokens were faster one by one on an H100; 256 is a guess."""


@dataclass(frozen=True)
class Prefill:
    """What a prefill with views runs in every layer.

    Attributes:
        rows: query rows; what lies beyond is padding.
        dense: the dense kernel, planned for this prefill; None where it has no rows.
        lists: (first row, end row, loaded buffers) of each work list.
        by_request: in place of lists, where requests read their runs one by one; None otherwise.
        listed: [rows of the work lists] int64, where the dense kernel serves others; None where one of them serves all.
        in_graph: whether the one list is in the buffers of the CUDA graphs that have attention inside.
    """

    rows: int
    dense: VirtualRequests | None
    lists: tuple[tuple[int, int, PlanBuffers], ...]
    listed: torch.Tensor | None = None
    by_request: LoadedRequests | None = None
    in_graph: bool = False

    @property
    def kind(self) -> str:
        """In which way it runs: `graph`, `dense`, `by_request` or `lists`."""
        if self.in_graph or self.dense is not None:
            return "graph" if self.in_graph else "dense"
        return "lists" if self.by_request is None else "by_request"

    def read(self, call: LayerCall[LoadedT]) -> torch.Tensor:
        """[rows, heads, value_dim]: attention of one layer."""
        out = call.empty()
        out[self.rows :] = 0
        if self.dense is not None:
            self.dense.run(call.query[: self.rows], *call.caches, out=out[: self.rows])
        if self.listed is None:
            self._read_lists(call, out)
        else:
            apart = torch.empty_like(out)
            self._read_lists(call, apart)
            out[self.listed] = apart[self.listed]
        return out

    def _read_lists(self, call: LayerCall[LoadedT], out: torch.Tensor) -> None:
        if self.by_request is not None:
            rows = self.by_request.plan.num_rows
            attend_by_request(call.query[:rows], self.by_request, *call.caches, call.scale, out=out[:rows])
        for first, end, buffers in self.lists:
            view_attention_plan(call.query[first:end], buffers, *call.caches, call.scale, out=out[first:end])


def dense_kernel(model: Model, machine: Machine) -> VirtualRequests | None:
    """The prefill kernel over virtual requests, where there is one; there is none for a KV cache in float8.

    Raises:
        ValueError: dense kernels do not serve the model's head size, or the KV cache has a type that kernels do not
            read here.
    """
    if model.device.type != "cuda":
        return None
    if model.shape.head_dim not in HEAD_SIZES:
        raise ValueError(
            f"head size {model.shape.head_dim}: dense kernels serve {', '.join(map(str, HEAD_SIZES))}; set"
            f" {KERNELS_ENV}=torch in the server's environment, which is slow but serves any"
        )
    model.check_cache_type(float8=True)
    if model.cache_dtype == FLOAT8:
        _check_converts(model.device)
        return None  # virtual requests were measured with caches of 16 bits alone: work lists serve all rows
    if machine.kernels != "flashinfer":
        return None
    shape = model.shape
    if library_of(model.device) == FLASH_ATTENTION_3 and shape.head_dim == shape.value_dim:
        return FlashAttentionRequests(model.device)
    layer = LayerHeads(shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim, shape.dtype)
    return FlashInferRequests(model.device, layer, "auto")


def _check_converts(device: torch.device) -> None:
    """Raise ValueError for a GPU that has no instructions for float8."""
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        raise ValueError(
            f"a KV cache in float8 on a GPU of compute capability {'.'.join(map(str, found))}: kernels read it from"
            f" {'.'.join(map(str, CAPABILITY))} on; leave out --kv-cache-dtype, or set {KERNELS_ENV}=torch in the"
            " server's environment, which is slow"
        )


class Prefills(PrefillGraphs[Loaded]):
    """Plans prefills with views.

    Args:
        planner: of the policy.
        memory: buffers of work lists.
        machine: which kernels there are.

    Raises:
        ValueError: the kernels do not serve the model's heads, or its KV cache.

    Attributes:
        dense: prefill kernel over virtual requests, where there is one.
        ran: how many ran in which way.
    """

    def __init__(self, planner: Planner, memory: PlanMemory, machine: Machine) -> None:
        self.planner, self.memory, self.dense = planner, memory, dense_kernel(planner.model, machine)
        self.ran = {"graph": 0, "lists": 0, "by_request": 0, "dense": 0}
        self._question: PlanBuffers | None = None

    def plan(self, batch: Batch, graph_rows: int | None) -> Prefill:
        """Plan a prefill and load it.

        Args:
            batch: the requests.
            graph_rows: rows of the CUDA graph with attention inside that may serve it; None where there is none.
        """
        dense: list[tuple[BatchRows, RowRuns]] = []
        listed: list[planning.PlanRows] = []
        for rows in batch.rows:
            for seen in self.planner.seen(rows):
                rotated = any(run.delta for run in seen.runs)
                if self.dense is not None and not rotated and seen.end - seen.begin >= DENSE_ROWS:
                    dense.append((rows, seen))
                else:
                    for part in plans.parts(seen):
                        listed.append(self.planner.rows(rows.request, part, rows.first + part.begin - rows.begin))
        found = self._plan_question(listed, batch.total, graph_rows) if not dense else None
        if found is None:
            found = self._plan_lists(listed, dense, batch.total)
        self.ran[found.kind] += 1
        return found

    def _plan_lists(
        self, listed: Sequence[planning.PlanRows], dense: Sequence[tuple[BatchRows, RowRuns]], total: int
    ) -> Prefill:
        loaded = self._by_request(listed) if self._reads_by_request(listed) else None
        lists = self._lists(listed) if loaded is None else []
        index = None
        if dense:
            self._plan_dense(dense, total)
            if listed:
                index = sent(plans.rows_of(listed), self.planner.model.table.device)
        return Prefill(total, self.dense if dense else None, tuple(lists), index, loaded)

    def _lists(self, listed: Sequence[planning.PlanRows]) -> list[tuple[int, int, PlanBuffers]]:
        lists = []
        config = self.planner.config(plans.rows_per_run(listed))
        for number, (first, requests) in enumerate(plans.slices(listed)):
            plan = self.planner.plan(requests, config, first_rows=[each.first_row - first for each in requests])
            lists.append((first, first + plan.num_rows, self.memory.load(plan, number + 1)))
        return lists

    # ---- requests that read their runs one by one ----

    def _reads_by_request(self, listed: Sequence[planning.PlanRows]) -> bool:
        if plans.entries_of(listed) <= plans.SLICE_ENTRIES:
            return False
        pairs = sum(each.num_rows for each in listed) * self.planner.shape.group
        runs, tokens = sum(len(each.keys) for each in listed), sum(int(each.lengths.sum()) for each in listed)
        return pairs >= BY_REQUEST_PAIRS * len(listed) and tokens <= BY_REQUEST_TOKENS * runs

    def _by_request(self, listed: Sequence[planning.PlanRows]) -> LoadedRequests:
        model, shape = self.planner.model, self.planner.shape
        workers = max(1, 2 * shape.num_sms // shape.kv_heads)
        plan = plan_by_request(listed, group=shape.group, workers=workers)
        return load(plan, model.table.view(-1), model.rope, shape.kv_heads, shape.value_dim, shape.dtype)

    # ---- dense rows ----

    def _plan_dense(self, dense: Sequence[tuple[BatchRows, RowRuns]], total: int) -> None:
        """Virtual requests in row order; rows between them belong to the work lists and see nothing here."""
        rows: list[int] = []
        tokens: list[int] = []
        parts: list[torch.Tensor] = []
        done = 0
        for batch_rows, seen in dense:
            first = batch_rows.first + seen.begin - batch_rows.begin
            if first > done:
                rows.append(first - done)
                tokens.append(0)
            slots = self.planner.model.table[batch_rows.request.slot]
            spans = [(run.column, run.column + run.tokens) for run in seen.runs] + [(seen.tail, seen.end)]
            parts.extend(slots[low:high] for low, high in spans)
            rows.append(seen.end - seen.begin)
            tokens.append(sum(high - low for low, high in spans))
            done = first + rows[-1]
        if done < total:
            rows.append(total - done)
            tokens.append(0)
        self._plan_dense_of(rows, tokens, torch.cat(parts))

    def _plan_dense_of(self, rows: Sequence[int], tokens: Sequence[int], slots: torch.Tensor) -> None:
        if self.dense is None:
            raise ValueError("no dense prefill kernel: rows cannot be virtual requests")
        self.dense.plan(VirtualBatch(rows, tokens, slots, causal=True, scale=self.planner.shape.scale))

    # ---- CUDA graphs with attention inside ----

    def allocate(self, sizes: Sequence[int]) -> None:
        """Room for prefills inside CUDA graphs of `sizes` rows, before they are captured."""
        sizes = [size for size in sizes if size <= QUESTION_ROWS]
        if not sizes:
            return
        workers = max(self.question_config(size).workers(self.planner.shape.kv_heads) for size in sizes)
        capacity = PlanCapacity(
            rows=max(sizes),
            items=plans.SLICE_ENTRIES + workers,
            entries=self.memory.entries,
            angles=plans.SLICE_ENTRIES,
            slots=self.planner.model.slots,
            workers=workers,
        )
        self._question = self.memory.allocate(capacity, share=self.memory.first)

    def question_config(self, size: int) -> Config:
        """How the kernel is cut for the prefill graph of `size` rows: by its size alone, as for decoding."""
        return self.planner.config(max(min(size, ONE_QUESTION), size / 3))

    def capture(self, size: int) -> Prefill | None:
        """The prefill that a graph of `size` rows is captured with; None where it is to have no attention inside."""
        if self._question is None or size > QUESTION_ROWS:
            return None
        self.memory.fill(self._question, self.planner.plan([], self.question_config(size)))
        return Prefill(size, None, ((0, size, self._question),), in_graph=True)

    def _plan_question(self, listed: Sequence[planning.PlanRows], total: int, size: int | None) -> Prefill | None:
        """The plan of a prefill whose attention is inside its CUDA graph; None where it cannot be."""
        buffers = self._question
        if size is None or buffers is None or plans.entries_of(listed) > plans.SLICE_ENTRIES:
            return None
        plan = self.planner.plan(listed, self.question_config(size))
        if buffers.capacity.lacks(plan):
            return None
        self.memory.fill(buffers, plan)
        return Prefill(total, None, ((0, size, buffers),), in_graph=True)

    def holds(self, step: Loaded) -> bool:
        return isinstance(step, Prefill) and step.in_graph

    # ---- warm-up ----

    def _rows_by_request(self) -> list[int]:
        """Rows of a request by which every size of tiles is chosen once."""
        group = self.planner.shape.group
        rows = {block_for(rows * group, group): rows for rows in range(1, 129)}
        return sorted(rows.values())

    def warm_up(self) -> None:
        """Run every kernel that a batch may need once: the first request is not to wait for a compiler."""
        model, shape = self.planner.model, self.planner.shape
        caches = model.caches()
        keys, values = caches[min(caches)]
        query = keys.new_zeros(1, shape.heads, shape.head_dim, dtype=shape.dtype)
        none = np.zeros(1, dtype=np.int64)
        seen = planning.PlanRows(first_row=0, num_rows=1, keys=none - 1, lengths=none + 1, deltas=none, source=none)
        for config in self.planner.configs():
            buffers = self.memory.load(self.planner.plan([seen], config), 1)
            view_attention_plan(query, buffers, keys, values, shape.scale)
            one = torch.ones(1, dtype=torch.int64, device=query.device)
            buffers.advance(one, one)  # there is no tail: nothing is written
        for rows in self._rows_by_request():
            each = replace(seen, num_rows=rows, lengths=none + rows, own=(0,))
            queries = query.expand(rows, -1, -1).contiguous()
            attend_by_request(queries, self._by_request([each]), keys, values, shape.scale, torch.empty_like(queries))
        if self.dense is not None:
            self._plan_dense_of([1], [1], model.table[0, :1])
            self.dense.run(query, keys, values, out=query.new_empty(1, shape.heads, shape.value_dim))
