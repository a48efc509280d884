"""Simulated CUDA streams: which launches on them would run beside each other, and whether that is safe.

Launches run on the CPU in the order of the program. Each notes which elements it reads and writes, and what was before
it on its stream and on those that its stream has waited for (a vector clock). Two launches that touch one element, one
of which writes it, must be in an order. PyTorch gives memory that nobody holds to the next launch on the stream that it
came from: what another stream has done with it must be before that launch. References stand for kernels, so this sees
the memory that references read and write, and nothing of buffers inside kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_ext.attention.ltri_state import Lane, Lanes

LANES = ("gather", "window", "tiles", "received", "memory", "index", "choice", "back", "beyond")
BY_INDEX = {"index_select": 2, "index_add_": 2, "index_copy_": 2, "index_fill_": 2, "gather": 2}
"""Operations on the elements that an index names along a dimension -> where the index is among the arguments."""


class FakeStream:
    """A stream: `clock` has how many launches of each stream are before the next one here."""

    def __init__(self, name: str) -> None:
        self.name, self.device, self.clock = name, torch.device("cpu"), dict[str, int]()

    def record_event(self) -> dict[str, int]:
        return dict(self.clock)

    def wait_event(self, event: dict[str, int]) -> None:
        for name, count in event.items():
            self.clock[name] = max(count, self.clock.get(name, 0))

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.clock)

    def launch(self) -> int:
        """The number of a launch here."""
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.clock[self.name]

    def is_behind(self, name: str, number: int) -> bool:
        """Whether the next launch here is behind a launch of a stream."""
        return number <= self.clock.get(name, 0)


@dataclass(frozen=True)
class Access:
    """What a launch does with a storage.

    Attributes:
        stream, number, what: the launch.
        writes: whether it writes.
        tensor: which part of the storage, without its values.
        touched: the addresses of the elements, where an index names them; else those of all of `tensor`.
    """

    stream: str
    number: int
    what: str
    writes: bool
    tensor: torch.Tensor
    touched: np.ndarray[Any, Any] | None

    def addresses(self) -> np.ndarray[Any, Any]:
        return addresses_of(self.tensor).numpy().reshape(-1) if self.touched is None else self.touched


@dataclass
class Memory:
    """A storage.

    Attributes:
        there: whether anybody holds it.
        origin: the stream that it came from; None for one that was there before.
        accesses: what was done with it.
    """

    there: StorageWeakRef
    origin: str | None
    accesses: list[Access] = field(default_factory=list)


def addresses_of(like: torch.Tensor) -> torch.Tensor:
    """[shape of a meta tensor] int64, the first byte of each element in its storage."""
    found = torch.full(like.shape, like.storage_offset(), dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        steps = torch.arange(size) * stride
        found = found + steps.view(-1, *[1] * (like.dim() - dim - 1))
    return found * like.element_size()


class Races(TorchDispatchMode):
    """Finds races among launches on fake streams.

    Attributes:
        found: what was found, in words.
        launches: by stream.
        lanes: that run on the streams.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lanes: list[Lane] = []
        self.found: list[str] = []
        self.launches = dict[str, int]()
        self.current = FakeStream("main")
        self._memories = dict[int, Memory]()
        self._free: list[Memory] = []
        self._busy = False

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """`torch.cuda.stream`."""
        before, self.current = self.current, stream
        yield
        self.current = before

    def begin(self, streams: list[FakeStream]) -> None:
        """All that was launched before has ended."""
        self._memories, self._free = {}, []
        for each in (self.current, *streams):
            each.clock = {}

    def end(self, streams: list[FakeStream]) -> None:
        """What follows on the main stream follows all."""
        for each in streams:
            if not self.current.is_behind(each.name, each.clock.get(each.name, 0)):
                self.found.append(f"nobody waits for the end of {each.name}")
        self.found += ["a lane holds what it has read for ever" for each in self.lanes if each._held]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._busy or is_view(func):
            return func(*args, **kwargs)
        self._busy = True
        try:
            number = self.current.launch()
            self.launches[self.current.name] = self.launches.get(self.current.name, 0) + 1
            written = {id(each) for each in tree_leaves(written_by(func, args, kwargs)) if torch.is_tensor(each)}
            for each in tree_leaves((args, kwargs)):
                if torch.is_tensor(each) and each.numel():
                    touched = touched_of(func, args, each) if each is args[0] else None
                    self._access(each, func.__name__, number, id(each) in written, touched)
            made = func(*args, **kwargs)
            known = {id(each) for each in tree_leaves((args, kwargs))}
            for each in tree_leaves(made):
                if torch.is_tensor(each) and each.numel() and id(each) not in known:
                    self._made(each, func.__name__, number)
            return made
        finally:
            self._busy = False

    def _made(self, tensor: torch.Tensor, what: str, number: int) -> None:
        key = tensor.untyped_storage()._cdata
        if key not in self._memories or self._memories[key].there.expired():
            self._freed()
            for memory in self._free:
                late = [each for each in memory.accesses if not self.current.is_behind(each.stream, each.number)]
                if memory.origin == self.current.name and late:
                    self.found.append(f"{what} on {memory.origin} may get memory that {told(late[0])} still has")
            self._free = [each for each in self._free if each.origin != self.current.name]
            self._memories[key] = Memory(StorageWeakRef(tensor.untyped_storage()), self.current.name)
        self._access(tensor, what, number, True, None)

    def _freed(self) -> None:
        for key, memory in list(self._memories.items()):
            if memory.there.expired():
                del self._memories[key]
                if memory.origin is not None:
                    self._free.append(memory)

    def _access(
        self, tensor: torch.Tensor, what: str, number: int, writes: bool, touched: np.ndarray[Any, Any] | None
    ) -> None:
        key = tensor.untyped_storage()._cdata
        if key not in self._memories or self._memories[key].there.expired():
            self._freed()
            self._memories[key] = Memory(StorageWeakRef(tensor.untyped_storage()), None)
        memory, shape = self._memories[key], torch.empty(0, dtype=tensor.dtype, device="meta")
        like = shape.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        access = Access(self.current.name, number, what, writes, like, touched)
        for other in memory.accesses:
            unordered = not self.current.is_behind(other.stream, other.number)
            if unordered and (writes or other.writes) and meet(access, other):
                self.found.append(f"{told(access)} and {told(other)}")
        memory.accesses.append(access)


