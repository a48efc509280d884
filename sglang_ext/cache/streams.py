"""What stands in the radix cache's place for streams: it reserves a bounded set of KV slots a request, and shares none.

A stream's slots hold what it has kept, each key-value head its own tokens: there is no prefix in them that another
request could begin with. SGLang's cache for servers without a radix tree does all but allotting and freeing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_ext import compat
from sglang_ext.attention.policy import StreamPolicy
from sglang_ext.compat import ChunkCache


class StreamCache(ChunkCache):
    """`--radix-cache-backend sglang_ext` of a policy whose requests are streams.

    SGLang takes a request's `prefix_indices` for the slots of what was computed of it. A stream's are not one a token:
    `prefix_indices` has the length that SGLang counts with, and no memory. Its row in `req_to_token` begins with the
    reserved slots.

    Attributes:
        policy: says how many slots a request needs.
        on_release: called with the request slot of every request that ends or is retracted.
        reserved: request slot -> how many KV slots it has.
    """

    def __init__(self, params: Any, policy: StreamPolicy) -> None:
        super().__init__(params)
        self.policy = policy
        self.on_release: list[Callable[[int], None]] = []
        self.reserved: dict[int, int] = {}
        self._length = torch.zeros(1, dtype=torch.int64)

    def reset(self) -> None:
        self.reserved.clear()

    def need(self, req: Any) -> int:
        """KV slots that a request has to be given before it runs; none when it has them."""
        if req.kv is not None:
            return 0
        # One token more: the step that overlap scheduling runs past the end.
        tokens = len(req.origin_input_ids) + req.sampling_params.max_new_tokens + 1
        return self.policy.slots(compat.request_options(req), tokens)

    def cut(self, req: Any, begin: int, end: int) -> int:
        """Where a chunk [begin, end) of a prompt, or a shorter one, had best end."""
        return self.policy.cut(compat.request_options(req), begin, end)

    def reserve(self, req: Any) -> None:
        """Give a request that has a row its KV slots, unless it has them.

        Raises:
            RuntimeError: there are not as many free; `need` was not counted at admission.
        """
        count = self.need(req)
        if count == 0:
            return
        slots = self.token_to_kv_pool_allocator.alloc(count)
        if slots is None:
            free = self.token_to_kv_pool_allocator.available_size()
            raise RuntimeError(f"request {req.rid} was admitted with {count} KV slots, and {free} are free")
        self.req_to_token_pool.write((req.req_pool_idx, slice(0, count)), slots.to(torch.int32))
        self.reserved[req.req_pool_idx] = count
        compat.set_reserved(req, count)

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        req.prefix_indices = self._length.expand(req.extend_range.end)

    def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        for released in self.on_release:
            released(req.req_pool_idx)
        count = self.reserved.pop(req.req_pool_idx)
        self.token_to_kv_pool_allocator.free(self.req_to_token_pool.req_to_token[req.req_pool_idx, :count])
        compat.set_released(req, kv_len_to_handle)

    def protected_size(self) -> int:
        """Slots of all requests, those whose prompt waits for its next chunk among them."""
        return sum(self.reserved.values())
