"""What is in deploy/: the images, the fleet of the compose file, and the dashboard, as far as files alone show it."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_ext import lines
from sglang_ext.launch import serve
from sglang_ext.launch.bench._router import FLAGS

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
OWN = ROOT / "sglang_ext"
SUFFIXES = ("_bucket", "_count", "_sum", "_total")


def read_yaml(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def services() -> dict[str, Any]:
    found: dict[str, Any] = read_yaml("compose.yaml")["services"]
    return found


@cache
def dashboard() -> Any:
    return json.loads((DEPLOY / "grafana" / "dashboards" / "sglang_ext.json").read_text(encoding="utf-8"))


def queries() -> dict[str, str]:
    """Panel and letter -> query, of the whole dashboard."""
    return {
        f"{panel['title']}, {target['refId']}": target["expr"]
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    }


# ---- images ----


def test_the_image_has_the_sglang_that_the_plugin_runs_with_on_gpus() -> None:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    (image,) = re.findall(r"^FROM (\S+)$", text, flags=re.MULTILINE)
    name, _, tag = image.partition(":")
    assert name == "lmsysorg/sglang" and tag.partition("-")[0] == f"v{lines.OLDER.tried}"
    copied = re.findall(r"^COPY \. (\S+)$", text, flags=re.MULTILINE)
    assert copied and f"pip install --no-cache-dir {copied[0]}" in text, "the plugin is installed from the repository"
    assert '\nENTRYPOINT ["sglang-ext", "serve"]\n' in text and "/ready" in text
    assert "\nSTOPSIGNAL SIGTERM\n" in text


def test_images_have_versions() -> None:
    named = [service["image"] for service in services().values() if "image" in service and "build" not in service]
    named += re.findall(r"^FROM (\S+)$", (DEPLOY / "router.Dockerfile").read_text(), flags=re.MULTILINE)
    assert len(named) == 3
    for image in named:
        assert re.search(r":v?\d+\.\d+", image), f"{image}: the tag is no version"


# ---- the compose file ----


def test_there_are_two_servers_a_router_prometheus_and_grafana() -> None:
    assert sorted(services()) == ["grafana", "prometheus", "router", "server-1", "server-2"]
    gpus = []
    for name in ("server-1", "server-2"):
        server = services()[name]
        assert server["init"] is True and server["build"]["dockerfile"] == "deploy/Dockerfile"
        (device,) = server["deploy"]["resources"]["reservations"]["devices"]
        gpus += device["device_ids"]
    assert len(set(gpus)) == 2
    for service in services().values():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), "nothing is open to others unless the user says so"


def test_servers_take_the_flags_that_they_are_given() -> None:
    flags = {each.partition("=")[0]: each.partition("=")[2] for each in services()["server-1"]["command"][1:]}
    own = {name: flags[name] for name in flags if name in serve.own_flags()}
    theirs = [name if not value else f"{name}={value}" for name, value in flags.items() if name not in own]
    assert set(own) == {"--pool-dir", "--pool-scan-seconds", "--drain-seconds"}
    assert set(serve.given_flags(theirs)) == {"host", "port", "api_key", "enable_metrics"}
    assert f"{own['--pool-dir']}" in {volume.partition(":")[2] for volume in services()["server-1"]["volumes"]}
    grace = services()["server-1"]["stop_grace_period"]
    assert grace.endswith("m") and 60 * int(grace[:-1]) > 2 * float(own["--drain-seconds"])


def test_the_router_knows_the_servers_and_leaves_one_that_ends_in_time() -> None:
    command = services()["router"]["command"]
    flags = {each.partition("=")[0]: each.partition("=")[2] for each in command if each.startswith("--")}
    assert flags["--policy"] == "consistent_hashing" and flags["--health-check-endpoint"] == "/ready"
    assert set(FLAGS) <= set(flags)
    urls = command[command.index("--worker-urls") + 1 :]
    assert urls == ["http://server-1:30000", "http://server-2:30000"]
    leaves = int(flags["--health-check-interval-secs"]) * int(flags["--health-failure-threshold"])
    (drains,) = (each.partition("=")[2] for each in services()["server-1"]["command"] if "--drain-seconds" in each)
    assert leaves < float(drains)


def test_prometheus_asks_servers_and_router() -> None:
    jobs = {
        job["job_name"]: job["static_configs"][0]["targets"] for job in read_yaml("prometheus.yaml")["scrape_configs"]
    }
    assert jobs["sglang"] == ["server-1:30000", "server-2:30000"]
    (port,) = (each.partition("=")[2] for each in services()["router"]["command"] if "--prometheus-port" in each)
    assert jobs["router"] == [f"router:{port}"]


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    (source,) = read_yaml("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = read_yaml("grafana/provisioning/dashboards/sglang_ext.yaml")["providers"]
    mounted = dict(volume.removesuffix(":ro").split(":") for volume in services()["grafana"]["volumes"])
    assert mounted["./grafana/dashboards"] == provider["options"]["path"]
    used = {target["datasource"]["uid"] for panel in dashboard()["panels"] for target in panel.get("targets", ())}
    assert used == {source["uid"]}


# ---- the dashboard ----


def declared() -> set[str]:
    """The names of all metrics that SGLang and the plugin declare, as their source has them."""
    import sglang.srt.observability.metrics_collector as theirs

    text = Path(theirs.__file__).read_text(encoding="utf-8")
    found = set(re.findall(r'name="(sglang:\w+)"', text))
    found |= set(re.findall(r'"(sglang_ext:\w+)"', (OWN / "serving" / "metrics.py").read_text(encoding="utf-8")))
    # The scheduler's counters are gauges, named by what their `stats` say.
    for file in ("serving/tree.py", "serving/streams.py", "cache/host_tier.py"):
        found |= {f"sglang_ext:{name}" for name in re.findall(r'^ +"(\w+)": ', (OWN / file).read_text(), re.MULTILINE)}
    return found


def bare(name: str) -> set[str]:
    """A metric's name, and what it is without the suffix of a series."""
    return {name} | {name.removesuffix(suffix) for suffix in SUFFIXES}


def test_every_metric_of_the_dashboard_is_declared() -> None:
    known = declared()
    assert "sglang:time_to_first_token_seconds" in known and "sglang_ext:block_hits" in known
    named = {name for query in queries().values() for name in re.findall(r"\bsglang(?:_ext)?:\w+", query)}
    assert len(named) > 12
    assert {name for name in named if not bare(name) & known} == set()
    for kind in ("pool", "hits", "encoding", "time_to_first_token"):
        assert any(kind in name for name in named), f"the dashboard shows nothing of {kind}"
    assert not bare("sglang_ext:no_such_metric_total") & known


@pytest.mark.parametrize("name", sorted(queries()))
def test_queries_are_of_the_servers_that_were_chosen(name: str) -> None:
    query = queries()[name]
    assert query.count("$instance") == len(re.findall(r"\bsglang(?:_ext)?:\w+|\bup\{", query)), query
