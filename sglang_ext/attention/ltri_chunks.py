"""What computes the chunks of streams of Ltri-LLM: plain PyTorch, and what kernels must do as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from sglang_ext.attention.ltri_chunk import Chunk
from sglang_ext.attention.ltri_layer import LayerTokens
from sglang_ext.attention.ltri_memory import LayerHost, LayerMemory, TorchMemory
from sglang_ext.cache.host_blocks import HostLease
from sglang_ext.policies.ltri import ONE_RANK, TensorRanks
from sglang_ext.policies.ltri_options import Ltri

AnyMemory: TypeAlias = LayerMemory[Any]
"""Of whoever computes the chunks: plain PyTorch or kernels."""
Votes: TypeAlias = dict[int, torch.Tensor]
"""First token of a chunk -> votes for blocks, of the layers before."""


class Chunks(Protocol):
    """What computes chunks: `TorchChunks`, or `ltri_stores.KernelChunks`.

    Attributes:
        most_blocks: of a stream that may leave its window; None for any number.
    """

    @property
    def most_blocks(self) -> int | None: ...

    def memory(self) -> AnyMemory:
        """What a layer of a stream remembers that has no token yet."""

    def attend(
        self,
        chunks: Sequence[LayerTokens[Any]],
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        votes: Votes,
    ) -> torch.Tensor:
        """Store the keys and values of consecutive chunks of a stream in one layer, and attend to what each sees.

        Args:
            chunks: all that a pass has of the stream.
            query: [tokens of all chunks, heads, head_dim], not rotated, as the keys.
            keys: [tokens, kv_heads, head_dim].
            values: [tokens, kv_heads, value_dim].
            votes: of the pass.

        Returns:
            [tokens, heads, value_dim].
        """

    def retrieved(self, memory: AnyMemory) -> list[int]:
        """The blocks that the last chunk of a prompt got back; may wait for the device."""

    def stored(self, host: LayerHost, blocks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) [tokens, kv_heads, dim], on the KV cache's device, of blocks that have left a window."""

    def close(self, lease: HostLease) -> None:
        """The stream that has a lease ends."""


@dataclass(frozen=True)
class TorchChunks:
    """Chunks in plain PyTorch.

    Attributes:
        settings: of the method.
        device: of the KV cache.
        ranks: which have the other heads.
    """

    settings: Ltri
    device: torch.device
    ranks: TensorRanks = ONE_RANK
    most_blocks: None = None

    def memory(self) -> AnyMemory:
        return TorchMemory.empty(self.settings, self.device)

    def attend(
        self,
        chunks: Sequence[LayerTokens[Any]],
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        votes: Votes,
    ) -> torch.Tensor:
        out, first = query.new_empty(*query.shape[:2], values.shape[-1]), chunks[0].begin
        for tokens in chunks:
            rows = slice(tokens.begin - first, tokens.end - first)
            out[rows] = Chunk(**vars(tokens), ranks=self.ranks).attend(query[rows], keys[rows], values[rows], votes)
        return out

    def retrieved(self, memory: AnyMemory) -> list[int]:
        return list(memory.blocks) if isinstance(memory, TorchMemory) else []

    def stored(self, host: LayerHost, blocks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return host.get(blocks)

    def close(self, lease: HostLease) -> None:
        """Nothing but the lease is the stream's."""
        return
