"""Elections among memory blocks against sorted Python numbers, and against the policy.

They must agree exactly, ties included, so their scores and votes are drawn from few numbers. Votes and outputs are NaN,
or out of range, before they are written.
"""

from __future__ import annotations

import math

import pytest
import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.block_votes import cuda_election, reference, triton_impl
from sglang_ext.kernels.block_votes.cuda_election import refusal
from sglang_ext.policies import ltri
from tests.kernels import on_host
from tests.kernels.block_votes import DEVICE, NONE

CUDA = pytest.param(cuda_election, id="cuda", marks=on_host.needed)
ALL = pytest.mark.parametrize(
    "module", [pytest.param(reference, id="reference"), pytest.param(triton_impl, id="triton"), CUDA]
)


@pytest.fixture(autouse=True)
def launches():
    """Let the kernel in CUDA run, on this CPU where there is no GPU."""
    with on_host.cuda(cuda_election):
        yield


class Ballots:
    """Votes and scores of few different numbers; behind each request's blocks scores are -inf and votes NaN."""

    def __init__(self, blocks, limit, levels=4, seed=0):
        gen = torch.Generator().manual_seed(seed)
        draw = lambda: torch.randint(-levels, levels + 1, (len(blocks), limit), generator=gen)  # noqa: E731
        self.blocks, self.scores, self.votes = blocks, draw() * 0.25, draw().clamp(min=0) * 0.3
        self.scores[torch.rand(len(blocks), limit, generator=gen) < 0.1] *= -1.0  # -0.0 is as large as 0.0
        for request, n in enumerate(blocks):
            self.scores[request, n:], self.votes[request, n:] = NONE, math.nan

    def expected(self, scored, weight, count, mode):
        """(chosen [batch, count], votes [batch, max_blocks]) by sorting Python's numbers."""
        chosen, after = torch.full((len(self.blocks), count), -1, dtype=torch.int32), self.votes.clone()
        for request, n in enumerate(self.blocks):
            score = self.scores[request].tolist() if scored else [0.0] * n
            own = sorted(range(n), key=lambda b: (-score[b], b))[:count] if scored else []
            for block in own:
                after[request, block] += weight
            counted = (after if mode == "inclusive" else self.votes)[request].tolist()
            some = [block for block in range(n) if counted[block] > 0]
            best = sorted(some, key=lambda b: (-counted[b], -score[b], b))[:count]
            found = own if mode == "off" else best
            chosen[request, : len(found)] = torch.tensor(found, dtype=torch.int32)
        return chosen, after

    def elect(self, module, scored, **settings):
        votes, count = self.votes.to(DEVICE, copy=True), settings["count"]
        out = torch.full((len(self.blocks), count), 77, dtype=torch.int32, device=DEVICE)
        scores = self.scores.to(DEVICE) if scored else None
        assert module.elect(votes, scores, out=out, **settings) is out
        return out.cpu(), votes.cpu()


