"""Who may see what over HTTP: a server with two keys, of which most clients hold one; and conversations of others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from sglang_ext.lines import NEWER, current
from tests.e2e.server import STORES_ANSWERS, Server, error_of, model, until
from tests.oracle import models

USER, ADMIN = "key-of-users", "key-of-the-operator"
SECRETS = (USER, ADMIN)
PROBE = "UNSAID"  # stands in every text of a definition, and in no question
DEMOS = models.demonstrations(24)
SYSTEM = f"{PROBE} system prompt"
TEMPLATE = "{input}\n" + PROBE + " {label_prefix}{output}"
QUESTION = "how do i activate my card?"
MOST_RESPONSES = 3
POLICY = {"sinks": 4, "window": 32, "stride": 16}


def bearer(key: str | None) -> dict[str, str | None]:
    return {"Authorization": None if key is None else f"Bearer {key}"}


class Guarded:
    """A server with both keys, whose session shows the users'."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def call(self, method: str, path: str, key: str | None = USER, **kwargs: Any) -> requests.Response:
        return self.server.call(method, path, headers=bearer(key), **kwargs)

    def json(self, method: str, path: str, key: str | None = USER, **kwargs: Any) -> Any:
        answer = self.call(method, path, key, **kwargs)
        assert answer.status_code in (200, 202), f"{method} {path}: {answer.status_code} {answer.text[:800]}"
        return answer.json()

    def ask(self, pool: str, **fields: Any) -> requests.Response:
        """A short answer over a pool to who holds the users' key."""
        custom = {"pool": pool, **fields.pop("custom", {})}
        params = {"max_new_tokens": 4, "temperature": 0, "custom_params": custom}
        body = {"text": QUESTION, "sampling_params": params, **fields}
        return self.call("POST", "/generate", json=body)


@pytest.fixture(scope="module")
def guarded() -> Iterator[Guarded]:
    settings = json.dumps({"max_responses": MOST_RESPONSES, "max_headers": 0})
    with Server(
        model(),
        max_total_tokens=6000,
        chunked_prefill_size=128,
        api_key=USER,
        admin_api_key=ADMIN,
        enable_metrics=True,
        env={"SGLANG_EXT_SETTINGS": settings},
        **STORES_ANSWERS,
    ) as running:
        guarded = Guarded(running)
        for name, options in (("closed", {}), ("open", {"readable": True})):
            body = {"demonstrations": DEMOS, "block_size": 6, "system": SYSTEM, "template": TEMPLATE, **options}
            guarded.json("PUT", f"/v1/pools/{name}", ADMIN, json=body)
        yield guarded
        assert running.faults() == []


def test_server_info_shows_no_keys_and_no_definitions(guarded: Guarded) -> None:
    for path in ("/server_info", "/get_server_info"):
        text = guarded.call("GET", path).text
        info = json.loads(text)
        for secret in (*SECRETS, PROBE, "closed", *guarded.json("GET", "/v1/pools/closed", ADMIN)["labels"]):
            assert secret not in text, (path, secret)
        state = info["internal_states"][0]["sglang_ext"]
        assert state["num_pools"] == 2 and "pools" not in state and state["requests"] >= 0
        assert info["api_key"] == info["admin_api_key"] == info["internal_states"][0]["admin_api_key"] == "hidden"
        assert info["model_path"]


def test_a_header_that_is_not_ascii_is_no_key(guarded: Guarded) -> None:
    for value in (b"Bearer \xe9", b"Bearer \xff\xfe"):
        for path in ("/get_model_info", "/v1/pools"):
            answer = requests.get(guarded.server.url + path, headers={"Authorization": value}, timeout=60)
            assert answer.status_code == 401, answer.text


def test_definitions_are_the_admins(guarded: Guarded) -> None:
    listed = guarded.json("GET", "/v1/pools", ADMIN)["pools"]
    assert [pool["name"] for pool in listed] == ["closed", "open"] and listed[0]["options"]["system"] == SYSTEM
    assert [pool["options"]["readable"] for pool in listed] == [False, True]
    for method, path in (
        ("GET", "/v1/pools"),
        ("GET", "/v1/pools/closed?tokens=true"),
        ("PUT", "/v1/pools/mine"),
        ("POST", "/v1/pools/plan"),
        ("POST", "/v1/pools/closed/cancel"),
        ("POST", "/v1/pools/closed/select"),
        ("POST", "/v1/pools/closed/demonstrations"),
        ("DELETE", "/v1/pools/closed"),
        ("DELETE", "/v1/pools/closed/demonstrations/0"),
    ):
        for key in (USER, None, "wrong"):
            assert guarded.call(method, path, key).status_code == 401, (method, path, key)


