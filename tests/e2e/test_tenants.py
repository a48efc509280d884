"""Tenants of one server over HTTP: names, conversations, answers, caches, quotas and counters of each are its own."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from sglang_ext.serving.tenants import HEADER, ROUTES, digest_of
from tests.e2e.server import STORES_ANSWERS, Server, error_of, model, until
from tests.e2e.streams import prompt_of
from tests.e2e.test_ltri import SIZES, policy_of
from tests.oracle import models

ADMIN = "key-of-the-operator"
ACME, ACME_TOO, BOLT, SMALL, LATE = "key-of-acme", "another-key-of-acme", "key-of-bolt", "key-of-small", "key-of-late"
NAMES = ("acme", "bolt", "small")
DEMOS = models.demonstrations(24)
OTHERS = models.demonstrations(12, 7)
QUESTION = "how do i activate my card?"
TEXT = "a prompt that is long enough to be found again in the cache of whoever has sent it before, word by word"
POOL_QUOTA, TOKEN_QUOTA, REQUEST_QUOTA = 2, 600, 2


def entry(*keys: str, **quotas: int) -> dict[str, Any]:
    return {"keys": [digest_of(key) for key in keys], **quotas}


TENANTS = {
    "acme": entry(ACME, ACME_TOO),
    "bolt": entry(BOLT),
    "small": entry(SMALL, max_pools=POOL_QUOTA, max_tokens=TOKEN_QUOTA, max_requests=REQUEST_QUOTA),
}


class Tenanted:
    """A server, and its file of tenants."""

    def __init__(self, server: Server, file: Path) -> None:
        self.server, self.file = server, file

    def call(self, key: str | None, method: str, path: str, place: str | None = None, **kwargs: Any) -> Any:
        headers = {"Authorization": None if key is None else f"Bearer {key}", HEADER: place}
        return self.server.call(method, path, headers=headers, **kwargs)

    def json(self, key: str | None, method: str, path: str, **kwargs: Any) -> Any:
        answer = self.call(key, method, path, **kwargs)
        assert answer.status_code in (200, 202), f"{method} {path}: {answer.status_code} {answer.text[:800]}"
        return answer.json()

    def put(self, key: str, name: str, demonstrations: list[dict[str, str]] = DEMOS, **options: Any) -> Any:
        body = {"demonstrations": demonstrations, "block_size": 6, **options}
        return self.json(key, "PUT", f"/v1/pools/{name}", json=body)

    def ask(self, key: str, new_tokens: int = 4, **custom: Any) -> requests.Response:
        params = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "custom_params": custom or None}
        return self.call(key, "POST", "/generate", json={"text": QUESTION, "sampling_params": params})

    def names(self, key: str) -> list[str]:
        return [pool["name"] for pool in self.json(key, "GET", "/v1/pools")["pools"]]

    def write(self, tenants: Any) -> None:
        self.file.write_text(json.dumps(tenants), encoding="utf-8")

    def hang_up(self) -> None:
        """SIGHUP to the server's main process."""
        assert self.server.process is not None
        os.kill(self.server.process.pid, signal.SIGHUP)


def refused(answer: requests.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return error_of(answer)


def started(folder: Path, **options: Any) -> tuple[Server, Path]:
    file = folder / "tenants.json"
    file.write_text(json.dumps(TENANTS), encoding="utf-8")
    settings = json.dumps({"tenants": str(file), "pool_metrics": True})
    env = {"SGLANG_EXT_SETTINGS": settings, **options.pop("env", {})}
    return Server(model(), env=env, admin_api_key=ADMIN, **options), file


@pytest.fixture(scope="module")
def tenanted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenanted]:
    folder = tmp_path_factory.mktemp("tenants")
    env = {"SGLANG_EXT_POOL_DIR": str(folder / "pools")}
    options = {"max_total_tokens": 12_000, "chunked_prefill_size": 256, "enable_metrics": True}
    server, file = started(folder, env=env, **options, **STORES_ANSWERS)
    with server:
        yield Tenanted(server, file)
        assert server.faults() == []


# ---- pools ----


