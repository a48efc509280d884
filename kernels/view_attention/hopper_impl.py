"""Attention over planned views for Hopper's tensor cores: one group of warps loads, the others multiply.

The same work list as `triton_impl`, for batches where many query rows see a run. A loading group brings whole tiles by
TMA where the slots of an item follow one another and gathers them otherwise; each other group multiplies 64 rows, and
computes the softmax of one tile while the tensor cores multiply the next (Shah et al., 2024, FlashAttention-3, section
3). Written in Gluon, Triton's lower level, which has no interpreter: it runs on Hopper alone.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sglang_ext.kernels.hopper import TILES, is_hopper, thread_barrier
from sglang_ext.kernels.view_attention.buffers import PlanBuffers, copies_tiles
from sglang_ext.kernels.view_attention.config import Config
from sglang_ext.kernels.view_attention.triton_impl import LOG2_E, _pairs

SQUARE = "square tiles of keys: on an H200, Triton 3.6.0 made wrong results of them"
"""Why tiles never have as many tokens as a head has dimensions: logits and outputs have one layout then, and what comes
out is far off (head sizes 64 and 128, both half types, any number of groups). Found by the tests; the fault lies below
Gluon, as its intermediate code and the PTX look right."""

ROTATING = 2112
"""Programs that rotate queries."""

REGISTERS = {1: (128, 0, 64), 2: (168, 216, 64), 3: (128, 160, 32)}
"""Registers a thread by number of multiplying groups: on average, of a group that multiplies, of the one that loads."""


@gluon.jit
def _item(items, straight, item, last_item):
    """(first token, tokens, first entry, tokens in slots that follow one another, first slot) of an item."""
    inside = item < last_item
    kv_begin = gl.load(items + item * 4, mask=inside, other=0)
    kv_len = gl.load(items + item * 4 + 1, mask=inside, other=0)
    entry = gl.load(items + item * 4 + 2, mask=inside, other=0)
    tokens = gl.load(straight + item * 2, mask=inside, other=0)
    slot = gl.load(straight + item * 2 + 1, mask=inside, other=0)
    return kv_begin, kv_len, entry, tokens, slot


@gluon.jit
def _load(
    tiles,
    caches,
    work,
    strides,
    buffers,
    barriers,
    HEADS_EACH: gl.constexpr,
    HEAD_STEP: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Fill the ring of tiles, item after item."""
    query_tiles, key_tiles, value_tiles = tiles
    key_cache, value_cache = caches
    items, kv_slots, straight, first_item, last_item, first_head = work
    rotated_rows, stride_key, stride_key_head, stride_value, stride_value_head = strides
    q_smem, k_smem, v_smem = buffers
    q_ready, q_free, ready, free, _ = barriers
    GROUPS: gl.constexpr = q_smem.type.shape[0]
    STAGES: gl.constexpr = k_smem.type.shape[0]
    BLOCK_N: gl.constexpr = k_smem.type.shape[1]
    DIM: gl.constexpr = k_smem.type.shape[2]
    GATHER: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    dim = gl.arange(0, DIM, gl.SliceLayout(0, GATHER))
    line = gl.arange(0, BLOCK_N, gl.SliceLayout(1, GATHER))
    count = 0
    number = last_item - first_item
    kv_begin, kv_len, entry, whole, first_slot = _item(items, straight, first_item, last_item)
    for turn in range(number * HEADS_EACH):
        # Asked for an item ahead: nothing waits for them.
        next_item = first_item + (turn + 1) % number
        next_begin, next_len, next_entry, next_whole, next_slot = _item(items, straight, next_item, last_item)
        kv_head = first_head + turn // number * HEAD_STEP
        key_column = kv_head * stride_key_head
        value_column = kv_head * stride_value_head
        keys = key_cache + key_column
        values = value_cache + value_column
        slots = kv_slots + kv_begin
        whole = whole // BLOCK_N
        mbarrier.wait(q_free, (turn + 1) & 1)
        mbarrier.expect(q_ready, GROUPS * query_tiles.block_type.nbytes)
        query_row = kv_head * rotated_rows + entry * GROUP
        for g in gl.static_range(GROUPS):
            tma.async_copy_global_to_shared(query_tiles, [query_row + g * 64, 0], q_ready, q_smem.index(g))
        for step in range(gl.cdiv(kv_len, BLOCK_N)):
            stage = count % STAGES
            phase = (count // STAGES + 1) & 1
            count += 1
            arrived = ready.index(stage)
            mbarrier.wait(free.index(stage), phase)
            if step < whole:
                mbarrier.expect(arrived, key_tiles.block_type.nbytes + value_tiles.block_type.nbytes)
                at = first_slot + step * BLOCK_N
                tma.async_copy_global_to_shared(key_tiles, [at, key_column], arrived, k_smem.index(stage))
                tma.async_copy_global_to_shared(value_tiles, [at, value_column], arrived, v_smem.index(stage))
            else:
                token = step * BLOCK_N + line
                inside = token < kv_len
                slot = gl.load(slots + token, mask=inside, other=0).to(gl.int64)
                # What lies beyond the item becomes zeros: it gets no weight, but may be NaN.
                mask = inside[:, None] & (dim < DIM)[None, :]
                where = keys + slot[:, None] * stride_key + dim[None, :]
                async_copy.async_copy_global_to_shared(k_smem.index(stage), where, mask)
                where = values + slot[:, None] * stride_value + dim[None, :]
                async_copy.async_copy_global_to_shared(v_smem.index(stage), where, mask)
                async_copy.mbarrier_arrive(arrived)
                thread_barrier()
                mbarrier.arrive(arrived, count=1)
        kv_begin, kv_len, entry, whole, first_slot = next_begin, next_len, next_entry, next_whole, next_slot


@gluon.jit
def _softmax(logits, top, total, step, limit, whole, LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr):
    """One step of the online softmax, in powers of two: (weights, shrink, top, total)."""
    if (step + 1) * BLOCK_N > whole:
        token = step * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        logits = gl.where(token[None, :] < limit[:, None], logits, float("-inf"))
    new_top = gl.maximum(top, gl.max(logits, 1))
    weights = gl.exp2(logits - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    total = total * shrink + gl.sum(weights, 1)
    return weights, shrink, new_top, total


@gluon.jit
def _multiply(
    work,
    outputs,
    buffers,
    barriers,
    WHICH: gl.constexpr,
    HEADS_EACH: gl.constexpr,
    HEAD_STEP: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Attention of 64 rows of every item: group WHICH of those that multiply."""
    items, _, straight, first_item, last_item, first_head = work
    entry_limit, part, part_lse = outputs
    q_smem, k_smem, v_smem = buffers
    q_ready, q_free, ready, free, order = barriers
    HEADS: gl.constexpr = HEAD_STEP * HEADS_EACH * GROUP
    GROUPS: gl.constexpr = q_smem.type.shape[0]
    STAGES: gl.constexpr = k_smem.type.shape[0]
    BLOCK_N: gl.constexpr = k_smem.type.shape[1]
    DIM: gl.constexpr = k_smem.type.shape[2]
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    QUERIES: gl.constexpr = gl.DotOperandLayout(0, LOGITS, 2)
    dtype: gl.constexpr = k_smem.dtype
    line = WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, LOGITS))
    local = line // GROUP
    out_line = WHICH * 64 + gl.arange(0, 64, gl.SliceLayout(1, OUT))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, OUT))
    # Groups take turns with their keys, so that one computes its softmax while the tensor cores serve the others.
    ORDERED: gl.constexpr = GROUPS > 1
    FIRST: gl.constexpr = 0 if WHICH == 0 else 1  # `count` is already one ahead
    nothing = gl.zeros((64, BLOCK_N), gl.float32, LOGITS)
    count = 0
    number = last_item - first_item
    _, kv_len, entry_begin, straight_tokens, _ = _item(items, straight, first_item, last_item)
    entries = gl.load(items + first_item * 4 + 3, mask=number > 0, other=0)
    limit = gl.load(entry_limit + entry_begin + local, mask=local < entries, other=0)
    for turn in range(number * HEADS_EACH):
        # Asked for an item ahead: nothing waits for them.
        next_item = first_item + (turn + 1) % number
        _, next_len, next_begin, next_straight, _ = _item(items, straight, next_item, last_item)
        next_entries = gl.load(items + next_item * 4 + 3)
        kv_head = first_head + turn // number * HEAD_STEP
        straight_steps = straight_tokens // BLOCK_N
        used = local < entries
        entry = entry_begin + local
        limit = gl.where(used, limit, kv_len)  # unused lines see everything: harmless, and nothing to mask
        whole = gl.min(limit, 0)
        steps = gl.cdiv(kv_len, BLOCK_N)

        # From registers the tensor cores take queries at full speed; from shared memory, beside keys, they do not.
        mbarrier.wait(q_ready, turn & 1)
        q = q_smem.index(WHICH).load(QUERIES)
        mbarrier.arrive(q_free, count=1)
        acc = gl.zeros((64, DIM), gl.float32, OUT)
        top = gl.full((64,), float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
        total = gl.zeros((64,), gl.float32, gl.SliceLayout(1, LOGITS))
        for step in range(steps):
            stage = count % STAGES
            phase = (count // STAGES) & 1
            count += 1
            mbarrier.wait(ready.index(stage), phase)
            if step >= straight_steps:
                fence_async_shared()
            if ORDERED:
                mbarrier.wait(order.index(WHICH), (count + FIRST) & 1)
            logits = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            if ORDERED:
                mbarrier.arrive(order.index((WHICH + 1) % GROUPS), count=1)
            logits = warpgroup_mma_wait(0, [logits])
            weights, shrink, top, total = _softmax(logits, top, total, step, limit, whole, LOGITS, BLOCK_N)
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
            p = gl.convert_layout(weights.to(dtype), WEIGHTS)
            acc = warpgroup_mma(p, v_smem.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(free.index(stage), count=1)
        limit = gl.load(entry_limit + next_begin + local, mask=local < next_entries, other=0)
        state = entry.to(gl.int64) * HEADS + kv_head * GROUP + line % GROUP
        ln2: gl.constexpr = 0.6931471805599453
        gl.store(part_lse + state, (top + gl.log2(total)) * ln2, mask=used)
        acc = acc / gl.convert_layout(total, gl.SliceLayout(1, OUT))[:, None]
        out_used = out_line // GROUP < entries
        out_state = (entry_begin + out_line // GROUP).to(gl.int64) * HEADS
        out_state += kv_head * GROUP + out_line % GROUP
        where = part + out_state[:, None] * DIM + dim[None, :]
        gl.store(where, acc.to(part.dtype.element_ty), mask=out_used[:, None] & (dim < DIM)[None, :])
        kv_len, entry_begin, entries, straight_tokens = next_len, next_begin, next_entries, next_straight


@gluon.jit
def _attend(
    query_tiles,
    key_tiles,
    value_tiles,
    key_cache,
    value_cache,
    kv_slots,
    straight,
    work_ptr,
    items,
    entry_limit,
    part,
    part_lse,
    rotated_rows,
    stride_key,
    stride_key_head,
    stride_value,
    stride_value_head,
    KV_HEADS: gl.constexpr,
    HEADS_EACH: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    REGISTERS: gl.constexpr,
    LOAD_REGISTERS: gl.constexpr,
):
    """One worker's items, for `HEADS_EACH` key-value heads one after the other."""
    HEAD_STEP: gl.constexpr = KV_HEADS // HEADS_EACH
    first_head = gl.program_id(0) % HEAD_STEP
    worker = gl.program_id(0) // HEAD_STEP
    dtype: gl.constexpr = key_cache.dtype.element_ty
    q_smem = gl.allocate_shared_memory(dtype, [GROUPS, 64, DIM], query_tiles.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DIM], key_tiles.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DIM], value_tiles.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_free, count=GROUPS)
    for group in gl.static_range(GROUPS):
        mbarrier.init(order.index(group), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=GROUPS)
    fence_async_shared()

    first_item = gl.load(work_ptr + worker)
    last_item = gl.load(work_ptr + worker + 1)
    tiles = (query_tiles, key_tiles, value_tiles)
    caches = (key_cache, value_cache)
    work = (items, kv_slots, straight, first_item, last_item, first_head)
    strides = (rotated_rows, stride_key, stride_key_head, stride_value, stride_value_head)
    outputs = (entry_limit, part, part_lse)
    buffers = (q_smem, k_smem, v_smem)
    barriers = (q_ready, q_free, ready, free, order)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (work, outputs, buffers, barriers, 0, HEADS_EACH, HEAD_STEP, GROUP)),
                (_load, (tiles, caches, work, strides, buffers, barriers, HEADS_EACH, HEAD_STEP, GROUP)),
            ],
            [4],
            [LOAD_REGISTERS],
        )
    elif GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (work, outputs, buffers, barriers, 0, HEADS_EACH, HEAD_STEP, GROUP)),
                (_multiply, (work, outputs, buffers, barriers, 1, HEADS_EACH, HEAD_STEP, GROUP)),
                (_load, (tiles, caches, work, strides, buffers, barriers, HEADS_EACH, HEAD_STEP, GROUP)),
            ],
            [4, 4],
            [REGISTERS, LOAD_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (work, outputs, buffers, barriers, 0, HEADS_EACH, HEAD_STEP, GROUP)),
                (_multiply, (work, outputs, buffers, barriers, 1, HEADS_EACH, HEAD_STEP, GROUP)),
                (_multiply, (work, outputs, buffers, barriers, 2, HEADS_EACH, HEAD_STEP, GROUP)),
                (_load, (tiles, caches, work, strides, buffers, barriers, HEADS_EACH, HEAD_STEP, GROUP)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, LOAD_REGISTERS],
        )


