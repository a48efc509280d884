"""What a reader is: the part of an attention backend that knows how rows are read.

For every pass the adapter (`attention.backend`) calls `step` when the batch is known, `before_layers` right before its
layers run, and `read` in every layer. What one call finds out and the next one needs is what it returns: the adapter
hands it on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from sglang_ext.attention.step import Batch, Forward, LayerCall, LoadedT

StepT = TypeVar("StepT")
"""A batch, and what a reader knows of it on the host."""

Step: TypeAlias = Any
Loaded: TypeAlias = Any
"""`StepT` and `LoadedT` of whichever reader it is: what one call of it returns is handed on to the next."""


def graph_sizes(sizes: Sequence[int], streams: int) -> list[int]:
    """Those sizes of CUDA graphs that a server of so many streams has a use for: more rows are never asked for."""
    largest = min((size for size in sizes if size >= streams), default=max(sizes))
    return [size for size in sizes if size <= largest]


class DecodeGraphs(ABC, Generic[StepT, LoadedT]):
    """How decoding steps of a reader run inside CUDA graphs.

    Attributes:
        both: whether every batch size has two graphs: one for batches with views, and SGLang's own for those without.
            Where it has one, a decoding step that the reader does not serve runs without a graph.
    """

    both: bool = True

    def sizes(self, sizes: Sequence[int]) -> list[int]:
        """Graphs for batches of so many rows are about to be captured; returns the sizes of any use."""
        return list(sizes)

    def allocate(self, rows: int) -> None:
        """Make what graphs of up to `rows` rows read and write, before they are captured."""
        return

    @abstractmethod
    def capture(self, rows: int) -> LoadedT:
        """What a graph of so many rows is captured with: all of its rows are padding."""

    @abstractmethod
    def fits(self, step: StepT) -> bool:
        """Whether the graphs hold a step."""

    @abstractmethod
    def before_replay(self, step: StepT, forward: Forward, rows: int) -> LoadedT:
        """Have a step that fits in the buffers which the graph of `rows` rows reads; returns as `before_layers`."""


class PrefillGraphs(ABC, Generic[LoadedT]):
    """How small prefills of a reader run inside CUDA graphs that have their attention inside."""

    @abstractmethod
    def allocate(self, sizes: Sequence[int]) -> None:
        """Make what graphs of `sizes` rows read and write, before they are captured."""

    @abstractmethod
    def capture(self, size: int) -> LoadedT | None:
        """What a graph of `size` rows is captured with; None where there is to be none."""

    @abstractmethod
    def holds(self, step: LoadedT) -> bool:
        """Whether `before_layers` loaded a step for such a graph."""


class Reader(ABC, Generic[StepT, LoadedT]):
    """Base class of readers.

    Attributes:
        writes: whether the reader stores new keys and values itself; the adapter does it otherwise.
        graphs: decoding steps inside CUDA graphs; None for a reader that decodes without.
        prefill_graphs: prefills inside CUDA graphs, likewise.
    """

    writes: bool = False
    graphs: DecodeGraphs[Step, Loaded] | None = None
    prefill_graphs: PrefillGraphs[Loaded] | None = None

    @abstractmethod
    def step(self, batch: Batch) -> StepT | None:
        """What the reader makes of a batch; None for one that SGLang's own backend serves. Called once for each batch.

        The device may still compute the batch before: kernels may be launched, and nothing may wait for them.
        """

    def before_pass(self) -> None:
        """A pass is about to run on the current stream, whoever serves it: for what must not wait any longer."""
        return

    @abstractmethod
    def before_layers(self, step: StepT, forward: Forward, graph_rows: int | None) -> LoadedT | None:
        """Have on the device what the layers read. Decoding steps inside CUDA graphs have `DecodeGraphs` instead.

        Args:
            step: of `step`.
            forward: the pass.
            graph_rows: rows of the CUDA graph with attention inside that has room for the prefill at hand
                (`prefill_graphs`); None where there is none.

        Returns:
            What `read` gets; None where SGLang's own backend is to serve the batch after all.
        """

    @abstractmethod
    def read(self, call: LayerCall[LoadedT]) -> torch.Tensor:
        """Attention of one layer.

        Returns:
            [rows, heads, value_dim] in the query's dtype; rows beyond the batch's are zero. The next layer may write to
            the same memory.
        """

    def release(self, slot: int) -> None:
        """The request in `slot` of SGLang's request pool ended or was retracted."""
        return

    def rewritten(self, slot: int) -> None:
        """The row of the request in `slot` may name other KV slots now: what was copied from it no longer holds."""
        return

    def restored(self, slots: torch.Tensor, first: int) -> None:
        """Keys and values that were written at positions from `first` on were copied to KV slots, [tokens] int64."""
        return

    def stats(self) -> Mapping[str, Mapping[str, float]]:
        """What ran, for /server_info; may wait for the device."""
        return {"view_prefills": {}}

    def counters(self) -> Mapping[str, float]:
        """Counters for /metrics. They must not wait for the device: what it counts may be of an earlier moment."""
        return {}
