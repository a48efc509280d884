"""The attention backend: dense attention as SGLang's own for plain requests, views for the others.

It reads nothing of the scheduler but the request's row of KV slots, the position each slot was written at, and the
description of the row (`cache.rows.Row`). It writes `slot_pos` before every forward pass.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_ext import compat
from sglang_ext.attention.policy import Attended, Caches, Policy, RequestRows, RowViews
from sglang_ext.attention.requests import RequestTable, ViewBackend, note_batch
from sglang_ext.attention.rope import find_rope
from sglang_ext.attention.torch_base import TorchBackend
from sglang_ext.kernels.view_attention import merge_states, view_attention


class ViewAttnBackend(ViewBackend, TorchBackend):
    """PyTorch attention over the views of one policy, on any device; the base class serves plain requests."""

    def __init__(self, model_runner: Any, policy: Policy) -> None:
        compat.refuse_model(model_runner)
        super().__init__(model_runner)
        self.policy = policy
        self.rope = find_rope(model_runner.model)
        slots = compat.num_kv_slots(model_runner)
        self.slot_pos = torch.zeros(slots, dtype=torch.int32, device=self.device)
        self.requests = RequestTable(policy)
        policy.bind(lambda: compat.kv_by_layer(self.token_to_kv_pool))
        self._views: list[tuple[RequestRows, RowViews] | None] = []

    # ---- before a forward pass ----

    def prepare(self, batch: Any, forward_batch: Any) -> None:
        rows = note_batch(self.requests, batch, forward_batch)
        decode = forward_batch.forward_mode.is_decode()
        for req, (request, begin, end) in zip(batch.reqs, rows, strict=True):
            self.policy.before_pass(request, req, begin, end, decode)

    def release(self, slot: int) -> None:
        self.requests.release(slot)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._views = []
        if forward_batch.forward_mode.is_idle():
            return
        self.slot_pos[forward_batch.out_cache_loc.long()] = forward_batch.positions.to(torch.int32)
        requests, seq_lens = forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist()
        extend = not forward_batch.forward_mode.is_decode()
        lengths = forward_batch.extend_seq_lens.tolist() if extend else [1] * len(requests)
        for request, seq_len, length in zip(requests, seq_lens, lengths, strict=True):
            rows = RequestRows(
                request=self.requests.get(request),
                slots=self.req_to_token_pool.req_to_token[request, :seq_len],
                begin=seq_len - length,
                slot_pos=self.slot_pos,
                decode=not extend,
            )
            views = self.policy.views(rows)
            self._views.append(None if views is None else (rows, views))

    # ---- in every layer ----

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        if not any(self._views):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        if not any(self._views):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def _forward(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool
    ) -> torch.Tensor:
        if save_kv_cache and k is not None and v is not None:
            compat.write_kv(self.token_to_kv_pool, layer, forward_batch.out_cache_loc, k, v)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = query.new_empty(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        caches = Caches(
            layer=layer.layer_id,
            keys=self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            values=self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            slot_pos=self.slot_pos,
            rope=self.rope,
            scale=layer.scaling,
        )
        decode = forward_batch.forward_mode.is_decode()
        first = 0
        for index, planned in enumerate(self._views):
            if planned is None:
                length = 1 if decode else int(forward_batch.extend_seq_lens[index])
                self._plain(query, out, slice(first, first + length), layer, caches, forward_batch, index, decode)
            else:
                rows, views = planned
                length = rows.end - rows.begin
                for low, high, view in views:
                    part = slice(first + low - rows.begin, first + high - rows.begin)
                    positions = forward_batch.positions[part]
                    chosen = view(caches, query[part], positions) if callable(view) else view
                    attended = chosen if isinstance(chosen, Attended) else Attended(chosen)
                    partial, lse = view_attention(
                        query[part],
                        positions,
                        attended.view,
                        caches.keys,
                        caches.values,
                        self.slot_pos,
                        self.rope,
                        caches.scale,
                    )
                    if attended.parts:
                        outs, lses = zip((partial, lse), *attended.parts, strict=True)
                        partial, lse = merge_states(torch.stack(outs), torch.stack(lses))
                    out[part] = partial
                    self.policy.observe(caches, rows, query[part], positions, attended.view, lse)
            first += length
        return out.view(out.shape[0], -1)

    def _plain(
        self,
        query: torch.Tensor,
        out: torch.Tensor,
        part: slice,
        layer: Any,
        caches: Caches,
        forward_batch: Any,
        index: int,
        decode: bool,
    ) -> None:
        """SGLang's own attention for one plain request of a batch that also has views."""
        one = slice(index, index + 1)
        common = dict(
            scaling=layer.scaling,
            enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            causal=not decode,
        )
        table = self.req_to_token_pool.req_to_token
        requests, seq_lens = forward_batch.req_pool_indices[one], forward_batch.seq_lens[one]
        if decode:
            self._run_sdpa_forward_decode(
                query[part], out[part], caches.keys, caches.values, table, requests, seq_lens, **common
            )
        else:
            self._run_sdpa_forward_extend(
                query[part],
                out[part],
                caches.keys,
                caches.values,
                table,
                requests,
                seq_lens,
                forward_batch.extend_prefix_lens[one],
                forward_batch.extend_seq_lens[one],
                **common,
            )
