"""Spans, counts and tokens of tiles against the paper's formulas, written out span by span in float64.

The definition here knows no cumulative sum: a span's score is the sum over its triangle. Random tiles are such that no
decision is within rounding of another (`Expected.margin`), so that spans and counts must be equal in float32. What lies
above the diagonal, beyond a tile's rows, or in buffers that are to be written is NaN or no number of a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from sglang_ext.kernels import span_index
from sglang_ext.kernels.span_index import HeadSums, SpanRule, Spans, SpanWorkspace, cuda_impl, dispatch, reference
from sglang_ext.kernels.span_index import triton_impl as triton
from sglang_ext.policies import ltri
from sglang_ext.policies.ltri_options import Ltri
from tests.kernels import on_host, sm90

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MARGIN = 2e-5
"""By how much all decisions differ, at least: beside it, rounding in float32 is small."""
SCORES = {torch.float64: 1e-13, torch.float32: 1e-6}
"""Tolerance of scores, beside the sum of a tile."""
POISON = -12345
IMPLEMENTATIONS = [
    pytest.param(reference, torch.float64, id="reference-float64"),
    pytest.param(reference, torch.float32, id="reference-float32"),
    pytest.param(triton, torch.float32, id="triton"),
]
SUMMED = IMPLEMENTATIONS.copy()
"""What sums heads and cuts what is summed, and picks tokens."""
IMPLEMENTATIONS += [pytest.param(cuda_impl, torch.float32, id="cuda", marks=on_host.needed)]
MODULES = [
    pytest.param(reference, id="reference"),
    pytest.param(triton, id="triton"),
    pytest.param(cuda_impl, id="cuda", marks=on_host.needed),
]


@pytest.fixture(autouse=True)
def launches() -> Iterator[None]:
    """Let the kernels in CUDA run, on this CPU where there is no GPU."""
    with on_host.cuda(cuda_impl):
        yield


# ---- the definition ----


def tile_of(heads: int, tokens: int, seed: int, planted: bool = True) -> np.ndarray:
    """Attention [heads, tokens, tokens] float64, 0 above the diagonal: noise, and triangles that stand out of it."""
    generator = np.random.default_rng(seed)
    found = generator.random((heads, tokens, tokens)) ** 3 * 0.05
    begin = 0
    while planted and begin < tokens:
        end = min(tokens, begin + int(generator.integers(1, max(2, tokens // 3))))
        found[:, begin:end, begin:end] += generator.random() * generator.random((heads, end - begin, end - begin)) * 0.2
        begin = end
    return np.tril(found)


@dataclass(frozen=True)
class Expected:
    """What a tile's spans are.

    Attributes:
        spans: (first, end, count), in the order of first tokens.
        scores: [tokens, tokens], of the span from x to y in row y, column x.
        thresholds: [heads].
        margin: the least difference of numbers that were compared.
    """

    spans: list[tuple[int, int, int]]
    scores: np.ndarray
    thresholds: np.ndarray
    margin: float


def overlap(a: tuple[int, int], b: tuple[int, int], boxes: bool) -> float:
    """Intersection over union, counted cell by cell."""
    cells = [{*range(*span)} if not boxes else {*product(range(*span), repeat=2)} for span in (a, b)]
    return len(cells[0] & cells[1]) / len(cells[0] | cells[1])


def expected(tile: np.ndarray, rule: SpanRule) -> Expected:
    """Equations 4, 5 and 7, Appendix E."""
    heads, tokens, _ = tile.shape
    tile = np.nan_to_num(tile)
    lower = np.tril(np.ones((tokens, tokens), dtype=bool))
    thresholds = np.array([np.quantile(tile[head][lower], rule.theta) for head in range(heads)])
    summed = tile.sum(0)
    above = np.where(lower, (tile - thresholds[:, None, None]).sum(0), 0)
    scores = np.full((tokens, tokens), -np.inf)
    for x in range(tokens):
        for y in range(x, tokens):
            scores[y, x] = above[x : y + 1, x : y + 1].sum()
    margins, found = [], []
    for middle in range(2 * tokens - 1):
        line = [(x, middle - x) for x in range(middle // 2, -1, -1) if middle - x < tokens]  # the shortest first
        values = [scores[y, x] for x, y in line]
        best = int(np.argmax(values))
        margins += [abs(values[best])] + sorted(abs(value - values[best]) for value in values)[1:2]
        if values[best] > 0:
            found.append((values[best], line[best][0], line[best][1] + 1))
    found.sort(key=lambda candidate: -candidate[0])
    kept: list[tuple[int, int]] = []
    for number, (score, first, end) in enumerate(found):
        margins += [score - other for other, _, _ in found[number + 1 : number + 2]]
        if len(kept) < rule.spans and all(overlap((first, end), span, rule.boxes) <= rule.phi for span in kept):
            kept.append((first, end))
    spans = []
    for first, end in sorted(kept) or [(0, tokens)]:
        length = end - first
        own, beside = np.tril(summed[first:end, first:end]).sum(), 0.0
        if rule.ratio in ("row", "rowcol"):
            beside += summed[first:end, :first].sum()
        if rule.ratio in ("col", "rowcol"):
            beside += summed[end:, first:end].sum()
        ratio = min(1.0, own / beside) if beside > 0 else 1.0
        share = length * math.exp(-rule.rate * (1 - ratio))
        if 0 < ratio < 1:
            margins += [abs(share - round(share)), 1 - ratio]
        spans.append((first, end, max(1, min(int(share), rule.most, length))))
    return Expected(spans, scores, thresholds, min(margins))


def distinct(heads: int, tokens: int, seed: int, rule: SpanRule, planted: bool = True) -> tuple[np.ndarray, Expected]:
    """A random tile whose decisions are not within rounding of each other, and what is expected of it."""
    for attempt in range(100):
        tile = tile_of(heads, tokens, 1000 * seed + attempt, planted)
        found = expected(tile, rule)
        if found.margin > MARGIN:
            return tile, found
    raise AssertionError("no such tile in a hundred: take fewer tokens, or another rule")


# ---- tiles in a batch ----


def batch_of(given: list[np.ndarray], block: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """(tiles, rows): NaN above the diagonal and beyond each tile's rows. A tile may be None: there is none."""
    heads = next(tile.shape[0] for tile in given if tile is not None)
    tiles = torch.full((len(given), heads, block, block), float("nan"), dtype=dtype)
    for number, tile in enumerate(given):
        if tile is not None:
            tokens = tile.shape[1]
            held = torch.from_numpy(tile).to(dtype)
            tiles[number, :, :tokens, :tokens] = torch.where(torch.ones_like(held).tril() > 0, held, torch.nan)
    rows = torch.tensor([0 if tile is None else tile.shape[1] for tile in given], dtype=torch.int32)
    return tiles.to(DEVICE), rows.to(DEVICE)


