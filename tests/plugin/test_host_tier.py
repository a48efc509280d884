"""Evicted blocks on the host, on real allocators without a model: what is kept, what gives way, and what comes back.

What lies in a KV slot is a number that stands for the token that was written there. Slots and pages that are free hold
poison, so whatever is read of one shows.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from sglang_ext.cache import host_tier
from sglang_ext.cache.host_tier import HostTier, back_up, bring_back
from sglang_ext.cache.rows import REQUEST_OWNER
from tests.plugin import tree_lines
from tests.plugin.test_radix import LENGTHS, POOL, Request, World, answering

PAGE, PAGES = 2, 8  # pages take `a` 2, `b` 2, `c` 1, `d` 3, `e` 1, `f` 3, `g` 2 and `h` 2
TOKEN_BYTES = 2 * (2 * 3 + 1 * 4) * 4
POISON = float("nan")


class TierWorld(World):
    """A world whose KV cache holds numbers, with a host tier behind it."""

    def __init__(self, allocator: str = "token", size: int = 24, pages: int = PAGES) -> None:
        super().__init__(allocator, size)
        self.caches = {layer: (torch.zeros(size + 1, 2, 3), torch.zeros(size + 1, 1, 4)) for layer in (0, 5)}
        self.numbers: dict[tuple, int] = {}
        self.tier = self.cache.host = HostTier(self.caches, pages * PAGE * TOKEN_BYTES)
        self.restored: dict[int, int] = {}  # slot -> position that was told of it
        self.cache.on_restore.append(self._restored)

    def _restored(self, slots: torch.Tensor, first: int) -> None:
        self.restored.update(zip(slots.tolist(), range(first, first + len(slots)), strict=True))

    def tensors(self) -> list[torch.Tensor]:
        return [tensor for pair in self.caches.values() for tensor in pair]

    def compute(self, req: Request, tokens: int) -> bool:
        begin = req.computed
        done = super().compute(req, tokens)
        if done:
            for slot, state in zip(self.row(req)[begin:].tolist(), req.states()[begin : req.computed], strict=True):
                for shift, tensor in enumerate(self.tensors()):
                    tensor[slot] = self.numbers.setdefault(state, len(self.numbers)) + shift * 1000
        return done

    def check(self) -> None:
        states = {number: state for state, number in self.numbers.items()}
        for node in self.tree():
            for slot in node.value.tolist():
                read = {
                    float(number) - shift * 1000
                    for shift, tensor in enumerate(self.tensors())
                    for number in tensor[slot].flatten()
                }
                assert len(read) == 1, f"slot {slot} holds parts of several tokens: {read}"
                self.holds[slot] = states[int(read.pop())]
        super().check()
        pages = self.tier.pages
        kept = [page for block in self.tier.blocks.values() for page in block.pages.ids]
        assert len(kept) == len(set(kept)) == pages.used and pages.available == pages.total - pages.used
        assert all(
            len(block.pages.ids) == -(-len(block.token_ids) // PAGE) and len(block.token_ids) == LENGTHS[key]
            for key, block in self.tier.blocks.items()
        )
        free = tree_lines.free_slots(self.allocator)
        empty = sorted({*range(pages.total)} - {*kept})
        for tensor in self.tensors():
            tensor[free] = POISON
        for tensor in (*pages.keys.values(), *pages.values.values()):
            tensor[empty] = POISON

    def evict(self, tokens: int) -> None:
        self.cache.evict(EvictParams(num_tokens=tokens))
        self.check()

    def evicted(self, *keys: str) -> None:
        """Encode blocks that nobody holds then, and evict all that may go."""
        self.encode(*keys, owner="passing")
        self.cache.release("passing")
        self.evict(self.size)
        assert not {*keys} & self.cache.blocks.keys()

    def back(self, *keys: str, owner: str = POOL, room: int = 1000) -> list[str]:
        """Ask for blocks; those that are in the KV cache then."""
        bring_back(self.cache, owner, list(keys), room)
        self.check()
        return sorted(self.cache.blocks)

    @property
    def kept(self) -> list[str]:
        return list(self.tier.blocks)


@pytest.fixture(params=["token", "paged"])
def world(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[TierWorld]:
    monkeypatch.setattr(host_tier, "PAGE", PAGE)
    made = TierWorld(request.param)
    yield made
    made.check()
    made.drain()


def test_what_is_evicted_comes_back_as_it_was(world: TierWorld) -> None:
    world.evicted("a", "d", "c")
    assert sorted(world.kept) == ["a", "c", "d"] and world.tier.stored == 3
    assert world.back("a", "d", owner="p1") == ["a", "d"]  # `check` has compared them token by token
    assert world.cache.owners == {"a": {"p1"}, "d": {"p1"}} and world.cache.held_tokens == 8
    assert sorted(world.restored) == sorted(
        slot for key in "ad" for slot in world.cache.blocks[key].value.tolist()
    ) and {*world.restored.values()} == {*range(5)}
    assert world.tier.stats() == {
        "host_blocks": 3, "host_pages": 6, "host_pages_total": PAGES, "host_stored": 3, "host_stored_ahead": 0,
        "host_returned": 2,
    }  # fmt: skip
    req = world.run(Request(answering("d", "a"), [7, 8, 9]))
    assert req.computed == 11


def test_a_block_that_is_in_the_cache_or_nowhere_does_not_come_back(world: TierWorld) -> None:
    world.evicted("a")
    world.encode("b")
    assert world.back("b", "x", "a", "a") == ["a", "b"]
    assert world.tier.returned == 1 and world.cache.owners["a"] == {POOL}
    assert world.back("a", owner="p2") == ["a", "b"] and world.cache.owners["a"] == {POOL}, "holding is not its work"


def test_a_second_eviction_copies_nothing(world: TierWorld) -> None:
    world.evicted("a", "b")
    world.back("b", "a")
    world.cache.release(POOL)
    world.evict(world.size)
    assert world.tier.stored == 2 and sorted(world.kept) == ["a", "b"]
    assert world.back("a") == ["a"]


def test_what_nobody_holds_is_copied_ahead_of_its_eviction(world: TierWorld) -> None:
    """One block between two passes, in the order in which their last holders let go; eviction copies nothing more."""
    world.encode("a", owner="p1")
    world.encode("b", "c", owner="passing")
    world.cache.hold("p2", ["b"])
    back_up(world.cache)
    assert world.kept == [], "all are held"
    world.cache.release("passing")
    back_up(world.cache)
    assert world.kept == ["c"] and "c" in world.cache.blocks
    world.cache.release("p2")
    world.cache.release("p1")
    for kept in (["c", "b"], ["c", "b", "a"], ["c", "b", "a"]):
        back_up(world.cache)
        world.check()
        assert world.kept == kept
    world.evict(world.size)
    assert not world.cache.blocks and world.tier.stored == world.tier.ahead == 3
    assert world.back("a", "b", "c") == ["a", "b", "c"]


def test_nothing_gives_way_to_a_copy_ahead(world: TierWorld) -> None:
    """What is only on the host stays. What has left the KV cache meanwhile, or is on the host, is passed over."""
    world.evicted("a", "b", "d")
    world.encode("f", "c", owner="passing")
    world.cache.release("passing")
    assert world.tier.pages.available == 1
    back_up(world.cache)
    assert sorted(world.kept) == ["a", "b", "c", "d"], "`f` needs 3 pages"
    world.cache.hold("p1", ["f", "c"])
    world.cache.release("p1")
    world.cache.drop(["f"], keep=False)
    back_up(world.cache)
    assert not world.tier.waiting and world.tier.ahead == 1


def test_the_longest_unused_gives_way_after_those_that_are_in_the_cache_too(world: TierWorld) -> None:
    for key in "abde":
        world.evicted(key)
    assert world.kept == ["a", "b", "d", "e"] and world.tier.pages.available == 0
    world.back("d", owner="p1")
    world.evicted("c")
    assert world.kept == ["a", "b", "e", "c"], "`d` is in the cache"
    world.evicted("f")
    assert world.kept == ["b", "e", "c", "f"]
    world.back("b", owner="p1")
    world.cache.release("p1", ["b"])
    world.evict(world.size)
    assert world.kept == ["e", "c", "f", "b"], "used last"
    world.evicted("h")
    assert world.kept == ["c", "f", "b", "h"]


def test_what_is_too_large_is_lost_and_drives_nothing_away(world: TierWorld) -> None:
    small = TierWorld(pages=2)
    small.evicted("a")
    small.evicted("d")
    assert small.kept == ["a"] and small.tier.stored == 1
    assert small.back("d", "a") == ["a"]


def test_no_more_comes_back_than_there_is_room_for(world: TierWorld) -> None:
    world.evicted("a", "b", "d")
    assert world.back("a", "b", "d", room=11) == ["a", "b"]  # 3 + 4, and 5 more would be 12
    world.cache.release(POOL)
    req = world.start(Request(None, range(18)))
    world.compute(req, 18)  # 6 of 24 slots are left
    world.check()
    assert world.back("b", "a", "d") in (["a"], ["b"]), "one that the request had evicted, or left"
    world.finish(req, is_insert=False)


def test_what_is_on_its_way_back_does_not_give_way_to_what_it_evicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the host is taken, and so is the cache: each block that comes back has another one evicted."""
    monkeypatch.setattr(host_tier, "PAGE", PAGE)
    world = TierWorld(size=9, pages=4)
    world.evicted("a", "b")
    world.encode("d", "c", owner="p1")
    world.cache.release("p1")
    assert {"a", "b"} <= {*world.back("a", "b", owner="p2")}
    world.drain()


