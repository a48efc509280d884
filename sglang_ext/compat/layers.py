"""Models that mix kinds of layers: those that attend to the whole context, and others.

The others have a sliding window, or they keep one state for a whole context (hybrid linear models). A system that says
so (`System.mixed`, `System.hybrid`) reads the layers that attend to the whole context. SGLang's own code serves the
others beside it. Layers with windows keep all tokens, so that the radix tree is that of any other model. Models with
states run without a radix tree: a prefix in it would need its state, too.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

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


def attention_output(forward_batch: Any, rows: int, heads: int, dim: int) -> torch.Tensor | None:
    """[rows, heads, dim], where SGLang wants a layer's attention; None where it takes any tensor that it is given.

    Between the pieces of a prefill's CUDA graph, it copies what lies elsewhere to where the next piece reads it.
    """
    found = getattr(forward_batch, "_attn_output", None)  # as SGLang's own backends look for it
    return None if found is None or found.shape[0] != rows else found.view(rows, heads, dim)


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
