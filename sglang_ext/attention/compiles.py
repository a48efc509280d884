"""Kernels that Triton compiles while requests wait: every token of every request waits for them.

A server compiles at its start what it knows that it will need. What it did not know is said in its log, by name, and
counted for /server_info: a benchmark, or an operator, can tell a slow kernel from one that was being compiled.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import triton

from sglang_ext.types import JsonObject

logger = logging.getLogger(__name__)


@dataclass
class Compiles:
    """What was compiled since the first request ended.

    Attributes:
        kernels: how many.
        seconds: that they took.
    """

    kernels: int = 0
    seconds: float = 0.0

    def __call__(self, *, src: Any, times: Any, cache_hit: bool, **_: object) -> None:
        """Triton's listener: it is told of every kernel that is compiled, or read from the cache on disk."""
        if cache_hit:
            return
        seconds = times.total / 1e6
        self.kernels, self.seconds = self.kernels + 1, self.seconds + seconds
        logger.warning(
            "requests waited %.1f s for Triton to compile the kernel %s, which the server did not compile at its start;"
            " from now on it is there",
            seconds,
            src.name,
        )

    def record(self) -> JsonObject:
        """For /server_info."""
        return {"kernels": self.kernels, "seconds": round(self.seconds, 3)}


COMPILES = Compiles()
"""Of this process: Triton has one listener."""


def watch(_slot: int) -> None:
    """A request ended: what is compiled from now on makes others wait. Does nothing the second time."""
    if triton.knobs.compilation.listener is None:  # somebody else's stays
        triton.knobs.compilation.listener = COMPILES
