"""The KV cache as SGLang has it: sizes, and keys and values of every layer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sglang_ext.compat.scales import UNSCALED, KVScales


def num_kv_slots(model_runner: Any) -> int:
    """Rows of every layer's KV buffer; slot 0 is SGLang's padding slot."""
    pool = model_runner.token_to_kv_pool
    return pool.size + pool.page_size


def num_request_slots(model_runner: Any) -> int:
    """KV slots that requests can be given."""
    return int(model_runner.token_to_kv_pool.size)


def first_layer(pool: Any, but: Collection[int] = ()) -> int:
    """Number of the first layer whose KV this rank holds, those `but` left out."""
    return next(layer for layer in kv_layers(pool) if layer not in but)


def kv_layers(pool: Any) -> Sequence[int]:
    """Numbers of the layers whose keys and values this rank holds, in order; a hybrid linear model has some of them."""
    mapped = getattr(pool, "full_attention_layer_id_mapping", None)
    return range(pool.start_layer, pool.start_layer + pool.layer_num) if mapped is None else list(mapped)


def kv_by_layer(pool: Any, but: Collection[int] = ()) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """(keys, values) of every layer on this rank, each [num_slots, kv_heads, dim], by layer number; not those `but`."""
    layers = (layer for layer in kv_layers(pool) if layer not in but)
    return {layer: (pool.get_key_buffer(layer), pool.get_value_buffer(layer)) for layer in layers}


def write_kv(
    pool: Any, layer: Any, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scales: KVScales
) -> None:
    """Store a layer's new keys and values at `slots`, divided by their scales."""
    # The layer's own tensors, as SGLang's backends pass them: by a number PyTorch divides with other last bits.
    by = (None, None) if scales is UNSCALED else (layer.k_scale, layer.v_scale)
    pool.set_kv_buffer(layer, KVWriteLoc(slots, None), keys, values, *by)


def kv_bytes_per_token(scheduler: Any) -> int:
    """Bytes of keys and values of one token on one rank, all layers."""
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    key_bytes, value_bytes = pool.get_kv_size_bytes()
    return int((key_bytes + value_bytes) // (pool.size + pool.page_size))
