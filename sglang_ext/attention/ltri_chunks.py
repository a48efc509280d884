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
from sglang_ext.policies.ltri_options import Ltri

AnyMemory: TypeAlias = LayerMemory[Any]
"""Of whoever computes the chunks: plain PyTorch or kernels."""
Votes: TypeAlias = dict[int, torch.Tensor]
"""First token of a chunk -> votes for blocks, of the layers before."""


class LayerChunk(Protocol):
    """One chunk in one layer, in plain PyTorch (`ltri_chunk.Chunk`) or in kernels (`ltri_kernels.KernelChunk`)."""

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, votes: Votes) -> torch.Tensor:
        """Store the chunk's keys and values, and attend to what it sees."""


class Chunks(Protocol):
    """What computes chunks: `TorchChunks`, or `ltri_stores.KernelChunks`.

    Attributes:
        most_blocks: of a stream that may leave its window; None for any number.
    """

    @property
    def most_blocks(self) -> int | None: ...

    def memory(self) -> AnyMemory:
        """What a layer of a stream remembers that has no token yet."""

    def chunk(self, tokens: LayerTokens[Any]) -> LayerChunk:
        """What computes a chunk."""

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
    """

    settings: Ltri
    device: torch.device
    most_blocks: None = None

    def memory(self) -> AnyMemory:
        return TorchMemory.empty(self.settings, self.device)

    def chunk(self, tokens: LayerTokens[Any]) -> LayerChunk:
        return Chunk(**vars(tokens))

    def retrieved(self, memory: AnyMemory) -> list[int]:
        return list(memory.blocks) if isinstance(memory, TorchMemory) else []

    def stored(self, host: LayerHost, blocks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return host.get(blocks)

    def close(self, lease: HostLease) -> None:
        """Nothing but the lease is the stream's."""
        return
