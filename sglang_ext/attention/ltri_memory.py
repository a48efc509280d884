"""What one layer of a stream of Ltri-LLM remembers: on the host, in its index, and of the blocks in its window."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import torch

from sglang_ext.cache.host_blocks import HostBlocks, HostLease
from sglang_ext.policies.ltri import Span, kept_chunks
from sglang_ext.policies.ltri_options import Ltri
from sglang_ext.policies.ltri_similarity import Compared, SpanVectors, block_scores, similarity

if TYPE_CHECKING:
    from typing_extensions import Self


class SpanIndex:
    """The index vectors of all blocks of a layer that have left the window, in the order in which they left.

    Attributes:
        blocks: how many blocks there are.
    """

    def __init__(self) -> None:
        self.blocks, self._spans = 0, 0
        self._vectors, self._counts, self._block_of = torch.empty(0), torch.empty(0), torch.empty(0)

    def add(self, spans: Sequence[torch.Tensor], most: int) -> None:
        """The next block.

        Args:
            spans: [vectors, dim] of each of its spans.
            most: vectors of a span at most.
        """
        end = self._spans + len(spans)
        if end > len(self._counts):
            self._grow(2 * end, most, spans[0])
        for number, span in enumerate(spans, self._spans):
            self._vectors[number, : len(span)] = span
            self._counts[number] = len(span)
        self._block_of[self._spans : end] = self.blocks
        self._spans, self.blocks = end, self.blocks + 1

    def _grow(self, spans: int, most: int, like: torch.Tensor) -> None:
        vectors = like.new_zeros(spans, most, like.shape[-1])
        counts, block_of = (torch.zeros(spans, dtype=torch.int64, device=like.device) for _ in range(2))
        if self._spans:
            kept = slice(0, self._spans)
            vectors[kept], counts[kept] = self._vectors[kept], self._counts[kept]
            block_of[kept] = self._block_of[kept]
        self._vectors, self._counts, self._block_of = vectors, counts, block_of

    def fork(self, blocks: int) -> SpanIndex:
        """The index of another stream whose first blocks are these; it is copied when that one adds to it."""
        found = SpanIndex()
        found.blocks, found._spans = min(blocks, self.blocks), int((self._block_of[: self._spans] < blocks).sum())
        kept = slice(0, found._spans)
        found._vectors, found._counts, found._block_of = (
            each[kept] for each in (self._vectors, self._counts, self._block_of)
        )
        return found

    def scores(self, query: SpanVectors, how: Compared) -> torch.Tensor:
        """The score of each block (`policies.ltri_similarity.block_scores`) for a chunk's spans."""
        memory = SpanVectors(self._vectors[: self._spans], self._counts[: self._spans])
        return block_scores(similarity(query, memory, how), self._block_of[: self._spans], self.blocks)


