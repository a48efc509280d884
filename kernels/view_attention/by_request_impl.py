"""Attention over a `RequestPlan` in Triton: one program a share and key-value head, and one merge.

Exactness is that of `triton_impl`: queries are rotated instead of keys, softmaxes have float32 sums, and the shares of
a row merge by log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from sglang_ext.kernels.float8 import FLOAT8
from sglang_ext.kernels.rope import Rope
from sglang_ext.kernels.rope.triton_impl import angle_tables
from sglang_ext.kernels.view_attention.buffers import gather_slots
from sglang_ext.kernels.view_attention.by_request import BLOCK_N, RequestPlan
from sglang_ext.kernels.view_attention.triton_impl import LOG2_E, _pairs, _steps, merge_parts

MERGE_BLOCK = 4
"""Partial outputs that one step of the merge reads: a row has few."""


@triton.jit
def _attend(
    query,
    key_cache,
    value_cache,
    kv_slots,
    shares,
    runs,
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
    FLOAT8: tl.constexpr,
):
    """One share for one key-value head; neighbouring programs read neighbouring heads of the same tokens."""
    HALF: tl.constexpr = ROTARY // 2
    DTYPE: tl.constexpr = query.dtype.element_ty if FLOAT8 else key_cache.dtype.element_ty
    kv_head = tl.program_id(0) % KV_HEADS
    share = shares + tl.program_id(0) // KV_HEADS * 6
    first_row, rows = tl.load(share), tl.load(share + 1)
    first_run, end_run = tl.load(share + 2), tl.load(share + 3)
    first_part, before = tl.load(share + 4), tl.load(share + 5)
    keys = key_cache + kv_head * stride_key_head
    values = value_cache + kv_head * stride_value_head

    line = tl.arange(0, BLOCK_M)
    local = line // GROUP
    head = kv_head * GROUP + line % GROUP
    used = (local < rows) & (line < BLOCK_M // GROUP * GROUP)
    dim = tl.arange(0, BLOCK_D)
    value_dim = tl.arange(0, BLOCK_V)
    partner, frequency, sign = _pairs(dim, ROTARY, NEOX)
    rotary = dim < ROTARY
    start = query + (first_row + local).to(tl.int64) * stride_query_row + head * stride_query_head
    q_mask = used[:, None] & (dim < HEAD_DIM)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_V), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    for run in range(first_run, end_run):
        begin, tokens = tl.load(runs + run * 4), tl.load(runs + run * 4 + 1)
        angle, limit = tl.load(runs + run * 4 + 2), tl.load(runs + run * 4 + 3)
        # Loaded anew for each run: they are in the cache, and in registers they would push out the sums.
        q = tl.load(start[:, None] + dim[None, :], mask=q_mask, other=0.0).to(tl.float32)
        q_partner = tl.load(start[:, None] + partner[None, :], mask=used[:, None] & rotary[None, :], other=0.0)
        c = tl.load(cos + angle * HALF + frequency, mask=rotary, other=1.0)
        s = tl.load(sin + angle * HALF + frequency, mask=rotary, other=0.0) * sign
        q = ((q * c[None, :] + q_partner.to(tl.float32) * s[None, :]) * scale_log2).to(DTYPE)
        sees = tl.where(used, tl.minimum(limit + before + local, tokens), tokens)
        whole = tl.min(sees) // BLOCK_N * BLOCK_N  # up to here every row sees every token
        slots = kv_slots + begin
        acc, total, top = _steps(
            acc,
            total,
            top,
            q,
            sees,
            slots,
            keys,
            values,
            0,
            whole,
            tokens,
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
            sees,
            slots,
            keys,
            values,
            whole,
            tokens,
            tokens,
            stride_key,
            stride_value,
            HEAD_DIM,
            VALUE_DIM,
            BLOCK_D,
            BLOCK_V,
            BLOCK_N,
            True,
        )
    state = (first_part + local).to(tl.int64) * (KV_HEADS * GROUP) + head
    acc = (acc / total[:, None]).to(part.dtype.element_ty)
    mask = used[:, None] & (value_dim < VALUE_DIM)[None, :]
    tl.store(part + state[:, None] * VALUE_DIM + value_dim[None, :], acc, mask=mask)
    ln2: tl.constexpr = 0.6931471805599453
    tl.store(part_lse + state, (top + tl.log2(total)) * ln2, mask=used)


@dataclass(frozen=True)
class LoadedRequests:
    """A `RequestPlan` on the device.

    Attributes:
        plan: on the host.
        kv_heads: of the attention that uses it.
        rope: the model's rotation.
        shares, runs, row_ptr, row_parts: of the plan, flat int32.
        kv_slots: [num_slots] int32, the plan's own copy of the slots of its runs.
        cos, sin: [angles, rotary_dim / 2] float32, of the rotations by -angles.
        part: [parts, heads, value_dim] partial outputs; part_lse: [parts, heads] float32.
    """

    plan: RequestPlan
    kv_heads: int
    rope: Rope
    shares: torch.Tensor
    runs: torch.Tensor
    row_ptr: torch.Tensor
    row_parts: torch.Tensor
    kv_slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    part: torch.Tensor
    part_lse: torch.Tensor


def load(
    plan: RequestPlan, slot_table: torch.Tensor, rope: Rope, kv_heads: int, value_dim: int, part_dtype: torch.dtype
) -> LoadedRequests:
    """Bring a plan to the device: one asynchronous copy, then the slots of its runs and its angle tables.

    Args:
        plan: of a prefill.
        slot_table: [n] int32, contiguous: what `PlanRows.source` points into. It is read once, on the current stream.
        rope: the model's rotation, on the table's device.
        kv_heads: key-value heads of this device.
        value_dim: size of a value.
        part_dtype: type of the partial outputs.

    Raises:
        ValueError: the table is not one contiguous row of int32, or is shorter than the plan's runs need.
    """
    if slot_table.dim() != 1 or slot_table.dtype != torch.int32 or not slot_table.is_contiguous():
        raise ValueError(
            f"slot table {tuple(slot_table.shape)} of {slot_table.dtype}: expected one contiguous row of int32"
        )
    if slot_table.numel() < plan.table_size:
        raise ValueError(f"slot table of {slot_table.numel()}: expected at least {plan.table_size}")
    device, heads, parts = slot_table.device, kv_heads * plan.group, len(plan.row_parts)
    whole = [plan.shares, plan.runs, plan.row_ptr, plan.row_parts, plan.angles, plan.copies[:, ::2]]
    # Every section begins at a multiple of 128 bytes: Triton compiles kernels anew for pointers that are not aligned.
    sizes = [-(-each.size // 32) * 32 for each in whole]
    packed = torch.zeros(sum(sizes), dtype=torch.int32)
    for each, section in zip(whole, packed.split(sizes), strict=True):
        section[: each.size] = torch.from_numpy(each.reshape(-1).astype(np.int32))
    source = torch.from_numpy(np.ascontiguousarray(plan.copies[:, 1]))
    if device.type == "cuda":
        packed, source = packed.pin_memory(), source.pin_memory()
    packed, source = packed.to(device, non_blocking=True), source.to(device, non_blocking=True)
    shares, runs, row_ptr, row_parts, angles, copies = packed.split(sizes)
    kv_slots = torch.empty(plan.num_slots, dtype=torch.int32, device=device)
    gather_slots(copies, source, slot_table, kv_slots)
    half = rope.inv_freq.numel()
    cos, sin = (torch.empty(len(plan.angles), max(half, 1), dtype=torch.float32, device=device) for _ in range(2))
    if half:
        angle_tables(angles[: len(plan.angles)], rope, cos, sin)
    part = torch.empty(parts, heads, value_dim, dtype=part_dtype, device=device)
    part_lse = torch.empty(parts, heads, dtype=torch.float32, device=device)
    return LoadedRequests(plan, kv_heads, rope, shares, runs, row_ptr, row_parts, kv_slots, cos, sin, part, part_lse)


def attend_by_request(
    query: torch.Tensor,
    loaded: LoadedRequests,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of a prefill over a loaded plan; equal to `view_attention` of each request's view.

    Args:
        query: [rows, heads, head_dim], rotated at the rows' positions; at least the plan's rows.
        loaded: the plan.
        key_cache: [num_slots, kv_heads, head_dim], rotated at the written positions; float8 e4m3 too.
        value_cache: [num_slots, kv_heads, value_dim] in the same type.
        scale: factor of the logits, usually head_dim ** -0.5.
        out: [rows, heads, value_dim] to be written, any floating type; a row that sees nothing gets zeros.
        lse: [rows, heads] float32 to be written with the natural-log sums; nothing is written when left out.

    Returns:
        `out`.

    Raises:
        ValueError: shapes other than these, or fewer rows than the plan has.
    """
    rows, heads, head_dim = query.shape
    plan, kv_heads, value_dim = loaded.plan, loaded.kv_heads, loaded.part.shape[2]
    if heads != kv_heads * plan.group or tuple(out.shape) != (rows, heads, value_dim) or rows != plan.num_rows:
        raise ValueError(
            f"queries {tuple(query.shape)} into {tuple(out.shape)}: expected [{plan.num_rows}, {kv_heads * plan.group},"
            f" head_dim] into [{plan.num_rows}, {kv_heads * plan.group}, {value_dim}]"
        )
    block_d, block_v = (max(16, triton.next_power_of_2(size)) for size in (head_dim, value_dim))
    _attend[(len(plan.shares) * kv_heads,)](
        query,
        key_cache,
        value_cache,
        loaded.kv_slots,
        loaded.shares,
        loaded.runs,
        loaded.cos,
        loaded.sin,
        loaded.part,
        loaded.part_lse,
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        value_cache.stride(0),
        value_cache.stride(1),
        scale * LOG2_E,
        KV_HEADS=kv_heads,
        GROUP=plan.group,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_D=block_d,
        BLOCK_V=block_v,
        ROTARY=loaded.rope.rotary_dim,
        NEOX=loaded.rope.neox,
        BLOCK_M=plan.block_m,
        BLOCK_N=BLOCK_N if block_d <= 128 else BLOCK_N // 2,
        FLOAT8=key_cache.dtype == FLOAT8,
        num_warps=4 if plan.block_m <= 64 else 8,
        num_stages=3,
    )
    merge_parts(loaded.part, loaded.part_lse, loaded.row_ptr, loaded.row_parts, out, lse, MERGE_BLOCK)
    return out