@pytest.mark.parametrize("route", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_an_unknown_pool_names_no_others(guarded: Guarded, route: str) -> None:
    custom = {"pool": "clsed"}
    body: dict[str, Any] = {"text": QUESTION, "sampling_params": {"custom_params": custom}}
    if route != "/generate":
        body = {"model": "m", "max_tokens": 4, "prompt": QUESTION, "custom_params": custom}
        body["messages"] = [{"role": "user", "content": QUESTION}]
    answer = guarded.call("POST", route, json=body)
    assert answer.status_code in (400, 404) and "unknown pool 'clsed'" in error_of(answer), answer.text
    assert "closed" not in answer.text and "open" not in answer.text
    known = guarded.call("GET", "/v1/pools/clsed", ADMIN)
    assert known.status_code == 404 and "closed, open" in error_of(known)


def test_demonstrations_are_returned_where_the_pool_says_so(guarded: Guarded) -> None:
    refused = guarded.ask("closed", return_prompt_token_ids=True)
    assert refused.status_code == 400 and "readable=true" in error_of(refused), refused.text
    many = guarded.ask("closed", text=[QUESTION, QUESTION], return_prompt_token_ids=True)
    assert many.status_code == 400 and "readable=true" in error_of(many), many.text
    blocks = guarded.json("GET", "/v1/pools/open?tokens=true", ADMIN)["blocks"]
    answer = guarded.ask("open", custom={"block_ids": [0, 2]}, return_prompt_token_ids=True).json()
    stitched = [*blocks[0]["token_ids"], *blocks[2]["token_ids"]]
    assert answer["prompt_token_ids"][: len(stitched)] == stitched
    events = list(
        guarded.server.stream(
            {
                "text": QUESTION,
                "return_prompt_token_ids": True,
                "sampling_params": {"max_new_tokens": 4, "custom_params": {"pool": "closed"}},
            }
        )
    )
    assert "readable=true" in json.dumps(events) and "prompt_token_ids" not in events[-1], events
    plain = guarded.json("POST", "/generate", json={"input_ids": [5, 6], "return_prompt_token_ids": True})
    assert plain["prompt_token_ids"] == [5, 6]


@pytest.mark.parametrize(
    ("route", "field"),
    [
        ("/v1/completions", "return_token_ids"),
        ("/v1/chat/completions", "return_token_ids"),
        ("/v1/chat/completions", "return_prompt_token_ids"),
        *([("/v1/chat/completions", "return_input_ids_in_sglext")] if current() is NEWER else []),
    ],
)
def test_nor_do_openai_routes_return_them(guarded: Guarded, route: str, field: str) -> None:
    body: dict[str, Any] = {"model": "m", "max_tokens": 4, field: True, "prompt": QUESTION}
    body["messages"] = [{"role": "user", "content": QUESTION}]
    refused = guarded.call("POST", route, json={**body, "custom_params": {"pool": "closed"}})
    assert refused.status_code == 400 and "readable=true" in error_of(refused), refused.text
    read = guarded.json("POST", route, json={**body, "custom_params": {"pool": "open"}})
    shown = read["sglext"]["input_ids"] if field.endswith("sglext") else read["choices"][0]["prompt_token_ids"]
    assert len(shown) == read["usage"]["prompt_tokens"]


def test_log_probabilities_and_echoes_are_of_own_tokens(guarded: Guarded) -> None:
    fields = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    for pool in ("closed", "open"):
        meta = guarded.ask(pool, **fields).json()["meta_info"]
        own = meta["prompt_tokens"] - meta["sglang_ext"]["stitched_tokens"]
        assert len(meta["input_token_logprobs"]) == len(meta["input_top_logprobs"]) == own
    custom = {"pool": "closed", "raw": True}
    body = {"model": "m", "prompt": QUESTION, "max_tokens": 2, "echo": True, "logprobs": 1, "custom_params": custom}
    choice = guarded.json("POST", "/v1/completions", json=body)["choices"][0]
    assert choice["text"].startswith(QUESTION)
    assert "".join(choice["logprobs"]["tokens"]).startswith(QUESTION[:1])
    assert len(choice["logprobs"]["tokens"]) <= len(QUESTION) + 2


def test_other_words_about_a_pool_say_nothing_of_its_texts(guarded: Guarded) -> None:
    """An error about the system prompt, and the ids of demonstrations that were chosen."""
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": QUESTION}]
    for pool, shown in (("closed", False), ("open", True)):
        body = {"model": "m", "messages": messages, "max_tokens": 4, "custom_params": {"pool": pool}}
        refused = guarded.call("POST", "/v1/chat/completions", json=body)
        assert refused.status_code == 400 and "--max-headers 0" in refused.text
        assert (PROBE in refused.text) == shown
        used = guarded.ask(pool, custom={"granularity": "example", "ratio": 0.5}).json()["meta_info"]["sglang_ext"]
        assert ("demonstrations" in used) == shown and used["blocks"]


def test_metrics_do_not_name_pools(guarded: Guarded) -> None:
    guarded.ask("closed")
    lines = [line for line in guarded.call("GET", "/metrics", None).text.splitlines() if line.startswith("sglang_ext:")]
    assert any(line.startswith("sglang_ext:pool_requests_total") for line in lines)
    assert not any("pool=" in line or "closed" in line for line in lines)
    sizes = [pool["tokens"] for pool in guarded.json("GET", "/v1/pools", ADMIN)["pools"]]
    (tokens,) = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("sglang_ext:pool_tokens")]
    assert tokens == sum(sizes)


