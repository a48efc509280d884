"""Memory of clusters for kernels: who gets which place, what lies there, and when it is given back."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_ext.cache import cluster_pool
from sglang_ext.cache.budget import ClusterBytes, KVShape
from sglang_ext.cache.cluster_pool import ClusterMemory, Cut, PooledRun, Ranges
from sglang_ext.cache.clusters import ClusteredRun, cluster_run
from sglang_ext.kernels.kmeans import Clusters, kmeans_layers
from sglang_ext.policies.clustering import Clustering
from tests.plugin.test_clusters import LONG, Tree

SLOTS, KV_HEADS, DIM, LAYERS = 120, 2, 8, (3, 4)
CONFIG = Clustering(cluster=4, append=16, iterations=3)


@pytest.fixture
def caches() -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    gen = torch.Generator().manual_seed(0)
    return {
        layer: (
            torch.randn(SLOTS, KV_HEADS, DIM, generator=gen),
            torch.randn(SLOTS, KV_HEADS, DIM, generator=gen),
        )
        for layer in LAYERS
    }


@pytest.fixture
def memory(caches: Any) -> ClusterMemory:
    return ClusterMemory(caches, CONFIG)


def made(memory: ClusterMemory, slots: torch.Tensor, begin: int = 0) -> PooledRun:
    found = memory.make(slots, begin)
    assert found is not None
    memory.settle()
    return found


def test_centroids_of_float8(caches: Any) -> None:
    """A quarter of the bytes of 32 bits; everything else as it is, and plain PyTorch rounds alike."""
    config, slots = replace(CONFIG, centroids="float8"), torch.arange(3, 43)
    few, whole = ClusterMemory(caches, config), ClusterMemory(caches, CONFIG)
    mine, theirs = made(few, slots), made(whole, slots)
    assert theirs.bytes - mine.bytes == len(mine.place.tiles) * len(LAYERS) * KV_HEADS * few.width * 3 * DIM
    plain = cluster_run(caches, slots, 0, cluster=4, iterations=3, assignment="inner", centroids="float8")
    for layer in LAYERS:
        got, want = few.layers[layer], whole.layers[layer]
        tiles = list(mine.place.tiles)
        centroids = got.centroids.float()[tiles]
        assert torch.equal(centroids, want.centroids[tiles].to(torch.float8_e4m3fn).float())
        assert (centroids != want.centroids[tiles]).any() and torch.equal(got.values[tiles], want.values[tiles])
        for head in range(KV_HEADS):
            filled = got.sizes[tiles, head].flatten() > 0
            own = plain.layers[layer]
            assert torch.equal(centroids[:, head].flatten(0, 1)[filled], own.centroids[head, own.sizes[head] > 0])
    with pytest.raises(ValueError, match="centroids='int8': expected one of same, float8"):
        replace(CONFIG, centroids="int8")


@pytest.mark.parametrize("centroids", ["same", "float8"])
def test_what_is_allocated_is_what_the_memory_budget_was_told(centroids: str) -> None:
    """But for `SPARE` tiles and pieces, whose share of a large cache is nothing."""
    config, tokens = replace(CONFIG, centroids=centroids), 64_000
    keys, values = torch.zeros(tokens, KV_HEADS, DIM), torch.zeros(tokens, KV_HEADS, 2 * DIM)
    memory = ClusterMemory({0: (keys, values)}, config)
    held = sum(tensor.numel() * tensor.element_size() for tensor in vars(memory.layers[0]).values())
    itemsize = 1 if centroids == "float8" else 4
    said = ClusterBytes.of(KVShape(1, KV_HEADS, DIM, 2 * DIM, 4), itemsize)
    spare = cluster_pool.SPARE * memory.width * (said.cluster + said.piece)
    assert -(-(held - spare) // tokens) == said.per_token(config.cluster, in_tiles=True)


def same(caches: Any, slots: torch.Tensor) -> ClusteredRun:
    return cluster_run(caches, slots, 0, cluster=4, iterations=3, assignment="inner")


def cells(memory: ClusterMemory, run: PooledRun, piece: Any, layer: int) -> dict[tuple[int, int], tuple[int, set[int]]]:
    """(head, cluster) -> (size as it is kept, slots of the members)."""
    pool, found = memory.layers[layer], {}
    for at, tile in enumerate(piece.cells if isinstance(piece, Cut) else piece):
        for head in range(KV_HEADS):
            for number in range(memory.width):
                size, begin = int(pool.sizes[tile, head, number]), int(pool.starts[tile, head, number])
                slots = pool.members[head, begin : begin + abs(size)].tolist()
                assert run.place.begin <= begin <= begin + abs(size) <= run.place.begin + run.place.tokens
                found[head, at * memory.width + number] = (size, set(slots))
    return found


def expected(run: ClusteredRun, slots: torch.Tensor, low: int, high: int, layer: int) -> Any:
    """What `cells` must find of tokens [low, high)."""
    found = {}
    labels = run.layers[layer].labels
    for head in range(KV_HEADS):
        for cluster in range(run.layers[layer].sizes.shape[1]):
            tokens = (labels[head] == cluster).nonzero().flatten().tolist()
            there = [token for token in tokens if low <= token < high]
            size = len(there) if len(there) == len(tokens) else -len(there)
            found[head, cluster] = (size, {int(slots[token]) for token in there})
    return found


def test_ranges() -> None:
    rng, ranges, taken = random.Random(0), Ranges(100), []
    for _ in range(2000):
        if taken and rng.random() < 0.5:
            begin, size = taken.pop(rng.randrange(len(taken)))
            ranges.give_back(begin, size)
        else:
            size = rng.randint(1, 30)
            begin = ranges.take(size)
            used = {n for at, length in taken for n in range(at, at + length)}
            if begin is None:
                assert not any(used.isdisjoint(range(at, at + size)) for at in range(101 - size))
            else:
                assert used.isdisjoint(range(begin, begin + size)) and begin + size <= 100
                taken.append((begin, size))
        assert ranges.free == 100 - sum(size for _, size in taken)
    for begin, size in taken:
        ranges.give_back(begin, size)
    assert ranges.take(100) == 0


def test_what_lies_in_a_place(memory: ClusterMemory, caches: Any) -> None:
    others = made(memory, torch.arange(100, 118))
    slots = torch.randperm(90, generator=torch.Generator().manual_seed(1))
    run = made(memory, slots, begin=7)
    assert (run.begin, run.end, len(run.place.tiles)) == (7, 97, 2) and memory.width == 16
    alone = same(caches, slots)
    for layer in LAYERS:
        whole = expected(alone, slots, 0, 90, layer)
        found = cells(memory, run, run.piece(0, 90), layer)
        assert {key: each for key, each in found.items() if each[0]} == {k: e for k, e in whole.items() if e[0]}
        for (head, cluster), (size, _) in whole.items():
            if size:
                tile, number = run.place.tiles[cluster // 16], cluster % 16
                pool, summary = memory.layers[layer], alone.layers[layer]
                assert torch.equal(pool.centroids[tile, head, number], summary.centroids[head, cluster])
                assert torch.equal(pool.values[tile, head, number], summary.values[head, cluster])
    assert cells(memory, others, others.piece(0, 18), 3)  # where its members are


@pytest.mark.parametrize("at_once", [1, 90 * KV_HEADS, 2 * 90 * KV_HEADS])
def test_layers_in_one_call_or_several(caches: Any, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """A call's memory is bounded; what is found is not another for it."""
    calls = []

    def cluster(keys: Any, *others: Any, **options: Any) -> Clusters:
        calls.append(len(keys))
        return kmeans_layers(keys, *others, **options)

    slots = torch.randperm(90, generator=torch.Generator().manual_seed(1))
    want = ClusterMemory(caches, CONFIG)
    made(want, slots)
    monkeypatch.setattr(cluster_pool, "AT_ONCE", at_once)
    got = ClusterMemory(caches, CONFIG, cluster)
    made(got, slots)
    assert calls == ([2] if at_once == 2 * 90 * KV_HEADS else [1, 1])
    for layer in LAYERS:
        for name, tensor in vars(want.layers[layer]).items():
            assert torch.equal(vars(got.layers[layer])[name], tensor), (layer, name)


