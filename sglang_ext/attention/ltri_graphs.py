"""Chunks of prompts of Ltri-LLM inside CUDA graphs, one for each layer.

From some token on (`Ltri.alike_from`), the chunks of a prompt do the same, in frames of as many rows (`ltri_frames`):
the launches of a *run* of chunks (`ltri_runs`), in one layer, are recorded once and replayed for every other. The
longest run has all chunks of a pass, so that the host launches one graph a layer; shorter ones, of powers of two, serve
what is left, and some have a prompt's end. The chunks before `alike_from` are recorded each. What differs between
chunks lies on the device, in plans that stand (`StandingPlan`). Where a pass needs a run twice, its plans are loaded
anew in every layer.

Blocks that leave the window with a run are copied to the host behind it (`ltri_copies`). A chunk that wants such a
block back takes it from where it waits for its copy. Inside a graph, each step of a chunk but the last has a lane.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from sglang_ext.attention.ltri_copies import HostCopies
from sglang_ext.attention.ltri_frames import Frame, FramePlan, Nowhere, StandingPlan
from sglang_ext.attention.ltri_layer import LayerTokens
from sglang_ext.attention.ltri_plan import Seat
from sglang_ext.attention.ltri_recorded import RecordedRun
from sglang_ext.attention.ltri_runs import Before, ChunkPlace, ChunkRows, ChunkRun, PlacedRun, Replay, Tokens
from sglang_ext.attention.ltri_state import HIGH_PRIORITY, KernelMemory, Lanes, LayerStore, Leaving, Retrieved
from sglang_ext.kernels.span_index import Spans
from sglang_ext.policies.ltri import ONE_RANK, TensorRanks, kept_chunks
from sglang_ext.policies.ltri_options import Ltri

CHUNKS_AT_ONCE = 3
"""Chunks that have a room for what they see. A window is gathered once the last chunk in its room is answered, and what
it leaves is remembered."""


class ChunkGraphs:
    """Graphs of chunks, in every layer and run.

    Args:
        settings: of the method.
        stores: by layer.
        blocks: of a stream that may leave its window.
        nowhere: where rows of a frame that are not the chunk's leave things.
        device: of the KV cache.
        ranks: the tensor-parallel ranks, which share the heads. What they add is recorded, too, in one order on all.

    Attributes:
        replayed: how often a chunk was, in a layer.
        copies: of blocks to the host.
    """

    def __init__(
        self,
        settings: Ltri,
        stores: Mapping[int, LayerStore],
        blocks: int,
        nowhere: Nowhere,
        device: torch.device,
        ranks: TensorRanks = ONE_RANK,
    ) -> None:
        self._settings, self._stores, self._blocks, self._nowhere = settings, stores, blocks, nowhere
        self._ranks = ranks
        self._runs: list[ChunkRun] = []
        scratch = next(iter(stores.values())).scratch
        self._rooms = [scratch, *(scratch.beside() for _ in range(CHUNKS_AT_ONCE - 1))]  # no graph keeps them alive
        self.replayed, self.copies = 0, HostCopies(device)

    def record(self, chunks: Mapping[int, LayerTokens[Spans]], seat: Seat, frames: Sequence[Sequence[Frame]]) -> None:
        """Record all runs in all layers, with chunks of a stream; this runs them, and leaves nothing of use in its row.

        Args:
            chunks: layer -> a whole chunk there.
            seat: of the stream.
            frames: of each run.
        """
        first = next(iter(chunks.values()))
        keys, values = first.caches.keys, first.caches.values
        rows = max(sum(frame.rows for frame in each) for each in frames)
        room = ChunkRows.empty(rows, first.heads, keys, values)
        recorder, lanes = GraphRecorder(keys.device), Lanes.beside(keys.device)
        for number, each in enumerate(frames):
            run = self._run(number, each, first, seat, room)
            for layer in sorted(chunks):
                run.replays[layer] = recorder.record(self._in_layer(run, chunks[layer], lanes).compute)
            self._runs.append(run)

    def place(self, chunks: Tokens, seat: Seat, stored: int, taken: list[PlacedRun]) -> PlacedRun | None:
        """Have places for the first of some chunks, which follow others of their prompt.

        Args:
            chunks: in the first layer.
            seat: of their stream.
            stored: blocks that have left the window before them.
            taken: other runs of the pass, to which theirs is added.

        Returns:
            As many as fit, in the run that takes most, then has fewest rows, then is least in `taken`, or None.
        """
        settings, shares = self._settings, Counter(other.run.number for other in taken)
        fitting = [run for run in self._runs if run.fits(settings, chunks, stored)]
        if not fitting:
            return None
        run, plans = min(fitting, key=lambda each: (-len(each.places), each.rows, shares[each.number])), []
        for place, tokens in zip(run.places, chunks, strict=False):
            plans.append(FramePlan.on_host(place.frame, tokens, seat, self._nowhere, stored))
            stored = plans[-1].plan.stored
        some = chunks[: len(plans)]
        wanted = kept_chunks(some[-1].begin // settings.chunk)
        there = chunks[0].memory.snapshots  # a fork has its source's snapshot where it begins, and keeps no other
        kept = [
            tokens.kept and tokens.begin not in there and tokens.begin // settings.chunk in wanted for tokens in some
        ]
        placed = PlacedRun(run, seat, plans, kept, self._leave(run, plans, chunks[0]), shared=shares[run.number] > 0)
        for other in taken:
            other.shared |= other.run is run
        taken.append(placed)
        return placed

    def attend(
        self,
        placed: PlacedRun,
        chunks: Tokens,
        row: int,
        given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`KernelChunk.attend` of chunks whose stream has a row, replayed.

        Args:
            placed: the chunks in their run.
            chunks: the same, in this layer.
            row: of their stream.
            given: (query, keys, values) of all of their tokens.
            into: as in `PlacedRun.read`.

        Returns:
            [tokens, heads, value_dim], until the next chunks are replayed.
        """
        run, newest = placed.run, chunks[-1]
        layer, memory = newest.caches.layer, newest.memory
        if not isinstance(memory, KernelMemory):
            raise ValueError(f"a {type(memory).__name__} for kernels: expected a KernelMemory")
        run.load(placed)
        placed.write(given)
        self.copies.wait_for_run(run.number)
        run.replays[layer]()
        self.replayed += len(chunks)
        if placed.leaves:
            self.copies.put(run.number, layer, run.leaving, newest.host, placed.leaves)
        out = placed.read(into)
        self._remember(placed, chunks, memory)
        if newest.voter is not None:
            self._keep_tile(newest, memory, row)
        return out

    def _leave(self, run: ChunkRun, plans: Sequence[FramePlan], first: LayerTokens[Spans]) -> list[tuple[int, int]]:
        """(place in `ChunkRun.leaving`, number on the host) of each block that leaves the window."""
        begins = accumulate((place.frame.gone(self._settings) for place in run.places), initial=0)
        return [
            (begin + number, first.host.lease.ids[block])
            for begin, plan in zip(begins, plans, strict=False)
            for number, block in enumerate(plan.gone)
        ]

    def _remember(self, placed: PlacedRun, chunks: Tokens, memory: KernelMemory) -> None:
        """Know what the layer remembers behind some chunks."""
        chunk, newest, run = self._settings.chunk, chunks[-1], placed.run
        votes = newest.voter is not None and any(placed.kept)
        before = run.before.copied() if votes and run.before is not None else None
        for number, (plan, kept, tokens) in enumerate(zip(placed.plans, placed.kept, chunks, strict=True)):
            memory.stored = plan.plan.stored
            if kept and before is not None:
                memory.have(tokens.begin, chunk, before.of(number, memory.stored))
            elif kept:
                memory.keep(tokens.begin, chunk)
        memory.part(chunks[0].begin)  # few are left of an older run, whose memory they would keep
        memory.retrieved = None
        if newest.end - newest.begin < chunk:  # the prompt's last chunk is none of the whole ones
            memory.retrieved = Retrieved(*run.places[-1].found[newest.caches.layer].clone().unbind())

    def _keep_tile(self, tokens: LayerTokens[Spans], memory: KernelMemory, row: int) -> None:
        """Know the newest token, and where the tile of the newest block lies that is not complete."""
        settings = self._settings
        state, newest = self._stores[tokens.caches.layer].state, settings.blocks(tokens.end) - 1
        memory.saw(tokens.end - 1)
        memory.tiles.clear()
        waits = newest >= 0 and settings.first(newest + 1) > tokens.end
        if state is not None and settings.index == "ltri" and waits:
            memory.tiles[newest] = state.tile[row]

    # ---- recording ----

    def _run(
        self, number: int, frames: Sequence[Frame], first: LayerTokens[Spans], seat: Seat, room: ChunkRows
    ) -> ChunkRun:
        """A run that no layer was recorded of, with some chunks in it, in the first of the rows of all runs."""
        settings, (keys, values) = self._settings, (first.caches.keys, first.caches.values)
        received = next((store.state.received for store in self._stores.values() if store.state), None)
        gone = [0, *accumulate(frame.gone(settings) for frame in frames)]
        rows = [0, *accumulate(frame.rows for frame in frames)]
        leaving, places, plans = Leaving.empty(gone[-1] * settings.block, keys, values), [], []
        for at, frame in enumerate(frames):
            begin = first.begin if frame.begin is None else frame.begin
            tokens = replace(first, begin=begin, end=begin + frame.most, ending=frame.tokens_ask)
            plans.append(FramePlan.on_host(frame, tokens, seat, self._nowhere, first.memory.stored))
            places.append(
                ChunkPlace(
                    frame=frame,
                    rows=slice(rows[at], rows[at + 1]),
                    standing=StandingPlan(plans[-1], self._blocks, keys.device),
                    leaving=leaving.part(settings, gone[at], gone[at + 1]),
                    votes=torch.zeros(1, self._blocks, device=keys.device),
                )
            )
        before = None if received is None else Before.empty(settings, len(frames), received)
        gone_ids = keys.new_zeros(gone[-1], dtype=torch.int32)
        run = ChunkRun(number, places, room.of(slice(rows[-1])), leaving, gone_ids, before)
        run.load(PlacedRun(run, seat, plans, [False] * len(plans), ()))
        return run

    def _in_layer(self, run: ChunkRun, chunk: LayerTokens[Spans], lanes: Lanes) -> RecordedRun:
        """A run in one layer, of which a chunk is given."""
        layer = chunk.caches.layer
        store = self._stores[layer]
        voted = any(each.state is not None for before, each in self._stores.items() if before < layer)
        stores = [replace(store, scratch=room) for room in self._rooms]
        return RecordedRun(run, chunk, stores, self._ranks, lanes, voted)


class GraphRecorder:
    """CUDA graphs that share their memory; on a CPU, what was recorded is run again.

    All are recorded on one stream, and with the same lanes, because PyTorch reuses freed memory within a stream only.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        self._stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY) if on_gpu else None

    def record(self, body: Callable[[], None]) -> Replay:
        """Run launches once, which compiles what has to be, and record them.

        A CUDA graph does not keep alive what it did not allocate: the caller keeps all that `body` reads and writes.
        """
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
