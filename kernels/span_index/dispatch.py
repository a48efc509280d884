"""Who cuts spans on a device: Triton's kernels on a GPU, the reference elsewhere."""

from __future__ import annotations

import torch

from sglang_ext.kernels.span_index import reference
from sglang_ext.kernels.span_index.types import SpanRule, Spans, SpanWorkspace


def cut_spans(
    tiles: torch.Tensor,
    rows: torch.Tensor,
    rule: SpanRule,
    *,
    out: Spans | None = None,
    workspace: SpanWorkspace | None = None,
) -> Spans:
    """`reference.cut_spans` (see there), by the Triton kernels where the tiles live on a GPU; `workspace` is theirs."""
    if tiles.is_cuda:
        from sglang_ext.kernels.span_index import triton_impl

        return triton_impl.cut_spans(tiles, rows, rule, out=out, workspace=workspace)
    return reference.cut_spans(tiles, rows, rule, out=out)


def pick(spans: Spans, received: torch.Tensor, most: int, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`reference.pick` (see there), by the Triton kernel where the received attention lives on a GPU."""
    chosen = reference.pick
    if received.is_cuda:
        from sglang_ext.kernels.span_index.triton_impl import pick as chosen
    return chosen(spans, received, most, out=out)
