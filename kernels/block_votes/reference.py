"""Scores of memory blocks and the election among them in plain PyTorch (Ltri-LLM, sections 3.4 and 3.5)."""

from __future__ import annotations

import torch

from sglang_ext.kernels.block_votes.types import BlockIndex, QuerySpans, check, check_election, score_dtype
from sglang_ext.kernels.packed_vectors.reference import unpack

NONE = float("-inf")


def score_blocks(
    query: QuerySpans, index: BlockIndex, *, kind: str = "sum", out: torch.Tensor | None = None
) -> torch.Tensor:
    """The score of every block of each request for the spans of a chunk (section 3.4, equations 8 and 9).

    A block's score is the largest similarity of one of its spans and one of the query's spans. The similarity is the
    sum of all products of their vectors (`sum`, equation 8), the largest product (`max`), or the attention that the
    query span's vectors give to the span's among all index vectors of the request, at scale dim**-0.5 (`mass`).

    Args:
        query: spans of the chunk, on any device.
        index: of the layer's memory, on query's device.
        kind: `sum`, `max` or `mass`.
        out: [batch, max_blocks] to write to; None: a new tensor.

    Returns:
        [batch, max_blocks] float32, in the order of each stream; float64 where the query or the index is float64. -inf
        where there is no block, where the block has no spans, and everywhere where the query has none.

    Raises:
        ValueError: shapes, dtypes, devices or the similarity do not fit; a number of blocks or vectors, or an entry,
            is out of its range.
    """
    check(query, index, kind, out)
    dtype = score_dtype(query, index)
    entries, limit = index.vectors.shape[0], index.ids.shape[1]
    if out is None:
        out = torch.empty(index.ids.shape, dtype=dtype, device=query.vectors.device)
    out.fill_(NONE)
    for request, blocks in enumerate(index.blocks.tolist()):
        if not 0 <= blocks <= limit:
            raise ValueError(f"request {request} has {blocks} blocks: expected 0 to {limit}, for which ids have room")
        if blocks == 0:
            continue
        at = index.ids[request, :blocks].long()
        if bool((at < 0).any()) or bool((at >= entries).any()):
            raise ValueError(f"request {request} has entries {at.min()} to {at.max()}: expected 0 to {entries - 1}")
        counts = index.counts[at]
        asked, asked_spans = _used(query.vectors[request], query.counts[request], dtype)
        vectors = index.vectors[at] if index.scales is None else unpack(index.vectors[at], index.scales[at], dtype)
        kept, kept_spans = _used(vectors, counts, dtype)
        if asked_spans.any() and kept_spans.any():
            out[request, :blocks] = _best(asked, query.counts[request], kept, counts, kind)
    return out


def _used(vectors: torch.Tensor, counts: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors [..., most, dim] with zeros beyond the spans' numbers, and which of the spans [...] there are."""
    if bool((counts < 0).any()) or bool((counts > vectors.shape[-2]).any()):
        raise ValueError(f"spans of {counts.min()} to {counts.max()} vectors: expected 0 to {vectors.shape[-2]}")
    beyond = torch.arange(vectors.shape[-2], device=counts.device) >= counts.unsqueeze(-1)
    return vectors.to(dtype).masked_fill(beyond.unsqueeze(-1), 0), counts > 0


def _best(
    asked: torch.Tensor, asked_counts: torch.Tensor, kept: torch.Tensor, kept_counts: torch.Tensor, kind: str
) -> torch.Tensor:
    """[blocks] equation 9 of one request.

    Args:
        asked: [query_spans, most_q, dim], zeros beyond the counts.
        asked_counts: [query_spans].
        kept: [blocks, spans, most, dim], likewise.
        kept_counts: [blocks, spans].
        kind: `sum`, `max` or `mass`.
    """
    if kind == "sum":
        similar = torch.einsum("qd,bsd->qbs", asked.sum(1), kept.sum(2))
    else:
        products = torch.einsum("qnd,bsmd->qnbsm", asked, kept)
        unused = torch.arange(kept.shape[2], device=kept.device) >= kept_counts.unsqueeze(-1)
        unasked = torch.arange(asked.shape[1], device=kept.device) >= asked_counts.unsqueeze(-1)
        unasked = unasked[:, :, None, None, None]
        products = products.masked_fill(unused, NONE)
        if kind == "max":
            similar = products.masked_fill(unasked, NONE).amax((1, 4))
        else:
            attention = (products * asked.shape[-1] ** -0.5).flatten(2).softmax(-1).view_as(products)
            similar = attention.masked_fill(unasked, 0).sum((1, 4))
    absent = (asked_counts == 0)[:, None, None] | (kept_counts == 0)
    return similar.masked_fill(absent, NONE).amax((0, 2))


def elect(
    votes: torch.Tensor,
    scores: torch.Tensor | None,
    *,
    weight: float | torch.Tensor,
    count: int,
    mode: str = "inclusive",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """What a layer retrieves, and the votes for the layers after it (section 3.5).

    A layer's own choice are the `count` blocks with the largest scores, of equal ones the first; each of them gets the
    layer's weight, where the layer has a retrieval head. With `inclusive` and `preceding`, the `count` blocks with the
    most votes are retrieved, of blocks with equal votes those with the larger score of the layer itself, of equal ones
    the first; none without a vote. A block whose score is -inf is neither chosen nor retrieved.

    Args:
        votes: [batch, max_blocks] float32, votes of the layers before; updated in place. Only where they are greater
            than 0 are they looked at: so they are 0 or NaN where there is no block.
        scores: [batch, max_blocks] float32 of `score_blocks`, on votes' device; None where the layer has no retrieval
            head: then votes stay as they are, and blocks with equal votes are ordered by their numbers.
        weight: of the layer's head, a number or [batch] in votes' dtype; not looked at without scores.
        count: how many blocks are chosen and retrieved, at most.
        mode: `inclusive`: the layer's own vote is counted. `preceding`: it is counted in the layers after this one.
            `off`: the layer retrieves its own choice, and nothing without scores.
        out: [batch, count] int32 to write to; None: a new tensor.

    Returns:
        [batch, count] int32 numbers of blocks, best first, -1 beyond.

    Raises:
        ValueError: shapes, dtypes, devices, the mode or the count do not fit.
    """
    check_election(votes, scores, weight, count, mode, out)
    if out is None:
        out = torch.empty(votes.shape[0], count, dtype=torch.int32, device=votes.device)
    out.fill_(-1)
    for request, row in enumerate(votes):
        own = row.new_empty(0, dtype=torch.int64)
        order = torch.arange(len(row), device=row.device)
        counted = row
        if scores is not None:
            score = scores[request]
            order = score.nan_to_num(nan=NONE, posinf=float("inf"), neginf=NONE).sort(descending=True, stable=True)[1]
            order = order[score[order] > NONE]
            own = order[:count]
            counted = row.clone()
            row[own] += weight[request] if isinstance(weight, torch.Tensor) else weight
            if mode == "inclusive":
                counted = row
        chosen = own
        if mode != "off":
            order = order[counted[order] > 0]
            chosen = order[counted[order].sort(descending=True, stable=True)[1]][:count]
        out[request, : len(chosen)] = chosen.to(torch.int32)
    return out
