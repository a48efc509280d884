"""Clients that cancel, delete, replace and leave at any moment, bodies of every size: the server goes on answering."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import requests

from tests.e2e.server import Server, answer_logprobs, answer_tokens, error_of, model, until
from tests.oracle import models

MIB = 1 << 20
POOL_MIB, REQUEST_MIB, MOST = 24, 2, 60_000
SETTINGS = {
    "max_pool_mb": POOL_MIB,
    "max_request_mb": REQUEST_MIB,
    "max_demonstrations": MOST,
    "max_pools": 6,
    "max_waiting_encodings": 3,
    "max_body_seconds": 5,
    "encoding_tokens": 8,
}
BASE = models.demonstrations(12)


def many(n: int, seed: int) -> list[dict[str, str]]:
    """Demonstrations that no other pool here has."""
    return [{**d, "input": f"{seed} {d['input']}"} for d in models.demonstrations(n, seed)]


SLOW = {"demonstrations": many(240, 11), "block_size": 2, "positions": "local"}  # encoded in many steps


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    env = {"SGLANG_EXT_SETTINGS": json.dumps(SETTINGS)}
    with Server(model(), env=env, max_total_tokens=6000, chunked_prefill_size=32) as running:
        running.put("base", BASE, block_size=4)
        yield running
        assert running.faults() == []


@pytest.fixture(autouse=True)
def unharmed(server: Server) -> Iterator[None]:
    """After every test here the pool `base` is alone, and holds its own tokens only."""
    yield
    server.idle()
    until(lambda: len(server.json("GET", "/v1/pools")["pools"]) == 1)
    until(lambda: server.state()["sglang_ext"]["held_tokens"] == server.pool("base")["tokens"])
    assert server.generate("how do i activate my card?", pool="base")["meta_info"]["completion_tokens"] == 8


# --------------------------------------------------------------------------- changes that are stopped


def test_cancelling_at_every_moment(server: Server) -> None:
    """One PUT while three clients cancel it again and again; then the pool can be put and deleted."""
    over = threading.Event()

    def cancel_on() -> set[int]:
        seen = set()
        with requests.Session() as session:
            while not over.is_set():
                answer = session.post(server.url + "/v1/pools/x/cancel", timeout=60)
                seen.add(answer.status_code)
        return seen

    with ThreadPoolExecutor(3) as threads:
        cancelling = [threads.submit(cancel_on) for _ in range(3)]
        try:
            for _ in range(12):
                answer = server.call("PUT", "/v1/pools/x", json={"demonstrations": many(12, 1), "block_size": 2})
                assert answer.status_code in (200, 409), answer.text
                assert server.call("GET", "/health", timeout=20).status_code == 200
        finally:
            over.set()
        assert set().union(*(each.result() for each in cancelling)) <= {200, 404}
    server.put("x", many(12, 1), block_size=2)
    assert server.json("DELETE", "/v1/pools/x")["status"] == "deleted"


def test_deleting_and_replacing_at_once(server: Server) -> None:
    def put(seed: int) -> int:
        return server.call("PUT", "/v1/pools/x", json={"demonstrations": many(9, seed), "block_size": 3}).status_code

    def delete(_: int) -> int:
        return server.call("DELETE", "/v1/pools/x").status_code

    with ThreadPoolExecutor(6) as threads:
        puts, deletes = threads.map(put, range(12)), threads.map(delete, range(24))
        assert set(puts) <= {200, 409} and set(deletes) <= {200, 404}
    server.call("DELETE", "/v1/pools/x")


def leave_in_mid_put(server: Server, name: str, wait: bool) -> None:
    """PUT a pool, and hang up once it is being encoded."""
    body = json.dumps({**SLOW, "wait": wait}).encode()
    head = f"PUT /v1/pools/{name} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: server.call("GET", f"/v1/pools/{name}").json().get("progress", {}).get("blocks_done"))


def test_a_put_whose_client_went_stops_encoding(server: Server) -> None:
    leave_in_mid_put(server, "left", wait=True)
    until(lambda: server.call("GET", "/v1/pools/left").status_code == 404)


def test_a_put_that_nobody_waits_for_goes_on_without_its_client(server: Server) -> None:
    leave_in_mid_put(server, "alone", wait=False)
    until(lambda: server.pool("alone")["status"] == "ready")
    server.json("DELETE", "/v1/pools/alone")


def test_the_queue_of_encodings_is_bounded(server: Server) -> None:
    def put(number: int) -> requests.Response:
        demonstrations = many(40, 20 + number)
        return server.call("PUT", f"/v1/pools/q{number}", json={"demonstrations": demonstrations, "block_size": 2})

    for _ in range(8):  # on a crowded machine clients come too late to meet in the queue
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(put, range(8)))
        for number in range(8):
            server.call("DELETE", f"/v1/pools/q{number}")
        refused = [answer for answer in answers if answer.status_code != 200]
        for answer in refused:  # there may be no more than five pools beside the first, either
            assert answer.status_code in (429, 413), answer.text
            assert "--max-waiting-encodings 3" in error_of(answer) or "--max-pools 6" in error_of(answer)
        if any(answer.status_code == 429 for answer in refused):
            return
    raise AssertionError("the queue was never full")


def test_the_number_of_pools_is_bounded(server: Server) -> None:
    answers = [server.call("PUT", f"/v1/pools/n{n}", json={"demonstrations": many(3, n)}) for n in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 5 + [413]
    assert "--max-pools 6" in error_of(answers[-1])
    for number in range(5):
        server.json("DELETE", f"/v1/pools/n{number}")


# --------------------------------------------------------------------------- large bodies


def endless(size: int) -> Iterator[bytes]:
    """A body without Content-Length."""
    for _ in range(size // (64 << 10)):
        yield b"x" * (64 << 10)


@pytest.mark.parametrize(
    ("method", "path", "mib", "flag"),
    [
        ("PUT", "/v1/pools/large", POOL_MIB, "--max-pool-mb"),
        ("POST", "/v1/pools/base/demonstrations", POOL_MIB, "--max-pool-mb"),
        ("POST", "/v1/pools/plan", POOL_MIB, "--max-pool-mb"),
        ("POST", "/generate", REQUEST_MIB, "--max-request-mb"),
        ("POST", "/v1/chat/completions", REQUEST_MIB, "--max-request-mb"),
    ],
)
def test_a_body_beyond_its_limit_is_413(server: Server, method: str, path: str, mib: int, flag: str) -> None:
    kind = {"Content-Type": "application/json"}
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:  # its size is all it says
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {mib * MIB + 1}\r\n\r\n".encode())
        told = client.recv(4096).decode()
    assert told.startswith("HTTP/1.1 413"), told
    try:
        answer = server.call(method, path, data=endless(3 * mib * MIB), headers=kind)
    except requests.ConnectionError:  # the server hangs up on what it does not read
        pass
    else:
        assert answer.status_code == 413 and f"{flag} {mib}" in answer.text, answer.text
    assert server.call("GET", "/health").status_code == 200


def test_a_slow_body_is_408_and_many_large_ones_are_429(server: Server) -> None:
    """Clients that announce a body and never send its end: together they take no more memory than four large bodies."""
    clients = []
    for _ in range(6):
        client = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        head = "PUT /v1/pools/large HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with contextlib.suppress(ConnectionError):  # the server hangs up on what it does not read
            client.sendall(f"{head}Content-Length: {POOL_MIB * MIB}\r\n\r\n".encode() + b"x" * (POOL_MIB * MIB - 1))
        clients.append(client)
    assert server.call("GET", "/health").status_code == 200
    assert server.generate("a small one", 1)["meta_info"]["completion_tokens"] == 1
    told = []
    for client in clients:
        with client, contextlib.suppress(ConnectionError):
            told.append(client.recv(4096).decode().split(" ", 2)[1])
    assert told.count("408") == 4 and set(told) == {"408", "429"}, told


def test_a_large_pool_is_refused_soon_and_leaves_no_memory(server: Server) -> None:
    """Its demonstrations are counted as far as it takes to know, beside everything else, and forgotten."""
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    text = " ".join(f"why is my card {n} frozen and who can help me" for n in range(8))
    items = [{"input": f"{n} {text}", "output": "x"} for n in range((POOL_MIB - 2) * MIB // (len(text) + 40))]
    body = json.dumps({"demonstrations": items}).encode()
    assert 0.8 * POOL_MIB * MIB < len(body) < POOL_MIB * MIB

    def refused() -> float:
        begin = time.monotonic()
        answer = server.call("PUT", "/v1/pools/large", data=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413 and "tokens" in error_of(answer), answer.text
        return time.monotonic() - begin

    for _ in range(2):
        refused()  # what a first use keeps
    time.sleep(2)  # and gives back a second later
    before = process.memory_info().rss
    waits: list[float] = []
    with ThreadPoolExecutor(1) as thread:
        working = thread.submit(lambda: [refused() for _ in range(3)])
        while not working.done():
            begin = time.monotonic()
            assert server.call("GET", "/get_model_info", timeout=30).status_code == 200
            waits.append(time.monotonic() - begin)
            time.sleep(0.02)
        took = working.result()
    until(lambda: (process.memory_info().rss - before) / MIB < POOL_MIB)  # and not three bodies more
    assert max(took) < 30, took
    assert sorted(waits)[len(waits) // 2] < 1, "half of a neighbour's answers took more than a second"


@pytest.mark.parametrize(
    ("demonstrations", "words"),
    [
        ([{"input": "x", "output": "y"}] * (MOST + 1), "--max-demonstrations"),
        ([{"input": "x" * (MIB + 1), "output": "y"}], "characters"),
        ([{"input": "x", "output": "y" * (MIB + 1)}], "characters"),
    ],
)
def test_too_much_of_anything_is_refused_in_words(server: Server, demonstrations: list[Any], words: str) -> None:
    for method, path in (("PUT", "/v1/pools/large"), ("POST", "/v1/pools/base/demonstrations")):
        answer = server.call(method, path, json={"demonstrations": demonstrations})
        assert answer.status_code in (400, 413) and words in error_of(answer), answer.text


# --------------------------------------------------------------------------- texts and options


LONE = "\ud800"


@pytest.mark.parametrize(
    "body",
    [
        {"demonstrations": [{"input": LONE, "output": "y"}]},
        {"demonstrations": [{"input": "x", "output": LONE}]},
        {"demonstrations": [{"id": LONE, "input": "x", "output": "y"}]},
        {"demonstrations": BASE, "system": LONE},
        {"demonstrations": BASE, "separator": LONE},
        {"demonstrations": BASE, "label_prefix": LONE},
        {"demonstrations": BASE, "template": "{input}" + LONE + "{output}"},
    ],
)
def test_a_lone_surrogate_is_refused_before_anything_changes(server: Server, body: dict[str, Any]) -> None:
    raw = json.dumps(body)
    assert "\\ud800" in raw
    answer = server.call("PUT", "/v1/pools/lone", data=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and "surrogate" in error_of(answer), answer.text
    lines = "\n".join(json.dumps(item) for item in body["demonstrations"])
    if "\\ud800" in lines:
        answer = server.call("PUT", "/v1/pools/lone", data=lines, headers={"Content-Type": "application/jsonl"})
        assert answer.status_code == 400 and "surrogate" in error_of(answer), answer.text
    assert [pool["name"] for pool in server.json("GET", "/v1/pools")["pools"]] == ["base"]
    assert server.call("GET", "/server_info").status_code == 200


def test_byte_order_marks_and_numbers_as_ids(server: Server) -> None:
    items = [{"id": number, **item} for number, item in enumerate(models.demonstrations(4, 2))]
    lines = "\ufeff" + "\n".join(map(json.dumps, items))
    for raw, kind in (
        (lines, "application/jsonl"),
        ("\ufeff" + json.dumps({"demonstrations": items}), "application/json"),
    ):
        info = server.json("PUT", "/v1/pools/marked", data=raw.encode(), headers={"Content-Type": kind})
        assert sorted(id for block in info["blocks"] for id in block["demonstrations"]) == ["0", "1", "2", "3"]
    assert server.json("DELETE", "/v1/pools/marked/demonstrations/3")["deleted"] == ["3"]
    server.json("DELETE", "/v1/pools/marked")


@pytest.mark.parametrize(
    ("method", "path", "kind", "words"),
    [
        ("PUT", "/v1/pools/odd?block_size=3", "application/json", "block_size"),
        ("PUT", "/v1/pools/odd?wait=false", "application/json", "wait"),
        ("PUT", "/v1/pools/odd?blocksize=3", "application/jsonl", "did you mean block_size"),
        ("POST", "/v1/pools/base/demonstrations?wait=true", "application/json", "wait"),
        ("POST", "/v1/pools/base/cancel?now=1", "application/json", "now"),
        ("GET", "/v1/pools?tokens=true", "application/json", "tokens"),
        ("GET", "/v1/pools/base?token=true", "application/json", "token"),
        ("DELETE", "/v1/pools/base?purge=true", "application/json", "purge"),
        ("DELETE", "/v1/pools/base/demonstrations/d0?purged=true", "application/json", "purged"),
    ],
)
def test_query_parameters_that_nobody_reads_are_refused(
    server: Server, method: str, path: str, kind: str, words: str
) -> None:
    raw = json.dumps({"demonstrations": BASE}) if kind.endswith("json") else json.dumps(BASE[0])
    answer = server.call(method, path, data=raw if method in ("PUT", "POST") else None, headers={"Content-Type": kind})
    assert answer.status_code == 400 and words in error_of(answer), answer.text


def passes(server: Server, since: int) -> list[int]:
    """New tokens of each prefill that the log tells of, from a place in it on."""
    found = re.findall(r"Prefill batch.*?#new-token: (\d+)", server.log()[since:])
    return [int(tokens) for tokens in found]


def test_an_encoding_lets_others_decode(server: Server) -> None:
    """While somebody decodes, a pass encodes 8 tokens; while nobody does, 32. What is written is the same."""
    question = "where is the money that i sent?"
    since = len(server.log())
    server.put("alone", SLOW["demonstrations"][:24], block_size=6)
    until(lambda: sum(passes(server, since)) >= server.pool("alone")["tokens"])
    assert max(passes(server, since)) == 32
    alone = server.generate(question, pool="alone")
    server.json("DELETE", "/v1/pools/alone")
    body = {"text": "an answer", "sampling_params": {"temperature": 0, "max_new_tokens": 1000, "ignore_eos": True}}
    decoding = server.stream(body)
    next(decoding)
    since = len(server.log())
    server.put("beside", SLOW["demonstrations"][:24], block_size=6)
    tokens = server.pool("beside")["tokens"]
    running = server.json("GET", "/v1/loads")["loads"][0]["num_running_reqs"]
    assert running == 1, "the answer ended first: let it be longer"
    until(lambda: sum(passes(server, since)) >= tokens)
    assert 0 < max(passes(server, since)) <= 8
    decoding.close()
    beside = server.generate(question, pool="beside")
    assert answer_tokens(beside) == answer_tokens(alone)
    assert answer_logprobs(beside) == pytest.approx(answer_logprobs(alone), abs=1e-4)
    server.json("DELETE", "/v1/pools/beside")
