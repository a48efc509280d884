"""The election among memory blocks in CUDA: few steps that wait for each other (`elect.cu`).

Where it cannot run (`refusal`), `triton_impl.elect` does the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.block_votes.types import MAX_COUNT, VOTES, check_election
from sglang_ext.kernels.shared import check_contiguous

SOURCE = "block_votes/elect.cu"

FEW = 16
"""Blocks to choose, at most, for which a kernel of its own has fewer groups of threads."""

THREADS = 512
"""Threads that search among the blocks of a request."""


def refusal(device: torch.device, votes: torch.Tensor, scores: torch.Tensor | None, count: int) -> str | None:
    """Why the kernel cannot elect, or None where it can."""
    if device.type != "cuda":
        return f"device {device}: it is written in CUDA"
    for name, tensor in (("votes", votes), ("scores", scores)):
        if tensor is not None and tensor.dtype != torch.float32:
            return f"{name} are {tensor.dtype}: expected float32"
    if count > MAX_COUNT:
        return f"count={count}: expected at most {MAX_COUNT}"
    return _unusable(nvrtc.index_of(device))


@cache
def _unusable(index: int) -> str | None:
    """Why no election runs on a device: found out once, before any CUDA graph is captured."""
    both = [lambda: _kernel(index, FEW), lambda: _kernel(index, MAX_COUNT)]
    return nvrtc.failure(index, "elections of blocks run", *both)


def constants(count: int) -> dict[str, int]:
    """Macros of `elect.cu`: there are twice as many groups of threads as blocks to choose, at least."""
    return dict(THREADS=THREADS, LANES=16 if count <= FEW else 4, BFLOAT16=0)


@cache
def _kernel(index: int, count: int) -> Callable[..., None]:
    return nvrtc.kernel(index, SOURCE, "elect", THREADS, tuple(constants(count).items()))


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
        ValueError: as in the reference; what `refusal` says; tensors that are not contiguous.
    """
    check_election(votes, scores, weight, count, mode, out)
    if reason := refusal(votes.device, votes, scores, count):
        raise ValueError(f"{reason}; use triton_impl.elect")
    batch, limit = votes.shape
    if out is None:
        out = torch.empty(batch, count, dtype=torch.int32, device=votes.device)
    tensors = {"votes": votes, "out": out}
    if scores is not None:
        tensors["scores"] = scores
    if isinstance(weight, torch.Tensor):
        tensors["weight"] = weight
    check_contiguous(tensors)
    if out.numel() == 0:
        return out
    if limit == 0 or (scores is None and mode == "off"):
        return out.fill_(-1)
    each, one = (weight.data_ptr(), 0.0) if isinstance(weight, torch.Tensor) else (0, weight)
    kernel = _kernel(nvrtc.index_of(votes.device), FEW if count <= FEW else MAX_COUNT)
    kernel(
        (batch,), votes.data_ptr(), 0 if scores is None else scores.data_ptr(), out.data_ptr(), each,
        ctypes.c_float(one), ctypes.c_int32(limit), ctypes.c_int32(count), ctypes.c_int32(VOTES.index(mode)),
        early=True,
    )  # fmt: skip
    return out
