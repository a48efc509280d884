"""Scores of memory blocks by `mass` in CUDA, on Hopper: two launches, of which the first reads the index (`mass.cu`).

Where it cannot run (`refusal`), `triton_impl.score_blocks` does the same, but it rounds no query to 8 bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, partial

import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.block_votes import cuda_impl
from sglang_ext.kernels.block_votes.cuda_impl import THREADS
from sglang_ext.kernels.block_votes.types import LOG2_E, BlockIndex, QuerySpans, check

SOURCE = "block_votes/mass.cu"

MAX_COLUMNS = 48
"""Vectors of a query, at most: as many as one product takes."""

RESIDENT = 2
"""Blocks of the grid that a multiprocessor has at once: with more, registers are too few for products of 48 vectors."""

FEW_RESIDENT = 3
"""The same where vectors are packed, of 128 components at most, and the query has 8 vectors at most: beside these, a
multiprocessor has registers for one block of the second launch's grid."""

THREADS_OF_MASSES, FEW_THREADS_OF_MASSES = 1024, 512
"""Threads of a block of the second launch's grid; the latter where the first launch has FEW_RESIDENT."""

TAKEN = 32
"""Memory blocks that it takes."""

NAMES = ("levels", "masses")
"""Both launches."""


def refusal(device: torch.device, query: QuerySpans, index: BlockIndex, kind: str) -> str | None:
    """Why the kernels cannot compare these, or None where they can."""
    if device.type != "cuda":
        return f"device {device}: it is written in CUDA"
    if kind != "mass":
        return f"kind={kind!r}: it compares by 'mass'"
    if index.vectors.shape[1] > 1:
        return f"blocks of {index.vectors.shape[1]} spans: expected 1"
    return cuda_impl.unfit(query, index, MAX_COLUMNS) or _unusable(nvrtc.index_of(device))


@cache
def _unusable(index: int) -> str | None:
    """Why no kernel runs on a device: found out once, before any CUDA graph is captured."""
    if torch.cuda.get_device_properties(index).major != 9:
        return "it is written for Hopper"
    sizes = with_own(cuda_impl.constants(128, 1, 48, 1, 8, packed=True, wide=False, bfloat16=True))
    both = [partial(_kernel, index, name, tuple(sizes.items())) for name in NAMES]
    return nvrtc.failure(index, "scores of blocks by `mass` run", *both)


def with_own(sizes: dict[str, int]) -> dict[str, int]:
    """Macros of `mass.cu`, from those of `cuda_impl.constants`."""
    few = sizes["PACKED"] and sizes["DIM"] <= 128 and sizes["COLUMNS"] <= 8
    resident, threads = (FEW_RESIDENT, FEW_THREADS_OF_MASSES) if few else (RESIDENT, THREADS_OF_MASSES)
    return sizes | dict(RESIDENT=resident, BESIDE=int(few), THREADS_OF_MASSES=threads, TAKEN=TAKEN)


@cache
def _kernel(index: int, name: str, macros: tuple[tuple[str, int], ...]) -> Callable[..., None]:
    threads = {"levels": THREADS, "masses": dict(macros)["THREADS_OF_MASSES"]}
    return nvrtc.kernel(index, SOURCE, name, threads[name], macros)


def score_blocks(
    query: QuerySpans, index: BlockIndex, *, kind: str = "mass", out: torch.Tensor | None = None
) -> torch.Tensor:
    """`reference.score_blocks` on the device, in two launches and without synchronisation.

    Products are those of `cuda_impl.score_blocks`: packed vectors are multiplied by query vectors that are rounded to
    8 bits.

    Args:
        query, index: as in the reference, contiguous; blocks have one span, and scales are at least 0.
        kind: `mass`.
        out: [batch, max_blocks] float32 to write to, contiguous; None: a new tensor.

    Returns:
        [batch, max_blocks] float32 on the device; -inf where there is no block (equation 9).

    Raises:
        ValueError: as in the reference; what `refusal` says; tensors that are not contiguous.
    """
    check(query, index, kind, out)
    if reason := refusal(query.vectors.device, query, index, kind):
        raise ValueError(f"{reason}; use triton_impl.score_blocks")
    out, left = cuda_impl.begun(query, index, out)
    if not left:
        return out
    tensors = cuda_impl.tensors_of(query, index)
    device, (batch, limit) = nvrtc.index_of(query.vectors.device), index.ids.shape
    sizes = with_own(cuda_impl.constants_for(query, index))
    programs = min(-(-limit // (THREADS // 32)), sizes["RESIDENT"] * nvrtc.multiprocessors(device))
    levels = torch.empty(batch, limit + programs, sizes["COLUMNS"], dtype=torch.float32, device=out.device)
    of_blocks = levels.data_ptr()
    of_programs = of_blocks + batch * limit * sizes["COLUMNS"] * levels.itemsize
    macros = tuple(sizes.items())
    _kernel(device, "levels", macros)(
        (programs, batch), *(each.data_ptr() for each in tensors.values()), of_blocks, of_programs,
        ctypes.c_int32(limit), ctypes.c_float(sizes["DIM"] ** -0.5 * LOG2_E), early=True,
    )  # fmt: skip
    _kernel(device, "masses", macros)(
        (-(-limit // TAKEN), batch), query.counts.data_ptr(), index.blocks.data_ptr(), of_blocks, of_programs,
        out.data_ptr(), ctypes.c_int32(limit), ctypes.c_int32(programs), early=True,
    )  # fmt: skip
    return out
