"""Models that views do not serve are refused by their configuration, before any weights are there to load."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from sglang_ext import compat, lines
from sglang_ext.attention import choice
from sglang_ext.attention.model import layers_read
from sglang_ext.compat import line
from sglang_ext.kinds import Kinds
from sglang_ext.serving.checks import before_model_adjustments
from sglang_ext.systems.registry import ours
from tests.models.architectures import HYBRID, MIXED, REFUSED, SERVED, Architecture

INSTEAD = "leave out --attention-backend, and SGLang chooses one"
HAS = {
    "Nemotron-H": "hybrid linear attention",
    "Kimi Linear": "hybrid linear attention (3 of 4 layers",
    "LFM2": "hybrid linear attention",
    "Falcon-H1": "hybrid linear attention (every layer has a state",
    "Granite 4": "hybrid linear attention (2 of 3 layers",
    "DeepSeek-V2": "multi-head latent attention (MLA)",
    "DeepSeek-V3, R1; Kimi K2": "multi-head latent attention (MLA)",
    "DeepSeek-V3.2": "sparse attention with an indexer (DSA), multi-head latent attention (MLA)",
    "GLM-5": "sparse attention with an indexer (DSA)",
    "GLM-4.7-Flash": "multi-head latent attention (MLA)",
    "gpt-oss": "sliding-window attention (2 of 3 layers), attention sinks",
    "Gemma 2": "attention logit caps",
    "Llama 4": "attention in chunks of 8192 tokens",
    "SmolLM3": "layers without a rotary embedding (1 of 3)",
    "Phi-3, Phi-4-mini, 128K": "changes with the length of a context (longrope)",
    "Qwen2.5-VL": "M-RoPE",
    "Qwen3-VL": "M-RoPE",
}
"""Name -> what is said; of all others, that they have sliding windows."""
LFM2 = next(each for each in REFUSED if each.name == "LFM2")
UNREAD = ("Nemotron-H", "Gemma 4, text")
"""Names of layers that SGLang does not know yet, and a head size of each layer for which it asks the whole model."""


def arguments(folder: Path, backend: str = "dbsa", **others: Any) -> Any:
    """A server's arguments as they are when our hook is called: SGLang's own, resolved no further."""
    from sglang.srt.server_args import ServerArgs

    given = {"model_path": str(folder), "attention_backend": backend, "device": "cpu", "dtype": "float32", **others}
    if lines.current() is lines.NEWER:  # which resolves nothing yet when arguments are made
        return ServerArgs(**given)
    made = object.__new__(ServerArgs)
    for name, known in ServerArgs.__dataclass_fields__.items():
        object.__setattr__(made, name, known.default)
    for name, value in given.items():
        object.__setattr__(made, name, value)
    return made


@pytest.mark.parametrize("backend", ["dbsa", "double_p"])
@pytest.mark.parametrize("architecture", REFUSED, ids=lambda each: each.name)
def test_refused(architecture: Architecture, backend: str, tmp_path: Path) -> None:
    if lines.current() is lines.NEWER and architecture.name in UNREAD:
        pytest.skip("SGLang 0.5.23 itself cannot read the configuration that transformers writes of it")
    server_args = arguments(architecture.save(tmp_path), backend)
    with pytest.raises(ValueError, match=f"--attention-backend {backend} does not serve") as caught:
        before_model_adjustments(server_args)
    said = str(caught.value)
    named = line.model_config(server_args).hf_config.architectures[0]
    assert said.startswith(f"{named} has ") and INSTEAD in said
    assert HAS.get(architecture.name, "sliding-window attention (2 of 3 layers)") in said


def test_a_stock_server_takes_them(tmp_path: Path) -> None:
    before_model_adjustments(arguments(LFM2.save(tmp_path), backend="triton"))


@pytest.mark.parametrize("backend", ["double_p", "cascade", "ltri"])
def test_every_system_refuses_by_its_own_name(backend: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--attention-backend {backend} does not serve"):
        before_model_adjustments(arguments(LFM2.save(tmp_path), backend=backend))


def test_the_hook_is_called_where_arguments_are_resolved(tmp_path: Path) -> None:
    """SGLang would refuse gpt-oss for its own reasons, by an assertion that does not say what to use instead."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    folder = next(each for each in REFUSED if each.name == "gpt-oss").save(tmp_path)
    with pytest.raises(ValueError, match="GptOssForCausalLM has sliding-window attention"):
        made = ServerArgs(model_path=str(folder), attention_backend="dbsa", device="cpu")
        if lines.current() is lines.NEWER:
            made.resolve_once()