def cut(module: ModuleType, tiles: torch.Tensor, rows: torch.Tensor, rule: SpanRule) -> Spans:
    """The module's spans, written to buffers that hold something else; stale bounds stay what they were."""
    out = Spans.empty(len(rows), rule.spans, DEVICE)
    out.bounds.fill_(POISON)
    out.counts.fill_(POISON)
    more = {}
    if module in (triton, cuda_impl):
        workspace = SpanWorkspace.empty(len(rows), *tiles.shape[1:3], DEVICE)
        for buffer in (workspace.thresholds, workspace.summed, workspace.scores):
            buffer.fill_(float("nan"))
        more["workspace"] = workspace
    found = module.cut_spans(tiles, rows, rule, out=out, **more)
    assert found is out
    assert bool((found.bounds[found.counts == 0] == POISON).all()), "of a span that is not there nothing is written"
    return found


def listed(spans: Spans) -> list[list[tuple[int, int, int]]]:
    """(first, end, count) of each tile's spans, which come before those that are not there."""
    result = []
    for bounds, counts in zip(spans.bounds.tolist(), spans.counts.tolist(), strict=True):
        number = sum(count > 0 for count in counts)
        assert counts[number:] == [0] * (len(counts) - number), counts
        result.append([(*bound, count) for bound, count in zip(bounds[:number], counts[:number], strict=True)])
    return result


