"""The block radix cache on real allocators, without a model: every slot is free, in the tree or a request's, once.

`World` stands for SGLang's scheduler: it matches, locks, allocates, chunks, decodes, finishes and retracts requests
in the order SGLang does. It remembers what was written into every slot, so that a prefix of the right length that holds
the wrong tokens shows too.
"""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from sglang_ext import compat
from sglang_ext.cache import carried, radix
from sglang_ext.cache.radix import BlockRadixCache
from sglang_ext.cache.rows import POOL_OWNER, REQUEST_OWNER, WIRE_KEY, NewBlock, Piece, Row
from sglang_ext.cache.stitch import StitchNode
from sglang_ext.serving.admin import Admin
from sglang_ext.serving.scheduler import before_handle_generate_request
from tests.plugin import tree_lines

POOL = f"{POOL_OWNER}p"

LENGTHS = {"a": 3, "b": 4, "c": 2, "d": 5, "e": 1, "f": 6, "g": 3, "h": 4}  # tokens of the blocks of the tests


def block_tokens(key: str) -> list[int]:
    return [1000 * (ord(key) - 96) + offset for offset in range(LENGTHS[key])]


def answering(*keys: str | tuple[str, int, int]) -> Row:
    """A row that begins with whole blocks, or with (block, first, end) pieces."""
    return Row(tuple(Piece(key, 0, LENGTHS[key]) if isinstance(key, str) else Piece(*key) for key in keys))


def encoding(new: Iterable[str], prefix: Iterable[str] = (), owner: str = POOL) -> Row:
    """A row that encodes `new` behind resident blocks."""
    blocks = tuple(NewBlock(key, LENGTHS[key], 0, ()) for key in new)
    return Row(answering(*prefix).prefix, blocks, owner)


class Audited:
    """Mixed into an allocator: freeing what is free already is an error at once."""

    def _check(self, slots: torch.Tensor) -> None:
        named = slots.tolist()
        free = {*tree_lines.free_slots(self), *tree_lines.held_back(self)}
        twice = [slot for slot in named if slot in free or named.count(slot) > 1 or slot == 0]
        assert not twice, f"slots {twice} are freed twice"

    def free(self, free_index: torch.Tensor) -> None:
        self._check(free_index)
        super().free(free_index)

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        if isinstance(self, PagedTokenToKVPoolAllocator):  # the other one calls free
            self._check(free_index)
        super().free_segment(free_index, start_pos=start_pos)


class AuditedToken(Audited, TokenToKVPoolAllocator):
    pass


class AuditedPaged(Audited, PagedTokenToKVPoolAllocator):
    pass


class ExtendRange(NamedTuple):
    start: int
    end: int


class Request(tree_lines.Slots):
    """What the cache reads of SGLang's `Req`."""

    _numbers = itertools.count()

    def __init__(self, row: Row | None, own: Sequence[int], extra_key: str | None = None) -> None:
        super().__init__()
        tokens = []
        if row is not None:
            for piece in row.prefix:
                tokens += block_tokens(piece.key)[piece.start : piece.end]
            for block in row.new:
                tokens += block_tokens(block.key)
        self.origin_input_ids = array("q", [*tokens, *own])
        self.output_ids = array("q")
        self.extra_key, self.cache_salt = extra_key, None
        self.priority = None
        self.rid = f"r{next(self._numbers)}"
        self.is_finished = False
        self.computed = 0
        self.to_finish: Any = None
        self.finished_reason: Any = None
        carried.set_request_row(self, row)

    @property
    def tokens(self) -> array:
        return self.origin_input_ids + self.output_ids

    def finished(self) -> bool:
        return self.is_finished

    def get_fill_ids(self) -> array:
        return self.tokens[: self.computed]

    @property
    def full_untruncated_fill_ids(self) -> array:
        return self.tokens

    @property
    def extend_range(self) -> ExtendRange:
        return ExtendRange(0, self.computed)

    def set_finish_with_abort(self, message: str) -> None:
        self.origin_input_ids = array("q", [0])
        self.error = message
        carried.set_request_row(self, None)  # the plugin's hook

    def refresh_fill_ids(self) -> None:
        self.refreshed = True

    _refresh_fill_ids = refresh_fill_ids  # its name in the older line

    def states(self) -> list[tuple]:
        """What each of the request's slots must hold: equal entries are equal keys and values."""
        row, tokens = carried.request_row(self), self.tokens.tolist()
        if row is None:
            return [("plain", self.extra_key, *tokens[: end + 1]) for end in range(len(tokens))]
        found: list[tuple] = [("block", p.key, offset) for p in row.prefix for offset in range(p.start, p.end)]
        found += [("block", block.key, offset) for block in row.new for offset in range(block.tokens)]
        own = tokens[len(found) :]
        selection = (self.extra_key, *((p.key, p.start, p.end) for p in row.prefix))
        return found + [("own", selection, *own[: end + 1]) for end in range(len(own))]


