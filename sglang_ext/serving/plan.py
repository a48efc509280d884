"""What a pool takes before it is encoded: tokens, bytes, blocks, and whether it fits. No server, no SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_ext.config import PoolOptions
from sglang_ext.serving.layout import Layout
from sglang_ext.types import JsonObject, Options

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ROOM_FOR_REQUESTS = 128  # tokens that pools leave free, so that a question always fits
COUNTED_TIMES, COUNTED_AT_LEAST = 4, 1 << 18  # tokens of a pool that are counted before it is refused: see countable

_DTYPE_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}


def kv_bytes_per_token(config: PretrainedConfig, dtype: str = "auto", tp_size: int = 1) -> int:
    """Bytes of keys and values of one token on one rank: layers x KV heads x head_dim x 2 x bytes of a number.

    Args:
        config: a Hugging Face model configuration.
        dtype: SGLang's --dtype; `auto` is the checkpoint's, float16 for float32 ones (bfloat16 for Gemma) as SGLang has
            it.
        tp_size: ranks of tensor parallelism, over which KV heads are dealt; each rank has at least one.

    Raises:
        ValueError: an unknown dtype, or a model whose cache is not plain keys and values (MLA).
    """
    config = config.get_text_config()
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(f"{config.model_type} uses multi-head latent attention (MLA): pools do not support it")
    if dtype == "auto":
        dtype = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
        dtype = "float16" if dtype == "float32" else dtype
    if dtype not in _DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r}: expected auto or one of {', '.join(_DTYPE_BYTES)}")
    if tp_size < 1:
        raise ValueError(f"tp_size={tp_size}: expected at least 1")
    heads: int = config.num_attention_heads
    kv_heads: int = getattr(config, "num_key_value_heads", None) or heads
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers: int = config.num_hidden_layers
    return layers * max(1, kv_heads // tp_size) * head_dim * 2 * _DTYPE_BYTES[dtype]


def beyond_context(layout: Layout, options: PoolOptions, limit: int) -> str | None:
    """What is wrong when a block would be encoded at positions outside the model's context of `limit` tokens."""
    pattern = options.block_sparse
    for number, block in enumerate(layout.blocks):
        end = block.position + len(block.token_ids)
        if end >= limit:
            advice = (
                'use positions="local", or fewer demonstrations'
                if pattern.positions == "sequential"
                else "use smaller blocks, fewer previous blocks or another pattern"
            )
            return f"block {number} would end at position {end}, the model's context is {limit} tokens: {advice}"
    return None


def describe(
    layout: Layout, options: PoolOptions, bytes_per_token: int, context: int, total_tokens: int | None
) -> JsonObject:
    """The plan of a pool.

    Args:
        context: the model's context in tokens.
        total_tokens: size of the KV cache in tokens; None when it is not known, and then nothing is said of fitting.

    Returns:
        `demonstrations`, `blocks`, `tokens`, `tokens_per_block`, `bytes`, `problem` (why it cannot be put, or None),
        and with a known size `capacity_tokens` and `fits`, how many such pools fit in an empty cache.
    """
    plan: JsonObject = {
        "demonstrations": sum(len(block.demonstrations) for block in layout.blocks),
        "blocks": len(layout.blocks),
        "tokens": layout.tokens,
        "tokens_per_block": list(layout.lengths),
        "bytes": layout.tokens * bytes_per_token,
        "problem": beyond_context(layout, options, context),
    }
    if total_tokens is not None:
        capacity = max(total_tokens - ROOM_FOR_REQUESTS, 0)
        plan |= {"capacity_tokens": capacity, "fits": capacity // layout.tokens}
    return plan


def countable(state: Options) -> int:
    """How many tokens of a pool are counted before it is refused: enough to say how much too large most are."""
    return max(int(state["total_tokens"]) * COUNTED_TIMES, COUNTED_AT_LEAST)
