"""One chunk of a stream of Ltri-LLM in one layer, in kernels: as `ltri_chunk`, and the host waits for nothing.

What the host needs to know follows from the number of the chunk (`ltri_plan`). Which blocks come back, and what is
remembered of them, stays on the device.

**Ranks.** They add what decides in a layer that votes, as in plain PyTorch (`ltri_chunk`), but scores in the place of
products: the index of a layer lies on the rank that has its retrieval head, and the others have scores of 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sglang_ext.attention.ltri_index import LayerIndex
from sglang_ext.attention.ltri_layer import LayerTokens, Voter
from sglang_ext.attention.ltri_plan import ChunkPlan, SpanRing, on_device
from sglang_ext.attention.ltri_spans import cut, keep_vectors, leaving_spans, padded, query_spans, token_spans
from sglang_ext.attention.ltri_state import KernelMemory, Lanes, LayerStore, Looked, Retrieved, Sought, span_rule
from sglang_ext.kernels.block_votes import QuerySpans, elect, score_blocks
from sglang_ext.kernels.clamped_attention import ChunkQuery, FarKeys, SeenKeys
from sglang_ext.kernels.clamped_attention.dispatch import gather_keys, merge, move, rotate_queries
from sglang_ext.kernels.host_fetch import FreshBlocks, fetch, look_up, store
from sglang_ext.kernels.local_map import BlockTiles, LocalMap, Received, fill_tiles, received
from sglang_ext.kernels.rope import rotate
from sglang_ext.kernels.span_index import Spans
from sglang_ext.policies.ltri import ONE_RANK, TensorRanks, random_blocks


@dataclass(frozen=True)
class KernelChunk(LayerTokens[Spans]):
    """A chunk in kernels.

    Attributes:
        memory: of the layer, on the device.
        store: of the layer.
        plan: the chunk, in every layer.
        ranks: the tensor-parallel ranks, which share the heads, and add what decides in a layer that votes.
        lanes: what runs beside the rest, in a chunk that is recorded (`ltri_recorded`).
    """

    memory: KernelMemory
    store: LayerStore
    plan: ChunkPlan
    ranks: TensorRanks = ONE_RANK
    lanes: Lanes = field(default_factory=Lanes)

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, votes: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """As `ltri_chunk.Chunk.attend`; votes are [1, blocks] float32, and there from the first layer that votes on."""
        self.remember()
        if self.kept:
            self.memory.keep(self.begin, self.settings.chunk)
        looked = self.look(*self.gathered(query, keys, values))
        own = None if self.voter is None else self._map(looked)
        sought = self.sought(self.chosen(looked.asked, own, votes))
        self.fill(sought)
        return self.answered(looked, self.beyond(sought.retrieved))

    # ---- the steps of a chunk; in `ltri_recorded`, chunks do them beside each other ----

    def gathered(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[ChunkQuery, SeenKeys]:
        """Store the chunk's keys and values, and gather those of its window in `scratch`: (its queries, its window)."""
        move((keys, values), (self.caches.keys, self.caches.values), write=self.plan.rows.slots)
        return self._queries(query), self._window()

    def look(self, asked: ChunkQuery, window: SeenKeys) -> Looked:
        """Attend to the window; where `_late` is not 0, only to what each row sees at its true distance."""
        attention = self.store.attention
        attend = attention.attend_near if self._late else attention.attend_window
        local = attend(asked, window, width=self._width, scale=self.caches.scale)
        return Looked(asked, window, local)

    def chosen(
        self, asked: ChunkQuery, own: tuple[Spans, torch.Tensor] | None, votes: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """Choose the blocks that come back.

        Args:
            asked: the chunk's queries; not used in a layer that does not vote, where the layers before decide.
            own: (spans of the chunk's own tokens, cut in tiles of `block` tokens; [tiles, block] what these tokens
                received from all heads); None where the chunk's spans are not compared with the index.
            votes: of the layers before, to which the layer adds its own.

        Returns:
            [n] int32, numbers of the stream's blocks, on the device; n is 0 where an answer sees its prompt's blocks.
        """
        if self._of_prompt is not None:
            return self._of_prompt.blocks[:0]
        settings, stored, device = self.settings, self.plan.stored, self.slots.device
        if settings.index == "given":
            return on_device([block for block in self.given if block < stored][: settings.retrieved], device)
        if settings.index == "random":
            seed = (self.begin << 16) + self.caches.layer
            return on_device(random_blocks(stored, settings.retrieved, seed), device)
        found = self._elected(votes, asked, own)
        return found if self.plan.renewed is None or not len(found) else self.plan.renewed

    def sought(self, chosen: torch.Tensor) -> Sought:
        """Look up the blocks of `chosen` in the stream's row of the cache; missing ones get ways, for `fill`."""
        if self._of_prompt is not None:
            return Sought(self._of_prompt)
        ids = self.plan.ids[chosen.long()]  # -1, where an election finds no more blocks, is the last of `ids`: no block
        found = look_up(ids.unsqueeze(0), self.plan.at, self.store.cache)
        sought = Sought(Retrieved(chosen, found.places[0]), found)
        if not self.answers:
            self.memory.retrieved = sought.retrieved
        return sought

    def fill(self, sought: Sought) -> None:
        """Fetch the blocks whose ways are new."""
        if sought.found is not None:
            fetch(self.store.region, sought.found, self.plan.at, self.store.cache, fresh=self._fresh())

    def beyond(self, found: Retrieved) -> tuple[SeenKeys, FarKeys]:
        """Copy the sinks, and the blocks that came back, into `scratch`; the next chunk there overwrites them.

        Returns:
            (sinks, blocks). Where all rows see all sinks at the largest distance, the second has sinks, blocks, and the
            `_late` tokens of the window, which `gathered` has put there; the first is empty then.
        """
        settings, plan, count = self.settings, self.plan, found.ways.shape[0]
        slots = plan.sinks.slots
        sinks, tokens = slots.shape[0], slots.shape[0] + count * settings.block
        keys, values = self._beyond_room(tokens, 0)
        move((self.caches.keys, self.caches.values), (keys, values), read=slots)
        cached = [each.flatten(0, 1) for each in (self.store.cache.keys, self.store.cache.values)]
        blocks = [each[sinks:].view(count, settings.block, *each.shape[1:]) for each in (keys, values)]
        move((cached[0], cached[1]), (blocks[0], blocks[1]), read=found.ways, base=plan.first_way)
        if settings.far:
            at = found.blocks.long().unsqueeze(1) * settings.block + torch.arange(settings.block, device=keys.device)
            keys[sinks:] = rotate(keys[sinks:], (at + settings.sinks - plan.window.first).view(-1, 1), self.caches.rope)
        if self._sinks_are_far:
            memory = FarKeys(*self._beyond_room(tokens, self._late), self._late)
            return SeenKeys(keys[:0], keys[:0], values[:0], 0), memory
        near, _ = rotate_queries(keys[:sinks], self.store.rotation, first=-plan.window.first, edge=0)
        return SeenKeys(near, keys[:sinks], values[:sinks], 0), FarKeys(keys[sinks:], values[sinks:])

    def answered(
        self, looked: Looked, beyond: tuple[SeenKeys, FarKeys], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[rows, heads, value_dim]: attention to the window, merged with that to what `beyond` has given (`out`)."""
        (sinks, memory), asked, local = beyond, looked.asked, looked.local
        if sinks.near.shape[0] + memory.keys.shape[0] == 0:
            return local.out.to(asked.near.dtype) if out is None else out.copy_(local.out)
        if self.settings.far:
            asked = ChunkQuery(asked.near, asked.near, asked.begin)
        part = self.store.attention.attend_beyond(asked, sinks, memory, width=self._width, scale=self.caches.scale)
        return merge(local, part, asked.near.dtype, out=out).out

    # ---- the window ----

    @property
    def _width(self) -> int:
        """Rows see tokens at true distances below it, and at the largest distance from it on."""
        return self.end + 1 if self.settings.far else self.settings.window

    @property
    def _oldest(self) -> int:
        """How many of the window's tokens some row sees at the largest distance: its oldest ones."""
        return max(0, self.end - self._width - self.plan.window.first)

    @property
    def _late(self) -> int:
        """How many of the window's tokens are attended to together with those beyond it, in one call instead of two.

        All `_oldest`, or none. A layer that votes has none: its map needs the whole window's log-sum-exps. In others,
        all rows must see all sinks at the largest distance, and at least one of the window's tokens, too.
        """
        together = self.voter is None and self._sinks_are_far and self._oldest >= self.end - self.begin
        return self._oldest if together else 0

    @property
    def _sinks_are_far(self) -> bool:
        """Whether all rows see all sinks at the largest distance."""
        return not self.settings.far and self.begin - (self.plan.sinks.slots.shape[0] - 1) >= self._width

    def _queries(self, query: torch.Tensor) -> ChunkQuery:
        """Positions count from the window's first token."""
        first = self.begin - self.plan.window.first
        near, far = rotate_queries(query, self.store.rotation, first=first, edge=self.settings.window - 1)
        return ChunkQuery(near, far, self.begin)

    def _window(self) -> SeenKeys:
        plan, scratch = self.plan, self.store.scratch
        count = plan.window.slots.shape[0]
        near, far, values = scratch.near[:count], scratch.far[:count], scratch.values[:count]
        gather_keys(self.caches.keys, self.caches.values, plan.listed, self.store.rotation, count, scratch.near, values)
        # `move` copies values, too: to where `gather_keys` has just put the same, or to where the late ones are read.
        oldest = (far, values) if self._late == 0 else self._beyond_room(0, self._late)
        move((self.caches.keys, self.caches.values), oldest, read=plan.window.slots[: self._oldest])
        return SeenKeys(near, far, values, plan.window.first)

    # ---- what is remembered ----

    def remember(self) -> None:
        """Cut the spans of the blocks that are complete, and move those that have left the window to the host."""
        memory, settings, state = self.memory, self.settings, self.store.state
        if memory.last is not None and memory.last[0] < self.begin and state is not None:
            state.received.index_add_(0, self.plan.at, state.last.index_select(0, self.plan.at))
            memory.last = None
        whole = [block for block in memory.tiles if settings.first(block + 1) <= self.begin]
        tiles = [memory.tiles.pop(block) for block in whole]
        if whole and settings.index == "ltri":
            lengths = torch.full((len(whole),), settings.block, dtype=torch.int32, device=self.slots.device)
            found = self._cut(torch.stack(tiles), lengths)
            for place, block in enumerate(whole):
                at = SpanRing.places(settings, self.plan.row, range(block, block + 1), self.slots.device)
                part = slice(place, place + 1)
                self.store.spans_of_voters.put(at, Spans(found.bounds[part], found.counts[part]))
        if self.plan.gone_tokens is not None:
            self._evict(self.plan.gone_tokens.slots, self.plan.gone_tokens.cells)

    def _evict(self, slots: torch.Tensor, cells: torch.Tensor) -> None:
        settings, blocks, ids = self.settings, self.plan.gone, self.plan.gone_ids
        if self.voter is not None:
            received = self.ranks.add(self.store.map_of_voters.received.view(-1)[cells])
            given, index = received.view(len(blocks), settings.block), self.store.index
            if index is not None:
                spans, at = leaving_spans(settings, self.store, self.plan.gone_spans), ids.long()
                with self.lanes.index.apart(spans, given, at):
                    keep_vectors(settings, index, spans, given, self._gone_states(self.voter, slots), at)
        self._keep_blocks(slots.view(len(blocks), settings.block), ids)
        self.memory.stored = blocks.stop

    def _gone_states(self, voter: Voter, slots: torch.Tensor) -> torch.Tensor:
        """[tokens, dim], the voter's keys (`Voter.of_keys`) of the tokens in these slots, which leave the window."""
        return voter.of_slots(self.caches.keys, slots, self.heads)

    def _keep_blocks(self, slots: torch.Tensor, ids: torch.Tensor) -> None:
        """Have the blocks with slots [blocks, block] under their numbers on the host, [blocks] int32."""
        store(self.caches.keys, self.caches.values, slots, ids, self.store.region)

    def _map(self, looked: Looked) -> tuple[Spans, torch.Tensor] | None:
        """Keep what the map of attention to the window says of blocks.

        Returns:
            (spans of the chunk's own tokens, cut in tiles of `block` tokens; [tiles, block] what the tokens received);
            None where the chunk's spans are not compared with the index.
        """
        chunk = self._local_map(looked)
        spans, given = self._tiles(chunk), received(chunk)
        self._add_sums(given)
        if self.settings.index != "ltri":
            return None
        own = None if spans is None else self._own_spans(spans, self.ranks.add(given.chunk_received[0]))
        self._keep_tiles()
        return own

    def _local_map(self, looked: Looked) -> LocalMap:
        """What the map of the chunk's attention to the window follows from."""
        asked, window, local = looked.asked, looked.window, looked.local
        return LocalMap(
            query_near=asked.near.unsqueeze(0),
            query_far=asked.far.unsqueeze(0),
            keys_near=window.near.transpose(0, 1).unsqueeze(0),
            keys_far=window.far.transpose(0, 1).unsqueeze(0),
            lse=local.lse.unsqueeze(0),
            before=self.plan.before,
            count=self.plan.count,
            window=self._width,
            scale=self.caches.scale,
        )

    def _add_sums(self, given: Received) -> None:
        """Add what tokens receive from all rows but the last to `received`, and keep the last row's part in `last`."""
        cells, state = self.plan.window.cells, self.store.map_of_voters
        state.received.view(-1).index_fill_(0, self.plan.rows.cells, 0)  # they were an older token's
        state.received.view(-1).index_add_(0, cells, given.received[0])
        state.last.index_fill_(0, self.plan.at, 0)
        state.last.view(-1).index_copy_(0, cells, given.last[0])
        self.memory.saw(self.end - 1)

    def _tiles(self, chunk: LocalMap) -> Spans | None:
        """Fill the tiles of the attention map that the chunk has rows in.

        Returns:
            The spans of the chunk's own; None where nothing remembers spans, and where these do not ask.
        """
        settings, memory, plan = self.settings, self.memory, self.plan
        if settings.index != "ltri":
            return None
        tiles = self._no_tiles(chunk)
        for place, block in enumerate(plan.tiles.blocks):
            if block in memory.tiles:
                tiles[place] = memory.tiles[block]
            memory.tiles[block] = tiles[place]
        fill_tiles(chunk, BlockTiles(tiles, plan.tiles.firsts, plan.tiles.places))
        if self.tokens_ask or (self.answers and settings.persist):
            return None
        return self._cut(tiles[plan.tiles.asking], plan.tiles.lengths)

    def _cut(self, tiles: torch.Tensor, lengths: torch.Tensor) -> Spans:
        """The spans of tiles [tiles, heads, block, block] that have so many tokens."""
        return cut(tiles, lengths, span_rule(self.settings, self.caches.layer), self.ranks)

    def _no_tiles(self, chunk: LocalMap) -> torch.Tensor:
        """[tiles, heads, block, block] without a row, in the dtype of the log-sum-exps."""
        block = self.settings.block
        return chunk.lse.new_zeros(self.plan.tiles.places.shape[1], self.heads, block, block)

    def _keep_tiles(self) -> None:
        """Copy the tiles that wait for more rows, or to be cut, out of the tensor that holds all of the chunk's tiles.

        The newest block's goes to the stream's row of `MapState.tile`, where decoding steps write more of its rows.
        """
        memory, state, newest = self.memory, self.store.state, self.settings.blocks(self.end) - 1
        for block, tile in memory.tiles.items():
            if block == newest and state is not None:
                memory.tiles[block] = state.tile[self.plan.row].copy_(tile)
            else:
                memory.tiles[block] = tile.clone()

    def _own_spans(self, spans: Spans, given: torch.Tensor) -> tuple[Spans, torch.Tensor]:
        """(spans, [tiles, block] received) of the chunk's own tiles; where these are blocks, keep whole ones' spans."""
        settings, plan = self.settings, self.plan
        whole = [block for block in plan.tiles.blocks if settings.first(block + 1) <= self.end]
        if whole and plan.tiles.own == 0:
            count = len(whole)
            self.store.spans_of_voters.put(plan.tile_spans[:count], Spans(spans.bounds[:count], spans.counts[:count]))
            for block in whole:
                del self.memory.tiles[block]
        tiles = spans.counts.shape[0]
        return spans, padded(given.unsqueeze(1), tiles * settings.block).view(tiles, settings.block)

    # ---- what comes back ----

    @property
    def _of_prompt(self) -> Retrieved | None:
        """What the prompt has got back, where the chunk is of its answer and sees the same; else None."""
        sees = self.answers and self.settings.persist and self.settings.index != "given"
        return self.memory.retrieved if sees else None

    def _elected(
        self, votes: dict[int, torch.Tensor], asked: ChunkQuery, own: tuple[Spans, torch.Tensor] | None
    ) -> torch.Tensor:
        settings, plan, nothing = self.settings, self.plan, self.plan.gone_ids[:0]
        count = min(settings.retrieved, plan.stored)
        before = votes.get(self.begin)
        if count == 0 or (before is None and self.voter is None):
            return nothing
        scores = None if self.voter is None else self._scores(self.voter, asked, own)
        after = torch.zeros(1, plan.ids.shape[0], device=self.slots.device) if before is None else before
        weight = 0.0 if self.voter is None else self.voter.weight
        found = elect(after, scores, weight=weight, count=count, mode=settings.vote)
        votes[self.begin] = after
        if (settings.vote == "preceding" and before is None) or (settings.vote == "off" and scores is None):
            return nothing  # nobody has voted for what this layer gets
        return found[0]

    def _scores(self, voter: Voter, asked: ChunkQuery, own: tuple[Spans, torch.Tensor] | None) -> torch.Tensor:
        """[1, blocks], scores of the stream's blocks: the sum over ranks, of which those without the index add 0."""
        ids, index = self.plan.ids.unsqueeze(0), self.store.index
        if index is None:
            return self.ranks.add(torch.zeros(ids.shape, device=ids.device))
        spans, blocks = self._query_spans(voter, asked, own, index), index.of(ids, self.plan.blocks)
        self.lanes.index.follow()
        return self.ranks.add(score_blocks(spans, blocks, kind=self.settings.compared_by(self.tokens_ask)))

    def _query_spans(
        self, voter: Voter, asked: ChunkQuery, own: tuple[Spans, torch.Tensor] | None, index: LayerIndex
    ) -> QuerySpans:
        """Queries rotated to the distance `window - 1`: of the chunk's spans, of its last tokens, or all as a mean."""
        settings, states = self.settings, voter.of_queries(asked.far)
        if self.tokens_ask:
            return index.compared(self._asking_tokens(states))
        if own is None:
            mean = self._mean(states, torch.promote_types(states.dtype, torch.float32))
            return index.compared(QuerySpans(mean.view(1, 1, 1, -1), torch.ones_like(self.plan.count).view(1, 1)))
        spans, given = own
        asking = self._asking(states, given.numel()).view(*given.shape, -1)
        return query_spans(settings, index.rotation, spans, given, asking)

    def _asking_tokens(self, states: torch.Tensor) -> QuerySpans:
        """The last tokens of states [rows, dim], each as a span of its own, padded to `most_askers` spans."""
        asking = states[-self.settings.most_askers :]
        there = torch.arange(self.settings.most_askers, device=states.device) < asking.shape[0]
        return token_spans(padded(asking, len(there)), there.int())

    def _mean(self, states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[dim], of the chunk's states [rows, dim]."""
        return states.mean(0, dtype=dtype)

    def _asking(self, states: torch.Tensor, rows: int) -> torch.Tensor:
        """[rows, dim]: those of the chunk's own tokens, and behind them anything."""
        return padded(states, rows)

    def _fresh(self) -> FreshBlocks | None:
        """Blocks that leave the window, and are not on the host yet."""
        return None

    def _beyond_room(self, tokens: int, late: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Room in `scratch` for (keys, values) of `tokens` beyond the window, then of `late` tokens of the window."""
        end, scratch = self.settings.sinks + self.settings.retrieved * self.settings.block, self.store.scratch
        part = slice(end - tokens, end + late)
        return scratch.beyond_keys[part], scratch.beyond_values[part]
