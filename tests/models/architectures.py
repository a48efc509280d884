"""Architectures, each built small with random weights: what `docs/models.md` has a row for.

Sizes are a test's, and all that decides whether views serve a model is as in its published configuration: windows,
state layers, latent attention, sinks, positions, experts, biases, norms and partial rotations.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.oracle import models

SIZES: dict[str, Any] = {
    "vocab_size": models.VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HALF = {**ROPE, "partial_rotary_factor": 0.5}
LLAMA3 = models.CONFIGS["llama3_rope"][1]["rope_parameters"]
OLMO3_ROPE = {"rope_scaling": {**ROPE, "rope_theta": 500000.0}, "rope_parameters": None}
"""The published base; SGLang 0.5.17 reads it here alone, and `transformers` takes no other for layers with a window."""
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 64,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
MINIMAX = {
    **LOCAL_MOE,
    "rope_parameters": HALF,
    "rotary_dim": 8,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
}
PHI = {"num_key_value_heads": 4, "head_dim": None, "intermediate_size": 256, "rope_parameters": HALF}
OLMOE = {"num_key_value_heads": 4, "head_dim": None, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
LINEAR = {
    "full_attention_interval": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 4,
    "head_dim": 256,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25},
}
SHARED = {"shared_expert_intermediate_size": 32}
THREE_POSITIONS = {
    "rope_parameters": {**LINEAR["rope_parameters"], "mrope_section": [11, 11, 10], "mrope_interleaved": True}
}
IMAGES = {
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [],
    },
    "image_token_id": 370,
    "video_token_id": 371,
    "vision_start_token_id": 372,
    "vision_end_token_id": 373,
}


NORMS_ON_GPU = "SGLang norms its queries and keys by a kernel for GPUs"


@dataclass(frozen=True, eq=False)
class Architecture:
    """One row.

    Attributes:
        name: what users call the models.
        class_name: the architecture that `config.json` names.
        config: name of the class of its configuration in `transformers`; None where it has none.
        fields: what its configuration has beside `SIZES`, whose fields that are None here are left out.
        text: fields of the configuration of its text model, where that is a part of it.
        works: whether views serve it, so that weights are made.
        needs_gpu: why SGLang itself cannot run it without a GPU; empty where it can.
        wider: tokens by which SGLang's window is wider than that of `transformers`.
        written: fields of `config.json` in place of those that `transformers` writes; None: left out.
        offset: what its norms add to a weight that is saved: of most, nothing.
        images: whether weights are those of the model that reads images, too, and what prepares images is saved.
    """

    name: str
    class_name: str
    config: str | None
    fields: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] | None = None
    works: bool = False
    needs_gpu: str = ""
    wider: int = 0
    written: dict[str, Any] = field(default_factory=dict)
    offset: float = 0.0
    images: bool = False

    def save(self, folder: Path, weights: bool = True) -> Path:
        """Write the configuration and the tokenizer into a folder, and random float32 weights where views serve it."""
        folder.mkdir(parents=True, exist_ok=True)
        models.save_tokenizer(folder)
        if self.config is None:
            written = {**_sizes(self.fields), "architectures": [self.class_name]}
            (folder / "config.json").write_text(json.dumps(written), encoding="utf-8")
            return folder
        given = self.fields if self.text is not None else _sizes(self.fields)
        if self.text is not None:
            given = {**given, "text_config": _sizes(self.text)}
        config = getattr(transformers, self.config)(**copy.deepcopy(given))  # which may change what it is given
        config.architectures = [self.class_name]
        if self.works and weights:
            made = transformers.AutoModelForImageTextToText if self.images else transformers.AutoModelForCausalLM
            model = made.from_config(config, dtype=torch.float32)
            models._initialise(model.named_parameters(), seed=0)
            self._spread(model)
            if (bias := getattr(model.lm_head, "bias", None)) is not None:
                torch.nn.init.zeros_(bias)  # SGLang leaves it out (Phi-1 and Phi-2), whichever backend serves
            model.save_pretrained(folder)
            if self.images:
                transformers.Qwen2VLImageProcessor().save_pretrained(folder)
                transformers.Qwen3VLVideoProcessor().save_pretrained(folder)
        else:
            config.save_pretrained(folder)
        file = folder / "config.json"
        written = {**json.loads(file.read_text(encoding="utf-8")), "architectures": [self.class_name]}
        written = {name: value for name, value in {**written, **self.written}.items() if value is not None}
        for part, fields in ((written, self.fields), (written.get("text_config"), self.text)):
            if "full_attention_interval" in (fields or ()):  # published; transformers keeps what follows from it
                part["full_attention_interval"] = fields["full_attention_interval"]
        file.write_text(json.dumps(written, indent=1), encoding="utf-8")
        return folder

    def _spread(self, model: torch.nn.Module) -> None:
        """Give norms the weights that they are to multiply by, and states decays of a token up to hundreds of them."""
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
                    weight.sub_(self.offset)
                if name.endswith("A_log"):
                    weight.copy_(torch.linspace(-6, 0, weight.numel()))


def _sizes(changed: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**SIZES, **changed}.items() if value is not None}


def _served(name: str, class_name: str, config: str, needs_gpu: str = "", **fields: Any) -> Architecture:
    fields = {"rope_parameters": ROPE, **fields}
    return Architecture(name, class_name, config, fields, works=True, needs_gpu=needs_gpu)


SERVED = (
    _served("Llama 3", "LlamaForCausalLM", "LlamaConfig", rope_parameters=LLAMA3),
    _served("Mistral", "MistralForCausalLM", "MistralConfig", sliding_window=None),
    _served("Mixtral", "MixtralForCausalLM", "MixtralConfig", sliding_window=None, **LOCAL_MOE),
    _served("Qwen2, Qwen2.5", "Qwen2ForCausalLM", "Qwen2Config", head_dim=None),
    _served("Qwen3, dense", "Qwen3ForCausalLM", "Qwen3Config", head_dim=32),
    _served("Qwen3, MoE", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", head_dim=32, norm_topk_prob=True, **MOE),
    _served("GLM-4", "Glm4ForCausalLM", "Glm4Config", attention_bias=True, rope_parameters=HALF),
    _served(
        "GLM-4.5, 4.6, 4.7",
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        attention_bias=True,
        use_qk_norm=True,
        rope_parameters=HALF,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        num_nextn_predict_layers=0,
    ),
    _served("MiniMax-M2", "MiniMaxM2ForCausalLM", "MiniMaxM2Config", NORMS_ON_GPU, **MINIMAX),
    _served("Phi-1, Phi-2", "PhiForCausalLM", "PhiConfig", **PHI),
    _served("Phi-3, Phi-4", "Phi3ForCausalLM", "Phi3Config", head_dim=None, sliding_window=None),
    _served("Phi-3.5-MoE", "PhiMoEForCausalLM", "PhimoeConfig", head_dim=None, sliding_window=None, **LOCAL_MOE),
    _served("OLMo", "OlmoForCausalLM", "OlmoConfig", head_dim=None, num_key_value_heads=4),
    _served("OLMo 2", "Olmo2ForCausalLM", "Olmo2Config", head_dim=None),
    _served("OLMoE", "OlmoeForCausalLM", "OlmoeConfig", **OLMOE),
    # SGLang computes GELU exactly here, whatever is asked for, and newer versions of transformers do so by this name.
    _served("Gemma", "GemmaForCausalLM", "GemmaConfig", tie_word_embeddings=True, hidden_act="gelu_python"),
    _served("Granite", "GraniteForCausalLM", "GraniteConfig", head_dim=None),
    _served("StarCoder 2", "Starcoder2ForCausalLM", "Starcoder2Config", head_dim=None, sliding_window=None),
)
"""Those that views serve, as the tests show."""

_SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]

MIXED = (
    Architecture(
        "Gemma 3, text",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"layer_types": _SLIDING, "sliding_window": 16, "head_dim": 16, "tie_word_embeddings": True},
        works=True,
    ),
    Architecture(
        "OLMo 3",
        "Olmo3ForCausalLM",
        "Olmo3Config",
        {"layer_types": _SLIDING, "sliding_window": 16, "head_dim": None, "rope_parameters": ROPE},
        works=True,
        written=OLMO3_ROPE,
    ),
    Architecture(
        "Command R7B",
        "Cohere2ForCausalLM",
        "Cohere2Config",
        {"layer_types": _SLIDING, "sliding_window": 16, "head_dim": None, "rope_parameters": ROPE}
        | {"tie_word_embeddings": True},
        works=True,
        wider=1,
    ),
)
"""Those whose layers without a window `double_p` reads; the other systems refuse them."""

HYBRID = (
    Architecture(
        "Qwen3-Next",
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**LINEAR, **MOE, **SHARED},
        works=True,
        offset=1.0,
    ),
    Architecture(
        "Qwen3.5",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        IMAGES,
        {**LINEAR, **THREE_POSITIONS},
        works=True,
        offset=1.0,
        images=True,
    ),
    Architecture(
        "Qwen3.5, MoE",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeConfig",
        IMAGES,
        {**LINEAR, **THREE_POSITIONS, **MOE, **SHARED},
        works=True,
        offset=1.0,
        images=True,
    ),
)
"""Those most of whose layers keep a state, and whose other layers `double_p` reads; the other systems refuse them."""

REFUSED = (
    Architecture(
        "Nemotron-H",
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {"hybrid_override_pattern": "M-M*", "num_hidden_layers": None, "head_dim": 16, "mamba_num_heads": 4},
    ),
    Architecture(
        "Kimi Linear",
        "KimiLinearForCausalLM",
        None,
        {
            **LATENT,
            "model_type": "kimi_linear",
            "num_hidden_layers": 4,
            "linear_attn_config": {
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
                "num_heads": 4,
                "head_dim": 16,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    Architecture("LFM2", "Lfm2ForCausalLM", "Lfm2Config", {"full_attn_idxs": [2], "head_dim": None}),
    Architecture("Falcon-H1", "FalconH1ForCausalLM", "FalconH1Config", {"mamba_d_ssm": 64, "mamba_n_heads": 4}),
    Architecture(
        "Granite 4",
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {"layer_types": ["mamba", "mamba", "attention"], "head_dim": None, "mamba_n_heads": 4, **LOCAL_MOE},
    ),
    Architecture("DeepSeek-V2", "DeepseekV2ForCausalLM", "DeepseekV2Config", {**LATENT, "head_dim": None}),
    Architecture("DeepSeek-V3, R1; Kimi K2", "DeepseekV3ForCausalLM", "DeepseekV3Config", {**LATENT, "head_dim": None}),
    Architecture(
        "DeepSeek-V3.2",
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        {**LATENT, "head_dim": None, "index_topk": 16, "index_n_heads": 2, "index_head_dim": 16},
    ),
    Architecture(
        "GLM-5",
        "GlmMoeDsaForCausalLM",
        "GlmMoeDsaConfig",
        {**LATENT, "head_dim": None, "index_topk": 16, "index_n_heads": 2, "index_head_dim": 16},
    ),
    Architecture("GLM-4.7-Flash", "Glm4MoeLiteForCausalLM", "Glm4MoeLiteConfig", {**LATENT, "head_dim": None}),
    Architecture("gpt-oss", "GptOssForCausalLM", "GptOssConfig", {"layer_types": _SLIDING, **LOCAL_MOE}),
    Architecture("Gemma 2", "Gemma2ForCausalLM", "Gemma2Config"),
    Architecture("Gemma 3", "Gemma3ForConditionalGeneration", "Gemma3Config", text={"layer_types": _SLIDING}),
    Architecture("Gemma 4, text", "Gemma4ForCausalLM", "Gemma4TextConfig", {"layer_types": _SLIDING}),
    Architecture("Gemma 4", "Gemma4ForConditionalGeneration", "Gemma4Config", text={"layer_types": _SLIDING}),
    Architecture("Llama 4", "Llama4ForConditionalGeneration", "Llama4Config", text={"num_hidden_layers": 4}),
    Architecture("Ministral", "MinistralForCausalLM", "MinistralConfig", {"layer_types": _SLIDING}),
    Architecture("EXAONE 4", "Exaone4ForCausalLM", "Exaone4Config", {"layer_types": _SLIDING, "head_dim": None}),
    Architecture("SmolLM3", "SmolLM3ForCausalLM", "SmolLM3Config", {"no_rope_layers": [1, 1, 0], "head_dim": None}),
    Architecture(
        "Phi-3, Phi-4-mini, 128K",
        "Phi3ForCausalLM",
        "Phi3Config",
        {"head_dim": None, "original_max_position_embeddings": 64, "rope_parameters": LONG},
    ),
    Architecture(
        "Qwen2.5-VL",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        text={"head_dim": None, "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    ),
    Architecture(
        "Qwen3-VL",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        text={"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3], "mrope_interleaved": True}},
    ),
)
"""Those that every system refuses by their configuration."""
