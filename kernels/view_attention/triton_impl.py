"""Fused attention over planned views in Triton: one launch reads every shared run once for the whole batch, one merges.

Exactness: a key written at m and seen at m + delta is met by the query row rotated by -delta (Su et al., 2021, section
3.2.2: rotations compose), each (row, item) is a softmax with float32 sums (Milakov and Gimelshein, 2018), and items
merge by log-sum-exp; only the rounding of the rotated query and of the weights to the caches' type is lost. Caches in
float8 are widened to the query's type, exactly, and multiplied in it: it takes their type's place then.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from sglang_ext.kernels.float8 import FLOAT8
from sglang_ext.kernels.view_attention.buffers import PlanBuffers, copies_tiles
from sglang_ext.kernels.view_attention.config import Config

LOG2_E = 1.4426950408889634
"""The kernels' exponentials are powers of two."""

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
    k = k.to(q.dtype)  # of float8 alone it is another type
    v = v.to(q.dtype)
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
def _pairs(dim, ROTARY: tl.constexpr, NEOX: tl.constexpr):
    """out[d] = q[d] * cos + q[partner[d]] * sign[d] * sin, for both styles; beyond the rotary part sin is 0."""
    HALF: tl.constexpr = ROTARY // 2
    if NEOX:
        first = dim < HALF
        partner = tl.where(first, dim + HALF, tl.where(dim < ROTARY, dim - HALF, dim))
        frequency = tl.where(first, dim, dim - HALF)
    else:
        first = dim % 2 == 0
        partner = tl.where(dim < ROTARY, tl.where(first, dim + 1, dim - 1), dim)
        frequency = dim // 2
    return partner, frequency, tl.where(first, -1.0, 1.0)


@triton.jit
def _rotated_query(
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
    """[len(local), BLOCK_D] queries of an item, each rotated by its entry's angle, times the logits' factor."""
    HALF: tl.constexpr = ROTARY // 2
    dim = tl.arange(0, BLOCK_D)
    partner, frequency, sign = _pairs(dim, ROTARY, NEOX)
    inside = item < last_item
    entry = tl.load(items + item * 4 + 2, mask=inside, other=0) + local
    used = local < tl.load(items + item * 4 + 3, mask=inside, other=0)
    row = tl.load(entry_row + entry, mask=used, other=0).to(tl.int64)
    angle = tl.load(entry_angle + entry, mask=used, other=0)
    start = query + row * stride_query_row + head * stride_query_head
    q_mask = used[:, None] & (dim < HEAD_DIM)[None, :]
    rotation_mask = used[:, None] & (dim < ROTARY)[None, :]
    q = tl.load(start[:, None] + dim[None, :], mask=q_mask, other=0.0).to(tl.float32)
    q_partner = tl.load(start[:, None] + partner[None, :], mask=rotation_mask, other=0.0).to(tl.float32)
    rotation = angle[:, None] * HALF + frequency[None, :]
    c = tl.load(cos + rotation, mask=rotation_mask, other=1.0)
    s = tl.load(sin + rotation, mask=rotation_mask, other=0.0)
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
    FLOAT8: tl.constexpr,
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
    DTYPE: tl.constexpr = query.dtype.element_ty if FLOAT8 else key_cache.dtype.element_ty

    first_item = tl.load(work_ptr + worker)
    last_item = tl.load(work_ptr + worker + 1)
    # A value that the loop carries goes to shared memory once, from where the tensor cores read it. Queries computed
    # where they are used were loaded into registers again by every step.
    q = _rotated_query(
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
        DTYPE,
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
        q = _rotated_query(
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
            DTYPE,
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


def attend(
    query: torch.Tensor,
    buffers: PlanBuffers,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    config: Config,
) -> None:
    """Every item's output and log-sum-exp, into the buffers' partials; see `planned.view_attention_plan`."""
    _, heads, head_dim = query.shape
    value_dim, kv_heads = buffers.value_dim, buffers.kv_heads
    block_d, block_v = (max(16, triton.next_power_of_2(size)) for size in (head_dim, value_dim))
    d = buffers.sections
    stages = config.tile_stages
    key_tiles = value_tiles = None
    if stages and (head_dim, value_dim) == (block_d, block_v):
        key_tiles, value_tiles = (_tiles(buffers, cache, config.block_n) for cache in (key_cache, value_cache))
    if key_tiles is None or value_tiles is None:
        stages, key_tiles, value_tiles = 0, None, None
    _attend[(config.workers(kv_heads) * kv_heads,)](
        query,
        key_cache,
        value_cache,
        key_tiles,
        value_tiles,
        buffers.kv_slots,
        buffers.straight,
        d["work_ptr"],
        d["items"],
        d["entry_row"],
        d["entry_limit"],
        d["entry_angle"],
        buffers.cos,
        buffers.sin,
        buffers.part,
        buffers.part_lse,
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        value_cache.stride(0),
        value_cache.stride(1),
        scale * LOG2_E,
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
        FLOAT8=key_cache.dtype == FLOAT8,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _tiles(buffers: PlanBuffers, cache: torch.Tensor, tokens: int) -> TensorDescriptor | None:
    """[slots, heads * dim] of a cache, from which tiles of `tokens` slots of one head are copied; None: it has none."""
    name = ("triton", cache.data_ptr(), cache.shape, cache.stride(), tokens)
    if name not in buffers.descriptors:
        width = (cache.shape[1] - 1) * cache.stride(1) + cache.shape[2]
        shape, strides, tile = [cache.shape[0], width], [cache.stride(0), 1], [tokens, cache.shape[2]]
        buffers.descriptors[name] = TensorDescriptor(cache, shape, strides, tile) if copies_tiles(cache) else None
    return buffers.descriptors[name]


def merge(buffers: PlanBuffers, out: torch.Tensor, lse: torch.Tensor | None, config: Config) -> None:
    """Each row's entries, merged by log-sum-exp into `out`; see `planned.view_attention_plan`."""
    d = buffers.sections
    merge_parts(buffers.part, buffers.part_lse, d["row_ptr"], d["row_entries"], out, lse, config.merge_block)


def merge_parts(
    part: torch.Tensor,
    part_lse: torch.Tensor,
    row_ptr: torch.Tensor,
    row_parts: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    block: int,
) -> None:
    """Merge the partial outputs of each row by log-sum-exp.

    Args:
        part: [parts, heads, value_dim] any floating type; part_lse: [parts, heads] float32, natural-log sums.
        row_ptr: [at least rows + 1], row_parts: [parts] int32: the partial outputs of each row (CSR).
        out: [rows, heads, value_dim] to be written; zeros where a row has none.
        lse: [rows, heads] float32 to be written, -inf where a row has none; None: not wanted.
        block: partial outputs that one step reads.
    """
    rows, heads, value_dim = out.shape
    _merge[(rows, heads)](
        part,
        part_lse,
        row_ptr,
        row_parts,
        out,
        part_lse if lse is None else lse,
        out.stride(0),
        out.stride(1),
        0 if lse is None else lse.stride(0),
        HEADS=heads,
        VALUE_DIM=value_dim,
        BLOCK_V=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_E=block,
        WITH_LSE=lse is not None,
        num_warps=2,
    )
