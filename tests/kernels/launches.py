"""What Triton kernels would be compiled for: which launches of the interpreter a device would compile anew."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

Kind = tuple[Any, ...]


def kind(value: Any, specialized: bool) -> Any:
    """What an argument of a launch adds to the name by which Triton knows compiled code.

    A tensor's type, and whether it begins at 16 bytes; of a whole number that it is 1, or a multiple of 16.
    """
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, bool) or not isinstance(value, int):
        return type(value).__name__
    width = "int32" if -(1 << 31) <= value < 1 << 31 else "int64"
    return (width, value == 1, value % 16 == 0) if specialized else width


def compiled(monkeypatch: pytest.MonkeyPatch) -> set[Kind]:
    """Kernels, each with what it would be compiled for, that are launched from here on."""
    found: set[Kind] = set()
    run = InterpretedFunction.run

    def noted(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        names, free = self.arg_names, self.kwargs.get("do_not_specialize") or ()
        constants = {name for name, of in self.fn.__annotations__.items() if "constexpr" in str(of)}
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        kinds = tuple(
            (name, value if name in constants or name not in names else kind(value, name not in free))
            for name, value in sorted(given.items())
        )
        found.add((self.fn.__module__.rpartition("kernels.")[2], self.__name__, kinds))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    return found


def different(new: Collection[Kind], known: Collection[Kind]) -> list[str]:
    """Launches that `known` has not, each by what sets it apart from the most similar one of its kernel."""
    words = []
    for each in sorted(set(new) - set(known), key=str):
        others = [other for other in known if other[:2] == each[:2]]
        apart = min((sorted(set(each[2]) - set(other[2]), key=str) for other in others), key=len, default=["never ran"])
        words.append(f"{each[0]}.{each[1]}: {apart}")
    return words
