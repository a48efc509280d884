"""From what rows see (`attention.seen`) to the work lists of the kernels, and the buffers that hold them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.attention.model import Model
from sglang_ext.attention.policy import Policy, Request
from sglang_ext.attention.seen import RowRuns
from sglang_ext.attention.step import BatchRows
from sglang_ext.kernels.view_attention import plan as planning
from sglang_ext.kernels.view_attention.buffers import PlanBuffers, PlanCapacity
from sglang_ext.kernels.view_attention.config import Config, choose
from sglang_ext.kernels.view_attention.plan import Plan

ROOM = 64
"""Tokens by which decoding requests may grow before a batch that stays the same is planned, or loaded, again."""

SLICE_ENTRIES = 16384
"""Partial outputs of one work list; prefills that need more are cut into several."""

ROWS = range(1, 2049)
"""Pairs of (query row, head of the group) that see a run: with more, no configuration comes that fewer have not."""

MAX_KEYS = 100_000
"""Names of runs that are remembered before they are numbered anew."""


class Planner:
    """Work lists of one policy's rows.

    Attributes:
        shape: heads of a layer.
    """

    def __init__(self, model: Model, policy: Policy) -> None:
        self.model, self.policy, self.shape = model, policy, model.shape
        self._keys: dict[Hashable, int] = {}
        self._hopper = _hopper_serves(model)

    @property
    def hopper(self) -> bool:
        """Whether the kernels for Hopper GPUs serve the model."""
        return self._hopper

    def forget(self) -> bool:
        """Number runs anew once there are too many names; whether rows that were planned before no longer hold."""
        if len(self._keys) <= MAX_KEYS:  # blocks come and go for as long as the server runs
            return False
        self._keys.clear()
        return True

    def seen(self, rows: BatchRows) -> Sequence[RowRuns]:
        """What the new rows of a request see; those of a plain one see all before them."""
        runs = self.policy.runs(rows.request, rows.begin, rows.end)
        return runs if runs is not None else [RowRuns(rows.begin, rows.end, (), tail=0)]

    def rows(self, request: Request, seen: RowRuns, first: int) -> planning.PlanRows:
        """What rows see, as kernels are told: runs of the flattened table of slots.

        Args:
            request: whose rows they are.
            seen: what they see.
            first: number of the first row in its batch.
        """
        base = request.slot * self.model.table.shape[1]
        runs = [run for run in seen.runs if run.tokens]
        keys = [self._key((request.slot, run.column) if run.key is None else run.key) for run in runs]
        return planning.PlanRows(
            first_row=first,
            num_rows=seen.end - seen.begin,
            keys=np.array([*keys, -1]),
            lengths=np.array([*(run.tokens for run in runs), seen.end - seen.tail]),
            deltas=np.array([*(run.delta for run in runs), 0]),
            source=np.array([*(base + run.column for run in runs), base + seen.tail]),
            own=(len(runs),),
            tail_column=seen.tail,
        )

    def _key(self, key: Hashable) -> int:
        return self._keys.setdefault(key, len(self._keys))

    def config(self, rows_per_run: float) -> Config:
        """How the kernel is cut where so many query rows see a run, in the mean."""
        return choose(
            rows_per_run,
            self.shape.group,
            self.shape.head_dim,
            self.shape.value_dim,
            itemsize=self.shape.dtype.itemsize,
            num_sms=self.shape.num_sms,
            kv_heads=self.shape.kv_heads,
            hopper=self._hopper,
        )

    def configs(self) -> set[Config]:
        """Every configuration that `config` may choose."""
        return {self.config(rows / self.shape.group) for rows in ROWS}

    def plan(
        self,
        rows: Sequence[planning.PlanRows],
        config: Config,
        first_rows: npt.ArrayLike | None = None,
        seq_lens: npt.ArrayLike | None = None,
        room: int = 0,
    ) -> Plan:
        """The work list of some rows; arguments as of `kernels.view_attention.plan.plan_rows`."""
        return planning.plan_rows(
            rows,
            config=config,
            group=self.shape.group,
            kv_heads=self.shape.kv_heads,
            room=room,
            first_rows=first_rows,
            seq_lens=seq_lens,
        )


class PlanMemory:
    """Buffers for plans outside of CUDA graphs, which grow when needed; all use the first one's partial outputs.

    Attributes:
        first: those of decoding steps.
        entries: partial outputs that all buffers share.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner, self._slots = planner, planner.model.table.view(-1)
        shape = planner.shape
        # Cutting a list's items repeats the rows of at most one tile a worker.
        repeated = max(c.workers(shape.kv_heads) * c.tile_rows(shape.group) for c in planner.configs())
        self._grown = [self.allocate(PlanCapacity(1, 1, SLICE_ENTRIES + repeated, 1, 1, 1), share=None)]

    @property
    def first(self) -> PlanBuffers:
        return self._grown[0]

    @property
    def entries(self) -> int:
        return len(self._grown[0].part)

    def allocate(self, capacity: PlanCapacity, share: PlanBuffers | None) -> PlanBuffers:
        """New buffers, over the partial outputs of `share` where those are enough."""
        shape = self._planner.shape
        return PlanBuffers(
            capacity,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            value_dim=shape.value_dim,
            rope=self._planner.model.rope,
            # Weighted means of values in this type; what rounding them adds is of the size of rounding the output.
            part_dtype=shape.dtype,
            share=share,
            rotated=shape.dtype if self._planner.hopper else None,
        )

    def load(self, plan: Plan, number: int) -> PlanBuffers:
        """Load a plan into buffers that no graph uses: number 0 for decoding, 1 and on for a prefill's lists.

        The lists of a prefill run one after the other, so all use the first one's partial outputs.
        """
        if len(self._grown) <= number or self._grown[number].capacity.lacks(plan):
            share, capacity = self._grown[0], PlanCapacity.of(plan, headroom=1.25)
            if number < len(self._grown):  # one kind of plan has more rows, another more workers: hold both
                capacity = largest((capacity, self._grown[number].capacity))
            lent = len(share.part)
            if len(plan.entry_row) <= lent < capacity.entries:  # no headroom for what would then be of its own
                capacity = replace(capacity, entries=lent)
            self._grown[number : number + 1] = [self.allocate(capacity, share)]
        self.fill(self._grown[number], plan)
        return self._grown[number]

    def fill(self, buffers: PlanBuffers, plan: Plan) -> None:
        """Load a plan into buffers that hold it."""
        buffers.load(plan, self._slots)


