"""What kernels keep of the streams of Ltri-LLM in one layer, and where they find it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from sglang_ext.attention.ltri_index import LayerIndex
from sglang_ext.attention.ltri_memory import LayerMemory, Snapshot
from sglang_ext.attention.ltri_plan import SpanRing
from sglang_ext.kernels.cells import Rotation
from sglang_ext.kernels.clamped_attention import ChunkQuery, FarKeys, Part, SeenKeys
from sglang_ext.kernels.host_fetch import BlockCache, Found, FreshBlocks, HostRegion
from sglang_ext.kernels.span_index import SpanRule, Spans
from sglang_ext.kernels.stream_decode import MapState
from sglang_ext.policies.ltri_options import Ltri

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Retrieved:
    """The blocks that a layer has got back.

    Attributes:
        blocks: [n] int32, numbers of the stream's blocks.
        ways: [n] int32, where they lie in the stream's row of the layer's cache of blocks.
    """

    blocks: torch.Tensor
    ways: torch.Tensor


@dataclass(frozen=True)
class Sought:
    """The blocks that a chunk is to see.

    Attributes:
        retrieved: all of them, whether or not they lie in their ways yet.
        found: which of them have to be fetched, [1, n]; None where all lie there.
    """

    retrieved: Retrieved
    found: Found | None = None


@dataclass
class KernelMemory(LayerMemory[Spans]):
    """What one layer of a stream remembers, on the device.

    In a layer that votes, once the stream has a row, `received`, `newest` and `spans` are views of it in
    `LayerStore.state` and `ring`. Before, `received` and `spans` have memory of their own, out of which `sit` copies
    them into the row.

    Attributes:
        newest: [slots of a stream], what the newest token adds to `received`.
        retrieved: the blocks that the last chunk of a prompt retrieved.
        shown: the `retrieved` whose ways were last written to `LayerStore.ways`, where decoding steps read them.
        row: None where nothing votes, and before the first chunk.
    """

    newest: torch.Tensor | None = None
    retrieved: Retrieved | None = None
    shown: Retrieved | None = None
    row: int | None = None

    @staticmethod
    def copied(spans: Spans) -> Spans:
        return Spans(spans.bounds.clone(), spans.counts.clone())

    @classmethod
    def empty(cls, settings: Ltri, device: torch.device) -> Self:
        """The memory of a stream that has no token yet."""
        return cls(torch.zeros(settings.slots, device=device), Spans.empty(0, settings.spans, device))

    def keep(self, begin: int, chunk: int) -> None:
        if self.row is None:  # there is nothing but the number of blocks
            self.have(begin, chunk, Snapshot(self.stored, self.spans, self.received[:0]))
        else:
            super().keep(begin, chunk)

    def begun(self, kept: Snapshot[Spans]) -> Snapshot[Spans]:
        """The snapshot itself: nobody writes to it before `sit_down` has copied it into the stream's row."""
        return kept

    def saw(self, token: int) -> None:
        """Know that `newest` holds what the query of this token adds to `received`, once another token follows."""
        if self.newest is not None:
            self.last = token, self.newest


def sit_down(layers: Iterable[tuple[KernelMemory, LayerStore]], row: int, settings: Ltri) -> None:
    """Copy what layers of a stream remember into its row of `state` and `ring`, and keep views of that row instead.

    It takes three launches for all layers. Nothing is done in layers in which nothing votes, or whose memory lies there
    already.

    Args:
        layers: what each remembers, and has for all streams.
        row: of the stream.
        settings: of the method.
    """
    into: list[list[torch.Tensor]] = [[], []]
    kept: list[list[torch.Tensor]] = [[], []]
    zeros: list[torch.Tensor] = []
    for memory, store in layers:
        state, ring = store.state, store.ring
        if state is None or ring is None or memory.row == row:
            continue
        spans, received, newest = ring.of_row(settings, row), state.received[row], state.last[row]
        if memory.spans.counts.shape[0]:
            into[0] += spans.bounds, spans.counts
            kept[0] += memory.spans.bounds, memory.spans.counts
        into[1].append(received)
        kept[1].append(memory.received)
        zeros.append(newest)
        memory.received, memory.newest, memory.spans, memory.row = received, newest, spans, row
    for targets, sources in zip(into, kept, strict=True):  # of one dtype each
        if targets:
            torch._foreach_copy_(targets, sources)
    if zeros:
        torch._foreach_zero_(zeros)


