"""Ltri-LLM: what is remembered of a block that leaves the window, and how it is found again (Tang et al., 2024).

A block's tokens attend to each other in triangles of the attention map, which are its semantic spans. Each span is
remembered by the keys of its most attended tokens. A later chunk has spans likewise, whose queries are compared with
these keys, and so are the last tokens of a prompt (`Ltri.asking`). Layers that have a retrieval head vote for blocks,
and the best blocks come back.

The functions follow section 3 of the paper in order; `ltri_similarity` has section 3.4. A *tile* is a block's attention
to itself, [heads, tokens, tokens] with rows that attend to columns, 0 above the diagonal; a span is (first token, end
token), numbers in its tile. All tensors of a call are on one device, float32 or float64.

What is decided follows from sums over all heads. Tensor-parallel ranks have some of the heads each: they add their sums
(`TensorRanks`), and decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sglang_ext.policies.ltri_options import REPRESENTATIVES, Ltri

Span = tuple[int, int]
KEPT_CHUNKS = 8
"""Newest chunks before each of which a stream's state is kept: 4,096 tokens of 512 a chunk."""


# ---- heads of several ranks ----


def of_one(values: torch.Tensor) -> torch.Tensor:
    """What a single rank has is the sum."""
    return values


@dataclass(frozen=True)
class TensorRanks:
    """The tensor-parallel ranks, which have equally many heads of a layer each.

    Attributes:
        count: how many they are.
        add: adds a tensor over the ranks; all of them get the same sum, to the last bit. Every rank calls it at the
            same moment, with a tensor of the same shape and dtype.
    """

    count: int = 1
    add: Callable[[torch.Tensor], torch.Tensor] = of_one

    def add_all(self, each: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`add` for several tensors at once, of different shapes, which are on one device; nothing where none is."""
        if not each:
            return []
        summed = self.add(torch.cat([values.flatten() for values in each]))
        parts = summed.split([values.numel() for values in each])
        return [part.view(values.shape) for part, values in zip(parts, each, strict=True)]


ONE_RANK = TensorRanks()


# ---- 3.2: spans ----


def above_threshold(tile: torch.Tensor, theta: float) -> torch.Tensor:
    """The attention of equation 5, summed over heads: what exceeds each head's threshold, and what falls short of it.

    Args:
        tile: [heads, tokens, tokens].
        theta: share of a head's entries on and below the diagonal that are to lie below its threshold.

    Returns:
        [tokens, tokens], 0 above the diagonal.
    """
    lower = torch.ones_like(tile[0], dtype=torch.bool).tril()
    thresholds = tile[:, lower].quantile(theta, dim=1)
    return torch.where(lower, tile - thresholds[:, None, None], 0).sum(0)


def summed_heads(tile: torch.Tensor, theta: float) -> torch.Tensor:
    """All that spans are cut out of: the attention of a tile, summed over heads, above their thresholds and as it is.

    Args:
        tile: [heads, tokens, tokens]; NaN counts as no attention.
        theta: see `above_threshold`.

    Returns:
        [2, tokens, tokens]: `above_threshold`, and the plain sum.
    """
    tile = tile.nan_to_num()
    return torch.stack([above_threshold(tile, theta), tile.sum(0)])


def span_scores(summed: torch.Tensor) -> torch.Tensor:
    """Equations 4 and 5: the score of every span [x, y], the sum of the triangle between its tokens.

    Args:
        summed: [tokens, tokens] attention less thresholds, 0 above the diagonal: so the triangle is all that lies in
            rows up to y and columns from x on, which is one cumulative sum.

    Returns:
        [tokens, tokens]: row y, column x; -inf where y < x.
    """
    scores = summed.cumsum(0).flip(1).cumsum(1).flip(1)
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))


def candidates(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Appendix E: the best span of every anti-diagonal x + y, of equals the shortest.

    Args:
        scores: [tokens, tokens] of `span_scores`.

    Returns:
        (first tokens, end tokens, scores), each [2 tokens - 1], in the order of their middles.
    """
    tokens = scores.shape[0]
    middle = torch.arange(2 * tokens - 1, device=scores.device).unsqueeze(1)
    first = torch.arange(tokens, device=scores.device).unsqueeze(0)
    last = middle - first
    valid = (first <= last) & (last < tokens)
    skewed = scores[last.clamp(0, tokens - 1), first.expand_as(last)].masked_fill(~valid, float("-inf"))
    best = skewed.amax(1)
    begin = torch.where(valid & (skewed == best.unsqueeze(1)), first, -1).amax(1)
    return begin, middle.squeeze(1) - begin + 1, best


def suppress(
    begin: torch.Tensor, end: torch.Tensor, scores: torch.Tensor, phi: float, count: int, boxes: bool = False
) -> list[int]:
    """Non-maximum suppression: the best spans of which no two overlap by more than `phi`.

    Args:
        begin, end: [candidates] first and end tokens.
        scores: [candidates]; of equal ones the first comes first.
        phi: largest intersection over union.
        count: most spans that are kept.
        boxes: compare squares of the attention map, not intervals.

    Returns:
        Numbers of the candidates that are kept, best first.
    """
    length, power = end - begin, 2 if boxes else 1
    kept: list[int] = []
    open_ = torch.ones_like(scores, dtype=torch.bool)
    for number in scores.sort(descending=True, stable=True).indices.tolist():
        if not open_[number]:
            continue
        kept.append(number)
        if len(kept) == count:
            break
        common = (torch.minimum(end, end[number]) - torch.maximum(begin, begin[number])).clamp(min=0) ** power
        union = length**power + length[number] ** power - common
        open_ &= common / union <= phi
    return kept


def spans_of(above: torch.Tensor, settings: Ltri) -> list[Span]:
    """The spans of a tile, from its first tokens to its last; all of it where nothing stands out.

    Args:
        above: [tokens, tokens] of `above_threshold`, of all heads.
        settings: `phi`, `spans` and `boxes`.
    """
    begin, end, scores = candidates(span_scores(above))
    some = scores > 0
    begin, end, scores = begin[some], end[some], scores[some]
    kept = suppress(begin, end, scores, settings.phi, settings.spans, settings.boxes)
    return sorted((int(begin[number]), int(end[number])) for number in kept) or [(0, above.shape[-1])]


# ---- 3.3: index vectors ----


def mass_ratio(summed: torch.Tensor, span: Span, neighbours: str) -> float:
    """r_a of section 3.3.2: the mass of a span's triangle over that of its neighbours in the block, at most 1.

    Args:
        summed: [tokens, tokens] attention summed over heads, thresholds not taken off.
        span: the span.
        neighbours: `row`, `col` or `rowcol` (figure 5).

    Returns:
        The ratio; 1 also where there are no neighbours, or where these have no mass.
    """
    low, high = span
    beside = 0.0
    if "row" in neighbours:
        beside += float(summed[low:high, :low].sum())
    if "col" in neighbours:
        beside += float(summed[high:, low:high].sum())
    own = float(summed[low:high, low:high].sum())
    return 1.0 if beside <= 0 else min(1.0, max(0.0, own / beside))


def vector_count(tokens: int, ratio: float, rate: float, most: int) -> int:
    """Equation 7: how many index vectors a span of so many tokens gets; at least one.

    Args:
        tokens: of the span.
        ratio: `mass_ratio`.
        rate: λ.
        most: the largest number.
    """
    return max(1, min(int(tokens * math.exp(-rate * (1 - ratio))), most, tokens))


def picked(received: torch.Tensor, span: Span, count: int) -> list[int]:
    """The tokens of a span that stand for it: those with the most attention (equation 6), of equals the first.

    Args:
        received: [tokens] attention that each token of the tile has received from all rows and heads so far.
        span: the span.
        count: how many.

    Returns:
        Their numbers in the tile, ascending.
    """
    low, high = span
    order = received[low:high].sort(descending=True, stable=True).indices[:count]
    return sorted((order + low).tolist())


def counted_spans(sums: torch.Tensor, settings: Ltri, layer: int) -> list[tuple[Span, int]]:
    """The spans of a tile, and how many index vectors each of them gets.

    Args:
        sums: [2, tokens, tokens] of `summed_heads`, of all heads.
        settings: of the method.
        layer: number of the layer, for its λ.
    """
    (above, summed), most = sums, settings.most_vectors
    found = []
    for span in spans_of(above, settings):
        ratio = mass_ratio(summed, span, settings.ratio)
        found.append((span, vector_count(span[1] - span[0], ratio, settings.rate_of(layer), most)))
    return found


def whole_span(tokens: int, settings: Ltri) -> list[tuple[Span, int]]:
    """What an index other than `ltri` has in the place of spans: all of a block, and how many tokens stand for it.

    Args:
        tokens: of the block.
        settings: of the method.
    """
    return [((0, tokens), tokens if settings.index == "mean" else min(REPRESENTATIVES, tokens))]


def index_tokens(spans: Sequence[tuple[Span, int]], received: torch.Tensor) -> list[list[int]]:
    """The tokens whose keys (of a block) or queries (of a chunk) are index vectors, span by span.

    Args:
        spans: of `counted_spans` or `whole_span`.
        received: [tokens] from all heads, as for `picked`; NaN counts as no attention.
    """
    received = received.nan_to_num()
    return [picked(received, span, count) for span, count in spans]


# ---- 3.4: the blocks that come back ----


def best_blocks(scores: torch.Tensor, count: int) -> list[int]:
    """The blocks with the largest scores, best first; of equals the first one."""
    return scores.sort(descending=True, stable=True).indices[:count].tolist()


def renewed_blocks(begin: int, settings: Ltri) -> list[int]:
    """The blocks of a chunk, of which `renewed` differ from those of the chunk before; for measurements.

    They are consecutive in a ring of the stream's first blocks, and move on by `renewed` with each chunk. The ring has
    the largest power of two of blocks that have left the window; where that doubles, more blocks may differ.

    Args:
        begin: first token of the chunk.
        settings: of the method.

    Returns:
        At most `retrieved` numbers of blocks, from 0.
    """
    stored = settings.evicted(begin)
    count = min(settings.retrieved, stored)
    around = 1 << stored.bit_length() - 1 if stored else 1
    first = begin // settings.chunk * settings.renewed
    return [(first + number) % around for number in range(min(count, around))]


def random_blocks(blocks: int, count: int, seed: int) -> list[int]:
    """Different blocks at random, a baseline; the same ones for the same seed.

    Args:
        blocks: how many there are.
        count: most blocks.
        seed: of the choice.
    """
    return torch.randperm(blocks, generator=torch.Generator().manual_seed(seed))[:count].tolist()


# ---- 3.5: votes ----


def with_vote(votes: torch.Tensor, chosen: Sequence[int], weight: float) -> torch.Tensor:
    """The votes after a layer: those of the layers before it, and its head's score for each block of its own choice.

    Args:
        votes: [blocks] so far.
        chosen: blocks of the layer's own choice (`best_blocks`).
        weight: score of its retrieval head.
    """
    found = votes.clone()
    found[list(chosen)] += weight
    return found


def elected(votes: torch.Tensor, scores: torch.Tensor | None, count: int) -> list[int]:
    """The blocks with the most votes, best first; none without a vote.

    Args:
        votes: [blocks].
        scores: [blocks] of the layer itself, by which blocks with equal votes are ordered; None: the first comes first.
        count: most blocks.
    """
    order = range(len(votes)) if scores is None else best_blocks(scores, len(votes))
    given: list[float] = votes.tolist()  # a look at a tensor takes a hundred times as long as one at a list
    return sorted((number for number in order if given[number] > 0), key=lambda number: -given[number])[:count]


def retrieved(
    votes: torch.Tensor, scores: torch.Tensor | None, weight: float, settings: Ltri
) -> tuple[list[int], torch.Tensor]:
    """What a layer retrieves, and the votes for the layers after it.

    Args:
        votes: [blocks] of the layers before it.
        scores: [blocks] of the layer's own retrieval head; None where it has none.
        weight: that head's score.
        settings: `vote` and `retrieved`.

    Returns:
        (blocks, best first; votes [blocks]). A layer without a retrieval head retrieves what the layers before it voted
        for, and nothing where votes are off.
    """
    own = [] if scores is None else best_blocks(scores, settings.retrieved)
    after = votes if scores is None else with_vote(votes, own, weight)
    if settings.vote == "off":
        return own, after
    counted = after if settings.vote == "inclusive" else votes
    return elected(counted, scores, settings.retrieved), after


# ---- streams that begin alike ----


def kept_chunks(newest: int) -> set[int]:
    """Numbers of the chunks before which a stream's state is kept, of those up to `newest`.

    They are the last `KEPT_CHUNKS`, for questions about one document, and about as many at equal distances before them,
    which are multiples of a power of two: so what is kept later was kept before.

    Args:
        newest: number of the newest chunk; the first chunk, number 0, has no state.
    """
    step = 1
    while newest // step >= 2 * KEPT_CHUNKS:
        step *= 2
    return {*range(step, newest + 1, step), *range(max(1, newest - KEPT_CHUNKS + 1), newest + 1)}
