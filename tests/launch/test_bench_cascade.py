"""The kernels' half of `bench cascade` on the CPU: its checks find what is wrong, and its rows are put together right.

Triton's interpreter runs the kernels; times are made up, so that a mistake does not wait for a GPU to show.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_ext.kernels.cells import reference
from sglang_ext.launch import cli
from sglang_ext.launch.bench import _cascade_kernels as bench
from sglang_ext.launch.bench._record import Timing, table
from sglang_ext.policies.cascade import Cascade

CPU = torch.device("cpu")
CASCADE = Cascade(window=12, cascades=3, sinks=2, stride=5)
Shape = bench.Shape
SHAPE = Shape(4, 2, 16, torch.float32)
gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


@gpu
def test_a_prefill_is_checked_step_by_step() -> None:
    worst = bench.check_prefill(bench.Layer(CASCADE, SHAPE, 1, CPU), 6, rows=5)
    assert worst.keys() == {"window", "attention", "scores"} and max(worst.values()) < 1e-4


@gpu
@pytest.mark.parametrize("broken", ["window", "lists", "attention", "scores"])
def test_what_is_wrong_is_not_timed(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = bench.Layer(CASCADE, SHAPE, 1, CPU)
    if broken == "window":
        monkeypatch.setattr(layer, "prepare", lambda *_: [part.fill_(1.0) for part in layer.window])
    elif broken == "lists":
        listed = layer.list
        monkeypatch.setattr(layer, "list", lambda added: (listed(added), layer.lists.delta.add_(1)))
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
    decoding.layer.lists.delta[0, 1] += 3
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
        ran.append(work(*arguments))
        return Timing.of([1e-3])

    def seconds(work: Any, repeats: int) -> Timing:
        ran.append(work())
        return Timing.of([1e-2] * repeats)

    class Properties:
        multi_processor_count = 3

    for name, value in {
        "time_gpu": time_gpu,
        "_seconds": seconds,
        "copy_bandwidth": lambda _: 1e9,
        "Shape": lambda heads=4, kv_heads=2: Shape(heads, kv_heads, 16, torch.float32),
        "UPDATE_BATCH": 2,
        "UPDATE_HEADS": 2,
        "UPDATE_TOKENS": 10,
        "SINGLE_TOKENS": 4,
        "DENSE_ROWS": 16,
        "dense_decode": lambda _: {"tensor cores": Timing.of([2e-3]), "CUDA cores": Timing.of([4e-3])},
    }.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(
        bench.flashinfer_impl, "attend", lambda q, k, v, s: reference.attend(q, k[: len(q)], v[: len(q)], s)
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    figures = bench.measure(CPU, CASCADE, 32, [1, 2, 8])
    assert [figure.met for figure in figures] == [False, False, False, True, None, None, True, None, True]
    prefill, share, alone, by_stride, *_, one, _, eight = figures
    assert prefill.ratio == 1 and prefill.notes["strides"] == 7 and "35 tokens" in prefill.name
    assert prefill.notes["stages_ms"].keys() == {"update", "lists", "window", "attention", "scores"}
    assert share.ratio == pytest.approx(2e-3 / (1e-2 / 7))
    assert alone.ratio == pytest.approx(1e-2 / 1e-3 * 10 / 4) and by_stride.ratio == pytest.approx(10)
    assert one.ratio == 0.5 and one.aim == "at most 1.35x" and eight.aim == "at most 1.2x"
    assert one.notes["columns"] == 16 and "tensor cores" in one.baseline
    assert len(table(figures).splitlines()) == 2 + len(figures)


@gpu
def test_no_gpu_no_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "cascade"]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
