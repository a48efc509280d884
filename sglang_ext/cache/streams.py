"""What stands in the radix cache's place for streams: it reserves a bounded set of KV slots for each request.

A stream's slots hold what it has kept, each key-value head its own tokens, and its scores hold what all of its queries
attended to. So it is the state after all of its tokens and after no other number of them. A policy may keep more: the
states after shorter prefixes, at which another stream can begin as a copy (`cache.forks`). SGLang's cache for servers
without a radix tree does all but allotting and freeing.

A stream stays when its request ends, until its room is needed. A request whose prompt begins with all tokens of one,
its answer included, goes on from there: the next turn of a chat does. A request may also name a conversation. The next
turn, which names it too, is sent without what came before, and computed alone, however long the conversation is.
SGLang counts what has ended as evictable. It gives way when a batch is made that needs its room (`make_room`): streams
without a name first, then conversations, the one that was longest without a turn before others, and last of all what
waiting requests would go on from or copy.

A name belongs to who begins it, from the moment its first turn runs until it gives way: others, who do not have its key
(`custom_params`, `conversation_key`), can neither go on from it nor begin it anew. That is decided here, request by
request in the order in which they run, so of two first turns at once one finds the name taken.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch

from sglang_ext import compat
from sglang_ext.cache import carried
from sglang_ext.cache.conversation import Conversation, StreamStates, has_key, longest_whole, name_of, tokens_before
from sglang_ext.cache.forks import Fork, Source, longest_fork
from sglang_ext.compat import RadixKey, TreelessCache
from sglang_ext.config import CONVERSATION_OPTIONS
from sglang_ext.names import Passed, Req
from sglang_ext.types import JsonObject, Options

MAX_TOKENS = 2**31 - 2**24
"""Tokens of a stream, prompt and answer: their numbers are int32, and those of a stride lie ahead of the last."""


class StreamCache(TreelessCache):
    """`--radix-cache-backend sglang_ext` of a policy whose requests are streams.

    A stream's slots are not one a token. Its row in `req_to_token` begins with the reserved slots.

    Attributes:
        policy: says how many slots a request needs.
        release_hooks: called with the request slot of every request that ends or is retracted.
        reserved: request slot -> how many KV slots it has.
        running: request slot -> request, of those without a name that others may begin like.
        conversations: name (`name_of`) -> what its last turn left, and something unique -> what a request without a
            name left; of each kind the next to give way first.
        waiting: the requests that waited when SGLang began to make the next batch.
        open_conversations: whoever knows a conversation's name may go on from it and begin it anew.
    """

    def __init__(self, params: Passed, policy: StreamStates, open_conversations: bool = False) -> None:
        super().__init__(params)
        self.policy, self.open_conversations = policy, open_conversations
        self.release_hooks: list[Callable[[int], None]] = []
        self.reserved: dict[int, int] = {}
        self.running: dict[int, Req] = {}
        self.conversations: dict[Hashable, Conversation] = {}
        self.waiting: Sequence[Req] = ()
        self._found: weakref.WeakKeyDictionary[Req, Conversation] = weakref.WeakKeyDictionary()  # request -> its prefix
        self._forks: weakref.WeakKeyDictionary[Req, Fork] = weakref.WeakKeyDictionary()  # request -> what it copies
        self._claimed: dict[str, Conversation] = {}  # by the id of a request in the batch that is being made
        self._copied: dict[str, Fork] = {}  # likewise
        self._whole: Req | None = None  # the request that is looked up to begin as no copy
        self._before: dict[int, int] = {}  # request slot -> tokens of the stream before this turn
        self._under_way: dict[str, tuple[Hashable, str | None]] = {}  # id of a turn -> name and key of its conversation

    @property
    def most_tokens(self) -> int:
        """Tokens of a stream at most, all turns of its conversation together."""
        return MAX_TOKENS if self.policy.host is None else min(MAX_TOKENS, self.policy.host_tokens())

    def reset(self) -> None:
        for turn in (*self.conversations.values(), *self._claimed.values()):
            self.policy.drop(turn.state)
        books = (self.reserved, self.running, self.conversations, self._claimed, self._copied, self._before)
        for kept in (*books, self._under_way, self._found, self._forks):
            kept.clear()

    # ---- conversations ----

    def conversation(self, options: Options) -> Conversation | None:
        """The conversation that a request names and has the key of, where its last turn has ended."""
        kept = self.conversations.get(name_of(options))
        return kept if kept is not None and self._opens(options, kept.secret) else None

    def _opens(self, options: Options, secret: str | None) -> bool:
        """Whether a request with these `custom_params` has the key of a conversation."""
        return self.open_conversations or has_key(options, secret)

    def _taken(self, options: Options) -> bool:
        """Whether the name that a first turn would begin belongs to somebody else."""
        name = name_of(options)
        if name is None:
            return False
        kept = self.conversations.get(name)
        holders = [secret for held, secret in self._under_way.values() if held == name]
        return not all(self._opens(options, secret) for secret in (*holders, *([kept.secret] if kept else [])))

    def find_row(self, req: Req, key: RadixKey) -> int:
        """Tokens of the stream that a prompt begins with; a turn that cannot go on is refused.

        Its answer would be another.
        """
        options = carried.request_options(req)
        if options.get("continue") and not compat.is_aborted(req):
            turn: Conversation | None = carried.sent_turn(req)
            name = options["conversation"]
            if turn is None or self.conversations.get(name_of(options)) is not turn:
                why = f"conversation {name!r} cannot be continued: this server never had it, gave it up for others, is"
                why += " still answering its last turn, or conversation_key is another; send it whole, without continue"
                why += " (behind a router, under a new name: another server may still have this one)"
                compat.abort_unscheduled(req, why, 400)
            elif self._settings(options) != (began := self._settings(turn.options)):
                compat.abort_unscheduled(req, f"conversation {name!r} began with the options {began}: keep them", 400)
            elif turn.tokens + len(req.origin_input_ids) >= self.most_tokens:
                sizes = f"has {turn.tokens} tokens, and this turn {len(req.origin_input_ids)}"
                why = f"conversation {name!r} {sizes}: expected fewer than {self.most_tokens} together; begin another"
                compat.abort_unscheduled(req, why, 400)
        elif not compat.is_aborted(req) and self._taken(options):
            why = f"conversation {options['conversation']!r} is another's: to begin it anew send its conversation_key,"
            compat.abort_unscheduled(req, why + " or choose another name", 400)
        if options.get("continue") or compat.is_aborted(req):
            return 0
        self._found.pop(req, None)
        self._forks.pop(req, None)
        if (longest := self._longest(key, options)) is not None:
            self._found[req] = longest
            return longest.tokens
        if (fork := self._fork(req, key, options)) is not None:
            self._forks[req] = fork
            return fork.tokens
        return 0

    def _fork(self, req: Req, key: RadixKey, options: JsonObject) -> Fork | None:
        """The stream without a name whose beginning a prompt shares; settings of its own find none."""
        if not self.policy.forks or req is self._whole or self._settings(options):
            return None
        sources = [
            Source(kept.whole, kept.key, kept.state, kept.slots)
            for kept in self.conversations.values()
            if kept.whole is not None
        ]
        for slot, other in self.running.items():
            state = self.policy.state_of(slot)
            if state is not None:
                slots = self.req_to_token_pool.req_to_token[slot, : self.reserved[slot]]
                sources.append(Source(other.origin_input_ids, other.extra_key, state, slots))
        point = partial(self.policy.fork_point, prompt=len(req.origin_input_ids))
        # The tokens behind the key's end have to be computed, for their log-probabilities.
        return longest_fork(key.token_ids, key.extra_key, sources, point, most=len(key))

    def begin_whole(self, req: Req) -> bool:
        """Have a request that would begin as a copy compute all of its prompt; False for one that does so anyway.

        Where there is no room for a stream beside the one that it would copy, that one can give way then.
        """
        if self._copies(req) is None:
            return False
        self._whole = req
        req.init_next_round_input(self)
        self._whole = None  # where it has to wait after all, it may be a copy in the next pass
        return True

    def _copies(self, req: Req) -> Fork | None:
        """What a request begins as a copy of: what the look-up found last whose tokens SGLang took for computed."""
        fork = self._copied.get(req.rid) or self._forks.get(req)
        return fork if fork is not None and compat.computed(req) == fork.tokens else None

    def _longest(self, key: RadixKey, options: JsonObject) -> Conversation | None:
        """The longest stream without a name that a prompt begins with; settings of its own find none."""
        if not self.policy.of_tokens or self._settings(options):
            return None
        return longest_whole(self.conversations.values(), key.token_ids, len(key), key.extra_key)

    def _settings(self, options: JsonObject) -> JsonObject:
        """What of the options cannot change from turn to turn."""
        names = self.policy.request_options - CONVERSATION_OPTIONS
        return {name: value for name, value in options.items() if name in names}

    def _turn(self, req: Req) -> Conversation | None:
        """What a request goes on from; None for one that begins."""
        if compat.is_aborted(req):
            return None
        claimed = self._claimed.get(req.rid)
        sent = carried.sent_turn(req)
        if sent is None and (found := self._found.get(req)) is not None and compat.computed(req) == found.tokens:
            sent = found
        return claimed or (sent if any(kept is sent for kept in self.conversations.values()) else None)

    def claim(self, req: Req) -> None:
        """A request comes into the next batch: what it goes on from gives way to nobody any more."""
        options = carried.request_options(req)
        if (named := name_of(options)) is not None and not compat.is_aborted(req):
            self._under_way[req.rid] = named, options.get("conversation_key")
        if not self._holds(req) and (fork := self._copies(req)) is not None:
            self._copied[req.rid] = fork
        turn = None if self._holds(req) else self._turn(req)
        if turn is not None and req.rid not in self._claimed:
            del self.conversations[next(name for name, kept in self.conversations.items() if kept is turn)]
            self._claimed[req.rid] = turn

    # ---- room ----

    def evictable_size(self) -> int:
        """Slots of what has ended, and gives way where others need them."""
        return sum(len(kept.slots) for kept in self._evictable().values())

    def protected_size(self) -> int:
        """Slots of all requests, those that wait for their next chunk among them, and of what a batch begins from."""
        kept = [*self.conversations.values(), *self._claimed.values()]
        return sum(self.reserved.values()) + sum(len(each.slots) for each in kept) - self.evictable_size()

    def _evictable(self) -> dict[Hashable, Conversation]:
        """What may give way: all but what a request of the batch that is being made copies."""
        copied = {id(fork.source.state) for fork in self._copied.values()}
        return {name: kept for name, kept in self.conversations.items() if id(kept.state) not in copied}

    def _begins_from(self, req: Req) -> list[Conversation]:
        """What has ended that a request without slots goes on from, or copies."""
        turn, fork = self._turn(req), self._copies(req)
        state = object() if fork is None else fork.source.state
        return [kept for kept in self.conversations.values() if kept is turn or kept.state is state]

    def fits(self, req: Req, slots: int, batch: Sequence[Req]) -> bool:
        """Whether a waiting request has room beside those of a batch, where what has ended gives way.

        Args:
            req: it waits.
            slots: KV slots that are free or evictable, without those that `batch` needs.
            batch: what comes before it into the batch that is being made.
        """
        own = self._begins_from(req)
        others = [kept for kept in self._evictable().values() if kept not in own]
        taken = self.evictable_size() - sum(len(kept.slots) for kept in others)  # `own` does not give way to itself
        if self.need(req) + taken > slots:
            return False
        host, blocks = self.policy.host, sum(self.need_blocks(each) for each in (*batch, req))
        if host is None or blocks <= host.available:
            return True
        return blocks <= host.available + host.freed_by(self.policy.host_lease(kept.state) for kept in others)

    def make_room(self, batch: Sequence[Req]) -> None:
        """Let what has ended go until the requests of a batch can have the slots and blocks that `fits` has counted."""
        slots, blocks = sum(map(self.need, batch)), sum(map(self.need_blocks, batch))
        if self._has(slots, blocks):
            return
        waiting = [req for req in self.waiting if req not in batch]
        if waiting:
            waiting[0].init_next_round_input(self)  # nobody may have looked yet what it begins from
        names = iter(self._order(waiting))
        while not self._has(slots, blocks) and (name := next(names, None)) is not None:
            self.drop(name)

    def _has(self, slots: int, blocks: int) -> bool:
        """Whether so many slots and blocks are free."""
        free, host = self.token_to_kv_pool_allocator.available_size(), self.policy.host
        return bool(free >= slots and (host is None or host.available >= blocks))

    def _order(self, waiting: Sequence[Req]) -> list[Hashable]:
        """Names of what may give way, what gives way first before the rest."""
        wanted = [each for req in waiting for each in self._begins_from(req)]
        kept = self._evictable()
        return sorted(kept, key=lambda name: (kept[name] in wanted, kept[name].whole is None))

    def drop(self, name: Hashable) -> None:
        """Forget a conversation, if it is there."""
        kept = self.conversations.pop(name, None)
        if kept is not None:
            self.policy.drop(kept.state)
            self.token_to_kv_pool_allocator.free(kept.slots)

    # ---- slots ----

    def _holds(self, req: Req) -> bool:
        """Whether a request has its KV slots."""
        return compat.has_row(req) and compat.request_slot(req) in self.reserved

    def need(self, req: Req) -> int:
        """KV slots that a request has to be given before it runs; none when it has them."""
        if self._holds(req):
            return 0
        turn = self._turn(req)
        slots = self.policy.slots(carried.request_options(req), _tokens(req) + tokens_before(turn))
        return max(0, slots - len(turn.slots)) if turn else slots

    def need_blocks(self, req: Req) -> int:
        """Blocks of host memory that a request has to be promised before it runs; none when it was."""
        if self._holds(req) or self.policy.host is None:
            return 0
        turn = self._turn(req)
        held = len(self.policy.host_lease(turn.state).ids) if turn else 0
        if (fork := self._copies(req)) is not None:
            held = self.policy.host_need(fork.tokens + 1)
        return max(0, self.policy.host_need(_tokens(req) + tokens_before(turn)) - held)

    def cut(self, req: Req, begin: int, end: int) -> int:
        """Where a chunk [begin, end) of a prompt, or a shorter one, is to end; `begin` where it must wait."""
        before = self._before[compat.request_slot(req)] if self._holds(req) else tokens_before(self._turn(req))
        prompt = before + len(req.origin_input_ids)
        return self.policy.cut(carried.request_options(req), before + begin, before + end, prompt) - before

    def reserve(self, req: Req) -> None:
        """Give a request that has a row its KV slots, unless it has them.

        Raises:
            RuntimeError: there are not as many free; `need` was not counted at admission.
        """
        if self._holds(req):
            return
        more, blocks = self.need(req), self.need_blocks(req)
        found = self.token_to_kv_pool_allocator.alloc(more)
        if found is None:
            free = self.token_to_kv_pool_allocator.available_size()
            raise RuntimeError(f"request {req.rid} was admitted with {more} KV slots, and {free} are free")
        slot = compat.request_slot(req)
        slots, turn, fork = found.to(torch.int32), self._claimed.pop(req.rid, None), self._copied.pop(req.rid, None)
        self._forks.pop(req, None)  # it would keep what it copies alive
        if turn is not None:
            slots = torch.cat([turn.slots, slots])
            self.policy.resume(slot, turn.state, tokens_before(turn))
        elif fork is not None:
            self.policy.fork(slot, fork, slots)
        if self.policy.host is not None:
            self.policy.host_reserve(slot, blocks)
        self._before[slot] = tokens_before(turn)
        self.req_to_token_pool.write((slot, slice(0, len(slots))), slots)
        self.reserved[slot] = len(slots)
        if self.policy.forks and self._nameless(req):
            self.running[slot] = req
        compat.set_reserved(req, len(slots))

    def finish_row(self, req: Req) -> None:
        """A request has ended, or is retracted: its slots are free, or stay with its stream."""
        self._under_way.pop(req.rid, None)
        slot = compat.request_slot(req)
        self.running.pop(slot, None)
        before, count = self._before.pop(slot), self.reserved.pop(slot)
        slots = self.req_to_token_pool.req_to_token[slot, :count].clone()
        options = carried.request_options(req)
        name = name_of(options)
        if req.finished() and not compat.is_aborted(req):
            if name is not None:
                slots = self._keep(name, req, before, slots)
            elif req.output_ids and self._nameless(req) and self._is_found_again(req):
                whole = array("q", req.origin_input_ids) + array("q", req.output_ids)  # copies of their memory
                slots = self._keep(object(), req, before, slots, whole)
        for released in self.release_hooks:
            released(slot)
        self.token_to_kv_pool_allocator.free(slots)

    def _nameless(self, req: Req) -> bool:
        """Whether later requests may find a request's stream by its tokens: not one of SGLang's probes of health."""
        options = carried.request_options(req)
        return options.get("conversation") is None and not self._settings(options) and not compat.is_probe(req)

    def _is_found_again(self, req: Req) -> bool:
        """Whether a later request can use anything of a stream that ends."""
        if self.policy.of_tokens:
            return True
        if not self.policy.forks:
            return False
        state = self.policy.state_of(compat.request_slot(req))
        return self.policy.fork_point(state, len(req.origin_input_ids), MAX_TOKENS) > 0

    def _keep(
        self, name: Hashable, req: Req, before: int, slots: torch.Tensor, whole: array[int] | None = None
    ) -> torch.Tensor:
        """Keep a request's stream; returns slots that it does not need, all where conversations have all the room."""
        options = carried.request_options(req)
        answer = len(req.output_ids)
        tokens = before + len(req.origin_input_ids) + max(answer - 1, 0)
        held = self.policy.slots(options, tokens + 1)
        self.drop(name)
        # A policy's state has the size of a full stream, however short this one is.
        while len(self.conversations) >= max(1, self.token_to_kv_pool_allocator.size // self.policy.slots({}, 2**31)):
            first = self._order(self.waiting)[0]
            if whole is not None and self.conversations[first].whole is None:
                return slots
            self.drop(first)
        state, last = self.policy.park(compat.request_slot(req)), req.output_ids[-1] if answer else None
        secret = options.get("conversation_key")
        kept = Conversation(slots[:held], tokens, last, options, state, whole, req.extra_key, secret)
        self.conversations[name] = kept
        return slots[held:]


def _tokens(req: Req) -> int:
    """Tokens that a request may compute, with the step that overlap scheduling runs past the end.

    One that was refused computes one token, and says why then.
    """
    new = 0 if compat.is_aborted(req) else req.sampling_params.max_new_tokens
    return len(req.origin_input_ids) + new + 1
