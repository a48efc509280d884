"""What kernels in Gluon, which run on Hopper alone, have in common."""

from __future__ import annotations

import torch
import triton
from packaging.version import Version
from triton.experimental.gluon import language as gl

TILES = gl.NVMMASharedLayout(128, 16, rank=2)
"""How tiles of 16-bit numbers lie in shared memory, as TMA writes them and the tensor cores read them."""

thread_barrier = gl.barrier if Version(triton.__version__) >= Version("3.7") else gl.thread_barrier
"""Waits until all threads of a partition have come here. Triton 3.6 has the longer name, 3.8 the shorter one."""


def is_hopper(device: torch.device) -> bool:
    """Whether a device is a GPU of this generation."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