class Recorder:
    """Node hooks that keep their own picture of the tree."""

    def __init__(self) -> None:
        self.nodes: dict[TreeNode, int] = {}
        self.events: list[str] = []

    def on_insert(self, node: TreeNode) -> None:
        assert node not in self.nodes
        self.nodes[node] = len(node.key)
        self.events.append("insert")

    def on_split(self, head: TreeNode, tail: TreeNode) -> None:
        assert head not in self.nodes and tail in self.nodes
        assert tail.parent is head and len(head.key) + len(tail.key) == self.nodes[tail]
        self.nodes[head], self.nodes[tail] = len(head.key), len(tail.key)
        self.events.append("split")

    def on_evict(self, node: TreeNode) -> None:
        assert self.nodes.pop(node) == len(node.key)
        self.events.append("evict")

    def on_reset(self) -> None:
        self.nodes.clear()
        self.events.append("reset")


class World:
    """A KV pool of `size` slots, the cache, and running requests."""

    def __init__(self, allocator: str = "token", size: int = 60) -> None:
        if allocator == "token":
            self.allocator: Any = AuditedToken(size, torch.float32, "cpu", None, False)
        else:
            self.allocator = AuditedPaged(size, 1, torch.float32, "cpu", None, False)
        self.size = size
        self.rows = ReqToTokenPool(16, 200, "cpu", False)
        self.cache = BlockRadixCache(
            CacheInitParams(
                disable=False, req_to_token_pool=self.rows, token_to_kv_pool_allocator=self.allocator, page_size=1
            )
        )
        self.recorder = Recorder()
        self.cache.hooks.append(self.recorder)
        self.running: list[Request] = []
        self.holds: dict[int, tuple] = {}  # slot -> what was written there

    # ---- the scheduler

    def match(self, req: Request, limit: int | None = None) -> Any:
        key = RadixKey(req.tokens, req.extra_key, limit=len(req.tokens) - 1 if limit is None else limit)
        return tree_lines.match(self.cache, key, req)

    def start(self, req: Request) -> Request:
        """Match, lock, and give the request a row."""
        match = self.match(req)
        req.prefix_indices, req.last_node = match.device_indices, match.last_device_node
        req.cache_protected_len = req.computed = len(match.device_indices)
        tree_lines.lock(self.cache, req)
        req.req_pool_idx = self.rows.free_slots.pop(0)
        self.rows.write((req.req_pool_idx, slice(0, req.computed)), req.prefix_indices.to(torch.int32))
        self.running.append(req)
        self.check()
        return req

    def compute(self, req: Request, tokens: int) -> bool:
        """Write the next `tokens` tokens into new slots; False where there is no room even after eviction."""
        missing = tokens - self.allocator.available_size()
        if missing > 0:
            self.cache.evict(EvictParams(num_tokens=missing))
        slots = self.allocator.alloc(tokens)
        if slots is None:
            return False
        end = req.computed + tokens
        self.rows.write((req.req_pool_idx, slice(req.computed, end)), slots.to(torch.int32))
        for slot, state in zip(slots.tolist(), req.states()[req.computed : end], strict=True):
            self.holds[slot] = state
        req.computed = end
        return True

    def unfinished(self, req: Request, chunked: bool = False) -> None:
        tree_lines.unfinished(self.cache, req, req.computed, chunked)
        assert torch.equal(req.prefix_indices, self.row(req).to(torch.int64))
        self.check()

    def decode(self, req: Request, token: int) -> bool:
        """One more token: what was generated last is computed now."""
        req.output_ids.append(token)
        return self.compute(req, 1)

    def finish(self, req: Request, is_insert: bool = True, retracted: bool = False) -> None:
        req.is_finished = not retracted
        # SGLang frees inside a group when a batch finishes.
        self.allocator.free_group_begin()
        tree_lines.finished(self.cache, req, req.computed, is_insert)
        self.allocator.free_group_end()
        self.running.remove(req)
        self.rows.free_slots.append(req.req_pool_idx)
        self.check()

    def run(self, req: Request, chunks: Iterable[int] = ()) -> Request:
        """A whole request: the given chunks, the rest of the prompt at once, no output."""
        self.start(req)
        for tokens in chunks:
            assert self.compute(req, tokens)
            self.unfinished(req, chunked=True)
        rest = len(req.tokens) - req.computed
        assert self.compute(req, rest)
        self.finish(req)
        return req

    def encode(self, *keys: str, prefix: Iterable[str] = (), owner: str = POOL, chunks: Iterable[int] = ()) -> None:
        self.run(Request(encoding(keys, prefix, owner), []), chunks)

    # ---- what must always be true

    def row(self, req: Request) -> torch.Tensor:
        return self.rows.req_to_token[req.req_pool_idx, : req.computed]

    def tree(self) -> Iterator[TreeNode]:
        waiting = list(self.cache.root_node.children.values())
        while waiting:
            node = waiting.pop()
            waiting.extend(node.children.values())
            yield node

    def check(self) -> None:
        free = tree_lines.free_slots(self.allocator)
        nodes = list(self.tree())
        tree = [slot for node in nodes for slot in node.value.tolist()]
        own = [slot for req in self.running for slot in self.row(req)[req.cache_protected_len :].tolist()]
        every = sorted([*free, *tree, *own])
        assert every == list(range(1, self.size + 1)), (
            f"free {sorted(free)}, tree {sorted(tree)}, requests {sorted(own)} of {self.size} slots"
        )
        for req in self.running:
            row = self.row(req).tolist()
            assert set(row[: req.cache_protected_len]) <= set(tree)
            assert [self.holds[slot] for slot in row] == req.states()[: req.computed]
        cache = self.cache
        locked = [node for node in nodes if node.lock_ref]
        assert cache.protected_size_ == sum(len(node.key) for node in locked)
        assert cache.evictable_size_ == len(tree) - cache.protected_size_
        assert set(cache.evictable_leaves) - {cache.root_node} == {
            n for n in nodes if not n.lock_ref and not n.children
        }
        named = {node.key.extra_key: node for node in nodes if (node.key.extra_key or "").startswith(radix._BLOCK)}
        assert {radix._BLOCK + key: node for key, node in cache.blocks.items()} == named
        for key, node in cache.blocks.items():
            assert node.parent is cache.root_node and len(node.value) == LENGTHS[key] and not node.children
            assert [self.holds[slot] for slot in node.value.tolist()] == [
                ("block", key, t) for t in range(LENGTHS[key])
            ]
        for key, node in cache.blocks.items():
            stitched = [req for req in self.running if isinstance(req.last_node, StitchNode)]
            users = sum(node in req.last_node.members for req in stitched)
            assert node.lock_ref == users + bool(cache.owners.get(key))
        assert cache.block_tokens == sum(LENGTHS[key] for key in cache.blocks)
        assert cache.held_tokens == sum(LENGTHS[key] for key in cache.owners)
        of_pools = [k for k, owners in cache.owners.items() if any(owner.startswith(POOL_OWNER) for owner in owners)]
        assert cache.held_by_pools == sum(LENGTHS[key] for key in of_pools)
        assert self.recorder.nodes == {node: len(node.key) for node in nodes}

    def drain(self) -> None:
        """Everything let go and evicted: all slots must come back."""
        for req in list(self.running):
            self.finish(req, is_insert=False)
        for owner in {owner for owners in self.cache.owners.values() for owner in owners}:
            self.cache.release(owner)
        self.check()
        assert self.cache.protected_size_ == 0
        self.cache.evict(EvictParams(num_tokens=self.size))
        self.check()
        assert self.allocator.available_size() == self.size and not self.cache.blocks and not self.recorder.nodes


