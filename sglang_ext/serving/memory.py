"""Memory that a large piece of work has freed goes back to the system."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable
from functools import cache


@cache
def _trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim; None where the C library has none (musl, macOS), which gives memory back by itself."""
    name = ctypes.util.find_library("c")
    try:
        found: Callable[[int], int] = ctypes.CDLL(name).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return found


def give_back() -> None:
    """Give free memory of this process back to the system; takes milliseconds.

    glibc keeps what threads have freed for those threads, which end with each pool that is tokenized: without this, a
    server kept three times the size of every body it had read.
    """
    trim = _trim()
    if trim is not None:
        trim(0)
