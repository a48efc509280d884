"""The adapter between SGLang's attention backends and our readers.

It is mixed over one of SGLang's own backends, which serves batches without views untouched. All else is the reader's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from sglang_ext import compat
from sglang_ext.attention.model import Model
from sglang_ext.attention.policy import Carry, Policy
from sglang_ext.attention.readers.reader import Loaded, Reader, Step
from sglang_ext.attention.requests import RequestTable, note_batch
from sglang_ext.attention.step import Batch, Forward, LayerCall
from sglang_ext.names import AttentionBackend, AttentionLayer, ForwardBatch, ModelRunner, Passed, ScheduleBatch

MakeReader = Callable[[Model, Policy, AttentionBackend], Reader[Step, Loaded]]
"""(model, policy, SGLang's own backend) -> reader."""


class _Base:
    """What is called of SGLang's backend, which stands behind the mixin: for type checkers alone."""

    if TYPE_CHECKING:

        def __init__(self, model_runner: ModelRunner) -> None: ...

        def init_forward_metadata(self, forward_batch: ForwardBatch) -> None: ...

        def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None: ...

        def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *args: Passed, **kwargs: Passed) -> None: ...

        def forward_decode(
            self,
            q: torch.Tensor,
            k: torch.Tensor | None,
            v: torch.Tensor | None,
            layer: AttentionLayer,
            forward_batch: ForwardBatch,
            save_kv_cache: bool = True,
            **kwargs: Passed,
        ) -> torch.Tensor: ...

        def forward_extend(
            self,
            q: torch.Tensor,
            k: torch.Tensor | None,
            v: torch.Tensor | None,
            layer: AttentionLayer,
            forward_batch: ForwardBatch,
            save_kv_cache: bool = True,
            **kwargs: Passed,
        ) -> torch.Tensor: ...


