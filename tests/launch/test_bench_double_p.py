"""The comparing code of `sglang-ext bench double_p`, its planted keys, and that wrong kernels are not timed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.kernels.cluster_attention import attend_impl, joint_impl
from sglang_ext.kernels.cluster_attention import triton_impl as attention
from sglang_ext.kernels.top_p import dispatch
from sglang_ext.launch import cli
from sglang_ext.launch.bench import _double_p_kernels as kernels
from sglang_ext.launch.bench import _double_p_rows as rows_of
from sglang_ext.launch.bench import _double_p_step as steps
from sglang_ext.launch.bench._record import Timing
from sglang_ext.policies import double_p
from sglang_ext.policies.double_p import DoubleP
from tests.kernels import on_host

TINY = rows_of.SHAPES["tiny"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def planted(length: int = 2000, batch: int = 2) -> rows_of.Planted:
    return rows_of.Planted(length, batch, TINY, DoubleP(segment=1024), DEVICE)


@pytest.fixture(scope="module")
def step() -> steps.ClusterBenchStep:
    keys = planted()
    return steps.ClusterBenchStep(keys, 2, rows_of.layers(keys, 2))


def test_kmeans_finds_the_planted_clusters() -> None:
    keys = planted()
    assert keys.plan.lengths == (1020, 912) and keys.agreed == 1.0
    sizes = keys.pool.sizes[: keys.tiles].transpose(0, 1).flatten(1)
    for head in sizes:
        assert {15, 16} >= {int(size) for size in head if size} and int(head.sum()) == 1932
    # Tokens of one cluster are not side by side: members are read here and there.
    label = keys.labels[0][0]
    assert (label[1:] == label[:-1]).float().mean() < 0.1


def test_queries_have_their_level() -> None:
    keys = rows_of.Planted(40_000, 1, TINY, DoubleP(iterations=1), DEVICE)
    for level in rows_of.LEVELS.values():
        query = keys.queries(level)
        assert torch.equal(query, keys.queries(level))
        centroids = keys.pool.centroids.transpose(0, 1).flatten(1, 2).float()
        x = double_p.logits(query[0].float().view(TINY.kv_heads, TINY.group, -1), centroids)
        filled = keys.pool.sizes.transpose(0, 1).flatten(1) > 0
        for head in range(TINY.kv_heads):
            assert float(x[head][:, filled[head]].std()) == pytest.approx(level.deviation, rel=0.15)


def test_shares_are_what_sorting_keeps(step: steps.ClusterBenchStep) -> None:
    """Exact tokens, approximated clusters and recovered mass against the policy's equations."""
    step.ask(rows_of.LEVELS["middle"])
    keys, found = step.planted, step.shares()
    exact_shares, approx_shares, mass = [], [], []
    for row in range(2):
        tiles = slice(row * keys.tiles, (row + 1) * keys.tiles)
        centroids = keys.pool.centroids[tiles].transpose(0, 1).flatten(1, 2).double()
        sizes = keys.pool.sizes[tiles].transpose(0, 1).flatten(1)
        query = step.query[row].double().view(TINY.kv_heads, TINY.group, -1)
        share = double_p.distribution(double_p.estimated_log_mass(query, centroids, sizes))
        exact, approx = double_p.select(share, keys.config)
        exact_shares.append(float((sizes * exact).sum() / sizes.sum()))
        approx_shares.append(float(approx.sum() / (sizes > 0).sum()))
        all_keys = keys.keys[row * 2000 : (row + 1) * 2000].double()
        weights = torch.softmax(torch.einsum("hgd,thd->hgt", query, all_keys) * TINY.head_dim**-0.5, -1)
        kept = torch.ones(TINY.kv_heads, 2000, device=DEVICE)
        kept[:, keys.begin : keys.end] = (exact | approx).gather(1, keys.labels[row].long()).float()
        mass.append((weights * kept.unsqueeze(1)).sum(-1).flatten())
    recovered = torch.cat(mass)
    assert found["exact"] == pytest.approx(sum(exact_shares) / 2, abs=2e-3)
    assert found["approx"] == pytest.approx(sum(approx_shares) / 2, abs=2e-3)
    assert found["recovered"] == pytest.approx(float(recovered.mean()), abs=2e-3)
    assert found["recovered_least"] == pytest.approx(float(recovered.min()), abs=2e-3)


