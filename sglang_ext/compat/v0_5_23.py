"""SGLang 0.5.23: the names and fields that 0.5.16 to 0.5.18 have elsewhere. `v0_5_16` has the same names of ours."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import get_default_attn_backend, model_config_of, resolved_view
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode
from sglang.srt.model_executor.runner_utils.capture_mode import get_capture_lora_variant as capture_variant
from sglang.srt.model_executor.runner_utils.pool import graph_pool_capture_scope as capture_scope
from sglang.srt.model_executor.runner_utils.pool import graph_pool_replay_scope as replay_scope

__all__ = [
    "ABORT_FLAG",
    "LEAVES_OUT_ENDING",
    "LENGTH_HIDES_STOPS",
    "REQUEUES_PREEMPTED",
    "RadixTree",
    "TreelessCache",
    "capture_scope",
    "capture_variant",
    "charge_slots",
    "computed",
    "decide",
    "default_attention",
    "extend_end",
    "has_row",
    "is_resolved",
    "model_config",
    "protected",
    "refresh_fill_ids",
    "replay_scope",
    "request_slot",
    "resolved",
    "set_extend",
    "set_reserved",
    "set_written",
    "slots_ahead",
    "verified_logprobs",
]

LENGTH_HIDES_STOPS = False
"""Whether an answer whose last step reaches `max_new_tokens` goes on to there, past what would have stopped it."""

ABORT_FLAG = "abort_sent"
"""The field of a request's state in the TokenizerManager that says whether somebody asked to abort it."""

REQUEUES_PREEMPTED = True
"""Whether a request that gave way by its priority waits again where the one it gave way to does not fit after all."""

LEAVES_OUT_ENDING = True
"""Whether SGLang leaves requests that end in the step on the way out of the next decoding step by itself."""


# ---- server arguments ----


def model_config(server_args: Any) -> Any:
    """The configuration of a server's model, SGLang's `ModelConfig`."""
    return model_config_of(server_args)


def resolved(server_args: Any) -> Any:
    """A server's arguments with SGLang's own decisions."""
    return resolved_view(server_args)


def decide(server_args: Any, **fields: Any) -> None:
    """Decide on fields of a server's arguments, while SGLang does."""
    declare_resolution(server_args, "sglang_ext", **fields)


def is_resolved(server_args: Any) -> bool:
    """Whether SGLang has made its decisions on these arguments before, in this process or the one that sent them."""
    return bool(getattr(server_args, "_resolution_finished", False))


def default_attention(model_runner: Any) -> str:
    """The attention backend that SGLang would choose for a model on this machine, if none were asked for."""
    return get_default_attn_backend(model_runner.server_args, model_runner.use_mla_backend, model_runner.model_config)


# ---- requests in the scheduler ----


def has_row(req: Any) -> bool:
    """Whether a request has a row in `req_to_token`."""
    return req.kv.req_pool_idx is not None


def request_slot(req: Any) -> int:
    """Number of the row in `req_to_token` of a request that has one."""
    found: int = req.kv.req_pool_idx
    return found


def computed(req: Any) -> int:
    """Tokens of a request, from its first on, that need not be computed any more."""
    found: int = req.prefix_len
    return found


def extend_end(req: Any) -> int:
    """Tokens of a request that are computed once the pass at hand is over."""
    found: int = req.extend_end
    return found


def set_extend(req: Any, begin: int, end: int) -> None:
    """Have the next pass compute tokens [begin, end) of a request, of which `begin` are computed."""
    req.extend_end = end


def protected(req: Any) -> int:
    """Tokens of a request, from its first on, whose slots are the radix tree's."""
    found: int = req.kv.cache_protected_len
    return found


def refresh_fill_ids(req: Any) -> None:
    """Have SGLang look again at what tokens a request has."""
    req.refresh_fill_ids()


def set_reserved(req: Any, slots: int) -> None:
    """Tell SGLang that a stream has so many KV slots, and that the cache accounts for all of them."""


def set_written(req: Any, tokens: int) -> None:
    """Tell SGLang how many tokens a stream has once the pass at hand is over."""
    req.kv.kv_allocated_len = req.kv.kv_committed_len = req.kv.cache_protected_len = tokens


# ---- admission ----


def charge_slots(adder: Any, req: Any, tokens: int, slots: int) -> None:
    """Take what a stream adds to a batch from the adder's room: so many tokens of the pass, and so many KV slots."""
    budget = adder.memory_budget
    total, current = budget.total_offset + slots, budget.current_offset + slots
    adder._update_prefill_budget(computed(req), tokens, 0, req.retracted_stain)
    budget.total_offset, budget.current_offset = total, current


# ---- drafting ----


def slots_ahead(server_args: Any) -> int:
    """KV slots that a request needs beside its tokens while it decodes: for what a server drafts."""
    return 0 if resolved(server_args).speculative_algorithm is None else get_alloc_reserve_per_decode()


