"""What Ltri-LLM must answer, by `transformers` and the paper alone: nothing of this project is imported.

It is the paper's method but for what a prompt's last tokens ask (`LtriSizes.asking`), which is written here, too.

:class:`LtriOracle` runs a checkpoint in float64 over a whole prompt and its forced answer in one forward at position 0,
in which attention is written from the paper: chunk by chunk, with a map of local attention that is kept whole, spans by
sums over every triangle, and a distance for every pair of tokens. Layers run one after the other, so what the layers of
one chunk tell each other (votes) is kept by chunk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface

from tests.oracle import models, oracle


@dataclass(frozen=True)
class LtriSizes:
    """Ltri-LLM's settings, as the paper names them.

    Attributes:
        asking: `tokens`: the last `askers` tokens of a prompt ask, each for itself, by `mass` (by `sum` with the
            similarity `sum`); `spans`: the spans of their chunk ask, as in the paper.
        heads: layer -> (retrieval head, its score); None: every layer votes with all of its heads.
        far: true distances instead of at most the window's.
        four_bits: remember keys in 4 bits a component, which the paper does not.
        everything: retrieve all evicted blocks, whatever their scores.
    """

    sinks: int
    window: int
    block: int
    chunk: int
    last: int
    retrieved: int
    spans: int = 4
    vectors: int = 12
    queries: int = 12
    theta: float = 0.9
    phi: float = 0.1
    ratio: str = "row"
    rate: float = 3.0
    early_rate: float = 20.0
    early_layers: int = 4
    index: str = "ltri"
    similarity: str = "sum"
    asking: str = "tokens"
    askers: int = 8
    vote: str = "inclusive"
    persist: bool = True
    far: bool = False
    four_bits: bool = False
    everything: bool = False
    heads: Mapping[int, tuple[int, float]] | None = None


@dataclass
class Chunk:
    """Tokens [begin, end) that see the same blocks in a layer, and the votes of the layers so far.

    Attributes:
        asks: it is part of a prompt, and retrieves blocks of its own.
        ending: all of its tokens are among the last ones of a prompt (`last`), or of an answer.
        lists: layer -> blocks that it retrieved.
    """

    begin: int
    end: int
    asks: bool
    ending: bool
    votes: dict[int, float] = field(default_factory=dict)
    lists: dict[int, list[int]] = field(default_factory=dict)


def spans_of(tile: torch.Tensor, sizes: LtriSizes) -> list[tuple[int, int]]:
    """Spans [first, last] of a tile [heads, tokens, tokens], by every triangle's sum (eqs. 4 and 5, appendix E)."""
    tokens = tile.shape[-1]
    below = [(i, j) for i in range(tokens) for j in range(i + 1)]
    summed = torch.zeros(tokens, tokens, dtype=tile.dtype)
    for head in tile:
        values = torch.stack([head[i, j] for i, j in below])
        threshold = values.quantile(sizes.theta)
        for (i, j), value in zip(below, values, strict=True):
            summed[i, j] += value - threshold
    found = []
    for middle in range(2 * tokens - 1):
        spans = [(x, middle - x) for x in range(tokens) if x <= middle - x < tokens]
        scored = [(float(summed[x : y + 1, x : y + 1].sum()), x - y, (x, y)) for x, y in spans]
        score, _, span = max(scored)
        if score > 1e-12:
            found.append((score, span))
    kept: list[tuple[int, int]] = []
    for _, (x, y) in sorted(found, key=lambda each: -each[0]):
        overlaps = []
        for a, b in kept:
            common = max(0, min(y, b) - max(x, a) + 1)
            overlaps.append(common / (y - x + b - a + 2 - common))
        if len(kept) < sizes.spans and all(overlap <= sizes.phi for overlap in overlaps):
            kept.append((x, y))
    return sorted(kept) or [(0, tokens - 1)]