@pytest.mark.parametrize(("low", "high"), [(0, 40), (33, 90), (20, 21), (1, 89)])
def test_a_piece_of_a_run(memory: ClusterMemory, caches: Any, low: int, high: int) -> None:
    slots = torch.randperm(90, generator=torch.Generator().manual_seed(1)) + 5
    run, alone = made(memory, slots), same(caches, slots)
    piece = run.piece(low, high)
    assert isinstance(piece, Cut) and run.piece(low, high) is piece and len(piece.cells) == 2
    memory.settle()
    kinds = set()
    for layer in LAYERS:
        wanted = expected(alone, slots, low, high, layer)
        found = cells(memory, run, piece, layer)
        assert {key: each for key, each in found.items() if each[0]} == {k: e for k, e in wanted.items() if e[0]}
        kinds |= {size > 0 for size, _ in wanted.values() if size}
        whole = cells(memory, run, run.place.tiles, layer)
        assert sum(size for size, _ in whole.values()) == 90 * KV_HEADS, "the run is what it was"
    assert False in kinds


def test_tokens_that_come_to_lie_in_other_slots(memory: ClusterMemory, caches: Any) -> None:
    slots = torch.arange(10, 60)
    run, alone = made(memory, slots), same(caches, slots)
    others = torch.cat([torch.arange(20, 45), torch.arange(100, 80, -1), torch.arange(5)])
    run.moved(others)
    piece = run.piece(10, 50)
    memory.settle()
    for layer in LAYERS:
        for part, low in ((run.place.tiles, 0), (piece, 10)):
            wanted = expected(alone, others, low, 50, layer)
            found = cells(memory, run, part, layer)
            assert {key: each for key, each in found.items() if each[0]} == {k: e for k, e in wanted.items() if e[0]}


