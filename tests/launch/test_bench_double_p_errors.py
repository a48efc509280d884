"""Where centroids err on captured keys, beside brute force over small ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from sglang_ext.kernels.kmeans import kmeans
from sglang_ext.launch import cli
from sglang_ext.launch.bench import _double_p_error_rows as rows
from sglang_ext.launch.bench import _double_p_errors as errors
from sglang_ext.launch.bench import _double_p_texts as texts_of
from sglang_ext.policies import double_p
from sglang_ext.policies.double_p import DoubleP

LENGTH, LAYERS, KV, GROUP, DIM = 419, 3, 3, 2, 16
CONFIG = DoubleP(segment=128)


def drawn(seed: int = 0, sharp: float = 3.0) -> texts_of.Text:
    """A text of random keys, whose heads attend to few of them."""
    dice = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(LAYERS, KV, LENGTH, DIM, generator=dice).bfloat16() for _ in range(2))
    queries = sharp * torch.randn(LAYERS, KV * GROUP, texts_of.STEPS, DIM, generator=dice)
    return texts_of.Text(keys, values, queries)


def step_of(text: texts_of.Text, config: DoubleP = CONFIG, step: int = -1) -> errors.CapturedStep:
    layer = errors.CapturedLayer.of(text, 1, errors.labels_of(text, 1, errors.ErrorVariant(config), kmeans), config)
    seen = LENGTH + 1 + step
    return errors.CapturedStep.of(layer, text.queries[1, :, step].unflatten(0, (KV, GROUP)), seen)


@pytest.mark.parametrize("step", [-1, -7])
def test_dense_output_is_that_of_all_tokens_seen(step: int) -> None:
    text = drawn()
    found, seen = step_of(text, step=step), LENGTH + 1 + step
    for head in range(KV * GROUP):
        keys, values = (x[1, head // GROUP, :seen].double() for x in (text.keys, text.values))
        x = keys @ text.queries[1, head, step].double() * DIM**-0.5
        wanted = x.softmax(0) @ values
        torch.testing.assert_close(found.dense.flatten(0, 1)[head].double(), wanted, atol=1e-5, rtol=1e-5)  # float32


def test_errors_by_count_are_those_of_attending() -> None:
    """The running sums equal attention with the first k clusters exact and all others approximated, for every k."""
    step = step_of(drawn())
    clusters = step.log_mass.shape[-1]
    found = step.errors_by_count()
    assert found.shape == (KV, GROUP, clusters + 1)
    order = step.log_mass.argsort(-1, descending=True)
    for head in range(KV):
        for one in range(GROUP):
            for k in (0, 1, 2, 5, clusters):
                exact = torch.zeros(KV, clusters, dtype=torch.bool)
                exact[head, order[head, one, :k]] = True
                output = step.attend(exact, ~exact & (step.layer.sizes > 0))
                wanted = step.error(output)[head, one]
                torch.testing.assert_close(found[head, one, k], wanted, atol=1e-4, rtol=1e-3)  # float32
    assert float(found[..., clusters].max()) < 1e-4, "all exact is dense attention"
    assert float(found[..., 0].min()) > 1e-3, "no cluster is exact"


def test_needed_tokens_are_the_fewest() -> None:
    step = step_of(drawn())
    share = step.inside.softmax(-1).flatten(0, 1)
    for p in (0.5, 0.95, 1.0):
        found = step.needed_tokens(p).flatten()
        for head, each in enumerate(share):
            best = each.sort(descending=True).values
            count = round(float(found[head]) * len(best))
            assert 1 <= count <= len(best)
            assert float(best[:count].sum()) >= p - 1e-5 and float(best[: count - 1].sum()) < p


def test_mass_errors_are_by_rank() -> None:
    step = step_of(drawn())
    found, own = step.mass_errors(), step.layer
    x = torch.cat([step.inside, step.outside], -1)
    share = x.softmax(-1)[..., : step.inside.shape[-1]]
    whole = x.logsumexp(-1)
    for head in range(KV):
        for one in range(GROUP):
            order = step.log_mass[head, one].argsort(descending=True)
            for rank in (0, 3):
                cluster = order[rank]
                true = share[head, one, own.labels[head] == cluster].sum()
                guessed = (step.log_mass[head, one, cluster] - whole[head, one]).exp()
                torch.testing.assert_close(found[head, one, rank], (true - guessed).abs(), atol=1e-6, rtol=1e-4)


def test_unit_labels_are_of_the_nearest_direction() -> None:
    """Each key has the centroid that points its way most, and segments keep their clusters to themselves."""
    text = drawn()
    keys = text.keys[0].float()
    begin, end = CONFIG.clustered(LENGTH)
    plan = CONFIG.plan(begin, end, 64)
    labels = errors.unit_labels(keys[:, begin:end], plan, iterations=50)
    assert labels.shape == (KV, end - begin)
    token, cell = 0, 0
    for length, count, tiles in zip(plan.lengths, plan.clusters, plan.tiles, strict=True):
        part = keys[:, begin + token : begin + token + length]
        part = torch.nn.functional.normalize(part - part.mean(1, keepdim=True), dim=-1)
        own = labels[:, token : token + length] - cell
        assert int(own.min()) >= 0 and int(own.max()) < count
        centroids = torch.nn.functional.normalize(double_p.cluster_values(part, own, count), dim=-1)
        nearest = (part @ centroids.transpose(1, 2)).argmax(-1)
        assert (nearest == own).float().mean() > 0.99, "k-means has settled"
        token, cell = token + length, cell + tiles * plan.width


def test_steps_see_the_tokens_before_them() -> None:
    """Of every step, dense attention and the errors without exact clusters are those of the tokens that it sees."""
    text = drawn()
    (layers,) = errors.errors_of([text], CONFIG).needs
    for step in range(texts_of.STEPS):
        wanted = step_of(text, step=step - texts_of.STEPS)
        torch.testing.assert_close(layers[1].mass_errors[step], wanted.mass_errors().flatten(0, 1))
        assert torch.equal(layers[1].tokens[0.95][step], wanted.needed_tokens(0.95).flatten())


def test_what_settings_cost_and_err() -> None:
    found = errors.errors_of([drawn(), drawn(1)], CONFIG)
    heads = 2 * LAYERS * KV * GROUP
    assert list(found.variants) == list(errors.variants(CONFIG))
    first = found.variants["as set"]
    assert first.error.shape == first.recovered.shape == (heads,)
    assert first.exact.shape == first.read.shape == first.largest.shape == (heads // GROUP,)
    whole = found.variants["all other clusters by their centroids (`tail: centroid`)"]
    assert torch.allclose(whole.exact + whole.approx, torch.ones(1, dtype=torch.float64))
    assert torch.allclose(whole.recovered, torch.ones(1))
    alone = found.variants["no centroids (`p2` as `p1`)"]
    assert float(alone.approx.max()) == 0 and float(alone.exact.mean()) > float(first.exact.mean())
    rounded = found.variants["centroids in float8"]
    assert not torch.equal(rounded.error, first.error)
    for (p1, p2), each in found.thresholds.items():
        assert p2 <= p1
        more = found.thresholds[p1, max(p for _, p in found.thresholds if p <= p1)]
        assert float(more.exact.mean()) >= float(each.exact.mean())
    torch.testing.assert_close(found.thresholds[0.95, 0.7].error, first.error)
    assert [len(text) for text in found.needs] == [LAYERS, LAYERS]
    need = found.needs[0][0]
    assert need.chosen.shape == (texts_of.STEPS, KV * GROUP)
    tokens = [float(need.tokens[p].mean()) for p in errors.P1S]
    clusters = [float(need.clusters[most].double().mean()) for most in errors.WITHIN]
    assert tokens == sorted(tokens) and clusters == sorted(clusters, reverse=True) and clusters[-1] > 0


def test_bytes_of_a_setting() -> None:
    """All keys and values of exact tokens; a key of each cluster; a value of each approximated one."""
    step = step_of(drawn())
    found = errors.SettingCost.by(step, CONFIG)
    exact, approx = double_p.select(step.share, CONFIG)
    own = step.layer
    for head in range(KV):
        tokens = int(exact[head][own.labels[head]].sum())
        read = 2 * tokens + int((own.sizes[head] > 0).sum()) + int(approx[head].sum())
        assert float(found.read[head]) == pytest.approx(read / (2 * own.labels.shape[1]))
    half = errors.SettingCost.by(step, replace(CONFIG, centroids="float8"))
    scanned = (own.sizes > 0).sum(-1) / (2 * own.labels.shape[1])
    assert torch.allclose(found.read - half.read, scanned.double() / 2)


def test_a_window_that_steps_do_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="window=8: expected at least 16"):
        errors.errors_of([drawn()], replace(CONFIG, window=8))


def test_rows_and_plots() -> None:
    found = errors.errors_of([drawn()], CONFIG)
    figures = rows.figures_of(found, CONFIG, "captured keys of a model", LENGTH)
    variants = len(errors.variants(CONFIG))
    assert len(figures) == variants + len(errors.P1S) + len(errors.WITHIN) + 1
    assert figures[0].baseline == "" and all(figure.baseline == "as set" for figure in figures[1:variants])
    assert all("captured keys of a model, 419 tokens" in figure.name and figure.unit == "%" for figure in figures)
    curves = rows.curves_of(found, CONFIG, "captured keys of a model", LENGTH)
    assert len(curves) == 4 and all(1 < len(curve.series) <= 6 for curve in curves)
    needed, ranked, counts, cost = curves
    for points in needed.series.values():
        shares = [y for _, y in points]
        assert shares == sorted(shares) and shares[-1] == 1
    assert list(ranked.series) == ["layer 0", "layer 1", "layer 2"] and ranked.series["layer 0"][0][0] == 1
    assert [len(points) for points in counts.series.values()] == [LAYERS] * 4
    reads = [[x for x, _ in points] for points in cost.series.values()]
    assert all(each == sorted(each) for each in reads), "more is read with a larger p2"


def test_the_command_runs_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "errors.json"
    words = ["--only", "errors", "--device", "cpu", "--texts", "1", "--text-length", "256", "--out", str(out)]
    book = tmp_path / "book.txt"
    book.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    assert cli.main(["bench", "double_p", *words, "--books", str(book)]) == 0
    record = json.loads(out.read_text())
    assert len(record["curves"]) == 4 and "captured keys, books, 256 tokens" in record["figures"][0]["name"]


def test_books_that_are_too_short_are_refused(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("A short one.")
    source = texts_of.TextSource(books=(book,))
    with pytest.raises(ValueError, match="expected at least 511 for a text of 512"):
        texts_of.capture(torch.device("cpu"), 1, 512, source=source)
    tokenizer = AutoTokenizer.from_pretrained(str(texts_of.MODEL))
    whole = list(tokenizer("A short one.", add_special_tokens=False)["input_ids"])
    assert source.ids(tokenizer, 1, len(whole) + 1) == [[tokenizer.bos_token_id, *whole]]
    first, second = source.ids(tokenizer, 2, len(whole))
    assert first[1:] == whole[:-1] and second[1:] == whole[1:]


def test_another_model_s_texts_are_not_taken_for_these(tmp_path: Path) -> None:
    saved = tmp_path / "texts.pt"
    text = {name: value for name, value in vars(drawn()).items()}
    torch.save({"of": "captured keys of another", "digests": ["0"], "texts": [text]}, saved)
    with pytest.raises(ValueError, match=r"of another\), expected 1 of 419 \(captured keys\)"):
        texts_of.capture(torch.device("cpu"), 1, LENGTH, saved)
    torch.save([text], saved)
    with pytest.raises(ValueError, match="another layout"):
        texts_of.capture(torch.device("cpu"), 1, LENGTH, saved)


@pytest.mark.parametrize("part", ["kernels", "engine"])
def test_another_model_is_of_the_parts_with_captured_keys(
    part: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--only", part, "--device", "cpu", "--model", str(tmp_path), "--out", str(tmp_path / "x.json")]
    assert cli.main(["bench", "double_p", *words]) != 0
    assert "expected --only recovered, errors or captured" in capsys.readouterr().err
