"""A plan on the device: static memory that serves every plan loaded into it, and what keeps it up to date.

Shapes, grids and pointers do not depend on the plan, every count is read on the device and nothing synchronises with
the host, so that a CUDA graph captured over one `PlanBuffers` serves every plan that is loaded into it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from sglang_ext.kernels.rope import Rope
from sglang_ext.kernels.rope.triton_impl import angle_tables
from sglang_ext.kernels.view_attention.config import Config
from sglang_ext.kernels.view_attention.plan import COPY_TOKENS, Plan

STAGING = 3
"""Plans that may be on their way to the device at once."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit(do_not_specialize=["size"])
def _advance(
    seq_lens,
    new_slots,
    num_rows,
    items,
    entry_limit,
    tail_item,
    tail_entry,
    tail_base,
    tail_room,
    kv_slots,
    size,
    BLOCK: tl.constexpr,
):
    """Set the length of every row's tail from its sequence length, and write its newest slot."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < size) & (row < tl.load(num_rows))
    item = tl.load(tail_item + row, mask=inside, other=-1)
    grows = inside & (item >= 0)
    entry = tl.load(tail_entry + row, mask=grows, other=0)
    base = tl.load(tail_base + row, mask=grows, other=0)
    room = tl.load(tail_room + row, mask=grows, other=1)
    length = tl.load(seq_lens + row, mask=grows, other=0).to(tl.int32) - base
    # A length outside the room is the caller's mistake; it must not reach another request's slots.
    length = tl.minimum(tl.maximum(length, 1), room)
    slot = tl.load(new_slots + row, mask=grows, other=0).to(tl.int32)
    tl.store(items + item * 4 + 1, length, mask=grows)
    tl.store(entry_limit + entry, length, mask=grows)
    tl.store(kv_slots + tl.load(items + item * 4, mask=grows, other=0) + length - 1, slot, mask=grows)


@triton.jit
def _gather_slots(copies, source, table, kv_slots, BLOCK: tl.constexpr):
    """kv_slots[to : to + n] = table[source : source + n] for the copy of this program."""
    copy = tl.program_id(0)
    to = tl.load(copies + copy * 2)
    size = tl.load(copies + copy * 2 + 1)
    begin = tl.load(source + copy)
    at = tl.arange(0, BLOCK)
    slot = tl.load(table + begin + at, mask=at < size, other=0)
    tl.store(kv_slots + to + at, slot.to(tl.int32), mask=at < size)


@triton.jit
def _straight(items, kv_slots, straight, BLOCK: tl.constexpr):
    """[items, 2]: how many of an item's first tokens lie in slots that follow one another, and the first slot."""
    item = tl.program_id(0)
    slots = kv_slots + tl.load(items + item * 4)
    kv_len = tl.load(items + item * 4 + 1)
    first = tl.load(slots)
    found = kv_len
    for begin in range(0, kv_len, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        slot = tl.load(slots + at, mask=at < kv_len, other=0)
        breaks = (at < kv_len) & (slot != first + at)
        found = tl.minimum(found, tl.min(tl.where(breaks, at, kv_len), 0))
    tl.store(straight + item * 2, found)
    tl.store(straight + item * 2 + 1, first)


@dataclass(frozen=True)
class PlanCapacity:
    """The largest plan that a `PlanBuffers` takes; the fields count what `Plan` calls by the same names.

    Attributes:
        rows: query rows, padding of CUDA graphs included.
        items, entries, angles: of the plan.
        slots: tokens of distinct runs, room included.
        workers: shares of the work.
    """

    rows: int
    items: int
    entries: int
    angles: int
    slots: int
    workers: int

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in self.__dataclass_fields__}
        if min(sizes.values()) < 1 or max(sizes.values()) >= 1 << 31:
            raise ValueError(f"capacity {sizes}: expected 1 to 2**31 - 1 of each")

    @classmethod
    def bound(cls, rows: int, runs: int, slots: int, config: Config, group: int, kv_heads: int) -> PlanCapacity:
        """What can never overflow for `rows` rows that see `runs` runs each, over `slots` tokens (room included)."""
        pairs, workers = rows * runs, config.workers(kv_heads)
        cuts = workers - 1  # each makes one item more, and repeats the rows of one tile
        return cls(rows, pairs + cuts, pairs + cuts * config.tile_rows(group), pairs, slots, workers)

    @classmethod
    def of(cls, plan: Plan, headroom: float = 1.0) -> PlanCapacity:
        """What one plan needs, times `headroom`."""
        needs = {
            "rows": plan.num_rows,
            "items": len(plan.items),
            "entries": len(plan.entry_row),
            "angles": len(plan.angles),
            "slots": plan.num_slots,
        }
        sizes = {name: max(1, int(n * headroom)) for name, n in needs.items()}
        return cls(**sizes, workers=len(plan.work_ptr) - 1)

    def lacks(self, plan: Plan) -> list[str]:
        """What of a plan is too much for this capacity, in words; empty when it fits."""
        needed = vars(PlanCapacity.of(plan))
        return [f"{n} {name} of {getattr(self, name)}" for name, n in needed.items() if n > getattr(self, name)]

    @property
    def copies(self) -> int:
        return self.items + self.slots // COPY_TOKENS


