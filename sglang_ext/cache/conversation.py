"""What streams leave when their requests end, and what a cache of streams asks the policy that they belong to."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from secrets import compare_digest
from typing import Protocol

import torch

from sglang_ext.cache.forks import Fork, StreamState
from sglang_ext.cache.host_blocks import HostBlocks, HostLease
from sglang_ext.types import JsonObject, Options

NAMESPACE = "_namespace"
"""In `custom_params`, which clients cannot say it in: what keeps equal names of two tenants apart."""


def name_of(options: Options) -> Hashable | None:
    """What tells the conversation that a request names from all others; None for a request that names none."""
    name, space = options.get("conversation"), options.get(NAMESPACE)
    return name if space is None or name is None else (space, name)


@dataclass(eq=False)
class Conversation:
    """What a turn leaves for the next.

    Attributes:
        slots: [n] int32, the stream's KV slots.
        tokens: how many tokens of the stream the next turn finds computed.
        last: the last token of the answer, which the next turn begins with; None when there was no answer.
        options: `custom_params` of the first turn.
        state: the policy's.
        whole: of a stream without a name, all tokens of its prompt and its answer. The last one is among them, although
            its keys and values must not be reused: it was not computed, or once too early. None where there is a name.
        key: SGLang's `extra_key` of the request, which those that go on must share.
        secret: the `conversation_key` of the turns; None for a stream without a name, and where no key is asked for.
    """

    slots: torch.Tensor
    tokens: int
    last: int | None
    options: JsonObject
    state: StreamState
    whole: array[int] | None = None
    key: str | None = None
    secret: str | None = None


def has_key(options: Options, secret: str | None) -> bool:
    """Whether a request with these `custom_params` has the key of a conversation."""
    given = options.get("conversation_key")
    return isinstance(given, str) and secret is not None and compare_digest(given.encode(), secret.encode())


def tokens_before(turn: Conversation | None) -> int:
    """Tokens of a stream that lie before a request's own: none where its prompt has them all."""
    return 0 if turn is None or turn.whole is not None else turn.tokens


def longest_whole(ended: Iterable[Conversation], ids: array[int], most: int, key: str | None) -> Conversation | None:
    """The longest stream without a name that a prompt begins with.

    Args:
        ended: the streams there are.
        ids: the prompt's tokens.
        most: how many of its tokens it may find computed.
        key: SGLang's `extra_key` of its request.
    """
    longest = None
    for kept in ended:
        whole = kept.whole
        if whole is None or kept.key != key or kept.tokens > most or len(whole) > len(ids):
            continue
        longer = longest is None or kept.tokens > longest.tokens
        if longer and ids[kept.tokens] == whole[-1] and ids[: len(whole)] == whole:  # most differ in the last
            longest = kept
    return longest


class StreamStates(Protocol):
    """What a cache of streams asks the policy whose streams they are; `attention.stream_policy` says more."""

    request_options: frozenset[str]
    of_tokens: bool
    forks: bool
    host: HostBlocks | None
    ranks: int

    def state_of(self, slot: int) -> StreamState:
        """The state of the request that runs in `slot`; None before its first pass."""

    def fork_point(self, state: StreamState, tokens: int, prompt: int) -> int:
        """How many of a stream's first `tokens` tokens a request with a prompt of so many can copy; 0 where none."""

    def fork(self, slot: int, fork: Fork, slots: torch.Tensor) -> None:
        """The request that is about to start in `slot`, with KV slots `slots`, begins as a copy."""

    def host_tokens(self) -> int:
        """Tokens of the longest stream for which `host` has room."""

    def host_need(self, tokens: int) -> int:
        """Blocks of `host` that a stream of so many tokens holds."""

    def host_lease(self, state: StreamState) -> HostLease:
        """What a state of `park` holds of `host`."""

    def host_reserve(self, slot: int, blocks: int) -> None:
        """The request that is about to start in `slot` may take so many blocks of `host` more than it holds."""

    def slots(self, options: Options, tokens: int) -> int:
        """KV slots that a stream of up to so many tokens needs."""

    def cut(self, options: Options, begin: int, end: int, prompt: int) -> int:
        """Where a chunk of a prompt that may end anywhere in (begin, end] is to end; `begin` where it must wait."""

    def park(self, slot: int) -> StreamState:
        """Hand over the state of the request in `slot`, which ends."""

    def resume(self, slot: int, state: StreamState, tokens: int) -> None:
        """The request that is about to start in `slot` goes on from a state of `park`."""

    def drop(self, state: StreamState) -> None:
        """Nobody will go on from a state of `park`."""

    def stats(self) -> Mapping[str, int]:
        """Counters."""