def test_dropped_blocks_are_kept_unless_nobody_wants_them(world: TierWorld) -> None:
    world.encode("a", "b", "c", owner="p1")
    world.cache.release("p1")
    assert world.cache.drop(["a"]) == 3 and world.kept == ["a"]
    assert world.cache.drop(["b"], keep=False) == 4 and world.kept == ["a"]
    world.evict(world.size)
    world.tier.forget(["a", "b", "unknown"])
    world.check()
    assert world.kept == ["c"] and world.tier.pages.used == 1


def test_a_flush_empties_the_host(world: TierWorld) -> None:
    world.evicted("a", "b", "c")
    world.cache.reset()
    world.allocator.clear()
    world.check()
    assert not world.tier.blocks and world.tier.pages.used == 0
    assert world.back("a", "b", "c") == []


def test_a_block_of_many_pages_here_and_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that others left, not one behind the other; and slots in any order."""
    caches = {layer: (torch.rand(200, 2, 3), torch.rand(200, 2, 3)) for layer in range(3)}
    tier = HostTier(caches, 10 * host_tier.PAGE * 3 * 2 * 6 * 4)
    first = {layer: (keys.clone(), values.clone()) for layer, (keys, values) in caches.items()}
    slots = torch.randperm(200)
    small, large = slots[:16], slots[16:110]  # 1 page; 6 pages, of which the last has 14 tokens
    for name in "abcdefghij":
        tier.store(name, ids_of(16), 0, small, ())
    tier.forget("acehij")
    tier.store("large", ids_of(94), 7, large, ())
    ids = tier.blocks["large"].pages.ids
    assert list(ids) == [0, 2, 4, 7, 8, 9]
    for pair in caches.values():
        for tensor in pair:
            tensor.fill_(POISON)
    back = torch.randperm(200)[:94]
    assert tier.load("large", back).written == 7
    for layer, pair in caches.items():
        for now, before in zip(pair, first[layer], strict=True):
            assert torch.equal(now[back], before[large]) and int(now.isnan().any(-1).any(-1).sum()) == 200 - 94


def ids_of(count: int) -> array[int]:
    return array("q", range(count))


def test_anything_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are encoded, held, brought back, dropped, forgotten and flushed; `check` compares all, each time."""
    monkeypatch.setattr(host_tier, "PAGE", PAGE)
    assert sum(returned(random.Random(seed)) for seed in range(40)) > 80