@pytest.fixture(params=["token", "paged"])
def world(request) -> Iterator[World]:
    made = World(request.param)
    yield made
    made.check()
    made.drain()


# ---- holds ---------------------------------------------------------------------------------------


def test_encoding_makes_blocks_that_their_owner_holds(world: World) -> None:
    world.encode("a", "b", "c", owner="p1")
    assert list(world.cache.blocks) == ["a", "b", "c"] and world.cache.held_tokens == 9
    assert world.cache.protected_size() == 9 and world.cache.evictable_size() == 0
    assert world.allocator.available_size() == world.size - 9
    assert world.cache.missing(["c", "x", "a", "x"]) == ["x"]


def test_hold_release_drop(world: World) -> None:
    world.encode("a", "b", owner="p1")
    world.cache.hold("p2", ["a"])
    world.cache.hold("p2", ["a"])  # again: nothing more
    world.cache.release("p1")
    world.check()
    assert (world.cache.held_tokens, world.cache.protected_size(), world.cache.evictable_size()) == (3, 3, 4)
    assert world.cache.drop(["a", "b", "unknown"]) == 4  # `a` is held
    world.check()
    assert list(world.cache.blocks) == ["a"]
    world.cache.release("p1")  # holds nothing any more
    world.cache.release("nobody", ["a", "unknown"])
    assert world.cache.held_tokens == 3
    world.cache.release("p2", ["a", "unknown"])
    assert world.cache.held_tokens == 0 and world.cache.drop(["a"]) == 3 and not world.cache.blocks
    assert world.allocator.available_size() == world.size


