"""What kernels have for the streams of Ltri-LLM, beside the KV cache: index vectors, cached blocks, views of the host.

Index vectors have the numbers of the blocks on the host, whichever streams hold them. Nearly all else has a row a
stream, and is there from the start; a stream knows the numbers of its own blocks (`ltri_plan.Seat`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sglang_ext.attention.ltri_cached import CachedBlocks
from sglang_ext.attention.ltri_chunks import AnyMemory, Beginning, KVCaches, Votes
from sglang_ext.attention.ltri_frames import Nowhere, run_frames
from sglang_ext.attention.ltri_graphs import ChunkGraphs
from sglang_ext.attention.ltri_index import LayerIndex, index_bytes
from sglang_ext.attention.ltri_kernels import KernelChunk
from sglang_ext.attention.ltri_layer import LayerTokens, Voters
from sglang_ext.attention.ltri_plan import ChunkPlan, Seat, SeatRows, SpanRing, on_device
from sglang_ext.attention.ltri_runs import PlacedRun
from sglang_ext.attention.ltri_state import ClampedAttention, KernelMemory, LayerStore, Scratch, sit_down
from sglang_ext.cache.budget import FLOAT32
from sglang_ext.cache.host_blocks import GIB, HostBlocks, HostLease
from sglang_ext.kernels.block_votes.triton_impl import MAX_BLOCKS
from sglang_ext.kernels.cells import Rotation
from sglang_ext.kernels.clamped_attention import LayerRows
from sglang_ext.kernels.clamped_attention.dispatch import move_layers
from sglang_ext.kernels.host_fetch import HostRegion
from sglang_ext.kernels.host_fetch.types import NOBODY
from sglang_ext.kernels.stream_decode import MapState
from sglang_ext.policies.ltri import ONE_RANK, TensorRanks
from sglang_ext.policies.ltri_options import Ltri

RESERVED = 2 * GIB
"""Bytes of the GPU that are left to activations, CUDA graphs and buffers."""
logger = logging.getLogger(__name__)


def device_view(kept: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor in host memory as kernels on a device address it; the same tensor on a CPU.

    Args:
        kept: contiguous; registered with CUDA where `device` is a GPU (`cache.host_blocks`).
        device: of the KV cache.
    """
    if device.type != "cuda":
        return kept

    class Memory:
        __cuda_array_interface__ = {  # noqa: RUF012  (read once, below)
            "shape": (kept.numel() * kept.element_size(),),
            "typestr": "|u1",
            "data": (kept.data_ptr(), False),
            "version": 3,
        }

    return torch.as_tensor(Memory(), device=device).view(kept.dtype).view(kept.shape)


