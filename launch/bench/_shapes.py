"""The models of the engines' benchmarks: a configuration in a stated shape, and the embedded model's tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import sglang_ext

TOKENIZER = Path(sglang_ext.__file__).resolve().parent / "assets" / "reference"
SHAPES: dict[str, dict[str, int]] = {
    "llama-3.1-8b": dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
    ),
    "llama-3.1-70b": dict(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
    ),
    # For trying the benchmark itself on a machine without a GPU.
    "tiny": dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=0,  # the tokenizer's
    ),
}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write_model(folder: Path, shape: str, context: int, layers: int = 0) -> None:
    """A model folder without weights: Llama's configuration in `shape`, the reference model's tokenizer.

    Args:
        folder: which is made.
        shape: one of `SHAPES`.
        context: positions.
        layers: 0 for as many as the shape has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in TOKENIZER.glob("*token*"):
        shutil.copy(path, folder / path.name)
    own = json.loads((TOKENIZER / "config.json").read_text())
    sizes = {**SHAPES[shape]}
    sizes["vocab_size"] = sizes["vocab_size"] or own["vocab_size"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16" if shape != "tiny" else "float32",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": context,
        "bos_token_id": own.get("bos_token_id"),
        "eos_token_id": own.get("eos_token_id"),
        "rope_scaling": ROPE,
        "rope_theta": ROPE["rope_theta"],
        **sizes,
        **({"num_hidden_layers": layers} if layers else {}),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
