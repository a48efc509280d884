"""Tokens of a row that each key-value head chooses for itself, as a view; and the logits of all of them."""

from __future__ import annotations

import torch

from sglang_ext.attention.policy import Caches, RequestRows
from sglang_ext.kernels.rope.reference import rotate
from sglang_ext.kernels.view_attention import Ranks, Segment


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
    # Padding is read from slot 0: where that was written, nothing needs to be turned.
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
    keys = caches.keys[slots].to(query.dtype)
    delta = torch.arange(rows.end, device=slots.device) - rows.slot_pos[slots]
    if bool(delta.any()):
        keys = rotate(keys, delta.unsqueeze(1), caches.rope)
    return torch.einsum("hgd,thd->hgt", query, keys) * caches.scale
