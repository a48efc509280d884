"""Scores of memory blocks in CUDA, on the CPU where there is no GPU, against equations 8 and 9 written as loops."""

from __future__ import annotations

import math
import re

import pytest
import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.block_votes import cuda_impl, cuda_mass
from tests.kernels import on_host
from tests.kernels.block_votes import DEVICE, NONE
from tests.kernels.test_block_votes import HALF, Case, PackedCase

IN_CUDA = [
    {"blocks": (7, 0, 61), "limit": 64, "spans": 1, "most": 48, "query_spans": 4, "most_q": 12, "dim": 128},
    {"blocks": (5,), "limit": 5, "spans": 4, "most": 12, "query_spans": 5, "most_q": 3, "dim": 128},
    {"blocks": (9, 33), "limit": 35, "spans": 2, "most": 9, "query_spans": 7, "most_q": 1, "dim": 256},
    {"blocks": (3,), "limit": 4, "spans": 1, "most": 1, "query_spans": 1, "most_q": 1, "dim": 128},
    {"blocks": (3300,), "limit": 3301, "spans": 1, "most": 3, "query_spans": 2, "most_q": 5, "dim": 128},
    {"blocks": (0, 9), "limit": 11, "spans": 1, "most": 70, "query_spans": 20, "most_q": 4, "dim": 128},
    {"blocks": (2,), "limit": 2, "spans": 8, "most": 16, "query_spans": 8, "most_q": 12, "dim": 256},
]


MASS_IN_CUDA = [
    IN_CUDA[0],
    IN_CUDA[3],
    IN_CUDA[4],
    {"blocks": (9, 0, 20), "limit": 21, "spans": 1, "most": 48, "query_spans": 8, "most_q": 1, "dim": 128},
    {"blocks": (0, 9), "limit": 11, "spans": 1, "most": 70, "query_spans": 8, "most_q": 4, "dim": 128},
    {"blocks": (11,), "limit": 11, "spans": 1, "most": 17, "query_spans": 5, "most_q": 3, "dim": 256},
    {"blocks": (33,), "limit": 40, "spans": 1, "most": 20, "query_spans": 3, "most_q": 7, "dim": 128},
    {"blocks": (33, 2), "limit": 33, "spans": 1, "most": 128, "query_spans": 39, "most_q": 1, "dim": 128},
]
BY_CUDA = [
    pytest.param(module, kind, sizes, id=f"{kind}-{sizes['blocks'][-1]}-{i}")
    for module, kind, all_sizes in ((cuda_impl, "max", IN_CUDA), (cuda_mass, "mass", MASS_IN_CUDA))
    for i, sizes in enumerate(all_sizes)
]


def scored(module, case, **more):
    """What a kernel in CUDA finds; behind it the case has the query as the kernel rounded it."""
    with on_host.cuda(module):
        found = module.score_blocks(case.query(), case.index(), **more)
    if isinstance(case, PackedCase):
        case.round_query()
    return found


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "half"])
@pytest.mark.parametrize("module, kind, sizes", BY_CUDA)
@pytest.mark.parametrize("seed", [2, 3])
@on_host.needed
def test_scores_in_cuda(module, kind, sizes, packed, seed):
    if not packed and sizes["dim"] == 256:
        sizes = {**sizes, "dim": 64}
    case = (PackedCase if packed else Case)(HALF, seed=seed, **sizes)
    out = torch.full(case.ids.shape, math.nan, device=DEVICE)
    found = scored(module, case, out=out)
    assert found is out
    case.close(found, kind, HALF)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "half"])
@pytest.mark.parametrize("module, kind", [(cuda_impl, "max"), (cuda_mass, "mass")])
@on_host.needed
def test_ids_beyond_a_request_s_blocks_in_cuda(module, kind, packed):
    case = (PackedCase if packed else Case)(HALF, **IN_CUDA[0])
    beyond = torch.arange(64) >= case.blocks[:, None]
    case.ids[beyond] = torch.tensor([-1, -(10**9), 2**31 - 1])[torch.arange(int(beyond.sum())) % 3].int()
    found = scored(module, case)
    case.close(found, kind, HALF)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "half"])
