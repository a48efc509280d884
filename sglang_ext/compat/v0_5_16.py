"""SGLang 0.5.16 to 0.5.18: the names and fields that 0.5.23 has elsewhere. `v0_5_23` has the same names of ours."""

from __future__ import annotations

from array import array
from contextlib import nullcontext as capture_scope
from contextlib import nullcontext as replay_scope
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams, MatchResult
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode
from sglang.srt.model_executor.runner_utils import get_capture_lora_variant as capture_variant

from sglang_ext import lines

_FROM_18 = lines.at_least("0.5.18")
"""Whether SGLang's functions of speculative decoding read the server's arguments by themselves, and have new names."""

if _FROM_18:
    from sglang.srt.layers.logprob_processor import compute_spec_logprobs
else:
    from sglang.srt.layers.logprob_processor import compute_spec_v2_logprobs

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

LENGTH_HIDES_STOPS = not _FROM_18
"""Whether an answer whose last step reaches `max_new_tokens` goes on to there, past what would have stopped it."""

ABORT_FLAG = "abort_requested"
"""The field of a request's state in the TokenizerManager that says whether somebody asked to abort it."""

REQUEUES_PREEMPTED = False
"""Whether a request that gave way by its priority waits again where the one it gave way to does not fit after all."""

LEAVES_OUT_ENDING = False
"""Whether SGLang leaves requests that end in the step on the way out of the next decoding step by itself."""


# ---- server arguments ----


def model_config(server_args: Any) -> Any:
    """The configuration of a server's model, SGLang's `ModelConfig`."""
    return server_args.get_model_config()


def resolved(server_args: Any) -> Any:
    """A server's arguments with SGLang's own decisions."""
    return server_args


def decide(server_args: Any, **fields: Any) -> None:
    """Decide on fields of a server's arguments, while SGLang does."""
    for name, value in fields.items():
        setattr(server_args, name, value)


def is_resolved(server_args: Any) -> bool:
    """Whether SGLang has made its decisions on these arguments before, in this process or the one that sent them."""
    return False


def default_attention(model_runner: Any) -> str:
    """The attention backend that SGLang would choose for a model on this machine, if none were asked for."""
    return model_runner.server_args._get_default_attn_backend(model_runner.use_mla_backend, model_runner.model_config)


# ---- requests in the scheduler ----


def has_row(req: Any) -> bool:
    """Whether a request has a row in `req_to_token`."""
    return req.req_pool_idx is not None


def request_slot(req: Any) -> int:
    """Number of the row in `req_to_token` of a request that has one."""
    found: int = req.req_pool_idx
    return found


def computed(req: Any) -> int:
    """Tokens of a request, from its first on, that need not be computed any more."""
    return len(req.prefix_indices)


def extend_end(req: Any) -> int:
    """Tokens of a request that are computed once the pass at hand is over."""
    found: int = req.extend_range.end
    return found


def set_extend(req: Any, begin: int, end: int) -> None:
    """Have the next pass compute tokens [begin, end) of a request."""
    req.set_extend_range(begin, end)


def protected(req: Any) -> int:
    """Tokens of a request, from its first on, whose slots are the radix tree's."""
    found: int = req.cache_protected_len
    return found


def refresh_fill_ids(req: Any) -> None:
    """Have SGLang look again at what tokens a request has."""
    req._refresh_fill_ids()


def set_reserved(req: Any, slots: int) -> None:
    """Tell SGLang that a stream has so many KV slots, and that the cache accounts for all of them."""
    req.kv = ReqKvInfo(kv_allocated_len=slots, swa_evicted_seqlen=0)
    req.cache_protected_len = slots


def set_written(req: Any, tokens: int) -> None:
    """Tell SGLang how many tokens a stream has once the pass at hand is over."""


# ---- admission ----


def charge_slots(adder: Any, req: Any, tokens: int, slots: int) -> None:
    """Take what a stream adds to a batch from the adder's room: so many tokens of the pass, and so many KV slots."""
    total, current = adder.rem_total_token_offset + slots, adder.cur_rem_token_offset + slots
    adder._update_prefill_budget(computed(req), tokens, 0, req.retracted_stain)
    adder.rem_total_token_offset, adder.cur_rem_token_offset = total, current


# ---- drafting ----


