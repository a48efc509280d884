"""What a fleet carries, on paper: rates that are read by the names of rows, and arithmetic on them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.launch import capacity, cli
from sglang_ext.launch.capacity import GIB, FleetSize, Rates, carried, measured

ROUND = Rates(
    gpu="G",
    gpus=1,
    source="s",
    memory=100 * GIB,
    weights=20 * GIB,
    token_bytes=GIB / 1000,  # 1,000 tokens in a GiB
    encoded=1000.0,
    answered=50.0,
    at_a_time=1,
    copied=10.0 * GIB,
    copied_source="c",
)
"""A server whose figures are easy: 60,000 tokens of KV cache at 80% of the memory."""
FLEET = FleetSize(gpus=1, pools=1, pool_tokens=10_000, host_gb=25.0, memory_fraction=0.8, in_a_row=10)


def plan(**changed: Any) -> capacity.Capacity:
    return carried(ROUND, replace(FLEET, **changed))


def test_pools_that_fit_are_answered_as_fast_as_one() -> None:
    found = plan(pools=5)  # 60,000 tokens less room for a request: five pools of 10,000, and not six
    assert (found.per_server, found.on_gpu, found.on_host, found.again) == (5, 5, 0, 0)
    assert (found.tokens, found.kv_bytes, found.host_bytes) == (50_000, pytest.approx(50 * GIB), 0)
    assert found.first_seconds == pytest.approx(50.0)
    assert (found.scattered, found.bound) == (pytest.approx(50.0), "answering")
    assert (found.grouped, found.grouped_bound) == (pytest.approx(50.0), "answering")


def test_what_spills_and_what_is_encoded_again() -> None:
    found = plan(pools=10)  # five fit, two more lie in 25 GiB, three are encoded again
    assert (found.on_gpu, found.on_host, found.again) == (5, 2, 3)
    assert found.host_bytes == pytest.approx(20 * GIB)
    # A request: 0.02 s; of ten, two wait a second for 10 GiB, three 10 s for 10,000 tokens.
    assert found.scattered == pytest.approx(1 / (0.02 + 0.2 * 1 + 0.3 * 10)) and found.bound == "encoding again"
    assert found.grouped == pytest.approx(1 / (0.02 + (0.2 * 1 + 0.3 * 10) / 10))
    copies = plan(pools=7)
    assert (copies.on_host, copies.again, copies.bound) == (2, 0, "copies from the host")
    assert copies.grouped == pytest.approx(1 / (0.02 + 2 / 7 / 10)) and copies.grouped_bound == "copies from the host"
    assert plan(pools=7, in_a_row=1000).grouped_bound == "answering"
    bare = plan(pools=7, host_gb=0)
    assert (bare.on_host, bare.again, bare.host_bytes) == (0, 2, 0)


def test_servers_add_up_and_pools_have_one_home() -> None:
    found = plan(gpus=4, pools=18)
    assert (found.homes, found.per_server) == (4, 5) and found.scattered == pytest.approx(200.0)
    few = plan(gpus=4, pools=3)
    assert few.scattered == pytest.approx(150.0) and few.bound == "pools: 1 servers have none"
    two = carried(replace(ROUND, gpus=2), replace(FLEET, gpus=5, pools=4))
    assert (two.homes, two.per_server) == (2, 2)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"gpus": 0}, "gpus=0"),
        ({"pools": 0}, "pools=0"),
        ({"pool_tokens": 0}, "pool_tokens=0"),
        ({"in_a_row": 0}, "in_a_row=0"),
        ({"host_gb": -1.0}, "host_gb=-1.0"),
        ({"host_gb": float("nan")}, "host_gb=nan"),
        ({"memory_fraction": 1.1}, "memory_fraction=1.1"),
        ({"pool_tokens": 70_000}, "has room for 60,000 tokens"),
        ({"memory_fraction": 0.1}, "has room for 0 tokens"),
    ],
)
def test_what_cannot_be_planned(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(**changed)
    with pytest.raises(ValueError, match="a server has 8 GPUs"):
        carried(replace(ROUND, gpus=8), FLEET)


def test_rates_are_those_of_the_results_files() -> None:
    record = json.loads(capacity.ENGINE.read_text())
    rows = {row["name"]: row["timing"]["median"] for row in record["figures"]}
    (encoding,) = (seconds for name, seconds in rows.items() if name.startswith("encoding a pool of 90015 tokens"))
    found = measured()
    assert found.gpu == record["machine"]["gpu"] and record["commit"].startswith(found.source.split()[-1])
    assert found.encoded == pytest.approx(90_015 / encoding)
    answers = [seconds for name, seconds in rows.items() if name.startswith("answering with 4 tokens, ")]
    assert found.answered == pytest.approx(1 / min(answers)) and found.at_a_time == 128
    copies = json.loads(capacity.COPIES.read_text())
    (fetch,) = (row for row in copies["figures"] if row["name"].startswith("fetch of 16 blocks of 512 KiB"))
    assert found.copied == pytest.approx(16 * 512 * 1024 / fetch["timing"]["median"])
    assert copies["machine"]["gpu"] in found.copied_source
    assert found.token_bytes == 2 * 2 * 32 * 8 * 128  # keys and values in half precision, 32 layers of 8 heads of 128
    assert found.weights == pytest.approx(2 * 8.03e9, rel=0.001), "Llama-3.1-8B has 8.03 billion parameters"


def test_rates_of_several_gpus_and_of_other_models() -> None:
    found = measured(capacity.RESULTS / "dbsa_engine_70b_tp2.json")
    assert found.gpus == 2 and found.token_bytes == 2 * 2 * 40 * 8 * 128
    assert found.weights == pytest.approx(2 * 70.6e9 * 40 / 80, rel=0.04), "half of the layers of a model of 70B"


@pytest.mark.parametrize(
    ("pools", "words"), [(9, "90,000"), (100, "1 million"), (99_990, "1,000 million"), (100_000, "1 billion")]
)
def test_tokens_are_shown_in_words(pools: int, words: str) -> None:
    assert words in capacity.row(plan(pools=pools))


def test_files_that_hold_no_rates(tmp_path: Path) -> None:
    record = json.loads(capacity.ENGINE.read_text())
    for changed, words in (
        ({"figures": record["figures"][1:]}, "no row that begins with 'encoding a pool of'"),
        ({"machine": {**record["machine"], "gpu": None}}, "no GPU made it"),
        ({"figures": None}, "expected a results file of a GPU"),
    ):
        file = tmp_path / "rates.json"
        file.write_text(json.dumps({**record, **changed}))
        with pytest.raises(ValueError, match=words):
            measured(file)
    (tmp_path / "text").write_text("x")
    with pytest.raises(ValueError, match="expected a results file"):
        measured(tmp_path / "text")


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pool", "plan", "--fleet", "--gpus", "2", "4", "--pools", "30", "--host-gb", "64", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["gpus"] for each in told["fleets"]] == [2, 4] and told["rates"]["gpu"] == measured().gpu
    assert told["fleets"][0]["on_host"] == int(64 * GIB // (90_000 * measured().token_bytes))
    assert cli.main(["pool", "plan", "--fleet"]) == 0
    out = capsys.readouterr().out
    assert measured().gpu in out and "encoding again" in out and len(out.splitlines()) == 3 + 1 + 2 + 9
    lines = capacity.markdown(measured(), capacity.fleets()).splitlines()
    assert sum(line.startswith("| ") for line in lines) == 2 + 9


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--fleet", "--model", "M"], "--fleet with --model"),
        (["a.jsonl", "--fleet"], "--fleet with a.jsonl"),
        (["--fleet", "--memory-tokens", "9", "--block-size", "3"], "--fleet with --memory-tokens, --block-size"),
        (["--fleet", "--dtype", "bfloat16"], "--fleet with --dtype: it goes by rates that were measured"),
        (["--fleet", "--tp-size", "2", "--trust-remote-code"], "--fleet with --tp-size, --trust-remote-code"),
        (["a.jsonl", "--url", "U", "--tp-size", "1"], "--tp-size: these go with --model"),
        (["a.jsonl", "--model", "M", "--gpus", "3"], "--gpus: these go with --fleet"),
        (["a.jsonl", "--model", "M", "--in-a-row", "3"], "--in-a-row: these go with --fleet"),
        (["a.jsonl"], "expected FILE.jsonl with --model or --url, or --fleet"),
        (["--model", "M"], "expected FILE.jsonl"),
        (["--fleet", "--pools", "0"], "pools=0"),
    ],
)
def test_lines_that_are_refused(line: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pool", "plan", *line]) == cli.BAD_INPUT
    assert words in capsys.readouterr().err
