"""Host memory in blocks without an engine: how large it may be, who holds what, and what is refused."""

from __future__ import annotations

import mmap
import re
import resource
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_ext.attention.ltri_copies import stretches
from sglang_ext.cache import host_blocks
from sglang_ext.cache.host_blocks import GIB, HostBlocks, host_bytes, memory_limit
from tests.plugin.test_ltri_room import OnGPU

CACHES = {
    0: (torch.zeros(1, 2, 6), torch.zeros(1, 2, 4)),
    3: (torch.zeros(1, 2, 6, dtype=torch.float16), torch.zeros(1, 2, 4, dtype=torch.float16)),
}
BLOCK, BLOCK_BYTES = 5, 5 * 2 * (6 + 4) * (4 + 2)


def machine(root: Path, total: int, available: int, groups: dict[str, str] | None = None, own: str = "0::/") -> Path:
    """A file system with so many GiB of memory, and the limits of control groups by the path of their file."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal:  {total * 2**20} kB\nMemFree:  1 kB\nMemAvailable:  {available * 2**20} kB\n"
    )
    (root / "proc/self/cgroup").write_text(own + "\n")
    for path, text in (groups or {}).items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


def test_the_machine_or_its_control_group_says_how_much_memory_there_is(tmp_path: Path) -> None:
    plain = machine(tmp_path / "plain", 64, 50)
    assert memory_limit(plain) == (64 * GIB, "this machine's memory")
    limits = {"memory.max": "max", "a/memory.max": str(40 * GIB), "a/b/memory.max": "max"}
    grouped = machine(tmp_path / "grouped", 64, 50, limits, "0::/a/b")
    assert memory_limit(grouped) == (40 * GIB, "this process's control group")
    old = {"memory/a/memory.limit_in_bytes": str(30 * GIB), "memory/memory.limit_in_bytes": str(2**63 - 4096)}
    assert memory_limit(machine(tmp_path / "old", 64, 50, old, "5:memory:/a\n3:cpu:/b"))[0] == 30 * GIB
    assert memory_limit(machine(tmp_path / "none", 64, 50, {"memory.max": "max"}))[0] == 64 * GIB
    # Memory that grows as it is touched: the group's limit is larger than what the machine shows.
    grows = machine(tmp_path / "grows", 31, 28, {"memory.max": str(256 * GIB)})
    assert host_bytes(200, grows) == 200 * GIB
    assert host_bytes(None, grows) == 31 * GIB // 4
    assert host_bytes(None, machine(tmp_path / "full", 64, 20)) == 10 * GIB


def test_the_size_is_a_quarter_or_what_leaves_ten_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []  # SGLang, where a test has started it in this process, sets up logging anew
    monkeypatch.setattr(host_blocks.logger, "warning", lambda text, *values: warnings.append(text % values))
    root = machine(tmp_path / "large", 64, 50)
    assert host_bytes(None, root) == 16 * GIB
    assert host_bytes(50, root) == 50 * GIB and not warnings
    assert host_bytes(54, root) == 54 * GIB
    assert warnings == ["host_gb=54: only 50.0 GiB of memory are free at this moment"]  # it may be given back
    with pytest.raises(ValueError, match=r"host_gb=54.5: this machine's memory has 64.0 GiB, of which 10.0 GiB"):
        host_bytes(54.5, root)
    small = machine(tmp_path / "small", 8, 8)
    assert host_bytes(2, small) == 2 * GIB
    with pytest.raises(ValueError, match=r"of which 6.0 GiB are left to everything else: expected at most 2.0"):
        host_bytes(3, small)


def test_a_region_of_blocks() -> None:
    host = HostBlocks(CACHES, BLOCK, 3 * BLOCK_BYTES + BLOCK_BYTES - 1)
    assert (host.total, host.block_bytes, host.available, host.used) == (3, BLOCK_BYTES, 3, 0)
    for layer, (keys, values) in CACHES.items():
        assert host.keys[layer].shape == (3, BLOCK, 2, 6) and host.keys[layer].dtype == keys.dtype
        assert host.values[layer].shape == (3, BLOCK, 2, 4) and host.values[layer].dtype == values.dtype
    tensors = [*host.keys.values(), *host.values.values()]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors)), "they overlap"
    with pytest.raises(ValueError, match=f"no room for a block, which takes {BLOCK_BYTES} bytes"):
        HostBlocks(CACHES, BLOCK, BLOCK_BYTES - 1)


def test_what_is_promised_is_there() -> None:
    host = HostBlocks(CACHES, BLOCK, 6 * BLOCK_BYTES)
    first, second = host.lease(4), host.lease()
    assert (host.available, host.promised, host.used) == (2, 4, 0)
    with pytest.raises(RuntimeError, match="admitted with 3 blocks of host memory, and 2 are available"):
        second.extend(3)
    second.extend(2)
    taken = [first.take(), second.take(), first.take()]
    assert len(set(taken)) == 3 and list(first.ids) == [taken[0], taken[2]]
    assert (host.available, host.promised, host.used) == (0, 3, 3)
    second.take()
    with pytest.raises(RuntimeError, match="with 2 blocks of host memory was promised no more"):
        second.take()
    first.settle()
    assert (host.available, host.promised, host.used) == (2, 0, 4)
    second.release()
    assert (host.available, len(second.ids), host.used) == (4, 0, 2)
    assert host.stats()["host_blocks"] == 2 and host.stats()["host_blocks_total"] == 6
    first.release()
    assert (host.available, host.used) == (6, 0)


def test_what_streams_left_is_taken_in_order() -> None:
    """However streams end: neighbours are copied to the host together."""
    host = HostBlocks(CACHES, BLOCK, 6 * BLOCK_BYTES)
    leases = [host.lease(2) for _ in range(3)]
    for lease in leases:
        lease.take(), lease.take()
    for lease in (leases[1], leases[2], leases[0]):
        lease.release()
    other = host.lease(6)
    assert [other.take() for _ in range(6)] == list(range(6))
    assert [*stretches([(0, 4), (1, 5), (2, 7), (4, 8)])] == [(0, 4, 2), (2, 7, 1), (4, 8, 1)]
    assert [*stretches([])] == []


def test_forks_hold_what_they_share() -> None:
    host = HostBlocks(CACHES, BLOCK, 6 * BLOCK_BYTES)
    first = host.lease(4)
    for _ in range(3):
        first.take()
    fork = first.fork(2)
    assert fork.ids == first.ids[:2] and fork.room == 0 and host.used == 3
    fork.extend(1)
    fork.take()
    assert host.used == 4 and host.available == 1
    # The first holds one block alone, and was promised one.
    assert host.freed_by([first]) == 2 and host.freed_by([fork]) == 1 and host.freed_by([first, fork]) == 5
    shared = first.ids[:2]
    first.release()
    assert host.used == 3 and fork.ids[:2] == shared
    fork.release()
    assert host.used == 0 and host.available == 6


def test_every_page_of_the_region_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the last one, where threads have unequal shares."""
    monkeypatch.setattr(host_blocks, "TOUCHED", 2**20)
    size = 5 * 2**19 + mmap.PAGESIZE
    monkeypatch.setattr(host_blocks.os, "sched_setaffinity", _refuse)
    region = host_blocks._mapped_for_gpu(size)
    before = _resident(region)
    host_blocks._touch(region)
    assert before == 0 and _resident(region) >= size
    assert not np.frombuffer(region, dtype=np.uint8).any()


