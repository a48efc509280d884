"""Fused attention over views in Triton: one launch reads every shared run once for the whole batch, one merges.

`PlanBuffers` holds a plan on the device, `view_attention_plan` runs it. Shapes, grids and pointers do not depend on the
plan, every count is read on the device and nothing synchronises with the host, so that a CUDA graph captured over one
`PlanBuffers` serves every plan that is loaded into it.

Exactness: a key written at m and seen at m + delta is met by the query row turned by -delta (Su et al., 2021, section
3.2.2: rotations compose), each (row, item) is a softmax with float32 sums (Milakov and Gimelshein, 2018), and items
merge by log-sum-exp; only the rounding of the turned query and of the weights to the caches' type is lost.
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
from triton.tools.tensor_descriptor import TensorDescriptor

from sglang_ext.kernels.rope import Rope
from sglang_ext.kernels.view_attention.plan import COPY_TOKENS, Config, Plan

STAGING = 3
"""Plans that may be on their way to the device at once."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _dot(a, b, acc):
    """acc + a b with float32 sums; float32 operands are not rounded to tf32."""
    if _INTERPRETED:  # its dot takes bfloat16 for integers; products of half types are exact in float32
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _online(acc, total, top, q, k, v, token, limit, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):
    """One step of the online softmax, in powers of two; the logits' factor is in q already."""
    logits = _dot(q, tl.trans(k), tl.zeros((q.shape[0], BLOCK_N), dtype=tl.float32))
    if MASKED:
        logits = tl.where(token[None, :] < limit[:, None], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    weights = tl.exp2(logits - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    acc = _dot(weights.to(v.dtype), v, acc * shrink[:, None])
    return acc, total, new_top


@triton.jit
def _straight_steps(
    acc,
    total,
    top,
    q,
    limit,
    key_tiles,
    value_tiles,
    slot,
    key_column,
    value_column,
    end,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Online softmax over the item's first `end` tokens, in slots that follow one another: whole tiles by TMA."""
    for step in tl.range(0, end, BLOCK_N, num_stages=STAGES):
        k = key_tiles.load([slot + step, key_column])
        v = value_tiles.load([slot + step, value_column])
        acc, total, top = _online(acc, total, top, q, k, v, step, limit, BLOCK_N, False)
    return acc, total, top


@triton.jit
def _steps(
    acc,
    total,
    top,
    q,
    limit,
    slots,
    keys,
    values,
    begin,
    end,
    kv_len,
    stride_key,
    stride_value,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Online softmax over tokens [begin, end) of an item; MASKED where a row's limit or the item's end lies inside."""
    dim = tl.arange(0, BLOCK_D)
    value_dim = tl.arange(0, BLOCK_V)
    for step in range(begin, end, BLOCK_N):
        token = step + tl.arange(0, BLOCK_N)
        if MASKED:
            # Beyond the item lie other runs, room or nothing at all: no slot may be read from there.
            inside = token < kv_len
            slot = tl.load(slots + token, mask=inside, other=0).to(tl.int64)
            key_mask = inside[:, None] & (dim < HEAD_DIM)[None, :]
            value_mask = inside[:, None] & (value_dim < VALUE_DIM)[None, :]
            k = tl.load(keys + slot[:, None] * stride_key + dim[None, :], mask=key_mask, other=0.0)
            v = tl.load(values + slot[:, None] * stride_value + value_dim[None, :], mask=value_mask, other=0.0)
        else:
            slot = tl.load(slots + token).to(tl.int64)
            if HEAD_DIM == BLOCK_D:
                k = tl.load(keys + slot[:, None] * stride_key + dim[None, :])
            else:
                k = tl.load(keys + slot[:, None] * stride_key + dim[None, :], mask=(dim < HEAD_DIM)[None, :], other=0.0)
            if VALUE_DIM == BLOCK_V:
                v = tl.load(values + slot[:, None] * stride_value + value_dim[None, :])
            else:
                v = tl.load(
                    values + slot[:, None] * stride_value + value_dim[None, :],
                    mask=(value_dim < VALUE_DIM)[None, :],
                    other=0.0,
                )
        acc, total, top = _online(acc, total, top, q, k, v, token, limit, BLOCK_N, MASKED)
    return acc, total, top


@triton.jit
def _turned_query(
    query,
    items,
    entry_row,
    entry_angle,
    cos,
    sin,
    item,
    last_item,
    local,
    head,
    stride_query_row,
    stride_query_head,
    scale_log2,
    DTYPE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROTARY: tl.constexpr,
    NEOX: tl.constexpr,
):
    """[len(local), BLOCK_D] queries of an item, each turned by its entry's angle, times the logits' factor."""
    HALF: tl.constexpr = ROTARY // 2
    dim = tl.arange(0, BLOCK_D)
    # out[d] = q[d] * cos + q[partner[d]] * sign[d] * sin holds for both styles; beyond the rotary part sin is 0.
    if NEOX:
        first = dim < HALF
        partner = tl.where(first, dim + HALF, tl.where(dim < ROTARY, dim - HALF, dim))
        frequency = tl.where(first, dim, dim - HALF)
    else:
        first = dim % 2 == 0
        partner = tl.where(dim < ROTARY, tl.where(first, dim + 1, dim - 1), dim)
        frequency = dim // 2
    sign = tl.where(first, -1.0, 1.0)
    inside = item < last_item
    entry = tl.load(items + item * 4 + 2, mask=inside, other=0) + local
    used = local < tl.load(items + item * 4 + 3, mask=inside, other=0)
    row = tl.load(entry_row + entry, mask=used, other=0).to(tl.int64)
    angle = tl.load(entry_angle + entry, mask=used, other=0)
    start = query + row * stride_query_row + head * stride_query_head
    q_mask = used[:, None] & (dim < HEAD_DIM)[None, :]
    turn_mask = used[:, None] & (dim < ROTARY)[None, :]
    q = tl.load(start[:, None] + dim[None, :], mask=q_mask, other=0.0).to(tl.float32)
    q_partner = tl.load(start[:, None] + partner[None, :], mask=turn_mask, other=0.0).to(tl.float32)
    turn = angle[:, None] * HALF + frequency[None, :]
    c = tl.load(cos + turn, mask=turn_mask, other=1.0)
    s = tl.load(sin + turn, mask=turn_mask, other=0.0)
    return ((q * c + q_partner * s * sign[None, :]) * scale_log2).to(DTYPE)


@triton.jit
def _attend(
    query,
    key_cache,
    value_cache,
    key_tiles,
    value_tiles,
    kv_slots,
    straight,
    work_ptr,
    items,
    entry_row,
    entry_limit,
    entry_angle,
    cos,
    sin,
    part,
    part_lse,
    stride_query_row,
    stride_query_head,
    stride_key,
    stride_key_head,
    stride_value,
    stride_value_head,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ROTARY: tl.constexpr,
    NEOX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILE_STAGES: tl.constexpr,
):
    """One worker's items for one key-value head; neighbouring programs read neighbouring heads of the same tokens."""
    program = tl.program_id(0)
    kv_head = program % KV_HEADS
    worker = program // KV_HEADS
    keys = key_cache + kv_head * stride_key_head
    values = value_cache + kv_head * stride_value_head

    line = tl.arange(0, BLOCK_M)
    local = line // GROUP
    head = kv_head * GROUP + line % GROUP
    value_dim = tl.arange(0, BLOCK_V)

    first_item = tl.load(work_ptr + worker)
    last_item = tl.load(work_ptr + worker + 1)
    # A value that the loop carries goes to shared memory once, from where the tensor cores read it. Queries computed
    # where they are used were loaded into registers again by every step.
    q = _turned_query(
        query,
        items,
        entry_row,
        entry_angle,
        cos,
        sin,
        first_item,
        last_item,
        local,
        head,
        stride_query_row,
        stride_query_head,
        scale_log2,
        key_cache.dtype.element_ty,
        HEAD_DIM,
        BLOCK_D,
        ROTARY,
        NEOX,
    )
    for item in range(first_item, last_item):
        kv_begin = tl.load(items + item * 4)
        kv_len = tl.load(items + item * 4 + 1)
        entry = tl.load(items + item * 4 + 2) + local
        used = local < tl.load(items + item * 4 + 3)
        limit = tl.load(entry_limit + entry, mask=used, other=0)
        limit = tl.where(used, limit, kv_len)  # unused lines see everything: harmless, and nothing to mask
        acc = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
        slots = kv_slots + kv_begin
        whole = tl.min(limit) // BLOCK_N * BLOCK_N  # up to here every row sees every token
        done = 0
        if TILE_STAGES:
            done = tl.minimum(whole, tl.load(straight + item * 2) // BLOCK_N * BLOCK_N)
            acc, total, top = _straight_steps(
                acc,
                total,
                top,
                q,
                limit,
                key_tiles,
                value_tiles,
                tl.load(straight + item * 2 + 1),
                kv_head * stride_key_head,
                kv_head * stride_value_head,
                done,
                BLOCK_N,
                TILE_STAGES,
            )
        acc, total, top = _steps(
            acc,
            total,
            top,
            q,
            limit,
            slots,
            keys,
            values,
            done,
            whole,
            kv_len,
            stride_key,
            stride_value,
            HEAD_DIM,
            VALUE_DIM,
            BLOCK_D,
            BLOCK_V,
            BLOCK_N,
            False,
        )
        acc, total, top = _steps(
            acc,
            total,
            top,
            q,
            limit,
            slots,
            keys,
            values,
            whole,
            kv_len,
            kv_len,
            stride_key,
            stride_value,
            HEAD_DIM,
            VALUE_DIM,
            BLOCK_D,
            BLOCK_V,
            BLOCK_N,
            True,
        )

        state = entry.to(tl.int64) * (KV_HEADS * GROUP) + head
        mask = used[:, None] & (value_dim < VALUE_DIM)[None, :]
        acc = (acc / total[:, None]).to(part.dtype.element_ty)
        tl.store(part + state[:, None] * VALUE_DIM + value_dim[None, :], acc, mask=mask)
        ln2: tl.constexpr = 0.6931471805599453
        tl.store(part_lse + state, (top + tl.log2(total)) * ln2, mask=used)
        q = _turned_query(
            query,
            items,
            entry_row,
            entry_angle,
            cos,
            sin,
            item + 1,
            last_item,
            local,
            head,
            stride_query_row,
            stride_query_head,
            scale_log2,
            key_cache.dtype.element_ty,
            HEAD_DIM,
            BLOCK_D,
            ROTARY,
            NEOX,
        )


@triton.jit
def _merge(
    part,
    part_lse,
    row_ptr,
    row_entries,
    out,
    lse,
    stride_out_row,
    stride_out_head,
    stride_lse_row,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_E: tl.constexpr,
    WITH_LSE: tl.constexpr,
):
    """One (row, head): the log-sum-exp merge of the row's entries; zeros and -inf where it has none."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    begin = tl.load(row_ptr + row)
    end = tl.load(row_ptr + row + 1)
    dim = tl.arange(0, BLOCK_V)
    inside = dim < VALUE_DIM
    to = out + row * stride_out_row + head * stride_out_head + dim
    if end - begin == 1:
        state = tl.load(row_entries + begin).to(tl.int64) * HEADS + head
        only = tl.load(part + state * VALUE_DIM + dim, mask=inside, other=0.0)
        tl.store(to, only.to(out.dtype.element_ty), mask=inside)
        if WITH_LSE:
            tl.store(lse + row * stride_lse_row + head, tl.load(part_lse + state))
    else:
        acc = tl.zeros((BLOCK_V,), dtype=tl.float32)
        top = float("-inf")
        total = 0.0
        for step in range(begin, end, BLOCK_E):
            at = step + tl.arange(0, BLOCK_E)
            listed = at < end
            state = tl.load(row_entries + at, mask=listed, other=0).to(tl.int64) * HEADS + head
            sums = tl.load(part_lse + state, mask=listed, other=float("-inf"))
            # Entries that are not listed may hold anything: they are not read.
            values = tl.load(
                part + state[:, None] * VALUE_DIM + dim[None, :],
                mask=listed[:, None] & inside[None, :],
                other=0.0,
            ).to(tl.float32)
            new_top = tl.maximum(top, tl.max(sums, 0))
            weights = tl.exp(sums - new_top)
            shrink = tl.exp(top - new_top)
            total = total * shrink + tl.sum(weights, 0)
            acc = acc * shrink + tl.sum(weights[:, None] * values, 0)
            top = new_top
        some = total > 0
        acc = acc / tl.where(some, total, 1.0)
        tl.store(to, acc.to(out.dtype.element_ty), mask=inside)
        if WITH_LSE:
            tl.store(lse + row * stride_lse_row + head, tl.where(some, top + tl.log(total), float("-inf")))


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


@triton.jit
def _angles(angles, inv_freq, cos, sin, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Tables of the turn by -angles[program]: float64 angles, as in kernels/rope (float32 is off at 1e6)."""
    row = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    turn = -tl.load(angles + row).to(tl.float64) * tl.load(inv_freq + pair, mask=inside, other=0.0).to(tl.float64)
    tl.store(cos + row * HALF + pair, tl.cos(turn).to(tl.float32), mask=inside)
    tl.store(sin + row * HALF + pair, tl.sin(turn).to(tl.float32), mask=inside)


@dataclass(frozen=True)
class Capacity:
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
    def bound(cls, rows: int, runs: int, slots: int, config: Config, group: int, kv_heads: int) -> Capacity:
        """What can never overflow for `rows` rows that see `runs` runs each, over `slots` tokens (room included)."""
        pairs, workers = rows * runs, config.workers(kv_heads)
        cuts = workers - 1  # each makes one item more, and repeats the rows of one tile
        return cls(rows, pairs + cuts, pairs + cuts * config.tile_rows(group), pairs, slots, workers)

    @classmethod
    def of(cls, plan: Plan, headroom: float = 1.0) -> Capacity:
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
        needed = vars(Capacity.of(plan))
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
    other on one stream. `turned` is the caches' type where plans for Hopper's kernel (`Config.groups`) are to be run:
    their queries are turned before, into `buffers.turned`.

    Raises:
        ValueError: heads is no multiple of kv_heads, a type that the kernels do not know, or a device without Triton.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        heads: int,
        kv_heads: int,
        value_dim: int,
        rope: Rope,
        part_dtype: torch.dtype = torch.float32,
        share: PlanBuffers | None = None,
        turned: torch.dtype | None = None,
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
        self._device = {name: self._packed[a:b] for name, (a, b) in self._bounds.items()}
        self._source = self._device["source"].view(torch.int64)
        self.kv_slots = torch.zeros(c.slots, dtype=torch.int32, device=device)
        self._straight = torch.zeros(2 * c.items, dtype=torch.int32, device=device)
        self.part: torch.Tensor
        self.part_lse: torch.Tensor
        wanted = (part_dtype, heads, value_dim)
        if share is not None and (share.part.dtype, *share.part.shape[1:]) == wanted and len(share.part) >= c.entries:
            self.part, self.part_lse = share.part, share.part_lse
        else:
            self.part = torch.zeros(c.entries, heads, value_dim, dtype=part_dtype, device=device)
            self.part_lse = torch.zeros(c.entries, heads, dtype=torch.float32, device=device)
        self.turned: torch.Tensor | None = None
        if turned is not None:
            shape = (kv_heads, c.entries * (heads // kv_heads), value_dim)
            if share is not None and share.turned is not None and share.turned.shape[1] >= shape[1]:
                self.turned = share.turned
            else:
                self.turned = torch.zeros(shape, dtype=turned, device=device)
        self.descriptors: dict[Hashable, Any] = {}
        half = rope.inv_freq.numel()
        self._cos = torch.zeros(c.angles, max(half, 1), dtype=torch.float32, device=device)
        self._sin = torch.zeros(c.angles, max(half, 1), dtype=torch.float32, device=device)

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
        return self._device["counts"][:2]

    def load(self, plan: Plan, slot_table: torch.Tensor) -> None:
        """Bring a plan to the device: one asynchronous copy, then the slots of its runs and its angle tables.

        Args:
            plan: fits the capacity and was made for these heads.
            slot_table: [n] int32, contiguous, on the buffers' device: what `RowRuns.source` points into. It is read
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
        if len(plan.copies):
            _gather_slots[(len(plan.copies),)](
                self._device["copies"], self._source, slot_table, self.kv_slots, BLOCK=COPY_TOKENS, num_warps=4
            )
        if plan.config.tile_stages and len(plan.items):
            _straight[(len(plan.items),)](
                self._device["items"], self.kv_slots, self._straight, BLOCK=COPY_TOKENS, num_warps=4
            )
        half = self.rope.inv_freq.numel()
        if len(plan.angles) and half:
            _angles[(len(plan.angles),)](
                self._device["angles"],
                self.rope.inv_freq,
                self._cos,
                self._sin,
                HALF=half,
                BLOCK=triton.next_power_of_2(half),
                num_warps=1,
            )
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
        d = self._device
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


def view_attention_plan(
    query: torch.Tensor,
    buffers: PlanBuffers,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Attention of a batch over the loaded plan; equal to `view_attention` of each request's view.

    Two launches, no synchronisation. In a CUDA graph the plan may change between replays, as long as plans for
    another `config` are not loaded.

    Args:
        query: [rows, heads, head_dim], rotated at the rows' positions; head_dim a multiple of 16. Rows beyond the
            plan's are padding.
        buffers: holds the plan.
        key_cache: [num_slots, kv_heads, head_dim] float32, bfloat16 or float16, rotated at the written positions.
        value_cache: [num_slots, kv_heads, value_dim] in the same type; value_dim a multiple of 16.
        scale: factor of the logits, usually head_dim ** -0.5.
        out: [rows, heads, value_dim] to be written, any floating type; made in the query's type when left out.
        lse: [rows, heads] float32 to be written with the natural-log sums; nothing is written when left out.
        config: what every plan of this graph is cut for; the loaded plan's when left out.

    Returns:
        `out`. A row that sees nothing, padding included, gets zeros and a log-sum-exp of -inf.

    Raises:
        ValueError: shapes, types, strides or devices other than these, more rows than the buffers hold, fewer than the
            plan has, or a config other than the loaded plan's.
    """
    if out is None:
        out = query.new_empty(query.shape[0], buffers.heads, buffers.value_dim)
    _check_output("out", out, (query.shape[0], buffers.heads, buffers.value_dim), query.device)
    attend(query, buffers, key_cache, value_cache, scale, config)
    return merge(buffers, out, lse, config)


def attend(
    query: torch.Tensor,
    buffers: PlanBuffers,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    config: Config | None = None,
) -> None:
    """The first launch of `view_attention_plan`: every item's output and log-sum-exp, into the buffers' partials."""
    config = _config(buffers, config)
    plan = buffers.plan
    rows, heads, head_dim = _check_attention(query, buffers, key_cache, value_cache)
    if plan is not None and rows < plan.num_rows:
        raise ValueError(f"{rows} query rows for a plan of {plan.num_rows}: expected at least as many")
    if rows == 0:
        return
    value_dim, kv_heads = buffers.value_dim, buffers.kv_heads
    workers = config.workers(kv_heads)
    if workers > buffers.capacity.workers:
        raise ValueError(f"{workers} workers: expected at most {buffers.capacity.workers}; allocate larger PlanBuffers")
    block_d, block_v = (max(16, triton.next_power_of_2(size)) for size in (head_dim, value_dim))
    d = buffers._device
    if config.groups:
        _attend_hopper(query, buffers, key_cache, value_cache, scale, config)
        return
    stages = config.tile_stages
    key_tiles = value_tiles = None
    if stages and (head_dim, value_dim) == (block_d, block_v) and _has_tiles(key_cache) and _has_tiles(value_cache):
        key_tiles, value_tiles = (_tiles(cache, config.block_n) for cache in (key_cache, value_cache))
    else:
        stages = 0
    _attend[(workers * kv_heads,)](
        query,
        key_cache,
        value_cache,
        key_tiles,
        value_tiles,
        buffers.kv_slots,
        buffers._straight,
        d["work_ptr"],
        d["items"],
        d["entry_row"],
        d["entry_limit"],
        d["entry_angle"],
        buffers._cos,
        buffers._sin,
        buffers.part,
        buffers.part_lse,
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        value_cache.stride(0),
        value_cache.stride(1),
        scale * 1.4426950408889634,  # log2(e): the kernel's exponentials are powers of two
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_D=block_d,
        BLOCK_V=block_v,
        ROTARY=buffers.rope.rotary_dim,
        NEOX=buffers.rope.neox,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        TILE_STAGES=stages,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _attend_hopper(
    query: torch.Tensor,
    buffers: PlanBuffers,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    config: Config,
) -> None:
    from sglang_ext.kernels.view_attention import hopper_impl  # Gluon: not everywhere

    turned, dim = buffers.turned, query.shape[2]
    shapes = (buffers.heads, buffers.kv_heads, dim, buffers.value_dim, key_cache.dtype, query.device)
    if turned is None or turned.dtype != key_cache.dtype or not hopper_impl.serves(*shapes):
        raise ValueError(
            f"config {config} is for Hopper's kernel, which does not take {shapes} with queries turned to "
            f"{None if turned is None else turned.dtype}: expected half precision, head size 64 or 128 and "
            "PlanBuffers(turned=the caches' type); choose a config without groups"
        )
    if not (_has_tiles(key_cache) and _has_tiles(value_cache)):
        raise ValueError("caches that are not aligned to 16 bytes: choose a config without groups")
    d, rope = buffers._device, buffers.rope
    entries, tables = (d["entry_row"], d["entry_angle"]), (buffers._cos, buffers._sin)
    hopper_impl.turn(query, *entries, d["counts"], *tables, turned, rope.rotary_dim, rope.neox, scale)
    hopper_impl.attend(
        turned,
        key_cache,
        value_cache,
        buffers.kv_slots,
        buffers._straight,
        d["work_ptr"],
        d["items"],
        d["entry_limit"],
        buffers.part,
        buffers.part_lse,
        config,
        buffers.descriptors,
    )


def _has_tiles(cache: torch.Tensor) -> bool:
    """Whether the device copies tiles by itself (TMA: Hopper and later) and may do so from this cache."""
    aligned = all(size * cache.element_size() % 16 == 0 for size in cache.stride()[:-1])
    hopper = not cache.is_cuda or torch.cuda.get_device_capability(cache.device)[0] >= 9
    return hopper and aligned and cache.data_ptr() % 16 == 0


def _tiles(cache: torch.Tensor, tokens: int) -> TensorDescriptor:
    """[slots, heads * dim] of a cache, from which tiles of `tokens` slots of one head are copied."""
    width = (cache.shape[1] - 1) * cache.stride(1) + cache.shape[2]
    return TensorDescriptor(cache, [cache.shape[0], width], [cache.stride(0), 1], [tokens, cache.shape[2]])


def merge(
    buffers: PlanBuffers, out: torch.Tensor, lse: torch.Tensor | None = None, config: Config | None = None
) -> torch.Tensor:
    """The second launch of `view_attention_plan`: each row's entries, merged by log-sum-exp into `out`."""
    config = _config(buffers, config)
    rows, heads, value_dim = out.shape[0], buffers.heads, buffers.value_dim
    _check_output("out", out, (rows, heads, value_dim), buffers.device)
    if lse is not None:
        _check_output("lse", lse, (rows, heads), buffers.device)
    if rows == 0:
        return out
    block_v = max(16, triton.next_power_of_2(value_dim))
    d = buffers._device
    _merge[(rows, heads)](
        buffers.part,
        buffers.part_lse,
        d["row_ptr"],
        d["row_entries"],
        out,
        buffers.part_lse if lse is None else lse,
        out.stride(0),
        out.stride(1),
        0 if lse is None else lse.stride(0),
        HEADS=heads,
        VALUE_DIM=value_dim,
        BLOCK_V=block_v,
        BLOCK_E=config.merge_block,
        WITH_LSE=lse is not None,
        num_warps=2,
    )
    return out


def _config(buffers: PlanBuffers, config: Config | None) -> Config:
    plan = buffers.plan
    if config is None:
        if plan is None:
            raise ValueError("no plan is loaded and no config given: load a plan, or say for which config to run")
        return plan.config
    if plan is not None and plan.config != config:
        raise ValueError(f"config {config} for a plan that was cut for {plan.config}: expected the same")
    return config


def _check_attention(
    query: torch.Tensor, buffers: PlanBuffers, key_cache: torch.Tensor, value_cache: torch.Tensor
) -> tuple[int, int, int]:
    if query.dim() != 3 or query.shape[1] != buffers.heads or query.shape[2] % 16 or not query.shape[2]:
        raise ValueError(
            f"query {tuple(query.shape)}: expected [rows, {buffers.heads}, head_dim] with head_dim a multiple of 16"
        )
    rows, heads, head_dim = query.shape
    if rows > buffers.capacity.rows:
        raise ValueError(f"{rows} query rows: expected at most {buffers.capacity.rows}; allocate larger PlanBuffers")
    if buffers.rope.rotary_dim > head_dim:
        raise ValueError(f"a rotary part of {buffers.rope.rotary_dim} in heads of {head_dim}: expected no more")
    for name, cache, dim in (("key", key_cache, head_dim), ("value", value_cache, buffers.value_dim)):
        if cache.dim() != 3 or cache.shape[1:] != (buffers.kv_heads, dim) or dim % 16:
            raise ValueError(
                f"{name} cache {tuple(cache.shape)}: expected [num_slots, {buffers.kv_heads}, {dim}], a multiple of 16"
            )
    if key_cache.dtype not in DTYPES or value_cache.dtype != key_cache.dtype or query.dtype not in DTYPES:
        raise ValueError(
            f"query {query.dtype}, keys {key_cache.dtype}, values {value_cache.dtype}: expected types of {DTYPES}, "
            "equal for keys and values; use view_attention for others"
        )
    for name, tensor in (("query", query), ("key cache", key_cache), ("value cache", value_cache)):
        if tensor.stride(2) != 1:
            raise ValueError(f"{name} with strides {tensor.stride()}: expected the last dimension contiguous")
        if tensor.device != buffers.device:
            raise ValueError(f"{name} on {tensor.device}: expected {buffers.device}")
    return rows, heads, head_dim


def _check_output(name: str, tensor: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if tensor.shape != shape or tensor.device != device or tensor.stride(-1) != 1 or not tensor.is_floating_point():
        raise ValueError(
            f"{name} {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}, strides {tensor.stride()}: expected "
            f"{shape}, floating, on {device}, last dimension contiguous"
        )