class ViewBackend(_Base):
    """Mixin: `class Backend(ViewBackend, TheBase)`.

    Args:
        model_runner: SGLang's.
        policy: what rows see.
        make_reader: what reads it.

    Raises:
        ValueError: the model, or its memory, is none that the reader serves.

    Attributes:
        scales: whether SGLang's own backend divides keys and values by the checkpoint's scales where it stores them in
            8 bits. What this one stores must be the same, since requests share it.
        window_layers: numbers of the layers that SGLang's own backend serves in every batch.
        reader: serves batches with views.
        prepared: what the reader knows of the batch at hand on the host (`Reader.step`); None for a batch that the base
            serves, and where a CUDA graph is captured.
        loaded: what the layers read (`Reader.before_layers`); None where the base serves them.
        question_size: rows of the CUDA graph with attention inside that has room for the prefill at hand; None where
            there is none.
    """

    scales: bool = True
    window_layers: frozenset[int] = frozenset()

    def __init__(self, model_runner: ModelRunner, policy: Policy, make_reader: MakeReader) -> None:
        super().__init__(model_runner)
        self.policy = policy
        self.requests = RequestTable(policy)
        model = Model(model_runner)
        self.window_layers = model.window_layers
        self.reader = make_reader(model, policy, self)
        self.prepared: Step | None = None
        self.loaded: Loaded | None = None
        self.question_size: int | None = None
        self._graph_rows = 0  # for which there are buffers of decoding steps' graphs
        self._planned = False  # whether `before_layers` has seen the batch at hand
        self._carry: Carry = {}
        self._pool = model_runner.token_to_kv_pool

    # ---- the scheduler's side ----

    @property
    def viewing(self) -> bool:
        """Whether the batch at hand has views."""
        return self.prepared is not None or self.loaded is not None

    def prepare(self, batch: ScheduleBatch, forward_batch: ForwardBatch) -> None:
        """Note the requests of a batch and set their positions. Runs when SGLang builds a ForwardBatch."""
        rows = note_batch(self.requests, batch, forward_batch)
        decode = forward_batch.forward_mode.is_decode()
        self._forget()
        self.prepared = self.reader.step(Batch(tuple(rows), decode)) if rows else None

    def _forget(self) -> None:
        """Name nothing of the batch before any more: it was launched, and what it names may have to go."""
        self.prepared = self.loaded = None
        self._planned, self._carry = False, {}

    def release(self, slot: int) -> None:
        """The request in `slot` of SGLang's request pool ended or was retracted."""
        self.requests.release(slot)
        self.reader.release(slot)
        self._forget()

    def rewritten(self, slot: int) -> None:
        """The row of the request in `slot` may name other KV slots now: what was copied from it no longer holds."""
        self.reader.rewritten(slot)

    def restored(self, slots: torch.Tensor, first: int) -> None:
        """Keys and values that were written at positions from `first` on were copied to KV slots, [tokens] int64."""
        self.reader.restored(slots, first)

    def caches(self) -> Mapping[int, tuple[torch.Tensor, torch.Tensor]]:
        """(keys [slots, kv_heads, head_dim], values [slots, kv_heads, value_dim]) by number of the layer."""
        return compat.kv_by_layer(self._pool)

    # ---- before the layers ----

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self.reader.before_pass()
        idle = forward_batch.forward_mode.is_idle()
        if self.prepared is not None and not idle:
            self.loaded = self.reader.before_layers(self.prepared, _forward(forward_batch), self.question_size)
            self._planned = True
        if self.loaded is None or idle or self.window_layers:
            super().init_forward_metadata(forward_batch)

    # ---- in every layer ----

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Passed,
    ) -> torch.Tensor:
        if not self._is_ours(layer):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        _refuse(kwargs)
        return self._read(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Passed,
    ) -> torch.Tensor:
        if not self._is_ours(layer):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        _refuse(kwargs)
        return self._read(q, k, v, layer, forward_batch, save_kv_cache)

    def _is_ours(self, layer: AttentionLayer) -> bool:
        """Whether the reader serves the layer that runs."""
        if self.prepared is not None and not self._planned:
            raise ValueError("layers run over a batch with views that was not planned: expected init_forward_metadata")
        return self.loaded is not None and layer.layer_id not in self.window_layers

    def _read(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save: bool,
    ) -> torch.Tensor:
        new, scales = None, compat.kv_scales(self._pool, layer) if self.scales else compat.UNSCALED
        if k is not None and v is not None:
            if self.reader.writes:
                keys = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim)
                new = keys, v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim)
            elif save:
                compat.write_kv(self._pool, layer, forward_batch.out_cache_loc, k, v, scales)
        caches = self._pool.get_key_buffer(layer.layer_id), self._pool.get_value_buffer(layer.layer_id)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if layer.layer_id == compat.first_layer(self._pool, but=self.window_layers):  # graphs are captured after runs
            self._carry = {}
        scale = layer.scaling * scales.keys  # logits are linear in the keys, and outputs in the values
        into = compat.attention_output(forward_batch, query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        call = LayerCall(layer.layer_id, query, new, caches, scale, self.loaded, self._carry, into)
        out = self.reader.read(call).flatten(1)
        return out if scales.values == 1.0 else out * scales.values

    # ---- CUDA graphs of decoding steps ----

    @property
    def both_variants(self) -> bool:
        """Whether every batch size has two graphs: one for batches with views, and SGLang's own for those without."""
        return self.reader.graphs is not None and self.reader.graphs.both

    def begin_capture(self, sizes: list[int]) -> list[int]:
        """CUDA graphs of decoding steps with so many rows are about to be captured; returns the sizes of any use."""
        return sizes if self.reader.graphs is None else self.reader.graphs.sizes(sizes)

    def end_capture(self) -> None:
        """The next batch says itself whether it has views."""
        self._forget()

    def fits_graph(self, verifies: bool) -> bool:
        """Whether the decoding step at hand can run in a CUDA graph; where it `verifies`, SGLang's own alone."""
        graphs = self.reader.graphs
        if verifies:
            return self.prepared is None
        if self.prepared is None:
            return graphs is None or graphs.both  # else there is no graph for a batch without views
        return graphs is not None and graphs.fits(self.prepared)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *args: Passed, **kwargs: Passed) -> None:
        if self._graph_rows:  # graphs of drafting steps come behind those of verifications, and share their buffers
            if max_bs > self._graph_rows:
                raise ValueError(f"graphs of {max_bs} rows behind others with buffers for {self._graph_rows}")
            return
        self._graph_rows = max_bs
        super().init_cuda_graph_state(max_bs, max_num_tokens, *args, **kwargs)
        if self.reader.graphs is not None:
            self.reader.graphs.allocate(max_bs)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        graphs = self.reader.graphs
        if in_capture:
            self._forget()
            verifies = forward_batch.forward_mode.is_target_verify()
            if graphs is not None and not verifies and (not graphs.both or compat.capturing_views()):
                self.loaded = graphs.capture(forward_batch.batch_size)
        else:
            self.reader.before_pass()
            if graphs is not None and self.prepared is not None:
                self.loaded = graphs.before_replay(self.prepared, _forward(forward_batch), forward_batch.batch_size)
                self._planned = True
        if self.loaded is None or self.window_layers:
            super().init_forward_metadata_out_graph(forward_batch, in_capture)

    # ---- CUDA graphs of prefills ----

    def init_question_graphs(self, sizes: list[int]) -> None:
        """Room for prefills inside CUDA graphs of `sizes` rows; called before they are captured.

        None where some layers have windows: there are no pools, so that no prefill has views.
        """
        if self.reader.prefill_graphs is not None and not self.window_layers:
            self.reader.prefill_graphs.allocate(sizes)

    def capture_question(self, size: int) -> bool:
        """Let the next prefill of `size` rows be captured with its attention inside; False where it is not to be.

        `end_capture` ends it.
        """
        graphs = self.reader.prefill_graphs
        self._forget()
        self.loaded = None if graphs is None else graphs.capture(size)
        return self.viewing

    def in_question_graph(self) -> bool:
        """Whether the prefill at hand was planned for a CUDA graph that has its attention inside."""
        graphs = self.reader.prefill_graphs
        return graphs is not None and self.loaded is not None and graphs.holds(self.loaded)


def view_backend(model_runner: ModelRunner) -> ViewBackend | None:
    """The view backend among a model runner's attention backends, or None when another one was chosen."""
    return views_of(getattr(model_runner, "attn_backend", None))


def views_of(backend: AttentionBackend | None) -> ViewBackend | None:
    """The view backend that one of SGLang's is, or that reads the attention layers of a hybrid linear model for it."""
    backend = getattr(backend, "full_attn_backend", backend)
    return backend if isinstance(backend, ViewBackend) else None


def _refuse(given: Mapping[str, Passed]) -> None:
    """Raise ValueError where a layer passes what no reader knows (attention sinks, scales of 8 bits)."""
    if unknown := [name for name, value in given.items() if value is not None]:
        raise ValueError(
            f"the model's attention passes {', '.join(unknown)}, which views do not serve: serve it with one of"
            " SGLang's own attention backends"
        )


def _forward(forward_batch: ForwardBatch) -> Forward:
    return Forward(forward_batch.positions, forward_batch.seq_lens, forward_batch.out_cache_loc)
