"""Scores of memory blocks against equations 8 and 9 written as loops, and against the policy.

What there is not is NaN: vectors beyond a span's number, entries of the index that no request names, and outputs before
they are written. What scores and elections (`test_elections.py`) have in common is tested here, too.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from sglang_ext.kernels import block_votes
from sglang_ext.kernels.block_votes import BlockIndex, QuerySpans, reference
from sglang_ext.kernels.block_votes import triton_impl as triton
from sglang_ext.policies import ltri_similarity
from tests.kernels import sm90
from tests.kernels.block_votes import BOTH, DEVICE, NONE
from tests.kernels.test_elections import Ballots, same

# Triton's interpreter multiplies the bits of bfloat16 as integers.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
# Beside the largest score. Half precision: the inputs are the same numbers in both, products are added in float32.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 3e-6, torch.bfloat16: 3e-6}
KINDS = ("sum", "max", "mass")
SMALL = triton.BlockTuning(columns=16, rows=16, width=16, warps=2, stages=1)


class Case:
    """Requests of different numbers of blocks, anywhere in the index; the last begins with blocks of the first."""

    def __init__(
        self, dtype, blocks=(7, 0, 11), limit=11, spans=3, most=2, query_spans=5, most_q=3, dim=20, seed=0, other=None
    ):
        gen = torch.Generator().manual_seed(seed)
        batch, entries = len(blocks), sum(blocks) + 3
        draw = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)  # noqa: E731
        self.asked, self.kept = draw(batch, query_spans, most_q, dim), draw(entries, spans, most, dim)
        if other is not None:
            self.kept = self.kept.to(other)
        self.asked_counts = torch.randint(0, most_q + 1, (batch, query_spans), generator=gen).int()
        self.asked_counts[:, 0] = most_q
        self.kept_counts = torch.randint(0, most + 1, (entries, spans), generator=gen).int()
        self.blocks = torch.tensor(blocks, dtype=torch.int64 if seed % 2 else torch.int32)
        *taken, unused = torch.randperm(entries, generator=gen).int().split([*blocks, 3])
        self.ids = unused[torch.randint(0, 3, (batch, limit), generator=gen)]
        for ids, each in zip(self.ids, taken, strict=True):
            ids[: len(each)] = each
        shared = (min(blocks[0], blocks[-1]) + 1) // 2 if batch > 1 else 0
        self.ids[batch - 1 :, :shared] = self.ids[:1, :shared]
        for vectors, counts in ((self.asked, self.asked_counts), (self.kept, self.kept_counts)):
            beyond = torch.arange(vectors.shape[-2]) >= counts.unsqueeze(-1)
            vectors.masked_fill_(beyond.unsqueeze(-1), math.nan)
        self.spoil()

    def named(self, request):
        """The entries of a request's blocks."""
        return self.ids[request, : int(self.blocks[request])].long()

    def spoil(self):
        """Nothing may read the entries that no request names."""
        unused = torch.ones(len(self.kept), dtype=torch.bool)
        for request in range(len(self.blocks)):
            unused[self.named(request)] = False
        self.kept[unused], self.kept_counts[unused] = math.nan, 10**6

    def spans(self, request):
        """Vectors [vectors, dim] of each query span, and of each block's spans, float64, without those that are not."""
        asked = [v[:n].double() for v, n in zip(self.asked[request], self.asked_counts[request], strict=True) if n]
        kept = [
            [v[:n].double() for v, n in zip(self.kept[entry], self.kept_counts[entry], strict=True) if n]
            for entry in self.named(request)
        ]
        return asked, kept

    def expected(self, kind):
        """[batch, max_blocks] float64, span by span."""
        found = torch.full(self.ids.shape, NONE, dtype=torch.float64)
        for request in range(len(self.blocks)):
            asked, kept = self.spans(request)
            every = [vector for spans in kept for span in spans for vector in span]
            scale = self.asked.shape[-1] ** -0.5
            for block, spans in enumerate(kept):
                for span in spans:
                    for question in asked:
                        products = question @ span.T
                        if kind == "mass":
                            whole = (question @ torch.stack(every).T * scale).exp().sum(1, keepdim=True)
                            products = (products * scale).exp() / whole
                        similar = float(products.max() if kind == "max" else products.sum())
                        found[request, block] = max(float(found[request, block]), similar)
        return found

    def query(self):
        return QuerySpans(self.asked.to(DEVICE), self.asked_counts.to(DEVICE))

    def index(self):
        return BlockIndex(*(t.to(DEVICE) for t in (self.kept, self.kept_counts, self.ids, self.blocks)))

    def close(self, found, kind, dtype):
        want = self.expected(kind)
        assert found.shape == want.shape and found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        found = found.cpu().double()
        there = want > NONE
        assert torch.equal(found == NONE, ~there)
        if there.any():
            error = (found - want)[there].abs().max()
            assert error <= TOLERANCE[dtype] * want[there].abs().max(), (kind, error)


