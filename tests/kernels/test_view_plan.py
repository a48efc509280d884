"""Plans against brute force: every row's tokens, one by one, are those of its runs; and what the planner refuses."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from sglang_ext.kernels.view_attention.config import Config, choose
from sglang_ext.kernels.view_attention.plan import COPY_TOKENS, Plan, PlanRows, deal, plan_rows, split

SMALL = Config(block_m=16, block_n=16, num_programs=10, min_split=32)
TABLE = np.random.default_rng(0).permutation(100_000)


def request(
    first_row: int,
    num_rows: int,
    runs: list[tuple[int, int, int, int]],
    own: tuple[int, ...] = (),
    tail_column: int = 0,
) -> PlanRows:
    """From (key, tokens, delta, source) of each run."""
    keys, lengths, deltas, source = np.array(runs, dtype=np.int64).reshape(-1, 4).T
    return PlanRows(
        first_row, num_rows, keys, lengths.astype(np.int32), deltas.astype(np.int32), source, own, tail_column
    )


def some_batch(seed: int, decode: bool = False) -> list[PlanRows]:
    """Shared blocks, runs of one request alone, empty runs, tails of none to three runs, gaps between rows."""
    rng = np.random.default_rng(seed)
    blocks = [(k, int(rng.integers(1, 70)), 100 * k) for k in range(8)]
    requests, row = [], int(rng.integers(0, 3))
    for number in range(int(rng.integers(1, 9))):
        runs = [
            (blocks[b][0], blocks[b][1], int(rng.integers(-9, 9)), blocks[b][2])
            for b in rng.choice(8, int(rng.integers(0, 8)), replace=False)
        ]
        if rng.random() < 0.3:
            runs.append((100 + number, 0, 4, 5))
        tails = 1 if decode else int(rng.integers(0, 4))
        rows = 1 if decode else int(rng.integers(1, 40))
        first_own = len(runs)
        for part in range(tails):
            tokens = int(rng.integers(1, 250 if decode else 50)) + (rows if part == 0 else 0)
            runs.append((3, tokens, 0, 1000 + 1000 * number + 300 * part))  # keys of own runs mean nothing
        own = tuple(range(first_own, len(runs)))
        requests.append(request(row, rows, runs, own, int(rng.integers(0, 500))))
        row += rows + int(rng.integers(0, 2))
    return requests


def wanted(requests: list[PlanRows]) -> dict[int, Counter[tuple[int, int]]]:
    """Row -> how often it sees (slot, delta), from the definition."""
    seen: dict[int, Counter[tuple[int, int]]] = {}
    for r in requests:
        whole, tail = [], []
        for at in range(len(r.keys)):
            tokens = [(int(TABLE[r.source[at] + t]), int(r.deltas[at])) for t in range(int(r.lengths[at]))]
            (tail if at in r.own else whole).extend(tokens)
        for i in range(r.num_rows):
            visible = tail[: max(0, len(tail) - r.num_rows + 1 + i)]
            seen[r.first_row + i] = Counter(whole + visible)
    return seen


def planned(plan: Plan) -> dict[int, Counter[tuple[int, int]]]:
    """Row -> how often it sees (slot, delta), as the kernels would read the plan."""
    slots = np.full(plan.num_slots, -1)
    for to, source, size in plan.copies:
        assert 0 < size <= COPY_TOKENS
        assert (slots[to : to + size] == -1).all(), "two runs in one place"
        slots[to : to + size] = TABLE[source : source + size]
    done = [item for w in range(len(plan.work_ptr) - 1) for item in range(plan.work_ptr[w], plan.work_ptr[w + 1])]
    assert done == list(range(len(plan.items))), "every item has one worker"
    owner = np.full(len(plan.entry_row), -1)
    for number, (_, size, first, count) in enumerate(plan.items):
        assert 1 <= count <= plan.config.tile_rows(plan.group) and size >= 1
        assert (owner[first : first + count] == -1).all(), "every entry is in one item"
        owner[first : first + count] = number
        limits = plan.entry_limit[first : first + count]
        assert limits.min() >= 1 and limits.max() == size
    assert (owner >= 0).all()
    assert sorted(plan.row_entries.tolist()) == list(range(len(plan.entry_row)))
    seen: dict[int, Counter[tuple[int, int]]] = {row: Counter() for row in range(plan.num_rows)}
    for row in range(plan.num_rows):
        for entry in plan.row_entries[plan.row_ptr[row] : plan.row_ptr[row + 1]]:
            assert plan.entry_row[entry] == row
            begin, limit = plan.items[owner[entry], 0], plan.entry_limit[entry]
            delta = int(plan.angles[plan.entry_angle[entry]])
            seen[row].update((int(slot), delta) for slot in slots[begin : begin + limit])
    return seen


@pytest.mark.parametrize("group", [1, 3, 7])
@pytest.mark.parametrize("programs", [1, 10, 90])
@pytest.mark.parametrize("seed", range(12))
def test_every_row_sees_its_runs(seed: int, programs: int, group: int) -> None:
    requests = some_batch(seed)
    plan = plan_rows(requests, config=replace(SMALL, num_programs=programs), group=group, kv_heads=2)
    want = wanted(requests)
    got = planned(plan)
    for row in range(plan.num_rows):
        assert got[row] == want.get(row, Counter()), row
    assert len(set(plan.angles.tolist())) == len(plan.angles), "angles are distinct"


@pytest.mark.parametrize("seed", range(12))
def test_decoding_with_room(seed: int) -> None:
    requests = some_batch(seed, decode=True)
    plan = plan_rows(requests, config=replace(SMALL, num_programs=20), group=2, kv_heads=2, room=6)
    want, got = wanted(requests), planned(plan)
    reserved = np.zeros(plan.num_slots, dtype=int)
    for to, _, size in plan.copies:
        reserved[to : to + size] += 1
    for r in requests:
        row = r.first_row
        assert got[row] == want[row]
        item, entry = plan.tail_item[row], plan.tail_entry[row]
        begin, size, first, count = plan.items[item]
        assert (first, count) == (entry, 1) and plan.entry_row[entry] == row
        assert plan.tail_base[row] == r.seq_len - size and plan.tail_room[row] == size + 6
        reserved[begin + size : begin + size + 6] += 1
    assert (reserved == 1).all(), "room belongs to one tail, and no run lies in it"
    lengths = np.zeros(plan.num_rows, dtype=int)
    lengths[[r.first_row for r in requests]] = [r.seq_len for r in requests]
    assert [plan.steps_left(lengths + n) for n in (0, 2, 6)] == [6, 4, 0]
    lengths[requests[-1].first_row] += 3
    assert plan.steps_left(lengths) == 3, "the fullest tail counts"
    assert (plan.tail_item[np.setdiff1d(np.arange(plan.num_rows), [r.first_row for r in requests])] == -1).all()


def test_runs_longer_than_one_copy() -> None:
    requests = [request(0, 1, [(1, 2 * COPY_TOKENS + 5, 0, 7), (2, COPY_TOKENS, 1, 50_000)])]
    plan = plan_rows(requests, config=SMALL, group=1, kv_heads=1)
    assert len(plan.copies) == 4 and planned(plan) == wanted(requests)


def test_cuts_of_known_tiles() -> None:
    """Tiles of 30, 1 and 5 steps, each with 2 steps of its own: 42 in all, so that shares end at 14 and 28."""
    config = replace(SMALL, block_n=32, min_split=0, item_cost=2)
    tile, first, size, work_ptr = split(np.array([960, 7, 150]), 3, config)
    assert tile.tolist() == [0, 0, 0, 1, 2]
    assert first.tolist() == [0, 12 * 32, 26 * 32, 0, 0]
    assert size.tolist() == [12 * 32, 14 * 32, 4 * 32, 7, 150]
    assert work_ptr.tolist() == [0, 1, 2, 5]


def test_equal_keys_are_read_once() -> None:
    requests = [request(i, 1, [(5, 90, i, 0), (i + 50, 10, 0, 500 + 20 * i)]) for i in range(4)]
    plan = plan_rows(requests, config=replace(SMALL, num_programs=1), group=4, kv_heads=1)
    assert plan.num_slots == 90 + 4 * 10
    assert sorted(plan.items[:, [1, 3]].tolist()) == [[10, 1]] * 4 + [[90, 4]]
    other = [replace(r, keys=np.array([i + 100, i + 50])) for i, r in enumerate(requests)]
    assert plan_rows(other, config=SMALL, group=4, kv_heads=1).num_slots == 4 * 100


def test_numbers_of_the_batch_replace_those_of_the_request() -> None:
    kept = [request(0, 1, [(1, 20, 3, 0), (-1, 5, 0, 100), (-1, 9, 1, 200)], own=(1, 2), tail_column=20)] * 2
    fresh = [
        request(4, 3, [(1, 20, 3, 0), (-1, 5, 0, 100), (-1, 12, 1, 200)], own=(1, 2), tail_column=20),
        request(0, 2, [(1, 20, 3, 0), (-1, 5, 0, 100), (-1, 2, 1, 200)], own=(1, 2), tail_column=20),
    ]
    assert [r.seq_len for r in fresh] == [37, 27]
    plan = plan_rows(
        kept, config=SMALL, group=2, kv_heads=2, first_rows=[4, 0], num_rows=np.array([3, 2]), seq_lens=[37, 27]
    )
    want = wanted(fresh)
    got = planned(plan)
    assert all(got[row] == want.get(row, Counter()) for row in range(plan.num_rows)) and plan.num_rows == 7


@pytest.mark.parametrize("runs", [[], [(1, 0, 2, 3)]], ids=["none", "empty"])
def test_nothing_to_see(runs: list[tuple[int, int, int, int]]) -> None:
    for requests, rows in (([], 0), ([request(2, 3, runs)], 5)):
        plan = plan_rows(requests, config=SMALL, group=1, kv_heads=2)
        assert (plan.num_rows, len(plan.items), plan.num_slots, plan.steps_left()) == (rows, 0, 0, 0)
        assert plan.row_ptr.tolist() == [0] * (rows + 1)
        assert plan.work_ptr.tolist() == [0] * (1 + SMALL.workers(2))


def test_dealt_tiles() -> None:
    """Two runs of three tiles of 8 steps, and one of a step: 49 steps for 3 workers, who get two tiles each."""
    config = replace(SMALL, block_n=16, min_split=0, item_cost=0)
    lengths, several = np.array([16, *[128] * 6]), np.array([False, *[True] * 6])
    tile, first, size, work_ptr = deal(lengths, several, 3, config)
    assert [tile[a:b].tolist() for a, b in pairwise(work_ptr)] == [[1, 4], [2, 5], [3, 6, 0]]
    assert not first.any() and size.tolist() == lengths[tile].tolist()
    tile, first, size, work_ptr = deal(np.array([16, *[128] * 7]), np.array([False, *[True] * 7]), 3, config)
    shares = [tile[a:b].tolist() for a, b in pairwise(work_ptr)]
    assert [share[:2] for share in shares] == [[1, 4], [2, 5], [3, 6]] and [share[2:] for share in shares] == [
        [0, 7],
        [7],
        [7],
    ]


@pytest.mark.parametrize("dealt", [False, True], ids=["split", "dealt"])
@pytest.mark.parametrize("seed", range(30))
def test_shares_are_equal_and_pieces_are_not_small(seed: int, dealt: bool) -> None:
    rng = np.random.default_rng(seed)
    tiles, workers = int(rng.integers(1, 60)), int(rng.integers(1, 40))
    config = replace(SMALL, block_n=32, min_split=int(rng.choice([0, 64, 128])), item_cost=int(rng.integers(0, 4)))
    tile_len = rng.integers(1, 3000, tiles)
    if dealt:
        tile_len = rng.integers(2000, 3000, tiles)
        tile, first, size, work_ptr = deal(tile_len, rng.random(tiles) < 0.8, workers, config)
    else:
        tile, first, size, work_ptr = split(tile_len, workers, config)
    for t in range(tiles):
        mine = (tile == t).nonzero()[0]
        mine = mine[first[mine].argsort()]
        begin, length = first[mine], size[mine]
        assert begin[0] == 0 and (begin[1:] == (begin + length)[:-1]).all() and (begin + length)[-1] == tile_len[t]
        assert (begin % config.block_n == 0).all()
        if len(mine) > 1:
            assert (-(-length // config.block_n) * config.block_n).min() >= config.min_split
    assert len(tile) <= tiles + workers - 1
    assert work_ptr[0] == 0 and work_ptr[-1] == len(tile) and (np.diff(work_ptr) >= 0).all()
    cost = -(-size // config.block_n) + np.where(first == 0, config.item_cost, 0)
    shares = np.array([cost[a:b].sum() for a, b in pairwise(work_ptr)])
    # A share's two ends move by less than min_split or an item's own cost, and by a step of rounding.
    slack = 2 * (max(config.min_split // config.block_n, config.item_cost) + 1)
    assert np.abs(shares - cost.sum() / workers).max() <= slack


def test_a_batch_is_planned_quickly() -> None:
    """128 requests of 15 runs; the aim is half a millisecond, and a Python loop over runs would take ten times that."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1500, 2300, 48)
    requests = []
    for i in range(128):
        picked = rng.choice(48, 14, replace=False)
        runs = [(int(b), int(lengths[b]), int(rng.integers(-90_000, 1)), 2000 * int(b)) for b in picked]
        requests.append(request(i, 1, [*runs, (-1, 30, 0, 96_000 + 30 * i)], own=(14,)))
    config = choose(128 * 15 / 48, 4, 128)

    def once() -> float:
        begin = time.thread_time()
        plan_rows(requests, config=config, group=4, kv_heads=8, room=64)
        return time.thread_time() - begin

    fastest = min(once() for _ in range(50))
    assert fastest < 2e-3, fastest  # four times the aim: machines that run tests are slow and shared


