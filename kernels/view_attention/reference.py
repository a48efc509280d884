"""Attention over a view in plain PyTorch: the CPU engine's path and every faster kernel's oracle.

It rotates each key to the position at which it is seen and takes one softmax over all segments. That is the definition;
faster implementations rotate the query instead, attend segment by segment and merge by log-sum-exp, which is equal.
"""

from __future__ import annotations

import torch

from sglang_ext.kernels.rope.reference import Rope, rotate
from sglang_ext.kernels.view_attention.view import (
    Consecutive,
    Ranks,
    Segment,
    SharedDistance,
    View,
    Written,
)


def view_attention(
    query: torch.Tensor,
    query_pos: torch.Tensor,
    view: View,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_pos: torch.Tensor,
    rope: Rope,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of `query` over the tokens of `view`.

    Args:
        query: [rows, heads, head_dim], rotated at `query_pos`.
        query_pos: [rows] integer, the position each row was rotated at.
        view: what the rows see.
        key_cache: [num_slots, kv_heads, head_dim], keys rotated at `slot_pos`.
        value_cache: [num_slots, kv_heads, value_dim].
        slot_pos: [num_slots] int32.
        rope: rotation used by the model.
        scale: factor of the logits, usually head_dim ** -0.5.

    Returns:
        (output [rows, heads, value_dim] in query's dtype, log-sum-exp [rows, heads] in float32 or float64). A row that
        sees nothing gets zeros and -inf, so that it merges as nothing.

    Raises:
        ValueError: heads is not a multiple of kv_heads.
    """
    rows, heads, _ = query.shape
    kv_heads = key_cache.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads over {kv_heads} key-value heads: expected a multiple")
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    grouped = query.to(dtype).view(rows, kv_heads, heads // kv_heads, -1)
    logits, values = [], []
    for segment in view.segments:
        if segment.slots.numel() == 0:
            continue
        segment_logits, segment_values = _segment_logits(
            grouped, query_pos, segment, key_cache, value_cache, slot_pos, rope, dtype
        )
        logits.append(segment_logits * scale)
        values.append(segment_values)
    if not logits:
        out = query.new_zeros(rows, heads, value_cache.shape[-1])
        return out, torch.full((rows, heads), float("-inf"), dtype=dtype, device=query.device)
    scores = torch.cat(logits, dim=-1)  # [kv_heads, rows, group, tokens]
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(torch.isinf(lse), torch.zeros_like(lse), lse).unsqueeze(-1))
    out = torch.einsum("hrgt,htd->rhgd", weights, torch.cat(values, dim=1))
    return out.reshape(rows, heads, -1).to(query.dtype), lse.permute(1, 0, 2).reshape(rows, heads)


def _segment_logits(
    grouped: torch.Tensor,
    query_pos: torch.Tensor,
    segment: Segment,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_pos: torch.Tensor,
    rope: Rope,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Unscaled logits [kv_heads, rows, group, tokens] and values [kv_heads, tokens, value_dim] of one segment."""
    shared = segment.slots.dim() == 1  # one token list for all heads: positions and angles are computed once
    cells = segment.slots.long().reshape(1 if shared else -1, segment.slots.shape[-1])
    kept, safe = cells >= 0, cells.clamp(min=0)
    if shared:
        keys, values = (cache[safe[0]].transpose(0, 1).to(dtype) for cache in (key_cache, value_cache))
    else:
        head = torch.arange(key_cache.shape[1], device=cells.device).unsqueeze(-1)
        keys = key_cache[safe, head].to(dtype)
        # Padding reads slot 0, which may hold anything: 0 * NaN would reach the output.
        values = value_cache[safe, head].to(dtype).masked_fill(~kept.unsqueeze(-1), 0.0)
    written = slot_pos[safe]  # [1 or kv_heads, tokens]

    rule = segment.positions
    if isinstance(rule, SharedDistance):
        # (R(p) q) . (R(p - d) k) depends on d alone: take the key back to 0 and the query to d.
        keys = rotate(keys, -written, rope)
        grouped = rotate(grouped, (rule.distance - query_pos).view(-1, 1, 1), rope)
        seen = (query_pos - rule.distance).view(1, -1, 1)  # [1, rows, 1]
    else:
        if isinstance(rule, Consecutive):
            positions = torch.arange(rule.start, rule.start + cells.shape[1], device=cells.device).expand_as(cells)
        elif isinstance(rule, Ranks):
            positions = torch.atleast_2d(rule.ranks)
        elif isinstance(rule, Written):
            positions = written
        else:
            raise ValueError(f"position rule {rule!r}: expected Consecutive, Written, Ranks or SharedDistance")
        delta = positions - written
        if bool((delta != 0).any()):
            keys = rotate(keys, delta, rope)
        seen = positions.unsqueeze(1)  # [kv_heads, 1, tokens]

    logits = torch.einsum("rhgd,htd->hrgt", grouped, keys)
    visible = kept.unsqueeze(1)  # [kv_heads, 1, tokens]
    if segment.causal:
        visible = visible & (seen <= query_pos.view(1, -1, 1))
    return logits.masked_fill(~visible.unsqueeze(2), float("-inf")), values


def merge_states(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint parts into attention over their union, exactly.

    Args:
        outputs: [parts, rows, heads, value_dim].
        lses: [parts, rows, heads] natural-log sums; -inf for a part that saw nothing.

    Returns:
        (output [rows, heads, value_dim], log-sum-exp [rows, heads]).
    """
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - torch.where(torch.isinf(lse), torch.zeros_like(lse), lse))
    return (outputs * weights.unsqueeze(-1).to(outputs.dtype)).sum(0), lse
