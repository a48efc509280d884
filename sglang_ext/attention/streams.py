"""The attention backend of streams: requests that keep a bounded set of KV slots, whatever their length.

Where keys and values go and what a row sees is the policy's (`policy.StreamPolicy`); here are the requests of a batch,
their slots and their rows. SGLang's own write of keys and values does not happen: `out_cache_loc` names the padding
slot for every token (`serving.streams`).
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_ext import compat
from sglang_ext.attention.policy import Caches, Request, StreamPolicy
from sglang_ext.attention.requests import RequestTable, ViewBackend, note_batch
from sglang_ext.attention.rope import find_rope
from sglang_ext.attention.torch_base import TorchBackend
from sglang_ext.cache.streams import MAX_TOKENS


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


class StreamAttnBackend(ViewBackend, TorchBackend):
    """PyTorch attention of a `StreamPolicy`, on any device; the base class serves SGLang's dummy batches.

    Raises:
        ValueError: one request may need more slots than there are, or than a row has columns.
    """

    policy: StreamPolicy

    def __init__(self, model_runner: Any, policy: StreamPolicy) -> None:
        compat.refuse_model(model_runner)
        super().__init__(model_runner)
        self.policy = policy
        self.rope = find_rope(model_runner.model)
        self.requests = RequestTable(policy)
        self._nowhere = torch.empty(0, dtype=torch.int32, device=self.device)
        self._rows: list[tuple[Request, torch.Tensor, int]] = []
        check_fits(policy, compat.num_request_slots(model_runner), compat.context_length(model_runner))
        policy.bind(lambda: compat.kv_by_layer(self.token_to_kv_pool))

    # ---- before a forward pass ----

    def prepare(self, batch: Any, forward_batch: Any) -> None:
        note_batch(self.requests, batch, forward_batch)

    def release(self, slot: int) -> None:
        self.requests.release(slot)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._rows = []
        if forward_batch.forward_mode.is_idle():
            return
        requests, seq_lens = forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist()
        decode = forward_batch.forward_mode.is_decode()
        lengths = [1] * len(requests) if decode else forward_batch.extend_seq_lens.tolist()
        known = [self.requests.find(slot) for slot in requests]
        for request, seq_len, length in zip(known, seq_lens, lengths, strict=True):
            if request is not None:
                table = self.req_to_token_pool.req_to_token
                self._rows.append((request, table[request.slot], seq_len - length))
        if self._rows and len(self._rows) != len(requests):
            raise ValueError(f"requests {requests}: {len(requests) - len(self._rows)} of a batch are not known")

    # ---- in every layer ----

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        if not self._rows:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return self._forward(q, k, v, layer, forward_batch.extend_seq_lens_cpu)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        if not self._rows:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return self._forward(q, k, v, layer, [1] * len(self._rows))

    def _forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, lengths: list[int]
    ) -> torch.Tensor:
        caches = Caches(
            layer=layer.layer_id,
            keys=self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            values=self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            slot_pos=self._nowhere,
            rope=self.rope,
            scale=layer.scaling,
        )
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim).split(lengths)
        keys = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim).split(lengths)
        values = v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim).split(lengths)
        out = [
            self.policy.attend(request, caches, slots, begin, *rows)
            for (request, slots, begin), *rows in zip(self._rows, queries, keys, values, strict=True)
        ]
        return torch.cat(out).flatten(1)
