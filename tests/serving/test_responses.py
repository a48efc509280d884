"""Answers that /v1/responses keeps: how many, whose, and which give way."""

from __future__ import annotations

import contextvars
import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.serving.errors import PoolError
from sglang_ext.serving.responses import Answers, after_init


def new_id() -> str:
    return f"resp_{uuid.uuid4().hex}"


def response(status: str = "completed") -> Any:
    return SimpleNamespace(status=status)


class Store:
    """A store with somebody who asks."""

    def __init__(self, most: int) -> None:
        self.caller = "a"
        self.answers = Answers(most, lambda: self.caller)
        self.responses, self.messages = self.answers.responses, self.answers.messages

    def finished(self, id: str | None = None, status: str = "completed", again: bool = False) -> str:
        """A request of its own begins and ends; with `again`, it stores its messages once more at its end."""
        id = id or new_id()

        def run() -> None:
            self.messages[id] = [id]
            self.responses[id] = response(status)
            if again:
                self.messages[id] = [id, "answer"]

        contextvars.copy_context().run(run)
        return id


def test_the_oldest_give_way_with_their_messages() -> None:
    store = Store(2)
    ids = [store.finished() for _ in range(4)]
    assert [store.responses.get(id) is not None for id in ids] == [False, False, True, True]
    assert len(store.answers) == 2 and store.messages[ids[3]] == [ids[3]]
    with pytest.raises(ValueError, match="cannot be continued"):
        store.messages[ids[0]]


def test_messages_are_stored_again_by_their_own_request_alone() -> None:
    """As SGLang 0.5.23 does at the end of an answer; one that gave way meanwhile stays away."""
    store = Store(2)
    id = store.finished(again=True)
    assert store.messages[id] == store.messages.get(id, []) == [id, "answer"] and len(store.answers) == 1
    with pytest.raises(PoolError, match="is taken"):
        store.finished(id)
    late = new_id()

    def gives_way() -> None:
        store.messages[late] = []
        store.finished(), store.finished()
        store.messages[late] = ["answer"]

    contextvars.copy_context().run(gives_way)
    assert store.messages.get(late, ["none"]) == ["none"] and len(store.answers) == 2


def test_strangers_find_nothing() -> None:
    store = Store(4)
    id = store.finished()
    store.caller = "b"
    assert store.responses.get(id) is None is store.responses.get(new_id())
    with pytest.raises(ValueError, match="cannot be continued"):
        store.messages[id]
    for change in (lambda: store.messages.__setitem__(id, []), lambda: store.responses.__setitem__(id, response())):
        with pytest.raises(PoolError, match="is taken") as error:
            change()
        assert error.value.status_code == 409
    store.caller = "a"
    assert store.messages[id] == [id] and store.responses.get(id).status == "completed"


def test_ids_are_the_servers() -> None:
    store = Store(4)
    for id in ("alice", "resp_alice", f"resp_{uuid.uuid4()}", new_id() + "\n"):
        with pytest.raises(PoolError, match="the server chooses it") as error:
            store.messages[id] = []
        assert error.value.status_code == 400
    assert len(store.answers) == 0


def test_unfinished_answers_stay_and_are_bounded() -> None:
    store = Store(2)
    first = store.finished(status="queued")
    second = store.finished()
    third = store.finished(status="in_progress")
    assert [store.responses.get(id) is None for id in (first, second, third)] == [False, True, False]
    with pytest.raises(PoolError, match="max_responses=2") as error:
        store.messages[new_id()] = []
    assert error.value.status_code == 429
    store.responses[second] = response()  # it gave way while it was generated: its client has it, nobody else
    assert store.responses.get(second) is None and len(store.answers) == 2
    store.responses.get(first).status = "completed"
    store.messages[new_id()] = []
    assert store.responses.get(first) is None


def test_an_answer_that_is_not_stored_whole_is_read_but_not_continued() -> None:
    """SGLang keeps what runs in the background so that it can be read, without messages where `store` is false."""
    store, id = Store(2), new_id()
    store.responses[id] = response("queued")
    assert store.responses.get(id).status == "queued"
    with pytest.raises(ValueError, match="were not stored"):
        store.messages[id]


def test_other_servers_keep_sglangs_own() -> None:
    handler = SimpleNamespace(response_store={}, msg_store={})
    after_init(None, handler, SimpleNamespace(ext_pools=None), None)
    assert handler.response_store == {} == handler.msg_store
    service = SimpleNamespace(settings=SimpleNamespace(max_responses=7))
    after_init(None, handler, SimpleNamespace(ext_pools=service, ext_keys=None), None)
    assert handler.msg_store._answers() is handler.response_store._answers()
    assert handler.msg_store._answers().most == 7
