"""What is known of a chunk of a stream of Ltri-LLM in one layer, whoever computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_ext.attention.ltri_memory import LayerHost, LayerMemory, SpansT
from sglang_ext.attention.policy import Caches
from sglang_ext.policies.ltri_options import Ltri

Indices: TypeAlias = NDArray[np.signedinteger[Any]]
TokensT = TypeVar("TokensT", torch.Tensor, Indices)


@dataclass(frozen=True)
class Voter:
    """What votes in a layer, and whose queries and keys are compared.

    Attributes:
        weight: of its vote.
        head: number of the retrieval head on its rank; None for all heads, whose products are summed.
        here: whether the retrieval head is on this rank; where it is not, this rank has no component of what is
            compared (`policies.ltri_similarity`).
    """

    weight: float = 1.0
    head: int | None = None
    here: bool = True

    @classmethod
    def of_rank(cls, weight: float, head: int, first: int, heads: int) -> Voter:
        """On a rank with the query heads [first, first + heads) of a layer, where head number `head` votes."""
        return cls(weight, head % heads, first <= head < first + heads)

    def dim(self, heads: int, head_dim: int) -> int:
        """Components of what is compared, in a layer of so many query heads."""
        return head_dim * (heads if self.head is None else 1)

    def of_queries(self, query: torch.Tensor) -> torch.Tensor:
        """[tokens, dim] of the voting head, or [tokens, heads * dim], from queries [tokens, heads, dim].

        [tokens, 0] where the voting head is on another rank.
        """
        if not self.here:
            return query[:, :0].flatten(1)
        return query.flatten(1) if self.head is None else query[:, self.head]

    def of_keys(self, keys: torch.Tensor, heads: int) -> torch.Tensor:
        """Likewise, from keys [tokens, kv_heads, dim] of so many query heads."""
        if not self.here:
            return keys[:, :0].flatten(1)
        group = heads // keys.shape[1]
        return keys.repeat_interleave(group, 1).flatten(1) if self.head is None else keys[:, self.head // group]

    def of_slots(self, keys: torch.Tensor, slots: torch.Tensor, heads: int) -> torch.Tensor:
        """Likewise, of those keys of a KV cache that lie in slots [tokens]."""
        return self.of_keys(keys[slots], heads) if self.head is None else self.of_keys(keys, heads)[slots]


Voters: TypeAlias = Mapping[int, Voter | None]
"""Layer -> what votes in it; None where nothing does."""


def cells_of(settings: Ltri, tokens: torch.Tensor, behind_sinks: bool = False) -> torch.Tensor:
    """The cells of tokens: index, among the stream's KV slots, of the slot that holds each until it leaves the window.

    Args:
        settings: of the method.
        tokens: [n] int64, any device.
        behind_sinks: whether none of them is a sink.

    Returns:
        [n] int64, likewise.
    """
    cells = _in_ring(settings, tokens)
    return cells if behind_sinks else torch.where(tokens < settings.sinks, tokens, cells)


def cells_between(settings: Ltri, begin: int, end: int) -> Indices:
    """`cells_of` the tokens [begin, end), [end - begin] int64."""
    behind = max(begin, settings.sinks)
    ring = _in_ring(settings, np.arange(behind, max(behind, end)))
    return ring if begin == behind else np.concatenate([np.arange(begin, min(end, behind)), ring])


def _in_ring(settings: Ltri, tokens: TokensT) -> TokensT:
    """The cells of tokens behind the sinks."""
    return settings.sinks + (tokens - settings.sinks) % (settings.slots - settings.sinks)


@dataclass(frozen=True)
class LayerTokens(Generic[SpansT]):
    """Tokens [begin, end) of a stream in one layer.

    Attributes:
        settings: of the method.
        memory: of the layer.
        host: what the stream has on the host.
        caches: of the layer; written at `slots` only.
        slots: [slots of a stream] the stream's KV slots.
        voter: what votes in the layer; None where nothing does.
        heads: query heads of the layer, on this rank.
        begin, end: numbers of its tokens.
        answers: whether the chunk is one token of an answer.
        ending: whether its tokens are all among the last ones of a prompt (`Ltri.ending`), or belong to an answer.
        given: numbers of the blocks that the request names.
        kept: whether other streams may begin like this one up to `begin`, so that a snapshot may be kept there.
    """

    settings: Ltri
    memory: LayerMemory[SpansT]
    host: LayerHost
    caches: Caches
    slots: torch.Tensor
    voter: Voter | None
    heads: int
    begin: int
    end: int
    answers: bool
    ending: bool
    given: Sequence[int]
    kept: bool

    @property
    def tokens_ask(self) -> bool:
        """Whether the last of the tokens are compared with what is remembered, and not the spans of the chunk."""
        return self.ending and self.settings.tokens_ask
