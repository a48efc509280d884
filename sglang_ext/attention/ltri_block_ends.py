"""What the end of a block asks for between decoding steps of Ltri-LLM, in one recording for all layers.

Once in as many steps as a block has tokens, a stream's newest block has its spans cut, and its oldest one leaves the
window. Layer by layer, launched from the host, that takes longer than a decoding step. What differs between streams and
blocks is four numbers, which lie on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from sglang_ext.attention.ltri_graphs import GraphRecorder
from sglang_ext.attention.ltri_layer import Voter, cells_of
from sglang_ext.attention.ltri_plan import SpanRing
from sglang_ext.attention.ltri_runs import Replay
from sglang_ext.attention.ltri_spans import cut, keep_vectors, leaving_spans
from sglang_ext.attention.ltri_state import LayerStore, span_rule
from sglang_ext.cache.host_blocks import HostBlocks
from sglang_ext.kernels.host_fetch import store
from sglang_ext.policies.ltri import ONE_RANK, TensorRanks
from sglang_ext.policies.ltri_options import Ltri

KINDS = ((True, False), (False, True), (True, True))
"""Whether a block is complete, and whether one leaves the window."""


class BlockEnds:
    """Ends of blocks of one stream at a time, of all layers together.

    Args:
        settings: of the method.
        caches: layer -> (keys [slots, kv_heads, head_dim], values [slots, kv_heads, value_dim]).
        voters: layer -> what votes in it.
        stores: by layer.
        slot: [rows, slots of a stream] int32, the KV slots of each stream's cells.
        heads: query heads of a layer.
        ranks: the tensor-parallel ranks, each of which has some of the heads.
    """

    def __init__(
        self,
        settings: Ltri,
        caches: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
        voters: Mapping[int, Voter | None],
        stores: Mapping[int, LayerStore],
        slot: torch.Tensor,
        heads: int,
        ranks: TensorRanks = ONE_RANK,
    ) -> None:
        self._settings, self._caches, self._voters, self._stores = settings, caches, voters, stores
        self._slot, self._heads, self._ranks = slot, heads, ranks
        self._numbers = torch.zeros(4, dtype=torch.int64, device=slot.device)
        self._replays: dict[tuple[bool, bool], Replay] = {}

    def record(self, host: HostBlocks) -> None:
        """Record all kinds of ends; what that leaves in the first row, and in one block on the host, is of no use.

        Args:
            host: blocks on the host, of which one is free.
        """
        lease, recorder = host.lease(1), GraphRecorder(self._slot.device)
        self._load(0, 0, 0, lease.take())
        for kind in KINDS:
            self._replays[kind] = recorder.record(partial(self._compute, *kind))
        lease.release()
        host.taken = 0

    def replay(self, row: int, complete: int | None, gone: tuple[int, int] | None) -> None:
        """Launch the recording of a block's end, behind what was launched so far.

        Args:
            row: of the stream.
            complete: number of the block whose last token the previous step computed; None for none.
            gone: (number, number on the host) of the block that leaves the window; None for none.
        """
        self._load(row, complete or 0, *(gone or (0, 0)))
        self._replays[complete is not None, gone is not None]()

    def _load(self, *numbers: int) -> None:
        staged = torch.tensor(numbers, dtype=torch.int64, pin_memory=self._numbers.is_cuda)
        self._numbers.copy_(staged, non_blocking=True)

    def _compute(self, complete: bool, gone: bool) -> None:
        """What is recorded of a kind of end; all that differs between ends follows from `_numbers`."""
        settings, (row, whole, leaves, at) = self._settings, self._numbers.split(1)
        first = settings.sinks + leaves * settings.block
        tokens = first + torch.arange(settings.block, device=first.device)
        cells = cells_of(settings, tokens, behind_sinks=True) + row * settings.slots
        slots, ids = self._slot.view(-1).index_select(0, cells).long(), at.int()
        for layer, (keys, values) in self._caches.items():
            if (voter := self._voters[layer]) is not None:
                self._count(layer, row, SpanRing.place(settings, row, whole) if complete else None)
                if gone:
                    self._remember(voter, layer, cells, slots, SpanRing.place(settings, row, leaves), at)
            if gone:
                store(keys, values, slots.view(1, -1), ids, self._stores[layer].region)

    def _count(self, layer: int, row: torch.Tensor, place: torch.Tensor | None) -> None:
        """Count what the newest token gave, and cut the spans of the block that is complete into their place."""
        settings, layer_store = self._settings, self._stores[layer]
        state = layer_store.map_of_voters
        state.received.index_add_(0, row, state.last.index_select(0, row))
        if place is not None and settings.index == "ltri":
            lengths = torch.full((1,), settings.block, dtype=torch.int32, device=row.device)
            spans = cut(state.tile.index_select(0, row), lengths, span_rule(settings, layer), self._ranks)
            layer_store.spans_of_voters.put(place, spans)

    def _remember(
        self,
        voter: Voter,
        layer: int,
        cells: torch.Tensor,
        slots: torch.Tensor,
        place: torch.Tensor,
        at: torch.Tensor,
    ) -> None:
        """Have the block that leaves the window in the layer's index, if there is one."""
        settings, layer_store = self._settings, self._stores[layer]
        received = self._ranks.add(layer_store.map_of_voters.received.view(-1).index_select(0, cells))
        if layer_store.index is None:
            return
        states = voter.of_slots(self._caches[layer][0], slots, self._heads)
        spans = leaving_spans(settings, layer_store, place)
        keep_vectors(settings, layer_store.index, spans, received.view(1, -1), states, at)
