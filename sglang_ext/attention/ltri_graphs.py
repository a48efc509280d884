"""Chunks of prompts of Ltri-LLM inside CUDA graphs, one for each layer.

From some token on (`Ltri.alike_from`), the chunks of a prompt do the same, in frames of as many rows (`ltri_frames`):
the launches of one, in one layer, are recorded once and replayed for every other. What differs between chunks lies on
the device, in a plan that stands (`StandingPlan`). The chunks before that are recorded each. A pass has chunks in
several *places*, one behind the other; each place has a plan and graphs of its own, so that a layer need not load what
the layer before it has loaded. Where chunks are more than places, some share one, and are loaded anew in every layer.

Blocks that leave the window are copied to the host by the GPU's copy engine, beside all else (`HostCopies`): a kernel
that writes to the host holds up others on its multiprocessors. A chunk that wants such a block back takes it from where
it waits for its copy. Blocks that come back, and what a layer remembers, have lanes of their own inside a graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from sglang_ext.attention.ltri_frames import Frame, FramePlan, Nowhere, StandingPlan
from sglang_ext.attention.ltri_layer import LayerTokens
from sglang_ext.attention.ltri_memory import LayerHost
from sglang_ext.attention.ltri_plan import Seat
from sglang_ext.attention.ltri_recorded import RecordedChunk
from sglang_ext.attention.ltri_state import KernelMemory, Lane, Lanes, LayerStore, Leaving, Retrieved
from sglang_ext.kernels.clamped_attention.dispatch import move
from sglang_ext.kernels.span_index import Spans
from sglang_ext.policies.ltri_options import Ltri

Replay: TypeAlias = Callable[[], object]


@dataclass(frozen=True)
class ChunkRows:
    """The rows of a chunk, which graphs read and write; one for all places and layers.

    Attributes:
        query: [chunk, heads, head_dim], not rotated, as the keys.
        keys: [chunk, kv_heads, head_dim].
        values: [chunk, kv_heads, value_dim].
        out: [chunk, heads, value_dim].
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor

    @classmethod
    def empty(cls, settings: Ltri, heads: int, keys: torch.Tensor, values: torch.Tensor) -> ChunkRows:
        """Rows for a layer with such a KV cache."""
        rows = lambda count, like: like.new_zeros(settings.chunk, count, like.shape[2])  # noqa: E731
        kv_heads = keys.shape[1]
        return cls(rows(heads, keys), rows(kv_heads, keys), rows(kv_heads, values), rows(heads, values))


@dataclass(eq=False)
class PlacedChunk:
    """A chunk of a pass in its place.

    Attributes:
        place: where it is computed.
        plan: the chunk.
        packed: `plan`, to be loaded.
        shared: whether another chunk of the pass has the same place.
        votes: [1, blocks] float32, of the layers so far, while another chunk is in the place.
    """

    place: ChunkPlace
    plan: FramePlan
    packed: torch.Tensor
    shared: bool = False
    votes: torch.Tensor | None = None


@dataclass(eq=False)
class ChunkPlace:
    """Where one chunk of a pass is computed.

    Attributes:
        number: of the place, from 0.
        frame: of its chunks.
        standing: the plan that graphs read.
        leaving: blocks on their way to the host.
        chunk: the one that was loaded last.
        votes: [1, blocks] float32, of the layers so far. Graphs share their memory, and a graph of another place may
            write to all of it between two layers of this one: so votes lie outside of that memory.
        voted: whether a layer that votes was recorded.
        leaves: layer -> what has the blocks in `leaving`.
        replays: layer -> what computes the chunk there, behind that.
        found: layer -> what the chunk got back there, until the next one.
    """

    number: int
    frame: Frame
    standing: StandingPlan
    leaving: Leaving
    votes: torch.Tensor
    chunk: PlacedChunk | None = None
    voted: bool = False
    leaves: dict[int, Replay] = field(default_factory=dict)
    replays: dict[int, Replay] = field(default_factory=dict)
    found: dict[int, Retrieved] = field(default_factory=dict)

    def load(self, chunk: PlacedChunk) -> None:
        """Have a chunk here, with the votes of the layers before; those of the one that was here are kept for it."""
        before = self.chunk
        if chunk is before:
            return
        if before is not None and before.shared:
            before.votes = self.votes.clone()
        plan = chunk.plan.plan
        self.standing.load(chunk.packed, plan.ids[: plan.stored])
        if chunk.votes is not None:
            self.votes.copy_(chunk.votes)
        self.chunk = chunk


