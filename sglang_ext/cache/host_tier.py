"""Blocks of demonstrations that the radix tree evicts go to host memory, and come back by a copy.

A block's name stands for its keys and values. So a copy, at the positions that they were written at, is the block
itself, and whoever asks for it is answered as before. The host keeps what has come back until its room is needed:
evicted once more, it is there already.

Copies run on the stream of the scheduler, one behind the other, so a page is read before it is written anew. A pass
waits for that stream: what was evicted is read before the pass writes to its slots. Every rank keeps its own heads, and
does the same in the same order.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_ext import compat
from sglang_ext.cache.host_blocks import HostBlocks, HostLease
from sglang_ext.cache.rows import NewBlock

if TYPE_CHECKING:
    from sglang_ext.cache.radix import BlockRadixCache

PAGE = 16
"""Tokens of a page: blocks have any length, and their last page has some room left."""


@dataclass(frozen=True, eq=False)
class HostBlock:
    """A block on the host.

    Attributes:
        pages: that hold its keys and values.
        token_ids: its tokens, an array of "q".
        written: position of its first token.
    """

    pages: HostLease
    token_ids: array[int]
    written: int


class HostTier:
    """Host memory of one rank for blocks that were evicted.

    Args:
        caches: layer -> (keys [slots, kv_heads, head_dim], values [slots, kv_heads, value_dim]) of the KV cache.
        size: of the host memory, in bytes.

    Raises:
        ValueError: there is no room for a page, or CUDA cannot register the memory.

    Attributes:
        blocks: name -> block, the one that was longest not used first.
        pages: the memory.
        wanted: names of blocks that are on their way back.
        stored: blocks that were copied to the host.
        returned: blocks that came back.
    """

    def __init__(self, caches: Mapping[int, tuple[torch.Tensor, torch.Tensor]], size: int) -> None:
        self._caches = caches
        self.pages = HostBlocks(caches, PAGE, size)
        self.blocks: dict[str, HostBlock] = {}
        self.wanted: set[str] = set()
        self.stored = self.returned = 0

    def stats(self) -> Mapping[str, int]:
        """Counters, for /server_info and /metrics."""
        return {
            "host_blocks": len(self.blocks),
            "host_pages": self.pages.used,
            "host_pages_total": self.pages.total,
            "host_stored": self.stored,
            "host_returned": self.returned,
        }

    def store(self, key: str, token_ids: array[int], written: int, slots: torch.Tensor, spare: Container[str]) -> None:
        """Keep a block that leaves the KV cache, unless it is here already or there is no room for it.

        Args:
            key, token_ids, written: its name, its tokens, and the position of its first token.
            slots: [tokens] int64, where its keys and values are.
            spare: names of blocks that are in the KV cache, too: they give way first, then those that were longest not
                used. Those that are on their way back do not.
        """
        if key in self.blocks:
            self.blocks[key] = self.blocks.pop(key)
            return
        count = -(-len(token_ids) // PAGE)
        if not self._make_room(count, spare):
            return
        lease = self.pages.lease(count)
        for _ in range(count):
            lease.take()
        lease.ids.sort()
        for cache, host in self._tensors():
            tokens = cache[slots]
            for rows, part in _runs(lease.ids, len(token_ids)):
                host[rows].copy_(tokens[part], non_blocking=True)
        self.blocks[key] = HostBlock(lease, token_ids, written)
        self.stored += 1

    def load(self, key: str, slots: torch.Tensor) -> HostBlock:
        """Copy a block that is here to KV slots, [tokens] int64."""
        kept = self.blocks[key] = self.blocks.pop(key)
        for cache, host in self._tensors():
            tokens = cache.new_empty(len(kept.token_ids), *cache.shape[1:])
            for rows, part in _runs(kept.pages.ids, len(kept.token_ids)):
                tokens[part].copy_(host[rows], non_blocking=True)
            cache[slots] = tokens
        self.returned += 1
        return kept

    def forget(self, keys: Iterable[str]) -> None:
        """Give up blocks, those that are here."""
        for key in keys:
            kept = self.blocks.pop(key, None)
            if kept is not None:
                kept.pages.release()

    def clear(self) -> None:
        """Give up all blocks: their names stand for other keys and values from now on."""
        self.forget(list(self.blocks))

    def _make_room(self, count: int, spare: Container[str]) -> bool:
        """Whether there are so many free pages, for which others give way; nothing does where that is not enough."""
        if count <= self.pages.available:
            return True
        loose = [key for key in self.blocks if key not in self.wanted]
        chosen, found = list[str](), self.pages.available
        for key in sorted(loose, key=lambda key: key not in spare):  # stable: of each kind, the longest unused first
            chosen.append(key)
            found += len(self.blocks[key].pages.ids)
            if found >= count:
                self.forget(chosen)
                return True
        return False

    def _tensors(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """([slots, heads, dim] in the KV cache, [pages x PAGE, heads, dim] on the host) of every layer, twice."""
        for layer, (keys, values) in self._caches.items():
            yield keys, self.pages.keys[layer].flatten(0, 1)
            yield values, self.pages.values[layer].flatten(0, 1)


def _runs(pages: list[int], tokens: int) -> Iterator[tuple[slice, slice]]:
    """(rows on the host, tokens of the block) for every run of pages that follow one another."""
    begin = 0
    while begin < len(pages):
        end = begin + 1
        while end < len(pages) and pages[end] == pages[end - 1] + 1:
            end += 1
        first, last = begin * PAGE, min(end * PAGE, tokens)
        row = pages[begin] * PAGE
        yield slice(row, row + last - first), slice(first, last)
        begin = end


def bring_back(cache: BlockRadixCache, owner: str, keys: Sequence[str], room: int) -> None:
    """Copy blocks that are on the host, and not in the KV cache, back there, and hold them.

    Args:
        cache: whose nodes they become. No pass may write to its free slots any more (`compat.after_forward`).
        owner: who holds them.
        keys: in the order in which they come, until one finds no room.
        room: KV slots that they may take, in tokens.
    """
    tier = cache.host
    if tier is None:
        return
    coming = [key for key in dict.fromkeys(keys) if key in tier.blocks and key not in cache.blocks]
    tier.wanted.update(coming)
    try:
        for key in coming:
            tokens = len(tier.blocks[key].token_ids)
            room -= tokens
            slots = compat.take_slots(cache, tokens) if room >= 0 else None
            if slots is None:
                return
            kept = tier.load(key, slots)
            cache.add_block(NewBlock(key, tokens, kept.written, ()), kept.token_ids, slots)
            for restored in cache.on_restore:
                restored(slots, kept.written)
            cache.hold(owner, [key])
            tier.wanted.discard(key)
    finally:
        tier.wanted.clear()
