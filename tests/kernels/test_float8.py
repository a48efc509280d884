"""Kernels over keys and values in float8 e4m3, beside the same numbers in the queries' type.

A float8 is exactly a number of every wider type, so that a kernel must give the same bits for both. What is right for
the wider ones say the references. Slots that nobody owns hold NaN, which float8 has, too; outputs are NaN before.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_ext.kernels.cluster_attention import ClusterPool, attend_impl, triton_impl
from sglang_ext.kernels.float8 import FLOAT8, bytes_of, widened
from sglang_ext.kernels.kmeans import ClusterPlan, kmeans
from sglang_ext.kernels.rope.reference import rotate
from sglang_ext.kernels.view_attention import Segment, View, Written, hopper_impl, view_attention
from sglang_ext.kernels.view_attention.config import Config
from sglang_ext.kernels.view_attention.planned import view_attention_plan
from tests.kernels import sm90
from tests.kernels import test_cluster_attention as clusters
from tests.kernels import test_view_triton as views

DEVICE = views.DEVICE


def attended(world: views.World, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, config: Config) -> list:
    """[output, log-sum-exp] by the kernels, from poisoned buffers."""
    plan = world.plan(config)
    buffers = world.buffers(plan, padding=len(query) - plan.num_rows)
    buffers.load(plan, world.table())
    out = torch.full((*query.shape[:2], world.value_dim), float("nan"), dtype=query.dtype, device=DEVICE)
    lse = torch.full(query.shape[:2], float("nan"), device=DEVICE)
    view_attention_plan(query, buffers, keys, values, world.head_dim**-0.5, out=out, lse=lse)
    return [out, lse]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("shape", "straight"),
    [
        ({"head_dim": 32, "group": 3}, True),  # whole tiles are copied where slots follow one another
        ({"head_dim": 80, "value_dim": 48, "rotary_dim": 20, "kv_heads": 1, "group": 7}, False),
        ({"head_dim": 16, "value_dim": 64, "rotary_dim": 0}, False),
        ({"head_dim": 64, "neox": False, "group": 1}, True),
    ],
    ids=str,
)
def test_views(shape: dict[str, int], straight: bool, dtype: torch.dtype) -> None:
    world = views.batch(views.World(size=900, straight=straight, dtype=dtype, **shape), requests=2, rows=3)
    world.requests.append(views.Asked(world.requests[0].pieces[:1], world.write(41, 300), rows=5))
    narrow = [cache.to(FLOAT8) for cache in (world.keys, world.values)]
    world.keys, world.values = (cache.to(dtype) for cache in narrow)
    query = world.query(padding=2)
    config = replace(views.SMALL, num_programs=2 * world.kv_heads)
    got = attended(world, query, *narrow, config)
    for mine, wide in zip(got, attended(world, query, world.keys, world.values, config), strict=True):
        assert torch.equal(mine, wide)
    want, _ = world.expected(query)
    views.close(got[0][: len(want)], want, views.TOLERANCE[dtype])
    assert (got[0][len(want) :] == 0).all(), "padding"


def test_the_reference_widens_before_it_rotates() -> None:
    """Float8 keys that are seen elsewhere: rotated in float32 and not rounded again, which would show."""
    world = views.World(head_dim=32)
    slots = world.write(23, 5)
    keys, values = world.keys.to(FLOAT8), world.values.to(FLOAT8)
    query, scale = torch.randn(1, 4, 32, generator=world.gen).to(DEVICE), 32**-0.5
    at = torch.tensor(slots, device=DEVICE)
    positions = world.slot_pos.to(DEVICE)
    moved = Segment(at, views.Ranks(positions[at].long() + 71))

    def seen(segment: Segment, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        where = torch.tensor([200], device=DEVICE)
        return view_attention(query, where, View((segment,)), keys, values, positions, world.rope, scale)[0]

    rotated = rotate(keys.float(), torch.full((len(keys), 1), 71, device=DEVICE), world.rope)
    stay = Segment(at, Written())
    got = seen(moved, keys, values)
    torch.testing.assert_close(got, seen(stay, rotated, values.float()), rtol=0, atol=1e-6)
    again = seen(stay, rotated.to(FLOAT8), values)
    assert (got - again).abs().max() > 1e-3, "rounding once more is another answer"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("group", "rotations"), [(1, 1), (4, 1), (3, 4)])
def test_clusters(group: int, rotations: int, dtype: torch.dtype) -> None:
    """Exact tokens are read in float8; centroids and mean values are in the queries' type."""
    world = clusters.make_world(group, rotations=rotations, seed=group)
    narrow = [cache.to(FLOAT8) for cache in (world.keys, world.values)]
    world = replace(world, keys=narrow[0].double(), values=narrow[1].double())
    exact, approx = clusters.random_sets(world, seed=group)
    selection = clusters.lists(world, exact, approx)
    wide, wide_lse = clusters.attend(world, selection, "triton", dtype)
    got, lse = _attend_narrow(world, narrow, selection, dtype)
    assert torch.equal(got, wide) and torch.equal(lse, wide_lse)
    want, _ = clusters.expected(world, exact, approx)
    torch.testing.assert_close(got, want, rtol=0, atol=clusters.TOLERANCE[dtype])
    plain = clusters.reference.cluster_attention(
        world.query, *narrow, *world.reading(selection, _logits(world))[3:]
    )  # the reference, too, widens
    torch.testing.assert_close(plain[0], want, rtol=0, atol=1e-12)


