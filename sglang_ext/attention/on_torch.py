"""The attention backend in plain PyTorch: what machines without a GPU have, and policies without kernels."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang_ext import compat
from sglang_ext.attention.backend import ViewBackend
from sglang_ext.compat import TorchNativeAttnBackend
from sglang_ext.names import AttentionLayer, ForwardBatch, Passed


class TorchBackend(TorchNativeAttnBackend):
    """`torch_native` whose prefill computes the new rows only, and which verifies drafts as rows of a prompt."""

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
        return super().forward_extend(q, k, v, layer, compat.as_prompt(forward_batch), save_kv_cache, **kwargs)

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        """SGLang's PyTorch prefill of plain requests, for the new rows alone.

        The base class pads the queries with garbage to the whole prefix and computes a square: 17 tokens after a prefix
        of 4,096 cost it 0.60 s a layer instead of 0.004 s, which would make any comparison with a dense prompt unfair.
        A layer with a sliding window (`sliding_window_size` tokens before a row's own) gathers what its new rows see.
        The arguments that `compat.refuse_model` excludes (encoders) are not read. Shapes as in the base class.
        """
        first = 0
        requests, totals, lengths = req_pool_indices.tolist(), seq_lens.tolist(), extend_seq_lens.tolist()
        for request, total, new in zip(requests, totals, lengths, strict=True):
            begin = 0 if sliding_window_size is None else max(0, total - new - sliding_window_size)
            slots = req_to_token[request, begin:total].long()
            keys, values = (cache[slots].transpose(0, 1).unsqueeze(0).to(query.dtype) for cache in (k_cache, v_cache))
            mask = None
            if causal and (total != new or sliding_window_size is not None):
                column = torch.arange(begin, total, device=query.device)
                own = column[total - new - begin :].unsqueeze(1)
                mask = column <= own
                if sliding_window_size is not None:
                    mask &= column >= own - sliding_window_size
            attended = scaled_dot_product_attention(
                query[first : first + new].transpose(0, 1).unsqueeze(0),
                keys,
                values,
                attn_mask=mask,
                is_causal=causal and mask is None,
                scale=scaling,
                enable_gqa=enable_gqa,
            )
            output[first : first + new] = attended.squeeze(0).transpose(0, 1)
            first += new
        return output


class TorchViews(ViewBackend, TorchBackend):
    """SGLang's PyTorch attention, and a reader of ours for batches with views: on any device."""

    scales = False  # SGLang's PyTorch attention neither divides by them nor multiplies
