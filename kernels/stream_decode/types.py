"""What a decoding step of streams of Ltri-LLM is given in one layer, and what it remembers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

LOG2_E = math.log2(math.e)
FIELDS = ("row", "token", "first", "fresh")
"""Rows of `StepNumbers.numbers`."""
MAX_SHARES = 64
"""Shares that the columns of a request are cut into, at most."""


@dataclass(frozen=True, slots=True)
class StreamSizes:
    """Sizes of all streams (`policies.ltri_options.Ltri`).

    Attributes:
        sinks: first tokens, which lie in the first cells.
        cells: KV slots of a stream; those behind the sinks are a ring.
        width: distances below it, in tokens, are true, and any other is width - 1.
        block: tokens of a block.
    """

    sinks: int
    cells: int
    width: int
    block: int

    def cell(self, token: int) -> int:
        """The cell of a token that has not left the window."""
        return token if token < self.sinks else self.sinks + (token - self.sinks) % (self.cells - self.sinks)


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """What the host knows of the streams of a step, on the device.

    Attributes:
        numbers: [4, batch] int32, contiguous: the row that a stream has in all tensors that have rows, -1 for padding;
            the number of its new token; its window's first token; and whether what the newest token added to others is
            to be added to what they received (1), or that has been done, or the new token is computed anew (0).
    """

    numbers: torch.Tensor


@dataclass(frozen=True, slots=True)
class NewToken:
    """One new token of each stream, in one layer. Nothing is rotated.

    Attributes:
        query: [batch, heads, head_dim].
        keys: [batch, kv_heads, head_dim].
        values: [batch, kv_heads, value_dim].
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class StreamCaches:
    """Where the tokens lie that streams see, in one layer. Keys are not rotated.

    Attributes:
        keys: [slots, kv_heads, head_dim], the layer's KV cache.
        values: [slots, kv_heads, value_dim], likewise.
        slot: [rows, cells] int32, the KV slots of the streams' cells; the same in all layers.
        block_keys: [rows, ways, block, kv_heads, head_dim], blocks that came back.
        block_values: [rows, ways, block, kv_heads, value_dim], likewise.
        ways: [rows, most] int32, which of them a stream sees in the layer; -1 for none.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slot: torch.Tensor
    block_keys: torch.Tensor
    block_values: torch.Tensor
    ways: torch.Tensor


@dataclass(frozen=True, slots=True)
class MapState:
    """What is remembered of the attention map of streams, in one layer that votes; contiguous.

    Attributes:
        received: [rows, cells] float32 (as the others, float64 with float64 keys), attention that the token in each
            cell received from all heads of the queries before the newest one.
        last: [rows, cells] float32, what it received from the newest one.
        tile: [rows, heads, block, block] float32, attention of the rows of the newest token's block to its columns.
    """

    received: torch.Tensor
    last: torch.Tensor
    tile: torch.Tensor


@dataclass(frozen=True, slots=True)
class StreamWorkspace:
    """Buffers of `decode`, shared by all layers; allocate once, before a CUDA graph is captured.

    Attributes:
        parts: [batch, heads, shares, value_dim] float32, each share's output.
        part_lse: [batch, heads, shares] float32, its log-sum-exp to base 2.
        logits: [batch, heads, cells] float32 to base 2, of the window's tokens from its first on.
        shares: (of the window, of what lies beyond it).
    """

    parts: torch.Tensor
    part_lse: torch.Tensor
    logits: torch.Tensor
    shares: tuple[int, int]

    @classmethod
    def empty(
        cls, batch: int, heads: int, value_dim: int, cells: int, shares: tuple[int, int], device: torch.device
    ) -> StreamWorkspace:
        """Uninitialised buffers."""
        make = lambda *shape: torch.empty(shape, dtype=torch.float32, device=device)  # noqa: E731
        return cls(
            make(batch, heads, sum(shares), value_dim),
            make(batch, heads, sum(shares)),
            make(batch, heads, cells),
            shares,
        )


def check(
    tokens: NewToken, caches: StreamCaches, step: StepNumbers, sizes: StreamSizes, state: MapState | None
) -> None:
    """Raise ValueError where shapes or dtypes do not fit; values on the device are not looked at."""
    query, keys, values = tokens.query, caches.keys, caches.values
    if keys.dim() != 3 or values.dim() != 3 or keys.shape[:2] != values.shape[:2]:
        raise ValueError(
            f"caches {tuple(keys.shape)} and {tuple(values.shape)}: expected [slots, kv_heads, head_dim] and [slots, "
            "kv_heads, value_dim]"
        )
    kv_heads, dim, value_dim = *keys.shape[1:], values.shape[2]
    if query.dim() != 3 or query.shape[2] != dim or kv_heads == 0 or query.shape[1] % kv_heads:
        raise ValueError(f"query {tuple(query.shape)}: expected [batch, a multiple of {kv_heads} heads, {dim}]")
    batch, rows = query.shape[0], caches.slot.shape[0]
    ways = caches.block_keys.shape[1] if caches.block_keys.dim() == 5 else 0
    shapes = {
        "new keys": (tokens.keys, (batch, kv_heads, dim), keys.dtype),
        "new values": (tokens.values, (batch, kv_heads, value_dim), keys.dtype),
        "query": (query, tuple(query.shape), keys.dtype),
        "values": (values, tuple(values.shape), keys.dtype),
        "slot": (caches.slot, (rows, sizes.cells), torch.int32),
        "block_keys": (caches.block_keys, (rows, ways, sizes.block, kv_heads, dim), keys.dtype),
        "block_values": (caches.block_values, (rows, ways, sizes.block, kv_heads, value_dim), keys.dtype),
        "ways": (caches.ways, (rows, caches.ways.shape[-1]), torch.int32),
        "numbers": (step.numbers, (len(FIELDS), batch), torch.int32),
    }
    if state is not None:
        wide = torch.promote_types(keys.dtype, torch.float32)
        heads = query.shape[1]
        shapes |= {
            "received": (state.received, (rows, sizes.cells), wide),
            "last": (state.last, (rows, sizes.cells), wide),
            "tile": (state.tile, (rows, heads, sizes.block, sizes.block), wide),
        }
    for name, (tensor, shape, dtype) in shapes.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}: expected {dtype} {shape}")
    for name in ("slot", "block_keys", "block_values", "ways", "numbers", "received", "last", "tile"):
        if name in shapes and not shapes[name][0].is_contiguous():
            raise ValueError(f"{name} has strides {shapes[name][0].stride()}: expected contiguous")
    if not 0 <= sizes.sinks < sizes.cells or sizes.width < 1 or sizes.block < 1:
        raise ValueError(f"{sizes}: expected fewer sinks than cells, a width and a block of at least 1")
