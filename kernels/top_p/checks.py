"""What is refused before a kernel that selects is launched."""

from __future__ import annotations

import torch

from sglang_ext.kernels.top_p.types import GROUPS, Expansion, Numbering, SearchedClusters, Selection, SetRule


def check(logits: torch.Tensor, clusters: SearchedClusters, p: torch.Tensor, rule: SetRule) -> None:
    """Raise ValueError where shapes or the group rule do not fit `select`."""
    if logits.dim() != 4:
        raise ValueError(f"logits of shape {tuple(logits.shape)}: expected [batch, kv_heads, group, cells]")
    batch, kv_heads, _, width = logits.shape
    for name, tensor, shape in (
        ("sizes", clusters.sizes, (batch, kv_heads, width)),
        ("starts", clusters.starts, (batch, kv_heads, width)),
        ("cells", clusters.cells, (batch,)),
        ("p", p, (batch, 2)),
    ):
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)}: expected {shape} for logits {tuple(logits.shape)}"
            )
    if rule.group not in GROUPS:
        raise ValueError(f"group={rule.group!r}: expected one of {', '.join(GROUPS)}")


def check_memory(logits: torch.Tensor, clusters: SearchedClusters, p: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError where tensors are not contiguous, or not of the types that kernels read: logits of `dtype`."""
    check_types(
        ("logits", logits, dtype),
        ("sizes", clusters.sizes, torch.int32),
        ("starts", clusters.starts, torch.int32),
        ("cells", clusters.cells, torch.int32),
        ("p", p, torch.float32),
    )


def check_types(*tensors: tuple[str, torch.Tensor, torch.dtype]) -> None:
    """Raise ValueError where one of (name, tensor, type) is not contiguous or of another type."""
    for name, tensor, expected in tensors:
        if tensor.dtype != expected or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype}, strides {tensor.stride()}: expected contiguous {expected}")


def check_buffers(out: Selection, numbering: Numbering) -> None:
    """Raise ValueError where buffers are for other numbers of tokens than asked for."""
    run, align, own = numbering.run, numbering.align, out.numbering
    if run < 1 or align < 1 or run & (run - 1):
        raise ValueError(f"run={run}, align={align}: expected a power of two, and at least 1")
    if max(align, own.align) > 1 and (own.run, own.align) != (run, align):
        raise ValueError(
            f"buffers for run={own.run}, align={own.align}: expected {run} and {align}; make them with Selection.empty"
        )


def check_expansion(expansion: Expansion | None, batch: int, kv_heads: int, cells: int, numbering: Numbering) -> None:
    """Raise ValueError where what is to be written out does not fit rows of so many clusters."""
    if expansion is None:
        return
    if numbering.align > 1:
        raise ValueError(f"an expansion with align={numbering.align}: expected 1")
    members, tiles, width = expansion.members, expansion.tiles, expansion.width
    if width < 4 or width % 4 or tiles.shape[0] != batch or tiles.shape[1] * width != cells:
        raise ValueError(
            f"tiles {tuple(tiles.shape)} of {width} clusters: expected those of {batch} requests, {cells} clusters "
            "together, and a multiple of 4"
        )
    if members.shape[0] != kv_heads or expansion.slots.shape[0] != batch * kv_heads:
        raise ValueError(
            f"members of {members.shape[0]} heads and slots of {expansion.slots.shape[0]} rows: expected {kv_heads} "
            f"and {batch * kv_heads}"
        )
    if tuple(expansion.summaries.shape) != (batch * kv_heads, cells):
        raise ValueError(f"summaries {tuple(expansion.summaries.shape)}: expected {(batch * kv_heads, cells)}")
    for name in ("members", "tiles", "slots", "summaries"):
        tensor = getattr(expansion, name)
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype}, strides {tensor.stride()}: expected contiguous int32")