def test_each_has_a_pool_of_that_name(tenanted: Tenanted) -> None:
    tenanted.put(ACME, "tickets")
    tenanted.put(BOLT, "tickets", OTHERS)
    tenanted.put(ACME, "secret-of-acme")
    assert tenanted.names(ACME) == tenanted.names(ACME_TOO) == ["secret-of-acme", "tickets"]
    assert tenanted.names(BOLT) == ["tickets"]
    for key, demonstrations in ((ACME, DEMOS), (BOLT, OTHERS)):
        assert tenanted.json(key, "GET", "/v1/pools/tickets")["demonstrations"] == len(demonstrations)
        used = tenanted.ask(key, pool="tickets", explain=True, ratio=1.0).json()["meta_info"]["sglang_ext"]
        texts = {item["input"] for block in used["selection"] for item in block["demonstrations"]}
        assert used["pool"] == "tickets" and texts == {item["input"] for item in demonstrations}
        chat = {"messages": [{"role": "user", "content": QUESTION}], "model": "m", "max_tokens": 4}
        answer = tenanted.json(key, "POST", "/v1/chat/completions", json={**chat, "custom_params": {"pool": "tickets"}})
        assert answer["choices"][0]["sglang_ext"]["blocks"][-1] < len(demonstrations) / 6
    for tenant, pools in (("acme", {"tickets", "secret-of-acme"}), ("bolt", {"tickets"})):
        kept = (Path(tenanted.file.parent) / "pools" / "tenants" / tenant).glob("*.json")
        assert {path.stem for path in kept} >= pools


def test_another_s_pool_is_not_there(tenanted: Tenanted) -> None:
    tenanted.put(ACME, "secret-of-acme")
    tenanted.put(BOLT, "mine")
    for method, path, body in (
        ("GET", "", None),
        ("DELETE", "", None),
        ("POST", "/cancel", None),
        ("POST", "/select", {"text": QUESTION}),
        ("POST", "/demonstrations", {"demonstrations": OTHERS}),
        ("DELETE", "/demonstrations/d0", None),
    ):
        answer = tenanted.call(BOLT, method, f"/v1/pools/secret-of-acme{path}", json=body)
        words = refused(answer, 404)
        assert "unknown pool 'secret-of-acme'" in words and "mine" in words, words
        nothing = tenanted.call(BOLT, method, f"/v1/pools/never{path}", json=body)
        assert refused(nothing, 404) == words.replace("secret-of-acme", "never") and "acme" not in nothing.text
    asked = tenanted.ask(BOLT, pool="secret-of-acme")
    assert refused(asked, 404).replace("secret-of-acme", "never") == refused(tenanted.ask(BOLT, pool="never"), 404)
    assert "secret-of-acme" in tenanted.names(ACME)


def test_equal_blocks_are_encoded_anew(tenanted: Tenanted) -> None:
    """A tenant's second pool shares blocks with its first; another's has blocks of its own, however equal."""
    alike = models.demonstrations(12, 99)
    first, again = (tenanted.put(ACME, name, alike) for name in ("equal", "equal-again"))
    theirs = tenanted.put(BOLT, "equal", alike)
    keys = [[block["key"] for block in info["blocks"]] for info in (first, again, theirs)]
    assert keys[0] == keys[1] and set(keys[0]).isdisjoint(keys[2])
    for _ in range(3):
        assert tenanted.ask(ACME, pool="equal", ratio=1.0).status_code == 200
    hits = [
        [block["hits"] for block in tenanted.json(key, "GET", f"/v1/pools/{name}")["blocks"]]
        for key, name in ((ACME, "equal-again"), (BOLT, "equal"))
    ]
    assert min(hits[0]) >= 3 and max(hits[1]) == 0


def test_dense_models_are_the_operators(tenanted: Tenanted) -> None:
    tenanted.put(ACME, "tickets")
    question = {"text": QUESTION, "retriever": "dense:/etc"}
    selected = tenanted.call(ACME, "POST", "/v1/pools/tickets/select", json=question)
    for answer in (selected, tenanted.ask(ACME, pool="tickets", retriever="dense:/etc")):
        assert "expected a model that the operator chose" in refused(answer, 403)


# ---- what is cached ----


def cached(answer: Any) -> int:
    usage = answer.get("usage") or {}
    if "meta_info" in answer:
        return int(answer["meta_info"]["cached_tokens"])
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


