"""The rows of the caches of blocks of all layers."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.attention.ltri_cached import CachedBlocks
from sglang_ext.kernels.host_fetch import HostRegion, reference

LAYERS, ROWS, WAYS, BLOCKS = 3, 4, 5, 11


def regions() -> list[HostRegion]:
    generator = torch.Generator().manual_seed(1)
    return [HostRegion.of(torch.randn(BLOCKS, 2, 4, 2, 8, generator=generator)) for _ in range(LAYERS)]


def fetched(cached: CachedBlocks, hosts: list[HostRegion], row: int, wanted: list[int]) -> list[list[int]]:
    """Have blocks in a row of every layer; returns what was missing in each."""
    at, missing = torch.tensor([row]), list[list[int]]()
    for cache, host in zip(cached.layers, hosts, strict=True):
        found = reference.look_up(torch.tensor([wanted], dtype=torch.int32), at, cache)
        reference.fetch(host, found, at, cache)
        missing.append([number for number in found.missing[0].tolist() if number >= 0])
        for number, way in zip(wanted, found.places[0].tolist(), strict=True):
            assert torch.equal(cache.keys[row, way], host.keys[number])
            assert torch.equal(cache.values[row, way], host.values[number])
    return missing


def test_a_copy_has_what_both_hold_and_leaves_its_source_alone() -> None:
    hosts = regions()
    cached = CachedBlocks(LAYERS, ROWS, WAYS, hosts[0], torch.device("cpu"))
    for cache in cached.layers:
        cache.keys.fill_(torch.nan), cache.values.fill_(torch.nan)
    fetched(cached, hosts, 1, [3, 0, 7, 10])
    fetched(cached, hosts, 1, [3])  # so 0, and not the first way, goes first
    fetched(cached, hosts, 3, [2, 4])
    cached.copy(1, 2, torch.tensor([0, 1, 2, 3, 10], dtype=torch.int32))
    assert [sorted(cache.held[2].tolist()) for cache in cached.layers] == [[-1, -1, 0, 3, 10]] * LAYERS
    assert [sorted(cache.held[1].tolist()) for cache in cached.layers] == [[-1, 0, 3, 7, 10]] * LAYERS
    assert [sorted(cache.held[3].tolist()) for cache in cached.layers] == [[-1, -1, -1, 2, 4]] * LAYERS
    # Two ways are empty in the copy, then its oldest blocks give way; its source has all of its own still.
    assert fetched(cached, hosts, 2, [1, 2, 5]) == [[1, 2, 5]] * LAYERS
    assert [sorted(cache.held[2].tolist()) for cache in cached.layers] == [[1, 2, 3, 5, 10]] * LAYERS
    assert fetched(cached, hosts, 2, [6]) == [[6]] * LAYERS
    assert [sorted(cache.held[2].tolist()) for cache in cached.layers] == [[1, 2, 3, 5, 6]] * LAYERS
    assert fetched(cached, hosts, 1, [3, 0, 7, 10]) == [[]] * LAYERS


def test_a_row_forgets_and_counts_are_of_all() -> None:
    hosts = regions()
    cached = CachedBlocks(LAYERS, ROWS, WAYS, hosts[0], torch.device("cpu"))
    fetched(cached, hosts, 0, [3, 5])
    fetched(cached, hosts, 1, [3])
    fetched(cached, hosts, 0, [3])
    assert cached.counts() == cached.earlier_counts() == (LAYERS, 3 * LAYERS)
    cached.forget(0)
    assert fetched(cached, hosts, 0, [3]) == [[3]] * LAYERS and fetched(cached, hosts, 1, [3]) == [[]] * LAYERS
    cached.forget_counts()
    assert cached.counts() == (0, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a CPU there is nothing to wait for")
def test_earlier_counts_do_not_wait_for_a_gpu() -> None:
    """They arrive behind what the device has still to do; until then, the counts of before are given."""
    host, device = regions()[0], torch.device("cuda")
    cached = CachedBlocks(LAYERS, ROWS, WAYS, host, device)
    counters = cached._all.counters
    assert cached.earlier_counts() == (0, 0)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # a tenth of a second
    counters[:, 0] += torch.tensor([2, 5], device=device)
    assert cached.earlier_counts() == cached.earlier_counts() == (0, 0)
    assert not torch.cuda.current_stream().query(), "somebody has waited for the device"
    torch.cuda.synchronize()
    assert cached.earlier_counts() == cached.counts() == (2 * LAYERS, 5 * LAYERS)
