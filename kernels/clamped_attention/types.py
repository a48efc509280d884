"""The queries of a chunk, and the keys that they see near by, at the beginning, and far away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ChunkQuery:
    """The queries of consecutive tokens of a stream.

    Attributes:
        near: [rows, heads, head_dim], rotated as `SeenKeys.near`: a product has the angle of the true distance.
        far: [rows, heads, head_dim], rotated by the largest distance.
        begin: number of the first row's token.
    """

    near: torch.Tensor
    far: torch.Tensor
    begin: int


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """The keys and values of consecutive tokens, each near by or far away, as seen from a row.

    Attributes:
        near: [tokens, kv_heads, head_dim], rotated.
        far: [tokens, kv_heads, head_dim], not rotated.
        values: [tokens, kv_heads, value_dim].
        first: number of the first token.
    """

    near: torch.Tensor
    far: torch.Tensor
    values: torch.Tensor
    first: int


@dataclass(frozen=True, slots=True)
class FarKeys:
    """Keys and values that rows see at the largest distance.

    Attributes:
        keys: [tokens, kv_heads, head_dim], not rotated.
        values: [tokens, kv_heads, value_dim].
        late: how many of the last tokens only the later rows see: the last row sees them all, and each row one less
            than the row behind it. They are at least as many as the rows, or none. All rows see the other tokens.
    """

    keys: torch.Tensor
    values: torch.Tensor
    late: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """Attention over some of the tokens that rows see.

    Attributes:
        out: [rows, heads, value_dim].
        lse: [rows, heads] natural log-sum-exp of the logits, float32 or wider; of any strides.
    """

    out: torch.Tensor
    lse: torch.Tensor


def check_window(query: ChunkQuery, window: SeenKeys, width: int) -> None:
    """Raise ValueError where shapes, dtypes, devices or places do not fit `attend_window`."""
    _check(query, width, ("window", window.near, window.far, window.values))
    rows, end = query.near.shape[0], window.first + window.near.shape[0]
    if window.first > query.begin or end != query.begin + rows:
        raise ValueError(
            f"a window of the tokens [{window.first}, {end}) for rows [{query.begin}, {query.begin + rows}): expected"
            " one that begins at or before the rows and ends with them"
        )


def check_beyond(query: ChunkQuery, sinks: SeenKeys, memory: FarKeys, width: int) -> None:
    """Raise ValueError where shapes, dtypes, devices or places do not fit `attend_beyond`."""
    _check(
        query,
        width,
        ("sinks", sinks.near, sinks.far, sinks.values),
        ("memory", memory.keys, memory.keys, memory.values),
    )
    end = sinks.first + sinks.near.shape[0]
    if end > query.begin:
        raise ValueError(f"sinks end at token {end}, and rows begin at {query.begin}: expected them before the rows")
    rows, tokens = query.near.shape[0], memory.keys.shape[0]
    if memory.late and not rows <= memory.late <= tokens:
        raise ValueError(f"late={memory.late}: expected 0, or {rows} (rows) to {tokens} (tokens of the memory)")
    if sinks.near.shape[0] + tokens == 0:
        raise ValueError("neither sinks nor memory have a token: expected one; take the window's attention alone")


def _check(query: ChunkQuery, width: int, *named: tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """Raise ValueError where the queries do not go with (name, near keys, far keys, values)."""
    _, heads, dim = query.near.shape
    if query.far.shape != query.near.shape:
        raise ValueError(f"far queries {tuple(query.far.shape)}: expected {tuple(query.near.shape)}, as the near ones")
    for name, near, far, values in named:
        kv_heads = near.shape[1]
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(f"{name}: {heads} query heads over {kv_heads} key-value heads: expected a multiple")
        shape = (values.shape[0], kv_heads, dim)
        if near.shape != shape or far.shape != shape or values.shape[:2] != shape[:2]:
            raise ValueError(
                f"{name}: keys {tuple(near.shape)} and {tuple(far.shape)}, values {tuple(values.shape)}: expected"
                f" {shape} twice and as many values"
            )
    tensors = [query.near, query.far, *(tensor for _, *each in named for tensor in each)]
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(kinds) > 1:
        raise ValueError(f"tensors of {', '.join(sorted(map(str, kinds)))}: expected one dtype on one device")
    if width < 1:
        raise ValueError(f"width={width}: expected at least 1")


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Keys and values of several layers, a row each: tokens, or whole blocks. Layers differ in where these lie alone.

    Attributes:
        pairs: (keys [n, ...], values [n, ...]) of each layer; what belongs to one row is contiguous.
        addresses: [layers, 2] int64, on their device: where keys and values begin.
        aligned: whether all of these are multiples of 16 bytes, which a GPU reads at a time.
    """

    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    addresses: torch.Tensor
    aligned: bool

    @classmethod
    def of(cls, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> LayerRows:
        """Those of some layers.

        Raises:
            ValueError: their dtypes, devices, sizes of rows or strides differ.
        """
        kinds = {tuple((each.dtype, each.device, each.shape[1:], each.stride()) for each in pair) for pair in pairs}
        if len(kinds) != 1:
            raise ValueError(
                f"keys and values of {len(pairs)} layers come in {len(kinds)} kinds: expected one dtype, device, size"
                " of a row, and strides; move those of each kind apart"
            )
        addresses = torch.tensor([[each.data_ptr() for each in pair] for pair in pairs], dtype=torch.int64)
        return cls(pairs, addresses.to(pairs[0][0].device), not bool((addresses % 16).any()))


def check_parts(one: Part, other: Part, dtype: torch.dtype, out: torch.Tensor | None) -> None:
    """Raise ValueError where two parts do not fit each other, or not what they are merged into."""
    if out is not None and (out.shape != one.out.shape or out.dtype != dtype or not out.is_contiguous()):
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)}, strides {out.stride()}: expected {dtype} {tuple(one.out.shape)},"
            " contiguous"
        )
    shapes = [part.out.shape for part in (one, other)]
    whole = all(part.out.shape[:2] == part.lse.shape for part in (one, other))
    if not whole or shapes[0][1:] != shapes[1][1:] or shapes[0][0] < shapes[1][0]:
        raise ValueError(
            f"parts {tuple(shapes[0])} and {tuple(shapes[1])}, log-sum-exps {tuple(one.lse.shape)} and"
            f" {tuple(other.lse.shape)}: expected as many heads and components, a log-sum-exp for each row of a head,"
            " and no more rows in the second"
        )


def check_layers(source: LayerRows, target: LayerRows) -> None:
    """Raise ValueError where two have different numbers of layers."""
    if len(source.pairs) != len(target.pairs):
        raise ValueError(
            f"rows of {len(source.pairs)} layers into {len(target.pairs)}: expected as many of the target as of the"
            " source; name the same layers in both"
        )
