"""`rope.rotate` against complex multiplication in float64, which shares no code with it."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.kernels.rope import Rope, rotate
from sglang_ext.kernels.rope.triton_impl import angle_tables, rotate_queries

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}  # beside vectors of order one


def make_rope(rotary_dim: int, neox: bool, base: float = 10000.0) -> Rope:
    pairs = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    return Rope((base**-pairs).to(torch.float32), neox)


def by_complex_numbers(x: torch.Tensor, delta: torch.Tensor, rope: Rope) -> torch.Tensor:
    """`x` rotated by `delta`: each pair of components is one complex number, times exp(i * delta * frequency)."""
    x, d = x.to(torch.float64), 2 * len(rope.inv_freq)
    out = x.clone()
    for pair, frequency in enumerate(rope.inv_freq.tolist()):
        real, imaginary = (pair, pair + d // 2) if rope.neox else (2 * pair, 2 * pair + 1)
        angle = delta.to(torch.float64) * frequency
        rotated = torch.complex(x[..., real], x[..., imaginary]) * torch.polar(torch.ones_like(angle), angle)
        out[..., real], out[..., imaginary] = rotated.real, rotated.imag
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (64, 64), (10, 6), (7, 2), (80, 20)])
def test_equals_complex_multiplication(head_dim: int, rotary_dim: int, neox: bool, dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(head_dim)
    rope = make_rope(rotary_dim, neox)
    x = torch.randn(5, 3, head_dim, generator=gen, dtype=dtype)
    # One delta a token, the same for its heads; near, far and backwards.
    delta = torch.tensor([0, 1, -1, 1_000_000, -999_999]).unsqueeze(-1)
    got = rotate(x, delta, rope)
    assert got.dtype == dtype and got.shape == x.shape
    expected = by_complex_numbers(x, delta.expand(5, 3), rope)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=TOLERANCE[dtype])
    assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])  # partial rotary leaves the rest alone
    assert torch.equal(got[0], x[0])


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
def test_every_vector_has_its_own_delta(neox: bool) -> None:
    gen = torch.Generator().manual_seed(1)
    rope = make_rope(12, neox, base=500_000.0)
    x = torch.randn(4, 9, 12, generator=gen, dtype=torch.float64)
    delta = torch.randint(-5000, 5000, (4, 9), generator=gen, dtype=torch.int32)
    torch.testing.assert_close(rotate(x, delta, rope), by_complex_numbers(x, delta, rope), rtol=0, atol=1e-12)


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize(("a", "b"), [(3, 4), (700, -700), (-12, -30), (1_000_000, -999_000), (131_072, 1)])
def test_rotations_compose(a: int, b: int, neox: bool) -> None:
    gen = torch.Generator().manual_seed(2)
    rope = make_rope(16, neox)
    x = torch.randn(6, 16, generator=gen, dtype=torch.float64)
    once = rotate(x, torch.tensor(a + b), rope)
    twice = rotate(rotate(x, torch.tensor(a), rope), torch.tensor(b), rope)
    torch.testing.assert_close(twice, once, rtol=0, atol=1e-9)  # angles of 1e6 rad carry 1e-10 in float64


def test_logits_depend_on_the_difference_of_positions_only() -> None:
    gen = torch.Generator().manual_seed(3)
    rope = make_rope(32, True)
    q, k = torch.randn(2, 32, generator=gen, dtype=torch.float64)
    logits = [(rotate(q, torch.tensor(p + 37), rope) * rotate(k, torch.tensor(p), rope)).sum() for p in (0, 5, 90_000)]
    # (R(p) q) . (R(m + d) k) = (R(p - d) q) . (R(m) k): the identity that lets keys stay where they are
    moved = (rotate(q, torch.tensor(37 - 10), rope) * rotate(k, torch.tensor(0), rope)).sum()
    direct = (rotate(q, torch.tensor(37), rope) * rotate(k, torch.tensor(10), rope)).sum()
    torch.testing.assert_close(torch.stack(logits), logits[0].expand(3), rtol=0, atol=1e-9)
    torch.testing.assert_close(moved, direct, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_goes_in_and_out_and_is_computed_in_float32(dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(4)
    rope = make_rope(32, True)
    x = torch.randn(7, 2, 40, generator=gen).to(dtype)
    delta = torch.tensor([0, 1, -1, 12_345, -12_345, 131_071, 1_000_000]).unsqueeze(-1)
    got = rotate(x, delta, rope)
    assert got.dtype == dtype
    assert torch.equal(got, rotate(x.float(), delta, rope).to(dtype))
    # One rounding, of the result.
    expected = by_complex_numbers(x, delta.expand(7, 2), rope)
    ulp = torch.finfo(dtype).eps * expected.abs().clamp(min=1e-2)
    assert ((got.double() - expected).abs() <= 0.51 * ulp).all()


def test_rotary_dim() -> None:
    assert make_rope(20, True).rotary_dim == 20


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (80, 20), (10, 6)])
def test_queries_in_several_rotations(head_dim: int, rotary_dim: int, neox: bool) -> None:
    gen = torch.Generator().manual_seed(head_dim)
    rope = make_rope(rotary_dim, neox)
    rope = Rope(rope.inv_freq.to(DEVICE), neox)
    query = torch.randn(3, 2 * 4, head_dim, generator=gen).to(DEVICE)[:, ::2].contiguous()
    wide = torch.full((3, 6 * head_dim), float("nan"), device=DEVICE)  # rows as they lie in a fused projection
    wide[:, : 4 * head_dim] = query.flatten(1)
    deltas = torch.tensor([[0, 1, -7], [0, 1_000_000, 5], [0, 3, 4]], dtype=torch.int32, device=DEVICE)
    counts = torch.tensor([3, 2, 0], dtype=torch.int32, device=DEVICE)
    cos, sin = torch.zeros(9, rotary_dim // 2, device=DEVICE), torch.zeros(9, rotary_dim // 2, device=DEVICE)
    angle_tables(deltas, rope, cos, sin)
    out = torch.full((3, 3, 4, head_dim), 77.0, device=DEVICE)
    rotate_queries(wide[:, : 4 * head_dim].view(3, 4, head_dim), cos, sin, counts, rope, out)
    for row, count in enumerate(counts.tolist()):
        expected = rotate(query[row].expand(3, -1, -1), -deltas[row].view(-1, 1), rope)
        torch.testing.assert_close(out[row, :count], expected[:count], atol=TOLERANCE[torch.float32] * 5, rtol=0)
        assert (out[row, count:] == 77).all(), "what lies behind the count is not touched"
    with pytest.raises(ValueError, match="expected"):
        rotate_queries(query, cos[:8], sin[:8], counts, rope, out)
