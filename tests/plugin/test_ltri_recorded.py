"""A CUDA graph does not keep alive what it did not allocate: whoever records one must keep what it reads and writes.

References stand for kernels here, so buffers of kernels are not seen. `test_ltri_lanes.py` looks at several streams.
"""

from __future__ import annotations

import gc
import sys
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
    """Notes the storages of tensors that operations are given, and that were there before the recording at hand.

    Attributes:
        given: of all recordings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.given: list[StorageWeakRef] = []
        self._known: dict[int, StorageWeakRef] = {}  # a weak reference keeps another storage from the same address

    def begin(self) -> None:
        """Another recording begins: what the one before has made was there before it."""
        self._known = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = self._new((args, kwargs))
        made = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.lift_fresh.default or not is_constant(args[0]):
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


def is_constant(tensor: torch.Tensor) -> bool:
    """Whether a tensor that was made of numbers is one number, or a reference's, which kernels do not have."""
    frame, names = sys._getframe(), set[str]()
    while frame.f_back is not None:
        frame = frame.f_back
        names.add(frame.f_code.co_filename.rsplit("/", 1)[-1])
    return tensor.dim() == 0 or "reference.py" in names


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Storages:
    """Recordings, as a GPU makes them: they run what they are given once, and do not keep it."""
    storages = Storages()

    def record(recorder: GraphRecorder, body: Callable[[], None]) -> Callable[[], None]:
        storages.begin()
        with storages:
            body()
        return lambda: None

    monkeypatch.setattr(GraphRecorder, "record", record)
    return storages


def lost(storages: Storages) -> int:
    """Storages that recordings were given and nobody has any more."""
    gc.collect()
    return sum(each.expired() for each in storages.given)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"similarity": "mass", "vote": "preceding"},
        {"heads": "file"},
        {"heads": "file", "similarity": "max", "four_bits": True},
        {"renewed": 2, "retrieved": 4},
        {"index": "mean"},
        {"sinks": 0},
    ],
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
    kept, left, made = torch.zeros(3), torch.zeros(3), list[torch.Tensor]()

    def body(kept: torch.Tensor = kept, left: torch.Tensor = left) -> None:
        made.append(kept + left)

    def of_another() -> None:
        made[0].add_(1)

    recorder = GraphRecorder(torch.device("cpu"))
    recorder.record(body)
    recorder.record(of_another)
    assert len(recorded.given) == 3 and lost(recorded) == 0
    made.clear()
    assert lost(recorded) == 1, "what one recording has made, and another one reads"
    del body
    del left
    assert lost(recorded) == 2 and kept is not None
