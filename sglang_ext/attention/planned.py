"""Views planned on the host: one work list serves every layer, two launches a layer, inside CUDA graphs.

For policies that say what rows see from host data alone (`Policy.plans`). Mixed over one of SGLang's own backends,
which serves batches of plain requests untouched. In a batch that has views:

- many query rows that turn nothing (a block being encoded, a long plain prompt) are virtual requests of a dense prefill
  kernel, where there is one;
- all other rows go into the work list (`kernels.view_attention.plan`): runs of equal keys are read once for the batch.

A batch is planned from host data before it runs: nothing waits for the GPU. While the same requests decode, a step
only appends its slots to the plan's.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from sglang_ext import compat
from sglang_ext.attention.policy import Policy, Request, RowRuns
from sglang_ext.attention.requests import RequestTable, ViewBackend, note_batch
from sglang_ext.attention.rope import find_rope
from sglang_ext.kernels.view_attention import plan as planning
from sglang_ext.kernels.view_attention.buffers import Capacity, PlanBuffers
from sglang_ext.kernels.view_attention.flashinfer_impl import VirtualRequests
from sglang_ext.kernels.view_attention.plan import Config, Plan
from sglang_ext.kernels.view_attention.planned import view_attention_plan

ROOM = 64
"""Tokens by which requests may grow before a batch that stays the same is planned again."""

DENSE_ROWS = 256
"""Query rows of a request from which a dense prefill kernel serves it, where nothing is turned."""

GRAPH_RUNS = 96
"""Runs a row for which buffers of CUDA graphs have room; a batch that has more decodes without a graph."""

SLICE_ENTRIES = 16384
"""Partial outputs of one work list; prefills that need more are cut into several."""

QUESTION_ROWS = 1024
"""Query rows of the largest prefill whose attention is inside its CUDA graph: above, launches are hidden anyway."""

ONE_QUESTION = 24
"""Query rows of a question of usual length; a small prefill is one, and every run is seen by all of its rows."""

ROWS = (1.0, 40.0, 100.0, 160.0, 1e6)
"""Pairs of (query row, head of the group) that see a run, one number for each configuration of the kernels."""

MAX_KEYS = 100_000
"""Names of runs that are remembered before they are numbered anew."""


@dataclass(frozen=True)
class BatchRows:
    """The new rows of one request in a batch: columns [begin, end), query rows from `first`."""

    request: Request
    first: int
    begin: int
    end: int


@dataclass
class _Extend:
    """What a prefill with views runs in every layer.

    Attributes:
        rows: query rows; what lies beyond is padding.
        dense: whether the dense kernel was planned.
        lists: (first row, end row, loaded buffers) of each work list.
        listed: rows of the work lists, where the dense kernel serves others; None where one of them serves all.
        in_graph: whether the one list is in the buffers of the CUDA graphs that have attention inside.
    """

    rows: int
    dense: bool
    lists: list[tuple[int, int, PlanBuffers]]
    listed: torch.Tensor | None
    in_graph: bool = False


class PlannedViews(ViewBackend):
    """Mixin over a backend of SGLang's: `class Backend(PlannedViews, TheBase)`.

    Attributes:
        dense: prefill kernel over virtual requests, where there is one.
        viewing: whether the batch at hand has views; the base serves it otherwise.
        graph_sizes: batch sizes that have a CUDA graph, in ascending order.
        prefills: how many prefills with views ran in which way.
        question_size: rows of the CUDA graph with attention inside that may serve the prefill at hand; None where there
            is none.
    """

    dense: VirtualRequests | None = None

    def __init__(self, model_runner: Any, policy: Policy) -> None:
        compat.refuse_model(model_runner)
        super().__init__(model_runner)  # type: ignore[call-arg]
        self.policy = policy
        self.requests = RequestTable(policy)
        self.shape = compat.attention_shape(model_runner)
        self.rope = find_rope(model_runner.model)
        self.num_slots = compat.num_kv_slots(model_runner)
        self.viewing = False
        self.graph_sizes: list[int] = []
        self.prefills = {"graph": 0, "lists": 0, "dense": 0}
        self.question_size: int | None = None
        self._table: torch.Tensor = self.req_to_token_pool.req_to_token  # type: ignore[attr-defined]
        self._keys: dict[Hashable, int] = {}
        self._kept: dict[int, tuple[Request, planning.RowRuns]] = {}  # what decoding requests see
        self._batch: list[BatchRows] = []
        self._planned: list[Request] = []
        self._seq_lens = np.zeros(0, dtype=np.int64)
        self._plan: Plan | None = None
        self._graph_buffers: PlanBuffers | None = None
        self._question_buffers: PlanBuffers | None = None
        # Cutting a list's items repeats the rows of at most one tile a worker.
        shape = self.shape
        self._hopper = _hopper_serves(shape, self.rope.inv_freq.device)
        configs = [self._config(rows / shape.group) for rows in ROWS]
        repeated = max(config.workers(shape.kv_heads) * config.tile_rows(shape.group) for config in configs)
        # Outside of graphs; grow when needed, all over the first one's partial outputs.
        self._grown = [self._allocate(Capacity(1, 1, SLICE_ENTRIES + repeated, 1, 1, 1))]
        self._decoding: PlanBuffers | None = None
        self._extend: _Extend | None = None

    # ---- the scheduler's side ----

    def prepare(self, batch: Any, forward_batch: Any) -> None:
        first = 0
        self._batch = []
        for request, begin, end in note_batch(self.requests, batch, forward_batch):
            self._batch.append(BatchRows(request, first, begin, end))
            first += end - begin
        decode = forward_batch.forward_mode.is_decode()
        self.viewing = self._has_views(batch, decode)
        if self.viewing and decode:
            self._plan_decode()

    def _has_views(self, batch: Any, decode: bool) -> bool:
        """Whether the batch at hand is none for the base class."""
        return any(rows.request.row is not None for rows in self._batch)

    def release(self, slot: int) -> None:
        self.requests.release(slot)
        self._kept.pop(slot, None)
        if len(self._keys) > MAX_KEYS:  # blocks come and go for as long as the server runs
            self._keys.clear()
            self._kept.clear()
            self._planned = []

    def rewritten(self, slot: int) -> None:
        if any(request.slot == slot for request in self._planned):
            self._planned = []  # its plan holds a copy of the row as it was

    # ---- plans ----

    def _key(self, key: Hashable) -> int:
        return self._keys.setdefault(key, len(self._keys))

    def _rows(self, request: Request, seen: RowRuns, first: int) -> planning.RowRuns:
        """What rows see, as the planner takes it: runs of the flattened table of slots."""
        base = request.slot * self._table.shape[1]
        runs = [run for run in seen.runs if run.tokens]
        keys = [self._key((request.slot, run.column) if run.key is None else run.key) for run in runs]
        return planning.RowRuns(
            first_row=first,
            num_rows=seen.end - seen.begin,
            keys=np.array([*keys, -1]),
            lengths=np.array([*(run.tokens for run in runs), seen.end - seen.tail]),
            deltas=np.array([*(run.delta for run in runs), 0]),
            source=np.array([*(base + run.column for run in runs), base + seen.tail]),
            own=(len(runs),),
            tail_column=seen.tail,
        )

    def _seen(self, rows: BatchRows) -> Sequence[RowRuns]:
        runs = self.policy.runs(rows.request, rows.begin, rows.end)
        return runs if runs is not None else [RowRuns(rows.begin, rows.end, (), tail=0)]

    def _decode_rows(self, rows: BatchRows) -> planning.RowRuns:
        """What a decoding request sees: kept, because only its length changes."""
        known = self._kept.get(rows.request.slot)
        if known is None or known[0] is not rows.request:
            (seen,) = self._seen(rows)
            known = self._kept[rows.request.slot] = (rows.request, self._rows(rows.request, seen, 0))
        return known[1]

    def _plan_decode(self, anew: bool = False) -> None:
        """Plan the batch's next steps, unless the plan of the step before still holds.

        Each step tells the plan its newest slots only, so that it holds for the very next step of the same requests.
        """
        requests = [rows.request for rows in self._batch]
        seq_lens = np.array([rows.end for rows in self._batch])
        before, self._seq_lens = self._seq_lens, seq_lens
        if (
            not anew
            and self._plan is not None
            and len(requests) == len(self._planned)
            and all(now is then for now, then in zip(requests, self._planned, strict=True))
            and (seq_lens - before == 1).all()
            and self._plan.steps_left(seq_lens) >= 0
        ):
            return
        self._planned, self._decoding = requests, None
        self._plan = planning.plan_rows(
            [self._decode_rows(rows) for rows in self._batch],
            config=self.decode_config(self._padded(len(requests))),
            group=self.shape.group,
            kv_heads=self.shape.kv_heads,
            room=ROOM,
            first_rows=np.arange(len(requests)),
            seq_lens=seq_lens,
        )

    def _padded(self, batch_size: int) -> int:
        """The batch size of the graph that serves this one; without a graph too, so that both give equal tokens."""
        return next((size for size in self.graph_sizes if size >= batch_size), batch_size)

    def decode_config(self, batch_size: int) -> Config:
        """How the kernel is cut for decoding: by the batch size alone, which is what a CUDA graph is captured for."""
        return self._config(max(1.0, batch_size / 3))

    def _config(self, rows_per_run: float) -> Config:
        return planning.choose(
            rows_per_run,
            self.shape.group,
            self.shape.head_dim,
            self.shape.value_dim,
            itemsize=self.shape.dtype.itemsize,
            num_sms=self.shape.num_sms,
            kv_heads=self.shape.kv_heads,
            hopper=self._hopper,
        )

    def _plan_extend(self) -> _Extend:
        dense: list[tuple[BatchRows, RowRuns]] = []
        listed: list[planning.RowRuns] = []
        for rows in self._batch:
            for seen in self._seen(rows):
                turned = any(run.delta for run in seen.runs)
                if self.dense is not None and not turned and seen.end - seen.begin >= DENSE_ROWS:
                    dense.append((rows, seen))
                else:
                    for part in _parts(seen):
                        listed.append(self._rows(rows.request, part, rows.first + part.begin - rows.begin))
        total = self._batch[-1].first + self._batch[-1].end - self._batch[-1].begin
        in_graph = None if dense else self._plan_question(listed, total)
        if in_graph is not None:
            return in_graph
        lists = []
        config = self._config(_rows_per_run(listed))
        for number, (first, requests) in enumerate(_slices(listed)):
            plan = planning.plan_rows(
                requests,
                config=config,
                group=self.shape.group,
                kv_heads=self.shape.kv_heads,
                first_rows=[request.first_row - first for request in requests],
            )
            lists.append((first, first + plan.num_rows, self._load(plan, number + 1)))
        index = None
        if dense:
            self._plan_dense(dense, total)
            if listed:
                index = _rows_of(listed)
                index = index.pin_memory() if self._table.is_cuda else index  # no copy that waits for the GPU
                index = index.to(self._table.device, non_blocking=True)
        return _Extend(total, bool(dense), lists, index)

    def _plan_question(self, listed: Sequence[planning.RowRuns], total: int) -> _Extend | None:
        """The plan of a prefill whose attention is inside its CUDA graph; None where it cannot be."""
        size, buffers = self.question_size, self._question_buffers
        if size is None or buffers is None or _entries(listed) > SLICE_ENTRIES:
            return None
        plan = planning.plan_rows(
            listed, config=self.question_config(size), group=self.shape.group, kv_heads=self.shape.kv_heads
        )
        if buffers.capacity.lacks(plan):
            return None
        buffers.load(plan, self._table.view(-1))
        return _Extend(total, False, [(0, size, buffers)], None, in_graph=True)

    def question_config(self, size: int) -> Config:
        """How the kernel is cut for the prefill graph of `size` rows: by its size alone, as for decoding."""
        return self._config(max(min(size, ONE_QUESTION), size / 3))

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
            slots = self._table[batch_rows.request.slot]
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
        self.dense.plan(
            rows,
            tokens,
            slots,
            heads=self.shape.heads,
            kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim,
            value_dim=self.shape.value_dim,
            dtype=self.shape.dtype,
            causal=True,
            scale=self.shape.scale,
        )

    # ---- buffers ----

    def begin_capture(self, sizes: list[int]) -> list[int]:
        self.graph_sizes = sorted(sizes)
        return sizes

    def _allocate(self, capacity: Capacity, share: PlanBuffers | None = None) -> PlanBuffers:
        return PlanBuffers(
            capacity,
            heads=self.shape.heads,
            kv_heads=self.shape.kv_heads,
            value_dim=self.shape.value_dim,
            rope=self.rope,
            # Weighted means of values in this type; what rounding them adds is of the size of rounding the output.
            part_dtype=self.shape.dtype,
            share=share,
            turned=self.shape.dtype if self._hopper else None,
        )

    def _load(self, plan: Plan, number: int) -> PlanBuffers:
        """Load a plan into buffers that no graph uses: number 0 for decoding, 1 and on for a prefill's lists.

        The lists of a prefill run one after the other, so all use the first one's partial outputs.
        """
        if len(self._grown) <= number or self._grown[number].capacity.lacks(plan):
            share, capacity = self._grown[0], Capacity.of(plan, headroom=1.25)
            if number < len(self._grown):  # one kind of plan has more rows, another more workers: hold both
                capacity = _largest((capacity, self._grown[number].capacity))
            lent = len(share.part)
            if len(plan.entry_row) <= lent < capacity.entries:  # no headroom for what would then be of its own
                capacity = replace(capacity, entries=lent)
            self._grown[number : number + 1] = [self._allocate(capacity, share)]
        self._grown[number].load(plan, self._table.view(-1))
        return self._grown[number]

    def _load_decode(self, in_graph: bool) -> None:
        """Have the plan in the buffers that this step reads, with every step so far."""
        buffers = self._graph_buffers if in_graph else self._grown[0]
        if self._decoding is buffers and buffers is not None:
            return
        if self._decoding is not None:  # the steps before ran from other buffers: these lack their slots
            self._plan_decode(anew=True)
        if self._plan is None:
            raise ValueError("a batch with views decodes that was not planned: prepare() runs before every batch")
        if in_graph and buffers is not None:
            buffers.load(self._plan, self._table.view(-1))
            self._decoding = buffers
        else:
            self._decoding = self._load(self._plan, 0)

    def warm_up(self) -> None:
        """Run every kernel that a batch may need once: the first request is not to wait for a compiler."""
        layer = compat.first_layer(self.token_to_kv_pool)  # type: ignore[attr-defined]
        caches = self.token_to_kv_pool.get_key_buffer(layer), self.token_to_kv_pool.get_value_buffer(layer)  # type: ignore[attr-defined]
        query = caches[0].new_zeros(1, self.shape.heads, self.shape.head_dim)
        none = np.zeros(1, dtype=np.int64)
        seen = planning.RowRuns(first_row=0, num_rows=1, keys=none - 1, lengths=none + 1, deltas=none, source=none)
        for config in {self._config(rows / self.shape.group) for rows in ROWS}:
            plan = planning.plan_rows([seen], config=config, group=self.shape.group, kv_heads=self.shape.kv_heads)
            buffers = self._load(plan, 1)
            view_attention_plan(query, buffers, *caches, self.shape.scale)
            one = torch.ones(1, dtype=torch.int64, device=query.device)
            buffers.advance(one, one)  # there is no tail: nothing is written
        if self.dense is not None:
            self._plan_dense_of([1], [1], self._table[0, :1])
            self.dense.run(query, *caches, out=query.new_empty(1, self.shape.heads, self.shape.value_dim))

    # ---- SGLang's side: before the layers ----

    def init_forward_metadata(self, forward_batch: Any) -> None:
        if not self.viewing or forward_batch.forward_mode.is_idle():
            super().init_forward_metadata(forward_batch)  # type: ignore[misc]
            return
        if forward_batch.forward_mode.is_decode():
            self._load_decode(in_graph=False)
            self._advance(forward_batch)
        else:
            self._extend = self._plan_extend()
            kind = "graph" if self._extend.in_graph else "dense" if self._extend.dense else "lists"
            self.prefills[kind] += 1

    def _advance(self, forward_batch: Any) -> None:
        if self._decoding is None:
            raise ValueError("no buffers: a plan is loaded before it advances")
        rows = len(self._batch)
        self._decoding.advance(forward_batch.seq_lens[:rows], forward_batch.out_cache_loc[:rows])

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *args: Any, **kwargs: Any) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens, *args, **kwargs)  # type: ignore[misc]
        self._allocate_for_graphs(max_bs)

    def _allocate_for_graphs(self, max_bs: int) -> None:
        """Buffers that decoding in CUDA graphs of up to `max_bs` rows reads."""
        configs = {self.decode_config(bs) for bs in range(1, max_bs + 1)}
        slots = self.num_slots + max_bs * ROOM
        bounds = [
            Capacity.bound(max_bs, GRAPH_RUNS, slots, config, self.shape.group, self.shape.kv_heads)
            for config in configs
        ]
        self._graph_buffers = self._allocate(
            _largest(bounds),
            share=self._grown[0],
        )

    def init_question_graphs(self, sizes: Sequence[int]) -> None:
        """Room for prefills inside CUDA graphs of `sizes` rows; called before they are captured."""
        sizes = [size for size in sizes if size <= QUESTION_ROWS]
        if not sizes:
            return
        workers = {self.question_config(size).workers(self.shape.kv_heads) for size in sizes}
        entries = len(self._grown[0].part)
        capacity = Capacity(
            rows=max(sizes),
            items=SLICE_ENTRIES + max(workers),
            entries=entries,
            angles=SLICE_ENTRIES,
            slots=self.num_slots,
            workers=max(workers),
        )
        self._question_buffers = self._allocate(capacity, share=self._grown[0])

    def capture_question(self, size: int) -> bool:
        """Let the next prefill of `size` rows be captured with its attention inside; False where it is not to be.

        `end_capture` ends it.
        """
        buffers = self._question_buffers
        if buffers is None or size > QUESTION_ROWS:
            return False
        config = self.question_config(size)
        empty = planning.plan_rows([], config=config, group=self.shape.group, kv_heads=self.shape.kv_heads)
        buffers.load(empty, self._table.view(-1))
        self.viewing, self._extend = True, _Extend(size, False, [(0, size, buffers)], None, in_graph=True)
        return True

    def end_capture(self) -> None:
        super().end_capture()
        self._extend = None

    def in_question_graph(self) -> bool:
        """Whether the prefill at hand was planned for a CUDA graph that has its attention inside."""
        return self.viewing and self._extend is not None and self._extend.in_graph

    def fits_graph(self) -> bool:
        """Whether the batch's plan fits into the buffers of the CUDA graphs."""
        return (
            self._plan is not None
            and self._graph_buffers is not None
            and not self._graph_buffers.capacity.lacks(self._plan)
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if in_capture:
            self.viewing = compat.capturing_views()
            self._batch = []
        if not self.viewing:
            super().init_forward_metadata_out_graph(forward_batch, in_capture)  # type: ignore[misc]
        elif not in_capture:
            self._load_decode(in_graph=True)
            self._advance(forward_batch)
        else:
            self._load_empty(forward_batch.batch_size)

    def _load_empty(self, batch_size: int) -> None:
        """For the capture of a graph of so many rows: its buffers, with rows that see nothing."""
        self._plan, self._decoding = None, self._graph_buffers
        if self._graph_buffers is not None:
            config = self.decode_config(batch_size)
            empty = planning.plan_rows([], config=config, group=self.shape.group, kv_heads=self.shape.kv_heads)
            self._graph_buffers.load(empty, self._table.view(-1))

    # ---- SGLang's side: in every layer ----

    def _caches(self, layer: Any, k: Any, v: Any, forward_batch: Any, save: bool) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.token_to_kv_pool  # type: ignore[attr-defined]
        if save and k is not None and v is not None:
            compat.write_kv(pool, layer, forward_batch.out_cache_loc, k, v)
        return pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        if not self.viewing:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)  # type: ignore[misc]
        keys, values = self._caches(layer, k, v, forward_batch, save_kv_cache)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = self._attend_decode(query, keys, values, layer)
        return out.view(out.shape[0], -1)

    def _attend_decode(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: Any) -> torch.Tensor:
        """[rows, heads, value_dim]: one layer of a decoding step with views."""
        if self._decoding is None:
            raise ValueError("no buffers: a plan is loaded before the layers run")
        return view_attention_plan(query, self._decoding, keys, values, layer.scaling)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        if not self.viewing:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)  # type: ignore[misc]
        keys, values = self._caches(layer, k, v, forward_batch, save_kv_cache)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        work = self._extend
        if work is None:
            raise ValueError("a prefill with views was not planned: init_forward_metadata runs before the layers")
        out = query.new_empty(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        out[work.rows :] = 0
        if work.dense and self.dense is not None:
            self.dense.run(query[: work.rows], keys, values, out=out[: work.rows])
        if work.listed is None:
            for first, end, buffers in work.lists:
                view_attention_plan(query[first:end], buffers, keys, values, layer.scaling, out=out[first:end])
        else:
            apart = torch.empty_like(out)
            for first, end, buffers in work.lists:
                view_attention_plan(query[first:end], buffers, keys, values, layer.scaling, out=apart[first:end])
            out[work.listed] = apart[work.listed]
        return out.view(out.shape[0], -1)


def _hopper_serves(shape: compat.AttentionShape, device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    from sglang_ext.kernels.view_attention import hopper_impl  # Gluon: not everywhere

    return hopper_impl.serves(shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim, shape.dtype, device)


def _largest(capacities: Sequence[Capacity]) -> Capacity:
    """Room for whatever fits into one of them."""
    return Capacity(**{name: max(getattr(c, name) for c in capacities) for name in Capacity.__dataclass_fields__})


def _parts(seen: RowRuns) -> list[RowRuns]:
    """Many rows in parts that one work list holds."""
    rows = max(1, SLICE_ENTRIES // (len(seen.runs) + 1))
    bounds = [*range(seen.begin, seen.end, rows), seen.end]
    return [replace(seen, begin=low, end=high) for low, high in pairwise(bounds)]


def _slices(requests: Sequence[planning.RowRuns]) -> list[tuple[int, list[planning.RowRuns]]]:
    """Cut a batch, in row order, into work lists of bounded size: (first row, requests) of each."""
    slices: list[tuple[int, list[planning.RowRuns]]] = []
    size = SLICE_ENTRIES
    for request in requests:
        entries = request.num_rows * len(request.keys)
        if size + entries > SLICE_ENTRIES:
            slices.append((request.first_row, []))
            size = 0
        slices[-1][1].append(request)
        size += entries
    return slices


def _entries(requests: Sequence[planning.RowRuns]) -> int:
    """Partial outputs of a work list that is cut nowhere."""
    return sum(request.num_rows * len(request.keys) for request in requests)


def _rows_of(requests: Sequence[planning.RowRuns]) -> torch.Tensor:
    rows = [np.arange(request.first_row, request.first_row + request.num_rows) for request in requests]
    return torch.from_numpy(np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64))


def _rows_per_run(requests: Sequence[planning.RowRuns]) -> float:
    """Mean number of query rows that read one run, weighted by its tokens: what tile sizes are chosen by."""
    rows: dict[int, int] = {}
    tokens: dict[int, int] = {}
    own_rows, own_tokens = 0, 0
    for request in requests:
        for key, length in zip(request.keys.tolist(), request.lengths.tolist(), strict=True):
            if key < 0:
                own_rows, own_tokens = own_rows + request.num_rows * length, own_tokens + length
            else:
                rows[key] = rows.get(key, 0) + request.num_rows
                tokens[key] = length
    total = sum(tokens.values()) + own_tokens
    return (sum(rows[key] * tokens[key] for key in rows) + own_rows) / total if total else 1.0