def test_places_are_given_back_when_nobody_has_them(memory: ClusterMemory) -> None:
    free = memory.stats()["cluster_tiles_free"]
    run = made(memory, torch.arange(40))
    rest = run.cut(20)
    assert isinstance(rest, PooledRun) and rest.bytes == run.bytes > 0
    piece = rest.piece(0, 20)
    assert isinstance(piece, Cut)
    del run
    gc.collect()
    assert memory.stats()["cluster_tiles_free"] == free - 1, "the rest has it still"
    memory.settle()
    del rest, piece
    gc.collect()
    assert memory.stats()["cluster_tiles_free"] == free
    assert memory._cells.free == memory._num_tiles and memory._members.free == SLOTS + SLOTS // 10


def test_a_full_pool_refuses(memory: ClusterMemory) -> None:
    runs = [memory.make(torch.arange(44), 0) for _ in range(4)]
    assert [run is None for run in runs] == [False, False, False, True]  # members for 132 tokens
    assert memory.stats()["cluster_refused"] == 1
    memory.settle()
    runs[1] = None
    gc.collect()
    assert memory.make(torch.arange(44), 0) is not None
    kept = [memory.cut(runs[0].place, 0, end) for end in range(1, 40)]  # type: ignore[union-attr]
    assert kept[0] is not None and kept[-1] is None, "no room for so many pieces"


def test_runs_in_the_tree(caches: Any) -> None:
    """Given to a node, cut with it, kept by the head alone, and gone."""
    tree = Tree()
    memory = ClusterMemory({0: (torch.randn(200, KV_HEADS, DIM), torch.randn(200, KV_HEADS, DIM))}, CONFIG)
    free = memory.stats()["cluster_tiles_free"]
    path = tree.insert(LONG)
    tree.store.give(path, made(memory, path[0].value[2:38], 2))
    tree.insert([*LONG[:20], 99])
    (held,) = tree.store.chain(tree.path([*LONG[:20], 99]), 2)
    assert (held.end, held.run.end) == (20, 38)
    tree.cache.evict(EvictParams(num_tokens=1))
    (held,) = tree.store.chain(tree.path([*LONG[:20], 99]), 2)
    assert isinstance(held.run, PooledRun) and (held.end, held.run.end, held.run.place.tokens) == (20, 20, 36)
    assert isinstance(held.run.piece(0, 18), Cut), "its place has more tokens than it has"
    del held
    tree.cache.evict(EvictParams(num_tokens=100))
    memory.settle()
    gc.collect()
    assert memory.stats()["cluster_tiles_free"] == free


def test_a_run_that_the_tree_gets_names_the_tree_s_slots(caches: Any) -> None:
    """Its first tokens were in the tree when its request ended: those are read, the request's own are freed."""
    tree = Tree()
    cache = (torch.randn(200, KV_HEADS, DIM), torch.randn(200, KV_HEADS, DIM))
    memory = ClusterMemory({0: cache}, CONFIG)
    tree.insert(LONG[:20])
    following = int(tree.allocator.free_pages[0])
    own = torch.arange(following, following + 40)  # the slots that the insertion takes for all of LONG
    run = made(memory, own[10:36], 10)
    tree.store.leave([(run, own[35])])
    tree.insert(LONG)
    memory.settle()
    slots = torch.cat([node.value for node in tree.path(LONG)])[10:36]
    assert not torch.equal(slots[:10], own[10:20]) and torch.equal(slots[10:], own[20:36])
    assert run.place.slots is not None and torch.equal(run.place.slots.long(), slots)
    assert set(memory.layers[0].members[0, run.place.begin :][:26].tolist()) == set(slots.tolist())