def _logits(world: clusters.World) -> torch.Tensor:
    return clusters.reference.centroid_scores(world.query, world.pool, world.rows, world.scale)[0]


def _attend_narrow(world, narrow, selection, dtype):
    """`clusters.attend` in Triton, with the caches in float8."""
    moved = world.to(dtype, DEVICE)
    keys, values = (cache.to(DEVICE) for cache in narrow)
    narrow_world = replace(moved, keys=keys, values=values)
    narrow_world.to = lambda *_: narrow_world  # what `attend` would widen
    return clusters.attend(narrow_world, selection, "triton", dtype)


def test_types_that_do_not_go_together() -> None:
    world = clusters.make_world()
    selection = clusters.lists(world, *clusters.random_sets(world, seed=1))
    w = world.to(torch.float32, DEVICE)
    logits = triton_impl.centroid_scores(w.query, w.pool, w.rows, w.scale)[0]
    query, keys, values, *rest = w.reading(selection, logits)
    with pytest.raises(ValueError, match="expected contiguous tensors of one dtype"):
        triton_impl.cluster_attention(query, keys.to(FLOAT8), values, *rest)
    views_world = views.batch(views.World(), requests=2)
    plan = views_world.plan()
    buffers = views_world.buffers(plan)
    buffers.load(plan, views_world.table())
    for keys, values in ((FLOAT8, torch.float32), (torch.float8_e5m2, torch.float8_e5m2)):
        caches = views_world.keys.to(keys), views_world.values.to(values)
        with pytest.raises(ValueError, match=r"equal for keys and values, which may be torch\.float8_e4m3fn"):
            view_attention_plan(views_world.query(), buffers, *caches, 0.25)


def test_widened_vectors_are_clustered_as_they_are() -> None:
    gen = torch.Generator().manual_seed(0)
    caches = [torch.randn(90, 2, 24, generator=gen).to(FLOAT8) for _ in range(4)]
    slots = torch.randperm(90, generator=gen)[:61].int()
    keys, values, at = widened(caches[:2], caches[2:], slots, torch.bfloat16)
    assert {each.dtype for each in (*keys, *values)} == {torch.bfloat16} and at.dtype == slots.dtype
    plan = ClusterPlan((61,), 4, 16)
    for layer in range(2):
        found = kmeans(keys[layer], values[layer], at, plan)
        wide = caches[layer].to(torch.bfloat16), caches[2 + layer].to(torch.bfloat16)
        want = kmeans(*wide, slots, plan)
        assert all(torch.equal(vars(found)[name], vars(want)[name]) for name in vars(want))
    wide = [cache.float() for cache in caches]
    assert widened(wide[:2], wide[2:], slots, None)[0][0] is wide[0], "other types are left as they are"
    with pytest.raises(ValueError, match="to be widened to None: expected the model's type"):
        widened(caches[:2], caches[2:], slots, None)
    with pytest.raises(ValueError, match=r"k-means sums 16 bits or more; see `kernels.float8.widened`"):
        kmeans(caches[0], caches[2], slots, plan)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_float8_is_a_number_of_every_wider_type(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(FLOAT8)
    back = every.to(dtype).to(FLOAT8)
    assert torch.equal(back.float().nan_to_num(1e9), every.float().nan_to_num(1e9))
    assert bytes_of(every).data_ptr() == every.data_ptr() and bytes_of(every).dtype == torch.uint8


def test_hopper_kernels_are_for_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_impl, "is_hopper", lambda _: True)
    serves = hopper_impl.serves.__wrapped__
    assert serves(32, 8, 128, 128, torch.bfloat16, torch.device("cuda"))
    assert not serves(32, 8, 128, 128, FLOAT8, torch.device("cuda"))

    half = torch.bfloat16
    pool = ClusterPool.empty(1, 1, 64, 64, 16, half, "cpu")
    query, cache = torch.zeros(1, 1, 1, 64, dtype=half), torch.zeros(4, 1, 64, dtype=half)
    monkeypatch.setattr(attend_impl, "_unusable", lambda *_: None)
    monkeypatch.setattr(attend_impl.nvrtc, "index_of", lambda _: 0)
    on_cuda = torch.device("cuda"), query
    assert attend_impl.refusal(*on_cuda, cache, cache, pool) is None
    narrow = cache.to(FLOAT8)
    assert "keys of torch.float8_e4m3fn" in str(attend_impl.refusal(*on_cuda, narrow, narrow, pool))


