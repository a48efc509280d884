"""Rotary position embedding as a pure rotation, in plain PyTorch.

RoPE (Su et al., 2021, section 3.2.2) rotates the pair `i` of a head by the angle `position * inv_freq[i]`. Rotations
compose: a key written at position m is moved to position m + delta by rotating it by delta, which may be negative.

The tables here are unit-norm. YaRN multiplies cos and sin by a magnitude ("mscale"); it is already contained in what
the model wrote, and a rebase must not apply it twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rope:
    """What a rebase needs to know of a model's rotary embedding.

    Attributes:
        inv_freq: [rotary_dim / 2] float32 on the KV cache's device, radians per position.
        neox: True when the pair i is (x[i], x[i + rotary_dim / 2]), False for (x[2 i], x[2 i + 1]) (GPT-J).
    """

    inv_freq: torch.Tensor
    neox: bool = True

    @property
    def rotary_dim(self) -> int:
        """How many leading components of a head are rotated (partial rotary leaves the rest alone)."""
        return 2 * self.inv_freq.numel()


def rotate(x: torch.Tensor, delta: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotate every vector of `x` by `delta` positions.

    Args:
        x: [..., head_dim], any floating dtype; computed in float32 (float64 stays float64).
        delta: integer positions, broadcastable to `x.shape[:-1]`, same device; may be negative.
        rope: the model's rotary embedding.

    Returns:
        A tensor like `x`, in its dtype.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    # float64 angles: at position 1e6 a float32 product is off by up to 0.03 rad in the fastest pair.
    angle = delta.to(torch.float64).unsqueeze(-1) * rope.inv_freq.to(torch.float64)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    rotated, rest = x[..., : rope.rotary_dim].to(dtype), x[..., rope.rotary_dim :]
    if rope.neox:
        first, second = rotated.chunk(2, dim=-1)
    else:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    a, b = first * cos - second * sin, second * cos + first * sin
    rotated = torch.cat([a, b], dim=-1) if rope.neox else torch.stack([a, b], dim=-1).flatten(-2)
    return torch.cat([rotated.to(x.dtype), rest], dim=-1)
