"""Attention with clamped distances in plain PyTorch: every logit is written down.

A row sees the tokens of its window up to itself, all sinks, and all of the memory. A token at a distance below `width`
is seen at that distance, and any other at the distance `width` - 1, as InfLLM does (Xiao et al., 2024) and Ltri-LLM
after it (Tang et al., 2024, section 3).
"""

from __future__ import annotations

import torch

from sglang_ext.kernels.cells.lists import Rotation
from sglang_ext.kernels.clamped_attention.types import (
    ChunkQuery,
    FarKeys,
    LayerRows,
    Part,
    SeenKeys,
    check_beyond,
    check_layers,
    check_parts,
    check_window,
)
from sglang_ext.kernels.rope import rotate


def rotate_queries(
    query: torch.Tensor, rotation: Rotation, *, first: int, edge: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The queries of a chunk as they meet keys near by, and keys far away.

    Args:
        query: [rows, heads, head_dim], not rotated, any floating dtype and device.
        rotation: the model's.
        first: position of the first row, in tokens; the others follow. Near keys are rotated likewise.
        edge: the largest distance, in tokens.

    Returns:
        (near, far), each [rows, heads, head_dim] like `query`: rotated by first, first + 1, ..., and all by `edge`.
    """
    rows = torch.arange(first, first + query.shape[0], device=query.device).unsqueeze(1)
    return rotate(query, rows, rotation.rope), rotate(query, torch.full_like(rows, edge), rotation.rope)


def attend_window(query: ChunkQuery, window: SeenKeys, *, width: int, scale: float) -> Part:
    """Attention of a chunk to its window, itself included.

    Args:
        query: of the chunk.
        window: the tokens before the chunk that it sees all of, and the chunk.
        width: distances below it are true; any other is `width` - 1.
        scale: factor of the logits.

    Returns:
        `out` in the query's dtype or wider.

    Raises:
        ValueError: shapes, dtypes, devices or places do not fit.
    """
    check_window(query, window, width)
    return _attention(seen_logits(query, window, width, scale), window.values)


def attend_near(query: ChunkQuery, window: SeenKeys, *, width: int, scale: float) -> Part:
    """`attend_window` over those tokens alone that are nearer to a row than `width`."""
    check_window(query, window, width)
    logits = seen_logits(query, window, width, scale)
    rows = torch.arange(query.begin, query.begin + logits.shape[1], device=logits.device).unsqueeze(1)
    places = torch.arange(window.first, window.first + logits.shape[2], device=logits.device)
    return _attention(logits.masked_fill(rows - places >= width, float("-inf")), window.values)


def attend_beyond(query: ChunkQuery, sinks: SeenKeys, memory: FarKeys, *, width: int, scale: float) -> Part:
    """Attention of a chunk to what lies outside of its window.

    Args:
        query: of the chunk.
        sinks: tokens before the window; none where they are part of it.
        memory: what else is seen; one of the two has a token.
        width, scale: as for `attend_window`.

    Returns:
        `out` in the query's dtype or wider, to be merged with the window's.

    Raises:
        ValueError: shapes, dtypes, devices or places do not fit.
    """
    check_beyond(query, sinks, memory, width)
    far = _products(query.far, memory.keys) * scale
    if memory.late:
        rows, tokens = far.shape[1:]
        far = far.masked_fill(far.new_ones(rows, tokens).tril(tokens - rows) == 0, float("-inf"))
    logits = [seen_logits(query, sinks, width, scale), far]
    return _attention(torch.cat(logits, -1), torch.cat([sinks.values, memory.values]))


def merge(one: Part, other: Part, dtype: torch.dtype, *, out: torch.Tensor | None = None) -> Part:
    """Attention over the tokens of both parts, which share none.

    Args:
        one: of all rows.
        other: of all rows, or of the last ones, where the rows before see nothing of it.
        dtype: of the result's `out`.
        out: [rows, heads, value_dim] contiguous, what the result's `out` is; made where not given.

    Returns:
        Of all rows; contiguous.

    Raises:
        ValueError: the parts do not fit each other, or `out` does not fit them.
    """
    check_parts(one, other, dtype, out)
    before = one.out.shape[0] - other.out.shape[0]
    lse = one.lse.clone(memory_format=torch.contiguous_format)
    lse[before:] = torch.logaddexp(lse[before:], other.lse)
    merged = _share(one, lse)
    merged[before:] += _share(other, lse[before:])
    return Part(merged.to(dtype) if out is None else out.copy_(merged), lse)


def _share(part: Part, lse: torch.Tensor) -> torch.Tensor:
    """What a part adds to the output of all tokens, whose log-sum-exps are `lse`: nothing where it sees nothing."""
    seen = part.lse > float("-inf")
    weight = torch.where(seen, (part.lse - lse).exp(), 0.0)
    return weight.unsqueeze(-1) * part.out.to(part.lse.dtype)


def move(
    source: tuple[torch.Tensor, torch.Tensor],
    target: tuple[torch.Tensor, torch.Tensor],
    *,
    read: torch.Tensor | None = None,
    write: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
) -> None:
    """Copy keys and values, a row each: tokens, or whole blocks.

    Args:
        source: (keys [n, ...], values [n, ...]); what belongs to one row is contiguous.
        target: likewise, in the source's dtype and on its device; written.
        read: [rows] integer, which rows of the source, or a negative number for zeros; None for its first ones.
        write: [rows] integer, which rows of the target; None for its first ones.
        base: [1] integer, the row of the source from which `read` counts; None for the first.

    Raises:
        ValueError: neither is given.
    """
    index = read if read is not None else write
    if index is None:
        raise ValueError("neither read nor write is given: expected one, [rows] integer")
    for each, into in zip(source, target, strict=True):
        rows = each[: index.shape[0]]
        if read is not None:
            rows = each[read.long().clamp(min=0) + (0 if base is None else base)]
            rows[read < 0] = 0
        if write is None:
            into[: index.shape[0]] = rows
        else:
            into[write.long()] = rows


def move_layers(source: LayerRows, target: LayerRows, *, read: torch.Tensor, write: torch.Tensor) -> None:
    """`move` in all layers, the same rows of each.

    Args:
        source: rows of some layers.
        target: as many layers, in the source's dtype and on its device; written.
        read: [rows] integer, which rows of the source.
        write: [rows] integer, which rows of the target.

    Raises:
        ValueError: the numbers of layers differ.
    """
    check_layers(source, target)
    for pair, into in zip(source.pairs, target.pairs, strict=True):
        move(pair, into, read=read, write=write)


def _attention(logits: torch.Tensor, values: torch.Tensor) -> Part:
    grouped = values.to(logits.dtype).repeat_interleave(logits.shape[0] // values.shape[1], 1)
    out = torch.einsum("hrt,thd->rhd", logits.softmax(-1), grouped).contiguous()
    return Part(out, logits.logsumexp(-1).transpose(0, 1).contiguous())


def seen_logits(query: ChunkQuery, seen: SeenKeys, width: int, scale: float) -> torch.Tensor:
    """[heads, rows, tokens] logits, each at its distance, float32 or wider; -inf behind the row."""
    rows, device = torch.arange(query.near.shape[0], device=query.near.device), query.near.device
    tokens = torch.arange(seen.near.shape[0], device=device) + seen.first
    distance = (rows + query.begin).unsqueeze(1) - tokens
    logits = torch.where(distance < width, _products(query.near, seen.near), _products(query.far, seen.far)) * scale
    return logits.masked_fill(distance < 0, float("-inf"))


def _products(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[heads, rows, tokens], float32 or wider."""
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = keys.to(wide).repeat_interleave(query.shape[1] // keys.shape[1], 1)
    return torch.einsum("rhd,thd->hrt", query.to(wide), grouped)
