"""The index of one layer's memory, as kernels keep it: vectors that stand for the spans of blocks, packed or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_ext.attention.ltri_layer import Voters
from sglang_ext.cache.budget import FLOAT32, INT32
from sglang_ext.kernels.block_votes import BlockIndex, QuerySpans
from sglang_ext.kernels.packed_vectors import PackedSpans, hadamard
from sglang_ext.policies.ltri_options import REPRESENTATIVES, Ltri

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class LayerIndex:
    """The index vectors of one layer's blocks, under the numbers that the blocks have on the host.

    Attributes:
        vectors: [host blocks, spans, most, dim] in the dtype of the layer's keys; with `four_bits` [host blocks, spans,
            most, dim / 2] uint8 (`kernels.packed_vectors.PackedSpans`).
        counts: [host blocks, spans] int32.
        scales: [host blocks, spans] float32, of packed vectors; None where they are not packed.
        rotation: [dim, dim] in the keys' dtype, by which packed vectors are multiplied before; None likewise.
    """

    vectors: torch.Tensor
    counts: torch.Tensor
    scales: torch.Tensor | None = None
    rotation: torch.Tensor | None = None

    @classmethod
    def empty(cls, settings: Ltri, blocks: int, dim: int, like: torch.Tensor) -> Self:
        """An index without a block.

        Args:
            settings: of the method.
            blocks: on the host.
            dim: components of an index vector.
            like: the layer's keys, for dtype and device.
        """
        spans, most = stored_sizes(settings)
        counts = torch.zeros(blocks, spans, dtype=torch.int32, device=like.device)
        if not settings.packs:
            return cls(like.new_zeros(blocks, spans, most, dim), counts)
        vectors = torch.zeros(blocks, spans, most, dim // 2, dtype=torch.uint8, device=like.device)
        scales = torch.zeros(blocks, spans, dtype=torch.float32, device=like.device)
        return cls(vectors, counts, scales, hadamard(dim, like.dtype, like.device))

    @property
    def packed(self) -> PackedSpans | None:
        """Its vectors and scales where they are packed."""
        return None if self.scales is None else PackedSpans(self.vectors, self.scales)

    def of(self, ids: torch.Tensor, blocks: torch.Tensor) -> BlockIndex:
        """The entries of requests (`BlockIndex.ids` and `BlockIndex.blocks`)."""
        return BlockIndex(self.vectors, self.counts, ids, blocks, self.scales)

    def compared(self, query: QuerySpans) -> QuerySpans:
        """What is compared with the index, rotated as its vectors are."""
        if self.rotation is None:
            return query
        return QuerySpans(query.vectors @ self.rotation, query.counts)


def index_sizes(settings: Ltri) -> tuple[int, int]:
    """(spans of a block, tokens that stand for one of them), at most."""
    if settings.index == "ltri":
        return settings.spans, settings.most_vectors
    return 1, settings.block if settings.index == "mean" else min(REPRESENTATIVES, settings.block)


def stored_sizes(settings: Ltri) -> tuple[int, int]:
    """(spans of a block, index vectors of one of them), at most: one vector where it stands for all tokens."""
    spans, most = index_sizes(settings)
    return spans, 1 if is_folded(settings) else most


def is_folded(settings: Ltri) -> bool:
    """Whether one vector stands for a span: the sum of all, or their mean."""
    return settings.index != "ltri" or settings.similarity == "sum"


def index_bytes(settings: Ltri, voters: Voters, blocks: int, heads: int, keys: torch.Tensor) -> int:
    """Bytes of the index of so many blocks on the host: vectors, their numbers, and scales.

    They lie on the GPU, all from the start.

    Args:
        settings: of the method.
        voters: of all layers.
        blocks: on the host.
        heads: query heads of a layer.
        keys: of a layer of the KV cache.
    """
    spans, most = stored_sizes(settings)
    dims = [voter.dim(heads, keys.shape[2]) for voter in voters.values() if voter and voter.here]
    counts = blocks * spans * len(dims) * INT32
    if settings.packs:
        return counts + blocks * spans * sum(most * dim // 2 + FLOAT32 for dim in dims)
    return counts + blocks * spans * most * sum(dims) * keys.element_size()