class KernelChunks:
    """Chunks in kernels, and what they need.

    Args:
        settings: of the method.
        host: what has left the windows.
        caches: layer -> (keys [slots, kv_heads, head_dim], values [slots, kv_heads, value_dim]).
        voters: of all layers.
        heads: query heads of a layer.
        rows: streams, at most.
        rotation: the model's.
        attention: what computes attention.
        ranks: tensor-parallel ranks, which share the heads; a layer's index lies on the one with its retrieval head.

    Raises:
        ValueError: what they need does not fit the GPU.

    Attributes:
        stores: by layer.
        slot: [rows, slots of a stream] int32, the KV slots of each stream's cells.
        none: [`Ltri.ways`, at least 1] int32 on the device, `NOBODY` everywhere.
        cached: the caches, on the device, of blocks that came back, of all layers.
        voters: of all layers.
        ranks: the tensor-parallel ranks, each of which has some of the heads.
        prompts: numbers of prompts' chunks that were `replayed` from a recording, and `launched` kernel by kernel.
    """

    most_blocks = MAX_BLOCKS - 1  # an election takes MAX_BLOCKS, and `Seat.ids` has one place that stays empty

    def __init__(
        self,
        settings: Ltri,
        host: HostBlocks,
        caches: KVCaches,
        voters: Voters,
        heads: int,
        rows: int,
        rotation: Rotation,
        attention: ClampedAttention,
        ranks: TensorRanks = ONE_RANK,
    ) -> None:
        keys, values = next(iter(caches.values()))
        self.settings, self.device, self.voters, self.ranks = settings, keys.device, voters, ranks
        self._graphs: ChunkGraphs | None = None
        self._passes: torch.cuda.Stream | None = None  # on which the newest pass runs, and those before it
        self._blocks = min(host.total, self.most_blocks) + 1
        self._nowhere = Nowhere(host.total, rows * SpanRing.blocks(settings))
        self.prompts = {"replayed": 0, "launched": 0}
        self._free, self._seats = list(range(rows))[::-1], dict[HostLease, Seat]()
        _check_room(settings, voters, host.total + 1, heads, rows, keys)
        self.slot = torch.zeros(rows, settings.slots, dtype=torch.int32, device=self.device)
        self._rows = SeatRows.empty(rows, settings.slots, self._blocks, self.device)
        scratch = Scratch.empty(settings, keys, values)
        self.stores: dict[int, LayerStore] = {}
        regions = {
            layer: HostRegion(*(device_view(kept[layer], self.device) for kept in (host.keys, host.values)))
            for layer in caches
        }
        ways = max(1, settings.ways)
        self.none = torch.full((ways,), NOBODY, dtype=torch.int32, device=self.device)
        tokens = [(region.keys.flatten(0, 1), region.values.flatten(0, 1)) for region in regions.values()]
        self._in_slots, self._on_host = LayerRows.of(list(caches.values())), LayerRows.of(tokens)
        self.cached = CachedBlocks(len(caches), rows, ways, next(iter(regions.values())), self.device)
        for (layer, (keys, _)), cache in zip(caches.items(), self.cached.layers, strict=True):
            region = regions[layer]
            voter, index, state, ring = voters[layer], None, None, None
            if voter is not None:
                # One place more, for those of no block (`ltri_frames`).
                if voter.here:
                    index = LayerIndex.empty(settings, host.total + 1, voter.dim(heads, keys.shape[2]), keys)
                state, ring = map_state(settings, rows, heads, keys), SpanRing.empty(settings, rows, self.device)
            seen = torch.full((rows, max(1, settings.retrieved)), NOBODY, dtype=torch.int32, device=self.device)
            self.stores[layer] = LayerStore(index, state, ring, region, cache, seen, rotation, attention, scratch)

    def memory(self) -> KernelMemory:
        """The memory of one layer of a stream that has no token yet."""
        return KernelMemory.empty(self.settings, self.device)

    def attend(
        self,
        chunks: Sequence[LayerTokens[Any]],
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        votes: Votes,
    ) -> torch.Tensor:
        """`Chunks.attend`: chunks one after the other, launched or replayed; what it returns stands until the next."""
        caches, first, at = chunks[0].caches, chunks[0].begin, 0
        carry, out = caches.carry, caches.out
        key, outs = f"runs of {self._named(chunks[0])}", list[torch.Tensor]()
        if key not in carry:
            carry[key] = self._runs(chunks)
            self._passes = torch.cuda.current_stream(self.device) if query.is_cuda else None
        for count, run in carry[key]:
            some, given, into = chunks[at : at + count], (query, keys, values), out
            if count < len(chunks):
                rows = slice(some[0].begin - first, some[-1].end - first)
                given, into = (query[rows], keys[rows], values[rows]), None
            if run is None or self._graphs is None:
                outs.append(self.launched(some[0]).attend(*given, votes))
            else:
                seat, _ = self._seated(some[0])
                found = self._graphs.attend(run, some, seat.row, given, into)
                outs.append(found if count == len(chunks) else found.clone())
            at += count
        return outs[0] if len(outs) == 1 else torch.cat(outs, out=out)

    def launched(self, tokens: LayerTokens[Any]) -> KernelChunk:
        """What computes a chunk, launch by launch."""
        carry, key = tokens.caches.carry, f"plan of {self._named(tokens)}"
        seat, memory = self._seated(tokens)
        if key not in carry:
            carry[key] = ChunkPlan.on_host(tokens, seat, memory.stored).on(seat)
        store = self.stores[tokens.caches.layer]
        return KernelChunk(store=store, plan=carry[key], ranks=self.ranks, **{**vars(tokens), "memory": memory})

    def record(self, chunks: Mapping[int, LayerTokens[Any]], places: int) -> None:
        """Record a chunk, so that chunks like it are replayed from then on.

        Args:
            chunks: layer -> a chunk from `Ltri.alike_from` on, whose stream has all blocks before it.
            places: whole chunks of a run, at most.
        """
        for tokens in chunks.values():
            seat, _ = self._seated(tokens)
        frames = run_frames(self.settings, places)
        begun, free = time.perf_counter(), _free_bytes(self.device)
        graphs = ChunkGraphs(self.settings, self.stores, self._blocks, self._nowhere, self.device, self.ranks)
        graphs.record(chunks, seat, frames)
        what, seconds = sum(map(len, frames)) * len(self.stores), time.perf_counter() - begun
        taken = (free - _free_bytes(self.device)) / GIB
        logger.info("chunks of prompts of Ltri-LLM: %d were recorded in %.1f s and %.2f GiB", what, seconds, taken)
        self._graphs = graphs

    def _named(self, tokens: LayerTokens[Any]) -> str:
        """What tells a chunk from others of its pass."""
        return f"{id(tokens.host.lease)} from {tokens.begin}"

    def _seated(self, tokens: LayerTokens[Any]) -> tuple[Seat, KernelMemory]:
        """A chunk's stream in its row, in one layer: (its seat, the layer's memory)."""
        memory, layer, seat = tokens.memory, tokens.caches.layer, self.seat(tokens)
        if not isinstance(memory, KernelMemory):
            raise ValueError(f"a {type(memory).__name__} for kernels: expected a KernelMemory")
        sit_down([(memory, self.stores[layer])], seat.row, self.settings)
        seat.decodes = False
        if self._graphs is not None:
            self._graphs.copies.wait_for_layer(layer)
        return seat, memory

    def _runs(self, chunks: Sequence[LayerTokens[Any]]) -> list[tuple[int, PlacedRun | None]]:
        """Consecutive parts of a pass's chunks: (how many, the run that replays them; None for a launched chunk)."""
        found: list[tuple[int, PlacedRun | None]] = []
        taken: list[PlacedRun] = chunks[0].caches.carry.setdefault("runs taken", [])
        stored, at = chunks[0].memory.stored, 0
        for tokens in chunks:
            seat = self.seat(tokens)
        while at < len(chunks):
            tokens, run = chunks[at], None
            if self._graphs is not None and seat.settled == tokens.begin:
                read = [each for each in chunks[at:] if not each.answers]
                run = self._graphs.place(read, seat, stored, taken)
            count = 1 if run is None else len(run.plans)
            newest = chunks[at + count - 1]
            self._settle(seat, newest, replayed=run is not None)
            if not tokens.answers:
                self.prompts["launched" if run is None else "replayed"] += count
            stored, at = self.settings.evicted(newest.begin), at + count
            found.append((count, run))
        return found

    def _settle(self, seat: Seat, newest: LayerTokens[Any], *, replayed: bool) -> None:
        """Know whether all is settled behind a stream's newest chunk (`Seat.settled`)."""
        settings = self.settings
        # After the sinks, a launched chunk cuts the spans of the blocks that it completes, unless its tokens ask.
        whole = newest.begin % settings.chunk == 0 and newest.begin >= settings.sinks
        if newest.tokens_ask:
            whole = whole and settings.blocks(newest.begin + 1) == settings.blocks(newest.end + 1)
        seat.settled = newest.end if (replayed or whole) and not newest.answers else None

    def retrieved(self, memory: AnyMemory) -> list[int]:
        """The blocks that the last chunk of a prompt got back; waits for the device."""
        if not isinstance(memory, KernelMemory) or memory.retrieved is None:
            return []
        found: list[int] = memory.retrieved.blocks.tolist()
        return found

    def wait_for_passes(self) -> None:
        """`Chunks.wait_for_passes`; the host does not wait, as it would for 0.7 ms even where nothing runs."""
        if self._passes is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._passes)
        elif self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def begin(self, beginning: Beginning) -> None:
        """`Chunks.begin`, in few launches for all layers; the device reads host memory."""
        like = self._seats.get(beginning.like)
        if like is not None and self._free:  # a warm-up may have the only row
            seat = self._sit(beginning.lease, beginning.slots, beginning.tokens)
            seat.learn(beginning.lease.ids)
            kept = ((each, self.stores[layer]) for layer, each in beginning.layers.items())
            sit_down(((each, store) for each, store in kept if isinstance(each, KernelMemory)), seat.row, self.settings)
            self.cached.copy(like.row, seat.row, seat.ids[: seat.known])
        move_layers(self._in_slots, self._in_slots, read=beginning.source, write=beginning.target)
        if not beginning.blocks:
            return
        self.wait_for_copies()
        block = self.settings.block
        tokens = on_device(beginning.blocks, self.device).long().unsqueeze(1) * block
        back = (tokens + torch.arange(block, device=self.device)).view(-1)
        move_layers(self._on_host, self._in_slots, read=back, write=beginning.block_target)

    def wait_for_copies(self) -> None:
        """What is launched from here on may read any block on the host, and write there.

        A block of an ended stream may still be on its way.
        """
        if self._graphs is not None:
            self._graphs.copies.wait_for_all()

    def forget_counts(self) -> None:
        """Count chunks and wanted blocks from nothing again."""
        self.prompts.update(replayed=0, launched=0)
        self.cached.forget_counts()

    def close(self, lease: HostLease) -> None:
        """A stream has ended."""
        seat = self._seats.pop(lease, None)
        if seat is not None:
            self._free.append(seat.row)

    def counters(self) -> Mapping[str, int]:
        """Counts of wanted blocks that the caches of blocks had (`hits`) and did not (`misses`); waits for the device.

        `fetched_bytes` are the bytes of the misses, also of those that came from the GPU before they were on the host.
        """
        return self._counted(self.cached.counts())

    def earlier_counters(self) -> Mapping[str, int]:
        """`counters` of an earlier moment (`CachedBlocks.earlier_counts`); does not wait for the device."""
        return self._counted(self.cached.earlier_counts())

    def _counted(self, counts: tuple[int, int]) -> Mapping[str, int]:
        hits, misses = counts
        region = next(iter(self.stores.values())).region
        block = sum(each[0].numel() * each.element_size() for each in (region.keys, region.values))
        return {"hits": hits, "misses": misses, "fetched_bytes": misses * block}

    def seat_of(self, lease: HostLease) -> Seat | None:
        """The seat of the stream that has a lease; None before it has a row."""
        return self._seats.get(lease)

    def seat(self, tokens: LayerTokens[Any]) -> Seat:
        """Where a stream has what lies on the device; it gets its row with its first chunk, or had it from `begin`."""
        lease = tokens.host.lease
        if lease not in self._seats:
            self.cached.forget(self._sit(lease, tokens.slots, tokens.begin).row)
        seat = self._seats[lease]
        seat.learn(tokens.host.numbers(self.settings.evicted(tokens.begin)))
        return seat

    def _sit(self, lease: HostLease, slots: torch.Tensor, begin: int) -> Seat:
        """Give a stream a row, with whatever blocks were cached there.

        Args:
            lease: the stream's.
            slots: [at least the slots of a stream], its KV slots.
            begin: its first token that is computed: a stream begins empty, or as a copy that ends with a whole chunk.
        """
        row = self._free.pop()
        self.slot[row] = slots[: self.settings.slots]
        self._seats[lease] = seat = self._rows.seat(row, self.slot[row], settled=begin)
        return seat


