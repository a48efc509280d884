"""What one forward pass is: the batch as the host knows it, and what a reader is told in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from sglang_ext.attention.policy import Carry, Request
from sglang_ext.names import Req

LoadedT = TypeVar("LoadedT")
"""What a reader made of a batch, on the device, for its layers."""


@dataclass(frozen=True)
class BatchRows:
    """The new rows of one request in a batch: columns [begin, end), query rows from `first`.

    Attributes:
        request: whose rows they are.
        req: SGLang's own request, to be read through `sglang_ext.compat` only.
        first: number of the first query row in the batch.
        begin, end: columns.
    """

    request: Request
    req: Req
    first: int
    begin: int
    end: int


@dataclass(frozen=True)
class Batch:
    """The requests of one forward pass, known when SGLang builds a ForwardBatch.

    Attributes:
        rows: those of each request, one after the other.
        decode: whether every request decodes one token; a prompt's rows may be a single one, too.
    """

    rows: tuple[BatchRows, ...]
    decode: bool

    @property
    def total(self) -> int:
        """Query rows of the batch; a CUDA graph may have more, which are padding."""
        return self.rows[-1].first + self.rows[-1].end - self.rows[-1].begin


@dataclass(frozen=True)
class Forward:
    """What SGLang tells of a pass right before its layers run. A CUDA graph may have more rows than the batch.

    Attributes:
        positions: [rows, padding included] int64, at which the new tokens are written.
        seq_lens: [requests, padding included] int64, columns of each request, those of this pass included.
        slots: [rows, with or without padding] int64, KV slot of each new token.
    """

    positions: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class LayerCall(Generic[LoadedT]):
    """One layer of one pass.

    Attributes:
        layer: number of the layer.
        query: [rows, heads, head_dim], rotated at the rows' positions.
        new: (keys [rows, kv_heads, head_dim], values [rows, kv_heads, value_dim]) of the pass, for readers that store
            them themselves (`Reader.writes`); None where SGLang's own write has stored them.
        caches: (keys [num_slots, kv_heads, head_dim], values [num_slots, kv_heads, value_dim]) of the layer.
        scale: factor of the logits.
        loaded: what the reader made of the batch (`Reader.before_layers`).
        carry: empty in the first layer; what a layer leaves there the layers after it find.
        out: [rows, heads, value_dim] in the query's dtype, where SGLang wants the answer; None where it takes any
            tensor. A reader may return it, or another tensor, which SGLang copies there.
    """

    layer: int
    query: torch.Tensor
    new: tuple[torch.Tensor, torch.Tensor] | None
    caches: tuple[torch.Tensor, torch.Tensor]
    scale: float
    loaded: LoadedT
    carry: Carry
    out: torch.Tensor | None = None

    def empty(self) -> torch.Tensor:
        """[rows, heads, value_dim] in the query's dtype, to be written."""
        return self.query.new_empty(*self.query.shape[:2], self.caches[1].shape[-1])
