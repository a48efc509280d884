"""Scores of centroids and attention to what was chosen in CUDA (`scores.cu`, `attend.cu`), for one rotation.

In the place of `triton_impl._scores` and `_attend`.

Not chosen by itself: nobody has measured it on a GPU yet (`triton_impl.Tuning.cuda`). The tests run it on a CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from sglang_ext.kernels import nvrtc, warp

SOURCE = "cluster_attention/attend.cu"
SCORES = "cluster_attention/scores.cu"
STAGES = 2
SCORE_STAGES = 4
BLOCKS = 12
"""Warps, each a block, of a multiprocessor."""

UNITS = {"TILE": 16, "SUMMARIES": 16, "COST": 2}
"""Units of work, as `triton_impl._work` takes them: 16 summaries; 16 tokens are two."""


def refusal(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, group: int, rotations: int
) -> str | None:
    """Why the kernel cannot attend from `group` query heads a key-value head, or None where it can."""
    if reason := warp.refusal(device, dtype, head_dim, value_dim, group):
        return reason
    if rotations > 1:
        return f"{rotations} rotations of the query: one"
    return _unusable(nvrtc.index_of(device))


@cache
def _unusable(index: int) -> str | None:
    """Why no kernel runs on a device: found out once, before any CUDA graph is captured."""
    properties = torch.cuda.get_device_properties(index)
    if properties.major < 8:
        return f"compute capability {properties.major}.{properties.minor}: asynchronous copies begin at 8.0"
    return nvrtc.failure(index, "attention to clusters", lambda: _kernel(index, 128, 4, 8, True))


def programs(device: torch.device) -> int:
    """Warps that a device runs at once."""
    return BLOCKS * nvrtc.multiprocessors(nvrtc.index_of(device))


def compiled(arch: str, dim: int, group: int, kv_heads: int, bfloat16: bool) -> object:
    """The kernel's machine code (`cuda.core.ObjectCode`) for an architecture such as "sm_90"; needs no GPU."""
    return nvrtc.compiled(SOURCE, arch, _constants(dim, group, kv_heads, bfloat16))


def _constants(dim: int, group: int, kv_heads: int, bfloat16: bool) -> dict[str, int]:
    return dict(DIM=dim, GROUP=group, KV_HEADS=kv_heads, STAGES=STAGES, BLOCKS=BLOCKS, BFLOAT16=int(bfloat16))


@cache
def _kernel(index: int, dim: int, group: int, kv_heads: int, bfloat16: bool) -> Callable[..., None]:
    constants = tuple(_constants(dim, group, kv_heads, bfloat16).items())
    return nvrtc.kernel(index, SOURCE, "attend_clusters", 32, constants)


def compiled_scores(arch: str, dim: int, group: int, kv_heads: int, width: int, sized: bool, bfloat16: bool) -> object:
    """Likewise, of the scores."""
    return nvrtc.compiled(SCORES, arch, _score_constants(dim, group, kv_heads, width, sized, bfloat16))


def _score_constants(dim: int, group: int, kv_heads: int, width: int, sized: bool, bfloat16: bool) -> dict[str, int]:
    constants = _constants(dim, group, kv_heads, bfloat16)
    return {**constants, "STAGES": SCORE_STAGES, "WIDTH": width, "SIZED": int(sized)}


@cache
def _score_kernel(
    index: int, dim: int, group: int, kv_heads: int, width: int, sized: bool, bfloat16: bool
) -> Callable[..., None]:
    constants = tuple(_score_constants(dim, group, kv_heads, width, sized, bfloat16).items())
    return nvrtc.kernel(index, SCORES, "score_centroids", 32, constants)


def centroid_scores(
    query: torch.Tensor,
    centroids: torch.Tensor,
    sizes: torch.Tensor,
    starts: torch.Tensor,
    tiles: torch.Tensor,
    tile_counts: torch.Tensor,
    sized: torch.Tensor | None,
    scale: float,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """`triton_impl.centroid_scores`, which has checked all, for tiles of a multiple of 16 clusters.

    Args:
        query, scale, out: as there; one rotation.
        centroids, sizes, starts: of `ClusterPool`.
        tiles, tile_counts, sized: of `ClusterRows`.
    """
    _, kv_heads, width, dim = centroids.shape
    batch, most = tiles.shape
    index, group, half = nvrtc.index_of(query.device), query.shape[2] // kv_heads, query.dtype == torch.bfloat16
    launch = _score_kernel(index, dim, group, kv_heads, width, sized is not None, half)
    warps = max(1, min(programs(query.device) // (batch * kv_heads), most * width // 16))
    tensors = (query, centroids, sizes, starts, tiles, tile_counts, tiles if sized is None else sized, *out)
    launch(
        (warps, kv_heads, batch), *(x.data_ptr() for x in tensors), ctypes.c_int64(query.stride(0)),
        ctypes.c_int64(most), ctypes.c_float(scale),
    )  # fmt: skip


def attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    means: torch.Tensor,
    slots: torch.Tensor,
    summaries: torch.Tensor,
    dense_slots: torch.Tensor,
    dense_counts: torch.Tensor,
    counts: torch.Tensor,
    approx: torch.Tensor,
    logits: torch.Tensor,
    parts: torch.Tensor,
    part_lse: torch.Tensor,
    scale: float,
    programs: int,
) -> None:
    """The parts of every row, for `triton_impl._merge` with `UNITS`.

    Args:
        query, key_cache, value_cache, logits, scale: as for `triton_impl.cluster_attention`; one rotation.
        means: `ClusterPool.values`.
        slots, summaries, parts, part_lse: of its `Workspace`.
        dense_slots, dense_counts: of its `DenseTokens`.
        counts, approx: of its `Selection`.
        programs: warps, as many as there are places for parts beside a row's.
    """
    kv_heads, dim = key_cache.shape[1:]
    rows = query.shape[0] * kv_heads
    launch = _kernel(
        nvrtc.index_of(query.device), dim, query.shape[2] // kv_heads, kv_heads, query.dtype == torch.bfloat16
    )
    tensors = (
        query, key_cache, value_cache, means, slots, summaries, dense_slots, dense_counts, counts, approx, logits,
        parts, part_lse,
    )  # fmt: skip
    launch(
        (programs,), *(x.data_ptr() for x in tensors), ctypes.c_int64(query.stride(0)),
        ctypes.c_int64(summaries.shape[1]), ctypes.c_int64(slots.shape[1]), ctypes.c_int64(dense_slots.shape[1]),
        ctypes.c_int32(rows), ctypes.c_float(scale),
    )  # fmt: skip