def test_who_leaves_ends_no_other_request(guarded: Guarded) -> None:
    """SGLang's scheduler ends all requests whose ids begin with that of the one to be ended."""
    params = {"max_new_tokens": 700, "ignore_eos": True, "temperature": 0}
    body = {"text": QUESTION, "sampling_params": params}
    with ThreadPoolExecutor(1) as thread:
        mine = thread.submit(guarded.json, "POST", "/generate", json={**body, "rid": "somebody-elses"})
        until(lambda: guarded.json("GET", "/v1/loads")["loads"][0]["num_running_reqs"])
        events = guarded.server.stream({**body, "rid": "somebody"})
        next(events)
        assert not mine.done()
        events.close()  # the client hangs up, and the server notices
        assert mine.result()["meta_info"]["finish_reason"]["type"] == "length"


def respond(guarded: Guarded, **fields: Any) -> requests.Response:
    body = {"model": "m", "input": QUESTION, "max_output_tokens": 4, **fields}
    return guarded.call("POST", "/v1/responses", json=body)


def test_stored_responses_are_bounded(guarded: Guarded) -> None:
    ids = [respond(guarded).json()["id"] for _ in range(MOST_RESPONSES + 2)]
    found = [guarded.call("GET", f"/v1/responses/{id}").status_code for id in ids]
    assert found == [404] * 2 + [200] * MOST_RESPONSES
    assert respond(guarded, previous_response_id=ids[-1]).status_code == 200
    gone = respond(guarded, previous_response_id=ids[0])
    assert gone.status_code == 404, gone.text
    unstored = respond(guarded, store=False).json()["id"]
    assert guarded.call("GET", f"/v1/responses/{unstored}").status_code == 404


def test_stored_responses_are_read_with_the_users_key_alone(guarded: Guarded) -> None:
    id = respond(guarded).json()["id"]
    for key in (ADMIN, None, "wrong"):
        for method, path in (("GET", f"/v1/responses/{id}"), ("POST", f"/v1/responses/{id}/cancel")):
            assert guarded.call(method, path, key).status_code == 401
        body = {"model": "m", "input": QUESTION, "previous_response_id": id}
        assert guarded.call("POST", "/v1/responses", key, json=body).status_code == 401
    assert guarded.json("GET", f"/v1/responses/{id}")["id"] == id


