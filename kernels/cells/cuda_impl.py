"""Decoding over cells in CUDA: keys are rotated in the registers that the matrix product takes them from (`decode.cu`).

One launch a layer: the blocks of a head, or of a request whose heads share their scores, wait for each other before
they merge what they found and count the query. So all blocks must run at once, which a cooperative launch makes sure
of. Where the kernel cannot run (`refusal`), `decode_impl` does the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.cells.lists import Rotation, rows_of
from sglang_ext.kernels.cells.types import (
    COLUMNS,
    LOG2_E,
    MAX_SPLITS,
    Cells,
    CountedScores,
    DecodeWorkspace,
    NewTokens,
    check_decode,
    check_dtypes,
)

SOURCE = "cells/decode.cu"
DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
MAX_GROUP = 8
"""Queries of a matrix product."""

WARPS = 2

KEPT = 5 << 20
"""Bytes of logits that stay in the L2 cache until they are read again: of an H200's 50 MB. With more of them marked to
stay, fewer did: 32 rows with a window of 16,384 took 0.6346 ms with all of them marked; in another run 0.631 with 10
MB, 0.6295 with 5."""

BUSY, LAUNCH = 0.8, 16 * 16384
"""Share of the multiprocessors' places that a launch is to fill, where it has at least so many columns of all its rows.

On an H200 64 rows with a window of 16,384 took 1.311 ms at once, which fills 65% of the places, and 1.258 as two
launches of 32; a launch more than that takes costs 6 us."""


@dataclass(frozen=True)
class CudaDecodeTuning:
    """Chunks of 16 columns that a warp has on their way, and blocks of two warps a multiprocessor."""

    stages: int = 2
    blocks: int = 6


TUNING = CudaDecodeTuning()


def refusal(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, group: int, rotation: Rotation
) -> str | None:
    """Why the kernel cannot attend from `group` query heads a key-value head, or None where it can."""
    if device.type != "cuda":
        return f"device {device}: it is written in CUDA"
    if dtype not in DTYPES:
        return f"{dtype}: 16 bits only"
    if head_dim not in DIMS or value_dim != head_dim:
        return f"heads of {head_dim} and {value_dim}: {', '.join(map(str, DIMS))}, keys as values"
    if group > MAX_GROUP:
        return f"groups of {group} heads: at most {MAX_GROUP}"
    if rotation.rope.rotary_dim != head_dim or not rotation.rope.neox:
        rope = rotation.rope
        return f"{rope.rotary_dim} of {head_dim} components rotated, neox={rope.neox}: all, in NeoX pairs"
    return _unusable(nvrtc.index_of(device))


def rows_at_once(
    batch: int, kv_heads: int, lanes: int, shares: int, multiprocessors: int, tuning: CudaDecodeTuning = TUNING
) -> int:
    """Rows of a launch, so that blocks that wait for each other run at once; 0 where those of one row do not.

    `lanes` is `kv_heads` where no scores are kept.
    """
    if not _waits(kv_heads, lanes, shares):
        return batch
    most = multiprocessors * tuning.blocks // (kv_heads * shares)
    return most and -(-batch // -(-batch // most))


def _waits(kv_heads: int, lanes: int, shares: int) -> bool:
    """Whether blocks wait for each other."""
    return shares > 1 or lanes < kv_heads


def _memory(dim: int, tuning: CudaDecodeTuning) -> int:
    """Bytes of shared memory that a block takes, 1 KiB of CUDA's own among them."""
    return WARPS * tuning.stages * 2 * COLUMNS * dim * 2 + 1024


