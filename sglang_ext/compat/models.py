"""Which models views serve: what a model has that they do not serve is known here alone.

Most of it stands in the model's configuration, so that a server is refused before it loads weights. The layers that
SGLang builds are looked at once more when the attention backend is made: they tell what a configuration does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import (
    AttentionArch,
    is_deepseek_dsa,
    is_encoder_decoder_model,
    is_hybrid_swa_model,
    is_minimax_sparse,
)
from sglang.srt.connector import ConnectorType
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.utils import parse_connector_type

from sglang_ext.compat.layers import HYBRID, MIXED, attention_layers, has_window, listed_windows
from sglang_ext.compat.line import model_config
from sglang_ext.kinds import Kinds


def _hybrid_linear(config: Any) -> str:
    found = mambaish_config(config)
    if not found:
        return ""
    full, layers = getattr(found, "full_attention_layer_ids", None), config.num_hidden_layers
    state = "a state, which belongs to a whole context, instead of keys and values"
    if full is None:
        return f"hybrid linear attention (layers that have {state})"
    if len(full) == layers:
        return "hybrid linear attention (every layer has a state beside its keys and values)"
    return f"hybrid linear attention ({layers - len(full)} of {layers} layers have {state})"


def _sparse_index(config: Any) -> str:
    if is_deepseek_dsa(config.hf_config):
        return "sparse attention with an indexer (DSA)"
    return "sparse attention with an indexer (MiniMax-M3)" if is_minimax_sparse(config.hf_config) else ""


def _latent(config: Any) -> str:
    return "multi-head latent attention (MLA)" if config.attention_arch == AttentionArch.MLA else ""


def _windows(config: Any) -> str:
    if size := config.attention_chunk_size:
        return f"attention in chunks of {size} tokens"
    local, layers = listed_windows(config)
    if local:
        return f"sliding-window attention ({local} of {layers} layers)"
    hybrid = is_hybrid_swa_model(config.hf_config.architectures, config.hf_text_config)
    return "sliding-window attention" if hybrid else ""


def _sinks(config: Any) -> str:
    return "attention sinks (a learned logit of each head)" if config.has_attention_sinks else ""


def _logit_caps(config: Any) -> str:
    return "attention logit caps" if getattr(config.hf_text_config, "attn_logit_softcapping", None) else ""


def _several_positions(config: Any) -> str:
    return "M-RoPE (three positions a token)" if config.model_is_mrope else ""


def _two_ropes(config: Any) -> str:
    rope = getattr(config.hf_text_config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", rope.get("type"))
    return f"a rotary embedding that changes with the length of a context ({kind})" if kind == "longrope" else ""


def _cross(config: Any) -> str:
    return "cross attention" if is_encoder_decoder_model(config.hf_config.architectures) else ""


def _no_rope(config: Any) -> str:
    listed = getattr(config.hf_text_config, "no_rope_layers", None) or ()
    without = sum(not rotates for rotates in listed)
    return f"layers without a rotary embedding ({without} of {len(listed)})" if without else ""


_RULES: tuple[Callable[[Any], str], ...] = (
    _hybrid_linear,
    _sparse_index,
    _latent,
    _windows,
    _sinks,
    _logit_caps,
    _several_positions,
    _two_ropes,
    _cross,
    _no_rope,
)
"""Each says what a model's configuration (SGLang's `ModelConfig`) has that views do not serve, or nothing."""


FLOAT8 = torch.float8_e4m3fn
"""The KV cache of 8 bits that some systems read."""


NONE = Kinds()


def _beside(config: Any, kinds: Kinds) -> tuple[Callable[[Any], str], ...]:
    """Rules that do not hold for a model whose layers of these kinds SGLang's own code serves."""
    name = config.hf_config.architectures[0]
    found: tuple[Callable[[Any], str], ...] = ()
    if kinds.windows and name in MIXED and not config.is_hybrid_swa:
        found += (_windows,)
    if kinds.states and name in HYBRID:
        found += (_hybrid_linear, _several_positions)
    return found


def serves_states(server_args: Any, kinds: Kinds) -> bool:
    """Whether a system serves a server's model, most of whose layers keep a state, beside these layers.

    False for a model that comes from a running server (`instance://`), which has no configuration yet.
    """
    if parse_connector_type(server_args.model_path) == ConnectorType.INSTANCE:
        return False
    return _hybrid_linear in _beside(model_config(server_args), kinds)