def largest(capacities: Sequence[PlanCapacity]) -> PlanCapacity:
    """Room for whatever fits into one of them."""
    return PlanCapacity(
        **{name: max(getattr(c, name) for c in capacities) for name in PlanCapacity.__dataclass_fields__}
    )


def parts(seen: RowRuns) -> list[RowRuns]:
    """Many rows in parts that one work list holds."""
    rows = max(1, SLICE_ENTRIES // (len(seen.runs) + 1))
    bounds = [*range(seen.begin, seen.end, rows), seen.end]
    return [replace(seen, begin=low, end=high) for low, high in pairwise(bounds)]


def slices(requests: Sequence[planning.PlanRows]) -> list[tuple[int, list[planning.PlanRows]]]:
    """Cut a batch, in row order, into work lists of bounded size: (first row, requests) of each."""
    found: list[tuple[int, list[planning.PlanRows]]] = []
    size = SLICE_ENTRIES
    for request in requests:
        entries = request.num_rows * len(request.keys)
        if size + entries > SLICE_ENTRIES:
            found.append((request.first_row, []))
            size = 0
        found[-1][1].append(request)
        size += entries
    return found


def entries_of(requests: Sequence[planning.PlanRows]) -> int:
    """Partial outputs of a work list that is cut nowhere."""
    return sum(request.num_rows * len(request.keys) for request in requests)


def rows_of(requests: Sequence[planning.PlanRows]) -> torch.Tensor:
    """[rows] int64 on the host, the numbers of their rows in the batch."""
    rows = [np.arange(request.first_row, request.first_row + request.num_rows) for request in requests]
    return torch.from_numpy(np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64))


def rows_per_run(requests: Sequence[planning.PlanRows]) -> float:
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


def _hopper_serves(model: Model) -> bool:
    if model.device.type != "cuda":
        return False
    from sglang_ext.kernels.view_attention import hopper_impl  # Gluon: not everywhere

    shape, kind = model.shape, model.cache_dtype
    return hopper_impl.serves(shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim, kind, model.device)
