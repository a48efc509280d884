"""Estimated logits of the tokens of chosen pages, in plain PyTorch, row by row (Twilight, section 4)."""

from __future__ import annotations

import torch

from sglang_ext.kernels.candidates.quantised import QuantisedKeys, check
from sglang_ext.kernels.top_p.types import Selection


def token_scores(
    query: torch.Tensor,
    keys: QuantisedKeys,
    members: torch.Tensor,
    chosen: Selection,
    page: int,
    cells: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every token of the chosen pages as a cluster of one token, for `top_p.select`.

    Args:
        query: [batch, heads, head_dim].
        keys: of this layer.
        members: [kv_heads, tokens] int32 KV slots, page by page, as in `ClusterPool`.
        chosen: the pages, in its exact lists; all of them have `page` tokens.
        page: tokens of a page.
        cells: room for tokens of a row.
        scale: factor of the logits.

    Returns:
        (logits [batch, kv_heads, group, cells] float32, float64 for float64 queries; sizes and starts
        [batch, kv_heads, cells] int32; counts [batch] int32: the most tokens of a request's heads). Cell i is token i
        of the lists: of size 1, its start is its place in `members`. A head with fewer tokens than another of its
        request has empty cells up to the count (-inf, 0, 0).

    Raises:
        ValueError: parts that do not fit each other.
    """
    check(query, keys, members, chosen)
    batch, heads, dim = query.shape
    kv_heads = members.shape[0]
    dtype = torch.promote_types(query.dtype, torch.float32)
    restored = keys.restored().to(dtype)
    logits = torch.full((batch, kv_heads, heads // kv_heads, cells), float("-inf"), dtype=dtype, device=query.device)
    sizes = torch.zeros(batch, kv_heads, cells, dtype=torch.int32, device=query.device)
    starts = torch.zeros_like(sizes)
    inside = torch.arange(page, device=query.device)
    for b in range(batch):
        for h in range(kv_heads):
            pages = int(chosen.counts[b, h, 0])
            first = chosen.prefix[b, h, :pages].long() + chosen.shift[b, h, :pages].long()
            member = (first.unsqueeze(-1) + inside).flatten()
            own = query[b].view(kv_heads, -1, dim)[h].to(dtype)
            logits[b, h, :, : len(member)] = own @ restored[members[h, member].long(), h].T * scale
            sizes[b, h, : len(member)] = 1
            starts[b, h, : len(member)] = member.int()
    return logits, sizes, starts, chosen.counts[..., 1].amax(1)
