"""`sglang-ext bench ltri`: its rows, its list of heads, and one real engine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.launch import cli
from sglang_ext.launch.bench import _ltri_engine, ltri
from sglang_ext.policies.heads import Heads


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ltri.add_arguments(parser)
    return parser.parse_args(words)


def test_rows() -> None:
    raw: dict[str, Any] = {
        "ltri": {
            "whole": [9.0],
            "fork": [0.1, 0.3, 0.2],
            "parts": [1.0, 2.0, 2.1],
            "decode": {"1": [0.006], "3": [0.02]},
        },
        "streaming_llm": {"whole": [8.0]},
        "stock": {"decode": {"1": [0.005], "3": [0.01]}, "kept": 6272, "backend": "fa3"},
    }
    rows = ltri.compare(raw, arguments("--tokens", str(2**18), "--parts", "3"))
    found = [(round(row.ratio or 0, 3), row.aim, row.met) for row in rows]
    assert found == [
        (0.9, "at most 1x", True),  # of ten seconds
        (1.125, "at most 1.15x", True),
        (1.05, "at most 1.05x", True),
        (0.022, "", None),
        (1.2, "at most 1.05x", False),
        (2.0, "", None),
    ]
    assert all("window 4096, 16 blocks of 128, chunk 512" in row.name for row in rows)
    assert "stock SGLang on fa3" in rows[-1].baseline


def test_rows_of_the_engines_that_ran() -> None:
    raw: dict[str, Any] = {"ltri": {"whole": [9.0], "fork": [0.1], "parts": [], "decode": {}}}
    assert len(ltri.compare(raw, arguments())) == 2
    assert ltri.compare({"streaming_llm": {"whole": [1.0]}}, arguments()) == []


@pytest.mark.parametrize(("layers", "heads", "voting"), [(32, 32, 14), (2, 4, 1)])
def test_heads_that_vote(layers: int, heads: int, voting: int, tmp_path: Path) -> None:
    _ltri_engine.write_heads(tmp_path / "heads.json", layers, heads)
    found = Heads.load(tmp_path / "heads.json")
    found.check(tmp_path / "heads.json", "", layers, heads)
    assert len(found.voters) == voting


def test_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = {"sinks": 16, "window": 128, "block": 16, "chunk": 64, "last": 8, "retrieved": 4}
    words = [
        "bench",
        "ltri",
        "--shape",
        "tiny",
        "--roles",
        "ltri",
        "--kernels",
        "torch",
        "--policy",
        json.dumps(policy),
    ]
    words += ["--tokens", "1024", "--part", "256", "--parts", "3", "--host-gb", "0.05", "--decode-tokens", "3"]
    words += ["--repeats", "1", "--streams", "3", "--batch", "1", "--engine", '{"dtype": "float32"}']
    assert cli.main([*words, "--out", str(tmp_path / "rows.json")]) == 0, capsys.readouterr()
    found = json.loads((tmp_path / "rows.json").read_text())
    assert [figure["name"].split(",")[0] for figure in found["figures"]] == [
        "a prompt of 1024 tokens",
        "the last 256 of 768 tokens",
        "another question about a document of 1024 tokens",
    ]
    assert found["engine"]["ltri"]["after"]["host_blocks"] > 0
