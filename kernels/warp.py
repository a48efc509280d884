"""What `warp.cuh` can do: attention of a warp, 16 columns and up to eight queries of a key-value head at a time."""

from __future__ import annotations

import torch

DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
MAX_GROUP = 8
"""Queries of a matrix product."""


def refusal(device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, group: int) -> str | None:
    """Why it cannot attend from `group` query heads a key-value head, or None where it can."""
    if device.type != "cuda":
        return f"device {device}: it is written in CUDA"
    if dtype not in DTYPES:
        return f"{dtype}: 16 bits only"
    if head_dim not in DIMS or value_dim != head_dim:
        return f"heads of {head_dim} and {value_dim}: {', '.join(map(str, DIMS))}, keys as values"
    if group > MAX_GROUP:
        return f"groups of {group} heads: at most {MAX_GROUP}"
    return None
