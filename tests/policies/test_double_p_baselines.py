"""Quest, RetroInfer and Twilight against brute force."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_ext.policies import options, quest, retroinfer, twilight
from sglang_ext.policies.quest import Quest
from sglang_ext.policies.retroinfer import RetroInfer
from sglang_ext.policies.twilight import Twilight


def heads(tokens: int, group: int = 3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    shapes = ((2, group, 6), (2, tokens, 6), (2, tokens, 5))
    return tuple(torch.randn(*shape, generator=gen, dtype=torch.float64) for shape in shapes)  # type: ignore[return-value]


def chosen_pages(query: torch.Tensor, keys: torch.Tensor, page: int, count: int) -> list[set[int]]:
    """Tokens of the pages of the highest bound, per key-value head: loops over pages and channels."""
    found = []
    for h in range(2):
        pages = [list(range(a, min(a + page, keys.shape[1]))) for a in range(0, keys.shape[1], page)]
        scores = []
        for tokens in pages:
            bound = []
            for q in query[h]:
                channels = range(len(q))
                bound.append(sum(max(float(q[d] * keys[h, t, d]) for t in tokens) for d in channels))
            scores.append(max(bound))
        best = sorted(range(len(pages)), key=lambda i, scores=scores: (-scores[i], i))[:count]
        found.append({t for i in best for t in pages[i]})
    return found


@pytest.mark.parametrize(("tokens", "page", "budget", "count"), [(41, 4, 0.25, 3), (40, 8, 0.25, 2), (5, 16, 0.1, 1)])
def test_quest(tokens: int, page: int, budget: float, count: int) -> None:
    query, keys, values = heads(tokens)
    config = Quest(page, budget)
    assert config.pages(tokens) == count
    scores = quest.page_scores(query, *quest.page_bounds(keys, page))
    chosen = quest.select(scores, tokens, config)
    want = chosen_pages(query, keys, page, count)
    assert [set(row.nonzero().flatten().tolist()) for row in chosen] == want
    # The bound is one: no key of a page scores higher.
    x = torch.einsum("hgd,hnd->hgn", query, keys)
    assert (x <= scores.repeat_interleave(page, -1)[..., :tokens] + 1e-12).all()
    dense_x, dense_values = x[..., :2] * 0.5, values[:, :2] * 3
    out = quest.attend(x, values, chosen, dense_x, dense_values)
    for h in range(2):
        for g in range(3):
            terms = [(math.exp(x[h, g, t]), values[h, t]) for t in want[h]]
            terms += [(math.exp(dense_x[h, g, t]), dense_values[h, t]) for t in range(2)]
            total = sum(w for w, _ in terms)
            torch.testing.assert_close(out[h, g], sum(w / total * v for w, v in terms), rtol=0, atol=1e-12)


def test_retroinfer() -> None:
    gen = torch.Generator().manual_seed(1)
    share = torch.rand(2, 3, 50, generator=gen, dtype=torch.float64)
    share[:, :, 7] = 0.0  # an empty cluster
    share[1, :, 20:] = 0.0
    share[0, :, 4] = share[0, :, 31] = 2.0  # equals: the first is exact first
    config = RetroInfer(exact=0.03, approx=0.2)
    exact, approx = retroinfer.select(share, config)
    for h, filled in ((0, 49), (1, 19)):
        kept_count, exact_count = math.ceil(0.23 * filled), math.ceil(0.03 * filled)
        assert config.budgets(filled) == (kept_count, exact_count)
        order = sorted(range(50), key=lambda i, h=h: (-float(share[h, :, i].sum()), i))
        assert set(exact[h].nonzero().flatten().tolist()) == set(order[:exact_count])
        assert set(approx[h].nonzero().flatten().tolist()) == set(order[exact_count:kept_count])
    assert RetroInfer().budgets(4000) == (1000, 72)


def test_retroinfer_takes_no_empty_cluster() -> None:
    share = torch.zeros(1, 2, 10, dtype=torch.float64)
    share[0, :, 3] = 1.0
    exact, approx = retroinfer.select(share, RetroInfer(exact=0.5, approx=0.5))
    assert exact.nonzero().tolist() == [[0, 3]] and not approx.any()


@pytest.mark.parametrize("rule", options.GROUPS)
@pytest.mark.parametrize("estimate", options.ESTIMATES)
def test_twilight(estimate: str, rule: str) -> None:
    tokens, p = 61, 0.8
    query, keys, _ = heads(tokens, seed=4)
    config = Twilight(p=p, candidates=Quest(4, 0.4), estimate=estimate, group=rule)
    chosen = twilight.select(query, keys, config)
    candidates = chosen_pages(query, keys, 4, math.ceil(0.4 * tokens / 4))
    for h in range(2):
        seen = keys[h].clone()
        if estimate == "int4":
            for t in range(tokens):
                low, high = float(keys[h, t].min()), float(keys[h, t].max())
                step = (high - low) / 15
                seen[t] = torch.tensor([low + round((float(k) - low) / step) * step for k in keys[h, t]])
        shares = []
        for q in query[h]:
            weights = {t: math.exp(float(q @ seen[t]) / math.sqrt(6)) for t in candidates[h]}
            shares.append({t: w / sum(weights.values()) for t, w in weights.items()})
        if rule == "mean":
            shares = [{t: sum(s[t] for s in shares) / 3 for t in candidates[h]}]
        want: set[int] = set()
        for share in shares:
            running = 0.0
            for t in sorted(share, key=lambda t, share=share: (-share[t], t)):
                if running >= p:
                    break
                want.add(t)
                running += share[t]
        assert set(chosen[h].nonzero().flatten().tolist()) == want
        assert len(want) < len(candidates[h])


def test_a_fixed_budget_of_candidates_can_miss_the_mass() -> None:
    """Flat attention: the candidates' share is the budget, whatever p says; this is what Double-P does away with."""
    query, keys, _ = heads(64, group=1)
    keys = keys * 0.01
    chosen = twilight.select(query, keys, Twilight(p=0.95, candidates=Quest(4, 0.25)))
    attention = torch.softmax(torch.einsum("hgd,hnd->hgn", query, keys) / math.sqrt(6), -1)[:, 0]
    assert ((attention * chosen).sum(-1) < 0.3).all()


def test_quantised_keys_keep_what_four_bits_can() -> None:
    _, keys, _ = heads(20, seed=2)
    got = twilight.quantise(keys)
    step = (keys.amax(-1) - keys.amin(-1)).unsqueeze(-1) / 15
    assert ((got - keys).abs() <= step / 2 + 1e-12).all()
    assert all(len(set(vector.tolist())) <= 16 for vector in got.flatten(0, 1))
    constant = torch.full((1, 1, 6), 0.3, dtype=torch.float64)
    assert torch.equal(twilight.quantise(constant), constant)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Quest(page=0), "page=0"),
        (lambda: Quest(budget=0.0), "budget=0.0"),
        (lambda: RetroInfer(exact=0.6, approx=0.5), "expected shares that sum to at most 1"),
        (lambda: RetroInfer(exact=float("nan")), "exact=nan, approx=.*: expected shares"),
        (lambda: RetroInfer(approx=float("nan")), "approx=nan: expected shares"),
        (lambda: Twilight(p=0.0), "p=0.0"),
        (lambda: Twilight(estimate="int2"), "estimate='int2'"),
        (lambda: Twilight(group="max"), "group='max'"),
    ],
)
def test_settings_are_checked(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
