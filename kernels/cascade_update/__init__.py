"""A whole stride into the cascading KV cache at once: only indices and scores move, never keys or values."""

from __future__ import annotations

import torch

from sglang_ext.kernels.cascade_update.reference import stride_update, token_update
from sglang_ext.kernels.cascade_update.state import CascadeState, Rings

__all__ = ["CascadeState", "Rings", "cascade_update", "stride_update", "token_update"]


def cascade_update(
    state: CascadeState,
    rows: torch.Tensor,
    seen: torch.Tensor,
    count: torch.Tensor,
    rings: Rings,
    selection: bool = True,
) -> None:
    """`stride_update` (see there), by the Triton kernels where the state lives on a GPU."""
    if state.cell.is_cuda:
        from sglang_ext.kernels.cascade_update import triton_impl

        triton_impl.cascade_update(state, rows, seen, count, rings, selection)
    else:
        stride_update(state, rows, seen, count, rings, selection)
