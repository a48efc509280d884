"""Keys and values in float8 e4m3: which type it is, and how kernels read it.

A stored number is widened before it is used, never rounded again: every float8 e4m3 is a bfloat16, a float16 and a
float32 exactly. So a key is rounded once, where it is written, rotated at the position that it is written at; whoever
sees it elsewhere rotates the widened key, or the query, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

FLOAT8 = torch.float8_e4m3fn

CAPABILITY = (8, 9)
"""Compute capability from which GPUs convert it: Triton compiles for no earlier one."""


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes (uint8) where it is in float8; any other tensor itself."""
    return tensor.view(torch.uint8) if tensor.dtype == FLOAT8 else tensor


def widened(
    key_caches: Sequence[torch.Tensor],
    value_caches: Sequence[torch.Tensor],
    slots: torch.Tensor,
    dtype: torch.dtype | None,
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], torch.Tensor]:
    """Caches that can be summed over, and where the vectors at `slots` are in them.

    Args:
        key_caches, value_caches: a layer each, [num_slots, kv_heads, dim], all of one type.
        slots: [tokens] integer.
        dtype: to which float8 is widened; a float8 is exactly one of its numbers.

    Returns:
        The arguments, where the caches are not in float8; otherwise copies [tokens, kv_heads, dim] of the vectors at
        `slots` in `dtype`, and their numbers.

    Raises:
        ValueError: float8, and no type to widen it to.
    """
    if key_caches[0].dtype != FLOAT8:
        return key_caches, value_caches, slots
    if dtype is None or dtype.itemsize == 1:
        raise ValueError(f"a KV cache of {FLOAT8} to be widened to {dtype}: expected the model's type")
    at = slots.long()
    keys, values = ([cache[at].to(dtype) for cache in caches] for caches in (key_caches, value_caches))
    return keys, values, torch.arange(slots.numel(), dtype=slots.dtype, device=slots.device)
