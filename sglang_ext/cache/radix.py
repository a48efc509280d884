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
from sglang_ext.cache.stitch import MissingBlocks, NodeHooks, StitchNode, StitchTooShort, joined_ids, joined_slots
from sglang_ext.compat import InsertParams, RadixKey, RadixTree, TreeNode
from sglang_ext.names import Passed, Req, ServerArgs

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import DecLockRefParams, DecLockRefResult, IncLockRefResult

    from sglang_ext.cache.host_tier import HostTier

# Namespaces of the tree. Users choose `extra_key` freely, and must not reach a block with it.
_SECRET = secrets.token_hex(8)
_BLOCK = f"{_SECRET}:block:"


class BlockRadixCache(RadixTree):
    """`--radix-cache-backend sglang_ext`.

    Attributes:
        hooks: told of every node's life.
        release_hooks: called with the request slot of every request that ends or is retracted.
        on_rewrite: called with the request slot of every request whose row may name other KV slots than before, for the
            same tokens. Under overlap scheduling the request may have decoded a step by then, from the freed ones.
        on_restore: called with [tokens] KV slots that got a block back from the host, and the first token's position.
        host: where evicted blocks go; None where they are lost.
        step_tokens: that a decoding step gives a request at most; more than one where the server drafts.
        slots_ahead: KV slots that a request needs beside its tokens while it decodes, for what is drafted.
    """

    step_tokens: int = 1
    slots_ahead: int = 0

    def __init__(self, params: Passed) -> None:
        self.hooks: list[NodeHooks] = []
        self.release_hooks: list[Callable[[int], None]] = []
        self.on_rewrite: list[Callable[[int], None]] = []
        self.on_restore: list[Callable[[torch.Tensor, int], None]] = []
        self.host: HostTier | None = None
        self.hits: Counter[str] = Counter()
        self.total_hits = 0
        self.saved_tokens = 0
        self.stitch_seconds = 0.0
        super().__init__(params)
        self._no_slots = torch.empty(0, dtype=torch.int64, device=self.device)

    def serve(self, server_args: ServerArgs) -> None:
        """Know how much a decoding step of a server takes; called once, before the first request."""
        self.step_tokens, self.slots_ahead = compat.step_tokens(server_args), compat.slots_ahead(server_args)

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
                self.removed(node)
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

    def forget_hits(self, keys: Iterable[str]) -> None:
        """No pool has the blocks named `keys` any more: nobody asks how often they were read."""
        for key in keys:
            self.hits.pop(key, None)

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

    def serves(self, req: Req) -> bool:
        """Whether a request is found and kept here, and not by SGLang's own rules."""
        return carried.request_row(req) is not None

    def find_row(self, req: Req, key: RadixKey) -> tuple[torch.Tensor, StitchNode | None] | None:
        """What is known of a request with a row: its KV slots, [tokens] int64, and the node that stands for them.

        The node is None for a request that was refused, and all of it for one without a row.
        """
        row = carried.request_row(req)
        if row is None:
            return None
        begin = compat.now()
        try:
            return self._match_row(row, key, req)
        except StitchTooShort as error:
            compat.abort_unscheduled(req, str(error), 400)
        except MissingBlocks as error:
            # Never a dense prefix instead: that would be another answer.
            compat.abort_unscheduled(req, compat.missing_message(len(error.keys)), 503)
        finally:
            self.stitch_seconds += compat.now() - begin
        return self._no_slots, None

    def _match_row(self, row: Row, key: RadixKey, req: Req) -> tuple[torch.Tensor, StitchNode]:
        """The stitched prefix, then what is known of the request's own tokens (or of the blocks it encodes)."""
        absent = self.missing(piece.key for piece in row.prefix)
        if absent:
            raise MissingBlocks(absent)
        nodes = {piece.key: self.blocks[piece.key] for piece in row.prefix}
        members = list(nodes.values())
        slots = [joined_slots({key: node.value for key, node in nodes.items()}, row.prefix)] if members else []
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
            own, tail = self.longest(own_ids, self._namespace(row, req), req)
            slots.append(own)
        # Not all at one time: among equals, eviction follows the order of a set, which differs between TP ranks.
        now = compat.now()
        for order, node in enumerate(members):
            node.last_access_time = now + order * 1e-6
        found = torch.cat(slots) if slots else self._no_slots
        return found, StitchNode(dict.fromkeys(members), tail, found)

    def path_slots(self, node: TreeNode | StitchNode) -> torch.Tensor | None:
        """[tokens] int64 KV slots of the prefix that `find_row` gave a node for; None for other nodes."""
        return node.slots if isinstance(node, StitchNode) else None

    def _hold_new(self, req: Req, row: Row, key: str) -> None:
        """Hold a block for the owner that had it encoded, unless the owner gave up and has let go already."""
        if not compat.is_aborted(req):
            self.hold(row.owner, [key])

    def _namespace(self, row: Row, req: Req) -> str:
        """Of a request's own tokens in the tree."""
        return f"{_SECRET}:{row.namespace(req.extra_key)}"

    def rewritten(self, slot: int) -> None:
        """The row in `slot` of the request pool may name other KV slots than before."""
        for told in self.on_rewrite:
            told(slot)

    def let_go(self, slot: int) -> None:
        """The request in `slot` of the request pool has ended or is retracted."""
        for told in self.release_hooks:
            told(slot)

    def ended(self, req: Req) -> None:
        """A request with a row has ended, and does not come back for its blocks as one that is retracted does."""
        row = carried.request_row(req)
        if row is not None:
            self.release(REQUEST_OWNER + req.rid, [piece.key for piece in row.prefix])

    def keep_row(self, req: Req, end: int, chunked: bool) -> tuple[int, StitchNode] | None:
        """Give the tree what a request with a row has computed beyond its protected prefix, up to token `end`.

        Slots of tokens that the tree holds already are freed and the request's row is pointed at the tree's.

        Returns:
            (how many leading tokens of the row the tree now holds, the node that stands for them); None for a request
            without a row.
        """
        row = carried.request_row(req)
        if row is None:
            return None
        own_ids = compat.own_ids(req, row.prefix_tokens, end)
        slots = self.req_to_token_pool.req_to_token[compat.request_slot(req), : row.prefix_tokens + len(own_ids)]
        members = [self.blocks[key] for key in dict.fromkeys(piece.key for piece in row.prefix)]
        if row.own is not None:  # the branches behind them go with the request
            own_ids = own_ids[: row.own]
            if not own_ids:
                return row.prefix_tokens, StitchNode(dict.fromkeys(members), self.root_node)
        begin = own_begin = row.prefix_tokens
        if not row.encodes:
            namespace, own = self._namespace(row, req), slots[begin : begin + len(own_ids)]
            had, tail = self.add_tokens(own_ids, namespace, own.to(torch.int64, copy=True), req, begin, chunked)
            known, protected = begin + had, compat.protected(req)
            if known > protected:
                held, _ = self.longest(own_ids, namespace, req)
                self._replace(req, slots, protected, known, held, begin)
            return begin + len(own_ids), StitchNode(dict.fromkeys(members), tail)

        for block in row.new:
            end = begin + block.tokens
            if end > own_begin + len(own_ids):
                break  # cut by a chunk: the next chunk completes it
            node = self.blocks.get(block.key)
            if node is None:
                token_ids = own_ids[begin - own_begin : end - own_begin]
                node = self.add_block(block, token_ids, slots[begin:end].to(torch.int64, copy=True))
            elif end > compat.protected(req):
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
            slot = compat.request_slot(req)
            self.req_to_token_pool.write(
                (slot, slice(begin, end)), values[begin - values_at : end - values_at].to(slots.dtype)
            )
            self.rewritten(slot)
