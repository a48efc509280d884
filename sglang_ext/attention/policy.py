"""What a KV-cache policy tells the readers of the attention backend.

A policy answers one question for each request of a forward pass: what do its query rows see? The answer is a list of
(query rows, view). A view may be built before the layers run, or be a function called in each layer with that layer's
queries and caches: that is how views differ per layer and per key-value head, and how token lists are chosen on the
device in the step itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from sglang_ext.attention.seen import RowRuns
from sglang_ext.config import CONVERSATION_OPTIONS
from sglang_ext.kernels.rope import Rope
from sglang_ext.kernels.view_attention import View
from sglang_ext.names import Req
from sglang_ext.types import Options

if TYPE_CHECKING:
    from sglang_ext.cache.budget import KVShape
    from sglang_ext.cache.forks import Fork, StreamState
    from sglang_ext.cache.host_blocks import HostBlocks, HostLease
    from sglang_ext.cache.rows import Row
    from sglang_ext.cache.stitch import NodeHooks

CONVERSATION_KEY_BYTES = 32  # random ones; base64 spells them in 43 characters
_CONVERSATION_KEY = re.compile(r"[A-Za-z0-9_-]{43}")

Carry: TypeAlias = dict[str, Any]
"""What layers of one pass leave for the layers after them: empty before the first."""


@dataclass(frozen=True)
class ServedModel:
    """The model of a server.

    Attributes:
        path: its folder, its file, or its name at Hugging Face.
        layers: with attention.
        heads: query heads of each of them.
        loaded: whether its weights are those at `path`; not where SGLang makes them up (`--load-format dummy`).
    """

    path: str
    layers: int
    heads: int
    loaded: bool


@dataclass(frozen=True)
class Caches:
    """One layer's KV cache and what is needed to read it.

    Attributes:
        layer: index of the layer.
        keys, values: [num_slots, kv_heads, head_dim or value_dim]; keys are rotated at `slot_pos`.
        slot_pos: [num_slots] int32, the position each slot was written at.
        rope: the model's rotation.
        scale: factor of the logits.
        carry: what earlier layers of the pass left, for this one to read and to add to.
    """

    layer: int
    keys: torch.Tensor
    values: torch.Tensor
    slot_pos: torch.Tensor
    rope: Rope
    scale: float
    carry: Carry = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """One request, for as long as it has a row of KV slots.

    Attributes:
        slot: its number in SGLang's request pool; used again by later requests.
        rid: SGLang's name of it.
        row: what its row begins with, or None for a plain request.
        options: its `custom_params`, for policies that take options a request.
        prompt: tokens of its prompt, without those that it has answered.
        written: position at which the first token of each prefix piece of `row` was written.
    """

    slot: int
    rid: str
    row: Row | None
    options: Options
    written: tuple[int, ...] = ()
    prompt: int = 0


@dataclass(frozen=True)
class RequestRows:
    """One request in one forward pass.

    Attributes:
        request: whose rows they are.
        slots: [seq_len] the request's KV slots in column order, those of this pass included.
        begin: column of the first query row; they are columns [begin, seq_len).
        slot_pos: [num_slots] int32, already holding the positions of this pass.
        decode: whether this is a decoding step; a prompt's rows may be a single one, too.
    """

    request: Request
    slots: torch.Tensor
    begin: int
    slot_pos: torch.Tensor
    decode: bool = False

    @property
    def row(self) -> Row | None:
        return self.request.row

    @property
    def end(self) -> int:
        return self.slots.numel()


@dataclass(frozen=True)
class Attended:
    """A view, and attention over parts that are not tokens of the cache: merged with it, exactly, by log-sum-exp.

    Double-P's summaries enter here: s tokens with mean key C and mean value V count as s * exp(q . C / sqrt(D)) at V.

    Attributes:
        view: disjoint from the parts.
        parts: (output [rows, heads, value_dim], log-sum-exp [rows, heads]) of each part.
    """

    view: View
    parts: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()


LayerView: TypeAlias = Callable[[Caches, torch.Tensor, torch.Tensor], View | Attended]
"""(caches, query [rows, heads, head_dim], query positions [rows]) -> what these rows see in this layer."""


RowViews: TypeAlias = Sequence[tuple[int, int, View | LayerView]]
"""(first column, end column, view) for disjoint runs of query rows that together are [begin, end)."""


class Policy:
    """Base class: a policy that changes nothing.

    Attributes:
        request_options: names in `custom_params` that the policy reads itself (`Request.options`); over a pool they are
            passed on beside the pool's own.
        least_chunk: tokens of a prompt that a pass must have room for.
        captured: whether kernels that serve it decode inside CUDA graphs.
    """

    request_options: frozenset[str] = frozenset()

    def pass_tokens(self, kernels: bool) -> int | None:
        """Tokens of prompts that one pass had best compute, in kernels or plain PyTorch; None for SGLang's choice."""
        return None

    @property
    def least_chunk(self) -> int:
        return 1

    @property
    def captured(self) -> bool:
        return True

    def check(self, options: Options) -> None:
        """Look at a request's `custom_params` before it is sent to the schedulers.

        Raises:
            ValueError: one of `request_options` has a value that the policy does not take; the client gets it as 400.
        """

    def extra_bytes_per_token(self, shape: KVShape, kernels: bool) -> int:
        """Bytes a token that the policy keeps beside keys and values, from `cache.budget`.

        SGLang's memory budget counts them at start.

        Args:
            shape: the KV cache of one rank.
            kernels: whether kernels read what the policy keeps, and not plain PyTorch.
        """
        return 0

    def bind(self, caches: Callable[[], Mapping[int, tuple[torch.Tensor, torch.Tensor]]]) -> None:
        """The KV cache, for policies that read it between passes; readers in plain PyTorch call it, before the first.

        Args:
            caches: gives (keys [num_slots, kv_heads, head_dim], values [num_slots, kv_heads, value_dim]) by layer.
        """

    def meet(self, model: ServedModel) -> None:
        """The model whose requests will come; readers in plain PyTorch call it, before the first pass.

        Raises:
            ValueError: what the policy was told does not go with it.
        """

    def stats(self) -> Mapping[str, int]:
        """Counters, for /server_info and /metrics."""
        return {}

    def node_hooks(self) -> Sequence[NodeHooks]:
        """What follows the nodes of the radix tree through their lives: insert, split, evict."""
        return ()

    def start(self, request: Request) -> None:
        """A request gets its row of slots; after a retraction, once more and from nothing."""

    def finish(self, request: Request) -> None:
        """A request loses its row of slots: it ended, was aborted or retracted."""

    def before_pass(self, request: Request, req: Req, begin: int, end: int, decode: bool) -> None:
        """Columns [begin, end) of a request are about to be computed. Runs when SGLang builds a ForwardBatch.

        `readers.planned` and `readers.cells` do not call it: they know what they need from `runs`, or keep it.

        Args:
            request: the request.
            req: SGLang's own, to be read through `sglang_ext.compat` only.
            begin, end: columns of the pass.
            decode: whether it is a decoding step.
        """

    def positions(self, request: Request, begin: int, end: int) -> list[int] | None:
        """Positions at which columns [begin, end) are written, or None where they are the column numbers."""
        return None

    def runs(self, request: Request, begin: int, end: int) -> Sequence[RowRuns] | None:
        """What the query rows at columns [begin, end) see, from host data alone; None for plain causal attention.

        A policy that says so for every request can be served by kernels that plan on the host, read runs of equal keys
        once for the whole batch and stay inside CUDA graphs (`attention.readers.planned`).
        """
        raise NotImplementedError

    def views(self, rows: RequestRows) -> RowViews | None:
        """What the query rows see, or None for SGLang's own dense causal attention."""
        return None


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
        host: the host memory that streams share; None where they keep nothing there, or not in blocks.
    """

    request_options = CONVERSATION_OPTIONS
    of_tokens: bool = True
    forks: bool = False
    host: HostBlocks | None = None

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
        """How many of a stream's first `tokens` tokens another stream can copy; 0 where none.

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
            [rows, heads, value_dim] in query's dtype.
        """
        raise NotImplementedError
