"""What a lane of a stream sees: for every view column the slot of its cell, and how far its key has to be turned.

Both follow from the cascade's state and change at the end of a stride only, so they are written down once a stride, for
all layers in one launch, and read in every pass until the next one ends: 8 bytes beside the 512 of a token's key and
value (128 components of 16 bits). The columns of the open stride are in them from its beginning, since its cells are
known by then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sglang_ext.kernels.cascade_update import CascadeState
from sglang_ext.kernels.rope import Rope


@dataclass(frozen=True)
class Lists:
    """The columns of all lanes, for the open stride of each request.

    Attributes:
        slot: [layers, rows, lanes, entries] int32, slot of the cell that a column shows.
        delta: likewise, positions by which the key in it is seen away from where it was written.

    A stream whose window is not full has fewer columns than entries; the others name slot 0.
    """

    slot: torch.Tensor
    delta: torch.Tensor

    @classmethod
    def empty(cls, state: CascadeState) -> Lists:
        """Lists for every lane of a state, which `list_columns` fills."""
        return cls(torch.zeros_like(state.cell), torch.zeros_like(state.cell))


@dataclass(frozen=True)
class Turn:
    """The model's rotation, as kernels take it that turn keys while they load them.

    Attributes:
        rope: the rotation.
        phase: [rotary_dim / 2] int32, inv_freq as a fraction of a full turn in units of 2^-32 (unsigned, its bits
            kept in int32). `delta * phase` wraps around where the angle does: exact range reduction by an integer
            product. Its rounding is at most delta * 2^-33 turns: below 2e-4 radians for 2^18 positions, a tenth of what
            a bfloat16 key is rounded by.
    """

    rope: Rope
    phase: torch.Tensor

    @classmethod
    def of(cls, rope: Rope) -> Turn:
        """Computed in float64; waits for the device, once."""
        parts = (rope.inv_freq.double().cpu() * (2**32 / (2 * math.pi))).round().long() % 2**32
        return cls(rope, torch.where(parts < 2**31, parts, parts - 2**32).to(torch.int32).to(rope.inv_freq.device))


def check_cells(slot: torch.Tensor, delta: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raise ValueError where lists of one layer do not fit its caches.

    Args:
        slot, delta: [..., lanes, entries] int32.
        keys, values: [slots, kv_heads, head_dim or value_dim].
    """
    if slot.shape != delta.shape or slot.dtype != torch.int32 or delta.dtype != torch.int32:
        raise ValueError(
            f"slot is {slot.dtype} {tuple(slot.shape)}, delta {delta.dtype} {tuple(delta.shape)}: expected int32 of "
            "one shape [..., lanes, entries]"
        )
    if keys.dim() != 3 or values.dim() != 3 or keys.shape[:2] != values.shape[:2] or keys.dtype != values.dtype:
        raise ValueError(
            f"caches {keys.dtype} {tuple(keys.shape)} and {values.dtype} {tuple(values.shape)}: expected [slots, "
            "kv_heads, head_dim] and [slots, kv_heads, value_dim] of one dtype"
        )
    if slot.shape[-2] not in (1, keys.shape[1]):
        raise ValueError(f"{slot.shape[-2]} lanes: expected {keys.shape[1]}, one a key-value head, or 1 for all")