@on_host.needed
def test_large_logits_by_mass_in_cuda(packed):
    """Where exponentials without their maximum overflow, and blocks whose exponentials are all too small."""
    case = (PackedCase if packed else Case)(HALF, seed=2, **IN_CUDA[0])
    case.asked *= 20
    found = scored(cuda_mass, case).cpu().double()
    want = case.expected("mass")
    assert torch.equal(found > NONE, want > NONE)
    there = want > NONE
    assert (found - want)[there].abs().max() <= 1e-4  # logits of 400 have errors of 2e-5


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "half"])
@pytest.mark.parametrize("seed", [0, 1])
@on_host.needed
def test_logits_of_all_sizes_by_mass_in_cuda(monkeypatch, seed, packed):
    """Many blocks a warp, some without vectors, of which each may be far above or below those before it."""
    monkeypatch.setattr(on_host, "MULTIPROCESSORS", 1)
    monkeypatch.setattr(nvrtc, "multiprocessors", lambda index: 1)  # the same on a GPU
    sizes = {"blocks": (60,), "limit": 64, "spans": 1, "most": 100, "query_spans": 4, "most_q": 5, "dim": 128}
    case = (PackedCase if packed else Case)(HALF, seed=seed, **sizes)
    gen = torch.Generator().manual_seed(seed)
    gone = torch.rand(len(case.kept), generator=gen) < 0.4
    case.kept_counts[gone & (case.kept_counts[:, 0] < 10**6)] = 0
    factors = 10 ** (torch.rand(len(case.kept), 1, generator=gen, dtype=torch.float64) * 3 - 2.5)
    if isinstance(case, PackedCase):
        scales = (case.scales * factors * 2).float()
        case.kept *= (scales.double() / case.scales.double())[..., None, None]
        case.scales = scales
        case.asked *= 4
    else:
        case.kept = (case.kept.double() * factors[..., None, None]).to(HALF)
        case.asked *= 20
    found = scored(cuda_mass, case).cpu().double()
    want = case.expected("mass")
    there = want > NONE
    assert torch.equal(found > NONE, there)
    assert (found - want)[there].abs().max() <= 1e-4


@on_host.needed
def test_logits_that_float32_rounds_by_hundreds():
    """A largest product that is rounded down would be far above itself: there is an end, and numbers."""
    sizes = {"blocks": (60,), "limit": 64, "spans": 1, "most": 30, "query_spans": 4, "most_q": 5, "dim": 128}
    case = Case(HALF, seed=1, **sizes)
    gen = torch.Generator().manual_seed(5)
    for vectors in (case.asked, case.kept):
        vectors[~vectors.isnan()] = (6e4 * (0.5 + 0.5 * torch.rand(vectors.shape, generator=gen))).to(HALF)[
            ~vectors.isnan()
        ]
    found = scored(cuda_mass, case).cpu()
    there = found > NONE
    assert torch.equal(there, case.expected("max") > NONE)
    assert float(found[there].sum()) > 0.5 and float(found[there].max()) < 6


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "half"])
@on_host.needed
def test_a_query_without_vectors_in_cuda(packed):
    for module in (cuda_impl, cuda_mass):
        case = (PackedCase if packed else Case)(HALF, seed=2, **IN_CUDA[0])
        case.asked_counts[2] = 0
        found = scored(module, case)
        assert bool((found[1:] == NONE).all()) and not bool((found[0] == NONE).all())


@pytest.mark.parametrize(
    "module, says, kind, change",
    [
        (cuda_impl, "kind='mass': it compares by 'max'", "mass", {}),
        (cuda_mass, "kind='max': it compares by 'mass'", "max", {}),
        (cuda_mass, "blocks of 4 spans: expected 1", "mass", {}),
        (
            cuda_mass,
            "49 query vectors, 12 index .* at most 48, 128",
            "mass",
            {"spans": 1, "query_spans": 7, "most_q": 7},
        ),
        (cuda_mass, "expected bfloat16 or float16, or packed", "mass", {"spans": 1, "dtype": torch.float32}),
        (cuda_impl, "expected bfloat16 or float16, or packed", "max", {"dtype": torch.float32}),
        (cuda_impl, "index vectors of 48 bytes: expected a multiple of 64", "max", {"dim": 96}),
        (cuda_impl, "100 query vectors, 48 index vectors of 128 comp", "max", {"query_spans": 10, "most_q": 10}),
        (
            cuda_impl,
            "130 index vectors of 128 .* in 64 bytes: expected at most 96, 128",
            "max",
            {"spans": 2, "most": 65},
        ),
        (cuda_impl, "of 512 components in 256 bytes: expected at most 96, 128, 256 and 256", "max", {"dim": 512}),
    ],
)
def test_what_cuda_does_not_compare(module, says, kind, change):
    sizes = {"dtype": HALF, **IN_CUDA[1], **change}
    case = PackedCase(sizes.pop("dtype"), **sizes)
    assert re.search(says, module.refusal(torch.device("cuda"), case.query(), case.index(), kind))
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match="it is written in CUDA; use triton_impl"):
            module.score_blocks(case.query(), case.index(), kind=kind)


@pytest.mark.parametrize("packed, bfloat16", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(
    "dim, most, columns", [(128, 48, 48), (128, 128, 96), (256, 128, 96), (128, 48, 8), (256, 48, 8)]
)
def test_cuda_compiles_for_hopper(packed, bfloat16, dim, most, columns):
    """Without a GPU, where NVRTC is installed."""
    pytest.importorskip("cuda.core")
    sizes = cuda_impl.constants(dim, 1, most, min(columns, 12), columns, packed=packed, wide=False, bfloat16=bfloat16)
    assert nvrtc.compiled(cuda_impl.SOURCE, nvrtc.HOPPER, sizes).code
    sizes = cuda_impl.constants(
        dim, 1, most, min(columns, 12), min(columns, 48), packed=packed, wide=False, bfloat16=bfloat16
    )
    assert nvrtc.compiled(cuda_mass.SOURCE, nvrtc.HOPPER, cuda_mass.with_own(sizes)).code
