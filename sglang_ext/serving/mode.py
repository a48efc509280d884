"""How a server holds the keys and values of requests: what the scheduler's hooks ask, answered by one object a server.

`Mode` itself leaves everything to SGLang; it is the mode of servers whose cache is not ours. Where every request is a
row of SGLang's radix tree there is `tree.TreeMode`, where every request is a stream `streams.StreamMode`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.cache.radix import BlockRadixCache


class Mode:
    """What is SGLang's own.

    Attributes:
        ours: whether the server's cache is one of ours.
        ends_early: whether requests that are about to end take part in no further step (`last_step`).
    """

    ours = False
    ends_early = False

    # ---- requests ----

    def received(self, scheduler: Any, message: Any) -> None:
        """A TokenizedGenerateReqInput arrived, and becomes a request."""

    def limit(self, original: Callable[..., None], scheduler: Any, req: Any) -> None:
        """Say how much a request may generate, or end it where it can never run."""
        original(scheduler, req)

    # ---- what runs next ----

    def takes_turns(self, chunked: Any) -> bool:
        """Whether a prompt that is prefilled in chunks may be so long that others must not wait for it."""
        return False

    def room_beside(self, scheduler: Any, running: int) -> int | None:
        """Tokens that requests may take beside the prompt in chunks and `running` others; None: they have theirs."""
        return None

    def make_room(self, scheduler: Any) -> None:
        """The first waiting request does not run although nothing else does: let go of what stands in its way."""

    # ---- admission ----

    def add(
        self, original: Callable[..., Any], adder: Any, req: Any, has_chunked_req: bool, alignment: int | None
    ) -> Any:
        """Put a waiting request into the batch if it fits; SGLang's `AddReqResult`."""
        return original(adder, req, has_chunked_req, alignment)

    def add_chunk(self, original: Callable[..., Any], adder: Any, req: Any) -> Any:
        """Put the next chunk of a prompt into the batch; the request if there is more of it, else None."""
        return original(adder, req)

    def offset(self, original: Callable[..., float], adder: Any, req: Any) -> float:
        """Tokens that a running request may still take."""
        return original(adder, req)

    # ---- slots ----

    def slots_for_extend(self, original: Callable[..., Any], batch: Any) -> Any:
        """KV slots of the new tokens of a batch of prompts."""
        return original(batch)

    def slots_for_decode(self, original: Callable[..., Any], batch: Any, token_per_req: int) -> Any:
        """KV slots of a decoding step."""
        return original(batch, token_per_req)

    def decode_fits(self, original: Callable[..., bool], batch: Any, *args: Any, **kwargs: Any) -> bool:
        """Whether there are slots for a decoding step; a running request is retracted otherwise."""
        return original(batch, *args, **kwargs)

    # ---- for operators ----

    def blocks(self, cache: Any) -> BlockRadixCache:
        """The cache that holds pools' blocks.

        Raises:
            ValueError: there is none; says how to start a server that has one.
        """
        raise ValueError(f"the radix cache is {type(cache).__name__}: pools need --radix-cache-backend sglang_ext")

    def stats(self, scheduler: Any) -> dict[str, Any]:
        """Counters, for /server_info and /metrics."""
        return {}
