"""`bench cascade` on the CPU: its checks find what is wrong, and its rows are put together right.

Triton's interpreter runs the kernels; times are made up, so that a mistake does not wait for a GPU to show.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.kernels.cells import reference
from sglang_ext.launch import cli
from sglang_ext.launch.bench import _cascade_engine as engine_half
from sglang_ext.launch.bench import _cascade_kernels as bench
from sglang_ext.launch.bench import cascade as command
from sglang_ext.launch.bench._record import Timing, table
from sglang_ext.policies.cascade import Cascade

CPU = torch.device("cpu")
CASCADE = Cascade(window=12, cascades=3, sinks=2, stride=5)
Shape = bench.LayerShape
SHAPE = Shape(4, 2, 16, torch.float32)
gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


@gpu
def test_a_prefill_is_checked_step_by_step() -> None:
    worst = bench.check_prefill(bench.CascadeLayer(CASCADE, SHAPE, 1, CPU), 6, rows=5)
    assert worst.keys() == {"window", "attention", "scores"} and max(worst.values()) < 1e-4


@gpu
@pytest.mark.parametrize("broken", ["window", "lists", "attention", "scores"])
def test_what_is_wrong_is_not_timed(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = bench.CascadeLayer(CASCADE, SHAPE, 1, CPU)
    if broken == "window":
        monkeypatch.setattr(layer, "prepare", lambda *_: [part.fill_(1.0) for part in layer.window])
    elif broken == "lists":
        listed = layer.list
        monkeypatch.setattr(layer, "list", lambda added: (listed(added), layer.lists.add_(1)))
    elif broken == "attention":
        attend = layer.attend
        monkeypatch.setattr(layer, "attend", lambda *given: (attend(*given)[0] * 1.1, attend(*given)[1]))
    else:
        monkeypatch.setattr(layer, "score", lambda *_: None)
    with pytest.raises(ValueError, match=f"{broken}.*not timed"):
        bench.check_prefill(layer, 6, rows=5)


@gpu
def test_decoding_is_checked() -> None:
    decoding = bench.Decoding(CASCADE, 2, CPU, SHAPE)
    assert decoding.seen == 14 + 2 and max(decoding.check().values()) < 1e-4
    good = reference.decode

    def wrong(*given: Any, **named: Any) -> torch.Tensor:
        return good(*given, **named) * 1.1

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="not timed"):
        patch.setattr(bench.reference, "decode", wrong)
        decoding.check()


@gpu
def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole half with made-up times: 10 ms for what is run long, 1 ms for what is run in graphs."""
    ran = []

    def time_gpu(work: Any, *arguments: Any, **_: Any) -> Timing:
        if isinstance(work, Dense):
            return Timing.of([work.seconds])
        ran.append(work(*arguments))
        return Timing.of([1e-3])

    def seconds(work: Any, repeats: int) -> Timing:
        ran.append(work())
        return Timing.of([1e-2] * repeats)

    class Properties:
        multi_processor_count = 3

    @dataclass
    class Dense:
        seconds: float

    for name, value in {
        "time_gpu": time_gpu,
        "_seconds": seconds,
        "copy_bandwidth": lambda _: 1e9,
        "LayerShape": lambda heads=4, kv_heads=2: Shape(heads, kv_heads, 16, torch.float32),
        "UPDATE_BATCH": 2,
        "UPDATE_HEADS": 2,
        "UPDATE_TOKENS": 10,
        "DENSE_ROWS": 16,
        "dense_decode": lambda _: {"tensor cores": Dense(2e-3), "CUDA cores": Dense(4e-3)},
    }.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(bench.dense_impl, "attend", lambda q, k, v, s: reference.attend(q, k[: len(q)], v[: len(q)], s))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    figures = bench.measure(CPU, CASCADE, 32, [1, 2, 8])
    assert [figure.met for figure in figures] == [False, False, True, True, None, True]
    prefill, share, keeping, one, _, eight = figures
    assert prefill.ratio == 1 and prefill.notes["strides"] == 7 and "35 tokens" in prefill.name
    assert prefill.notes["stages_ms"].keys() == {"update", "lists", "window", "attention", "scores"}
    assert share.ratio == pytest.approx(2e-3 / (1e-2 / 7))
    assert keeping.ratio == pytest.approx(10) and keeping.aim == "at least 3x"
    assert one.ratio == 0.5 and one.aim == "at most 1.35x" and eight.aim == "at most 1.2x"
    assert one.notes["ratios"] == [0.5] * bench.TURNS and eight.timing.samples == bench.TURNS
    assert one.notes["columns"] == 16 and "tensor cores" in one.baseline
    assert len(table(figures).splitlines()) == 2 + len(figures)


@gpu
def test_no_gpu_no_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "cascade"]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


# ---- the engine's half ----

RAW = {
    "ours": {
        "parts": [[9.0, 4.0, 4.1, 4.2], [9.0, 4.0, 4.1, 4.2]],
        "unscored": [8.0, 3.4, 3.6],
        "decode": [0.006],
        "whole": [20.0],
        "dense": [3.0, 5.0],
        "conversation_slots": 30,
    },
    "stock": {"dense": [6.0], "decode": [0.005], "kept": 16, "backend": "flashinfer"},
}