def test_a_block_in_use_is_neither_dropped_nor_evicted(world: World) -> None:
    world.encode("a", "b")
    world.cache.release(POOL)
    req = world.start(Request(answering("b"), [1, 2]))
    assert world.cache.drop(["a", "b"]) == 3
    world.cache.evict(EvictParams(num_tokens=100))
    assert list(world.cache.blocks) == ["b"]
    world.compute(req, 2)
    world.finish(req)
    assert world.cache.drop(["b"]) == 4


def test_what_a_request_holds_is_let_go_when_it_ends_and_not_when_it_is_retracted(world: World) -> None:
    """Blocks that the server encoded for one request (of an unpinned pool) wait for it, even through a retraction."""
    world.encode("a", "b", "c")
    req = Request(answering("a", "c"), [1, 2])
    world.cache.hold(REQUEST_OWNER + req.rid, ["a", "c"])
    world.cache.release(POOL)
    assert world.cache.held_tokens == 5 and world.cache.held_by_pools == 0
    world.start(req)
    world.compute(req, 2)
    world.finish(req, is_insert=False, retracted=True)
    world.cache.evict(EvictParams(num_tokens=100))
    assert sorted(world.cache.blocks) == ["a", "c"]
    world.start(req)
    world.compute(req, 2)
    world.finish(req)
    assert world.cache.held_tokens == 0 and world.cache.drop(["a", "c"]) == 5


# ---- token ids -----------------------------------------------------------------------------------


def message(row: Row | None, own: Sequence[int]) -> SimpleNamespace:
    """What the cache's hook reads of SGLang's TokenizedGenerateReqInput."""
    custom = {WIRE_KEY: row.dump()} if row else None
    return SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom), input_ids=array("q", own))


@pytest.mark.parametrize(
    "row",
    [
        answering("a", "d", "b"),
        answering(("d", 1, 3), "a", ("d", 4, 5)),
        answering(),
        encoding(["e", "f"], ["b", "a"]),
        encoding(["e"]),
    ],
)
def test_the_scheduler_puts_the_prefix_before_a_requests_own_tokens(world: World, row: Row) -> None:
    world.encode("a", "b", "c", "d")
    own = [token for block in row.new for token in block_tokens(block.key)] or [7, 8]
    received = message(row, own)
    before_handle_generate_request(SimpleNamespace(tree_cache=world.cache), received)
    assert received.input_ids == Request(row, [] if row.new else own).tokens


def test_tokens_are_left_alone_where_there_is_no_prefix_to_put(world: World) -> None:
    world.encode("a")
    for cache, row in ((world.cache, None), (world.cache, answering("a", "b")), (object(), answering("a"))):
        received = message(row, [7, 8])
        before_handle_generate_request(SimpleNamespace(tree_cache=cache), received)
        assert received.input_ids.tolist() == [7, 8]


def test_a_row_travels_whole() -> None:
    sent = Row(
        (Piece("a", 0, 3), Piece("b", 1, 2)),
        (NewBlock("c", 5, 7, ((0, 0), (1, 3))), NewBlock("d", 1, 12, ())),
        "pool:7",
    )
    assert Row.load(sent.dump()) == sent and Row.load(answering().dump()) == answering()
    assert Row.load(sent.dump()).namespace("x") == sent.namespace("x") != sent.namespace(None)


