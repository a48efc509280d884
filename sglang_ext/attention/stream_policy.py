"""What a policy tells the attention backend whose requests are streams: each keeps a bounded set of KV slots."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from sglang_ext.attention.policy import Caches, Policy, Request, ServedModel
from sglang_ext.config import CONVERSATION_OPTIONS
from sglang_ext.types import Options

if TYPE_CHECKING:
    from sglang_ext.cache.forks import Fork, StreamState
    from sglang_ext.cache.host_blocks import HostBlocks, HostLease

CONVERSATION_KEY_BYTES = 32  # random ones; base64 spells them in 43 characters
_CONVERSATION_KEY = re.compile(r"[A-Za-z0-9_-]{43}")


class StreamPolicy(Policy):
    """Base class: every request is a stream, which keeps a bounded set of KV slots however long it grows.

    - `slots` says how many. They are reserved when a request is first scheduled and freed when it ends; admission
      counts them, not tokens, and no slot is allotted in between. So a prompt may be longer than the KV pool, and
      nothing is ever retracted for want of memory.
    - `positions` stay below that number, and so below the model's context: a prompt may be longer than that, too.
    - `attend` writes keys and values itself, to cells (slot, key-value head): heads may keep different tokens.
    - There are no pools, and streams share no slots. A prompt may go on from an ended stream (`of_tokens`), or begin as
      a copy of another one's beginning (`forks`).

    `views`, `runs` and `node_hooks` are not asked. Columns of a pass are tokens of the stream here.
    Wherever a prompt is cut into chunks, its answer must be the same. A stream may outlive its request: a
    *conversation* is a stream that the next request, its next turn, goes on from.

    Attributes:
        of_tokens: whether what is kept of a stream follows from its tokens alone, and not from where prompts ended in
            it. Then a prompt that begins with all tokens of a stream that ended goes on from it.
        forks: whether a stream may begin as a copy of another one's beginning (`fork_point`, `fork`).
        host: the host memory that streams share; None where they keep nothing there, or not in blocks. Of several
            tensor-parallel ranks, each has some of the heads of every block.
        ranks: how many tensor-parallel ranks there are.
    """

    request_options = CONVERSATION_OPTIONS
    of_tokens: bool = True
    forks: bool = False
    host: HostBlocks | None = None
    ranks: int = 1

    def spread(self, ranks: int) -> None:
        """A policy of which each head decides for itself, or whose ranks ask each other, sets `ranks` instead."""
        if ranks > 1:
            raise ValueError(
                f"tp_size={ranks}: what comes back for a request depends on heads of all ranks, which ask each other"
                " nothing; set --tp-size 1"
            )

    def meet(self, model: ServedModel) -> None:
        """To be extended: whether the model has a key-value head for each rank."""
        if self.ranks > model.kv_heads:
            raise ValueError(
                f"tp_size={self.ranks} for a model with {model.kv_heads} key-value heads a layer: one head would lie"
                f" on several ranks, each with some of its queries; set --tp-size {model.kv_heads} or less"
            )

    def check(self, options: Options) -> None:
        """Whether the name and key of a conversation, and `continue`, are what they should be; to be extended."""
        name, goes_on = options.get("conversation"), options.get("continue", False)
        key = options.get("conversation_key")
        if name is not None and not (isinstance(name, str) and 1 <= len(name) <= 128):
            raise ValueError(f"custom_params: conversation={name!r}: expected a name of 1 to 128 characters")
        if not isinstance(goes_on, bool) or (goes_on and name is None):
            raise ValueError(
                f"custom_params: continue={goes_on!r} with conversation={name!r}: expected true or false, and the name"
                " of a conversation that a request has begun"
            )
        if key is not None and (name is None or not (isinstance(key, str) and _CONVERSATION_KEY.fullmatch(key))):
            raise ValueError(
                "custom_params: conversation_key is not one: expected the text that the first turn's answer has in"
                ' meta_info["sglang_ext"], beside the name of its conversation'
            )

    def park(self, slot: int) -> StreamState:
        """Hand over the state of the request in `slot`, which ends; `finish` finds none then."""
        raise NotImplementedError

    def resume(self, slot: int, state: StreamState, tokens: int) -> None:
        """The request that is about to start in `slot` goes on from a state of `park`.

        Its columns follow the first `tokens` tokens of the stream. The step that overlap scheduling runs past the end
        of an answer may have computed one token more: the same that now comes first.
        """
        raise NotImplementedError

    def drop(self, state: StreamState) -> None:
        """Nobody will go on from a state of `park`."""

    def slots(self, options: Options, tokens: int) -> int:
        """KV slots that a request with these `custom_params` ever needs, at most `tokens` tokens long."""
        raise NotImplementedError

    # ---- forks: of policies that have them ----

    def state_of(self, slot: int) -> StreamState:
        """The state of the request that runs in `slot`; None before its first pass."""
        raise NotImplementedError

    def fork_point(self, state: StreamState, tokens: int, prompt: int) -> int:
        """How many of a stream's first `tokens` tokens another stream can copy, no fewer of more; 0 where none.

        Args:
            state: of a stream that runs, or of `park`.
            tokens: with which the other one's prompt begins, too.
            prompt: tokens of the other one's prompt.
        """
        raise NotImplementedError

    def fork(self, slot: int, fork: Fork, slots: torch.Tensor) -> None:
        """The request that is about to start in `slot` begins as a copy, and its first column is `fork.tokens`.

        Args:
            slot: its number in SGLang's request pool.
            fork: what it copies.
            slots: [n] int32, its own KV slots, to be written.
        """
        raise NotImplementedError

    # ---- host memory: of policies that have some ----

    def host_tokens(self) -> int:
        """Tokens of the longest stream for which `host` has room."""
        raise NotImplementedError

    def host_need(self, tokens: int) -> int:
        """Blocks of `host` that a stream of so many tokens holds."""
        raise NotImplementedError

    def host_lease(self, state: StreamState) -> HostLease:
        """What a state of `park` holds of `host`."""
        raise NotImplementedError

    def host_reserve(self, slot: int, blocks: int) -> None:
        """The request that is about to start in `slot` may take so many blocks of `host` more than it holds."""
        raise NotImplementedError

    # ---- a prompt ----

    def cut(self, options: Options, begin: int, end: int, prompt: int) -> int:
        """Where a chunk of a prompt that may end anywhere in (begin, end] is to end.

        Args:
            options: `custom_params` of the request.
            begin, end: tokens of the stream.
            prompt: number of the stream's tokens up to the end of the request's prompt.

        Returns:
            A place in (begin, end]; `begin` where the chunk must wait for a pass with more room.
        """
        return end

    def attend(
        self,
        request: Request,
        caches: Caches,
        slots: torch.Tensor,
        begin: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Store the tokens [begin, begin + rows) of a stream in one layer, and attend to what it keeps.

        Called for every layer of every pass, each token once and in order; under overlap scheduling also for one token
        past the end of the answer.

        Args:
            request: the stream.
            caches: of the layer; to be written at `slots` only. `slot_pos` is empty: cells of one slot are written at
                different positions.
            slots: [slots(...)] integer, the request's KV slots.
            begin: number of the first token.
            query: [rows, heads, head_dim], rotated at `positions`.
            keys: [rows, kv_heads, head_dim], likewise.
            values: [rows, kv_heads, value_dim].

        Returns:
            [rows, heads, value_dim] in query's dtype: `caches.out`, or memory that the next call may write to.
        """
        raise NotImplementedError