@pytest.mark.parametrize("route", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("own", [None, "a key of one's own"])
def test_prompts_are_found_again_by_their_tenant_alone(tenanted: Tenanted, route: str, own: str | None) -> None:
    text = f"{route} {own} {TEXT}"
    body: dict[str, Any] = {"text": text, "sampling_params": {"max_new_tokens": 2, "temperature": 0}}
    if route != "/generate":
        body = {"model": "m", "max_tokens": 2, "temperature": 0, "prompt": text}
        body["messages"] = [{"role": "user", "content": text}]
        body.pop("prompt" if "chat" in route else "messages")
    body |= {} if own is None else {"extra_key": own}
    asked = [ACME, ACME_TOO, BOLT, BOLT, ADMIN, ADMIN]
    found = [cached(tenanted.json(key, "POST", route, json=body)) for key in asked]
    first, again = found[::2], found[1::2]
    # What every chat begins with is not found across tenants either: only a tenant's own requests came before.
    assert all(many > few + 40 for few, many in zip(first, again, strict=True)), found
    fresh = {**body, "extra_key": f"nobody's {text}"}
    assert cached(tenanted.json(BOLT, "POST", route, json=fresh)) == 0


def test_batches_are_in_their_tenant_s_cache(tenanted: Tenanted) -> None:
    body = {"text": [f"batch {TEXT}", f"another batch {TEXT}"], "sampling_params": {"max_new_tokens": 2}}
    tenanted.json(ACME, "POST", "/generate", json=body)
    (theirs, ours) = (tenanted.json(key, "POST", "/generate", json=body) for key in (BOLT, ACME))
    assert cached(theirs[0]) < 10 and all(cached(answer) > 40 for answer in ours)


# ---- stored answers ----


def test_stored_answers_are_the_tenant_s(tenanted: Tenanted) -> None:
    body = {"model": models_name(tenanted), "input": QUESTION, "max_output_tokens": 4, "store": True}
    id = tenanted.json(ACME, "POST", "/v1/responses", json=body)["id"]
    assert tenanted.json(ACME_TOO, "GET", f"/v1/responses/{id}")["id"] == id
    for key in (BOLT, ADMIN):
        theirs, nothing = (tenanted.call(key, "GET", f"/v1/responses/{each}") for each in (id, "resp_" + "0" * 32))
        assert refused(theirs, 404).replace(id, "") == refused(nothing, 404).replace("resp_" + "0" * 32, "")
        assert tenanted.call(key, "POST", f"/v1/responses/{id}/cancel").status_code == 404
        goes_on = tenanted.call(key, "POST", "/v1/responses", json={**body, "previous_response_id": id})
        assert goes_on.status_code == 404, goes_on.text
    assert tenanted.json(ACME_TOO, "POST", "/v1/responses", json={**body, "previous_response_id": id})["output"]


def models_name(tenanted: Tenanted) -> str:
    return str(tenanted.json(ACME, "GET", "/v1/models")["data"][0]["id"])


# ---- routes and keys ----


def test_only_routes_of_tenants_open(tenanted: Tenanted) -> None:
    """All that the server has, as it says itself, but for those that a tenant may use."""
    told = tenanted.json(ADMIN, "GET", "/openapi.json")["paths"]
    opened = {path.replace(":path", "") for path in ROUTES}  # as it is spelled there
    closed = [
        (method, path)
        for path, methods in told.items()
        for method in methods
        if path not in opened and method != "head"
    ]
    assert len(closed) > 30 and {"/flush_cache", "/server_info"} <= {path for _, path in closed}
    for method, path in [*closed, ("get", "/metrics"), ("get", "/openapi.json"), ("get", "/docs"), ("get", "/never")]:
        spelled = re.sub(r"\{[^}]*\}", "x", path)
        words = refused(tenanted.call(ACME, method.upper(), spelled), 403)
        assert words.startswith(f"{method.upper()} {spelled} is not for tenants' keys: expected one of /api/chat, ")
    for path in ("/health", "/pools", "/v1/models", "/model_info"):
        assert tenanted.call(ACME, "GET", path).status_code == 200
    assert {path for path in opened if path.startswith("/v1/")} <= set(told)


def test_without_a_key_nobody_asks(tenanted: Tenanted) -> None:
    """A server with --admin-api-key alone has its routes of clients open elsewhere."""
    for key in (None, "wrong", digest_of(ACME)):
        for method, path in (("POST", "/generate"), ("GET", "/v1/pools"), ("GET", "/metrics"), ("GET", "/v1/models")):
            assert tenanted.call(key, method, path, json={"text": "x"}).status_code == 401, (key, path)
        assert tenanted.call(key, "GET", "/health").status_code == 200
        page = tenanted.call(key, "GET", "/pools")
        assert page.status_code == 200 and "acme" not in page.text


def test_the_operator_sees_all_and_asks_in_a_tenant_s_place(tenanted: Tenanted) -> None:
    tenanted.put(ADMIN, "own")
    tenanted.put(ACME, "tickets")
    told = tenanted.json(ADMIN, "GET", "/v1/pools")
    assert [pool["name"] for pool in told["pools"]] == ["own"]
    listed = {each["name"]: {pool["name"] for pool in each["pools"]} for each in told["tenants"]}
    assert listed.keys() >= set(NAMES) and "tickets" in listed["acme"] and "own" not in tenanted.names(ACME)
    tenanted.json(ADMIN, "PUT", "/v1/pools/for-bolt", place="bolt", json={"demonstrations": OTHERS})
    assert "for-bolt" in tenanted.names(BOLT) and "for-bolt" not in tenanted.names(ACME)
    state = tenanted.json(ADMIN, "GET", "/server_info")["internal_states"][0]["sglang_ext"]
    assert state["num_pools"] >= 3 and {each["name"] for each in state["tenants"]} >= set(NAMES)
    assert "there are acme, bolt" in refused(tenanted.call(ADMIN, "GET", "/v1/pools", place="never"), 404)
    theirs = refused(tenanted.call(BOLT, "GET", "/v1/pools", place="acme"), 403)
    assert theirs == refused(tenanted.call(BOLT, "GET", "/v1/pools", place="never"), 403).replace("never", "acme")
    assert tenanted.call(BOLT, "GET", "/v1/pools", place="bolt").status_code == 200


# ---- quotas ----


def test_quotas_of_pools_say_their_numbers(tenanted: Tenanted) -> None:
    first = tenanted.put(SMALL, "a")
    assert first["tokens"] < TOKEN_QUOTA < 2 * first["tokens"], "the quota is meant for one such pool"
    body = {"demonstrations": DEMOS, "block_size": 6}
    words = refused(tenanted.call(SMALL, "PUT", "/v1/pools/b", json=body), 403)
    assert f"would have {first['tokens']} tokens" in words and f"have {first['tokens']}" in words
    assert f"quota is {TOKEN_QUOTA} (max_tokens)" in words and tenanted.names(SMALL) == ["a"]
    assert tenanted.put(SMALL, "a")["version"] == 2  # it takes its own place
    tenanted.put(SMALL, "b", DEMOS[:2])
    words = refused(tenanted.call(SMALL, "PUT", "/v1/pools/c", json={"demonstrations": DEMOS[:2]}), 403)
    assert f"you have {POOL_QUOTA} pools, and your quota is {POOL_QUOTA} (max_pools)" in words
    told = tenanted.json(SMALL, "GET", "/v1/pools")
    taken = sum(pool["tokens"] for pool in told["pools"])
    wanted = {"name": "small", "pools": 2, "tokens": taken, "requests": 0, "max_pools": POOL_QUOTA}
    assert told["tenant"] == {**wanted, "max_tokens": TOKEN_QUOTA, "max_requests": REQUEST_QUOTA}
    grown = tenanted.call(SMALL, "POST", "/v1/pools/b/demonstrations", json={"demonstrations": DEMOS[2:]})
    assert "max_tokens" in refused(grown, 403)


@pytest.mark.parametrize("route", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_answers_under_way_are_counted(tenanted: Tenanted, route: str) -> None:
    body: dict[str, Any] = {"text": QUESTION, "sampling_params": {"max_new_tokens": 4}}
    if route != "/generate":
        body = {"model": "m", "max_tokens": 4, "prompt": QUESTION}
        body["messages"] = [{"role": "user", "content": QUESTION}]
    alone = {**body, "n": 3}
    if route == "/generate":
        alone = {**body, "sampling_params": {"max_new_tokens": 4, "n": 3}}
    words = refused(tenanted.call(SMALL, "POST", route, json=alone), 403)
    assert "asks for 3 answers" in words and "quota is 2 under way" in words
    busy = {"text": QUESTION, "sampling_params": {"max_new_tokens": 900, "ignore_eos": True}, "stream": True}
    running: list[requests.Response] = []
    try:
        for _ in range(REQUEST_QUOTA):
            running.append(tenanted.call(SMALL, "POST", "/generate", json=busy, stream=True))
        begun = [each.iter_lines() for each in running]  # kept: one that is forgotten hangs up
        assert all(next(lines).startswith(b"data: ") for lines in begun)
        words = refused(tenanted.call(SMALL, "POST", route, json=body), 429)
        assert "asks for 1 answers" in words and "2 are under way" in words and "quota is 2 at a time" in words
        assert tenanted.json(SMALL, "GET", "/v1/pools")["tenant"]["requests"] == REQUEST_QUOTA
        assert tenanted.call(ACME, "POST", route, json=body).status_code == 200
    finally:
        for each in running:
            each.close()
    until(lambda: tenanted.json(SMALL, "GET", "/v1/pools")["tenant"]["requests"] == 0)
    assert tenanted.call(SMALL, "POST", route, json=body).status_code == 200


def test_requests_that_end_are_no_longer_under_way(tenanted: Tenanted) -> None:
    """One after the other, with streams and mistakes among them, from as many clients as may ask at a time."""

    def ask(number: int) -> list[int]:
        found = []
        for each in range(6):
            params = {"max_new_tokens": 3, "top_p": 7.0 if each == 2 else 1.0}
            body = {"text": f"{number} {each} {QUESTION}", "sampling_params": params, "stream": each % 2 == 1}
            answer = tenanted.call(SMALL, "POST", "/generate", json=body)
            found.append(answer.status_code)
        return found

    with ThreadPoolExecutor(REQUEST_QUOTA) as threads:
        assert list(threads.map(ask, range(REQUEST_QUOTA))) == [[200, 200, 400, 200, 200, 200]] * REQUEST_QUOTA
    until(lambda: tenanted.json(SMALL, "GET", "/v1/pools")["tenant"]["requests"] == 0)


# ---- counters ----


def samples(tenanted: Tenanted, name: str) -> dict[str, float]:
    """Tenant -> value of a metric."""
    text = tenanted.call(ADMIN, "GET", "/metrics").text
    found = re.findall(rf'^sglang_ext:{name}{{[^}}]*tenant="([^"]*)"[^}}]*}} (\S+)$', text, flags=re.MULTILINE)
    return {tenant: float(value) for tenant, value in found}


def test_counters_are_by_tenant(tenanted: Tenanted) -> None:
    tenanted.put(BOLT, "tickets")
    counters = ("tenant_requests_total", "tenant_prompt_tokens_total", "tenant_generated_tokens_total")
    before = [samples(tenanted, name).get("bolt", 0.0) for name in (*counters, "pool_requests_total")]
    metas = [tenanted.ask(BOLT, new_tokens=5, **custom).json()["meta_info"] for custom in ({}, {"pool": "tickets"})]
    after = [samples(tenanted, name).get("bolt", 0.0) for name in (*counters, "pool_requests_total")]
    grown = [new - old for new, old in zip(after, before, strict=True)]
    assert grown == [2, sum(meta["prompt_tokens"] for meta in metas), 10, 1]
    text = tenanted.call(ADMIN, "GET", "/metrics").text
    assert re.search(r'sglang_ext:pool_tokens{[^}]*pool="tickets"[^}]*tenant="bolt"', text), text[-3000:]
    small = samples(tenanted, "tenant_refused_total").get("small", 0.0)
    assert tenanted.ask(SMALL, new_tokens=4).status_code == 200
    body = {"text": [QUESTION] * 3, "sampling_params": {"max_new_tokens": 2}}
    assert tenanted.call(SMALL, "POST", "/generate", json=body).status_code == 403
    assert samples(tenanted, "tenant_refused_total")["small"] == small + 1


# ---- SIGHUP ----


def test_the_file_is_read_again(tenanted: Tenanted) -> None:
    """A key more, a tenant more, another quota; then a wrong file, which changes nothing; then a tenant less."""
    assert tenanted.ask(LATE).status_code == 401
    wider = {**TENANTS, "late": entry(LATE, max_pools=1), "bolt": entry(BOLT, "more-of-bolt")}
    try:
        tenanted.write(wider)
        tenanted.hang_up()
        until(lambda: tenanted.ask(LATE).status_code == 200)
        assert tenanted.ask("more-of-bolt").status_code == 200
        tenanted.put(LATE, "tickets", DEMOS[:2])
        assert tenanted.names(LATE) == ["tickets"]
        assert "max_pools" in refused(tenanted.call(LATE, "PUT", "/v1/pools/b", json={"demonstrations": DEMOS}), 403)
        for wrong, why in (
            ("{", "Expecting property name"),
            ('{"acme": {"keys": ["key-of-acme"]}}', "keys[0] is no SHA"),
        ):
            tenanted.file.write_text(wrong, encoding="utf-8")
            tenanted.hang_up()
            until(lambda why=why: why in tenanted.server.log())
            assert tenanted.ask(LATE).status_code == tenanted.ask(ACME).status_code == 200
        assert ACME not in tenanted.server.log().split("the tenants stay as they were")[-1]
    finally:
        tenanted.write(TENANTS)
        tenanted.hang_up()
        until(lambda: tenanted.ask(LATE).status_code == 401)
    assert tenanted.ask("more-of-bolt").status_code == 401 and tenanted.ask(BOLT).status_code == 200
    listed = {each["name"]: each["pools"] for each in tenanted.json(ADMIN, "GET", "/v1/pools")["tenants"]}
    assert [pool["name"] for pool in listed["late"]] == ["tickets"]  # it is the operator's to delete now
    tenanted.json(ADMIN, "DELETE", "/v1/pools/tickets", place="late")


# ---- streams ----


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenanted]:
    env = {"SGLANG_EXT_POLICY": json.dumps(policy_of(SIZES))}
    options = {"attention_backend": "ltri", "max_total_tokens": 400}
    server, file = started(tmp_path_factory.mktemp("streams"), env=env, **options)
    with server:
        yield Tenanted(server, file)
        assert server.faults() == []


def turn(tenanted: Tenanted, key: str, prompt: list[int], **custom: Any) -> requests.Response:
    params = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True, "custom_params": custom or None}
    return tenanted.call(key, "POST", "/generate", json={"input_ids": prompt, "sampling_params": params})