# ---- matching ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "selection",
    [["a"], ["c", "a"], ["a", "b", "c", "d"], ["d", "b"], [("b", 1, 3)], ["a", ("d", 3, 5), ("d", 0, 2), ("b", 2, 3)]],
    ids=repr,
)
def test_a_stitched_prefix_is_the_blocks_slots_in_view_order(world: World, selection: list) -> None:
    world.encode("a", "b", "c", "d")
    row = answering(*selection)
    match = world.match(Request(row, [7, 8, 9]))
    expected = [world.cache.blocks[piece.key].value[piece.start : piece.end] for piece in row.prefix]
    assert torch.equal(match.device_indices, torch.cat(expected))
    stitch = match.last_device_node
    assert isinstance(stitch, StitchNode) and stitch.tail is world.cache.root_node
    assert len(set(stitch.members)) == len(stitch.members) == len({piece.key for piece in row.prefix})
    assert match.last_host_node is stitch and not stitch.backuped


def test_own_tokens_are_found_again_under_the_same_selection_only(world: World) -> None:
    world.encode("a", "b", "c")
    own = [7, 8, 9, 10, 11]
    world.run(Request(answering("a", "c"), own))

    def found(row: Row | None, tokens: list[int], extra_key: str | None = None) -> int:
        return len(world.match(Request(row, tokens, extra_key)).device_indices)

    assert found(answering("a", "c"), own) == 5 + 4  # all but the last, which must be computed
    assert found(answering("a", "c"), [*own, 12, 13]) == 5 + 5  # the next turn
    assert found(answering("a", "c"), [7, 8, 99, 1]) == 5 + 2
    assert found(answering("c", "a"), own) == 5
    assert found(answering("a"), own) == 3
    assert found(answering("a", ("c", 0, 1)), own) == 4
    assert found(answering("a", "c"), own, extra_key="salt") == 5
    assert found(None, [*block_tokens("a"), *block_tokens("c"), *own]) == 0  # never a dense prefix, either way
    world.run(Request(None, [*block_tokens("a"), *own]))
    assert found(None, [*block_tokens("a"), *own]) == 7 and found(answering("a"), own) == 3


def test_a_multi_turn_conversation_over_one_selection(world: World) -> None:
    world.encode("a", "b")
    conversation: list[int] = []
    for turn in range(3):
        conversation += [50 + turn, 60 + turn]
        req = world.start(Request(answering("b", "a"), conversation))
        assert req.computed == 7 + max(0, len(conversation) - 3)  # all up to the token whose KV was not written yet
        world.compute(req, len(req.tokens) - req.computed)
        world.unfinished(req)
        for step in range(3):
            world.decode(req, 70 + step)
        conversation = req.tokens[7:].tolist()
        req.output_ids.append(80)  # the last token was never computed
        world.finish(req)
        conversation.append(80)
    world.check()


def test_the_limit_of_what_may_be_matched(world: World) -> None:
    world.encode("a", "b")
    row, own = answering("a", "b"), [7, 8, 9]
    world.run(Request(row, own))
    for limit, expected in ((7, 7), (8, 8), (9, 9)):
        match = world.match(Request(row, own), limit)
        assert len(match.device_indices) == expected
    for limit in (0, 3, 6):
        req = Request(row, own)
        match = world.match(req, limit)
        assert len(match.device_indices) == 0 and match.last_device_node is world.cache.root_node
        assert f"recompute from token {limit} on, inside its 7 stitched tokens" in req.error
        assert req.to_finish.status_code == 400 and req.refreshed and carried.request_row(req) is None


def test_a_users_extra_key_does_not_reach_blocks(world: World) -> None:
    world.encode("a", "b")
    world.run(Request(None, [*block_tokens("a")[:2], 50, 51], extra_key="block:a"))
    row = answering("a", "b")
    world.run(Request(None, block_tokens("a"), extra_key=row.namespace(None)))
    assert len(world.match(Request(row, [7, 8])).device_indices) == row.prefix_tokens
    world.check()


def test_an_encoding_that_was_given_up_holds_nothing(world: World) -> None:
    """The owner lets go before the aborted request has ended in the scheduler."""
    req = Request(encoding(["a", "b", "c"]), [])
    world.start(req)
    world.compute(req, 4)
    world.cache.release(POOL)
    req.to_finish = compat.aborts.FINISH_ABORT("given up")
    world.compute(req, 5)
    req.is_finished = True
    world.finish(req)
    assert world.cache.held_tokens == 0
    world.check()


