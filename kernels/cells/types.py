"""What decoding over cells is given and works in, whichever kernel runs it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sglang_ext.kernels.cells.lists import check_cells

LOG2_E = math.log2(math.e)

MAX_SPLITS = 128
"""Shares that the columns of a request are cut into, at most."""

COLUMNS = 16
"""Columns that CUDA's kernel sees together, and has the largest logit of."""


def chunks(entries: int) -> int:
    """Chunks of `COLUMNS` columns, the new token in one of its own; `decode.cu` counts alike."""
    return entries // COLUMNS + 2


@dataclass(frozen=True, slots=True)
class NewTokens:
    """One new token of each request, in one layer.

    Attributes:
        query: [batch, heads, head_dim], rotated at the token's column.
        keys: [batch, kv_heads, head_dim], likewise.
        values: [batch, kv_heads, value_dim].
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Cells:
    """One layer's cells, and which of them every lane sees.

    Attributes:
        keys: [slots, kv_heads, head_dim], the layer's cache; keys lie in it as at position 0.
        values: [slots, kv_heads, value_dim], likewise, in the keys' dtype.
        slot: [rows of the state, lanes, entries] int32, the layer's lists (`empty_lists`).
    """

    keys: torch.Tensor
    values: torch.Tensor
    slot: torch.Tensor


@dataclass(frozen=True, slots=True)
class CountedScores:
    """The scores that new tokens' queries are counted in, in one layer.

    Attributes:
        score: [rows of the state, lanes, entries] float32, the layer's in `CascadeState`.
        entries: [batch, entries] int32, as for `list_columns`.
        skip: [batch] integer, first columns whose scores stay as they are (`Rings.settled`).
        fresh: [batch] integer, 1, or 0 for a query that was counted before.
        beta: decay a query.
        reduction: of the query heads that share a score, `mean` or `max`.
    """

    score: torch.Tensor
    entries: torch.Tensor
    skip: torch.Tensor
    fresh: torch.Tensor
    beta: float
    reduction: str = "mean"


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Buffers of `decode`, shared by all layers; allocate once, before a CUDA graph is captured.

    Attributes:
        parts: [batch, heads, splits, value_dim] float32, each share's output.
        part_lse: [batch, heads, splits] float32, its log-sum-exp to base 2.
        logits: [batch, heads, entries] float32, to base 2; empty where no scores are kept. CUDA's kernel keeps them in
            the first half of it, as float16, those of a column's heads side by side.
        tops: [batch, heads, `chunks(entries)`] float32, what CUDA's are below; empty likewise.
        arrived: [batch, kv_heads, 2] int32, zeros before a launch and after it; CUDA's blocks wait by them.
    """

    parts: torch.Tensor
    part_lse: torch.Tensor
    logits: torch.Tensor
    tops: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        kv_heads: int,
        value_dim: int,
        entries: int,
        shares: int,
        device: torch.device,
        scores: bool,
    ) -> DecodeWorkspace:
        """Room for `shares` (`splits`) shares of up to `entries` columns."""
        make = lambda *shape: torch.empty(shape, dtype=torch.float32, device=device)  # noqa: E731
        return cls(
            make(batch, heads, shares, value_dim),
            make(batch, heads, shares),
            make(batch, heads, entries if scores else 0),
            make(batch, heads, chunks(entries) if scores else 0),
            torch.zeros(batch, kv_heads, 2, dtype=torch.int32, device=device),
        )

    def check(self, batch: int, heads: int, value_dim: int, entries: int, scores: bool) -> int:
        """How many shares there is room for.

        Raises:
            ValueError: it was made for something else.
        """
        shares = self.parts.shape[2]
        if self.parts.shape != (batch, heads, shares, value_dim) or (
            scores
            and (self.logits.shape, self.tops.shape) != ((batch, heads, entries), (batch, heads, chunks(entries)))
        ):
            raise ValueError(
                f"workspace {tuple(self.parts.shape)} with logits {tuple(self.logits.shape)}: make it for "
                f"{batch} rows of {heads} heads and {entries} columns with DecodeWorkspace.empty"
            )
        return shares

    def unscored(self, unread: torch.Tensor) -> CountedScores:
        """What kernels are given where nobody keeps scores: they take addresses, and read nothing from there.

        Args:
            unread: any integers, [batch].
        """
        return CountedScores(self.logits, unread, unread, unread, 0.0)


def check_decode(tokens: NewTokens, cells: Cells, rows: torch.Tensor, seen: torch.Tensor) -> None:
    """Raise ValueError where shapes or dtypes do not fit; values on the device are not looked at."""
    query, keys, values = tokens.query, cells.keys, cells.values
    check_cells(cells.slot, keys, values)
    batch, kv_heads, head_dim, value_dim = query.shape[0], keys.shape[1], keys.shape[2], values.shape[2]
    if query.dim() != 3 or query.shape[2] != head_dim or query.shape[1] % kv_heads:
        raise ValueError(
            f"query {tuple(query.shape)}: expected [batch, heads, {head_dim}] with a multiple of {kv_heads} heads"
        )
    if tokens.keys.shape != (batch, kv_heads, head_dim) or tokens.values.shape != (batch, kv_heads, value_dim):
        raise ValueError(
            f"new keys {tuple(tokens.keys.shape)}, new values {tuple(tokens.values.shape)}: expected "
            f"{(batch, kv_heads, head_dim)} and {(batch, kv_heads, value_dim)}"
        )
    if cells.slot.dim() != 3:
        raise ValueError(f"slot {tuple(cells.slot.shape)}: expected one layer's, [rows, lanes, entries]")
    for name, tensor in (("rows", rows), ("seen", seen)):
        if tensor.shape != (batch,) or tensor.is_floating_point():
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}: expected integers, {(batch,)}")


def check_dtypes(tokens: NewTokens, cells: Cells) -> None:
    """Raise ValueError for tokens of another dtype than the caches: kernels convert none."""
    dtype = cells.keys.dtype
    for name, tensor in (
        ("query is", tokens.query), ("new keys are", tokens.keys), ("new values are", tokens.values)
    ):  # fmt: skip
        if tensor.dtype != dtype:
            raise ValueError(f"{name} {tensor.dtype}, the caches {dtype}: expected one type")
