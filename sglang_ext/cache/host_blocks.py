"""Host memory for what leaves the windows of streams: one region, cut into blocks that several streams may hold.

A block has the keys and values of some consecutive tokens in all layers. The region is one anonymous mapping of the
scheduler's process, so the operating system frees it however that process ends. Where the KV cache lies on a GPU, the
region is registered with CUDA (pinned): then copies run beside kernels, and kernels can read it directly.

A stream has a `HostLease`: the blocks that it holds, and how many more it was promised. Admission promises all that a
stream can ever need, so a stream that runs never waits for host memory.
"""

from __future__ import annotations

import heapq
import logging
import mmap
import os
import resource
import time
import weakref
from array import array
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

logger = logging.getLogger(__name__)

GIB = 2**30
KEPT_FREE = 10 * GIB
"""Memory of the machine that is left to everything else, in bytes."""
PARTS = 4
"""The region takes one part in so many of the machine's memory, unless its size is set."""
TOUCHING = 16
"""Threads that touch the region, at most: one alone gets 1.5 to 4 GiB a second from the operating system."""
TOUCHED = GIB // 4
"""Bytes that a thread touches at a time."""


# ---- how large the region may be ----


def memory_limit(root: Path = Path("/")) -> tuple[int, str]:
    """How much memory this process may use, in bytes, and what says so.

    A control group's limit counts before the machine's memory: some virtual machines show little memory at first, and
    get more as it is touched.

    Args:
        root: where `proc` and `sys` are mounted.
    """
    limits = [int(text) for text in _group_limits(root) if text.isdigit()]
    finite = [limit for limit in limits if limit < 2**60]  # version 1 says "none" by a number near 2**63
    if finite:
        return min(finite), "this process's control group"
    return _meminfo(root, "MemTotal"), "this machine's memory"


def _group_limits(root: Path) -> list[str]:
    """What the control groups of this process say, from its own to the outermost."""
    found = []
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            name = "memory.max" if not controllers else "memory.limit_in_bytes"
            top = root / "sys/fs/cgroup" / controllers
            group = top / path.lstrip("/")
            for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(top))):
                if (folder / name).is_file():
                    found.append((folder / name).read_text().strip())
    return found


def _meminfo(root: Path, name: str) -> int:
    """Bytes of a line of /proc/meminfo."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/meminfo has no line {name}: expected one; set host_gb (--policy) on another system")


def host_bytes(host_gb: float | None, root: Path = Path("/")) -> int:
    """The size of the region, in bytes.

    Args:
        host_gb: what the operator asks for, in GiB; None for a quarter of the memory that there is, and at most half of
            what is free.
        root: where `proc` and `sys` are mounted.

    Raises:
        ValueError: there is not as much memory.
    """
    limit, what = memory_limit(root)
    available = _meminfo(root, "MemAvailable")
    if host_gb is None:
        return min(min(limit, _meminfo(root, "MemTotal")) // PARTS, available // 2)
    wanted, most = int(host_gb * GIB), max(limit - KEPT_FREE, limit // PARTS)
    if wanted > most:
        raise ValueError(
            f"host_gb={host_gb}: {what} has {limit / GIB:.1f} GiB, of which {(limit - most) / GIB:.1f} GiB are left to"
            f" everything else: expected at most {most / GIB:.1f}; set --policy '{{\"host_gb\": N}}'"
        )
    if wanted > available:
        logger.warning("host_gb=%s: only %.1f GiB of memory are free at this moment", host_gb, available / GIB)
    return wanted


# ---- the region ----


def _mapped_for_gpu(size: int) -> mmap.mmap:
    """An anonymous mapping of so many bytes, in huge pages where the system gives them.

    Huge pages are touched and registered in fewer steps. Child processes do not get the mapping: the kernel would copy
    registered pages for them.
    """
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
        try:
            region.madvise(advice)
        except OSError as error:
            logger.info("the system does not take advice %d for host memory: %s", advice, error)
    return region


def _cpus_nearby(root: Path = Path("/")) -> set[int]:
    """CPUs that this process may use and that have their own memory in common with the one that this thread runs on.

    Args:
        root: where `proc` and `sys` are mounted.

    Returns:
        All CPUs that this process may use where the system does not say which memory is theirs.
    """
    allowed = os.sched_getaffinity(0)
    try:
        here = int((root / "proc/thread-self/stat").read_text().rpartition(")")[2].split()[36])
    except OSError:  # sandboxes have no such file
        return allowed
    for path in (root / "sys/devices/system/node").glob("node*/cpulist"):
        bounds = [part.split("-") for part in path.read_text().strip().split(",") if part]
        cpus = {cpu for each in bounds for cpu in range(int(each[0]), int(each[-1]) + 1)}
        if here in cpus:
            return allowed & cpus or allowed
    return allowed


def _run_on(cpus: set[int]) -> None:
    """Have this thread run on some CPUs, if it may say so."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        logger.info("threads that touch host memory run on any CPU: %s", error)


