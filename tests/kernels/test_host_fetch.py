"""The cache in front of host memory against an `OrderedDict` that is its definition, and copies bit by bit.

Whatever must not be read or written is poisoned with NaN: empty ways, freed host blocks, and slots that no block names.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sglang_ext.kernels import host_fetch
from sglang_ext.kernels.host_fetch import BlockCache, Found, FreshBlocks, HostRegion, reference
from sglang_ext.kernels.host_fetch import triton_impl as triton
from tests.kernels import sm90

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLEMENTATIONS = pytest.mark.parametrize("module", [reference, triton], ids=["reference", "triton"])
SMALL = triton.CopyTuning(size=128, warps=1, programs=3)
"""Pieces so small that a block takes several."""
UNREAD = 10**6
"""What stands in `used` where a way is empty, and nobody may heed it."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits, so that NaN equals NaN."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def ints(values: list[int] | list[list[int]], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def poison(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan"))


def region(blocks: int, block: int, heads: int, dims: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> HostRegion:
    """A region with random contents."""
    return HostRegion(*(drawn((blocks, block, heads, dim), dtype, seed + n) for n, dim in enumerate(dims)))


@dataclass
class Row:
    """One stream's cache: blocks in the order of their last use, the oldest first."""

    ways: int
    blocks: OrderedDict[int, int] = field(default_factory=OrderedDict)  # host block -> way
    looks: int = 0
    hits: int = 0
    misses: int = 0

    def want(self, asked: list[int]) -> tuple[list[int], list[int]]:
        """(way, block to fetch) of each wanted block."""
        names = [block for block in asked if block >= 0]
        missing = [block if block >= 0 and block not in self.blocks else -1 for block in asked]
        self.looks += bool(names)
        for block in (block for block in missing if block >= 0):
            empty = [way for way in range(self.ways) if way not in self.blocks.values()]
            old = [held for held in self.blocks if held not in names]
            self.blocks[block] = empty[0] if empty else self.blocks.pop(old[0])
        for block in sorted(names, key=lambda block: self.blocks[block]):  # blocks used together leave by their way
            self.blocks.move_to_end(block)
        self.misses += sum(block >= 0 for block in missing)
        self.hits += len(names) - sum(block >= 0 for block in missing)
        return [self.blocks[block] if block >= 0 else -1 for block in asked], missing


@dataclass
class World:
    """A cache of several rows, and the model of each that is used."""

    module: ModuleType
    host: HostRegion
    cache: BlockCache
    models: dict[int, Row]

    @classmethod
    def make(cls, module: ModuleType, host: HostRegion, rows: int, ways: int, used: list[int]) -> World:
        cache = BlockCache.empty(rows, ways, host, DEVICE)
        poison(cache.keys, cache.values)
        cache.used.fill_(UNREAD)
        return cls(module, host, cache, {row: Row(ways) for row in used})

    def step(self, rows: list[int], wanted: list[list[int]], copy: bool = True) -> Found:
        """Look up by the model and by the kernel, and fetch; the results and the whole cache are compared."""
        expected = [
            self.models[row].want(asked) if row >= 0 else ([-1] * len(asked),) * 2
            for row, asked in zip(rows, wanted, strict=True)
        ]
        at = ints(rows, torch.int64)
        found = self.module.look_up(ints(wanted), at, self.cache)
        assert found.places.dtype == found.missing.dtype == torch.int32
        assert found.places.tolist() == [places for places, _ in expected]
        assert found.missing.tolist() == [missing for _, missing in expected]
        if copy:
            self.module.fetch(self.host, found, at, self.cache)
        self.check(copy)
        return found

    def check(self, copied: bool = True) -> None:
        keys, values = torch.empty_like(self.cache.keys), torch.empty_like(self.cache.values)
        poison(keys, values)
        for row in range(len(self.cache.clock)):
            model = self.models.get(row, Row(self.cache.held.shape[1]))
            held = [-1] * model.ways
            for block, way in model.blocks.items():
                held[way] = block
                keys[row, way], values[row, way] = self.host.keys[block], self.host.values[block]
            assert self.cache.held[row].tolist() == held
            assert self.cache.clock[row].item() == model.looks
            assert self.cache.counters[row].tolist() == [model.hits, model.misses]
            used = self.cache.used[row].tolist()
            assert all((used[way] == UNREAD) == (block < 0) for way, block in enumerate(held))
            by_use = sorted(model.blocks.values(), key=lambda way: (used[way], way))
            assert by_use == list(model.blocks.values())
        if copied:
            assert same(self.cache.keys, keys) and same(self.cache.values, values)


@pytest.mark.parametrize("seed", range(8))
@IMPLEMENTATIONS
def test_random_wants(module: ModuleType, seed: int) -> None:
    rng = random.Random(seed)
    ways = rng.choice([1, 3, 8, 13, 32])
    blocks = ways + rng.choice([1, 4, 40])
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
    host = region(blocks, rng.choice([1, 3, 4]), rng.choice([1, 2]), (24, rng.choice([24, 40])), dtype, seed)
    rows = 5
    used = sorted(rng.sample(range(rows), 3))
    world = World.make(module, host, rows, ways, used)
    for _ in range(25):
        batch = rng.sample(used, rng.randint(1, 3))
        count = rng.randint(1, ways)
        near = rng.randint(count, blocks)  # small: the same blocks are wanted again and again
        wanted = [rng.sample(range(near), count) for _ in batch]
        holes = rng.choice([0.0, 0.3, 1.0])
        world.step(batch, [[-1 if rng.random() < holes else block for block in asked] for asked in wanted])


@IMPLEMENTATIONS
def test_all_misses_then_all_hits_then_a_full_cache(module: ModuleType) -> None:
    world = World.make(module, region(20, 2, 1, (8, 8), torch.float32), 2, 4, [1])
    first = world.step([1], [[9, 3, 7, 5]])
    assert first.places.tolist() == [[0, 1, 2, 3]] and first.missing.tolist() == [[9, 3, 7, 5]]
    hits = world.step([1], [[5, 9, 7, 3]])
    assert hits.places.tolist() == [[3, 0, 2, 1]] and hits.missing.tolist() == [[-1] * 4]
    # All ways were used together: the smallest goes first, but not one that is wanted.
    mixed = world.step([1], [[11, -1, 9, 12]])
    assert mixed.places.tolist() == [[1, -1, 0, 2]] and mixed.missing.tolist() == [[11, -1, -1, 12]]
    # Way 3 was not used in the last call.
    assert world.step([1], [[13]]).places.tolist() == [[3]]
    replaced = world.step([1], [[0, 1, 2, 4]])
    assert replaced.places.tolist() == [[0, 1, 2, 3]] and replaced.missing.tolist() == [[0, 1, 2, 4]]
    assert world.cache.counters[1].tolist() == [5, 4 + 2 + 1 + 4]


@IMPLEMENTATIONS
def test_requests_that_want_nothing(module: ModuleType) -> None:
    """Padding of a batch may name any row, also one that another request uses."""
    world = World.make(module, region(20, 2, 1, (8, 8), torch.float32), 3, 4, [0, 1])
    world.step([1, 0], [[2, 3], [4, 5]])
    before = [tensor.clone() for tensor in (world.cache.held, world.cache.used, world.cache.clock)]
    world.step([-1, 0], [[8, 9], [-1, -1]])
    for tensor, old in zip((world.cache.held, world.cache.used, world.cache.clock), before, strict=True):
        assert torch.equal(tensor, old)
    world.step([0, 1, 0, -1], [[-1, -1], [2, 6], [4, 7], [-1, 3]])


@IMPLEMENTATIONS
def test_nothing_to_do(module: ModuleType) -> None:
    world = World.make(module, region(3, 2, 1, (8, 8), torch.float32), 2, 2, [0])
    for batch, count in ((0, 2), (1, 0)):
        wanted, rows = torch.empty(batch, count, dtype=torch.int32, device=DEVICE), ints([0] * batch)
        found = module.look_up(wanted, rows, world.cache)
        assert found.places.shape == found.missing.shape == (batch, count)
        module.fetch(world.host, found, rows, world.cache)
    slots = torch.empty(0, 2, dtype=torch.int64, device=DEVICE)
    module.store(world.host.keys[0], world.host.values[0], slots, ints([]), world.host)
    world.check()


@IMPLEMENTATIONS
def test_results_go_to_given_tensors(module: ModuleType) -> None:
    """`wanted` is a part of a wider table here."""
    world = World.make(module, region(20, 2, 1, (8, 8), torch.float32), 2, 4, [1])
    table = ints([[6, 9, 2, 99]])
    out = Found.empty(1, 3, DEVICE)
    assert module.look_up(table[:, :3], ints([1]), world.cache, out=out) is out
    assert out.places.tolist() == [[0, 1, 2]] and out.missing.tolist() == [[6, 9, 2]]


@IMPLEMENTATIONS
def test_a_reset_row_is_empty(module: ModuleType) -> None:
    world = World.make(module, region(20, 2, 1, (8, 8), torch.float32), 3, 4, [0, 2])
    world.step([0, 2], [[1, 2], [3, 4]])
    world.cache.reset(ints([2, 1]))
    assert world.cache.held[1:].tolist() == [[-1] * 4] * 2 and not world.cache.used[1:].any()
    assert world.cache.clock.tolist() == [1, 0, 0] and not world.cache.counters[1:].any()
    # The freed blocks' memory may be anything; the new stream's block 3 is another one.
    world.models[2] = Row(4)
    poison(world.cache.keys[2], world.cache.values[2], world.host.keys[4], world.host.values[4])
    world.host.keys[3], world.host.values[3] = 1.0, 2.0
    world.cache.used[1:] = UNREAD
    found = world.step([2, 0], [[3], [2]])
    assert found.missing.tolist() == [[3], [-1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(24, 40), (40, 24), (16, 16), (7, 5)], ids=str)
@IMPLEMENTATIONS
def test_fetch(module: ModuleType, dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Only the missing blocks are read, and only their ways are written."""
    host = region(9, 3, 2, dims, dtype)
    poison(*(tensor[block] for tensor in (host.keys, host.values) for block in (0, 3, 5, 8)))
    missing, places, rows = [[1, -1, 7], [2, 4, -1], [6, 6, 6]], [[2, 0, 3], [0, 4, -1], [1, 2, 3]], [3, 0, -1]
    for more in [{}] if module is reference else [{}, {"tuning": SMALL}]:
        cache = BlockCache.empty(4, 5, host, DEVICE)
        poison(cache.keys, cache.values)
        keys, values = cache.keys.clone(), cache.values.clone()
        for block, row, way in ((1, 3, 2), (7, 3, 3), (2, 0, 0), (4, 0, 4)):
            keys[row, way], values[row, way] = host.keys[block], host.values[block]
        module.fetch(host, Found(ints(places), ints(missing)), ints(rows), cache, **more)
        assert same(cache.keys, keys) and same(cache.values, values)
        assert int(cache.keys.isnan().logical_not().sum()) == 4 * 3 * 2 * dims[0]


@IMPLEMENTATIONS
@pytest.mark.parametrize("dims", [(8, 8), (24, 40)])
def test_blocks_that_are_not_on_the_host_yet(module: ModuleType, dims: tuple[int, int]) -> None:
    """They come from where they wait; what the host has at their numbers is NaN."""
    host = region(9, 5, 3, dims, torch.float32)
    kept = [each.clone() for each in (host.keys, host.values)]
    waiting = [4, 7]
    fresh = FreshBlocks(ints(waiting), *(each[waiting].contiguous() for each in kept))
    for each in (host.keys, host.values):
        each[waiting] = torch.nan
    cache = BlockCache.empty(2, 4, host, DEVICE)
    cache.keys.fill_(torch.nan), cache.values.fill_(torch.nan)
    found = Found(ints([[3, 0, -1, 2], [1, 3, 0, 2]]), ints([[7, 2, 4, -1], [-1, 0, 4, 8]]))
    module.fetch(host, found, ints([1, 0]), cache, fresh=fresh)
    for row, way, block in ((1, 3, 7), (1, 0, 2), (0, 3, 0), (0, 0, 4), (0, 2, 8)):
        assert torch.equal(cache.keys[row, way], kept[0][block])
        assert torch.equal(cache.values[row, way], kept[1][block])
    for row, way in ((1, 1), (1, 2), (0, 1)):
        assert cache.keys[row, way].isnan().all() and cache.values[row, way].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(24, 40), (40, 24), (16, 16), (7, 5)], ids=str)
@IMPLEMENTATIONS
def test_store(module: ModuleType, dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Slots are a part of a table of slots; those of a request that stores nothing are not read."""
    block, slots = 3, torch.randperm(20, generator=torch.Generator().manual_seed(1))[:9].tolist()
    keys, values = (drawn((20, 2, dim), dtype, n) for n, dim in enumerate(dims))
    for slot in set(range(20)) - set(slots[:3] + slots[6:]):
        poison(keys[slot], values[slot])
    table = [[-9, *slots[:3], 99], [-9, 10**6, 10**6, 10**6, 99], [-9, *slots[6:], 99]]
    for kind in (torch.int32, torch.int64):
        for more in [{}] if module is reference else [{}, {"tuning": SMALL}]:
            host = region(7, block, 2, dims, dtype)
            poison(host.keys, host.values)
            expected = host.keys.clone(), host.values.clone()
            for number, at in ((5, slots[:3]), (0, slots[6:])):
                expected[0][number], expected[1][number] = keys[at], values[at]
            module.store(keys, values, ints(table, kind)[:, 1:4], ints([5, -1, 0]), host, **more)
            assert same(host.keys, expected[0]) and same(host.values, expected[1])
            assert int(host.values.isnan().logical_not().sum()) == 2 * block * 2 * dims[1]


@IMPLEMENTATIONS
def test_blocks_leave_and_come_back(module: ModuleType) -> None:
    """Keys and values share one region here, and the layer's caches are parts of a larger tensor."""
    host = HostRegion.of(torch.full((6, 2, 4, 2, 16), float("nan"), dtype=torch.bfloat16, device=DEVICE))
    both = drawn((30, 2, 2, 16), torch.bfloat16, 3)
    keys, values = both[:, 0], both[:, 1]
    slots = torch.randperm(30, generator=torch.Generator().manual_seed(2))[:12].view(3, 4)
    module.store(keys, values, slots.to(DEVICE), ints([4, 0, 2]), host)
    world = World.make(module, host, 2, 3, [1])
    world.step([1], [[0, 4]])
    found = world.step([1], [[2, 4]])
    for place, at in zip(found.places[0].tolist(), (slots[2], slots[0]), strict=True):
        assert same(world.cache.keys[1, place], keys[at.to(DEVICE)])
        assert same(world.cache.values[1, place], values[at.to(DEVICE)])


def test_triton_equals_the_reference() -> None:
    """All integers of the cache, the clock's readings among them, and the most ways that the kernel takes."""
    rng = random.Random(4)
    host = region(300, 1, 1, (2, 2), torch.float32)
    caches = [BlockCache.empty(3, triton.MAX_WAYS, host, DEVICE) for _ in range(2)]
    for count in (128, 16, 100, 1):
        wanted, rows = ints([rng.sample(range(300), count) for _ in range(2)]), ints([2, 0])
        found = [module.look_up(wanted, rows, c) for module, c in zip((reference, triton), caches, strict=True)]
        assert same(found[0].places, found[1].places) and same(found[0].missing, found[1].missing)
        for name in ("held", "used", "clock", "counters"):
            assert same(getattr(caches[0], name), getattr(caches[1], name)), name


def test_a_device_s_own_implementation_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    other = triton if DEVICE == "cpu" else reference
    for name in ("look_up", "fetch", "store"):
        monkeypatch.delattr(other, name)
    world = World.make(host_fetch, region(20, 2, 1, (8, 8), torch.float32), 2, 4, [1])
    world.step([1], [[3, 8]])
    keys, values = drawn((5, 1, 8), torch.float32, 1), drawn((5, 1, 8), torch.float32, 2)
    host_fetch.store(keys, values, ints([[4, 1]]), ints([6]), world.host)
    assert same(world.host.keys[6], keys[[4, 1]]) and same(world.host.values[6], values[[4, 1]])


@IMPLEMENTATIONS
def test_bad_input_is_refused(module: ModuleType) -> None:
    host = region(6, 2, 1, (8, 4), torch.float32)
    cache = BlockCache.empty(2, 3, host, DEVICE)
    one, found = ints([0]), Found.empty(1, 2, DEVICE)
    with pytest.raises(ValueError, match="4 blocks wanted of 3 ways: expected at most 3"):
        module.look_up(ints([[0, 1, 2, 3]]), one, cache)
    with pytest.raises(ValueError, match=r"wanted is torch\.int64 .* expected int32"):
        module.look_up(ints([[0]], torch.int64), one, cache)
    with pytest.raises(ValueError, match=r"rows is torch\.int32 \(2,\): expected contiguous int32 or int64 \(1,\)"):
        module.look_up(ints([[0]]), ints([0, 1]), cache)
    with pytest.raises(ValueError, match="out has room for 2 blocks a request: expected 1"):
        module.look_up(ints([[0]]), one, cache, out=found)
    with pytest.raises(ValueError, match=r"places is torch\.int64"):
        module.look_up(ints([[0, 1]]), one, cache, out=Found(found.places.long(), found.missing))
    with pytest.raises(ValueError, match=r"cache.counters is torch\.int32 .* make it with BlockCache.empty"):
        wrong = BlockCache(cache.held, cache.used, cache.clock, cache.counters.int(), cache.keys, cache.values)
        module.look_up(ints([[0]]), one, wrong)
    with pytest.raises(ValueError, match=r"cache.values \(2, 3, 2, 1, 4\) .* expected contiguous \(2, 3, 2, 1, 8\)"):
        module.fetch(HostRegion(host.keys, host.keys), found, one, cache)
    with pytest.raises(ValueError, match=r"cache.keys is torch\.float32 .* host.keys is torch\.float16"):
        module.fetch(HostRegion(host.keys.half(), host.values.half()), found, one, cache)
    with pytest.raises(ValueError, match="expected blocks that are contiguous each"):
        strided = host.keys.transpose(0, 1).contiguous().transpose(0, 1)
        module.fetch(HostRegion(strided, host.values), found, one, cache)
    with pytest.raises(ValueError, match=r"missing is torch\.int32 \(1, 1\): expected contiguous int32 \(1, 2\)"):
        module.fetch(host, Found(found.places, found.missing[:, :1].contiguous()), one, cache)
    fresh = FreshBlocks(ints([0]), host.keys[:1].contiguous(), host.values[:1].contiguous())
    for wrong_fresh, message in (
        (replace(fresh, ids=fresh.ids.long()), "fresh.ids is torch.int64"),
        (replace(fresh, keys=fresh.keys[:, 1:]), "fresh.keys"),
        (replace(fresh, values=fresh.values.half()), "fresh.values is torch.float16"),
    ):
        with pytest.raises(ValueError, match=message):
            module.fetch(host, found, one, cache, fresh=wrong_fresh)
    with pytest.raises(ValueError, match="as many blocks of as many tokens"):
        module.fetch(HostRegion(host.keys, host.values[:5]), found, one, cache)
    keys, values, slots = host.keys[:, 0], host.values[:, 0], ints([[0, 1]])
    with pytest.raises(ValueError, match=r"keys \(6, 1, 4\) .* expected \[num_slots, 1, 8\]"):
        module.store(values, values, slots, one, host)
    with pytest.raises(ValueError, match=r"values are torch\.float64"):
        module.store(keys, values.double(), slots, one, host)
    with pytest.raises(ValueError, match=r"slots is torch\.int32 \(1, 1\): expected int32 or int64 \[batch, 2\]"):
        module.store(keys, values, slots[:, :1], one, host)
    with pytest.raises(ValueError, match=r"ids is torch\.int64"):
        module.store(keys, values, slots, one.long(), host)
    with pytest.raises(ValueError, match="expected the slots of a block side by side"):
        module.store(keys, values, slots.repeat(2, 1).t(), ints([0, 1]), host)
    elsewhere = torch.device("meta")
    with pytest.raises(ValueError, match="rows is on meta: expected"):
        module.look_up(ints([[0]]), one.to(elsewhere), cache)
    with pytest.raises(ValueError, match=r"host.keys is torch\.float32 on meta: expected one dtype, and"):
        module.fetch(HostRegion(host.keys.to(elsewhere), host.values.to(elsewhere)), found, one, cache)


def test_bad_values_are_refused_by_the_reference() -> None:
    cache = BlockCache.empty(2, 3, region(6, 2, 1, (8, 4), torch.float32), DEVICE)
    with pytest.raises(ValueError, match=r"wanted \[2, -1, 2\]: expected no block twice"):
        reference.look_up(ints([[2, -1, 2]]), ints([0]), cache)
    with pytest.raises(ValueError, match=r"rows \[1, 1\]: expected no row twice"):
        reference.look_up(ints([[2], [3]]), ints([1, 1]), cache)
    with pytest.raises(ValueError, match="row 2: expected one below 2"):
        reference.look_up(ints([[2]]), ints([2]), cache)
    assert not cache.clock.any()


def test_sizes_that_nothing_can_be_made_of() -> None:
    host = region(2, 1, 1, (2, 2), torch.float32)
    with pytest.raises(ValueError, match=r"expected \[host_blocks, 2, block, kv_heads, dim\]"):
        HostRegion.of(host.keys)
    with pytest.raises(ValueError, match="0 ways: expected at least 1"):
        BlockCache.empty(1, 0, host, DEVICE)
    with pytest.raises(ValueError, match="129 ways: expected at most 128"):
        triton.look_up(ints([[0]]), ints([0]), BlockCache.empty(1, 129, host, DEVICE))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs and pinned memory need a GPU")
def test_a_cuda_graph_over_pinned_memory() -> None:
    """One capture serves all later wants, and the blocks lie in host memory."""
    memory = torch.empty(40, 2, 16, 2, 64, dtype=torch.bfloat16, pin_memory=True)
    memory.normal_()
    host = HostRegion.of(_alias(memory))
    world = World.make(triton, host, 3, 8, [2, 0])
    wanted, rows, out = ints([[-1] * 6] * 2), ints([2, 0]), Found.empty(2, 6, DEVICE)
    keys, values = drawn((50, 2, 64), torch.bfloat16, 5), drawn((50, 2, 64), torch.bfloat16, 6)
    slots, ids = ints([list(range(16)), list(range(20, 36))]), ints([-1, -1])

    def launch() -> None:
        triton.store(keys, values, slots, ids, host)
        triton.look_up(wanted, rows, world.cache, out=out)
        triton.fetch(host, out, rows, world.cache)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    rng = random.Random(6)
    for step in range(10):
        asked = [rng.sample(range(30), 6) for _ in range(2)]
        wanted.copy_(ints(asked))
        ids.copy_(ints([30 + step, -1]))
        graph.replay()
        torch.cuda.synchronize()
        expected = [world.models[row].want(each) for row, each in zip((2, 0), asked, strict=True)]
        assert out.places.tolist() == [places for places, _ in expected]
        world.check()
        assert same(memory[30 + step, 0], keys[:16].cpu()) and same(memory[30 + step, 1], values[:16].cpu())


def _alias(pinned: torch.Tensor) -> torch.Tensor:
    """A CUDA tensor over pinned host memory, bfloat16."""

    class Memory:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": tuple(pinned.shape),
            "typestr": "<i2",
            "data": (pinned.data_ptr(), False),
            "version": 3,
        }

    view = torch.as_tensor(Memory(), device=DEVICE).view(torch.bfloat16)
    assert view.data_ptr() == pinned.data_ptr()
    return view


COMPILE = """
import re
import torch
from sglang_ext.kernels.host_fetch import BlockCache, Found, FreshBlocks, HostRegion, triton_impl as triton
from tests.kernels.sm90 import compiled, stand_in

SMALL = 48 * 1024
stand_in(triton, "_look_up_kernel", "_fetch_kernel", "_store_kernel", shared=SMALL)


def run(heads, dims, dtype, block=128, ways=32, count=16, kind=torch.int64, fresh=0):
    host = HostRegion(*(torch.empty(3, block, heads, dim, dtype=dtype) for dim in dims))
    cache = BlockCache.empty(2, ways, host, "cpu")
    rows, ids = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    found = triton.look_up(torch.zeros(2, count, dtype=torch.int32), rows, cache)
    triton.fetch(host, found, rows, cache)
    slots = torch.zeros(2, block, dtype=kind)
    triton.store(host.keys[0], host.values[0], slots, ids, host)
    if fresh:
        some = FreshBlocks(torch.zeros(fresh, dtype=torch.int32), *(torch.empty(fresh, block, heads, dim, dtype=dtype)
                                                                    for dim in dims))
        triton.fetch(host, found, rows, cache, fresh=some)
    return [compiled[f"host_fetch_{name}_kernel"].asm["ptx"] for name in ("look_up", "fetch", "store")]


wide = re.compile(r"(ld|st)\\.global\\S*\\.v4\\.b32")
for heads, dims, dtype in ((8, (128, 128), torch.bfloat16), (1, (192, 128), torch.float16),
                           (8, (128, 128), torch.float32)):
    _, *copies = run(heads, dims, dtype)
    for text in copies:
        kinds = "".join(found[0] for found in wide.findall(text))
        # Eight accesses of 16 bytes a thread, all loads before all stores.
        assert kinds == "l" * 8 + "s" * 8, kinds
run(2, (24, 40), torch.float32, block=4, ways=128, count=128, kind=torch.int32)
run(1, (7, 5), torch.bfloat16, block=3, ways=13, count=1)
_, text, _ = run(8, (128, 128), torch.bfloat16, fresh=4)
assert "".join(found[0] for found in wide.findall(text)) == "l" * 16 + "s" * 8, text
assert len(compiled) == 3, compiled
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile the kernels and run them")
def test_compiles_for_hopper(tmp_path: Path) -> None:
    """What the interpreter takes, the compiler may not; and copies must move 16 bytes at a time."""
    sm90.run(COMPILE, tmp_path)
