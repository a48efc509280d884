"""What /v1/responses keeps to be read, cancelled or continued: a bounded number of answers, each for who asked for it.

SGLang keeps every answer and its messages in two dictionaries, for ever and for everybody. What stands in their places
here looks like them, as far as SGLang uses them, and asks whose request is being served.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from sglang_ext.names import OpenAIAnswer, OpenAIHandler, Passed, TokenizerManager
from sglang_ext.serving.access import owner_of_answers, tenant_at_hand
from sglang_ext.serving.errors import PoolError
from sglang_ext.types import Json

_OWN_ID = re.compile(r"resp_[0-9a-f]{32}")  # SGLang's: a random UUID
MOST_CHARACTERS = 1 << 26  # of the messages of all answers that are kept
_UNFINISHED = ("queued", "in_progress")

_begun: ContextVar[str] = ContextVar("sglang_ext_begun_response", default="")
"""The id of the answer whose messages the request at hand has stored; tasks that it starts inherit it."""


@dataclass
class StoredAnswer:
    """One request to /v1/responses that wants to be stored.

    Attributes:
        owner: whose it is (`access.owner_of_answers`).
        response: what is read by its id; None until there is one.
        messages: the conversation up to its answer, which a next one continues; None where they are not stored.
        characters: of the messages.
    """

    owner: str
    response: OpenAIAnswer | None = None
    messages: list[Json] | None = None
    characters: int = 0

    @property
    def unfinished(self) -> bool:
        """Whether it runs in the background: somebody was told its id and waits for it."""
        return getattr(self.response, "status", None) in _UNFINISHED


class Answers:
    """At most `most` stored answers by id, the oldest first; those that run in the background do not give way.

    Attributes:
        responses: stands for SGLang's `response_store`.
        messages: stands for SGLang's `msg_store`.
    """

    def __init__(self, most: int, owner: Callable[[], str]) -> None:
        self.most, self.owner = most, owner
        self._kept: dict[str, StoredAnswer] = {}
        self.responses, self.messages = Responses(lambda: self), Messages(lambda: self)

    def __len__(self) -> int:
        return len(self._kept)

    def full(self) -> bool:
        """Whether there is room for no more, because nothing that is kept may give way."""
        return len(self._kept) >= self.most and all(answer.unfinished for answer in self._kept.values())

    def find(self, id: str) -> StoredAnswer | None:
        """The answer of that id if it is the caller's; a stranger learns no more than that it is not there."""
        found = self._kept.get(id)
        return found if found is not None and found.owner == self.owner() else None

    def add(self, id: str) -> StoredAnswer:
        """A new answer, for which the oldest that is finished gives way.

        Raises:
            PoolError: the id is not a random one of SGLang's or is taken, or all answers that are kept are unfinished.
        """
        if not _OWN_ID.fullmatch(id):
            raise PoolError(
                f"request_id={id!r}: an answer that is stored is found by its id, so the server chooses it: leave"
                " request_id out, or set store to false"
            )
        if id in self._kept:
            raise PoolError(f"request_id={id!r} is taken: leave it out", 409)
        if self.full():
            raise PoolError(
                f"{len(self._kept)} answers are being generated in the background, as many as the server keeps"
                f" (max_responses={self.most}): wait for one, or cancel it",
                429,
            )
        if len(self._kept) >= self.most:
            del self._kept[next(known for known, answer in self._kept.items() if not answer.unfinished)]
        self._kept[id] = StoredAnswer(self.owner())
        return self._kept[id]

    def shrink(self, newest: StoredAnswer) -> None:
        """The oldest finished answers give way until the messages of all have at most `MOST_CHARACTERS`."""
        total = sum(answer.characters for answer in self._kept.values())
        for id, answer in list(self._kept.items()):
            if total <= MOST_CHARACTERS:
                return
            if answer is not newest and not answer.unfinished:
                total -= answer.characters
                del self._kept[id]


class Responses:
    """SGLang's `response_store`: id -> response, in the answers that `answers` gives to the caller at hand."""

    def __init__(self, answers: Callable[[], Answers]) -> None:
        self._answers = answers

    def get(self, id: str) -> OpenAIAnswer | None:
        """The caller's response of that id, or None."""
        found = self._answers().find(id)
        return None if found is None else found.response

    def __setitem__(self, id: str, response: OpenAIAnswer) -> None:
        answers = self._answers()
        found = answers.find(id)
        if found is None and response.status not in _UNFINISHED and answers.full():
            return  # it gave way while it was generated, and those that are left must not
        (found or answers.add(id)).response = response


class Messages:
    """SGLang's `msg_store`: id of a response -> messages up to it.

    They are stored first, when a request begins; 0.5.23 stores them again, with the answer behind them, when it ends.
    """

    def __init__(self, answers: Callable[[], Answers]) -> None:
        self._answers = answers

    def get(self, id: str, default: list[Json]) -> list[Json]:
        """The messages of the caller's response of that id, or `default`."""
        found = self._answers().find(id)
        return default if found is None or found.messages is None else found.messages

    def __getitem__(self, id: str) -> list[Json]:
        found = self._answers().find(id)
        if found is None or found.messages is None:
            raise ValueError(
                f"response {id!r} cannot be continued: its messages were not stored, or gave way to others"
            )
        return found.messages

    def __setitem__(self, id: str, messages: list[Json]) -> None:
        answers = self._answers()
        if _begun.get() == id:
            answer = answers.find(id)
            if answer is None:
                return  # it gave way while it was generated
        else:
            answer = answers.add(id)
            _begun.set(id)
        answer.messages, answer.characters = messages, len(repr(messages))
        answers.shrink(answer)


def after_init(
    _result: None, handler: OpenAIHandler, tokenizer_manager: TokenizerManager, *_args: Passed, **_kwargs: Passed
) -> None:
    """AFTER OpenAIServingResponses.__init__: answers are kept by number and by owner, on servers of ours.

    Each tenant has its own number, so that none makes another's give way.
    """
    service = getattr(tokenizer_manager, "ext_pools", None)
    if service is None:
        return
    most, kept = service.settings.max_responses, dict[str, Answers]()

    def answers() -> Answers:
        return kept.setdefault(tenant_at_hand(), Answers(most, lambda: owner_of_answers(tokenizer_manager)))

    handler.response_store, handler.msg_store = Responses(answers), Messages(answers)