def span_rule(settings: Ltri, layer: int) -> SpanRule:
    """How spans are cut in a layer."""
    return SpanRule(
        theta=settings.theta,
        phi=settings.phi,
        spans=settings.spans,
        most=settings.most_vectors,
        rate=settings.rate_of(layer),
        ratio=settings.ratio,
        boxes=settings.boxes,
    )


class ClampedAttention(Protocol):
    """Attention with clamped distances: `reference` or `dense_impl` of `kernels.clamped_attention`."""

    def attend_window(self, query: ChunkQuery, window: SeenKeys, *, width: int, scale: float) -> Part:
        """Attention to the window, with contiguous log-sum-exps: the map of attention is made of them."""

    def attend_near(self, query: ChunkQuery, window: SeenKeys, *, width: int, scale: float) -> Part:
        """Attention to what rows see of the window at its true distance."""

    def attend_beyond(self, query: ChunkQuery, sinks: SeenKeys, memory: FarKeys, *, width: int, scale: float) -> Part:
        """Attention to the sinks and to `memory`, to be merged with the attention to the window."""


@dataclass(frozen=True)
class Looked:
    """A chunk's attention to its window.

    Attributes:
        asked: the chunk's queries.
        window: what they see.
        local: their attention to it; where `KernelChunk._late` is not 0, to tokens at their true distance alone.
    """

    asked: ChunkQuery
    window: SeenKeys
    local: Part


@dataclass(frozen=True)
class Scratch:
    """Room for what a chunk sees, which all layers and streams share one after the other.

    Attributes:
        near, far: [tokens of a window, kv_heads, head_dim]: rotated keys of the window, and its keys as they are
            stored.
        values: [likewise, kv_heads, value_dim].
        beyond_keys: [sinks + retrieved * block + tokens of a window, kv_heads, head_dim]: keys of sinks and blocks end
            at sinks + retrieved * block, and behind them lie `KernelChunk._late` keys of the window.
        beyond_values: [likewise, kv_heads, value_dim].
    """

    near: torch.Tensor
    far: torch.Tensor
    values: torch.Tensor
    beyond_keys: torch.Tensor
    beyond_values: torch.Tensor

    @classmethod
    def empty(cls, settings: Ltri, keys: torch.Tensor, values: torch.Tensor) -> Scratch:
        """Room for streams with KV caches like `keys` and `values`."""
        window, beyond = settings.slots, settings.sinks + settings.retrieved * settings.block
        room = lambda like, rows: like.new_empty(rows, *like.shape[1:])  # noqa: E731
        wide = (room(keys, window), room(keys, window), room(values, window))
        return cls(*wide, room(keys, beyond + window), room(values, beyond + window))

    def beside(self) -> Scratch:
        """As much room for another chunk, while this one's is still read."""
        rooms = self.near, self.far, self.values, self.beyond_keys, self.beyond_values
        return Scratch(*(each.clone() for each in rooms))


@dataclass(frozen=True)
class LayerStore:
    """What one layer has for all streams.

    Attributes:
        index: None where nothing votes, and where the retrieval head is on another rank.
        state: what is remembered of the map of attention, one row for each stream; None where nothing votes.
        ring: the spans of the blocks in the windows. None where nothing votes.
        region: its blocks on the host, as the device sees them.
        cache: the blocks that lie on the device, too; a row a stream.
        ways: [rows, max(1, retrieved)] int32, the ways in `cache` of the blocks that an answer sees; -1 for none.
        rotation: the model's.
        attention: what computes attention.
        scratch: shared by all layers.
    """

    index: LayerIndex | None
    state: MapState | None
    ring: SpanRing | None
    region: HostRegion
    cache: BlockCache
    ways: torch.Tensor
    rotation: Rotation
    attention: ClampedAttention
    scratch: Scratch

    @property
    def map_of_voters(self) -> MapState:
        """`state`, in a layer that votes."""
        if self.state is None:
            raise ValueError("a layer that does not vote has no map of attention")
        return self.state

    @property
    def spans_of_voters(self) -> SpanRing:
        """`ring`, in a layer that votes."""
        if self.ring is None:
            raise ValueError("a layer that does not vote has no spans")
        return self.ring


HIGH_PRIORITY = -1
"""The priority of CUDA streams whose waiting kernels begin before those of other streams."""

Mark: TypeAlias = torch.cuda.Event | None
"""What was launched on a CUDA stream up to some point; None where nothing runs beside anything."""