class PackedCase(Case):
    """The same of packed index vectors; bytes of what there is not are 255, scales NaN."""

    def __init__(self, dtype, **sizes):
        super().__init__(dtype, **sizes)
        gen = torch.Generator().manual_seed(13)
        steps = torch.randint(-7, 8, self.kept.shape, generator=gen)
        self.scales = torch.rand(self.kept.shape[:2], generator=gen)
        half = steps.shape[-1] // 2
        self.packed = (steps[..., :half] + 8 + (steps[..., half:] + 8) * 16).to(torch.uint8)
        self.kept = steps.double() * self.scales.double()[..., None, None]
        self.packed[torch.arange(steps.shape[2]) >= self.kept_counts.unsqueeze(-1)] = 255
        self.spoil()
        self.scales[self.kept_counts == 10**6] = math.nan
        beyond = torch.arange(self.asked.shape[2]) >= self.asked_counts.unsqueeze(-1)
        spoilt = self.asked[beyond]
        spoilt[::2] = 10**4  # which a largest component would not ignore, as it may NaN
        self.asked[beyond] = spoilt

    def round_query(self):
        """To 8 bits, by the largest component of all vectors of a request, in float32, as the kernel in CUDA does."""
        self.asked = self.asked.float()
        for asked, counts in zip(self.asked, self.asked_counts, strict=True):
            there = torch.arange(asked.shape[1]) < counts.unsqueeze(1)
            if not there.any():
                continue
            largest = asked[there].abs().max()
            factor = torch.div(torch.tensor(127.0), largest)  # 127 / largest multiplies by the reciprocal
            asked[there] = (asked[there] * factor).round() * (largest / 127)

    def index(self):
        found = (self.packed, self.kept_counts, self.ids, self.blocks, self.scales)
        return BlockIndex(*(t.to(DEVICE) for t in found))


