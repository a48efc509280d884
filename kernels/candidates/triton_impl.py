"""Estimates for candidate tokens in Triton: fixed grids, counts read on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ext.kernels.candidates.quantised import QuantisedKeys, check
from sglang_ext.kernels.top_p.types import Selection

BLOCK = 128
"""Tokens of a program."""


@triton.jit
def _bounds_query(query, out, heads, DIM: tl.constexpr, DIM_PAD: tl.constexpr, HEADS_PAD: tl.constexpr):
    h, d = tl.program_id(0) * HEADS_PAD + tl.arange(0, HEADS_PAD), tl.arange(0, DIM_PAD)
    inside = (h < heads)[:, None] & (d < DIM)[None, :]
    q = tl.load(query + h[:, None] * DIM + d[None, :], mask=inside, other=0.0)
    zero = tl.zeros_like(q)
    tl.store(out + h[:, None] * (2 * DIM) + d[None, :], tl.maximum(q, zero), mask=inside)
    tl.store(out + h[:, None] * (2 * DIM) + DIM + d[None, :], tl.minimum(q, zero), mask=inside)


def bounds_query(query: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The query that scores pages by the bounds of their keys, as centroids (high, low): (max(q, 0), min(q, 0)).

    Args:
        query: [batch, heads, head_dim] contiguous.
        out: [batch, heads, 2 * head_dim] contiguous, in query's dtype.

    Returns:
        `out`.

    Raises:
        ValueError: an output of another shape or dtype; tensors that are not contiguous.
    """
    batch, heads, dim = query.shape
    if tuple(out.shape) != (batch, heads, 2 * dim) or out.dtype != query.dtype:
        raise ValueError(f"out {out.dtype} of {tuple(out.shape)}: expected {query.dtype}, {(batch, heads, 2 * dim)}")
    if not (query.is_contiguous() and out.is_contiguous()):
        raise ValueError(f"strides {query.stride()} and {out.stride()}: expected contiguous tensors")
    rows = batch * heads
    _bounds_query[(triton.cdiv(rows, 16),)](
        query, out, rows, DIM=dim, DIM_PAD=triton.next_power_of_2(dim), HEADS_PAD=16, num_warps=4
    )
    return out


@triton.jit
def _token_scores(
    query, codes, ranges, members, counts, shift, logits, sizes, starts, cells,
    scale, slots, most_members, most_pages, most_cells,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, KV_PAD: tl.constexpr, GROUP_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    request, head = row // KV_HEADS, row % KV_HEADS
    h = tl.arange(0, KV_PAD)
    most = tl.max(tl.load(counts + (request * KV_HEADS + h) * 5 + 1, mask=h < KV_HEADS, other=0), 0)
    begin = tl.program_id(0) * BLOCK
    if (begin == 0) & (head == 0):
        tl.store(cells + request, most)
    if begin < most:
        n = tl.load(counts + row * 5 + 1)
        token = begin + tl.arange(0, BLOCK)
        visible = token < n
        member = token + tl.load(shift + row * most_pages + token // PAGE, mask=visible, other=0)
        slot = tl.load(members + head * most_members + member, mask=visible, other=0).to(tl.int64)
        at = head * slots + slot
        g, d = tl.arange(0, GROUP_PAD), tl.arange(0, HALF_PAD)
        of_query = ((row * GROUP + g) * 2 * HALF)[:, None] + d[None, :]
        in_query = (g < GROUP)[:, None] & (d < HALF)[None, :]
        q1 = tl.load(query + of_query, mask=in_query, other=0.0)
        q2 = tl.load(query + of_query + HALF, mask=in_query, other=0.0)
        inside = visible[:, None] & (d < HALF)[None, :]
        code = tl.load(codes + at[:, None] * HALF + d[None, :], mask=inside, other=0).to(tl.int32)
        low = tl.load(ranges + at * 2, mask=visible, other=0.0).to(tl.float32)
        step = tl.load(ranges + at * 2 + 1, mask=visible, other=0.0).to(tl.float32)
        # Whole numbers up to 15 are exact in any floating type; the range is applied to the products.
        x = tl.dot(q1, tl.trans((code & 15).to(q1.dtype)), input_precision=PRECISION)
        x += tl.dot(q2, tl.trans((code >> 4).to(q2.dtype)), input_precision=PRECISION)
        total = tl.sum(q1.to(tl.float32), 1) + tl.sum(q2.to(tl.float32), 1)
        x = (x * step[None, :] + total[:, None] * low[None, :]) * scale
        x = tl.where(visible[None, :], x, float("-inf"))
        room = token < tl.minimum(most, most_cells)
        tl.store(
            logits + ((row * GROUP + g) * most_cells)[:, None] + token[None, :],
            x,
            mask=(g < GROUP)[:, None] & room[None, :],
        )
        tl.store(sizes + row * most_cells + token, visible.to(tl.int32), mask=room)
        tl.store(starts + row * most_cells + token, tl.where(visible, member, 0), mask=room)


def token_scores(
    query: torch.Tensor,
    keys: QuantisedKeys,
    members: torch.Tensor,
    chosen: Selection,
    page: int,
    cells: int,
    scale: float,
    *,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`reference.token_scores` on the device.

    Args:
        query: [batch, heads, head_dim] contiguous.
        keys, members, chosen, page, scale: as in the reference, contiguous.
        cells: room for tokens of a row; the chosen pages must fit.
        out: (logits float32, sizes, starts, counts) to write to; needed under CUDA graphs.

    Returns:
        As the reference, logits in float32, but nothing is written from a request's count on.

    Raises:
        ValueError: as in the reference; tensors that are not contiguous.
    """
    check(query, keys, members, chosen)
    for name, tensor in (("query", query), ("codes", keys.codes), ("ranges", keys.ranges), ("members", members)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}: expected a contiguous tensor")
    batch, heads, _ = query.shape
    kv_heads, slots, half = keys.codes.shape
    group = heads // kv_heads
    if out is None:
        ints = torch.empty(batch, kv_heads, cells, dtype=torch.int32, device=query.device)
        out = (
            torch.empty(batch, kv_heads, group, cells, dtype=torch.float32, device=query.device),
            ints,
            torch.empty_like(ints),
            torch.empty(batch, dtype=torch.int32, device=query.device),
        )
    _token_scores[(max(1, triton.cdiv(cells, BLOCK)), batch * kv_heads)](
        query, keys.codes, keys.ranges, members, chosen.counts, chosen.shift, *out,
        scale, slots, members.shape[1], chosen.shift.shape[-1], cells,
        KV_HEADS=kv_heads, GROUP=group, HALF=half, KV_PAD=triton.next_power_of_2(kv_heads),
        GROUP_PAD=max(16, triton.next_power_of_2(group)), HALF_PAD=max(16, triton.next_power_of_2(half)),
        PAGE=page, BLOCK=BLOCK, PRECISION="ieee" if query.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    return out
