"""What a stream's answer must be, by `transformers` and the rules alone: nothing of this project is imported.

* :func:`streaming_llm`: one cascade. Stride by stride, the checkpoint's own model in float32 over a cache of the sinks
  and the last `window` tokens before the stride, rotated to positions 0, 1, 2, ..., with explicit mask and positions.
* :class:`CascadeOracle`: any number of cascades, in float64. One forward over the whole sequence at position 0, in
  which attention is written from the rules (Cascading KV cache, section 3.2): each lane replays them token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache

from tests.oracle import models, oracle


@dataclass(frozen=True)
class Sizes:
    """A cascade's settings, as the paper names them."""

    sinks: int
    window: int
    stride: int
    cascades: int = 4
    beta: float = 0.9999
    maximum: bool = False  # scores of the group's best query head instead of their mean
    homogeneous: bool = False
    selection: bool = True
    score_every: int = 1  # of so many queries the last counts, with the decay of them all


def streaming_llm(model: torch.nn.Module, tokens: Sequence[int], sizes: Sizes) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary]: sinks and a sliding window that moves on by whole strides."""
    layers = len(model.model.layers)
    keys: list[torch.Tensor] = [torch.empty(0)] * layers
    values: list[torch.Tensor] = [torch.empty(0)] * layers
    table = []
    for begin in range(0, len(tokens), sizes.stride):
        part = tokens[begin : begin + sizes.stride]
        kept = torch.tensor([t for t in range(begin) if t < sizes.sinks or t >= begin - sizes.window], dtype=torch.long)
        past, before = DynamicCache(config=model.config), len(kept)
        for layer in range(layers if before else 0):
            rotated = oracle.rotate(model, keys[layer][:, kept], torch.arange(before))
            past.update(rotated[None], values[layer][:, kept][None], layer)
        allowed = torch.ones(len(part), before + len(part), dtype=torch.bool).tril(before)
        with oracle._capture(model) as (new_keys, new_values):
            logits = oracle._forward(model, part, torch.arange(before, before + len(part)), allowed, past)
        for layer in range(layers):
            keys[layer] = torch.cat([keys[layer], new_keys[layer]], 1) if begin else new_keys[layer]
            values[layer] = torch.cat([values[layer], new_values[layer]], 1) if begin else new_values[layer]
        table.append(torch.log_softmax(logits, -1))
    return torch.cat(table)


class Lane:
    """The tokens that one key-value head keeps, by the rules."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.sinks: list[int] = []
        self.sub_caches: list[list[int]] = [[] for _ in range(sizes.cascades)]

    def kept(self) -> list[int]:
        """Sinks, then oldest to newest."""
        return self.sinks + [token for sub_cache in reversed(self.sub_caches) for token in sub_cache]

    def add(self, token: int, scores: torch.Tensor) -> None:
        """One more token; `scores` of all tokens."""
        sizes = self.sizes
        if token < sizes.sinks:
            self.sinks.append(token)
            return
        behind = token - sizes.sinks
        for i, sub_cache in enumerate(self.sub_caches):
            if behind < sizes.window or behind % 2**i == 0:
                sub_cache.append(token)
                if len(sub_cache) <= sizes.window // sizes.cascades:
                    return
                token = sub_cache.pop(0)
            else:
                if not sub_cache:
                    sub_cache.append(token)
                elif sizes.selection and scores[token] >= scores[sub_cache[-1]]:
                    sub_cache[-1] = token
                return


class CascadeOracle:
    """A checkpoint in float64, its attention replaced.

    Attributes:
        kept: [layers][lanes] tokens kept at the end of the last sequence, in view order.
    """

    def __init__(self, folder: Path) -> None:
        self.model = models.load_model(folder, torch.float64)
        AttentionInterface.register("cascade_oracle", self._attend)
        self.model.set_attn_implementation("cascade_oracle")
        self.kept: list[list[list[int]]] = []
        self._sizes = Sizes(0, 1, 1)

    def log_probs(self, tokens: Sequence[int], sizes: Sizes) -> torch.Tensor:
        """Log-probabilities [tokens, vocabulary], float64."""
        self._sizes, self.kept = sizes, []
        everything = torch.ones(len(tokens), len(tokens), dtype=torch.bool)
        nowhere = torch.zeros(len(tokens), dtype=torch.long)  # the model's own rotation is none
        return torch.log_softmax(oracle._forward(self.model, tokens, nowhere, everything), -1)

    def _attend(self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
        sizes, (query, key, value) = self._sizes, (query[0], key[0], value[0])
        heads, length, _ = query.shape
        group = heads // key.shape[0]
        lanes = [range(heads)] if sizes.homogeneous else [range(k, k + group) for k in range(0, heads, group)]
        out = torch.empty_like(query)
        self.kept.append([])
        for members in lanes:
            lane, scores = Lane(sizes), torch.zeros(length, dtype=torch.float64)
            for begin in range(0, length, sizes.stride):
                end = min(begin + sizes.stride, length)
                seen = torch.tensor([*lane.kept(), *range(begin, end)])
                place = torch.arange(len(seen))
                own = place[len(seen) - (end - begin) :]
                received = torch.zeros(len(members), end - begin, length, dtype=torch.float64)
                for m, head in enumerate(members):
                    q = oracle.rotate(self.model, query[head, begin:end][None], own)[0]
                    k = oracle.rotate(self.model, key[head // group, seen][None], place)[0]
                    logits = (q @ k.T * scaling).masked_fill(place > own[:, None], float("-inf"))
                    weights = torch.softmax(logits, -1)
                    out[head, begin:end] = weights @ value[head // group, seen]
                    received[m][:, seen] = weights
                reduced = received.amax(0) if sizes.maximum else received.mean(0)
                for token, attention in enumerate(reduced, begin):  # a query at a time
                    if (token + 1) % sizes.score_every == 0:
                        decay = sizes.beta**sizes.score_every
                        scores = decay * scores + (1 - decay) * attention
                if end % sizes.stride == 0:
                    for token in range(begin, end):
                        lane.add(token, scores)
            self.kept[-1].append(lane.kept())
        return out.transpose(0, 1)[None], None