@pytest.mark.parametrize("route", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_no_ids_of_an_answer_spell_demonstrations(guarded: Guarded, route: str) -> None:
    """All token ids that any answer returns, as /v1/detokenize spells them; an open pool's would be found."""
    for pool, shown in (("closed", False), ("open", True)):
        custom = {"pool": pool}
        params = {"max_new_tokens": 4, "temperature": 0, "custom_params": custom}
        body: dict[str, Any] = {"text": QUESTION, "sampling_params": params}
        more: list[dict[str, Any]] = [{}, {"return_prompt_token_ids": True}]
        more.append({"return_logprob": True, "logprob_start_len": 0})
        if route != "/generate":
            body = {"model": "m", "max_tokens": 4, "temperature": 0, "custom_params": custom, "prompt": QUESTION}
            body["messages"] = [{"role": "user", "content": QUESTION}]
            more = [{}, {"return_token_ids": True}, {"return_prompt_token_ids": True}, {"logprobs": 1, "echo": True}]
        spelled = ""
        for fields in more:
            answer = guarded.call("POST", route, json={**body, **fields})
            for ids in id_lists(answer.json()):
                ids = [id for id in ids if id >= 0]  # text offsets are numbers, too
                spelled += guarded.json("POST", "/v1/detokenize", json={"model": "m", "tokens": ids})["text"]
        assert spelled or route != "/generate"
        assert any(each["input"] in spelled for each in DEMOS) == shown, (route, pool, spelled[:300])


def id_lists(value: Any) -> Iterator[list[int]]:
    """Every list of whole numbers in an answer, and the ids of its log-probabilities."""
    if isinstance(value, dict):
        for each in value.values():
            yield from id_lists(each)
    elif isinstance(value, list) and value:
        if all(type(each) is int for each in value):
            yield value
        elif all(isinstance(each, list) and len(each) > 1 and type(each[1]) is int for each in value):
            yield [each[1] for each in value]
        else:
            for each in value:
                yield from id_lists(each)


def test_ids_of_stored_responses_are_the_servers(guarded: Guarded) -> None:
    chosen = respond(guarded, request_id="resp_alice")
    assert chosen.status_code == 400 and "request_id" in error_of(chosen), chosen.text
    first = respond(guarded).json()["id"]
    assert len(first) >= len("resp_") + 32
    again = respond(guarded, request_id=first)
    assert again.status_code == 409, again.text
    assert guarded.json("GET", f"/v1/responses/{first}")["output"]
    assert respond(guarded, request_id="resp_alice", store=False).status_code == 200


def test_answers_in_the_background_do_not_give_way(guarded: Guarded) -> None:
    for _ in range(8):  # until none of them ended before it was looked at
        ids = [respond(guarded, background=True, max_output_tokens=900).json()["id"] for _ in range(MOST_RESPONSES)]
        full = respond(guarded)
        states = {guarded.call("GET", f"/v1/responses/{id}").json().get("status") for id in ids}
        for id in ids:
            guarded.call("POST", f"/v1/responses/{id}/cancel")
        until(lambda: respond(guarded).status_code == 200)
        if states <= {"queued", "in_progress"}:
            assert full.status_code == 429 and f"max_responses={MOST_RESPONSES}" in error_of(full), full.text
            return
    raise AssertionError("answers in the background ended before they were looked at")


# ---- conversations ----


class Streams:
    """A server of streams."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def turn(self, text: str, new_tokens: int = 6, **custom: Any) -> requests.Response:
        params = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "custom_params": custom}
        return self.server.call("POST", "/generate", json={"text": text, "sampling_params": params})

    def key(self, text: str, **custom: Any) -> str:
        answer = self.turn(text, **custom)
        assert answer.status_code == 200, answer.text
        return key_of(answer.json())


def key_of(answer: Any) -> str:
    return answer["meta_info"]["sglang_ext"]["conversation_key"]


@pytest.fixture(scope="module")
def streams() -> Iterator[Streams]:
    with Server(
        model(),
        attention_backend="cascade",
        max_total_tokens=400,
        api_key=USER,
        env={"SGLANG_EXT_POLICY": json.dumps(POLICY)},
    ) as running:
        yield Streams(running)
        assert running.faults() == []


def refusal(answer: requests.Response) -> str:
    assert answer.status_code == 400, answer.text
    return error_of(answer)


def test_a_conversation_goes_on_with_its_key_alone(streams: Streams) -> None:
    key = streams.key("my pin is 4711", conversation="alice")
    assert len(key) >= 43
    before = refusal(streams.turn("what is my pin?", conversation="nobody", **{"continue": True}))
    strangers: list[dict[str, Any]] = [{}, {"conversation_key": "x" * 43}, {"conversation_key": key[:-1] + "-"}]
    for stranger in strangers:
        told = refusal(streams.turn("what is my pin?", conversation="alice", **{"continue": True}, **stranger))
        assert told == before.replace("nobody", "alice")  # no more than of a name that nobody has
        told = refusal(streams.turn("i am alice now", conversation="alice", **stranger))
        assert "another's" in told and key not in told
    # With other settings, too: what the conversation began with is not told.
    told = refusal(streams.turn("x", conversation="alice", cascades=1, **{"continue": True}))
    assert "options" not in told
    answer = streams.turn("what is my pin?", conversation="alice", conversation_key=key, **{"continue": True})
    assert answer.status_code == 200 and key_of(answer.json()) == key
    assert streams.key("begin anew", conversation="alice", conversation_key=key) == key
    assert streams.turn("go on", conversation="alice", conversation_key=key, **{"continue": True}).status_code == 200


def test_of_two_first_turns_at_once_one_has_the_name(streams: Streams) -> None:
    for attempt in range(3):
        name = f"race-{attempt}"
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda n: streams.turn(f"i am {n}", 60, conversation=name), range(4)))  # noqa: B023
        winners = [answer for answer in answers if answer.status_code == 200]
        assert len(winners) == 1, [answer.text[:200] for answer in answers]
        assert all("another's" in refusal(answer) for answer in answers if answer not in winners)
        custom = {"conversation": name, "conversation_key": key_of(winners[0].json()), "continue": True}
        assert streams.turn("who am i?", **custom).status_code == 200


def test_a_name_is_its_owners_while_a_turn_is_under_way(streams: Streams) -> None:
    """The state is not there to be compared with while it is gone on from."""
    key = streams.key("my pin is 4711", conversation="busy")
    goes_on = {"conversation": "busy", "conversation_key": key, "continue": True}
    with ThreadPoolExecutor(1) as thread:
        under_way = thread.submit(streams.turn, "tell me a long story", 300, **goes_on)
        tried = 0
        while not under_way.done():
            assert "another's" in refusal(streams.turn("i am busy now", 1, conversation="busy"))
            tried += 1
    assert tried and under_way.result().status_code == 200
    assert streams.turn("and then?", **goes_on).status_code == 200


def test_keys_come_with_streams_batches_and_openai_routes(streams: Streams) -> None:
    params = {"max_new_tokens": 20, "temperature": 0, "custom_params": {"conversation": "streamed"}}
    events = list(streams.server.stream({"text": "hello", "sampling_params": params}))
    assert len({key_of(event) for event in events}) == 1
    several = [{**params, "custom_params": {"conversation": f"batch-{n}"}} for n in range(2)]
    body: dict[str, Any] = {"text": ["hello", "you"], "sampling_params": several}
    plain = {"model": "m", "prompt": "hello", "max_tokens": 4, "custom_params": {"conversation": "openai"}}
    choice = streams.server.json("POST", "/v1/completions", json=plain)["choices"][0]
    assert len(choice["sglang_ext"]["conversation_key"]) == 43
    first, second = streams.server.json("POST", "/generate", json=body)
    assert key_of(first) != key_of(second)
    for n, answer in enumerate((first, second)):
        custom = {"conversation": f"batch-{n}", "conversation_key": key_of(answer), "continue": True}
        assert streams.turn("go on", **custom).status_code == 200


@pytest.mark.parametrize(
    "custom",
    [
        {"conversation": "a", "conversation_key": "short"},
        {"conversation": "a", "conversation_key": 7},
        {"conversation": "a", "conversation_key": ["x" * 43]},
        {"conversation_key": "x" * 43},
        {"conversation": "a", "conversation_key": "é" * 43},
    ],
)
def test_what_is_no_key(streams: Streams, custom: dict[str, Any]) -> None:
    assert "conversation_key" in refusal(streams.turn("hello", **custom))