COMPILE = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang_ext.kernels.cluster_attention import ClusterPool, ClusterReads, ClusterRows, DenseTokens
from sglang_ext.kernels.cluster_attention import triton_impl as attention
from sglang_ext.kernels.cluster_attention.types import aligned
from sglang_ext.kernels.top_p import Numbering, Selection
from sglang_ext.kernels.view_attention import triton_impl as views
from sglang_ext.kernels.view_attention.config import choose
from tests.kernels.sm90 import compiled, stand_in

stand_in(attention, "_expand", "_attend", "_merge")

def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)

batch, heads, dim = 8, 8, 128
cache = torch.zeros(16, heads, dim, dtype=torch.float8_e4m3fn)
for half in (torch.bfloat16, torch.float16):
    for rotated in (False, True):
        query = torch.zeros(batch, 4 if rotated else 1, 4 * heads, dim, dtype=half)
        pool = ClusterPool.empty(2, heads, dim, dim, 32, half, "cpu")
        lists = (ints(batch, 64), ints(batch, 64)) if rotated else (None, None)
        rows = ClusterRows(ints(batch, 64), ints(batch), *lists)
        dense = DenseTokens(ints(batch, 1024), ints(batch), ints(batch, 16) if rotated else None)
        numbering = Numbering(64, aligned(64)) if rotated else Numbering()
        chosen = Selection.empty(batch, heads, 64 * pool.width, "cpu", numbering)
        logits = torch.zeros(batch, heads, 4, 64 * pool.width)
        attention.cluster_attention(query, cache, cache, pool, ClusterReads(rows, dense, chosen, logits), 0.1)
        text = compiled["cluster_attention_attend"].asm["ptx"]
        assert "e4m3" in text and "mma" in text

names = views._attend.arg_names
for half in ("bf16", "fp16"):
    for rows, product in ((1, "mma.sync"), (12, "wgmma"), (40, "wgmma")):
        c = choose(rows, 4, 128)
        types = {n: "i32" if n.startswith("stride") else "*i32" for n in names}
        types |= dict.fromkeys(("key_cache", "value_cache"), "*fp8e4nv")
        types |= dict.fromkeys(("key_tiles", "value_tiles"), f"tensordesc<fp8e4nv[{c.block_n}, 128]>")
        types |= dict.fromkeys(("cos", "sin", "part", "part_lse"), "*fp32")
        types |= {"query": "*" + half, "scale_log2": "fp32"}
        constants = dict(KV_HEADS=8, GROUP=4, HEAD_DIM=128, VALUE_DIM=128, BLOCK_D=128, BLOCK_V=128, ROTARY=128,
                         NEOX=True, BLOCK_M=c.block_m, BLOCK_N=c.block_n, TILE_STAGES=c.tile_stages, FLOAT8=True)
        types |= dict.fromkeys(constants, "constexpr")
        even = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
                if types[n] != "constexpr" and n not in ("scale_log2", "key_tiles", "value_tiles")}
        source = ASTSource(views._attend, types, {(names.index(n),): v for n, v in constants.items()}, even)
        options = {"num_warps": c.num_warps, "num_stages": c.num_stages}
        found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        text = found.asm["ptx"]
        assert all(each in text for each in ("cp.async.bulk.tensor", "e4m3", product)), (half, rows)
        held = (found.metadata.shared + 1024) * c.num_programs // 132  # CUDA keeps 1 KB of each program's
        assert held <= 228 * 1024, (rows, held)
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="the other tests compile the kernels and run them")
def test_compiles_for_hopper(tmp_path: Path) -> None:
    """What the interpreter takes, the compiler may not; Triton brings what it needs to compile for sm_90 anywhere."""
    sm90.run(COMPILE, tmp_path)
