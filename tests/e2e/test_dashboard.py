"""The dashboard's queries in a real Prometheus, which asks a real server for its metrics; and its log of requests."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import yaml

from tests.e2e.server import Server, free_port, model, until
from tests.oracle import models
from tests.packaging.test_deploy import DEPLOY, queries

PROMETHEUS = shutil.which("prometheus")
LONG = 180.0

pytestmark = pytest.mark.timeout(900)
needs_prometheus = pytest.mark.skipif(
    PROMETHEUS is None, reason="no program `prometheus` is installed (apt-get install prometheus)"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    env = {"SGLANG_EXT_SETTINGS": json.dumps({"pool_metrics": True}), "SGLANG_EXT_POLICY": '{"host_gb": 0.05}'}
    options: dict[str, Any] = {"max_total_tokens": 3000, "chunked_prefill_size": 128, "enable_metrics": True}
    options |= {"log_requests": True, "log_requests_level": 0, "log_requests_format": "json"}
    with Server(model(), env=env, **options) as running:
        running.put("asked", models.demonstrations(24), block_size=4, pinned=False)
        yield running


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus with the configuration of deploy/, but for the addresses."""
    assert PROMETHEUS is not None
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    settings = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    settings["scrape_configs"] = [each for each in settings["scrape_configs"] if each["job_name"] == "sglang"]
    settings["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{server.port}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        until(lambda: process.poll() is not None or _answers(f"http://127.0.0.1:{port}/-/ready"), LONG)
        assert process.poll() is None, (folder / "log").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=10).ok
    except requests.RequestException:
        return False


def values(prometheus: str, query: str) -> list[float]:
    """The values that a query has now; a series without a number has none."""
    query = query.replace("$__rate_interval", "1m").replace("$instance", ".*")
    answer = requests.get(prometheus + "/api/v1/query", params={"query": query}, timeout=60).json()
    assert answer["status"] == "success", f"{query}: {answer}"
    found = [float(series["value"][1]) for series in answer["data"]["result"]]
    return [value for value in found if math.isfinite(value)]


def failures(prometheus: str) -> list[str]:
    """What Prometheus says of targets that it cannot ask."""
    targets = requests.get(prometheus + "/api/v1/targets", timeout=60).json()["data"]["activeTargets"]
    return [f"{each['scrapeUrl']}: {each['lastError']}" for each in targets if each["health"] != "up"]


def load(server: Server) -> None:
    """What moves every counter: answers in many tokens, and blocks that are gone."""
    for _ in server.stream(server.payload("how do i activate my card?", 8, pool="asked", ratio=1.0)):
        pass
    server.call("POST", "/flush_cache")
    server.generate("where is my card?", 2, pool="asked", ratio=0.5)


def test_the_log_of_requests_names_pools(server: Server) -> None:
    answer = server.generate("where is my card?", 3, pool="asked", ratio=0.5)
    body = {"model": "default", "messages": [{"role": "user", "content": "where is it?"}], "max_tokens": 2}
    chat = server.json("POST", "/v1/chat/completions", json={**body, "custom_params": {"pool": "asked"}})
    refused = server.call("POST", "/generate", json={**server.payload("x", 1, pool="none"), "rid": "mine"})
    assert refused.status_code == 404
    found = [json.loads(line[line.index("{") :]) for line in server.log().splitlines() if '"sglang_ext.' in line]
    lines = {line["rid"]: line for line in found}
    said = lines[answer["meta_info"]["id"]]
    assert (said["event"], said["pool"], said["version"]) == ("sglang_ext.answered", "asked", 1)
    assert said["completion_tokens"] == 3 and said["blocks"] == len(answer["meta_info"]["sglang_ext"]["blocks"])
    assert lines[chat["id"]]["pool"] == "asked"
    assert lines["mine"]["event"] == "sglang_ext.failed" and "unknown pool 'none'" in lines["mine"]["error"]


@needs_prometheus
def test_every_query_of_the_dashboard_has_a_series(server: Server, prometheus: str) -> None:
    waiting, end = dict(queries()), time.monotonic() + LONG
    assert len(waiting) > 20
    while waiting:
        load(server)
        waiting = {name: query for name, query in waiting.items() if not values(prometheus, query)}
        assert time.monotonic() < end, f"no series: {waiting}; {failures(prometheus)}"
        time.sleep(1)
    (found,) = values(prometheus, next(query for query in queries().values() if "missed" in query and "1 -" in query))
    assert 0 <= found < 1, "blocks were encoded again"
    (pools,) = values(prometheus, "sglang_ext:num_pools")
    assert pools == 1
    server.json("DELETE", "/v1/pools/asked")
    until(lambda: values(prometheus, "sglang_ext:num_pools") == [0], LONG)