class PlanBuffers:
    """Static device memory for one plan at a time, with its partial outputs.

    Allocate it once for each CUDA graph (or share one among the graphs of a stream), `load` a plan outside the graph,
    and run `advance` and `view_attention_plan` inside. All work happens on the current stream; a plan that is loaded
    while another one runs must be loaded on the same stream.

    Attributes:
        capacity: the largest plan.
        heads, kv_heads, value_dim: of the attention that uses it.
        rope: the model's rotation; its frequencies are on the buffers' device.
        kv_slots: [capacity.slots] int32, the plan's own copy of the slots of its runs.
        part: [capacity.entries, heads, value_dim] partial outputs; part_lse: [capacity.entries, heads] float32.
        plan: the loaded plan, or None.

    `share`, where it is given, lends its partial outputs if they are large enough: for plans that run one after the
    other on one stream. `rotated` is the caches' type where plans for Hopper's kernel (`Config.groups`) are to be run:
    their queries are rotated before, into `buffers.rotated`.

    Raises:
        ValueError: heads is no multiple of kv_heads, a type that the kernels do not know, or a device without Triton.
    """

    def __init__(
        self,
        capacity: PlanCapacity,
        *,
        heads: int,
        kv_heads: int,
        value_dim: int,
        rope: Rope,
        part_dtype: torch.dtype = torch.float32,
        share: PlanBuffers | None = None,
        rotated: torch.dtype | None = None,
    ) -> None:
        device = rope.inv_freq.device
        if device.type != "cuda" and not triton.knobs.runtime.interpret:
            raise ValueError(
                f"device {device}: expected CUDA; elsewhere Triton runs only with TRITON_INTERPRET=1 set before it is "
                "imported, use view_attention instead"
            )
        if kv_heads < 1 or heads < 1 or heads % kv_heads:
            raise ValueError(f"{heads} query heads over {kv_heads} key-value heads: expected a multiple")
        if part_dtype not in DTYPES:
            raise ValueError(f"partial outputs of {part_dtype}: expected one of {DTYPES}")
        self.capacity, self.heads, self.kv_heads, self.value_dim, self.rope = capacity, heads, kv_heads, value_dim, rope
        self.plan: Plan | None = None

        c = capacity
        sizes = {
            "source": 2 * c.copies,
            "counts": 4,
            "work_ptr": c.workers + 1,
            "items": 4 * c.items,
            "entry_row": c.entries,
            "entry_limit": c.entries,
            "entry_angle": c.entries,
            "row_ptr": c.rows + 1,
            "row_entries": c.entries,
            "angles": c.angles,
            "copies": 2 * c.copies,
            "tail_item": c.rows,
            "tail_entry": c.rows,
            "tail_base": c.rows,
            "tail_room": c.rows,
        }
        # Every section begins at a multiple of 128 bytes: Triton compiles aligned pointers into wider loads.
        self._bounds: dict[str, tuple[int, int]] = {}
        end = 0
        for name, size in sizes.items():
            self._bounds[name] = (end, end + size)
            end += -(-size // 32) * 32
        cuda = device.type == "cuda"
        self._staging = [
            torch.zeros(end, dtype=torch.int32, device="cpu", pin_memory=cuda) for _ in range(STAGING if cuda else 1)
        ]
        self._views = [self._sections(staging.numpy()) for staging in self._staging]
        self._done: list[torch.cuda.Event | None] = [None] * len(self._staging)
        self._next = 0
        self._packed = torch.zeros(end, dtype=torch.int32, device=device)
        self.sections = {name: self._packed[a:b] for name, (a, b) in self._bounds.items()}
        self._source = self.sections["source"].view(torch.int64)
        self.kv_slots = torch.zeros(c.slots, dtype=torch.int32, device=device)
        self.straight = torch.zeros(2 * c.items, dtype=torch.int32, device=device)
        self.part: torch.Tensor
        self.part_lse: torch.Tensor
        wanted = (part_dtype, heads, value_dim)
        if share is not None and (share.part.dtype, *share.part.shape[1:]) == wanted and len(share.part) >= c.entries:
            self.part, self.part_lse = share.part, share.part_lse
        else:
            self.part = torch.zeros(c.entries, heads, value_dim, dtype=part_dtype, device=device)
            self.part_lse = torch.zeros(c.entries, heads, dtype=torch.float32, device=device)
        self.rotated: torch.Tensor | None = None
        if rotated is not None:
            shape = (kv_heads, c.entries * (heads // kv_heads), value_dim)
            lent = None if share is None else share.rotated
            if lent is not None and (lent.dtype, lent.shape[0], lent.shape[2]) != (rotated, kv_heads, value_dim):
                lent = None
            if lent is not None and lent.shape[1] >= shape[1]:
                self.rotated = lent
            else:
                self.rotated = torch.zeros(shape, dtype=rotated, device=device)
        self.descriptors: dict[Hashable, Any] = {}
        half = rope.inv_freq.numel()
        self.cos = torch.zeros(c.angles, max(half, 1), dtype=torch.float32, device=device)
        self.sin = torch.zeros(c.angles, max(half, 1), dtype=torch.float32, device=device)

    def _sections(self, packed: npt.NDArray[np.int32]) -> dict[str, npt.NDArray[np.generic]]:
        views: dict[str, npt.NDArray[np.generic]] = {name: packed[a:b] for name, (a, b) in self._bounds.items()}
        views["source"] = views["source"].view(np.int64)
        return views

    @property
    def device(self) -> torch.device:
        return self._packed.device

    @property
    def counts(self) -> torch.Tensor:
        """[2] int32 on the device: items and query rows of the loaded plan."""
        return self.sections["counts"][:2]

    def load(self, plan: Plan, slot_table: torch.Tensor) -> None:
        """Bring a plan to the device: one asynchronous copy, then the slots of its runs and its angle tables.

        Args:
            plan: fits the capacity and was made for these heads.
            slot_table: [n] int32, contiguous, on the buffers' device: what `PlanRows.source` points into. It is read
                once, on the current stream; later changes do not reach the plan.

        Raises:
            ValueError: the plan is too large or was made for other heads, or the table is not what the plan needs;
                nothing was written then.
        """
        self._check(plan, slot_table)
        turn = self._next
        self._next = (turn + 1) % len(self._staging)
        event = self._done[turn]
        if event is not None:
            event.synchronize()  # waits only when three plans are still on their way
        self._pack(plan, self._views[turn])
        self._packed.copy_(self._staging[turn], non_blocking=True)
        if self.device.type == "cuda":
            event = event or torch.cuda.Event()
            event.record()
            self._done[turn] = event
        gather_slots(self.sections["copies"], self._source[: len(plan.copies)], slot_table, self.kv_slots)
        if plan.config.tile_stages and len(plan.items):
            _straight[(len(plan.items),)](
                self.sections["items"], self.kv_slots, self.straight, BLOCK=COPY_TOKENS, num_warps=4
            )
        if len(plan.angles) and self.rope.inv_freq.numel():
            angle_tables(self.sections["angles"][: len(plan.angles)], self.rope, self.cos, self.sin)
        self.plan = plan

    def _check(self, plan: Plan, slot_table: torch.Tensor) -> None:
        if (plan.group * plan.kv_heads, plan.kv_heads) != (self.heads, self.kv_heads):
            raise ValueError(
                f"a plan for {plan.kv_heads} key-value heads of {plan.group} query heads: expected "
                f"{self.kv_heads} of {self.heads // self.kv_heads}"
            )
        over = self.capacity.lacks(plan)
        if over:
            raise ValueError(f"the plan needs {', '.join(over)}: expected no more; allocate a larger PlanBuffers")
        if slot_table.dim() != 1 or slot_table.dtype != torch.int32 or not slot_table.is_contiguous():
            raise ValueError(
                f"slot table {tuple(slot_table.shape)} of {slot_table.dtype}, strides {slot_table.stride()}: expected "
                "one contiguous row of int32; flatten it with .view(-1)"
            )
        if slot_table.device != self.device:
            raise ValueError(f"slot table on {slot_table.device}: expected {self.device}")
        if slot_table.numel() < plan.table_size:
            raise ValueError(
                f"slot table of {slot_table.numel()}: expected at least {plan.table_size}, where the plan's runs end"
            )

    @staticmethod
    def _pack(plan: Plan, views: Mapping[str, npt.NDArray[np.generic]]) -> None:
        views["counts"][:3] = len(plan.items), plan.num_rows, len(plan.entry_row)
        views["source"][: len(plan.copies)] = plan.copies[:, 1]
        views["copies"].reshape(-1, 2)[: len(plan.copies)] = plan.copies[:, ::2]
        views["items"].reshape(-1, 4)[: len(plan.items)] = plan.items
        for name in ("entry_row", "entry_limit", "entry_angle", "row_entries", "angles"):
            values = getattr(plan, name)
            views[name][: len(values)] = values
        for name in ("tail_item", "tail_entry", "tail_base", "tail_room"):
            views[name][: plan.num_rows] = getattr(plan, name)
        # Workers and rows beyond the plan have nothing: their range is empty.
        for name in ("work_ptr", "row_ptr"):
            values = getattr(plan, name)
            views[name][: len(values)] = values
            views[name][len(values) :] = values[-1]

    def advance(self, seq_lens: torch.Tensor, new_slots: torch.Tensor) -> None:
        """Let every tail reach its row's sequence length, without a new plan; the same call twice does nothing more.

        It must run at every step: only the newest slot is written. How far it may go says `Plan.steps_left`.

        Args:
            seq_lens: [n] int32 or int64 on the device: row i's sequence length with its newest token. Rows beyond the
                plan (padding) are left alone.
            new_slots: [n] int32 or int64 on the device: the slot of row i's newest token.

        Raises:
            ValueError: shapes, types or devices differ, or more rows than the capacity.
        """
        n = seq_lens.shape[0]
        for name, values in (("seq_lens", seq_lens), ("new_slots", new_slots)):
            if values.shape != (n,) or values.dtype not in (torch.int32, torch.int64) or not values.is_contiguous():
                raise ValueError(
                    f"{name} {tuple(values.shape)} of {values.dtype}: expected [{n}] contiguous int32 or int64"
                )
            if values.device != self.device:
                raise ValueError(f"{name} on {values.device}: expected {self.device}")
        if n > self.capacity.rows:
            raise ValueError(f"{n} rows: expected at most {self.capacity.rows}")
        d = self.sections
        _advance[(triton.cdiv(n, 128),)](
            seq_lens,
            new_slots,
            self.counts[1:],
            d["items"],
            d["entry_limit"],
            d["tail_item"],
            d["tail_entry"],
            d["tail_base"],
            d["tail_room"],
            self.kv_slots,
            n,
            BLOCK=128,
            num_warps=4,
        )


def gather_slots(copies: torch.Tensor, source: torch.Tensor, table: torch.Tensor, kv_slots: torch.Tensor) -> None:
    """Copy the slots of runs out of a table, on the current stream.

    Args:
        copies: [at least 2 * n] int32, (first token, slots) of each copy, of at most `COPY_TOKENS` slots.
        source: [n] int64, offsets in the table.
        table: [any] int32.
        kv_slots: [any] int32, to write to.
    """
    if len(source):
        _gather_slots[(len(source),)](copies, source, table, kv_slots, BLOCK=COPY_TOKENS, num_warps=4)


def copies_tiles(cache: torch.Tensor) -> bool:
    """Whether the device copies tiles by itself (TMA: Hopper and later) and may do so from this cache."""
    aligned = all(size * cache.element_size() % 16 == 0 for size in cache.stride()[:-1])
    hopper = not cache.is_cuda or torch.cuda.get_device_capability(cache.device)[0] >= 9
    return hopper and aligned and cache.data_ptr() % 16 == 0