class Lane:
    """A sequence of launches that runs beside others on a CUDA stream of its own, or else in order among the others.

    Args:
        stream: the lane's CUDA stream; None where its launches run on the current stream, in order.
    """

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._stream, self._left, self._held = stream, False, list[object]()

    def mark(self) -> Mark:
        """All that was launched so far on the current stream, which is the lane's inside of `apart`."""
        return None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()

    @contextmanager
    def apart(self, *read: object, behind: Mark = None) -> Iterator[None]:
        """Launch what is inside on the lane's stream, once `behind` has ended; the current stream does not wait for it.

        A lane's own launches run one behind the other.

        Args:
            read: what the launches read and the caller may free; the lane holds it until `join`.
            behind: a mark; None for all that was launched before.
        """
        begins = self.mark() if behind is None else behind
        if self._stream is None or begins is None:
            yield
            return
        self._stream.wait_event(begins)
        self._left = True
        self._held += read
        with torch.cuda.stream(self._stream):
            yield

    def wait(self, *marks: Mark) -> None:
        """What is launched on the current stream from here on waits for marks."""
        for mark in marks:
            if self._stream is not None and mark is not None:
                torch.cuda.current_stream(self._stream.device).wait_event(mark)

    def follow(self) -> None:
        """What is launched on the current stream from here on waits for all of the lane's launches so far."""
        if self._stream is not None and self._left:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def join(self) -> None:
        """`follow`, and let go of what the launches read: its memory came from the current stream."""
        self.follow()
        self._left = False
        self._held.clear()


@dataclass(frozen=True)
class Lanes:
    """What of chunks in one layer runs beside the rest.

    All steps of a chunk but the last have a lane each, so that several chunks are computed at once. The last one,
    attention beyond the window, runs on the stream that the lanes leave.

    Attributes:
        gather: what leaves the window, and the keys and values of the window as the chunk sees them.
        window: attention to the window. Its kernels fill whole multiprocessors. The other lanes, and the stream that
            they leave, have priority: they are what a chunk's answer still waits for.
        tiles: in a layer that votes, the attention map's tiles, and the spans that are cut out of them.
        received: likewise, what the window's tokens receive.
        memory: likewise, what was remembered before the chunk is brought up to date, and then what the next chunk will
            find. It waits for `tiles` and `received`, and for `index`.
        index: likewise, the index vectors of blocks that leave the window.
        choice: which blocks come back, and where they lie in the cache of blocks. In a layer that votes, it waits for
            `index`, and so for what the chunk before has left in `memory`; and where spans ask, for `tiles` and
            `received`.
        back: blocks come from the host into the cache.
        beyond: sinks and blocks are gathered as the chunk sees them.
    """

    gather: Lane = field(default_factory=Lane)
    window: Lane = field(default_factory=Lane)
    tiles: Lane = field(default_factory=Lane)
    received: Lane = field(default_factory=Lane)
    memory: Lane = field(default_factory=Lane)
    index: Lane = field(default_factory=Lane)
    choice: Lane = field(default_factory=Lane)
    back: Lane = field(default_factory=Lane)
    beyond: Lane = field(default_factory=Lane)

    @classmethod
    def beside(cls, device: torch.device) -> Self:
        """Lanes of which each has a stream of its own on a GPU; on a CPU, nothing runs beside anything."""
        if device.type != "cuda":
            return cls()
        gather, *others = (Lane(torch.cuda.Stream(device, priority=HIGH_PRIORITY)) for _ in range(8))
        return cls(gather, Lane(torch.cuda.Stream(device)), *others)


@dataclass(frozen=True)
class Leaving:
    """The blocks that leave the window with chunks that are recorded, on their way to the host.

    Attributes:
        keys: [tokens, kv_heads, head_dim], not rotated, block by block.
        values: [tokens, kv_heads, value_dim], likewise.
    """

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def empty(cls, tokens: int, keys: torch.Tensor, values: torch.Tensor) -> Leaving:
        """Room for so many tokens, of a layer with such a KV cache."""
        return cls(*(each.new_zeros(tokens, *each.shape[1:]) for each in (keys, values)))

    def part(self, settings: Ltri, begin: int, end: int) -> Leaving:
        """The blocks [begin, end) of these."""
        part = slice(begin * settings.block, end * settings.block)
        return Leaving(self.keys[part], self.values[part])

    def fresh(self, settings: Ltri, ids: torch.Tensor) -> FreshBlocks:
        """As blocks with these numbers on the host, [n] int32."""
        keys, values = (each.unflatten(0, (-1, settings.block)) for each in (self.keys, self.values))
        return FreshBlocks(ids, keys[: ids.shape[0]], values[: ids.shape[0]])