@triton.jit
def _rotate(
    query,
    entry_row,
    entry_angle,
    counts,
    cos,
    sin,
    rotated,
    rotated_rows,
    stride_row,
    stride_head,
    scale_log2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    NEOX: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """rotated[kv_head, entry, head of the group] = its query, rotated by its angle, times the logits' factor."""
    HALF: tl.constexpr = ROTARY // 2
    head = tl.arange(0, KV_HEADS * GROUP)
    dim = tl.arange(0, DIM)
    partner, frequency, sign = _pairs(dim, ROTARY, NEOX)
    rotary = dim < ROTARY
    to = (head // GROUP) * rotated_rows + head % GROUP
    for entry in range(tl.program_id(0), tl.load(counts + 2), PROGRAMS):
        start = query + tl.load(entry_row + entry).to(tl.int64) * stride_row + head[:, None] * stride_head
        rotation = tl.load(entry_angle + entry) * HALF + frequency
        c = tl.load(cos + rotation, mask=rotary, other=1.0)
        s = tl.load(sin + rotation, mask=rotary, other=0.0) * sign
        q = tl.load(start + dim[None, :]).to(tl.float32)
        q_partner = tl.load(start + partner[None, :], mask=rotary[None, :], other=0.0).to(tl.float32)
        q = (q * c[None, :] + q_partner * s[None, :]) * scale_log2
        where = rotated + (to + entry * GROUP).to(tl.int64)[:, None] * DIM + dim[None, :]
        tl.store(where, q.to(rotated.dtype.element_ty))


@functools.cache
def serves(heads: int, kv_heads: int, head_dim: int, value_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel takes such attention: a Hopper GPU, half precision, and sizes that fill its tiles."""
    group = heads // kv_heads
    return (
        is_hopper(device)
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim == value_dim
        and head_dim in (64, 128)
        and heads & (heads - 1) == 0
        and 64 % group == 0
    )


def rotate(query: torch.Tensor, buffers: PlanBuffers, scale: float) -> None:
    """Rotate the queries of all entries, into `buffers.rotated`: the first of the two launches."""
    rotated, sections, rope = buffers.rotated, buffers.sections, buffers.rope
    if rotated is None:
        raise ValueError("these PlanBuffers hold no rotated queries: allocate PlanBuffers(rotated=the caches' type)")
    kv_heads, rows, dim = rotated.shape
    _rotate[(ROTATING,)](
        query,
        sections["entry_row"],
        sections["entry_angle"],
        sections["counts"],
        buffers.cos,
        buffers.sin,
        rotated,
        rows,
        query.stride(0),
        query.stride(1),
        scale * LOG2_E,
        KV_HEADS=kv_heads,
        GROUP=buffers.heads // kv_heads,
        DIM=dim,
        ROTARY=rope.rotary_dim,
        NEOX=rope.neox,
        PROGRAMS=ROTATING,
        num_warps=4,
    )


def attend(
    query: torch.Tensor,
    buffers: PlanBuffers,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    config: Config,
) -> None:
    """Rotate the queries, then every item's output and log-sum-exp into the buffers' partials.

    See `planned.view_attention_plan` for the arguments.

    Raises:
        ValueError: the kernel does not serve such attention, the buffers have no room for rotated queries, tiles are as
            long as a head is wide, or a cache is not aligned to 16 bytes.
    """
    rotated = buffers.rotated
    shapes = (buffers.heads, buffers.kv_heads, query.shape[2], buffers.value_dim, key_cache.dtype, query.device)
    if rotated is None or rotated.dtype != key_cache.dtype or not serves(*shapes):
        raise ValueError(
            f"config {config} is for Hopper's kernel, which does not take {shapes} with queries rotated to "
            f"{None if rotated is None else rotated.dtype}: expected half precision, head size 64 or 128 and "
            "PlanBuffers(rotated=the caches' type); choose a config without groups"
        )
    if config.block_n == query.shape[2]:
        raise ValueError(f"config {config} for head size {query.shape[2]}: expected another block_n ({SQUARE})")
    rotate(query, buffers, scale)
    attend_rotated(buffers, rotated, key_cache, value_cache, config)


def attend_rotated(
    buffers: PlanBuffers, rotated: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, config: Config
) -> None:
    """The second of the two launches of `attend`, over the queries that the first one rotated."""
    kv_heads, rows, dim = rotated.shape
    sections = buffers.sections
    average, multiplying, loading = REGISTERS[config.groups]
    _attend[(config.workers(kv_heads) * kv_heads // config.heads_each,)](
        _tiles(buffers, rotated.view(kv_heads * rows, 1, dim), 64),
        _tiles(buffers, key_cache, config.block_n),
        _tiles(buffers, value_cache, config.block_n),
        key_cache,
        value_cache,
        buffers.kv_slots,
        buffers.straight,
        sections["work_ptr"],
        sections["items"],
        sections["entry_limit"],
        buffers.part,
        buffers.part_lse,
        rows,
        key_cache.stride(0),
        key_cache.stride(1),
        value_cache.stride(0),
        value_cache.stride(1),
        KV_HEADS=kv_heads,
        HEADS_EACH=config.heads_each,
        GROUP=buffers.heads // kv_heads,
        DIM=dim,
        BLOCK_N=config.block_n,
        STAGES=config.tile_stages,
        GROUPS=config.groups,
        REGISTERS=multiplying,
        LOAD_REGISTERS=loading,
        num_warps=4,
        maxnreg=average,
    )


def _tiles(buffers: PlanBuffers, tensor: torch.Tensor, rows: int) -> TensorDescriptor:
    """[rows, heads * dim] of a tensor, from which tiles of `rows` rows of one head are copied.

    Kept from one call to the next: making one costs the host more time than launching the kernel.
    """
    name = ("gluon", tensor.data_ptr(), tensor.shape, tensor.stride(), rows)
    if name not in buffers.descriptors:
        if not copies_tiles(tensor):
            raise ValueError("caches that are not aligned to 16 bytes: choose a config without groups")
        width = (tensor.shape[1] - 1) * tensor.stride(1) + tensor.shape[2]
        shape, strides = [tensor.shape[0], width], [tensor.stride(0), 1]
        buffers.descriptors[name] = TensorDescriptor(tensor, shape, strides, [rows, tensor.shape[2]], TILES)
    return buffers.descriptors[name]
