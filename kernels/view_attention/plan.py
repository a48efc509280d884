"""Which program reads which KV tokens for which query rows: the work list of fused view attention, planned on the host.

A run of KV slots seen at one distance from where it was written is a *virtual request* (nothing is copied). Query
rows of a batch whose runs have equal keys read that run once, each row rotated by its own distance; what they computed
over disjoint runs merges by log-sum-exp. The words used here:

- *pair*: one query row that sees one run.
- *tile*: up to `tile_rows` pairs of one run; its rows fill one matrix product.
- *item*: a tile over a part of the run's tokens: what one program does at a time, once for each key-value head.
- *entry*: one query row of an item, with how many of the item's tokens it sees and the angle by which it is rotated.

Plain numpy and no Python loop over runs: a plan for 128 requests of 15 runs takes a fraction of a millisecond, so
that planning when a batch changes hides behind the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_ext.kernels.view_attention.config import Config

Ints = npt.NDArray[np.int64]

COPY_TOKENS = 1024
"""Slots that one program of the gather kernel copies."""


@dataclass(frozen=True, eq=False)
class PlanRows:
    """What the query rows of one request see; made once when it starts and kept by the caller.

    Attributes:
        first_row: the request's first query row in the batch.
        num_rows: how many it has.
        keys: [n] integer, identity of each run: equal keys name equal KV slots, in order, and equal lengths.
        lengths: [n] integer tokens.
        deltas: [n] integer, position at which the run is seen - position at which it was written.
        source: [n] integer, offset of each run's first slot in a flat table of slots.
        own: indices of the runs that are, one after the other, the request's own causal tail: of its `tail_len` tokens
            row i sees [0, tail_len - num_rows + 1 + i). Never shared, whatever their keys. Every other run is seen
            whole by every row.
        tail_column: column of the row of slots at which the tail begins, so that tail_len = seq_len - tail_column.

    Raises:
        ValueError: arrays of different sizes, negative numbers, own runs that do not exist or are out of order, or a
            tail that is shorter than the rows.
    """

    first_row: int
    num_rows: int
    keys: Ints
    lengths: Ints
    deltas: Ints
    source: Ints
    own: tuple[int, ...] = ()
    tail_column: int = 0
    # [5, n]: key, length, delta, source, offset in the tail (-1: seen whole); and the numbers of the request, in the
    # order of `_head_row`. Kept as arrays, so that a plan over many requests is two concatenations.
    _table: Ints = field(init=False, repr=False)
    _head: Ints = field(init=False, repr=False)

    def __post_init__(self) -> None:
        sizes = [np.shape(a) for a in (self.keys, self.lengths, self.deltas, self.source)]
        n = len(self.keys)
        if any(size != (n,) for size in sizes):
            raise ValueError(f"keys, lengths, deltas and source of shapes {sizes}: expected one number a run in each")
        table = np.empty((5, n), dtype=np.int64)
        for row, values in enumerate((self.keys, self.lengths, self.deltas, self.source)):
            table[row] = values
        table[4] = -1
        if self.num_rows < 1 or self.first_row < 0 or self.tail_column < 0:
            raise ValueError(
                f"first_row {self.first_row}, num_rows {self.num_rows}, tail_column {self.tail_column}: expected at "
                "least 0, 1 and 0"
            )
        if n and (table[1].min() < 0 or table[3].min() < 0):
            raise ValueError(f"lengths {table[1].tolist()}, source {table[3].tolist()}: expected no negative numbers")
        tail_len = 0
        for at, before in zip(self.own, (-1, *self.own), strict=False):
            if not before < at < n:
                raise ValueError(f"own runs {self.own} of {n} runs: expected ascending indices below {n}")
            table[4, at] = tail_len
            tail_len += int(table[1, at])
        if self.own and tail_len < self.num_rows:
            raise ValueError(f"a tail of {tail_len} tokens for {self.num_rows} rows: expected at least a token a row")
        object.__setattr__(self, "_table", table)
        tail_at = self.own[-1] if self.own else -1
        head = (n, self.first_row, self.num_rows, tail_at, self.tail_column, self.tail_column + tail_len)
        object.__setattr__(self, "_head", np.array(head, dtype=np.int64))

    @property
    def seq_len(self) -> int:
        """Columns of the row of slots, own tokens included: tail_column + tail_len."""
        return int(self._head[5])


@dataclass(frozen=True, eq=False)
class Plan:
    """A work list; `PlanBuffers.load` brings it to the device. Every array is int64 and on the host.

    Attributes:
        config: what it was cut for.
        group: query heads a key-value head; kv_heads: how many of these.
        num_rows: query rows of the batch: 1 + the last one named.
        work_ptr: [workers + 1]: worker w does items [work_ptr[w], work_ptr[w + 1]) for each key-value head.
        items: [items, 4]: first token in `kv_slots`, tokens, first entry, entries.
        entry_row, entry_limit, entry_angle: [entries]: query row, how many of the item's tokens it sees (from the
            first, at least one), and index into `angles`.
        angles: [angles] distinct distances (seen - written position).
        row_ptr: [num_rows + 1], row_entries: [entries]: the entries of each row (CSR).
        copies: [copies, 3]: first token in `kv_slots`, offset in the caller's slot table, slots.
        num_slots: tokens of `kv_slots`, room included.
        table_size: slots that the caller's table must hold at least.
        room: tokens by which every tail may grow.
        tail_item, tail_entry, tail_base, tail_room: [num_rows]: the item and entry in which the row's tail ends (-1:
            none), the sequence length at which that item would be empty, and the most tokens it may hold.
    """

    config: Config
    group: int
    kv_heads: int
    num_rows: int
    work_ptr: Ints
    items: Ints
    entry_row: Ints
    entry_limit: Ints
    entry_angle: Ints
    angles: Ints
    row_ptr: Ints
    row_entries: Ints
    copies: Ints
    num_slots: int
    table_size: int
    room: int
    tail_item: Ints
    tail_entry: Ints
    tail_base: Ints
    tail_room: Ints

    def steps_left(self, seq_lens: npt.ArrayLike | None = None) -> int:
        """How many more tokens each row may append before a new plan is needed.

        Args:
            seq_lens: [at least num_rows] integer sequence lengths that the last step had; left out, those of the plan.
        """
        grows = self.tail_item >= 0
        if not self.room or not grows.any():
            return 0
        if seq_lens is None:
            return self.room
        return int((self.tail_base + self.tail_room - np.asarray(seq_lens)[: self.num_rows])[grows].min())


def plan_rows(
    requests: Sequence[PlanRows],
    *,
    config: Config,
    group: int,
    kv_heads: int,
    room: int = 0,
    first_rows: npt.ArrayLike | None = None,
    num_rows: npt.ArrayLike | None = None,
    seq_lens: npt.ArrayLike | None = None,
) -> Plan:
    """Plan attention of a batch: every row sees the union of its request's runs, which must be disjoint.

    Args:
        requests: what the rows of each request see.
        config: tile sizes and the number of programs.
        group: query heads a key-value head (G).
        kv_heads: key-value heads of this device.
        room: tokens by which the tail of every request may grow before the next plan (`PlanBuffers.advance`). Above 0
            the batch decodes: one row a request, each with a tail of its own.
        first_rows, num_rows, seq_lens: [requests] integer; replace the numbers in `requests`, so that what is kept of
            a request need not be made again when the batch or the request's length changes. `seq_lens` sets the
            length of the last own run.

    Raises:
        ValueError: rows of two requests overlap; equal keys with different lengths; one request names a key twice; a
            sequence too short for its rows or earlier own runs; room for a request of several rows or without a tail.
    """
    tile_rows = config.tile_rows(group)
    workers = config.workers(kv_heads)
    if room < 0 or kv_heads < 1:
        raise ValueError(f"room {room}, kv_heads {kv_heads}: expected at least 0 and 1")
    if not requests:
        return _empty(config, group, kv_heads, workers, room)
    run_count, first, rows, tail_at, column, length_now = np.concatenate([r._head for r in requests]).reshape(-1, 6).T
    first = _override("first_rows", first_rows, first)
    rows = _override("num_rows", num_rows, rows)
    tail_len = _override("seq_lens", seq_lens, length_now) - column
    _check_rows(first, rows, tail_len, tail_at, room)

    key, length, delta, source, own = np.concatenate([r._table for r in requests], axis=1)
    has_tail = tail_at >= 0
    last_own = (run_count.cumsum() - run_count + tail_at)[has_tail]
    length[last_own] = tail_len[has_tail] - own[last_own]
    if last_own.size and length[last_own].min() < (1 if room else 0):
        raise ValueError(
            f"sequences of {(tail_len + column)[has_tail].tolist()} tokens end before their last own run: expected "
            "longer sequences, or fewer own runs"
        )
    owner = np.arange(len(requests)).repeat(run_count)
    grows = np.zeros(len(key), dtype=bool)
    grows[last_own] = room > 0

    order = key.argsort(kind="stable")
    if not length.all():
        order = order[length[order] > 0]
    if not order.size:
        return _empty(config, group, kv_heads, workers, room, int((first + rows).max()))
    key, length, delta, source, own, owner, grows = (a[order] for a in (key, length, delta, source, own, owner, grows))

    # Runs with equal keys are one group; own runs are groups of their own.
    is_own = own >= 0
    new = np.ones(len(key), dtype=bool)
    new[1:] = (key[1:] != key[:-1]) | is_own[1:] | is_own[:-1]
    group_start = new.nonzero()[0]
    group_of = new.cumsum() - 1
    _check_groups(key, length, owner, new, group_of, group_start)

    # Slots: every group's once, with room behind a growing tail.
    group_len = length[group_start]
    taken = group_len + room * grows[group_start] if room else group_len
    slot_begin = taken.cumsum() - taken
    group_source = source[group_start]
    copies = copies_of(slot_begin, group_source, group_len)

    # Pairs of (row, run).
    angles, angle_of = np.unique(delta, return_inverse=True)
    run_rows = rows[owner]
    if (rows == 1).all():
        pair_row, pair_angle, pair_group, limit = first[owner], angle_of, group_of, length
    else:
        pair_run = np.arange(len(key)).repeat(run_rows)
        within = np.arange(len(pair_run)) - (run_rows.cumsum() - run_rows).repeat(run_rows)
        seen_by_first = (tail_len - rows + 1)[owner] - own
        limit = np.minimum(
            np.where(is_own[pair_run], seen_by_first[pair_run] + within, length[pair_run]), length[pair_run]
        )
        pair_row, pair_angle, pair_group = first[owner][pair_run] + within, angle_of[pair_run], group_of[pair_run]
        if limit.min() <= 0:  # the tail's later runs lie after its earlier rows
            seen = (limit > 0).nonzero()[0]
            limit, pair_row, pair_angle, pair_group = (a[seen] for a in (limit, pair_row, pair_angle, pair_group))
    group_pairs = np.bincount(pair_group, minlength=len(group_start))

    # Tiles of at most tile_rows pairs; a tile ends where its last row's sight does.
    group_tiles = -(-group_pairs // tile_rows)
    tile_group = np.arange(len(group_tiles)).repeat(group_tiles)
    before = (np.arange(len(tile_group)) - (group_tiles.cumsum() - group_tiles)[tile_group]) * tile_rows
    tile_first = (group_pairs.cumsum() - group_pairs)[tile_group] + before
    tile_pairs = np.minimum(group_pairs[tile_group] - before, tile_rows)
    tile_len = np.maximum.reduceat(limit, tile_first)

    # Items: tiles, cut where one worker's share ends.
    several = (group_tiles > 1)[tile_group]
    if several.any() and not room:  # what grows must stay the last item of its run
        item_tile, item_begin, item_len, work_ptr = deal(tile_len, several, workers, config)
    else:
        item_tile, item_begin, item_len, work_ptr = split(tile_len, workers, config)
    item_pairs = tile_pairs[item_tile]
    entry_item = np.arange(len(item_tile)).repeat(item_pairs)
    shift = tile_first[item_tile] - (item_pairs.cumsum() - item_pairs)
    pair = np.arange(len(entry_item)) + shift[entry_item]
    entry_limit = np.minimum(limit[pair] - item_begin[entry_item], item_len[entry_item])
    if entry_limit.min() <= 0:  # earlier rows of a causal tail do not reach its later items
        seen = (entry_limit > 0).nonzero()[0]
        entry_item, pair, entry_limit = entry_item[seen], pair[seen], entry_limit[seen]
        item_pairs = np.bincount(entry_item, minlength=len(item_tile))
    entry_row = pair_row[pair]
    items = np.stack(
        (slot_begin[tile_group[item_tile]] + item_begin, item_len, item_pairs.cumsum() - item_pairs, item_pairs), axis=1
    )

    batch_rows = int((first + rows).max())
    row_ptr = np.zeros(batch_rows + 1, dtype=np.int64)
    np.bincount(entry_row, minlength=batch_rows).cumsum(out=row_ptr[1:])
    small = entry_row.astype(np.uint16) if batch_rows <= 1 << 16 else entry_row  # numpy has a radix sort for 16 bits
    tails = np.full((4, batch_rows), -1, dtype=np.int64)
    if room:
        tail_group = grows[group_start].nonzero()[0]
        item_group = tile_group[item_tile]
        item = item_group.searchsorted(tail_group, side="right") - 1  # the group's last item
        request = owner[group_start[tail_group]]
        tails[:, first[request]] = (
            item,
            items[item, 2],
            (tail_len + column)[request] - item_len[item],
            item_len[item] + room,
        )
    return Plan(
        config=config,
        group=group,
        kv_heads=kv_heads,
        num_rows=batch_rows,
        work_ptr=work_ptr,
        items=items,
        entry_row=entry_row,
        entry_limit=entry_limit,
        entry_angle=pair_angle[pair],
        angles=angles,
        row_ptr=row_ptr,
        row_entries=small.argsort(kind="stable"),
        copies=copies,
        num_slots=int(taken.sum()),
        table_size=int((group_source + group_len).max()),
        room=room,
        tail_item=tails[0],
        tail_entry=tails[1],
        tail_base=tails[2],
        tail_room=tails[3],
    )


def split(tile_len: Ints, workers: int, config: Config, taken: npt.ArrayLike = 0) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut tiles so that every worker gets an equal, contiguous share of the work: the rule of splitting.

    A tile of n tokens costs ceil(n / block_n) + item_cost steps, however many of its rows are in use. The tiles are
    laid one after the other and this line is cut into `workers` equal shares, so a tile is split only where a share
    ends: at most workers - 1 tiles are, and there is little to merge. A cut is moved to the tile's nearest end where it
    would leave less than `min_split` tokens on one side.

    Args:
        tile_len: [tiles] tokens, at least one each.
        taken: [workers] steps that each worker has to do already; its share is smaller by as many.

    Returns:
        (tile, first token, tokens) of each item, each [items], and work_ptr [workers + 1].
    """
    block, least = config.block_n, -(-config.min_split // config.block_n)
    steps: Ints = -(-tile_len // block)
    cost_end = (steps + config.item_cost).cumsum()
    step_begin = steps.cumsum() - steps
    total = int(steps.sum())
    before = np.broadcast_to(np.asarray(taken, dtype=np.int64), workers).cumsum()
    every = int(cost_end[-1] + before[-1])
    cuts = np.clip(np.arange(1, workers) * every // workers - before[:-1], 0, int(cost_end[-1]) - 1)
    tile = cost_end.searchsorted(cuts, side="right")
    size = steps[tile]
    inside = np.clip(cuts - (cost_end[tile] - size), 0, size)  # the tile's own cost comes first
    short = np.minimum(inside, size - inside) < least
    to_begin = short & (inside <= size - inside)
    to_end = short & ~to_begin
    inside = np.where(to_begin, 0, np.where(to_end, size, inside))
    at = step_begin[tile] + inside
    begin: Ints = np.unique(np.concatenate((step_begin, at[at < total])))
    item_tile = step_begin.searchsorted(begin, side="right") - 1
    first = (begin - step_begin[item_tile]) * block
    end = np.empty_like(begin)
    end[:-1], end[-1] = begin[1:], total
    last = np.minimum((end - step_begin[item_tile]) * block, tile_len[item_tile])
    work_ptr = np.zeros(workers + 1, dtype=np.int64)
    work_ptr[1:-1], work_ptr[-1] = begin.searchsorted(np.maximum.accumulate(at)), len(begin)
    return item_tile, first, last - first, work_ptr


def deal(tile_len: Ints, several: npt.NDArray[np.bool_], workers: int, config: Config) -> tuple[Ints, Ints, Ints, Ints]:
    """`split`, but most tiles of runs that have several are dealt to the workers like cards.

    A run that many rows see has several tiles, which read the same keys. In `split` one worker takes them one after the
    other, each from memory; dealt, neighbours read them side by side, from the L2 cache. As many rounds are dealt as
    leave every worker below its share; what is left is split such that the shares are equal in the end.

    Args:
        tile_len: [tiles] tokens, at least one each.
        several: [tiles] whether the tile is one of several of its run.

    Returns:
        As `split`: each worker's dealt tiles are followed by its part of what is left.
    """
    cost: Ints = -(-tile_len // config.block_n) + config.item_cost
    cards = several.nonzero()[0]
    rounds = min(int(cost.sum() / workers / cost[cards].max()), len(cards) // workers) if cards.size else 0
    dealt = cards[: rounds * workers]
    left = np.ones(len(tile_len), dtype=bool)
    left[dealt] = False
    if not rounds or not left.any():
        return split(tile_len, workers, config)
    rest = left.nonzero()[0]
    taken = cost[dealt].reshape(rounds, workers).sum(axis=0)
    tile, begin, size, ptr = split(tile_len[rest], workers, config, taken)
    # Stable, so that a worker's dealt tiles come first and keep their order.
    worker = np.concatenate((np.tile(np.arange(workers), rounds), np.arange(workers).repeat(np.diff(ptr))))
    order = worker.argsort(kind="stable")
    whole = np.zeros(len(dealt), dtype=np.int64)
    return (
        np.concatenate((dealt, rest[tile]))[order],
        np.concatenate((whole, begin))[order],
        np.concatenate((tile_len[dealt], size))[order],
        ptr + rounds * np.arange(workers + 1),
    )


def copies_of(begin: Ints, source: Ints, length: Ints) -> Ints:
    """[copies, 3] (first token, offset in the table, slots) of runs, each of at most COPY_TOKENS."""
    count = -(-length // COPY_TOKENS)
    run = np.arange(len(count)).repeat(count)
    done = (np.arange(len(run)) - (count.cumsum() - count)[run]) * COPY_TOKENS
    return np.stack((begin[run] + done, source[run] + done, np.minimum(length[run] - done, COPY_TOKENS)), axis=1)


def _override(name: str, given: npt.ArrayLike | None, kept: Ints) -> Ints:
    if given is None:
        return kept
    values = np.asarray(given, dtype=np.int64)
    if values.shape != kept.shape:
        raise ValueError(f"{name} of shape {values.shape}: expected one number for each of {len(kept)} requests")
    return values


def _check_rows(first: Ints, rows: Ints, tail_len: Ints, tail_at: Ints, room: int) -> None:
    if first.min() < 0 or rows.min() < 1:
        raise ValueError(f"first_rows {first.tolist()}, num_rows {rows.tolist()}: expected at least 0 and 1")
    order = first.argsort()
    if (first[order][1:] < (first + rows)[order][:-1]).any():
        raise ValueError(
            f"rows of requests overlap (first rows {first.tolist()}, numbers {rows.tolist()}): expected disjoint rows; "
            "put everything that a row sees into one PlanRows"
        )
    has_tail = tail_at >= 0
    if (tail_len < rows)[has_tail].any():
        raise ValueError(
            f"tails of {tail_len[has_tail].tolist()} tokens for {rows[has_tail].tolist()} rows: expected at least one "
            "token a row"
        )
    if room and not (has_tail.all() and (rows == 1).all()):
        raise ValueError(
            f"room for {room} tokens: expected one row and one own run for every request; plan without room otherwise"
        )


def _check_groups(key: Ints, length: Ints, owner: Ints, new: Ints, group_of: Ints, group_start: Ints) -> None:
    differs = length != length[group_start][group_of]
    if differs.any():
        at = int(differs.argmax())
        raise ValueError(
            f"key {key[at]} names runs of {length[at]} and {length[group_start][group_of[at]]} tokens: expected equal "
            "slots under equal keys"
        )
    twice = ~new[1:] & (owner[1:] == owner[:-1])
    if twice.any():
        at = int(twice.argmax())
        raise ValueError(
            f"request {owner[at]} names key {key[at]} twice: expected disjoint runs; a token named twice counts twice"
        )


def _empty(config: Config, group: int, kv_heads: int, workers: int, room: int, rows: int = 0) -> Plan:
    none = np.zeros(0, dtype=np.int64)
    no_tail = np.full(rows, -1, dtype=np.int64)
    return Plan(
        config=config,
        group=group,
        kv_heads=kv_heads,
        num_rows=rows,
        work_ptr=np.zeros(workers + 1, dtype=np.int64),
        items=none.reshape(0, 4),
        entry_row=none,
        entry_limit=none,
        entry_angle=none,
        angles=none,
        row_ptr=np.zeros(rows + 1, dtype=np.int64),
        row_entries=none,
        copies=none.reshape(0, 3),
        num_slots=0,
        table_size=0,
        room=room,
        tail_item=no_tail,
        tail_entry=no_tail,
        tail_base=no_tail,
        tail_room=no_tail,
    )
