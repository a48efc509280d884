"""What a lane of a stream sees: for every view column the slot of its cell.

It follows from the cascade's state and changes at the end of a stride only, so it is written down once a stride, for
all layers in one launch, and read in every pass until the next one ends: 4 bytes beside the 512 of a token's key and
value (128 components of 16 bits). The columns of the open stride are in it from its beginning, since its cells are
known by then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sglang_ext.kernels.cascade_update import CascadeState
from sglang_ext.kernels.rope import Rope


def empty_lists(state: CascadeState) -> torch.Tensor:
    """Lists for every lane of a state, which `list_columns` fills.

    Returns:
        [layers, rows, lanes, entries] int32, the slot of the cell that a column shows. A stream whose window is not
        full has fewer columns than entries; the others name slot 0.
    """
    return torch.zeros_like(state.cell)


@dataclass(frozen=True)
class Rotation:
    """The model's rotation, as kernels take it that rotate keys while they load them.

    Attributes:
        rope: the rotation.
        phase: [rotary_dim / 2] int32, inv_freq as a fraction of a full rotation in units of 2^-32 (unsigned, its
            bits kept in int32). `position * phase` wraps around where the angle does: exact range reduction by an
            integer product. Its rounding is at most position * 2^-33 rotations: below 2e-4 radians for 2^18 positions,
            a tenth of what a bfloat16 key is rounded by.
    """

    rope: Rope
    phase: torch.Tensor

    @classmethod
    def of(cls, rope: Rope) -> Rotation:
        """Computed in float64; waits for the device, once."""
        parts = (rope.inv_freq.double().cpu() * (2**32 / (2 * math.pi))).round().long() % 2**32
        return cls(rope, torch.where(parts < 2**31, parts, parts - 2**32).to(torch.int32).to(rope.inv_freq.device))


def rows_of(*tensors: torch.Tensor) -> list[int]:
    """Elements from row to row of [rows, heads, size] tensors.

    Raises:
        ValueError: the heads of a row do not lie side by side.
    """
    for tensor in tensors:
        if tensor.stride(2) != 1 or tensor.stride(1) != tensor.shape[2]:
            raise ValueError(
                f"{tuple(tensor.shape)} with strides {tensor.stride()}: expected the heads of a row one after the other"
            )
    return [tensor.stride(0) for tensor in tensors]


def check_cells(slot: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raise ValueError where lists of one layer do not fit its caches.

    Args:
        slot: [..., lanes, entries] int32.
        keys, values: [slots, kv_heads, head_dim or value_dim].
    """
    if slot.dim() < 2 or slot.dtype != torch.int32:
        raise ValueError(f"slot is {slot.dtype} {tuple(slot.shape)}: expected int32 [..., lanes, entries]")
    if keys.dim() != 3 or values.dim() != 3 or keys.shape[:2] != values.shape[:2] or keys.dtype != values.dtype:
        raise ValueError(
            f"caches {keys.dtype} {tuple(keys.shape)} and {values.dtype} {tuple(values.shape)}: expected [slots, "
            "kv_heads, head_dim] and [slots, kv_heads, value_dim] of one dtype"
        )
    if slot.shape[-2] not in (1, keys.shape[1]):
        raise ValueError(f"{slot.shape[-2]} lanes: expected {keys.shape[1]}, one a key-value head, or 1 for all")
