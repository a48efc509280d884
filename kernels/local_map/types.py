"""The chunks whose attention is computed anew, and what is kept of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

NOBODY = -1
"""What stands where a request has no tile."""


@dataclass(frozen=True, slots=True)
class LocalMap:
    """One chunk a request, and what its attention to its window follows from (Ltri-LLM, section 3).

    A request's columns are the tokens of its window, the chunk's own at the end: row t of a chunk is the token of
    column before + t, and sees the columns up to that one. A column is seen at its distance d, in tokens, from the row:
    the logit is scale * query_near · keys_near where d < window, and scale * query_far · keys_far where d >= window.
    What no logit follows from may hold anything.

    Attributes:
        query_near: [batch, rows, heads, head_dim], a floating dtype, rotated at places that count from the chunk's
            first token. Rows from `count` on are not read.
        query_far: as query_near, rotated at window - 1. Only rows that see a column at a distance >= window are read.
        keys_near: [batch, kv_heads, columns, head_dim] in query's dtype, rotated at places that count from the chunk's
            first token. Only columns that some row sees at a distance < window are read.
        keys_far: as keys_near, not rotated. Only columns that some row sees at a distance >= window are read.
        lse: [batch, rows, heads] log-sum-exp (natural) of each row's logits over the window; float32, or float64 with
            float64 queries.
        before: [batch] int32, columns before the chunk's first row.
        count: [batch] int32, rows of the chunk, 0 to `rows`.
        window: smallest distance, in tokens, at which a token is seen at another one, at least 1. Where all tokens are
            seen at their true distance it is as large as `columns`, and what is far may be the same as what is near.
        scale: factor of the logits.
    """

    query_near: torch.Tensor
    query_far: torch.Tensor
    keys_near: torch.Tensor
    keys_far: torch.Tensor
    lse: torch.Tensor
    before: torch.Tensor
    count: torch.Tensor
    window: int
    scale: float


@dataclass(frozen=True, slots=True)
class Received:
    """The attention that tokens received from all heads, in sums of probabilities; all tensors are contiguous.

    Attributes:
        received: [batch, columns] float32, from all rows of the chunk but its last one.
        last: [batch, columns] float32, from the chunk's last row.
        chunk_received: [batch, rows] float32, what the chunk's own tokens received from all of its rows.

    A float64 query has all of them in float64. What no row sees, and rows that are not there, have 0.
    """

    received: torch.Tensor
    last: torch.Tensor
    chunk_received: torch.Tensor

    @classmethod
    def empty(cls, chunks: LocalMap) -> Received:
        """Uninitialised tensors for chunks, on their device."""
        batch, rows, _ = chunks.lse.shape
        columns = chunks.keys_near.shape[2]
        received, last = (chunks.lse.new_empty(batch, columns) for _ in range(2))
        return cls(received, last, chunks.lse.new_empty(batch, rows))


@dataclass(frozen=True, slots=True)
class BlockTiles:
    """Memory blocks, runs of as many columns each, and where the attention of their rows to themselves is kept.

    Attributes:
        tiles: [places, heads, block, block] float32 (float64 with a float64 query), the last dimension contiguous;
            written. Tiles [batch, blocks, heads, block, block] are given as `tiles.flatten(0, 1)`, with places
            0, 1, ....
        first: [batch, blocks] int32, column of each block's first token. It may be negative, and the block may begin
            before the chunk's rows and end behind them.
        place: [batch, blocks] int32, which of the tiles belongs to the block, no place twice; -1 for none, and
            `first` is of no meaning.
    """

    tiles: torch.Tensor
    first: torch.Tensor
    place: torch.Tensor


def check(chunks: LocalMap, out: Received | None) -> None:
    """Raise ValueError where shapes, dtypes, devices or settings do not fit; values on the device are not looked at."""
    query, keys, lse = chunks.query_near, chunks.keys_near, chunks.lse
    if query.dim() != 4 or keys.dim() != 4 or query.shape[0] != keys.shape[0] or query.shape[3] != keys.shape[3]:
        raise ValueError(
            f"query_near {tuple(query.shape)}, keys_near {tuple(keys.shape)}: expected [batch, rows, heads, head_dim] "
            "and [batch, kv_heads, columns, head_dim]"
        )
    batch, rows, heads, head_dim = query.shape
    if keys.shape[1] == 0 or heads == 0 or head_dim == 0 or heads % keys.shape[1]:
        raise ValueError(
            f"{heads} query heads of {head_dim} components over {keys.shape[1]} key-value heads: expected a multiple, "
            "and at least one component"
        )
    for name, far, near in (("query_far", chunks.query_far, query), ("keys_far", chunks.keys_far, keys)):
        if far.shape != near.shape:
            raise ValueError(f"{name} {tuple(far.shape)}: expected {tuple(near.shape)}, as what is near")
    dtypes = {each.dtype for each in (query, keys, chunks.query_far, chunks.keys_far)}
    if len(dtypes) > 1 or not query.is_floating_point():
        raise ValueError(
            f"queries and keys are {', '.join(sorted(map(str, dtypes)))}: expected one floating dtype of all four"
        )
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    if lse.shape != (batch, rows, heads) or lse.dtype != wide:
        raise ValueError(f"lse is {lse.dtype} {tuple(lse.shape)}: expected {wide} {(batch, rows, heads)}")
    for name, tensor in (("before", chunks.before), ("count", chunks.count)):
        _check_tensor(name, tensor, torch.int32, (batch,))
    if isinstance(chunks.window, bool) or not isinstance(chunks.window, int) or chunks.window < 1:
        raise ValueError(f"window={chunks.window!r}: expected a whole number of tokens, at least 1")
    tensors = [query, chunks.query_far, keys, chunks.keys_far, lse, chunks.before, chunks.count]
    if out is not None:
        _check_tensor("received", out.received, wide, (batch, keys.shape[2]))
        _check_tensor("last", out.last, wide, (batch, keys.shape[2]))
        _check_tensor("chunk_received", out.chunk_received, wide, (batch, rows))
        tensors += [out.received, out.last, out.chunk_received]
    _check_devices(tensors)


def check_tiles(chunks: LocalMap, blocks: BlockTiles) -> None:
    """The same for blocks of chunks that `check` has looked at."""
    tiles, wide, heads = blocks.tiles, chunks.lse.dtype, chunks.query_near.shape[2]
    if tiles.dim() != 4 or tiles.shape[1] != heads or tiles.shape[2] != tiles.shape[3] or tiles.shape[3] < 1:
        raise ValueError(f"tiles {tuple(tiles.shape)}: expected [places, {heads}, block, block], flattened in front")
    if tiles.dtype != wide or tiles.stride(3) != 1:
        raise ValueError(
            f"tiles are {tiles.dtype} with strides {tiles.stride()}: expected {wide} with a contiguous last dimension"
        )
    if blocks.first.dim() != 2:
        raise ValueError(f"first {tuple(blocks.first.shape)}: expected [batch, blocks]")
    shape = (chunks.query_near.shape[0], blocks.first.shape[1])
    _check_tensor("first", blocks.first, torch.int32, shape)
    _check_tensor("place", blocks.place, torch.int32, shape)
    _check_devices([chunks.query_near, tiles, blocks.first, blocks.place])


def _check_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise ValueError where a tensor is not contiguous, of another dtype or of another shape."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}: expected contiguous {dtype} "
            f"{shape}"
        )


def _check_devices(tensors: list[torch.Tensor]) -> None:
    """Raise ValueError where tensors are on several devices."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"tensors on {', '.join(sorted(map(str, devices)))}: expected one device")
