"""Layers with the gated delta rule in plain PyTorch, beside SGLang's pool of their states."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

from sglang_ext.kernels.gated_delta import causal_convolution, delta_rule, delta_step, gates
from sglang_ext.names import ForwardBatch, LinearLayer, Passed


class TorchDeltaRule(GDNAttnBackend):
    """SGLang's backend of these layers without its kernels.

    States are SGLang's: of each request a slot of two tensors a layer, [slots, channels, width - 1] for the convolution
    and [slots, heads, value_dim, key_dim] for the rule. A slot is zeroed before the first token of a request.
    """

    def forward_decode(
        self,
        layer: LinearLayer,
        forward_batch: ForwardBatch,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        **_kwargs: Passed,
    ) -> torch.Tensor:
        """One token a request; mixed_qkv [requests, channels]. Returns [1, requests, heads, value_dim]."""
        convolved, states, slots = self._states(layer)
        mixed, convolved[slots] = causal_convolution(
            mixed_qkv.unsqueeze(-1), layer.conv_weights, layer.bias, convolved[slots]
        )
        parts = _heads(layer, mixed.squeeze(-1))
        out, left = delta_step(*parts, *gates(a, b, layer.A_log, layer.dt_bias), states[slots])
        states[slots] = left.to(states.dtype)
        return out.unsqueeze(0)

    def forward_extend(
        self,
        layer: LinearLayer,
        forward_batch: ForwardBatch,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        **_kwargs: Passed,
    ) -> torch.Tensor:
        """Chunks of prompts, one by one; mixed_qkv [tokens, channels]. Returns [1, tokens, heads, value_dim]."""
        convolved, states, slots = self._states(layer)
        log_decay, share = gates(a, b, layer.A_log, layer.dt_bias)
        out, begin = [], 0
        for slot, tokens in zip(slots.tolist(), forward_batch.extend_seq_lens_cpu, strict=True):
            at = slice(begin, begin + tokens)
            mixed, before = causal_convolution(
                mixed_qkv[at].T.unsqueeze(0), layer.conv_weights, layer.bias, convolved[slot].unsqueeze(0)
            )
            read, left = delta_rule(*_heads(layer, mixed[0].T), log_decay[at], share[at], states[slot])
            convolved[slot], states[slot] = before[0], left.to(states.dtype)
            out.append(read)
            begin += tokens
        return torch.cat(out).unsqueeze(0)

    def _states(self, layer: LinearLayer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(states of the convolution, of the rule, each request's slot [requests] int64) of a layer."""
        cache = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        return cache.conv[0], cache.temporal, self.forward_metadata.mamba_cache_indices.long()


def _heads(layer: LinearLayer, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, each [tokens, heads, dim], of mixed [tokens, channels]."""
    q, k, v = mixed.split([layer.q_dim, layer.k_dim, layer.v_dim], -1)
    return (
        q.reshape(-1, layer.num_q_heads, layer.head_q_dim),
        k.reshape(-1, layer.num_k_heads, layer.head_k_dim),
        v.reshape(-1, layer.num_v_heads, layer.head_v_dim),
    )
