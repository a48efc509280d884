"""Keys in 4 bits, packed, as Twilight keeps them beside the KV cache to estimate attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_ext.kernels.top_p.types import Selection


@dataclass(frozen=True)
class QuantisedKeys:
    """Keys of one layer, each vector's range in 15 equal steps.

    A head's slots lie together, so that the tokens of a page do.

    Attributes:
        codes: [kv_heads, num_slots, head_dim / 2] uint8: component i in the low bits of byte i, component
            i + head_dim / 2 in its high ones.
        ranges: [kv_heads, num_slots, 2] float16: the least component and the step.
    """

    codes: torch.Tensor
    ranges: torch.Tensor

    @staticmethod
    def of(keys: torch.Tensor) -> QuantisedKeys:
        """Quantise keys [num_slots, kv_heads, head_dim] of any floating dtype, components within +-65504.

        Raises:
            ValueError: an odd head_dim.
        """
        dim = keys.shape[-1]
        if keys.dim() != 3 or dim % 2:
            raise ValueError(
                f"keys of shape {tuple(keys.shape)}: expected [num_slots, kv_heads, head_dim], head_dim even"
            )
        own = keys.transpose(0, 1).float()
        low, high = own.amin(-1, keepdim=True), own.amax(-1, keepdim=True)
        ranges = torch.cat([low, (high - low) / 15], -1).half()
        low, step = ranges.float().split(1, -1)  # codes are of the range that is kept, its rounding included
        codes = torch.round((own - low) / torch.where(step > 0, step, torch.ones_like(step))).clamp(0, 15).byte()
        return QuantisedKeys((codes[..., : dim // 2] | (codes[..., dim // 2 :] << 4)).contiguous(), ranges)

    def restored(self) -> torch.Tensor:
        """[num_slots, kv_heads, head_dim] float32: the keys that the codes stand for."""
        low, step = self.ranges.float().split(1, -1)
        codes = torch.cat([self.codes & 15, self.codes >> 4], -1)
        return (low + codes * step).transpose(0, 1)


def check(query: torch.Tensor, keys: QuantisedKeys, members: torch.Tensor, chosen: Selection) -> None:
    """Raise ValueError where the parts of `token_scores` do not fit each other."""
    kv_heads, slots, half = keys.codes.shape
    if query.dim() != 3 or query.shape[1] % kv_heads or query.shape[2] != 2 * half:
        raise ValueError(
            f"query of shape {tuple(query.shape)}: expected [batch, heads, {2 * half}], heads a multiple of {kv_heads}"
        )
    if tuple(keys.ranges.shape) != (kv_heads, slots, 2):
        raise ValueError(f"ranges of shape {tuple(keys.ranges.shape)}: expected {(kv_heads, slots, 2)}")
    if members.dim() != 2 or members.shape[0] != kv_heads or chosen.counts.shape[:2] != (query.shape[0], kv_heads):
        raise ValueError(
            f"members of shape {tuple(members.shape)} and a selection of {tuple(chosen.counts.shape[:2])} rows: "
            f"expected [{kv_heads}, tokens] and {(query.shape[0], kv_heads)}"
        )
