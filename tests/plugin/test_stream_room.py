"""Room for streams without an engine: what has ended counts as evictable, and which of it gives way for a batch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext import compat
from sglang_ext.cache.conversation import Conversation
from sglang_ext.cache.rows import WIRE_KEY
from sglang_ext.cache.streams import StreamCache
from sglang_ext.compat import AddReqResult, RadixKey
from sglang_ext.serving.streams import StreamMode

SLOTS = 4  # of each stream, however long
TOKENS = 10  # of a prompt


class States:
    """A policy that keeps nothing; one stream can be copied from its fifth token on."""

    request_options = frozenset({"conversation", "continue", "conversation_key"})
    of_tokens, forks, host = True, True, None

    def slots(self, options: Any, tokens: int) -> int:
        return SLOTS

    def cut(self, options: Any, begin: int, end: int, prompt: int) -> int:
        return end

    def fork_point(self, state: Any, tokens: int, prompt: int) -> int:
        return 5 if tokens >= 5 else 0

    def state_of(self, slot: int) -> None:
        """A running stream has none yet, and is no source."""

    def drop(self, state: Any) -> None:
        """It kept nothing."""

    def resume(self, slot: int, state: Any, tokens: int) -> None:
        """Likewise."""

    def fork(self, slot: int, fork: Any, slots: torch.Tensor) -> None:
        """Likewise."""


class Allocator:
    """KV slots of which nothing is written."""

    device = "cpu"

    def __init__(self, size: int) -> None:
        self.size, self.slots = size, list(range(size))

    def available_size(self) -> int:
        return len(self.slots)

    def alloc(self, count: int) -> torch.Tensor | None:
        if count > len(self.slots):
            return None
        taken, self.slots = self.slots[:count], self.slots[count:]
        return torch.tensor(taken, dtype=torch.int64)

    def free(self, slots: torch.Tensor) -> None:
        self.slots += slots.tolist()


class Asked:
    """A scheduler's request."""

    to_finish = finished_reason = extra_key = None
    retracted_stain = False

    def __init__(self, rid: str, ids: Sequence[int], turn: Conversation | None = None, **custom: Any) -> None:
        if turn is not None:
            custom = {"conversation": turn.options["conversation"], "continue": True, WIRE_KEY: turn}
        self.rid, self.origin_input_ids, self.output_ids = rid, list(ids), list[int]()
        self.full_untruncated_fill_ids = self.origin_input_ids
        self.sampling_params = SimpleNamespace(custom_params=custom or None, max_new_tokens=8)
        self.req_pool_idx: int | None = None
        self.kv = self  # where the newer SGLang keeps the row
        self.looked_up(0)

    def looked_up(self, tokens: int) -> None:
        self.prefix_indices, self.prefix_len = [0] * tokens, tokens

    def init_next_round_input(self, cache: StreamCache) -> None:
        ids = array("q", self.origin_input_ids)
        self.looked_up(cache.find_row(self, RadixKey(ids, None, limit=len(ids) - 1)))


class Adder:
    """What a pass has room for; SGLang counts likewise."""

    prefill_max_requests = new_chunked_req = None

    def __init__(self, cache: StreamCache, tokens: int) -> None:
        self.tree_cache, self.rem_chunk_tokens = cache, tokens
        self.rem_input_tokens = 1000
        self.can_run_list: list[Asked] = []
        self.taken = 0

    @property
    def rem_total_tokens(self) -> int:
        free = self.tree_cache.token_to_kv_pool_allocator.available_size()
        return int(free + self.tree_cache.evictable_size() - self.taken)

    def budget_state(self) -> AddReqResult:
        if self.rem_total_tokens <= 0:
            return AddReqResult.NO_TOKEN
        return AddReqResult.OTHER if self.rem_chunk_tokens <= 0 else AddReqResult.CONTINUE


def charge(adder: Adder, req: Asked, tokens: int, slots: int) -> None:
    adder.rem_chunk_tokens -= tokens
    adder.taken += slots


class World:
    """A cache of so many streams, and a scheduler's passes over it."""

    def __init__(self, streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compat, "charge_slots", charge)
        monkeypatch.setattr(compat, "set_extend", lambda req, begin, end: None)
        monkeypatch.setattr(compat, "set_reserved", lambda req, slots: None)
        self.allocator, rows = Allocator(streams * SLOTS), SimpleNamespace(write=lambda where, slots: None)
        params = SimpleNamespace(req_to_token_pool=rows, token_to_kv_pool_allocator=self.allocator, page_size=1)
        self.cache, self.rows = StreamCache(params, States(), open_conversations=True), 0  # type: ignore[arg-type]

    def ended(self, name: str, whole: Sequence[int] = ()) -> Conversation:
        """A stream that has ended: with its tokens one that later prompts find, without them a named conversation."""
        slots = self.allocator.alloc(SLOTS)
        assert slots is not None
        tokens = array("q", whole) if whole else None
        options = {} if whole else {"conversation": name}
        kept = Conversation(slots, len(whole) - 1 if whole else TOKENS, 7, options, object(), tokens)
        self.cache.conversations[name] = kept
        return kept

    def scheduled(
        self, waiting: Sequence[Asked], tokens: int = 1000, cut: bool = False
    ) -> tuple[list[str], AddReqResult | None]:
        """What one pass with room for so many tokens runs, and how the last request that it looked at was answered."""
        mode, adder, said = StreamMode(), Adder(self.cache, tokens), None
        mode.between_passes(SimpleNamespace(tree_cache=self.cache, waiting_queue=list(waiting)))
        for req in waiting:
            req.init_next_round_input(self.cache)
            said = mode.add(pytest.fail, adder, req, cut, None)
            if said is not AddReqResult.CONTINUE:
                break
        self.balanced()
        self.cache.make_room(adder.can_run_list)
        for req in adder.can_run_list:
            req.req_pool_idx = self.rows = self.rows + 1
            self.cache.reserve(req)
        self.balanced()
        return [req.rid for req in adder.can_run_list], said

    def balanced(self) -> None:
        """SGLang's check of its accounting."""
        accounted = self.cache.evictable_size() + self.cache.protected_size() + self.allocator.available_size()
        assert accounted == self.allocator.size


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(3, monkeypatch)


