"""Decayed column sums against the whole attention matrix written down in float64.

The definition here builds each query's attention by its own softmax over what it sees, knows no log-sum-exp, and adds
the queries up one by one, `score = beta * score + (1 - beta) * attention`. Queries, keys and log-sum-exps past what
counts are NaN.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from sglang_ext.kernels import score_update
from sglang_ext.kernels.cascade_update import CascadeState
from sglang_ext.kernels.score_update import CountedQueries, KeptScores, reference
from sglang_ext.kernels.score_update import hopper_impl as hopper
from sglang_ext.kernels.score_update import triton_impl as triton
from sglang_ext.policies.cascade import Cascade, decay
from tests.kernels import sm90

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter multiplies the bits of bfloat16 as integers.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
# Beside the largest sum. Half precision: the inputs are the same numbers in both, products are added in float32.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, HALF: 2e-6}
SMALL = triton.ScoreTuning(columns=32, rows=16, warps=2, stages=1)
SCALE = 0.3


class Case:
    """Queries over keys in view order, several requests of different lengths in one batch."""

    def __init__(self, dtype, heads=6, kv_heads=2, head_dim=24, before=(37, 0, 70), count=(13, 21, 0), seed=0):
        gen = torch.Generator().manual_seed(seed)
        batch, rows, columns = len(before), max(count) + 2, max(b + c for b, c in zip(before, count, strict=True)) + 9
        draw = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)  # noqa: E731
        self.query, self.keys = draw(batch, rows, heads, head_dim), draw(batch, kv_heads, columns, head_dim)
        self.before, self.count = (torch.tensor(x, dtype=torch.int32) for x in (before, count))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.lse = torch.full((batch, rows, heads), float("nan"), dtype=wide)
        # attention[b]: [rows that count, heads, columns], 0 where unseen
        self.attention = []
        for b in range(batch):
            seen, new = before[b], count[b]
            probabilities = torch.zeros(new, heads, columns, dtype=torch.float64)
            for t, h in itertools.product(range(new), range(heads)):
                k = self.keys[b, h // (heads // kv_heads), : seen + t + 1].double()
                logits = SCALE * (k @ self.query[b, t, h].double())
                probabilities[t, h, : seen + t + 1] = torch.softmax(logits, 0)
                self.lse[b, t, h] = torch.logsumexp(logits, 0)
            self.attention.append(probabilities)
            self.query[b, new:] = float("nan")
            self.keys[b, :, seen + new :] = float("nan")

    def expected(self, beta, reduction, out_heads, score=None):
        """The scores after all queries, one query at a time; [batch, out_heads, columns] float64."""
        batch, columns = self.keys.shape[0], self.keys.shape[2]
        out = torch.zeros(batch, out_heads, columns, dtype=torch.float64) if score is None else score.clone()
        for b, attention in enumerate(self.attention):
            for a in attention:
                grouped = a.view(out_heads, -1, columns)
                out[b] = beta * out[b] + (1 - beta) * (grouped.mean(1) if reduction == "mean" else grouped.amax(1))
        return out

    def tensors(self):
        return [t.to(DEVICE) for t in (self.query, self.keys, self.lse, self.before, self.count)]

    def queries(self, scale=SCALE, every=1):
        return CountedQueries(*self.tensors(), scale, every)


IMPLEMENTATIONS = [
    pytest.param(reference, torch.float64, {}, id="reference-float64"),
    pytest.param(reference, torch.float32, {}, id="reference-float32"),
    pytest.param(triton, torch.float32, {"tuning": SMALL}, id="triton-small tiles"),
    pytest.param(triton, torch.float32, {}, id="triton-float32"),
    pytest.param(triton, HALF, {}, id="triton-half"),
]


@pytest.mark.parametrize("homogeneous", [False, True], ids=["independent", "homogeneous"])
@pytest.mark.parametrize("reduction", ["mean", "max"])
@pytest.mark.parametrize("module, dtype, more", IMPLEMENTATIONS)
def test_column_sums(module, dtype, more, reduction, homogeneous):
    case = Case(dtype)
    for beta in (0.9999, 0.8, 0.0):
        got = module.column_sums(case.queries(), beta=beta, reduction=reduction, homogeneous=homogeneous, **more)
        want = case.expected(beta, reduction, 1 if homogeneous else 2)
        assert got.shape == want.shape and got.dtype == case.lse.dtype
        # Relative to the largest: with beta 0.9999 all are tiny.
        assert (got.cpu().double() - want).abs().max() <= TOLERANCE[dtype] * want.max()
        assert want.max() > 0


@pytest.mark.parametrize("sizes", [(4, 4, 16, (5,), (1,)), (7, 1, 8, (0, 100), (33, 1)), (2, 2, 40, (64,), (64,))])
@pytest.mark.parametrize("module", [reference, triton], ids=["reference", "triton"])
def test_other_sizes(module, sizes):
    heads, kv_heads, head_dim, before, count = sizes
    case = Case(torch.float32, heads, kv_heads, head_dim, before, count, seed=3)
    got = module.column_sums(case.queries(), beta=0.9)
    want = case.expected(0.9, "mean", kv_heads)
    assert (got.cpu().double() - want).abs().max() <= TOLERANCE[torch.float32] * want.max()


@pytest.mark.parametrize("reduction", ["mean", "max"])
@pytest.mark.parametrize("every", [2, 3, 7])
@pytest.mark.parametrize("module, dtype, more", IMPLEMENTATIONS)
def test_rows_some_columns_apart(module, dtype, more, every, reduction):
    """Queries between are passed over: as if their attention was nothing, and the others followed one another."""
    case = Case(dtype, before=(37, 0, 70), count=(43, 22, 0))
    first = every - 1
    counted = torch.tensor([len(range(first, c, every)) for c in case.count.tolist()], dtype=torch.int32)
    query, keys, lse, before, _ = case.tensors()
    case.attention = [a[first::every] for a in case.attention]
    queries = CountedQueries(
        query[:, first::every], keys, lse[:, first::every], before + first, counted.to(DEVICE), SCALE, every
    )
    got = module.column_sums(queries, beta=0.9, reduction=reduction, **more)
    want = case.expected(0.9, reduction, 2)
    assert (got.cpu().double() - want).abs().max() <= TOLERANCE[dtype] * want.max()
    with pytest.raises(ValueError, match="every=0"):
        module.column_sums(case.queries(every=0), beta=0.9)


@pytest.mark.parametrize("heads_kept", [2, 1])
@pytest.mark.parametrize(
    "module, dtype, more", [p for p in IMPLEMENTATIONS if "float64" not in p.id and "half" not in p.id]
)
def test_update_scores_touches_what_is_seen_and_nothing_else(module, dtype, more, heads_kept):
    case, beta = Case(dtype), 0.97
    gen = torch.Generator().manual_seed(5)
    batch, columns = case.keys.shape[0], case.keys.shape[2]
    rows, entries = torch.tensor([4, 0, 2]), 130
    place = torch.stack([torch.randperm(entries, generator=gen)[:columns] for _ in range(batch)]).to(torch.int32)
    start = torch.rand(5, heads_kept, entries, generator=gen)
    column_score = torch.stack([start[r][:, p.long()] for r, p in zip(rows.tolist(), place, strict=True)]).double()
    want, after = start.double(), case.expected(beta, "max", heads_kept, column_score)
    for b, row in enumerate(rows.tolist()):
        seen = int(case.before[b] + case.count[b])
        want[row][:, place[b, :seen].long()] = after[b, :, :seen]
        place[b, seen:] = -1
    score = start.to(DEVICE, copy=True)
    scores = KeptScores(score, place.to(DEVICE), rows.to(DEVICE))
    module.update_scores(scores, case.queries(), beta=beta, reduction="max", **more)
    assert (score.cpu().double() - want).abs().max() <= 2e-6
    untouched = want == start.double()
    assert torch.equal(score.cpu()[untouched], start[untouched])
    assert untouched[1].all() and untouched[3].all() and untouched[2].all() and not untouched[4].all()


@pytest.mark.parametrize("heads_kept", [2, 1])
@pytest.mark.parametrize("module", [reference, triton], ids=["reference", "triton"])
def test_skipped_columns_keep_their_scores(module, heads_kept):
    """A whole tile of them, a part of one, all of them."""
    case, skip = Case(torch.float32, before=(37, 0, 70), count=(13, 21, 5)), (33, 3, 75)
    batch, columns = case.keys.shape[0], case.keys.shape[2]
    start = torch.rand(batch, heads_kept, columns)
    want = case.expected(0.9, "mean", heads_kept, start.double())
    for b, first in enumerate(skip):
        want[b, :, :first] = start[b, :, :first].double()
        end = int(case.before[b] + case.count[b])
        want[b, :, end:] = start[b, :, end:].double()
    place = torch.arange(columns, dtype=torch.int32, device=DEVICE).repeat(batch, 1)
    score, rows = start.to(DEVICE, copy=True), torch.arange(batch, device=DEVICE)
    more = {"tuning": SMALL} if module is triton else {}
    skipped = torch.tensor(skip, device=DEVICE)
    module.update_scores(KeptScores(score, place, rows, skipped), case.queries(), beta=0.9, **more)
    assert (score.cpu().double() - want).abs().max() <= 2e-6
    assert torch.equal(score[2], start[2].to(DEVICE)) and not torch.equal(score[0], start[0].to(DEVICE))
    with pytest.raises(ValueError, match=r"skip is torch\.float32"):
        module.update_scores(KeptScores(score, place, rows, skipped.float()), case.queries(1.0), beta=0.9)


@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_one_run_of_queries_equals_runs_of_one(reduction):
    """In float64; and the token that is scored first is one of the run's own."""
    case = Case(torch.float64, before=(11,), count=(9,))
    options = {"beta": 0.9, "reduction": reduction}
    place = torch.arange(case.keys.shape[2], dtype=torch.int32)[None]
    together, single = (torch.zeros(1, 2, case.keys.shape[2], dtype=torch.float64) for _ in range(2))
    row = torch.tensor([0])
    query, keys, lse, before, count = case.query, case.keys, case.lse, case.before, case.count
    run = CountedQueries(query, keys, lse, before, count, SCALE)
    reference.update_scores(KeptScores(together, place, row), run, **options)
    for t in range(9):
        one = CountedQueries(query[:, t : t + 1], keys, lse[:, t : t + 1], before + t, torch.ones_like(count), SCALE)
        reference.update_scores(KeptScores(single, place, row), one, **options)
    assert (together - single).abs().max() <= 1e-14
    assert together[0, 0, 19] > 0  # the last token of the run, seen by itself alone


