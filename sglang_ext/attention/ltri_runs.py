"""Runs of chunks of Ltri-LLM: where chunks that are replayed together have their plans, and what they leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import torch

from sglang_ext.attention.ltri_frames import Frame, FramePlan, StandingPlan
from sglang_ext.attention.ltri_layer import LayerTokens
from sglang_ext.attention.ltri_memory import Snapshot
from sglang_ext.attention.ltri_plan import Seat, SpanRing, on_device
from sglang_ext.attention.ltri_state import LayerStore, Leaving
from sglang_ext.kernels.host_fetch import FreshBlocks
from sglang_ext.kernels.span_index import Spans
from sglang_ext.policies.ltri_options import Ltri

Replay: TypeAlias = Callable[[], object]
Tokens: TypeAlias = Sequence[LayerTokens[Spans]]
"""Of consecutive chunks of a stream, in one layer."""


@dataclass(frozen=True)
class ChunkRows:
    """The rows of a run of chunks, which graphs read and write; one for all runs and layers.

    Attributes:
        query: [rows, heads, head_dim], not rotated, as the keys.
        keys: [rows, kv_heads, head_dim].
        values: [rows, kv_heads, value_dim].
        out: [rows, heads, value_dim].
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor

    @classmethod
    def empty(cls, rows: int, heads: int, keys: torch.Tensor, values: torch.Tensor) -> ChunkRows:
        """Rows for a layer with such a KV cache."""
        room = lambda count, like: like.new_zeros(rows, count, like.shape[2])  # noqa: E731
        kv_heads = keys.shape[1]
        return cls(room(heads, keys), room(kv_heads, keys), room(kv_heads, values), room(heads, values))

    def of(self, part: slice) -> ChunkRows:
        """Some of these rows."""
        return ChunkRows(self.query[part], self.keys[part], self.values[part], self.out[part])


@dataclass(frozen=True)
class Before:
    """What a layer that votes remembered before each chunk of a run, for streams that begin alike; one for all layers.

    Attributes:
        received: [chunks, slots of a stream] float32 or float64.
        bounds: [chunks, blocks of a row, spans, 2] int32 (`SpanRing`).
        counts: [chunks, blocks of a row, spans] int32.
    """

    received: torch.Tensor
    bounds: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def empty(cls, settings: Ltri, chunks: int, received: torch.Tensor) -> Before:
        """Room for it; `received` has its dtype and device."""
        shape = chunks, SpanRing.blocks(settings), settings.spans
        bounds, counts = (torch.zeros(each, dtype=torch.int32, device=received.device) for each in ((*shape, 2), shape))
        return cls(received.new_zeros(chunks, settings.slots), bounds, counts)

    def keep(self, number: int, store: LayerStore, at: torch.Tensor) -> None:
        """Copy here what the stream's row `at`, [1] int64, holds before chunk `number` of the run."""
        ring, part = store.spans_of_voters, slice(number, number + 1)
        torch.index_select(store.map_of_voters.received, 0, at, out=self.received[part])
        for kept, all_rows in ((self.bounds[part], ring.bounds), (self.counts[part], ring.counts)):
            torch.index_select(all_rows[:-1].unflatten(0, (-1, kept.shape[1])), 0, at, out=kept)

    def copied(self) -> Before:
        """A copy that the next layer leaves alone."""
        return Before(self.received.clone(), self.bounds.clone(), self.counts.clone())

    def of(self, number: int, stored: int) -> Snapshot[Spans]:
        """The snapshot before a chunk of the run, behind so many blocks on the host; it shares this memory."""
        spans = Spans(self.bounds[number], self.counts[number])
        return Snapshot(stored, spans, self.received[number], shares=True)


