"""What a chunk of a stream of Ltri-LLM is in every layer, on the device.

It follows from numbers that the host knows: so it is written down once, in the first layer, and no layer waits for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sglang_ext.attention.ltri_layer import LayerTokens, SpansT, cells_of
from sglang_ext.kernels.span_index import Spans
from sglang_ext.policies.ltri import renewed_blocks
from sglang_ext.policies.ltri_options import Ltri

PADDING_SLOT = 0
"""SGLang's padding slot in the KV cache: what it holds has no meaning."""
ALIGNMENT = 16
"""Triton's kernels are compiled for tensors whose addresses are multiples of this many bytes."""


def on_device(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """[n] int32 on a device, which nobody waits for."""
    staged = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
    return staged.to(device, non_blocking=True)


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a device of a tensor in host memory; the host does not wait for it."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


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

    def on_host(self) -> Seat:
        """The seat, as the CPU knows it: slot n + 1 stands for the stream's cell n."""
        cells = torch.arange(self.slots.shape[0], dtype=torch.int32)
        at = torch.full((1,), self.row, dtype=torch.int64)
        return replace(self, at=at, ids=self.host_ids, slots=cells)

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
    def of(cls, settings: Ltri, slots: torch.Tensor, row: int, begin: int, end: int) -> Tokens:
        """The tokens [begin, end) of a stream in a row, with KV slots `slots`."""
        cells = cells_of(settings, torch.arange(begin, end, device=slots.device), begin >= settings.sinks)
        return cls(begin, cells + row * settings.slots, slots[cells].long())


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
    def of(cls, settings: Ltri, begin: int, end: int, window: int, spans_ask: bool, device: torch.device) -> Tiles:
        """Those of a chunk of the tokens [begin, end) whose window begins with token `window`."""
        rows, block = end - begin, settings.block
        blocks = range(max(0, begin - settings.sinks) // block, settings.blocks(end))
        own = -(-rows // block) if spans_ask else 0
        aligned = begin >= settings.sinks and (begin - settings.sinks) % block == 0
        count = 0 if aligned else own
        numbers = torch.arange(max(len(blocks), own), dtype=torch.int32, device=device) * block
        firsts = numbers[: len(blocks)] + (settings.first(blocks.start) - window)
        if count:
            firsts = torch.cat([firsts, numbers[:count] + (begin - window)])
        places = torch.arange(len(blocks) + count, dtype=torch.int32, device=device)
        lengths = (rows - numbers[:own]).clamp(max=block)
        return cls(blocks, count, firsts.unsqueeze(0), places.unsqueeze(0), lengths)


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
    def of(cls, chunk: LayerTokens[SpansT], seat: Seat, before: int) -> ChunkPlan:
        """The plan of a chunk whose blocks have their numbers on the host (`LayerHost.numbers`).

        Args:
            chunk: in the first layer.
            seat: of its stream.
            before: blocks that have left the window before the chunk.
        """
        settings, begin, end, device = chunk.settings, chunk.begin, chunk.end, chunk.slots.device
        first, stored, row = settings.local(begin), settings.evicted(begin), seat.row
        tokens = lambda low, high: Tokens.of(settings, chunk.slots, row, low, high)  # noqa: E731
        window = tokens(first, end)
        listed = torch.zeros(1, settings.slots, dtype=torch.int32, device=device)
        listed[0, : end - first] = window.slots
        gone = range(before, stored)
        number = lambda value: torch.full((1,), value, dtype=torch.int32, device=device)  # noqa: E731
        spans_ask = not (chunk.answers and settings.persist) and not chunk.tokens_ask
        tiles = Tiles.of(settings, begin, end, first, spans_ask, device)
        return cls(
            rows=tokens(begin, end),
            window=window,
            listed=listed,
            sinks=tokens(0, min(begin, settings.sinks)),
            stored=stored,
            gone=gone,
            gone_tokens=tokens(settings.first(gone.start), settings.first(gone.stop)) if gone else None,
            gone_ids=seat.ids[gone.start : gone.stop].clone(),  # where a kernel takes an address, it is aligned
            gone_spans=SpanRing.places(settings, row, gone, device),
            ids=seat.ids,
            row=row,
            at=seat.at,
            first_way=number(row * max(1, settings.ways)),
            tiles=tiles,
            tile_spans=SpanRing.places(settings, row, tiles.blocks, device),
            renewed=on_device(renewed_blocks(begin, settings), device) if settings.renewed else None,
            before=number(begin - first),
            count=number(end - begin),
            blocks=number(stored),
        )
