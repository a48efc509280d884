"""Ltri-LLM's functions against the paper's formulas, written out entry by entry, and against torchvision."""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from torchvision.ops import nms

from sglang_ext.attention.ltri_layer import cells_of
from sglang_ext.policies import ltri, ltri_similarity
from sglang_ext.policies.ltri_options import RATIOS, SIMILARITIES, Ltri
from sglang_ext.policies.ltri_similarity import Compared, SpanVectors

TOKENS = 13  # of a tile: odd, as a prompt's last one may be
EXACT = 1e-12  # float64


def tile(heads: int = 3, tokens: int = TOKENS, seed: int = 0) -> torch.Tensor:
    """Attention of a block to itself, whose rows do not sum to 1: the window before it gets the rest."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(heads, tokens, tokens, generator=generator, dtype=torch.float64)
    return (drawn**4).tril()


BETWEEN = 0.611
"""Of `triangles([4, 7, 5])`: 83 of 136 entries are the low ones."""


def triangles(lengths: list[int]) -> torch.Tensor:
    """One head whose rows attend to their own span, and a little to all before it."""
    total = sum(lengths)
    found = torch.full((total, total), 0.001, dtype=torch.float64)
    begin = 0
    for length in lengths:
        found[begin : begin + length, begin : begin + length] = 0.1
        begin += length
    return found.tril().unsqueeze(0)


# ---- spans ----


def spans_of(tile: torch.Tensor, settings: Ltri) -> list[ltri.Span]:
    return ltri.spans_of(ltri.summed_heads(tile, settings.theta)[0], settings)


@pytest.mark.parametrize("theta", [0.5, 0.9])
def test_scores_are_the_sums_of_triangles(theta: float) -> None:
    given = tile()
    summed = np.zeros((TOKENS, TOKENS))
    for head in given.numpy():
        threshold = np.quantile([head[i, j] for i in range(TOKENS) for j in range(i + 1)], theta)
        for i, j in product(range(TOKENS), repeat=2):
            summed[i, j] += head[i, j] - threshold if j <= i else 0
    above = ltri.above_threshold(given, theta)
    assert np.abs(above.numpy() - summed).max() < EXACT
    scores = ltri.span_scores(above)
    for y, x in product(range(TOKENS), repeat=2):
        wanted = sum(summed[i, j] for i in range(x, y + 1) for j in range(x, i + 1)) if x <= y else -math.inf
        assert scores[y, x] == wanted or abs(float(scores[y, x]) - wanted) < EXACT


def test_candidates_are_the_best_of_each_anti_diagonal() -> None:
    scores = ltri.span_scores(ltri.above_threshold(tile(), 0.9))
    scores[5, 3] = scores[4, 4] = 100.0  # equals: the shorter one
    begin, end, best = ltri.candidates(scores)
    assert len(begin) == 2 * TOKENS - 1
    for middle in range(2 * TOKENS - 1):
        spans = [(x, middle - x) for x in range(TOKENS) if x <= middle - x < TOKENS]
        x, y = min(spans, key=lambda span: (-float(scores[span[1], span[0]]), span[1] - span[0]))
        assert (int(begin[middle]), int(end[middle]), float(best[middle])) == (x, y + 1, float(scores[y, x]))


@pytest.mark.parametrize("boxes", [False, True])
@pytest.mark.parametrize("phi", [0.0, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("seed", range(5))
def test_suppression_is_torchvisions(seed: int, phi: float, boxes: bool) -> None:
    """Intervals are boxes of height 1, spans of the map are squares."""
    generator = torch.Generator().manual_seed(seed)
    begin = torch.randint(0, 100, (60,), generator=generator)
    end = begin + torch.randint(1, 40, (60,), generator=generator)
    scores = torch.rand(60, generator=generator)
    if boxes:
        given = torch.stack([begin, begin, end, end], 1)
    else:
        given = torch.stack([begin, torch.zeros_like(begin), end, torch.ones_like(begin)], 1)
    wanted = nms(given.double(), scores.double(), phi).tolist()
    assert ltri.suppress(begin, end, scores, phi, 60, boxes) == wanted
    assert ltri.suppress(begin, end, scores, phi, 4, boxes) == wanted[:4]


@pytest.mark.parametrize("boxes", [False, True])
@pytest.mark.parametrize("phi", [0.0, 0.5, 0.999])
@pytest.mark.parametrize(
    "spans",
    [
        [(3, 9)] * 6,
        [(0, 1)] * 3 + [(1, 2)] * 2,
        [(0, 4), (4, 8), (8, 12), (4, 8)],
        [(0, 12), (1, 11), (2, 10), (3, 9), (5, 6)],
        [(7, 8)],
        [],
    ],
    ids=["equal", "single tokens", "touching", "nested", "one", "none"],
)
def test_suppression_of_degenerate_spans_is_torchvisions(spans: list[tuple[int, int]], phi: float, boxes: bool) -> None:
    """Equal scores too: of these the first one goes first, as torchvision's sort has it."""
    begin, end = (torch.tensor([span[at] for span in spans], dtype=torch.int64) for at in (0, 1))
    for scores in (torch.ones(len(spans)), torch.arange(len(spans)) // 2 * 0.25):
        low, high = (begin, end) if boxes else (torch.zeros_like(begin), torch.ones_like(begin))
        wanted = nms(torch.stack([begin, low, end, high], 1).double(), scores.double(), phi).tolist()
        assert ltri.suppress(begin, end, scores, phi, 60, boxes) == wanted


def test_planted_triangles_are_found() -> None:
    assert spans_of(triangles([4, 7, 5]), Ltri(theta=BETWEEN, spans=4)) == [(0, 4), (4, 11), (11, 16)]
    assert spans_of(triangles([4, 7, 5]), Ltri(theta=BETWEEN, spans=2, vectors=2)) == [(4, 11), (11, 16)]


@pytest.mark.parametrize(
    "flat",
    [
        torch.zeros(2, 9, 9),
        torch.full((2, 9, 9), 0.25).tril(),
        torch.full((2, 9, 9), float("nan")),
        torch.ones(1, 1, 1),
    ],
    ids=["empty", "flat", "nan", "one token"],
)
def test_where_nothing_stands_out_the_block_is_one_span(flat: torch.Tensor) -> None:
    assert spans_of(flat, Ltri()) == [(0, flat.shape[-1])]


# ---- index vectors ----


@pytest.mark.parametrize("neighbours", RATIOS)
@pytest.mark.parametrize("span", [(0, 4), (4, 9), (9, TOKENS), (0, TOKENS)])
def test_the_mass_of_a_span_beside_its_neighbours(span: tuple[int, int], neighbours: str) -> None:
    summed = tile().sum(0)
    low, high = span
    beside = 0.0
    for i, j in product(range(TOKENS), repeat=2):
        row = low <= i < high and j < low
        col = i >= high and low <= j < high
        beside += float(summed[i, j]) if (row and "row" in neighbours) or (col and "col" in neighbours) else 0.0
    own = sum(float(summed[i, j]) for i in range(low, high) for j in range(low, high))
    wanted = min(1.0, own / beside) if beside else 1.0
    assert ltri.mass_ratio(summed, span, neighbours) == pytest.approx(wanted, abs=EXACT)


@pytest.mark.parametrize(
    ("given", "one_votes", "all_vote"),
    [
        ({}, 48, 12),
        ({"block": 32}, 12, 12),
        ({"block": 16, "spans": 4}, 1, 1),
        ({"block": 2, "spans": 4}, 1, 1),
        ({"spans": 4}, 12, 3),
        ({"spans": 20}, 2, 1),
        ({"vectors": 24}, 24, 24),
        ({"vectors": 24, "spans": 5}, 4, 4),
    ],
)
def test_vectors_that_are_left_out(given: dict[str, int], one_votes: int, all_vote: int) -> None:
    """A share of the block; fewer where all heads of a layer vote. What is given stays."""
    settings = Ltri(**given)  # type: ignore[arg-type]
    assert (settings.most_vectors, settings.of_all_heads().most_vectors) == (one_votes, all_vote)


@pytest.mark.parametrize(
    ("given", "compared"),
    [({}, 12), ({"queries": 20, "spans": 3}, 6), ({"queries": 1, "spans": 3}, 1), ({"vectors": 8, "spans": 2}, 4)],
)
def test_how_many_tokens_of_a_span_are_compared(given: dict[str, int], compared: int) -> None:
    assert Ltri(**given).most_queries == compared  # type: ignore[arg-type]


def test_how_many_vectors_a_span_gets() -> None:
    assert ltri.vector_count(40, 1.0, 3.0, 100) == 40, "nobody knows the span: all of it"
    assert ltri.vector_count(40, 0.5, 3.0, 100) == int(40 * math.exp(-1.5))
    assert ltri.vector_count(40, 0.0, 20.0, 100) == 1 and ltri.vector_count(40, 1.0, 3.0, 3) == 3
    assert ltri.vector_count(1, 1.0, 0.0, 3) == 1


def test_picked_tokens() -> None:
    received = torch.tensor([9.0, 1.0, 5.0, 5.0, 2.0, 8.0])
    assert ltri.picked(received, (1, 5), 1) == [2] and ltri.picked(received, (1, 5), 3) == [2, 3, 4]
    settings = Ltri(theta=BETWEEN, spans=4, vectors=8, rate=0.0, early_rate=100.0)
    received = torch.arange(16.0)
    sums = ltri.summed_heads(triangles([4, 7, 5]), BETWEEN)
    found = ltri.index_tokens(ltri.counted_spans(sums, settings, layer=9), received)
    assert found == [[2, 3], [9, 10], [14, 15]]
    early = ltri.index_tokens(ltri.counted_spans(sums, settings, layer=3), received)
    assert early[0] == [2, 3] and all(len(span) <= 2 for span in early), "the first span has no neighbours"


# ---- similarity ----


def spans_with(counts: list[int], seed: int) -> SpanVectors:
    generator = torch.Generator().manual_seed(seed)
    found = SpanVectors.of([torch.randn(count, 6, generator=generator, dtype=torch.float64) for count in counts])
    found.vectors[~found.used] = float("nan")  # nobody may look at them
    return found


@pytest.mark.parametrize("kind", SIMILARITIES)
def test_similarity_is_the_formula(kind: str) -> None:
    query, memory = spans_with([2, 1, 3], 0), spans_with([1, 3, 2, 2], 1)
    got = ltri_similarity.similarity(query, memory, Compared(kind, 6))
    everything = [(s, memory.vectors[s, m]) for s in range(4) for m in range(int(memory.counts[s]))]
    for q, s in product(range(3), range(4)):
        found = []
        for vector in query.vectors[q, : int(query.counts[q])]:
            products = [float(vector @ key) for at, key in everything if at == s]
            if kind == "mass":
                total = sum(math.exp(float(vector @ key) / math.sqrt(6)) for _, key in everything)
                products = [math.exp(x / math.sqrt(6)) / total for x in products]
            found += products
        wanted = max(found) if kind == "max" else sum(found)
        assert float(got[q, s]) == pytest.approx(wanted, abs=EXACT)


def test_a_folded_sum_is_the_sum_of_all_products() -> None:
    query, memory = spans_with([2, 4], 2), spans_with([3, 1, 5], 3)
    products = torch.einsum("qnd,smd->qnsm", query.vectors.nan_to_num(), memory.vectors.nan_to_num())
    folded = ltri_similarity.similarity(query, memory, Compared("sum", 6))
    assert (folded - products.sum((1, 3))).abs().max() < EXACT


def test_a_block_has_the_score_of_its_best_span() -> None:
    similarities = torch.tensor([[1.0, 7.0, 3.0, 2.0], [4.0, 0.0, 3.0, 6.0]])
    scores = ltri_similarity.block_scores(similarities, torch.tensor([0, 0, 1, 2]), 3)
    assert scores.tolist() == [7.0, 3.0, 6.0] and ltri.best_blocks(scores, 2) == [0, 2]
    assert ltri.best_blocks(torch.tensor([1.0, 2.0, 2.0]), 5) == [1, 2, 0], (
        "of equals the first; never more than there are"
    )


# ---- heads of several ranks ----


def ranks_of(*others: list[torch.Tensor]) -> ltri.TensorRanks:
    """This rank and others, of which each says what it adds, call by call."""
    calls = [iter(each) for each in others]
    return ltri.TensorRanks(len(others) + 1, lambda values: torch.stack([values, *map(next, calls)]).sum(0))


def test_sums_of_the_ranks_are_those_of_all_heads() -> None:
    """NaN of one rank's head hides no other head."""
    whole = tile(heads=6)
    whole[1, 5, 3] = float("nan")
    parts = [ltri.summed_heads(part, 0.7) for part in (whole[:2], whole[2:3], whole[3:])]
    flat = [part.flatten() for part in parts]
    (sums,) = ranks_of([flat[1]], [flat[2]]).add_all([parts[0]])
    assert (sums - ltri.summed_heads(whole, 0.7)).abs().max() < EXACT
    settings = Ltri(theta=0.7, rate=0.1, spans=4)
    assert len(ltri.spans_of(sums[0], settings)) > 1
    spans = ltri.counted_spans(sums, settings, layer=9)
    assert spans == ltri.counted_spans(ltri.summed_heads(whole, 0.7), settings, layer=9)
    assert any(spans != ltri.counted_spans(part, settings, layer=9) for part in parts), "no rank knows them alone"


def test_several_tensors_are_added_at_once() -> None:
    first, second = torch.arange(6.0).view(2, 3), torch.arange(4.0)
    asked: list[torch.Tensor] = []
    ranks = ltri.TensorRanks(2, lambda values: asked.append(values) or 3 * values)  # type: ignore[func-returns-value]
    found = ranks.add_all([first, second])
    assert len(asked) == 1 and all(map(torch.equal, found, [3 * first, 3 * second]))
    assert ranks.add_all([]) == [] and len(asked) == 1, "nothing is asked where there is nothing to add"
    assert all(map(torch.equal, ltri.TensorRanks().add_all([first, second]), [first, second]))


@pytest.mark.parametrize("kind", SIMILARITIES)
@pytest.mark.parametrize("cut", [2, 3, 6], ids=["unequal", "halves", "another rank has none"])
def test_products_of_the_ranks_are_those_of_all_components(kind: str, cut: int) -> None:
    query, memory = spans_with([2, 1, 3], 0), spans_with([1, 3, 2, 2], 1)
    here, there = (
        [SpanVectors(each.vectors[..., part], each.counts) for each in (query, memory)]
        for part in (slice(cut), slice(cut, None))
    )
    added: list[torch.Tensor] = []
    note = ltri.TensorRanks(2, lambda values: added.append(values) or values)  # type: ignore[func-returns-value]
    ltri_similarity.similarity(*there, Compared(kind, 6, note))
    got = ltri_similarity.similarity(*here, Compared(kind, 6, ranks_of(added)))
    wanted = ltri_similarity.similarity(query, memory, Compared(kind, 6))
    assert len(added) == 1 and (got - wanted).abs().max() < EXACT


# ---- votes ----


def test_layers_vote() -> None:
    none, first, second = torch.zeros(4), torch.tensor([5.0, 4.0, 0.0, 0.0]), torch.tensor([0.0, 3.0, 9.0, 1.0])
    settings = Ltri(retrieved=2)
    assert ltri.retrieved(none, None, 0.0, settings)[0] == [], "before the first layer that votes"
    got, votes = ltri.retrieved(none, first, 0.5, settings)
    assert got == [0, 1] and votes.tolist() == [0.5, 0.5, 0.0, 0.0]
    got, after = ltri.retrieved(votes, second, 0.3, settings)
    assert after.tolist() == pytest.approx([0.5, 0.8, 0.3, 0.0]) and got == [1, 0]
    assert ltri.retrieved(after, None, 0.0, settings)[0] == [1, 0], "a layer without a head follows"
    assert none.tolist() == [0.0] * 4, "votes are not changed in place: a pass may be computed again"


def test_the_own_layer_may_be_left_out() -> None:
    settings, none = Ltri(retrieved=2, vote="preceding"), torch.zeros(4)
    got, votes = ltri.retrieved(none, torch.tensor([5.0, 4.0, 0.0, 0.0]), 0.5, settings)
    assert got == [], "nobody voted before"
    got, _ = ltri.retrieved(votes, torch.tensor([0.0, 3.0, 9.0, 1.0]), 0.3, settings)
    assert got == [1, 0], "equal votes: in the order of the layer's own scores"
    off = Ltri(retrieved=2, vote="off")
    assert ltri.retrieved(votes, torch.tensor([0.0, 3.0, 9.0, 1.0]), 0.3, off)[0] == [2, 1]
    assert ltri.retrieved(votes, None, 0.0, off)[0] == []


# ---- settings ----


CHUNKS = Ltri(sinks=4, window=32, block=4, chunk=16, last=5)


def test_a_token_lies_in_the_same_chunk_wherever_a_prompt_is_cut() -> None:
    for begin, prompt in product((0, 3, 16, 33), (1, 5, 6, 16, 17, 21, 53, 64)):
        if begin >= prompt:
            continue
        whole = CHUNKS.chunks(begin, prompt + 3, prompt)
        multiples = range(begin // 16 * 16 + 16, prompt, 16)
        ends = {*multiples, prompt, *([prompt - 5] if prompt - 5 > begin else [])} | {
            prompt + 1,
            prompt + 2,
            prompt + 3,
        }
        assert {end for _, end in whole} == ends and whole[0][0] == begin
        assert all(high == low for (_, high), (low, _) in pairwise(whole))
        for room in range(1, prompt + 3 - begin):
            cut = CHUNKS.cut(begin, begin + room, prompt)
            assert cut == max((end for end in ends if end <= begin + room), default=begin)
            if cut > begin:
                assert CHUNKS.chunks(begin, cut, prompt) + CHUNKS.chunks(cut, prompt + 3, prompt) == whole


def test_a_part_of_a_chunk_is_none() -> None:
    with pytest.raises(ValueError, match="expected whole chunks, which end at multiples of 16, at 35 and at 40"):
        CHUNKS.chunks(16, 30, 40)


def test_a_token_keeps_its_slot_until_it_has_left_the_window() -> None:
    for begin, end in CHUNKS.chunks(0, 300, 290):
        seen = [*range(min(begin, 4)), *range(CHUNKS.local(begin), end)]
        cells = cells_of(CHUNKS, torch.tensor(seen))
        assert len({*cells.tolist()}) == len(seen) and 0 <= int(cells.min()) <= int(cells.max()) < CHUNKS.slots


def test_blocks_leave_the_window() -> None:
    settings = Ltri(sinks=4, window=32, block=4, chunk=16, last=5)
    assert [settings.evicted(n) for n in (0, 3, 36, 39, 40, 52)] == [0, 0, 0, 0, 1, 4]
    assert [settings.local(n) for n in (0, 3, 36, 39, 40, 52)] == [0, 3, 4, 4, 8, 20]
    for before in range(100):
        assert 32 <= before - settings.local(before) < 32 + 4 or settings.evicted(before) == 0
    assert [settings.blocks(n) for n in (0, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]


def test_index_vectors_are_packed_where_one_head_votes() -> None:
    assert Ltri().packs and Ltri(similarity="mass").packs and Ltri(four_bits=True).packs
    for others in (Ltri(four_bits=False), Ltri(similarity="sum"), Ltri(index="mean"), Ltri().of_all_heads()):
        assert not others.packs
    for dim, packs in ((64, True), (128, True), (256, True), (96, False), (81, False), (320, False)):
        assert Ltri().of_one_head(dim).packs is packs
        assert not Ltri(similarity="sum").of_one_head(dim).packs
    assert Ltri(four_bits=True).of_one_head(96).packs and not Ltri(four_bits=False).of_one_head(128).packs
    for dim in (81, 320):
        with pytest.raises(ValueError, match=f"heads of {dim} components: expected an even number of at most 256"):
            Ltri(four_bits=True).of_one_head(dim)
    with pytest.raises(ValueError, match="four_bits=True, and all heads of a layer vote: expected a file"):
        Ltri(four_bits=True).of_all_heads()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"chunk": 500}, "chunk=500, block=128: expected a chunk of whole blocks"),
        ({"window": 256}, "window=256, chunk=512: expected a window of at least a chunk"),
        ({"cached": 15}, "cached=15: expected a whole number of at least retrieved=16"),
        ({"last": 0}, "last=0: expected a whole number of at least 1"),
        ({"askers": 0}, "askers=0: expected a whole number of at least 1"),
        ({"last": 513}, "last=513, chunk=512: expected at most a chunk"),
        ({"similarity": "cosine"}, "similarity='cosine': expected one of sum, max, mass"),
        ({"asking": "all"}, "asking='all': expected one of tokens, spans"),
        ({"four_bits": True, "similarity": "sum"}, "similarity='sum': expected index 'ltri' with similarity 'max'"),
        ({"four_bits": True, "index": "infllm"}, "index='infllm', similarity='max': expected index 'ltri'"),
        ({"four_bits": 4}, "four_bits=4: expected true or false"),
        ({"theta": 1.0}, "theta=1.0, phi=0.1: expected 0 < theta < 1"),
        ({"theta": 0.0}, "theta=0.0, phi=0.1: expected 0 < theta < 1"),
        ({"spans": 13, "vectors": 12}, "vectors=12, spans=13: expected a whole number of at least one for each span"),
        ({"vectors": 0}, "vectors=0, spans=1: expected a whole number of at least one for each span"),
        ({"vectors": True}, "vectors=True, spans=1: expected a whole number of at least one for each span"),
        ({"vectors": "12"}, "vectors='12', spans=1: expected a whole number of at least one for each span"),
        ({"sinks": True}, "sinks=True: expected a whole number"),
        ({"rate": -1.0}, "rate=-1.0, early_rate=20.0: expected at least 0"),
    ],
)
def test_wrong_settings(given: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", "\\(")):
        Ltri(**given)  # type: ignore[arg-type]
