"""The model's rotary embedding, as a rotation that can be applied again.

Rebasing needs a rope whose angle is linear in the position. The frequencies come from the model's own module, and are
checked against its cos/sin table at spread positions, so that a variant this file does not know is refused rather than
rotated wrongly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from sglang_ext.kernels.rope import Rope

if TYPE_CHECKING:
    from sglang.srt.layers.rotary_embedding import RotaryEmbedding

_TOLERANCE = 2e-3  # of a unit vector, beside a table that the model may keep in bfloat16 (2 ** -9)
_INSTEAD = "not supported: serve the model with one of SGLang's own attention backends"
_LAST_BITS = 2.0**-22  # of a float32, relative to it


def find_rope(model: nn.Module) -> Rope:
    """The rotation that `model` applies to its queries and keys.

    Raises:
        ValueError: the model has no rotary embedding, several different ones, or one that is not linear in position.
    """
    found = {id(module): module for name, module in model.named_modules() if name.rsplit(".", 1)[-1] == "rotary_emb"}
    if not found:
        raise ValueError(f"{type(model).__name__} has no rotary embedding, which views move keys by: {_INSTEAD}")
    ropes = [rope_of(module) for module in found.values()]
    first = ropes[0]
    for other in ropes[1:]:
        if other.neox != first.neox or not torch.equal(other.inv_freq, first.inv_freq):
            raise ValueError(f"{type(model).__name__} has layers with different rotary embeddings: {_INSTEAD}")
    return first


def no_rotation(device: torch.device) -> Rope:
    """A rotation of nothing, for models whose keys are read where they were written."""
    return Rope(torch.zeros(1, device=device))  # kernels expect a pair at least


def rope_of(module: RotaryEmbedding) -> Rope:
    """The rotation of one rotary-embedding module of SGLang; ValueError names a module that is not linear."""
    name = type(module).__name__
    table = getattr(module, "cos_sin_cache", None)
    refused = name.startswith(("MRotary", "DualChunk", "Fourier"))
    if refused or table is None or not hasattr(module, "_compute_inv_freq"):
        raise ValueError(f"rotary embedding {name}: not linear in position, so keys cannot be moved; {_INSTEAD}")
    with torch.device(table.device):  # where the model's own came from: powers differ in their last bits elsewhere
        inv_freq = _inv_freq(module, name)
    _check_linear(name, table, inv_freq)
    return Rope(inv_freq.to(device=table.device, dtype=torch.float32), bool(module.is_neox_style))


def _inv_freq(module: RotaryEmbedding, name: str) -> torch.Tensor:
    if name in ("YaRNScalingRotaryEmbedding", "DeepseekScalingRotaryEmbedding"):
        return module._compute_inv_freq(module.scaling_factor)
    inv_freq = module._compute_inv_freq(module.base)
    if name == "LinearScalingRotaryEmbedding":
        factors = module.scaling_factors
        if len(factors) != 1:
            raise ValueError(f"rotary embedding {name} with scaling factors {factors}: expected one")
        return inv_freq / factors[0]
    if name == "DynamicNTKAlphaRotaryEmbedding":
        exponent = module.rotary_dim / (module.rotary_dim - 2)
        return module._compute_inv_freq(module.base * module.scaling_alpha**exponent)
    if name == "DynamicNTKScalingRotaryEmbedding":
        # Its table is built once, for the longest context, from one base: linear, with that base.
        longest = module.max_position_embeddings * module.scaling_factor
        exponent = module.rotary_dim / (module.rotary_dim - 2)
        stretched = module.scaling_factor * longest / module.max_position_embeddings - (module.scaling_factor - 1)
        return module._compute_inv_freq(module.base * stretched**exponent)
    return inv_freq


def _check_linear(name: str, table: torch.Tensor, inv_freq: torch.Tensor) -> None:
    """The table must be magnitude * (cos, sin)(position * inv_freq) at every position looked at."""
    rows = table.shape[0]
    positions = torch.unique(torch.tensor([0, 1, 2, 7, rows // 3, rows // 2, rows - 1]).clamp(max=rows - 1))
    cos, sin = table[positions.to(table.device)].to("cpu", torch.float64).chunk(2, dim=-1)
    magnitude = torch.hypot(cos, sin)
    # float32 angles, as the table itself was built: at large positions their rounding is the model's own.
    angle = (positions.to(torch.float32).unsqueeze(-1) * inv_freq.to("cpu", torch.float32)).double()
    error = torch.maximum((cos / magnitude - angle.cos()).abs(), (sin / magnitude - angle.sin()).abs())
    # A GPU's powers differ from a CPU's in the last bits of a frequency: that is radians behind a million positions.
    if cos.shape[-1] != inv_freq.numel() or not (error < _TOLERANCE * 4 + angle.abs() * _LAST_BITS).all():
        raise ValueError(
            f"rotary embedding {name}: not linear in position (its table is off by {error.max():.3g} from"
            f" position * frequency), so keys cannot be moved; {_INSTEAD}"
        )
