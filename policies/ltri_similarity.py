"""Ltri-LLM, section 3.4: how the spans of a chunk are compared with those that are remembered (Tang et al., 2024).

All tensors of a call are on one device, float32 or float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_ext.policies.ltri import ONE_RANK, TensorRanks
from sglang_ext.policies.ltri_options import Ltri


def index_vectors(states: torch.Tensor, settings: Ltri) -> torch.Tensor:
    """What is kept of the keys (or queries) of a span's tokens: all of them; their mean in the other two indexes.

    Args:
        states: [tokens, dim].
        settings: `index`.

    Returns:
        [vectors, dim].
    """
    return states if settings.index == "ltri" else states.mean(0, keepdim=True)


@dataclass(frozen=True)
class SpanVectors:
    """Index vectors of some spans.

    Attributes:
        vectors: [spans, most, dim]; what is beyond a span's number is not looked at. On one of several ranks, they have
            the components of its own heads: none where the one that votes is on another.
        counts: [spans] int64, vectors of each span.
    """

    vectors: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, spans: Sequence[torch.Tensor]) -> SpanVectors:
        """From [vectors, dim] of each span."""
        counts = torch.tensor([len(span) for span in spans], device=spans[0].device)
        return cls(torch.nn.utils.rnn.pad_sequence(list(spans), batch_first=True), counts)

    @property
    def used(self) -> torch.Tensor:
        """[spans, most] bool, which of the vectors there are."""
        return torch.arange(self.vectors.shape[1], device=self.counts.device) < self.counts.unsqueeze(1)

    def folded(self) -> torch.Tensor:
        """[spans, dim]: the sum of each span's vectors, which is all that the similarity `sum` needs."""
        return torch.where(self.used.unsqueeze(-1), self.vectors, 0).sum(1)


@dataclass(frozen=True)
class Compared:
    """How index vectors are compared.

    Attributes:
        kind: `sum`, `max` or `mass`.
        dim: components of a vector, on all ranks together.
        ranks: they add the products of their components.
    """

    kind: str
    dim: int
    ranks: TensorRanks = ONE_RANK


def similarity(query: SpanVectors, memory: SpanVectors, how: Compared) -> torch.Tensor:
    """Equation 8 and its two alternatives.

    Args:
        query: spans of the chunk.
        memory: spans of the blocks that may be retrieved.
        how: what they are compared by.

    Returns:
        [spans of the chunk, spans of the memory].
    """
    if how.kind == "sum":
        return how.ranks.add(query.folded() @ memory.folded().T)
    products = how.ranks.add(torch.einsum("qnd,smd->qnsm", query.vectors, memory.vectors))
    products = products.masked_fill(~memory.used, float("-inf"))
    if how.kind == "max":
        return products.masked_fill(~query.used[:, :, None, None], float("-inf")).amax((1, 3))
    scaled = products * how.dim**-0.5
    weights = scaled.flatten(2).softmax(-1).view_as(scaled).sum(-1)  # [query spans, vectors, memory spans]
    return torch.where(query.used.unsqueeze(-1), weights, 0).sum(1)


def block_scores(similarities: torch.Tensor, block_of: torch.Tensor, blocks: int) -> torch.Tensor:
    """Equation 9: the score of a block is the largest of its spans'.

    Args:
        similarities: [spans of the chunk, spans of the memory].
        block_of: [spans of the memory] int64, the block of each span.
        blocks: how many there are; each has a span.

    Returns:
        [blocks].
    """
    best = similarities.amax(0)
    return best.new_full((blocks,), float("-inf")).scatter_reduce_(0, block_of, best, "amax")
