"""The reference model as plain PyTorch, with Hugging Face's Llama parameter names, so a state dict exports as it is.

Shapes: B rows, T tokens, H query heads, Hkv key-value heads, D head dimension (64), E width.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from sglang_ext.types import JsonObject

# A rope base of 2**32-ish makes the 32 frequencies of a 64-wide head about octaves apart: 14 of them tell positions
# up to 16K apart, and the other 18 pairs (36 of 64 channels) hardly turn over the whole context, so a head has that
# many channels to match *content* at any distance. At a base of 500,000 only 8 pairs are left for that.
CONFIG: JsonObject = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 16384,
    "rope_theta": 1e10,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.04,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "torch_dtype": "bfloat16",
}


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split style: x (B, heads, T, D), cos and sin (T, D) in float32."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, c: JsonObject) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = (
            c["num_attention_heads"],
            c["num_key_value_heads"],
            c["head_dim"],
        )
        width = c["hidden_size"]
        self.q_proj = nn.Linear(width, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q = self.q_proj(x).view(rows, length, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(rows, length, self.kv_heads, self.dim).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, self.kv_heads, self.dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, self.heads * self.dim))


class MLP(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, c: JsonObject) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, c: JsonObject) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embedding, layers and final norm: tokens (B, T) to states (B, T, E)."""

    def __init__(self, c: JsonObject) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(DecoderLayer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def tables(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin (T, D) in float32 of positions 0..length-1."""
        dim = self.config["head_dim"]
        steps = torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim
        angles = torch.outer(
            torch.arange(length, device=device, dtype=torch.float32), self.config["rope_theta"] ** -steps
        )
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def forward(self, tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class ReferenceLlama(nn.Module):
    """Backbone plus tied output embedding. Parameters start from a normal distribution; see ``initialise``."""

    def __init__(self, config: JsonObject | None = None) -> None:
        super().__init__()
        self.config = dict(CONFIG, **(config or {}))
        self.model = Backbone(self.config)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Embeddings at ``initializer_range``; matrices at 1/sqrt(fan in); matrices that write to the residual
        stream smaller, so that the stream does not grow with depth."""
        depth = self.config["num_hidden_layers"]
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            if "embed_tokens" in name:
                parameter.normal_(std=self.config["initializer_range"])
            else:
                std = parameter.shape[1] ** -0.5
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameter.normal_(std=std * (2 * depth) ** -0.5 if writes else std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, V) of tokens (B, T); training computes only the rows it needs, see ``train``."""
        cos, sin = self.model.tables(tokens.shape[1], tokens.device)
        return F.linear(self.model(tokens, cos, sin), self.model.embed_tokens.weight)


def export(model: ReferenceLlama, out: str | Path) -> None:
    """Write ``config.json``, ``generation_config.json`` and ``model.safetensors`` (bfloat16) for transformers."""
    from safetensors.torch import save_file

    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": [1, 6], "pad_token_id": 2, "do_sample": False}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tensors = {
        name.removeprefix("_orig_mod."): value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
    }
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