def _free_bytes(device: torch.device) -> int:
    """Free bytes of a GPU; 0 for a CPU."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def map_state(settings: Ltri, rows: int, heads: int, keys: torch.Tensor) -> MapState:
    """What is remembered of the attention map of so many streams in one layer with such keys."""
    wide = torch.promote_types(keys.dtype, torch.float32)
    received, last = (torch.zeros(rows, settings.slots, dtype=wide, device=keys.device) for _ in range(2))
    tile = torch.zeros(rows, heads, settings.block, settings.block, dtype=wide, device=keys.device)
    return MapState(received, last, tile)


def blocks_that_fit(settings: Ltri, voters: Voters, heads: int, rows: int, keys: torch.Tensor) -> int | None:
    """Blocks on the host whose index vectors fit the GPU beside all else; None for any number of them."""
    each = index_bytes(settings, voters, 1, heads, keys)
    if not keys.is_cuda or not each:
        return None
    beside = sum(_beside_index(settings, voters, heads, rows, keys))
    free, _ = torch.cuda.mem_get_info(keys.device)
    return max(0, int((free - RESERVED - beside) // each) - 1)  # the index has one place more


def _beside_index(settings: Ltri, voters: Voters, heads: int, rows: int, keys: torch.Tensor) -> tuple[int, int]:
    """Bytes of so many streams: (of their attention maps, of the blocks that came back)."""
    votes = sum(voter is not None for voter in voters.values())
    cached = len(voters) * rows * settings.ways * settings.block * 2 * keys[0].numel() * keys.element_size()
    return votes * rows * (heads * settings.block**2 + 2 * settings.slots) * FLOAT32, cached


def _check_room(settings: Ltri, voters: Voters, blocks: int, heads: int, rows: int, keys: torch.Tensor) -> None:
    """Raise ValueError where index, maps and cached blocks do not fit the GPU; the KV cache left room for the last."""
    if not keys.is_cuda:
        return
    votes, (free, _) = sum(voter is not None for voter in voters.values()), torch.cuda.mem_get_info(keys.device)
    index = index_bytes(settings, voters, blocks, heads, keys)
    maps, cached = _beside_index(settings, voters, heads, rows, keys)
    if index + maps + cached + RESERVED > free:
        raise ValueError(
            f"the index of {blocks} blocks takes {index / GIB:.2f} GiB in {votes} layers that vote, and {rows} streams"
            f" take {maps / GIB:.2f} GiB for their attention maps and {cached / GIB:.2f} for blocks that came back;"
            f" {free / GIB:.2f} GiB of the GPU are free, of which {RESERVED / GIB:.0f} are left to all else: set"
            " --mem-fraction-static or --max-total-tokens lower, host_gb, vectors or cached lower (--policy), or let"
            " fewer heads vote (sglang-ext heads)"
        )
