"""The cascading KV cache's streams on the device: a row of static tensors each, for all layers, read by kernels.

What the host knows of a stream, how many tokens were added and counted, is the same in every layer of a pass; the
kernels are told by launch arguments or by a few numbers a request, and nothing is read back. What differs from head to
head is in the state (`kernels.cascade_update`) and in the lists that follow from it once a stride (`kernels.cells`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sglang_ext.attention.cascade import Stream
from sglang_ext.attention.cascade_buffers import ALIGNED, DecodeBuffers, StrideStep
from sglang_ext.compat import AttentionShape
from sglang_ext.kernels.cascade_update import CascadeState
from sglang_ext.kernels.cascade_update.triton_impl import cascade_update
from sglang_ext.kernels.cells import Cells, CountedScores, NewTokens, Rotation, dispatch, empty_lists, triton_impl
from sglang_ext.kernels.score_update import CountedQueries, KeptScores
from sglang_ext.kernels.score_update.triton_impl import update_scores
from sglang_ext.policies.cascade import Cascade

KEPT = 4
"""Rows of streams with settings of their own that are kept when their streams have ended."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
"""Attention of a stride behind its window, as `kernels.cells.reference.attend`."""


@dataclass(frozen=True)
class Shown:
    """What kernels of all layers are told of a step, on the device.

    Attributes:
        entries: [1, slots of a stream] int32, `Rings.columns` of the stride that the step lies in.
        before: [1] int32, columns that the first query to be counted in the scores sees before its own.
        count: [1] int32, queries to be counted.
        settled: [1] int32, columns whose scores decide nothing any more.
    """

    entries: torch.Tensor
    before: torch.Tensor
    count: torch.Tensor
    settled: torch.Tensor


@dataclass(kw_only=True)
class RowStream(Stream):
    """A stream in a row of `Rows`.

    Attributes:
        home, row: where.
        added, scored: tokens that were added to the sub-caches, and queries that were counted in the scores.
        listed: `added` of the stride whose lists are written down; None for none.
    """

    home: Rows
    row: int
    added: int = 0
    scored: int = 0
    listed: int | None = None

    def resumed(self, tokens: int) -> RowStream:
        return replace(self, offset=tokens, listed=None)

    def close(self) -> None:
        self.home.free.append(self.row)

    def steps(self, begin: int, end: int) -> list[StrideStep]:
        """What computing the tokens [begin, end) takes; they count as computed from now on."""
        found = []
        for first, last in self.cascade.strides(begin, end):
            added = self.cascade.stride_at(first)
            before = self.home.rings.kept(added) + first - added
            counted = self.cascade.counted(max(first, self.scored), last)
            found.append(StrideStep(first, last, added, before, self.added < added, self.listed != added, counted))
            self.added, self.listed, self.scored = max(self.added, added), added, max(self.scored, last)
        return found


