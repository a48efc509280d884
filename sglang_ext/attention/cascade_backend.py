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

from dataclasses import dataclass
from typing import Any

import torch

from sglang_ext import compat
from sglang_ext.attention.cascade import CascadePolicy, Stream
from sglang_ext.attention.cascade_rows import Attend, OwnRows, Rows, RowStream, Shown, Step
from sglang_ext.attention.choice import KERNELS_ENV, kernels
from sglang_ext.attention.requests import RequestTable, ViewBackend, check_cache_type, note_batch
from sglang_ext.attention.rope import find_rope
from sglang_ext.attention.streams import check_fits
from sglang_ext.kernels.cells import Turn, flashinfer_impl, reference
from sglang_ext.policies.cascade import Cascade

WARM_UP = (1, 3, 16, 17, 32)
"""Counted rows of the passes that compile a prompt's kernels; a whole stride is the last."""


@dataclass(frozen=True)
class _Part:
    """One stream of a batch: its steps, what kernels are told of each, its KV slots [1, slots of a stream]."""

    stream: RowStream
    steps: list[Step]
    shown: list[Shown]
    slots: torch.Tensor


class CascadeStreams(ViewBackend):
    """Mixin over a backend of SGLang's, which serves its dummy batches: `class Backend(CascadeStreams, TheBase)`.

    Raises:
        ValueError: one request may need more slots than there are, or than a row has columns; the KV cache has another
            type than the model; FlashInfer was asked for and has no kernel for the model's heads.

    Attributes:
        rows: states of the streams with the server's settings.
        prefills: how many steps of prompts, by what computed their attention.
        decoding_steps: how many decoding steps, inside CUDA graphs and outside.
    """

    policy: CascadePolicy

    def __init__(self, model_runner: Any, policy: CascadePolicy) -> None:
        compat.refuse_model(model_runner)
        super().__init__(model_runner)  # type: ignore[call-arg]
        self.policy = policy
        self.requests = RequestTable(policy)
        self.shape = compat.attention_shape(model_runner)
        pool, most = self.token_to_kv_pool, policy.config.slots  # type: ignore[attr-defined]
        check_cache_type(model_runner, self.shape.dtype)
        check_fits(policy, compat.num_request_slots(model_runner), compat.context_length(model_runner))
        rope = find_rope(model_runner.model)
        self._device, self._turn = rope.inv_freq.device, Turn.of(rope)
        self._layers = len(compat.kv_by_layer(pool)), compat.first_layer(pool)
        # Every stream, running or between two turns, has `most` slots: so many rows are enough.
        self.rows = self._make(policy.config, compat.num_request_slots(model_runner) // most)
        self._own = OwnRows(lambda cascade: self._make(cascade, 1, self.rows.window))
        policy.keep_in(self._begin)
        self._kind, self._attend = self._choose(kernels(policy))
        self.prefills = {"flashinfer": 0, "torch": 0}
        self.decoding_steps = {"graph": 0, "eager": 0}
        self._table: torch.Tensor = self.req_to_token_pool.req_to_token  # type: ignore[attr-defined]
        self._parts: list[_Part] = []
        if self._device.type == "cuda":
            self._warm_up()

    def _make(self, cascade: Cascade, rows: int, window: tuple[torch.Tensor, torch.Tensor] | None = None) -> Rows:
        return Rows(cascade, rows, self._layers, self.shape, self._turn, self._device, window)

    def _begin(self, cascade: Cascade) -> Stream:
        if cascade == self.policy.config:
            return self.rows.begin()
        return self._own.begin(cascade)

    def _choose(self, chosen: str) -> tuple[str, Attend]:
        """What computes the attention of prompts."""
        shape = self.shape
        if chosen != "flashinfer":
            return "torch", reference.attend
        if shape.head_dim != shape.value_dim or not flashinfer_impl.serves(shape.head_dim, shape.dtype, self._device):
            sizes = ", ".join(map(str, flashinfer_impl.HEAD_SIZES))
            raise ValueError(
                f"heads of size {shape.head_dim} in {shape.dtype}: FlashInfer serves {sizes} in half precision; set"
                f" {KERNELS_ENV}=triton in the server's environment"
            )
        return chosen, flashinfer_impl.attend

    # ---- the scheduler's side ----

    def prepare(self, batch: Any, forward_batch: Any) -> None:
        self._parts = []
        for request, begin, end in note_batch(self.requests, batch, forward_batch):
            stream = self.policy.stream(request.slot)
            if not isinstance(stream, RowStream):
                raise ValueError(f"a {type(stream).__name__} for kernels: expected a RowStream")
            steps = stream.steps(stream.offset + begin, stream.offset + end)
            slots = self._table[request.slot : request.slot + 1, : stream.cascade.slots]
            needed = not forward_batch.forward_mode.is_decode() or steps[0].lists
            part = _Part(stream, steps, [stream.home.show(step) for step in steps] if needed else [], slots)
            if needed:
                stream.home.open(stream.row, steps[0], part.shown[0], slots)
            self._parts.append(part)
        self.viewing = bool(self._parts)

    def release(self, slot: int) -> None:
        self.requests.release(slot)

    # ---- SGLang's side: before the layers ----

    def init_forward_metadata(self, forward_batch: Any) -> None:
        if not self.viewing or forward_batch.forward_mode.is_idle():
            super().init_forward_metadata(forward_batch)  # type: ignore[misc]
        elif forward_batch.forward_mode.is_decode():
            self.decoding_steps["eager"] += 1
            self._load(len(self._parts))
        else:
            self.prefills[self._kind] += sum(len(part.steps) for part in self._parts)

    def _load(self, batch: int) -> None:
        """Have the decoding step at hand in the kernels' buffers, padded to `batch` rows."""
        ours = [(p.stream.row, p.steps[0]) if p.stream.home is self.rows else None for p in self._parts]
        self.rows.decoding.load(ours, batch)
        for part in self._parts:
            if part.stream.home is not self.rows:
                part.stream.home.decoding.load([(part.stream.row, part.steps[0])], 1)

    # ---- SGLang's side: in every layer ----

    def _caches(self, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.token_to_kv_pool  # type: ignore[attr-defined]
        return pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)

    def _views(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
        )

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        if not self.viewing:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)  # type: ignore[misc]
        query, keys, values = self._views(q, k, v, layer)
        out = query.new_empty(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        caches, done = self._caches(layer), 0
        for part in self._parts:
            home, row = part.stream.home, part.stream.row
            for step, shown in zip(part.steps, part.shown, strict=True):
                if step is not part.steps[0]:
                    home.open(row, step, shown, part.slots, layer.layer_id)
                rows = slice(done, done + step.last - step.first)
                out[rows] = home.prefill(
                    layer.layer_id,
                    row,
                    step,
                    shown,
                    query[rows].contiguous(),
                    (keys[rows], values[rows]),
                    caches,
                    layer.scaling,
                    self._attend,
                )
                done = rows.stop
        out[done:] = 0  # padding of a prefill's CUDA graph
        return out.flatten(1)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        if not self.viewing:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)  # type: ignore[misc]
        query, keys, values = self._views(q, k, v, layer)
        caches = self._caches(layer)
        out = self.rows.decode(layer.layer_id, query, (keys, values), caches, layer.scaling)
        for index, part in enumerate(self._parts):
            home = part.stream.home
            if home is not self.rows:
                one = slice(index, index + 1)
                out[one] = home.decode(layer.layer_id, query[one], (keys[one], values[one]), caches, layer.scaling)
        return out.flatten(1)

    # ---- CUDA graphs ----

    def begin_capture(self, sizes: list[int]) -> list[int]:
        """More rows than there are streams are never asked for; buffers for them would be large."""
        streams = self.rows.decoding.rows
        largest = min((size for size in sizes if size >= streams), default=max(sizes))
        if largest > streams:
            self.rows.decoding = self.rows.buffers(largest)
        return [size for size in sizes if size <= largest]

    def fits_graph(self) -> bool:
        return all(part.stream.home is self.rows for part in self._parts)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if in_capture:
            self._parts, self.viewing = [], True
        else:
            self.decoding_steps["graph"] += 1
        self._load(forward_batch.batch_size)

    def _warm_up(self) -> None:
        """Run every kernel of a prompt, in all variants: the first requests are not to wait for a compiler."""
        stream, shape, first = self.rows.begin(), self.shape, compat.first_layer(self.token_to_kv_pool)  # type: ignore[attr-defined]
        # SGLang's padding slot; as far from row to row as in the table, for Triton tells apart multiples of 16.
        nowhere = self._table.new_zeros(1, self._table.shape[1])[:, : stream.cascade.slots]
        caches = compat.kv_by_layer(self.token_to_kv_pool)[first]  # type: ignore[attr-defined]
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


def warm_up(cascade: Cascade) -> list[Step]:
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
                found.append(Step(0, rows, cascade.stride, before, True, True, cascade.counted(0, rows)))
    return found
