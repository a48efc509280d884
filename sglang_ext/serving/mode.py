"""How a server holds the keys and values of requests: what the scheduler's hooks ask, answered by one object a server.

`Mode` itself leaves everything to SGLang; it is the mode of servers whose cache is not ours. Where every request is a
row of SGLang's radix tree there is `tree.TreeMode`, where every request is a stream `streams.StreamMode`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from sglang_ext.cache.radix import BlockRadixCache
from sglang_ext.compat import AddReqResult
from sglang_ext.names import Passed, PrefillAdder, PrefixCache, Req, ScheduleBatch, Scheduler, TokenizedInput

SlotsAndRows: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""KV slots of a batch's new tokens, and the request slot of each request, on the device and on the host."""


class Mode:
    """What is SGLang's own.

    Attributes:
        ours: whether the server's cache is one of ours.
        ends_early: whether requests that are about to end take part in no further step (`last_step`).
    """

    ours = False
    ends_early = False

    # ---- requests ----

    def received(self, scheduler: Scheduler, message: TokenizedInput) -> None:
        """A TokenizedGenerateReqInput arrived, and becomes a request."""

    def limit(self, original: Callable[..., None], scheduler: Scheduler, req: Req) -> None:
        """Say how much a request may generate, or end it where it can never run."""
        original(scheduler, req)

    # ---- what runs next ----

    def between_passes(self, scheduler: Scheduler) -> None:
        """The scheduler is about to choose what runs next."""

    def takes_turns(self, chunked: Req) -> bool:
        """Whether a prompt that is prefilled in chunks may be so long that others must not wait for it."""
        return False

    def room_beside(self, scheduler: Scheduler, running: Sequence[Req]) -> int | None:
        """Tokens that requests may take beside the prompt in chunks and the running ones; None: they have theirs."""
        return None

    def make_room(self, scheduler: Scheduler) -> None:
        """The first waiting request does not run although nothing else does: let go of what stands in its way."""

    # ---- admission ----

    def add(
        self,
        original: Callable[..., AddReqResult],
        adder: PrefillAdder,
        req: Req,
        has_chunked_req: bool,
        alignment: int | None,
    ) -> AddReqResult:
        """Put a waiting request into the batch if it fits; SGLang's `AddReqResult`."""
        return original(adder, req, has_chunked_req, alignment)

    def add_chunk(self, original: Callable[..., Req | None], adder: PrefillAdder, req: Req) -> Req | None:
        """Put the next chunk of a prompt into the batch; the request if there is more of it, else None."""
        return original(adder, req)

    def offset(self, original: Callable[..., float], adder: PrefillAdder, req: Req) -> float:
        """Tokens that a running request may still take."""
        return original(adder, req)

    # ---- slots ----

    def slots_for_extend(self, original: Callable[..., SlotsAndRows], batch: ScheduleBatch) -> SlotsAndRows:
        """KV slots of the new tokens of a batch of prompts."""
        return original(batch)

    def slots_for_decode(
        self, original: Callable[..., torch.Tensor], batch: ScheduleBatch, token_per_req: int
    ) -> torch.Tensor:
        """KV slots of a decoding step."""
        return original(batch, token_per_req)

    def decode_fits(self, original: Callable[..., bool], batch: ScheduleBatch, *args: Passed, **kwargs: Passed) -> bool:
        """Whether there are slots for a decoding step; a running request is retracted otherwise."""
        return original(batch, *args, **kwargs)

    # ---- for operators ----

    def blocks(self, cache: PrefixCache) -> BlockRadixCache:
        """The cache that holds pools' blocks.

        Raises:
            ValueError: there is none; says how to start a server that has one.
        """
        raise ValueError(f"the radix cache is {type(cache).__name__}: pools need --radix-cache-backend sglang_ext")

    def stats(self, scheduler: Scheduler) -> dict[str, float]:
        """Counters, for /server_info and /metrics."""
        return {}
