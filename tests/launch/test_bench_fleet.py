"""`sglang-ext bench fleet`: what is asked of which server, the rows that follow, and two servers behind the router."""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.launch import cli
from sglang_ext.launch.bench import _fleet_load, _router, fleet
from sglang_ext.launch.bench._fleet_kept import SETTINGS, FleetResults, FleetWanted, share
from sglang_ext.launch.bench._fleet_load import COUNTED, Fleet, PoolsAsked
from sglang_ext.launch.bench._fleet_rows import figures, shown
from sglang_ext.launch.bench._router import BY_KEY, FLAGS, KEYED, MANUAL, POLICIES, ROUTED, ROUTING_KEY, STICKY
from sglang_ext.launch.bench._serve_load import Measured
from sglang_ext.launch.bench._serve_mixes import pool_name
from sglang_ext.launch.client import ServerError
from sglang_ext.launch.docs import ROOT

ARGS = argparse.Namespace(ratio=0.5, answer=2, concurrency=2, seconds=1.0, warm_up=0.5, pool_tokens=200, block_size=4)


class Stand:
    """Stands for a server: notes calls, and counts as it was told."""

    def __init__(self, *counts: int) -> None:
        self.calls: list[tuple[str, str, Any]] = []
        self.counts = iter(counts)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        self.calls.append((method, path, json.loads(json.dumps(body))))
        if path == "/server_info":
            count = next(self.counts)
            return {"internal_states": [{"sglang_ext": {name: count * (n + 1) for n, name in enumerate(COUNTED)}}]}
        return {"version": 7}


def measured(**changes: Any) -> Measured:
    seen: dict[str, Any] = {
        "rate": None,
        "concurrency": 2,
        "seconds": 1.0,
        "requests": 9,
        "completed": 9.0,
        "good": 9.0,
    }
    seen |= {"good_parts": [], "unfinished": 0, "failed": 0, "miscounted": 0, "first": {"p50": 0.1, "p99": 0.2}}
    return Measured(**{**seen, "token": {}, "errors": [], **changes})


def test_popular_pools_are_asked_about_more() -> None:
    fleet = Fleet([], ARGS)
    for popularity, least, most in (("uniform", 0.8, 1.25), ("zipf", 3.0, 5.5)):
        asked = PoolsAsked(4, popularity)
        made = list(itertools.islice(fleet.requests(asked), 2000))
        counts = Counter(each.headers[ROUTING_KEY] for each in made)
        assert set(counts) == {asked.key(number) for number in range(4)}
        assert least < counts[asked.key(0)] / counts[asked.key(3)] < most
        names = {asked.key(number): pool_name(number) for number in range(4)}
        for each in made:
            custom = each.body["sampling_params"]["custom_params"]
            assert custom == {"pool": names[each.headers[ROUTING_KEY]], "ratio": ARGS.ratio}
    texts = [each.body["text"] for _ in range(2) for each in itertools.islice(fleet.requests(asked), 50)]
    assert len(set(texts)) == 100, "a question was asked twice"
    keys = {PoolsAsked(pools, each).key(0) for pools in (4, 8) for each in ("uniform", "zipf")}
    assert len(keys) == 4, "a router would remember the homes of another load"


def test_every_server_has_encoded_every_pool() -> None:
    one, two = Stand(), Stand()
    servers: Any = [one, two]
    Fleet(servers, ARGS).put(3)
    assert [(method, path) for method, path, _ in one.calls] == [("PUT", f"/v1/pools/{pool_name(n)}") for n in range(3)]
    assert all(body["pinned"] is False and body["block_size"] == 4 for _, _, body in one.calls)
    named = [body["sampling_params"]["custom_params"]["pool"] for _, _, body in two.calls]
    assert named == [f"{pool_name(number)}@7" for number in range(3)]


def test_counts_are_those_of_the_load_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    servers: Any = [Stand(10, 110), Stand(20, 40), Stand()]
    clients: list[int] = []

    def closed(self: Any, requests: Any, concurrency: int, seconds: float) -> Measured:
        clients.append(concurrency)
        return measured()

    monkeypatch.setattr(_fleet_load.Load, "closed", closed)
    found = Fleet(servers, ARGS).measure("http://router", 2, PoolsAsked(2, "uniform"))
    hits, missed = (100 + 20) * 1, (100 + 20) * 2
    assert found["block_hits"] == hits and found["missed_blocks"] == missed
    assert found["found"] == 1 - missed / hits and found["completed"] == 9.0
    assert not servers[2].calls
    assert clients == [2 * ARGS.concurrency] * 2, "each server has as many clients as one alone"