def test_the_policy_decays_alike():
    attention = torch.rand(7, 3, 5, dtype=torch.float64)
    score = want = torch.rand(3, 5, dtype=torch.float64)
    for a in attention:
        want = 0.9 * want + 0.1 * a
    assert (decay(score, attention, 0.9) - want).abs().max() <= 1e-14


def test_scores_land_in_the_cascade():
    """Through the view's columns: sinks, ring entries and open stride of two requests, one of them still filling."""
    cascade = Cascade(window=12, cascades=3, sinks=2, stride=4, beta=0.5)
    rings = cascade.rings
    state = CascadeState.empty(1, 3, 2, rings, DEVICE)
    added, seen = torch.tensor([4, 40]), torch.tensor([7, 42])
    place = rings.columns(added, seen, rings.entries)
    case = Case(torch.float32, 4, 2, 16, (4, 14), (3, 2))
    tensors = case.tensors()
    tensors[1] = torch.nn.functional.pad(tensors[1], (0, 0, 0, rings.entries - tensors[1].shape[2]))[
        :, :, : rings.entries
    ]
    rows = torch.tensor([2, 0], device=DEVICE)
    scores = KeptScores(state.score[0], place.to(DEVICE), rows)
    score_update.update_scores(scores, CountedQueries(*tensors, SCALE), beta=0.5)
    want = case.expected(0.5, "mean", 2)
    for b, (row, kept, new) in enumerate(((2, 4, 3), (0, 14, 2))):
        touched = state.score[0, row].cpu()
        assert (touched[:, place[b, : kept + new].long()].double() - want[b, :, : kept + new]).abs().max() <= 1e-6
        assert (touched > 0).sum() == 2 * (kept + new)
        waiting = rings.sinks + rings.window + (added[b] + torch.arange(new)) % rings.stride
        assert torch.equal(place[b, kept : kept + new].long(), waiting)
    assert bool((state.score[0, 1] == 0).all())


