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
from sglang_ext.launch.bench._fleet_load import COUNTED, Fleet, PoolsAsked
from sglang_ext.launch.bench._fleet_rows import rows, shown
from sglang_ext.launch.bench._router import BY_KEY, FLAGS, MANUAL, ROUTING_KEY
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
        assert set(counts) == {pool_name(number) for number in range(4)}
        assert least < counts[pool_name(0)] / counts[pool_name(3)] < most
        for each in made:
            custom = each.body["sampling_params"]["custom_params"]
            assert custom == {"pool": each.headers[ROUTING_KEY], "ratio": ARGS.ratio}
    texts = [each.body["text"] for _ in range(2) for each in itertools.islice(fleet.requests(asked), 50)]
    assert len(set(texts)) == 100, "a question was asked twice"


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
    monkeypatch.setattr(_fleet_load.Load, "closed", lambda *_: measured())
    found = Fleet(servers, ARGS).measure("http://router", 2, PoolsAsked(2, "uniform"))
    hits, missed = (100 + 20) * 1, (100 + 20) * 2
    assert found["block_hits"] == hits and found["missed_blocks"] == missed
    assert found["found"] == 1 - missed / hits and found["completed"] == 9.0
    assert not servers[2].calls


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


def test_a_load_comes_before_the_look_at_homes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A look asks about one pool after the other, and `manual` remembers what it chose then."""
    asked: list[str] = []

    class Noting(Fleet):
        def measure(self, url: str, servers: int, asked_about: PoolsAsked) -> dict[str, Any]:
            asked.append(f"load on {servers}")
            return load(MANUAL, 1.0, 1.0)

        def homes(self, url: str, pools: int) -> list[int]:
            asked.append("homes")
            return [pools]

    stands: Any = [SimpleNamespace(url="http://one"), SimpleNamespace(url="http://two")]
    monkeypatch.setattr(fleet, "routed", lambda *_: nullcontext(SimpleNamespace(url="http://router")))
    args = argparse.Namespace(
        pools=[4], servers=[2], policies=[MANUAL, "round_robin"], out=tmp_path / "o.json", commit="c"
    )
    loads: list[Any] = []
    fleet.measure(Noting(stands, args), "uniform", args, loads)
    assert asked == ["load on 1", "load on 2", "homes", "load on 2"]
    assert len(loads) == 2 and args.out.exists()


def load(policy: str, found: float, alone: float) -> dict[str, Any]:
    counts = dict.fromkeys(COUNTED, 5)
    about = {"pools": 8, "popularity": "uniform", "servers": 2, "policy": policy, "pools_alone": 4, "homes": [5, 3]}
    return {**about, **measured().record(), **counts, "found": found, "alone": {**measured().record(), "found": alone}}


def test_rows_and_their_aim() -> None:
    loads = [load(BY_KEY, 0.91, 1.0), load(BY_KEY, 0.8, 1.0), load("cache_aware", 0.8, 1.0), load(BY_KEY, 0.0, 0.0)]
    found = [row for row in rows(loads) if "share of selected blocks" in row.name]
    assert [row.met for row in found] == [True, False, None, None]
    assert found[0].name.startswith(f"8 pools (uniform) on 2 servers, {BY_KEY}:") and found[0].ratio == 0.91
    assert found[0].baseline == "one server alone, 4 pools" and found[2].aim == ""
    assert len(rows(loads)) == 4 * len(loads)
    lines = shown(loads).splitlines()
    assert len(lines) == 2 + len(loads) and "| 5 and 3 | 0.910 | 1.000 (4 pools) | 100, 200 | 9.0 |" in lines[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--servers 0", "expected numbers above 0"),
        ("--pools 0 8", "expected numbers above 0"),
        ("--warm-up 0", "expected numbers above 0"),
        ("--pool-tokens 300000", "do not fit --max-total-tokens 300000"),
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
def test_two_servers_behind_the_router(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--shape tiny --servers 2 --pools 4 --pool-tokens 1500 --block-size 8 --max-total-tokens 4000"
    loads = f"--concurrency 2 --seconds 2 --warm-up 1 --policies {BY_KEY} round_robin"
    out = tmp_path / "rows.json"
    assert cli.main(["bench", "fleet", *sizes.split(), *loads.split(), "--out", str(out)]) == 0, capsys.readouterr()
    record = json.loads(out.read_text())
    by_key, in_turn = record["loads"]
    for each in (by_key, in_turn, by_key["alone"]):
        assert each["requests"] and each["block_hits"] and 0 < each["found"] <= 1 and not each["failed"]
    assert by_key["pools_alone"] == 2 and sum(by_key["homes"]) == 4 and len(record["figures"]) == 8
    assert f"| 4 | uniform | 2 | `{BY_KEY}` |" in capsys.readouterr().out
