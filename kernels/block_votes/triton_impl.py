"""Scores of memory blocks and the election on a GPU: two launches a voting layer, three for the similarity `mass`.

Scores are bound by reading the index once (4,096 blocks of 12 vectors of 128 halves: 13 MB, 2.6 us at 4.8 TB/s), so
there is a program for every few blocks, and it compares all of their vectors with all vectors of the query by matrix
products. The entries of a request's blocks lie anywhere in the index, each of them in one piece of at least 256 bytes
(one vector of 128 halves): gathering them costs a look at their numbers beforehand. Entries that requests share are
read again, out of the L2 cache where they are still there. Sums over a span's vectors are taken of the products, in
float32, and not of half-precision vectors. Vectors that there are not are not read. `mass` needs the log-sum-exp over
all index vectors first: a first launch leaves the maximum and the sum of at most 128 parts of the index, and the
programs of the second launch, as many, join them while they read the index again, now mostly out of the L2 cache.

The election is bound by latency, so one program a request does both of its searches, and sorts nothing. To find the
best K of n blocks it looks at the largest entry of each of 64 groups of neighbours and keeps the K groups whose largest
entries are best, for no other group holds one of the K best entries. It cuts these into 64 groups again, and so on
until groups are single blocks (8,192 blocks and K = 16: groups of 128, 32, 8, 2 and 1 blocks). The rank of a group is
the number of groups before it: 64 x 64 comparisons that do not wait for each other, where a bitonic sort of 8,192 keys
is 91 steps that do. Twice the groups would need fewer rounds, but four times the comparisons in each, and one
multiprocessor computes them all. What is compared are the floats themselves, votes and then scores, and then the number
of the first block: so the first of equals wins, and nothing is packed. The own choices are added to the votes at the
very end; until then a block is known as an own choice by comparing it with the last of them.

Grids depend on shapes alone, counts are read on the device: launches can be part of a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_ext.kernels.block_votes.types import LOG2_E, MAX_COUNT, BlockIndex, QuerySpans, check, check_election
from sglang_ext.kernels.shared import check_contiguous, shared_memory

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

MAX_BLOCKS = 32768
"""Blocks of a request, at most: as many as one program of an election looks at. 4 million tokens in blocks of 128."""

MAX_VECTORS = 128
"""Vectors of a block, and of a query's span, at most; the numbers of spans (the option `spans`) and of vectors a span
(`vectors` divided by `spans`) are rounded up to powers of two."""

HOPPER_SHARED = 227 * 1024
"""Bytes of shared memory that a program may have on Hopper."""

PARTS = 128
"""Parts of a request's index, at most, whose log-sum-exps are joined."""

GROUPS = 64
"""Groups of blocks that a round of an election compares, at least; twice as many as it keeps, at least."""

PROGRAMS = 256
"""Programs that keep an H200 busy: where there would be fewer, each takes fewer blocks."""


@dataclass(frozen=True, slots=True)
class BlockTuning:
    """What may be tuned of the scores.

    Attributes:
        columns: index vectors a program compares at once, a power of two of at least 16; a whole block at least.
        rows: vectors of the query that it compares them with at once, likewise; a whole span at least.
        width: components that it reads at once, likewise.
        warps: of a program.
        stages: of the pipeline over the components, or over the blocks of a part.
    """

    columns: int = 128
    rows: int = 64
    width: int = 128
    warps: int = 4
    stages: int = 3


def tuning_for(vectors: int, batch: int, dtype: torch.dtype, kind: str) -> BlockTuning:
    """Tiles for requests of so many index vectors each, in the dtype in which products are computed.

    Chosen so that nothing spills when compiled for sm_90. Float32 has no tensor cores: threads hold their operands in
    registers. `mass` has twice the warps, for each program holds the levels of all parts while it joins them. So has
    `max`, which takes 21.7 us with them on an H200, and 23.2 without, for 4,096 blocks of 48 vectors.
    """
    wide = dtype == torch.float32
    columns = 64 if wide else 128
    while columns > 16 and batch * vectors < PROGRAMS * columns:
        columns //= 2
    return BlockTuning(columns, 64, 32 if wide else 128, 4 if kind == "sum" else 8)


