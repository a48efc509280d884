"""Two servers on one folder of pools behind the real router: where requests go, and what faults leave unanswered."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.router import HOME, Clients, Router, routing
from tests.e2e.server import Server, error_of, model, until
from tests.oracle import models

QUESTION = "how do i activate my card?"
EACH = 3  # pools at home on each server
BLOCKS = {"block_size": 3, "pinned": False}

pytestmark = pytest.mark.timeout(900)


@dataclass
class Fleet:
    """Two servers and their router.

    Attributes:
        servers: by address.
        folder: of their pools.
        asked: by pool: a request over it, and the text of its answer.
    """

    servers: dict[str, Server]
    router: Router
    folder: Path
    asked: dict[str, tuple[dict[str, Any], str]]

    @property
    def one(self) -> Server:
        return next(iter(self.servers.values()))

    @property
    def pool(self) -> str:
        """One of the pools."""
        return next(iter(self.asked))

    def homes(self) -> dict[str, str]:
        """Address of the server of each pool."""
        return {pool: self.router.home(pool, body) for pool, (body, _) in self.asked.items()}


def request(pool: str, tokens: int = 12) -> dict[str, Any]:
    params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"text": QUESTION, "sampling_params": {**params, "custom_params": {"pool": pool, "ratio": 0.5}}}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("shared")
    settings = {"pool_scan_seconds": 0.25, "max_version_seconds": 2}
    env = {"SGLANG_EXT_POOL_DIR": str(folder), "SGLANG_EXT_SETTINGS": json.dumps(settings)}
    limits: dict[str, Any] = {"max_total_tokens": 4000, "chunked_prefill_size": 64}
    with (
        Server(model(), env=env, **limits) as one,
        Server(model(), env=env, **limits) as two,
        routing([one.url, two.url]) as router,
    ):
        pools = [pool for url in (one.url, two.url) for pool in at_home(router, url)]
        for number, pool in enumerate(pools):
            one.put(pool, models.demonstrations(12, seed=number), **BLOCKS)
        asked = {pool: (request(pool), one.json("POST", "/generate", json=request(pool))["text"]) for pool in pools}
        yield Fleet({one.url: one, two.url: two}, router, folder, asked)


def at_home(router: Router, url: str) -> list[str]:
    """Names that the router sends to a server: addresses decide, and no two runs have the same."""
    plain = {"text": QUESTION, "sampling_params": {"max_new_tokens": 1}}
    names = (f"pool-{number}" for number in range(200))
    return list(itertools.islice((name for name in names if router.home(name, plain) == url), EACH))


def test_a_pool_has_a_home(fleet: Fleet) -> None:
    homes = fleet.homes()
    assert homes == fleet.homes() and list(homes.values()) == [url for url in fleet.servers for _ in range(EACH)]
    for pool, (body, text) in fleet.asked.items():
        answer = fleet.router.generate(body, pool).json()
        assert answer["text"] == text and answer["meta_info"]["sglang_ext"]["pool"] == pool
    name = fleet.router.call("GET", "/v1/models").json()["data"][0]["id"]
    shared = {"model": name, "max_tokens": 4, "temperature": 0, "custom_params": {"pool": fleet.pool, "ratio": 0.5}}
    for path, own in (
        ("chat/completions", {"messages": [{"role": "user", "content": QUESTION}]}),
        ("completions", {"prompt": QUESTION}),
    ):
        answer = fleet.router.call("POST", f"/v1/{path}", fleet.pool, json={**shared, **own})
        assert answer.status_code == 200 and answer.headers[HOME] == homes[fleet.pool], answer.text
        direct = fleet.servers[homes[fleet.pool]].json("POST", f"/v1/{path}", json={**shared, **own})
        (through,), (there,) = answer.json()["choices"], direct["choices"]
        assert through["sglang_ext"]["pool"] == fleet.pool
        assert [through.get("text"), through.get("message")] == [there.get("text"), there.get("message")]


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/pools"), ("PUT", "/v1/pools/new"), ("GET", "/pools")])
def test_pools_are_put_to_a_server(fleet: Fleet, method: str, path: str) -> None:
    answer = fleet.router.call(method, path, json={"demonstrations": models.demonstrations(3)})
    assert answer.status_code == 404 and "Invalid URL" in error_of(answer)


def test_what_the_router_s_retries_take_from_generate(fleet: Fleet) -> None:
    """What docs/fleet.md says of bodies: SMG reads /generate anew to be able to send it again."""
    body = request(fleet.pool)
    body["sampling_params"]["logit_bias"] = {"5": 100.0}
    direct = fleet.one.json("POST", "/generate", json=body)["text"]
    assert direct != fleet.asked[fleet.pool][1]
    assert fleet.router.generate(body, fleet.pool).json()["text"] == fleet.asked[fleet.pool][1]
    with routing(list(fleet.servers), "--disable-retries") as router:
        assert router.generate(body, fleet.pool).json()["text"] == direct
    name = fleet.router.call("GET", "/v1/models").json()["data"][0]["id"]
    chat = {"model": name, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12, "temperature": 0}
    chat |= {"custom_params": {"pool": fleet.pool}, "logit_bias": {"5": 100.0}}
    answers = [each.call("POST", "/v1/chat/completions", json=chat) for each in (fleet.router, fleet.one)]
    told = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
    assert told[0] == told[1]


def test_pools_that_fill_a_server_do_not_close_it(fleet: Fleet) -> None:
    """SMG leaves out a server whose KV cache is 80% full, unless it is told not to; pools fill it for good."""
    full = next(server for url, server in fleet.servers.items() if fleet.homes()[fleet.pool] == url)
    names = []
    while full.json("GET", "/v1/loads")["loads"][0]["token_usage"] < 0.82:
        names.append(f"filling-{len(names)}")
        full.put(names[-1], models.demonstrations(40, seed=100 + len(names)), block_size=10)
    try:
        time.sleep(2)  # the router looks at loads
        assert {fleet.homes()[fleet.pool] for _ in range(4)} == {full.url}
    finally:
        for name in names:
            full.json("DELETE", f"/v1/pools/{name}")


def test_a_damaged_pool_closes_no_server(fleet: Fleet) -> None:
    """Each of its requests is refused by both servers; those over other pools go on being answered."""
    fleet.one.put("odd", models.demonstrations(6), **BLOCKS)
    (fleet.folder / "odd@2.json").write_text('{"format": 2', encoding="utf-8")
    for server in fleet.servers.values():
        until(lambda server=server: server.call("POST", "/generate", json=request("odd")).status_code == 503)
    for _ in range(12):  # more than SMG's circuit breaker bears
        answer = fleet.router.generate(request("odd"), "odd")
        assert answer.status_code == 503 and "odd@2.json is not a pool definition" in error_of(answer), answer.text
    for pool, (body, text) in fleet.asked.items():
        assert fleet.router.generate(body, pool).json()["text"] == text
    fleet.one.put("odd", models.demonstrations(6), **BLOCKS)
    assert fleet.router.generate(request("odd@3"), "odd").status_code == 200


def test_a_disk_that_takes_no_more(fleet: Fleet) -> None:
    """The kernel lets the server write no file of the size of this pool: nothing is changed, and requests go on."""
    body = {"demonstrations": models.demonstrations(120), "positions": "local", **BLOCKS}
    assert fleet.one.process is not None
    pid, before = fleet.one.process.pid, fleet.one.json("GET", "/v1/pools")["pools"]
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (len(json.dumps(body)) // 2, hard))
    try:
        answer = fleet.one.call("PUT", "/v1/pools/large", json=body)
        assert answer.status_code == 503, answer.text
        assert "cannot be written to the folder that the servers share" in error_of(answer)
        for pool, (asked, text) in fleet.asked.items():
            assert fleet.router.generate(asked, pool).json()["text"] == text
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
    assert [pool["name"] for pool in fleet.one.json("GET", "/v1/pools")["pools"]] == [pool["name"] for pool in before]
    assert not [path.name for path in fleet.folder.iterdir() if path.name.startswith(("large", ".large"))]
    assert fleet.one.call("PUT", "/v1/pools/large", json=body).status_code == 200
    fleet.one.json("DELETE", "/v1/pools/large")


def test_a_server_that_is_killed_under_load(fleet: Fleet) -> None:
    """Every request is answered that was not streaming yet, and the server comes back with its pools."""
    homes = fleet.homes()
    url, lost = next((url, server) for url, server in fleet.servers.items() if url == homes[fleet.pool])
    (other,) = set(fleet.servers) - {url}
    with Clients(fleet.router, fleet.asked) as clients:
        clients.more(12, url)
        lost.kill()
        clients.more(24, other)
        lost.start()
        fleet.router.knows(list(fleet.servers))
        clients.more(12, url)
    assert not clients.seen.wrong, clients.seen.wrong[:3]
    assert fleet.homes() == homes


def test_a_rolling_restart_under_load(fleet: Fleet) -> None:
    """Each server is taken out, stopped, started and put back; nothing is lost, not even a stream."""
    homes = fleet.homes()
    with Clients(fleet.router, fleet.asked) as clients:
        for url, server in fleet.servers.items():
            clients.more(6, url)
            fleet.router.remove(url)
            server.idle()
            assert server.process is not None
            os.kill(server.process.pid, signal.SIGTERM)
            server.wait_for_exit()
            server.start()
            fleet.router.add(url)
            clients.more(6, url)
    assert not clients.seen.wrong and not clients.seen.broken, clients.seen
    assert fleet.homes() == homes
