"""What a load costs a server: time of its processors and of its GPU, and requests that run at a time."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
import torch

from sglang_ext.launch.client import ServerError
from sglang_ext.launch.demo_server import Server
from sglang_ext.types import JsonObject

LOOK_SECONDS = 0.5
"""Between two looks at a server."""


@dataclass
class Cost:
    """What a load cost a server.

    Attributes:
        processor_seconds: of all of its processes.
        busy: shares of time in which the first GPU had work, one a look; none without a GPU.
        running: requests that ran, one number a look.
        compiled: seconds for which requests waited for Triton; 0 where the server does not count them.
        failed: what ended the looks before the load did.
    """

    processor_seconds: float = 0.0
    busy: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    compiled: float = 0.0
    failed: Exception | None = None

    def record(self, requests: int) -> JsonObject:
        """For a results file: of a load of so many requests."""
        return {
            "processor_ms_a_request": 1e3 * self.processor_seconds / max(1, requests),
            "gpu_busy": statistics.fmean(self.busy) if self.busy else None,
            "most_running": max(self.running, default=0),
            "compiled_seconds": self.compiled,
        }


@contextmanager
def watched(server: Server) -> Iterator[Cost]:
    """Look at a server until the block ends.

    Args:
        server: with the number of its process.

    Raises:
        ServerError: the server did not say what runs.
    """
    cost, over = Cost(-_processor_seconds(server.pid), compiled=-_compiled_seconds(server)), threading.Event()
    looking = threading.Thread(target=_look, args=(server, cost, over), daemon=True)
    looking.start()
    try:
        yield cost
    finally:
        over.set()
        looking.join()
    cost.processor_seconds += _processor_seconds(server.pid)
    cost.compiled += _compiled_seconds(server)
    if cost.failed is not None:
        raise cost.failed


def _look(server: Server, cost: Cost, over: threading.Event) -> None:
    gpu = torch.cuda.is_available()
    try:
        while not over.wait(LOOK_SECONDS):
            cost.running.append(sum(running for running, _ in _under_way(server)))
            if gpu:
                cost.busy.append(torch.cuda.utilization(0) / 100)
    except ServerError as error:
        cost.failed = error


def _under_way(server: Server) -> list[tuple[int, int]]:
    """(requests that run, requests that wait) of each scheduler."""
    loads: JsonObject = server.call("GET", "/v1/loads")
    return [(each["num_running_reqs"], each["num_waiting_reqs"]) for each in loads["loads"]]


def _compiled_seconds(server: Server) -> float:
    """For which requests have waited for Triton so far: our servers count it."""
    states: JsonObject = server.call("GET", "/server_info")
    ours = states["internal_states"][0].get("sglang_ext") or {}
    return float(ours.get("compiled", {}).get("seconds", 0.0))


def _processor_seconds(process: int) -> float:
    """Of a process and all that it started."""
    first = psutil.Process(process)
    found = 0.0
    for each in (first, *first.children(recursive=True)):
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        found += times.user + times.system
    return found


def settle(server: Server, seconds: float = 30.0) -> None:
    """Wait until no request runs or waits on a server.

    Raises:
        RuntimeError: some still do.
    """
    until, idle = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        idle = 0 if any(map(any, _under_way(server))) else idle + 1
        if idle > 1:  # between two chunks of a prompt none runs, and none waits
            return
        time.sleep(LOOK_SECONDS)
    raise RuntimeError(
        f"requests are under way {seconds:.0f} s after a load: what follows would be measured beside them"
    )
