"""k-means against its definition, token by token in double precision, and its lists against their meaning.

Slots that no token owns are NaN in both caches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from sglang_ext.kernels import nvrtc
from sglang_ext.kernels.kmeans import ClusterPlan, Clusters, cuda_impl, dispatch, reference, triton_impl
from sglang_ext.kernels.kmeans.clusters import members
from sglang_ext.kernels.kmeans.types import KmeansTuning
from tests.kernels import on_host

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter multiplies bfloat16 matrices wrongly (by their bits); both halves run the same code.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}  # beside means of order one
NO_CUDA = cuda_impl.refusal(torch.device(DEVICE), HALF, 64)
needs_cuda = pytest.mark.skipif(NO_CUDA is not None and not on_host.STANDS_IN, reason=f"{NO_CUDA}; there is no g++")
SMALL = KmeansTuning(tokens=32, centroids=16, sum_clusters=16, sum_tokens=32)


def caches(
    tokens: int, kv_heads: int = 2, dim: int = 12, value_dim: int = 20, seed: int = 0, planted: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(keys, values, slots) in float64; keys have a common mean, and with `planted` lie near so many far directions."""
    gen = torch.Generator().manual_seed(seed)
    slots = torch.randperm(3 * tokens, generator=gen)[:tokens].int()
    keys = torch.full((3 * tokens, kv_heads, dim), math.nan, dtype=torch.float64)
    values = torch.full((3 * tokens, kv_heads, value_dim), math.nan, dtype=torch.float64)
    fresh = torch.randn(tokens, kv_heads, dim, generator=gen, dtype=torch.float64)
    if planted:
        # Orthogonal directions, one after the other, so that the first centroids at uniform strides hit each once.
        directions = torch.eye(dim, dtype=torch.float64)[:planted] * 9
        fresh = fresh * 0.3 + directions[torch.arange(tokens) * planted // tokens].unsqueeze(1)
    keys[slots.long()] = fresh + torch.randn(kv_heads, dim, generator=gen, dtype=torch.float64) * 2
    values[slots.long()] = torch.randn(tokens, kv_heads, value_dim, generator=gen, dtype=torch.float64)
    return keys, values, slots


def by_definition(keys: torch.Tensor, count: int, iterations: int, assignment: str) -> list[int]:
    """Labels of one head's keys [n, dim]: loops over tokens and clusters."""
    n = len(keys)
    mean = sum(keys) / n
    centroids = [keys[j * n // count] for j in range(count)]
    labels: list[int] = []
    for _ in range(iterations):
        labels = []
        for key in keys:
            if assignment == "inner":
                score = [float((key - mean) @ (c - mean)) for c in centroids]
            else:
                score = [-float((key - c).square().sum()) for c in centroids]
            labels.append(score.index(max(score)))
        for j in range(count):
            mine = [key for key, label in zip(keys, labels, strict=True) if label == j]
            if mine:
                centroids[j] = sum(mine) / len(mine)
    return labels


def check_meaning(
    got: Clusters, plan: ClusterPlan, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, tolerance: float
) -> None:
    """Lists and means say what the labels say."""
    kv_heads, width = keys.shape[1], plan.width
    assert got.labels.shape == got.order.shape == (kv_heads, plan.tokens)
    assert got.sizes.shape == got.starts.shape == (sum(plan.tiles), kv_heads, width)
    token, tile = 0, 0
    for length, clusters, tiles in zip(plan.lengths, plan.clusters, plan.tiles, strict=True):
        labels = got.labels[:, token : token + length]
        assert labels.min() >= tile * width and labels.max() < tile * width + clusters
        token, tile = token + length, tile + tiles
    for head in range(kv_heads):
        for cell in range(tile * width):
            at = (cell // width, head, cell % width)
            mine = (got.labels[head] == cell).nonzero().flatten()
            assert got.sizes[at] == len(mine)
            start = int(got.starts[at])
            assert torch.equal(got.order[head, start : start + len(mine)], mine.int())  # ascending, and nothing else
            for means, cache in ((got.centroids, keys), (got.values, values)):
                chosen = cache[slots[mine].long(), head].double()
                want = chosen.mean(0) if len(mine) else torch.zeros(cache.shape[2], dtype=torch.float64)
                torch.testing.assert_close(means[at].double(), want, rtol=0, atol=tolerance)


def run(
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    plan: ClusterPlan,
    dtype: torch.dtype,
    **options: object,
) -> Clusters:
    got = triton_impl.kmeans(
        keys.to(dtype).to(DEVICE), values.to(dtype).to(DEVICE), slots.to(DEVICE), plan, tuning=SMALL, **options
    )
    return Clusters(**{name: tensor.cpu() for name, tensor in vars(got).items()})


@pytest.mark.parametrize("assignment", ["inner", "l2"])
@pytest.mark.parametrize("iterations", [1, 4])
def test_reference_is_the_definition(iterations: int, assignment: str) -> None:
    keys, values, slots = caches(61, seed=iterations)
    plan = ClusterPlan((41, 20), cluster=6, width=4)  # 7 and 4 clusters: 2 tiles and 1
    got = reference.kmeans(keys, values, slots, plan, iterations=iterations, assignment=assignment)
    for head in range(2):
        first = by_definition(keys[slots[:41].long(), head], 7, iterations, assignment)
        second = by_definition(keys[slots[41:].long(), head], 4, iterations, assignment)
        assert got.labels[head].tolist() == first + [8 + label for label in second]
    check_meaning(got, plan, keys, values, slots, TOLERANCE[torch.float64])


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "half"])
@pytest.mark.parametrize("assignment", ["inner", "l2"])
def test_planted_clusters_are_found(assignment: str, dtype: torch.dtype) -> None:
    keys, values, slots = caches(90, planted=9, seed=3)
    plan = ClusterPlan((90,), cluster=10, width=16)
    got = run(keys, values, slots, plan, dtype, iterations=3, assignment=assignment)
    want = (torch.arange(90) * 9 // 90).int()
    assert torch.equal(got.labels, want.expand(2, -1))
    check_meaning(got, plan, keys, values, slots, 10 * TOLERANCE[dtype])  # keys of order ten
    assert int((got.sizes == 0).sum()) == 2 * 7  # the padding of the tile


@pytest.mark.parametrize("assignment", ["inner", "l2"])
def test_kernel_is_the_definition_where_no_two_scores_are_close(assignment: str) -> None:
    """Two segments, the second without a full tile of tokens; float32 against double precision."""
    keys, values, slots = caches(109, dim=20, seed=12)
    keys = keys.float().double()
    plan = ClusterPlan((70, 39), cluster=4, width=16)
    got = run(keys, values, slots, plan, torch.float32, iterations=2, assignment=assignment)
    for head in range(2):
        want = by_definition(keys[slots[:70].long(), head], 18, 2, assignment)
        want += [32 + label for label in by_definition(keys[slots[70:].long(), head], 10, 2, assignment)]
        assert got.labels[head].tolist() == want  # the seed leaves no close call
    check_meaning(got, plan, keys, values, slots, TOLERANCE[torch.float32])


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_equal_keys_leave_clusters_empty(kind: str) -> None:
    """All keys alike: all go to the first cluster; the others are empty, and zero."""
    keys, values, slots = caches(37, seed=4)
    keys[slots.long()] = 0.75
    plan = ClusterPlan((37,), cluster=2, width=16)  # 19 clusters: more than one tile of centroids
    if kind == "reference":
        got = reference.kmeans(keys, values, slots, plan, iterations=2)
    else:
        got = run(keys, values, slots, plan, torch.float32, iterations=2)
    assert not got.labels.any()
    assert got.sizes[0, :, 0].tolist() == [37, 37] and got.sizes.sum() == 2 * 37
    check_meaning(got, plan, keys, values, slots, TOLERANCE[torch.float32])


@pytest.mark.parametrize("iterations", [2, 3])
@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_a_cluster_that_lost_its_tokens_stays_and_wins_them_back(kind: str, iterations: int) -> None:
    """One dimension, mean 0, first centroids 2, 3, -3.5; the inner product lets the farther one win.

    First round: 3 takes all positive keys, and moves to their mean 1.625. Second round: 2, still there, takes them and
    moves to 1.625 too. Third round: equals, and the lower number keeps them.
    """
    line = torch.tensor([2.0, 1.0, 3.0, 0.5, -3.5, -3.0], dtype=torch.float64)
    keys = line.view(-1, 1, 1).clone()
    values, slots = torch.ones(6, 1, 2, dtype=torch.float64), torch.arange(6, dtype=torch.int32)
    plan = ClusterPlan((6,), cluster=2, width=16)
    if kind == "reference":
        got = reference.kmeans(keys, values, slots, plan, iterations=iterations)
        nearest = reference.kmeans(keys, values, slots, plan, iterations=iterations, assignment="l2")
    else:
        got = run(keys, values, slots, plan, torch.float32, iterations=iterations)
        nearest = run(keys, values, slots, plan, torch.float32, iterations=iterations, assignment="l2")
    assert got.labels.tolist() == [[0, 0, 0, 0, 2, 2]]
    assert nearest.labels.tolist() == [[0, 0, 1, 0, 2, 2]]


def test_segments_are_clustered_on_their_own_and_alike_in_every_run() -> None:
    keys, values, slots = caches(83, seed=7)
    whole = run(keys, values, slots, ClusterPlan((50, 33), 8, 16), torch.float32, iterations=2)
    again = run(keys, values, slots, ClusterPlan((50, 33), 8, 16), torch.float32, iterations=2)
    for name, tensor in vars(whole).items():
        assert torch.equal(tensor, getattr(again, name)), name
    first = run(keys, values, slots[:50].contiguous(), ClusterPlan((50,), 8, 16), torch.float32, iterations=2)
    second = run(keys, values, slots[50:].contiguous(), ClusterPlan((33,), 8, 16), torch.float32, iterations=2)
    assert torch.equal(whole.centroids, torch.cat([first.centroids, second.centroids]))
    assert torch.equal(whole.labels, torch.cat([first.labels, second.labels + 16], dim=1))
    assert torch.equal(whole.order, torch.cat([first.order, second.order + 50], dim=1))


def test_layers_are_clustered_on_their_own() -> None:
    """Three layers in one call, two segments each, beside one after the other."""
    layers = [caches(47, dim=12, seed=20 + layer) for layer in range(3)]
    keys, values = ([each[at][each[2].long()].float().to(DEVICE) for each in layers] for at in (0, 1))
    plan, here = ClusterPlan((30, 17), 5, 16), torch.arange(47, dtype=torch.int32, device=DEVICE)
    for module, options in ((triton_impl, {"tuning": SMALL}), (reference, {})):
        if module is reference:  # on a GPU its sums differ from run to run
            keys, values, here = [x.cpu() for x in keys], [x.cpu() for x in values], here.cpu()
        got = module.kmeans_layers(keys, values, here, plan, iterations=2, **options)
        for layer in range(3):
            want = module.kmeans(keys[layer], values[layer], here, plan, iterations=2, **options)
            for name, tensor in vars(want).items():
                assert torch.equal(vars(got.layer(layer))[name], tensor), (module.__name__, layer, name)


def test_members() -> None:
    """By loops: tokens of each label in order, row by row."""
    labels = torch.randint(0, 7, (2, 3, 41), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    order, sizes, starts = members(labels, 9)
    for at in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        row, listed = labels[tuple(at)].tolist(), order[tuple(at)].tolist()
        assert sorted(listed) == list(range(41))
        for label in range(9):
            size, start = int(sizes[(*at, label)]), int(starts[(*at, label)])
            assert listed[start : start + size] == [token for token, own in enumerate(row) if own == label]


@pytest.fixture
def cuda() -> Iterator[None]:
    with on_host.cuda(cuda_impl):
        yield


@needs_cuda
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("dtype", cuda_impl.DTYPES if DEVICE == "cuda" else [HALF], ids=str)
@pytest.mark.parametrize("assignment", ["inner", "l2"])
@pytest.mark.parametrize("dim", cuda_impl.DIMS)
def test_sums_in_cuda(dim: int, assignment: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same clusters as with Triton's sums where no two scores are close, means of exactly their tokens; segments
    longer than what a block looks through at once, components of very different sizes, and empty clusters."""
    plan = ClusterPlan((4100, 900, 3), cluster=16, width=32)
    if DEVICE == "cpu":
        plan = ClusterPlan((330, 90, 3), cluster=16, width=32)
        monkeypatch.setattr(cuda_impl, "CHUNK", 128)
    keys, values, slots = caches(plan.tokens, kv_heads=3, dim=dim, value_dim=64, seed=dim)
    keys *= torch.logspace(-2, 1, dim, dtype=torch.float64)  # as channels of real keys differ
    keys, values, slots = keys.to(dtype).to(DEVICE), values.to(dtype).to(DEVICE), slots.to(DEVICE)
    options = {"iterations": 4, "assignment": assignment}
    got = triton_impl.kmeans(keys, values, slots, plan, update=cuda_impl.update, **options)
    again = dispatch.kmeans(keys, values, slots, plan, **options)
    for name, tensor in vars(got).items():
        assert torch.equal(tensor, vars(again)[name]), name
    other = triton_impl.kmeans(keys, values, slots, plan, **options)
    # A mean that rounds the other way moves a token, which moves a mean: few of them in four rounds.
    assert (got.labels == other.labels).float().mean() > 0.97
    got = Clusters(**{name: tensor.cpu() for name, tensor in vars(got).items()})
    keys, values, slots = (x.cpu() for x in (keys, values, slots))
    for head in range(3):
        cells = got.labels[head].long()
        for means, cache in ((got.centroids, keys), (got.values, values)):
            chosen = cache[slots.long(), head].double()
            sums = torch.zeros(sum(plan.tiles) * plan.width, chosen.shape[1], dtype=torch.float64)
            sums.index_add_(0, cells, chosen)
            sizes = cells.bincount(minlength=len(sums)).clamp(min=1).unsqueeze(1)
            # Half a unit of the last place, and what whole numbers leave out of a component.
            tolerance = 2**-9 if dtype == torch.bfloat16 else 2**-12
            found = means[:, head].reshape(len(sums), -1).double()
            limit = tolerance * (sums / sizes).abs() * 2 + 2**-15 * chosen.abs().amax(0)
            assert ((found - sums / sizes).abs() <= limit).all()
    assert torch.equal(
        got.sizes.transpose(0, 1).flatten(1)[0].long(), got.labels[0].long().bincount(minlength=len(sums))
    )


@needs_cuda
@pytest.mark.usefixtures("cuda")
def test_sums_of_layers_in_cuda() -> None:
    """Three layers and two segments in one call are what each layer is alone, to the bit."""
    plan = ClusterPlan((500, 200) if DEVICE == "cuda" else (90, 40), 16, 32)
    layers = [caches(plan.tokens, kv_heads=3, dim=128, value_dim=64, seed=layer) for layer in range(3)]
    keys, values = ([each[at][each[2].long()].to(HALF).to(DEVICE) for each in layers] for at in (0, 1))
    here = torch.arange(plan.tokens, dtype=torch.int32, device=DEVICE)
    got = dispatch.kmeans_layers(keys, values, here, plan, iterations=3)
    for layer in range(3):
        want = dispatch.kmeans(keys[layer], values[layer], here, plan, iterations=3)
        for name, tensor in vars(want).items():
            assert torch.equal(vars(got.layer(layer))[name], tensor), (layer, name)


@pytest.mark.parametrize("dim", cuda_impl.DIMS)
@pytest.mark.parametrize("dtype", cuda_impl.DTYPES, ids=str)
def test_sums_compile_for_hopper(dim: int, dtype: torch.dtype) -> None:
    pytest.importorskip("cuda.core")
    assert cuda_impl.compiled(nvrtc.HOPPER, dim, dtype).code


def test_where_sums_in_cuda_are_refused() -> None:
    assert "CUDA" in str(cuda_impl.refusal(torch.device("cpu"), torch.bfloat16, 64))
    if DEVICE == "cuda":
        assert "float32" in str(cuda_impl.refusal(torch.device("cuda"), torch.float32, 64))
        assert "vectors of 96" in str(cuda_impl.refusal(torch.device("cuda"), torch.bfloat16, 64, 96))


def test_plan() -> None:
    plan = ClusterPlan((8192, 17, 1), cluster=16, width=64)
    assert plan.tokens == 8210 and plan.clusters == (512, 2, 1) and plan.tiles == (8, 1, 1)
    with pytest.raises(ValueError, match="expected at least one, each of at least one token"):
        ClusterPlan((5, 0))
    with pytest.raises(ValueError, match="cluster=0"):
        ClusterPlan((5,), cluster=0)


def test_refusals() -> None:
    keys, values, slots = caches(10)
    for module in (reference, triton_impl):
        with pytest.raises(ValueError, match="for a plan of 11 tokens"):
            module.kmeans(keys, values, slots, ClusterPlan((11,)))
        with pytest.raises(ValueError, match="iterations=0"):
            module.kmeans(keys, values, slots, ClusterPlan((10,)), iterations=0)
        with pytest.raises(ValueError, match="assignment='cosine'"):
            module.kmeans(keys, values, slots, ClusterPlan((10,)), assignment="cosine")
        with pytest.raises(ValueError, match="the same slots and heads"):
            module.kmeans(keys, values[:, :1], slots, ClusterPlan((10,)))
        with pytest.raises(ValueError, match="2 layers of keys, 1 of values"):
            module.kmeans_layers([keys, keys], [values], slots, ClusterPlan((10,)))
        with pytest.raises(ValueError, match="caches of one shape and type"):
            module.kmeans_layers([keys, keys.float()], [values, values], slots, ClusterPlan((10,)))
    part = torch.zeros(10 * 2 * 12 + 1)[1:].view(10, 2, 12)
    with pytest.raises(ValueError, match="no multiple of 16"):
        triton_impl.kmeans(part, part, slots, ClusterPlan((10,)))
    with pytest.raises(ValueError, match="expected contiguous tensors"):
        triton_impl.kmeans(keys.transpose(0, 1), values.transpose(0, 1), slots, ClusterPlan((10,)))