def prompt(first: int) -> list[int]:
    return list(range(first, first + TOKENS))


def test_what_has_ended_is_evictable(world: World) -> None:
    """SGLang goes on to look for requests where streams that have ended fill the KV cache."""
    for name in ("a", "b", "c"):
        world.ended(name)
    assert (world.cache.evictable_size(), world.cache.protected_size()) == (3 * SLOTS, 0)
    ran, said = world.scheduled([Asked("1", prompt(100))])
    assert (ran, said) == (["1"], AddReqResult.CONTINUE)
    assert (world.cache.evictable_size(), world.cache.protected_size()) == (2 * SLOTS, SLOTS)
    ran, said = world.scheduled([Asked(rid, prompt(int(rid) * 100)) for rid in ("2", "3", "4")])
    assert (ran, said) == (["2", "3"], AddReqResult.NO_TOKEN)
    assert (world.cache.evictable_size(), world.cache.protected_size()) == (0, 3 * SLOTS)


def test_nothing_gives_way_to_a_request_whose_chunk_does_not_fit(world: World) -> None:
    """SGLang cuts one prompt at a time, and has cut one here."""
    for name in ("a", "b", "c"):
        world.ended(name)
    ran, said = world.scheduled([Asked("1", prompt(100)), Asked("2", prompt(200))], tokens=TOKENS + 5, cut=True)
    assert (ran, said) == (["1"], AddReqResult.OTHER)
    assert list(world.cache.conversations) == ["b", "c"]


def test_a_stream_that_the_next_turn_goes_on_from_gives_way_last(world: World) -> None:
    """The pass has no room for the turn, and SGLang does not look at it."""
    oldest = world.ended("a")
    for name in ("b", "c"):
        world.ended(name)
    turns = [Asked("2", prompt(200)), Asked("3", [7], turn=oldest)]
    ran, said = world.scheduled([Asked("1", prompt(100)), *turns], tokens=TOKENS)
    assert (ran, said) == (["1"], AddReqResult.OTHER)
    assert list(world.cache.conversations) == ["a", "c"]
    assert world.scheduled(turns)[0] == ["2", "3"]
    assert not world.cache.conversations


@pytest.mark.parametrize("shared", [TOKENS, 6])
def test_a_stream_that_the_next_prompt_begins_with_gives_way_last(world: World, shared: int) -> None:
    """It goes on from all of the stream's tokens, or begins as a copy of the first ones."""
    world.ended("a", prompt(100))
    world.ended("b", prompt(200))
    world.ended("c", prompt(300))
    same = Asked("2", [*prompt(100)[:shared], *prompt(500)])
    assert world.scheduled([Asked("1", prompt(400)), same], tokens=TOKENS)[0] == ["1"]
    assert list(world.cache.conversations) == ["a", "c"]


def test_of_one_batch_nothing_gives_way_that_a_later_request_goes_on_from(world: World) -> None:
    oldest = world.ended("a")
    for name in ("b", "c"):
        world.ended(name)
    requests = [Asked("1", prompt(400)), Asked("2", [7], turn=oldest)]
    assert world.scheduled(requests) == (["1", "2"], AddReqResult.CONTINUE)
    assert list(world.cache.conversations) == ["c"]


def test_what_a_batch_copies_is_not_evictable(world: World) -> None:
    oldest = world.ended("a")
    for name, first in (("b", 200), ("c", 300)):
        world.ended(name, prompt(first))
    requests = [Asked("1", [*prompt(200)[:6], *prompt(500)]), Asked("2", [7], turn=oldest)]
    assert world.scheduled(requests) == (["1", "2"], AddReqResult.NO_TOKEN)
    assert list(world.cache.conversations) == ["b"]


def test_a_request_copies_nothing_whose_room_it_needs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, monkeypatch)
    world.ended("a", prompt(100))
    same = Asked("1", [*prompt(100)[:6], *prompt(500)])
    assert world.scheduled([same], tokens=3, cut=True) == ([], AddReqResult.OTHER)
    assert list(world.cache.conversations) == ["a"]
    same.init_next_round_input(world.cache)
    assert same.prefix_len == 5  # it may be a copy yet, where room comes free before the pass has some
    assert world.scheduled([same]) == (["1"], AddReqResult.NO_TOKEN)
    assert (same.prefix_len, world.cache.conversations) == (0, {})
