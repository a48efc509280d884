"""Spans of a tile and the tokens that stand for them, in plain PyTorch, tile by tile.

A tile is a block's attention to itself. Tokens of one semantic span attend to each other in a triangle of the tile, so
a span is scored by how far its triangle exceeds the thresholds of the heads (Ltri-LLM, equations 4 and 5). The best
spans that do not overlap are kept (Appendix E), and each gets index vectors by how much of what it receives and sees is
its own (equation 7).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from sglang_ext.kernels.span_index.types import (
    HeadSums,
    SpanRule,
    Spans,
    check,
    check_pick,
    check_sums,
    check_tiles,
)


def cut_spans(tiles: torch.Tensor, rows: torch.Tensor, rule: SpanRule, *, out: Spans | None = None) -> Spans:
    """The spans of every tile and how many index vectors each of them gets (Ltri-LLM, sections 3.2 and 3.3.2).

    A tile in which no span has a score above 0 is one span.

    Args:
        tiles: [batch, heads, block, block] float32 or float64: attention of a block's rows to its columns, in
            probabilities. NaN counts as 0, other entries are finite and at least 0. What lies above the diagonal or
            beyond the tile's rows is not read.
        rows: [batch] int32 on the same device, rows and columns of each tile that are there, 0 to `block`; 0: there is
            no tile.
        rule: how spans are cut and counted.
        out: where the result is written; made where not given.

    Returns:
        The spans of each tile (`out` where given), int32 on the tiles' device. Of a span that is not there only the
        count is written, which is 0.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not fit, or a tile has more rows than `block` or less than 0.
    """
    check(tiles, rows, rule, out)
    found = Spans.empty(tiles.shape[0], rule.spans, tiles.device) if out is None else out
    found.counts.zero_()
    for number, tokens in _there(rows, tiles.shape[-1]):
        tile = tiles[number, :, :tokens, :tokens].nan_to_num().tril()
        _put(found, number, span_scores(tile, rule.theta), tile.sum(0), rule)
    return found


def sum_heads(tiles: torch.Tensor, rows: torch.Tensor, theta: float) -> HeadSums:
    """What spans are cut out of, summed over heads (Ltri-LLM, equation 5).

    Args:
        tiles: as in `cut_spans`.
        rows: as there.
        theta: of `SpanRule`.

    Returns:
        Sums in the tiles' dtype, on their device. Thresholds are added in the order in which the attention is, so that
        a tile that is flat in every head has no entry above or below its level; nor has the sum of two ranks.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or a tile has more rows than `block` or less than 0.
    """
    check_tiles(tiles, rows)
    batch, heads, block, _ = tiles.shape
    sums = HeadSums(tiles.new_zeros(batch), tiles.new_zeros(batch, block, block))
    for number, tokens in _there(rows, block):
        tile = tiles[number, :, :tokens, :tokens].nan_to_num().tril()
        levels = thresholds(tile, theta)
        for head in range(heads):
            sums.levels[number] += levels[head]
            sums.summed[number, :tokens, :tokens] += tile[head]
    return sums


def cut_summed(sums: HeadSums, rows: torch.Tensor, rule: SpanRule) -> Spans:
    """`cut_spans`, of tiles whose heads are summed: by `sum_heads`, and over ranks.

    Args:
        sums: of all heads.
        rows: [batch] int32 on the same device, as in `cut_spans`.
        rule: as there.

    Returns:
        As `cut_spans`, up to the order in which entries and thresholds are added.

    Raises:
        ValueError: shapes, dtypes, devices or settings do not fit, or a tile has more rows than `block` or less than 0.
    """
    check_sums(sums, rows, rule)
    found = Spans.empty(rows.shape[0], rule.spans, rows.device)
    found.counts.zero_()
    for number, tokens in _there(rows, sums.summed.shape[-1]):
        summed = sums.summed[number, :tokens, :tokens]
        _put(found, number, _scores(summed - sums.levels[number]), summed, rule)
    return found


def _there(rows: torch.Tensor, block: int) -> Iterator[tuple[int, int]]:
    """(number, tokens) of each tile that is there."""
    for number, tokens in enumerate(rows.tolist()):
        if not 0 <= tokens <= block:
            raise ValueError(f"tile {number} has {tokens} rows: expected 0 to {block}")
        if tokens:
            yield number, tokens


def _put(found: Spans, number: int, scores: torch.Tensor, summed: torch.Tensor, rule: SpanRule) -> None:
    """Write the spans of a tile with such scores, and attention summed over heads."""
    for place, (first, end) in enumerate(_spans(scores, rule)):
        found.bounds[number, place, 0], found.bounds[number, place, 1] = first, end
        found.counts[number, place] = _count(summed, first, end, rule)


def pick(spans: Spans, received: torch.Tensor, most: int, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The tokens that stand for each span: those that received the most attention, of equals the first (equation 6).

    Args:
        spans: [batch, spans] spans of `cut_spans`, and how many tokens are to stand for each.
        received: [batch, block] float32 or float64 on the same device: attention, in sums of probabilities, that each
            token of a tile received from all rows and heads so far. NaN counts as 0, other entries are finite. What
            lies outside of a tile's spans is not read.
        most: room for tokens of a span; of a larger count only so many are picked.
        out: [batch, spans, most] int32, where the result is written; made where not given.

    Returns:
        [batch, spans, most] int32 (`out` where given): numbers of the tokens in the tile, ascending; -1 beyond the
        span's count or its last token.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or a span with a count does not lie in its tile.
    """
    check_pick(spans, received, most, out)
    batch, block = received.shape
    shape = (batch, spans.counts.shape[1], most)
    found = torch.empty(shape, dtype=torch.int32, device=received.device) if out is None else out
    found.fill_(-1)
    known = received.nan_to_num()
    for number, (bounds, counts) in enumerate(zip(spans.bounds.tolist(), spans.counts.tolist(), strict=True)):
        for place, ((first, end), count) in enumerate(zip(bounds, counts, strict=True)):
            if count <= 0:
                continue
            if not 0 <= first < end <= block:
                raise ValueError(f"span {place} of tile {number} is [{first}, {end}): expected tokens of [0, {block})")
            order = known[number, first:end].sort(descending=True, stable=True).indices[: min(count, most)]
            chosen = order.sort().values + first
            found[number, place, : len(chosen)] = chosen.to(torch.int32)
    return found