def test_bad_input_is_refused():
    case = Case(torch.float32, before=(3,), count=(2,))
    query, keys, lse, before, count = case.tensors()
    of = lambda *tensors: CountedQueries(*tensors, scale=1.0)  # noqa: E731
    good = of(query, keys, lse, before, count)
    for module in (reference, triton):
        with pytest.raises(ValueError, match="expected a multiple"):
            module.column_sums(of(query[:, :, :5], keys, lse[:, :, :5], before, count), beta=0.9)
        with pytest.raises(ValueError, match=r"query is torch\.bfloat16, keys are torch\.float32"):
            module.column_sums(of(query.bfloat16(), keys, lse, before, count), beta=0.9)
        with pytest.raises(ValueError, match=r"lse is torch\.float16"):
            module.column_sums(of(query, keys, lse.half(), before, count), beta=0.9)
        with pytest.raises(ValueError, match="beta=1"):
            module.column_sums(good, beta=1)
        with pytest.raises(ValueError, match="'median'"):
            module.column_sums(good, reduction="median", beta=0.9)
        with pytest.raises(ValueError, match=r"before is torch\.float32"):
            module.column_sums(of(query, keys, lse, before.float(), count), beta=0.9)
        entries = torch.zeros(1, keys.shape[2], dtype=torch.int32, device=DEVICE)
        row = torch.zeros(1, dtype=torch.long, device=DEVICE)
        with pytest.raises(ValueError, match=r"score is .*\(1, 3, 9\)"):
            module.update_scores(KeptScores(torch.zeros(1, 3, 9, device=DEVICE), entries, row), good, beta=0.9)
        with pytest.raises(ValueError, match=r"entries is torch\.int64"):
            module.update_scores(KeptScores(torch.zeros(1, 2, 9, device=DEVICE), entries.long(), row), good, beta=0.9)
    with pytest.raises(ValueError, match="expected both in"):
        reference.column_sums(of(query, keys, lse, before + 90, count), beta=0.9)
    with pytest.raises(ValueError, match="take the reference for float64"):
        triton.column_sums(of(query.double(), keys.double(), lse.double(), before, count), beta=0.9)


HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9
HOPPER_TOLERANCE = 2e-6  # of the largest sum, as `TOLERANCE[HALF]`
HOPPER_SIZES = [
    # dtype, heads, kv_heads, head_dim, before, count, splits
    (torch.bfloat16, 8, 2, 128, (300, 0, 70), (290, 257, 0), 2),
    (torch.float16, 4, 4, 64, (513,), (300,), 2),
    (torch.bfloat16, 6, 2, 64, (1, 900), (256, 31), 4),
    (torch.float16, 8, 1, 128, (255, 129), (64, 321), 4),
    (torch.bfloat16, 4, 1, 128, (0,), (1,), 1),
]


@pytest.mark.skipif(not HOPPER, reason="a kernel for Hopper, which no interpreter runs")
@pytest.mark.parametrize("dtype, heads, kv_heads, head_dim, before, count, splits", HOPPER_SIZES)
def test_hopper_column_sums(dtype, heads, kv_heads, head_dim, before, count, splits):
    """Tiles that are not whole, programs on the diagonal and behind the end, NaN behind every request."""
    case = Case(dtype, heads, kv_heads, head_dim, before, count, seed=7)
    query, keys, lse, before, count = case.tensors()
    # Rows enough for the kernel to be chosen, none of which count.
    more = max(0, hopper.LEAST_ROWS - query.shape[1])
    query = torch.nn.functional.pad(query, (0, 0, 0, 0, 0, more), value=float("nan"))
    lse = torch.nn.functional.pad(lse, (0, 0, 0, more), value=float("nan"))
    assert hopper.serves(query, keys, kv_heads, "mean")
    want = case.expected(0.99, "mean", kv_heads)
    queries = CountedQueries(query, keys, lse, before, count, SCALE)
    for tuning in (hopper.HopperScoreTuning(splits=splits), hopper.HopperScoreTuning(stages=2, splits=1)):
        got = triton.column_sums(queries, beta=0.99, tuning=tuning)
        assert (got.cpu().double() - want).abs().max() <= HOPPER_TOLERANCE * want.max(), tuning
    short = CountedQueries(query[:, :9], keys, lse[:, :9], before, count, SCALE)
    with pytest.raises(ValueError, match="not for Hopper's kernel"):
        triton.column_sums(short, beta=0.9, tuning=hopper.TUNING)
    with pytest.raises(ValueError, match="not for Hopper's kernel"):
        triton.column_sums(queries, beta=0.9, reduction="max", tuning=hopper.TUNING)


@pytest.mark.skipif(not HOPPER, reason="a kernel for Hopper, which no interpreter runs")
@pytest.mark.parametrize("every", [1, 3])
def test_hopper_updates_scores(every):
    """As the engine calls it: views of a window and of a prompt's rows; skipped columns keep their scores."""
    case, skip = Case(torch.bfloat16, 8, 2, 128, (430, 600), (1540, 1300)), torch.tensor([433, 3])
    query, keys, lse, before, count = case.tensors()
    keys = keys.transpose(1, 2).contiguous().transpose(1, 2)
    query, lse = query[:, every - 1 :: every], lse[:, every - 1 :: every]
    counted = count // every
    start = torch.rand(3, 2, keys.shape[2] + 5)
    place = torch.randperm(keys.shape[2] + 5)[: keys.shape[2]].to(torch.int32).repeat(2, 1)
    rows, scores = torch.tensor([2, 0], device=DEVICE), []
    assert hopper.serves(query, keys, 2, "mean") and not hopper.serves(query, keys, 2, "max")
    for tuning in (None, triton.SMALLER):
        score = start.to(DEVICE, copy=True)
        triton.update_scores(
            KeptScores(score, place.to(DEVICE), rows, skip.to(DEVICE)),
            CountedQueries(query, keys, lse, before + every - 1, counted, SCALE, every),
            beta=0.999,
            tuning=tuning,
        )
        scores.append(score.cpu())
    exact = start.clone()
    on_cpu = (t.cpu() for t in (query.float(), keys.float(), lse, before + every - 1, counted))
    reference.update_scores(
        KeptScores(exact, place, rows.cpu(), skip), CountedQueries(*on_cpu, SCALE, every), beta=0.999
    )
    for score in scores:
        assert (score - exact).abs().max() <= HOPPER_TOLERANCE * exact.max()
        assert torch.equal(score == start, exact == start)
    assert (exact != start).sum() > 2000 and torch.equal(exact[1], start[1])