def refuse_config(
    server_args: Any, float8: bool, kinds: Kinds = NONE, others: Mapping[str, Kinds] = MappingProxyType({})
) -> None:
    """Refuse a server's model by its configuration, before its weights are loaded.

    A model that comes from a running server (`instance://`) has none yet: its layers are looked at alone.

    Args:
        server_args: the server's, whose attention backend is one of ours.
        float8: whether the system reads a KV cache in float8 e4m3, which is what SGLang makes for such checkpoints.
        kinds: layers beside which the system reads the others of a model, on this machine.
        others: of all systems on machines where they read most kinds of models, by name, for the message.

    Raises:
        ValueError: the model has what views do not serve, or its checkpoint asks for a KV cache of 8 bits.
    """
    if parse_connector_type(server_args.model_path) == ConnectorType.INSTANCE:
        return
    config = model_config(server_args)
    name, backend = config.hf_config.architectures[0], server_args.attention_backend
    _refuse(
        name, _problems(config, kinds), backend, [each for each, has in others.items() if not _problems(config, has)]
    )
    if not float8 and server_args.kv_cache_dtype == "auto" and _asks_for_fp8(config):
        raise ValueError(_of_cache(name, "the checkpoint asks for a KV cache in FP8", backend, float8))


def _problems(config: Any, kinds: Kinds) -> list[str]:
    """What a model's configuration has that a system does not serve, which reads others beside layers of `kinds`."""
    beside = _beside(config, kinds)
    return [found for rule in _RULES if rule not in beside and (found := rule(config))]


def refuse_model(model_runner: Any, float8: bool, kinds: Kinds = NONE) -> None:
    """Refuse a model by its layers, and by the KV cache that it was given.

    Args:
        model_runner: SGLang's.
        float8: whether the system reads a KV cache in float8 e4m3.
        kinds: layers beside which the system reads the others of a model, on this machine.

    Raises:
        ValueError: the layers have what views do not serve, or keys and values are kept in 8 bits that the system does
            not read.
    """
    name, backend = model_runner.model_config.hf_config.architectures[0], model_runner.server_args.attention_backend
    layers = attention_layers(model_runner)
    problems = []
    if type(model_runner.model).__name__.startswith("Transformers"):
        problems.append("no code of SGLang's own, which runs it through transformers")
    if model_runner.use_mla_backend:
        problems.append("multi-head latent attention (MLA)")
    if any(layer.is_cross_attention for layer in layers):
        problems.append("cross attention")
    if any(layer.attn_type != AttentionType.DECODER for layer in layers):
        problems.append("attention in both directions")
    if any(has_window(layer) for layer in layers) and not (kinds.windows and name in MIXED):
        problems.append("sliding windows")
    if any(layer.logit_cap for layer in layers):
        problems.append("attention logit caps")
    _refuse(name, problems, backend)
    kind: torch.dtype = model_runner.kv_cache_dtype
    if kind.itemsize == 1 and not (float8 and kind == FLOAT8):
        raise ValueError(_of_cache(name, f"the KV cache is in {str(kind).removeprefix('torch.')}", backend, float8))


def _asks_for_fp8(config: Any) -> bool:
    """Whether a checkpoint asks to keep keys and values in FP8, which SGLang obeys where the server's flag is `auto`.

    Checkpoints of ModelOpt do, in `config.json` or in `hf_quant_config.json`; SGLang reads no others.
    """
    found = getattr(config.hf_config, "quantization_config", None) or {}
    found = found if isinstance(found, dict) else found.to_dict()
    file = Path(config.model_path) / "hf_quant_config.json"
    if not found and file.is_file():
        found = json.loads(file.read_text(encoding="utf-8"))
    found = found.get("quantization", found)
    if not str(found.get("quant_method", "modelopt")).startswith("modelopt"):
        return False
    scheme = found.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        return scheme.get("type") == "float" and scheme.get("num_bits") == 8
    return str(found.get("kv_cache_quant_algo")).upper() == "FP8"


def _refuse(name: str, problems: Sequence[str], backend: str, others: Sequence[str] = ()) -> None:
    """Raise ValueError where there are problems; `others` are systems that serve the model on some machines."""
    if problems:
        named = ", ".join(others)
        where = "on a Hopper GPU beside fa3, or without a GPU,"
        instead = f"; or, {where} with --attention-backend {named}" if others else ""
        raise ValueError(
            f"{name} has {', '.join(problems)}: --attention-backend {backend} does not serve such models. Serve it with"
            " one of SGLang's own attention backends: start it with python -m sglang.launch_server and leave out"
            f" --attention-backend, and SGLang chooses one{instead}"
        )


def _of_cache(name: str, found: str, backend: str, float8: bool) -> str:
    read = "the model's own type or of float8_e4m3fn" if float8 else "the model's own type"
    return (
        f"{name}: {found}, and --attention-backend {backend} reads keys and values of {read} alone: set"
        f" --kv-cache-dtype bfloat16{' or fp8_e4m3' if float8 else ''}, or serve the model with one of SGLang's own"
        " attention backends"
    )
