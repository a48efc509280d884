"""Models that mix kinds of layers: those with a sliding window, and those that attend to the whole context.

A system that says so (`System.mixed`) reads the layers that attend to the whole context. SGLang's own attention serves
the others beside it. All layers keep all tokens, so that the radix tree is that of any other model.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.radix_attention import RadixAttention

MIXED = frozenset({"Gemma3ForCausalLM", "Olmo2ForCausalLM", "Cohere2ForCausalLM"})
"""SGLang's classes of such models: Gemma 3 (text), OLMo 3, Command R7B. Each was compared with `transformers`.

SGLang keeps all tokens of all layers for them (`disable_hybrid_swa_memory`, or no KV cache of two kinds at all), and
builds the layers that `layer_types` lists.
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