class HostCopies:
    """Copies of blocks to the host, by the copy engine, one behind the other.

    Args:
        device: of the blocks.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._of_layer = dict[int, torch.cuda.Event]()
        self._of_place = dict[int, torch.cuda.Event]()

    def wait_for_layer(self, layer: int) -> None:
        """What is launched from here on finds all blocks of a layer on the host."""
        if layer in self._of_layer:
            torch.cuda.current_stream().wait_event(self._of_layer[layer])

    def wait_for_place(self, number: int) -> None:
        """What is launched from here on may write where the blocks of a place waited for their copies."""
        if number in self._of_place:
            torch.cuda.current_stream().wait_event(self._of_place[number])

    def put(self, number: int, layer: int, leaving: Leaving, host: LayerHost, ids: Sequence[int]) -> None:
        """Copy the blocks of a place to their numbers on the host, as soon as what was launched so far has ended."""
        block = host.host.keys[layer].shape[1]
        pairs = [
            (source.unflatten(0, (-1, block)), kept[layer])
            for source, kept in ((leaving.keys, host.host.keys), (leaving.values, host.host.values))
        ]
        if self._stream is None:
            self._copy(pairs, ids)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(pairs, ids)
            done = torch.cuda.Event()
            done.record()
        self._of_layer[layer] = self._of_place[number] = done

    @staticmethod
    def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], ids: Sequence[int]) -> None:
        together = list(ids) == list(range(ids[0], ids[0] + len(ids)))
        for waiting, kept in pairs:
            source = waiting[: len(ids)]
            if together:
                kept[ids[0] : ids[0] + len(ids)].copy_(source, non_blocking=True)
            else:
                for number, each in zip(ids, source, strict=True):
                    kept[number].copy_(each, non_blocking=True)


class ChunkGraphs:
    """Graphs of chunks, in every layer and place.

    Args:
        settings: of the method.
        stores: by layer.
        blocks: of a stream that may leave its window.
        nowhere: where rows of a frame that are not the chunk's leave things.
        device: of the KV cache.

    Attributes:
        replayed: how often a chunk was, in a layer.
        copies: of blocks to the host.
    """

    def __init__(
        self, settings: Ltri, stores: Mapping[int, LayerStore], blocks: int, nowhere: Nowhere, device: torch.device
    ) -> None:
        self._settings, self._stores, self._blocks, self._nowhere = settings, stores, blocks, nowhere
        self._places: list[ChunkPlace] = []
        self._rows: ChunkRows | None = None
        self._began: torch.Tensor | None = None
        self.replayed, self.copies = 0, HostCopies(device)

    def record(self, chunks: Mapping[int, LayerTokens[Spans]], seat: Seat, frames: Sequence[Frame]) -> None:
        """Record a chunk of a stream, and run it, in all layers; what it leaves in the stream's row is of no use.

        Args:
            chunks: layer -> a whole chunk there.
            seat: of the stream.
            frames: a place for each of them.
        """
        settings, first = self._settings, next(iter(chunks.values()))
        keys, values = first.caches.keys, first.caches.values
        self._rows = ChunkRows.empty(settings, first.heads, keys, values)
        states = (store.state for store in self._stores.values())
        self._began = next((state.received.new_zeros(1, settings.slots) for state in states if state), None)
        graphs = _Graphs(keys.device)
        for number, frame in enumerate(frames):
            begin = first.begin if frame.begin is None else frame.begin
            plan = FramePlan.of(frame, replace(first, begin=begin, end=begin + frame.most), seat, self._nowhere)
            leaving = Leaving.empty(settings, keys, values)
            votes = torch.zeros(1, self._blocks, device=keys.device)
            place = ChunkPlace(number, frame, StandingPlan(plan, self._blocks), leaving, votes)
            place.load(PlacedChunk(place, plan, plan.packed()))
            for layer in sorted(chunks):
                tokens = replace(chunks[layer], begin=begin, end=begin + frame.rows)
                if frame.gone(settings):
                    place.leaves[layer] = graphs.record(self._leave(place, tokens))
                place.replays[layer] = graphs.record(self._body(place, tokens, self._rows, graphs))
            self._places.append(place)

    def place(self, tokens: LayerTokens[Spans], seat: Seat, taken: list[PlacedChunk]) -> PlacedChunk | None:
        """Have a place for a chunk that follows others of its prompt.

        Args:
            tokens: the chunk, in the first layer.
            seat: of its stream.
            taken: other chunks of the pass, to which it is added.

        Returns:
            The chunk in the place with the fewest rows, that fewest others have. None where none fits, or too many
            blocks leave the window.
        """
        settings, shares = self._settings, Counter(chunk.place.number for chunk in taken)
        fitting = [place for place in self._places if place.frame.fits(settings, tokens.begin, tokens.end)]
        if not fitting or settings.evicted(tokens.begin) - tokens.memory.stored > settings.chunk // settings.block:
            return None
        place = min(fitting, key=lambda each: (each.frame.rows, shares[each.number]))
        plan = FramePlan.of(place.frame, tokens, seat, self._nowhere)
        chunk = PlacedChunk(place, plan, plan.packed(), shared=shares[place.number] > 0)
        for other in taken:
            other.shared |= other.place is place
        taken.append(chunk)
        return chunk

    def attend(
        self,
        placed: PlacedChunk,
        tokens: LayerTokens[Spans],
        row: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """`KernelChunk.attend` of a chunk whose stream has a row, replayed; what it returns holds until the next."""
        rows, memory, layer, place, chunk = self._rows, tokens.memory, tokens.caches.layer, placed.place, placed.plan
        if rows is None or not isinstance(memory, KernelMemory):
            raise ValueError("a chunk is replayed before one was recorded: expected `record` first")
        place.load(placed)
        part = slice(chunk.lead, chunk.count)
        for into, new in ((rows.query, query), (rows.keys, keys), (rows.values, values)):
            if chunk.count - chunk.lead < place.frame.rows:
                into.zero_()  # what another prompt left may not be finite
            into[part].copy_(new)
        if chunk.gone:
            self.copies.wait_for_place(place.number)
            place.leaves[layer]()
            ids = tokens.host.lease.ids[chunk.gone.start : chunk.gone.stop]
            self.copies.put(place.number, layer, place.leaving, tokens.host, ids)
        place.replays[layer]()
        self.replayed += 1
        memory.stored, memory.retrieved = chunk.plan.stored, None
        if tokens.end - tokens.begin < self._settings.chunk:  # the prompt's last chunk is none of the whole ones
            found = place.found[layer]
            memory.retrieved = Retrieved(found.blocks.clone(), found.ways.clone())
        if tokens.kept:
            memory.keep(tokens.begin, self._settings.chunk, None if self._began is None else self._began[0])
        if tokens.voter is not None:
            memory.saw(tokens.end - 1)
            self._keep_tile(memory, layer, row, tokens.end)
        return rows.out[part]

    def _keep_tile(self, memory: KernelMemory, layer: int, row: int, end: int) -> None:
        """Know where the tile of the newest block lies that is not complete."""
        settings, state = self._settings, self._stores[layer].state
        newest = settings.blocks(end) - 1
        memory.tiles.clear()
        waits = newest >= 0 and settings.first(newest + 1) > end
        if state is not None and settings.index == "ltri" and waits:
            memory.tiles[newest] = state.tile[row]

    def _leave(self, place: ChunkPlace, tokens: LayerTokens[Spans]) -> Callable[[], None]:
        """What has the blocks that leave the window where they wait: the chunk's own tokens take their slots."""
        gone, leaving = place.standing.plan.plan.gone_tokens, place.leaving
        if gone is None:
            raise ValueError(
                f"the frame at token {tokens.begin} has no room for blocks that leave: expected `Frame.gone` above 0"
            )
        caches, slots = (tokens.caches.keys, tokens.caches.values), gone.slots
        return lambda: move(caches, (leaving.keys, leaving.values), read=slots)

    def _body(
        self, place: ChunkPlace, tokens: LayerTokens[Spans], rows: ChunkRows, graphs: _Graphs
    ) -> Callable[[], None]:
        """What computes a frame in one layer out of what stands."""
        layer, began, frame = tokens.caches.layer, self._began, place.standing.plan
        store, plan, part = self._stores[layer], frame.plan, slice(0, place.frame.rows)
        state, nothing = store.state, Spans.empty(0, self._settings.spans, rows.query.device)
        voted = place.voted

        def compute() -> None:
            memory = KernelMemory(nothing.counts, nothing, plan.gone.start)
            if state is not None:
                memory.newest = state.last[plan.row]  # of which the chunk knows only that it is there
                memory.saw(tokens.begin - 1)
            votes = {tokens.begin: place.votes} if voted else {}
            given = {**vars(tokens), "memory": memory, "kept": False}
            chunk = RecordedChunk(
                store=store, plan=plan, lanes=graphs.lanes, frame=frame, leaving=place.leaving, **given
            )
            chunk.remember()
            if state is not None and began is not None:
                torch.index_select(state.received, 0, plan.at, out=began)
            rows.out[part].copy_(chunk.seen(rows.query[part], rows.keys[part], rows.values[part], votes))
            chunk.lanes.join()
            if not voted and tokens.begin in votes:
                place.votes.copy_(votes[tokens.begin])
                place.voted = True
            if memory.retrieved is not None:
                place.found[layer] = memory.retrieved

        return compute


class _Graphs:
    """CUDA graphs that share their memory; on a CPU, what was recorded is run again.

    All are recorded on one stream, because PyTorch reuses freed memory within a stream only.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._on_gpu else None
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self.lanes = Lanes(*(Lane(torch.cuda.Stream(device) if self._on_gpu else None) for _ in range(4)))

    def record(self, body: Callable[[], None]) -> Replay:
        """Run launches once, which compiles what has to be, and record them."""
        body()
        if self._stream is None:
            return body
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # torch.cuda.graph would collect garbage before each of hundreds
            graph.capture_begin(pool=self._pool)
            body()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph.replay
