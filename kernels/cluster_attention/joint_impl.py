"""Scores of centroids and the selection by them in one CUDA kernel (`top_p/select.cu` with DIM).

One launch less than `triton_impl.centroid_scores` and `top_p.cuda_impl.select`, logits come back from the L2 cache, and
while some heads' selections search, the centroids of others are read. For queries in one rotation, of 16 bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.cluster_attention.pool import FLOAT8, ClusterPool, check
from sglang_ext.kernels.cluster_attention.types import ClusterRows
from sglang_ext.kernels.top_p import cuda_impl
from sglang_ext.kernels.top_p.checks import check_buffers, check_expansion, check_types
from sglang_ext.kernels.top_p.types import UNION, WITHOUT_GAPS, Expansion, Selection, SetRule

DIMS = (64, 128)

RESIDENT = 768
"""Threads that are to fit a multiprocessor at once: of blocks of 256 that is 80 registers a thread, and the loads of 16
centroids do not spill, as they would with 64 (groups of four heads, up to 32 clusters a thread). Of blocks of 512 one
is sure to fit, with 128 registers."""


def refusal(query: torch.Tensor, pool: ClusterPool, rows: ClusterRows, *, group: str = "union") -> str | None:
    """Why the kernel cannot score and select for `query` [batch, rotations, heads, head_dim], or None where it can."""
    _, rotations, heads, dim = query.shape
    kv_heads = pool.centroids.shape[1]
    if query.dtype not in (torch.float16, torch.bfloat16) or pool.centroids.dtype not in (query.dtype, FLOAT8):
        return (
            f"query of {query.dtype}, centroids of {pool.centroids.dtype}: it multiplies float16 or bfloat16, with the"
            " same or with float8"
        )
    if dim not in DIMS:
        return f"head_dim {dim}: one of {DIMS}"
    if rotations > 1:
        return f"{rotations} rotations of the query: one"
    if not query[:1].is_contiguous() or query.stride(0) % 8 or (query.data_ptr() | pool.centroids.data_ptr()) % 16:
        return (
            f"query of strides {query.stride()}: each request's contiguous, queries and centroids at multiples of 16"
            " bytes"
        )
    refused = cuda_impl.refusal(query.device, heads // kv_heads, rows.tiles.shape[1] * pool.width, group=group)
    types = query.dtype == torch.bfloat16, pool.centroids.dtype == FLOAT8
    return refused or _unusable(nvrtc.index_of(query.device), dim, *types)


@cache
def _unusable(index: int, dim: int, bfloat16: bool, float8: bool) -> str | None:
    """Why no kernel runs on a device: found out once, before any CUDA graph is captured."""
    first = cuda_impl.BLOCKS[0]
    return nvrtc.failure(index, "scores run", lambda: _kernel(index, 1, first, False, 16, dim, bfloat16, float8))


def compiled(
    arch: str, heads: int, block: cuda_impl.SearchBlock, width: int, dim: int, bfloat16: bool, float8: bool = False
) -> Any:
    """The kernel's machine code (`cuda.core.ObjectCode`) for an architecture such as `nvrtc.HOPPER`; needs no GPU.

    Raises:
        Exception: what cuda-core raises where NVRTC refuses, with its log.
    """
    return nvrtc.compiled(cuda_impl.SOURCE, arch, _constants(heads, block, False, width, dim, bfloat16, float8))


def _constants(
    heads: int, block: cuda_impl.SearchBlock, by_count: bool, width: int, dim: int, bfloat16: bool, float8: bool
) -> dict[str, int]:
    resident = max(RESIDENT, block.threads)
    return {
        **cuda_impl.constants(heads, block, by_count, 1, 1, width),
        **dict(RESIDENT=resident, DIM=dim, BFLOAT16=int(bfloat16), FP8=int(float8)),
    }


@cache
def _kernel(
    index: int,
    heads: int,
    block: cuda_impl.SearchBlock,
    by_count: bool,
    width: int,
    dim: int,
    bfloat16: bool,
    float8: bool,
) -> Callable[..., None]:
    constants = tuple(_constants(heads, block, by_count, width, dim, bfloat16, float8).items())
    return nvrtc.kernel(index, cuda_impl.SOURCE, "score_and_select", block.threads, constants)


def warm_up(query: torch.Tensor, pool: ClusterPool, rows: ClusterRows, cells: int, *, group: str = "union") -> bool:
    """Compile what rows of up to `cells` clusters will need, where the kernel runs for such rows; whether it does.

    Args:
        query, pool, rows, group: as for `refusal`: of one batch, for all of its kind.
        cells: the most clusters.
    """
    if refusal(query, pool, rows, group=group):
        return False
    index, heads = nvrtc.index_of(query.device), query.shape[2] // pool.centroids.shape[1]
    kind = query.shape[3], query.dtype == torch.bfloat16, pool.centroids.dtype == FLOAT8
    blocks = cuda_impl.up_to(min(cells, cuda_impl.MAX_CELLS))
    macros = [_constants(heads, block, False, pool.width, *kind) for block in blocks]
    nvrtc.compile_ahead(index, [(cuda_impl.SOURCE, each) for each in macros])
    for block in blocks:
        _kernel(index, heads, block, False, pool.width, *kind)
    return True


def score_and_select(
    query: torch.Tensor,
    pool: ClusterPool,
    rows: ClusterRows,
    cells: torch.Tensor,
    p: torch.Tensor,
    scale: float,
    *,
    logits: torch.Tensor,
    out: Selection,
    expansion: Expansion,
    rule: SetRule = UNION,
) -> Selection:
    """`reference.centroid_scores`, then `top_p.reference.select` on what it gave, on the device.

    A fixed grid, counts and p read from tensors, no synchronisation.

    Args:
        query: [batch, 1, heads, head_dim], each request's contiguous, in the centroids' dtype; or these are float8.
        pool, rows, scale: as for `centroid_scores`.
        cells: [batch] int32 clusters of each request, `rows.counts` times the tiles' width.
        p: [batch, 2] float32.
        logits: [batch, kv_heads, group, most tiles * width] float32 to write to; nothing is from a request's count on.
        out: buffers for the selection, of tokens numbered without gaps.
        expansion: what is written out with it, over `rows.tiles`.
        rule: as for `select`; `rule.group` is "union".

    Returns:
        `out`, expanded.

    Raises:
        ValueError: what `refusal` says; parts that do not fit each other, are of other types or not contiguous.
    """
    check(query, pool, rows)
    reason = refusal(query, pool, rows, group=rule.group)
    if reason:
        raise ValueError(f"{reason}; use triton_impl.centroid_scores and top_p's select")
    batch, _, heads, dim = query.shape
    kv_heads, tiles, width = pool.centroids.shape[1], rows.tiles.shape[1], pool.width
    shape = (batch, kv_heads, heads // kv_heads, tiles * width)
    if tuple(logits.shape) != shape:
        raise ValueError(f"logits of shape {tuple(logits.shape)}: expected {shape}")
    check_buffers(out, WITHOUT_GAPS)
    check_expansion(expansion, batch, kv_heads, tiles * width, WITHOUT_GAPS)
    if expansion.width != width or expansion.tiles.data_ptr() != rows.tiles.data_ptr():
        raise ValueError(f"an expansion over other tiles, of {expansion.width}: expected the rows', of {width}")
    sized = rows.tiles if rows.sized is None else rows.sized
    check_types(
        ("centroids", pool.centroids, pool.centroids.dtype),
        ("sizes", pool.sizes, torch.int32),
        ("starts", pool.starts, torch.int32),
        ("rows.sized", sized, torch.int32),
        ("cells", cells, torch.int32),
        ("p", p, torch.float32),
        ("logits", logits, torch.float32),
    )
    if batch:
        index = nvrtc.index_of(query.device)
        block = cuda_impl.block_for(tiles * width, heads * batch, nvrtc.multiprocessors(index))
        kind = width, dim, query.dtype == torch.bfloat16, pool.centroids.dtype == FLOAT8
        kernel = _kernel(index, heads // kv_heads, block, rule.by_count, *kind)
        given = (query, pool.centroids, sized)
        tensors = (
            logits, pool.sizes, pool.starts, cells, p, out.counts, out.exact, out.prefix, out.shift, out.approx,
            expansion.members, expansion.tiles, expansion.slots, expansion.summaries,
        )  # fmt: skip
        kernel(
            (heads // kv_heads, batch * kv_heads), *(x.data_ptr() for x in given), ctypes.c_int64(query.stride(0)),
            ctypes.c_float(scale), *(x.data_ptr() for x in tensors), ctypes.c_int64(expansion.members.shape[1]),
            ctypes.c_int64(expansion.slots.shape[1]), ctypes.c_int32(tiles), ctypes.c_int32(kv_heads),
            ctypes.c_int32(tiles * width),
        )  # fmt: skip
    return out.said_expanded(True)
