"""Spans of Ltri-LLM in kernels: how they are cut, of the heads of all ranks, and the vectors that stand for them."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from sglang_ext.attention.ltri_index import LayerIndex, index_sizes, is_folded
from sglang_ext.attention.ltri_state import LayerStore
from sglang_ext.kernels.block_votes import QuerySpans
from sglang_ext.kernels.packed_vectors import pack, rotate
from sglang_ext.kernels.span_index import HeadSums, SpanRule, Spans, cut_spans, cut_summed, pick, sum_heads
from sglang_ext.policies.ltri import TensorRanks
from sglang_ext.policies.ltri_options import Ltri


def padded(states: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows, dim], contiguous: states and zeros behind them."""
    return pad(states, (0, 0, 0, rows - states.shape[0])).contiguous()


def cut(tiles: torch.Tensor, rows: torch.Tensor, rule: SpanRule, ranks: TensorRanks) -> Spans:
    """The spans of tiles of which each rank has some of the heads: the same on all ranks (`kernels.span_index`)."""
    if ranks.count == 1:
        return cut_spans(tiles, rows, rule)
    sums = sum_heads(tiles, rows, rule.theta)
    summed, levels = ranks.add_all([sums.summed, sums.levels])  # in this order, both are aligned for kernels
    return cut_summed(HeadSums(levels, summed), rows, rule)


def leaving_spans(settings: Ltri, store: LayerStore, places: torch.Tensor) -> Spans:
    """The spans of blocks that leave the window, which lie in places [blocks] int64 of a layer that votes."""
    if settings.index == "ltri":
        return store.spans_of_voters.at(places)
    bounds = torch.zeros(len(places), 1, 2, dtype=torch.int32, device=places.device)
    bounds[..., 1] = settings.block
    return Spans(bounds, torch.full_like(bounds[..., 0], index_sizes(settings)[1]))


def keep_vectors(
    settings: Ltri, index: LayerIndex, spans: Spans, given: torch.Tensor, states: torch.Tensor, at: torch.Tensor
) -> None:
    """Have the spans of blocks in a layer's index.

    Args:
        settings: of the method.
        index: of the layer; written.
        spans: of the blocks.
        given: [blocks, block], what their tokens received from all heads.
        states: [blocks * block, dim] of their tokens (`Voter.of_keys`).
        at: [blocks] int64, their numbers on the host.
    """
    chosen = pick(spans, given, index_sizes(settings)[1])
    states, counts = states.view(*given.shape, -1), spans.counts
    if index.packed is not None and index.rotation is not None:
        pack(states, chosen, at, index.rotation, out=index.packed)
    else:
        vectors, counts = span_vectors(settings, states, chosen, counts)
        index.vectors.index_copy_(0, at, vectors.to(index.vectors.dtype))
    index.counts.index_copy_(0, at, counts)


def query_spans(
    settings: Ltri, rotation: torch.Tensor | None, spans: Spans, given: torch.Tensor, states: torch.Tensor
) -> QuerySpans:
    """The spans of a chunk, as they are compared with an index.

    Args:
        settings: of the method.
        rotation: of the index (`LayerIndex.rotation`).
        spans: of the chunk's own tiles.
        given: [tiles, block], what their tokens received from all heads.
        states: [tiles, block, dim] of their tokens (`Voter.of_queries`).
    """
    most = index_sizes(settings)[1]
    if settings.index == "ltri" and settings.most_queries < most:
        most = settings.most_queries
        spans = Spans(spans.bounds, spans.counts.clamp(max=most))
    chosen = pick(spans, given, most)
    if rotation is None:
        found, counts = span_vectors(settings, states, chosen, spans.counts)
    else:
        found, counts = rotate(states, chosen, rotation), spans.counts
    vectors, counts = found.flatten(0, 1), counts.flatten()
    if missing := (settings.chunk // settings.block - len(given)) * settings.spans:  # kernels know the number
        vectors, counts = pad(vectors, (0, 0, 0, 0, 0, missing)), pad(counts, (0, missing))
    return QuerySpans(vectors.unsqueeze(0), counts.unsqueeze(0))


def token_spans(states: torch.Tensor, there: torch.Tensor) -> QuerySpans:
    """Tokens as spans of their own.

    Args:
        states: [tokens, dim] (`Voter.of_queries`).
        there: [tokens] int32, 1 for those that there are, and 0 for others.
    """
    return QuerySpans(states.view(1, -1, 1, states.shape[1]), there.unsqueeze(0))


def span_vectors(
    settings: Ltri, states: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index vectors of spans.

    Args:
        settings: of the method.
        states: [tiles, tokens of a tile, dim].
        tokens: [tiles, spans, most] int32 of `pick`.
        counts: [tiles, spans] int32.

    Returns:
        (vectors [tiles, spans, most or 1, dim], counts [tiles, spans] int32).
    """
    tiles, spans, most = tokens.shape
    at = tokens.clamp(min=0).long().view(tiles, spans * most, 1)
    found = states.gather(1, at.expand(-1, -1, states.shape[2])).view(tiles, spans, most, -1)
    if not is_folded(settings):
        return found, counts
    there = (tokens >= 0).unsqueeze(-1)
    summed = torch.where(there, found, 0).sum(2, keepdim=True, dtype=torch.promote_types(found.dtype, torch.float32))
    if settings.index != "ltri":
        summed = summed / counts.clamp(min=1).view(tiles, spans, 1, 1)
    return summed, counts.clamp(max=1)
