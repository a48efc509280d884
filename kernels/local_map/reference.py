"""A chunk's attention to its window in plain PyTorch, and what is kept of it.

Flash attention keeps no probabilities; they are computed anew from the log-sum-exp: exp(scale * q · k - lse). Ltri-LLM
keeps two things of the map: its column sums, by which the tokens of a span are ranked (section 3, equation 6), and the
tiles on its diagonal, one a memory block, out of which spans are cut (equation 5).
"""

from __future__ import annotations

import torch

from sglang_ext.kernels.local_map.types import BlockTiles, LocalMap, Received, check, check_tiles


def received(chunks: LocalMap, *, out: Received | None = None) -> Received:
    """The attention that each token of the window received from the chunk, summed over its rows and heads.

    The last row's part is kept apart: the caller adds it when another token follows (Ltri-LLM, section 3, equation 6).

    Args:
        chunks: one chunk a request; queries [batch, rows, heads, head_dim], keys [batch, kv_heads, columns, head_dim].
        out: what to write to; made where not given.

    Returns:
        Sums [batch, columns], [batch, columns] and [batch, rows] of probabilities (`out` where given), in lse's dtype
        on its device; 0 for what is not seen.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not fit, or a chunk's rows do not lie in its columns.
    """
    check(chunks, out)
    found = Received.empty(chunks) if out is None else out
    for tensor in (found.received, found.last, found.chunk_received):
        tensor.zero_()
    for request, (before, count) in enumerate(_places(chunks)):
        if count == 0:
            continue
        given = _attention(chunks, request, before, count).sum(1)
        end = before + count
        found.received[request, :end] = given[:-1].sum(0)
        found.last[request, :end] = given[-1]
        found.chunk_received[request, :count] = given[:, before:].sum(0)
    return found


def fill_tiles(chunks: LocalMap, blocks: BlockTiles) -> None:
    """The attention of the chunks' rows to the memory blocks in which they lie, a tile a block and head.

    A tile is filled by several chunks: its rows that belong to other chunks stay as they are. In the rows that are
    written, what lies above the diagonal or before the window is 0 (Ltri-LLM, section 3, equation 5).

    Args:
        chunks: one chunk a request, as for `received`.
        blocks: which blocks, [batch, blocks]; their tiles [places, heads, block, block] are written, in probabilities.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not fit; a chunk's rows do not lie in its columns; a place is
            there twice, or there is no such place.
    """
    check(chunks, None)
    check_tiles(chunks, blocks)
    taken = blocks.place[blocks.place >= 0].tolist()
    if len(set(taken)) < len(taken) or max(taken, default=-1) >= len(blocks.tiles):
        raise ValueError(
            f"places {blocks.place.tolist()}: expected no place twice, and each below {len(blocks.tiles)}, the number "
            "of tiles"
        )
    size = blocks.tiles.shape[3]
    firsts, places = blocks.first.tolist(), blocks.place.tolist()
    for request, (before, count) in enumerate(_places(chunks)):
        if count == 0:
            continue
        attention = _attention(chunks, request, before, count).transpose(0, 1)
        for first, place in zip(firsts[request], places[request], strict=True):
            begin, end = max(first, before), min(first + size, before + count)
            if place < 0 or begin >= end:
                continue
            tile = blocks.tiles[place, :, begin - first : end - first]
            tile.zero_()
            low = max(first, 0)
            tile[:, :, low - first : end - first] = attention[:, begin - before : end - before, low:end]


def _places(chunks: LocalMap) -> list[tuple[int, int]]:
    """(before, count) of each request; ValueError where they do not fit."""
    rows, columns = chunks.query_near.shape[1], chunks.keys_near.shape[2]
    found = list(zip(chunks.before.tolist(), chunks.count.tolist(), strict=True))
    for request, (before, count) in enumerate(found):
        if before < 0 or not 0 <= count <= rows or before + count > columns:
            raise ValueError(
                f"request {request}: {before} columns before {count} rows of {rows}; expected both in {columns} "
                "columns, and the rows in the query"
            )
    return found


def _attention(chunks: LocalMap, request: int, before: int, count: int) -> torch.Tensor:
    """[count, heads, before + count] attention of a request's chunk, 0 where a column is not seen."""
    lse, device = chunks.lse[request, :count], chunks.lse.device
    row = torch.arange(before, before + count, device=device)
    distance = row.unsqueeze(1) - torch.arange(before + count, device=device)
    far, hidden = distance >= chunks.window, distance < 0
    near = ~far & ~hidden
    logits = torch.where(
        far.unsqueeze(1),
        _products(chunks.query_far[request], chunks.keys_far[request], far, lse.dtype),
        _products(chunks.query_near[request], chunks.keys_near[request], near, lse.dtype),
    )
    return torch.exp(logits * chunks.scale - lse.unsqueeze(2)).masked_fill(hidden.unsqueeze(1), 0.0)


def _products(query: torch.Tensor, keys: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[count, heads, columns] products of the heads' queries and keys; any number where it is not wanted.

    Args:
        query: [rows, heads, head_dim], of which the first `count` may be wanted.
        keys: [kv_heads, columns, head_dim], likewise.
        wanted: [count, columns], of rows and columns.
        dtype: in which to multiply.
    """
    count, columns = wanted.shape
    rows = query[:count].to(dtype).masked_fill(~wanted.any(1)[:, None, None], 0.0)
    seen = keys[:, :columns].to(dtype).masked_fill(~wanted.any(0)[:, None], 0.0)
    kv_heads, heads = keys.shape[0], query.shape[1]
    return torch.einsum("thgd,hcd->thgc", rows.unflatten(1, (kv_heads, heads // kv_heads)), seen).flatten(1, 2)
