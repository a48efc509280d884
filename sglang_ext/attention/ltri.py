"""Ltri-LLM in the engine: every request is a stream; what leaves its window lies on the host and comes back by blocks.

A stream has the KV slots of its sinks and of a ring, in which a token keeps its slot until it has left the window. All
heads of a token share its slot. Keys lie there as the model makes them at position 0, and are rotated where they are
seen, by their distance.

**Chunks** are computed whole (`Ltri.chunks`): all of a chunk's rows see the same window and the same blocks, and the
blocks are chosen by what the whole chunk asks. Each token of an answer is a chunk of its own, also where it is computed
anew after a retraction.

**Ranks.** Each has some of the heads, and their keys and values of every block on the host. They add what their heads
say before anything is decided (`ltri_chunk`, `ltri_kernels`): so all of them get the same blocks back.

**Turns.** A turn begins with the last token of the answer before it, at which a chunk of the prompt begins. The step
that overlap scheduling runs past the end of an answer may have computed that token as one of the answer, which has
retrieved other blocks. So its row of the attention map is replaced, and what its query gave to others is counted only
when a token behind it comes (`LayerMemory.last`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sglang_ext import compat
from sglang_ext.attention.ltri_chunks import AnyMemory, Beginning, Chunks, KVCaches, TorchChunks, Votes
from sglang_ext.attention.ltri_layer import LayerTokens, Voter, cells_of
from sglang_ext.attention.ltri_memory import LayerHost
from sglang_ext.attention.policy import Caches, Request, ServedModel
from sglang_ext.attention.sparse import REPORT
from sglang_ext.attention.stream_policy import StreamPolicy
from sglang_ext.cache.budget import KVShape, cached_bytes_per_slot
from sglang_ext.cache.forks import Fork
from sglang_ext.cache.host_blocks import HostBlocks, HostLease, host_bytes
from sglang_ext.compat.ranks import least_over_ranks, sum_over_ranks
from sglang_ext.config import policy_options
from sglang_ext.kernels.shared import sent
from sglang_ext.names import Req
from sglang_ext.policies.heads import Heads, shipped, weights_hash
from sglang_ext.policies.ltri import TensorRanks
from sglang_ext.policies.ltri_options import InfLlmOptions, Ltri
from sglang_ext.types import JsonObject, Options

CHUNKS_OF_A_PASS = 8

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class LtriStream:
    """One stream.

    Attributes:
        lease: what it has on the host.
        layers: what its layers remember.
        offset: tokens before its request's first column.
        note: where to say what the layers of the pass at hand get back; None where nobody asks.
    """

    lease: HostLease
    layers: dict[int, AnyMemory] = field(default_factory=dict)
    offset: int = 0
    note: JsonObject | None = None

    @property
    def stored(self) -> int:
        """Blocks that have left the window, of every layer the same number."""
        return next(iter(self.layers.values())).stored

    @property
    def snapshots(self) -> set[int]:
        """Tokens before which every layer has kept its state."""
        kept = [layer.snapshots for layer in self.layers.values()]
        return set(kept[0]).intersection(*kept[1:]) if kept else set()

    def fork(self, tokens: int) -> LtriStream:
        """Another stream that begins with the same tokens, up to one of the layers' snapshots."""
        layers = {number: layer.fork(tokens) for number, layer in self.layers.items()}
        return LtriStream(self.lease.fork(next(iter(layers.values())).stored), layers)


