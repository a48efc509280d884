"""Double-P's equations against sums over Python floats, the guarantee with exact masses, dense attention at p = 1."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from sglang_ext.kernels.kmeans import kmeans
from sglang_ext.policies import double_p, options
from sglang_ext.policies.double_p import DoubleP

EXACT = 1e-12  # float64, beside numbers of order one


@dataclass
class Clustered:
    """One request: queries, clustered tokens with labels (cluster 2 is empty), and tokens outside the clusters."""

    query: torch.Tensor  # [kv_heads, group, head_dim]
    keys: torch.Tensor  # [kv_heads, tokens, head_dim]
    values: torch.Tensor
    labels: torch.Tensor
    dense_keys: torch.Tensor
    dense_values: torch.Tensor
    clusters: int

    @property
    def sizes(self) -> torch.Tensor:
        return double_p.cluster_sizes(self.labels, self.clusters)

    @property
    def centroids(self) -> torch.Tensor:
        """Mean keys; an empty cluster's is NaN."""
        rows = [
            [self.keys[h][self.labels[h] == c].mean(0) for c in range(self.clusters)] for h in range(len(self.keys))
        ]
        return torch.stack([torch.stack(row) for row in rows])


def make(group: int = 4, tokens: int = 53, clusters: int = 7, seed: int = 0, sharp: float = 1.0) -> Clustered:
    gen = torch.Generator().manual_seed(seed)
    kv_heads, dim, value_dim, own = 2, 6, 5, 9

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    labels = torch.randint(0, clusters, (kv_heads, tokens), generator=gen)
    labels[labels == 2] = 3
    centres = normal(kv_heads, clusters, dim) * sharp
    keys = centres.gather(1, labels.unsqueeze(-1).expand(-1, -1, dim)) + normal(kv_heads, tokens, dim) * 0.5
    return Clustered(
        normal(kv_heads, group, dim) * sharp, keys, normal(kv_heads, tokens, value_dim), labels,
        normal(kv_heads, own, dim), normal(kv_heads, own, value_dim), clusters,
    )  # fmt: skip


def step(c: Clustered, config: DoubleP) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output, log of the denominator, exact, approx) by the policy's own functions."""
    log_mass = double_p.estimated_log_mass(c.query, c.centroids, c.sizes)
    exact, approx = double_p.select(double_p.distribution(log_mass), config)
    values = double_p.cluster_values(c.values, c.labels, c.clusters)
    values[c.sizes == 0] = math.nan
    x, dense_x = double_p.logits(c.query, c.keys), double_p.logits(c.query, c.dense_keys)
    out, lse = double_p.attend(x, c.values, c.labels, log_mass, values, exact, approx, dense_x, c.dense_values)
    return out, lse, exact, approx


def by_hand(c: Clustered, config: DoubleP) -> tuple[torch.Tensor, torch.Tensor, list[set[int]], list[set[int]]]:
    """The paper's section 4 over Python floats, with a sort and a running sum."""
    kv_heads, group, dim = c.query.shape
    out = torch.zeros(kv_heads, group, c.values.shape[2], dtype=torch.float64)
    lse = torch.zeros(kv_heads, group, dtype=torch.float64)
    exacts, approxes = [], []
    for h in range(kv_heads):
        members = [[j for j, label in enumerate(c.labels[h].tolist()) if label == i] for i in range(c.clusters)]
        filled = [i for i in range(c.clusters) if members[i]]
        centroid = {i: sum(c.keys[h, j] for j in members[i]) / len(members[i]) for i in filled}
        z_hat, shares = [], []
        for g in range(group):
            q = c.query[h, g]
            z_hat.append({i: len(members[i]) * math.exp(float(q @ centroid[i]) / math.sqrt(dim)) for i in filled})
            shares.append({i: z / sum(z_hat[g].values()) for i, z in z_hat[g].items()})
        if config.group == "mean":
            shares = [{i: sum(s[i] for s in shares) / group for i in filled}]
        sets = []
        for p in (1.0 if config.tail == "centroid" else config.p1, config.p2):
            union: set[int] = set()
            for share in shares:
                running = 0.0
                for i in sorted(filled, key=lambda i, share=share: (-share[i], i)):
                    if running >= p and p < 1:
                        break
                    union.add(i)
                    running += share[i]
            sets.append(union)
        exact, approx = sets[1], sets[0] - sets[1]
        exacts.append(exact)
        approxes.append(approx)
        for g in range(group):
            q, terms = c.query[h, g], []
            for j in (j for i in exact for j in members[i]):
                terms.append((math.exp(float(q @ c.keys[h, j]) / math.sqrt(dim)), c.values[h, j]))
            for j in range(c.dense_keys.shape[1]):
                terms.append((math.exp(float(q @ c.dense_keys[h, j]) / math.sqrt(dim)), c.dense_values[h, j]))
            for i in approx:
                terms.append((z_hat[g][i], sum(c.values[h, j] for j in members[i]) / len(members[i])))
            z_tilde = sum(weight for weight, _ in terms)
            out[h, g], lse[h, g] = sum(weight / z_tilde * value for weight, value in terms), math.log(z_tilde)
    return out, lse, exacts, approxes