@dataclass(frozen=True)
class LayerHost:
    """What one stream has on the host, in one layer. Keys are not rotated.

    Attributes:
        host: the region.
        lease: the stream's blocks, of all layers.
        layer: number of the layer.
        device: of the KV cache.
    """

    host: HostBlocks
    lease: HostLease
    layer: int
    device: torch.device

    def put(self, block: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep a block that leaves the window; the first layer takes its place.

        Args:
            block: its number in the stream; all before it were kept.
            keys: [block, kv_heads, head_dim].
            values: [block, kv_heads, value_dim].
        """
        at = self.numbers(block + 1)[block]
        self.host.keys[self.layer][at], self.host.values[self.layer][at] = keys.cpu(), values.cpu()

    def numbers(self, count: int) -> array[int]:
        """Numbers on the host of a stream's blocks, `count` at least; new blocks get theirs."""
        while len(self.lease.ids) < count:
            self.lease.take()
        return self.lease.ids

    def get(self, blocks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of blocks that were kept, [tokens, kv_heads, dim] on the KV cache's device."""
        self.host.fetched += len(blocks)
        keys, values = self.host.read(self.layer, [self.lease.ids[block] for block in blocks])
        return keys.to(self.device), values.to(self.device)


SpansT = TypeVar("SpansT")
"""The spans of the blocks in a window, as whoever computes the chunks knows them."""
BlockSpans: TypeAlias = list[tuple[Span, int]]
"""The spans of a block, and how many index vectors each has."""


@dataclass(frozen=True)
class Snapshot(Generic[SpansT]):
    """What a layer remembered where a chunk began: a function of the tokens before it alone.

    A block ended there, too (`Ltri.alike`), so no tile was waiting for more rows.

    Attributes:
        stored, spans, received: see `LayerMemory`.
        shares: whether its memory is a part of a larger one, which it keeps alive.
    """

    stored: int
    spans: SpansT
    received: torch.Tensor
    shares: bool = False


@dataclass
class LayerMemory(ABC, Generic[SpansT]):
    """What one layer of a stream remembers.

    Attributes:
        received: [slots of a stream] float32 or float64, attention that the token in each slot received from the
            queries before the newest one (`last`), summed over the heads of this rank.
        spans: spans of the blocks whose tokens have all been computed, until the blocks leave the window.
        stored: blocks that have left the window; they are on the host.
        tiles: block -> [heads, block, block] of its attention map, until all of its rows are there.
        last: the newest token, and what it adds to `received` as soon as another one follows.
        snapshots: first token of a chunk -> what there was before it, for streams that begin alike.
    """

    received: torch.Tensor
    spans: SpansT
    stored: int = 0
    tiles: dict[int, torch.Tensor] = field(default_factory=dict)
    last: tuple[int, torch.Tensor] | None = None
    snapshots: dict[int, Snapshot[SpansT]] = field(default_factory=dict)

    @staticmethod
    @abstractmethod
    def copied(spans: SpansT) -> SpansT:
        """A copy of spans that does not change with them."""

    def keep(self, begin: int, chunk: int) -> None:
        """Keep a snapshot for streams that go on differently from `begin`, where a chunk begins; few are kept.

        Args:
            begin: first token of the chunk.
            chunk: tokens of a chunk.
        """
        self.have(begin, chunk, Snapshot(self.stored, self.copied(self.spans), self.received.clone()))

    def have(self, begin: int, chunk: int, snapshot: Snapshot[SpansT]) -> None:
        """`keep` a snapshot that was taken at `begin`."""
        self.snapshots[begin] = snapshot
        wanted = kept_chunks(begin // chunk)
        self.snapshots = {place: kept for place, kept in self.snapshots.items() if place // chunk in wanted}

    def owned(self, kept: Snapshot[SpansT]) -> Snapshot[SpansT]:
        """A snapshot in memory of its own."""
        return Snapshot(kept.stored, self.copied(kept.spans), kept.received.clone())

    def part(self, begin: int) -> None:
        """Have the snapshots before `begin` in memory of their own."""
        for place, kept in self.snapshots.items():
            if kept.shares and place < begin:
                self.snapshots[place] = self.owned(kept)

    def begun(self, kept: Snapshot[SpansT]) -> Snapshot[SpansT]:
        """The snapshot as another stream begins with it, in memory that this stream may write to."""
        return self.owned(kept)

    def fork(self, begin: int) -> Self:
        """The memory of another stream that begins with the same tokens, up to one of `snapshots`."""
        kept = self.begun(self.snapshots[begin])
        return type(self)(
            received=kept.received,
            spans=kept.spans,
            stored=kept.stored,
            snapshots={place: each for place, each in self.snapshots.items() if place <= begin},
        )


@dataclass
class TorchMemory(LayerMemory[dict[int, BlockSpans]]):
    """What one layer of a stream remembers in plain PyTorch: block -> its spans.

    Attributes:
        index: of the blocks on the host.
        blocks: what the last chunk of a prompt retrieved.
    """

    index: SpanIndex = field(default_factory=SpanIndex)
    blocks: list[int] = field(default_factory=list)

    @staticmethod
    def copied(spans: dict[int, BlockSpans]) -> dict[int, BlockSpans]:
        return dict(spans)

    def fork(self, begin: int) -> Self:
        found = super().fork(begin)
        found.index = self.index.fork(found.stored)
        return found

    @classmethod
    def empty(cls, settings: Ltri, device: torch.device) -> Self:
        """The memory of a stream that has no token yet."""
        return cls(torch.zeros(settings.slots, device=device), {})