def test_rows_of_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "engines", lambda _: RAW)
    monkeypatch.setattr(command, "stride_updates", lambda *_: 0.002)
    arguments = ["--only", "engine", "--tokens", "400000", "--part", "100000", "--out", str(tmp_path)]
    assert cli.main(["bench", "cascade", *arguments]) == 0
    record = json.loads((tmp_path / "cascade_engine.json").read_text())
    assert record["engine"] == {**RAW, "stride_update": 0.002} and list(tmp_path.iterdir()) == [
        tmp_path / "cascade_engine.json"
    ]
    linear, scores, whole, dense, step = record["figures"]
    assert linear["ratio"] == pytest.approx(4.2 / 4.0) and linear["met"] and linear["aim"] == "at most 1.1x"
    assert (
        scores["ratio"] == pytest.approx((4.1 - 3.5 + 0.002 * 100_000 / 4096) / 4.1)
        and scores["met"]
        and scores["aim"] == "at most 0.25x"
    )
    assert whole["ratio"] == pytest.approx(20 / (75 * 400_000 / 2**20)) and whole["met"]
    assert dense["ratio"] == pytest.approx(6 / 4) and not dense["aim"] and "524288 tokens" in dense["name"]
    assert [row["timing"]["samples"] for row in (linear, dense)] == [2, 2]
    assert step["ratio"] == pytest.approx(1.2) and not step["aim"]


def test_updates_of_all_layers_are_timed_when_they_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = command.argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.stride_updates(parser.parse_args(["--shape", "tiny"]), CASCADE) > 0

    def wrong(state: Any, *_: Any, **__: Any) -> None:
        state.cell.add_(1)

    monkeypatch.setattr(bench, "update_anywhere", wrong)
    with pytest.raises(ValueError, match="differs from its reference: not timed"):
        command.stride_updates(parser.parse_args(["--shape", "tiny"]), CASCADE)


@pytest.mark.parametrize("sizes", [(4096, 2048), (5000, 1024), (40_960, 8192)])
def test_parts_have_a_full_window(sizes: tuple[int, int], capsys: pytest.CaptureFixture[str]) -> None:
    tokens, part = map(str, sizes)
    assert cli.main(["bench", "cascade", "--only", "engine", "--tokens", tokens, "--part", part]) == 2
    assert "at least three whole parts" in capsys.readouterr().err


class Engine:
    """Answers at once, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, dict[str, Any]]] = []

    def generate(self, input_ids: list[int], sampling_params: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((len(input_ids), sampling_params))
        return {"meta_info": {"completion_tokens": min(sampling_params["max_new_tokens"], 7)}}


def test_turns_make_one_long_prompt() -> None:
    """With the token that a turn begins with, all parts are of one length."""
    engine = Engine()
    assert len(engine_half.parts(engine, 30, 10)) == 3
    assert [asked for asked, _ in engine.asked] == [10, 9, 9]
    custom = [params["custom_params"] for _, params in engine.asked]
    named = {"conversation": "parts", "conversation_key": engine_half.PARTS["conversation_key"]}
    assert custom[0] == named and custom[1:] == [{**named, "continue": True}] * 2
    engine_half.parts(engine, 20, 10, selection=False)
    assert [params["custom_params"].pop("selection") for _, params in engine.asked[3:]] == [False, False]
    del engine.asked[3:]
    steps = engine_half.decoding(engine, 6, 2, [1, 2])
    assert len(steps) == 2 and [params["max_new_tokens"] for _, params in engine.asked[3:]] == [1, 1, 7, 1, 7]
    with pytest.raises(RuntimeError, match="expected an answer of 9 tokens"):
        engine_half.timed(engine, [1], 9)


def test_options_of_the_engine_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `bench cascade` starts is what `_cascade_engine` takes."""
    seen: list[Any] = []

    def run(words: list[str], env: dict[str, str], **_: Any) -> SimpleNamespace:
        def record(role: str) -> Any:
            def measure(args: Any, cascade: Cascade, common: dict[str, Any]) -> dict[str, Any]:
                seen.append((role, cascade, common, env["SGLANG_EXT_KERNELS"] if role == "ours" else ""))
                return RAW[role]

            return measure

        for role in engine_half.ROLES:
            monkeypatch.setattr(engine_half, role, record(role))
        return SimpleNamespace(returncode=engine_half.main(words[3:]))

    monkeypatch.setattr(command.subprocess, "run", run)
    parser = command.argparse.ArgumentParser()
    command.add_arguments(parser)
    given = ["--shape", "tiny", "--window", "12", "--cascades", "3", "--kernels", "triton", "--engine", '{"x": 1}']
    found = command.engines(parser.parse_args([*given, "--stock-backend", "one", "two"]))
    assert found == {**RAW, "stock": {"one": RAW["stock"], "two": RAW["stock"]}}
    assert [role for role, *_ in seen] == ["ours", "stock", "stock"] and seen[0][1] == Cascade(12, 3)
    assert seen[0][2]["x"] == 1 and seen[0][2]["load_format"] == "dummy" and seen[0][3] == "triton"