# ---- models that mix kinds of layers ----


@pytest.mark.parametrize("backend", [name for name in ours() if name != "double_p"])
@pytest.mark.parametrize(
    ("architecture", "has"),
    [
        *((each, r"sliding-window attention \(2 of 3 layers\)") for each in MIXED),
        *((each, r"hybrid linear attention \(3 of 4 layers have a state.*") for each in HYBRID),
    ],
    ids=[each.name for each in (*MIXED, *HYBRID)],
)
def test_systems_that_read_all_layers_refuse_others_and_name_the_one_that_does_not(
    architecture: Architecture, has: str, backend: str, tmp_path: Path
) -> None:
    words = (
        f" has {has}: --attention-backend "
        + re.escape(backend)
        + " does not serve such models.*SGLang chooses one; or, on a Hopper GPU beside fa3, or without a"
        " GPU, with --attention-backend double_p$"
    )
    with pytest.raises(ValueError, match=words):
        before_model_adjustments(arguments(architecture.save(tmp_path, weights=False), backend=backend))


@pytest.mark.parametrize("architecture", [*MIXED, *HYBRID], ids=lambda each: each.name)
def test_double_p_takes_windows_and_states_without_a_gpu_and_on_hopper(
    architecture: Architecture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There beside fa3 alone: other GPUs, and FlashInfer beside it, have not run that."""
    server_args = arguments(architecture.save(tmp_path, weights=False), backend="double_p")
    before_model_adjustments(server_args)
    assert compat.resolved(server_args).disable_radix_cache == (architecture in HYBRID), (
        "a prefix would need its states"
    )
    monkeypatch.setattr(choice.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(choice.torch.cuda, "get_device_capability", lambda: (9, 0))
    before_model_adjustments(server_args)
    refused = pytest.raises(ValueError, match="--attention-backend double_p does not serve such models")
    monkeypatch.setenv(choice.PLAIN_ENV, "flashinfer")
    with refused:
        before_model_adjustments(server_args)
    monkeypatch.delenv(choice.PLAIN_ENV)
    monkeypatch.setattr(choice.torch.cuda, "get_device_capability", lambda: (8, 0))
    with refused:
        before_model_adjustments(server_args)


def test_hybrid_models_by_another_rule_are_refused(tmp_path: Path) -> None:
    """Three positions a token are let pass where states are, and nowhere else."""
    with pytest.raises(ValueError, match=r"^Qwen3VLForConditionalGeneration has M-RoPE"):
        before_model_adjustments(arguments(REFUSED[-1].save(tmp_path), backend="double_p"))


@pytest.mark.parametrize(("architecture", "layers"), [*((each, 1) for each in MIXED), (SERVED[0], 3)])
def test_memory_is_counted_for_layers_that_are_read(architecture: Architecture, layers: int, tmp_path: Path) -> None:
    found = line.model_config(arguments(architecture.save(tmp_path, weights=False), "double_p"))
    assert layers_read(found, found.num_hidden_layers) == layers


def test_windows_that_sglang_keeps_in_a_cache_of_their_own_are_refused(tmp_path: Path) -> None:
    folder = MIXED[0].save(tmp_path, weights=False)
    file = folder / "config.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**written, "is_hybrid_swa": True, "hybrid_layer_pattern": [1, 1, 0]}), encoding="utf-8")
    with pytest.raises(ValueError, match="--attention-backend double_p does not serve such models"):
        before_model_adjustments(arguments(folder, backend="double_p"))


def test_only_layers_with_windows_of_known_models_are_left_to_sglang() -> None:
    found = runner(sliding_window_size=15)
    with pytest.raises(ValueError, match="NewForCausalLM has sliding windows"):
        compat.refuse_model(found, float8=True, kinds=Kinds(windows=True))
    found.model_config.hf_config.architectures = ["Gemma3ForCausalLM"]
    compat.refuse_model(found, float8=True, kinds=Kinds(windows=True))
    with pytest.raises(ValueError, match="Gemma3ForCausalLM has sliding windows"):
        compat.refuse_model(found, float8=True, kinds=Kinds(states=True))
    assert compat.window_layers(found) == {0}


@pytest.mark.parametrize("architecture", SERVED, ids=lambda each: each.name)
def test_what_is_served_is_not_refused(architecture: Architecture, tmp_path: Path) -> None:
    before_model_adjustments(arguments(architecture.save(tmp_path, weights=False)))


# ---- checkpoints that ask for a KV cache of 8 bits ----

FLAT = {"quant_method": "modelopt", "quant_algo": "FP8"}
OF_SCHEME = {**FLAT, "kv_cache_scheme": {"type": "float", "num_bits": 8}}


def quantized(folder: Path, in_config: dict[str, Any] | None = None, beside: dict[str, Any] | None = None) -> Path:
    """A Llama whose checkpoint says how it is quantized: in its configuration, or in ModelOpt's own file."""
    SERVED[0].save(folder, weights=False)
    if in_config is not None:
        file = folder / "config.json"
        written = {**json.loads(file.read_text(encoding="utf-8")), "quantization_config": in_config}
        file.write_text(json.dumps(written), encoding="utf-8")
    if beside is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": beside}), encoding="utf-8")
    return folder


ASKED = [
    {"in_config": {**FLAT, "kv_cache_quant_algo": "FP8"}},
    {"in_config": OF_SCHEME},
    {"beside": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
]


@pytest.mark.parametrize("where", ASKED, ids=["config", "scheme", "file"])
def test_fp8_caches_that_checkpoints_ask_for(where: dict[str, Any], tmp_path: Path) -> None:
    folder = quantized(tmp_path, **where)
    with pytest.raises(ValueError, match=r"asks for a KV cache in FP8.*--kv-cache-dtype bfloat16"):
        before_model_adjustments(arguments(folder, backend="cascade"))
    before_model_adjustments(arguments(folder, backend="cascade", kv_cache_dtype="bfloat16"))
    before_model_adjustments(arguments(folder, backend="dbsa"))


def test_quantized_weights_alone_are_served(tmp_path: Path) -> None:
    before_model_adjustments(arguments(quantized(tmp_path, FLAT)))


# ---- what only the layers tell ----


def runner(kv_cache_dtype: torch.dtype = torch.float32, **of_layer: Any) -> Any:
    layer = RadixAttention(4, 16, 0.25, num_kv_heads=2, layer_id=0)
    for name, value in of_layer.items():
        setattr(layer, name, value)
    return SimpleNamespace(
        model=torch.nn.ModuleList([layer]),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(architectures=["NewForCausalLM"])),
        use_mla_backend=False,
        kv_cache_dtype=kv_cache_dtype,
        server_args=SimpleNamespace(attention_backend="quest"),
    )


@pytest.mark.parametrize(
    ("of_layer", "words"),
    [
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attention in both directions"),
        ({"sliding_window_size": 63}, "sliding windows"),
        ({"logit_cap": 50.0}, "attention logit caps"),
    ],
)
def test_layers_tell_the_rest(of_layer: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"NewForCausalLM has {words}: --attention-backend quest does not serve"):
        compat.refuse_model(runner(**of_layer), float8=True)


def test_models_that_sglang_has_no_code_for() -> None:
    class TransformersForCausalLM(torch.nn.Module):
        pass

    found = runner()
    found.model = TransformersForCausalLM()
    with pytest.raises(ValueError, match="NewForCausalLM has no code of SGLang's own"):
        compat.refuse_model(found, float8=True)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cache_of_8_bits_is_refused_by_systems_in_plain_pytorch_too(kind: torch.dtype) -> None:
    with pytest.raises(
        ValueError, match=f"KV cache is in {str(kind).removeprefix('torch.')}.*--kv-cache-dtype bfloat16"
    ):
        compat.refuse_model(runner(kind), float8=False)
    compat.refuse_model(runner(torch.bfloat16), float8=False)


def test_float8_is_read_by_the_systems_that_say_so() -> None:
    compat.refuse_model(runner(torch.float8_e4m3fn), float8=True)
    words = r"KV cache is in float8_e5m2.*of the model's own type or of float8_e4m3fn alone.*bfloat16 or fp8_e4m3"
    with pytest.raises(ValueError, match=words):
        compat.refuse_model(runner(torch.float8_e5m2), float8=True)
    assert {name for name, system in ours().items() if system.float8} == {"dbsa", "double_p", "dbsa+double_p"}