def _touch(region: mmap.mmap) -> None:
    """Have the operating system provide all pages of the region, by several threads: registering it has one.

    A page lies in the memory of the CPU that touches it first, so all of them run near this one.
    """
    every, cpus = np.frombuffer(region, dtype=np.uint8)[:: mmap.PAGESIZE], _cpus_nearby()
    step = TOUCHED // mmap.PAGESIZE

    def touch(begin: int) -> None:
        every[begin : begin + step] = 0

    with ThreadPoolExecutor(min(TOUCHING, len(cpus)), initializer=_run_on, initargs=(cpus,)) as threads:
        list(threads.map(touch, range(0, len(every), step)))


def _unregister(region: torch.Tensor) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(region.data_ptr())


class HostBlocks:
    """The region, which of its blocks are held, and how many are promised.

    Args:
        caches: layer -> (keys [slots, kv_heads, head_dim], values [slots, kv_heads, value_dim]) of the KV cache.
        block: tokens of a block.
        size: of the region, in bytes.

    Raises:
        ValueError: the region has no room for one block, or CUDA cannot register it.

    Attributes:
        keys: layer -> [blocks, block, kv_heads, head_dim] on the host, dtype of the KV cache.
        values: layer -> [blocks, block, kv_heads, value_dim], likewise.
        total: number of blocks.
        block_bytes: bytes of a block in all layers.
        promised: blocks that streams may still take.
        taken: blocks that were written, so far.
        fetched: blocks that layers have read in plain PyTorch, and for forks; each layer's counted.
    """

    def __init__(self, caches: Mapping[int, tuple[torch.Tensor, torch.Tensor]], block: int, size: int) -> None:
        flat = [tensor for pair in caches.values() for tensor in pair]
        token_bytes = sum(tensor[0].numel() * tensor.element_size() for tensor in flat)
        self.block_bytes = block * token_bytes
        self.total = size // self.block_bytes
        if self.total == 0:
            raise ValueError(
                f"{size / GIB:.4f} GiB of host memory, this rank's share of host_gb, have no room for a block, which"
                f" takes {self.block_bytes} bytes: set --policy '{{\"host_gb\": N}}' higher"
            )
        size = self.total * self.block_bytes
        self._region = _mapped_for_gpu(size) if flat[0].is_cuda else mmap.mmap(-1, size)
        self._whole = torch.frombuffer(self._region, dtype=torch.uint8)
        if flat[0].is_cuda:
            self._register()
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        begin = 0
        for layer, pair in caches.items():
            for tensor, kept in zip(pair, (self.keys, self.values), strict=True):
                shape = (self.total, block, *tensor.shape[1:])
                end = begin + self.total * block * tensor[0].numel() * tensor.element_size()
                kept[layer] = self._whole[begin:end].view(tensor.dtype).view(shape)
                begin = end
        self.promised = self.taken = self.fetched = 0
        self._free = list(range(self.total))  # a heap: neighbours are taken together, and copied together
        self._holders = np.zeros(self.total, dtype=np.int32)
        words = "%d blocks of %d tokens in %.2f GiB of host memory, this rank's share of host_gb"
        logger.info(words, self.total, block, begin / GIB)

    def _register(self) -> None:
        size, begin = self._whole.numel(), time.monotonic()
        _touch(self._region)
        touched = time.monotonic()
        status = int(torch.cuda.cudart().cudaHostRegister(self._whole.data_ptr(), size, 0))
        if status != 0:
            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            locked = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / GIB:.1f} GiB"
            raise ValueError(
                f"CUDA cannot register {size / GIB:.1f} GiB of host memory, this rank's share of host_gb (error"
                f" {status}): this process may lock {locked} (ulimit -l); raise that limit, or set --policy"
                " '{\"host_gb\": N}' lower"
            )
        seconds = (touched - begin, time.monotonic() - touched)
        logger.info("%.1f GiB of host memory were touched in %.1f s and registered in %.1f s", size / GIB, *seconds)
        # Memory that is unmapped while it is registered cannot be registered again at the same address.
        weakref.finalize(self, _unregister, self._whole).atexit = False

    def read(self, layer: int, numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) [tokens, kv_heads, dim], on the host, of the blocks of a layer with these numbers."""
        at = torch.tensor(numbers, dtype=torch.int64)
        return self.keys[layer][at].flatten(0, 1), self.values[layer][at].flatten(0, 1)

    def use(self, most: int) -> None:
        """Have so many blocks at most, of which none is held; the rest of the region is left alone.

        Raises:
            ValueError: a block is held.
        """
        if self.used:
            raise ValueError(
                f"{self.used} of {self.total} blocks on the host are held: expected none, before any stream"
            )
        self.total = min(self.total, most)
        self._free = list(range(self.total))

    def stats(self) -> Mapping[str, int]:
        """Counters, for /server_info and /metrics."""
        layer_bytes = self.block_bytes // len(self.keys)
        return {
            "host_blocks": self.used,
            "host_blocks_promised": self.promised,
            "host_blocks_total": self.total,
            "host_stored_bytes": self.taken * self.block_bytes,
            "host_fetched_bytes": self.fetched * layer_bytes,
        }

    @property
    def available(self) -> int:
        """Blocks that nobody holds and nobody was promised."""
        return len(self._free) - self.promised

    @property
    def used(self) -> int:
        """Blocks that are held."""
        return self.total - len(self._free)

    def lease(self, room: int = 0) -> HostLease:
        """A stream's, which holds nothing and may take so many blocks."""
        lease = HostLease(self)
        lease.extend(room)
        return lease

    def freed_by(self, leases: Iterable[HostLease]) -> int:
        """How many blocks more would be available without some leases."""
        kept = list(leases)
        held = np.zeros_like(self._holders)
        for lease in kept:
            held[np.asarray(lease.ids)] += 1
        ends = int(np.count_nonzero((held > 0) & (held == self._holders)))
        return ends + sum(lease.room for lease in kept)

    # ---- for leases ----

    def _take(self) -> int:
        number = heapq.heappop(self._free)
        self._holders[number] = 1
        self.promised -= 1
        self.taken += 1
        return number

    def _hold(self, ids: array[int]) -> None:
        self._holders[np.asarray(ids)] += 1

    def _release(self, ids: array[int]) -> None:
        numbers = np.asarray(ids)
        self._holders[numbers] -= 1
        for number in numbers[self._holders[numbers] == 0].tolist():
            heapq.heappush(self._free, number)


