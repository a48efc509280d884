"""Tokens of a row that each key-value head chooses for itself, as a view; and the logits of all of them."""

from __future__ import annotations

import torch

from sglang_ext.attention.policy import Caches, RequestRows
from sglang_ext.kernels.rope.reference import rotate
from sglang_ext.kernels.view_attention import Ranks, Segment

AT_ONCE = 8192
"""Keys that are copied at once: 8 heads of 128 components in float32 are 32 MB, a few times that if rotated."""


def chosen_tokens(rows: RequestRows, chosen: torch.Tensor) -> Segment:
    """The chosen columns of a row, each seen at its column.

    Args:
        rows: one decoding step; its query row sees every column.
        chosen: [kv_heads, columns] bool.
    """
    counts = chosen.sum(1)
    most = int(counts.max())
    # Chosen columns first, in their order.
    columns = torch.sort(~chosen, dim=1, stable=True).indices[:, :most]
    padding = torch.arange(most, device=chosen.device) >= counts.unsqueeze(1)
    slots = rows.slots.long()[columns].masked_fill(padding, -1)
    # Padding is read from slot 0: where that was written, nothing needs to be rotated.
    return Segment(slots, Ranks(torch.where(padding, rows.slot_pos[0].long(), columns)))


def token_logits(rows: RequestRows, caches: Caches, query: torch.Tensor) -> torch.Tensor:
    """Logits of every column of a row, each seen at its column (Double-P, equation 3).

    Args:
        rows: one decoding step.
        caches: of the layer.
        query: [kv_heads, group, head_dim], rotated at its own position.

    Returns:
        [kv_heads, group, columns] in query's dtype.
    """
    slots = rows.slots.long()
    delta = torch.arange(rows.end, device=slots.device) - rows.slot_pos[slots]
    rotated = bool(delta.any())

    def part(begin: int) -> torch.Tensor:
        some = slice(begin, begin + AT_ONCE)
        keys = caches.keys[slots[some]].to(query.dtype)
        if rotated:
            keys = rotate(keys, delta[some].unsqueeze(1), caches.rope)
        return torch.einsum("hgd,thd->hgt", query, keys)

    return torch.cat([part(begin) for begin in range(0, rows.end, AT_ONCE)], dim=-1) * caches.scale
