"""Decoding over cells on a GPU: each head of each request by its own list, split over columns, keys rotated as read.

Two launches a layer with grids that depend on shapes alone. The first reads every key and value once: a program takes
one key-value head of one request and a share of its columns; the last share also stores the new token and attends to
it. Keys lie in their cells as at position 0 and are seen at the number of their column. The kernel keeps the logits
where scores are kept (16 bytes beside 512, with four query heads), so that the second, which knows the log-sum-exp, can
count the query without reading the keys again. The second merges the shares.

How many shares there are follows from the batch. It is an ordinary argument: as a constant of the kernels, it would
have them compiled anew while serving.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from sglang_ext.kernels.cells.lists import Rotation, rows_of
from sglang_ext.kernels.cells.triton_impl import _cos_sin, _pairs, padded
from sglang_ext.kernels.cells.types import (
    LOG2_E,
    MAX_SPLITS,
    Cells,
    CountedScores,
    DecodeWorkspace,
    NewTokens,
    check_decode,
    check_dtypes,
)


@dataclass(frozen=True)
class DecodeTuning:
    """What may be tuned: columns a tile, warps and stages, programs a multiprocessor, columns a program of scores.

    Keys are loaded through a loaded index. The compiler gives each of the two steps a share of the stages: below six
    there is one buffer, and a tile's loads wait for the tile before.
    """

    columns: int = 64
    warps: int = 4
    stages: int = 6
    programs: int = 2
    scores: int = 1024


TUNING = DecodeTuning()


def tuning_for(head_dim: int, value_dim: int, itemsize: int) -> DecodeTuning:
    """What was tuned for 128 components of 16 bits, with less at a time where heads are larger.

    So that a program takes at most 99 KiB of shared memory (compiled for sm_90): what the smaller GPUs of a generation
    have. Float32 needs more room than its bytes, since no tensor core takes its products.
    """
    size = (padded(head_dim) + padded(value_dim)) * itemsize
    if size <= 512:
        return TUNING
    return replace(TUNING, stages=3, columns=TUNING.columns // max(1, size * itemsize // 2048))


def splits(batch: int, kv_heads: int, entries: int, multiprocessors: int, tuning: DecodeTuning = TUNING) -> int:
    """Into how many shares the columns of a request are cut: as many as run at once, none below two tiles.

    One program more than run at once would make every step as long as two.
    """
    wanted = multiprocessors * tuning.programs // (batch * kv_heads)
    return max(1, min(wanted, MAX_SPLITS, entries // (2 * tuning.columns)))


@triton.jit(do_not_specialize=["splits"])  # it is another one for every size of a batch
def _share_kernel(
    query, new_keys, new_values, keys, values, slot, rows, seen, skip, fresh, phase, parts, part_lse, logits, splits,
    scale, stride_query, stride_new_key, stride_new_value, stride_key, stride_value,
    LANES: tl.constexpr, ENTRIES: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HALF: tl.constexpr, NEOX: tl.constexpr, FAST: tl.constexpr,
    TILE: tl.constexpr, QUERIES: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, VALUES: tl.constexpr,
    SCORES: tl.constexpr,
):  # fmt: skip
    split, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    total = tl.load(seen + request).to(tl.int32)
    row = tl.load(rows + request).to(tl.int64)
    each = tl.cdiv(tl.cdiv(total, TILE), splits) * TILE
    begin = split * each
    end = tl.minimum(begin + each, total - 1)  # without the new token
    lists = (row * LANES + (head if LANES > 1 else 0)) * ENTRIES
    settled = 0
    if SCORES:
        settled = tl.load(skip + request).to(tl.int32)
        if tl.load(fresh + request) == 0:
            settled = total  # nobody will read the logits

    g = tl.arange(0, QUERIES)
    i = tl.arange(0, PAIRS)
    v = tl.arange(0, VALUES)
    first, second = _pairs(HALF, PAIRS, NEOX)
    in_group, in_half, in_value = g < GROUP, i < HALF, v < VALUE_DIM
    rest = 2 * HALF + tl.arange(0, REST if REST > 0 else 16)
    q = query + request * stride_query + (head * GROUP + g)[:, None] * DIM
    halves = in_group[:, None] & in_half[None, :]
    q_first = tl.load(q + first[None, :], mask=halves, other=0.0).to(tl.float32)
    q_second = tl.load(q + second[None, :], mask=halves, other=0.0).to(tl.float32)
    if REST > 0:
        q_rest = tl.load(q + rest[None, :], mask=in_group[:, None] & (rest < DIM)[None, :], other=0.0)
    phases = tl.load(phase + i, mask=in_half, other=0)
    logit = logits + (request * KV_HEADS + head) * GROUP * ENTRIES + g[:, None] * ENTRIES
    # Of the rotation by the number of its column a key gets the part within its tile, the same angles in every tile,
    # and the query the tile's part, backwards: R(start + o) k · q = R(o) k · R(-start) q.
    cos, sin = _cos_sin(tl.arange(0, TILE)[:, None] * phases[None, :], FAST)

    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total_weight = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, VALUES], tl.float32)
    for start in tl.range(begin, end, TILE):
        column = start + tl.arange(0, TILE)
        on = column < end
        at = tl.load(slot + lists + column, mask=on, other=0).to(tl.int64)
        base_cos, base_sin = _cos_sin(start * phases, FAST)
        a_first = (q_first * base_cos[None, :] + q_second * base_sin[None, :]).to(keys.dtype.element_ty)
        a_second = (q_second * base_cos[None, :] - q_first * base_sin[None, :]).to(keys.dtype.element_ty)
        source = keys + at[:, None] * stride_key + head * DIM
        both = on[:, None] & in_half[None, :]
        x = tl.load(source + first[None, :], mask=both, other=0.0).to(tl.float32)
        y = tl.load(source + second[None, :], mask=both, other=0.0).to(tl.float32)
        k_first, k_second = (x * cos - y * sin).to(a_first.dtype), (y * cos + x * sin).to(a_first.dtype)
        s = tl.dot(a_first, tl.trans(k_first), input_precision="ieee")
        s = tl.dot(a_second, tl.trans(k_second), s, input_precision="ieee")
        if REST > 0:
            three = on[:, None] & (rest < DIM)[None, :]
            k_rest = tl.load(source + rest[None, :], mask=three, other=0.0)
            s = tl.dot(q_rest, tl.trans(k_rest), s, input_precision="ieee")
        s = tl.where(on[None, :], s * scale, float("-inf"))
        if SCORES:
            tl.store(logit + column[None, :], s, mask=in_group[:, None] & (on & (column >= settled))[None, :])
        w = tl.load(
            values + at[:, None] * stride_value + head * VALUE_DIM + v[None, :],
            mask=on[:, None] & in_value[None, :],
            other=0.0,
        )
        higher = tl.maximum(top, tl.max(s, 1))
        shrink = tl.exp2(top - higher)
        p = tl.exp2(s - higher[:, None])
        total_weight = total_weight * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(w.dtype), w, acc * shrink[:, None], input_precision="ieee")
        top = higher

    if (split == splits - 1) & (total > 0):
        # The new token is seen as it is given, at its column, and stored rotated back from there.
        k = new_keys + request * stride_new_key + head * DIM
        at = tl.load(slot + lists + total - 1).to(tl.int64)
        target = keys + at * stride_key + head * DIM
        x = tl.load(k + first, mask=in_half, other=0.0).to(tl.float32)
        y = tl.load(k + second, mask=in_half, other=0.0).to(tl.float32)
        back_cos, back_sin = _cos_sin((total - 1) * phases, FAST)
        tl.store(target + first, (x * back_cos + y * back_sin).to(keys.dtype.element_ty), mask=in_half)
        tl.store(target + second, (y * back_cos - x * back_sin).to(keys.dtype.element_ty), mask=in_half)
        s = tl.sum(q_first * x[None, :], 1) + tl.sum(q_second * y[None, :], 1)
        if REST > 0:
            z = tl.load(k + rest, mask=rest < DIM, other=0.0)
            tl.store(target + rest, z.to(keys.dtype.element_ty), mask=rest < DIM)
            s += tl.sum(q_rest.to(tl.float32) * z.to(tl.float32)[None, :], 1)
        s *= scale
        w = tl.load(new_values + request * stride_new_value + head * VALUE_DIM + v, mask=in_value, other=0.0)
        tl.store(values + at * stride_value + head * VALUE_DIM + v, w.to(values.dtype.element_ty), mask=in_value)
        if SCORES:
            own = logits + ((request * KV_HEADS + head) * GROUP + g) * ENTRIES + total - 1
            tl.store(own, s, mask=in_group & (total - 1 >= settled))
        higher = tl.maximum(top, s)
        shrink, p = tl.exp2(top - higher), tl.exp2(s - higher)
        total_weight = total_weight * shrink + p
        acc = acc * shrink[:, None] + p[:, None] * w.to(tl.float32)[None, :]
        top = higher

    some = total_weight > 0
    acc = acc / tl.where(some, total_weight, 1.0)[:, None]
    level = tl.where(some, top + tl.log2(tl.where(some, total_weight, 1.0)), float("-inf"))
    part = ((request * KV_HEADS + head) * GROUP + g) * splits + split
    tl.store(parts + part[:, None] * VALUE_DIM + v[None, :], acc, mask=in_group[:, None] & in_value[None, :])
    tl.store(part_lse + part, level, mask=in_group)


@triton.jit
def _join(part_lse, head, splits, PARTS: tl.constexpr):
    """(log-sum-exp of a head over its shares, each share's weight)."""
    share = tl.arange(0, PARTS)
    level = tl.load(part_lse + head * splits + share, mask=share < splits, other=float("-inf"))
    top = tl.max(level, 0)
    top = tl.where(top > float("-inf"), top, 0.0)
    weight = tl.exp2(level - top)
    joined = tl.sum(weight, 0)
    some = joined > 0
    weight = weight / tl.where(some, joined, 1.0)
    return top + tl.log2(tl.where(some, joined, 1.0)), weight


@triton.jit(do_not_specialize=["splits"])
def _join_kernel(
    parts, part_lse, logits, out, score, entries, rows, seen, skip, fresh, splits, beta,
    LANES: tl.constexpr, ENTRIES: tl.constexpr, HEADS: tl.constexpr, VALUE_DIM: tl.constexpr,
    PARTS: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, SCORES: tl.constexpr, MAXIMUM: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0)
    if number < HEADS:
        head = request * HEADS + number
        _, weight = _join(part_lse, head, splits, PARTS)
        share, v = tl.arange(0, PARTS), tl.arange(0, VALUES)
        part = tl.load(
            parts + (head * splits + share)[:, None] * VALUE_DIM + v[None, :],
            mask=(share < splits)[:, None] & (v < VALUE_DIM)[None, :],
            other=0.0,
        )
        joined = tl.sum(part * weight[:, None], 0)
        tl.store(out + head * VALUE_DIM + v, joined.to(out.dtype.element_ty), mask=v < VALUE_DIM)
    elif SCORES:
        EACH: tl.constexpr = HEADS // LANES
        lane = (number - HEADS) % LANES
        start = (number - HEADS) // LANES * BLOCK
        total = tl.load(seen + request).to(tl.int32)
        settled = tl.load(skip + request).to(tl.int32)
        counted = tl.load(fresh + request) > 0
        if counted & (start < total) & (start + BLOCK > settled):
            column = start + tl.arange(0, BLOCK)
            on = (column >= settled) & (column < total)
            found = tl.zeros([BLOCK], tl.float32)
            for one in range(EACH):
                head = request * HEADS + lane * EACH + one
                level, _ = _join(part_lse, head, splits, PARTS)
                x = tl.load(logits + head * ENTRIES + column, mask=on, other=float("-inf"))
                p = tl.exp2(x - level)
                found = tl.maximum(found, p) if MAXIMUM else found + p / EACH
            row = tl.load(rows + request).to(tl.int64)
            entry = tl.load(entries + request * ENTRIES + column, mask=on, other=0)
            place = score + (row * LANES + lane) * ENTRIES + entry
            old = tl.load(place, mask=on, other=0.0)
            tl.store(place, beta * old + (1 - beta) * found, mask=on)


def decode(
    tokens: NewTokens,
    cells: Cells,
    rows: torch.Tensor,
    seen: torch.Tensor,
    rotation: Rotation,
    scale: float,
    *,
    scores: CountedScores | None = None,
    out: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
    tuning: DecodeTuning | None = None,
) -> torch.Tensor:
    """`reference.decode` on the device, without synchronisation.

    Args:
        out: [batch, heads, value_dim] contiguous, to write to; made here when None.
        workspace: made here when None.
        tuning: tile sizes; `tuning_for` the heads when None.

    Raises:
        ValueError: also for new tokens or queries in another type than the caches.
    """
    check_decode(tokens, cells, rows, seen)
    check_dtypes(tokens, cells)
    query, keys, values, scored = tokens.query, cells.keys, cells.values, scores is not None
    batch, heads, dim = query.shape
    kv_heads, value_dim, half = keys.shape[1], values.shape[2], rotation.phase.numel()
    lanes, width = cells.slot.shape[1:]
    tuning = tuning or tuning_for(dim, value_dim, keys.element_size())
    if workspace is None:
        device = query.device
        sms = torch.cuda.get_device_properties(device).multi_processor_count if query.is_cuda else 2
        shares = splits(batch, kv_heads, width, sms, tuning)
        workspace = DecodeWorkspace.empty(batch, heads, kv_heads, value_dim, width, shares, device, scored)
    shares = workspace.check(batch, heads, value_dim, width, scored)
    out = query.new_empty(batch, heads, value_dim) if out is None else out
    counted = workspace.unscored(rows) if scores is None else scores
    _share_kernel[(shares, kv_heads, batch)](
        query, tokens.keys, tokens.values, keys, values, cells.slot, rows, seen, counted.skip, counted.fresh,
        rotation.phase, workspace.parts, workspace.part_lse, workspace.logits, shares, scale * LOG2_E,
        *rows_of(query, tokens.keys, tokens.values, keys, values),
        LANES=lanes, ENTRIES=width, KV_HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim,
        VALUE_DIM=value_dim, HALF=half, NEOX=rotation.rope.neox, FAST=keys.is_cuda, TILE=tuning.columns,
        QUERIES=padded(heads // kv_heads), PAIRS=padded(half), REST=padded(dim - 2 * half),
        VALUES=padded(value_dim), SCORES=scored, num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip
    tiles = triton.cdiv(width, tuning.scores) * lanes if scored else 0
    _join_kernel[(heads + tiles, batch)](
        workspace.parts, workspace.part_lse, workspace.logits, out, counted.score, counted.entries, rows, seen,
        counted.skip, counted.fresh, shares, counted.beta,
        LANES=lanes, ENTRIES=width, HEADS=heads, VALUE_DIM=value_dim,
        PARTS=triton.next_power_of_2(shares), VALUES=triton.next_power_of_2(value_dim), BLOCK=tuning.scores,
        SCORES=scored, MAXIMUM=counted.reduction == "max", num_warps=4,
    )  # fmt: skip
    return out