def slots_ahead(server_args: Any) -> int:
    """KV slots that a request needs beside its tokens while it decodes: for what a server drafts."""
    if server_args.speculative_algorithm is None:
        return 0
    reserve: int = get_alloc_reserve_per_decode() if _FROM_18 else get_alloc_reserve_per_decode(server_args)
    return reserve


def verified_logprobs(batch: Any, logits: Any, drawn: torch.Tensor, rows: torch.Tensor) -> None:
    """Have SGLang compute the log-probabilities that a batch asks for, of tokens that a verification gave.

    Args:
        batch: of the verification.
        logits: its output, which gets them.
        drawn: [rows] the token of each row.
        rows: [requests, tokens] numbers of the rows.
    """
    if _FROM_18:
        compute_spec_logprobs(batch, logits, drawn, accept_index=rows)
    else:
        compute_spec_v2_logprobs(batch, logits, drawn, rows, rows.shape[1] - 1)


# ---- the radix tree ----


class RadixTree(RadixCache):
    """SGLang's radix tree, for a subclass that finds and keeps some of the requests in its own way.

    What the subclass defines: `find_row`, `keep_row`, `serves`, `path_slots`, `let_go`, `rewritten`, `ended`.
    """

    def longest(self, token_ids: array[int], namespace: str, req: Any) -> tuple[torch.Tensor, TreeNode]:
        """([tokens] int64 KV slots, node) of the longest known beginning of some tokens."""
        found = RadixCache.match_prefix(self, MatchPrefixParams(key=RadixKey(token_ids, namespace)))
        return found.device_indices, found.last_device_node

    def add_tokens(
        self, token_ids: array[int], namespace: str, slots: torch.Tensor, req: Any, begin: int, chunked: bool
    ) -> tuple[int, TreeNode]:
        """Give the tree the tokens of a request from its token `begin` on; (how many it had, their node)."""
        result = self.insert(
            InsertParams(
                key=RadixKey(token_ids, namespace),
                value=slots,
                chunked=chunked,
                priority=getattr(req, "priority", 0) or 0,
            )
        )
        return result.prefix_len, result.last_device_node

    def removed(self, node: TreeNode) -> None:
        """Report a node that has left the tree to those who listen to events of the cache."""
        self._record_remove_event(node)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        found = self.find_row(params.req, params.key) if params.req is not None else None
        if found is None:
            return super().match_prefix(params)
        slots, node = found
        if node is None:
            return self._empty_match_result
        node.slots = None  # SGLang has them from here on
        return MatchResult(device_indices=slots, last_device_node=node, last_host_node=node, best_match_node=node)

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        end = req.extend_range.end
        if self.disable:  # the next chunk goes on behind these slots, as in SGLang's cache without a tree
            slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, :end]
            req.prefix_indices = slots.to(dtype=torch.int64, copy=True)
            return
        kept = self.keep_row(req, end, chunked)
        if kept is None:
            super().cache_unfinished_req(req, chunked=chunked)
            self.rewritten(req.req_pool_idx)
            return
        tokens, node = kept
        self.inc_lock_ref(node)
        self.dec_lock_ref(req.last_node)
        # The row was rewritten where the tree already had the same tokens: read it again.
        slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, :end]
        req.prefix_indices = slots.to(dtype=torch.int64, copy=True)
        req.cache_protected_len = tokens
        req.last_node = node

    def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        self.let_go(req.req_pool_idx)
        if self.disable or not self.serves(req):
            return super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle)
        stored = req.cache_protected_len
        if is_insert and not self.disable_finished_insert:
            stored, _ = self.keep_row(req, kv_len_to_handle, False)
        slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, :kv_len_to_handle]
        self.token_to_kv_pool_allocator.free(slots[stored:])
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node)
        if req.finished():
            self.ended(req)


# ---- streams ----


class TreelessCache(ChunkCache):
    """SGLang's cache of a server without a radix tree, for a subclass that allots the slots of each request.

    What the subclass defines: `find_row`, `finish_row`. SGLang takes a request's `prefix_indices` for the slots of what
    was computed of it. Here it has the length that SGLang counts with, and no memory.
    """

    _length = torch.zeros(1, dtype=torch.int64)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        found = super().match_prefix(params)
        tokens = 0 if params.req is None else self.find_row(params.req, params.key)
        return found._replace(device_indices=self._length.expand(tokens)) if tokens else found

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        req.prefix_indices = self._length.expand(req.extend_range.end)

    def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        self.finish_row(req)
        req.kv.kv_allocated_len = kv_len_to_handle
        req.cache_protected_len = 0
