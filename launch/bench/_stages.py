"""Where the time of a round of requests goes: what the GPU does in it by kind, and what the host does beside it.

SGLang's profiler writes a trace; its GPU events are sorted into stages by the names of the kernels. A profiled round is
slower than one that is measured: shares count, not times.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ext.types import JsonObject

if TYPE_CHECKING:
    from sglang_ext.names import Engine


GPU_STAGES = (
    ("rotation", ("_rotate",)),
    ("merge", ("_merge", "MergeState")),
    ("planning", ("_gather_slots", "_straight", "_angles", "_advance")),
    ("attention", ("_attend", "PrefillWithKVCache", "PagedKVCacheKernel", "RaggedKVCacheKernel", "DecodeWithPaged")),
    ("matrix products", ("nvjet", "gemm", "Gemm", "GEMM", "cutlass", "splitK", "cublas")),
)
"""Stage -> parts of kernel names, the first that fits. `planning` is what is left of a plan on the GPU."""
REST, IDLE = "other kernels", "idle: scheduling, launching"
WAIT_SECONDS = 30.0
_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")


def stage_of(kernel: str) -> str:
    """The stage that a kernel belongs to."""
    return next((stage for stage, parts in GPU_STAGES if any(part in kernel for part in parts)), REST)


def gpu_stages(events: Iterable[JsonObject]) -> dict[str, float]:
    """Seconds of each stage of a trace's events, of none (`IDLE`: the GPU waits for the host) and of all (`span`).

    Kernels that run at one time count once, for the one that began first. Empty when there are no GPU events.
    """
    work = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("cat") in _EVENTS and "dur" in e)
    if not work:
        return {}
    found = dict.fromkeys((*(stage for stage, _ in GPU_STAGES), REST, IDLE), 0.0)
    begin = until = work[0][0]
    for start, end, name in work:
        found[IDLE] += max(0.0, start - until)
        found[stage_of(name)] += max(0.0, end - max(start, until))
        until = max(until, end)
    return {**{name: micro * 1e-6 for name, micro in found.items()}, "span": (until - begin) * 1e-6}


def profiled(engine: Engine, work: Callable[[], None]) -> dict[str, float]:
    """`gpu_stages` of what `work` has the engine do.

    Raises:
        RuntimeError: the profiler wrote no trace within half a minute.
    """
    with tempfile.TemporaryDirectory(prefix="sglang-ext-trace-") as folder:
        engine.start_profile(output_dir=folder, activities=["CPU", "GPU"], with_stack=False, record_shapes=False)
        try:
            work()
        finally:
            engine.stop_profile()
        return gpu_stages(_events(Path(folder)))


def _events(folder: Path) -> list[JsonObject]:
    """Events of the trace that appears in `folder`: one file a rank, the first of them."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        for path in sorted(folder.rglob("*.json.gz")):
            try:
                events: list[JsonObject] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
                return events
            except (EOFError, OSError, ValueError):
                break  # still being written
        time.sleep(0.2)
    raise RuntimeError(f"SGLang's profiler wrote no trace to {folder} within {WAIT_SECONDS:g} seconds")


def table(rounds: Mapping[str, Mapping[str, float]]) -> str:
    """Rounds side by side as a Markdown table, milliseconds a request and stage."""
    names = list(dict.fromkeys(name for stages in rounds.values() for name in stages))
    lines = [f"| stage, ms a request | {' | '.join(rounds)} |", "|---|" + "---|" * len(rounds)]
    for name in names:
        cells = (f"{stages[name] * 1e3:.3g}" if name in stages else "" for stages in rounds.values())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
