"""Attention over what was selected, in one CUDA kernel (`attend.cu`): units of both kinds, and the merge of the parts.

What `triton_impl.cluster_attention` does in two launches, for queries in one rotation, of 16 bits, after a selection
that wrote out its lists. The blocks of a row wait for each other before they merge it, so all must run at once, which a
cooperative launch makes sure of. Where the kernel cannot run (`refusal`), `triton_impl` does the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.cluster_attention.pool import ClusterPool, check
from sglang_ext.kernels.cluster_attention.types import ClusterReads, ClusterWorkspace
from sglang_ext.kernels.top_p.checks import check_types

SOURCE = "cluster_attention/attend.cu"
DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
MAX_GROUP = 8
"""Queries of a matrix product."""

WARPS = 2
THREADS = 32 * WARPS
LOG2_E = 1.4426950408889634
MAX_MEMORY = 48 << 10
"""Bytes of shared memory that a block may have where it does not ask for more."""


@dataclass(frozen=True)
class AttendTuning:
    """Units that a warp has on their way, blocks a multiprocessor, and the least units of a block."""

    stages: int = 2
    blocks: int = 6
    least: int = 4

    def memory(self, dim: int, group: int) -> int:
        """Bytes of shared memory that a block takes, 1 KiB of CUDA's own not among them."""
        return WARPS * self.stages * (2 * 16 * dim * 2 + group * 36 * 4) + 64

    def constants(self, dim: int, group: int, kv_heads: int, bfloat16: bool) -> dict[str, int]:
        """Macros of the kernel for heads of `dim`, `group` query heads to each of `kv_heads`.

        Raises:
            ValueError: more shared memory than a block may have.
        """
        if self.memory(dim, group) > MAX_MEMORY:
            raise ValueError(
                f"stages={self.stages} of heads of {dim}: {self.memory(dim, group)} bytes of shared memory a block,"
                f" expected at most {MAX_MEMORY}"
            )
        return dict(
            DIM=dim,
            GROUP=group,
            KV_HEADS=kv_heads,
            STAGES=self.stages,
            BLOCKS=self.blocks,
            LEAST=self.least,
            BFLOAT16=int(bfloat16),
        )


TUNING = AttendTuning()


