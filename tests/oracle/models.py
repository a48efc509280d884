"""Tiny random-weight models that are sensitive to every mask and position mistake.

A freshly initialised transformer is a poor witness: its attention is nearly uniform, so a wrong mask or a
key rotated to a wrong position moves its log-probabilities by less than the tolerance of the tests. The
weights here are drawn wide enough that the attention is peaked and differs from head to head
(``test_oracle.py`` keeps that true), and still narrow enough that float32 and float64 agree to 2e-5.

Every model is a standard ``transformers`` checkpoint directory (config.json, model.safetensors, tokenizer
files) that SGLang and ``transformers`` load unchanged. All have three layers and grouped-query attention.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers import models as token_models
from tokenizers import trainers as token_trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 384
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
USER, ASSISTANT, SYSTEM, END = "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# The words the tests' demonstrations are made of; the tokenizer's merges are trained on them.
NOUNS = ("card", "pin", "loan", "branch", "limit", "refund", "statement", "transfer", "balance", "account")
VERBS = ("activate", "cancel", "order", "check", "raise", "report", "freeze", "open", "close", "track")
LABELS = ("card issue", "card", "money", "lost item", "other")


def demonstrations(n: int, seed: int = 0) -> list[dict[str, str]]:
    """Return ``n`` distinct demonstrations ``{"input", "output"}`` of uneven length, the same for every call.

    Each carries its index, so no two are equal; one label is a prefix of another on purpose.
    """
    gen = torch.Generator().manual_seed(seed)
    made = []
    for i in range(n):
        picks = torch.randint(0, 10, (8,), generator=gen).tolist()
        words = [f"{VERBS[picks[0]]} my {NOUNS[picks[1]]}"]
        if picks[2] < 5:
            words.append(f"and {VERBS[picks[3]]} the {NOUNS[picks[4]]}")
        if picks[5] < 3:
            words.append(f"please, case {i}?")
        made.append({"input": f"{i}: " + " ".join(words), "output": LABELS[picks[6] % len(LABELS)]})
    return made


def build_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer of at most ``VOCAB_SIZE`` tokens.

    It encodes any text. It has merges, so that tokenizing two blocks together differs from tokenizing each
    alone, and it adds BOS unless ``add_special_tokens=False``, so that a stray BOS inside the pool shows.
    """
    tok = Tokenizer(token_models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.decoder = decoders.ByteLevel()
    specials = [PAD, BOS, EOS, USER, ASSISTANT, SYSTEM, END]
    trainer = token_trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(specials),
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = [f"{d['input']}\nLabel: {d['output']}\n\n" for d in demonstrations(200, seed=1)]
    tok.train_from_iterator(text, trainer)
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    tok.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tok.token_to_id(BOS))]
    )
    return tok


def save_tokenizer(folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` (with the chat template) into ``folder``."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


# Name -> (config class, what differs from the shared sizes). Head dimensions differ: 32, 16 and 64.
# The two scaled ropes have a short original context, so that the tests' positions lie beyond it and every
# part of the scaling (kept, blended and interpolated frequencies; YaRN's magnitude) is exercised.
CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"head_dim": 32}),
    "qwen2": (Qwen2Config, {}),  # head_dim = hidden_size / heads = 16; biased projections
    "qwen3": (Qwen3Config, {"head_dim": 64}),  # keys and queries are normalised before the rotation
    "llama3_rope": (
        LlamaConfig,
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "yarn": (
        LlamaConfig,
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
}


def make_config(name: str, **overrides: Any) -> PreTrainedConfig:
    """Return the configuration ``name`` (a key of ``CONFIGS``); ``overrides`` replace single fields."""
    if name not in CONFIGS:
        raise ValueError(f"unknown oracle model {name!r}: expected one of {sorted(CONFIGS)}")
    config_class, own = CONFIGS[name]
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": True,
    }
    return config_class(**{**fields, **own, **overrides})


def _tensor_std(name: str) -> float:
    """Standard deviation of the weights called ``name``; hidden size 64, inputs of unit root mean square."""
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        return 0.16  # queries and keys of std 1.3: attention logits of std about 1.6, clearly not flat
    if name.endswith("bias"):
        return 0.30
    if "embed_tokens" in name:
        return 0.50  # small beside what attention adds, so that attention decides the answer
    if "lm_head" in name:
        return 0.12
    return 0.16


def _initialise(parameters: Iterator[tuple[str, torch.nn.Parameter]], seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in parameters:
            noise = torch.randn(p.shape, generator=gen, dtype=torch.float32)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                p.copy_(1.4 + 0.2 * noise)  # as wide as the other models' queries and keys
            elif name.endswith("norm.weight"):
                p.copy_(1.0 + 0.1 * noise)
            else:
                p.copy_(_tensor_std(name) * noise)


def save_model(name: str, folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write the model called ``name`` with random float32 weights and the tokenizer into ``folder``.

    Args:
        name: a key of ``CONFIGS``.
        folder: created when missing; files in it are overwritten.
        seed: of the weights; the same seed gives the same weights.
        overrides: configuration fields to replace, for example ``max_position_embeddings``.
    Returns:
        ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_config(make_config(name, **overrides), dtype=torch.float32)
    _initialise(model.named_parameters(), seed)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Load a saved model for the oracle: on the CPU, with the attention that takes any additive mask."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load a saved model's tokenizer exactly as its ``tokenizer.json`` says.

    ``AutoTokenizer`` loads it too, but puts Qwen2's own pre-tokenizer in place of the file's where the folder's
    model is a Qwen2, which cuts line breaks differently; SGLang undoes that.
    """
    return PreTrainedTokenizerFast.from_pretrained(folder)
