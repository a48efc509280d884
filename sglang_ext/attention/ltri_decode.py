"""Decoding steps of streams of Ltri-LLM in kernels: the same launches every time, so that CUDA graphs hold them.

What a step reads of a stream lies in a row of tensors that never move (`ltri_stores`). What changes once a block, spans
that are cut and blocks that leave the window, is done before the layers run, when the host sees that it is due: in one
recording for all layers (`ltri_block_ends`), or layer by layer where a prompt ended with a chunk that was launched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sglang_ext.attention.ltri import LtriPolicy, LtriStream
from sglang_ext.attention.ltri_block_ends import BlockEnds
from sglang_ext.attention.ltri_memory import LayerHost
from sglang_ext.attention.ltri_plan import Seat
from sglang_ext.attention.ltri_state import KernelMemory
from sglang_ext.attention.ltri_stores import KernelChunks
from sglang_ext.attention.model import Model
from sglang_ext.attention.policy import Caches
from sglang_ext.attention.step import BatchRows, LayerCall
from sglang_ext.kernels.stream_decode import NewToken, StepNumbers, StreamCaches, StreamSizes, StreamWorkspace
from sglang_ext.kernels.stream_decode.dispatch import decode
from sglang_ext.kernels.stream_decode.triton_impl import shares_of
from sglang_ext.kernels.stream_decode.types import FIELDS

PADDING = (-1, 0, 0, 0)


@dataclass(frozen=True)
class StepBuffers:
    """What a decoding step of so many requests reads and writes.

    Attributes:
        numbers: of the streams.
        workspace: of the kernels.
    """

    numbers: StepNumbers
    workspace: StreamWorkspace


class DecodeRows:
    """Decoding steps of the streams of a policy.

    Args:
        model: the model.
        policy: whose streams they are.
        chunks: what kernels have for them.

    Attributes:
        block_ends: how often the work at a block's end was `replayed` for all layers, and `launched` layer by layer;
            the latter counts also answers that begin while blocks of their prompt still wait for that work.
    """

    def __init__(self, model: Model, policy: LtriPolicy, chunks: KernelChunks) -> None:
        self._model, self._policy, self._chunks, settings = model, policy, chunks, policy.config
        self._ends: BlockEnds | None = None
        self.block_ends = {"replayed": 0, "launched": 0}
        self._sizes = StreamSizes(settings.sinks, settings.slots, settings.window, settings.block)
        self._buffers: dict[int, StepBuffers] = {}

    def record(self) -> None:
        """Record what the end of a block asks for, unless the host has no block free, so that none leaves a window."""
        model, policy, chunks = self._model, self._policy, self._chunks
        caches, host = model.caches(), policy.blocks_on_host
        if host.available < 1:
            return
        self._ends = BlockEnds(
            policy.config, caches, chunks.voters, chunks.stores, chunks.slot, model.shape.heads, chunks.ranks
        )
        self._ends.record(host)

    def load(self, batch: Sequence[BatchRows], size: int) -> StepBuffers:
        """Have a step of streams, one token each, in the buffers for `size` requests, padding included."""
        buffers = self._buffers.get(size) or self._buffers.setdefault(size, self._make(size))
        numbers = [self._open(rows) for rows in batch] + [PADDING] * (size - len(batch))
        fields, into = list(zip(*numbers, strict=True)), buffers.numbers.numbers
        into.copy_(torch.tensor(fields, dtype=torch.int32, pin_memory=into.is_cuda), non_blocking=True)
        return buffers

    def _make(self, size: int) -> StepBuffers:
        settings, shape, device = self._policy.config, self._model.shape, self._model.device
        beyond = settings.sinks + settings.retrieved * settings.block
        shares = shares_of(size, shape.kv_heads, self._sizes, beyond, shape.num_sms)
        numbers = torch.zeros(len(FIELDS), size, dtype=torch.int32, device=device)
        space = StreamWorkspace.empty(size, shape.heads, shape.value_dim, settings.slots, shares, device)
        return StepBuffers(StepNumbers(numbers), space)

    # ---- before the layers ----

    def _open(self, rows: BatchRows) -> tuple[int, int, int, int]:
        """Have a stream's state where the step reads it; its column of `StepNumbers`."""
        settings, stream = self._policy.config, self._policy.stream(rows.request)
        token = stream.offset + rows.begin
        slots = self._model.table[rows.request.slot]
        seat = self._chunks.seat_of(stream.lease)
        maps = [each for each in stream.layers.values() if isinstance(each, KernelMemory) and each.row is not None]
        fresh = any(memory.last is not None and memory.last[0] < token for memory in maps)
        whole = settings.first(settings.blocks(token)) == token  # a block ended with the token before
        gone = settings.evicted(token) - stream.stored
        if seat is not None and not seat.decodes and self._begun(stream, seat, maps, token):
            whole = False  # the prompt's last chunk has cut its spans
        if seat is None or not seat.decodes or whole or gone > 0:
            usual = seat is not None and (fresh or not maps) and self._replayed(stream, seat, maps, token, whole)
            if seat is None or not usual:
                seat = self._settle(rows, slots, token)
            self.block_ends["replayed" if usual else "launched"] += 1
            fresh = False
        for memory in maps:
            memory.saw(token)
        return seat.row, token, settings.local(token), int(fresh)

    def _begun(self, stream: LtriStream, seat: Seat, maps: Sequence[KernelMemory], token: int) -> bool:
        """Begin an answer without launches of `_settle`, where the prompt's last chunk has cut all spans that are due.

        Returns:
            Whether it has; nothing is done where it has not.
        """
        settings = self._policy.config
        waits = any(settings.first(block + 1) <= token for memory in maps for block in memory.tiles)
        if seat.settled != token or waits:
            return False
        memories = {layer: each for layer, each in stream.layers.items() if isinstance(each, KernelMemory)}
        self._show(memories, seat.row, token)
        seat.decodes, seat.settled = True, None
        return True

    def _show(self, memories: Mapping[int, KernelMemory], row: int, token: int) -> None:
        """Have in the stream's row what an answer from a token on reads and writes of all layers.

        That is the blocks that the prompt got back, and the tile of the block that the token belongs to.
        """
        settings, none = self._policy.config, self._chunks.none
        block = settings.blocks(token + 1) - 1
        pairs = list[tuple[torch.Tensor, torch.Tensor]]()
        for layer, memory in memories.items():
            store = self._chunks.stores[layer]
            if store.state is not None and settings.index == "ltri" and block >= 0:
                memory.tiles[block] = store.state.tile[row]  # where a prompt's chunk left it, too
            if memory.retrieved is not memory.shown:
                found = none[:0] if memory.retrieved is None else memory.retrieved.ways
                shown, rest = store.ways[row].tensor_split([found.shape[0]])
                pairs += [(shown, found), (rest, none[: rest.shape[0]])]
                memory.shown = memory.retrieved
        moved = [(into, new) for into, new in pairs if new.numel()]
        if moved:
            torch._foreach_copy_([into for into, _ in moved], [new for _, new in moved])  # few launches for all layers

    def _replayed(self, stream: LtriStream, seat: Seat, maps: Sequence[KernelMemory], token: int, whole: bool) -> bool:
        """Replay the end of a block, and keep in mind what it leaves.

        Returns:
            Whether it was replayed. Nothing is done where no end is recorded, or where more waits than one block that
            is complete and one that leaves the window.
        """
        settings, ends = self._policy.config, self._ends
        before, after, complete = stream.stored, settings.evicted(token), settings.blocks(token) - 1
        spans = settings.index == "ltri"
        waits = all(list(memory.tiles) == [complete] for memory in maps) if spans and whole else True
        if ends is None or not seat.decodes or after > before + 1 or complete < 0 or not waits:
            return False
        ids = LayerHost(self._policy.blocks_on_host, stream.lease, 0, self._model.device).numbers(after)
        gone = (before, ids[before]) if after > before else None
        if gone is not None:
            self._chunks.wait_for_copies()
        ends.replay(seat.row, complete if whole else None, gone)
        seat.learn(ids)
        for layer, memory in stream.layers.items():
            memory.stored = after
            state = self._chunks.stores[layer].state
            if state is None:
                continue
            memory.last = None
            if spans and whole:
                memory.tiles = {complete + 1: state.tile[seat.row]}
        return True

    def _settle(self, rows: BatchRows, slots: torch.Tensor, token: int) -> Seat:
        """Do all layers' `KernelChunk.remember`, launched one by one, and `_show`; the seat, ready for decoding."""
        carry: dict[str, object] = {}
        nowhere, memories = slots[:0], dict[int, KernelMemory]()
        for layer, (keys, values) in self._model.caches().items():
            caches = Caches(layer, keys, values, nowhere, self._model.rope, self._model.shape.scale, carry)
            tokens = self._policy.tokens(rows.request, caches, slots, self._model.shape.heads, (token, token + 1))
            chunk = self._chunks.launched(tokens)
            chunk.remember()
            memories[layer] = chunk.memory
        seat = self._chunks.seat(tokens)
        self._show(memories, seat.row, token)
        seat.decodes, seat.settled = True, None
        return seat

    # ---- in every layer ----

    def decode(self, call: LayerCall[StepBuffers]) -> torch.Tensor:
        """One layer of a step."""
        if call.new is None:
            raise ValueError(f"layer {call.layer} has no keys and values of its own: streams need them in every layer")
        store, (keys, values) = self._chunks.stores[call.layer], call.caches
        seen = StreamCaches(keys, values, self._chunks.slot, store.cache.keys, store.cache.values, store.ways)
        return decode(
            NewToken(call.query, *call.new),
            seen,
            call.loaded.numbers,
            self._sizes,
            store.rotation,
            call.scale,
            state=store.state,
            workspace=call.loaded.workspace,
        )
