"""Decoding over cells in CUDA: keys are turned in the registers that the matrix product takes them from (`decode.cu`).

Where it cannot run (`refusal`), `decode_impl` does the same. The shares are merged, and the query is counted in the
scores, by the same kernel in both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.cells.lists import Turn

SOURCE = "cells/decode.cu"
DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
MAX_GROUP = 8
"""Queries of a matrix product."""

WARPS, COLUMNS = 2, 16


@dataclass(frozen=True)
class Tuning:
    """Chunks of 16 columns that a warp has on their way, and blocks of two warps a multiprocessor."""

    stages: int = 2
    blocks: int = 6


TUNING = Tuning()
MAX_SPLITS = 128


def refusal(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, group: int, turn: Turn
) -> str | None:
    """Why the kernel cannot attend from `group` query heads a key-value head, or None where it can."""
    if device.type != "cuda":
        return f"device {device}: it is written in CUDA"
    if dtype not in DTYPES:
        return f"{dtype}: 16 bits only"
    if head_dim not in DIMS or value_dim != head_dim:
        return f"heads of {head_dim} and {value_dim}: {', '.join(map(str, DIMS))}, keys as values"
    if turn.rope.rotary_dim != head_dim or not turn.rope.neox:
        return f"{turn.rope.rotary_dim} of {head_dim} components turned, neox={turn.rope.neox}: all, in NeoX pairs"
    if group > MAX_GROUP:
        return f"groups of {group} heads: at most {MAX_GROUP}"
    return _unusable(nvrtc.index_of(device))


@cache
def _unusable(index: int) -> str | None:
    """Why no kernel runs on a device: found out once, before any CUDA graph is captured."""
    properties = torch.cuda.get_device_properties(index)
    if properties.major < 9:
        return f"compute capability {properties.major}.{properties.minor}: it was measured on 9.0"
    return nvrtc.failure(index, "cascades decode", lambda: _kernel(index, 128, 4, 8, 8, True, True, TUNING))


def compiled(
    arch: str, dim: int, group: int, kv_heads: int, lanes: int, scores: bool, bfloat16: bool, tuning: Tuning = TUNING
) -> object:
    """The kernel's machine code (`cuda.core.ObjectCode`) for an architecture such as "sm_90"; needs no GPU."""
    return nvrtc.compiled(SOURCE, arch, _constants(dim, group, kv_heads, lanes, scores, bfloat16, tuning))


def _constants(
    dim: int, group: int, kv_heads: int, lanes: int, scores: bool, bfloat16: bool, tuning: Tuning
) -> dict[str, int]:
    return dict(
        DIM=dim, GROUP=group, KV_HEADS=kv_heads, LANES=lanes, SCORES=int(scores), STAGES=tuning.stages,
        BLOCKS=tuning.blocks, BFLOAT16=int(bfloat16),
    )  # fmt: skip


@cache
def _kernel(
    index: int, dim: int, group: int, kv_heads: int, lanes: int, scores: bool, bfloat16: bool, tuning: Tuning
) -> Callable[..., None]:
    constants = tuple(_constants(dim, group, kv_heads, lanes, scores, bfloat16, tuning).items())
    return nvrtc.kernel(index, SOURCE, "decode_share", 32 * WARPS, constants)


def splits(batch: int, kv_heads: int, entries: int, multiprocessors: int, tuning: Tuning = TUNING) -> int:
    """Into how many shares the columns of a request are cut: as many as run at once, none below two chunks a warp."""
    wanted = multiprocessors * tuning.blocks // (batch * kv_heads)
    return max(1, min(wanted, MAX_SPLITS, entries // (2 * WARPS * COLUMNS)))


def share(
    query: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot: torch.Tensor,
    rows: torch.Tensor,
    seen: torch.Tensor,
    turn: Turn,
    scale: float,
    skip: torch.Tensor | None,
    fresh: torch.Tensor | None,
    parts: torch.Tensor,
    part_lse: torch.Tensor,
    logits: torch.Tensor,
    tuning: Tuning = TUNING,
) -> None:
    """The first of `decode_impl.decode`'s two launches; scores are kept where `skip` and `fresh` are given.

    Args:
        query, new_keys, new_values, keys, values, slot, rows, seen, turn, skip, fresh: as for `reference.decode`, which
            has checked them; tokens and slots of the caches begin at multiples of 16 bytes.
        scale: factor of the logits, to base 2.
        parts, part_lse, logits: of `decode_impl.Workspace`.

    Raises:
        ValueError: rows at odd addresses.
    """
    kv_heads, dim = keys.shape[1:]
    for name, tensor in (("keys", keys), ("values", values), ("new keys", new_keys), ("new values", new_values)):
        if tensor.data_ptr() % 16 or tensor.stride(0) % 8:
            raise ValueError(f"{name} with rows of {tensor.stride(0)} elements: expected multiples of 16 bytes")
    unused = seen
    numbers = [
        (unused if each is None else each).to(torch.int32) for each in (rows, seen, skip, fresh)
    ]  # int32 already in an engine
    launch = _kernel(
        nvrtc.index_of(query.device), dim, query.shape[1] // kv_heads, kv_heads, slot.shape[1], skip is not None,
        query.dtype == torch.bfloat16, tuning,
    )  # fmt: skip
    launch(
        (part_lse.shape[2], kv_heads, query.shape[0]),
        *(x.data_ptr() for x in (query, new_keys, new_values, keys, values, slot, *numbers, turn.phase)),
        *(x.data_ptr() for x in (parts, part_lse, logits)),
        *(ctypes.c_int64(x.stride(0)) for x in (query, new_keys, new_values, keys, values)),
        ctypes.c_int32(slot.shape[2]), ctypes.c_float(scale),
    )  # fmt: skip
