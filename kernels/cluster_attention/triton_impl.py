"""Attention over clusters in Triton: scores of all centroids, then exact tokens and summaries in one kernel.

`_scores` reads every centroid of a request's tiles once for the whole group of heads. `_expand` writes out the slots of
the exact clusters' tokens and the places of the summaries, so that what `_attend` loads is one index away and its loads
run ahead of the products. `_attend` is a fixed number of programs: the work of all rows (a row: a request's key-value
head) is counted on the device (tiles of exact tokens, of summaries, of dense tokens, by what they cost), summed up,
and cut into equal runs, so that peaked and flat heads balance. A run may span rows; program p writes its part of row r
to place p + r, which is unique since both only grow. `_merge` joins the parts of a row; letting the program that
finishes a row last do so was slower on an H200.

A summary costs its mean value and the logit that `_scores` wrote: centroids are not read a second time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ext.kernels.cluster_attention.pool import FLOAT8, ClusterPool, check
from sglang_ext.kernels.cluster_attention.types import (
    PARTS_OF_TILE,
    TUNING,
    ClusterReads,
    ClusterRows,
    ClusterTuning,
    ClusterWorkspace,
    aligned,
)


@triton.jit(do_not_specialize=["most_tiles"])  # buffers grow while a server runs
def _scores(
    query, centroids, sizes, starts, tiles, tile_counts, rotation, sized, logits, out_sizes, out_starts,
    scale, most_tiles, query_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    GROUP_PAD: tl.constexpr, DIM_PAD: tl.constexpr, TILES: tl.constexpr, ROTATED: tl.constexpr, SIZED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    begin = tl.program_id(0) * TILES
    end = tl.minimum(begin + TILES, tl.load(tile_counts + request))
    g, d, c = tl.arange(0, GROUP_PAD), tl.arange(0, DIM_PAD), tl.arange(0, WIDTH)
    of_query = (head * GROUP + g)[:, None] * DIM + d[None, :]
    in_query = (g < GROUP)[:, None] & (d < DIM)[None, :]
    row = request * KV_HEADS + head
    query += request * query_stride
    q = tl.load(query + of_query, mask=in_query, other=0.0)
    for place in tl.range(begin, end):
        tile = tl.load(tiles + request * most_tiles + place).to(tl.int64)
        if ROTATED:
            which = tl.load(rotation + request * most_tiles + place)
            rotated = query + which * KV_HEADS * GROUP * DIM
            q = tl.load(rotated + of_query, mask=in_query, other=0.0)
        base = (tile * KV_HEADS + head) * WIDTH
        of_centroid = (base + c)[:, None] * DIM + d[None, :]
        centroid = tl.load(centroids + of_centroid, mask=(d < DIM)[None, :], other=0.0).to(q.dtype)
        cells_of = base
        if SIZED:
            cells_of = (tl.load(sized + request * most_tiles + place).to(tl.int64) * KV_HEADS + head) * WIDTH
        size = tl.load(sizes + cells_of + c)
        x = tl.dot(q, tl.trans(centroid), input_precision=PRECISION) * scale
        filled = size > 0
        x = tl.where(filled[None, :], x + tl.log(tl.maximum(size, 1).to(tl.float32))[None, :], float("-inf"))
        cell = place * WIDTH + c
        cells = most_tiles * WIDTH
        tl.store(logits + (row * GROUP + g)[:, None] * cells + cell[None, :], x, mask=(g < GROUP)[:, None])
        tl.store(out_sizes + row * cells + cell, size)
        tl.store(out_starts + row * cells + cell, tl.load(starts + cells_of + c))


def centroid_scores(
    query: torch.Tensor,
    pool: ClusterPool,
    rows: ClusterRows,
    scale: float,
    *,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    tuning: ClusterTuning = TUNING,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`reference.centroid_scores` on the device: a fixed grid over the most tiles; counts are read from tensors.

    Args:
        query: [batch, rotations, heads, head_dim], each request's contiguous, in the centroids' dtype; or these are
            float8.
        pool, rows, scale: as in the reference.
        out: (logits float32, sizes, starts) to write to; needed under CUDA graphs.
        tuning: see `ClusterTuning`.

    Returns:
        As the reference, but nothing is written from a request's count on.

    Raises:
        ValueError: as in the reference; a query that is not contiguous or of another dtype than the centroids.
    """
    check(query, pool, rows)
    if pool.centroids.dtype != FLOAT8:
        _check_dtype(query, pool.centroids)
    batch, rotations, heads, dim = query.shape
    _, kv_heads, width, _ = pool.centroids.shape
    group, most = heads // kv_heads, rows.tiles.shape[1]
    if out is None:
        shape = (batch, kv_heads, most * width)
        logits = torch.empty(batch, kv_heads, group, most * width, dtype=torch.float32, device=query.device)
        sizes = torch.empty(shape, dtype=torch.int32, device=query.device)
        out = (logits, sizes, torch.empty_like(sizes))
    if most == 0:
        return out
    _scores[(triton.cdiv(most, tuning.score_tiles), kv_heads, batch)](
        query, pool.centroids, pool.sizes, pool.starts, rows.tiles, rows.counts, rows.rotation, rows.sized,
        *out, scale, most, query.stride(0),
        KV_HEADS=kv_heads, GROUP=group, DIM=dim, WIDTH=width, GROUP_PAD=max(16, triton.next_power_of_2(group)),
        DIM_PAD=max(16, triton.next_power_of_2(dim)), TILES=tuning.score_tiles, ROTATED=rotations > 1,
        SIZED=rows.sized is not None, PRECISION=_precision(query.dtype), num_warps=tuning.score_warps,
        num_stages=tuning.score_stages,
    )  # fmt: skip
    return out