class LtriPolicy(StreamPolicy):
    """`--attention-backend ltri`: in plain PyTorch, or in the kernels of `attention.readers.ltri`."""

    options: type[Ltri] = Ltri
    request_options = StreamPolicy.request_options | {"blocks", REPORT}
    forks = True
    of_tokens = False  # where a prompt ends, its last tokens are a chunk of their own

    def __init__(self) -> None:
        self.config = policy_options(self.options)
        self._voters: Mapping[int, Voter] | None = None  # of the layers that have a retrieval head
        self._streams: dict[int, LtriStream] = {}
        self._admitted: dict[int, LtriStream] = {}  # about to start
        self._chunks: Chunks | None = None
        self._in_kernels = False

    # ---- options and sizes ----

    def spread(self, ranks: int) -> None:
        self.ranks = ranks

    def check(self, options: Options) -> None:
        super().check(options)
        if not isinstance(options.get(REPORT, False), bool):
            raise ValueError(f"custom_params: {REPORT}={options[REPORT]!r}: expected true or false")
        blocks = options.get("blocks")
        if blocks is None:
            return
        if self.config.index != "given":
            raise ValueError(
                f"custom_params: blocks={blocks!r} on a server with index={self.config.index}, which finds blocks"
                ' itself: leave it out, or start the server with --policy \'{"index": "given"}\''
            )
        numbers = isinstance(blocks, list) and all(
            isinstance(each, int) and not isinstance(each, bool) for each in blocks
        )
        if not numbers or len(set(blocks)) < len(blocks) or min(blocks, default=0) < 0:
            raise ValueError(f"custom_params: blocks={blocks!r}: expected a list of different numbers, from 0")
        if len(blocks) > self.config.retrieved:
            raise ValueError(
                f"custom_params: blocks names {len(blocks)}, and a layer gets {self.config.retrieved}: name fewer, or"
                " start the server with a larger `retrieved` (--policy)"
            )

    def pass_tokens(self, kernels: bool) -> int | None:
        """With kernels, several chunks: matrix products of more rows are faster, and passes are fewer."""
        return self.config.chunk * (CHUNKS_OF_A_PASS if kernels else 1)

    @property
    def least_chunk(self) -> int:
        return self.config.chunk

    @property
    def captured(self) -> bool:
        """What an answer sees of the host must be what the last chunk of its prompt got back, at one distance."""
        return self.config.persist and not self.config.far and self.config.index != "given"

    def slots(self, options: Options, tokens: int) -> int:
        """A stream that has a row of the kernels' memory takes all of them: so there is a row for each."""
        return self.config.slots if self._in_kernels else min(self.config.slots, tokens)

    def extra_bytes_per_token(self, shape: KVShape, kernels: bool) -> int:
        if not kernels:
            return 0
        return cached_bytes_per_slot(shape, self.config.ways * self.config.block, self.config.slots)

    def cut(self, options: Options, begin: int, end: int, prompt: int) -> int:
        return self.config.cut(begin, end, prompt)

    def positions(self, request: Request, begin: int, end: int) -> list[int]:
        return [0] * (end - begin)  # a key is rotated where it is read

    # ---- host memory ----

    @property
    def blocks_on_host(self) -> HostBlocks:
        """`host`, which is there as soon as the KV cache is."""
        if self.host is None:
            raise RuntimeError("host memory is asked for before the KV cache is there")
        return self.host

    @property
    def _computing(self) -> Chunks:
        """`_chunks`, which are there as soon as the KV cache is."""
        if self._chunks is None:
            raise RuntimeError("a chunk is asked for before the KV cache is there")
        return self._chunks

    def bind(self, caches: Callable[[], KVCaches], dtype: torch.dtype) -> None:
        # What is free differs from one moment to the next, and all ranks must have equally many blocks.
        share = torch.tensor(host_bytes(self.config.host_gb) // self.ranks)
        self.host = HostBlocks(caches(), self.config.block, int(least_over_ranks(share)))
        self._chunks = TorchChunks(self.config, caches, self.host, TensorRanks(self.ranks, sum_over_ranks))

    def fit_host(self, most: int | None) -> None:
        """Where the operator has not said how much host memory there is to be, use so many blocks of it at most.

        Args:
            most: of this rank; None for any number. All ranks use as many.
        """
        host = self.blocks_on_host
        if self.config.host_gb is not None:
            return
        total, fits = host.total, int(least_over_ranks(torch.tensor(host.total if most is None else most)))
        if 0 < fits < total:  # where none fits, kernels say what does not
            host.use(fits)
            words = "ltri uses %d of %d blocks on the host, as the GPU has no room for the index of more: set host_gb"
            logger.warning(words + " (--policy) to as much as you need", fits, total)

    def compute_in(self, chunks: Chunks) -> None:
        """Have kernels compute the chunks of all streams."""
        self._chunks, self._in_kernels = chunks, True

    def host_tokens(self) -> int:
        total, most = self.blocks_on_host.total, self._computing.most_blocks
        return self.config.longest(total if most is None else min(total, most))

    def host_need(self, tokens: int) -> int:
        return self.config.evicted(tokens - 1)

    def host_lease(self, state: LtriStream) -> HostLease:
        return state.lease

    def host_reserve(self, slot: int, blocks: int) -> None:
        stream = self._admitted.setdefault(slot, LtriStream(self.blocks_on_host.lease()))
        stream.lease.extend(blocks)

    # ---- the model ----

    def meet(self, model: ServedModel) -> None:
        super().meet(model)
        if not self.config.ends_blocks:
            what = "no stream begins as a copy of another one, and kernels record no chunks of prompts"
            words = "sinks=%d is not a multiple of block=%d, so that %s: set sinks (--policy) to a multiple of block"
            logger.warning(words, self.config.sinks, self.config.block, what)
        if model.kv_heads % self.ranks:
            raise ValueError(
                f"tp_size={self.ranks} for a model with {model.kv_heads} key-value heads a layer: ranks cannot have"
                " equally many of them, and what comes back depends on all; set --tp-size to a number that divides"
                f" {model.kv_heads}"
            )
        name = self.config.heads
        if name == "all":
            self.config = self.config.of_all_heads()
            return
        weights = weights_hash(model.path) if model.loaded else ""
        path = shipped(weights) if name is None else Path(name)
        if path is None:
            what = "all heads of every layer vote, since their retrieval heads are not known"
            logger.warning("ltri, %s: %s; sglang-ext heads finds them", model.path, what)
            self.config = self.config.of_all_heads()
            return
        heads = Heads.load(path)
        heads.check(path, weights, model.layers, model.heads * self.ranks)
        self.config = self.config.of_one_head(model.head_dim)
        first = model.heads * model.rank
        self._voters = {
            layer: Voter.of_rank(score, head, first, model.heads) for layer, (head, score) in heads.voters.items()
        }

    # ---- requests ----

    def start(self, request: Request) -> None:
        self._streams[request.slot] = self._admitted.pop(request.slot)

    def before_pass(self, request: Request, req: Req, begin: int, end: int, decode: bool) -> None:
        """The token that a prompt's last pass gives is asked what the layers got back for it."""
        asked = not decode and request.options.get(REPORT)
        self._streams[request.slot].note = compat.answer_note(req, REPORT, end) if asked else None

    def finish(self, request: Request) -> None:
        if request.slot in self._streams:  # not parked
            self.drop(self._streams.pop(request.slot))

    def park(self, slot: int) -> LtriStream:
        stream = self._streams.pop(slot)
        stream.lease.settle()
        return stream

    def resume(self, slot: int, state: LtriStream, tokens: int) -> None:
        self._admitted[slot] = replace(state, offset=tokens)

    def drop(self, state: LtriStream) -> None:
        self._computing.close(state.lease)
        state.lease.release()

    def stats(self) -> Mapping[str, int]:
        return {"streams": len(self._streams), **self.blocks_on_host.stats()}

    # ---- forks ----

    def state_of(self, slot: int) -> LtriStream | None:
        return self._streams.get(slot)

    def fork_point(self, state: LtriStream, tokens: int, prompt: int) -> int:
        alike = (place for place in state.snapshots if place <= tokens and self.config.alike(place, prompt))
        return max(alike, default=0)

    def fork(self, slot: int, fork: Fork, slots: torch.Tensor) -> None:
        """Copy sinks and window, whose tokens the source has in its slots or on the host; the rest is shared."""
        source, settings = fork.source, self.config
        self._computing.wait_for_passes()
        self._admitted[slot] = stream = source.state.fork(fork.tokens)
        gone = range(stream.stored, min(source.state.stored, settings.blocks(fork.tokens)))
        back = range(settings.first(gone.start), settings.first(max(gone.start, gone.stop)))
        held = range(min(settings.sinks, fork.tokens)), range(back.stop, max(back.stop, fork.tokens))
        tokens = torch.cat([torch.arange(each.start, each.stop) for each in (*held, back)])
        cells, copied = sent(cells_of(settings, tokens), slots.device), sum(map(len, held))
        target = slots.index_select(0, cells).long()
        beginning = Beginning(
            like=source.state.lease,
            lease=stream.lease,
            layers=stream.layers,
            tokens=fork.tokens,
            slots=slots,
            source=source.slots.index_select(0, cells[:copied]).long(),
            target=target[:copied],
            blocks=[source.state.lease.ids[block] for block in gone],
            block_target=target[copied:],
        )
        self._computing.begin(beginning)
        self.blocks_on_host.fetched += len(self.blocks_on_host.keys) * len(gone)

    # ---- in every layer ----

    @property
    def all_heads_vote(self) -> bool:
        """Whether no retrieval heads are known or asked for; settled as soon as the policy has met the model."""
        return self._voters is None

    def voter(self, layer: int) -> Voter | None:
        """What votes in a layer: its best retrieval head; where these are not known, all of its heads."""
        if not self.config.remembers:
            return None
        return Voter() if self._voters is None else self._voters.get(layer)

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
        carry, key = caches.carry, f"chunks of {request.slot}"
        votes: Votes = carry.setdefault(f"votes of {request.slot}", {})
        if key not in carry:  # they are alike in all layers
            begin, prompt = (self._streams[request.slot].offset + each for each in (begin, request.prompt))
            bounds = self.config.chunks(begin, begin + query.shape[0], prompt)
            carry[key] = [self._between(request, each) for each in bounds]
        here = self._here(request, caches, slots, query.shape[1])
        chunks = [LayerTokens(**here, **each) for each in carry[key]]
        out = self._computing.attend(chunks, query, keys, values, votes)
        stream = self._streams[request.slot]
        if stream.note is not None:
            found = self._computing.retrieved(stream.layers[caches.layer])
            stream.note.setdefault("blocks", []).append(found)
        return out

    def stream(self, request: Request) -> LtriStream:
        """What a request that has started has."""
        return self._streams[request.slot]

    def tokens(
        self, request: Request, caches: Caches, slots: torch.Tensor, heads: int, bounds: tuple[int, int]
    ) -> LayerTokens[Any]:
        """The chunk of a request's tokens between `bounds`, numbers in its stream, in one layer of so many heads."""
        return LayerTokens(**self._here(request, caches, slots, heads), **self._between(request, bounds))

    def _here(self, request: Request, caches: Caches, slots: torch.Tensor, heads: int) -> dict[str, Any]:
        """What all chunks of a request have in one pass and layer (`LayerTokens`)."""
        stream = self._streams[request.slot]
        if caches.layer not in stream.layers:
            stream.layers[caches.layer] = self._computing.memory()
        return {
            "settings": self.config,
            "memory": stream.layers[caches.layer],
            "host": LayerHost(self.blocks_on_host, stream.lease, caches.layer, slots.device),
            "caches": caches,
            "slots": slots,
            "voter": self.voter(caches.layer),
            "heads": heads,
            "given": request.options.get("blocks") or (),
        }

    def _between(self, request: Request, bounds: tuple[int, int]) -> dict[str, Any]:
        """What a chunk of a request has in one pass and all layers (`LayerTokens`)."""
        (begin, end), stream = bounds, self._streams[request.slot]
        prompt, kept = stream.offset + request.prompt, self._kept(request, stream, begin)
        ending = self.config.ending(begin, prompt)
        return {"begin": begin, "end": end, "answers": begin >= prompt, "ending": ending, "kept": kept}

    def _kept(self, request: Request, stream: LtriStream, begin: int) -> bool:
        """Whether other streams may begin like a stream up to `begin`, where a chunk begins."""
        own = request.options.get("conversation") is not None or request.options.get("blocks") is not None
        return not own and stream.offset == 0 and self.config.alike(begin, request.prompt)


class InfLlmPolicy(LtriPolicy):
    """`--attention-backend infllm`: the same with InfLLM's index (Xiao et al., 2024), a baseline."""

    options = InfLlmOptions