@pytest.mark.parametrize("tail", options.TAILS)
@pytest.mark.parametrize("rule", options.GROUPS)
@pytest.mark.parametrize("group", [1, 4])
def test_the_step_is_the_paper_s(group: int, rule: str, tail: str) -> None:
    c, config = make(group, seed=group), DoubleP(p1=0.9, p2=0.5, group=rule, tail=tail)
    want, want_lse, exact_sets, approx_sets = by_hand(c, config)
    out, lse, exact, approx = step(c, config)
    for h in range(2):
        assert set(exact[h].nonzero().flatten().tolist()) == exact_sets[h]
        assert set(approx[h].nonzero().flatten().tolist()) == approx_sets[h]
    assert exact.any() and approx.any()
    torch.testing.assert_close(out, want, rtol=0, atol=EXACT)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=EXACT)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, EXACT), (torch.float32, 1e-5)], ids=str)
def test_everything_exact_is_dense_attention(dtype: torch.dtype, tolerance: float) -> None:
    c = make(seed=3)
    c = replace(c, **{k: v.to(dtype) for k, v in vars(c).items() if torch.is_tensor(v) and v.is_floating_point()})
    out, _, _, approx = step(c, DoubleP(p1=1.0, p2=1.0))
    assert not approx.any()
    keys, values = (torch.cat(pair, 1).double() for pair in ((c.keys, c.dense_keys), (c.values, c.dense_values)))
    dense = torch.softmax(c.query.double() @ keys.transpose(1, 2) / math.sqrt(6), -1) @ values
    torch.testing.assert_close(out.double(), dense, rtol=0, atol=tolerance)


def test_exact_masses() -> None:
    """Equation 4, one sum a cluster; far apart logits neither overflow nor vanish."""
    c = make(seed=5)
    x = double_p.logits(c.query, c.keys) + torch.tensor([900.0, -900.0]).view(2, 1, 1)
    got = double_p.exact_log_mass(x, c.labels, c.clusters)
    for h in range(2):
        for i in range(c.clusters):
            want = torch.logsumexp(x[h][:, c.labels[h] == i], -1)  # of nothing: -inf
            torch.testing.assert_close(got[h, :, i], want, rtol=0, atol=1e-10)
    assert got[:, :, 2].isinf().all()


@pytest.mark.parametrize("sharp", [0.3, 1.0, 3.0], ids=["flat", "medium", "peaked"])
def test_with_exact_masses_the_kept_mass_is_at_least_p_and_the_set_minimal(sharp: float) -> None:
    """The guarantee is about true attention: the softmax over tokens, not over clusters."""
    kept_fractions = []
    for seed in range(10):
        c = make(group=1, tokens=200, clusters=20, seed=seed, sharp=sharp)
        x = double_p.logits(c.query, c.keys)
        share = double_p.distribution(double_p.exact_log_mass(x, c.labels, c.clusters))
        exact, approx = double_p.select(share, DoubleP(p1=0.95, p2=0.7))
        attention = torch.softmax(x, -1)[:, 0]
        for h in range(2):
            of_cluster = [float(attention[h][c.labels[h] == i].sum()) for i in range(c.clusters)]
            for chosen, p in ((exact[h] | approx[h], 0.95), (exact[h], 0.7)):
                mine = [of_cluster[i] for i in chosen.nonzero().flatten().tolist()]
                assert math.fsum(mine) >= p
                largest = sorted(of_cluster, reverse=True)
                assert math.fsum(largest[: len(mine) - 1]) < p  # no smaller set of clusters would do
                torch.testing.assert_close(
                    double_p.recovered_mass(x, c.labels, chosen.expand(2, -1))[h, 0].item(), math.fsum(mine)
                )
            kept_fractions.append(float((exact[h] | approx[h]).float().mean()))
    assert min(kept_fractions) < 1.0


