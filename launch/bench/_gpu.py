"""Timing on the GPU, by FlashInfer's own benchmark tools: cold L2, inside a CUDA graph where that can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_ext.launch.bench._record import Timing


def require_gpu() -> torch.device:
    """The CUDA device, or ValueError: a time taken elsewhere says nothing about it."""
    if not torch.cuda.is_available():
        raise ValueError("this benchmark needs an NVIDIA GPU: none was found (torch.cuda.is_available() is false)")
    return torch.device("cuda", torch.cuda.current_device())


def time_gpu(work: Callable[..., Any], *arguments: Any, graph: bool = True, milliseconds: int = 200) -> Timing:
    """Seconds of one call of `work(*arguments)`.

    Args:
        work: launches on the current stream; must be capturable when `graph`.
        arguments: tensors in them are cloned until they exceed the L2 cache, so that every call finds it cold.
        graph: run inside a CUDA graph of ten calls; otherwise eager, L2 flushed before each.
        milliseconds: how long to measure for.
    """
    from flashinfer.testing import bench_gpu_time

    times = bench_gpu_time(
        work,
        input_args=arguments,
        use_cuda_graph=graph,
        cold_l2_cache=True,
        dry_run_time_ms=milliseconds // 4,
        repeat_time_ms=milliseconds,
    )
    return Timing.of(float(t) * 1e-3 for t in times)


def copy_bandwidth(device: torch.device, gib: int = 4) -> float:
    """Bytes a second that a plain copy moves, reads and writes counted."""
    source = torch.empty(gib << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = time_gpu(lambda: target.copy_(source), graph=False)
    return 2 * source.numel() / timing.median


def matrix_rate(device: torch.device, dtype: torch.dtype = torch.bfloat16, size: int = 8192) -> float:
    """Floating-point operations a second of a large matrix product."""
    a = torch.randn(size, size, dtype=dtype, device=device)
    b = torch.randn(size, size, dtype=dtype, device=device)
    timing = time_gpu(torch.matmul, a, b)
    return 2 * size**3 / timing.median
