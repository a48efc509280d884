"""Decoding steps of streams for a device: Triton's kernels on a GPU, plain PyTorch elsewhere."""

from __future__ import annotations

import torch

from sglang_ext.kernels.cells.lists import Rotation
from sglang_ext.kernels.stream_decode import reference
from sglang_ext.kernels.stream_decode.types import (
    MapState,
    NewToken,
    StepNumbers,
    StreamCaches,
    StreamSizes,
    StreamWorkspace,
)


def decode(
    tokens: NewToken,
    caches: StreamCaches,
    step: StepNumbers,
    sizes: StreamSizes,
    rotation: Rotation,
    scale: float,
    *,
    state: MapState | None = None,
    workspace: StreamWorkspace | None = None,
) -> torch.Tensor:
    """`reference.decode` (see there), by the Triton kernels where the caches lie on a GPU, which use `workspace`."""
    if not caches.keys.is_cuda:
        return reference.decode(tokens, caches, step, sizes, rotation, scale, state=state)
    from sglang_ext.kernels.stream_decode import triton_impl

    return triton_impl.decode(tokens, caches, step, sizes, rotation, scale, state=state, workspace=workspace)
