"""Spans of tiles in CUDA, in two launches: thresholds and sums over heads (`heads.cu`), then the spans (`cut.cu`).

What they take is mostly the time to issue their instructions, and what Triton makes of the same takes nearly twice as
long. Where they cannot run (`refusal`), `triton_impl.cut_spans` does the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.span_index.types import BLOCKS, SpanRule, Spans, SpanWorkspace, check, check_workspace

HEADS = "span_index/heads.cu"
CUT = "span_index/cut.cu"

BITS = 9
"""Threads of a block that finds thresholds, and the bins in which it counts, are so many powers of two, or as many as a
tile has entries."""

MAX_SPANS = 64
"""Spans of a tile, at most."""


def refusal(device: torch.device, tiles: torch.Tensor, rule: SpanRule) -> str | None:
    """Why the kernels cannot cut these, or None where they can."""
    if device.type != "cuda":
        return f"device {device}: they are written in CUDA"
    if tiles.dtype != torch.float32 or tiles.stride(3) != 1:
        return f"tiles are {tiles.dtype} with strides {tiles.stride()}: expected float32, the last dimension contiguous"
    if rule.spans > MAX_SPANS:
        return f"spans={rule.spans}: expected at most {MAX_SPANS}"
    return _unusable(nvrtc.index_of(device), tiles.shape[-1])


@cache
def _unusable(index: int, block: int) -> str | None:
    """Why no kernel runs on a device: found out once a size, before any CUDA graph is captured."""
    if block not in BLOCKS:
        return f"tiles of {block} tokens: expected {', '.join(map(str, BLOCKS))}"
    both = [lambda: _kernel(index, HEADS, block), lambda: _kernel(index, CUT, block)]
    return nvrtc.failure(index, "spans are cut", *both)


def constants(source: str, block: int) -> dict[str, int]:
    """Macros of HEADS or CUT."""
    if source == HEADS:
        bits = min(BITS, 2 * (block.bit_length() - 1))
        return dict(BLOCK=block, THREADS=1 << bits, BITS=bits, BFLOAT16=0)
    return dict(BLOCK=block, THREADS=4 * block, SPANS=MAX_SPANS, BFLOAT16=0)


@cache
def _kernel(index: int, source: str, block: int) -> Callable[..., None]:
    macros = constants(source, block)
    name = "heads" if source == HEADS else "cut"
    return nvrtc.kernel(index, source, name, macros["THREADS"], tuple(macros.items()))


def cut_spans(
    tiles: torch.Tensor,
    rows: torch.Tensor,
    rule: SpanRule,
    *,
    out: Spans | None = None,
    workspace: SpanWorkspace | None = None,
) -> Spans:
    """`reference.cut_spans` on the device, without synchronisation (Ltri-LLM, sections 3.2 and 3.3.2, Appendix E).

    Args:
        tiles: as in the reference, float32; the last dimension is contiguous.
        rows: as in the reference; values out of range cannot be refused here, and count as 0 or `block`.
        rule: as in the reference; of other numbers nothing is compiled anew.
        out, workspace: buffers to use; needed under CUDA graphs, made otherwise. Scores are not written.

    Returns:
        As the reference (`out` where given). Arithmetic is in float32: spans whose scores are within its rounding of
        each other may be chosen differently.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not fit; what `refusal` says.
    """
    check(tiles, rows, rule, out)
    if reason := refusal(tiles.device, tiles, rule):
        raise ValueError(f"{reason}; use triton_impl.cut_spans")
    batch, heads, block, _ = tiles.shape
    found = Spans.empty(batch, rule.spans, tiles.device) if out is None else out
    buffers = SpanWorkspace.empty(batch, heads, block, tiles.device) if workspace is None else workspace
    check_workspace(buffers, tiles)
    if batch == 0:
        return found
    index, sums = nvrtc.index_of(tiles.device), (buffers.thresholds.data_ptr(), buffers.summed.data_ptr())
    threads = constants(HEADS, block)["THREADS"]
    _kernel(index, HEADS, block)(
        (heads + block * block // threads, batch), tiles.data_ptr(), rows.data_ptr(), *sums,
        ctypes.c_float(rule.theta), ctypes.c_int32(heads), *map(ctypes.c_int64, tiles.stride()[:3]),
        early=True,
    )  # fmt: skip
    flags = ("row" in rule.ratio, "col" in rule.ratio, rule.boxes)
    _kernel(index, CUT, block)(
        (batch,), *sums, rows.data_ptr(), found.bounds.data_ptr(), found.counts.data_ptr(), ctypes.c_float(rule.phi),
        ctypes.c_float(rule.rate), *map(ctypes.c_int32, (heads, rule.spans, rule.most, *flags)),
        early=True,
    )  # fmt: skip
    return found
