"""Ltri-LLM in the engine: every request is a stream; what leaves its window lies on the host and comes back by blocks.

A stream has the KV slots of its sinks and of a ring, in which a token keeps its slot until it has left the window. All
heads of a token share its slot. Keys lie there as the model makes them at position 0, and are rotated where they are
seen, by their distance.

**Chunks** are computed whole (`Ltri.chunks`): all of a chunk's rows see the same window and the same blocks, and the
blocks are chosen by what the whole chunk asks. Each token of an answer is a chunk of its own, also where it is computed
anew after a retraction.

**Turns.** A turn begins with the last token of the answer before it, at which a chunk of the prompt begins. The step
that overlap scheduling runs past the end of an answer may have computed that token as one of the answer, which has
retrieved other blocks. So its row of the attention map is replaced, and what its query gave to others is counted only
when a token behind it comes (`LayerMemory.last`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from sglang_ext.attention.ltri_chunk import Chunk, LayerMemory, Voter
from sglang_ext.attention.policy import Caches, Request, ServedModel, StreamPolicy
from sglang_ext.config import policy_options
from sglang_ext.policies.heads import Heads, shipped, weights_hash
from sglang_ext.policies.ltri_options import InfLlmOptions, Ltri
from sglang_ext.types import Options

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class LtriStream:
    """One stream: what its layers remember, and how many tokens lie before its request's first column."""

    layers: dict[int, LayerMemory] = field(default_factory=dict)
    offset: int = 0

    @property
    def host_blocks(self) -> int:
        """Blocks on the host, of all layers."""
        return sum(len(layer.keys) for layer in self.layers.values())


class LtriPolicy(StreamPolicy):
    """`--attention-backend ltri`, in plain PyTorch."""

    options: type[Ltri] = Ltri
    of_tokens = False  # where a prompt ends, its last tokens are a chunk of their own

    def __init__(self) -> None:
        self.config = policy_options(self.options)
        self._voters: Mapping[int, tuple[int, float]] | None = None  # layer -> its best head, that head's score
        self._streams: dict[int, LtriStream] = {}
        self._resumed: dict[int, LtriStream] = {}
        self._idle: set[LtriStream] = set()  # between two turns

    # ---- sizes ----

    @property
    def chunk(self) -> int | None:
        return self.config.chunk

    @property
    def least_chunk(self) -> int:
        return self.config.chunk

    def slots(self, options: Options, tokens: int) -> int:
        return min(self.config.slots, tokens)

    def cut(self, options: Options, begin: int, end: int, prompt: int) -> int:
        return self.config.cut(begin, end, prompt)

    def positions(self, request: Request, begin: int, end: int) -> list[int]:
        return [0] * (end - begin)  # a key is rotated where it is read

    # ---- the model ----

    def meet(self, model: ServedModel) -> None:
        name = self.config.heads
        if name == "all":
            return
        weights = weights_hash(model.path) if model.loaded else ""
        path = shipped(weights) if name is None else Path(name)
        if path is None:
            what = "all heads of every layer vote, since their retrieval heads are not known"
            logger.warning("ltri, %s: %s; sglang-ext heads finds them", model.path, what)
            return
        heads = Heads.load(path)
        heads.check(path, weights, model.layers, model.heads)
        self._voters = heads.voters

    # ---- requests ----

    def start(self, request: Request) -> None:
        resumed = self._resumed.pop(request.slot, None)
        self._streams[request.slot] = LtriStream() if resumed is None else resumed

    def finish(self, request: Request) -> None:
        if request.slot in self._streams:  # not parked
            del self._streams[request.slot]

    def park(self, slot: int) -> LtriStream:
        stream = self._streams.pop(slot)
        self._idle.add(stream)
        return stream

    def resume(self, slot: int, state: LtriStream, tokens: int) -> None:
        self._idle.remove(state)
        self._resumed[slot] = replace(state, offset=tokens)

    def drop(self, state: LtriStream) -> None:
        self._idle.discard(state)

    def stats(self) -> Mapping[str, int]:
        everywhere = [*self._streams.values(), *self._resumed.values(), *self._idle]
        return {"streams": len(self._streams), "host_blocks": sum(stream.host_blocks for stream in everywhere)}

    # ---- in every layer ----

    def _voter(self, layer: int) -> Voter | None:
        """What votes in a layer: its best retrieval head; where these are not known, all of its heads."""
        if self._voters is None:
            return Voter()
        head, score = self._voters.get(layer, (None, 0.0))
        return None if head is None else Voter(score, head)

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
        if caches.layer not in stream.layers:
            stream.layers[caches.layer] = LayerMemory.empty(self.config, query.device)
        memory, begin, prompt = stream.layers[caches.layer], stream.offset + begin, stream.offset + request.prompt
        out = query.new_empty(*query.shape[:2], values.shape[-1])
        for first, last in self.config.chunks(begin, begin + query.shape[0], prompt):
            rows = slice(first - begin, last - begin)
            votes = caches.carry.setdefault(f"votes of {request.slot}", {})
            answers, heads = first >= prompt, query.shape[1]
            chunk = Chunk(self.config, memory, caches, slots, self._voter(caches.layer), heads, first, last, answers)
            out[rows] = chunk.attend(query[rows], keys[rows], values[rows], votes)
        return out


class InfLlmPolicy(LtriPolicy):
    """`--attention-backend infllm`: the same with InfLLM's index (Xiao et al., 2024), a baseline."""

    options = InfLlmOptions
