"""What kernels have in common: what a device has for a program, and how tensors lie in memory."""

from __future__ import annotations

from functools import cache

import torch


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have on a GPU."""
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a device of a tensor in host memory; the host waits for nothing that the device does."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def check_contiguous(tensors: dict[str, torch.Tensor]) -> None:
    """Look at the strides of tensors whose addresses a kernel computes.

    Raises:
        ValueError: a tensor is not contiguous.
    """
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}: expected contiguous"
            )