class Rows:
    """States and lists of up to `rows` streams of one setting.

    Args:
        cascade: the setting.
        rows: how many.
        layers: layers of the model, and the number of the first.
        shape: heads of a layer.
        rotation: the model's.
        device: of everything.

    Attributes:
        free: rows that no stream has.
        window: (keys, values) that a stride of a prompt sees, [slots of a stream, kv_heads, dim]; all layers and
            streams use it, one after the other.
        decoding: buffers of decoding steps.
    """

    def __init__(
        self,
        cascade: Cascade,
        rows: int,
        layers: tuple[int, int],
        shape: AttentionShape,
        rotation: Rotation,
        device: torch.device,
        window: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        count, self._first = layers
        self.cascade, self.rings, self.shape = cascade, cascade.rings, shape
        self.rotation, self.device = rotation, device
        self.state = CascadeState.empty(count, rows, cascade.lanes(shape.kv_heads), self.rings, device)
        self.lists = empty_lists(self.state)
        self.free = list(range(rows))[::-1]
        self.scored = cascade.keeps_scores
        self._numbers = (torch.arange(ALIGNED * rows, dtype=torch.int32, device=device) // ALIGNED).view(rows, ALIGNED)
        if window is None:
            sizes = (shape.head_dim, shape.value_dim)
            keys, values = (
                torch.empty(cascade.slots, shape.kv_heads, size, dtype=shape.dtype, device=device) for size in sizes
            )
            window = keys, values
        self.window = window
        self.decoding = self.buffers(rows)

    def buffers(self, rows: int) -> DecodeBuffers:
        """Buffers for decoding steps of up to so many of these streams, padding included."""
        return DecodeBuffers(self.rings, self.shape, self.rotation, self.scored, rows, self.device)

    def begin(self) -> RowStream:
        """A stream that has seen nothing.

        Raises:
            RuntimeError: every row is taken.
        """
        if not self.free:
            raise RuntimeError(f"{self.state.cell.shape[1]} streams run and there is no row for one more")
        row = self.free.pop()
        self.state.reset(self._row(row), self.rings)
        return RowStream(self.cascade, home=self, row=row)

    def _row(self, row: int) -> torch.Tensor:
        """[1] int32, the number of a row, without a copy from the host."""
        return self._numbers[row, :1]

    def _number(self, value: int) -> torch.Tensor:
        """One number, made on the device: a copy from the host would wait for it."""
        return torch.full((1,), value, dtype=torch.int32, device=self.device)

    def show(self, step: StrideStep) -> Shown:
        """What `open` and `prefill` need on the device; once for all layers."""
        added, first = self._number(step.added), step.counted.start - step.first if step.counted else 0
        return Shown(
            triton_impl.columns(self.rings, added, added + self.rings.stride, self.rings.entries),
            self._number(step.before + first),
            self._number(len(step.counted)),
            self._number(self.rings.settled(step.added)),
        )

    def open(self, row: int, step: StrideStep, shown: Shown, slots: torch.Tensor, layer: int | None = None) -> None:
        """Begin a stride: add the one before, write down what this one sees; where that has not been done.

        Args:
            row: of the stream.
            step: the pass's first in the stride.
            shown: `show` of the step.
            slots: [1, slots of a stream] int32, KV slot of each cell.
            layer: the layer's number; None for all at once.
        """
        which = slice(None) if layer is None else slice(layer - self._first, layer - self._first + 1)
        state = CascadeState(self.state.token[which], self.state.cell[which], self.state.score[which])
        at = self._row(row)
        if step.grows:
            stride = self._number(self.rings.stride)
            before = self._number(step.added - self.rings.stride)
            cascade_update(state, at, before, stride, self.rings, self.cascade.selection)
        if step.lists:
            triton_impl.list_columns(self.lists[which], state, at, shown.entries, slots, self.rings)

    def prefill(
        self,
        layer: int,
        row: int,
        step: StrideStep,
        shown: Shown,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        caches: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        attend: Attend,
    ) -> torch.Tensor:
        """Tokens of a prompt in one layer, within a stride that is open: stored, attended from, and counted.

        Args:
            layer, row, step, shown: as for `open`.
            query: [rows, heads, head_dim], rotated at their columns.
            new: (keys, values), [rows, kv_heads, dim], likewise.
            caches: (keys, values) of the layer, [slots, kv_heads, dim].
            scale: factor of the logits.
            attend: attention over the window.

        Returns:
            [rows, heads, value_dim] in query's dtype.
        """
        number = layer - self._first
        slot = self.lists[number, row]
        triton_impl.gather(*caches, slot, self.rotation, step.before, *self.window)
        triton_impl.store(*new, slot, self.rotation, step.before, *caches, *self.window)
        keys, values = (part[: step.columns] for part in self.window)
        out, lse = attend(query, keys, values, scale)
        if self.scored and step.counted:
            counted = slice(step.counted.start - step.first, None, step.counted.step)
            update_scores(
                KeptScores(
                    score=self.state.score[number],
                    entries=shown.entries[:, : step.columns],
                    rows=self._row(row),
                    skip=shown.settled,
                ),
                CountedQueries(
                    query=query[counted].unsqueeze(0),
                    keys=keys.transpose(0, 1).unsqueeze(0),
                    lse=lse[counted].unsqueeze(0),
                    before=shown.before,
                    count=shown.count,
                    scale=scale,
                    every=self.cascade.score_every,
                ),
                beta=self.cascade.decay,
                reduction=self.cascade.head_reduction,
            )
        return out

    def decode(
        self,
        layer: int,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        caches: tuple[torch.Tensor, torch.Tensor],
        scale: float,
    ) -> torch.Tensor:
        """One token of each stream that `decoding` was loaded with, in one layer.

        Args, Returns: as for `prefill`, a row a stream; zeros where `decoding` has padding.
        """
        number, batch = layer - self._first, query.shape[0]
        rows, seen, skip, fresh, _ = self.decoding.numbers(batch)
        scores = None
        if self.scored:
            scores = CountedScores(
                score=self.state.score[number],
                entries=self.decoding.entries[:batch],
                skip=skip,
                fresh=fresh,
                beta=self.cascade.decay,
                reduction=self.cascade.head_reduction,
            )
        return dispatch.decode(
            NewTokens(query, *new),
            Cells(*caches, self.lists[number]),
            rows,
            seen,
            self.rotation,
            scale,
            scores=scores,
            workspace=self.decoding.workspace(batch),
        )


class OwnRows:
    """Rows for streams with settings of their own, one stream each.

    A row takes 16 bytes an entry, lane and layer, and buffers for decoding: with Llama-3.1-8B and 5,184 slots 23 MB.
    SGLang's budget does not know of them, neither of those in use nor of the `KEPT` that are kept for requests to come.

    Args:
        make: allocates a row for a setting.
    """

    def __init__(self, make: Callable[[Cascade], Rows]) -> None:
        self._make = make
        self._kept: list[Rows] = []  # the one begun last is the last one; some are in use

    def begin(self, cascade: Cascade) -> RowStream:
        """A stream that has seen nothing; allocates only where no row of an ended stream has these settings."""
        home = next((each for each in self._kept if each.cascade == cascade and each.free), None)
        if home is None:
            home = self._make(cascade)
        else:
            self._kept.remove(home)
        if len(self._kept) == KEPT:  # what is in use is freed with its stream
            self._kept.remove(next((each for each in self._kept if each.free), self._kept[0]))
        self._kept.append(home)
        return home.begin()