def test_homes_are_asked_for_without_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    def post(url: str, json: Any, headers: Any, timeout: float) -> Any:
        assert "custom_params" not in json["sampling_params"]
        home = "b" if headers[ROUTING_KEY] == asked.key(2) else "a"
        return SimpleNamespace(raise_for_status=lambda: None, headers={ROUTED: home})

    asked = PoolsAsked(3, "zipf")
    monkeypatch.setattr(_fleet_load.requests, "post", post)
    servers: Any = [SimpleNamespace(url=url) for url in "abcd"]
    assert Fleet(servers, ARGS).homes("http://router", 3, asked) == [2, 1, 0]


@pytest.mark.parametrize(
    "changes",
    [{"failed": 1, "errors": ["500: no"]}, {"unfinished": 1}, {"miscounted": 2}, {"first": {}}],
    ids=["failed", "unfinished", "other", "none"],
)
def test_a_load_that_is_none_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    monkeypatch.setattr(_fleet_load.Load, "closed", lambda *_: measured(**changes))
    servers: Any = [Stand(1, 2)]
    with pytest.raises(RuntimeError, match=r"of 9 requests failed.*(500: no|no message)"):
        Fleet(servers, ARGS).measure("http://router", 1, PoolsAsked(2, "uniform"))


def arguments(out: Path, **changes: Any) -> argparse.Namespace:
    settings: dict[str, Any] = dict.fromkeys(SETTINGS, 1)
    asked: dict[str, Any] = {"pools": [4, 6], "popularity": ["uniform"], "servers": [1, 2], "policies": [MANUAL]}
    return argparse.Namespace(**{**settings, **asked, "out": out, "commit": "c", "anew": False, **changes})


class Noting(Fleet):
    """Notes what it is asked to measure."""

    def __init__(self) -> None:
        servers: Any = [SimpleNamespace(url="http://one"), SimpleNamespace(url="http://two")]
        super().__init__(servers, ARGS)
        self.asked: list[str] = []

    def measure(self, url: str, servers: int, asked: PoolsAsked) -> dict[str, Any]:
        self.asked.append(f"{asked.pools} on {servers} at {url}")
        return found(1.0)

    def homes(self, url: str, servers: int, asked: PoolsAsked) -> list[int]:
        self.asked.append(f"homes of {asked.pools}")
        return [asked.pools, *[0] * (servers - 1)]


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> Noting:
    def routed(urls: Any, policy: str, more: Any) -> Any:
        return nullcontext(SimpleNamespace(url=" ".join([policy, *more])))

    monkeypatch.setattr(fleet, "routed", routed)
    return Noting()


def run(noting: Noting, args: argparse.Namespace) -> FleetResults:
    noting.asked.clear()
    results = FleetResults(args)
    fleet.measure(noting, FleetWanted.of(args).without(results), results)
    return results


def test_each_load_is_beside_one_server_alone(noting: Noting, tmp_path: Path) -> None:
    """A look at homes comes behind its load: `manual` would remember where pools went that were asked in turn."""
    args = arguments(tmp_path / "o.json", pools=[4], servers=[2], policies=[MANUAL, "round_robin"])
    results = run(noting, args)
    manual = "manual --assignment-mode min_group"
    assert noting.asked == ["2 on 1 at http://one", f"4 on 2 at {manual}", "homes of 4", "4 on 2 at round_robin"]
    by_key, in_turn = results.compared()
    assert by_key["homes"] == [4, 0] and in_turn["homes"] == [] and by_key["alone"] == results.alone[0]
    assert by_key["pools_alone"] == in_turn["pools_alone"] == 2
    assert share(PoolsAsked(7, "zipf"), 4) == PoolsAsked(2, "zipf")


def test_one_server_is_measured_with_one_policy(tmp_path: Path) -> None:
    wanted = FleetWanted.of(arguments(tmp_path / "o.json", policies=[STICKY, "cache_aware"]))
    assert [*wanted.loads] == [(1, STICKY), (2, STICKY), (2, "cache_aware")]
    assert [each.pools for each in wanted.alone] == [4, 6, 2, 3] and wanted.servers == 2 and wanted.pools == 6


