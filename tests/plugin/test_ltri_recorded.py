"""A CUDA graph holds no memory that it did not allocate: whoever records one must keep what it reads and writes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_ext.attention.ltri_block_ends import BlockEnds
from sglang_ext.attention.ltri_graphs import GraphRecorder
from tests.plugin.test_ltri_kernels import HEADS, both


class Storages(TorchDispatchMode):
    """Notes the storages of tensors that operations are given, and those that they make.

    Attributes:
        given: [weak references], of those that were there before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given: list[StorageWeakRef] = []
        self._known: dict[int, StorageWeakRef] = {}  # a weak reference keeps another storage from the same address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = self._new((args, kwargs))
        made = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.lift_fresh.default:  # constants of references, which kernels do not have
            self.given += given
        self._new(made)
        return made

    def _new(self, values: Any) -> list[StorageWeakRef]:
        found = []
        for each in tree_leaves(values):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in self._known:
                found.append(StorageWeakRef(each.untyped_storage()))
                self._known[each.untyped_storage()._cdata] = found[-1]
        return found


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Storages:
    """Recordings, as a GPU makes them: they run what they are given once, and do not keep it."""
    storages = Storages()

    def record(recorder: GraphRecorder, body: Callable[[], None]) -> Callable[[], None]:
        with storages:
            body()
        return lambda: None

    monkeypatch.setattr(GraphRecorder, "record", record)
    return storages


def lost(storages: Storages) -> int:
    gc.collect()
    return sum(each.expired() for each in storages.given)


@pytest.mark.parametrize(
    "changes",
    [{}, {"similarity": "mass", "vote": "preceding"}, {"index": "mean"}, {"sinks": 0}],
    ids=str,
)
def test_chunks(changes: dict[str, Any], recorded: Storages, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    _, kernels = both(monkeypatch, tmp_path, changes, places=4)
    assert kernels.chunks._graphs is not None and len(recorded.given) > 50
    assert lost(recorded) == 0


def test_block_ends(recorded: Storages, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    _, kernels = both(monkeypatch, tmp_path, {}, places=0)
    chunks = kernels.chunks
    ends = BlockEnds(chunks.settings, kernels.caches, chunks.voters, chunks.stores, chunks.slot, HEADS)
    ends.record(kernels.policy.blocks_on_host)
    assert len(recorded.given) > 10 and ends is not None
    assert lost(recorded) == 0


def test_what_nobody_keeps_is_found(recorded: Storages) -> None:
    kept, left = torch.zeros(3), torch.zeros(3)
    GraphRecorder(torch.device("cpu")).record(lambda kept=kept, left=left: (kept + left).sum() and None)
    assert lost(recorded) == 0
    del left
    assert lost(recorded) == 1 and kept is not None
