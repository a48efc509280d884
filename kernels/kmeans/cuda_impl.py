"""The update of k-means in CUDA: sums of whole numbers in shared memory (`sums.cu`).

It reads every vector once, where `triton_impl.update` multiplies all of them with a matrix of labels for each tile of
clusters.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.kmeans.types import Sums

SOURCE = "kmeans/sums.cu"
DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
THREADS = 256
CHUNK = 2048
"""Tokens whose labels a block looks through before it adds those up that are its own."""


def refusal(device: torch.device, dtype: torch.dtype, *dims: int) -> str | None:
    """Why the kernel cannot sum vectors of these dims, or None where it can."""
    if device.type != "cuda":
        return f"device {device}: it is written in CUDA"
    if dtype not in DTYPES:
        return f"{dtype}: whole numbers are exact enough for 16 bits only"
    for dim in dims:
        if dim not in DIMS:
            return f"vectors of {dim}: {', '.join(map(str, DIMS))}"
    return _unusable(nvrtc.index_of(device), dtype, dims)


@cache
def _unusable(index: int, dtype: torch.dtype, dims: tuple[int, ...]) -> str | None:
    """Why no kernel runs on a device: found out once."""
    return nvrtc.failure(index, "k-means sums", *(partial(_kernel, index, dim, dtype) for dim in dims))


def compiled(arch: str, dim: int, dtype: torch.dtype) -> Any:
    """The kernel's machine code (`cuda.core.ObjectCode`) for an architecture such as `nvrtc.HOPPER`; needs no GPU."""
    return nvrtc.compiled(SOURCE, arch, _constants(dim, dtype))


def _constants(dim: int, dtype: torch.dtype) -> dict[str, int]:
    return dict(DIM=dim, THREADS=THREADS, CHUNK=CHUNK, BFLOAT16=int(dtype == torch.bfloat16))


@cache
def _kernel(index: int, dim: int, dtype: torch.dtype) -> Callable[..., None]:
    return nvrtc.kernel(index, SOURCE, "sum_clusters", THREADS, tuple(_constants(dim, dtype).items()))


def update(sums: Sums, last: bool) -> None:
    """`triton_impl.update`, the same in every run.

    Raises:
        ValueError: what `refusal` says.
    """
    dim, dtype, plan = sums.out.shape[-1], sums.out.dtype, sums.plan
    reason = refusal(sums.out.device, dtype, dim)
    if reason:
        raise ValueError(f"{reason}; use triton_impl.update")
    slots = sums.slots.int()
    tiles = -(-max(plan.tiles) * plan.width * dim // 8192)  # see CLUSTERS
    tensors = (
        sums.caches, slots, sums.segments, sums.labels, sums.largest, sums.means, sums.centres, sums.biases, sums.out
    )  # fmt: skip
    numbers = (len(plan.lengths), plan.tokens, sums.cells, plan.width, int(sums.l2), int(last))
    launch = _kernel(nvrtc.index_of(sums.out.device), dim, dtype)
    launch((tiles, *sums.grid), *(x.data_ptr() for x in tensors), *(ctypes.c_int32(n) for n in numbers))
