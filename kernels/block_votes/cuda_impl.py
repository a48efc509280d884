"""Scores of memory blocks by `max` in CUDA, on Hopper: four warps multiply together (`compare.cuh`, `scores.cu`).

Where it cannot run (`refusal`), `triton_impl.score_blocks` does the same, but it rounds no query to 8 bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.block_votes.types import BlockIndex, QuerySpans, check
from sglang_ext.kernels.shared import check_contiguous

SOURCE = "block_votes/scores.cu"
DTYPES = (torch.bfloat16, torch.float16)

MAX_COLUMNS = 96
"""Vectors of a query, at most: with two bytes a component, they take 24 KiB of the 48 that a block has."""

MAX_ROWS = 128
"""Vectors of a block, at most."""

MAX_DIM = 256
"""Components of a vector, at most."""

THREADS = 128
"""Threads of a block of the grid: four warps, which multiply together."""

RESIDENT = 2
"""Blocks of the grid that a multiprocessor has at once: with more, registers are too few to prepare a tile ahead."""

PACKED_RESIDENT = 4
"""The same where vectors are packed, of 128 components at most, and the query has 48 vectors at most."""


def refusal(device: torch.device, query: QuerySpans, index: BlockIndex, kind: str) -> str | None:
    """Why the kernel cannot compare these, or None where it can."""
    if device.type != "cuda":
        return f"device {device}: it is written in CUDA"
    if kind != "max":
        return f"kind={kind!r}: it compares by 'max'"
    return unfit(query, index, MAX_COLUMNS) or _unusable(nvrtc.index_of(device))


def unfit(query: QuerySpans, index: BlockIndex, most_columns: int) -> str | None:
    """Why vectors cannot be multiplied as `compare.cuh` does it, or None where they can.

    Args:
        query, index: as `types.check` takes them.
        most_columns: vectors of a query, at most.
    """
    asked, kept = query.vectors, index.vectors
    if asked.dtype not in DTYPES or (index.scales is None and kept.dtype != asked.dtype):
        return f"query vectors are {asked.dtype}, index vectors {kept.dtype}: expected bfloat16 or float16, or packed"
    line = kept.shape[3] * kept.element_size()
    if line % 64:
        return f"index vectors of {line} bytes: expected a multiple of 64"
    columns, rows = asked.shape[1] * asked.shape[2], kept.shape[1] * kept.shape[2]
    if columns > most_columns or rows > MAX_ROWS or asked.shape[3] > MAX_DIM or line > 256:
        return (
            f"{columns} query vectors, {rows} index vectors of {asked.shape[3]} components in {line} bytes: expected "
            f"at most {most_columns}, {MAX_ROWS}, {MAX_DIM} and 256"
        )
    if (asked.data_ptr() | kept.data_ptr()) % 16:
        return "vectors begin at an address that is no multiple of 16"
    return None


@cache
def _unusable(index: int) -> str | None:
    """Why no kernel runs on a device: found out once, before any CUDA graph is captured."""
    if torch.cuda.get_device_properties(index).major != 9:
        return "it is written for Hopper"
    sizes = constants(128, 1, 48, 12, 48, packed=True, wide=False, bfloat16=True)
    return nvrtc.failure(index, "scores of blocks run", lambda: _kernel(index, tuple(sizes.items())))


def constants(
    dim: int, spans: int, most: int, most_q: int, columns: int, *, packed: bool, wide: bool, bfloat16: bool
) -> dict[str, int]:
    """Macros of `compare.cuh`, with so many blocks at once that `scores.cu` spills only of the largest packed ones."""
    resident = PACKED_RESIDENT if packed and dim <= 128 and columns <= 48 else RESIDENT
    return dict(
        DIM=dim, SPANS=spans, MOST=most, MOST_Q=most_q, COLUMNS=columns, PACKED=int(packed), WIDE=int(wide),
        BFLOAT16=int(bfloat16), THREADS=THREADS, RESIDENT=resident,
    )  # fmt: skip


def constants_for(query: QuerySpans, index: BlockIndex) -> dict[str, int]:
    """`constants` of these."""
    (_, query_spans, most_q, dim), (_, spans, most, _) = query.vectors.shape, index.vectors.shape
    return constants(
        dim, spans, most, most_q, query_spans * most_q, packed=index.scales is not None,
        wide=index.blocks.dtype == torch.int64, bfloat16=query.vectors.dtype == torch.bfloat16,
    )  # fmt: skip


def tensors_of(query: QuerySpans, index: BlockIndex) -> dict[str, torch.Tensor]:
    """What kernels are given of both, in its order."""
    scales = query.counts if index.scales is None else index.scales  # not looked at unless vectors are packed
    return {
        "query vectors": query.vectors, "query counts": query.counts, "index vectors": index.vectors,
        "index scales": scales, "index counts": index.counts, "ids": index.ids, "blocks": index.blocks,
    }  # fmt: skip


def begun(query: QuerySpans, index: BlockIndex, out: torch.Tensor | None) -> tuple[torch.Tensor, bool]:
    """(`out` or a new tensor, whether there is anything to compare); -inf where there is nothing.

    Raises:
        ValueError: a tensor is not contiguous.
    """
    if out is None:
        out = torch.empty(index.ids.shape, dtype=torch.float32, device=query.vectors.device)
    check_contiguous(tensors_of(query, index) | {"out": out})
    left = 0 not in (*query.vectors.shape, *index.vectors.shape, *out.shape)
    return out if left else out.fill_(float("-inf")), left


@cache
def _kernel(index: int, macros: tuple[tuple[str, int], ...]) -> Callable[..., None]:
    return nvrtc.kernel(index, SOURCE, "scores", THREADS, macros)


def score_blocks(
    query: QuerySpans, index: BlockIndex, *, kind: str = "max", out: torch.Tensor | None = None
) -> torch.Tensor:
    """`reference.score_blocks` on the device, in one launch and without synchronisation.

    Products are those of the query's dtype, added in float32. Packed vectors are multiplied as whole numbers, exactly,
    by query vectors whose components are rounded to 8 bits: to a whole number from -127 to 127, times 1/127 of the
    largest component of all query vectors of a request. So these must be finite.

    Args:
        query, index: as in the reference, contiguous.
        kind: `max`.
        out: [batch, max_blocks] float32 to write to, contiguous; None: a new tensor.

    Returns:
        [batch, max_blocks] float32 on the device; -inf where there is no block (equation 9).

    Raises:
        ValueError: as in the reference; what `refusal` says; tensors that are not contiguous.
    """
    check(query, index, kind, out)
    if reason := refusal(query.vectors.device, query, index, kind):
        raise ValueError(f"{reason}; use triton_impl.score_blocks")
    out, left = begun(query, index, out)
    if not left:
        return out
    tensors = tensors_of(query, index) | {"out": out}
    device, (batch, limit) = nvrtc.index_of(query.vectors.device), index.ids.shape
    sizes = constants_for(query, index)
    programs = min(-(-limit // (THREADS // 32)), sizes["RESIDENT"] * nvrtc.multiprocessors(device))
    kernel = _kernel(device, tuple(sizes.items()))
    kernel((programs, batch), *(each.data_ptr() for each in tensors.values()), ctypes.c_int32(limit), early=True)
    return out
