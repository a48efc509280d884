"""Clusters on a real radix tree: who has them after insertions, cuts and evictions; and the policy's options."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator

import pytest
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from sglang_ext import compat
from sglang_ext.attention.clustered import Placed, row_clusters
from sglang_ext.attention.double_p import DoublePPolicy
from sglang_ext.attention.policy import Caches
from sglang_ext.cache.budget import KVShape
from sglang_ext.cache.clusters import ClusteredRun, ClusterStore, TokenRun, cluster_run
from sglang_ext.cache.radix import BlockRadixCache
from sglang_ext.config import POLICY_ENV
from sglang_ext.kernels.rope import Rope
from sglang_ext.policies.double_p import DoubleP
from tests.plugin import tree_lines

SLOTS, KV_HEADS, DIM = 200, 2, 8


class Tree:
    """A radix tree whose nodes' clusters are followed."""

    def __init__(self) -> None:
        pool = ReqToTokenPool(8, 128, "cpu", enable_memory_saver=False)
        self.allocator = PagedTokenToKVPoolAllocator(SLOTS, 1, torch.float32, "cpu", None, need_sort=False)
        params = CacheInitParams(
            disable=False, req_to_token_pool=pool, token_to_kv_pool_allocator=self.allocator, page_size=1
        )
        self.cache, self.store = BlockRadixCache(params), ClusterStore()
        self.cache.hooks.append(self.store)

    def insert(self, tokens: list[int]) -> tuple[TreeNode, ...]:
        key = RadixKey(array("q", tokens), None)
        self.cache.insert(InsertParams(key=key, value=self.allocator.alloc(len(tokens)).to(torch.int64)))
        return self.path(tokens)

    def path(self, tokens: list[int]) -> tuple[TreeNode, ...]:
        found = tree_lines.match(self.cache, RadixKey(array("q", tokens), None))
        return compat.tree_nodes(found.last_device_node)[1]

    def chain(self, tokens: list[int], begin: int = 2) -> list[tuple[int, int]]:
        return [(held.run.begin, held.end) for held in self.store.chain(self.path(tokens), begin)]


@pytest.fixture
def tree() -> Tree:
    return Tree()


def run(begin: int, end: int) -> ClusteredRun:
    return ClusteredRun(begin, end - begin, {})


LONG = list(range(40))


def test_a_run_belongs_to_the_node_that_holds_its_last_token(tree: Tree) -> None:
    tree.insert(LONG[:20])
    path = tree.insert(LONG)
    assert len(path) == 2
    for each in (run(2, 16), run(16, 24), run(24, 36)):
        assert tree.store.give(path, each) is each
    assert [held.run.begin for held in tree.store.of(path[0])] == [2]
    assert [held.run.begin for held in tree.store.of(path[1])] == [16, 24]
    assert tree.chain(LONG) == [(2, 16), (16, 24), (24, 36)]
    assert tree.chain(LONG[:20]) == [(2, 16)]
    assert tree.chain(LONG, begin=3) == []
    assert tree.store.give(path, run(36, 41)) is None, "no node holds token 40"


def test_a_run_is_kept_once(tree: Tree) -> None:
    path = tree.insert(LONG)
    first = run(2, 20)
    assert tree.store.give(path, first) is first
    assert tree.store.give(path, run(2, 20)) is first
    longer = run(2, 30)
    assert tree.store.give(path, longer) is longer
    assert tree.chain(LONG) == [(2, 30)]


def test_the_tree_gets_the_runs_of_a_request_that_ends_with_its_tokens(tree: Tree) -> None:
    tree.insert(LONG[:20])
    slots = tree.path(LONG[:20])[0].value

    def leave(ends: dict[int, int]) -> None:
        """Runs by their ends, with the slot of the last token."""
        begins = [2, *ends]
        tree.store.leave([(run(a, b), torch.tensor(slot)) for a, (b, slot) in zip(begins, ends.items(), strict=False)])

    following = int(tree.allocator.free_pages[0])  # insertions take slots in this order
    leave({16: int(slots[15]), 24: following + 23, 36: following + 35})
    tree.insert(LONG)
    assert tree.chain(LONG[:20]) == [(2, 16)]
    assert tree.chain(LONG) == [(2, 16), (16, 24), (24, 36)]
    leave({16: 0, 24: 0})  # another request's tokens, in other slots
    tree.insert([90, *LONG])
    tree.store.leave(())
    assert tree.chain([90, *LONG]) == [] and tree.store.stats()["cluster_runs"] == 3


