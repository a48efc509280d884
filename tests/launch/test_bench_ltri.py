"""`sglang-ext bench ltri`: its rows, its list of heads, and one real engine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.launch import cli
from sglang_ext.launch.bench import _ltri_engine, _ltri_kernels, ltri
from sglang_ext.launch.bench._cascade_layer import LayerShape
from sglang_ext.launch.bench._ltri_layer import VOTES, Layers
from sglang_ext.policies.heads import Heads
from sglang_ext.policies.ltri_options import Ltri


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ltri.add_arguments(parser)
    return parser.parse_args(words)


def read(seconds: float, hits: int) -> dict[str, Any]:
    """What an engine says that has read a long prompt."""
    states = [
        {"host_cache": {"hits": count, "misses": 10 + count // 3, "fetched_bytes": 64 * count}} for count in (0, hits)
    ]
    return {"whole": [seconds], "before": states[0], "after": states[1]}


def test_rows() -> None:
    raw: dict[str, Any] = {
        "ltri": {
            **read(9.0, 30),
            "fork": {"from the queue": [0.02, 0.06, 0.03], "end to end": [0.1, 0.3, 0.2]},
            "short_fork": {"end to end": [0.2]},
            "parts": [[1.0, 2.0, 2.08], [1.0, 2.0, 2.08]],
            "decode": {"1": [0.006], "3": [0.02]},
        },
        "voted": read(10.0, 90),
        "streaming_llm": {"whole": [8.0]},
        "stock": {
            "decode": {"1": [0.005], "3": [0.01]},
            "short_fork": {"end to end": [0.1]},
            "kept": 6272,
            "backend": "fa3",
        },
    }
    rows = ltri.compare(raw, arguments("--tokens", str(2**18), "--parts", "3"))
    found = [(round(row.ratio or 0, 3), row.aim, row.met) for row in rows]
    assert found == [
        (0.9, "at most 1x", True),  # of ten seconds
        (1.111, "", None),
        (1.125, "at most 1.15x", True),
        (1.04, "at most 1.05x", True),
        (1.0, "at most 1x", False),  # in the median, and not in all of its interval
        (45.0, "", None),
        (2.0, "", None),
        (1.2, "at most 1.05x", False),
        (2.0, "", None),
    ]
    assert sum("window 4096, 16 blocks of 128, chunk 512" in row.name for row in rows) == 6
    assert [row.notes for row in rows[:2]] == [
        {"hit_rate": 0.75, "fetched_bytes": 1920},
        {"hit_rate": 0.75, "fetched_bytes": 5760},
    ]
    assert rows[1].baseline == "8 new blocks a chunk"
    assert "stock SGLang on fa3" in rows[-1].baseline
    other = {**raw["stock"], "decode": {"1": [0.004], "3": [0.04]}, "backend": "flashinfer"}
    several = ltri.compare(
        {**raw, "stock": {"fa3": raw["stock"], "flashinfer": other}}, arguments("--tokens", str(2**18), "--parts", "3")
    )
    assert [row.ratio for row in several[-2:]] == [1.5, 2.0] and "flashinfer" in several[-2].baseline
    assert several[-2].notes["seconds of others"] == {"fa3": 0.005}


def test_rows_of_the_engines_that_ran() -> None:
    raw: dict[str, Any] = {
        "ltri": {**read(9.0, 3), "fork": {"from the queue": [0.1], "end to end": [0.1]}, "parts": [], "decode": {}}
    }
    assert len(ltri.compare(raw, arguments())) == 3
    raw["ltri"]["parts"] = [[1.0, 2.0, 2.1]]
    assert len(ltri.compare(raw, arguments())) == 3, "one conversation says nothing of how far parts differ"
    assert ltri.compare({"streaming_llm": {"whole": [1.0]}}, arguments()) == []


@pytest.mark.parametrize(("layers", "heads", "voting"), [(32, 32, 14), (2, 4, 1)])
def test_heads_that_vote(layers: int, heads: int, voting: int, tmp_path: Path) -> None:
    _ltri_engine.write_heads(tmp_path / "heads.json", layers, heads)
    found = Heads.load(tmp_path / "heads.json")
    found.check(tmp_path / "heads.json", "", layers, heads)
    assert len(found.voters) == voting


@pytest.mark.usefixtures("forked_engines")
def test_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = {"sinks": 16, "window": 128, "block": 16, "chunk": 64, "last": 8, "retrieved": 4}
    words = [
        "bench",
        "ltri",
        "--only",
        "engine",
        "--shape",
        "tiny",
        "--roles",
        "ltri",
        "voted",
        "--kernels",
        "triton",
        "--whole-runs",
        "2",
        "--policy",
        json.dumps(policy),
    ]
    words += ["--tokens", "1024", "--part", "256", "--parts", "3", "--host-gb", "0.05", "--decode-tokens", "3"]
    words += [
        "--repeats",
        "2",
        "--forks",
        "2",
        "--streams",
        "3",
        "--fork-tokens",
        "512",
        "--batch",
        "1",
        "--engine",
        '{"dtype": "float32"}',
    ]
    assert cli.main([*words, "--out", str(tmp_path)]) == 0, capsys.readouterr()
    found = json.loads((tmp_path / "ltri_engine.json").read_text())
    assert [figure["name"].split(",")[0] for figure in found["figures"]] == [
        *["a prompt of 1024 tokens"] * 2,
        "the last 256 of 768 tokens",
        *["another question about a document of 1024 tokens"] * 2,
    ]
    for role in ("ltri", "voted"):
        engine = found["engine"][role]
        assert engine["after"]["host_blocks"] > 0 and len(engine["whole"]) == 2
        assert 0 < ltri.came_back(engine)["hit_rate"] < 1


def test_rows_of_the_kernels() -> None:
    """Times mean nothing on a CPU; what is computed is that of the engine, and is checked."""
    settings = Ltri(sinks=16, window=64, block=16, chunk=32, last=7, retrieved=4, spans=2, vectors=8)
    rows = _ltri_kernels.measure(torch.device("cpu"), settings, 320, LayerShape(4, 2, 16, torch.float32))
    assert [row.name.split(",")[0] for row in rows] == [
        "a chunk of 32 tokens in a layer that is the first to vote",
        "a chunk of 32 tokens in a layer that votes",
        "a chunk of 32 tokens in a layer that does not vote",
        "fetch of 4 blocks of 4 KiB",
        "transfers that attention waits for",
        "transfers that attention waits for",
        "spans of 2 tiles of 4 heads",
        *(f"scores of 4096 blocks by `{kind}`" for kind in ("sum", "max", "mass")),
        "scores of 4096 blocks for the 7 tokens that ask",
        *["index on the GPU of 320 tokens"] * 3,
    ]
    assert [row.met for row in rows[-3:]] == [True] * 3
    index = 14 * settings.evicted(320) * 16 * 4  # bytes of one vector a block, in the layers that vote
    numbers = 14 * settings.evicted(320) * 2 * 4  # of vectors of two spans
    assert [row.timing.median - numbers for row in rows[-3:]] == [2 * index, 8 * index, 8 * index]


def test_chunks_with_packed_index_vectors_are_checked() -> None:
    settings = Ltri(sinks=16, window=64, block=16, chunk=32, last=7, retrieved=4, vectors=8, renewed=2, four_bits=True)
    layers = Layers(settings, 320, LayerShape(4, 2, 16, torch.float32), torch.device("cpu"))
    layers.check()
    index = layers.chunks.stores[VOTES].index
    assert index is not None and index.scales is not None
    kept = layers._kept(VOTES)
    assert kept["scales"] is index.scales and kept["index"].dtype == torch.uint8


def test_layers_where_chunks_differ() -> None:
    settings = Ltri(sinks=16, window=64, block=16, chunk=32, last=7, retrieved=4)
    with pytest.raises(ValueError, match="tokens=96: expected a multiple of 32, at least 160"):
        Layers(settings, 96, LayerShape(4, 2, 16, torch.float32), torch.device("cpu"))
