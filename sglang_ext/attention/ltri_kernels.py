"""One chunk of a stream of Ltri-LLM in one layer, in kernels: as `ltri_chunk`, and the host waits for nothing.

What the host needs to know follows from the number of the chunk: how many blocks have left the window, where each token
lies, and how many blocks a layer gets. Which blocks these are, and what is remembered of them, stays on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sglang_ext.attention.ltri import AnyMemory, LayerChunk, LtriPolicy
from sglang_ext.attention.ltri_layer import LayerTokens, Voter
from sglang_ext.attention.ltri_memory import LayerMemory
from sglang_ext.kernels.block_votes import BlockIndex, QuerySpans, elect, score_blocks
from sglang_ext.kernels.clamped_attention import ChunkQuery, FarKeys, Part, SeenKeys
from sglang_ext.kernels.clamped_attention.reference import attend_beyond, attend_window
from sglang_ext.kernels.host_fetch import BlockCache, Found, HostRegion, fetch, store
from sglang_ext.kernels.local_map import BlockTiles, LocalMap, fill_tiles, received
from sglang_ext.kernels.rope import rotate
from sglang_ext.kernels.span_index import SpanRule, Spans, cut_spans, pick
from sglang_ext.policies.ltri import random_blocks
from sglang_ext.policies.ltri_options import REPRESENTATIVES, Ltri


@dataclass
class KernelMemory(LayerMemory[Spans]):
    """What one layer of a stream remembers, on the device.

    Attributes:
        chosen: [blocks] int32, what the last chunk of a prompt retrieved, as numbers of the stream's blocks.
    """

    chosen: torch.Tensor | None = None


@dataclass(frozen=True)
class LayerIndex:
    """The index vectors of one layer's blocks, under the numbers that the blocks have on the host.

    Attributes:
        vectors: [host blocks, spans, most, dim].
        counts: [host blocks, spans] int32.
    """

    vectors: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def empty(cls, settings: Ltri, blocks: int, dim: int, like: torch.Tensor) -> LayerIndex:
        """An index without a block.

        Args:
            settings: of the method.
            blocks: on the host.
            dim: components of an index vector.
            like: the layer's keys, for dtype and device.
        """
        spans, most = _sizes(settings)
        folded = 1 if _is_folded(settings) else most
        counts = torch.zeros(blocks, spans, dtype=torch.int32, device=like.device)
        return cls(like.new_zeros(blocks, spans, folded, dim), counts)


def _sizes(settings: Ltri) -> tuple[int, int]:
    """(spans of a block, tokens that stand for one of them), at most."""
    if settings.index == "ltri":
        return settings.spans, settings.vectors // settings.spans
    return 1, settings.block if settings.index == "mean" else min(REPRESENTATIVES, settings.block)


def _is_folded(settings: Ltri) -> bool:
    """Whether one vector stands for a span: the sum of all, or their mean."""
    return settings.index != "ltri" or settings.similarity == "sum"


@dataclass(frozen=True)
class KernelChunk(LayerTokens[Spans]):
    """A chunk in kernels.

    Attributes:
        memory: of the layer, on the device.
        index: of the layer; None where nothing votes.
    """

    memory: KernelMemory
    index: LayerIndex | None

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, votes: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """As `ltri_chunk.Chunk.attend`; votes are [1, blocks] float32, and there from the first layer that votes on."""
        settings, scale = self.settings, self.caches.scale
        self._remember()
        if self.kept:
            self.memory.keep(self.begin, settings.chunk)
        self._store(keys, values)
        asked, window = self._queries(query), self._seen(settings.local(self.begin), self.end)
        local = attend_window(asked, window, width=self._width, scale=scale)
        chosen = self._chosen(asked, self._map(asked, window, local), votes)
        sinks, memory = self._seen(0, min(self.begin, settings.sinks)), self._memory(chosen)
        if sinks.near.shape[0] + memory.keys.shape[0] == 0:
            return local.out.to(query.dtype)
        if settings.far:
            asked = ChunkQuery(asked.near, asked.near, asked.begin)
        beyond = attend_beyond(asked, sinks, memory, width=self._width, scale=scale)
        return local.merged(beyond).out.to(query.dtype)

    # ---- the window ----

    @property
    def _width(self) -> int:
        """Distances below it are true."""
        return self.end + 1 if self.settings.far else self.settings.window

    def _rotated(self, states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim] states at their places, which count from the chunk's first token."""
        return rotate(states, (places - self.begin).unsqueeze(1), self.caches.rope)

    def _queries(self, query: torch.Tensor) -> ChunkQuery:
        rows = torch.arange(self.begin, self.end, device=query.device)
        edge = torch.full_like(rows, self.settings.window - 1)
        return ChunkQuery(self._rotated(query, rows), rotate(query, edge.unsqueeze(1), self.caches.rope), self.begin)

    def _places(self, begin: int, end: int) -> torch.Tensor:
        """[tokens] int64: the KV slots of the tokens [begin, end)."""
        return self.slots[self._cells(begin, end)].long()

    def _cells(self, begin: int, end: int) -> torch.Tensor:
        """[tokens] int64: their numbers among the stream's slots (`Ltri.cell`)."""
        tokens, sinks = torch.arange(begin, end, device=self.slots.device), self.settings.sinks
        ring = sinks + (tokens - sinks) % (self.settings.slots - sinks)
        return torch.where(tokens < sinks, tokens, ring)

    def _seen(self, begin: int, end: int) -> SeenKeys:
        slots = self._places(begin, end)
        keys = self.caches.keys[slots]
        near = self._rotated(keys, torch.arange(begin, end, device=keys.device))
        return SeenKeys(near, keys, self.caches.values[slots], begin)

    def _store(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        slots = self._places(self.begin, self.end)
        self.caches.keys[slots], self.caches.values[slots] = keys, values
        self.memory.received[self._cells(self.begin, self.end)] = 0

    # ---- what is remembered ----

    @property
    def _rule(self) -> SpanRule:
        settings = self.settings
        return SpanRule(
            theta=settings.theta,
            phi=settings.phi,
            spans=settings.spans,
            most=settings.vectors // settings.spans,
            rate=settings.rate_of(self.caches.layer),
            ratio=settings.ratio,
            boxes=settings.boxes,
        )

    def _number(self, *values: int) -> torch.Tensor:
        """[n] int32 on the device."""
        return torch.tensor(values, dtype=torch.int32, device=self.slots.device)

    def _remember(self) -> None:
        """Cut the spans of the blocks that are complete, and move those that have left the window to the host."""
        memory, settings = self.memory, self.settings
        if memory.last is not None and memory.last[0] < self.begin:
            memory.received += memory.last[1]
            memory.last = None
        whole = [block for block in memory.tiles if settings.first(block + 1) <= self.begin]
        tiles = [memory.tiles.pop(block) for block in whole]
        if whole and settings.index == "ltri":
            found = cut_spans(torch.stack(tiles), self._number(*[settings.block] * len(whole)), self._rule)
            for place, block in enumerate(whole):
                memory.spans[block] = Spans(found.bounds[place : place + 1], found.counts[place : place + 1])
        gone = range(memory.stored, settings.evicted(self.begin))
        if gone:
            self._evict(gone)

    def _evict(self, blocks: range) -> None:
        settings, memory = self.settings, self.memory
        first, end = settings.first(blocks.start), settings.first(blocks.stop)
        slots = self._places(first, end).view(len(blocks), settings.block)
        ids = self.host.places(blocks)
        if self.voter is not None and self.index is not None:
            spans = self._spans(blocks)
            given = memory.received[self._cells(first, end)].view(len(blocks), settings.block)
            keys = self.caches.keys[slots.flatten()]
            vectors = self.voter.of_keys(keys, self.heads).view(len(blocks), settings.block, -1)
            found, counts = self._vectors(vectors, pick(spans, given, _sizes(settings)[1]), spans.counts)
            self.index.vectors[ids], self.index.counts[ids] = found.to(self.index.vectors.dtype), counts
        region = HostRegion(self.host.host.keys[self.caches.layer], self.host.host.values[self.caches.layer])
        store(self.caches.keys, self.caches.values, slots, ids.int(), region)
        memory.stored = blocks.stop

    def _spans(self, blocks: range) -> Spans:
        """The spans of blocks that leave the window."""
        if self.settings.index == "ltri":
            each = [self.memory.spans.pop(block) for block in blocks]
            return Spans(torch.cat([one.bounds for one in each]), torch.cat([one.counts for one in each]))
        bounds = self._number(*[0, self.settings.block] * len(blocks)).view(len(blocks), 1, 2)
        return Spans(bounds, self._number(*[_sizes(self.settings)[1]] * len(blocks)).view(len(blocks), 1))

    def _vectors(
        self, states: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Index vectors of spans.

        Args:
            states: [tiles, tokens of a tile, dim].
            tokens: [tiles, spans, most] int32 of `pick`.
            counts: [tiles, spans] int32.

        Returns:
            (vectors [tiles, spans, most or 1, dim], counts [tiles, spans] int32).
        """
        tiles, spans, most = tokens.shape
        at = tokens.clamp(min=0).long().view(tiles, spans * most, 1)
        found = states.gather(1, at.expand(-1, -1, states.shape[2])).view(tiles, spans, most, -1)
        if not _is_folded(self.settings):
            return found, counts
        there = (tokens >= 0).unsqueeze(-1)
        summed = torch.where(there, found, 0).sum(
            2, keepdim=True, dtype=torch.promote_types(found.dtype, torch.float32)
        )
        if self.settings.index != "ltri":
            summed = summed / counts.clamp(min=1).view(tiles, spans, 1, 1)
        return summed, counts.clamp(max=1)

    def _map(self, asked: ChunkQuery, window: SeenKeys, local: Part) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keep what the map of attention to the window says of blocks.

        Returns:
            (tiles [n, heads, block, block] of the chunk's own tokens, what these received [n, block]), for its spans;
            None where nothing votes.
        """
        if self.voter is None:
            return None
        settings, memory, rows = self.settings, self.memory, self.end - self.begin
        chunk = LocalMap(
            query_near=asked.near.unsqueeze(0),
            query_far=asked.far.unsqueeze(0),
            keys_near=window.near.transpose(0, 1).unsqueeze(0),
            keys_far=window.far.transpose(0, 1).unsqueeze(0),
            lse=local.lse.unsqueeze(0),
            before=self._number(self.begin - window.first),
            count=self._number(rows),
            window=self._width,
            scale=self.caches.scale,
        )
        given, cells = received(chunk), self._cells(window.first, self.end)
        memory.received[cells] += given.received[0]
        last = torch.zeros_like(memory.received)
        last[cells] = given.last[0]
        memory.last = self.end - 1, last
        blocks = range(max(0, self.begin - settings.sinks) // settings.block, settings.blocks(self.end))
        own = 0 if self.answers and settings.persist else -(-rows // settings.block)
        tiles = given.last.new_zeros(len(blocks) + own, self.heads, settings.block, settings.block)
        for place, block in enumerate(blocks):
            if block in memory.tiles:
                tiles[place] = memory.tiles[block]
            memory.tiles[block] = tiles[place]
        firsts = [settings.first(block) - window.first for block in blocks]
        firsts += [self.begin - window.first + number * settings.block for number in range(own)]
        places = self._number(*range(len(tiles))).unsqueeze(0)
        fill_tiles(chunk, BlockTiles(tiles, self._number(*firsts).unsqueeze(0), places))
        padded = torch.nn.functional.pad(given.chunk_received[0], (0, own * settings.block - rows)) if own else None
        return None if padded is None else (tiles[len(blocks) :], padded.view(own, settings.block))

    # ---- what comes back ----

    def _chosen(
        self,
        asked: ChunkQuery,
        own: tuple[torch.Tensor, torch.Tensor] | None,
        votes: dict[int, torch.Tensor],
    ) -> torch.Tensor:
        """[n] int32 numbers of the stream's blocks that come back for the chunk."""
        settings, memory = self.settings, self.memory
        if settings.index == "given":
            return self._number(*[block for block in self.given if block < memory.stored][: settings.retrieved])
        if self.answers and settings.persist and memory.chosen is not None:
            return memory.chosen
        if settings.index == "random":
            seed = (self.begin << 16) + self.caches.layer
            found = self._number(*random_blocks(memory.stored, settings.retrieved, seed))
        else:
            found = self._elected(asked, own, votes)
        if not self.answers:
            memory.chosen = found
        return found

    def _elected(
        self,
        asked: ChunkQuery,
        own: tuple[torch.Tensor, torch.Tensor] | None,
        votes: dict[int, torch.Tensor],
    ) -> torch.Tensor:
        settings, stored = self.settings, self.memory.stored
        count = min(settings.retrieved, stored)
        before, nothing = votes.get(self.begin), self._number()
        if count == 0 or (before is None and self.voter is None):
            return nothing
        scores = None
        if self.voter is not None and self.index is not None:
            ids = self.host.places(range(stored)).int().unsqueeze(0)
            index = BlockIndex(self.index.vectors, self.index.counts, ids, self._number(stored))
            scores = score_blocks(self._query_spans(self.voter, asked, own), index, kind=settings.similarity)
        after = torch.zeros(1, stored, device=self.slots.device) if before is None else before
        weight = 0.0 if self.voter is None else self.voter.weight
        found = elect(after, scores, weight=weight, count=count, mode=settings.vote)
        votes[self.begin] = after
        if (settings.vote == "preceding" and before is None) or (settings.vote == "off" and scores is None):
            return nothing  # nobody has voted for what this layer gets
        return found[0]

    def _query_spans(
        self, voter: Voter, asked: ChunkQuery, own: tuple[torch.Tensor, torch.Tensor] | None
    ) -> QuerySpans:
        """Index vectors of the chunk's own spans: queries as they are behind a whole window."""
        settings, rows = self.settings, self.end - self.begin
        states = voter.of_queries(asked.far)
        if settings.index != "ltri" or own is None:
            mean = states.mean(0, dtype=torch.promote_types(states.dtype, torch.float32))
            return QuerySpans(mean.view(1, 1, 1, -1), self._number(1).view(1, 1))
        tiles, given = own
        lengths = [min(settings.block, rows - low) for low in range(0, rows, settings.block)]
        spans = cut_spans(tiles, self._number(*lengths), self._rule)
        padded = torch.nn.functional.pad(states, (0, 0, 0, len(lengths) * settings.block - rows))
        tokens = pick(spans, given, _sizes(settings)[1])
        found, counts = self._vectors(padded.view(len(lengths), settings.block, -1), tokens, spans.counts)
        return QuerySpans(found.flatten(0, 1).unsqueeze(0), counts.flatten().unsqueeze(0))

    def _memory(self, chosen: torch.Tensor) -> FarKeys:
        """The blocks that come back, from the host."""
        layer, settings, count = self.caches.layer, self.settings, chosen.shape[0]
        region = HostRegion(self.host.host.keys[layer], self.host.host.values[layer])
        near = BlockCache.empty(1, max(1, count), region, self.slots.device)
        ids = self.host.places(range(self.memory.stored)).int()
        places = torch.arange(count, dtype=torch.int32, device=self.slots.device)
        fetch(region, Found(places.unsqueeze(0), ids[chosen.long()].unsqueeze(0)), self._number(0), near)
        keys, values = near.keys[0, :count].flatten(0, 1), near.values[0, :count].flatten(0, 1)
        if settings.far:
            token = torch.arange(settings.block, device=self.slots.device)
            where = (settings.sinks + chosen.long().unsqueeze(1) * settings.block + token).flatten()
            keys = self._rotated(keys, where)
        return FarKeys(keys, values)


class KernelLtriPolicy(LtriPolicy):
    """`LtriPolicy` whose chunks are computed in kernels. No system declares it yet."""

    def __init__(self) -> None:
        super().__init__()
        self._indexes: dict[int, LayerIndex] = {}

    def _memory(self, device: torch.device) -> AnyMemory:
        return KernelMemory.empty(self.config, device)

    def _index(self, layer: int, voter: Voter | None, heads: int) -> LayerIndex | None:
        """The index of a layer, made when its first chunk comes; None where nothing votes."""
        if voter is None:
            return None
        if layer not in self._indexes:
            keys, _ = self._caches()[layer]
            dim = keys.shape[2] * (heads if voter.head is None else 1)
            self._indexes[layer] = LayerIndex.empty(self.config, self._region.total, dim, keys)
        return self._indexes[layer]

    def _chunk(self, tokens: LayerTokens[Any]) -> LayerChunk:
        index = self._index(tokens.caches.layer, tokens.voter, tokens.heads)
        return KernelChunk(index=index, **vars(tokens))
