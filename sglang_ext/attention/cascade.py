"""The cascading KV cache and StreamingLLM in the engine: every request is a stream with a cascade of its own.

A layer keeps a request's tokens in cells (slot, lane): a lane is a key-value head, or all of them with
`heads: homogeneous`. The first tokens go to the cells 0, 1, 2, ...; later ones to the cells of those that were dropped
(`kernels.cascade_update`). Keys lie there as at position 0: rotated back when they are written, and to the place
where they are seen when they are read.

**When tokens are added.** Strides end at absolute multiples of `stride`, in the prompt and in the answer alike. A
stride is added to the sub-caches when it is complete; until then its tokens are seen besides the cache, causally. The
paper adds the tokens of an answer one at a time. Here an answer does not depend on where the prompt ended, on how it
was cut into chunks, on other requests, or on whether it was computed anew after a retraction; a decoding step sees up
to `stride` - 1 tokens more for it.

**Turns.** A conversation goes on with the last token of the answer. The step that overlap scheduling runs past the end
of an answer may have computed it: then its key and value are written again, to the same cells. That its query was
counted in the scores, and that the stride before it was added, is known layer by layer, and neither is done twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

import torch

from sglang_ext.attention.policy import Caches, Request
from sglang_ext.attention.stream_policy import StreamPolicy
from sglang_ext.cache.budget import KVShape, cascade_bytes_per_token
from sglang_ext.config import policy_options
from sglang_ext.kernels.cascade_update import CascadeState, cascade_update
from sglang_ext.kernels.rope import rotate
from sglang_ext.kernels.score_update import CountedQueries, KeptScores, update_scores
from sglang_ext.policies.options import Cascade, CascadeOptions, StreamingLlmOptions
from sglang_ext.types import Options


@dataclass
class _Layer:
    """What a stream keeps in one layer.

    Attributes:
        state: [1, 1, lanes, entries] of tokens, cells and scores.
        added: tokens that were added to the sub-caches.
        scored: queries that were counted in the scores.
    """

    state: CascadeState
    added: int = 0
    scored: int = 0


@dataclass
class Stream:
    """What one request keeps, on the host.

    Attributes:
        cascade: its settings.
        offset: how many tokens lie before its first column.
    """

    cascade: Cascade
    offset: int = 0

    def resumed(self, tokens: int) -> Stream:
        """The same stream, for a request whose columns follow its first `tokens` tokens."""
        return replace(self, offset=tokens)

    def close(self) -> None:
        """Nobody goes on from it any more."""
        return


@dataclass
class _TorchStream(Stream):
    """Also a state a layer."""

    layers: dict[int, _Layer] = field(default_factory=dict)


class CascadePolicy(StreamPolicy):
    """`--attention-backend cascade`.

    Served by `attend` here, or by the kernels of `attention.readers.cells`, which then keep the streams' states.
    """

    options: type[Cascade] = CascadeOptions
    request_options = StreamPolicy.request_options | {option.name for option in fields(Cascade)}

    def pass_tokens(self, kernels: bool) -> int | None:
        """A stride: what it sees is prepared for all layers at once then."""
        return self.config.stride

    def __init__(self) -> None:
        self.config = policy_options(self.options)
        self._streams: dict[int, Stream] = {}
        self._resumed: dict[int, Stream] = {}
        self._caches: Callable[[], Mapping[int, tuple[torch.Tensor, torch.Tensor]]] = dict
        self._elsewhere: Callable[[Cascade], Stream] | None = None

    # ---- options and sizes ----

    def spread(self, ranks: int) -> None:
        self.ranks = ranks
        self._check_ranks(self.config, "--policy")

    def _check_ranks(self, cascade: Cascade, where: str) -> None:
        if self.ranks > 1 and cascade.decides_together:
            raise ValueError(
                f"{where}: heads=homogeneous with tp_size={self.ranks}: one decision for all heads needs the scores"
                " of all ranks, which ask each other nothing; set heads to independent, or --tp-size 1"
            )

    def check(self, options: Options) -> None:
        super().check(options)
        self._parse(options)

    def _parse(self, options: Options) -> Cascade:
        given = {name: options[name] for name in self.request_options - StreamPolicy.request_options if name in options}
        try:
            cascade = replace(self.config, **given)
        except ValueError as error:
            raise ValueError(f"custom_params: {error} (what is not given is the server's)") from error
        if cascade.slots > self.config.slots:
            raise ValueError(
                f"custom_params: sinks {cascade.sinks} + window {cascade.window} + stride {cascade.stride} ="
                f" {cascade.slots} KV slots; the server reserves at most {self.config.slots} a request: make one of"
                " them smaller, or raise the server's (--policy)"
            )
        self._check_ranks(cascade, "custom_params")
        return cascade

    def extra_bytes_per_token(self, shape: KVShape, kernels: bool) -> int:
        return cascade_bytes_per_token(shape.layers, self.config.lanes(shape.kv_heads), lists=kernels)

    def slots(self, options: Options, tokens: int) -> int:
        """A stream whose state is a row of the kernels' memory takes the server's slots: so there is a row for each."""
        needed = min(self._parse(options).slots, tokens)
        return needed if self._elsewhere is None else self.config.slots

    def cut(self, options: Options, begin: int, end: int, prompt: int) -> int:
        cascade = self._parse(options)
        last = cascade.stride_at(end)
        return last if last > cascade.stride_at(begin) else end

    # ---- requests ----

    def bind(self, caches: Callable[[], Mapping[int, tuple[torch.Tensor, torch.Tensor]]], dtype: torch.dtype) -> None:
        self._caches = caches

    def keep_in(self, begin: Callable[[Cascade], Stream]) -> None:
        """Have kernels keep the streams: `begin` makes one. `attend` serves none of them."""
        self._elsewhere = begin

    def start(self, request: Request) -> None:
        known = self._resumed.pop(request.slot, None)
        begin = self._elsewhere or self._begin
        self._streams[request.slot] = begin(self._parse(request.options)) if known is None else known

    def _begin(self, cascade: Cascade) -> Stream:
        def empty(keys: torch.Tensor) -> CascadeState:
            return CascadeState.empty(1, 1, cascade.lanes(keys.shape[1]), cascade.rings, keys.device)

        layers = {layer: _Layer(empty(keys)) for layer, (keys, _) in self._caches().items()}
        return _TorchStream(cascade, layers=layers)

    def stream(self, slot: int) -> Stream:
        """What the request in `slot`, which has started, keeps."""
        return self._streams[slot]

    def finish(self, request: Request) -> None:
        stream = self._streams.pop(request.slot, None)
        if stream is not None:
            stream.close()

    def park(self, slot: int) -> Stream:
        return self._streams.pop(slot)

    def resume(self, slot: int, state: Stream, tokens: int) -> None:
        self._resumed[slot] = state.resumed(tokens)

    def drop(self, state: Stream) -> None:
        state.close()

    def stats(self) -> Mapping[str, int]:
        return {"streams": len(self._streams)}

    def positions(self, request: Request, begin: int, end: int) -> list[int]:
        """A token of a stride stands behind all that was kept when the stride began."""
        stream = self._streams[request.slot]
        cascade, found = stream.cascade, list[int]()
        for first, last in cascade.strides(stream.offset + begin, stream.offset + end):
            added = cascade.stride_at(first)
            place = cascade.rings.kept(added) - added
            found.extend(range(first + place, last + place))
        return found

    # ---- in every layer ----

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
        stream = self._streams[request.slot]
        if not isinstance(stream, _TorchStream):
            raise ValueError("kernels keep this stream: attend serves those that it began itself")
        layer, begin = stream.layers[caches.layer], stream.offset + begin
        out = query.new_empty(*query.shape[:2], values.shape[-1])
        for first, last in stream.cascade.strides(begin, begin + query.shape[0]):
            rows = slice(first - begin, last - begin)
            out[rows] = _attend(stream.cascade, layer, caches, slots, first, query[rows], keys[rows], values[rows])
        return out


class StreamingLlmPolicy(CascadePolicy):
    """`--attention-backend streaming_llm`: sinks and a sliding window, the cascade of one sub-cache."""

    options = StreamingLlmOptions


def _attend(
    cascade: Cascade,
    layer: _Layer,
    caches: Caches,
    slots: torch.Tensor,
    begin: int,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """`CascadePolicy.attend` within one stride."""
    rings, state, rows, kv_heads, device = cascade.rings, layer.state, query.shape[0], keys.shape[1], query.device
    only = torch.zeros(1, dtype=torch.int64, device=device)
    added = cascade.stride_at(begin)
    if layer.added < added:
        cascade_update(state, only, only + layer.added, only + cascade.stride, rings, selection=cascade.selection)
        layer.added = added
    before = rings.kept(added) + begin - added
    entries = rings.columns(only + added, only + begin + rows, before + rows)
    shown = entries[0].long()
    cells = state.cell[0, 0][:, shown].long().expand(kv_heads, -1)
    head, at = torch.arange(kv_heads, device=device).unsqueeze(1), slots.long()[cells]  # [kv_heads, columns]
    dtype, column = torch.promote_types(query.dtype, torch.float32), torch.arange(before + rows, device=device)
    stored = rotate(keys.to(dtype).transpose(0, 1), -column[before:], caches.rope)
    caches.keys[at[:, before:], head] = stored.to(caches.keys.dtype)
    caches.values[at[:, before:], head] = values.transpose(0, 1).to(caches.values.dtype)

    seen = rotate(caches.keys[at, head].to(dtype), column, caches.rope)
    wide = query.to(dtype)
    logits = torch.einsum("thgd,hcd->thgc", wide.unflatten(1, (kv_heads, -1)), seen) * caches.scale
    hidden = torch.ones(rows, before + rows, dtype=torch.bool, device=device).triu(before + 1)
    logits = logits.masked_fill(hidden[:, None, None], float("-inf"))
    lse = logits.logsumexp(-1)
    weights = torch.exp(logits - lse.unsqueeze(-1))
    out = torch.einsum("thgc,hcd->thgd", weights, caches.values[at, head].to(dtype)).flatten(1, 2)
    counted = cascade.counted(max(begin, layer.scored), begin + rows)
    if counted and cascade.keeps_scores:
        first = counted[0] - begin
        update_scores(
            KeptScores(state.score[0], entries, only),
            CountedQueries(
                query=wide[first :: cascade.score_every].unsqueeze(0).contiguous(),
                keys=seen.unsqueeze(0).contiguous(),
                lse=lse[first :: cascade.score_every].flatten(1).unsqueeze(0).contiguous(),
                before=only + before + first,
                count=only + len(counted),
                scale=caches.scale,
                every=cascade.score_every,
            ),
            beta=cascade.decay,
            reduction=cascade.head_reduction,
        )
    layer.scored = max(layer.scored, begin + rows)
    return out.to(query.dtype)