@triton.jit
def _update(top, total, acc, x):
    """One step of the running softmax; a row without a single visible entry keeps its maximum of -inf."""
    new = tl.maximum(top, tl.max(x, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    weight = tl.exp2(x - safe[:, None])
    old = tl.exp2(top - safe)
    return new, total * old + tl.sum(weight, 1), acc * old[:, None], weight


@triton.jit(do_not_specialize=["most_tiles"])
def _expand(
    members, sizes, tiles, sized, rotation, counts, exact, prefix, shift, approx, slots, rotations, summaries,
    most_tiles, most_tokens, most_members,
    KV_HEADS: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr, CLUSTERS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Slots of a row's exact tokens by their numbers, -1 for nobody's, the rotation that reads each ALIGN of them
    (with several rotations: ALIGN > 1), and where its summaries lie."""
    row, head = tl.program_id(1).to(tl.int64), tl.program_id(1) % KV_HEADS
    request = row // KV_HEADS
    n_exact, n_numbers = tl.load(counts + row * 5), tl.load(counts + row * 5 + 4)
    n_approx = tl.load(counts + row * 5 + 2)
    lists = row * most_tiles * WIDTH
    members += head.to(tl.int64) * most_members
    k, j, s = tl.arange(0, CLUSTERS), tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    for begin in range(tl.program_id(0) * CLUSTERS, n_exact, tl.num_programs(0) * CLUSTERS):
        place = begin + k
        valid = place < n_exact
        first = tl.load(prefix + lists + place, mask=valid, other=0)
        after = tl.load(prefix + lists + place + 1, mask=place + 1 < n_exact, other=0)
        after = tl.where(place + 1 < n_exact, after, n_numbers)
        moved = tl.load(shift + lists + place, mask=valid, other=0)
        last = after
        which = tl.zeros_like(first)
        if ALIGN > 1:
            cell = tl.load(exact + lists + place, mask=valid, other=0)
            tile = request * most_tiles + cell // WIDTH
            which = tl.load(rotation + tile, mask=valid, other=0)
            size_of = (tl.load(sized + tile, mask=valid, other=0).to(tl.int64) * KV_HEADS + head) * WIDTH
            last = first + tl.abs(tl.load(sizes + size_of + cell % WIDTH, mask=valid, other=0))
        for done in range(0, tl.max(tl.where(valid, after - first, 0), 0), TOKENS):
            token = first[:, None] + done + j[None, :]
            inside = valid[:, None] & (token < after[:, None])
            slot = tl.load(members + token + moved[:, None], mask=inside & (token < last[:, None]), other=-1)
            tl.store(slots + row * most_tokens + token, slot, mask=inside)
            if ALIGN > 1:
                at = row * (most_tokens // ALIGN) + token // ALIGN
                tl.store(rotations + at, which[:, None] + tl.zeros_like(token), mask=inside & (token % ALIGN == 0))
    for begin in range(tl.program_id(0) * BLOCK, n_approx, tl.num_programs(0) * BLOCK):
        place = begin + s
        cell = tl.load(approx + lists + place, mask=place < n_approx, other=0)
        tile = tl.load(tiles + request * most_tiles + cell // WIDTH, mask=place < n_approx, other=0)
        tl.store(summaries + lists + place, (tile * KV_HEADS + head) * WIDTH + cell % WIDTH, mask=place < n_approx)


@triton.jit
def _work(counts, dense_counts, rows, KV_HEADS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
          SUMMARIES: tl.constexpr, COST: tl.constexpr):  # fmt: skip
    """Work of each row, at least one unit each, so that some program writes every row's output."""
    row = tl.arange(0, ROWS)
    valid = row < rows
    tokens = tl.load(counts + row * 5 + 4, mask=valid, other=0)
    approx = tl.load(counts + row * 5 + 2, mask=valid, other=0)
    dense = tl.load(dense_counts + row // KV_HEADS, mask=valid, other=0)
    work = ((tokens + TILE - 1) // TILE + (dense + TILE - 1) // TILE) * COST + (approx + SUMMARIES - 1) // SUMMARIES
    work = tl.where(valid, tl.maximum(work, 1), 0)
    return row, work, tl.cumsum(work, 0), tl.sum(work, 0)


@triton.jit(do_not_specialize=["rows"])
def _attend(
    query, key_cache, value_cache, means, slots, rotations, summaries, dense_slots, dense_counts, dense_rotation,
    counts, approx, logits, parts, part_lse,
    scale, rows, query_stride, most_cells, most_tokens, most_dense,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    GROUP_PAD: tl.constexpr, SEEN: tl.constexpr, DIM_PAD: tl.constexpr, VALUE_PAD: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, SUMMARIES: tl.constexpr, COST: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of the products are (part of a tile, head): a part of ALIGN tokens is read with a rotation of its own, and
    each (part, head) sees its tokens only. Products have 16 rows at least, of which a group of four heads fills four.
    """
    index, row_work, row_ends, work = _work(counts, dense_counts, rows, KV_HEADS, ROWS, TILE, SUMMARIES, COST)
    # With less work than programs the rest have none: every program up to `programs` writes what `_merge` expects.
    programs = tl.minimum(tl.num_programs(0), work)
    program = tl.program_id(0)
    if program < programs:
        position = (program.to(tl.int64) * work // programs).to(tl.int32)
        stop = ((program + 1).to(tl.int64) * work // programs).to(tl.int32)
        row = tl.sum((row_ends <= position).to(tl.int32), 0)
        of_part, g = tl.arange(0, SEEN) // GROUP_PAD, tl.arange(0, SEEN) % GROUP_PAD
        d, v = tl.arange(0, DIM_PAD), tl.arange(0, VALUE_PAD)
        t, s = tl.arange(0, TILE), tl.arange(0, SUMMARIES)
        own = of_part[:, None] == (t // (TILE if ALIGN == 1 else ALIGN))[None, :]
        real = (g < GROUP) & (of_part < TILE // (TILE if ALIGN == 1 else ALIGN))
        # exp2 is what the hardware has: logits in units of log 2.
        log2e = 1.4426950408889634
        while position < stop:
            row_end = tl.sum(tl.where(index == row, row_ends, 0), 0)
            row_begin = row_end - tl.sum(tl.where(index == row, row_work, 0), 0)
            until = tl.minimum(stop, row_end) - row_begin
            since = position - row_begin
            request, head = (row // KV_HEADS).to(tl.int64), row % KV_HEADS
            of_query = (head * GROUP + g)[:, None] * DIM + d[None, :]
            in_query = real[:, None] & (d < DIM)[None, :]
            queries = query + request * query_stride
            q = tl.load(queries + of_query, mask=in_query, other=0.0)
            n_exact = tl.load(counts + row * 5 + 4)
            n_approx = tl.load(counts + row * 5 + 2)
            n_dense = tl.load(dense_counts + request)
            exact_tiles = (n_exact + TILE - 1) // TILE
            token_tiles = exact_tiles + (n_dense + TILE - 1) // TILE
            top = tl.full([SEEN], float("-inf"), tl.float32)
            total = tl.zeros([SEEN], tl.float32)
            acc = tl.zeros([SEEN, VALUE_PAD], tl.float32)
            lists = row.to(tl.int64) * most_cells
            of_exact = row.to(tl.int64) * most_tokens
            of_dense = request * most_dense

            # A tile belongs to the program in whose run its first unit of work lies.
            for tile in tl.range((since + COST - 1) // COST, tl.minimum((until + COST - 1) // COST, token_tiles)):
                exact = tile < exact_tiles
                place = (tile - tl.where(exact, 0, exact_tiles)) * TILE
                listed = tl.where(exact, slots + of_exact, dense_slots + of_dense) + place
                left = tl.where(exact, n_exact, n_dense) - place
                slot = tl.load(listed + t, mask=t < left, other=-1).to(tl.int64)
                visible = slot >= 0
                if ALIGN > 1:
                    first_rotation = rotations + row.to(tl.int64) * (most_tokens // ALIGN) + place // ALIGN
                    which = tl.load(first_rotation + of_part, mask=real & exact & (of_part * ALIGN < left), other=0)
                    which += tl.load(
                        dense_rotation + request * ((most_dense + TILE - 1) // TILE) + place // TILE + of_part * 0,
                        mask=real & (tile >= exact_tiles), other=0,
                    )  # fmt: skip
                    rotated = queries + (which * (KV_HEADS * GROUP * DIM))[:, None]
                    q = tl.load(rotated + of_query, mask=in_query, other=0.0)
                at = slot * KV_HEADS + head
                keys = tl.load(
                    key_cache + at[:, None] * DIM + d[None, :], mask=visible[:, None] & (d < DIM)[None, :], other=0.0
                )
                values = tl.load(
                    value_cache + at[:, None] * VALUE_DIM + v[None, :],
                    mask=visible[:, None] & (v < VALUE_DIM)[None, :],
                    other=0.0,
                )
                keys, values = keys.to(q.dtype), values.to(q.dtype)  # of float8 alone it is another type
                x = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * (scale * log2e)
                x = tl.where(own & visible[None, :], x, float("-inf"))
                top, total, acc, weight = _update(top, total, acc, x)
                acc += tl.dot(weight.to(values.dtype), values, input_precision=PRECISION)

            before = token_tiles * COST
            for tile in tl.range(
                tl.maximum(since - before, 0), tl.minimum(until - before, (n_approx + SUMMARIES - 1) // SUMMARIES)
            ):
                place = tile * SUMMARIES + s
                visible = place < n_approx
                cell = tl.load(approx + lists + place, mask=visible, other=0)
                at = tl.load(summaries + lists + place, mask=visible, other=0).to(tl.int64)
                values = tl.load(
                    means + at[:, None] * VALUE_DIM + v[None, :],
                    mask=visible[:, None] & (v < VALUE_DIM)[None, :],
                    other=0.0,
                )
                x = tl.load(
                    logits + (row.to(tl.int64) * GROUP + g)[:, None] * most_cells + cell[None, :],
                    mask=(real & (of_part == 0))[:, None] & visible[None, :],
                    other=float("-inf"),
                )
                top, total, acc, weight = _update(top, total, acc, x * log2e)
                acc += tl.dot(weight.to(values.dtype), values, input_precision=PRECISION)

            # Join the parts of tiles.
            PARTS: tl.constexpr = SEEN // GROUP_PAD
            tops = tl.reshape(top, [PARTS, GROUP_PAD])
            best = tl.max(tops, 0)
            share = tl.exp2(tops - tl.where(best == float("-inf"), 0.0, best)[None, :])
            joined = tl.sum(tl.reshape(total, [PARTS, GROUP_PAD]) * share, 0)
            mean = tl.sum(tl.reshape(acc, [PARTS, GROUP_PAD, VALUE_PAD]) * share[:, :, None], 0)
            mean = mean / tl.maximum(joined, 1e-38)[:, None]
            head_of = tl.arange(0, GROUP_PAD)
            part = (program + row).to(tl.int64) * GROUP + head_of
            tl.store(
                parts + part[:, None] * VALUE_DIM + v[None, :],
                mean,
                mask=(head_of < GROUP)[:, None] & (v < VALUE_DIM)[None, :],
            )
            level = tl.where(joined > 0, best + tl.log2(tl.maximum(joined, 1e-38)), float("-inf"))
            tl.store(part_lse + part, level, mask=head_of < GROUP)
            position = row_begin + until
            row += 1


@triton.jit(do_not_specialize=["rows"])
def _merge(
    counts, dense_counts, parts, part_lse, out, lse, rows, programs,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SUMMARIES: tl.constexpr, COST: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Join the parts of a head of a row: base-2 log-sum-exps in, natural ones out."""
    index, row_work, row_ends, work = _work(counts, dense_counts, rows, KV_HEADS, ROWS, TILE, SUMMARIES, COST)
    row, g = tl.program_id(0), tl.program_id(1)
    programs = tl.minimum(programs, work).to(tl.int64)
    row_end = tl.sum(tl.where(index == row, row_ends, 0), 0)
    row_begin = row_end - tl.sum(tl.where(index == row, row_work, 0), 0)
    # The program that does unit u is the last one whose first unit is not after u.
    first_program = (((row_begin + 1).to(tl.int64) * programs - 1) // work).to(tl.int32)
    last_program = ((row_end.to(tl.int64) * programs - 1) // work).to(tl.int32)
    d, k = tl.arange(0, VALUE_PAD), tl.arange(0, PARTS)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([VALUE_PAD], tl.float32)
    for program in range(first_program, last_program + 1, PARTS):
        place = (program + k + row) * GROUP + g
        valid = program + k <= last_program
        part = tl.load(part_lse + place, mask=valid, other=float("-inf"))
        mask = valid[:, None] & (d < VALUE_DIM)[None, :]
        values = tl.load(parts + place.to(tl.int64)[:, None] * VALUE_DIM + d[None, :], mask=mask, other=0.0)
        new = tl.maximum(top, tl.max(part, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        old, weight = tl.exp2(top - safe), tl.exp2(part - safe)
        acc = acc * old + tl.sum(values * weight[:, None], 0)
        total = total * old + tl.sum(weight, 0)
        top = new
    inverse = tl.where(total > 0, 1.0 / tl.maximum(total, 1e-38), 0.0)
    result = (acc * inverse).to(out.dtype.element_ty)
    tl.store(out + (row * GROUP + g).to(tl.int64) * VALUE_DIM + d, result, mask=d < VALUE_DIM)
    natural = tl.where(total > 0, (top + tl.log2(tl.maximum(total, 1e-38))) * 0.6931471805599453, float("-inf"))
    tl.store(lse + row * GROUP + g + tl.arange(0, 1), natural)


def cluster_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    pool: ClusterPool,
    reads: ClusterReads,
    scale: float,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    workspace: ClusterWorkspace | None = None,
    tuning: ClusterTuning = TUNING,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.cluster_attention` on the device: a fixed grid; all counts are read from tensors.

    Args:
        query: [batch, rotations, heads, head_dim], each request's contiguous, in the caches' dtype, or these are float8
            e4m3; the pool's mean values are in the query's. With several rotations, the selection is numbered with
            `run` the clusters of a tile and `align` = `aligned(dense.tile)`.
        key_cache: [num_slots, kv_heads, head_dim] contiguous.
        value_cache: [num_slots, kv_heads, value_dim] contiguous.
        pool, reads, scale: as in the reference, contiguous. A selection that is `expanded` has filled this very
            workspace.
        out: (output [batch, heads, value_dim], log-sum-exp [batch, heads] float32) to write to.
        workspace: made for this tuning; needed under CUDA graphs, made otherwise.
        tuning: see `ClusterTuning`.

    Returns:
        As the reference; sums are float32.

    Raises:
        ValueError: as in the reference; tensors that are not contiguous or of mixed dtypes.
    """
    rows, dense, selection, logits = reads.rows, reads.dense, reads.selection, reads.logits
    check(query, pool, rows, dense)
    _check_dtype(query, pool.values)
    for cache in (key_cache, value_cache):
        _check_dtype(query, cache, float8=key_cache.dtype == value_cache.dtype == FLOAT8)
    batch, rotations, heads, dim = query.shape
    _, kv_heads, width, value_dim = pool.values.shape
    group, count = heads // kv_heads, batch * kv_heads
    if logits.dtype != torch.float32 or not logits.is_contiguous() or logits.shape[-1] != rows.tiles.shape[1] * width:
        raise ValueError(
            f"logits {logits.dtype} of shape {tuple(logits.shape)}: expected contiguous float32 [batch, kv_heads, "
            f"group, {rows.tiles.shape[1] * width}], as centroid_scores writes them"
        )
    if out is None:
        output = torch.empty(batch, heads, value_dim, dtype=query.dtype, device=query.device)
        out = (output, torch.empty(batch, heads, dtype=torch.float32, device=query.device))
    cells, align = rows.tiles.shape[1] * width, aligned(dense.tile) if rotations > 1 else 1
    if rotations > 1 and align == 1:
        raise ValueError(f"tiles of {dense.tile} tokens for {rotations} rotations: expected at least 8")
    numbering = selection.numbering
    if align > 1 and (numbering.run, numbering.align) != (width, align):
        raise ValueError(
            f"a selection with run={numbering.run}, align={numbering.align}: expected run={width} and align={align} "
            "where the query has several rotations"
        )
    if selection.expanded and (workspace is None or align > 1):
        raise ValueError(
            "an expanded selection without a workspace, or for several rotations: expected the workspace that was "
            "filled with it, and one rotation"
        )
    most_tokens = pool.members.shape[1] + cells // width * (align - 1)
    workspace = workspace or ClusterWorkspace.empty(
        batch, kv_heads, group, value_dim, cells, most_tokens, query.device, tuning, align=align
    )
    programs = tuning.programs
    if workspace.parts.shape[0] < programs + count:
        raise ValueError(
            f"workspace of {workspace.parts.shape[0]} parts: expected {programs + count}; make it for this tuning"
        )
    most_tokens = workspace.slots.shape[1]
    rotated = most_tokens // align if align > 1 else 0
    if tuple(workspace.summaries.shape) != (count, max(1, cells)) or workspace.rotations.shape[1] < rotated:
        raise ValueError(
            f"workspace of {tuple(workspace.summaries.shape)} summaries and {tuple(workspace.rotations.shape)} "
            f"rotations: expected {(count, max(1, cells))} and {(count, rotated)}"
        )
    value_pad = max(16, triton.next_power_of_2(value_dim))
    looked_through = padded(count) if tuning.any_size else triton.next_power_of_2(count)
    counted = dict(ROWS=looked_through, TILE=dense.tile, SUMMARIES=tuning.summaries, COST=tuning.token_tile)
    if cells and not selection.expanded:
        _expand[(tuning.expanding, count)](
            pool.members, pool.sizes, rows.tiles, rows.tiles if rows.sized is None else rows.sized, rows.rotation,
            selection.counts, selection.exact, selection.prefix, selection.shift, selection.approx,
            workspace.slots, workspace.rotations, workspace.summaries,
            rows.tiles.shape[1], most_tokens, pool.members.shape[-1],
            KV_HEADS=kv_heads, WIDTH=width, ALIGN=align, CLUSTERS=32, TOKENS=32, BLOCK=256, num_warps=4,
        )  # fmt: skip
    _attend[(programs,)](
        query, key_cache, value_cache, pool.values, workspace.slots, workspace.rotations, workspace.summaries,
        dense.slots, dense.counts, dense.rotation, selection.counts, selection.approx,
        logits, workspace.parts, workspace.part_lse, scale, count, query.stride(0), cells, most_tokens,
        dense.slots.shape[1],
        KV_HEADS=kv_heads, GROUP=group, DIM=dim, VALUE_DIM=value_dim,
        GROUP_PAD=triton.next_power_of_2(group), SEEN=max(16, PARTS_OF_TILE * triton.next_power_of_2(group))
        if align > 1 else max(16, triton.next_power_of_2(group)), DIM_PAD=max(16, triton.next_power_of_2(dim)),
        VALUE_PAD=value_pad, ALIGN=align, PRECISION=_precision(query.dtype), **counted,
        num_warps=tuning.warps, num_stages=tuning.stages, maxnreg=tuning.registers,
    )  # fmt: skip
    _merge[(count, group)](
        selection.counts, dense.counts, workspace.parts, workspace.part_lse, *out, count, programs,
        KV_HEADS=kv_heads, GROUP=group, VALUE_DIM=value_dim, VALUE_PAD=value_pad, PARTS=tuning.merge_parts, **counted,
        num_warps=2,
    )  # fmt: skip
    return out


def padded(count: int) -> int:
    """The number of rows that the kernels are compiled for where a batch of any size (`ClusterTuning.any_size`) has
    `count` of them, one for each request and key-value head.

    It is a power of eight, and at least 64: a server of 512 requests with 8 key-value heads compiles three kernels.
    """
    return max(64, 8 ** -(-max(0, count - 1).bit_length() // 3))


def _precision(dtype: torch.dtype) -> str:
    # TF32 would lose 13 bits of float32 inputs; half precision does not look at this.
    return "ieee" if dtype == torch.float32 else "tf32"


def _check_dtype(query: torch.Tensor, other: torch.Tensor, float8: bool = False) -> None:
    if (query.dtype != other.dtype and not float8) or not query[:1].is_contiguous() or not other.is_contiguous():
        raise ValueError(
            f"query {query.dtype} (each request's contiguous: {query[:1].is_contiguous()}) beside {other.dtype} "
            f"(contiguous: {other.is_contiguous()}): expected contiguous tensors of one dtype"
        )