def test_a_cut_leaves_the_head_what_lies_before_it(tree: Tree) -> None:
    path = tree.insert(LONG)
    runs = [run(2, 10), run(10, 30), run(30, 38)]
    for each in runs:
        tree.store.give(path, each)
    tree.insert([*LONG[:20], 99, 98])
    assert tree.chain([*LONG[:20], 99, 98]) == [(2, 10), (10, 20)]
    assert tree.chain(LONG) == [(2, 10), (10, 30), (30, 38)]
    tree.insert([*LONG[:5], 97])
    assert tree.chain([*LONG[:5], 97]) == [(2, 5)]
    assert tree.chain([*LONG[:20], 99, 98]) == [(2, 10), (10, 20)]
    assert tree.chain(LONG) == [(2, 10), (10, 30), (30, 38)]
    assert tree.store.stats()["cluster_runs"] == 3, "the same run at several nodes is one"


def test_a_whole_run_takes_the_place_of_a_cut_one(tree: Tree) -> None:
    path = tree.insert(LONG)
    long = run(2, 38)
    tree.store.give(path, long)
    (head, _) = tree.insert([*LONG[:20], 99, 98])
    (cut,) = tree.store.of(head)
    assert (cut.run, cut.end, cut.lost) == (long, 20, 18)
    anew = run(2, 20)
    assert tree.store.give([head], anew) is anew and tree.store.give([head], run(2, 20)) is anew
    assert [(held.run, held.lost) for held in tree.store.of(head)] == [(anew, 0)]
    assert [held.run for held in tree.store.chain(tree.path(LONG), 2)] == [long], "the longest, where it is whole"
    longer = tree.insert([*LONG[:25], 97])
    assert [held.run for held in tree.store.chain(longer, 2)] == [long], "cut at 25"

    def best(exact: int) -> list[TokenRun]:
        """Where a cut run leaves so many tokens exact."""
        return [held.run for held in tree.store.chain(longer, 2, lambda held: exact if held.lost else 0)]

    assert best(4) == [long] and best(5) == [anew]
    further = tree.store.give(longer, run(25, 26))
    assert best(5) == [long, further] and best(6) == [anew], "what follows counts"
    assert tree.store.find(longer, 2, 20) is anew and tree.store.find(longer, 2, 25) is None
    assert tree.store.stats()["cluster_runs"] == 3
    for tokens in ([*LONG[:25], 97], [*LONG[:20], 99, 98]):
        tree.path(tokens)  # used after the long one's tail
    tree.cache.evict(EvictParams(num_tokens=1))
    rest, _ = tree.store.chain(tree.path([*LONG[:25], 97]), 2)
    assert (rest.run.end, rest.end, rest.lost) == (25, 25, 13), "what is gone is remembered"


@pytest.mark.parametrize(
    ("tokens", "lost", "anew"), [(1024, 64, True), (1023, 64, False), (8000, 63, False), (8000, 0, False)]
)
def test_what_is_clustered_anew(tokens: int, lost: int, anew: bool) -> None:
    assert DoubleP().anew(tokens, lost) == anew


def test_clusters_leave_with_their_node(tree: Tree) -> None:
    path = tree.insert(LONG)
    for each in (run(2, 10), run(10, 30)):
        tree.store.give(path, each)
    tree.insert([*LONG[:20], 99])
    tree.cache.evict(EvictParams(num_tokens=1))  # the tail, which is the older leaf
    assert tree.chain([*LONG[:20], 99]) == [(2, 10), (10, 20)]
    tree.cache.evict(EvictParams(num_tokens=100))
    assert tree.store.stats()["cluster_tokens"] == 0
    tree.store.give(tree.insert(LONG), run(2, 10))
    tree.cache.reset()
    assert tree.store.stats()["cluster_runs"] == 0 and tree.chain(LONG) == []


