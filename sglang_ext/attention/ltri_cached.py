"""The blocks of Ltri-LLM that lie on the device, too: those of a stream, in all layers, come and go in few launches."""

from __future__ import annotations

import torch

from sglang_ext.kernels.host_fetch import BlockCache, HostRegion
from sglang_ext.kernels.host_fetch.types import NOBODY


class CachedBlocks:
    """The caches of blocks of all layers, one behind the other; each layer has a row a stream.

    Args:
        layers: how many there are.
        rows: streams, at most.
        ways: blocks that a layer keeps for a stream.
        region: of any layer; the blocks of all layers have its shape and dtype.
        device: of the caches.

    Attributes:
        layers: the cache of each; they share the memory of all.
    """

    def __init__(self, layers: int, rows: int, ways: int, region: HostRegion, device: torch.device) -> None:
        self._numbers, self._all = region.keys.shape[0], BlockCache.stacked(layers, rows, ways, region, device)
        self.layers = [self._all.layer(number) for number in range(layers)]
        self._counted = (0, 0)
        self._on_way = torch.zeros(2, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._arrives: torch.cuda.Event | None = None

    def forget(self, row: int) -> None:
        """Have no block in a row, before a new stream takes it; counters are of all streams, and go on."""
        self._all.held[:, row].fill_(NOBODY)

    def copy(self, source: int, target: int, numbers: torch.Tensor) -> None:
        """Have the blocks of one row in another one, before a stream takes it that begins like the stream of the first.

        Args:
            source, target: the rows.
            numbers: [n] int32, on the device: the numbers on the host of the new stream's blocks. What else lies in the
                row of the source is left out: its number may become another block's while the new stream lives.
        """
        shared = torch.zeros(self._numbers + 1, dtype=torch.bool, device=numbers.device)  # the last is nobody's
        shared.index_fill_(0, numbers.long(), True)
        every = self._all
        held = every.held[:, source]
        every.held[:, target] = torch.where(shared[held.long()], held, NOBODY)
        for tensor in (every.used, every.clock, every.keys, every.values):
            tensor[:, target] = tensor[:, source]

    def counts(self) -> tuple[int, int]:
        """(Hits, misses) of all layers and streams; waits for the device."""
        hits, misses = self._all.counters.sum((0, 1)).tolist()
        return hits, misses

    def earlier_counts(self) -> tuple[int, int]:
        """`counts` of an earlier moment on a GPU: those that had arrived when it was last called. It does not wait."""
        if self._all.counters.device.type != "cuda":
            return self.counts()
        if self._arrives is None or self._arrives.query():
            hits, misses = self._on_way.tolist()
            self._counted = hits, misses
            self._on_way.copy_(self._all.counters.sum((0, 1)), non_blocking=True)
            self._arrives = torch.cuda.Event()
            self._arrives.record()
        return self._counted

    def forget_counts(self) -> None:
        """Count from nothing again."""
        self._all.counters.zero_()