@cache
def _unusable(index: int) -> str | None:
    """Why no kernel runs on a device: found out once, before any CUDA graph is captured."""
    properties = torch.cuda.get_device_properties(index)
    if properties.major < 9:
        return f"compute capability {properties.major}.{properties.minor}: it was measured on 9.0"
    room, needed = properties.shared_memory_per_multiprocessor, TUNING.blocks * _memory(max(DIMS), TUNING)
    if room < needed:
        return f"{room} bytes of shared memory a multiprocessor: {TUNING.blocks} blocks take {needed}"
    return nvrtc.failure(index, "cascades decode", lambda: _kernel(index, Variant(128, 4, 8, 8)))


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for.

    Attributes:
        dim: components of keys and values.
        group: query heads a key-value head.
        kv_heads, lanes: key-value heads, and sets of tokens.
        scores: whether scores are kept, `maximum` over the heads of one instead of their mean.
        bfloat16: or float16.
        tuning: chunks and blocks.
    """

    dim: int
    group: int
    kv_heads: int
    lanes: int
    scores: bool = True
    maximum: bool = False
    bfloat16: bool = True
    tuning: CudaDecodeTuning = TUNING

    def constants(self) -> dict[str, int]:
        return dict(
            DIM=self.dim, GROUP=self.group, KV_HEADS=self.kv_heads, LANES=self.lanes, SCORES=int(self.scores),
            MAXIMUM=int(self.maximum), STAGES=self.tuning.stages, BLOCKS=self.tuning.blocks,
            BFLOAT16=int(self.bfloat16), MAX_SPLITS=MAX_SPLITS,
        )  # fmt: skip


def compiled(arch: str, variant: Variant) -> Any:
    """The kernel's machine code (`cuda.core.ObjectCode`) for an architecture such as `nvrtc.HOPPER`; needs no GPU.

    Raises:
        Exception: what cuda-core raises where NVRTC refuses, with its log.
    """
    return nvrtc.compiled(SOURCE, arch, variant.constants())


@cache
def _kernel(index: int, variant: Variant) -> Callable[..., None]:
    return nvrtc.kernel(index, SOURCE, "decode_cells", 32 * WARPS, tuple(variant.constants().items()))


def splits(batch: int, kv_heads: int, entries: int, multiprocessors: int, tuning: CudaDecodeTuning = TUNING) -> int:
    """Into how many shares the columns of a request are cut: as many as run at once, none below two chunks a warp.

    Where the whole batch would leave places empty, as many as run at once of the largest part of it that does not.
    """
    places, most = multiprocessors * tuning.blocks, max(1, min(MAX_SPLITS, entries // (2 * WARPS * COLUMNS)))
    best, busiest = 1, 0.0
    for launches in range(1, max(1, batch * entries // LAUNCH) + 1):
        rows = -(-batch // launches)
        shares = max(1, min(places // (rows * kv_heads), most))
        blocks = rows * kv_heads * shares
        busy = blocks / (-(-blocks // places) * places)
        if busy > busiest:
            best, busiest = shares, busy
        if busy >= BUSY:
            break
    return best


def decode(
    tokens: NewTokens,
    cells: Cells,
    rows: torch.Tensor,
    seen: torch.Tensor,
    rotation: Rotation,
    scale: float,
    *,
    scores: CountedScores | None = None,
    out: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
    tuning: CudaDecodeTuning = TUNING,
) -> torch.Tensor:
    """`reference.decode` on the device, without synchronisation.

    Args:
        out: [batch, heads, value_dim] contiguous, to write to; made here when None.
        workspace: made here when None.
        tuning: chunks and blocks.

    Raises:
        ValueError: as `decode_impl.decode`; what `refusal` says; tokens or slots that do not begin at multiples of 16
            bytes; more blocks that wait for each other than run at once.
    """
    check_decode(tokens, cells, rows, seen)
    check_dtypes(tokens, cells)
    query, new_keys, new_values = tokens.query, tokens.keys, tokens.values
    keys, values, slot, scored = cells.keys, cells.values, cells.slot, scores is not None
    batch, heads, dim = query.shape
    kv_heads, (lanes, width), device = keys.shape[1], slot.shape[1:], query.device
    reason = refusal(device, keys.dtype, dim, values.shape[2], heads // kv_heads, rotation)
    if reason:
        raise ValueError(f"{reason}; use decode_impl.decode")
    aligned = {"query": query, "keys": keys, "values": values, "new keys": new_keys, "new values": new_values}
    for name, tensor in aligned.items():
        if tensor.data_ptr() % 16 or tensor.stride(0) % 8:
            raise ValueError(f"{name} with rows of {tensor.stride(0)} elements: expected multiples of 16 bytes")
    out = query.new_empty(batch, heads, dim) if out is None else out
    if out.shape != (batch, heads, dim) or out.dtype != query.dtype or not out.is_contiguous():
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}: expected contiguous {query.dtype} {query.shape}")
    if scores is not None and scores.score.dtype != torch.float32:
        raise ValueError(f"score is {scores.score.dtype}: expected float32")
    strides = rows_of(query, new_keys, new_values, keys, values)
    index = nvrtc.index_of(device)
    processors = nvrtc.multiprocessors(index)
    if workspace is None:
        shares = splits(batch, kv_heads, width, processors, tuning)
        workspace = DecodeWorkspace.empty(batch, heads, kv_heads, dim, width, shares, device, scored)
    shares = workspace.check(batch, heads, dim, width, scored)
    if workspace.arrived.shape != (batch, kv_heads, 2):
        raise ValueError(f"a workspace for {tuple(workspace.arrived.shape)}: expected {(batch, kv_heads, 2)}")
    for name, tensor in (("logits", workspace.logits), ("tops", workspace.tops)):
        if scored and (tensor.data_ptr() % 16 or not tensor.is_contiguous()):
            raise ValueError(
                f"workspace.{name} of strides {tensor.stride()}: expected contiguous, at 16 bytes' multiple"
            )
    if shares > MAX_SPLITS:
        raise ValueError(f"a workspace of {shares} shares: expected at most {MAX_SPLITS}")
    sets = lanes if scored else kv_heads  # of blocks, by what they have to agree on
    each = rows_at_once(batch, kv_heads, sets, shares, processors, tuning)
    if not each:
        raise ValueError(f"{shares} shares of a row do not run at once: take fewer, or decode_impl.decode")
    counted = workspace.unscored(seen) if scores is None else scores
    maximum, bfloat16 = counted.reduction == "max", query.dtype == torch.bfloat16
    variant = Variant(dim, heads // kv_heads, kv_heads, lanes, scored, maximum, bfloat16, tuning)
    # int32 already in an engine
    rows, seen, skip, fresh, entries = (
        x.to(torch.int32) for x in (rows, seen, counted.skip, counted.fresh, counted.entries)
    )
    staying = min(1.0, KEPT / (2 * each * heads * max(1, width)))
    launch, waits = _kernel(index, variant), _waits(kv_heads, sets, shares)
    for first in range(0, batch, each):
        of = slice(first, first + each)
        row_of = rows[of]
        # What a launch leaves for itself lies where the one before left its own: in the L2 cache.
        own = slice(0, row_of.shape[0])
        tensors = (
            query[of], new_keys[of], new_values[of], keys, values, slot, row_of, seen[of], skip[of], fresh[of],
            entries[of], rotation.phase, counted.score, workspace.parts[own], workspace.part_lse[own],
            workspace.logits[own], workspace.tops[own], workspace.arrived[own], out[of],
        )  # fmt: skip
        launch(
            (shares, kv_heads, row_of.shape[0]), *(x.data_ptr() for x in tensors),
            *(ctypes.c_int64(stride) for stride in strides), ctypes.c_int32(width), ctypes.c_float(scale * LOG2_E),
            ctypes.c_float(counted.beta), ctypes.c_float(staying), cooperative=waits,
        )  # fmt: skip
    return out