@pytest.mark.parametrize(
    ("limit", "said"), [(resource.RLIM_INFINITY, "unlimited"), (2**29, "0.5 GiB")], ids=["unlimited", "limited"]
)
def test_memory_that_cuda_cannot_register(limit: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the process may lock less (`ulimit -l`); 2 stands for CUDA's error of memory."""
    refusing = SimpleNamespace(cudaHostRegister=lambda *_: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    monkeypatch.setattr(host_blocks.resource, "getrlimit", lambda _: (limit, limit))
    keys = torch.zeros(10, 2, 16).as_subclass(OnGPU)
    with pytest.raises(ValueError, match=rf"register 0.0 GiB of host memory.*error 2\).*may lock {said} \(ulimit -l\)"):
        HostBlocks({0: (keys, keys)}, 4, 2**20)


def test_cpus_that_share_memory_with_the_one_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_blocks.os, "sched_getaffinity", lambda _: {1, 2, 5, 6})
    assert host_blocks._cpus_nearby(tmp_path) == {1, 2, 5, 6}  # there is no such file
    stat = tmp_path / "proc/thread-self/stat"
    stat.parent.mkdir(parents=True)
    stat.write_text("12 (a name) with) S " + "0 " * 35 + "6 0 0\n")
    assert host_blocks._cpus_nearby(tmp_path) == {1, 2, 5, 6}
    for number, cpus in enumerate(("0-1,4-5", "2-3,6-7,9", "")):
        node = tmp_path / f"sys/devices/system/node/node{number}/cpulist"
        node.parent.mkdir(parents=True)
        node.write_text(cpus + "\n")
    assert host_blocks._cpus_nearby(tmp_path) == {2, 6}
    stat.write_text("12 (a name) with) S " + "0 " * 35 + "9 0 0\n")
    assert host_blocks._cpus_nearby(tmp_path) == {2, 6}
    assert host_blocks._cpus_nearby() == {1, 2, 5, 6} & host_blocks._cpus_nearby()


def _refuse(*_: object) -> None:
    raise PermissionError("not here")


def _resident(region: mmap.mmap) -> int:
    """Bytes that the operating system has provided."""
    begin = np.frombuffer(region, dtype=np.uint8).ctypes.data
    text = Path("/proc/self/smaps").read_text()
    own = re.search(rf"^{begin:x}-.*?^Rss: +(\d+) kB", text, re.MULTILINE | re.DOTALL)
    return int(own[1]) * 1024 if own else 0
