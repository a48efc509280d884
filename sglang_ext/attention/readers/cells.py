"""Streams with a cascading KV cache in kernels: prompts stride by stride, decoding batched and in CUDA graphs.

Each stream has a row of tensors that never move (`attention.cascade_rows`). What a pass changes besides keys, values
and scores, it changes before the layers run, when the host sees that a stride ended: the stride is added to the
sub-caches in all layers at once, and what the next one sees is written down. So a decoding step is the same launches
every time, and a CUDA graph holds them. Strides that end within a chunk of a prompt are added layer by layer: make
chunks as long as strides.

Requests with settings of their own have a row of their own as well, and batches with them decode without a graph.
(`OwnRows`: memory outside SGLang's budget, of which a little is kept for the next ones.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from sglang_ext.attention.cascade import CascadePolicy, Stream
from sglang_ext.attention.cascade_buffers import StrideStep
from sglang_ext.attention.cascade_rows import Attend, OwnRows, Rows, RowStream, Shown
from sglang_ext.attention.model import Machine, Model
from sglang_ext.attention.readers.reader import DecodeGraphs, Reader, graph_sizes
from sglang_ext.attention.readers.streams import check_dense, check_fits
from sglang_ext.attention.step import Batch, BatchRows, Forward, LayerCall
from sglang_ext.kernels.cells import Rotation, dense_impl, reference
from sglang_ext.policies.cascade import Cascade

WARM_UP = (1, 3, 16, 17, 32)
"""Counted rows of the passes that compile a prompt's kernels; a whole stride is the last."""


@dataclass(frozen=True)
class _Part:
    """One stream of a batch: its steps, what kernels are told of each, its KV slots [1, slots of a stream]."""

    stream: RowStream
    steps: list[StrideStep]
    shown: list[Shown]
    slots: torch.Tensor


@dataclass(frozen=True)
class CellStep:
    """A batch of streams.

    Attributes:
        batch: the requests.
        parts: what each of them computes; none where a CUDA graph is captured.
    """

    batch: Batch
    parts: tuple[_Part, ...]


