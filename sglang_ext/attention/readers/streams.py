"""The reader of streams in plain PyTorch, on any device: each request attends to what its policy keeps of it.

Where keys and values go and what a row sees is the policy's (`policy.StreamPolicy`). SGLang's own write of keys and
values does not happen: `out_cache_loc` names the padding slot for every token (`serving.streams`).
"""

from __future__ import annotations

import torch

from sglang_ext.attention.choice import KERNELS_ENV
from sglang_ext.attention.model import Machine, Model
from sglang_ext.attention.policy import Caches
from sglang_ext.attention.readers.reader import Reader
from sglang_ext.attention.step import Batch, BatchRows, Forward, LayerCall
from sglang_ext.attention.stream_policy import StreamPolicy
from sglang_ext.cache.streams import MAX_TOKENS
from sglang_ext.kernels import dense_attention


def check_fits(policy: StreamPolicy, pool: int, context: int) -> None:
    """Whether a KV pool of so many slots and a model of so many positions hold any request of the policy.

    Raises:
        ValueError: they do not; says what to change.
    """
    most = policy.slots({}, MAX_TOKENS)
    if most > pool:
        raise ValueError(
            f"a request keeps up to {most} KV slots and the pool has {pool}: make the window or the stride smaller"
            " (--policy), or raise --max-total-tokens"
        )
    if most > context:
        raise ValueError(
            f"a request keeps up to {most} tokens and the model's context has {context} positions: make the window or"
            " the stride smaller (--policy)"
        )


def check_dense(model: Model) -> None:
    """Whether dense prefill kernels (`kernels.dense_attention`) take a model's heads.

    Raises:
        ValueError: they do not; says what to change.
    """
    shape = model.shape
    if shape.head_dim != shape.value_dim or not dense_attention.serves(shape.head_dim, shape.dtype, model.device):
        sizes = ", ".join(map(str, dense_attention.HEAD_SIZES))
        raise ValueError(
            f"heads of size {shape.head_dim} in {shape.dtype}: dense prefill kernels serve {sizes} in half precision;"
            f" set {KERNELS_ENV}=triton in the server's environment"
        )


class StreamReader(Reader[Batch, Batch]):
    """`StreamPolicy.attend` for each request of a batch.

    Raises:
        ValueError: one request may need more slots than there are, or than a row has columns.
    """

    writes = True

    def __init__(self, model: Model, policy: StreamPolicy, machine: Machine) -> None:
        self.model, self.policy = model, policy
        self._nowhere = torch.empty(0, dtype=torch.int32, device=model.table.device)
        check_fits(policy, model.request_slots, model.context)
        policy.bind(model.caches, model.shape.dtype)
        policy.meet(model.served)

    def step(self, batch: Batch) -> Batch:
        for rows in batch.rows:
            self.policy.before_pass(rows.request, rows.req, rows.begin, rows.end, batch.decode)
        return batch

    def before_layers(self, step: Batch, forward: Forward, graph_rows: int | None) -> Batch:
        return step

    def read(self, call: LayerCall[Batch]) -> torch.Tensor:
        if call.new is None:
            raise ValueError(f"layer {call.layer} has no keys and values of its own: streams need them in every layer")
        batch, padded = call.loaded, call.query.shape[0] > call.loaded.total
        alone = len(batch.rows) == 1 and not padded
        where = call.out if alone else None
        caches = Caches(call.layer, *call.caches, self._nowhere, self.model.rope, call.scale, call.carry, where)
        if alone:  # a launch less in each layer
            return self._attend(batch.rows[0], caches, (call.query, *call.new))
        out = call.empty()
        if padded:
            out[batch.total :] = 0
        for rows in batch.rows:
            part = slice(rows.first, rows.first + rows.end - rows.begin)
            out[part] = self._attend(rows, caches, (call.query[part], call.new[0][part], call.new[1][part]))
        return out

    def _attend(
        self, rows: BatchRows, caches: Caches, tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """[tokens, heads, value_dim] of one request, with (query, keys, values) of its tokens."""
        slots = self.model.table[rows.request.slot]
        return self.policy.attend(rows.request, caches, slots, rows.begin, *tokens)
