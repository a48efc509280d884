"""What a device has for a program of a kernel."""

from __future__ import annotations

from functools import cache

import torch


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have on a GPU."""
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]