def index_of(tile: torch.Tensor, received: torch.Tensor, sizes: LtriSizes, layer: int, vectors: int) -> list[list[int]]:
    """Tokens that stand for each span (eqs. 6 and 7), of so many in a block at most."""
    if sizes.index != "ltri":
        order = sorted(range(tile.shape[-1]), key=lambda token: (-float(received[token]), token))
        return [sorted(order if sizes.index == "mean" else order[:4])]
    summed, found = tile.sum(0), []
    for x, y in spans_of(tile, sizes):
        own = float(summed[x : y + 1, x : y + 1].sum())
        row, col = float(summed[x : y + 1, :x].sum()), float(summed[y + 1 :, x : y + 1].sum())
        beside = {"row": row, "col": col, "rowcol": row + col}[sizes.ratio]
        ratio = min(1.0, own / beside) if beside > 0 else 1.0
        rate = sizes.early_rate if layer < sizes.early_layers else sizes.rate
        count = int((y - x + 1) * math.exp(-rate * (1 - ratio)))
        count = max(1, min(count, vectors // sizes.spans))
        order = sorted(range(x, y + 1), key=lambda token: (-float(received[token]), token))
        found.append(sorted(order[:count]))
    return found


def similarity_of(
    query: Sequence[torch.Tensor], memory: Mapping[int, Sequence[torch.Tensor]], kind: str
) -> dict[int, float]:
    """Block -> its score (eqs. 8 and 9), from [vectors, dim] of each span."""
    scale = query[0].shape[-1] ** -0.5
    scores = {}
    for block, spans in memory.items():
        best = []
        for q in query:
            for k in spans:
                products = q @ k.T
                if kind == "mass":
                    everything = torch.cat([q @ other.T for others in memory.values() for other in others], 1) * scale
                    best.append(float(((products * scale).exp().sum(1) / everything.exp().sum(1)).sum()))
                else:
                    best.append(float(products.sum() if kind == "sum" else products.max()))
        scores[block] = max(best)
    return scores


def in_four_bits(keys: torch.Tensor) -> torch.Tensor:
    """Keys [tokens, dim] of a span, whose components are 15 numbers in another basis; dim is a power of two.

    The basis is Hadamard's, in which component i of vector j is -1 where i and j share an odd number of bits, behind
    signs that a generator with the seed 0 draws.
    """
    dim = keys.shape[1]
    signs = [2 * bit - 1 for bit in torch.randint(2, (dim, 1), generator=torch.Generator().manual_seed(0)).flatten()]
    basis = torch.tensor(
        [[(-1) ** (i & j).bit_count() * sign / math.sqrt(dim) for j in range(dim)] for i, sign in enumerate(signs)],
        dtype=keys.dtype,
    )
    mixed = keys @ basis
    step = float(mixed.abs().max()) / 7
    return torch.round(mixed / step) * step @ basis.T


class LtriOracle:
    """A checkpoint in float64, its attention replaced.

    Attributes:
        chunks: of the last sequence, with what every layer retrieved.
    """

    def __init__(self, folder: Path) -> None:
        self.model = models.load_model(folder, torch.float64)
        AttentionInterface.register("ltri_oracle", self._attend)
        self.model.set_attn_implementation("ltri_oracle")
        self.chunks: list[Chunk] = []
        self._sizes = LtriSizes(0, 1, 1, 1, 1, 0)

    def log_probs(
        self, tokens: Sequence[int], prompt: int | Sequence[tuple[int, int]], sizes: LtriSizes
    ) -> torch.Tensor:
        """Log-probabilities [tokens, vocabulary], float64.

        Args:
            tokens: prompts and answers.
            prompt: tokens of the prompt; or, of each turn, where it begins, at the last token of the answer before it,
                and where its prompt ends.
            sizes: the settings.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # these are many small operations, for which threads wait for each other
        try:
            return self._log_probs(tokens, prompt, sizes)
        finally:
            torch.set_num_threads(threads)

    def _log_probs(
        self, tokens: Sequence[int], prompt: int | Sequence[tuple[int, int]], sizes: LtriSizes
    ) -> torch.Tensor:
        turns = [(0, prompt)] if isinstance(prompt, int) else list(prompt)
        self._sizes, self.chunks = sizes, []
        for (begin, end), following in zip(turns, [*(low for low, _ in turns[1:]), len(tokens)], strict=True):
            cuts = {begin, *range(begin // sizes.chunk * sizes.chunk, end, sizes.chunk), end - sizes.last, end}
            bounds = sorted(cut for cut in cuts if cut >= begin)
            ending = end - sizes.last
            self.chunks += [Chunk(low, high, True, low >= ending) for low, high in pairwise(bounds)]
            self.chunks += [Chunk(token, token + 1, False, True) for token in range(end, following)]
        everything = torch.ones(len(tokens), len(tokens), dtype=torch.bool)
        nowhere = torch.zeros(len(tokens), dtype=torch.long)  # the model's own rotation is none
        return torch.log_softmax(oracle._forward(self.model, tokens, nowhere, everything), -1)

    def _attend(self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
        sizes, layer, (query, key, value) = self._sizes, module.layer_idx, (query[0], key[0], value[0])
        heads, length, _ = query.shape
        of = [head // (heads // key.shape[0]) for head in range(heads)]
        local = torch.zeros(heads, length, length, dtype=query.dtype)  # attention over [window, chunk]
        index: dict[int, list[list[int]]] = {}  # block -> tokens of its spans
        out = torch.empty_like(query)
        asked: list[int] = []
        for chunk in self.chunks:
            begin, end = chunk.begin, chunk.end
            evicted = max(0, (begin - sizes.sinks - sizes.window) // sizes.block)
            first = min(begin, sizes.sinks) + evicted * sizes.block
            for block in range(len(index), evicted):
                low = sizes.sinks + block * sizes.block
                high = low + sizes.block
                spans = index_of(
                    local[:, low:high, low:high], local[:, :begin, low:high].sum((0, 1)), sizes, layer, sizes.vectors
                )  # fmt: skip
                index[block] = [[low + token for token in span] for span in spans]
            near = list(range(first, end))
            for head in range(heads):
                for i in range(begin, end):
                    seen = [j for j in near if j <= i]
                    local[head, i, seen] = self._weights(query[head, i], key[of[head]], i, seen, scaling)
            if chunk.asks or not sizes.persist:
                asked = self._retrieve(chunk, layer, query, key, of, local, index)
            chunk.lists[layer] = asked
            blocks = sorted(index) if sizes.everything else asked
            back = [sizes.sinks + block * sizes.block + t for block in sorted(blocks) for t in range(sizes.block)]
            visible = [*range(min(sizes.sinks, begin)), *back, *near]
            for head in range(heads):
                for i in range(begin, end):
                    seen = [j for j in visible if j <= i]
                    weights = self._weights(query[head, i], key[of[head]], i, seen, scaling)
                    out[head, i] = weights @ value[of[head], seen]
        return out.transpose(0, 1)[None], None

    def _weights(self, query: torch.Tensor, keys: torch.Tensor, i: int, seen: list[int], scale: float) -> torch.Tensor:
        """Attention of one query to some keys, the query rotated by its distance from each."""
        far = torch.tensor([i - j for j in seen])
        if not self._sizes.far:
            far = far.clamp(max=self._sizes.window - 1)
        rotated = oracle.rotate(self.model, query.expand(1, len(seen), -1), far)[0]
        return torch.softmax((rotated * keys[seen]).sum(-1) * scale, -1)

    def _retrieve(
        self,
        chunk: Chunk,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        of: list[int],
        local: torch.Tensor,
        index: dict[int, list[list[int]]],
    ) -> list[int]:
        """Blocks that a layer gets for a chunk; the chunk's votes get the layer's."""
        sizes = self._sizes
        own: list[int] = []
        scores: dict[int, float] = {}
        votes_before = dict(chunk.votes)
        voting = sizes.heads is None or layer in sizes.heads
        if voting and index and sizes.retrieved:
            chosen, weight = ([*range(query.shape[0])], 1.0) if sizes.heads is None else (
                [sizes.heads[layer][0]], sizes.heads[layer][1]
            )  # fmt: skip
            asking = []
            kind, tokens_ask = sizes.similarity, sizes.asking == "tokens" and chunk.ending
            if sizes.index != "ltri":
                asking = [self._vectors(query, chosen, [*range(chunk.begin, chunk.end)], rotated=True).mean(0)[None]]
            elif tokens_ask:
                first = max(chunk.begin, chunk.end - sizes.askers)
                asking = [self._vectors(query, chosen, [i], rotated=True) for i in range(first, chunk.end)]
                kind = kind if kind == "sum" else "mass"
            for low in range(chunk.begin, chunk.end, sizes.block):
                high = min(low + sizes.block, chunk.end)
                received = local[:, chunk.begin : chunk.end, low:high].sum((0, 1))
                for span in (
                    index_of(local[:, low:high, low:high], received, sizes, layer, min(sizes.vectors, sizes.queries))
                    if sizes.index == "ltri" and not tokens_ask
                    else ()
                ):
                    asking.append(self._vectors(query, chosen, [low + t for t in span], rotated=True))
            memory = {
                block: [self._vectors(key[of], chosen, span, rotated=False) for span in spans]
                for block, spans in index.items()
            }
            if sizes.index != "ltri":
                memory = {block: [keys.mean(0)[None] for keys in spans] for block, spans in memory.items()}
            if sizes.four_bits:
                memory = {block: [in_four_bits(keys) for keys in spans] for block, spans in memory.items()}
            scores = similarity_of(asking, memory, kind)
            own = sorted(scores, key=lambda block: (-scores[block], block))[: sizes.retrieved]
            for block in own:
                chunk.votes[block] = chunk.votes.get(block, 0.0) + weight
        if sizes.vote == "off":
            return own
        votes = chunk.votes if sizes.vote == "inclusive" else votes_before
        some = [block for block, count in votes.items() if count > 0]
        return sorted(some, key=lambda block: (-votes[block], -scores.get(block, 0.0), block))[: sizes.retrieved]

    def _vectors(self, states: torch.Tensor, heads: list[int], tokens: list[int], rotated: bool) -> torch.Tensor:
        """[tokens, heads * dim]: keys as they are, queries as a window behind them; a sum over heads is one product."""
        found = states[heads][:, tokens]
        if rotated:
            found = oracle.rotate(self.model, found, torch.full((len(tokens),), self._sizes.window - 1))
        return found.transpose(0, 1).flatten(1)
