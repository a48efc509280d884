"""`sglang-ext bench beside`: rows of two checkouts, and one real pair of engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import sglang_ext
from sglang_ext.launch import cli
from sglang_ext.launch.bench import beside

ROOT = Path(sglang_ext.__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "ours, other, ratio, met",
    [
        ([1.0, 1.0, 1.0], [1.0, 1.1, 0.99], 1.0, True),
        ([1.0, 1.0, 1.0], [1.2, 1.3, 1.1], 1.2, True),
        ([1.0, 1.0, 1.0], [0.98, 0.97, 0.99], 0.98, False),  # a little slower, every time
        ([1.0, 1.0, 1.0], [0.90, 0.94, 1.10], 0.94, False),  # the median says it
    ],
)
def test_a_row_is_met_where_nothing_is_slower(ours: list[float], other: list[float], ratio: float, met: bool) -> None:
    row = beside.row("x", {beside.OURS: ours, beside.OTHER: other})
    assert row.ratio == pytest.approx(ratio) and row.met is met and row.baseline == beside.OTHER


def test_a_folder_without_the_package_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "beside", str(tmp_path)]) == 2
    assert "holds no sglang_ext: expected the root of a checkout" in capsys.readouterr().err


def test_rows_of_a_kernels_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names lose what was measured; rows that one checkout lacks, and others than times, are left out."""
    runs: list[str] = []

    def run(words: list[str], env: dict[str, str], **_: bool) -> None:
        runs.append(env["PYTHONPATH"].split(":")[0])
        times = {"median": 2.0 if runs[-1] == "/old" else 1.0, "low": 1.0, "high": 1.0, "samples": 1}
        figures = [
            {"name": f"attention (exact {len(runs)})", "unit": "ms", "timing": times},
            {"name": "memory", "unit": "MiB", "timing": times},
            {"name": runs[-1], "unit": "ms", "timing": times},
        ]
        Path(words[-1]).write_text(json.dumps({"figures": figures}))

    monkeypatch.setattr(beside.subprocess, "run", run)
    roots = {beside.OTHER: Path("/old"), beside.OURS: Path("/new")}
    (row,) = beside.kernels(["double_p", "--only", "kernels"], roots, 2)
    assert runs == ["/old", "/new", "/new", "/old"], "in turns, and not one of them always first"
    assert row.name == "attention" and row.ratio == 2.0 and row.met


@pytest.mark.usefixtures("forked_engines")
def test_a_checkout_beside_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--shape tiny --layers 2 --length 1024 --prompts 2 --steps 4 --repeats 1 --step-repeats 2 --kernels torch"
    out = tmp_path / "rows.json"
    words = ["bench", "beside", str(ROOT), "--systems", "double_p", *sizes.split(), "--out", str(out)]
    assert cli.main(words) == 0, capsys.readouterr()
    names = [figure["name"] for figure in json.loads(out.read_text())["figures"]]
    assert names == [
        "double_p: prefill and clustering of 2 prompts of 1024 tokens, 2 layers",
        "double_p: a decoding step over 2 prompts of 1024 tokens, 2 layers",
    ]
