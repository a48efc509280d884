"""Estimates of candidate tokens: 4-bit keys by hand and by the policy, scores token by token, buffers of garbage."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_ext.kernels.candidates import QuantisedKeys, reference, triton_impl
from sglang_ext.kernels.top_p import Selection
from sglang_ext.policies import quest, twilight
from tests.kernels import sm90

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 16


def test_codes_by_hand() -> None:
    keys = torch.tensor([[[0.0, 15.0, 3.0, 7.4], [2.0, 2.0, 2.0, 2.0]]])
    found = QuantisedKeys.of(keys)
    assert found.ranges[:, 0].tolist() == [[0.0, 1.0], [2.0, 0.0]]
    assert found.codes[:, 0].tolist() == [[0 | 3 << 4, 15 | 7 << 4], [0, 0]]
    assert found.restored().tolist() == [[[0.0, 15.0, 3.0, 7.0], [2.0, 2.0, 2.0, 2.0]]]


def test_codes_are_the_policy_s() -> None:
    keys = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0)) * 5
    restored, wanted = QuantisedKeys.of(keys).restored(), twilight.quantise(keys)
    step = (keys.amax(-1, keepdim=True) - keys.amin(-1, keepdim=True)) / 15
    assert ((restored - keys).abs() <= step * 0.52).all()
    # Ranges are kept in half precision: a component half-way between two steps may fall to the other one.
    assert ((restored - wanted).abs() < step * 0.02).float().mean() > 0.98


def world(group: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, QuantisedKeys, torch.Tensor, Selection]:
    """Two requests of two key-value heads: pages chosen at random, of one head none; members shuffled."""
    gen = torch.Generator().manual_seed(group + dim)
    kv_heads, pages, slots = 2, 40, 900
    query = torch.randn(2, kv_heads * group, dim, generator=gen)
    keys = QuantisedKeys.of(torch.randn(slots, kv_heads, dim, generator=gen) + 0.5)
    members = torch.stack([torch.randperm(slots, generator=gen)[: pages * PAGE].int() for _ in range(kv_heads)])
    chosen = Selection.empty(2, kv_heads, pages + 3, "cpu")
    for x in (chosen.counts, chosen.exact, chosen.prefix, chosen.shift, chosen.approx):
        x.fill_(-(10**6))
    for b, h, count in [(0, 0, 20), (0, 1, 7), (1, 0, 0), (1, 1, 31)]:
        listed = torch.randperm(pages, generator=gen)[:count].sort().values.int()
        prefix = torch.arange(count, dtype=torch.int32) * PAGE
        chosen.exact[b, h, :count], chosen.prefix[b, h, :count] = listed, prefix
        chosen.shift[b, h, :count] = listed * PAGE - prefix
        chosen.counts[b, h] = torch.tensor([count, count * PAGE, 0, pages, count * PAGE])
    there = replace(chosen, **{k: v.to(DEVICE) for k, v in vars(chosen).items() if isinstance(v, torch.Tensor)})
    return (
        query.to(DEVICE, dtype), QuantisedKeys(keys.codes.to(DEVICE), keys.ranges.to(DEVICE)), members.to(DEVICE), there
    )  # fmt: skip


def poisoned(group: int, cells: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    ints = [torch.full(shape, -77, dtype=torch.int32, device=DEVICE) for shape in ((2, 2, cells), (2, 2, cells), (2,))]
    return torch.full((2, 2, group, cells), math.nan, device=DEVICE), *ints  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("group", "dim", "dtype"), [(4, 64, torch.float32), (1, 24, torch.float32), (3, 32, torch.float16)]
)
def test_scores_of_single_tokens(group: int, dim: int, dtype: torch.dtype) -> None:
    query, keys, members, chosen = world(group, dim, dtype)
    cells, scale = 32 * PAGE, 0.3
    wanted = reference.token_scores(query.double(), keys, members, chosen, PAGE, cells, scale)
    found = triton_impl.token_scores(query, keys, members, chosen, PAGE, cells, scale, out=poisoned(group, cells))
    assert found[3].tolist() == wanted[3].tolist() == [20 * PAGE, 31 * PAGE]
    restored = keys.restored().double()
    for b in range(2):
        for h in range(2):
            tokens = [
                int(page) * PAGE + i for page in chosen.exact[b, h, : int(chosen.counts[b, h, 0])] for i in range(PAGE)
            ]
            most = int(wanted[3][b])
            for which in (wanted, found):
                logits, sizes, starts, _ = which
                assert starts[b, h, : len(tokens)].tolist() == tokens
                assert sizes[b, h, :most].tolist() == [1] * len(tokens) + [0] * (most - len(tokens))
                assert (logits[b, h, :, len(tokens) : most] == -math.inf).all()
            for token in (0, len(tokens) // 2, len(tokens) - 1) if tokens else ():
                key = restored[int(members[h, tokens[token]]), h]
                for g in range(group):
                    x = float(query[b, h * group + g].double() @ key) * scale
                    assert float(wanted[0][b, h, g, token]) == pytest.approx(x, abs=1e-9)
            close = 1e-5 if dtype == torch.float32 else 3e-3
            torch.testing.assert_close(
                found[0][b, h, :, : len(tokens)].double(), wanted[0][b, h, :, : len(tokens)], atol=close, rtol=close
            )
        assert torch.isnan(found[0][b, ..., int(found[3][b]) :]).all(), "written behind the count"
        assert (found[1][b, :, int(found[3][b]) :] == -77).all()


def test_query_of_bounds() -> None:
    query = torch.randn(5, 7, 24, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    out = torch.full((5, 7, 48), math.nan, device=DEVICE)
    assert torch.equal(triton_impl.bounds_query(query, out), quest.as_query(query))


def test_refusals() -> None:
    query, keys, members, chosen = world(2, 32, torch.float32)
    for module in (reference, triton_impl):
        with pytest.raises(ValueError, match="expected \\[batch, heads, 32\\]"):
            module.token_scores(query[..., :30], keys, members, chosen, PAGE, 99, 1.0)
        with pytest.raises(ValueError, match="and a selection of"):
            module.token_scores(query[:1], keys, members, chosen, PAGE, 99, 1.0)
    with pytest.raises(ValueError, match="head_dim even"):
        QuantisedKeys.of(torch.zeros(3, 2, 5))
    with pytest.raises(ValueError, match="expected a contiguous tensor"):
        triton_impl.token_scores(query, keys, members.t().contiguous().t(), chosen, PAGE, 99, 1.0)
    with pytest.raises(ValueError, match=r"expected torch\.float32"):
        triton_impl.bounds_query(query, query)


COMPILE = """
import torch
from sglang_ext.kernels.candidates import QuantisedKeys, triton_impl
from sglang_ext.kernels.top_p import Selection
from tests.kernels.sm90 import compiled, stand_in

stand_in(triton_impl, "_token_scores", "_bounds_query")
for dim in (64, 128):
    query = torch.zeros(8, 32, dim, dtype=torch.bfloat16)
    keys = QuantisedKeys.of(torch.zeros(64, 8, dim))
    members = torch.zeros(8, 64, dtype=torch.int32)
    triton_impl.token_scores(query, keys, members, Selection.empty(8, 8, 4, "cpu"), 16, 64, 0.1)
    triton_impl.bounds_query(query, torch.zeros(8, 32, 2 * dim, dtype=torch.bfloat16))
assert len(compiled) == 2, compiled
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests compile the kernels and run them")
def test_compiles_for_hopper(tmp_path: Path) -> None:
    """What the interpreter takes, the compiler may not."""
    sm90.run(COMPILE, tmp_path)