def conversation_key(answer: requests.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["meta_info"]["sglang_ext"]["conversation_key"])


def test_conversations_of_one_name(streams: Tenanted) -> None:
    """A name is free to each tenant; the key of another's conversation opens nothing, as if it were not there."""
    key = conversation_key(turn(streams, ACME, prompt_of(40, 1), conversation="a"))
    goes_on = {"conversation": "a", "conversation_key": key, "continue": True}
    nothing = refused(turn(streams, BOLT, prompt_of(5, 2), **{**goes_on, "conversation": "never"}), 400)
    words = refused(turn(streams, BOLT, prompt_of(5, 2), **goes_on), 400)
    assert words == nothing.replace("'never'", "'a'") and "cannot be continued" in words
    theirs = conversation_key(turn(streams, BOLT, prompt_of(40, 3), conversation="a"))
    assert theirs != key
    assert "is another's" in refused(turn(streams, ACME, prompt_of(9, 4), conversation="a"), 400)
    answer = turn(streams, ACME, prompt_of(5, 2), **goes_on)
    assert conversation_key(answer) == key
    assert "_namespace" not in answer.text and "_namespace" not in words
    assert "_namespace" in refused(turn(streams, ACME, prompt_of(5, 2), **goes_on, _namespace="x"), 400)


def test_streams_fork_within_a_tenant(streams: Tenanted) -> None:
    document = prompt_of(120, 5)
    asked = [(ACME, 6), (BOLT, 7), (ACME_TOO, 8), (ADMIN, 9)]
    found = [turn(streams, key, [*document, *prompt_of(20, number)]).json() for key, number in asked]
    copied = [answer["meta_info"]["cached_tokens"] for answer in found]
    assert copied[0] == copied[1] == copied[3] == 0 < copied[2], copied
