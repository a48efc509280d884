"""Bad input and faults over HTTP: every one is told in plain words, changes nothing, and leaves a server that answers.

One server with room for 6,000 tokens and chunks of 64, so that pools are encoded in many steps.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from tests.e2e.server import Server, answer_tokens, error_of, in_mid_encode, model, until
from tests.oracle import models

TOTAL = 6000
CONTEXT = 2048
QUESTION = "how do i activate my card?"
BASE = models.demonstrations(24)  # about 16 tokens each


def many(n: int, seed: int) -> list[dict[str, str]]:
    """Demonstrations that no other pool here has."""
    return [{**d, "input": f"{seed} {d['input']}"} for d in models.demonstrations(n, seed)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(
        model("llama", max_position_embeddings=CONTEXT),
        max_total_tokens=TOTAL,
        chunked_prefill_size=64,
        decode_log_interval=1,
    ) as running:
        running.put("base", BASE, block_size=6)
        yield running
        assert running.faults() == []


@pytest.fixture(autouse=True)
def unharmed(server: Server) -> Iterator[None]:
    """After every test here: the pool `base` is alone, holds its own tokens only, and answers as before."""
    before = answer_tokens(server.generate(QUESTION, pool="base"))
    yield
    server.idle()
    pools = server.json("GET", "/v1/pools")["pools"]
    left = [pool["name"] for pool in pools if pool["name"] != "base"]
    for name in left:
        server.call("DELETE", f"/v1/pools/{name}")
    assert not left, "a test left pools behind"
    until(lambda: server.pool("base")["requests_in_flight"] == 0)  # of a client that went, a moment after
    assert answer_tokens(server.generate(QUESTION, pool="base")) == before
    assert server.state()["sglang_ext"]["held_tokens"] == pools[0]["tokens"]


def gone(server: Server, name: str) -> bool:
    return server.call("GET", f"/v1/pools/{name}").status_code == 404


# --------------------------------------------------------------------------- unknown pools


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/pools/nope", None),
        ("DELETE", "/v1/pools/nope", None),
        ("POST", "/v1/pools/nope/cancel", None),
        ("POST", "/v1/pools/nope/demonstrations", {"demonstrations": BASE[:1]}),
        ("DELETE", "/v1/pools/nope/demonstrations/d0", None),
        ("POST", "/generate", {"text": "a", "sampling_params": {"custom_params": {"pool": "nope"}}}),
        ("POST", "/v1/completions", {"model": "m", "prompt": "a", "custom_params": {"pool": "nope"}}),
        (
            "POST",
            "/v1/chat/completions",
            {"model": "m", "messages": [{"role": "user", "content": "a"}], "custom_params": {"pool": "nope"}},
        ),
    ],
)
def test_an_unknown_pool_is_404_and_lists_the_names(server: Server, method: str, path: str, body: Any) -> None:
    answer = server.call(method, path, json=body)
    assert answer.status_code == 404, answer.text
    assert "nope" in error_of(answer) and "base" in error_of(answer)


def test_an_unknown_pool_while_streaming(server: Server) -> None:
    body = {"text": "a", "stream": True, "sampling_params": {"custom_params": {"pool": "nope"}}}
    answer = server.call("POST", "/generate", json=body)
    assert "nope" in answer.text and "base" in answer.text
    assert answer.status_code == 404 or "error" in answer.text


def test_an_unknown_demonstration_is_404(server: Server) -> None:
    answer = server.call("DELETE", "/v1/pools/base/demonstrations/d999")
    assert answer.status_code == 404 and "d999" in error_of(answer)


def test_a_demonstration_is_deleted_once(server: Server) -> None:
    server.put("once", many(6, 3), block_size=3)
    server.generate("why?", 2, pool="once")  # its retriever is there, to be extended
    server.json("DELETE", "/v1/pools/once/demonstrations/d1")
    version = server.pool("once")["version"]
    answer = server.call("DELETE", "/v1/pools/once/demonstrations/d1")
    assert answer.status_code == 404 and "deleted already" in error_of(answer), answer.text
    assert server.pool("once")["version"] == version and server.pool("once")["status"] == "ready"
    server.json("DELETE", "/v1/pools/once/demonstrations/d1", params={"purge": "true"})
    assert server.pool("once")["deleted"] == []
    server.json("DELETE", "/v1/pools/once")


# --------------------------------------------------------------------------- bad pools


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"demonstrations": []}, ["no demonstrations"]),
        ({"demonstrations": "x"}, ["list"]),
        ({"demonstrations": [1]}, ["demonstration 1"]),
        ({"demonstrations": [*BASE[:2], {"input": "a"}]}, ["demonstration 3", "output"]),
        ({"demonstrations": [{"input": "a", "output": ""}]}, ["demonstration 1", "not empty"]),
        ({"demonstrations": [{"input": 5, "output": "x"}]}, ["demonstration 1"]),
        ({"demonstrations": [{**BASE[0], "id": "x"}, {**BASE[1], "id": "x"}]}, ["demonstration 2", "'x'", "unique"]),
        ({"demonstrations": BASE, "template": "{input}"}, ["template", "{output}"]),
        ({"demonstrations": BASE, "template": "{output} {input}"}, ["after"]),
        ({"demonstrations": BASE, "block_size": 0}, ["block_size"]),
        ({"demonstrations": BASE, "block_size": "5"}, ["block_size", "str"]),
        ({"demonstrations": BASE, "block_size": True}, ["block_size", "bool"]),
        ({"demonstrations": BASE, "sink_blocks": 0}, ["sink_blocks=0"]),
        ({"demonstrations": BASE, "previous_blocks": -1}, ["previous_blocks=-1"]),
        ({"demonstrations": BASE, "pattern": "half"}, ["half", "sink+previous+self"]),
        ({"demonstrations": BASE, "grouping": "luck"}, ["luck", "length_balanced"]),
        ({"demonstrations": BASE, "positions": "up"}, ["up", "local"]),
        ({"demonstrations": BASE, "bloc_size": 3}, ["bloc_size", "block_size"]),
        ({"demonstrations": BASE, "wait": "no"}, ["wait"]),
        ({"demonstrations": many(120, 9), "positions": "sequential"}, ["context", str(CONTEXT), "local"]),
        ({"demonstrations": many(120, 9), "block_size": 120, "positions": "local"}, ["context", "smaller blocks"]),
        ([1, 2], ["object"]),
    ],
)
def test_a_bad_pool_is_refused_in_words(server: Server, body: Any, words: list[str]) -> None:
    answer = server.call("PUT", "/v1/pools/bad", json=body)
    assert answer.status_code == 400, answer.text
    for word in words:
        assert word in error_of(answer)
    assert gone(server, "bad")


@pytest.mark.parametrize("name", ["a b", "a%2Fb", "..", "%2e%2e", ".hidden", "ä", "a" * 129, "-x", "a%00b", "a\u202eb"])
def test_an_odd_name_is_refused(server: Server, name: str) -> None:
    answer = server.call("PUT", f"/v1/pools/{name}", json={"demonstrations": BASE})
    assert answer.status_code in (400, 404, 405), answer.text


@pytest.mark.parametrize(
    ("lines", "number"),
    [('{"input":"x","output":"y"}\n{bad', 2), ('\n\n{"input":"x","output":"y"}\n\n[1,', 5), ("not json", 1)],
)
def test_malformed_jsonl_names_the_line(server: Server, lines: str, number: int) -> None:
    for path, method in (("/v1/pools/bad", "PUT"), ("/v1/pools/base/demonstrations", "POST")):
        answer = server.call(method, path, data=lines, headers={"Content-Type": "application/jsonl"})
        assert answer.status_code == 400 and f"line {number} " in error_of(answer), answer.text
    assert server.pool("base")["version"] == 1


@pytest.mark.parametrize("raw", [b"{", b"", b"\xff\xfe{}", b'"x"', b"[" * 50_000])
def test_a_body_that_is_no_json(server: Server, raw: bytes) -> None:
    assert server.call("PUT", "/v1/pools/bad", data=raw).status_code == 400


def test_query_options_of_a_wrong_type(server: Server) -> None:
    line = '{"input":"x","output":"y"}'
    header = {"Content-Type": "application/x-ndjson"}
    for query in ("block_size=x", "pinned=perhaps", "wait=perhaps", "nonsense=1"):
        answer = server.call("PUT", f"/v1/pools/bad?{query}", data=line, headers=header)
        assert answer.status_code == 400 and query.split("=")[0] in error_of(answer), answer.text


# --------------------------------------------------------------------------- bad requests


LONG = "how do i activate my card? " * 400


@pytest.mark.parametrize(
    ("own", "custom", "words"),
    [
        ({"text": "a"}, {"ratio": 0}, ["ratio"]),
        ({"text": "a"}, {"ratio": 1.5}, ["ratio"]),
        ({"text": "a"}, {"ratio": -0.1}, ["ratio"]),
        ({"text": "a"}, {"ratio": None, "blocks": None, "block_ids": {}}, ["block_ids"]),
        ({"text": "a"}, {"ratio": "half"}, ["ratio"]),
        ({"text": "a"}, {"blocks": 0}, ["blocks"]),
        ({"text": "a"}, {"blocks": 99}, ["blocks"]),
        ({"text": "a"}, {"blocks": 1.0}, ["blocks"]),
        ({"text": "a"}, {"ratio": 0.5, "blocks": 2}, ["ratio and blocks"]),
        ({"text": "a"}, {"block_ids": [0, 99]}, ["99"]),
        ({"text": "a"}, {"block_ids": [0, 0]}, ["twice"]),
        ({"text": "a"}, {"block_ids": []}, ["block_ids"]),
        ({"text": "a"}, {"block_ids": ["x"]}, ["block_ids"]),
        ({"text": "a"}, {"block_ids": [-1]}, ["block_ids"]),
        ({"text": "a"}, {"order": "odd"}, ["order", "low_to_high"]),
        ({"text": "a"}, {"retriever": "luck"}, ["luck", "bm25"]),
        ({"text": "a"}, {"retriever": "bm25:luck"}, ["bm25:luck", "stem, stop_words"]),
        ({"text": "a"}, {"granularity": "word"}, ["granularity"]),
        ({"text": "a"}, {"granularity": "example", "block_ids": [0]}, ["block_ids"]),
        ({"text": "a"}, {"constrain": "json"}, ["constrain"]),
        ({"text": "a"}, {"nonsense": 1}, ["nonsense"]),
        ({"text": "a"}, {"pool": 5}, ["pool"]),
        ({"text": "a"}, {"pool": None}, ["pool"]),
        ({"text": "a"}, {"sglang_ext": "{"}, ["sglang_ext"]),
        ({"text": "a"}, {"_chat_header": "x"}, ["_chat_header"]),
        ({"text": "  "}, {}, ["empty"]),
        ({"input_ids": []}, {}, ["empty"]),
        ({"input_ids": [5, 6]}, {}, ["query"]),
        ({"input_ids": [5, 10_000]}, {"query": "a"}, ["10000", "vocabulary"]),
        ({"input_ids": [5, -1]}, {"query": "a"}, ["-1", "vocabulary"]),
        ({"text": LONG}, {}, [str(CONTEXT), "shorten"]),
    ],
)
def test_a_bad_request_is_refused_in_words(
    server: Server, own: dict[str, Any], custom: dict[str, Any], words: list[str]
) -> None:
    params = {"max_new_tokens": 4, "custom_params": {"pool": "base", **custom}}
    answer = server.call("POST", "/generate", json={**own, "sampling_params": params})
    assert answer.status_code == 400, answer.text
    for word in words:
        assert word in error_of(answer), answer.text


def test_fewer_blocks_than_sinks(server: Server) -> None:
    server.put("sinks", BASE, block_size=4, sink_blocks=3)
    body = server.payload("a", pool="sinks", blocks=2)
    answer = server.call("POST", "/generate", json=body)
    assert answer.status_code == 400 and "2" in error_of(answer) and "3" in error_of(answer), answer.text
    server.json("DELETE", "/v1/pools/sinks")


def test_one_bad_prompt_of_a_batch_leaves_no_lease(server: Server) -> None:
    body = {
        "text": ["a", "b", LONG, "c"],
        "sampling_params": {"max_new_tokens": 30, "temperature": 0, "custom_params": {"pool": "base"}},
    }
    assert server.call("POST", "/generate", json=body).status_code == 400
    until(lambda: server.pool("base")["requests_in_flight"] == 0)


@pytest.mark.parametrize("text", ["{", "[]", '{"prefix":[],"new":[],"owner":""}'])
@pytest.mark.parametrize("rid", ["sglang-ext-1", "sglang-ext-encode-1", None])
def test_a_client_cannot_speak_as_the_server(server: Server, text: str, rid: str | None) -> None:
    """What the tokenizer process tells the schedulers cannot come from outside, whatever the request calls itself."""
    params = {"max_new_tokens": 2, "custom_params": {"sglang_ext": text}}
    body: dict[str, Any] = {"text": "a", "sampling_params": params}
    if rid is not None:
        body["rid"] = f"{rid}{abs(hash(text))}"
    answer = server.call("POST", "/generate", json=body)
    assert answer.status_code == 400 and "own requests" in error_of(answer), answer.text


def test_constraints_exclude_each_other(server: Server) -> None:
    for name, value in (("regex", "a+"), ("json_schema", "{}"), ("ebnf", 'root ::= "a"')):
        body = server.payload("a", pool="base", constrain="labels")
        body["sampling_params"][name] = value
        answer = server.call("POST", "/generate", json=body)
        assert answer.status_code == 400 and name in error_of(answer), answer.text


def test_options_are_not_changed_by_appending(server: Server) -> None:
    answer = server.call("POST", "/v1/pools/base/demonstrations", json={"demonstrations": BASE[:1], "block_size": 3})
    assert answer.status_code == 400 and "block_size" in error_of(answer)


def test_the_last_demonstration_stays(server: Server) -> None:
    server.put("one", many(1, 3))
    answer = server.call("DELETE", "/v1/pools/one/demonstrations/d0")
    assert answer.status_code == 409 and "delete the pool" in error_of(answer), answer.text
    server.json("DELETE", "/v1/pools/one")


# --------------------------------------------------------------------------- memory


def test_a_pool_larger_than_memory_says_the_numbers_and_changes_nothing(server: Server) -> None:
    big = many(450, 5)
    plan = server.json("POST", "/v1/pools/plan", json={"demonstrations": big, "positions": "local", "block_size": 10})
    assert plan["tokens"] > TOTAL and plan["fits"] == 0
    before = server.pool("base", tokens=True)
    for name in ("big", "base"):  # a new one, and in the place of the one there is
        answer = server.call(
            "PUT", f"/v1/pools/{name}", json={"demonstrations": big, "positions": "local", "block_size": 10}
        )
        assert answer.status_code == 413, answer.text
        numbers = [int(n) for n in re.findall(r"\d+", error_of(answer))]
        assert plan["tokens"] in numbers, "the tokens it needs"
        assert any(0 < n < TOTAL for n in numbers), "the tokens there are"
    answer = server.call("POST", "/v1/pools/base/demonstrations", json={"demonstrations": many(120, 6)})
    assert answer.status_code == 400, answer.text  # beyond the context: also without a change
    after = server.pool("base", tokens=True)
    for info in (before, after):
        for block in info["blocks"]:
            block.pop("hits")
    assert after == before


def test_a_request_that_can_never_fit_is_refused_with_numbers(server: Server) -> None:
    """Held blocks leave too little for it: waiting would be for ever."""
    server.put("wide", many(280, 7), positions="local", block_size=10)
    held = server.state()["sglang_ext"]["held_tokens"]
    free = TOTAL - held
    assert free < 900, "the pool must leave less than a context"
    answer = server.call("POST", "/generate", json=server.payload([7] * (free + 10), 4))
    assert answer.status_code == 400, answer.text
    assert str(free) in error_of(answer) and str(TOTAL) in error_of(answer)
    # one that fits is answered, with as many tokens as there is room for
    answer = server.generate([7] * (free - 20), 500)
    assert 0 < answer["meta_info"]["completion_tokens"] <= 20
    server.json("DELETE", "/v1/pools/wide")


def test_two_pools_at_once_that_do_not_fit_together(server: Server) -> None:
    """Each alone would fit: one is served, the other is told; neither waits for ever."""

    def put(seed: int) -> requests.Response:
        body = {"demonstrations": many(160, seed), "positions": "local", "block_size": 10}
        return requests.put(f"{server.url}/v1/pools/half{seed}", json=body, timeout=120)

    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(put, (11, 12)))
    assert sorted(answer.status_code for answer in answers) == [200, 413], [a.text[:300] for a in answers]
    ready = [pool["name"] for pool in server.json("GET", "/v1/pools")["pools"]]
    assert len(ready) == 2
    server.generate(QUESTION, pool=ready[1])
    server.json("DELETE", f"/v1/pools/{ready[1]}")


# --------------------------------------------------------------------------- changes at once


def test_two_puts_of_one_name_at_once(server: Server) -> None:
    def put(seed: int) -> requests.Response:
        body = {"demonstrations": many(40, seed), "block_size": 5}
        return requests.put(f"{server.url}/v1/pools/twice", json=body, timeout=120)

    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(put, (21, 22)))
    codes = sorted(answer.status_code for answer in answers)
    assert codes in ([200, 409], [200, 200]), [a.text[:300] for a in answers]
    if 409 in codes:
        refused = next(a for a in answers if a.status_code == 409)
        assert "cancel" in error_of(refused) or "retry" in error_of(refused)
    pool = server.pool("twice")
    assert pool["status"] == "ready" and all(block["resident"] for block in pool["blocks"])
    server.json("DELETE", "/v1/pools/twice")


def test_flushing_the_cache_keeps_pools_working(server: Server) -> None:
    server.idle()
    before = server.generate(QUESTION, pool="base", ratio=0.6)
    # An answer overtakes the scheduler, which has a step more under way: a flush at once may be refused.
    server.call("POST", "/flush_cache", params={"timeout": 10}).raise_for_status()
    assert not any(block["resident"] for block in server.pool("base")["blocks"])
    after = server.generate(QUESTION, pool="base", ratio=0.6)
    assert answer_tokens(after) == answer_tokens(before)
    assert after["meta_info"]["sglang_ext"]["blocks"] == before["meta_info"]["sglang_ext"]["blocks"]
    assert all(block["resident"] for block in server.pool("base")["blocks"])


@pytest.mark.parametrize("pattern", ["self", "sink+previous+self"])
def test_flushing_the_cache_in_mid_encode(server: Server, pattern: str) -> None:
    """A flush between two of its requests takes blocks that are already there; the pool must still become whole."""
    body = {"demonstrations": many(230, 31), "block_size": 4, "pattern": pattern, "wait": False, "positions": "local"}
    for _ in range(8):  # on a crowded machine the encoding may be over before a flush finds the server idle
        server.json("PUT", "/v1/pools/flushed", json=body)
        flushed = 0
        while server.pool("flushed")["status"] == "encoding" and flushed < 3:
            for _ in range(8):  # refused while a request runs, which is nearly always
                flushed += server.call("POST", "/flush_cache").status_code == 200
        until(lambda: server.pool("flushed")["status"] != "encoding")
        pool = server.pool("flushed")
        assert pool["status"] == "ready", pool["error"]
        if flushed:
            break
        server.json("DELETE", "/v1/pools/flushed")
    assert flushed, "no flush found the server idle"
    server.generate(QUESTION, pool="flushed", ratio=0.3)
    assert all(block["resident"] for block in server.pool("flushed")["blocks"])
    server.generate(QUESTION, pool="base")  # whose blocks the flush took too
    server.json("DELETE", "/v1/pools/flushed")


@pytest.mark.parametrize("change", ["delete", "replace", "append", "purge"])
def test_streams_finish_on_the_version_they_began_on(server: Server, change: str) -> None:
    first = many(30, 41)
    server.put("moving", first, block_size=5)
    body = server.payload(QUESTION, 900, pool="moving", ratio=0.6)
    body["return_logprob"] = False  # lists that grow would slow down the change more than the streams
    expected = server.json("POST", "/generate", json=body)["output_ids"]
    # a fresh server-side state of the own tokens, so that the streams compute again
    started, results = [threading.Event() for _ in range(3)], [[] for _ in range(3)]

    def follow(index: int) -> None:
        for event in server.stream(body):
            results[index] = event["output_ids"]
            assert event["meta_info"]["sglang_ext"]["version"] == 1
            if len(results[index]) >= 3:
                started[index].set()

    threads = [threading.Thread(target=follow, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for event in started:
        assert event.wait(60)
    if change == "delete":
        server.json("DELETE", "/v1/pools/moving")
    elif change == "replace":
        server.put("moving", many(30, 42), block_size=5)
    elif change == "append":
        server.json("POST", "/v1/pools/moving/demonstrations", json={"demonstrations": many(5, 43)})
    else:
        server.json("DELETE", "/v1/pools/moving/demonstrations/d0", params={"purge": "true"})
    overlapped = sum(thread.is_alive() for thread in threads)
    for thread in threads:
        thread.join(120)
    assert overlapped, "the change came after the streams: nothing was tested"
    for tokens in results:
        assert tokens == expected
    if change == "delete":
        refused = server.call("POST", "/generate", json=body)
        assert refused.status_code == 404
    else:
        assert server.generate(QUESTION, pool="moving")["meta_info"]["sglang_ext"]["version"] == 2
        server.json("DELETE", "/v1/pools/moving")


# --------------------------------------------------------------------------- clients that go, work that stops


def test_a_client_gone_in_mid_stream(server: Server) -> None:
    for options in ({"pool": "base"}, {"pool": "base", "granularity": "example"}, {}):
        stream = server.stream(server.payload(QUESTION, 400, **options))
        for _ in range(3):
            next(stream)
        stream.close()
    server.idle(30)
    until(lambda: server.pool("base")["requests_in_flight"] == 0)


@pytest.mark.parametrize("custom", [{}, {"constrain": "labels"}])
def test_aborting_requests(server: Server, custom: dict[str, Any]) -> None:
    # a label of `base` may be answered before the abort arrives: these labels are long
    demonstrations = [{"input": f"case {i}", "output": letter * 1000} for i, letter in enumerate("ab")]
    server.put("long", demonstrations, block_size=1)
    body = {**server.payload(QUESTION, 1000, pool="long", **custom), "rid": "to-abort", "return_logprob": False}
    stream = server.stream(body)
    next(stream)
    server.call("POST", "/abort_request", json={"rid": "to-abort"}).raise_for_status()
    last = list(stream)[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    until(lambda: server.pool("long")["requests_in_flight"] == 0)
    server.json("DELETE", "/v1/pools/long")


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_stopping_an_encoding(server: Server, how: str) -> None:
    in_mid_encode(server, "stopped", {"demonstrations": many(250, 51), "block_size": 5, "positions": "local"})
    # a request has to wait until the pool is ready
    refused = server.call("POST", "/generate", json=server.payload(QUESTION, 4, pool="stopped"))
    assert refused.status_code == 409 and "encoded" in error_of(refused)
    if how == "cancel":
        server.json("POST", "/v1/pools/stopped/cancel")
    else:
        server.json("DELETE", "/v1/pools/stopped")
    assert gone(server, "stopped")


def test_cancelling_a_replacement_keeps_the_old_version(server: Server) -> None:
    def first() -> None:
        server.put("kept", many(20, 61), block_size=5)

    first()
    expected = answer_tokens(server.generate(QUESTION, pool="kept"))
    body = {"demonstrations": many(230, 62), "block_size": 5, "positions": "local"}
    for _ in range(8):
        in_mid_encode(server, "kept", body, again=first)
        meanwhile = answer_tokens(server.generate(QUESTION, pool="kept"))
        cancelled = server.call("POST", "/v1/pools/kept/cancel")
        if server.pool("kept")["version"] == 1:
            break
        server.json("DELETE", "/v1/pools/kept")  # it was encoded before the cancellation came, on a crowded machine
        first()
    else:
        raise AssertionError("every replacement was encoded before it was cancelled: encode more")
    assert meanwhile == expected, "served meanwhile from the old version"
    cancelled.raise_for_status()
    state = cancelled.json()
    assert state["status"] == "ready" and state["version"] == 1
    assert answer_tokens(server.generate(QUESTION, pool="kept")) == expected
    assert server.put("kept", many(20, 63), block_size=5)["version"] == 2
    server.json("DELETE", "/v1/pools/kept")


@pytest.mark.parametrize("pattern", ["self", "sink+previous+self"])
def test_aborting_all_requests_in_mid_encode(server: Server, pattern: str) -> None:
    """SGLang's abort of everything takes the encoding with it; the name is free again."""
    body = {"demonstrations": many(140, 71), "block_size": 7, "pattern": pattern, "positions": "local"}
    in_mid_encode(server, "aborted", body)
    server.call("POST", "/abort_request", json={"abort_all": True}).raise_for_status()
    until(lambda: gone(server, "aborted") or server.pool("aborted")["status"] != "encoding")
    pool = server.pool("aborted")
    if pool["status"] == "ready":  # the abort found no chunk of it under way
        assert all(block["resident"] for block in pool["blocks"])
    else:
        assert pool["status"] == "failed" and "abort" in pool["error"].lower(), pool
    server.json("DELETE", "/v1/pools/aborted")


# --------------------------------------------------------------------------- fairness


def test_a_running_answer_goes_on_while_a_pool_is_encoded(server: Server) -> None:
    """Between two chunks of an encoding a running request gets a token: at most two chunks in between."""
    mark = len(server.log())
    stream = server.stream(server.payload(QUESTION, 500))
    next(stream)
    body = {"demonstrations": many(140, 81), "block_size": 14, "positions": "local", "wait": False}
    server.json("PUT", "/v1/pools/large", json=body)
    for count, _ in enumerate(stream, 1):
        if count % 10 == 0 and server.pool("large")["status"] != "encoding":
            break
    stream.close()
    steps = re.findall(r"(Prefill|Decode) batch,?[^\n]*?#running-req: (\d+)", server.log()[mark:])
    kinds = "".join(kind[0] for kind, running in steps if kind == "Decode" or int(running) > 0)
    chunks = kinds.count("P")
    assert chunks >= 30, "the pool must take many chunks while the answer runs"
    assert "PPP" not in kinds, "three chunks of encoding without a token of the running request between them"
    server.json("DELETE", "/v1/pools/large")
