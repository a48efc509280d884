"""SGLang's radix cache with demonstration blocks as nodes of their own and prefixes stitched from them.

A block is one child of the root under its own namespace, so that it is locked, counted and evicted on its own whatever
else is in the tree. A request that selects blocks gets, as its cached prefix, their slots one after the other; its own
tokens live under the namespace of the selection. Everything that is not about blocks is SGLang's `RadixCache`.
"""

from __future__ import annotations

import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from sglang_ext import compat
from sglang_ext.cache import carried
from sglang_ext.cache.rows import POOL_OWNER, REQUEST_OWNER, NewBlock, Row
from sglang_ext.cache.stitch import MissingBlocks, NodeHooks, StitchNode, StitchTooShort, joined_ids
from sglang_ext.compat import (
    InsertParams,
    MatchPrefixParams,
    MatchResult,
    RadixCache,
    RadixKey,
    TreeNode,
)
from sglang_ext.names import Passed, Req

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams, DecLockRefResult, IncLockRefResult

    from sglang_ext.cache.host_tier import HostTier

# Namespaces of the tree. Users choose `extra_key` freely, and must not reach a block with it.
_SECRET = secrets.token_hex(8)
_BLOCK = f"{_SECRET}:block:"


class BlockRadixCache(RadixCache):
    """`--radix-cache-backend sglang_ext`.

    Attributes:
        hooks: told of every node's life.
        on_release: called with the request slot of every request that ends or is retracted.
        on_rewrite: called with the request slot of every request whose row may name other KV slots than before, for the
            same tokens. Under overlap scheduling the request may have decoded a step by then, from the freed ones.
        on_restore: called with [tokens] KV slots that got a block back from the host, and the first token's position.
        host: where evicted blocks go; None where they are lost.
    """

    def __init__(self, params: Passed) -> None:
        self.hooks: list[NodeHooks] = []
        self.on_release: list[Callable[[int], None]] = []
        self.on_rewrite: list[Callable[[int], None]] = []
        self.on_restore: list[Callable[[torch.Tensor, int], None]] = []
        self.host: HostTier | None = None
        self.hits: Counter[str] = Counter()
        self.total_hits = 0
        self.saved_tokens = 0
        self.stitch_seconds = 0.0
        super().__init__(params)

    # ---- blocks ----

    def reset(self) -> None:
        self.blocks: dict[str, TreeNode] = {}
        self.written: dict[str, int] = {}  # block -> position its first token was written at
        self.owners: dict[str, set[str]] = {}  # block -> who holds it
        self._pool_owners: Counter[str] = Counter()  # block -> how many of them are pools
        # Asked for with every request, so they are kept, not summed up: tokens of all blocks, of those that somebody
        # holds, and of those that a pool holds.
        self.block_tokens = self.held_tokens = self.held_by_pools = 0
        super().reset()
        if self.host is not None:
            self.host.clear()
        for hook in self.hooks:
            hook.on_reset()

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Which of the blocks named `keys` are not resident."""
        return [key for key in dict.fromkeys(keys) if key not in self.blocks]

    def stitched_ids(self, row: Row, own: array[int]) -> array[int]:
        """Token ids of a request: those of its row's prefix, then its `own` (both as arrays of "q").

        Raises:
            MissingBlocks: some blocks of the prefix are not resident.
        """
        absent = self.missing(piece.key for piece in row.prefix)
        if absent:
            raise MissingBlocks(absent)
        return joined_ids(self.blocks, row, own)

    def hold(self, owner: str, keys: Iterable[str]) -> None:
        """Lock resident blocks for `owner`; a block held by several stays until all let go.

        Raises:
            MissingBlocks: some are not resident; nothing was locked.
        """
        keys = list(keys)
        absent = self.missing(keys)
        if absent:
            raise MissingBlocks(absent)
        for key in keys:
            node = self.blocks[key]
            if key not in self.owners:
                super().inc_lock_ref(node)
                self.held_tokens += len(node.key)
            owners = self.owners.setdefault(key, set())
            if owner.startswith(POOL_OWNER) and owner not in owners:
                self._pool_owners[key] += 1
                if self._pool_owners[key] == 1:
                    self.held_by_pools += len(node.key)
            owners.add(owner)

    def release(self, owner: str, keys: Iterable[str] | None = None) -> None:
        """Take back `owner`'s holds, all of them or those on `keys`; unknown ones are none."""
        for key in list(self.owners) if keys is None else keys:
            owners = self.owners.get(key)
            if owners and owner in owners:
                node = self.blocks[key]
                owners.discard(owner)
                if owner.startswith(POOL_OWNER):
                    self._pool_owners[key] -= 1
                    if not self._pool_owners[key]:
                        del self._pool_owners[key]
                        self.held_by_pools -= len(node.key)
                if not owners:
                    del self.owners[key]
                    self.held_tokens -= len(node.key)
                    super().dec_lock_ref(node)
                    if self.host is not None:
                        self.host.waiting[key] = None

    def release_requests(self, keep: Iterable[str]) -> None:
        """Take back what requests hold for themselves, except those with the ids `keep`."""
        # Requests that wait lose nothing but time: their blocks may be evicted, and are encoded again then.
        kept = {REQUEST_OWNER + str(rid) for rid in keep}
        for owner in sorted({owner for owners in self.owners.values() for owner in owners}):  # on every rank alike
            if owner.startswith(REQUEST_OWNER) and owner not in kept:
                self.release(owner)

    def drop(self, keys: Iterable[str], keep: bool = True) -> int:
        """Free blocks that nobody holds or uses, at once; returns how many tokens that freed.

        With `keep`, they go to the host as those that are evicted do.
        """
        freed = 0
        for key in keys:
            node = self.blocks.get(key)
            if node is not None and node.lock_ref == 0:
                self.token_to_kv_pool_allocator.free(node.value)
                freed += len(node.value)
                self._delete_leaf(node, keep)
                self._record_remove_event(node)
        return freed

    def unlocked_tokens(self, keys: Iterable[str]) -> int:
        """Tokens of resident blocks that nothing locks: what holding them takes from what can be evicted."""
        return sum(len(self.blocks[key].key) for key in set(keys) if self.blocks[key].lock_ref == 0)

    def loose_tokens(self, keys: Iterable[str]) -> int:
        """Tokens of those blocks among `keys` that no pool holds."""
        return sum(len(self.blocks[key].key) for key in set(keys) if key not in self._pool_owners)

    def count_hits(self, row: Row) -> None:
        """A request reads the blocks of its row's prefix, each counted once."""
        keys = {piece.key for piece in row.prefix}
        self.hits.update(keys)
        self.total_hits += len(keys)
        self.saved_tokens += row.prefix_tokens

    def add_block(self, block: NewBlock, token_ids: array[int], slots: torch.Tensor) -> TreeNode:
        """A block that is in KV `slots` ([tokens] int64) becomes a node, which is new and nobody's."""
        radix_key = RadixKey(token_ids, _BLOCK + block.key)
        result = self.insert(InsertParams(key=radix_key, value=slots))
        node = result.last_device_node
        self.blocks[block.key] = node
        self.written[block.key] = block.position
        self.block_tokens += len(node.key)
        return node

    # ---- node life ----

    def _insert_helper(self, node: TreeNode, key: RadixKey, *args: Passed, **kwargs: Passed) -> tuple[int, TreeNode]:
        total = len(key)
        prefix_len, last = super()._insert_helper(node, key, *args, **kwargs)
        if prefix_len < total:
            for hook in self.hooks:
                hook.on_insert(last)
        return prefix_len, last

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        head = super()._split_node(key, child, split_len)
        for hook in self.hooks:
            hook.on_split(head, child)
        return head

    def _delete_leaf(self, node: TreeNode, keep: bool = True) -> None:
        name = node.key.extra_key
        super()._delete_leaf(node)
        if name is not None and name.startswith(_BLOCK):
            key = name[len(_BLOCK) :]
            written = self.written.pop(key)
            del self.blocks[key]
            self.block_tokens -= len(node.key)
            if keep and self.host is not None:
                self.host.store(key, node.key.token_ids, written, node.value, self.blocks)
        for hook in self.hooks:
            hook.on_evict(node)

    # ---- locks ----

    def inc_lock_ref(self, node: TreeNode | StitchNode) -> IncLockRefResult:
        if not isinstance(node, StitchNode):
            return super().inc_lock_ref(node)
        result = super().inc_lock_ref(node.tail)
        for member in node.members:
            if member.lock_ref:  # a block hangs from the root: one lock more changes no other node and no sum
                member.lock_ref += 1
            else:
                result.delta += super().inc_lock_ref(member).delta
        return result

    def dec_lock_ref(self, node: TreeNode | StitchNode, params: DecLockRefParams | None = None) -> DecLockRefResult:
        if not isinstance(node, StitchNode):
            return super().dec_lock_ref(node, params)
        result = super().dec_lock_ref(node.tail)
        for member in node.members:
            if member.lock_ref > 1:
                member.lock_ref -= 1
            else:
                result.delta += super().dec_lock_ref(member).delta
        return result

    # ---- requests ----

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        row = carried.request_row(params.req) if params.req is not None else None
        if row is None:
            return super().match_prefix(params)
        begin = compat.now()
        try:
            return self._match_row(row, params.key, params.req)
        except StitchTooShort as error:
            compat.abort_unscheduled(params.req, str(error), 400)
            return self._empty_match_result
        except MissingBlocks as error:
            # Never a dense prefix instead: that would be another answer.
            compat.abort_unscheduled(params.req, compat.missing_message(len(error.keys)), 503)
            return self._empty_match_result
        finally:
            self.stitch_seconds += compat.now() - begin

    def _match_row(self, row: Row, key: RadixKey, req: Req) -> MatchResult:
        """The stitched prefix, then what is known of the request's own tokens (or of the blocks it encodes)."""
        absent = self.missing(piece.key for piece in row.prefix)
        if absent:
            raise MissingBlocks(absent)
        members = [self.blocks[piece.key] for piece in row.prefix]
        slots = [
            node.value if p.tokens == node.value.numel() else node.value[p.start : p.end]
            for node, p in zip(members, row.prefix, strict=True)
        ]
        carried.set_request_written(req, tuple(self.written[piece.key] + piece.start for piece in row.prefix))
        limit, matched, tail = len(key), row.prefix_tokens, self.root_node
        if matched > limit:
            raise StitchTooShort(
                f"the request must recompute from token {limit} on, inside its {matched} stitched tokens;"
                " log-probabilities can start at the request's own tokens only"
            )
        if row.encodes:
            for block in row.new:
                node = self.blocks.get(block.key)
                if node is None or matched + block.tokens > limit:
                    break
                members.append(node)
                slots.append(node.value)
                matched += block.tokens
                self._hold_new(req, row, block.key)
        elif limit > matched:
            own_ids = key.token_ids[matched : limit if row.own is None else min(limit, matched + row.own)]
            own = super().match_prefix(MatchPrefixParams(key=self._own_key(row, own_ids, req.extra_key)))
            slots.append(own.device_indices)
            tail = own.last_device_node
        # Not all at one time: among equals, eviction follows the order of a set, which differs between TP ranks.
        now = compat.now()
        for order, node in enumerate(members):
            node.last_access_time = now + order * 1e-6
        indices = torch.cat(slots) if slots else self._empty_match_result.device_indices
        stitch = StitchNode(dict.fromkeys(members), tail)
        return MatchResult(
            device_indices=indices, last_device_node=stitch, last_host_node=stitch, best_match_node=stitch
        )

    def _hold_new(self, req: Req, row: Row, key: str) -> None:
        """Hold a block for the owner that had it encoded, unless the owner gave up and has let go already."""
        if not compat.is_aborted(req):
            self.hold(row.owner, [key])

    def _own_key(self, row: Row, own_ids: array[int], extra_key: str | None) -> RadixKey:
        return RadixKey(own_ids, f"{_SECRET}:{row.namespace(extra_key)}")

    def cache_unfinished_req(self, req: Req, chunked: bool = False) -> None:
        row = carried.request_row(req)
        if row is None or self.disable:
            super().cache_unfinished_req(req, chunked=chunked)
            for rewritten in self.on_rewrite:
                rewritten(req.req_pool_idx)
            return
        own_ids = compat.own_fill_ids(req, row.prefix_tokens)
        slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, : row.prefix_tokens + len(own_ids)]
        protected, node = self._store(req, row, own_ids, slots, chunked)
        self.inc_lock_ref(node)
        self.dec_lock_ref(req.last_node)
        # The row was rewritten where the tree already had the same tokens: read it again.
        req.prefix_indices = slots.to(dtype=torch.int64, copy=True)
        req.cache_protected_len = protected
        req.last_node = node

    def cache_finished_req(self, req: Req, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        for released in self.on_release:
            released(req.req_pool_idx)
        row = carried.request_row(req)
        if row is None or self.disable:
            return super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle)
        own_ids = compat.own_ids(req, row.prefix_tokens, kv_len_to_handle)
        slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, : row.prefix_tokens + len(own_ids)]
        stored = req.cache_protected_len
        if is_insert and not self.disable_finished_insert:
            stored, _ = self._store(req, row, own_ids, slots, chunked=False)
        self.token_to_kv_pool_allocator.free(slots[stored:])
        if req.last_node is not None:
            self.dec_lock_ref(req.last_node)
        if req.finished():  # and not retracted: a retracted request comes back for its blocks
            self.release(REQUEST_OWNER + req.rid, [piece.key for piece in row.prefix])

    def _store(
        self, req: Req, row: Row, own_ids: array[int], slots: torch.Tensor, chunked: bool
    ) -> tuple[int, StitchNode]:
        """Give the tree what the request has computed beyond its protected prefix: `own_ids` follow the row's prefix.

        Slots of tokens that the tree holds already are freed and the request's row is pointed at the tree's.

        Returns:
            (how many leading tokens of the row the tree now holds, the node that stands for them).
        """
        members = [self.blocks[piece.key] for piece in row.prefix]
        if row.own is not None:  # the branches behind them go with the request
            own_ids = own_ids[: row.own]
            if not own_ids:
                return row.prefix_tokens, StitchNode(dict.fromkeys(members), self.root_node)
        if not row.encodes:
            key = self._own_key(row, own_ids, req.extra_key)
            begin = row.prefix_tokens
            result = self.insert(
                InsertParams(
                    key=key,
                    value=slots[begin : begin + len(own_ids)].to(torch.int64, copy=True),
                    chunked=chunked,
                    priority=getattr(req, "priority", 0) or 0,
                )
            )
            known = begin + result.prefix_len
            if known > req.cache_protected_len:
                held = super().match_prefix(MatchPrefixParams(key=key)).device_indices
                self._replace(req, slots, req.cache_protected_len, known, held, begin)
            return begin + len(own_ids), StitchNode(dict.fromkeys(members), result.last_device_node)

        begin = own_begin = row.prefix_tokens
        for block in row.new:
            end = begin + block.tokens
            if end > own_begin + len(own_ids):
                break  # cut by a chunk: the next chunk completes it
            node = self.blocks.get(block.key)
            if node is None:
                token_ids = own_ids[begin - own_begin : end - own_begin]
                node = self.add_block(block, token_ids, slots[begin:end].to(torch.int64, copy=True))
            elif end > req.cache_protected_len:
                self._replace(req, slots, begin, end, node.value, begin)
            self._hold_new(req, row, block.key)
            members.append(node)
            begin = end
        return begin, StitchNode(dict.fromkeys(members), self.root_node)

    def _replace(
        self, req: Req, slots: torch.Tensor, begin: int, end: int, values: torch.Tensor, values_at: int
    ) -> None:
        """Free the request's slots [begin, end) and put the tree's in their place; values[0] is token `values_at`."""
        if begin < end:
            self.token_to_kv_pool_allocator.free(slots[begin:end].clone())
            self.req_to_token_pool.write(
                (req.req_pool_idx, slice(begin, end)), values[begin - values_at : end - values_at].to(slots.dtype)
            )
            for rewritten in self.on_rewrite:
                rewritten(req.req_pool_idx)
