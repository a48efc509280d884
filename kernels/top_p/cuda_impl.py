"""Top-p in CUDA: a search is as long as its chain of dependent steps, and those are short there (`select.cu`).

Where it cannot run (`refusal`), `triton_impl.select` does the same.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.top_p.selection import Selection, check, check_buffers, check_memory

logger = logging.getLogger(__name__)

SOURCE = "top_p/select.cu"

MAX_GROUP = 8
"""Blocks of a thread block cluster that every GPU with clusters takes."""

BINS = 1024


@dataclass(frozen=True)
class Block:
    """How many clusters a block of threads holds in its registers.

    Attributes:
        threads: of a block.
        quads: groups of four clusters of a thread.
    """

    threads: int
    quads: int

    @property
    def cells(self) -> int:
        return 4 * self.threads * self.quads


# Few, since each is compiled; on an H200 four groups of four were the best for 4,096 and for 8,192 clusters.
BLOCKS = (Block(256, 1), Block(256, 2), Block(256, 4), Block(512, 4), Block(1024, 4), Block(1024, 8))
MAX_CELLS = BLOCKS[-1].cells


def block_for(width: int) -> Block:
    """The smallest that holds `width` clusters, at most MAX_CELLS."""
    return next(block for block in BLOCKS if block.cells >= width)


def refusal(
    device: torch.device, heads: int, width: int, *, group: str = "union", run: int = 1, align: int = 1
) -> str | None:
    """Why the kernel cannot select among `width` clusters for groups of `heads`, or None where it can."""
    if device.type != "cuda":
        return f"device {device}: it is written in CUDA"
    if group != "union":
        return f"group={group!r}: it searches for each head"
    if heads > MAX_GROUP:
        return f"groups of {heads} heads: at most {MAX_GROUP}"
    if align > 1 and not 4 <= run <= 1024:
        return f"runs of {run} clusters: 4 to 1,024"
    if width > MAX_CELLS:
        return f"{width} clusters of a request: at most {MAX_CELLS}"
    return _unusable(nvrtc.index_of(device))


@cache
def _unusable(index: int) -> str | None:
    """Why no kernel runs on a device: found out once, before any CUDA graph is captured."""
    properties = torch.cuda.get_device_properties(index)
    if properties.major < 9:
        return f"compute capability {properties.major}.{properties.minor}: thread block clusters begin at 9.0"
    try:
        _kernel(index, 1, BLOCKS[0], False, 1, 1)
    except Exception as error:  # a missing package or library, an older NVRTC or driver: Triton's kernels run there
        reason = f"cuda-core cannot compile for {properties.name}: {type(error).__name__}: {error}"
        logger.warning("top-p runs in Triton, which is slower: %s", reason)
        return reason
    return None


def compiled(arch: str, heads: int, block: Block, by_count: bool = False, run: int = 1, align: int = 1) -> Any:
    """The kernel's machine code (`cuda.core.ObjectCode`) for an architecture such as "sm_90"; needs no GPU.

    Raises:
        Exception: what cuda-core raises where NVRTC refuses, with its log.
    """
    return nvrtc.compiled(SOURCE, arch, _constants(heads, block, by_count, run, align))


def _constants(heads: int, block: Block, by_count: bool, run: int, align: int) -> dict[str, int]:
    return dict(
        GROUP=heads, THREADS=block.threads, QUADS=block.quads, BINS=BINS, BY_COUNT=int(by_count), RUN=run, ALIGN=align
    )


@cache
def _kernel(index: int, heads: int, block: Block, by_count: bool, run: int, align: int) -> Callable[..., None]:
    constants = tuple(_constants(heads, block, by_count, run, align).items())
    return nvrtc.kernel(index, SOURCE, "select_clusters", block.threads, constants)


def _kernel_for(
    device: torch.device, heads: int, block: Block, by_count: bool, run: int, align: int
) -> Callable[..., None]:
    return _kernel(nvrtc.index_of(device), heads, block, by_count, run if align > 1 else 1, align)


def warm_up(device: torch.device, heads: int, cells: int, run: int, align: int) -> None:
    """Compile what selections among up to `cells` clusters will need, where the kernel runs at all."""
    for block in BLOCKS:
        if refusal(device, heads, block.cells, run=run, align=align) is None:
            _kernel_for(device, heads, block, False, run, align)
        if block.cells >= cells:
            break


def select(
    logits: torch.Tensor,
    sizes: torch.Tensor,
    starts: torch.Tensor,
    cells: torch.Tensor,
    p: torch.Tensor,
    *,
    group: str = "union",
    by_count: bool = False,
    run: int = 1,
    align: int = 1,
    out: Selection | None = None,
) -> Selection:
    """`reference.select` on the device: a fixed grid, counts and p read from tensors, no synchronisation.

    Args:
        logits: as in the reference, contiguous float32 on a CUDA device.
        sizes, starts, cells: as in the reference, contiguous int32.
        p: [batch, 2] float32.
        group, by_count, run, align: as in the reference; `group` is "union".
        out: buffers to use; needed under CUDA graphs, made otherwise. Before one is captured, `warm_up` or call once.

    Returns:
        The selection (`out` where given).

    Raises:
        ValueError: as in the reference; what `refusal` says; tensors of other types or not contiguous.
    """
    check(logits, sizes, starts, cells, p, group)
    batch, kv_heads, heads, width = logits.shape
    reason = refusal(logits.device, heads, width, group=group, run=run, align=align)
    if reason:
        raise ValueError(f"{reason}; use triton_impl.select")
    check_memory(logits, sizes, starts, cells, p, torch.float32)
    out = out or Selection.empty(batch, kv_heads, width, logits.device, run, align)
    check_buffers(out, run, align)
    if batch == 0:
        return out
    kernel = _kernel_for(logits.device, heads, block_for(width), by_count, run, align)
    tensors = (logits, sizes, starts, cells, p, out.counts, out.exact, out.prefix, out.shift, out.approx)
    kernel((heads, batch * kv_heads), *(x.data_ptr() for x in tensors), ctypes.c_int32(kv_heads), ctypes.c_int32(width))
    return out
