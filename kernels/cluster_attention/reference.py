"""Attention over clusters in plain PyTorch, request by request and head by head (Double-P, equations 3 to 9)."""

from __future__ import annotations

import torch

from sglang_ext.kernels.cluster_attention.pool import ClusterPool, check
from sglang_ext.kernels.cluster_attention.types import ClusterReads, ClusterRows


def centroid_scores(
    query: torch.Tensor, pool: ClusterPool, rows: ClusterRows, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log of the estimated mass of every cluster: x + log s (equations 3 and 5).

    Args:
        query: [batch, rotations, heads, head_dim]; rotation r is the row's query rotated for the tiles that name r.
        pool: the clusters of this layer.
        rows: which tiles each request reads.
        scale: factor of the logits, usually head_dim ** -0.5.

    Returns:
        (logits [batch, kv_heads, group, cells] float32 (float64 for float64 queries), -inf for empty clusters, cut
        ones, and from a request's count on; sizes [batch, kv_heads, cells] int32, -n for n tokens of a cut cluster;
        starts [batch, kv_heads, cells] int32).

    Raises:
        ValueError: parts that do not fit each other.
    """
    check(query, pool, rows)
    batch, _, heads, dim = query.shape
    kv_heads, width = pool.centroids.shape[1:3]
    cells = rows.tiles.shape[1] * width
    dtype = torch.promote_types(query.dtype, torch.float32)
    logits = torch.full((batch, kv_heads, heads // kv_heads, cells), float("-inf"), dtype=dtype, device=query.device)
    sizes = torch.zeros(batch, kv_heads, cells, dtype=torch.int32, device=query.device)
    starts = torch.zeros_like(sizes)
    for b in range(batch):
        for place in range(int(rows.counts[b])):
            tile, span = int(rows.tiles[b, place]), slice(place * width, (place + 1) * width)
            rotated = query[b, 0 if rows.rotation is None else rows.rotation[b, place]]
            x = torch.einsum("hgd,hcd->hgc", rotated.view(kv_heads, -1, dim).to(dtype), pool.centroids[tile].to(dtype))
            cells_of = tile if rows.sized is None else rows.sized[b, place]
            size = pool.sizes[cells_of]
            logged = size.clamp(min=1).to(dtype).log().unsqueeze(1)  # of an empty cluster the centroid may be anything
            logits[b, ..., span] = torch.where(size.unsqueeze(1) > 0, x * scale + logged, float("-inf"))
            sizes[b, :, span], starts[b, :, span] = size, pool.starts[cells_of]
    return logits, sizes, starts


def cluster_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    pool: ClusterPool,
    reads: ClusterReads,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One softmax over exact tokens and centroid summaries (equations 8 and 9).

    Args:
        query: [batch, rotations, heads, head_dim].
        key_cache: [num_slots, kv_heads, head_dim].
        value_cache: [num_slots, kv_heads, value_dim].
        pool: the clusters of this layer.
        reads: what is read of them, and beside them.
        scale: factor of the logits.

    Returns:
        (output [batch, heads, value_dim] in query's dtype, log-sum-exp [batch, heads] natural, float32 or float64). A
        row that sees nothing gets zeros and -inf.

    Raises:
        ValueError: parts that do not fit each other.
    """
    rows, dense, selection, logits = reads.rows, reads.dense, reads.selection, reads.logits
    check(query, pool, rows, dense)
    batch, _, heads, dim = query.shape
    kv_heads, width = pool.centroids.shape[1:3]
    dtype = torch.promote_types(query.dtype, torch.float32)
    out = torch.zeros(batch, kv_heads, heads // kv_heads, value_cache.shape[-1], dtype=dtype, device=query.device)
    lse = torch.full(out.shape[:3], float("-inf"), dtype=dtype, device=query.device)
    for b in range(batch):
        for h in range(kv_heads):
            n_exact, _, n_approx, *_ = selection.counts[b, h].tolist()
            slots, rotations = [], []
            entries = torch.arange(int(dense.counts[b]), device=query.device)
            own = dense.slots[b, entries]
            run = entries // dense.tile
            slots.append(own[own >= 0].long())
            of_run = torch.zeros_like(run) if dense.rotation is None else dense.rotation[b, run].long()
            rotations.append(of_run[own >= 0])
            for cell in selection.exact[b, h, :n_exact].tolist():
                place, inside = divmod(cell, width)
                pooled = int((rows.tiles if rows.sized is None else rows.sized)[b, place])
                begin, size = int(pool.starts[pooled, h, inside]), abs(int(pool.sizes[pooled, h, inside]))
                slots.append(pool.members[h, begin : begin + size].long())
                rotation = 0 if rows.rotation is None else int(rows.rotation[b, place])
                rotations.append(torch.full((size,), rotation, device=query.device))
            slot, which = torch.cat(slots), torch.cat(rotations)
            q = query[b].view(-1, kv_heads, heads // kv_heads, dim)[which, h].to(dtype)  # [tokens, group, head_dim]
            x = torch.einsum("tgd,td->gt", q, key_cache[slot, h].to(dtype)) * scale
            approx = selection.approx[b, h, :n_approx].long()
            tiles = rows.tiles[b, approx // width].long()
            summary = pool.values[tiles, h, approx % width].to(dtype)
            scores = torch.cat([x, logits[b, h][:, approx].to(dtype)], dim=-1)
            if scores.shape[-1] == 0:
                continue
            seen = torch.cat([value_cache[slot, h].to(dtype), summary])
            out[b, h] = torch.softmax(scores, dim=-1) @ seen
            lse[b, h] = torch.logsumexp(scores, dim=-1)
    return out.reshape(batch, heads, -1).to(query.dtype), lse.reshape(batch, heads)