class CellReader(Reader[CellStep, CellStep], DecodeGraphs[CellStep, CellStep]):
    """Streams of a cascade, in rows of tensors that kernels read; every batch is its.

    Raises:
        ValueError: one request may need more slots than there are, or than a row has columns; the KV cache has another
            type than the model; dense kernels were asked for and do not take the model's heads.

    Attributes:
        rows: states of the streams with the server's settings.
        prefills: how many steps of prompts, by what computed their attention.
        decoding_steps: how many decoding steps, inside CUDA graphs and outside.
    """

    writes = True
    both = False

    def __init__(self, model: Model, policy: CascadePolicy, machine: Machine) -> None:
        self.model, self.policy, self.shape, self.graphs = model, policy, model.shape, self
        most, caches = policy.config.slots, model.caches()
        model.check_cache_type()
        check_fits(policy, model.request_slots, model.context)
        self._device, self._rotation = model.device, Rotation.of(model.rope)
        self._layers = len(caches), min(caches)
        # Every stream, running or between two turns, has `most` slots: so many rows are enough.
        self.rows = self._make(policy.config, model.request_slots // most)
        self._own = OwnRows(lambda cascade: self._make(cascade, 1, self.rows.window))
        policy.meet(model.served)
        policy.keep_in(self._begin)
        self._kind, self._attend = self._choose(machine.kernels)
        self.prefills = {"dense": 0, "torch": 0}
        self.decoding_steps = {"graph": 0, "eager": 0}
        if self._device.type == "cuda":
            self._warm_up()

    def _make(self, cascade: Cascade, rows: int, window: tuple[torch.Tensor, torch.Tensor] | None = None) -> Rows:
        return Rows(cascade, rows, self._layers, self.shape, self._rotation, self._device, window)

    def _begin(self, cascade: Cascade) -> Stream:
        if cascade == self.policy.config:
            return self.rows.begin()
        return self._own.begin(cascade)

    def _choose(self, chosen: str) -> tuple[str, Attend]:
        """What computes the attention of prompts."""
        if chosen != "flashinfer":
            return "torch", reference.attend
        check_dense(self.model)
        return "dense", dense_impl.attend

    # ---- before the layers ----

    def step(self, batch: Batch) -> CellStep:
        return CellStep(batch, tuple(self._part(rows, batch.decode) for rows in batch.rows))

    def _part(self, rows: BatchRows, decode: bool) -> _Part:
        stream = self.policy.stream(rows.request.slot)
        if not isinstance(stream, RowStream):
            raise ValueError(f"a {type(stream).__name__} for kernels: expected a RowStream")
        steps = stream.steps(stream.offset + rows.begin, stream.offset + rows.end)
        slots = self.model.table[rows.request.slot : rows.request.slot + 1, : stream.cascade.slots]
        needed = not decode or steps[0].lists
        part = _Part(stream, steps, [stream.home.show(step) for step in steps] if needed else [], slots)
        if needed:
            stream.home.open(stream.row, steps[0], part.shown[0], slots)
        return part

    def before_layers(self, step: CellStep, forward: Forward, graph_rows: int | None) -> CellStep:
        if step.batch.decode:
            self.decoding_steps["eager"] += 1
            self._load(step, len(step.parts))
        else:
            self.prefills[self._kind] += sum(len(part.steps) for part in step.parts)
        return step

    def _load(self, step: CellStep, rows: int) -> None:
        """Have a decoding step in the kernels' buffers, padded to `rows` rows."""
        ours = [(p.stream.row, p.steps[0]) if p.stream.home is self.rows else None for p in step.parts]
        self.rows.decoding.load(ours, rows)
        for part in step.parts:
            if part.stream.home is not self.rows:
                part.stream.home.decoding.load([(part.stream.row, part.steps[0])], 1)

    # ---- in every layer ----

    def read(self, call: LayerCall[CellStep]) -> torch.Tensor:
        if call.new is None:
            raise ValueError(f"layer {call.layer} has no keys and values of its own: streams need them in every layer")
        return self._decode(call, *call.new) if call.loaded.batch.decode else self._prefill(call, *call.new)

    def _prefill(self, call: LayerCall[CellStep], keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out, done = call.empty(), 0
        for part in call.loaded.parts:
            home, row = part.stream.home, part.stream.row
            for step, shown in zip(part.steps, part.shown, strict=True):
                if step is not part.steps[0]:
                    home.open(row, step, shown, part.slots, call.layer)
                rows = slice(done, done + step.last - step.first)
                query, new = call.query[rows].contiguous(), (keys[rows], values[rows])
                out[rows] = home.prefill(
                    call.layer, row, step, shown, query, new, call.caches, call.scale, self._attend
                )
                done = rows.stop
        out[done:] = 0  # padding of a prefill's CUDA graph
        return out

    def _decode(self, call: LayerCall[CellStep], keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out = self.rows.decode(call.layer, call.query, (keys, values), call.caches, call.scale)
        for index, part in enumerate(call.loaded.parts):
            home = part.stream.home
            if home is not self.rows:
                one = slice(index, index + 1)
                new = keys[one], values[one]
                out[one] = home.decode(call.layer, call.query[one], new, call.caches, call.scale)
        return out

    def stats(self) -> Mapping[str, Mapping[str, float]]:
        return {"view_prefills": dict(self.prefills), "decoding_steps": dict(self.decoding_steps)}

    # ---- CUDA graphs ----

    def sizes(self, sizes: Sequence[int]) -> list[int]:
        """The useful ones; there are buffers for the largest, and for more rows they would be large."""
        found = graph_sizes(sizes, self.rows.decoding.rows)
        if max(found) > self.rows.decoding.rows:
            self.rows.decoding = self.rows.buffers(max(found))
        return found

    def capture(self, rows: int) -> CellStep:
        step = CellStep(Batch((), decode=True), ())
        self._load(step, rows)
        return step

    def fits(self, step: CellStep) -> bool:
        return all(part.stream.home is self.rows for part in step.parts)

    def before_replay(self, step: CellStep, forward: Forward, rows: int) -> CellStep:
        self.decoding_steps["graph"] += 1
        self._load(step, rows)
        return step

    def _warm_up(self) -> None:
        """Run every kernel of a prompt, in all variants: the first requests are not to wait for a compiler."""
        stream, shape, first = self.rows.begin(), self.shape, self._layers[1]
        # SGLang's padding slot; as far from row to row as in the table, for Triton tells apart multiples of 16.
        nowhere = self.model.table.new_zeros(1, self.model.table.shape[1])[:, : stream.cascade.slots]
        caches = self.model.caches()[first]
        passes = warm_up(stream.cascade)
        query, keys, values = (
            torch.zeros(passes[-1].last, heads, size, dtype=shape.dtype, device=self._device)
            for heads, size in (
                (shape.heads, shape.head_dim),
                (shape.kv_heads, shape.head_dim),
                (shape.kv_heads, shape.value_dim),
            )
        )
        for step in passes:
            shown, size = self.rows.show(step), step.last - step.first
            for layer in (None, first):  # of all layers before a pass, of one within it
                self.rows.open(stream.row, step, shown, nowhere, layer)
            new = keys[:size], values[:size]
            self.rows.prefill(first, stream.row, step, shown, query[:size], new, caches, shape.scale, self._attend)
        stream.close()


def warm_up(cascade: Cascade) -> list[StrideStep]:
    """Steps that need every variant of a prompt's kernels, the longest last; none follows from the one before.

    Triton compiles a kernel anew for a number that is 1, and for multiples of 16; kernels of scores are told how many
    rows and columns there are, have other tiles for up to 16 rows, and for long strides on Hopper are others
    (`score_update`).
    """
    found = []
    sizes = {*WARM_UP, *(rows * cascade.score_every for rows in WARM_UP), cascade.stride}
    for rows in sorted(sizes):
        for before in sorted({0, -rows % 16, -rows % 16 + 1}):
            if rows <= cascade.stride and before + rows <= cascade.slots:
                found.append(StrideStep(0, rows, cascade.stride, before, True, True, cascade.counted(0, rows)))
    return found