def refusal(
    device: torch.device, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, pool: ClusterPool
) -> str | None:
    """Why the kernel cannot attend from `query` [batch, rotations, heads, head_dim], or None where it can.

    Args:
        device: of all of them.
        query, key_cache, value_cache, pool: as for `cluster_attention`.
    """
    _, rotations, heads, dim = query.shape
    _, kv_heads, _, value_dim = pool.values.shape
    if device.type != "cuda":
        return f"device {device}: it is written in CUDA"
    if query.dtype not in DTYPES:
        return f"query of {query.dtype}: float16 or bfloat16"
    if dim not in DIMS or value_dim != dim:
        return f"heads of {dim} and {value_dim}: {', '.join(map(str, DIMS))}, keys as values"
    if heads // kv_heads > MAX_GROUP:
        return f"groups of {heads // kv_heads} heads: at most {MAX_GROUP}"
    if rotations > 1:
        return f"{rotations} rotations of the query: one"
    if not query[:1].is_contiguous() or query.stride(0) % 2 or query.data_ptr() % 4:
        return f"query of strides {query.stride()}: each request's contiguous, at a multiple of 4 bytes"
    for name, tensor in {"keys": key_cache, "values": value_cache, "mean values": pool.values}.items():
        if tensor.data_ptr() % 16 or not tensor.is_contiguous() or tensor.dtype != query.dtype:
            return (
                f"{name} of {tensor.dtype}, strides {tensor.stride()}, at {tensor.data_ptr():#x}: contiguous, in the"
                " query's type, at a multiple of 16 bytes"
            )
    return _unusable(nvrtc.index_of(device), dim, heads // kv_heads, kv_heads, query.dtype == torch.bfloat16)


@cache
def _unusable(index: int, dim: int, group: int, kv_heads: int, bfloat16: bool) -> str | None:
    """Why no kernel for such heads runs on a device: found out once, before any CUDA graph is captured."""
    properties = torch.cuda.get_device_properties(index)
    if properties.major < 9:
        return f"compute capability {properties.major}.{properties.minor}: it was written for 9.0"
    room, needed = properties.shared_memory_per_multiprocessor, TUNING.blocks * (TUNING.memory(dim, group) + 1024)
    if room < needed:
        return f"{room} bytes of shared memory a multiprocessor: {TUNING.blocks} blocks take {needed}"
    make = lambda: _kernel(index, dim, group, kv_heads, bfloat16, TUNING)  # noqa: E731
    return nvrtc.failure(index, "attention over clusters runs", make)


def compiled(
    arch: str, dim: int, group: int, kv_heads: int, bfloat16: bool = True, tuning: AttendTuning = TUNING
) -> Any:
    """The kernel's machine code (`cuda.core.ObjectCode`) for an architecture such as `nvrtc.HOPPER`; needs no GPU.

    Raises:
        Exception: what cuda-core raises where NVRTC refuses, with its log.
    """
    return nvrtc.compiled(SOURCE, arch, tuning.constants(dim, group, kv_heads, bfloat16))


@cache
def _kernel(
    index: int, dim: int, group: int, kv_heads: int, bfloat16: bool, tuning: AttendTuning
) -> Callable[..., None]:
    constants = tuple(tuning.constants(dim, group, kv_heads, bfloat16).items())
    return nvrtc.kernel(index, SOURCE, "attend_selected", THREADS, constants)


PROGRAMS = 1024
"""Blocks of a launch at most, for which a workspace has room: an H200 runs 792 at once."""


def cluster_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    pool: ClusterPool,
    reads: ClusterReads,
    scale: float,
    *,
    out: tuple[torch.Tensor, torch.Tensor],
    workspace: ClusterWorkspace,
    tuning: AttendTuning = TUNING,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.cluster_attention` on the device, without synchronisation; all counts are read from tensors.

    Args:
        query: [batch, 1, heads, head_dim], each request's contiguous, in the caches' dtype.
        key_cache, value_cache: [num_slots, kv_heads, head_dim] contiguous.
        pool, reads, scale: as in the reference, contiguous; the selection is expanded into this very workspace.
        out: (output [batch, heads, head_dim], log-sum-exp [batch, heads] float32) to write to.
        workspace: with `PROGRAMS` places for parts beside those of the rows; with fewer, as many blocks are launched.
        tuning: see `AttendTuning`.

    Returns:
        `out`; sums are float32.

    Raises:
        ValueError: as in the reference; what `refusal` says; buffers of other shapes or types, or not contiguous.
    """
    rows, dense, selection, logits = reads.rows, reads.dense, reads.selection, reads.logits
    check(query, pool, rows, dense)
    reason = refusal(query.device, query, key_cache, value_cache, pool)
    if reason:
        raise ValueError(f"{reason}; use triton_impl.cluster_attention")
    batch, _, heads, dim = query.shape
    kv_heads, width = pool.values.shape[1:3]
    group, count, cells = heads // kv_heads, batch * kv_heads, rows.tiles.shape[1] * width
    if not selection.expanded:
        raise ValueError("a selection that is not expanded: expected one whose lists are in the workspace")
    shapes = {
        "key_cache": (key_cache, (key_cache.shape[0], kv_heads, dim), query.dtype),
        "value_cache": (value_cache, (key_cache.shape[0], kv_heads, dim), query.dtype),
        "pool.values": (pool.values, (pool.values.shape[0], kv_heads, width, dim), query.dtype),
        "logits": (logits, (batch, kv_heads, group, cells), torch.float32),
        "dense.slots": (dense.slots, (batch, dense.slots.shape[1]), torch.int32),
        "dense.counts": (dense.counts, (batch,), torch.int32),
        "selection.counts": (selection.counts, (batch, kv_heads, 5), torch.int32),
        "selection.approx": (selection.approx, (batch, kv_heads, cells), torch.int32),
        "workspace.slots": (workspace.slots, (count, workspace.slots.shape[1]), torch.int32),
        "workspace.summaries": (workspace.summaries, (count, max(1, cells)), torch.int32),
        "workspace.arrived": (workspace.arrived, (count, 2), torch.int32),
        "workspace.parts": (workspace.parts, (workspace.parts.shape[0], group, dim), torch.float32),
        "workspace.part_lse": (workspace.part_lse, (workspace.parts.shape[0], group), torch.float32),
        "output": (out[0], (batch, heads, dim), query.dtype),
        "log-sum-exp": (out[1], (batch, heads), torch.float32),
    }
    for name, (tensor, shape, _) in shapes.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} of shape {tuple(tensor.shape)}: expected {shape}")
    check_types(*((name, tensor, dtype) for name, (tensor, _, dtype) in shapes.items()))
    room = workspace.parts.shape[0] - count
    if room < 1:
        raise ValueError(f"workspace of {workspace.parts.shape[0]} parts: expected more than the {count} rows")
    if batch:
        index = nvrtc.index_of(query.device)
        launched = min(nvrtc.multiprocessors(index) * tuning.blocks, room)
        kernel = _kernel(index, dim, group, kv_heads, query.dtype == torch.bfloat16, tuning)
        tensors = (
            query, key_cache, value_cache, pool.values, workspace.slots, workspace.summaries, dense.slots, dense.counts,
            selection.counts, selection.approx, logits, workspace.parts, workspace.part_lse, workspace.arrived, *out,
        )  # fmt: skip
        strides = (query.stride(0), workspace.slots.shape[1], dense.slots.shape[1])
        kernel(
            (launched,), *(x.data_ptr() for x in tensors), *(ctypes.c_int64(each) for each in strides),
            ctypes.c_int32(cells), ctypes.c_int32(count), ctypes.c_float(scale * LOG2_E),
            cooperative=True,
        )  # fmt: skip
    return out
