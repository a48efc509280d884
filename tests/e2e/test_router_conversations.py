"""Conversations behind the real router: their turns go back to their server, and say so when it is gone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.router import HOME, Router, routing
from tests.e2e.server import Server, error_of
from tests.e2e.streams import POLICY, goes_on, prompt_of, save

TOKENS = 8
SETTINGS: dict[str, Any] = {"attention_backend": "cascade", "max_total_tokens": 600, "chunked_prefill_size": 50}

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Two servers of streams, by address."""
    folder: Path = save(tmp_path_factory.mktemp("model"))
    env = {"SGLANG_EXT_POLICY": json.dumps(POLICY)}
    with Server(folder, env=env, **SETTINGS) as one, Server(folder, env=env, **SETTINGS) as two:
        yield {one.url: one, two.url: two}


@pytest.fixture(scope="module")
def router(both: dict[str, Server]) -> Iterator[Router]:
    with routing(list(both), "--sticky-sessions", policy="round_robin") as found:
        yield found


def body(prompt: list[int], **options: Any) -> dict[str, Any]:
    params = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "custom_params": options or None}
    return {"input_ids": prompt, "sampling_params": params}


class Conversation:
    """One conversation, all turns of which have its name as their routing key.

    Attributes:
        whole: its tokens so far.
        home: address of the server that answered last.
    """

    def __init__(self, router: Router, name: str) -> None:
        self.router, self.name, self.whole, self.home = router, name, list[int](), ""
        self.turn: dict[str, Any] = {"conversation": name}

    def say(self, prompt: list[int]) -> list[int]:
        """A turn that must be answered; the answer's tokens."""
        answer = self.router.generate(body(prompt, **self.turn), self.name)
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["output_ids"]
        self.turn, self.home = goes_on(self.name, answer.json()), answer.headers[HOME]
        self.whole += [*prompt, *found]
        return found


def test_turns_go_back_to_their_server(both: dict[str, Server], router: Router) -> None:
    talks = [Conversation(router, f"talk-{number}") for number in range(4)]
    for number in range(3):
        for place, talk in enumerate(talks):
            before, home = [*talk.whole], talk.home
            prompt = prompt_of(20 + place, 10 * number + place)
            answer = talk.say(prompt)
            assert home in ("", talk.home), "it went elsewhere"
            alone = both[talk.home].json("POST", "/generate", json=body([*before, *prompt]))
            assert answer == alone["output_ids"]
    assert {talk.home for talk in talks} == set(both)


def test_a_conversation_whose_server_is_gone_begins_anew(both: dict[str, Server], router: Router) -> None:
    """And stays where it began anew when the other server is back."""
    talks = [Conversation(router, f"lost-{number}") for number in range(2)]
    for talk in talks:
        talk.say(prompt_of(30, 1))
    lost, other = talks
    assert lost.home != other.home, "names go to one server after the other"
    both[lost.home].kill()
    question = prompt_of(5, 2)
    for _ in range(2):
        is_gone(router.generate(body(question, **lost.turn), lost.name), other.home)
    anew = Conversation(router, "lost, anew")
    told = anew.say([*lost.whole, *question])
    alone = both[other.home].json("POST", "/generate", json=body([*lost.whole, *question]))
    assert told == alone["output_ids"] and anew.home == other.home
    both[lost.home].start()
    router.knows(list(both))
    for seed in (3, 4):
        for talk in (anew, other):
            talk.say(prompt_of(4, seed))
            assert talk.home == other.home
    is_gone(router.generate(body(question, **lost.turn), lost.name), other.home)


def is_gone(answer: requests.Response, url: str) -> None:
    """Check that a server refused a turn and said how to begin anew."""
    assert answer.status_code == 400 and answer.headers[HOME] == url, answer.text
    assert "cannot be continued" in error_of(answer)
    assert "send it whole, without continue (behind a router, under a new name" in error_of(answer)