def test_a_run_goes_on_where_it_stopped(noting: Noting, tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    args = arguments(out)
    run(noting, arguments(out, servers=[1], pools=[4]))
    assert len(noting.asked) == 3
    run(noting, args)
    assert "4 on 1 at http://one" not in noting.asked and "homes of 6" in noting.asked
    results = run(noting, args)
    assert not noting.asked and not FleetWanted.of(args).without(results)
    assert len(results.compared()) == 4 and len(json.loads(out.read_text())["figures"]) == 16
    run(noting, arguments(out, anew=True))
    assert noting.asked


@pytest.mark.parametrize("changes", [{"concurrency": 2}, {"code": "other"}])
def test_results_of_other_settings_are_refused(noting: Noting, tmp_path: Path, changes: dict[str, Any]) -> None:
    out = tmp_path / "o.json"
    run(noting, arguments(out))
    if "code" in changes:
        out.write_text(json.dumps({**json.loads(out.read_text()), **changes}))
        changes = {}
    with pytest.raises(ValueError, match=r"has results of other settings: (concurrency=1|code=other); .*--anew"):
        FleetResults(arguments(out, **changes))


def found(share: float) -> dict[str, Any]:
    return {**measured().record(), **dict.fromkeys(COUNTED, 5), "found": share}


def load(policy: str, share: float, alone: float) -> dict[str, Any]:
    about = {"pools": 8, "popularity": "uniform", "servers": 2, "policy": policy, "pools_alone": 4, "homes": [5, 3]}
    return {**about, **found(share), "alone": found(alone)}


def test_rows_and_their_aim() -> None:
    loads = [load(BY_KEY, 0.91, 1.0), load(STICKY, 0.8, 1.0), load("cache_aware", 0.8, 1.0), load(BY_KEY, 0.0, 0.0)]
    rows = [row for row in figures(loads, 0) if "share of selected blocks" in row.name]
    assert [row.met for row in rows] == [True, False, None, None]
    assert rows[0].name.startswith(f"8 pools (uniform) on 2 servers, {BY_KEY}:") and rows[0].ratio == 0.91
    assert rows[0].baseline == "one server alone, 4 pools" and rows[2].aim == ""
    assert len(figures(loads, 0)) == 4 * len(loads)
    lines = shown(loads).splitlines()
    assert len(lines) == 2 + len(loads) and "| 5 and 3 | 0.910 | 1.000 (4 pools) | 100, 200 | 9.0 |" in lines[2]


def test_rows_of_times_say_what_servers_share() -> None:
    answers = [figures([load(BY_KEY, 1.0, 1.0)], gpus)[-1] for gpus in (0, 1, 2)]
    ends = ("server, servers on shared processors", "server, servers on shared GPUs", "answers of a server")
    assert all(row.name.endswith(end) for row, end in zip(answers, ends, strict=True))
    assert answers[0].timing.median == 4.5 and answers[0].ratio == 0.5, "nine a second, of two servers"
    assert not any("shared" in row.name for row in figures([{**load(BY_KEY, 1.0, 1.0), "servers": 1}], 0))


def test_policies_by_key_are_told_apart() -> None:
    assert set(KEYED) < set(POLICIES) and POLICIES[STICKY] == ("round_robin", "--sticky-sessions")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--servers 0", "expected numbers above 0"),
        ("--pools 0 8", "expected numbers above 0"),
        ("--warm-up 0", "expected numbers above 0"),
        ("--pool-tokens 300000", "do not fit --max-total-tokens 230000"),
    ],
)
def test_sizes_that_do_not_go_together(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "fleet", *words.split()]) == cli.BAD_INPUT
    assert message in capsys.readouterr().err


def test_without_the_router(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_router, "find_spec", lambda name: None)
    assert cli.main(["bench", "fleet", "--shape", "tiny"]) == cli.BAD_INPUT
    assert "pip install 'sglang-ext[fleet]'" in capsys.readouterr().err


def test_a_router_that_does_not_know_a_server() -> None:
    with (
        pytest.raises(ServerError, match=r"the router knows \[\] after 1 s"),
        _router.routed(["http://127.0.0.1:1"], BY_KEY, seconds=1.0),
    ):
        raise AssertionError("it was not waited for")


def test_the_router_s_options_stand_in_the_docs() -> None:
    text = (ROOT / "docs" / "fleet.md").read_text(encoding="utf-8")
    start = text.split("smg launch", 1)[1].split("```", 1)[0]
    assert f"--policy {BY_KEY}" in start and all(flag in start for flag in FLAGS)
    assert ROUTING_KEY in text


def test_servers_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [_fleet_load._gpu(number) for number in range(2)] == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-6")
    assert [_fleet_load._gpu(number) for number in range(2)] == ["4", "GPU-6"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_engines")
def test_two_servers_behind_the_router(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--shape tiny --servers 2 --pools 4 --pool-tokens 1500 --block-size 8 --max-total-tokens 4000"
    loads = f"--concurrency 2 --seconds 2 --warm-up 1 --policies {BY_KEY} round_robin"
    out = tmp_path / "rows.json"
    assert cli.main(["bench", "fleet", *sizes.split(), *loads.split(), "--out", str(out)]) == 0, capsys.readouterr()
    record = json.loads(out.read_text())
    by_key, in_turn = record["loads"]
    for each in (by_key, in_turn, *record["alone"]):
        assert each["requests"] and each["block_hits"] and 0 < each["found"] <= 1 and not each["failed"]
    assert record["alone"][0]["pools"] == 2 and sum(by_key["homes"]) == 4 and len(record["figures"]) == 8
    assert f"| 4 | uniform | 2 | `{BY_KEY}` |" in capsys.readouterr().out