def test_a_cut_run_shrinks_when_its_tail_goes(tree: Tree, caches: Caches) -> None:
    kv = {0: (caches.keys, caches.values)}
    tree.store.give(
        tree.insert(LONG), cluster_run(kv, torch.arange(2, 40), 2, cluster=4, iterations=3, assignment="l2")
    )
    for cut in (30, 20):
        tree.insert([*LONG[:cut], 99 + cut])
    whole, bytes_before = tree.store.chain(tree.path(LONG), 2)[0].run, tree.store.stats()["cluster_bytes"]
    for cut in (30, 20):
        tree.path([*LONG[:cut], 99 + cut])  # used after the long one's tail
    tree.cache.evict(EvictParams(num_tokens=1))
    (head,) = tree.store.chain(tree.path([*LONG[:30], 129]), 2)
    (upper,) = tree.store.chain(tree.path([*LONG[:20], 119]), 2)
    assert head.run is upper.run and (head.run.end, head.end, upper.end) == (30, 30, 20)
    assert tree.store.stats()["cluster_tokens"] == 28 and tree.store.stats()["cluster_bytes"] < bytes_before
    query = torch.randn(KV_HEADS, 2, DIM)
    for end in (30, 20):
        old, new = (row_clusters([Placed(run, 2, 2, end)], 40, caches, query) for run in (whole, head.run))
        for head_number in range(KV_HEADS):
            masses = [each.log_mass[head_number, 0] for each in (old, new)]
            served = [(mass > float("-inf")).nonzero().flatten() for mass in masses]
            assert torch.equal(masses[0][served[0]], masses[1][served[1]]) and len(served[0]) > 0
            assert torch.equal(old.values[head_number, served[0]], new.values[head_number, served[1]])
            for a, b in zip(*served, strict=True):
                assert torch.equal(old.labels[head_number] == a, new.labels[head_number] == b)
    tree.cache.evict(EvictParams(num_tokens=100))
    assert tree.store.stats()["cluster_tokens"] == 0


# ---- clusters in a row ----


@pytest.fixture
def caches() -> Caches:
    gen = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(SLOTS, KV_HEADS, DIM, generator=gen) for _ in range(2))
    rope = Rope(10000.0 ** (-torch.arange(0, DIM, 2) / DIM))
    return Caches(0, keys, values, torch.arange(SLOTS, dtype=torch.int32), rope, DIM**-0.5)


def test_clusters_that_a_row_has_partly_do_not_serve(caches: Caches) -> None:
    kv = {0: (caches.keys, caches.values)}
    made = cluster_run(kv, torch.arange(50, 90), 0, cluster=4, iterations=3, assignment="inner")
    query = torch.randn(KV_HEADS, 2, DIM)
    assert made.bytes == sum(summary.bytes for summary in made.layers.values()) > 0
    placed = [Placed(made, 5, 5, 45), Placed(made, 50, 60, 80)]  # whole, and its tokens [10, 30)
    found = row_clusters(placed, 100, caches, query)
    labels = made.layers[0].labels
    for head in range(KV_HEADS):
        assert found.labels[head, 5:45].tolist() == labels[head].tolist()
        for column in (*range(5), *range(45, 60), *range(80, 100)):
            assert found.labels[head, column] == 20
        for cluster in range(10):
            members = (labels[head] == cluster).nonzero().flatten().tolist()
            inside = bool(members) and all(10 <= token < 30 for token in members)
            assert (found.log_mass[head, 0, 10 + cluster] > float("-inf")) == inside
            for token in members:
                if 10 <= token < 30:
                    assert found.labels[head, 50 + token] == (10 + cluster if inside else 20)
    some = torch.zeros(KV_HEADS, 20, dtype=torch.bool)
    some[:, 3] = True
    assert torch.equal(found.columns(some, others=False), found.labels == 3)
    assert torch.equal(found.columns(some, others=True), (found.labels == 3) | (found.labels == 20))


