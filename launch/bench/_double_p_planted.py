"""This module plants what the models of ``sglang-ext bench double_p`` attend to: it writes projections of queries and
keys with which keys lie in clusters, and it makes the prompts whose tokens are these clusters; the other weights stay
SGLang's random ones.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch

from sglang_ext.launch.bench._double_p_rows import Level
from sglang_ext.policies.double_p import DoubleP

DUMMY = 1e-3
"""SGLang's random weights are uniform between minus this and this, those of the norms too."""

EPSILON = 1e-5
"""Of the norms, as `write_model` says."""

STILL = 20 / 64
"""Share of the rotated pairs of components that carry queries and keys: the slowest ones."""


def planted_weights(folder: Path, level: Level, keys: bool = True, seed: int = 0) -> None:
    """Write query (and key) projections with which attention over `prompt_ids` is as peaked as `level` says.

    In a model of random weights a token's residual is its embedding in every layer: norms have random weights around
    zero, which make all that is added 1,000 times smaller. So a key is a random vector of its token, in each layer and
    head another one, normal(0, 1); tokens of one kind are a cluster. Only the slowest `STILL` of the rotated components
    carry it (the others are 0), which turn by at most one radian over 64K tokens: what a trained head that attends by
    content does. Queries are those of the token just sampled, which is any at all at temperature 1: random vectors,
    with which the logits of clusters have standard deviation `deviation`, correlated by `shared` in a group of heads.

    Args:
        folder: of a model that `write_model` wrote; gets one more file.
        level: which.
        keys: whether the key projections are written, too; they are the same at every level.
        seed: of all random numbers.
    """
    from safetensors.torch import save_file

    config = json.loads((folder / "config.json").read_text())
    hidden, heads, kv_heads = (config[f"{x}"] for x in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    dim = config["head_dim"]
    still = max(1, round(STILL * dim / 2))
    places = torch.cat([torch.arange(half - still, half) for half in (dim // 2, dim)])
    square = DUMMY**2 / 3  # mean square of a random weight
    # A component of the normed residual: embedding over its own size and epsilon, times the norm's weight.
    gain = 1 / math.sqrt(hidden * square / (square + EPSILON) * square)
    strength = level.deviation * math.sqrt(dim / (2 * still))
    dice = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["dtype"])
    tensors: dict[str, torch.Tensor] = {}

    def rows(of: torch.Tensor) -> torch.Tensor:
        """[n, 2 still, hidden] as the rows of a projection: [n * head_dim, hidden]."""
        whole = torch.zeros(of.shape[0], dim, hidden, dtype=dtype)
        whole[:, places] = (gain * of).to(dtype)
        return whole.flatten(0, 1)

    for layer in range(config["num_hidden_layers"]):
        group = heads // kv_heads
        key = torch.randn(kv_heads, 2 * still, hidden, generator=dice)
        common = torch.randn(kv_heads, 1, 2 * still, hidden, generator=dice)
        own = torch.randn(kv_heads, group, 2 * still, hidden, generator=dice)
        query = math.sqrt(level.shared) * common + math.sqrt(1 - level.shared) * own
        name = f"model.layers.{layer}.self_attn."
        tensors[name + "q_proj.weight"] = rows(strength * query.flatten(0, 1))
        if keys:
            tensors[name + "k_proj.weight"] = rows(key)
    save_file(tensors, folder / "model.safetensors")


def prompt_ids(length: int, vocabulary: int, config: DoubleP, seed: int) -> list[int]:
    """Tokens of a prompt: in each segment that is clustered, as many kinds as it gets clusters, shuffled.

    The token with which k-means begins a cluster is of another kind for each, so that it finds the kinds: how well it
    clusters is not what is measured here.
    """
    dice = np.random.default_rng(seed)
    ids = dice.integers(vocabulary, size=length)
    begin, end = config.clustered(length)
    for low, high in config.due(begin, end, True):
        count = -(-(high - low) // config.cluster)
        kinds = dice.choice(vocabulary, count, replace=count > vocabulary)
        first = np.arange(count) * (high - low) // count
        numbers = np.full(high - low, -1)
        numbers[first] = np.arange(count)
        rest = np.flatnonzero(numbers < 0)
        numbers[rest] = dice.permutation(len(rest)) % count
        ids[low:high] = kinds[numbers]
    return [int(x) for x in ids]