def test_an_encoding_row_matches_whole_blocks_only(world: World) -> None:
    world.encode("a", "b", "c")
    for limit, expected in ((0, 0), (2, 0), (3, 3), (6, 3), (7, 7), (8, 7), (9, 9), (10, 9)):
        match = world.match(Request(encoding(["a", "b", "c", "d"]), []), limit)
        assert len(match.device_indices) == expected
        assert len(match.last_device_node.members) == sum(expected >= end for end in (3, 7, 9))
    # A gap ends the match: what comes after was encoded behind other tokens.
    world.cache.release(POOL)
    world.cache.drop(["b"])
    assert len(world.match(Request(encoding(["a", "b", "c"]), [])).device_indices) == 3


def test_missing_blocks_end_the_request_and_never_fall_through_to_a_dense_prefix(world: World) -> None:
    world.encode("a", "b")
    world.cache.release(POOL)
    world.cache.drop(["b"])
    world.run(Request(None, [*block_tokens("a"), *block_tokens("b"), 1, 2]))
    req = Request(answering("a", "b"), [1, 2])
    match = world.match(req)
    assert len(match.device_indices) == 0 and match.last_device_node is world.cache.root_node
    assert "demonstration blocks are not in the KV cache (1 of them)" in req.error
    assert req.to_finish.status_code == 503 and req.refreshed and carried.request_row(req) is None


# ---- encoding in chunks --------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [(), ("d",), ("e", "d")], ids=repr)
def test_blocks_cut_by_chunks_at_every_possible_boundary(prefix: tuple[str, ...]) -> None:
    """All 256 ways of cutting nine tokens of three blocks into chunks."""
    for cuts in itertools.product((False, True), repeat=8):
        world = World("token" if sum(cuts) % 2 else "paged", size=40)
        if prefix:
            world.encode(*sorted(prefix), owner="other")
        ends = [end for end, cut in enumerate(cuts, start=1) if cut]
        chunks = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        req = world.start(Request(encoding("abc", prefix), []))
        begin = sum(LENGTHS[key] for key in prefix)
        assert req.computed == begin
        for tokens in chunks:
            world.compute(req, tokens)
            world.unfinished(req, chunked=True)
            done = req.computed - begin
            resident = [key for key, end in (("a", 3), ("b", 7), ("c", 9)) if done >= end]
            assert sorted({*world.cache.blocks} - {*prefix}) == resident  # partial blocks are not in the tree
            assert req.cache_protected_len == begin + sum(LENGTHS[key] for key in resident)
        world.compute(req, begin + 9 - req.computed)
        world.finish(req)
        assert world.cache.held_tokens == begin + 9
        world.drain()


@pytest.mark.parametrize("done", range(9))
@pytest.mark.parametrize("is_insert", [True, False])
def test_an_encoding_given_up_in_the_middle_leaves_whole_blocks_or_nothing(done: int, is_insert: bool) -> None:
    """Abort (what is whole may stay) and retraction (is_insert=False), at every token and after a cached chunk."""
    for cached in range(done + 1):
        world = World()
        req = world.start(Request(encoding("abc"), []))
        world.compute(req, cached)
        world.unfinished(req, chunked=True)
        world.compute(req, done - cached)
        world.finish(req, is_insert)
        kept = done if is_insert else cached
        assert list(world.cache.blocks) == [key for key, end in (("a", 3), ("b", 7), ("c", 9)) if kept >= end]
        again = world.start(Request(encoding("abc"), []))  # a retracted request comes back
        assert again.computed == sum(LENGTHS[key] for key in world.cache.blocks)
        world.drain()


# ---- duplicates ----------------------------------------------------------------------------------


@pytest.mark.parametrize("allocator", ["token", "paged"])
def test_two_encodings_of_the_same_blocks_at_once_in_every_interleaving(allocator: str) -> None:
    """Whoever completes a block second gives its slots back, once, and reads the tree's from then on."""
    chunks = [2, 3, 3, 1]
    for order in set(itertools.permutations([0] * len(chunks) + [1] * len(chunks))):
        world = World(allocator)
        pair = [world.start(Request(encoding("abc", owner=f"p{i}"), [])) for i in range(2)]
        left = [list(chunks), list(chunks)]
        for who in order:
            world.compute(pair[who], left[who].pop(0))
            if left[who]:
                world.unfinished(pair[who], chunked=True)
            else:
                world.finish(pair[who])
        assert world.allocator.available_size() == world.size - 9 and world.cache.held_tokens == 9
        assert all(owners == {"p0", "p1"} for owners in world.cache.owners.values())
        world.drain()