@dataclass(eq=False)
class ChunkPlace:
    """Where one chunk of a run is computed.

    Attributes:
        frame: of its chunks.
        rows: of the run's that are the frame's.
        standing: the plan that graphs read.
        leaving: blocks on their way to the host.
        votes: [1, blocks] float32, of the layers so far. Graphs share their memory, and a graph of another run may
            write to all of it between two layers of this one: so votes lie outside of that memory.
        found: layer -> [2, n] int32, blocks and ways (`Retrieved`) that the chunk got back there, until the next one;
            in the last place of a run alone.
    """

    frame: Frame
    rows: slice
    standing: StandingPlan
    leaving: Leaving
    votes: torch.Tensor
    found: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class PlacedRun:
    """Consecutive chunks of a stream in a run.

    Attributes:
        run: where they are computed.
        seat: of the stream.
        plans: of the chunks, on the CPU.
        kept: for each chunk, whether a snapshot of the memory before it is kept when the whole run has been computed.
        leaves: (place in the run's `leaving`, number on the host) of each block that leaves the window.
        shared: whether others of the pass are computed there, too.
        votes: [1, blocks] float32 of each chunk, of the layers so far, while others are in the run.
        packed: the plans, to be loaded.
        full: whether the chunks have all rows of their frames.
        framed: the rows of the run that have tokens; None where others lie between them.
        token_of_row: [rows of the run] int32, the token of each row, counted over all chunks; 0 where a row has none.
            Empty where the run is full.
        row_of_token: [tokens of all chunks] int32, the row of each; empty where `framed` says it.
    """

    run: ChunkRun
    seat: Seat
    plans: Sequence[FramePlan]
    kept: Sequence[bool]
    leaves: Sequence[tuple[int, int]]
    shared: bool = False
    votes: Sequence[torch.Tensor] = ()

    def __post_init__(self) -> None:
        self.packed = [plan.packed(pin=self.seat.at.is_cuda) for plan in self.plans]
        self.full = all(
            plan.count - plan.lead == place.frame.rows for place, plan in zip(self.run.places, self.plans, strict=True)
        )
        rows = [
            range(place.rows.start + plan.lead, place.rows.start + plan.count)
            for place, plan in zip(self.run.places, self.plans, strict=True)
        ]
        together = all(one.stop == next_one.start for one, next_one in pairwise(rows))
        self.framed = slice(rows[0].start, rows[-1].stop) if together else None
        self.token_of_row, self.row_of_token = self._indices(rows)

    def _indices(self, framed: Sequence[range]) -> tuple[torch.Tensor, torch.Tensor]:
        """`token_of_row` and `row_of_token`, in one copy to the device.

        Args:
            framed: of each chunk, the rows of the run that have its tokens.
        """
        if self.full:
            return self.seat.slots[:0], self.seat.slots[:0]
        tokens, rows = [0] * self.run.rows, list[int]()
        for each in framed:
            tokens[each.start : each.stop] = range(len(rows), len(rows) + len(each))
            rows += each
        both = on_device(tokens if self.framed else tokens + rows, self.seat.at.device)
        return both[: len(tokens)], both[len(tokens) :]

    def write(self, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        """Write (queries, keys, values) of all tokens into the run's rows.

        A row that has no token gets the first one's: what another prompt has left there may not be finite.
        """
        room = self.run.room
        for into, new in zip((room.query, room.keys, room.values), given, strict=True):
            if self.full:
                into.copy_(new)
            else:
                torch.index_select(new, 0, self.token_of_row, out=into)

    def read(self, into: torch.Tensor | None = None) -> torch.Tensor:
        """[tokens of all chunks, heads, value_dim]; the next replay of any run may write to the same memory.

        Args:
            into: of this shape, to be written where answers have to be gathered; None for memory of their own.
        """
        out = self.run.room.out
        return torch.index_select(out, 0, self.row_of_token, out=into) if self.framed is None else out[self.framed]


@dataclass(eq=False)
class ChunkRun:
    """Chunks that are replayed together.

    Attributes:
        number: of the run, from 0.
        places: of its chunks, one behind the other.
        room: their rows.
        leaving: room for the blocks that leave the window with any of them.
        gone_ids: [blocks of `leaving`] int32, their numbers on the host.
        before: what there was before the chunks, in the layer that was replayed last; None where nothing votes.
        chunks: those that were loaded last.
        replays: layer -> what computes all of them there.
    """

    number: int
    places: Sequence[ChunkPlace]
    room: ChunkRows
    leaving: Leaving
    gone_ids: torch.Tensor
    before: Before | None
    chunks: PlacedRun | None = None
    replays: dict[int, Replay] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Of all frames."""
        return self.places[-1].rows.stop

    def fits(self, settings: Ltri, chunks: Tokens, stored: int) -> bool:
        """Whether the first of some chunks fit the places, where `stored` blocks have left the window before them."""
        if len(chunks) < len(self.places):
            return False
        for place, tokens in zip(self.places, chunks, strict=False):
            leave = settings.evicted(tokens.begin) - stored
            if not place.frame.fits(tokens) or leave > settings.chunk // settings.block:
                return False
            stored += leave
        return True

    def load(self, chunks: PlacedRun) -> None:
        """Load the plans and votes of chunks; the votes of those before are saved, if they share the run."""
        before = self.chunks
        if chunks is before:
            return
        if before is not None and before.shared:
            before.votes = [place.votes.clone() for place in self.places]
        for place, plan, packed in zip(self.places, chunks.plans, chunks.packed, strict=True):
            place.standing.load(packed, chunks.seat, plan.plan.stored)
        torch.cat([place.standing.plan.plan.gone_ids for place in self.places], out=self.gone_ids)
        for place, votes in zip(self.places, chunks.votes, strict=False):
            place.votes.copy_(votes)
        self.chunks = chunks

    def fresh(self, settings: Ltri) -> FreshBlocks | None:
        """The blocks that leave, before they are on the host."""
        return self.leaving.fresh(settings, self.gone_ids) if len(self.gone_ids) else None
