"""Chunks of Ltri-LLM in one layer as CUDA graphs have them: all of a frame's rows, whichever of them are the chunk's.

No chunk of a run needs the answer of the one before it. So each step but the last has a lane, which goes through all
chunks: the window's keys are gathered; attention to them; in a layer that votes, the spans, what tokens receive, and
what is remembered of both; the choice of blocks; their way from the host into the cache; and from there to where
attention reads them. Behind these, attention to the blocks runs on the stream that the lanes leave. While a chunk is in
one lane, those before it are in the next ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sglang_ext.attention.ltri_frames import FramePlan
from sglang_ext.attention.ltri_kernels import KernelChunk
from sglang_ext.attention.ltri_layer import LayerTokens, Voter
from sglang_ext.attention.ltri_runs import ChunkRun
from sglang_ext.attention.ltri_spans import token_spans
from sglang_ext.attention.ltri_state import KernelMemory, Lanes, LayerStore, Leaving, Looked, Mark, Sought
from sglang_ext.kernels.block_votes import QuerySpans
from sglang_ext.kernels.clamped_attention import ChunkQuery, FarKeys, SeenKeys
from sglang_ext.kernels.clamped_attention.dispatch import move
from sglang_ext.kernels.host_fetch import FreshBlocks
from sglang_ext.kernels.local_map import BlockTiles, LocalMap, Received, fill_tiles, received
from sglang_ext.kernels.span_index import Spans
from sglang_ext.policies.ltri import TensorRanks


@dataclass(frozen=True, kw_only=True)
class RecordedChunk(KernelChunk):
    """A chunk in a frame; `begin` and `end` are those of the frame, and `plan` is that of `frame`.

    The spans of complete blocks are cut as soon as they are complete, so no tile waits for it.

    Attributes:
        frame: the chunk in its frame.
        leaving: the blocks that leave the window; who replays the chunk copies them to the host.
        waiting: those that leave with any chunk of its run, and may not be on the host yet; None where none does.
    """

    frame: FramePlan
    leaving: Leaving
    waiting: FreshBlocks | None

    # ---- what leaves the window ----

    def leave(self) -> None:
        """Have the blocks that leave the window wait in `leaving`: the chunk's own tokens take their slots."""
        caches, gone = (self.caches.keys, self.caches.values), self.plan.gone_tokens
        if gone is not None:
            move(caches, (self.leaving.keys, self.leaving.values), read=gone.slots)

    def _gone_states(self, voter: Voter, slots: torch.Tensor) -> torch.Tensor:
        return voter.of_keys(self.leaving.keys[: slots.shape[0]], self.heads)

    def _keep_blocks(self, slots: torch.Tensor, ids: torch.Tensor) -> None:
        """They wait in `leaving`."""

    def _fresh(self) -> FreshBlocks | None:
        return self.waiting

    # ---- the map of attention ----

    def tiles(self, looked: Looked) -> torch.Tensor | None:
        """[tiles, heads, block, block]: those of the frame's blocks, and of the chunk's own tokens behind them.

        The oldest block's rows from before the chunk come from the stream's row of `MapState.tile`. None where nothing
        is cut.
        """
        plan, state, frame = self.plan, self.store.map_of_voters, self.frame
        if self.settings.index != "ltri" or not plan.tiles.places.shape[1]:
            return None
        chunk = self._local_map(looked)
        found = self._no_tiles(chunk)
        fill_tiles(chunk, BlockTiles(found, plan.tiles.firsts, plan.tiles.places))
        if frame.anywhere:
            kept, there = state.tile[plan.at], found[frame.oldest]
            found.index_copy_(0, frame.oldest, torch.where(frame.before.view(1, 1, -1, 1), kept, there))
        return found

    def spans(self, tiles: torch.Tensor) -> Spans:
        """The spans of what `tiles` returns."""
        return self._cut(tiles, self.plan.tiles.lengths)

    def keep_tile(self, tiles: torch.Tensor) -> None:
        """Leave the newest block's tile in the stream's row; `index_select` takes 20 us for so long a row."""
        self.store.map_of_voters.tile.index_copy_(0, self.plan.at, tiles[self.frame.newest])

    def _local_map(self, looked: Looked) -> LocalMap:
        chunk = super()._local_map(looked)
        if not self.frame.anywhere:
            return chunk
        # Rows before the chunk attend to nothing.
        return replace(chunk, lse=chunk.lse.masked_fill(self.frame.outside.view(1, -1, 1), torch.inf))

    @property
    def spans_ask(self) -> bool:
        """Whether the spans of the chunk's own tokens are compared with the index."""
        return self.settings.index == "ltri" and self.plan.tiles.places.shape[1] > 0 and not self.tokens_ask

    def received(self, looked: Looked) -> Received:
        """What the window's tokens receive."""
        return received(self._local_map(looked))

    def own_spans(self, spans: Spans, given: Received) -> tuple[Spans, torch.Tensor]:
        """What `chosen` takes, from the spans of all tiles."""
        own, blocks = self.ranks.add(given.chunk_received[0]), len(self.plan.tiles.blocks)
        if self.plan.tiles.own:
            spans = Spans(spans.bounds[blocks:], spans.counts[blocks:])
            own = own.index_select(0, self.frame.asking)
        return spans, own.view(-1, self.settings.block)

    def have(self, spans: Spans | None, given: Received) -> None:
        """Remember the spans of the frame's blocks, and what tokens have received."""
        self._add_sums(given)
        if spans is not None:
            blocks = len(self.plan.tiles.blocks)
            kept = Spans(spans.bounds[:blocks], spans.counts[:blocks])
            self.store.spans_of_voters.put(self.plan.tile_spans, kept)

    # ---- what the chunk asks ----

    def _asking_tokens(self, states: torch.Tensor) -> QuerySpans:
        return token_spans(states.index_select(0, self.frame.asking), self.frame.asks)

    def _mean(self, states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        outside = self.frame.outside
        return states.masked_fill(outside.unsqueeze(1), 0).sum(0, dtype=dtype) / (~outside).sum()

    def _asking(self, states: torch.Tensor, rows: int) -> torch.Tensor:
        return states.index_select(0, self.frame.asking) if self.plan.tiles.own else states


@dataclass(frozen=True)
class Seen:
    """What a chunk sees, and what it has found in its window.

    Attributes:
        looked: attention to the window (`look`).
        sought: the blocks that come back.
        beyond: (sinks, those blocks); in a layer that does not vote, `_late` tokens of the window, which `gathered` has
            put there, lie behind the blocks.
        there: the mark behind which `beyond` is complete, and the chunk reads no more of its blocks in the cache.
        near: the mark behind which `looked` is complete.
        remembered: the mark behind which all else is complete. Behind all three, only the last step reads the room.
        spans: of the map's tiles; None where none are cut.
        given: what the window's tokens received; None in a layer that does not vote.
    """

    looked: Looked
    sought: Sought
    beyond: tuple[SeenKeys, FarKeys]
    there: Mark
    near: Mark
    remembered: Mark
    spans: Spans | None
    given: Received | None


@dataclass(frozen=True)
class RecordedRun:
    """A run of chunks in one layer, which `GraphRecorder` records.

    Attributes:
        run: the chunks.
        chunk: any chunk of the layer; those of the run are copies of it with other tokens.
        stores: copies of the layer's store, each with a `scratch` of its own, which consecutive chunks use in turn.
        ranks: the tensor-parallel ranks, each of which has some of the heads.
        lanes: what runs beside the rest.
        voted: whether a layer before this one votes.
    """

    run: ChunkRun
    chunk: LayerTokens[Spans]
    stores: Sequence[LayerStore]
    ranks: TensorRanks
    lanes: Lanes
    voted: bool

    def compute(self) -> None:
        """Compute all chunks from the plans and rows that were loaded (`ChunkRun.load`, `PlacedRun.write`)."""
        places, lane, turns = self.run.places, self.lanes.window, len(self.stores)
        chunks = [self._recorded(number) for number in range(len(places))]
        votes = [{one.begin: place.votes} if self.voted else {} for one, place in zip(chunks, places, strict=True)]
        free = [lane.mark()] * turns  # behind which each chunk has its room
        read = [lane.mark()] * self.chunks_in_cache  # behind which each chunk may have blocks replaced in the cache
        held = deque[Seen](maxlen=turns)  # a lane would reuse memory that another one still reads
        for number, (one, place) in enumerate(zip(chunks, places, strict=True)):
            seen = self._seen(number, one, votes[number], free[number], read[number])
            held.append(seen)
            read.append(seen.there)
            lane.wait(seen.there, seen.near)
            one.answered(seen.looked, seen.beyond, out=self.run.room.out[place.rows])
            lane.wait(seen.remembered)
            free.append(lane.mark())  # for the chunk that has the same room next
            if not self.voted and one.begin in votes[number]:
                place.votes.copy_(votes[number][one.begin])
        if (last := chunks[-1].memory.retrieved) is not None:  # nobody asks for the others'
            places[-1].found[self.chunk.caches.layer] = torch.stack([last.blocks, last.ways])

    @property
    def chunks_in_cache(self) -> int:
        """How many consecutive chunks' blocks the cache holds at least, since those used least recently leave first."""
        cache = self.stores[0].cache
        return cache.held.shape[1] // max(1, self.chunk.settings.retrieved)

    def _seen(self, number: int, chunk: RecordedChunk, votes: dict[int, torch.Tensor], room: Mark, ways: Mark) -> Seen:
        """All of a chunk but attention to what lies beyond its window.

        Calls of dense kernels share no memory that they write, so they may run beside each other. Sums over ranks run
        in the order in which they are launched, whatever their lane: so what the last tokens ask is launched before
        their own attention map, for which it does not wait.

        Args:
            number: of the chunk in its run.
            chunk: the chunk.
            votes: of the layers before, to which the layer adds its own.
            room: behind it, the chunk has its room.
            ways: behind it, the chunk's blocks may replace others in the cache.
        """
        lanes, rows = self.lanes, self.run.room.of(self.run.places[number].rows)
        with lanes.gather.apart(behind=room):
            chunk.leave()
            left = lanes.gather.mark()
            asked, window = chunk.gathered(rows.query, rows.keys, rows.values)
            there = lanes.gather.mark()
        with lanes.window.apart(behind=there):
            looked = chunk.look(asked, window)
            near = remembered = lanes.window.mark()
        spans: Spans | None = None
        given: Received | None = None
        if chunk.voter is None:
            sought, ready = self._sought(chunk, asked, None, votes, left)
        else:
            with lanes.memory.apart(behind=left):
                chunk.remember()
                if self.run.before is not None:
                    self.run.before.keep(number, chunk.store, chunk.plan.at)
            if not chunk.spans_ask:
                sought, ready = self._sought(chunk, asked, None, votes, there)
            with lanes.tiles.apart(behind=near):
                tiles = chunk.tiles(looked)
                spans = None if tiles is None else chunk.spans(tiles)
                cut = lanes.tiles.mark()
                if tiles is not None:
                    chunk.keep_tile(tiles)
                kept = lanes.tiles.mark()
            with lanes.received.apart(behind=near):
                given = chunk.received(looked)
                counted = lanes.received.mark()
            if spans is not None and chunk.spans_ask:
                sought, ready = self._sought(chunk, asked, (spans, given), votes, cut, counted)
            with lanes.memory.apart(behind=counted):
                lanes.memory.wait(cut)
                lanes.index.join()
                chunk.have(spans, given)
                lanes.memory.wait(kept)
                remembered = lanes.memory.mark()
        with lanes.back.apart(behind=ready):
            lanes.back.wait(ways)
            chunk.fill(sought)
            filled = lanes.back.mark()
        with lanes.beyond.apart(behind=filled):
            beyond = chunk.beyond(sought.retrieved)
            return Seen(looked, sought, beyond, lanes.beyond.mark(), near, remembered, spans, given)

    def _sought(
        self,
        chunk: RecordedChunk,
        asked: ChunkQuery,
        own: tuple[Spans, Received] | None,
        votes: dict[int, torch.Tensor],
        *behind: Mark,
    ) -> tuple[Sought, Mark]:
        """The blocks that a chunk is to see, and the mark behind which they are known.

        Args:
            chunk: the chunk.
            asked: its queries.
            own: the spans of all tiles, and what tokens received, where spans ask; else None.
            votes: of the layers before, to which the layer adds its own.
            behind: marks behind which all of this is there.
        """
        lane, first = self.lanes.choice, behind[0]
        with lane.apart(behind=first):
            lane.wait(*behind[1:])
            sought = chunk.sought(chunk.chosen(asked, None if own is None else chunk.own_spans(*own), votes))
            return sought, lane.mark()

    def _recorded(self, number: int) -> RecordedChunk:
        """A chunk in its place, which remembers what stands in its stream's row."""
        place, store = self.run.places[number], self.stores[number % len(self.stores)]
        frame, settings = place.standing.plan, self.chunk.settings
        begin, nothing = frame.plan.rows.first, Spans.empty(0, settings.spans, place.votes.device)
        memory = KernelMemory(nothing.counts, nothing, frame.plan.gone.start)
        if store.state is not None:
            memory.newest = store.state.last[frame.plan.row]  # of which the chunk knows only that it is there
            memory.saw(begin - 1)
        tokens = replace(self.chunk, begin=begin, end=begin + place.frame.rows, ending=place.frame.tokens_ask)
        return RecordedChunk(
            **{**vars(tokens), "memory": memory, "kept": False},
            store=store,
            plan=frame.plan,
            ranks=self.ranks,
            lanes=self.lanes,
            frame=frame,
            leaving=place.leaving,
            waiting=self.run.fresh(settings),
        )