def verified_logprobs(batch: Any, logits: Any, drawn: torch.Tensor, rows: torch.Tensor) -> None:
    """Have SGLang compute the log-probabilities that a batch asks for, of tokens that a verification gave.

    Args:
        batch: of the verification.
        logits: its output, which gets them.
        drawn: [rows] the token of each row.
        rows: [requests, tokens] numbers of the rows.
    """
    compute_spec_logprobs(batch, logits, drawn, accept_index=rows)


# ---- the radix tree ----


class RadixTree(RadixCache):
    """SGLang's radix tree, for a subclass that finds and keeps some of the requests in its own way.

    What the subclass defines: `find_row`, `keep_row`, `serves`, `path_slots`, `let_go`, `rewritten`, `ended`.
    """

    def longest(self, token_ids: array[int], namespace: str, req: Any) -> tuple[torch.Tensor, TreeNode]:
        """([tokens] int64 KV slots, node) of the longest known beginning of some tokens."""
        key = RadixKey(token_ids, namespace, cache_salt=req.cache_salt)
        node = RadixCache.match_prefix(self, MatchPrefixParams(key=key)).last_device_node
        return RadixCache.path_device_indices(self, node), node

    def add_tokens(
        self, token_ids: array[int], namespace: str, slots: torch.Tensor, req: Any, begin: int, chunked: bool
    ) -> tuple[int, TreeNode]:
        """Give the tree the tokens of a request from its token `begin` on; (how many it had, their node)."""
        key = RadixKey(token_ids, namespace, cache_salt=req.cache_salt)
        counted = max(0, req.kv.cache_inserted_len - begin)  # the request has counted its hits of these before
        result = self.insert(InsertParams(key=key, value=slots, inserted_len=counted, priority=req.priority or 0))
        req.kv.cache_inserted_len = max(req.kv.cache_inserted_len, begin + len(token_ids))
        return result.prefix_len, result.last_device_node

    def removed(self, node: TreeNode) -> None:
        """Report a node that has left the tree to those who listen to events of the cache."""
        self.kv_events.record_remove(node)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        found = self.find_row(params.req, params.key) if params.req is not None else None
        if found is None:
            return super().match_prefix(params)
        slots, node = found
        if node is None:
            return self._empty_match_result
        return MatchResult(
            device_prefix_len=len(slots), last_device_node=node, last_host_node=node, best_match_node=node
        )

    def path_device_indices(self, node: Any) -> torch.Tensor:
        slots = self.path_slots(node)
        return super().path_device_indices(node) if slots is None else slots

    def checkpoint(self, req: Any, *, up_to: int) -> None:
        if req.finished():  # what a request leaves is known before the tree is given its tokens
            self.let_go(req.kv.req_pool_idx)
        kept = None if self.disable else self.keep_row(req, up_to, not req.finished())
        if kept is None:
            super().checkpoint(req, up_to=up_to)
            if not req.finished():
                self.rewritten(req.kv.req_pool_idx)
            return
        if req.best_match_node is not None:
            req.best_match_node.slots = None  # they are in the request's row
        req.kv.cache_protected_len, node = kept
        self.unlock(req.lock)
        req.lock, req.last_node = self.lock(node), node

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        if not (checkpointed and req.finished()):
            self.let_go(req.kv.req_pool_idx)
        if self.serves(req) and req.finished():
            self.ended(req)
        if self.disable and req.kv.holds_mamba:
            self.req_to_token_pool.free_mamba_cache(req)
        super().on_release(req, checkpointed=checkpointed)

    # ---- of hybrid linear models, which are served without a tree ----

    def supports_mamba(self) -> bool:
        """Whether requests have states, each its own: `on_release` frees them."""
        return bool(self.disable)

    def mamba_evictable_size(self) -> int:
        return 0

    def mamba_protected_size(self) -> int:
        return 0


# ---- streams ----


class TreelessCache(BasePrefixCache):
    """A cache without a radix tree, for a subclass that allots the slots of each request.

    What the subclass defines: `find_row`, `finish_row`. A request's slots are not one a token: to SGLang all of them
    are the cache's.
    """

    disable = True

    def __init__(self, params: Any) -> None:
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size = params.page_size
        self.device = torch.device(self.token_to_kv_pool_allocator.device)
        self.root_node = None

    def supports_prefix_sharing(self) -> bool:
        return False

    def reset(self) -> None:
        """Forget everything."""

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        tokens = 0 if params.req is None else self.find_row(params.req, params.key)
        return MatchResult(device_prefix_len=tokens, last_device_node=None, last_host_node=None, best_match_node=None)

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64, device=self.device)

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """A stream's slots are its own until it ends."""

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        """`on_release` frees what the stream does not leave to a later one."""

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        self.finish_row(req)

    def evict(self, params: EvictParams) -> EvictResult:
        return EvictResult()

    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        return IncLockRefResult(delta=0)

    def dec_lock_ref(self, node: Any, params: DecLockRefParams | None = None) -> DecLockRefResult:
        return DecLockRefResult(delta=0)
