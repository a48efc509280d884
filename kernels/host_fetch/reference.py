"""The cache in front of host memory in plain PyTorch.

A chunk wants some blocks of a stream (Ltri-LLM, section 3.4, equation 9). Those that the cache holds are hits. The
others replace the blocks that were used least recently and that the chunk does not want itself, and come from the host.
What leaves the window goes to the host (section 3.4, first step).
"""

from __future__ import annotations

import torch

from sglang_ext.kernels.host_fetch.types import (
    NOBODY,
    BlockCache,
    Found,
    FreshBlocks,
    HostRegion,
    check_fetch,
    check_look_up,
    check_store,
)


def look_up(wanted: torch.Tensor, rows: torch.Tensor, cache: BlockCache, *, out: Found | None = None) -> Found:
    """Find the way of each wanted block, and give one to each block that the cache does not hold (section 3.4).

    A miss takes an empty way, or the way with the smallest `used` that holds no wanted block; of equals it takes the
    smallest way. Misses choose in the order of `wanted`. The wanted blocks' ways get the clock's new reading, and hits
    and misses are counted. A row that wants nothing stays as it is. The new blocks' keys and values are not there until
    `fetch` has run.

    Args:
        wanted: [batch, count] int32 ids of host blocks, no id twice in a request; -1 for none. `count` is at most the
            number of ways.
        rows: [batch] int32 or int64 row of the cache of each request, no row twice among those that want something; -1
            for a request that wants nothing, whatever `wanted` says.
        cache: the layer's, on the device of `wanted` and `rows`; its integers are updated.
        out: what to write to; None makes new tensors.

    Returns:
        `out`.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit; more blocks are wanted than there are ways; an id is there
            twice, or a row; there is no such row.
    """
    check_look_up(wanted, rows, cache, out)
    if out is None:
        out = Found.empty(wanted.shape[0], wanted.shape[1], wanted.device)
    _check_values(wanted, rows, cache)
    out.places.fill_(NOBODY)
    out.missing.fill_(NOBODY)
    for request, row in enumerate(rows.tolist()):
        asked = wanted[request]
        wants = asked >= 0
        if row < 0 or not bool(wants.any()):
            continue
        held, used = cache.held[row], cache.used[row]
        same = (asked.unsqueeze(1) == held) & wants.unsqueeze(1)
        miss = wants & ~same.any(1)
        # The order in which ways are given away: those that hold a wanted block come last and are never reached.
        age = used.long().masked_fill(held < 0, -1).masked_fill(same.any(0), 2**40)
        place = torch.where(wants, same.int().argmax(1), NOBODY)
        place[miss] = age.argsort(stable=True)[: int(miss.sum())]
        cache.clock[row] += 1
        held[place[miss]] = asked[miss]
        used[place[wants]] = cache.clock[row]
        cache.counters[row] += torch.stack([(wants & ~miss).sum(), miss.sum()])
        out.places[request] = place.int()
        out.missing[request] = torch.where(miss, asked, NOBODY)
    return out


def fetch(
    host: HostRegion, found: Found, rows: torch.Tensor, cache: BlockCache, *, fresh: FreshBlocks | None = None
) -> None:
    """Copy the missing blocks' keys and values from the host into their ways (section 3.4, second step).

    Args:
        host: the layer's region, [host_blocks, block, kv_heads, dim].
        found: what `look_up` returned for these rows, [batch, count] int32.
        rows: [batch] int32 or int64, as for `look_up`.
        cache: the layer's, on the region's device and in its dtype; its keys and values are written.
        fresh: blocks that are taken from there, and not from the host.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    check_fetch(host, found, rows, cache, fresh)
    there = (found.missing >= 0) & (found.places >= 0) & (rows >= 0).unsqueeze(1)
    row = rows.long().unsqueeze(1).expand_as(there)[there]
    way, block = found.places[there].long(), found.missing[there].long()
    cache.keys[row, way] = host.keys[block]
    cache.values[row, way] = host.values[block]
    if fresh is not None:
        item, number = (block.unsqueeze(1) == fresh.ids).nonzero().unbind(1)
        cache.keys[row[item], way[item]] = fresh.keys[number]
        cache.values[row[item], way[item]] = fresh.values[number]


def store(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, ids: torch.Tensor, host: HostRegion) -> None:
    """Copy blocks that leave the window from KV slots to the host (section 3.4, first step).

    Args:
        keys: [num_slots, kv_heads, head_dim] of the layer, in the region's dtype and on its device.
        values: [num_slots, kv_heads, value_dim] likewise.
        slots: [batch, block] int32 or int64 slot of each token of each block.
        ids: [batch] int32 host block that is written, no id twice; -1 for none, and the request's slots are not read.
        host: the layer's region, [host_blocks, block, kv_heads, dim]; written.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit.
    """
    check_store(keys, values, slots, ids, host)
    there = ids >= 0
    block, slot = ids[there].long(), slots[there].long()
    host.keys[block] = keys[slot]
    host.values[block] = values[slot]


def _check_values(wanted: torch.Tensor, rows: torch.Tensor, cache: BlockCache) -> None:
    """Raise ValueError for ids or rows that are there twice, and for rows that are not there."""
    active = (rows >= 0) & (wanted >= 0).any(1)
    taken = rows[active].tolist()
    if len(set(taken)) < len(taken):
        raise ValueError(f"rows {rows.tolist()}: expected no row twice among the requests that want something")
    if taken and max(taken) >= len(cache.clock):
        raise ValueError(f"row {max(taken)}: expected one below {len(cache.clock)}, as many as the cache has")
    for ids in wanted[active].tolist():
        named = [block for block in ids if block >= 0]
        if len(set(named)) < len(named):
            raise ValueError(f"wanted {ids}: expected no block twice in a request")
