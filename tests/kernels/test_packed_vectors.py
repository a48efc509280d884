"""Packed index vectors against numbers computed one by one, and the kernel against the reference.

What there is not is NaN: tokens that no span names, entries of other blocks, outputs before they are written.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from sglang_ext.kernels.packed_vectors import PackedSpans, dispatch, hadamard, reference
from sglang_ext.kernels.packed_vectors import triton_impl as triton
from sglang_ext.kernels.packed_vectors.types import blocks_of
from sglang_ext.policies.ltri_options import MOST_PACKED
from tests.kernels import sm90

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter multiplies the bits of bfloat16 as integers.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
BOTH = pytest.mark.parametrize("module", [reference, triton], ids=["reference", "triton"])
UNUSED = 0xAB


class Case:
    """Blocks of different spans, in some entries of an index."""

    def __init__(self, dtype, blocks=3, tokens=24, spans=2, most=5, dim=20, entries=7, seed=0):
        gen = torch.Generator().manual_seed(seed)
        self.tokens = torch.full((blocks, spans, most), -1, dtype=torch.int32)
        self.states = torch.full((blocks, tokens, dim), math.nan, dtype=dtype)
        for block in range(blocks):
            for span in range(spans):
                count = int(torch.randint(0 if (block, span) != (0, 0) else most, most + 1, (1,), generator=gen))
                chosen = torch.randperm(tokens, generator=gen)[:count]
                self.tokens[block, span, :count] = chosen.int()
                self.states[block, chosen] = torch.randn(count, dim, generator=gen).to(dtype) * 3
        self.at = torch.randperm(entries, generator=gen)[:blocks]
        self.rotation = hadamard(dim, dtype, torch.device("cpu"))
        self.empty = PackedSpans(
            torch.full((entries, spans, most, dim // 2), UNUSED, dtype=torch.uint8),
            torch.full((entries, spans), math.nan),
        )

    def pack(self, module):
        out = PackedSpans(*(t.to(DEVICE, copy=True) for t in (self.empty.vectors, self.empty.scales)))
        given = (t.to(DEVICE) for t in (self.states, self.tokens, self.at, self.rotation))
        module.pack(*given, out=out)
        return PackedSpans(out.vectors.cpu(), out.scales.cpu())

    def spans(self):
        """(block, span, [vectors, dim] float64) of each span."""
        for block, spans in enumerate(self.tokens.tolist()):
            for span, chosen in enumerate(spans):
                yield block, span, self.states[block, [token for token in chosen if token >= 0]].double()


SIZES = [
    {},
    {"dim": 128, "most": 48, "tokens": 64, "spans": 1, "blocks": 4},
    {"dim": 96, "most": 3, "spans": 4},
    {"dim": 64, "most": 17, "blocks": 1},
    {"dim": 2, "most": 1, "spans": 1},
    {"dim": 256, "most": 12, "blocks": 2},
]
ids = lambda sizes: f"{sizes.get('dim', 20)}"  # noqa: E731


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "half"])
@pytest.mark.parametrize("sizes", SIZES, ids=ids)
@BOTH
def test_packing(module, sizes, dtype):
    """Each component is within half a step of the rotated one; the largest is 7 steps; no other entry is written."""
    case = Case(dtype, **sizes)
    packed, dim = case.pack(module), case.states.shape[2]
    written = torch.zeros(packed.scales.shape, dtype=torch.bool)
    for block, span, vectors in case.spans():
        entry = int(case.at[block])
        written[entry, span] = True
        scale = float(packed.scales[entry, span])
        if not len(vectors):
            assert scale == 0
            continue
        mixed = vectors @ case.rotation.double()
        largest = float(mixed.abs().max())
        assert scale == pytest.approx(largest / 7 / blocks_of(dim), rel=1e-6)
        bytes_ = packed.vectors[entry, span, : len(vectors)].tolist()
        steps = torch.tensor([[b % 16 - 8 for b in row] + [b // 16 - 8 for b in row] for row in bytes_])
        assert steps.abs().max() == 7
        assert (steps * (largest / 7) - mixed).abs().max() <= largest / 14 * (1 + 1e-5)  # float32 rounds halves
    entries = written.any(1)
    assert torch.equal(packed.scales.isnan(), ~written)
    assert (packed.vectors[~entries] == UNUSED).all()


@pytest.mark.parametrize("sizes", SIZES, ids=ids)
def test_the_kernel_is_the_reference(sizes):
    """To the bit, where sums of float32 in two orders do not end on two sides of a half."""
    case = Case(torch.float32, seed=1, **sizes)
    one, other = case.pack(reference), case.pack(triton)
    assert torch.allclose(one.scales, other.scales, rtol=1e-6, equal_nan=True)
    there = torch.zeros(one.vectors.shape[:3], dtype=torch.bool)
    for block, span, vectors in case.spans():
        there[case.at[block], span, : len(vectors)] = True
    nibbles = lambda packed: torch.cat([packed.vectors & 15, packed.vectors >> 4], -1)[there].int()  # noqa: E731
    apart = (nibbles(one) - nibbles(other)).abs()
    assert apart.max() <= 1 and apart.sum() <= 2


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (HALF, 4e-3)], ids=["float32", "half"])
@pytest.mark.parametrize("sizes", SIZES, ids=ids)
@BOTH
def test_rotating_what_packed_vectors_are_compared_with(module, sizes, dtype, tolerance):
    """Tolerances are of the largest component; in half precision, of its last bit."""
    case = Case(dtype, seed=2, **sizes)
    found = module.rotate(*(t.to(DEVICE) for t in (case.states, case.tokens, case.rotation)))
    assert found.shape == (*case.tokens.shape, case.states.shape[2]) and found.dtype == dtype
    for block, span, vectors in case.spans():
        if len(vectors):
            wanted = vectors @ case.rotation.double()
            apart = found[block, span, : len(vectors)].cpu().double() - wanted
            assert apart.abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("dim", [2, 20, 64, 96, 128])
def test_products_survive_the_rotation(dim):
    """The matrix is orthogonal up to a factor, and mixes as many components as the dimension lets it."""
    rotation = hadamard(dim, torch.float64, torch.device("cpu"))
    assert torch.equal(rotation @ rotation.T, blocks_of(dim) * torch.eye(dim, dtype=torch.float64))
    assert torch.equal((rotation != 0).sum(0), torch.full((dim,), blocks_of(dim)))
    gen = torch.Generator().manual_seed(2)
    keys, queries = (torch.randn(9, dim, generator=gen, dtype=torch.float64) for _ in range(2))
    steps, scale = reference.rounded(keys, rotation)
    found = (queries @ rotation) @ (steps * scale).T
    error = (found - queries @ keys.T).abs().max()
    # A component is off by half a step at most, of which there are 7 to the largest component of a span.
    assert error <= (keys @ rotation).abs().max() / 14 * (queries @ rotation).abs().sum(1).max() / blocks_of(dim)
    assert 0 < error < 0.5 * (queries @ keys.T).abs().max()


def test_a_large_component_does_not_hide_the_others():
    """What the rotation is for: without it, all components but the large one round to 0."""
    gen = torch.Generator().manual_seed(4)
    keys = torch.randn(16, 128, generator=gen, dtype=torch.float64)
    keys[:, 5] += 60
    queries = torch.randn(8, 128, generator=gen, dtype=torch.float64)
    queries[:, 5] = 0
    errors = []
    for rotation in (hadamard(128, torch.float64, keys.device), torch.eye(128, dtype=torch.float64)):
        steps, scale = reference.rounded(keys, rotation)
        factor = blocks_of(128) if (rotation == torch.eye(128)).all() else 1
        errors.append(((queries @ rotation) @ (steps * scale * factor).T - queries @ keys.T).abs().mean())
    assert errors[0] < 0.5 * errors[1]


@BOTH
def test_zeros_and_nan_stay_in_their_span(module):
    case = Case(torch.float32, blocks=3, spans=1, tokens=8)
    case.states[0], case.states[1] = 0, math.nan
    packed, alone = case.pack(module), Case(torch.float32, blocks=3, spans=1, tokens=8).pack(module)
    assert packed.scales[case.at[0]] == 0
    assert torch.equal(packed.vectors[case.at[2]], alone.vectors[case.at[2]])
    assert torch.equal(packed.scales[case.at[2]], alone.scales[case.at[2]])


@BOTH
def test_nothing_to_pack(module):
    case = Case(torch.float32)
    case.tokens, case.at, case.states = case.tokens[:0], case.at[:0], case.states[:0]
    packed = case.pack(module)
    assert packed.scales.isnan().all() and (packed.vectors == UNUSED).all()


BAD = {
    "expected floating": {"states": torch.zeros(3, 24, 20, dtype=torch.int32)},
    "an even number": {"states": torch.zeros(3, 24, 21)},
    "tokens are torch.int64": {"tokens": torch.zeros(3, 2, 5, dtype=torch.int64)},
    "at is torch.int32": {"at": torch.zeros(3, dtype=torch.int32)},
    "of `hadamard`": {"rotation": torch.zeros(20, 10)},
    "vectors are": {"out": PackedSpans(torch.zeros(7, 2, 5, 20, dtype=torch.uint8), torch.zeros(7, 2))},
    "scales are": {"out": PackedSpans(torch.zeros(7, 2, 5, 10, dtype=torch.uint8), torch.zeros(7, 2).double())},
}


@pytest.mark.parametrize("says, bad", BAD.items())
def test_what_does_not_fit(says, bad):
    case = Case(torch.float32)
    given = {"states": case.states, "tokens": case.tokens, "at": case.at, "rotation": case.rotation, "out": case.empty}
    with pytest.raises(ValueError, match=says):
        reference.pack(**{**given, **bad})


def test_the_option_allows_what_the_kernel_takes():
    assert MOST_PACKED == triton.MAX_DIM


def test_what_the_kernel_does_not_take():
    case = Case(torch.float64)
    case.rotation = case.rotation.double()
    with pytest.raises(ValueError, match="take the reference for float64"):
        case.pack(triton)
    case = Case(torch.float32, most=129, tokens=130)
    with pytest.raises(ValueError, match="`four_bits` to false"):
        case.pack(triton)
    case = Case(torch.float32)
    case.tokens = case.tokens.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match="expected contiguous"):
        case.pack(triton)
    case = Case(torch.float32)
    case.states = case.states.to(DEVICE).repeat(1, 1, 2)[..., ::2]
    with pytest.raises(ValueError, match="components beside each other"):
        case.pack(triton)
    with pytest.raises(ValueError, match="components beside each other"):
        triton.rotate(case.states, case.tokens.to(DEVICE), case.rotation.to(DEVICE))


def test_dispatch_is_by_device():
    case = Case(torch.float32)
    one, other = case.pack(dispatch), case.pack(triton if DEVICE == "cuda" else reference)
    assert torch.equal(one.vectors, other.vectors) and torch.allclose(one.scales, other.scales, equal_nan=True)
    given = [t.to(DEVICE) for t in (case.states, case.tokens, case.rotation)]
    module = triton if DEVICE == "cuda" else reference
    assert torch.equal(dispatch.rotate(*given)[0, 0], module.rotate(*given)[0, 0])


COMPILE = """
import torch
from sglang_ext.kernels.packed_vectors import PackedSpans, triton_impl
from tests.kernels.sm90 import stand_in

stand_in(triton_impl, "_pack_kernel", "_rotate_kernel")
for dtype, spans, most, dim in ((torch.bfloat16, 1, 48, 128), (torch.float16, 4, 12, 64), (torch.float32, 2, 6, 96)):
    out = PackedSpans(torch.empty(1, spans, most, dim // 2, dtype=torch.uint8), torch.empty(1, spans))
    triton_impl.pack(torch.empty(4, 128, dim, dtype=dtype), torch.zeros(4, spans, most, dtype=torch.int32),
                     torch.zeros(4, dtype=torch.int64), torch.empty(dim, dim, dtype=dtype), out=out)
    triton_impl.rotate(torch.empty(4, 128, dim, dtype=dtype), torch.zeros(4, spans, most, dtype=torch.int32),
                       torch.empty(dim, dim, dtype=dtype))
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests compile the kernel and run it")
def test_compiles_for_hopper(tmp_path: Path) -> None:
    """What the interpreter takes, the compiler may not."""
    sm90.run(COMPILE, tmp_path)
