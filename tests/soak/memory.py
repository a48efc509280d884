"""Resident memory of a server's processes, by kind."""

from __future__ import annotations

import contextlib

import psutil

MIB = 2**20


def kind_of(process: psutil.Process) -> str:
    """`scheduler`, `detokenizer`, or `http` for the rest of SGLang's processes."""
    first = (process.cmdline() or [""])[0]
    if first.startswith("sglang::"):
        return first.removeprefix("sglang::")
    return "resource_tracker" if "resource_tracker" in " ".join(process.cmdline()) else "http"


def resident(pid: int) -> dict[str, float]:
    """MiB of each process of the server that `pid` began."""
    itself = psutil.Process(pid)
    found: dict[str, float] = {}
    for process in [itself, *itself.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            kind = kind_of(process)
            found[kind] = round(found.get(kind, 0.0) + process.memory_info().rss / MIB, 1)
    return found


def grown(half: dict[str, float], end: dict[str, float], share: float) -> list[str]:
    """Processes whose memory at the end is not within `share` of that at half time, in words."""
    return [
        f"resident memory of {kind}: {half[kind]} MiB at half time, {end.get(kind, 0.0)} MiB at the end"
        for kind in half
        if kind != "resource_tracker" and abs(end.get(kind, 0.0) - half[kind]) > share * half[kind]
    ]
