"""The election among memory blocks in CUDA: few steps that wait for each other (`elect.cu`).

Where it cannot run (`refusal`), `triton_impl.elect` does the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.block_votes.types import VOTES, check_election
from sglang_ext.kernels.shared import check_contiguous

SOURCE = "block_votes/elect.cu"

MAX_COUNT = 64
"""Blocks that an election chooses, at most."""

THREADS = 1024
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
    sizes = constants(16, "inclusive", scored=True, weights=False)
    return nvrtc.failure(index, "elections of blocks run", lambda: _kernel(index, tuple(sizes.items())))


def constants(count: int, mode: str, *, scored: bool, weights: bool) -> dict[str, int]:
    """Macros of `elect.cu`."""
    return dict(
        KEPT=count, SCORED=int(scored), MODE=VOTES.index(mode), WEIGHTS=int(weights), THREADS=THREADS,
        LANES=32 if count <= 16 else 8, BFLOAT16=0,
    )  # fmt: skip


@cache
def _kernel(index: int, macros: tuple[tuple[str, int], ...]) -> Callable[..., None]:
    return nvrtc.kernel(index, SOURCE, "elect", THREADS, macros)


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
    each = isinstance(weight, torch.Tensor)
    weights = weight if isinstance(weight, torch.Tensor) else votes  # not looked at unless each request has one
    own = votes if scores is None else scores
    tensors = {"votes": votes, "scores": own, "out": out, "weight": weights}
    check_contiguous(tensors)
    if out.numel() == 0:
        return out
    if limit == 0 or (scores is None and mode == "off"):
        return out.fill_(-1)
    sizes = constants(count, mode, scored=scores is not None, weights=each)
    kernel = _kernel(nvrtc.index_of(votes.device), tuple(sizes.items()))
    number = 0.0 if isinstance(weight, torch.Tensor) else weight
    kernel(
        (batch,), *(tensor.data_ptr() for tensor in tensors.values()), ctypes.c_float(number), ctypes.c_int32(limit),
        ctypes.c_int32(count),
    )  # fmt: skip
    return out
