"""Captured keys of `sglang-ext bench double_p`: they are the model's, tiled as said, and methods keep what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sglang_ext.launch import cli
from sglang_ext.launch.bench import _double_p_captured as captured
from sglang_ext.launch.bench import _double_p_kernels as kernels
from sglang_ext.launch.bench import _double_p_rows as rows_of
from sglang_ext.launch.bench import _double_p_step as steps
from sglang_ext.launch.bench import _double_p_texts as texts_of
from sglang_ext.policies import double_p
from sglang_ext.policies.double_p import DoubleP
from sglang_ext.policies.quest import Quest

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTH = 512
CONFIG = DoubleP(segment=256, window=32)


@pytest.fixture(scope="module")
def texts() -> list[texts_of.Text]:
    return texts_of.capture(DEVICE, 3, LENGTH)


def test_texts_are_of_the_length_asked_for() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(texts_of.MODEL))
    for seed in range(6):
        ids = texts_of.prompt(tokenizer, LENGTH, seed)
        assert len(ids) == LENGTH and ids == texts_of.prompt(tokenizer, LENGTH, seed)
        assert ids[0] == tokenizer.bos_token_id
        words = str(tokenizer.decode(ids))
        assert words.endswith(texts_of.QUESTION if seed % 2 else "\nLabel:")
        assert words.count("Remember it.") == seed % 2
    with pytest.raises(ValueError, match="texts of 5 tokens"):
        texts_of.prompt(tokenizer, 5, 0)


def test_logits_are_the_model_s(texts: list[texts_of.Text]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        str(texts_of.MODEL), dtype=torch.float32, attn_implementation="eager"
    ).to(DEVICE)  # type: ignore[arg-type]
    ids = texts_of.prompt(AutoTokenizer.from_pretrained(str(texts_of.MODEL)), LENGTH, 1)
    with torch.no_grad():
        seen = model(torch.tensor([ids], device=DEVICE), output_attentions=True).attentions
    for layer, attentions in enumerate(seen):
        for step in range(texts_of.STEPS):
            seen_keys = texts[1].keys[layer, :, : LENGTH + 1 + step - texts_of.STEPS].float()
            x = double_p.logits(texts[1].queries[layer, :, step].unflatten(0, (4, 2)), seen_keys)
            wanted = attentions[0, :, step - texts_of.STEPS, : seen_keys.shape[1]].unflatten(0, (4, 2))
            torch.testing.assert_close(x.softmax(-1), wanted, atol=0.02, rtol=0)  # keys are bfloat16
            assert (wanted - wanted.flip(-1)).abs().max() > 0.1, "not flat"
        assert torch.equal(texts[1].query[layer], texts[1].queries[layer, :, -1])


def test_a_file_keeps_them(texts: list[texts_of.Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tmp_path / "texts.pt"
    texts_of.capture(DEVICE, 1, LENGTH, saved)
    monkeypatch.setattr(texts_of, "_captured", None)  # not captured again
    (again,) = texts_of.capture(DEVICE, 1, LENGTH, saved)
    assert all(torch.equal(x, y) for x, y in zip(vars(again).values(), vars(texts[0]).values(), strict=True))
    with pytest.raises(ValueError, match="expected 2 of 512"):
        texts_of.capture(DEVICE, 2, LENGTH, saved)


def test_rows_are_tiled_as_said(texts: list[texts_of.Text]) -> None:
    rows = captured.Captured(LENGTH, 5, texts, CONFIG, DEVICE, dtype=torch.float16)
    assert (rows.shape.heads, rows.shape.kv_heads, rows.shape.group, rows.shape.head_dim) == (32, 8, 4, 64)
    found = rows.keys.unflatten(0, (5, LENGTH))
    for row, text, layer, head in [(0, 0, 0, 0), (1, 0, 3, 2), (3, 0, 7, 3), (4, 1, 0, 1)]:
        at = 4 * (layer % 2) + head
        assert torch.equal(found[row, :, at], texts[text].keys[layer, head].half())
        queries = rows.queries()[row].unflatten(0, (8, 4))[at]
        wanted = texts[text].query[layer].unflatten(0, (4, 2))[head].half()
        assert torch.equal(queries, wanted[[0, 0, 1, 1]])
    longer = captured.Captured(2 * LENGTH, 1, texts, CONFIG, DEVICE, dtype=torch.float16)
    assert torch.equal(longer.keys[LENGTH:, 0], texts[1].keys[0, 0].half())
    assert torch.equal(longer.queries()[0, 0], texts[1].query[0, 0].half())
    with pytest.raises(ValueError, match="expected 4 texts"):
        captured.Captured(2 * LENGTH, 5, texts, CONFIG, DEVICE)


def drawn_texts(count: int, layers: int, kv_heads: int, group: int) -> list[texts_of.Text]:
    """Texts of `LENGTH` tokens of a model with so many heads, of random numbers."""
    dice, made = torch.Generator().manual_seed(0), []
    for _ in range(count):
        keys, values = (torch.randn(layers, kv_heads, LENGTH, 64, generator=dice).bfloat16() for _ in range(2))
        queries = torch.randn(layers, kv_heads * group, texts_of.STEPS, 64, generator=dice)
        made.append(texts_of.Text(keys.to(DEVICE), values.to(DEVICE), queries.to(DEVICE)))
    return made


def test_three_heads_of_three_make_rows_of_nine() -> None:
    """SmolLM2-135M's heads: three layers side by side, and no query head twice."""
    texts = drawn_texts(2, 7, 3, 3)  # the seventh layer is in no row
    rows = captured.Captured(LENGTH, 3, texts, CONFIG, DEVICE, dtype=torch.float16)
    assert (rows.shape.heads, rows.shape.kv_heads, rows.shape.group) == (27, 9, 3)
    found = rows.keys.unflatten(0, (3, LENGTH))
    for row, text, layer, head in [(0, 0, 0, 0), (0, 0, 2, 1), (1, 0, 3, 2), (2, 1, 1, 0)]:
        at = 3 * (layer % 3) + head
        assert torch.equal(found[row, :, at], texts[text].keys[layer, head].half())
        wanted = texts[text].query[layer].unflatten(0, (3, 3))[head].half()
        assert torch.equal(rows.queries()[row].unflatten(0, (9, 3))[at], wanted)
    step = steps.ClusterBenchStep(rows, 3, rows_of.layers(rows, 3))
    step.check()
    with pytest.raises(ValueError, match="5 rows of 512 from 2 texts of 512 tokens: expected 3 texts"):
        captured.Captured(LENGTH, 5, texts, CONFIG, DEVICE)