def test_pools_with_an_equal_prefix_share_it(world: World) -> None:
    world.encode("a", "b", "c", owner="p1")
    world.encode("a", "b", "d", owner="p2")
    assert world.allocator.available_size() == world.size - 9 - 5
    world.cache.release("p1")
    assert world.cache.drop(["a", "b", "c"]) == 2
    assert sorted(world.cache.blocks) == ["a", "b", "d"]


def test_two_requests_with_the_same_own_tokens_at_once(world: World) -> None:
    rewritten: list[int] = []
    world.cache.on_rewrite.append(rewritten.append)
    world.encode("a", "b")
    pair = [world.start(Request(answering("a", "b"), [7, 8, 9, 10])) for _ in range(2)]
    for req in pair:
        world.compute(req, 2)
        world.unfinished(req, chunked=True)
    world.compute(pair[0], 2)
    world.unfinished(pair[0])
    world.compute(pair[1], 2)
    world.unfinished(pair[1])
    assert torch.equal(*(world.row(req) for req in pair)) and len(set(world.row(pair[0]).tolist())) == 11
    assert rewritten == [pair[1].req_pool_idx] * 2  # what the first one computed was new to the tree
    world.decode(pair[0], 20)
    world.decode(pair[1], 21)  # they part here
    for req in pair:
        world.finish(req)
    assert world.allocator.available_size() == world.size - 7 - 4 - 2


# ---- eviction ------------------------------------------------------------------------------------


def test_blocks_are_evicted_one_by_one_the_longest_unused_first(world: World) -> None:
    world.encode("a", "b", "c", "d")
    world.cache.release(POOL)
    world.cache.hold("keeper", ["c"])
    for key in "badb":  # a request touches its blocks
        world.match(Request(answering(key), [1]))
    left = []
    while world.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted:
        world.check()
        left.append("".join(world.cache.blocks))
    assert left == ["bcd", "bc", "c"]


def test_a_stitched_request_protects_its_blocks_and_its_own_tokens(world: World) -> None:
    world.encode("a", "b", "c")
    world.cache.release(POOL)
    req = world.start(Request(answering("c", "a"), [7, 8]))
    world.compute(req, 2)
    world.unfinished(req)
    assert world.cache.evict(EvictParams(num_tokens=100)).num_tokens_evicted == 4
    assert sorted(world.cache.blocks) == ["a", "c"] and world.cache.protected_size() == 7
    world.finish(req)
    assert world.cache.evict(EvictParams(num_tokens=100)).num_tokens_evicted == 7


def test_a_piece_named_twice_locks_its_block_once(world: World) -> None:
    world.encode("d")
    world.cache.release(POOL)
    req = world.start(Request(answering(("d", 0, 2), ("d", 3, 5)), [1]))
    assert world.cache.blocks["d"].lock_ref == 1
    world.compute(req, 1)
    world.finish(req)
    assert world.cache.blocks["d"].lock_ref == 0


# ---- hooks and reset -----------------------------------------------------------------------------


def test_hooks_follow_the_tree(world: World) -> None:
    """`Recorder` compares with the tree at every check; here is the order of events."""
    world.encode("a", "b")
    assert world.recorder.events == ["insert", "insert"]
    world.run(Request(answering("a"), [1, 2, 3, 4]))
    world.run(Request(answering("a"), [1, 2, 8, 9]))  # cuts the first one's node
    assert world.recorder.events[2:] == ["insert", "split", "insert"]
    world.match(Request(answering("a"), [1, 5, 5]))  # a match cuts too
    assert world.recorder.events[5:] == ["split"]
    world.run(Request(answering("a"), [1, 2, 3, 4]))  # known already: cut before the last, which is computed again
    assert world.recorder.events[6:] == ["split"]
    world.cache.release(POOL)
    world.cache.drop(["b"])
    world.cache.evict(EvictParams(num_tokens=100))
    assert world.recorder.events[7:] == ["evict"] * 7  # two blocks, 1, 2, 3, 4 and 8 9


