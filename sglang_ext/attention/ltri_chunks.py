"""What computes the chunks of streams of Ltri-LLM: plain PyTorch, and what kernels must do as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from sglang_ext.attention.ltri_chunk import Chunk
from sglang_ext.attention.ltri_layer import LayerTokens
from sglang_ext.attention.ltri_memory import LayerMemory, TorchMemory
from sglang_ext.cache.host_blocks import HostBlocks, HostLease
from sglang_ext.policies.ltri import ONE_RANK, TensorRanks
from sglang_ext.policies.ltri_options import Ltri

AnyMemory: TypeAlias = LayerMemory[Any]
"""Of whoever computes the chunks: plain PyTorch or kernels."""
Votes: TypeAlias = dict[int, torch.Tensor]
"""First token of a chunk -> votes for blocks, of the layers before."""
KVCaches: TypeAlias = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
"""Layer -> (keys, values)."""


@dataclass(frozen=True)
class Beginning:
    """What a new stream copies from another one (the source) to begin with. All tensors lie on the KV cache's device.

    Attributes:
        like: the source's blocks on the host.
        lease: the new stream's blocks on the host.
        layers: layer -> what it remembers of the tokens that the new stream begins with.
        tokens: how many tokens the new stream begins with.
        slots: [slots of a stream] int32, the new stream's KV slots.
        source: [n] int64, KV slots of the source, with the tokens to copy that it still has in its slots.
        target: [n] int64, KV slots of the new stream, to which these are copied.
        blocks: numbers on the host of the source's blocks that hold the other tokens to copy.
        block_target: [tokens of `blocks`] int64, KV slots of the new stream, to which these are copied.
    """

    like: HostLease
    lease: HostLease
    layers: Mapping[int, AnyMemory]
    tokens: int
    slots: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    blocks: Sequence[int]
    block_target: torch.Tensor


class Chunks(Protocol):
    """What computes chunks: `TorchChunks`, or `ltri_stores.KernelChunks`.

    Attributes:
        most_blocks: of a stream that may leave its window; None for any number.
    """

    @property
    def most_blocks(self) -> int | None: ...

    def memory(self) -> AnyMemory:
        """The memory of one layer of a stream that has no token yet."""

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
            [tokens, heads, value_dim], which may be `Caches.out`, or memory that the next call writes to.
        """

    def retrieved(self, memory: AnyMemory) -> list[int]:
        """The blocks that the last chunk of a prompt got back; may wait for the device."""

    def wait_for_passes(self) -> None:
        """What is launched from here on finds what all passes so far have written, on whichever CUDA stream."""

    def begin(self, beginning: Beginning) -> None:
        """Have the keys and values that a stream begins with in its slots, in all layers, before its first chunk."""

    def close(self, lease: HostLease) -> None:
        """The stream that has a lease ends."""


@dataclass(frozen=True)
class TorchChunks:
    """Chunks in plain PyTorch.

    Attributes:
        settings: of the method.
        caches: gives the KV cache.
        host: what has left the windows.
        ranks: the tensor-parallel ranks, each of which has some of the heads.
    """

    settings: Ltri
    caches: Callable[[], KVCaches]
    host: HostBlocks
    ranks: TensorRanks = ONE_RANK
    most_blocks: None = None

    def memory(self) -> AnyMemory:
        keys, _ = next(iter(self.caches().values()))
        return TorchMemory.empty(self.settings, keys.device)

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

    def wait_for_passes(self) -> None:
        keys, _ = next(iter(self.caches().values()))
        if keys.is_cuda:
            torch.cuda.synchronize(keys.device)

    def begin(self, beginning: Beginning) -> None:
        for layer, pair in self.caches().items():
            for cache, kept in zip(pair, self.host.read(layer, beginning.blocks), strict=True):
                cache[beginning.target] = cache[beginning.source]
                cache[beginning.block_target] = kept.to(cache.device)

    def close(self, lease: HostLease) -> None:
        """Nothing but the lease is the stream's."""
        return
