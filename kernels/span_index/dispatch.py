"""Who cuts spans on a device: kernels in CUDA or Triton on a GPU, the reference elsewhere."""

from __future__ import annotations

import torch

from sglang_ext.kernels.span_index import reference
from sglang_ext.kernels.span_index.types import HeadSums, SpanRule, Spans, SpanWorkspace, check


def cut_spans(
    tiles: torch.Tensor,
    rows: torch.Tensor,
    rule: SpanRule,
    *,
    out: Spans | None = None,
    workspace: SpanWorkspace | None = None,
) -> Spans:
    """`reference.cut_spans` (see there), by kernels where the tiles live on a GPU; `workspace` is theirs.

    Those in CUDA cut what they can (`cuda_impl.refusal`), and those in Triton the rest.
    """
    if tiles.is_cuda:
        from sglang_ext.kernels.span_index import cuda_impl, triton_impl

        check(tiles, rows, rule, out)  # `refusal` takes what fits
        chosen = triton_impl.cut_spans if cuda_impl.refusal(tiles.device, tiles, rule) else cuda_impl.cut_spans
        return chosen(tiles, rows, rule, out=out, workspace=workspace)
    return reference.cut_spans(tiles, rows, rule, out=out)


def sum_heads(tiles: torch.Tensor, rows: torch.Tensor, theta: float) -> HeadSums:
    """`reference.sum_heads` (see there), by the Triton kernels where the tiles live on a GPU."""
    chosen = reference.sum_heads
    if tiles.is_cuda:
        from sglang_ext.kernels.span_index.triton_impl import sum_heads as chosen
    return chosen(tiles, rows, theta)


def cut_summed(sums: HeadSums, rows: torch.Tensor, rule: SpanRule) -> Spans:
    """`reference.cut_summed` (see there), by the Triton kernel where the sums live on a GPU."""
    chosen = reference.cut_summed
    if sums.summed.is_cuda:
        from sglang_ext.kernels.span_index.triton_impl import cut_summed as chosen
    return chosen(sums, rows, rule)


def pick(spans: Spans, received: torch.Tensor, most: int, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`reference.pick` (see there), by the Triton kernel where the received attention lives on a GPU."""
    chosen = reference.pick
    if received.is_cuda:
        from sglang_ext.kernels.span_index.triton_impl import pick as chosen
    return chosen(spans, received, most, out=out)