def thresholds(tile: torch.Tensor, theta: float) -> torch.Tensor:
    """Each head's threshold (equation 5): the quantile of its entries on and below the diagonal.

    Args:
        tile: [heads, tokens, tokens] float32 or float64, without NaN.
        theta: which quantile; between two entries it is interpolated linearly, as `torch.quantile` does.

    Returns:
        [heads] in tile's dtype, on its device.
    """
    lower = torch.ones_like(tile[0], dtype=torch.bool).tril()
    return tile[:, lower].quantile(theta, dim=1)


def span_scores(tile: torch.Tensor, theta: float) -> torch.Tensor:
    """Score of every span by a cumulative sum in two dimensions (equations 4 and 5).

    Args:
        tile: [heads, tokens, tokens] float32 or float64, without NaN, 0 above the diagonal.
        theta: of `thresholds`.

    Returns:
        [tokens, tokens] in tile's dtype, on its device: the span from token x to token y in row y, column x; -inf where
        y < x.
    """
    return _scores((tile - thresholds(tile, theta)[:, None, None]).sum(0))


def _scores(above: torch.Tensor) -> torch.Tensor:
    """`span_scores` from what exceeds the thresholds, or falls short of them, [tokens, tokens], summed over heads."""
    upper = torch.ones_like(above, dtype=torch.bool).triu(1)
    # No entry above the diagonal counts, so rows up to y and columns from x on are the triangle between x and y.
    scores = above.masked_fill(upper, 0).cumsum(0).flip(1).cumsum(1).flip(1)
    return scores.masked_fill(upper, -math.inf)


def _candidates(scores: torch.Tensor) -> list[tuple[int, int, float]]:
    """(first, end, score) of the best span of each anti-diagonal, of equals the shortest; only scores above 0."""
    found = []
    for line in range(2 * len(scores) - 1):
        # From the shortest span to the longest.
        first = torch.arange(line // 2, max(-1, line - len(scores)), -1, device=scores.device)
        along = scores[line - first, first]
        best = along.max()
        if best > 0:
            begin = int(first[(along == best).nonzero()[0, 0]])
            found.append((begin, line - begin + 1, float(best)))
    return found


def _spans(scores: torch.Tensor, rule: SpanRule) -> list[tuple[int, int]]:
    """Non-maximum suppression: (first, end) of the spans that are kept, in the order of their first tokens."""
    # The sort is stable: of equal scores the first by the span's middle comes first.
    left = sorted(_candidates(scores), key=lambda found: -found[2])
    kept: list[tuple[int, int]] = []
    while left and len(kept) < rule.spans:
        first, end, _ = left[0]
        kept.append((first, end))
        left = [other for other in left[1:] if not _overlap(first, end, other[0], other[1], rule)]
    return sorted(kept) or [(0, len(scores))]


def _overlap(first: int, end: int, other_first: int, other_end: int, rule: SpanRule) -> bool:
    """Whether two spans overlap by more than phi, as intersection over union."""
    power = 2 if rule.boxes else 1
    common = max(0, min(end, other_end) - max(first, other_first)) ** power
    union = (end - first) ** power + (other_end - other_first) ** power - common
    # In float32, so that a threshold of 0.1 is met by one token in ten.
    return bool(torch.tensor(common / union, dtype=torch.float32) > rule.phi)


def _count(summed: torch.Tensor, first: int, end: int, rule: SpanRule) -> int:
    """Index vectors of a span (equation 7), from attention [tokens, tokens] summed over heads."""
    own = float(summed[first:end, first:end].sum())
    beside = 0.0
    if "row" in rule.ratio:
        beside += float(summed[first:end, :first].sum())
    if "col" in rule.ratio:
        beside += float(summed[end:, first:end].sum())
    # Without neighbours, or where they have no mass, nobody knows the span.
    ratio = 1.0 if beside <= 0 else min(1.0, max(0.0, own / beside))
    tokens = end - first
    return max(1, min(int(tokens * math.exp(-rule.rate * (1 - ratio))), rule.most, tokens))
