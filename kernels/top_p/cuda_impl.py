"""Top-p in CUDA: a search is as long as its chain of dependent steps, and those are short there (`select.cu`).

Where it cannot run (`refusal`), `triton_impl.select` does the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.top_p.checks import check, check_buffers, check_expansion, check_memory
from sglang_ext.kernels.top_p.types import (
    UNION,
    WITHOUT_GAPS,
    Expansion,
    Numbering,
    SearchedClusters,
    Selection,
    SetRule,
)

SOURCE = "top_p/select.cu"

MAX_GROUP = 8
"""Blocks of a thread block cluster that every GPU with clusters takes."""

BINS = 1024

RESIDENT = 1024
"""Threads that are to fit a multiprocessor at once: 64 registers each."""

ROOMY = 768
"""The same where a thread of a block of 256 holds more clusters than 64 registers have room for: with 80 nothing spills
up to 32 clusters a thread and groups of four heads (nvcc 13.0, sm_90); with 40, or a head by itself, some does."""


@dataclass(frozen=True)
class SearchBlock:
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

    @property
    def resident(self) -> int:
        """Threads that are to fit a multiprocessor at once."""
        return ROOMY if self.threads == 256 and self.quads > 4 else RESIDENT


# Few, since each is compiled. Where there are more than half as many blocks as multiprocessors, fewer threads are
# better: 8,192 clusters of 8 requests with 8 key-value heads, 19.6 us beside 23.8 on an H200. A row that 4 (or 8)
# groups of four clusters a thread have room for is searched by code for so many (`select.cu`). CUDA graphs have room
# for 10,240 clusters where tokens are 131,072.
OF_MANY = (
    SearchBlock(256, 1),
    SearchBlock(256, 2),
    SearchBlock(256, 4),
    SearchBlock(256, 8),
    SearchBlock(256, 10),
    SearchBlock(512, 8),
    SearchBlock(1024, 8),
)
OF_FEW = (
    SearchBlock(256, 1),
    SearchBlock(256, 2),
    SearchBlock(256, 4),
    SearchBlock(512, 4),
    SearchBlock(1024, 4),
    SearchBlock(1024, 8),
)
BLOCKS = tuple(dict.fromkeys(OF_MANY + OF_FEW))
MAX_CELLS = OF_MANY[-1].cells


def block_for(width: int, blocks: int, multiprocessors: int) -> SearchBlock:
    """The smallest that holds `width` clusters, at most MAX_CELLS.

    Args:
        width: clusters.
        blocks: that are launched.
        multiprocessors: that they run on.
    """
    return next(block for block in (OF_MANY if 2 * blocks > multiprocessors else OF_FEW) if block.cells >= width)


def up_to(cells: int) -> list[SearchBlock]:
    """Blocks that selections among up to `cells` clusters come in."""
    found = {
        block
        for blocks in (OF_MANY, OF_FEW)
        for smaller, block in zip((None, *blocks), blocks, strict=False)
        if smaller is None or smaller.cells < cells
    }
    return [block for block in BLOCKS if block in found]


def refusal(
    device: torch.device, heads: int, width: int, *, group: str = "union", numbering: Numbering = WITHOUT_GAPS
) -> str | None:
    """Why the kernel cannot select among `width` clusters for groups of `heads`, or None where it can."""
    if device.type != "cuda":
        return f"device {device}: it is written in CUDA"
    if group != "union":
        return f"group={group!r}: it searches for each head"
    if heads > MAX_GROUP:
        return f"groups of {heads} heads: at most {MAX_GROUP}"
    if numbering.align > 1 and not 4 <= numbering.run <= 1024:
        return f"runs of {numbering.run} clusters: 4 to 1,024"
    if width > MAX_CELLS:
        return f"{width} clusters of a request: at most {MAX_CELLS}"
    return _unusable(nvrtc.index_of(device))


@cache
def _unusable(index: int) -> str | None:
    """Why no kernel runs on a device: found out once, before any CUDA graph is captured."""
    properties = torch.cuda.get_device_properties(index)
    if properties.major < 9:
        return f"compute capability {properties.major}.{properties.minor}: thread block clusters begin at 9.0"
    return nvrtc.failure(index, "top-p runs", lambda: _kernel(index, 1, BLOCKS[0], False, 1, 1, 0))


def compiled(
    arch: str, heads: int, block: SearchBlock, by_count: bool = False, run: int = 1, align: int = 1, width: int = 0
) -> Any:
    """The kernel's machine code (`cuda.core.ObjectCode`) for an architecture such as `nvrtc.HOPPER`; needs no GPU.

    Raises:
        Exception: what cuda-core raises where NVRTC refuses, with its log.
    """
    return nvrtc.compiled(SOURCE, arch, constants(heads, block, by_count, run, align, width))


def constants(heads: int, block: SearchBlock, by_count: bool, run: int, align: int, width: int) -> dict[str, int]:
    """Macros of `select.cu`, logits given."""
    return dict(
        GROUP=heads, THREADS=block.threads, QUADS=block.quads, BINS=BINS, BY_COUNT=int(by_count), RUN=run, ALIGN=align,
        WIDTH=width, RESIDENT=block.resident, DIM=0,
    )  # fmt: skip


@cache
def _kernel(
    index: int, heads: int, block: SearchBlock, by_count: bool, run: int, align: int, width: int
) -> Callable[..., None]:
    macros = tuple(constants(heads, block, by_count, run, align, width).items())
    return nvrtc.kernel(index, SOURCE, "select_clusters", block.threads, macros)


def _kernel_for(
    device: torch.device, heads: int, block: SearchBlock, by_count: bool, numbering: Numbering, width: int
) -> Callable[..., None]:
    run = numbering.run if numbering.align > 1 else 1
    return _kernel(nvrtc.index_of(device), heads, block, by_count, run, numbering.align, width)


def warm_up(device: torch.device, heads: int, cells: int, numbering: Numbering, width: int = 0) -> None:
    """Compile what selections among up to `cells` clusters will need, where the kernel runs at all.

    Args:
        device, heads, numbering: of the selections.
        cells: the most clusters.
        width: of the tiles of an `Expansion`; 0: none is asked for.
    """
    blocks = [block for block in up_to(cells) if refusal(device, heads, block.cells, numbering=numbering) is None]
    if not blocks:
        return
    run = numbering.run if numbering.align > 1 else 1
    macros = [constants(heads, block, False, run, numbering.align, width) for block in blocks]
    nvrtc.compile_ahead(nvrtc.index_of(device), [(SOURCE, each) for each in macros])
    for block in blocks:
        _kernel_for(device, heads, block, False, numbering, width)


def select(
    logits: torch.Tensor,
    clusters: SearchedClusters,
    p: torch.Tensor,
    *,
    rule: SetRule = UNION,
    numbering: Numbering = WITHOUT_GAPS,
    out: Selection | None = None,
    expansion: Expansion | None = None,
) -> Selection:
    """`reference.select` on the device: a fixed grid, counts and p read from tensors, no synchronisation.

    Args:
        logits: as in the reference, contiguous float32 on a CUDA device.
        clusters: as in the reference, contiguous.
        p: [batch, 2] float32.
        rule, numbering: as in the reference; `rule.group` is "union".
        out: buffers to use; needed under CUDA graphs, made otherwise. Before one is captured, `warm_up` or call once.
        expansion: what is written out with it; None: nothing.

    Returns:
        The selection (`out` where given), `expanded` if an expansion was.

    Raises:
        ValueError: as in the reference; what `refusal` says; tensors of other types or not contiguous.
    """
    check(logits, clusters, p, rule)
    batch, kv_heads, heads, width = logits.shape
    reason = refusal(logits.device, heads, width, group=rule.group, numbering=numbering)
    if reason:
        raise ValueError(f"{reason}; use triton_impl.select")
    check_memory(logits, clusters, p, torch.float32)
    out = out or Selection.empty(batch, kv_heads, width, logits.device, numbering)
    check_buffers(out, numbering)
    check_expansion(expansion, batch, kv_heads, width, numbering)
    if batch:
        index, wide = nvrtc.index_of(logits.device), 0 if expansion is None else expansion.width
        block = block_for(width, heads * batch * kv_heads, nvrtc.multiprocessors(index))
        kernel = _kernel_for(logits.device, heads, block, rule.by_count, numbering, wide)
        nothing = out.counts  # never looked at
        written = (nothing,) * 4
        most: tuple[int, int, int] = (0, 0, 0)
        if expansion is not None:
            written = (expansion.members, expansion.tiles, expansion.slots, expansion.summaries)
            most = (expansion.members.shape[1], expansion.slots.shape[1], expansion.tiles.shape[1])
        tensors = (
            logits, clusters.sizes, clusters.starts, clusters.cells, p, out.counts, out.exact, out.prefix, out.shift,
            out.approx, *written,
        )  # fmt: skip
        kernel(
            (heads, batch * kv_heads), *(x.data_ptr() for x in tensors), ctypes.c_int64(most[0]),
            ctypes.c_int64(most[1]), ctypes.c_int32(most[2]), ctypes.c_int32(kv_heads), ctypes.c_int32(width),
        )  # fmt: skip
    return out.said_expanded(expansion is not None)