def test_floor_counts_what_must_be_read(step: steps.ClusterBenchStep) -> None:
    step.ask(rows_of.LEVELS["flat"])
    step.run()
    counts = step.buffers.chosen(2)[0].counts.long().sum((0, 1))
    vectors = int(counts[3]) + int(counts[2]) + 2 * int(counts[1]) + 2 * 68 * 2 * TINY.kv_heads
    assert step.floor_bytes() == vectors * TINY.head_dim * 2


def test_right_kernels_pass(step: steps.ClusterBenchStep) -> None:
    errors = step.check()
    assert set(errors) == {"logits", "selection", "output"} and max(errors.values()) < 5e-3


def test_buffers_wider_than_the_rows_pass(step: steps.ClusterBenchStep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_ext.attention.readers.clusters.GRAPH_TOKENS", 5000)
    wide = steps.ClusterBenchStep(step.planted, 2, step.copies, engine_room=True)
    errors = wide.check()
    assert wide.buffers.chosen(2)[1].shape[-1] > step.buffers.chosen(2)[1].shape[-1] and max(errors.values()) < 5e-3


@pytest.fixture(scope="module")
def wide() -> Any:
    """(rows, two copies of them) with heads as wide as the CUDA kernels take."""
    shape = replace(TINY, head_dim=64, value_dim=64)
    keys = rows_of.Planted(2000, 2, shape, DoubleP(segment=1024), DEVICE)
    return keys, rows_of.layers(keys, 2)


@on_host.needed
def test_scores_and_selection_in_one_kernel_pass(wide: Any) -> None:
    """In CUDA, on this CPU where there is no GPU: as right, and the same sets within rounding."""
    keys, copies = wide
    two, one = (steps.ClusterBenchStep(keys, 2, copies, joint=joint) for joint in (False, True))
    with on_host.top_p():
        errors = one.check()
        assert max(errors.values()) < 5e-3
        out = one.run()
        torch.testing.assert_close(out, two.run(), rtol=2e-2, atol=2e-3)  # float16, and sets at their edges
        same = steps.difference(one.buffers.chosen(2)[0], two.buffers.chosen(2)[0], keys.tiles * rows_of.WIDTH)
        assert same <= steps.EDGE
    with pytest.MonkeyPatch.context() as patch:
        called = []
        real = joint_impl.score_and_select
        patch.setattr(joint_impl, "score_and_select", lambda *a, **k: called.append(1) or real(*a, **k))
        with on_host.top_p():
            one.run()
            two.run()
    assert called == [1]


@on_host.needed
def test_attention_and_merge_in_one_kernel_pass(wide: Any) -> None:
    """Likewise, after a selection that wrote out its lists."""
    keys, copies = wide
    two, one = (steps.ClusterBenchStep(keys, 2, copies, fused=fused) for fused in (False, True))
    called = []
    real = attend_impl.cluster_attention
    with pytest.MonkeyPatch.context() as patch, on_host.top_p(), on_host.cuda(attend_impl):
        patch.setattr(attend_impl, "cluster_attention", lambda *a, **k: called.append(1) or real(*a, **k))
        assert max(one.check().values()) < 5e-3
        torch.testing.assert_close(one.run(), two.run(), rtol=2e-2, atol=2e-3)  # float16
        again = one.read_again().clone()
        torch.testing.assert_close(again, one.run(), rtol=0, atol=0)
    assert len(called) == 4


@pytest.mark.parametrize(
    ("name", "module", "broken"),
    [
        ("logits", attention, "centroid_scores"),
        ("selection", dispatch, "select"),
        ("output", attention, "cluster_attention"),
    ],
)
def test_wrong_kernels_are_not_timed(
    step: steps.ClusterBenchStep, monkeypatch: pytest.MonkeyPatch, name: str, module: Any, broken: str
) -> None:
    right = getattr(module, broken)

    def wrong(*args: Any, **options: Any) -> Any:
        if broken == "select":
            return right(*args[:-1], args[-1] * 0.9, **options)
        found = right(*args, **options)
        found[0][..., :3] += 0.5 * found[0][torch.isfinite(found[0])].abs().max()
        return found

    monkeypatch.setattr(module, broken, wrong)
    with pytest.raises(ValueError, match=f"the kernels' {name} are wrong"):
        step.check()


def case(**changes: Any) -> kernels.Case:
    parts: dict[str, Any] = {
        "batch": 8,
        "length": 65536,
        "level": "middle",
        "ours": Timing.of([0.1]),
        "dense": Timing.of([0.54]),
        "dense_name": "dense FlashInfer",
        "floor": 0.07,
        "shares": {"exact": 0.0749, "approx": 0.354, "recovered": 0.97},
        "notes": {},
        "reading": Timing.of([0.07]),
    }
    return kernels.Case(**{**parts, **changes})


def test_rows_of_a_case() -> None:
    dense, floor, share = kernels.figures_of(case())
    assert (dense.ratio, dense.aim, dense.met) == (pytest.approx(5.4), "at least 5.3x", True)
    assert "0.07 exact, 0.35 by centroid, recovered 0.970" in dense.name
    assert (floor.ratio, floor.aim, floor.met) == (pytest.approx(0.1 / 0.07), "at most 1.45x", True)
    assert (share.ratio, share.aim, share.met) == (pytest.approx(0.3), "at most 0.35x", True)
    assert not kernels.figures_of(case(ours=Timing.of([0.11])))[0].met
    assert len(kernels.figures_of(case(floor=None, reading=None))) == 1


@pytest.mark.parametrize(
    ("batch", "length", "exact", "approx", "aim"),
    [
        (8, 65536, 0.08, 0.35, 5.3),
        (8, 131072, 0.05, 0.31, 5.3),
        (8, 131072, 0.09, 0.31, None),
        (8, 65536, 0.08, 0.36, None),
        (8, 32768, 0.05, 0.31, None),
        (1, 131072, 0.09, 0.36, 2.5),
        (1, 131072, 0.28, 0.43, None),
        (1, 65536, 0.05, 0.31, None),
        (32, 65536, 0.05, 0.31, None),
    ],
)
def test_what_is_aimed_at(batch: int, length: int, exact: float, approx: float, aim: float | None) -> None:
    assert kernels.dense_aim(batch, length, {"exact": exact, "approx": approx}) == aim


def test_reading_again_is_what_the_step_read() -> None:
    """What is taken for the attention of a step, without scores and selection, is its attention."""
    keys = planted()
    step = steps.ClusterBenchStep(keys, 2, rows_of.layers(keys, 2))
    want = step.run()
    torch.testing.assert_close(step.read_again(), want, rtol=0, atol=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "double_p", "--only", "kernels"]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "double_p.json"
    words = ["bench", "double_p", "--only", "kernels", "--device", "cpu", "--shape", "tiny", "--lengths", "1024"]
    assert cli.main([*words, "--batches", "1", "--out", str(out)]) == 0
    figures = json.loads(out.read_text())["figures"]
    assert [figure["baseline"] for figure in figures] == ["dense PyTorch, no GPU"] * 3
    assert all(math.isfinite(figure["notes"]["recovered"]) for figure in figures)
    assert "recovered" in capsys.readouterr().out


def test_what_cannot_be_written_to_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for bench in ("double_p", "dbsa", "quality", "reference"):
        with pytest.raises(SystemExit):
            cli.main(["bench", bench, "--out", str(tmp_path)])
        assert "is a folder: expected a JSON file" in capsys.readouterr().err
    (tmp_path / "x").write_text("")
    for bench, out in (("cascade", "x"), ("cascade", "x/y"), ("dbsa", "x/y.json")):
        with pytest.raises(SystemExit):
            cli.main(["bench", bench, "--out", str(tmp_path / out)])
        assert f"{tmp_path / 'x'} is a file: expected a folder" in capsys.readouterr().err