@pytest.mark.parametrize(
    ("layers", "heads", "kv_heads", "tiling"),
    [(8, 8, 4, (2, 2, 4)), (30, 9, 3, (3, 1, 10)), (32, 32, 8, (1, 1, 32)), (9, 8, 2, (4, 1, 2)), (8, 5, 5, (2, 4, 4))],
)
def test_tilings(layers: int, heads: int, kv_heads: int, tiling: tuple[int, int, int]) -> None:
    found = captured.Tiling.of(layers, heads, kv_heads)
    assert (found.side, found.times, found.rows) == tiling
    with pytest.raises(ValueError, match="expected at least 8 layers"):
        captured.Tiling.of(7, 4, 1)


def test_the_kernels_run_on_them(texts: list[texts_of.Text]) -> None:
    rows = captured.Captured(LENGTH, 2, texts, CONFIG, DEVICE, dtype=torch.float16)
    step = steps.ClusterBenchStep(rows, 2, rows_of.layers(rows, 2))
    step.check()
    assert 0 < step.shares()["exact"] < 0.9


def test_what_is_recovered(texts: list[texts_of.Text]) -> None:
    """Exact masses never recover less than p; a budget of everything recovers everything."""
    chosen = {**captured.methods(CONFIG), "all": Quest(budget=1.0)}
    found = captured.recovered(texts[:2], chosen, CONFIG)
    assert all(len(each.mass) == 2 * 8 * 8 and len(each.tokens) == 2 * 8 * 4 for each in found.values())
    exact = found["Double-P, exact cluster masses"]
    assert exact.violations(0.95) == 0 and float(exact.mass.min()) >= 0.95
    assert torch.allclose(found["all"].mass, torch.ones(128, device=DEVICE)) and found["all"].tokens.min() == 1
    assert found["Quest, 25% of the tokens"].violations(0.95) > 0.1
    for each in found.values():
        assert (each.whole >= each.mass - 1e-5).all(), "sinks and window only add"
        assert (each.exact <= each.tokens).all()
    rounded = found["Double-P, centroids in float8"]
    assert not torch.equal(rounded.mass, found["Double-P (0.95, 0.7)"].mass), "other centroids"
    curve = captured.curve_of(found, LENGTH, "captured keys")
    assert curve.series["Double-P, exact cluster masses"][:23] == [(x / 100, 0.0) for x in range(50, 95, 2)]
    for name, points in curve.series.items():
        shares = [share for _, share in points]
        assert shares == sorted(shares) and points[20] == (0.9, found[name].violations(0.9))
    figures = captured.figures_of(found, 0.95, LENGTH, 2, "captured keys")
    assert figures[0].baseline == "" and figures[1].baseline == "Double-P (0.95, 0.7)"
    (least,) = (figure for figure in figures if "exact cluster masses" in figure.name)
    assert least.notes["violations"] == 0 and "below 0.95 in 0% of the heads" in least.name


def test_what_is_recovered_needs_no_gpu(tmp_path: Path) -> None:
    out = tmp_path / "recovered.json"
    words = ["--only", "recovered", "--device", "cpu", "--texts", "1", "--text-length", str(LENGTH), "--out", str(out)]
    assert cli.main(["bench", "double_p", *words]) == 0
    record = json.loads(out.read_text())
    assert [figure["unit"] for figure in record["figures"]] == ["%"] * len(captured.methods(CONFIG))
    (curve,) = record["curves"]
    assert list(curve["series"]) == list(captured.methods(DoubleP()))


def test_too_few_texts_are_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    captured.check_texts(8, 16384, 65536, 8)
    with pytest.raises(ValueError, match="8 rows of 65536 from 7 texts of 16384 tokens: expected 8 texts"):
        captured.check_texts(7, 16384, 65536, 8)
    with pytest.raises(ValueError, match="divides the row's"):
        captured.check_texts(99, 16384, 8192, 1)
    monkeypatch.setattr(kernels, "measure", None)
    assert cli.main(["bench", "double_p", "--device", "cpu", "--texts", "7"]) == 2
    assert "from 7 texts" in capsys.readouterr().err
