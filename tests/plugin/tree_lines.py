"""How SGLang's scheduler drives a radix tree, in the line of SGLang that is installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

from sglang_ext import lines
from sglang_ext.compat import RadixKey

NEWER = lines.current() is lines.NEWER


class Slots:
    """Of a scheduler's request: its row and whose slots are in it, where either line has them.

    `req_pool_idx` and `cache_protected_len` are attributes of `Req` in the older line, and of `Req.kv` in the newer.
    """

    def __init__(self) -> None:
        self.kv = SimpleNamespace(req_pool_idx=None, cache_protected_len=0, cache_inserted_len=0, swa_evict_floor=0)
        self.lock: Any = None
        self.prefix_indices = torch.empty(0, dtype=torch.int64)
        self.last_node: Any = None
        self.best_match_node: Any = None

    @property
    def req_pool_idx(self) -> int:
        return self.kv.req_pool_idx

    @req_pool_idx.setter
    def req_pool_idx(self, slot: int | None) -> None:
        self.kv.req_pool_idx = slot

    @property
    def cache_protected_len(self) -> int:
        return self.kv.cache_protected_len

    @cache_protected_len.setter
    def cache_protected_len(self, tokens: int) -> None:
        self.kv.cache_protected_len = tokens


def match(cache: Any, key: RadixKey, req: Any = None) -> SimpleNamespace:
    """What the tree finds: `device_indices`, [tokens] int64 KV slots, and fields of SGLang's `MatchResult`."""
    found = cache.match_prefix(MatchPrefixParams(key=key, req=req))
    fields = found._asdict()
    if NEWER:
        path = cache.path_device_indices(found.last_device_node)
        fields["device_indices"] = path[: fields.pop("device_prefix_len")]
    return SimpleNamespace(**fields)


def lock(cache: Any, req: Any) -> None:
    """A request that was looked up comes into a batch."""
    if NEWER:
        req.lock = cache.lock(req.last_node)
    else:
        cache.inc_lock_ref(req.last_node)


def unfinished(cache: Any, req: Any, end: int, chunked: bool) -> None:
    """`end` tokens of a request are computed, and it goes on."""
    if not NEWER:
        cache.cache_unfinished_req(req, chunked=chunked)
        return
    cache.checkpoint(req, up_to=end)
    req.prefix_indices = cache.req_to_token_pool.req_to_token[req.req_pool_idx, :end].to(torch.int64)


def finished(cache: Any, req: Any, end: int, is_insert: bool) -> None:
    """A request of `end` tokens ends, or is retracted."""
    if not NEWER:
        cache.cache_finished_req(req, is_insert, kv_len_to_handle=end)
        return
    if is_insert:
        cache.checkpoint(req, up_to=end)
    row = cache.req_to_token_pool.req_to_token[req.req_pool_idx]
    cache.token_to_kv_pool_allocator.free(row[req.cache_protected_len : end])
    cache.unlock(req.lock)
    cache.on_release(req, checkpointed=is_insert)


def free_slots(allocator: Any) -> list[int]:
    """Slots that can be allotted."""
    return [
        slot for part in (allocator.free_pages, allocator.release_pages) if part is not None for slot in part.tolist()
    ]


def held_back(allocator: Any) -> list[int]:
    """Slots that are free once the batch at hand is done."""
    if NEWER:
        parts = allocator.free_group or []
    else:
        group = [*allocator.free_group, *getattr(allocator, "free_page_reps_group", ())]
        parts = [] if allocator.is_not_in_free_group else group
    return [slot for part in parts for slot in part.tolist()]