def meet(one: Access, other: Access) -> bool:
    """Whether two launches touch the same element."""
    return bool(np.intersect1d(one.addresses(), other.addresses()).size)


def told(access: Access) -> str:
    return f"{access.what} {access.number} on {access.stream} ({'writes' if access.writes else 'reads'})"


def is_view(func: Any) -> bool:
    """Whether an operation launches nothing: what it returns is a part of what it was given."""
    returned = [each.alias_info for each in func._schema.returns]
    return bool(returned) and all(each is not None and not each.is_write for each in returned)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation writes."""
    named = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    return [named[a.name] for a in func._schema.arguments if a.name in named and a.alias_info and a.alias_info.is_write]


def touched_of(func: Any, args: Any, tensor: torch.Tensor) -> np.ndarray[Any, Any] | None:
    """The addresses of the elements of its first argument that an operation reads or writes; None for all."""
    name = func._schema.name.removeprefix("aten::")
    if name not in BY_INDEX and name not in ("index", "index_put_"):
        return None
    shape = torch.empty(0, dtype=tensor.dtype, device="meta")
    places = addresses_of(shape.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()))
    if name == "gather":
        return places.gather(args[1], args[2]).numpy().reshape(-1)
    if name in BY_INDEX:
        return places.index_select(args[1], args[BY_INDEX[name]]).numpy().reshape(-1)
    return torch.ops.aten.index.Tensor(places, args[1]).numpy().reshape(-1)


def watch(monkeypatch: pytest.MonkeyPatch) -> tuple[Races, list[FakeStream]]:
    """Have lanes run on fake streams; (what finds races among them, the streams)."""
    if (names := tuple(each.name for each in fields(Lanes))) != LANES:
        raise ValueError(f"lanes are {names}, and those that are watched {LANES}")
    races, streams = Races(), [FakeStream(name) for name in LANES]
    listed = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: listed(tensor.clone()))  # a read that modes do not see
    races.lanes = [Lane(each) for each in streams]  # type: ignore[arg-type]
    lanes = partial(Lanes, *races.lanes)
    monkeypatch.setattr(Lanes, "beside", lambda device: lanes())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: races.current)
    monkeypatch.setattr(torch.cuda, "stream", races.stream)
    return races, streams