def same(one, other):
    """Bit by bit; NaN is what NaN was."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


ELECTIONS = [
    ((1,), 1, 1),
    ((5, 0, 3), 5, 16),
    ((16, 9), 16, 16),
    ((40, 64, 3), 70, 5),
    ((130,), 130, 64),
    ((200, 131), 260, 16),
    ((999, 600), 1024, 16),
]


@pytest.mark.parametrize("scored", [True, False], ids=["voting", "no head"])
@pytest.mark.parametrize("mode", ["inclusive", "preceding", "off"])
@pytest.mark.parametrize("blocks, limit, count", ELECTIONS, ids=lambda x: str(x))
@ALL
def test_elections(module, blocks, limit, count, mode, scored):
    for seed, levels in enumerate((1, 4, 1000)):
        ballots = Ballots(blocks, limit, levels, seed)
        chosen, after = ballots.expected(scored, 0.7, count, mode)
        found, votes = ballots.elect(module, scored, weight=0.7, count=count, mode=mode)
        assert torch.equal(found, chosen)
        assert same(votes, after)
        assert scored or same(votes, ballots.votes)


MANY = [(8192, 16, 300), (5000, 64, 300), (20000, 3, 300)]
ALIKE = [(4096, 16, 1), (4096, 16, 100_000), (4096, 64, 2), (600, 5, 0)]


@pytest.mark.parametrize("scored", [True, False], ids=["voting", "no head"])
@pytest.mark.parametrize(
    "module, blocks, count, levels",
    [(triton_impl, *sizes) for sizes in MANY]
    + [pytest.param(cuda_election, *sizes, marks=on_host.needed) for sizes in MANY + ALIKE],
)
def test_elections_of_many_blocks(module, blocks, count, levels, scored):
    """As many rounds as there are; more blocks that are alike than are listed at once."""
    ballots = Ballots((blocks,), blocks, levels, seed=blocks)
    chosen, after = ballots.expected(scored, 1.5, count, "inclusive")
    found, votes = ballots.elect(module, scored, weight=1.5, count=count, mode="inclusive")
    assert torch.equal(found, chosen) and same(votes, after)


@pytest.mark.parametrize("weight", [-0.7, 0.0])
@pytest.mark.parametrize("blocks, levels", [(70, 4), (2000, 1), (2000, 1000)])
@ALL
def test_a_weight_of_nothing_or_less(module, blocks, levels, weight):
    """Votes that the layer takes away: what is no own choice may come in."""
    ballots = Ballots((blocks,), blocks + 26, levels=levels, seed=3)
    chosen, after = ballots.expected(True, weight, 8, "inclusive")
    found, votes = ballots.elect(module, True, weight=weight, count=8, mode="inclusive")
    assert torch.equal(found, chosen) and same(votes, after)


@pytest.mark.parametrize("mode", ["inclusive", "preceding", "off"])
@pytest.mark.parametrize("what", ["scores", "votes", "both"])
@on_host.needed
def test_more_blocks_reach_the_bar_than_are_listed(what, mode):
    """The 16th best group has no good block, so that all other blocks are as good as its best one, or better."""
    ballots = Ballots((4096,), 4096, levels=300, seed=7)
    good = torch.arange(4096) % 32 < 15
    if what != "votes":
        ballots.scores[0] = torch.where(good, 100.0 + ballots.scores[0], -1e6 - torch.arange(4096.0))
    if what != "scores":
        ballots.votes[0] = torch.where(good, 100.0 + ballots.votes[0], 1 / (1 + torch.arange(4096.0)))
    chosen, after = ballots.expected(True, 1.5, 16, mode)
    found, votes = ballots.elect(cuda_election, True, weight=1.5, count=16, mode=mode)
    assert torch.equal(found, chosen) and same(votes, after)


@pytest.mark.parametrize("mode", ["inclusive", "preceding", "off"])
@ALL
def test_layers_retrieve_what_the_policy_says(module, mode):
    """Ten layers of a request, some without a head; votes are sums that depend on their order."""
    settings, gen = ltri.Ltri(retrieved=6, vote=mode), torch.Generator().manual_seed(1)
    blocks, limit = 50, 64
    votes, mine = torch.zeros(blocks), torch.zeros(1, limit, device=DEVICE)
    for layer in range(10):
        score = None if layer in (0, 3, 4, 9) else torch.randint(0, 5, (blocks,), generator=gen).float()
        padded = None
        if score is not None:
            padded = torch.nn.functional.pad(score, (0, limit - blocks), value=NONE)[None].to(DEVICE)
        weight = 0.1 + 0.07 * layer
        chosen, votes = ltri.retrieved(votes, score, weight, settings)
        found = module.elect(mine, padded, weight=weight, count=6, mode=mode)
        assert found.shape == (1, 6) and [block for block in found[0].tolist() if block >= 0] == chosen
        assert same(mine[0, :blocks].cpu(), votes) and not mine[0, blocks:].any()


@ALL
def test_a_weight_for_each_request(module):
    ballots = Ballots((40, 64, 3), 70)
    weights = torch.tensor([0.7, 0.0, 2.5])
    found, votes = ballots.elect(module, True, weight=weights.to(DEVICE), count=5, mode="inclusive")
    for request, weight in enumerate(weights.tolist()):
        chosen, after = ballots.expected(True, weight, 5, "inclusive")
        assert torch.equal(found[request], chosen[request]) and same(votes[request], after[request])


@ALL
def test_scores_that_are_no_numbers(module):
    """Infinite ones are ordered, NaN is as no block."""
    scores = torch.tensor([[1.0, math.inf, math.nan, NONE, -5.0, math.inf]], device=DEVICE)
    votes = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0, 1.0]], device=DEVICE)
    found = module.elect(votes, scores, weight=1.0, count=6)
    assert found.tolist() == [[1, 5, 0, 4, -1, -1]]
    assert votes.tolist() == [[2.0, 2.0, 1.0, 1.0, 1.0, 2.0]]


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf, 3e38, 1e-42])
@pytest.mark.parametrize("mode", ["inclusive", "preceding"])
@pytest.mark.parametrize("module", [pytest.param(triton_impl, id="triton"), CUDA])
def test_numbers_at_the_edges(module, mode, weight):
    """Against the reference: weights, votes and scores that are no numbers, or the largest and smallest there are."""
    gen = torch.Generator().manual_seed(4)
    few = torch.tensor([math.nan, math.inf, -math.inf, 3e38, 1e-42, -0.0, 0.0, 0.5, -0.5, 1.0])
    votes, scores = (few[torch.randint(0, len(few), (2, 300), generator=gen)].to(DEVICE) for _ in range(2))
    expected = votes.clone()
    chosen = reference.elect(expected, scores, weight=weight, count=16, mode=mode)
    assert torch.equal(module.elect(votes, scores, weight=weight, count=16, mode=mode), chosen)
    assert same(votes.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@ALL
def test_nothing_to_elect(module):
    votes = torch.ones(2, 5, device=DEVICE)
    assert module.elect(votes, votes.clone(), weight=1.0, count=0).shape == (2, 0)
    assert (votes == 1).all()
    none = torch.zeros(2, 0, device=DEVICE)
    assert module.elect(none, none, weight=1.0, count=3).tolist() == [[-1] * 3] * 2
    assert module.elect(none[:0], None, weight=1.0, count=3).shape == (0, 3)


@pytest.mark.parametrize("count", [16, 64])
def test_cuda_compiles_for_hopper(count):
    """Needs no GPU; which tests of numbers do."""
    pytest.importorskip("cuda.core")
    assert nvrtc.compiled(cuda_election.SOURCE, nvrtc.HOPPER, cuda_election.constants(count)).code


def test_what_cuda_does_not_elect():
    votes = torch.zeros(1, 5)
    gpu = torch.device("cuda")
    for says, device, given in (
        ("written in CUDA", torch.device("meta"), (votes, None, 3)),
        ("votes are torch.float64", gpu, (votes.double(), None, 3)),
        ("scores are torch.float64", gpu, (votes, votes.double(), 3)),
        ("at most 64", gpu, (votes, None, 65)),
    ):
        assert says in (refusal(device, *given) or "")
