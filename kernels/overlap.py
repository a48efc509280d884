"""Kernels that begin while the one before them ends (programmatic dependent launch, from Hopper on).

A kernel that is launched so waits before it reads or writes anything, until the one before is complete and its writes
are visible; then it lets the next one begin, which waits likewise. What is saved is the time between them: a step of
decoding is a chain of short kernels. Stages of one chain only: whatever is launched otherwise, before or behind, is as
ordered as ever.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def take_turn(OVERLAP: tl.constexpr):
    """First statement of a kernel that was launched with `options`."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@cache
def _overlaps(index: int) -> bool:
    return torch.cuda.get_device_capability(index)[0] >= 9


def overlaps(device: torch.device) -> bool:
    """Whether kernels may be launched so on a device."""
    return device.type == "cuda" and _overlaps(torch.cuda.current_device() if device.index is None else device.index)


def options(device: torch.device, chained: bool = True) -> dict[str, Any]:
    """For the launch of a Triton kernel whose first statement is `take_turn`.

    Args:
        device: of the kernel.
        chained: False where it waits for kernels of several streams: launched as ever.
    """
    return {"OVERLAP": True, "launch_pdl": True} if chained and overlaps(device) else {"OVERLAP": False}
