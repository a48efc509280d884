"""What readers compile at a server's start is all that batches need later: a compiler would stop every request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_ext.attention.double_p import DbsaDoublePPolicy, DoublePPolicy
from sglang_ext.attention.readers.cluster_warm_up import LARGEST, batches
from sglang_ext.kernels.cluster_attention.triton_impl import padded
from sglang_ext.kernels.kmeans import dispatch as kmeans
from sglang_ext.kernels.kmeans import triton_impl
from tests.kernels.launches import compiled, different
from tests.plugin import test_clustered_backend as clustered
from tests.plugin import test_planned as planned

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="launches are watched in Triton's interpreter")


def test_views_that_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefills of one question and of several, decoding steps of one request and of many, plans that grow."""
    world = planned.World(monkeypatch)
    launches = compiled(monkeypatch)
    world.backend.reader.prefills.warm_up()
    warmed = set(launches)
    launches.clear()
    one = world.request("acb", 3, 1)
    world.forward([one], [3])
    several = [world.request("ab", 5, 2), world.request("abd", 17, 3), world.request("", 30, 4)]
    world.forward(several, [5, 17, 2])
    for batch in ([one], [one, *several], several, [one, *several, world.request("dc", 5, 5)]):
        for req in batch:
            world.grow(req)
        world.forward(batch, [1] * len(batch))
    assert launches and not different(launches, warmed)


@pytest.mark.parametrize("kind", [DoublePPolicy, DbsaDoublePPolicy])
def test_rows_over_clusters(kind: type[DoublePPolicy], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with clusters, dense ones, answers over pools; batches that grow and shrink, rows that are clustered."""
    world = clustered.World(monkeypatch, kind)
    reader, launches = world.backend.reader, compiled(monkeypatch)
    decodes = reader.decodes
    monkeypatch.setattr(decodes.memory, "_kmeans", kmeans.kmeans_layers)
    reader.prefills.warm_up()
    decodes.warm_up()
    warmed = set(launches)
    assert {name for _, name, _ in warmed} >= {"_scores", "_attend", "_merge", "_expand", "_rotate", "_assign"}
    launches.clear()
    batch = [world.request(100, 1)]
    for more in (world.request(61, 2), world.request(5, 3, (("a", 0, 30), ("c", 0, 25), ("b", 0, 41))), None):
        world.step(batch)
        batch += [more] if more is not None else []
    batch += [world.request(33 + 16 * slot, slot) for slot in (4, 5)] + [world.request(9, 6)]
    world.step(batch)
    world.step(batch[2:3])
    world.step(batch[:2])
    for _ in range(17):  # a run more is clustered
        world.step(batch[:1])
    assert launches and not different(launches, warmed)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8, 40])
def test_every_size_of_a_batch_is_compiled(kv_heads: int) -> None:
    """Kernels look through `padded` rows: the batches that a server warms up with need all such numbers, and few."""
    most = LARGEST // kv_heads
    warmed = {padded(batch * kv_heads) for batch in batches(most, kv_heads)}
    assert {padded(batch * kv_heads) for batch in range(1, most + 1)} == warmed
    assert all(padded(count) >= count for count in range(5000)) and len(warmed) == len(batches(most, kv_heads)) <= 3
    assert batches(10 * most, kv_heads) == batches(most, kv_heads)


def test_a_launch_that_would_be_compiled_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch itself: clusters of 16 tokens are other code than those of 17 where their number is compiled in."""
    launches, seen = compiled(monkeypatch), []
    kernel: Any = triton_impl._measure
    for free in (["num_segments"], []):
        monkeypatch.setitem(kernel.kwargs, "do_not_specialize", free)
        for count in (1, 2, 16):
            caches, slots = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
            segments, like = torch.tensor([[0, 1, 0, 1]] * count, dtype=torch.int32), torch.zeros(1, 1, 16)
            out = torch.zeros(count, 16)
            cache = torch.zeros(1, 1, 16)
            caches[0] = cache.data_ptr()
            kernel[(1, count)](
                caches, slots, segments, like, out, out, count, KV_HEADS=1, DIM=16, DIM_PAD=16, TOKENS=16
            )
        seen.append(len(launches))
        launches.clear()
    assert seen == [1, 3]
