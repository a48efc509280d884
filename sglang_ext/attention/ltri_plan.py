"""What a chunk of a stream of Ltri-LLM is in every layer, on the device.

It follows from numbers that the host knows: so it is written down once, in the first layer, and no layer waits for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_ext.attention.ltri_layer import LayerTokens, SpansT, cells_between
from sglang_ext.kernels.shared import sent
from sglang_ext.kernels.span_index import Spans
from sglang_ext.policies.ltri import renewed_blocks
from sglang_ext.policies.ltri_options import Ltri

PADDING_SLOT = 0
"""SGLang's padding slot in the KV cache: what it holds has no meaning."""
CPU = torch.device("cpu")
ALIGNMENT = 16
"""Triton's kernels are compiled for tensors whose addresses are multiples of this many bytes."""


def on_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """[n] int32 on a device, which nobody waits for."""
    staged = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
    return staged.to(device, non_blocking=True)


@dataclass
class Seat:
    """What one stream has on the device.

    Attributes:
        row: number of the stream's row in every tensor that has one row for each stream.
        at: [1] int64, `row` on the device.
        ids: [most blocks of a stream + 1] int32, numbers on the host of its blocks that have left the window, then -1.
            Every stream's `ids` have this width from the start, because kernels are compiled for it.
        slots: [1 + slots of a stream] int32, `PADDING_SLOT` and the KV slots of the stream's cells.
        wide_slots: the same, int64.
        host_ids: `ids`, on the CPU.
        known: how many of `ids` have been filled in.
        decodes: whether the stream's rows hold what decoding steps read.
        settled: number of the token after the stream's newest chunk, where all complete blocks have their spans, and
            the incomplete block's tile lies in the stream's row; None where that is not known.
    """

    row: int
    at: torch.Tensor
    ids: torch.Tensor
    slots: torch.Tensor
    wide_slots: torch.Tensor
    host_ids: torch.Tensor
    known: int = 0
    decodes: bool = False
    settled: int | None = None

    def learn(self, ids: array[int]) -> None:
        """Have all of a stream's blocks in `ids`, [blocks] 32-bit, of which some may be there."""
        if len(ids) > self.known:
            new = slice(self.known, len(ids))
            found = torch.frombuffer(ids[new], dtype=torch.int32)
            self.host_ids[new] = found
            self.ids[new] = sent(found, self.ids.device)
            self.known = len(ids)


