"""DBSA's arithmetic on blocks: tables worked out by hand, and what a block's name must and must not depend on."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from sglang_ext.policies.dbsa import PATTERNS, POSITIONS, BlockSparse, block_identities, block_identity

# pattern, sinks, previous -> the attended blocks of blocks 0, 1, 2, ... worked out by hand
ATTENDED = {
    ("full", 1, 2): [(), (0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)],
    ("full", 2, 0): [(), (0,), (0, 1), (0, 1, 2), (0, 1, 2, 3)],
    ("self", 1, 2): [(), (), (), (), ()],
    ("self", 2, 3): [(), (), (), (), ()],
    ("sink+self", 1, 2): [(), (0,), (0,), (0,), (0,)],
    ("sink+self", 2, 2): [(), (0,), (0, 1), (0, 1), (0, 1)],
    ("sink+previous+self", 1, 0): [(), (0,), (0,), (0,), (0,), (0,)],
    ("sink+previous+self", 1, 1): [(), (0,), (0, 1), (0, 2), (0, 3), (0, 4)],
    ("sink+previous+self", 1, 2): [(), (0,), (0, 1), (0, 1, 2), (0, 2, 3), (0, 3, 4)],
    ("sink+previous+self", 1, 3): [(), (0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 2, 3, 4)],
    ("sink+previous+self", 2, 0): [(), (0,), (0, 1), (0, 1), (0, 1), (0, 1)],
    ("sink+previous+self", 2, 1): [(), (0,), (0, 1), (0, 1, 2), (0, 1, 3), (0, 1, 4)],
    ("sink+previous+self", 2, 2): [(), (0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 3, 4), (0, 1, 4, 5)],
    ("sink+previous+self", 2, 3): [(), (0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3, 4), (0, 1, 3, 4, 5)],
}

LENGTHS = [5, 3, 7, 2, 4, 6]  # sums before each: 0 5 8 15 17 21

# pattern, sinks, previous, positions, block -> position of the first token of every block in its view
STARTS = {
    ("sink+previous+self", 1, 2, "sequential", 0): {0: 0},
    ("sink+previous+self", 1, 2, "local", 0): {0: 0},
    ("sink+previous+self", 1, 2, "sequential", 2): {0: 0, 1: 5, 2: 8},
    ("sink+previous+self", 1, 2, "local", 2): {0: 0, 1: 5, 2: 8},
    ("sink+previous+self", 1, 2, "sequential", 5): {0: 0, 3: 15, 4: 17, 5: 21},
    ("sink+previous+self", 1, 2, "local", 5): {0: 0, 3: 5, 4: 7, 5: 11},
    ("sink+previous+self", 2, 1, "sequential", 5): {0: 0, 1: 5, 4: 17, 5: 21},
    ("sink+previous+self", 2, 1, "local", 5): {0: 0, 1: 5, 4: 8, 5: 12},
    ("sink+previous+self", 1, 0, "local", 4): {0: 0, 4: 5},
    ("sink+self", 1, 2, "sequential", 3): {0: 0, 3: 15},
    ("sink+self", 2, 2, "local", 3): {0: 0, 1: 5, 3: 8},
    ("self", 1, 2, "sequential", 4): {4: 17},
    ("self", 1, 2, "local", 4): {4: 0},
    ("full", 1, 2, "sequential", 4): {0: 0, 1: 5, 2: 8, 3: 15, 4: 17},
    ("full", 1, 2, "local", 4): {0: 0, 1: 5, 2: 8, 3: 15, 4: 17},
}

# pattern, sinks, previous, changed block -> blocks of a pool of seven that depend on it, itself included
REACH = {
    ("self", 1, 2, 0): [0],
    ("self", 1, 2, 3): [3],
    ("full", 1, 2, 0): [0, 1, 2, 3, 4, 5, 6],
    ("full", 1, 2, 4): [4, 5, 6],
    ("sink+self", 1, 2, 0): [0, 1, 2, 3, 4, 5, 6],
    ("sink+self", 1, 2, 1): [1],
    ("sink+self", 2, 2, 1): [1, 2, 3, 4, 5, 6],
    ("sink+self", 2, 2, 2): [2],
    ("sink+previous+self", 1, 0, 3): [3],
    ("sink+previous+self", 1, 1, 3): [3, 4, 5, 6],  # 4 through 3, 5 through 4, ...
    ("sink+previous+self", 1, 2, 6): [6],
    ("sink+previous+self", 2, 0, 1): [1, 2, 3, 4, 5, 6],
    ("sink+previous+self", 2, 3, 5): [5, 6],
}


@pytest.mark.parametrize("case", ATTENDED, ids=repr)
def test_attended_blocks(case: tuple[str, int, int]) -> None:
    pattern, sinks, previous = case
    for positions in POSITIONS:
        sparse = BlockSparse(pattern, sinks, previous, positions)
        assert [sparse.attended(block) for block in range(len(ATTENDED[case]))] == ATTENDED[case]


@pytest.mark.parametrize("case", STARTS, ids=repr)
def test_starts(case: tuple[str, int, int, str, int]) -> None:
    pattern, sinks, previous, positions, block = case
    starts = BlockSparse(pattern, sinks, previous, positions).starts(block, LENGTHS)
    assert starts == STARTS[case]
    assert list(starts) == list(STARTS[case])  # in view order
    # Tokens behind the block play no part.
    assert BlockSparse(pattern, sinks, previous, positions).starts(block, LENGTHS[: block + 1]) == starts


@pytest.mark.parametrize("case", REACH, ids=repr)
def test_reach(case: tuple[str, int, int, int]) -> None:
    pattern, sinks, previous, block = case
    assert BlockSparse(pattern, sinks, previous).reach(block, 7) == REACH[case]


EVERY = [
    BlockSparse(*options)
    for options in itertools.product(PATTERNS, (1, 2), (0, 1, 2, 3), POSITIONS)
    if options[0] == "sink+previous+self" or options[2] == 2  # `previous` plays no part in the other patterns
]


@pytest.mark.parametrize("sparse", EVERY, ids=repr)
def test_views_are_disjoint_ordered_and_contiguous(sparse: BlockSparse) -> None:
    for block in range(12):
        attended = sparse.attended(block)
        assert list(attended) == sorted(set(attended)) and block not in attended
        lengths = [3 + (7 * number) % 5 for number in range(12)]
        starts = sparse.starts(block, lengths)
        assert list(starts) == [*attended, block]
        ends = [starts[other] + lengths[other] for other in starts]
        assert all(end <= start for end, start in zip(ends, list(starts.values())[1:], strict=False))
        if sparse.positions == "local":  # no gap: the view is as long as its tokens
            assert ends[-1] == sum(lengths[other] for other in starts)


@pytest.mark.parametrize("sparse", EVERY, ids=repr)
def test_reach_is_the_transitive_closure_of_attended(sparse: BlockSparse) -> None:
    blocks = 9
    depends = {(later, earlier) for later in range(blocks) for earlier in sparse.attended(later)}
    for _ in range(blocks):
        depends |= {(a, d) for a, b in depends for c, d in depends if b == c}
    for block in range(blocks):
        expected = sorted({block} | {later for later, earlier in depends if earlier == block})
        assert sparse.reach(block, blocks) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pattern": "sinks"},
            "attention pattern 'sinks': expected one of sink\\+previous\\+self, sink\\+self, self, full",
        ),
        ({"positions": "absolute"}, "positions 'absolute': expected one of sequential, local"),
        ({"sinks": 0}, "sink_blocks=0, previous_blocks=2: expected at least 1 and at least 0"),
        ({"previous": -1}, "sink_blocks=1, previous_blocks=-1"),
    ],
)
def test_wrong_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockSparse(**options)


# ---- identities -------------------------------------------------------------------------------------------------

POOL = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10, 11], [12], [13, 14, 15], [16, 17]]


def names(sparse: BlockSparse, pool: list[list[int]], model: str = "m") -> list[str]:
    found = block_identities(model, sparse, pool)
    assert len(found) == len(pool)
    return found


def changed(a: list[str], b: list[str]) -> list[int]:
    return [number for number, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]]


@pytest.mark.parametrize("sparse", EVERY, ids=repr)
def test_equal_pools_share_everything_and_names_are_distinct(sparse: BlockSparse) -> None:
    first = names(sparse, POOL)
    assert first == names(sparse, [list(block) for block in POOL]) == names(replace(sparse), POOL)
    assert len(set(first)) == len(POOL)


@pytest.mark.parametrize("sparse", EVERY, ids=repr)
def test_equal_prefixes_share_and_appending_changes_nothing(sparse: BlockSparse) -> None:
    whole = names(sparse, POOL)
    for blocks in range(len(POOL)):
        assert names(sparse, POOL[:blocks]) == whole[:blocks]
    other = names(sparse, [*POOL[:4], [99, 98], *POOL[5:]])
    assert other[:4] == whole[:4] and other[4] != whole[4]


@pytest.mark.parametrize("sparse", EVERY, ids=repr)
@pytest.mark.parametrize("block", range(len(POOL)))
def test_a_token_changes_the_names_of_all_blocks_that_depend_on_it_and_only_those(
    sparse: BlockSparse, block: int
) -> None:
    pool = [list(tokens) for tokens in POOL]
    pool[block][-1] += 1000  # lengths, and so positions, stay
    assert changed(names(sparse, POOL), names(sparse, pool)) == sparse.reach(block, len(POOL))


@pytest.mark.parametrize("sparse", EVERY, ids=repr)
@pytest.mark.parametrize("block", range(len(POOL)))
def test_a_longer_block_moves_later_ones_where_positions_are_sequential(sparse: BlockSparse, block: int) -> None:
    pool = [list(tokens) for tokens in POOL]
    pool[block].append(1000)
    found = changed(names(sparse, POOL), names(sparse, pool))
    if sparse.pattern == "self":
        assert found == [block]
    elif sparse.positions == "sequential":
        assert found == list(range(block, len(POOL)))
    else:
        assert found == sparse.reach(block, len(POOL))


def test_self_blocks_are_shared_wherever_they_stand() -> None:
    for positions in POSITIONS:
        sparse = BlockSparse("self", positions=positions)
        there, here = names(sparse, [[7], [8, 9], [1, 2, 3]]), names(sparse, [[1, 2, 3], [5], [8, 9]])
        assert there[2] == here[0] and there[1] == here[2] and there[0] not in here
    # Every other pattern's states depend on what stood before.
    for pattern in PATTERNS:
        if pattern != "self":
            sparse = BlockSparse(pattern)
            assert names(sparse, [[7, 7, 7], [1, 2, 3]])[1] != names(sparse, [[1, 2, 3], [7]])[0]


def test_what_a_name_depends_on() -> None:
    """Each ingredient of a block's states changes its name; boundaries between tokens are part of it."""
    base = dict(model="m", pattern=BlockSparse(), start=8, token_ids=[1, 2], attended=["a", "b"])
    variants = [
        {"model": "n"},
        {"pattern": BlockSparse("full")},
        {"pattern": BlockSparse(positions="local")},
        {"start": 9},
        {"token_ids": [1, 3]},
        {"token_ids": [2, 1]},
        {"token_ids": [1, 2, 0]},
        {"token_ids": [513]},
        {"token_ids": [1 + (2 << 16)]},
        {"attended": ["b", "a"]},
        {"attended": ["a"]},
        {"attended": ["ab"]},
        {"attended": []},
    ]
    found = [block_identity(**{**base, **variant}) for variant in [{}, *variants]]
    assert len(set(found)) == len(found)
    assert found[0] == block_identity(**base) and len(found[0]) == 32


def test_patterns_that_attend_to_the_same_blocks_differ_in_name_only_as_far_as_documented() -> None:
    """The first blocks of pools with other numbers of previous blocks are the same states, and share."""
    one, two, three = (names(BlockSparse(previous=previous), POOL) for previous in (1, 2, 3))
    assert one[:3] == two[:3] == three[:3]  # blocks 0 to 2 see all before them either way
    assert one[3] != two[3] and two[3] == three[3] and two[4] != three[4]


@pytest.mark.parametrize("sparse", EVERY, ids=repr)
def test_the_real_vocabulary_fits(sparse: BlockSparse) -> None:
    pool = [[0, 128_255, 262_143], [4_294_967_295]]
    assert len(set(names(sparse, pool))) == 2
