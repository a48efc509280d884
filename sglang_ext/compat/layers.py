"""Models that mix kinds of layers: those that attend to the whole context, and others.

The others have a sliding window, or they keep one state for a whole context (hybrid linear models). A system that says
so (`System.mixed`, `System.hybrid`) reads the layers that attend to the whole context. SGLang's own code serves the
others beside it. Layers with windows keep all tokens, so that the radix tree is that of any other model. Models with
states run without a radix tree: a prefix in it would need its state, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention


@dataclass(frozen=True)
class Kinds:
    """Kinds of layers that SGLang's own code serves beside those that a system reads.

    Attributes:
        windows: whether these are layers with a sliding window, of the models `MIXED`.
        states: whether these are layers that keep a state, of the models `HYBRID`.
    """

    windows: bool = False
    states: bool = False


MIXED = frozenset({"Gemma3ForCausalLM", "Olmo2ForCausalLM", "Cohere2ForCausalLM"})
"""SGLang's classes of such models: Gemma 3 (text), OLMo 3, Command R7B. Each was compared with `transformers`.

SGLang keeps all tokens of all layers for them (`disable_hybrid_swa_memory`, or no KV cache of two kinds at all), and
builds the layers that `layer_types` lists.
"""

HYBRID = frozenset({"Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"})
"""SGLang's classes of models most of whose layers keep a state by the gated delta rule, likewise compared.

Qwen3.5 has three positions a token, which are the same in texts, and keys stay where they were written. Texts alone are
served (`serving.requests`): nobody has compared images.
"""

WINDOWS = ("sliding_attention", "chunked_attention")
"""What a configuration calls layers that see a part of the context, in `layer_types`."""


def has_window(layer: Any) -> bool:
    """Whether an attention layer of SGLang's sees a part of the context alone."""
    size = layer.sliding_window_size
    return size is not None and size > -1


def attention_layers(model_runner: Any) -> list[Any]:
    """The attention layers that SGLang has built of a model."""
    return [module for module in model_runner.model.modules() if isinstance(module, RadixAttention)]


def window_layers(model_runner: Any) -> frozenset[int]:
    """Numbers of the layers with a sliding window."""
    return frozenset(layer.layer_id for layer in attention_layers(model_runner) if has_window(layer))


def listed_windows(model_config: Any) -> tuple[int, int]:
    """(layers that see a part of the context, layers) as a configuration lists them; (0, 0) where it lists none.

    Args:
        model_config: SGLang's `ModelConfig`.
    """
    listed = getattr(model_config.hf_text_config, "layer_types", None) or ()
    return sum(kind in WINDOWS for kind in listed), len(listed)


def listed_states(model_config: Any) -> tuple[int, int]:
    """(layers that keep a state, layers) as the configuration of a model of `HYBRID` lists them; (0, 0) for others.

    Args:
        model_config: SGLang's `ModelConfig`.
    """
    config = model_config.hf_text_config
    states = len(getattr(config, "linear_layer_ids", ()))
    return (states, states + len(config.full_attention_layer_ids)) if states else (0, 0)


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
