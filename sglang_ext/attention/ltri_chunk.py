"""One chunk of a stream of Ltri-LLM in one layer, in plain PyTorch: section 3 of the paper, step by step.

What leaves the window goes to the host; the chunk's keys and values take the slots that are free then; the chunk's
attention to its window is the map out of which spans are cut; the spans of the chunk ask for blocks, or its last
tokens do (`Ltri.asking`); these come back from the host; and one softmax goes over sinks, blocks and window.

**Ranks.** Each has some of the heads, its part of the map, and its part of every index vector. In a layer that votes,
what decides is a sum over all heads, and ranks add their parts of it at most three times a chunk: for the blocks that
are complete or leave the window (`_remember`), for the chunk's own spans (`_asked`), and for the products of index
vectors (`similarity`). All ranks get the same sums, and so the same blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_ext.attention.ltri_layer import LayerTokens, Voter, cells_of
from sglang_ext.attention.ltri_memory import BlockSpans, TorchMemory
from sglang_ext.kernels.packed_vectors.reference import in_four_bits
from sglang_ext.kernels.rope import rotate
from sglang_ext.policies.ltri import (
    TensorRanks,
    counted_spans,
    index_tokens,
    random_blocks,
    renewed_blocks,
    retrieved,
    summed_heads,
    whole_span,
)
from sglang_ext.policies.ltri_similarity import Compared, SpanVectors, index_vectors

LOGITS_AT_ONCE = 1 << 22
"""Logits of one softmax, at most, unless one key-value head has more: on a CPU, PyTorch takes a tensor of 32 MiB or
more from the operating system each time."""


def _weighted(logits: Sequence[torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """The values by the softmax of all logits together.

    Args:
        logits: [heads, rows, tokens] each, of some of the tokens, in their order.
        values: [kv_heads, tokens, dim] of all of them.

    Returns:
        [heads, rows, dim].
    """
    (heads, rows), (kv_heads, tokens) = logits[0].shape[:2], values.shape[:2]
    group = heads // kv_heads
    at_once = max(1, LOGITS_AT_ONCE // (rows * tokens * group))  # key-value heads
    pieces = zip(*(each.split(at_once * group) for each in logits), values.split(at_once), strict=True)
    return torch.cat([torch.cat(each, -1).softmax(-1) @ seen.repeat_interleave(group, 0) for *each, seen in pieces])


@dataclass(frozen=True)
class Chunk(LayerTokens[dict[int, BlockSpans]]):
    """A chunk in plain PyTorch.

    Attributes:
        memory: of the layer.
        ranks: the tensor-parallel ranks, each of which has some of the heads.
    """

    memory: TorchMemory
    ranks: TensorRanks

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, votes: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """Store the chunk's keys and values, and attend to what it sees.

        Args:
            query: [rows, heads, head_dim], not rotated, as the keys.
            keys: [rows, kv_heads, head_dim].
            values: [rows, kv_heads, value_dim].
            votes: first token of a chunk -> [blocks] votes of the layers before this one, which adds its own.

        Returns:
            [rows, heads, value_dim] in query's dtype.
        """
        dtype = torch.promote_types(query.dtype, torch.float32)
        wide = query.to(dtype).transpose(0, 1)  # [heads, rows, head_dim]
        self._remember()
        if self.kept:
            self.memory.keep(self.begin, self.settings.chunk)
        self._store(keys, values)
        first = self.settings.local(self.begin)
        near_keys, near_values = self._stored(first, self.end, dtype)
        near = self._logits(wide, near_keys, torch.arange(first, self.end, device=query.device))
        local = near.softmax(-1)
        self._keep_map(local, first)
        far_keys, far_values, places = self._far(self._blocks(wide, local, first, votes), dtype)
        logits = self._logits(wide, far_keys, places), near
        out = _weighted(logits, torch.cat([far_values, near_values], 1))
        return out.transpose(0, 1).to(query.dtype)

    # ---- the window ----

    def _cells(self, begin: int, end: int) -> torch.Tensor:
        """[tokens] int64: numbers, among the stream's slots, of those that hold the tokens [begin, end)."""
        return cells_of(self.settings, torch.arange(begin, end, device=self.slots.device))

    def _cells_of(self, block: int) -> torch.Tensor:
        """[tokens] int64, likewise, of a block's tokens."""
        return self._cells(self.settings.first(block), self.settings.first(block + 1))

    def _stored(self, begin: int, end: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of the tokens [begin, end), [kv_heads, tokens, dim]."""
        slots = self.slots[self._cells(begin, end)].long()
        keys, values = self.caches.keys[slots], self.caches.values[slots]
        return keys.to(dtype).transpose(0, 1), values.to(dtype).transpose(0, 1)

    def _store(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        cells = self._cells(self.begin, self.end)
        slots = self.slots[cells].long()
        self.caches.keys[slots], self.caches.values[slots] = keys, values
        self.memory.received[cells] = 0

    def _logits(self, query: torch.Tensor, keys: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Logits of the chunk's rows at their distances from keys; -inf behind the row.

        Args:
            query: [heads, rows, head_dim].
            keys: [kv_heads, tokens, head_dim].
            places: [tokens] int64, the tokens' numbers; ascending unless all of them, or none, are seen clipped.

        Returns:
            [heads, rows, tokens].
        """
        settings, rope = self.settings, self.caches.rope
        query, keys = query * self.caches.scale, keys.repeat_interleave(query.shape[0] // keys.shape[0], 0)
        rows = torch.arange(self.begin, self.end, device=query.device)
        distance = rows.unsqueeze(1) - places
        clipped = distance >= (sys.maxsize if settings.far else settings.window)
        at_edge = rotate(query, torch.tensor(settings.window - 1, device=query.device), rope)
        if clipped.all():
            return at_edge @ keys.transpose(1, 2)
        # Places count from the chunk's first token: angles stay small, however long the stream is.
        logits = rotate(query, rows - self.begin, rope) @ rotate(keys, places - self.begin, rope).transpose(1, 2)
        # Few of a window's tokens are clipped for any row, and the logits are by far the largest tensor of a chunk.
        oldest = slice(int(clipped.any(0).sum()))
        farthest = at_edge @ keys[:, oldest].transpose(1, 2)
        logits[..., oldest] = torch.where(clipped[:, oldest], farthest, logits[..., oldest])
        return logits.masked_fill_(distance < 0, float("-inf"))

    # ---- what is remembered ----

    def _remember(self) -> None:
        """Cut the spans of the blocks that are complete, and move those that have left the window to the host."""
        memory = self.memory
        if memory.last is not None and memory.last[0] < self.begin:
            memory.received += memory.last[1]
            memory.last = None
        complete = [block for block in memory.tiles if self.settings.first(block + 1) <= self.begin]
        leaving = range(memory.stored, self.settings.evicted(self.begin))
        tiles = [memory.tiles.pop(block) for block in complete]
        given = [memory.received[self._cells_of(block)] for block in (leaving if self.voter is not None else ())]
        spans, given = self._spans(tiles, given)
        memory.spans.update(zip(complete, spans, strict=True))
        for block in leaving:
            self._evict(block, given[block - leaving.start] if given else None)

    def _evict(self, block: int, received: torch.Tensor | None) -> None:
        """Move a block to the host, and what is remembered of it to the index.

        Args:
            block: its number.
            received: [tokens] what its tokens received from all heads; None in a layer that does not vote.
        """
        memory, slots = self.memory, self.slots[self._cells_of(block)].long()
        keys, values = self.caches.keys[slots], self.caches.values[slots]
        if self.voter is not None and received is not None:
            spans = index_tokens(memory.spans.pop(block), received)
            vectors = self.voter.of_keys(keys.to(memory.received.dtype), self.heads)
            found = [index_vectors(vectors[tokens], self.settings) for tokens in spans]
            if self.settings.packs:
                found = [in_four_bits(each) for each in found]
            memory.index.add(found, self.settings.most_vectors)
        self.host.put(block, keys, values)
        memory.stored += 1

    def _spans(
        self, tiles: Sequence[torch.Tensor], received: Sequence[torch.Tensor]
    ) -> tuple[list[BlockSpans], list[torch.Tensor]]:
        """The spans of some tiles, and what some tokens received; one sum over ranks.

        Args:
            tiles: [heads, tokens, tokens] each, of this rank's heads.
            received: [tokens] each, of this rank's heads.

        Returns:
            (the spans of each tile; `received` of all heads, on the CPU, where spans are cut in many small steps).
        """
        settings, sums = self.settings, list[torch.Tensor]()
        if settings.index == "ltri":
            sums = [summed_heads(tile.cpu(), settings.theta) for tile in tiles]
        summed = self.ranks.add_all([*sums, *(each.cpu() for each in received)])
        spans = [counted_spans(each, settings, self.caches.layer) for each in summed[: len(sums)]]
        return spans or [whole_span(tile.shape[-1], settings) for tile in tiles], summed[len(sums) :]

    def _keep_map(self, local: torch.Tensor, first: int) -> None:
        """Keep what the map of attention to the window says of blocks.

        Args:
            local: [heads, rows, tokens] attention to the tokens from `first` on.
            first: first token of the window.
        """
        if self.voter is None:
            return
        settings, memory = self.settings, self.memory
        for block in range(max(0, self.begin - settings.sinks) // settings.block, settings.blocks(self.end)):
            low, high = self.settings.first(block), self.settings.first(block + 1)
            if block not in memory.tiles:
                memory.tiles[block] = local.new_zeros(len(local), settings.block, settings.block)
            begin, end = max(low, self.begin), min(high, self.end)
            rows = local[:, begin - self.begin : end - self.begin, low - first : end - first]
            memory.tiles[block][:, begin - low : end - low, : end - low] = rows
        cells, given = self._cells(first, self.end), local.sum(0)
        memory.received[cells] += given[:-1].sum(0)
        last = torch.zeros_like(memory.received)
        last[cells] = given[-1]
        memory.last = self.end - 1, last

    # ---- what comes back ----

    def _blocks(
        self, query: torch.Tensor, local: torch.Tensor, first: int, votes: dict[int, torch.Tensor]
    ) -> Sequence[int]:
        """The blocks that come back for the chunk."""
        settings, memory = self.settings, self.memory
        if settings.index == "given":
            return [block for block in self.given if block < memory.stored][: settings.retrieved]
        if self.answers and settings.persist:
            return memory.blocks
        if settings.remembers:
            blocks = self._found(query, local, first, votes)
            if settings.renewed and blocks:
                blocks = renewed_blocks(self.begin, settings)
        else:
            blocks = random_blocks(memory.stored, settings.retrieved, (self.begin << 16) + self.caches.layer)
        if not self.answers:
            memory.blocks = blocks
        return blocks

    def _found(self, query: torch.Tensor, local: torch.Tensor, first: int, votes: dict[int, torch.Tensor]) -> list[int]:
        """The blocks that the index finds, by the votes of the layers."""
        settings, memory = self.settings, self.memory
        before = votes.get(self.begin, torch.zeros(memory.stored, device=query.device))
        scores = None
        if self.voter is not None and memory.stored and settings.retrieved:
            dim = self.voter.dim(self.heads * self.ranks.count, query.shape[-1])
            how = Compared(settings.compared_by(self.tokens_ask), dim, self.ranks)
            scores = memory.index.scores(self._asked(self.voter, query, local, first), how)
        weight = 0.0 if self.voter is None else self.voter.weight
        blocks, votes[self.begin] = retrieved(before, scores, weight, settings)
        return blocks

    def _asked(self, voter: Voter, query: torch.Tensor, local: torch.Tensor, first: int) -> SpanVectors:
        """Index vectors of the chunk's spans, or its last tokens: queries rotated to the distance `window - 1`."""
        settings, found = self.settings, []
        edge = torch.tensor(settings.window - 1, device=query.device)
        vectors = voter.of_queries(rotate(query, edge, self.caches.rope).transpose(0, 1))
        if settings.index != "ltri":
            return SpanVectors.of([index_vectors(vectors, settings)])
        size, before = self.end - self.begin, self.begin - first
        if self.tokens_ask:
            return SpanVectors.of(vectors[-settings.most_askers :].split(1))
        blocks = [(low, min(low + settings.block, size)) for low in range(0, size, settings.block)]
        tiles = [local[:, low:high, before + low : before + high] for low, high in blocks]
        given = [local[:, :, before + low : before + high].sum((0, 1)) for low, high in blocks]
        for (low, high), spans, received in zip(blocks, *self._spans(tiles, given), strict=True):
            compared = [(span, min(count, settings.most_queries)) for span, count in spans]
            found += [vectors[low:high][tokens] for tokens in index_tokens(compared, received)]
        return SpanVectors.of(found)

    def _far(self, blocks: Sequence[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(keys, values) [kv_heads, tokens, dim] of the sinks before the chunk and of blocks; the tokens' places."""
        settings, device = self.settings, self.slots.device
        sinks = min(self.begin, settings.sinks)
        keys, values = self._stored(0, sinks, dtype)
        places = [
            *range(sinks),
            *(self.settings.first(block) + token for block in blocks for token in range(settings.block)),
        ]
        back = [each.to(dtype).transpose(0, 1) for each in self.host.get(blocks)]
        where = torch.tensor(places, dtype=torch.int64, device=device)
        return torch.cat([keys, back[0]], 1), torch.cat([values, back[1]], 1), where
