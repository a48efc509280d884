"""What an answer selected, explained to who may read it: the option `explain`, and POST /v1/pools/{name}/select."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import requests

from sglang_ext.config import PoolOptions
from sglang_ext.retrievers import registry
from tests.e2e.server import Server, error_of, model
from tests.oracle import models

USER, ADMIN = "key-of-users", "key-of-the-operator"
DEMOS = models.demonstrations(24)
SIZE, BLOCKS = 4, 6
QUESTION = "how do i activate my card?"
BEARER = {"Authorization": f"Bearer {ADMIN}"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server with both keys, whose session shows the users'; pools `open` (readable), `closed` and `cut`."""
    with Server(model(), max_total_tokens=8000, api_key=USER, admin_api_key=ADMIN) as running:
        for name, readable in (("open", True), ("closed", False), ("cut", True)):
            body = {"demonstrations": DEMOS, "block_size": SIZE, "readable": readable}
            admin(running, "PUT", f"/v1/pools/{name}", json=body)
        admin(running, "DELETE", "/v1/pools/cut/demonstrations/d1")
        yield running
        assert running.faults() == []


def admin(server: Server, method: str, path: str, **kwargs: Any) -> Any:
    return server.json(method, path, headers=BEARER, **kwargs)


def ask(server: Server, pool: str, **custom: Any) -> Any:
    body = server.payload(QUESTION, 3, pool=pool, **custom)
    return server.json("POST", "/generate", json=body)["meta_info"]["sglang_ext"]


def select(server: Server, pool: str, **body: Any) -> Any:
    return admin(server, "POST", f"/v1/pools/{pool}/select", json=body)


def blocks(server: Server, pool: str) -> Any:
    return admin(server, "GET", f"/v1/pools/{pool}?tokens=true")["blocks"]


@pytest.mark.parametrize("kind", ["best", "text"])
@pytest.mark.parametrize("order", ["pool", "high_to_low"])
def test_an_answer_says_what_it_selected_and_why(server: Server, order: str, kind: str) -> None:
    said = ask(
        server, "open", ratio=0.5, order=order, explain=True, **({} if kind == "best" else {"block_score": kind})
    )
    entries, made = said["selection"], blocks(server, "open")
    assert [entry["block"] for entry in entries] == said["blocks"] and len(entries) == 3
    assert [entry["sink"] for entry in entries] == [True, False, False]
    assert sum(entry["tokens"] for entry in entries) == said["stitched_tokens"]
    items = {f"d{number}": item for number, item in enumerate(DEMOS)}
    for entry in entries:
        ids = made[entry["block"]]["demonstrations"]
        assert entry["demonstrations"] == [
            {"id": id, "input": items[id]["input"], "output": items[id]["output"]} for id in ids
        ]
        assert entry["tokens"] == made[entry["block"]]["tokens"]
    options = PoolOptions()
    texts = [
        [options.render(items[id]["input"], items[id]["output"]) for id in block["demonstrations"]] for block in made
    ]
    if kind == "text":
        scores = list(registry.get("bm25").build([options.separator.join(each) for each in texts]).score(QUESTION))
    else:
        single = iter(registry.get("bm25").build([text for each in texts for text in each]).score(QUESTION))
        scores = [max(next(single) for _ in each) for each in texts]
    assert [entry["score"] for entry in entries] == pytest.approx([scores[number] for number in said["blocks"]])
    assert len({entry["score"] for entry in entries}) > 1
    rest = [scores[number] for number in range(1, BLOCKS) if number not in said["blocks"]]
    assert min(entry["score"] for entry in entries if not entry["sink"]) >= max(rest)
    assert "selection" not in ask(server, "open", ratio=0.5, order=order)


def test_single_demonstrations_have_scores_of_their_own(server: Server) -> None:
    said = ask(server, "open", granularity="example", blocks=2, order="high_to_low", explain=True)
    entries, made = said["selection"], blocks(server, "open")
    chosen = [entry["demonstrations"][0]["id"] for entry in entries]
    assert all(len(entry["demonstrations"]) == 1 for entry in entries) and chosen == said["demonstrations"]
    assert all(id in made[entry["block"]]["demonstrations"] for id, entry in zip(chosen, entries, strict=True))
    # Behind the token that begins every sequence, which is no demonstration's.
    assert 1 + sum(entry["tokens"] for entry in entries) == said["stitched_tokens"]
    found = [entry["score"] for entry in entries if not entry["sink"]]
    assert len(found) == SIZE and found == sorted(found, reverse=True) and found[0] > found[-1]