def width_for(tuning: BlockTuning, vectors: int, dim: int, size: int, shared: int) -> int:
    """Components that a program reads at once, so that its tiles fit its shared memory.

    Args:
        tuning: what is wished.
        vectors: index vectors and query vectors of a program.
        dim: components of a vector.
        size: bytes of one.
        shared: bytes of shared memory that a program may have.
    """
    width = max(16, min(tuning.width, _power(dim)))
    while width > 16 and vectors * width * size * tuning.stages > shared * 3 // 4:  # a rest for what reductions need
        width //= 2
    return width


def _power(number: int) -> int:
    return int(triton.next_power_of_2(max(1, number)))


def score_blocks(
    query: QuerySpans,
    index: BlockIndex,
    *,
    kind: str = "sum",
    out: torch.Tensor | None = None,
    tuning: BlockTuning | None = None,
) -> torch.Tensor:
    """`reference.score_blocks` on the device, without synchronisation: values out of range cannot be refused here.

    Products are computed in the dtype of the vectors where query and index have one dtype, in float32 otherwise, and
    added in float32.

    Args:
        query, index: as in the reference, contiguous, float32, bfloat16 or float16 on one device.
        kind: `sum`, `max` or `mass` (section 3.4, equation 8 and its alternatives).
        out: [batch, max_blocks] float32 to write to, contiguous; None: a new tensor.
        tuning: sizes of tiles; None: those of `tuning_for`.

    Returns:
        [batch, max_blocks] float32 on the device; -inf where there is no block (equation 9).

    Raises:
        ValueError: as in the reference; also for tensors of other dtypes or not contiguous, and for blocks or query
            spans of more than MAX_VECTORS vectors.
    """
    check(query, index, kind, out)
    asked, kept = query.vectors, index.vectors
    packed = index.scales is not None
    for name, tensor in (("query vectors", asked), *([] if packed else [("index vectors", kept)])):
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{name} are {tensor.dtype}: expected one of {DTYPES}; take the reference for float64")
    batch, query_spans, most_q, dim = asked.shape
    entries, spans, most, _ = kept.shape
    scales = query.counts if index.scales is None else index.scales  # not looked at unless vectors are packed
    limit = index.ids.shape[1]
    if out is None:
        out = torch.empty(batch, limit, dtype=torch.float32, device=asked.device)
    check_contiguous(
        {"query vectors": asked, "query counts": query.counts, "index vectors": kept, "index counts": index.counts,
         "index scales": scales, "ids": index.ids, "blocks": index.blocks, "out": out}
    )  # fmt: skip
    spans_pad, most_pad, most_q_pad = _power(spans), _power(most), _power(most_q)
    if spans_pad * most_pad > MAX_VECTORS or most_q_pad > MAX_VECTORS:
        raise ValueError(
            f"blocks of {spans} x {most} vectors, query spans of {most_q}: expected at most {MAX_VECTORS} each, in "
            f"powers of two, {spans_pad} x {most_pad} and {most_q_pad}; set `vectors` or `spans` lower (--policy), or "
            "take the reference"
        )
    if out.numel() == 0:
        return out
    if 0 in (query_spans, most_q, entries, spans, most, dim):
        return out.fill_(float("-inf"))
    dtype = asked.dtype if packed or asked.dtype == kept.dtype else torch.float32
    block_columns = spans_pad * most_pad
    tuning = tuning or tuning_for(limit * block_columns, batch, dtype, kind)
    span_rows = max(16, tuning.rows, most_q_pad) // most_q_pad
    span_rows = max(16 // most_q_pad, min(span_rows, _power(query_spans)), 1)
    blocks = max(16, tuning.columns, block_columns) // block_columns
    query_tiles = triton.cdiv(query_spans, span_rows)
    tiles = triton.cdiv(limit, blocks)
    each = triton.cdiv(tiles, PARTS) if kind == "mass" else 1
    parts = triton.cdiv(tiles, each)
    width = width_for(
        tuning, blocks * block_columns + span_rows * most_q_pad, index.vectors.shape[3], dtype.itemsize,
        shared_memory(asked.device) if asked.is_cuda else HOPPER_SHARED,
    )  # fmt: skip
    sizes = {
        "SPANS": spans, "MOST": most, "DIM": dim, "BLOCKS": blocks, "SPANS_PAD": spans_pad, "MOST_PAD": most_pad,
        "QUERY_TILES": query_tiles, "SPAN_ROWS": span_rows, "MOST_Q": most_q, "MOST_Q_PAD": most_q_pad,
        "WIDTH": width, "WIDE": dtype == torch.float32, "PACKED": packed, "TILES": each,
        "num_warps": tuning.warps, "num_stages": tuning.stages,
    }  # fmt: skip
    tensors = (asked, query.counts, kept, scales, index.counts, index.ids, index.blocks)
    levels = sums = out  # not looked at
    if kind == "mass":
        rows = query_tiles * span_rows * most_q_pad
        levels, sums = torch.empty(2, batch, parts, rows, dtype=torch.float32, device=asked.device)
        _parts_kernel[(parts, batch)](*tensors, levels, sums, limit, query_spans, dim**-0.5 * LOG2_E, **sizes)
    _scores_kernel[(parts, batch)](
        *tensors, levels, sums, out, limit, query_spans, dim**-0.5 * LOG2_E, parts,
        KIND=kind, PARTS_PAD=_power(parts), **sizes,
    )  # fmt: skip
    return out


@triton.jit
def _query_rows(
    counts, tile, query_spans,
    SPAN_ROWS: tl.constexpr, MOST_Q: tl.constexpr, MOST_Q_PAD: tl.constexpr,
):  # fmt: skip
    """Vectors of a tile of the query's spans: their numbers, and which of them there are, [SPAN_ROWS * MOST_Q_PAD]."""
    row = tl.arange(0, SPAN_ROWS * MOST_Q_PAD)
    span, number = tile * SPAN_ROWS + row // MOST_Q_PAD, row % MOST_Q_PAD
    count = tl.load(counts + span, mask=span < query_spans, other=0)
    return span * MOST_Q + number, number < tl.minimum(count, MOST_Q)


@triton.jit
def _columns(
    ids, counts, end,
    BLOCKS: tl.constexpr, SPANS: tl.constexpr, MOST: tl.constexpr, SPANS_PAD: tl.constexpr, MOST_PAD: tl.constexpr,
):  # fmt: skip
    """Vectors of the next blocks, of which there are `end`: as `_query_rows`, [BLOCKS * SPANS_PAD * MOST_PAD].

    Their numbers are int64: an index of a large region of host memory has more than 2^31 components.
    """
    column = tl.arange(0, BLOCKS * SPANS_PAD * MOST_PAD)
    block, span, number = column // (SPANS_PAD * MOST_PAD), column // MOST_PAD % SPANS_PAD, column % MOST_PAD
    real = (block < end) & (span < SPANS)
    place = tl.load(ids + block, mask=real, other=0).to(tl.int64) * SPANS + span
    count = tl.load(counts + place, mask=real, other=0)
    return place * MOST + number, real & (number < tl.minimum(count, MOST))


@triton.jit
def _products(
    query, row, asked, vectors, scales, column, used,
    MOST: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """[columns, rows] products of index vectors and query vectors; 0 where there is none of either."""
    if PACKED:
        found = _packed_products(query, row, asked, vectors, scales, column, used, MOST, DIM // 2, WIDTH, WIDE)
    else:
        found = _plain_products(query, row, asked, vectors, column, used, DIM, WIDTH, WIDE)
    return found


@triton.jit
def _plain_products(
    query, row, asked, vectors, column, used,
    DIM: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The same of index vectors that are not packed."""
    d = tl.arange(0, WIDTH)
    found = tl.zeros([column.shape[0], row.shape[0]], tl.float32)
    for first in range(0, DIM, WIDTH):
        inside = first + d < DIM
        here = used[:, None] if DIM % WIDTH == 0 else used[:, None] & inside[None, :]
        there = asked[:, None] if DIM % WIDTH == 0 else asked[:, None] & inside[None, :]
        k = tl.load(vectors + column[:, None] * DIM + (first + d)[None, :], mask=here, other=0.0)
        q = tl.load(query + row[:, None] * DIM + (first + d)[None, :], mask=there, other=0.0)
        if WIDE:
            k, q = k.to(tl.float32), q.to(tl.float32)
        found = tl.dot(k, tl.trans(q), found, input_precision="ieee")
    return found


@triton.jit
def _packed_products(
    query, row, asked, vectors, scales, column, used,
    MOST: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The same of packed index vectors: each byte has a component of the first half and one of the second."""
    d = tl.arange(0, WIDTH)
    found = tl.zeros([column.shape[0], row.shape[0]], tl.float32)
    for first in range(0, HALF, WIDTH):
        inside = first + d < HALF
        here, there = used[:, None] & inside[None, :], asked[:, None] & inside[None, :]
        k = tl.load(vectors + column[:, None] * HALF + (first + d)[None, :], mask=here, other=0)
        places = query + row[:, None] * (2 * HALF) + (first + d)[None, :]
        low, high = tl.load(places, mask=there, other=0.0), tl.load(places + HALF, mask=there, other=0.0)
        if WIDE:
            low, high = low.to(tl.float32), high.to(tl.float32)
        found = tl.dot(_component(k & 15, low), tl.trans(low), found, input_precision="ieee")
        found = tl.dot(_component(k >> 4, low), tl.trans(high), found, input_precision="ieee")
    return found * tl.load(scales + column // MOST, mask=used, other=0.0)[:, None]


@triton.jit
def _component(bits, like):
    """Four bits as the whole number from -8 to 7 that they stand for, in the dtype of `like`."""
    return (bits.to(tl.int32) - 8).to(like.dtype)


@triton.jit
def _parts_kernel(
    query, query_counts, vectors, scales, counts, ids, blocks, levels, sums, max_blocks, query_spans, scale,
    SPANS: tl.constexpr, MOST: tl.constexpr, DIM: tl.constexpr, BLOCKS: tl.constexpr, SPANS_PAD: tl.constexpr,
    MOST_PAD: tl.constexpr, QUERY_TILES: tl.constexpr, SPAN_ROWS: tl.constexpr, MOST_Q: tl.constexpr,
    MOST_Q_PAD: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """For each query vector, over the index vectors of a part: the largest logit (base 2), and the sum beside it."""
    ROWS: tl.constexpr = SPAN_ROWS * MOST_Q_PAD
    part, request = tl.program_id(0), tl.program_id(1)
    begin = part * (BLOCKS * TILES)
    there = tl.minimum(tl.load(blocks + request).to(tl.int32), max_blocks) - begin
    tiles = tl.cdiv(tl.minimum(tl.maximum(there, 0), BLOCKS * TILES), BLOCKS)
    ids += request.to(tl.int64) * max_blocks + begin
    query += request.to(tl.int64) * query_spans * MOST_Q * DIM
    query_counts += request * query_spans
    place = (request * tl.num_programs(0) + part) * (QUERY_TILES * ROWS) + tl.arange(0, ROWS)
    for q in range(QUERY_TILES):
        row, asked = _query_rows(query_counts, q, query_spans, SPAN_ROWS, MOST_Q, MOST_Q_PAD)
        level = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for tile in range(tiles):
            first = tile * BLOCKS
            column, used = _columns(ids + first, counts, there - first, BLOCKS, SPANS, MOST, SPANS_PAD, MOST_PAD)
            x = _products(query, row, asked, vectors, scales, column, used, MOST, DIM, WIDTH, WIDE, PACKED)
            x = tl.where(used[:, None], x * scale, float("-inf"))
            new = tl.maximum(level, tl.max(x, 0))
            finite = tl.where(new == float("-inf"), 0.0, new)
            total = total * tl.exp2(level - finite) + tl.sum(tl.exp2(x - finite[None, :]), 0)
            level = new
        tl.store(levels + place + q * ROWS, level)
        tl.store(sums + place + q * ROWS, total)


@triton.jit
def _joined(levels, sums, parts, width, ROWS: tl.constexpr, PARTS_PAD: tl.constexpr):
    """[ROWS] log-sum-exp (base 2) of all parts; 0 where no part has a vector."""
    part, row = tl.arange(0, PARTS_PAD)[:, None], tl.arange(0, ROWS)[None, :]
    level = tl.load(levels + part * width + row, mask=part < parts, other=float("-inf"))
    total = tl.load(sums + part * width + row, mask=part < parts, other=0.0)
    top = tl.max(level, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(total * tl.exp2(level - top[None, :]), 0)
    return top + tl.log2(tl.where(total > 0, total, 1.0))


@triton.jit
def _scores_kernel(
    query, query_counts, vectors, scales, counts, ids, blocks, levels, sums, out, max_blocks, query_spans, scale, parts,
    SPANS: tl.constexpr, MOST: tl.constexpr, DIM: tl.constexpr, BLOCKS: tl.constexpr, SPANS_PAD: tl.constexpr,
    MOST_PAD: tl.constexpr, QUERY_TILES: tl.constexpr, SPAN_ROWS: tl.constexpr, MOST_Q: tl.constexpr,
    MOST_Q_PAD: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr, TILES: tl.constexpr,
    KIND: tl.constexpr, PARTS_PAD: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = SPAN_ROWS * MOST_Q_PAD
    part, request = tl.program_id(0), tl.program_id(1)
    begin = part * (BLOCKS * TILES)
    there = tl.minimum(tl.load(blocks + request).to(tl.int32), max_blocks) - begin
    ids += request.to(tl.int64) * max_blocks + begin
    query += request.to(tl.int64) * query_spans * MOST_Q * DIM
    query_counts += request * query_spans
    out += request.to(tl.int64) * max_blocks + begin
    width = QUERY_TILES * ROWS
    levels += request * parts * width
    sums += request * parts * width
    b = tl.arange(0, BLOCKS)
    for tile in range(tl.cdiv(tl.minimum(max_blocks - begin, BLOCKS * TILES), BLOCKS)):
        best = tl.full([BLOCKS], float("-inf"), tl.float32)
        if tile * BLOCKS < there:
            first = tile * BLOCKS
            column, used = _columns(ids + first, counts, there - first, BLOCKS, SPANS, MOST, SPANS_PAD, MOST_PAD)
            for q in range(QUERY_TILES):
                row, asked = _query_rows(query_counts, q, query_spans, SPAN_ROWS, MOST_Q, MOST_Q_PAD)
                x = _products(query, row, asked, vectors, scales, column, used, MOST, DIM, WIDTH, WIDE, PACKED)
                both = used[:, None] & asked[None, :]
                if KIND == "mass":
                    lse = _joined(levels + q * ROWS, sums + q * ROWS, parts, width, ROWS, PARTS_PAD)
                    x = tl.where(both, tl.exp2(x * scale - lse[None, :]), 0.0)
                if KIND == "max" or (MOST_PAD == 1 and MOST_Q_PAD == 1):
                    similar = tl.max(tl.where(both, x, float("-inf")), 1)
                    found = tl.max(tl.reshape(similar, [BLOCKS, SPANS_PAD * MOST_PAD]), 1)
                else:
                    x = tl.sum(tl.reshape(x, [BLOCKS * SPANS_PAD * MOST_PAD, SPAN_ROWS, MOST_Q_PAD]), 2)
                    x = tl.sum(tl.reshape(x, [BLOCKS * SPANS_PAD, MOST_PAD, SPAN_ROWS]), 1)
                    # A span is there if its first vector is.
                    kept = tl.max(tl.reshape(used.to(tl.int32), [BLOCKS * SPANS_PAD, MOST_PAD]), 1) > 0
                    spoken = tl.max(tl.reshape(asked.to(tl.int32), [SPAN_ROWS, MOST_Q_PAD]), 1) > 0
                    similar = tl.max(tl.where(kept[:, None] & spoken[None, :], x, float("-inf")), 1)
                    found = tl.max(tl.reshape(similar, [BLOCKS, SPANS_PAD]), 1)
                best = tl.maximum(best, found)
        place = tile * BLOCKS + b
        tl.store(out + place, best, mask=begin + place < max_blocks)


# ---- the election ----


def rounds_for(blocks: int, kept: int) -> tuple[int, int, int, int]:
    """How the best `kept` of `blocks`, both powers of two, are searched for.

    Returns:
        Groups of a round, blocks of a group in the first round, base-2 logarithm of the ratio of that to the blocks of
        a group in the next round, and rounds until groups are single blocks.
    """
    groups = min(blocks, max(GROUPS, 2 * kept))
    width, shift, rounds = blocks // groups, (groups // kept).bit_length() - 1, 0
    while width >> rounds * shift > 1:
        rounds += 1
    return groups, width, shift, rounds


def elect(
    votes: torch.Tensor,
    scores: torch.Tensor | None,
    *,
    weight: float | torch.Tensor,
    count: int,
    mode: str = "inclusive",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reference.elect` on the device, in one launch and without synchronisation (section 3.5).

    Args:
        votes: [batch, max_blocks] float32 contiguous, updated in place.
        scores: [batch, max_blocks] float32 contiguous, or None.
        weight: a number, which a CUDA graph keeps, or [batch] float32 contiguous.
        count, mode: as in the reference.
        out: [batch, count] int32 to write to, contiguous; None: a new tensor.

    Returns:
        [batch, count] int32 numbers of blocks, best first, -1 beyond.

    Raises:
        ValueError: as in the reference; also for tensors of other dtypes or not contiguous, more than MAX_COUNT blocks
            to choose or more than MAX_BLOCKS to choose from.
    """
    check_election(votes, scores, weight, count, mode, out)
    for name, tensor in (("votes", votes), ("scores", scores)):
        if tensor is not None and tensor.dtype != torch.float32:
            raise ValueError(f"{name} are {tensor.dtype}: expected float32; take the reference for float64")
    batch, limit = votes.shape
    if count > MAX_COUNT:
        raise ValueError(
            f"count={count}: expected at most {MAX_COUNT}; set `retrieved` lower (--policy), or take the reference"
        )
    if limit > MAX_BLOCKS:
        raise ValueError(
            f"votes for {limit} blocks of a request: expected at most {MAX_BLOCKS}; set `block` higher (--policy) or "
            "--context-length lower, so that a stream has fewer of them, or take the reference"
        )
    if out is None:
        out = torch.empty(batch, count, dtype=torch.int32, device=votes.device)
    weights = weight if isinstance(weight, torch.Tensor) else votes
    own = votes if scores is None else scores
    check_contiguous({"votes": votes, "scores": own, "weight": weights, "out": out})
    if out.numel() == 0:
        return out
    if limit == 0 or (scores is None and mode == "off"):
        return out.fill_(-1)
    kept = max(4, _power(count))
    padded = max(16, kept, _power(limit))
    groups, width, shift, rounds = rounds_for(padded, kept)
    _elect_kernel[(batch,)](
        votes, own, out, weights, 0.0 if isinstance(weight, torch.Tensor) else weight, limit, count,
        SCORED=scores is not None, MODE=mode, WEIGHTS=isinstance(weight, torch.Tensor), KEPT=kept, GROUPS=groups,
        WIDTH=width, SHIFT=shift, ROUNDS=rounds, num_warps=16 if padded > 8192 or kept > 32 else 8,
    )  # fmt: skip
    return out


@triton.jit
def _keys(
    votes, scores, at, max_blocks, weight, least, last,
    OWN: tl.constexpr, SCORED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """What blocks are ordered by, first and second: own scores, or votes and scores. -inf where one is not eligible.

    The layer's own choice are the blocks with a score above `least`, or with this score and no number above `last`;
    with ADDED, their votes are counted.
    """
    inside = at < max_blocks
    score = tl.zeros(at.shape, tl.float32)
    if SCORED:
        score = tl.load(scores + at, mask=inside, other=float("-inf"))
        score = tl.where(score > float("-inf"), score, float("-inf"))  # without NaN
    first = score
    if not OWN:
        first = tl.load(votes + at, mask=inside, other=0.0)
        if ADDED:
            first = tl.where((score > least) | ((score == least) & (at <= last)), first + weight, first)
        first = tl.where((first > 0) & (score > float("-inf")), first, float("-inf"))
    return first, score


@triton.jit
def _ranks(at, first, second, PAIRS: tl.constexpr):
    """[n] how many entries come before each: those with more first, then more second, then smaller numbers `at`."""
    before = at[:, None] < at[None, :]
    if PAIRS:
        before = (second[:, None] > second[None, :]) | ((second[:, None] >= second[None, :]) & before)
    before = (first[:, None] > first[None, :]) | ((first[:, None] >= first[None, :]) & before)
    return tl.sum(before.to(tl.int32), 0)


@triton.jit
def _narrowed(
    at, votes, scores, max_blocks, weight, least, last,
    OWN: tl.constexpr, SCORED: tl.constexpr, ADDED: tl.constexpr, KEPT: tl.constexpr, WIDTH: tl.constexpr,
    NEXT: tl.constexpr,
):  # fmt: skip
    """First blocks of groups of NEXT blocks: all of the best KEPT groups of WIDTH blocks that begin `at`."""
    PAIRS: tl.constexpr = SCORED and not OWN
    members = at[:, None] + tl.arange(0, WIDTH)[None, :]
    first, second = _keys(votes, scores, members, max_blocks, weight, least, last, OWN, SCORED, ADDED)
    top = tl.max(first, 1)
    beside = top
    if PAIRS:
        beside = tl.max(tl.where(first == top[:, None], second, float("-inf")), 1)
    rank = _ranks(at, top, beside, PAIRS)
    found = tl.sum(tl.where(rank[:, None] == tl.arange(0, KEPT)[None, :], at[:, None], 0), 0)
    return tl.reshape(found[:, None] + (tl.arange(0, WIDTH // NEXT) * NEXT)[None, :], [KEPT * (WIDTH // NEXT)])


@triton.jit
def _ranked(
    votes, scores, max_blocks, weight, least, last,
    OWN: tl.constexpr, SCORED: tl.constexpr, ADDED: tl.constexpr, KEPT: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, SHIFT: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Some blocks, the best KEPT among them: their numbers, what they are ordered by first, and their ranks."""
    at = tl.arange(0, GROUPS) * WIDTH
    for i in tl.static_range(ROUNDS):
        at = _narrowed(
            at, votes, scores, max_blocks, weight, least, last, OWN, SCORED, ADDED, KEPT, WIDTH >> i * SHIFT,
            WIDTH >> (i + 1) * SHIFT if i + 1 < ROUNDS else 1,
        )  # fmt: skip
    first, second = _keys(votes, scores, at, max_blocks, weight, least, last, OWN, SCORED, ADDED)
    return at, first, _ranks(at, first, second, SCORED and not OWN)


@triton.jit
def _write(out, at, first, rank, count, KEPT: tl.constexpr):
    """Blocks by their ranks, -1 behind the last that is eligible."""
    eligible = first > float("-inf")
    tl.store(out + rank, at, mask=eligible & (rank < count))
    k = tl.arange(0, KEPT)
    tl.store(out + k, tl.full([KEPT], -1, tl.int32), mask=(k >= tl.sum(eligible.to(tl.int32), 0)) & (k < count))


@triton.jit(do_not_specialize=["count"])
def _elect_kernel(
    votes, scores, out, weights, weight, max_blocks, count,
    SCORED: tl.constexpr, MODE: tl.constexpr, WEIGHTS: tl.constexpr, KEPT: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, SHIFT: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    votes += request * max_blocks
    scores += request * max_blocks
    out += request * count
    least, last = float("inf"), -1  # nothing is an own choice
    if SCORED:
        if WEIGHTS:
            weight = tl.load(weights + request)
        mine, score, rank = _ranked(
            votes,
            scores,
            max_blocks,
            weight,
            least,
            last,
            True,
            True,
            False,
            KEPT,
            GROUPS,
            WIDTH,
            SHIFT,
            ROUNDS,
        )
        own = (rank < count) & (score > float("-inf"))
        if MODE == "off":
            _write(out, mine, score, rank, count, KEPT)
        if MODE == "inclusive":
            least = tl.min(tl.where(own, score, float("inf")), 0)
            last = tl.max(tl.where(own & (score == least), mine, -1), 0)
    if MODE != "off":
        at, counted, place = _ranked(
            votes, scores, max_blocks, weight, least, last, False, SCORED, SCORED and MODE == "inclusive", KEPT, GROUPS,
            WIDTH, SHIFT, ROUNDS,
        )  # fmt: skip
        _write(out, at, counted, place, count, KEPT)
    if SCORED:
        voted = tl.load(votes + mine, mask=own, other=0.0)
        tl.debug_barrier()  # all threads have read the votes as they were
        tl.store(votes + mine, voted + weight, mask=own)