def test_reset_forgets_blocks_and_owners() -> None:
    world = World()
    world.encode("a", "b")
    world.run(Request(answering("a"), [1, 2]))
    world.cache.reset()
    world.allocator.clear()  # as Scheduler.flush_cache does
    world.recorder.nodes.clear()
    world.check()
    assert not world.cache.blocks and not world.cache.owners and world.cache.held_tokens == 0
    assert world.cache.missing(["a"]) == ["a"]
    world.cache.release(POOL)  # its owner does not know yet
    world.encode("a", "b")
    assert world.cache.held_tokens == 7
    world.drain()


# ---- stress --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("allocator", ["token", "paged"])
def test_a_thousand_random_operations(allocator: str, seed: int) -> None:
    """Pools come and go; requests of all kinds run interleaved, are cut, aborted and retracted; memory is short."""
    rng = random.Random(seed)
    world = World(allocator, size=40)
    done: dict[str, int] = dict.fromkeys(
        ("encode", "ask", "plain", "finish", "retract", "abort", "release", "evict", "none"), 0
    )
    started = 0
    for _ in range(1000):
        operation = rng.choice(
            ["encode", "ask", "ask", "plain", "step", "step", "step", "step", "step", "release", "evict"]
        )
        if operation == "step" and world.running:
            req = rng.choice(world.running)
            left = len(req.tokens) - req.computed
            row = carried.request_row(req)
            if left:  # a chunk of the prompt
                chunk = min(left, rng.randint(1, 5))
                fits = world.compute(req, chunk)
                if fits and chunk < left:
                    world.unfinished(req, chunked=True)
                elif fits and (row is None or not row.new):
                    world.unfinished(req)
            else:
                fits = (row is not None and row.new) or world.decode(req, rng.randint(1, 2))
            if not fits:
                if req.output_ids and len(req.tokens) > req.computed:
                    req.output_ids.pop()
                world.finish(req, is_insert=False, retracted=True)
                operation = "retract"
            elif len(req.tokens) == req.computed and (rng.random() < 0.3 or (row is not None and row.new)):
                world.finish(req)
                operation = "finish"
            elif rng.random() < 0.05:
                world.finish(req, is_insert=rng.random() < 0.5)
                operation = "abort"
        elif operation == "release":
            keys = rng.sample(sorted(LENGTHS), 3)
            owner = f"p{rng.randint(0, 2)}"
            world.cache.release(owner, keys if rng.random() < 0.5 else None)
            if rng.random() < 0.5:
                world.cache.drop(keys)
        elif operation == "evict":
            world.cache.evict(EvictParams(num_tokens=rng.randint(1, 6)))
        elif len(world.running) < 6:
            resident = sorted(world.cache.blocks)
            rng.shuffle(resident)
            own = [rng.randint(1, 2) for _ in range(rng.randint(1, 5))]
            row = None
            if operation == "encode":
                keys = rng.sample(sorted(LENGTHS), rng.randint(1, 4))
                owner = f"p{rng.randint(0, 2)}"
                row, own = encoding(keys, [k for k in resident[:2] if k not in keys], owner), []
            elif operation == "ask" and resident:
                pieces: list[Any] = list(resident[: rng.randint(1, 4)])
                if LENGTHS[pieces[0]] > 1 and rng.random() < 0.3:
                    pieces[0] = (pieces[0], 1, LENGTHS[pieces[0]])
                row = answering(*pieces)
            if row is None:
                operation = "plain"
            world.start(Request(row, own, rng.choice([None, "salt"])))
            started += 1
        done[operation if operation in done else "none"] += 1
        world.check()
    assert started > 100 and all(done.values()), done  # every kind of operation happened
    assert {"insert", "split", "evict"} <= set(world.recorder.events)
    world.drain()


def test_hits_of_blocks_that_no_pool_has_are_forgotten(world: World) -> None:
    """Each header of a chat and each replaced pool brings new names: kept for ever, they would fill the memory."""
    world.cache.hits.update({"gone": 2, "kept": 3})
    admin = Admin(SimpleNamespace(tree_cache=world.cache))
    assert admin.op_release("pool:1", keys=[], gone=["gone", "never read"]) == {"freed_tokens": 0}
    assert dict(world.cache.hits) == {"kept": 3}