IMPLEMENTATIONS = [
    pytest.param(reference, torch.float64, {}, id="reference-float64"),
    pytest.param(reference, torch.float32, {}, id="reference-float32"),
    pytest.param(reference, HALF, {}, id="reference-half"),
    pytest.param(triton, torch.float32, {"tuning": SMALL}, id="triton-small tiles"),
    pytest.param(triton, torch.float32, {}, id="triton-float32"),
    pytest.param(triton, HALF, {}, id="triton-half"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("module, dtype, more", IMPLEMENTATIONS)
def test_scores(module, dtype, more, kind):
    case = Case(dtype)
    out = torch.full((3, 11), math.nan, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=DEVICE)
    found = module.score_blocks(case.query(), case.index(), kind=kind, out=out, **more)
    assert found is out
    case.close(found, kind, dtype)
    case.close(module.score_blocks(case.query(), case.index(), kind=kind, **more), kind, dtype)


SIZES = [
    {"blocks": (37, 5), "limit": 37, "spans": 4, "most": 3, "query_spans": 6, "most_q": 4, "dim": 24},
    {"blocks": (1,), "limit": 1, "spans": 1, "most": 1, "query_spans": 1, "most_q": 1, "dim": 8},
    {"blocks": (70,), "limit": 75, "spans": 2, "most": 1, "query_spans": 20, "most_q": 1, "dim": 96},
    {"blocks": (3, 3), "limit": 4, "spans": 1, "most": 20, "query_spans": 2, "most_q": 20, "dim": 136},
    {"blocks": (23,), "limit": 24, "spans": 4, "most": 3, "query_spans": 32, "most_q": 1, "dim": 64},  # tokens ask
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "x".join(map(str, sizes["blocks"])))
@BOTH
def test_scores_of_other_sizes(module, sizes, kind):
    """Whole and cut tiles over blocks, spans of the query and components; more vectors a span than a tile has rows."""
    case = Case(torch.float32, seed=3, **sizes)
    case.close(module.score_blocks(case.query(), case.index(), kind=kind), kind, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [{}, *SIZES], ids=lambda sizes: "x".join(map(str, sizes.get("blocks", ()))))
@pytest.mark.parametrize("module, dtype, more", IMPLEMENTATIONS)
def test_scores_of_packed_vectors(module, dtype, more, sizes, kind):
    case = PackedCase(dtype, seed=7, **sizes)
    case.close(module.score_blocks(case.query(), case.index(), kind=kind, **more), kind, dtype)


@pytest.mark.parametrize("tuning", [None, SMALL], ids=["default", "small tiles"])
def test_mass_in_few_parts(monkeypatch, tuning):
    """Several tiles a program, the last part shorter than the others, one of a request without a block."""
    monkeypatch.setattr(triton, "PARTS", 3)
    case = Case(torch.float32, blocks=(61, 20, 0), limit=64, seed=5, dim=16)
    found = triton.score_blocks(case.query(), case.index(), kind="mass", tuning=tuning)
    case.close(found, "mass", torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@BOTH
def test_ids_beyond_a_request_s_blocks_may_be_anything(module, kind):
    """A kernel that reads by them crashes."""
    case = Case(torch.float32, blocks=(7, 0, 19), limit=40, seed=1)
    beyond = torch.arange(40) >= case.blocks[:, None]
    case.ids[beyond] = torch.tensor([-1, -(10**9), 2**31 - 1])[torch.arange(int(beyond.sum())) % 3].int()
    case.close(module.score_blocks(case.query(), case.index(), kind=kind), kind, torch.float32)


def test_large_logits():
    """Where exponentials without their maximum overflow."""
    case = Case(torch.float32, dim=16)
    case.asked *= 40
    want = reference.score_blocks(
        QuerySpans(case.asked.double().to(DEVICE), case.query().counts), case.index(), kind="mass"
    )
    found = triton.score_blocks(case.query(), case.index(), kind="mass", tuning=SMALL)
    there = want > NONE
    assert torch.equal(found > NONE, there)
    assert (found.double() - want)[there].abs().max() <= 1e-4  # logits of 500 have errors of 3e-5


@pytest.mark.parametrize("kind", KINDS)
@BOTH
def test_query_and_index_of_two_dtypes(module, kind):
    """Products are in the wider one."""
    case = Case(torch.float32, seed=9, other=HALF)
    case.close(module.score_blocks(case.query(), case.index(), kind=kind), kind, torch.float32)


@pytest.mark.parametrize("names", [("asked", "kept"), ("kept",), ("asked",)], ids="+".join)
@BOTH
def test_folded_vectors_give_the_same_sum(module, names):
    """The sums of both, or of one, of which there is one vector a span."""
    case = Case(torch.float32, seed=2)
    folded = Case(torch.float32, seed=2)
    for name in names:
        vectors, counts = getattr(case, name), getattr(case, name + "_counts")
        setattr(folded, name, vectors.nan_to_num().sum(-2, keepdim=True).contiguous())
        setattr(folded, name + "_counts", counts.clamp(max=1))
    folded.spoil()
    found = module.score_blocks(folded.query(), folded.index(), kind="sum")
    case.close(found, "sum", torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_the_policy_s(kind):
    case = Case(torch.float64, blocks=(9, 11), seed=4)
    case.kept_counts[:, 0] = 2  # the policy has no block without a span
    case.kept.normal_()
    case.spoil()
    found = reference.score_blocks(case.query(), case.index(), kind=kind).cpu()
    for request in range(2):
        asked, kept = case.spans(request)
        owners = torch.tensor([block for block, spans in enumerate(kept) for _ in spans])
        memory = ltri_similarity.SpanVectors.of([span for spans in kept for span in spans])
        how = ltri_similarity.Compared(kind, memory.vectors.shape[-1])
        similar = ltri_similarity.similarity(ltri_similarity.SpanVectors.of(asked), memory, how)
        want = ltri_similarity.block_scores(similar, owners, len(kept))
        assert (found[request, : len(kept)] - want).abs().max() <= 1e-12 * want.abs().max()


@pytest.mark.parametrize("kind", KINDS)
@BOTH
def test_nothing_to_compare(module, kind):
    """No blocks, whatever their ids; blocks without spans; a chunk without spans; tensors without numbers."""
    case = Case(torch.float32, blocks=(0, 6, 6), seed=6)
    case.kept_counts[case.named(1)] = 0
    case.asked_counts[2] = 0
    found = module.score_blocks(case.query(), case.index(), kind=kind)
    assert (found == NONE).all()
    for sizes in ({"limit": 0, "blocks": (0, 0)}, {"blocks": ()}):
        case = Case(torch.float32, **sizes)
        assert module.score_blocks(case.query(), case.index(), kind=kind).numel() == 0
    case = Case(torch.float32)
    query = QuerySpans(torch.zeros(3, 0, 3, 20, device=DEVICE), torch.zeros(3, 0, dtype=torch.int32, device=DEVICE))
    assert (module.score_blocks(query, case.index(), kind=kind) == NONE).all()
    case = Case(torch.float32, blocks=(0, 0, 0))
    case.kept, case.kept_counts = case.kept[:0], case.kept_counts[:0]
    assert (module.score_blocks(case.query(), case.index(), kind=kind) == NONE).all()


@pytest.mark.parametrize("kind", KINDS)
@BOTH
def test_an_index_of_more_than_2_31_numbers(module, kind):
    """Of 4 GiB, of which only what is read and written takes memory on a CPU."""
    spans, most, dim = 8, 16, 512
    few = Case(torch.float16, blocks=(3,), limit=4, spans=spans, most=most, dim=dim, seed=8)
    entries = 2**31 // (spans * most * dim) + 5
    large = torch.empty(entries, spans, most, dim, dtype=torch.float16, device=DEVICE)
    counts = torch.zeros(entries, spans, dtype=torch.int32, device=DEVICE)
    at = torch.tensor([entries - 1, 7, entries - 4], device=DEVICE)
    large[at], counts[at] = few.kept[few.named(0)].to(DEVICE), few.kept_counts[few.named(0)].to(DEVICE)
    ids = torch.nn.functional.pad(at[None].int(), (0, 1), value=-1)
    index = BlockIndex(large, counts, ids, few.blocks.to(DEVICE))
    few.close(module.score_blocks(few.query(), index, kind=kind), kind, torch.float16)


# ---- both ----


@BOTH
def test_bad_input_is_refused(module):
    case = Case(torch.float32)
    query, index = case.query(), case.index()
    votes = torch.zeros(3, 11, device=DEVICE)
    bad_queries = [
        (QuerySpans(query.vectors[..., :8], query.counts), "of one dim"),
        (QuerySpans(query.vectors.long(), query.counts), "expected floating dtypes"),
        (QuerySpans(query.vectors, query.counts.long()), "query counts are torch.int64"),
        (QuerySpans(query.vectors[:2], query.counts[:2]), r"ids are torch.int32 \(3, 11\): expected int32 \[2, max_bl"),
    ]
    for bad, message in bad_queries:
        with pytest.raises(ValueError, match=message):
            module.score_blocks(bad, index)
    bad_indexes = [
        (dataclasses.replace(index, vectors=index.vectors[None]), r"expected .* \[entries, spans, most, dim\]"),
        (dataclasses.replace(index, counts=index.counts[:, :2]), "index counts are"),
        (dataclasses.replace(index, ids=index.ids.long()), "ids are torch.int64"),
        (dataclasses.replace(index, ids=index.ids[0]), r"ids are torch.int32 \(11,\)"),
        (dataclasses.replace(index, ids=index.ids.to("meta")), "expected one device"),
        (dataclasses.replace(index, blocks=index.blocks.float()), r"blocks is torch\.float32"),
        (dataclasses.replace(index, blocks=index.blocks[:2]), r"blocks is torch\.int32 \(2,\)"),
    ]
    for wrong, message in bad_indexes:
        with pytest.raises(ValueError, match=message):
            module.score_blocks(query, wrong)
    with pytest.raises(ValueError, match="kind='mean'"):
        module.score_blocks(query, index, kind="mean")
    with pytest.raises(ValueError, match=r"out is torch\.float32 \(3, 10\)"):
        module.score_blocks(query, index, out=votes[:, :10])
    for settings, message in (
        ({"scores": votes[:2]}, "scores are"),
        ({"votes": votes.long()}, "votes are torch.int64"),
        ({"weight": votes[:2, 0]}, "weight is"),
        ({"count": -1}, "count=-1"),
        ({"count": 2.0}, r"count=2\.0"),
        ({"mode": "all"}, "mode='all'"),
        ({"out": torch.zeros(3, 2, dtype=torch.int32, device=DEVICE)}, r"out is torch.int32 \(3, 2\)"),
    ):
        given = {"votes": votes, "scores": votes, "weight": 1.0, "count": 3, **settings}
        with pytest.raises(ValueError, match=message):
            module.elect(given.pop("votes"), given.pop("scores"), **given)
    with pytest.raises(ValueError, match="expected one device"):
        module.elect(votes, torch.zeros(3, 11, device="meta"), weight=1.0, count=3)


def test_the_reference_refuses_values_out_of_range():
    case = Case(torch.float32)
    case.blocks[0] = 12
    with pytest.raises(ValueError, match="request 0 has 12 blocks: expected 0 to 11"):
        reference.score_blocks(case.query(), case.index())
    for entry in (21, -1):
        case = Case(torch.float32)
        case.ids[2, 10] = entry
        with pytest.raises(ValueError, match=f"request 2 has entries .*{entry}.*: expected 0 to 20"):
            reference.score_blocks(case.query(), case.index())
    case = Case(torch.float32)
    case.asked_counts[0, 0] = 4
    with pytest.raises(ValueError, match="4 vectors: expected 0 to 3"):
        reference.score_blocks(case.query(), case.index())


def test_the_kernels_refuse_what_they_cannot_do():
    case = Case(torch.float64)
    with pytest.raises(ValueError, match="take the reference for float64"):
        triton.score_blocks(case.query(), case.index())
    case = Case(torch.float32)
    index = case.index()
    turned = index.vectors.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match=r"index vectors of shape .* expected contiguous"):
        triton.score_blocks(case.query(), dataclasses.replace(index, vectors=turned))
    with pytest.raises(ValueError, match=r"ids of shape .* expected contiguous"):
        triton.score_blocks(case.query(), dataclasses.replace(index, ids=index.ids[:, :7]))
    for sizes, message in (
        ({"spans": 5, "most": 17}, r"blocks of 5 x 17 vectors.* 8 x 32 and 4; set `vectors` or `spans` lower"),
        ({"most_q": 129}, "query spans of 129: expected at most 128"),
    ):
        case = Case(torch.float32, **sizes)
        with pytest.raises(ValueError, match=message):
            triton.score_blocks(case.query(), case.index())
    votes = torch.zeros(2, 70, device=DEVICE)
    with pytest.raises(ValueError, match="count=65: expected at most 64; set `retrieved` lower"):
        triton.elect(votes, votes, weight=1.0, count=65)
    with pytest.raises(ValueError, match=r"votes for 32769 blocks .* set `block` higher"):
        triton.elect(torch.zeros(1, 32769, device=DEVICE), None, weight=1.0, count=3)
    with pytest.raises(ValueError, match=r"votes of shape .* expected contiguous"):
        triton.elect(votes[:, ::2], None, weight=1.0, count=3)
    with pytest.raises(ValueError, match=r"votes are torch\.float64: expected float32"):
        triton.elect(votes.double(), None, weight=1.0, count=3)


def test_dispatch():
    """By the device of what is read: plain PyTorch on a CPU, also float64; the kernels on a GPU."""
    dtype = torch.float64 if DEVICE == "cpu" else torch.float32
    case = Case(dtype)
    case.close(block_votes.score_blocks(case.query(), case.index(), kind="max"), "max", dtype)
    ballots = Ballots((40, 64, 3), 70)
    found, votes = ballots.elect(block_votes, True, weight=0.7, count=5, mode="preceding")
    chosen, after = ballots.expected(True, 0.7, 5, "preceding")
    assert torch.equal(found, chosen) and same(votes, after)


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spans", [1, 3])
def test_a_graph_reads_ids_and_counts_when_it_is_replayed(kind, spans):
    """Captured with no blocks, replayed with others."""
    case = Case(HALF, blocks=(61, 20, 64), limit=64, dim=64, spans=spans)
    query, index = case.query(), case.index()
    ids, blocks, votes = index.ids.clone(), index.blocks.clone(), torch.zeros(3, 64, device=DEVICE)
    out, chosen = torch.empty(3, 64, device=DEVICE), torch.empty(3, 16, dtype=torch.int32, device=DEVICE)
    index.ids.fill_(-1)
    index.blocks.zero_()

    def step():
        block_votes.score_blocks(query, index, kind=kind, out=out)
        block_votes.elect(votes, out, weight=0.5, count=16, out=chosen)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    index.ids.copy_(ids)
    index.blocks.copy_(blocks)
    graph.replay()
    case.close(out, kind, HALF)
    after = torch.zeros_like(votes)
    wanted = reference.elect(after, out, weight=0.5, count=16)
    assert torch.equal(chosen, wanted) and torch.equal(votes, after) and after.any()


COMPILE = """
import torch
from sglang_ext.kernels.block_votes import BlockIndex, QuerySpans, triton_impl
from tests.kernels.sm90 import compiled, stand_in

stand_in(triton_impl, "_parts_kernel", "_scores_kernel", "_elect_kernel")


def score(batch, limit, spans, most, query_spans, most_q, dim, dtype, kind, packed=False):
    ints = torch.zeros(batch, dtype=torch.int32)
    query = QuerySpans(torch.empty(batch, query_spans, most_q, dim, dtype=dtype),
                       torch.zeros(batch, query_spans, dtype=torch.int32))
    kept = torch.empty(1, spans, most, dim // 2 if packed else dim, dtype=torch.uint8 if packed else dtype)
    index = BlockIndex(kept, torch.zeros(1, spans, dtype=torch.int32), torch.zeros(batch, limit, dtype=torch.int32),
                       ints, torch.empty(1, spans) if packed else None)
    triton_impl.score_blocks(query, index, kind=kind)


half, wide = torch.bfloat16, torch.float32
# One head that votes: 512 tokens of 4 blocks of 4 spans of 3 vectors; folded ones; RULER's 6 spans of 4 vectors.
score(1, 4096, 4, 3, 16, 3, 128, half, "max")
assert "wgmma" in compiled["block_votes_scores_kernel"].asm["ptx"]
score(8, 8192, 4, 1, 16, 3, 96, half, "sum")
score(1, 8192, 4, 1, 4, 1, 64, half, "sum")
score(8, 8192, 6, 4, 24, 4, 128, half, "mass")
score(1, 4096, 1, 1, 1, 1, 128, torch.float16, "sum")
# All heads; float32; as many vectors as are taken.
score(1, 1024, 4, 3, 16, 3, 4096, half, "max")
assert "cp.async" in compiled["block_votes_scores_kernel"].asm["ptx"]
score(1, 4096, 4, 1, 16, 1, 4096, half, "sum")
score(1, 4096, 4, 3, 16, 3, 128, wide, "mass")
score(1, 256, 1, 128, 1, 128, 256, half, "mass")
# Packed vectors: the defaults of chunks and of a question.
score(1, 4096, 1, 48, 4, 12, 128, half, "max", packed=True)
assert "wgmma" in compiled["block_votes_scores_kernel"].asm["ptx"]
score(4, 8192, 1, 48, 8, 1, 128, half, "mass", packed=True)
score(1, 4096, 4, 3, 16, 3, 64, torch.float16, "max", packed=True)
score(1, 4096, 1, 48, 4, 12, 96, wide, "mass", packed=True)
for limit, count in ((8192, 16), (16384, 16), (2048, 64)):
    votes = torch.zeros(8, limit)
    triton_impl.elect(votes, votes, weight=0.5, count=count)
votes = torch.zeros(8, 1001)
triton_impl.elect(votes, votes, weight=torch.zeros(8), count=16, mode="preceding")
triton_impl.elect(votes, votes, weight=0.5, count=16, mode="off")
triton_impl.elect(votes, None, weight=0.5, count=16)
assert len(compiled) == 3, compiled
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests compile the kernels and run them")
def test_compiles_for_hopper(tmp_path: Path) -> None:
    """What the interpreter takes, the compiler may not."""
    sm90.run(COMPILE, tmp_path)
