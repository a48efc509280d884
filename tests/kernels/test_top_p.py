"""Top-p selection against sets worked out one cluster at a time, from Python floats and a sort.

Everything from a request's count on, and every output buffer, holds garbage before a call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.top_p import (
    Expansion,
    Numbering,
    SearchedClusters,
    Selection,
    SetRule,
    cuda_impl,
    dispatch,
    reference,
    top_p_mask,
    triton_impl,
)
from sglang_ext.kernels.top_p.types import WITHOUT_GAPS, TopPTuning, TopPWorkspace
from tests.kernels import on_host

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NO_CUDA = cuda_impl.refusal(torch.device(DEVICE), 4, 100)
needs_cuda = pytest.mark.skipif(NO_CUDA is not None and not on_host.STANDS_IN, reason=f"{NO_CUDA}; there is no g++")
PORTABLE = ("reference", "separate", "long")
KINDS = [*PORTABLE, pytest.param("cuda", marks=needs_cuda)]
# The CUDA kernel searches for each head.
BOTH_RULES = [(kind, rule) for kind in PORTABLE for rule in ("union", "mean")] + [
    pytest.param("cuda", "union", marks=needs_cuda)
]
UNIT = 2.0**-30  # the kernel's unit of mass
SEPARATE = TopPTuning(
    joint=False, chunk=32, compact_chunk=16
)  # the interpreter runs a joint reduction element by element
LONG = TopPTuning(joint=False, chunk=128, rounds=0, compact_chunk=32)


@pytest.fixture
def cuda() -> Iterator[None]:
    with on_host.top_p():
        yield


def shares(logits: list[float]) -> list[float]:
    """Softmax of one head, in double precision."""
    top = max(logits)
    weights = [math.exp(x - top) if x > -math.inf else 0.0 for x in logits]
    return [w / math.fsum(weights) for w in weights]


def smallest_set(masses: list[float], p: float, present: list[bool]) -> set[int]:
    """Take clusters by descending mass, the first of equals first, until the mass reaches p."""
    if p >= 1:
        return {i for i, there in enumerate(present) if there}
    taken: list[int] = []
    for i in sorted(range(len(masses)), key=lambda i: (-masses[i], i)):
        if math.fsum(masses[j] for j in taken) >= p or not present[i]:
            break
        taken.append(i)
    return set(taken) if p > 0 else set()


@dataclass
class Case:
    logits: torch.Tensor
    sizes: torch.Tensor
    starts: torch.Tensor
    cells: torch.Tensor
    p: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor, SearchedClusters, torch.Tensor]:
        """What `select` is given, on the device."""
        of_clusters = (x.to(DEVICE) for x in (self.sizes, self.starts, self.cells))
        return self.logits.to(DEVICE), SearchedClusters(*of_clusters), self.p.to(DEVICE)


def make_case(group: int, cells: list[int], spread: float, seed: int, p: list[list[float]] | None = None) -> Case:
    """Clusters of 0 to 40 tokens, one of 300; the most massive one is not the first."""
    gen = torch.Generator().manual_seed(seed)
    batch, kv_heads, width = len(cells), 2, max(cells) + 5
    sizes = torch.randint(0, 41, (batch, kv_heads, width), generator=gen, dtype=torch.int32)
    sizes[..., 3] = 300
    logits = torch.randn(batch, kv_heads, group, width, generator=gen) * spread
    logits = torch.where(sizes.unsqueeze(2) > 0, logits, -math.inf)
    starts = torch.randint(0, 10000, (batch, kv_heads, width), generator=gen, dtype=torch.int32)
    for b, n in enumerate(cells):
        logits[b, ..., n:] = math.nan
        sizes[b, :, n:] = 12345
    shared = torch.tensor(p or [[0.95, 0.7], [0.6, 0.2], [0.99, 0.8]][:batch])
    return Case(logits, sizes, starts, torch.tensor(cells, dtype=torch.int32), shared)


def poisoned(case: Case, numbering: Numbering) -> Selection:
    batch, kv_heads, _, width = case.logits.shape
    out = Selection.empty(batch, kv_heads, width, DEVICE, numbering)
    for buffer in (out.counts, out.exact, out.prefix, out.shift, out.approx):
        buffer.fill_(-(10**6))
    return out


def run(case: Case, kind: str, **options: Any) -> Selection:
    arguments = case.arguments
    if kind == "reference":
        return reference.select(*arguments, **options)
    if kind == "cuda":
        got = poisoned(case, options.get("numbering", WITHOUT_GAPS))
        with on_host.top_p():
            return cuda_impl.select(*arguments, out=got, **options)
    tuning = {"separate": SEPARATE, "long": LONG, "joint": TopPTuning()}[kind]
    workspace = TopPWorkspace.empty(*case.logits.shape, DEVICE)
    workspace.levels.fill_(77)
    workspace.keys.fill_(10**9)
    got = poisoned(case, options.get("numbering", WITHOUT_GAPS))
    workspace.few.fill_(10**9)
    triton_impl.select(*arguments, out=got, workspace=workspace, tuning=tuning, **options)
    return got


def expected_sets(case: Case, b: int, h: int, group: str, by_count: bool = False) -> tuple[set[int], set[int]]:
    """(exact, approximated) clusters of one row."""
    n = int(case.cells[b])
    present = (case.sizes[b, h, :n] > 0).tolist()
    heads = [shares(x) for x in case.logits[b, h, :, :n].double().tolist()] if any(present) else [[0.0] * n]
    if group == "mean":
        heads = [[math.fsum(column) / len(heads) for column in zip(*heads, strict=True)]]
    stages: list[set[int]] = []
    for p in case.p[b].double().tolist():
        if by_count:
            order = [sorted((i for i in range(n) if present[i]), key=lambda i, m=m: (-m[i], i)) for m in heads]
            stages.append(set().union(*(o[: int(p)] for o in order)))
        else:
            stages.append(set().union(*(smallest_set(m, p, present) for m in heads)))
    return stages[1], stages[0] - stages[1]


def check_lists(case: Case, got: Selection, b: int, h: int, exact: set[int], approx: set[int]) -> None:
    """The lists, their counts, and where each token of work is found."""
    n_exact, tokens, n_approx, filled, numbers = got.counts[b, h].tolist()
    chosen = got.exact[b, h, :n_exact].tolist()
    assert chosen == sorted(exact)
    assert got.approx[b, h, :n_approx].tolist() == sorted(approx)
    assert filled == int((case.sizes[b, h, : int(case.cells[b])] > 0).sum())
    prefix, shift = got.prefix[b, h].tolist(), got.shift[b, h].tolist()
    run, align = got.numbering.run, got.numbering.align
    number = 0
    for place, c in enumerate(chosen):
        if place and c // run != chosen[place - 1] // run:
            number = -(-number // align) * align
        assert prefix[place] == number and number + shift[place] == case.starts[b, h, c]
        number += int(case.sizes[b, h, c])
    assert tokens == int(case.sizes[b, h, chosen].sum())
    assert numbers == -(-number // align) * align


@pytest.mark.parametrize(("kind", "rule"), BOTH_RULES)
def test_cut_clusters_are_exact_and_have_no_mass(rule: str, kind: str) -> None:
    case = make_case(3, [40, 3, 90], 2.0, 5)
    gen = torch.Generator().manual_seed(9)
    cut = (torch.rand(case.sizes.shape, generator=gen) < 0.3) & (case.sizes > 0)
    cut[1, :, :3] = case.sizes[1, :, :3] > 0  # nothing but cut ones
    logits = case.logits.masked_fill(cut.unsqueeze(2), -math.inf)
    there = Case(logits, torch.where(cut, 0, case.sizes), case.starts, case.cells, case.p)
    having = Case(logits, torch.where(cut, -case.sizes, case.sizes), case.starts, case.cells, case.p)
    got = run(having, kind, rule=SetRule(rule))
    for b in range(3):
        for h in range(2):
            exact, approx = expected_sets(there, b, h, rule)
            always = cut[b, h, : int(case.cells[b])].nonzero().flatten().tolist()
            assert always
            check_lists(case, got, b, h, exact | set(always), approx)


@pytest.mark.parametrize(("kind", "rule"), BOTH_RULES)
@pytest.mark.parametrize(("group", "spread"), [(1, 3.0), (4, 0.3), (3, 8.0)], ids=["one", "flat", "peaked"])
def test_sets_and_lists(group: int, spread: float, rule: str, kind: str) -> None:
    case = make_case(group, [61, 17], spread, seed=group)
    got = run(case, kind, rule=SetRule(rule))
    kept = 0
    for b in range(2):
        for h in range(2):
            exact, approx = expected_sets(case, b, h, rule)
            check_lists(case, got, b, h, exact, approx)
            kept += len(exact)
    assert kept  # something was selected at all


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("length", "align"), [(4, 8), (16, 3)])
def test_numbers_of_tokens_begin_anew(length: int, align: int, kind: str) -> None:
    case = make_case(2, [61, 17], 2.0, seed=6)
    got = run(case, kind, numbering=Numbering(length, align))
    gaps = 0
    for b in range(2):
        for h in range(2):
            check_lists(case, got, b, h, *expected_sets(case, b, h, "union"))
            gaps += int(got.counts[b, h, 4] - got.counts[b, h, 1])
    assert gaps


def test_joint_reduction_is_the_same() -> None:
    case = make_case(2, [27], 2.0, seed=5)
    got = run(case, "joint")
    for h in range(2):
        check_lists(case, got, 0, h, *expected_sets(case, 0, h, "union"))


@pytest.mark.parametrize(("kind", "rule"), BOTH_RULES)
def test_numbers_of_clusters(rule: str, kind: str) -> None:
    case = make_case(3, [50, 9], 40.0, seed=8, p=[[20.0, 3.0], [100.0, 0.0]])  # most masses underflow
    got = run(case, kind, rule=SetRule(rule, by_count=True))
    for b in range(2):
        for h in range(2):
            check_lists(case, got, b, h, *expected_sets(case, b, h, rule, by_count=True))


@pytest.mark.parametrize("kind", KINDS)
def test_everything_and_nothing(kind: str) -> None:
    """p = 1 keeps clusters that weigh nothing in float32; p = 0 keeps none; a request may have no clusters."""
    case = make_case(2, [20, 20, 0], 60.0, seed=4, p=[[1.0, 1.0], [1.0, 0.0], [0.9, 0.9]])
    case.logits[:2, 1] = torch.where(case.sizes[:2, 1].unsqueeze(1) > 0, case.logits[:2, 1], -math.inf)
    case.sizes[0, 1, :20], case.logits[0, 1, :, :20] = 0, -math.inf  # a head without a token
    got = run(case, kind)
    for h in range(2):
        every = {i for i in range(20) if case.sizes[0, h, i] > 0}
        check_lists(case, got, 0, h, every, set())
        check_lists(case, got, 1, h, set(), {i for i in range(20) if case.sizes[1, h, i] > 0})
        check_lists(case, got, 2, h, set(), set())
    assert not every  # the head without a token was one of them


@pytest.mark.parametrize("kind", KINDS)
def test_of_equal_clusters_the_first_are_taken(kind: str) -> None:
    """Fifty equal masses of 0.02: 0.49 needs 25. Behind one of mass 1/2 with 48 equals, 0.75 needs 24 of them."""
    sizes = torch.ones(2, 1, 50, dtype=torch.int32)
    logits = torch.zeros(2, 1, 1, 50)
    logits[1, 0, 0, 7], logits[1, 0, 0, 20] = math.log(48), -math.inf
    sizes[1, 0, 20] = 0
    p = torch.tensor([[0.49, 0.01], [0.749, 0.5 - 1e-6]])
    case = Case(logits, sizes, sizes.clone(), torch.tensor([50, 50], dtype=torch.int32), p)
    got = run(case, kind)
    check_lists(case, got, 0, 0, {0}, set(range(1, 25)))
    check_lists(case, got, 1, 0, {7}, {i for i in range(26) if i not in (7, 20)})


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_cluster(kind: str) -> None:
    sizes = torch.tensor([[[5]]], dtype=torch.int32)
    case = Case(
        torch.tensor([[[[-80.0]]]]), sizes, sizes, torch.ones(1, dtype=torch.int32), torch.tensor([[0.5, 1e-6]])
    )
    check_lists(case, run(case, kind), 0, 0, {0}, set())


@pytest.mark.parametrize("seed", range(3))
def test_the_kernel_s_sets_are_minimal(seed: int) -> None:
    """With as many clusters as fit a quick test: mass at least p, and without its smallest cluster below p."""
    gen = torch.Generator().manual_seed(seed)
    n = 1000
    logits = (torch.randn(1, 1, 1, n, generator=gen) * [0.5, 2.0, 5.0][seed]).to(DEVICE)
    logits[..., ::7] = logits[..., 3:4]  # many equals
    sizes = torch.ones(1, 1, n, dtype=torch.int32, device=DEVICE)
    p = torch.tensor([[0.95, 0.7]], device=DEVICE)
    cells = torch.tensor([n], dtype=torch.int32, device=DEVICE)
    got = triton_impl.select(logits, SearchedClusters(sizes, sizes, cells), p, tuning=TopPTuning(joint=False))
    mass = torch.softmax(logits.double().flatten(), 0).cpu()
    n_exact, _, n_approx, *_ = got.counts[0, 0].tolist()
    exact = got.exact[0, 0, :n_exact].long().cpu()
    both = torch.cat([exact, got.approx[0, 0, :n_approx].long().cpu()])
    for chosen, target in ((both, p[0, 0].item()), (exact, p[0, 1].item())):
        assert mass[chosen].sum() >= target - n * UNIT - 1e-6  # and float32 exponentials
        assert mass[chosen].sum() - mass[chosen].min() < target + n * UNIT + 1e-6
        left = torch.ones(n, dtype=torch.bool)
        left[chosen] = False
        assert mass[left].max() <= mass[chosen].min()


def test_mask_by_hand() -> None:
    mass = torch.tensor([[1.0, 4.0, 2.0, 0.0, 1.0], [0.0, 0.0, 3.0, 0.0, 0.0]], dtype=torch.float64)
    for p, expected in (
        (0.5, [[0, 1, 0, 0, 0], [0, 0, 1, 0, 0]]),
        (0.51, [[0, 1, 1, 0, 0], [0, 0, 1, 0, 0]]),
        (0.8, [[1, 1, 1, 0, 0], [0, 0, 1, 0, 0]]),
        (1.0, [[1, 1, 1, 0, 1], [0, 0, 1, 0, 0]]),
        (0.0, [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]),
    ):
        assert top_p_mask(mass, p).int().tolist() == expected
    each = top_p_mask(mass, torch.tensor([0.8, 0.0]))
    assert each.int().tolist() == [[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]


def test_refusals() -> None:
    case = make_case(2, [10], 1.0, seed=0)
    for name, bad, message in (
        ("logits", case.logits[0], "expected \\[batch, kv_heads, group, cells\\]"),
        ("sizes", case.sizes[:, :1], "sizes of shape"),
        ("p", case.p[:, :1], "p of shape"),
    ):
        for module in (reference, triton_impl):
            with pytest.raises(ValueError, match=message):
                module.select(*replace(case, **{name: bad}).arguments)
    with pytest.raises(ValueError, match="group='median'"):
        reference.select(*case.arguments, rule=SetRule("median"))
    with pytest.raises(ValueError, match=r"expected contiguous torch\.int32"):
        triton_impl.select(*replace(case, sizes=case.sizes.long()).arguments)
    wide = torch.zeros(1, 1, triton_impl.MAX_CELLS + 1)
    with pytest.raises(ValueError, match="expected at most 1048575"):
        triton_impl.select(*Case(wide.unsqueeze(1), wide.int(), wide.int(), case.cells, case.p).arguments)


def lists(got: Selection, b: int, h: int) -> tuple[list[int], list[int]]:
    n_exact, _, n_approx, *_ = got.counts[b, h].tolist()
    return got.exact[b, h, :n_exact].tolist(), got.approx[b, h, :n_approx].tolist()


@needs_cuda
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("n", "spread", "many"),
    [
        (1, 1.0, False),
        (4093, 0.3, False),
        (8191, 2.0, False),
        (20000, 6.0, False),
        (8185, 0.5, True),
        (10236, 3.0, True),
        (16300, 1.0, True),
    ],
)
def test_cuda_at_full_size(n: int, spread: float, many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every head's sets alone are minimal, those of a group are their union, and every call gives the same.

    With the blocks of threads that few rows get, and those of many.
    """
    choose = cuda_impl.block_for
    monkeypatch.setattr(cuda_impl, "block_for", lambda width, *_: choose(width, int(many), 0))
    gen = torch.Generator().manual_seed(n)
    batch, kv_heads, group = 3, 2, 4
    logits = (torch.randn(batch, kv_heads, group, n + 3, generator=gen) * spread).to(DEVICE)
    logits[..., :n:7] = logits[..., :1]  # many equals
    sizes = torch.randint(1, 40, (batch, kv_heads, n + 3), generator=gen, dtype=torch.int32).to(DEVICE)
    cells = torch.tensor([n, n, n // 2], dtype=torch.int32, device=DEVICE)
    p = torch.tensor([[0.95, 0.7], [0.5, 0.5], [0.99, 0.01]], device=DEVICE)
    clusters, numbering = SearchedClusters(sizes, sizes, cells), Numbering(32, 16)
    got = cuda_impl.select(logits, clusters, p, numbering=numbering)
    again = cuda_impl.select(logits, clusters, p, numbering=numbering)
    alone = [cuda_impl.select(logits[:, :, g : g + 1].contiguous(), clusters, p) for g in range(group)]
    for b in range(batch):
        count = int(cells[b])
        for h in range(kv_heads):
            exact, approx = lists(got, b, h)
            assert lists(again, b, h) == (exact, approx) and torch.equal(again.counts, got.counts)
            each = [lists(one, b, h) for one in alone]
            assert exact == sorted(set().union(*(e for e, _ in each)))
            assert approx == sorted(set().union(*(a for _, a in each)) - set(exact))
            if count == 0:
                continue
            for g, (only, rest) in enumerate(each):
                mass = torch.softmax(logits[b, h, g, :count].double(), 0).cpu()
                for chosen, target in ((only + rest, p[b, 0].item()), (only, p[b, 1].item())):
                    left = torch.ones(count, dtype=torch.bool)
                    left[chosen] = False
                    slack = count * UNIT + 1e-6
                    assert target - slack <= mass[chosen].sum() < target + slack + mass[chosen].min()
                    assert not left.any() or mass[left].max() <= mass[chosen].min() + UNIT


@pytest.mark.parametrize(
    ("heads", "block", "by_count", "run", "align", "width"),
    [
        (1, (256, 1), False, 1, 1, 16),
        (4, (256, 8), True, 1, 1, 0),
        (7, (256, 4), False, 32, 16, 0),
        (2, (1024, 8), False, 4, 8, 0),
        (4, (256, 10), False, 1, 1, 64),
    ],
)
def test_cuda_compiles_for_hopper(
    heads: int, block: tuple[int, int], by_count: bool, run: int, align: int, width: int
) -> None:
    """Without a GPU, where NVRTC is installed."""
    pytest.importorskip("cuda.core")
    assert cuda_impl.compiled(nvrtc.HOPPER, heads, cuda_impl.SearchBlock(*block), by_count, run, align, width).code


@needs_cuda
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("block", cuda_impl.BLOCKS, ids=lambda block: f"{block.threads}x{block.quads}")
def test_every_block_selects_the_same(block: cuda_impl.SearchBlock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_impl, "block_for", lambda *_: block)
    for by_count in (False, True):
        p = [[300.0, 40.0], [9.0, 0.0], [5.0, 1.0]] if by_count else None
        case = make_case(4, [1000, 611, 3], 3.0, 9, p)
        got = cuda_impl.select(*case.arguments, rule=SetRule(by_count=by_count))
        for b, h in itertools.product(range(3), range(2)):
            exact, approx = expected_sets(case, b, h, "union", by_count)
            check_lists(case, got, b, h, exact, approx)


@needs_cuda
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
@pytest.mark.parametrize("spread", [0.3, 4.0])
@pytest.mark.parametrize(
    ("group", "tiles", "width"), [(4, 5, 16), (3, 65, 64), (1, 130, 64), (4, 128, 64), (4, 160, 64), (4, 500, 64)]
)
def test_cuda_writes_out_what_the_lists_stand_for(
    group: int, tiles: int, width: int, spread: float, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of exact tokens and places of summaries, by loops over the lists; nothing behind them is written.

    With the blocks of threads that few rows get, and those of many; and rows that a smaller block would have held.
    """
    choose = cuda_impl.block_for
    monkeypatch.setattr(cuda_impl, "block_for", lambda width, *_: choose(width, int(many), 0))
    gen = torch.Generator().manual_seed(tiles)
    batch, kv_heads, cells = 5, 2, tiles * width
    logits = (torch.randn(batch, kv_heads, group, cells, generator=gen) * spread).to(DEVICE)
    sizes = torch.randint(-3, 40, (batch, kv_heads, cells), generator=gen, dtype=torch.int32).to(DEVICE)  # cut ones
    logits = torch.where(sizes.unsqueeze(2) > 0, logits, -math.inf)
    most = 50 * cells
    starts = torch.randint(0, most, (batch, kv_heads, cells), generator=gen, dtype=torch.int32).to(DEVICE)
    parts = [tiles // n * width for n in (2, 3)]
    counts = torch.tensor([cells, cells - width, 0, *parts], dtype=torch.int32, device=DEVICE)
    p = torch.tensor([[0.95, 0.7], [1, 0.99], [0.9, 0.9], [0.9, 0.6], [0.97, 0.2]], device=DEVICE)

    def ints(*shape: int) -> torch.Tensor:
        return torch.full(shape, -(10**6), dtype=torch.int32, device=DEVICE)

    expansion = Expansion(
        members=torch.randint(0, 2**31 - 1, (kv_heads, most + 40), generator=gen, dtype=torch.int32).to(DEVICE),
        tiles=torch.randint(0, 10**6, (batch, tiles), generator=gen, dtype=torch.int32).to(DEVICE),
        width=width,
        slots=ints(batch * kv_heads, 40 * cells + 7),
        summaries=ints(batch * kv_heads, cells),
    )
    clusters = SearchedClusters(sizes, starts, counts)
    got = dispatch.select(logits, clusters, p, expansion=expansion)
    plain = cuda_impl.select(logits, clusters, p)
    assert got.expanded and not plain.expanded and torch.equal(got.counts, plain.counts)
    for row in range(batch * kv_heads):
        b, h = row // kv_heads, row % kv_heads
        assert lists(got, b, h) == lists(plain, b, h)
        exact, tokens, approx, *_ = got.counts[b, h].tolist()
        first = got.prefix[b, h, :exact].long()
        number = torch.arange(tokens, device=DEVICE)
        place = torch.searchsorted(first, number, right=True) - 1
        member = number + got.shift[b, h, :exact].long()[place] if exact else number
        assert torch.equal(expansion.slots[row, :tokens], expansion.members[h][member])
        assert (expansion.slots[row, tokens:] == -(10**6)).all()
        cell = got.approx[b, h, :approx].long()
        want = (expansion.tiles[b][cell // width] * kv_heads + h) * width + cell % width
        assert torch.equal(expansion.summaries[row, :approx].long(), want.long())
        assert (expansion.summaries[row, approx:] == -(10**6)).all()


@needs_cuda
@pytest.mark.usefixtures("cuda")
def test_expansions_that_do_not_fit() -> None:
    case = make_case(2, [11], 1.0, 1)
    cells = case.logits.shape[-1]

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=DEVICE)

    good = Expansion(ints(2, 9), ints(1, 1), cells, ints(2, 9), ints(2, cells))
    for name, value, words in (
        ("tiles", ints(1, 2), "clusters together"),
        ("members", ints(1, 9), "of 1 heads"),
        ("summaries", ints(2, 1), "summaries"),
        ("slots", ints(2, 9).long(), "contiguous int32"),
    ):
        with pytest.raises(ValueError, match=words):
            cuda_impl.select(*case.arguments, expansion=replace(good, **{name: value}))
    with pytest.raises(ValueError, match="align=8"):
        cuda_impl.select(*case.arguments, expansion=good, numbering=Numbering(4, 8))


def test_blocks() -> None:
    """The smallest that is large enough; fewer threads where there are many blocks."""
    for blocks, number in ((cuda_impl.OF_FEW, 66), (cuda_impl.OF_MANY, 67)):
        for width in (1, 1024, 1025, 4096, 8192, 10240, 16384, 16385, cuda_impl.MAX_CELLS):
            block = cuda_impl.block_for(width, number, 132)
            assert block.cells >= width and not any(width <= other.cells < block.cells for other in blocks)
            assert block in cuda_impl.up_to(width)
        assert blocks[-1].cells == cuda_impl.MAX_CELLS
    assert (cuda_impl.block_for(8192, 32, 132).threads, cuda_impl.block_for(8192, 256, 132).threads) == (512, 256)
    assert cuda_impl.up_to(1025) == [cuda_impl.SearchBlock(256, 1), cuda_impl.SearchBlock(256, 2)]
    assert set(cuda_impl.up_to(cuda_impl.MAX_CELLS)) == set(cuda_impl.BLOCKS)


def test_where_cuda_is_refused() -> None:
    assert "CUDA" in str(cuda_impl.refusal(torch.device("cpu"), 4, 100))
    case = make_case(2, [9], 1.0, 1)
    on_cpu = SearchedClusters(case.sizes, case.starts, case.cells)
    with pytest.raises(ValueError, match="triton_impl"):
        cuda_impl.select(case.logits, on_cpu, case.p)
    got = dispatch.select(*case.arguments, tuning=SEPARATE)
    for h in range(2):
        check_lists(case, got, 0, h, *expected_sets(case, 0, h, "union"))


@needs_cuda
@pytest.mark.usefixtures("cuda")
def test_cuda_refuses_what_it_cannot_do() -> None:
    for heads, width, options in (
        (9, 10, {}),
        (4, 10, {"group": "mean"}),
        (4, 10, {"numbering": Numbering(2, 8)}),
        (4, 60_000, {}),
    ):
        assert cuda_impl.refusal(torch.device(DEVICE), heads, width, **options)
