"""Blocks of demonstrations that the radix tree evicts go to host memory, and come back by a copy.

A block's name stands for its keys and values. So a copy, at the positions that they were written at, is the block
itself, and whoever asks for it is answered as before. The host keeps what has come back until its room is needed:
evicted once more, it is there already.

A block that nobody holds any more may be evicted. So it is copied ahead, on a stream beside the passes, a block between
two of them (`back_up`): its eviction has nothing to copy then, which would hold up the pass that needs its room. All
other copies run on the stream of the scheduler, one behind the other. A pass waits for that stream, and that stream for
a copy ahead where a block is evicted or a page is written anew: what was evicted is read before the pass writes to its
slots. Every rank keeps its own heads, and does the same in the same order.
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
from sglang_ext.kernels.float8 import bytes_of

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
        copied: when it is there, of a copy on a stream beside the scheduler's; None otherwise.
    """

    pages: HostLease
    token_ids: array[int]
    written: int
    copied: torch.cuda.Event | None = None

    def wait(self) -> None:
        """What is launched from here on finds it on the host, and may write to its slots or its pages."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)


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
        waiting: names of blocks that are to be copied ahead, in the order in which their last holders let go of them.
        stored: blocks that were copied to the host.
        ahead: those of them that were in the KV cache then.
        returned: blocks that came back.
    """

    def __init__(self, caches: Mapping[int, tuple[torch.Tensor, torch.Tensor]], size: int) -> None:
        # As they are stored: PyTorch does not write float8 by index everywhere.
        self._caches = {layer: (bytes_of(keys), bytes_of(values)) for layer, (keys, values) in caches.items()}
        self.pages = HostBlocks(self._caches, PAGE, size)
        self.blocks: dict[str, HostBlock] = {}
        self.wanted: set[str] = set()
        self.waiting: dict[str, None] = {}
        self.stored = self.ahead = self.returned = 0
        device = next(iter(caches.values()))[0].device
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None

    def stats(self) -> Mapping[str, int]:
        """Counters, for /server_info and /metrics."""
        return {
            "host_blocks": len(self.blocks),
            "host_pages": self.pages.used,
            "host_pages_total": self.pages.total,
            "host_stored": self.stored,
            "host_stored_ahead": self.ahead,
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
            kept = self.blocks[key] = self.blocks.pop(key)
            kept.wait()
            return
        if self._make_room(_pages(token_ids), spare):
            self.blocks[key] = HostBlock(self._copied(token_ids, slots), token_ids, written)

    def store_ahead(self, key: str, token_ids: array[int], written: int, slots: torch.Tensor) -> bool:
        """Copy a block that is in the KV cache, beside the passes, where it is not here and no other gives way for it.

        Args:
            key, token_ids, written, slots: as of `store`; what was launched before has written its keys and values.

        Returns:
            Whether it was copied.
        """
        if key in self.blocks or _pages(token_ids) > self.pages.available:
            return False
        copied = None
        if self._beside is None:
            pages = self._copied(token_ids, slots)
        else:
            self._beside.wait_stream(torch.cuda.current_stream(self._beside.device))
            with torch.cuda.stream(self._beside):
                pages = self._copied(token_ids, slots)
                copied = torch.cuda.Event()
                copied.record()
        self.blocks[key] = HostBlock(pages, token_ids, written, copied)
        self.ahead += 1
        return True

    def _copied(self, token_ids: array[int], slots: torch.Tensor) -> HostLease:
        """A block's pages, to which it is copied."""
        count = _pages(token_ids)
        lease = self.pages.lease(count)
        for _ in range(count):
            lease.take()
        lease.ids = array("i", sorted(lease.ids))
        for cache, host in self._tensors():
            tokens = cache[slots]
            for rows, part in _runs(lease.ids, len(token_ids)):
                host[rows].copy_(tokens[part], non_blocking=True)
        self.stored += 1
        return lease

    def load(self, key: str, slots: torch.Tensor) -> HostBlock:
        """Copy a block that is here to KV slots, [tokens] int64."""
        kept = self.blocks[key] = self.blocks.pop(key)
        kept.wait()
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
                kept.wait()
                kept.pages.release()

    def clear(self) -> None:
        """Give up all blocks: their names stand for other keys and values from now on."""
        self.forget(list(self.blocks))
        self.waiting.clear()

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


def _pages(token_ids: array[int]) -> int:
    """Pages of a block with these tokens."""
    return -(-len(token_ids) // PAGE)


def _runs(pages: Sequence[int], tokens: int) -> Iterator[tuple[slice, slice]]:
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


def back_up(cache: BlockRadixCache) -> None:
    """Copy the next block ahead that nobody holds any more and the host does not have; one at most."""
    tier = cache.host
    while tier is not None and tier.waiting:
        key = next(iter(tier.waiting))
        del tier.waiting[key]
        node = cache.blocks.get(key)
        if node is not None and tier.store_ahead(key, node.key.token_ids, cache.written[key], node.value):
            return


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