def test_the_query_is_rotated_to_where_the_keys_were_written(caches: Caches) -> None:
    """Equal to rotating every key to where it is seen and clustering it there."""
    from sglang_ext.kernels.rope.reference import rotate

    kv = {0: (caches.keys, caches.values)}
    made = cluster_run(kv, torch.arange(50, 90), 0, cluster=4, iterations=3, assignment="inner")
    query, delta = torch.randn(KV_HEADS, 2, DIM), -31
    found = row_clusters([Placed(made, 0, 0, 40, delta)], 40, caches, query).log_mass
    moved = rotate(caches.keys[50:90].double(), torch.tensor(delta), caches.rope)
    for head in range(KV_HEADS):
        for cluster in range(10):
            members = made.layers[0].labels[head] == cluster
            mean = moved[members, head].mean(0)
            expected = query[head].double() @ mean * caches.scale + members.sum().log()
            assert torch.allclose(found[head, :, cluster].double(), expected, atol=1e-5)


# ---- what is clustered when ----


def test_what_is_clustered_does_not_depend_on_chunks() -> None:
    config = DoubleP(sink=2, window=6, segment=64, append=16)
    for length in range(10, 300):
        at_once = config.due(2, length - 6, decoding=True)
        for chunk in (16, 50, 64, 100):
            found, settled = [], 2
            for begin in (*range(0, length, chunk), length):
                for segment in config.due(settled, begin - 6, decoding=begin == length):
                    assert segment[0] == settled
                    found.append(segment)
                    settled = segment[1]
            assert found == at_once
        assert all(end - begin <= 64 for begin, end in at_once)


def test_generated_tokens_wait_for_enough_others() -> None:
    config, settled, found = DoubleP(segment=64, append=16), 40, []
    for end in range(41, 120):
        for segment in config.due(settled, end, decoding=True):
            found.append((end, segment))
            settled = segment[1]
    assert found == [(56, (40, 56)), (72, (56, 64)), (80, (64, 80)), (96, (80, 96)), (112, (96, 112))]
    assert config.due(5, 5, True) == config.due(5, 2, False) == []


# ---- options ----


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv(POLICY_ENV, raising=False)
    yield monkeypatch


def test_the_server_s_options(options: pytest.MonkeyPatch) -> None:
    assert DoublePPolicy().config == DoubleP()
    options.setenv(POLICY_ENV, json.dumps({"p1": 0.99, "p2": 0.8, "cluster": 8, "tail": "centroid"}))
    assert DoublePPolicy().config == DoubleP(p1=0.99, p2=0.8, cluster=8, tail="centroid")


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "SGLANG_EXT_POLICY={: expected a JSON object"),
        ("[1]", r"SGLANG_EXT_POLICY=\[1\]: expected a JSON object, like \{\}; got a list"),
        ('{"cluste": 8}', "unknown option cluste; known are append, assignment, centroids, cluster"),
        ('{"cluster": 8.5}', "cluster=8.5 is a float; expected int"),
        ('{"tail": "cut"}', "tail='cut': expected one of drop, centroid"),
    ],
)
def test_wrong_server_options_are_refused(options: pytest.MonkeyPatch, text: str, message: str) -> None:
    options.setenv(POLICY_ENV, text)
    with pytest.raises(ValueError, match=message):
        DoublePPolicy()


def test_summaries_take_at_most_8_percent_of_what_they_summarise(options: pytest.MonkeyPatch) -> None:
    policy = DoublePPolicy()
    for itemsize, most in ((2, 0.0715), (4, 0.0675)):
        extra = policy.extra_bytes_per_token(KVShape(3, 2, 128, 128, itemsize), kernels=False)
        assert extra / (3 * 2 * 2 * 128 * itemsize) < most
    shape = KVShape(32, 8, 128, 128, 2)
    same = policy.extra_bytes_per_token(shape, kernels=True)
    assert 0.079 < same / (32 * 8 * 2 * 128 * 2) < 0.08, "and the room for tiles that are partly empty"
    options.setenv(POLICY_ENV, '{"centroids": "float8"}')
    few = DoublePPolicy().extra_bytes_per_token(shape, kernels=True)
    assert same - few == pytest.approx(32 * 8 * 128 / 16 * 1.1, abs=1)  # a tenth more than there are clusters
    keys, values = (torch.randn(SLOTS, 2, 128) for _ in range(2))
    made = cluster_run({0: (keys, values)}, torch.arange(160), 0, cluster=16, iterations=1, assignment="inner")
    extra = policy.extra_bytes_per_token(KVShape(1, 2, 128, 128, 4), kernels=False)
    assert made.bytes <= 160 * extra