def test_recovered_mass_counts_sinks_and_window() -> None:
    c = make(seed=8)
    x, dense_x = double_p.logits(c.query, c.keys), double_p.logits(c.query, c.dense_keys)
    chosen = torch.zeros(2, c.clusters, dtype=torch.bool)
    chosen[:, 4] = True
    got = double_p.recovered_mass(x, c.labels, chosen, dense_x)
    for h in range(2):
        for g in range(4):
            weights, own = x[h, g].exp().tolist(), dense_x[h, g].exp().tolist()
            kept = math.fsum(w for w, label in zip(weights, c.labels[h].tolist(), strict=True) if label == 4)
            assert got[h, g].item() == pytest.approx((kept + math.fsum(own)) / math.fsum(weights + own), abs=EXACT)


def test_a_head_without_clusters_reads_its_dense_tokens() -> None:
    c = make(group=2, seed=1)
    c = replace(c, keys=c.keys[:, :0], values=c.values[:, :0], labels=c.labels[:, :0])
    out, _, exact, approx = step(c, DoubleP())
    assert not exact.any() and not approx.any()
    want = torch.softmax(c.query @ c.dense_keys.transpose(1, 2) / math.sqrt(6), -1) @ c.dense_values
    torch.testing.assert_close(out, want, rtol=0, atol=EXACT)


def test_planted_clusters_from_keys_to_output() -> None:
    """k-means finds what was planted; a query at one centre makes that cluster exact and little else is kept."""
    gen = torch.Generator().manual_seed(0)
    planted, each, dim = 12, 16, 16
    directions = torch.eye(dim, dtype=torch.float64)[:planted] * 12
    truth = torch.arange(planted * each) // each
    keys = directions[truth] + torch.randn(planted * each, dim, generator=gen, dtype=torch.float64) * 0.3
    values = torch.randn(planted * each, dim, generator=gen, dtype=torch.float64)
    config = DoubleP(sink=0, window=0)
    plan = config.plan(0, planted * each, width=16)
    slots = torch.arange(planted * each)
    found = kmeans(keys.unsqueeze(1), values.unsqueeze(1), slots, plan)
    assert found.labels[0].tolist() == truth.tolist()
    query = directions[5].view(1, 1, dim)
    log_mass = double_p.estimated_log_mass(query, found.centroids[:, 0].view(1, -1, dim), found.sizes.view(1, -1))
    exact, approx = double_p.select(double_p.distribution(log_mass), config)
    assert exact.nonzero().tolist() == [[0, 5]] and not approx.any()
    x, nothing = double_p.logits(query, keys.unsqueeze(0)), torch.zeros(1, 1, 0, dtype=torch.float64)
    recovered = double_p.recovered_mass(x, found.labels.long(), exact)
    assert recovered.item() > 0.999
    out, _ = double_p.attend(
        x, values.unsqueeze(0), found.labels.long(), log_mass, found.values[:, 0].view(1, -1, dim), exact, approx,
        nothing, torch.zeros(1, 0, dim, dtype=torch.float64),
    )  # fmt: skip
    dense = torch.softmax(x, -1) @ values
    torch.testing.assert_close(out, dense, rtol=0, atol=1e-2)


@pytest.mark.parametrize(
    ("begin", "end", "want"),
    [
        (4, 20, [(4, 8), (8, 16), (16, 20)]),
        (8, 16, [(8, 16)]),
        (9, 10, [(9, 10)]),
        (0, 17, [(0, 8), (8, 16), (16, 17)]),
    ],
)
def test_segments_end_at_absolute_multiples(begin: int, end: int, want: list[tuple[int, int]]) -> None:
    assert DoubleP(segment=8).segments(begin, end) == want
    assert DoubleP(segment=8).plan(begin, end).lengths == tuple(b - a for a, b in want)


def test_middle_tokens() -> None:
    assert DoubleP().clustered(1000) == (4, 936)
    assert DoubleP().clustered(68) == (4, 4)
    assert DoubleP().clustered(50) == (4, 4)
    assert DoubleP().clustered(2) == (2, 2)
    with pytest.raises(ValueError, match="expected 0 <= begin < end"):
        DoubleP().segments(4, 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"p1": 0.0}, "p1=0.0"),
        ({"p1": 1.5}, "p1=1.5"),
        ({"p1": 0.5, "p2": 0.6}, "p2=0.6"),
        ({"cluster": 0}, "cluster=0"),
        ({"window": -1}, "window=-1"),
        ({"tail": "keep"}, "tail='keep'"),
        ({"group": "max"}, "group='max'"),
        ({"assignment": "cosine"}, "assignment='cosine'"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DoubleP(**settings)  # type: ignore[arg-type]
