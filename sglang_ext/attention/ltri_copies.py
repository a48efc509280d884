"""Blocks of Ltri-LLM on their way to the host: copied by the GPU's copy engine, beside all else.

A kernel that writes to the host holds up others on its multiprocessors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from sglang_ext.attention.ltri_memory import LayerHost
from sglang_ext.attention.ltri_state import Leaving


class HostCopies:
    """Copies of blocks to the host, one behind the other.

    A single CUDA stream waits for the copies of a layer or of a run, so one wait is enough, and the event is dropped.
    Several streams may wait for all copies, so `_newest` stays.

    Args:
        device: of the blocks.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._of_layer = dict[int, torch.cuda.Event]()
        self._of_run = dict[int, torch.cuda.Event]()
        self._newest: torch.cuda.Event | None = None

    def wait_for_layer(self, layer: int) -> None:
        """What is launched from here on finds all blocks of a layer on the host."""
        if layer in self._of_layer:
            torch.cuda.current_stream().wait_event(self._of_layer.pop(layer))

    def wait_for_all(self) -> None:
        """What is launched from here on finds all blocks on the host, and may write where any lies."""
        if self._newest is not None:
            torch.cuda.current_stream().wait_event(self._newest)

    def wait_for_run(self, number: int) -> None:
        """What is launched from here on may write where the blocks of a run of chunks waited for their copies."""
        if number in self._of_run:
            torch.cuda.current_stream().wait_event(self._of_run.pop(number))

    def put(
        self, number: int, layer: int, leaving: Leaving, host: LayerHost, blocks: Sequence[tuple[int, int]]
    ) -> None:
        """Copy blocks that wait to the host, as soon as what was launched so far has ended.

        Args:
            number: of the run of chunks that they leave the window with.
            layer: of the blocks.
            leaving: where they wait.
            host: where they go.
            blocks: (place among those that wait, number on the host) of each.
        """
        block = host.host.keys[layer].shape[1]
        pairs = [
            (source.unflatten(0, (-1, block)), kept[layer])
            for source, kept in ((leaving.keys, host.host.keys), (leaving.values, host.host.values))
        ]
        if self._stream is None:
            self._copy(pairs, blocks)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(pairs, blocks)
            done = torch.cuda.Event()
            done.record()
        self._of_layer[layer] = self._of_run[number] = self._newest = done

    @staticmethod
    def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], blocks: Sequence[tuple[int, int]]) -> None:
        for place, number, count in stretches(blocks):
            for waiting, kept in pairs:
                kept[number : number + count].copy_(waiting[place : place + count], non_blocking=True)


def stretches(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(first, first, count) of each stretch of pairs in which both numbers rise by 1."""
    begin = 0
    for at in range(1, len(pairs) + 1):
        if at == len(pairs) or any(new != old + 1 for old, new in zip(pairs[at - 1], pairs[at], strict=True)):
            yield *pairs[begin], at - begin
            begin = at