@dataclass(frozen=True)
class SeatRows:
    """The tensors of all seats, a row for each. They are never freed, because two CUDA streams use them.

    The scheduler's CUDA stream writes the seat of a request that begins as a copy of another; the model's CUDA stream
    reads and writes it later. PyTorch would give a seat's own memory back to the former while the latter uses it.

    Attributes:
        at: [rows, at least 1] int64, the number of each row.
        ids: [rows, at least `room`] int32.
        slots: [rows, at least 1 + slots of a stream] int32.
        wide_slots: the same, int64.
        room: of a seat's `ids`.
        width: of its slots.
    """

    at: torch.Tensor
    ids: torch.Tensor
    slots: torch.Tensor
    wide_slots: torch.Tensor
    room: int
    width: int

    @classmethod
    def empty(cls, rows: int, slots: int, room: int, device: torch.device) -> SeatRows:
        """Rows for so many streams with so many slots each; every row begins at a multiple of `ALIGNMENT`."""
        aligned = lambda width, size: width + -width % (ALIGNMENT // size)  # noqa: E731
        at = torch.arange(rows, device=device).unsqueeze(1).repeat(1, aligned(1, 8))
        ids = torch.full((rows, aligned(room, 4)), -1, dtype=torch.int32, device=device)
        cells = torch.full((rows, aligned(1 + slots, 4)), PADDING_SLOT, dtype=torch.int32, device=device)
        return cls(at, ids, cells, cells.long(), room, 1 + slots)

    def seat(self, row: int, slots: torch.Tensor, settled: int) -> Seat:
        """The seat of a stream that takes a row and has no block yet, with KV slots [slots of a stream] int32."""
        ids, cells, wide = self.ids[row, : self.room], self.slots[row, : self.width], self.wide_slots[row, : self.width]
        ids.fill_(-1)
        cells[1:] = slots
        wide[1:] = slots
        none = torch.full((self.room,), -1, dtype=torch.int32)
        return Seat(row, self.at[row, :1], ids, cells, wide, none, settled=settled)


@dataclass(frozen=True)
class Tokens:
    """Consecutive tokens of a stream, in its slots.

    Attributes:
        first: number of the first.
        cells: [tokens] int64, indices of their cells (`cells_of`) in a flattened [rows, slots of a stream].
        slots: [tokens] int64, their KV slots.
    """

    first: int
    cells: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def on_host(cls, settings: Ltri, row: int, begin: int, end: int) -> Tokens:
        """The tokens [begin, end) of a stream in a row, on the CPU, where a slot n + 1 is the stream's cell n."""
        cells = cells_between(settings, begin, end)
        return cls(begin, torch.from_numpy(cells + row * settings.slots), torch.from_numpy(cells + 1))

    def on(self, seat: Seat) -> Tokens:
        """These tokens, from the CPU, on the device of their stream's seat."""
        slots = seat.wide_slots.index_select(0, sent(self.slots, seat.at.device))
        return Tokens(self.first, sent(self.cells, seat.at.device), slots)


@dataclass(frozen=True)
class SpanRing:
    """The spans of the blocks in the windows of all streams, in one layer, one row of blocks behind the other.

    Attributes:
        bounds: [rows * blocks of a row + 1, spans, 2] int32 (`Spans.bounds`); the last place is no block's.
        counts: [rows * blocks of a row + 1, spans] int32.
    """

    bounds: torch.Tensor
    counts: torch.Tensor

    @staticmethod
    def blocks(settings: Ltri) -> int:
        """Blocks of a row: as many as the window of a chunk has tokens of, the chunk included."""
        return -(-(settings.slots - settings.sinks) // settings.block) + 1

    @classmethod
    def empty(cls, settings: Ltri, rows: int, device: torch.device) -> SpanRing:
        """Room for so many streams."""
        shape = rows * cls.blocks(settings) + 1, settings.spans
        bounds, counts = (torch.zeros(each, dtype=torch.int32, device=device) for each in ((*shape, 2), shape))
        return cls(bounds, counts)

    @classmethod
    def places(cls, settings: Ltri, row: int, blocks: range, device: torch.device) -> torch.Tensor:
        """[blocks] int64, where the spans of a stream's blocks lie."""
        return cls.place(settings, row, torch.arange(blocks.start, max(blocks.start, blocks.stop), device=device))

    @classmethod
    def place(cls, settings: Ltri, row: int | torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """As `places`, of blocks [n] int64; the row may be on the device, too, [1] int64."""
        count = cls.blocks(settings)
        return row * count + blocks % count

    def of_row(self, settings: Ltri, row: int) -> Spans:
        """Those of a stream, which share the memory of all."""
        count = self.blocks(settings)
        part = slice(row * count, (row + 1) * count)
        return Spans(self.bounds[part], self.counts[part])

    def put(self, places: torch.Tensor, spans: Spans) -> None:
        """Have spans in places [n] int64."""
        self.bounds.index_copy_(0, places, spans.bounds)
        self.counts.index_copy_(0, places, spans.counts)

    def at(self, places: torch.Tensor) -> Spans:
        """The spans in places [n] int64."""
        return Spans(self.bounds.index_select(0, places), self.counts.index_select(0, places))


@dataclass(frozen=True)
class Tiles:
    """The tiles of the attention map that a chunk has rows in.

    Attributes:
        blocks: numbers of the stream's blocks that have them.
        own: number of further tiles, which cut the chunk's own tokens from its first on; 0 where the blocks' tiles are
            the same, or where the spans of the chunk are not compared with the index.
        firsts: [1, len(blocks) + own] int32, column in the window of each one's first token.
        places: [1, len(blocks) + own] int32, numbers of the tiles.
        lengths: [tiles of the chunk's own tokens] int32, how many tokens each has; in a frame (`ltri_frames`) that of
            all tiles.
    """

    blocks: range
    own: int
    firsts: torch.Tensor
    places: torch.Tensor
    lengths: torch.Tensor

    @property
    def asking(self) -> slice:
        """Where the tiles of the chunk's own tokens lie."""
        return slice(len(self.blocks), None) if self.own else slice(0, self.lengths.shape[0])

    @classmethod
    def on_host(cls, settings: Ltri, begin: int, end: int, window: int, spans_ask: bool) -> Tiles:
        """Those of a chunk of the tokens [begin, end) whose window begins with token `window`, on the CPU."""
        rows, block = end - begin, settings.block
        blocks = range(max(0, begin - settings.sinks) // block, settings.blocks(end))
        own = -(-rows // block) if spans_ask else 0
        aligned = begin >= settings.sinks and (begin - settings.sinks) % block == 0
        count = 0 if aligned else own
        firsts = integers(len(blocks) + count) * block
        firsts[: len(blocks)] += settings.first(blocks.start) - window
        firsts[len(blocks) :] += begin - window - len(blocks) * block
        lengths = (rows - integers(own) * block).clip(max=block)
        places = integers(len(blocks) + count)
        return cls(blocks, count, *map(torch.from_numpy, (firsts[None], places[None], lengths)))

    def on(self, device: torch.device) -> Tiles:
        """These tiles, from the CPU, on a device."""
        return Tiles(self.blocks, self.own, *(sent(each, device) for each in (self.firsts, self.places, self.lengths)))


@dataclass(frozen=True)
class ChunkPlan:
    """A chunk of the tokens [begin, end) of a stream.

    Attributes:
        rows: its tokens.
        window: the tokens that it sees all of, its own at the end.
        listed: [1, slots of a stream] int32, KV slots of the window's tokens; entries after them are not used.
        sinks: the sinks that come before the chunk.
        stored: how many blocks have left the window when the chunk is computed.
        gone: those of them that leave it now.
        gone_tokens: their tokens; None for none.
        gone_ids: [n] int32, their numbers on the host.
        gone_spans: [n] int64, where their spans lie (`SpanRing`).
        ids: [at least `stored`] int32, numbers on the host of the stream's blocks.
        row: of the stream.
        at: [1] int64, the same on the device.
        first_way: [1] int32, the first way of the row, one row of a layer's cache of blocks behind the other.
        tiles: of its attention map.
        tile_spans: [blocks of `tiles`] int64, where the spans of the blocks lie.
        renewed: [n] int32, the blocks that come back whatever is voted for (`Ltri.renewed`); None otherwise.
        before, count, blocks: [1] int32, columns of the window before its rows, its rows, and `stored`.
    """

    rows: Tokens
    window: Tokens
    listed: torch.Tensor
    sinks: Tokens
    stored: int
    gone: range
    gone_tokens: Tokens | None
    gone_ids: torch.Tensor
    gone_spans: torch.Tensor
    ids: torch.Tensor
    row: int
    at: torch.Tensor
    first_way: torch.Tensor
    tiles: Tiles
    tile_spans: torch.Tensor
    renewed: torch.Tensor | None
    before: torch.Tensor
    count: torch.Tensor
    blocks: torch.Tensor

    @classmethod
    def on_host(cls, chunk: LayerTokens[SpansT], seat: Seat, before: int) -> ChunkPlan:
        """The plan on the CPU, where its many small steps take least; a slot n + 1 is the stream's cell n.

        `ids` and `gone_ids` share the memory of `Seat.host_ids`, and nobody writes to them.

        Args:
            chunk: in the first layer; its blocks have their numbers on the host (`LayerHost.numbers`).
            seat: of its stream.
            before: blocks that have left the window before the chunk.
        """
        settings, begin, end, row = chunk.settings, chunk.begin, chunk.end, seat.row
        first, stored = settings.local(begin), settings.evicted(begin)
        window = Tokens.on_host(settings, row, first, end)
        listed = torch.from_numpy(np.zeros((1, settings.slots), np.int32))
        listed.numpy()[0, : end - first] = window.slots.numpy()
        gone = range(before, stored)
        number = lambda value: torch.from_numpy(np.full(1, value, np.int32))  # noqa: E731
        spans_ask = not (chunk.answers and settings.persist) and not chunk.tokens_ask
        tiles = Tiles.on_host(settings, begin, end, first, spans_ask)
        leaving = Tokens.on_host(settings, row, settings.first(gone.start), settings.first(gone.stop)) if gone else None
        renewed = np.array(renewed_blocks(begin, settings), np.int32) if settings.renewed else None
        return cls(
            rows=Tokens.on_host(settings, row, begin, end),
            window=window,
            listed=listed,
            sinks=Tokens.on_host(settings, row, 0, min(begin, settings.sinks)),
            stored=stored,
            gone=gone,
            gone_tokens=leaving,
            gone_ids=seat.host_ids[gone.start : gone.stop],
            gone_spans=SpanRing.places(settings, row, gone, CPU),
            ids=seat.host_ids,
            row=row,
            at=torch.from_numpy(np.full(1, row)),
            first_way=number(row * max(1, settings.ways)),
            tiles=tiles,
            tile_spans=SpanRing.places(settings, row, tiles.blocks, CPU),
            renewed=None if renewed is None else torch.from_numpy(renewed),
            before=number(begin - first),
            count=number(end - begin),
            blocks=number(stored),
        )

    def on(self, seat: Seat) -> ChunkPlan:
        """This plan, from the CPU, on the device of the stream's seat."""
        to = lambda tensor: sent(tensor, seat.at.device)  # noqa: E731
        return replace(
            self,
            rows=self.rows.on(seat),
            window=self.window.on(seat),
            listed=seat.slots.index_select(0, to(self.listed[0])).unsqueeze(0),
            sinks=self.sinks.on(seat),
            gone_tokens=None if self.gone_tokens is None else self.gone_tokens.on(seat),
            gone_ids=to(self.gone_ids).clone(),  # where a kernel takes an address, it is aligned
            gone_spans=to(self.gone_spans),
            ids=seat.ids,
            at=seat.at,
            first_way=to(self.first_way),
            tiles=self.tiles.on(seat.at.device),
            tile_spans=to(self.tile_spans),
            renewed=None if self.renewed is None else to(self.renewed),
            before=to(self.before),
            count=to(self.count),
            blocks=to(self.blocks),
        )


def integers(count: int) -> NDArray[np.int32]:
    """[count] int32 on the CPU, the numbers from 0 on."""
    return np.arange(count, dtype=np.int32)
