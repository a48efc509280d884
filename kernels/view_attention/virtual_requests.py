"""Virtual requests: what dense prefill kernels take as requests, so that one call serves block-sparse attention.

A virtual request is query rows that follow each other and a list of KV slots, causal or not. A block that is being
encoded is one (the slots of the blocks it attends to, then its own, causal), so that block-sparse encoding is one
batched call without any mask (DBSA, section 2.1). All rows of a batch that see one block are one too: its KV is then
read once for the batch. Outputs over disjoint segments merge by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class VirtualBatch:
    """Some virtual requests. All of it is host data but the slots.

    Attributes:
        rows: query rows of each virtual request, in the order in which the rows stand in the query.
        tokens: KV tokens of each; 0 for rows that see nothing here.
        kv_slots: [sum(tokens)] int32 on the KV cache's device, the slots of all virtual requests one after the other.
        causal: whether the last row of a request sees all its tokens, the row before all but one, and so on.
        scale: factor of the logits.

    Raises:
        ValueError: lengths do not match, or a causal request has more rows than tokens.
    """

    rows: Sequence[int]
    tokens: Sequence[int]
    kv_slots: torch.Tensor
    causal: bool
    scale: float

    def __post_init__(self) -> None:
        rows, tokens = self.rows, self.tokens
        if len(rows) != len(tokens):
            raise ValueError(f"{len(rows)} row counts and {len(tokens)} token counts: expected as many")
        if self.kv_slots.numel() != sum(tokens):
            raise ValueError(f"{self.kv_slots.numel()} KV slots for {sum(tokens)} tokens: expected one each")
        short = [(r, t) for r, t in zip(rows, tokens, strict=True) if self.causal and 0 < t < r]
        if short:
            raise ValueError(
                f"a causal virtual request has {short[0][0]} rows and {short[0][1]} tokens: its own are missing"
            )

    def check_query(self, query: torch.Tensor) -> None:
        """Raise ValueError for a query [rows, ...] of another number of rows than planned."""
        if query.shape[0] != sum(self.rows):
            raise ValueError(f"{query.shape[0]} query rows, {sum(self.rows)} were planned: plan again")


class VirtualRequests(Protocol):
    """A dense prefill kernel; `plan` once for a batch, `run` in every layer."""

    def plan(self, batch: VirtualBatch) -> None:
        """Fix the batch; nothing waits for the GPU."""

    def run(
        self, query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one layer over the planned virtual requests.

        Args:
            query: [rows, heads, head_dim] float16 or bfloat16 on the caches' CUDA device, rotated to where each virtual
                request's keys were written.
            key_cache: [num_slots, kv_heads, head_dim], likewise.
            value_cache: [num_slots, kv_heads, value_dim], likewise.
            out: [rows, heads, value_dim] to write to; made here when None.

        Returns:
            (output [rows, heads, value_dim], natural log-sum-exp [rows, heads] float32, of any strides); zeros and -inf
            for rows that see nothing.

        Raises:
            ValueError: another number of rows than planned, or nothing was planned.
        """