def test_deleted_demonstrations_are_left_out(server: Server) -> None:
    home = next(block["id"] for block in blocks(server, "cut") if "d1" in block["demonstrations"])
    said = ask(server, "cut", block_ids=[home], explain=True)
    (entry,) = said["selection"]
    assert len(entry["demonstrations"]) == SIZE - 1 and "d1" not in [each["id"] for each in entry["demonstrations"]]
    assert entry["tokens"] == said["stitched_tokens"] and entry["score"] is None  # nothing was retrieved


def test_explain_is_for_who_may_read_the_pool(server: Server) -> None:
    answer = server.call("POST", "/generate", json=server.payload(QUESTION, 3, pool="closed", explain=True))
    assert answer.status_code == 403 and "readable=true" in error_of(answer), answer.text
    assert not any(item["input"] in answer.text for item in DEMOS)
    assert "selection" not in ask(server, "closed")
    wrong = server.call("POST", "/generate", json=server.payload(QUESTION, 3, pool="open", explain=1))
    assert wrong.status_code == 400 and "explain=1 is a int; expected bool" in error_of(wrong)


def test_only_the_end_of_a_stream_explains(server: Server) -> None:
    body = server.payload(QUESTION, 4, pool="open", explain=True)
    events = list(server.stream(body))
    explained = ["selection" in event["meta_info"]["sglang_ext"] for event in events]
    assert len(events) > 1 and explained == [False] * (len(events) - 1) + [True]


def test_openai_routes_explain_too(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key=USER, max_retries=0)
    custom = {"custom_params": {"pool": "open", "explain": True}}
    answer = client.completions.create(model="m", prompt=QUESTION, max_tokens=2, extra_body=custom)
    said: Any = (answer.choices[0].model_extra or {})["sglang_ext"]
    assert said["selection"] == ask(server, "open", explain=True)["selection"]


@pytest.mark.parametrize(
    "options",
    [{}, {"blocks": 3, "order": "reversed"}, {"granularity": "example"}, {"retriever": "all"}, {"block_ids": [2, 0]}],
)
def test_a_selection_is_that_of_an_answer(server: Server, options: dict[str, Any]) -> None:
    said = ask(server, "open", explain=True, **options)
    found = select(server, "open", text=QUESTION, **options)
    assert found == {name: said[name] for name in found} and {"pool", "version", "blocks", "selection"} <= set(found)
    closed = select(server, "closed", text=QUESTION, **options)
    assert closed["selection"] == found["selection"]


def test_named_blocks_need_no_text(server: Server) -> None:
    found = select(server, "closed", block_ids=[3])
    assert [entry["block"] for entry in found["selection"]] == [3]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "needs text"),
        ({"text": ""}, 400, "needs text"),
        ({"text": 3}, 400, "text is a int; expected a string"),
        ({"text": "\ud800"}, 400, "not JSON"),
        ([1], 400, "the body is a list; expected an object"),
        ({"text": "a", "ratio": 2}, 400, "expected a number in (0, 1]"),
        ({"text": "a", "explain": True}, 400, "unknown option explain"),
        ({"text": "a", "retreiver": "all"}, 400, "did you mean retriever?"),
        ({"text": "a", "block_ids": [BLOCKS]}, 400, f"0 to {BLOCKS - 1}"),
        ({"text": "a", "retriever": "nobody's"}, 400, "unknown retriever"),
        ({"text": "a " * 20_000}, 400, "shorten it"),
    ],
)
def test_a_wrong_selection_says_what_to_change(server: Server, body: Any, status: int, words: str) -> None:
    answer = server.call("POST", "/v1/pools/open/select", headers=BEARER, json=body)
    assert answer.status_code == status and words in error_of(answer), answer.text


def test_a_selection_is_the_admins(server: Server) -> None:
    url, body = f"{server.url}/v1/pools/open/select", {"text": QUESTION}
    for key in (USER, "wrong", ""):
        assert requests.post(url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60).status_code == 401
    answer = server.call("POST", "/v1/pools/nobody/select", headers=BEARER, json=body)
    assert answer.status_code == 404 and "unknown pool 'nobody'" in error_of(answer)
    query = server.call("POST", "/v1/pools/open/select?ratio=1", headers=BEARER, json=body)
    assert query.status_code == 400 and "in the body" in error_of(query)
