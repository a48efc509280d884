"""Timing on the GPU, by FlashInfer's own benchmark tools: cold L2, inside a CUDA graph where that can be."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from sglang_ext.launch.bench._record import Timing

Launched = torch.Tensor | tuple[torch.Tensor, ...] | None  # what timed work may return


def require_gpu() -> torch.device:
    """The CUDA device, or ValueError: a time taken elsewhere says nothing about it."""
    if not torch.cuda.is_available():
        raise ValueError("this benchmark needs an NVIDIA GPU: none was found (torch.cuda.is_available() is false)")
    return torch.device("cuda", torch.cuda.current_device())


def time_gpu(
    work: Callable[..., Launched], *arguments: torch.Tensor, graph: bool = True, milliseconds: int = 200
) -> Timing:
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


def time_turns(
    work: Callable[[int], Launched], turns: int, device: torch.device, *, calls: int = 10, milliseconds: int = 200
) -> Timing:
    """Seconds of one call of `work`, inside a CUDA graph that calls it on each of `turns` sets of data in turn.

    Unlike `time_gpu`, for work that touches a small part of its data: only the caller knows how many sets it takes for
    the L2 cache to be cold. Without a GPU the calls are eager and say nothing about one.

    Args:
        work: given the number of the set, launches on the current stream; capturable.
        turns: sets of data.
        device: where it runs.
        calls: the least calls of a graph, rounded up to whole rounds of turns.
        milliseconds: how long to measure for.
    """
    calls = -(-calls // turns) * turns
    if device.type != "cuda":
        begin = time.perf_counter()
        work(0)
        return Timing.of([time.perf_counter() - begin])
    graph = _captured(work, turns, calls)
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds(replays: int) -> float:
        begin_event.record()
        for _ in range(replays):
            graph.replay()
        end_event.record()
        torch.cuda.synchronize()
        return begin_event.elapsed_time(end_event) * 1e-3

    seconds(3)
    one = seconds(3) / 3
    return Timing.of(seconds(1) / calls for _ in range(max(10, int(milliseconds * 1e-3 / one))))


def _captured(work: Callable[[int], Launched], turns: int, calls: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile and allocate before the capture
        for turn in range(turns):
            work(turn)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            work(call % turns)
    return graph


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