def test_hopper_sums_are_folded():
    """The second of its launches, which runs anywhere: parts of the heads, and columns that do not count."""
    batch, kv_heads, splits, columns, entries = 2, 3, 2, 1100, 1200
    sums = torch.rand(batch, kv_heads, splits, columns, device=DEVICE)
    before, count = torch.tensor([1000, 5], device=DEVICE), torch.tensor([33, 0], device=DEVICE)
    skip, state = torch.tensor([40, 0], device=DEVICE), torch.tensor([3, 1], device=DEVICE)
    place = torch.randperm(entries)[:columns].to(torch.int32).to(DEVICE).repeat(batch, 1)
    start = torch.rand(4, kv_heads, entries)
    score = start.to(DEVICE, copy=True)
    sums[0, :, :, 1065:] = sums[0, :, :, :40] = sums[1] = float("nan")
    launch = (kv_heads, 2, batch)
    triton._parts_kernel[launch](
        sums, before, count, score, place, state, skip, columns, entries, 2, -0.25, 0.5, OUT_HEADS=kv_heads,
        PARTS=splits, FOLD=True, SKIP=True, BLOCK=1024,
    )  # fmt: skip
    want = start.clone()
    at = place[0, 40:1065].long().cpu()
    want[3][:, at] = start[3][:, at] * 2 ** (-0.25 * 33) + 0.5 * sums[0, :, :, 40:1065].sum(1).cpu()
    assert (score.cpu() - want).abs().max() <= 1e-6
    out = torch.full((batch, kv_heads, columns), float("nan"), device=DEVICE)
    triton._parts_kernel[launch](
        sums, before, count, out, place, state, skip, columns, columns, 2, -0.25, 0.5, OUT_HEADS=kv_heads,
        PARTS=splits, FOLD=False, SKIP=True, BLOCK=1024,
    )  # fmt: skip
    plain = torch.zeros(batch, kv_heads, columns)
    plain[0, :, 40:1065] = 0.5 * sums[0, :, :, 40:1065].sum(1).cpu()
    assert (out.cpu() - plain).abs().max() <= 1e-6


COMPILE = """
from sglang_ext.kernels.hopper import TILES
from sglang_ext.kernels.score_update import hopper_impl as hopper
from tests.kernels import sm90

tuning = hopper.TUNING
for dim, heads, skip in ((128, 2, True), (64, 3, False)):
    average, multiplying = hopper.REGISTERS
    constants = dict(SPLITS=2, HEADS=heads, DIM=dim, ROWS=hopper.ROWS, COLUMNS=hopper.COLUMNS, STAGES=tuning.stages,
                     SKIP=skip, REGISTERS=multiplying)
    types = {"query_tiles": f"tensordesc<bf16[{hopper.ROWS}, {dim}],{TILES!r}>", "keys": "*bf16", "scale": "fp32"}
    types |= dict.fromkeys(("bias", "sums"), "*fp32")
    types |= dict.fromkeys(("columns", "width", "every", "stride_kv", "stride_column"), "i32")
    found = sm90.gluon(hopper._columns, types, constants, average, odd=("columns", "every"))
    for wanted in ("wgmma", "cp.async.bulk.tensor", "setmaxnreg"):
        assert wanted in found.asm["ptx"], wanted
    assert found.metadata.shared <= 227 * 1024
    # One wait for all products of a tile: ptxas may put one behind each, and says nothing.
    products, waits = (found.asm["sass"].count(name) for name in ("HGMMA", "WARPGROUP.DEPBAR"))
    assert products == waits * dim // 16 > 0, (products, waits)
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests compile the kernel and run it")
def test_compiles_for_hopper(tmp_path: Path) -> None:
    sm90.run(COMPILE, tmp_path)