RULES = [
    SpanRule(),
    SpanRule(theta=0.5, phi=0.5, spans=6, most=4, ratio="col"),
    SpanRule(theta=0.5, phi=0.0, spans=4, most=6, ratio="rowcol", rate=1.0),
    SpanRule(theta=0.9, phi=0.1, spans=3, most=8, boxes=True, rate=0.5),
    SpanRule(theta=0.5, phi=0.5, spans=1, most=12, rate=0.0),
    SpanRule(theta=0.7, phi=0.01, spans=6, most=4, rate=20.0, boxes=True, ratio="rowcol"),
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("module, dtype", IMPLEMENTATIONS)
def test_spans_are_the_formulas(module: ModuleType, dtype: torch.dtype, rule: SpanRule) -> None:
    """Whole tiles, a partial one, one row, and no tile, in one batch."""
    wanted = [distinct(3, 16, 1, rule), distinct(3, 11, 2, rule), None, distinct(3, 5, 4, rule)]
    given = [None if pair is None else pair[0] for pair in wanted]
    one = tile_of(3, 1, 5)
    got = listed(cut(module, *batch_of([*given, one], 16, dtype), rule))
    assert got == [*([] if pair is None else pair[1].spans for pair in wanted), [(0, 1, 1)]]
    assert max(len(spans) for spans in got) >= min(rule.spans, 2)


@pytest.mark.parametrize("boxes, ratio", [(False, "row"), (False, "rowcol"), (True, "col")])
@pytest.mark.parametrize("phi", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("theta", [0.5, 0.9])
def test_larger_tiles(theta: float, phi: float, boxes: bool, ratio: str) -> None:
    """Four heads; one of the tiles has no planted triangles."""
    rule = SpanRule(theta=theta, phi=phi, spans=5, most=5, rate=1.5, ratio=ratio, boxes=boxes)
    first, second = distinct(4, 32, 7, rule), distinct(4, 27, 8, rule, planted=False)
    tiles, rows = batch_of([first[0], second[0]], 32)
    for module in (triton, reference, cuda_impl):
        assert listed(cut(module, tiles, rows, rule)) == [first[1].spans, second[1].spans]


def test_counts_differ_where_masses_do() -> None:
    """Counts that equation 7 decides, and not its bounds alone."""
    rule = SpanRule(theta=0.7, spans=6, most=32, rate=2.0, ratio="rowcol")
    pairs = [distinct(3, 32, seed, rule) for seed in (0, 1, 3)]
    decided = [1 < count < end - first for _, wanted in pairs for first, end, count in wanted.spans]
    assert sum(decided) >= 4, decided
    tiles, rows = batch_of([tile for tile, _ in pairs], 32)
    for module in (triton, reference, cuda_impl):
        assert listed(cut(module, tiles, rows, rule)) == [wanted.spans for _, wanted in pairs]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("mirrored", [False, True], ids=["first", "last"])
def test_a_single_neighbour_counts(module: ModuleType, mirrored: bool) -> None:
    """A span behind the first token alone, which has much of its attention; or, mirrored, one before the last."""
    tile = 0.1 + tile_of(2, 16, 0, planted=False) * 0.002
    tile[:, 1:4, 1:4] += 0.01
    tile[:, 1:4, 0] += 0.16
    tile[:, 4] = tile[:, 0] = 0.001  # so that no longer span around it is better
    tile = np.tril(tile)
    span, ratio = (1, 4), "row"
    if mirrored:
        tile, span, ratio = tile[:, ::-1, ::-1].transpose(0, 2, 1).copy(), (12, 15), "col"
    for beside, count in ((ratio, 2), ("rowcol", 1)):
        rule = SpanRule(theta=0.5, phi=0.8, spans=8, most=8, ratio=beside, rate=2.0)
        assert (*span, count) in expected(tile, rule).spans
        # Other spans of this tile are within rounding of each other.
        assert (*span, count) in listed(cut(module, *batch_of([tile], 16), rule))[0]


@pytest.mark.parametrize("index", range(len(RULES)))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_reference_is_the_policy(dtype: torch.dtype, index: int) -> None:
    """`policies.ltri`, also where scores are close: the arithmetic is the same."""
    rule = RULES[index]
    settings = Ltri(
        theta=rule.theta, phi=rule.phi, spans=rule.spans, vectors=rule.spans * rule.most, boxes=rule.boxes,
        ratio=rule.ratio, rate=rule.rate,
    )  # fmt: skip
    for seed, tokens in enumerate((32, 31, 17, 2, 1)):
        tile = torch.from_numpy(tile_of(2, tokens, seed)).to(dtype)
        sums = ltri.summed_heads(tile, rule.theta)
        wanted = [(*span, count) for span, count in ltri.counted_spans(sums, settings, layer=9)]
        tiles, rows = batch_of([tile.numpy()], 32, dtype)
        got = cut(reference, tiles.cpu(), rows.cpu(), rule) if DEVICE == "cpu" else cut(reference, tiles, rows, rule)
        assert listed(got) == [wanted]
        received = torch.rand(32, dtype=dtype, generator=torch.Generator().manual_seed(seed))
        received[tokens // 2] = float("nan")
        picked = reference.pick(got, received[None].to(DEVICE), rule.most)
        tokens_of = ltri.index_tokens([(span[:2], span[2]) for span in wanted], received[:tokens])
        assert [[token for token in span if token >= 0] for span in picked[0].tolist()][: len(wanted)] == tokens_of


@pytest.mark.parametrize("module", [pytest.param(triton, id="triton"), MODULES[2]])
@pytest.mark.parametrize("theta", [0.02, 0.5, 0.9, 0.123])
def test_thresholds_and_scores(module: ModuleType, theta: float) -> None:
    """Both entries around a quantile are exact; scores are compared beside the sum of a tile, for they cancel."""
    rule = SpanRule(theta=theta)
    given = [tile_of(3, tokens, tokens) for tokens in (32, 20, 2, 1)]
    # Numbers of all sizes, equal ones, and NaN that counts as 0.
    given[1][0] = np.tril(np.exp(np.random.default_rng(5).normal(0, 12, (20, 20))))
    given[1][1] = np.tril(np.random.default_rng(6).integers(0, 3, (20, 20)) / 4)
    given[1][2][3:7, 2] = np.nan
    tiles, rows = batch_of(given, 32)
    workspace = SpanWorkspace.empty(4, 3, 32, DEVICE)
    module.cut_spans(tiles, rows, rule, workspace=workspace)
    for number, tile in enumerate(given):
        tokens = tile.shape[1]
        known = tiles[number, :, :tokens, :tokens].nan_to_num().tril()
        thresholds = reference.thresholds(known, theta)
        # The rank in float32, as torch had it until 2.11: a weight that much apart of the entries around it.
        entries = known[:, torch.ones_like(known[0], dtype=torch.bool).tril()].sort(dim=1).values
        rank = theta * (entries.shape[1] - 1)
        low, high = entries[:, int(rank)], entries[:, min(int(rank) + 1, entries.shape[1] - 1)]
        apart = (workspace.thresholds[number] - thresholds).abs()
        assert bool((apart <= 1.2e-7 * (thresholds + rank * (high - low))).all()), apart / thresholds
        wanted = expected(tile, rule)
        some = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        scores, scale = torch.from_numpy(wanted.scores)[some], float(np.nan_to_num(tile).sum())
        if module is triton:  # the kernels in CUDA keep scores in shared memory
            got = workspace.scores[number, :tokens, :tokens].cpu()[some]
            assert (got.double() - scores).abs().max() <= SCORES[torch.float32] * scale
        summed = workspace.summed[number].cpu()
        assert (summed[:tokens, :tokens].double() - torch.from_numpy(np.nan_to_num(tile)).sum(0)).abs().max() <= (
            SCORES[torch.float32] * scale
        )
        assert not summed[tokens:].any() and not summed.triu(1).any()
        for dtype, tolerance in SCORES.items():
            known = torch.from_numpy(np.nan_to_num(tile)).to(DEVICE, dtype)
            same = reference.span_scores(known, theta).cpu()[some]
            assert same.dtype == dtype and (same.double() - scores).abs().max() <= tolerance * scale


@pytest.mark.parametrize("module", MODULES)
def test_where_nothing_stands_out_a_tile_is_one_span(module: ModuleType) -> None:
    """Empty, flat in every head, all NaN, and one row; also of numbers whose sums are rounded."""
    flat = np.array([0.1, 0.7, 0.3, 1 / 3, 0.05])[:, None, None] * np.tril(np.ones((11, 11)))
    given = [np.zeros((5, 16, 16)), flat, np.full((5, 16, 16), np.nan), np.full((5, 1, 1), 0.3), flat[:, :2, :2]]
    for rule in (SpanRule(most=8), SpanRule(theta=0.5, ratio="rowcol", spans=1, most=8)):
        got = listed(cut(module, *batch_of(given, 16), rule))
        # One row is above no threshold of its own. Nobody knows the span, so as many tokens as may be.
        assert got == [[(0, 16, 8)], [(0, 11, 8)], [(0, 16, 8)], [(0, 1, 1)], [(0, 2, 2)]]


@pytest.mark.parametrize("module", MODULES)
def test_nan_counts_as_nothing(module: ModuleType) -> None:
    rule = SpanRule(theta=0.5, spans=3)
    tile, wanted = None, None
    for seed in range(100):
        tile = tile_of(2, 16, seed)
        tile[1, 5, 2:5] = tile[0, 9] = 0.0
        wanted = expected(tile, rule)
        if wanted.margin > MARGIN and len(wanted.spans) > 1:
            break
    tile[1, 5, 2:5] = tile[0, 9] = np.nan
    assert listed(cut(module, *batch_of([tile], 16), rule)) == [wanted.spans]


@pytest.mark.parametrize("module, dtype", IMPLEMENTATIONS)
def test_of_equal_spans_the_shortest_and_the_first(module: ModuleType, dtype: torch.dtype) -> None:
    """Numbers of few bits, of which all sums are exact, and thresholds that are not interpolated."""
    points = np.full((1, 16, 16), 0.25)
    points[0, 8, 8] = points[0, 9, 7] = 0.5
    points[0, 8, 7] = points[0, 9, 6] = 0.0
    points = np.tril(points)
    rule = SpanRule(theta=0.5, spans=1)
    wanted = expected(points, rule)
    assert wanted.scores[8, 8] == wanted.scores[9, 7] == wanted.scores.max(), "on one anti-diagonal"
    assert wanted.scores[9, 8] == wanted.scores.max(), "and on a later one"
    assert wanted.spans == [(8, 9, 1)]
    assert listed(cut(module, *batch_of([points], 16, dtype), rule)) == [wanted.spans]
    if module is triton:  # also where each row of scores is read after the one before it
        found = triton.cut_spans(*batch_of([points], 16), rule, tuning=triton.SpanTuning(chunk=1))
        assert listed(found) == [wanted.spans]
    for spans, phi in ((1, 0.0), (4, 0.0), (4, 0.1), (6, 0.5)):
        generator = np.random.default_rng(spans)
        given = [np.tril(generator.integers(0, 3, (2, tokens, tokens)) / 4) for tokens in (26, 16, 13)]
        rule = SpanRule(theta=0.8, phi=phi, spans=spans, most=4, ratio="rowcol")
        # Of 351, 136 and 91 entries: 0.8 of 350, 135 and 90 steps are whole numbers.
        wanted_of = [expected(tile, rule) for tile in given]
        assert min(each.margin for each in wanted_of) < 1e-12, "there are ties"
        assert listed(cut(module, *batch_of(given, 32, dtype), rule)) == [each.spans for each in wanted_of]


@pytest.mark.parametrize("module", MODULES)
def test_an_overlap_of_exactly_phi_is_kept(module: ModuleType) -> None:
    """One token in ten, and a threshold of 0.1."""
    tile = np.zeros((1, 32, 32))
    tile[0, 0:6, 0:6] = tile[0, 5:10, 5:10] = 0.5
    tile = np.tril(tile)
    assert overlap((0, 1), (0, 10), False) == 0.1
    for phi, kept in ((0.1, [(0, 1), (0, 10), (7, 32)]), (0.0999, [(0, 10), (7, 32)])):
        rule = SpanRule(theta=0.9, phi=phi)
        wanted = expected(tile, rule)
        assert [span[:2] for span in wanted.spans] == kept
        assert listed(cut(module, *batch_of([tile], 32), rule)) == [wanted.spans]


def test_tiles_may_be_views() -> None:
    """Of a tensor with the heads behind the rows, and of a larger one; other sizes of programs find the same."""
    rule = SpanRule(theta=0.5, spans=3)
    pairs = [distinct(3, tokens, 11, rule) for tokens in (16, 12)]
    tiles, rows = batch_of([tile for tile, _ in pairs], 16)
    behind = tiles.transpose(1, 2).contiguous().transpose(1, 2)
    larger = torch.full((2, 5, 20, 24), float("nan"), device=DEVICE)
    larger[:, 1:4, 2:18, 4:20] = tiles
    for view in (behind, larger[:, 1:4, 2:18, 4:20]):
        assert not view.is_contiguous()
        for module in (triton, cuda_impl):
            assert listed(module.cut_spans(view, rows, rule)) == [wanted.spans for _, wanted in pairs]
    for tuning in (triton.SpanTuning(heads_warps=1, strip=16, unroll=2, chunk=4), triton.SpanTuning(strip=1, unroll=1)):
        assert listed(triton.cut_spans(tiles, rows, rule, tuning=tuning)) == [wanted.spans for _, wanted in pairs]
    for module in (triton, cuda_impl):
        assert module.cut_spans(tiles[:0], rows[:0], rule).counts.shape == (0, 3)


# ---- tokens ----


def spans_at(bounds: list[list[tuple[int, int]]], counts: list[list[int]]) -> Spans:
    return Spans(
        torch.tensor(bounds, dtype=torch.int32, device=DEVICE), torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    )


@pytest.mark.parametrize("most", [1, 3, 16])
@pytest.mark.parametrize("module, dtype", SUMMED)
def test_picked_tokens(module: ModuleType, dtype: torch.dtype, most: int) -> None:
    """The largest, of equals the first; NaN is 0; counts beyond the room or the span; spans that are not there."""
    nowhere = (POISON, -POISON)
    bounds = [[(0, 4), (3, 16), nowhere], [(5, 6), (2, 9), (0, 16)], [nowhere] * 3]
    counts = [[2, 3, 0], [1, 9, 16], [0, 0, 0]]
    generator = np.random.default_rng(3)
    received = generator.integers(0, 4, (3, 16)) / 2 - 0.5  # many equal ones, and some below 0
    received[0, 2] = received[1, 7] = received[1, 12] = np.nan
    received[0, 0] = -0.0
    out = torch.full((3, 3, most), POISON, dtype=torch.int32, device=DEVICE)
    given = torch.from_numpy(received).to(DEVICE, dtype)
    got = module.pick(spans_at(bounds, counts), given, most, out=out)
    assert got is out
    for tile, place in product(range(3), range(3)):
        count = min(counts[tile][place], most)
        wanted = []
        if count:
            tokens = range(*bounds[tile][place])
            wanted = sorted(sorted(tokens, key=lambda token: -np.nan_to_num(received[tile, token]))[:count])
        assert got[tile, place].tolist() == wanted + [-1] * (most - len(wanted)), (tile, place)
    assert torch.equal(module.pick(spans_at(bounds, counts), given, most), out), "without a buffer"


def test_picked_tokens_of_random_spans() -> None:
    generator = torch.Generator().manual_seed(0)
    for block in (16, 32, 64, 128):
        received = torch.rand(2, block, generator=generator).to(DEVICE)
        edges = torch.randint(0, block + 1, (2, 5, 2), generator=generator).sort(2).values
        edges[..., 1] = torch.maximum(edges[..., 1], edges[..., 0] + 1)
        edges -= (edges[..., 1:] > block).long()
        counts = torch.randint(0, 7, (2, 5), generator=generator).int()
        spans = Spans(edges.int().to(DEVICE), counts.to(DEVICE))
        assert torch.equal(triton.pick(spans, received, 6), reference.pick(spans, received, 6))


# ---- who is asked, what is refused ----


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("module, dtype", SUMMED)
def test_sums_of_two_ranks_are_cut_as_all_heads(module: ModuleType, dtype: torch.dtype, rule: SpanRule) -> None:
    """Of five heads one rank has two and the other three. A tile that is flat in all heads has no level above it."""
    wanted = [distinct(5, 16, 31, rule), distinct(5, 11, 32, rule), None]
    flat = np.stack([np.full((13, 13), value) for value in (0.1, 0.7, 0.3, 0.013, 0.11)])
    given = [None if pair is None else pair[0] for pair in wanted]
    tiles, rows = batch_of([*given, flat], 16, dtype)
    parts = [module.sum_heads(part.contiguous(), rows, rule.theta) for part in (tiles[:, :2], tiles[:, 2:])]
    assert all(bool((part.summed[2] == 0).all()) and float(part.levels[2]) == 0 for part in parts)
    levels, summed = (sum(getattr(part, name) for part in parts) for name in ("levels", "summed"))
    found = listed(module.cut_summed(HeadSums(levels, summed), rows, rule))
    assert found[:3] == [[] if pair is None else pair[1].spans for pair in wanted]
    assert [span[:2] for span in found[3]] == [(0, 13)]
    if rule == RULES[0]:
        assert listed(module.cut_summed(parts[0], rows, rule)) != found, "one rank's heads cut other spans"


def test_sums_that_do_not_fit_are_refused() -> None:
    tiles, rows = torch.zeros(2, 3, 16, 16, device=DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    for module in (reference, triton, span_index):
        with pytest.raises(ValueError, match=r"tiles of shape .*: expected \[batch, heads, block, block\]"):
            module.sum_heads(tiles[0], rows, 0.5)
        sums = module.sum_heads(tiles, rows, 0.5)
        with pytest.raises(ValueError, match=r"sums of shapes \(1,\) and \(2, 16, 16\) for 2 tiles: expected \[2\]"):
            module.cut_summed(replace(sums, levels=sums.levels[:1]), rows, SpanRule())
        with pytest.raises(ValueError, match=r"sums are torch\.float64 and torch\.float32: expected both float32"):
            module.cut_summed(replace(sums, levels=sums.levels.double()), rows, SpanRule())
        with pytest.raises(ValueError, match=r"rows is torch\.int64 \(2,\)"):
            module.cut_summed(sums, rows.long(), SpanRule())
        with pytest.raises(ValueError, match=r"theta=1\.0"):
            module.cut_summed(sums, rows, SpanRule(theta=1.0))
    with pytest.raises(ValueError, match="take the reference for float64"):
        triton.sum_heads(tiles.double(), rows, 0.5)
    with pytest.raises(ValueError, match="take the reference for float64"):
        triton.cut_summed(HeadSums(sums.levels.double(), sums.summed.double()), rows, SpanRule())


def test_the_public_functions_are_the_references_on_a_cpu() -> None:
    rule = SpanRule(theta=0.5)
    tile, wanted = distinct(2, 16, 21, rule)
    tiles, rows = batch_of([tile, None], 16)
    workspace = SpanWorkspace.empty(2, 2, 16, DEVICE)
    workspace.summed.fill_(POISON)
    found = span_index.cut_spans(tiles, rows, rule, workspace=workspace)
    assert listed(found) == [wanted.spans, []] and span_index.cut_spans is dispatch.cut_spans
    assert bool((workspace.summed == POISON).all()) == (DEVICE == "cpu")
    received = torch.rand(2, 16, device=DEVICE)
    assert torch.equal(span_index.pick(found, received, 3), reference.pick(found, received, 3))


def test_bad_input_is_refused() -> None:
    tiles, rows = torch.zeros(2, 3, 16, 16, device=DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE)
    rule = SpanRule()
    for module in (reference, triton, cuda_impl, span_index):
        for odd in (tiles[0], tiles[:, :, :8, :8], tiles[:, :, :8], tiles[:, :0], torch.zeros(1, 1, 256, 256)):
            with pytest.raises(ValueError, match=r"tiles of shape .*: expected \[batch, heads, block, block\]"):
                module.cut_spans(odd, rows, rule)
        with pytest.raises(ValueError, match=r"tiles are torch\.bfloat16: expected float32"):
            module.cut_spans(tiles.bfloat16(), rows, rule)
        with pytest.raises(ValueError, match=r"rows is torch\.int64 \(2,\).*: expected contiguous int32 \(2,\)"):
            module.cut_spans(tiles, rows.long(), rule)
        with pytest.raises(ValueError, match=r"rows is torch\.int32 \(1,\)"):
            module.cut_spans(tiles, rows[:1], rule)
        for settings, message in (
            ({"theta": 1.0}, "theta=1.0, phi=0.1: expected 0 < theta < 1"),
            ({"phi": 1.0}, "phi=1.0: expected 0 < theta < 1 and 0 <= phi < 1"),
            ({"spans": 0}, "spans=0, most=3: expected at least 1"),
            ({"most": 0}, "most=0: expected at least 1"),
            ({"rate": -1.0}, "rate=-1.0: expected at least 0"),
            ({"rate": math.nan}, "rate=nan: expected at least 0"),
            ({"ratio": "both"}, "ratio='both': expected one of row, col, rowcol"),
        ):
            with pytest.raises(ValueError, match=message):
                module.cut_spans(tiles, rows, replace(rule, **settings))
        with pytest.raises(ValueError, match=r"bounds is torch\.int32 \(2, 3, 2\).*expected contiguous int32 \(2, 4"):
            module.cut_spans(tiles, rows, rule, out=Spans.empty(2, 3, DEVICE))
        with pytest.raises(ValueError, match="expected one device"):
            module.cut_spans(tiles, rows.to("meta"), rule)
    with pytest.raises(ValueError, match=r"tiles are torch\.float64 .*; use triton_impl\.cut_spans"):
        cuda_impl.cut_spans(tiles.double(), rows, rule)
    for module in (triton, cuda_impl):
        with pytest.raises(
            ValueError, match=r"thresholds is torch\.float32 \(2, 4\).*make them with SpanWorkspace\.empty"
        ):
            module.cut_spans(tiles, rows, rule, workspace=SpanWorkspace.empty(2, 4, 16, DEVICE))
    for module in (reference, triton, span_index):
        spans, received = Spans.empty(2, 4, DEVICE), torch.zeros(2, 16, device=DEVICE)
        with pytest.raises(ValueError, match="most=0: expected at least 1"):
            module.pick(spans, received, 0)
        with pytest.raises(ValueError, match=r"received of shape \(2, 15\): expected \[batch, block\]"):
            module.pick(spans, received[:, :15], 3)
        with pytest.raises(ValueError, match=r"received is torch\.float16"):
            module.pick(spans, received.half(), 3)
        with pytest.raises(ValueError, match=r"bounds is torch\.int32 \(2, 4, 2\).*expected contiguous int32 \(1, 4"):
            module.pick(spans, received[:1], 3)
        with pytest.raises(ValueError, match=r"out is torch\.int32 \(2, 4, 2\).*expected contiguous int32 \(2, 4, 3\)"):
            module.pick(spans, received, 3, out=torch.zeros(2, 4, 2, dtype=torch.int32, device=DEVICE))
    with pytest.raises(ValueError, match="tile 1 has 17 rows: expected 0 to 16"):
        reference.cut_spans(tiles, rows + torch.tensor([0, 17], dtype=torch.int32, device=DEVICE), rule)
    with pytest.raises(ValueError, match=r"span 1 of tile 0 is \[3, 17\): expected tokens of \[0, 16\)"):
        reference.pick(spans_at([[(0, 4), (3, 17)]], [[1, 1]]), torch.zeros(1, 16, device=DEVICE), 3)
    with pytest.raises(ValueError, match="take the reference for float64"):
        triton.cut_spans(tiles.double(), rows, rule)
    with pytest.raises(ValueError, match="take the reference for float64"):
        triton.pick(Spans.empty(2, 4, DEVICE), torch.zeros(2, 16, dtype=torch.float64, device=DEVICE), 3)
    with pytest.raises(ValueError, match="expected a contiguous last dimension"):
        triton.cut_spans(tiles.transpose(2, 3), rows, rule)


# ---- on a GPU ----


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_in_a_cuda_graph() -> None:
    """One graph, replayed for other tiles and other numbers of rows."""
    rule = SpanRule(theta=0.5, spans=4, most=4)
    pairs = [distinct(3, tokens, 31, rule) for tokens in (32, 21)]
    tiles, rows = batch_of([pairs[0][0], None], 32)
    received = torch.rand(2, 32, device=DEVICE)
    out, workspace = Spans.empty(2, 4, DEVICE), SpanWorkspace.empty(2, 3, 32, DEVICE)
    tokens = torch.empty(2, 4, 4, dtype=torch.int32, device=DEVICE)

    def step() -> None:
        span_index.cut_spans(tiles, rows, rule, out=out, workspace=workspace)
        span_index.pick(out, received, 4, out=tokens)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for given in ([pairs[0], pairs[1]], [None, pairs[0]], [pairs[1], None]):
        new_tiles, new_rows = batch_of([None if pair is None else pair[0] for pair in given], 32)
        tiles.copy_(new_tiles)
        rows.copy_(new_rows)
        graph.replay()
        assert listed(out) == [[] if pair is None else pair[1].spans for pair in given]
        assert torch.equal(tokens, reference.pick(out, received, 4))


COMPILE = """
import torch
from sglang_ext.kernels.span_index import SpanRule, triton_impl as spans
from tests.kernels.sm90 import compiled, stand_in

stand_in(spans, "_heads_kernel", "_cut_kernel", "_pick_kernel", shared=99 * 1024)  # what the smaller GPUs have
rows = torch.zeros(4, dtype=torch.int32)
for heads, most_spans, ratio, boxes in ((32, 4, "row", False), (32, 6, "rowcol", False), (4, 4, "col", False),
                                        (4, 6, "rowcol", True)):
    tiles = torch.zeros(4, heads, 128, 128)
    found = spans.cut_spans(tiles, rows, SpanRule(spans=most_spans, ratio=ratio, boxes=boxes))
    spans.pick(found, torch.zeros(4, 128), 3)
assert len(compiled) == 3, compiled
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile the kernels and run them")
def test_compiles_for_hopper(tmp_path: Path) -> None:
    """At the paper's sizes: blocks of 128 tokens, all heads and voting ones, 4 and 6 spans."""
    sm90.run(COMPILE, tmp_path)
