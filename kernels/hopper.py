"""What kernels in Gluon, which run on Hopper alone, have in common."""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl

TILES = gl.NVMMASharedLayout(128, 16, rank=2)
"""How tiles of 16-bit numbers lie in shared memory, as TMA writes them and the tensor cores read them."""


def is_hopper(device: torch.device) -> bool:
    """Whether a device is a GPU of this generation."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