@pytest.mark.parametrize(
    ("rows", "group", "head_dim", "itemsize"), [(1, 4, 128, 2), (10, 4, 128, 2), (40, 4, 64, 2), (8, 71, 256, 4)]
)
def test_choice_fits_the_batch(rows: int, group: int, head_dim: int, itemsize: int) -> None:
    config = choose(rows, group, head_dim, itemsize=itemsize, num_sms=100)
    assert config.tile_rows(group) >= 1
    assert config.num_programs % 100 == 0
    # Two steps of keys and values beside the queries stay inside Hopper's 227 KB.
    assert (2 * 2 * config.block_n + config.block_m) * head_dim * itemsize <= 227 * 1024
    small = choose(1, 1, head_dim, itemsize=itemsize)
    assert small.block_m == 16


@pytest.mark.parametrize(
    ("wanted", "groups"), [(1, 0), (24, 0), (40, 1), (64, 2), (100, 2), (160, 3), (220, 2), (960, 3), (1e9, 3)]
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_choice_for_hopper(wanted: float, groups: int, kv_heads: int, head_dim: int) -> None:
    """As many groups of 64 rows as the batch fills, a program's buffers in shared memory, no multiprocessor idle."""
    config = choose(wanted / 4, 4, head_dim, kv_heads=kv_heads, hopper=True)
    assert config.groups == groups
    if groups:
        programs = config.workers(kv_heads) * kv_heads // config.heads_each
        several = wanted > 2 * 64 * groups  # tiles of a run: then one head a program, and a few idle
        assert config.num_programs - programs < (kv_heads if several else 1)
        assert config.heads_each == 1 or not several
        queries, tiles = 64 * groups, 2 * config.block_n * config.tile_stages
        assert (queries + tiles) * head_dim * 2 * (config.num_programs // 132) <= 226 * 1024
    assert choose(wanted / 4, 4, head_dim, kv_heads=kv_heads).groups == 0


@pytest.mark.parametrize("wrong", [{"groups": 4}, {"groups": 1, "block_m": 128}, {"heads_each": 2}, {"heads_each": 0}])
def test_config_refuses(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected 1"):
        Config(**wrong)
    with pytest.raises(ValueError, match="expected a divisor"):
        Config(block_m=64, groups=1, heads_each=2).workers(3)


def good(**changes: object) -> Callable[[], PlanRows]:
    fields = {
        "first_row": 0,
        "num_rows": 1,
        "keys": np.array([1, 2]),
        "lengths": np.array([3, 4]),
        "deltas": np.array([0, 0]),
        "source": np.array([0, 9]),
        "own": (1,),
    }
    return lambda: PlanRows(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (good(keys=np.array([1])), "one number a run"),
        (good(deltas=np.zeros((2, 1))), "one number a run"),
        (good(num_rows=0), "num_rows 0"),
        (good(first_row=-1), "first_row -1"),
        (good(lengths=np.array([-1, 4])), "no negative numbers"),
        (good(source=np.array([0, -9])), "no negative numbers"),
        (good(own=(2,)), "ascending indices below 2"),
        (good(own=(1, 0)), "ascending indices below 2"),
        (good(num_rows=5), "a tail of 4 tokens for 5 rows"),
    ],
)
def test_refuses_runs_that_make_no_sense(make: Callable[[], PlanRows], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("requests", "options", "message"),
    [
        ([good()(), good()()], {}, "rows of requests overlap"),
        ([good()(), good(first_row=1, lengths=np.array([5, 4]))()], {}, "key 1 names runs of 5 and 3 tokens"),
        ([good(keys=np.array([7, 7]), own=())()], {}, "key 7 names runs of"),
        ([good(keys=np.array([7, 7]), lengths=np.array([3, 3]), own=())()], {}, "request 0 names key 7 twice"),
        ([good()()], {"seq_lens": [2], "num_rows": [3]}, r"tails of \[2\] tokens for \[3\] rows"),
        ([good(own=(0, 1))()], {"seq_lens": [2]}, "end before their last own run"),
        ([good()()], {"seq_lens": [2, 3]}, "one number for each of 1 requests"),
        ([good(num_rows=2)()], {"room": 1}, "one row and one own run"),
        ([good(own=())()], {"room": 1}, "one row and one own run"),
        ([good()()], {"room": -1}, "room -1"),
        ([good()()], {"group": 17}, "17 query heads"),
    ],
)
def test_refuses_batches_that_make_no_sense(requests: list[PlanRows], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_rows(requests, **{"config": SMALL, "group": 1, "kv_heads": 1, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"block_m": 8}, {"block_n": 48}, {"num_programs": 0}, {"min_split": -1}])
def test_refuses_sizes_that_the_kernel_does_not_take(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        replace(SMALL, **change)
