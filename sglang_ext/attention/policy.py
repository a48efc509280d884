"""What a KV-cache policy tells the readers of the attention backend.

A policy answers one question for each request of a forward pass: what do its query rows see? The answer is a list of
(query rows, view). A view may be built before the layers run, or be a function called in each layer with that layer's
queries and caches: that is how views differ per layer and per key-value head, and how token lists are chosen on the
device in the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from sglang_ext.attention.seen import RowRuns
from sglang_ext.kernels.rope import Rope
from sglang_ext.kernels.view_attention import View
from sglang_ext.names import Req
from sglang_ext.types import Options

if TYPE_CHECKING:
    from sglang_ext.cache.budget import KVShape
    from sglang_ext.cache.rows import Row
    from sglang_ext.cache.stitch import NodeHooks

Carry: TypeAlias = dict[str, Any]
"""What layers of one pass leave for the layers after them: empty before the first."""


@dataclass(frozen=True)
class ServedModel:
    """The model of a server.

    Attributes:
        path: its folder, its file, or its name at Hugging Face.
        layers: with attention.
        heads: query heads of each of them, on one rank.
        kv_heads: key-value heads of each of them, on all ranks together.
        loaded: whether its weights are those at `path`; not where SGLang makes them up (`--load-format dummy`).
        rank: number of this rank, which has the `heads` query heads from number `heads` * `rank` on.
        head_dim: components of a key.
    """

    path: str
    layers: int
    heads: int
    kv_heads: int
    loaded: bool
    rank: int = 0
    head_dim: int = 128


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
        out: [rows, heads, value_dim] in the query's dtype, which may be written and returned as the answer, so that
            nobody has to copy it there; None where any memory is as good.
    """

    layer: int
    keys: torch.Tensor
    values: torch.Tensor
    slot_pos: torch.Tensor
    rope: Rope
    scale: float
    carry: Carry = field(default_factory=dict)
    out: torch.Tensor | None = None


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
        as_written: whether answers over pools may see blocks where these were written (`cache.rows.Row.follows`).
        least_chunk: tokens of a prompt that a pass must have room for.
        captured: whether kernels that serve it decode inside CUDA graphs.
    """

    request_options: frozenset[str] = frozenset()
    as_written: bool = False

    def pass_tokens(self, kernels: bool) -> int | None:
        """Tokens of prompts that one pass had best compute, in kernels or plain PyTorch; None for SGLang's choice."""
        return None

    @property
    def least_chunk(self) -> int:
        return 1

    @property
    def captured(self) -> bool:
        return True

    def spread(self, ranks: int) -> None:
        """Each of so many tensor-parallel ranks has a policy of its own, and some of the model's heads.

        What a policy decides must follow from what all ranks know, or concern heads of one rank alone. Where
        ranks ask each other, all of them do so at the same moment and with tensors of the same shapes.

        Raises:
            ValueError: the policy's settings do not allow that; says what to change.
        """

    def draft(self, tokens: int) -> None:
        """Decoding steps draft tokens, and `tokens` rows a request are verified at once (`sglang_ext.drafting`).

        Called once, before the first pass, of systems that declare it (`System.drafts`).

        Raises:
            ValueError: the policy's settings do not allow that; says what to change.
        """

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

    def bind(self, caches: Callable[[], Mapping[int, tuple[torch.Tensor, torch.Tensor]]], dtype: torch.dtype) -> None:
        """The KV cache, for policies that read it between passes; readers in plain PyTorch call it, before the first.

        Args:
            caches: gives (keys [num_slots, kv_heads, head_dim], values [num_slots, kv_heads, value_dim]) by layer.
            dtype: of the model's queries, and of keys and values unless these are in float8.
        """

    def meet(self, model: ServedModel) -> None:
        """The model whose requests will come; readers of streams call it, before the first pass.

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
