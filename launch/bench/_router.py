"""SGLang's router SMG in front of servers: how it is started, and which of its options our servers need."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from sglang_ext.launch.client import ServerError
from sglang_ext.launch.demo_server import Server, free_port, running

ROUTING_KEY = "X-SMG-Routing-Key"
"""Header of a request: equal keys go to the same server where the policy is `consistent_hashing`."""
ROUTED = "x-smg-routed-worker-id"
"""Header of an answer: the address of the server that gave it."""
BY_KEY, MANUAL, STICKY = "consistent_hashing", "manual", "sticky_round_robin"
POLICIES: dict[str, tuple[str, ...]] = {
    BY_KEY: ("consistent_hashing",),
    STICKY: ("round_robin", "--sticky-sessions"),
    MANUAL: ("manual", "--assignment-mode", "min_group"),
    "cache_aware": ("cache_aware",),
    "round_robin": ("round_robin",),
}
"""How a server is chosen -> the router's policy, and its options. The first computes it from the key; the second gives
new keys to servers in turn, and the third to that with the fewest keys under way, and both remember it."""
KEYED = (BY_KEY, STICKY, MANUAL)
"""Policies by which a key has a home. Sticky sessions send a request elsewhere while two of its key are there."""
FLAGS = ("--disable-circuit-breaker", "--disable-worker-overload-protection")
"""Without the first, a pool that all servers answer with 503 closes all servers; without the second, a server whose
KV cache is full of pools gets no requests for them."""
LOOK_SECONDS = 0.2


def command(port: int, urls: Sequence[str], policy: str, more: Sequence[str] = ()) -> list[str]:
    """What starts the router.

    Args:
        port: where it answers; its own metrics get another one.
        urls: of the servers.
        policy: by which it chooses one of them for a request.
        more: of its options.

    Raises:
        ValueError: the router is not installed.
    """
    if find_spec("smg") is None:
        raise ValueError("the router is the package smg, which is not installed: pip install 'sglang-ext[fleet]'")
    words = [sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
    words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--log-level", "warn"]
    words += ["--worker-startup-check-interval", "1", *FLAGS, *more]
    return [*words, "--worker-urls", *urls]


@contextmanager
def routed(urls: Sequence[str], policy: str, more: Sequence[str] = (), seconds: float = 60.0) -> Iterator[Server]:
    """A router that knows all of some running servers; it ends with the block.

    Args:
        urls: of the servers.
        policy: by which it chooses one.
        more: of its options.
        seconds: that it may take to know them.

    Raises:
        ServerError: it does not know them in time.
        ValueError: it is not installed.
    """
    port = free_port()
    with running(command(port, urls, policy, more), port) as router:
        deadline = time.monotonic() + seconds
        while known(router) != set(urls):
            if time.monotonic() > deadline:
                raise ServerError(f"the router knows {sorted(known(router))} after {seconds:.0f} s, not {list(urls)}")
            time.sleep(LOOK_SECONDS)
        yield router


def known(router: Server) -> set[str]:
    """Addresses of the servers to which a router sends requests now."""
    found = router.call("GET", "/workers")
    return {each["url"] for each in found["workers"] if each["is_healthy"]}