class HostLease:
    """The blocks of one stream.

    Attributes:
        ids: [blocks] 32-bit, different numbers: of the blocks that it holds, in the order in which their tokens left
            the window.
        room: how many more it may take.
    """

    def __init__(self, blocks: HostBlocks) -> None:
        self.blocks, self.ids, self.room = blocks, array("i"), 0

    def extend(self, room: int) -> None:
        """Promise the stream so many blocks more.

        Raises:
            RuntimeError: there are not as many; admission did not count them.
        """
        if room > self.blocks.available:
            raise RuntimeError(
                f"a stream was admitted with {room} blocks of host memory, and {self.blocks.available} are available"
            )
        self.room += room
        self.blocks.promised += room

    def take(self) -> int:
        """The number of one block more.

        Raises:
            RuntimeError: the stream was promised no more.
        """
        if self.room == 0:
            raise RuntimeError(f"a stream with {len(self.ids)} blocks of host memory was promised no more")
        self.room -= 1
        self.ids.append(self.blocks._take())
        return self.ids[-1]

    def settle(self) -> None:
        """Take back what was promised and not taken: the stream does not grow for now."""
        self.blocks.promised -= self.room
        self.room = 0

    def fork(self, count: int) -> HostLease:
        """A lease of another stream that begins like this one: it holds the first `count` blocks, too."""
        lease = HostLease(self.blocks)
        lease.ids = self.ids[:count]
        self.blocks._hold(lease.ids)
        return lease

    def release(self) -> None:
        """Let go of everything: the stream has ended."""
        self.settle()
        self.blocks._release(self.ids)
        self.ids = array("i")