def returned(dice: random.Random) -> int:
    """How many blocks came back in a run."""
    world = TierWorld(dice.choice(["token", "paged"]), dice.randint(14, 30), dice.randint(3, 12))
    owners = [POOL, "p2", f"{REQUEST_OWNER}x"]
    for _ in range(120):
        keys = dice.sample(sorted(LENGTHS), dice.randint(1, 3))
        owner = dice.choice(owners)
        act = dice.choice(
            ["encode", "back", "back", "release", "release", "evict", "drop", "forget", "answer", "flush"]
        )
        if act == "encode":
            # What an encoding attends to has been looked up before, and brought back.
            room = world.allocator.available_size() + world.cache.evictable_size()
            if sum(LENGTHS[key] for key in keys) <= room - world.cache.unlocked_tokens(
                key for key in keys if key in world.cache.blocks
            ):
                world.encode(*keys, owner=owner)
        elif act == "back":
            world.back(*keys, owner=owner, room=dice.randint(0, 20))
        elif act == "release":
            world.cache.release(owner)
        elif act == "evict":
            world.evict(dice.randint(1, world.size))
        elif act == "drop":
            world.cache.drop(keys, keep=dice.random() < 0.5)
        elif act == "forget":
            world.tier.forget(keys)
        elif act == "answer" and not world.cache.missing(keys):
            req = Request(answering(*keys), [dice.randint(0, 3)])
            world.start(req)
            world.compute(req, 1)
            world.finish(req)
        elif act == "flush" and dice.random() < 0.1:
            world.cache.reset()
            world.allocator.clear()
        world.check()
    world.drain()
    return world.tier.returned
