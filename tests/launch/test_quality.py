"""The quality studies: their tasks, budgets and rows, and one method in a real engine."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.launch.bench import _quality_engine as engine
from sglang_ext.launch.bench import _quality_figures as rows
from sglang_ext.launch.bench import _quality_tasks as tasks
from sglang_ext.launch.bench import quality
from sglang_ext.launch.bench._reference_reader import Writer
from sglang_ext.launch.bench.reference import MODEL
from sglang_ext.systems.registry import ours

LABELS = ("card_arrival", "top_up")


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer(MODEL)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    (folder / "banking77").mkdir()
    for split in ("train", "test"):
        lines = [{"text": f"Where is {split} card {i}?", "label": LABELS[i % 2]} for i in range(20)]
        (folder / "banking77" / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def arguments(*words: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    quality.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


# ---- tasks ----


def accepts(grammar: str, text: str) -> bool:
    """Whether an EBNF grammar accepts the whole of a text."""
    from xgrammar.testing import _is_grammar_accept_string

    return bool(_is_grammar_accept_string(grammar, text))


def test_all_that_decides_between_labels_is_generated(writer: Writer, data: str) -> None:
    task = tasks.classification(writer, data, 3, 5, seed=0, context=16384)
    assert task.name == "banking77, 3 a class" and len(task.prompts) == len(task.answers) == 5
    texts = [writer.tokenizer.decode(prompt) for prompt in task.prompts]
    assert all(text.endswith("?\nLabel") and text == text.lower().replace("\nlabel", "\nLabel") for text in texts)
    assert all(text.count("\nLabel: ") == 6 for text in texts)  # two classes of three
    assert len({tuple(prompt[: task.shared]) for prompt in task.prompts}) == 1
    assert task.prompts[0][task.shared :] != task.prompts[1][task.shared :]
    for label in LABELS:
        assert accepts(task.grammar or "", f": {label}\n\n") and not accepts(task.grammar or "", f": {label}s\n\n")
        spelled = writer.encode(f": {label}\n\n")
        assert writer.tokenizer.decode(spelled[:1]) == ":" and len(spelled) <= task.new_tokens
        assert task.said(f": {label}\n\n") == label
    # Nothing else begins with a colon: the grammar leaves no choice about the token that the prompt's pass gives.
    assert [token for token in writer.tokenizer.get_vocab() if token.startswith(":")] == [":"]


def test_demonstrations_fill_the_context_and_no_more(writer: Writer, data: str) -> None:
    task = tasks.classification(writer, data, 0, 5, seed=0, context=200)
    shots = int(task.name.split()[1])
    assert task.length + task.new_tokens <= 200
    with pytest.raises(ValueError, match=rf"{shots + 1} demonstrations a class: \d+ tokens, expected at most \d+"):
        tasks.classification(writer, data, shots + 1, 5, seed=0, context=200)


def test_passkeys_stand_at_their_depth(writer: Writer) -> None:
    task = tasks.passkeys(writer, 400, 2, skip=1)
    assert task.cells == sorted([*range(10), *range(10)])
    assert {len(prompt) + task.new_tokens for prompt in task.prompts} == {400}
    for prompt, key, wanted, tenth in zip(task.prompts, task.answers, task.wanted, task.cells, strict=True):
        text = writer.tokenizer.decode(prompt)
        assert text.endswith("The pass key is") and wanted == key[1:] and text.count(key) == 2
        assert abs(text.index(key) / len(text) - (tenth + 0.5) / 10) < 0.13
        assert task.said(f" {key}") == wanted
    assert len(set(task.answers)) == 20
    assert task.prompts == tasks.passkeys(writer, 400, 2).prompts != tasks.passkeys(writer, 400, 2, seed=1).prompts


@pytest.mark.parametrize(("said", "share"), [("12345", 1.0), ("12945", 0.8), ("", 0.0), ("2345", 0.0), ("1", 0.2)])
def test_digits_count_at_their_place(said: str, share: float) -> None:
    assert tasks.digits_right(said, "12345") == pytest.approx(share)


def test_a_stream_says_which_tokens_are_labels(writer: Writer, data: str) -> None:
    text = tasks.stream(writer, data, 900, seed=0)
    assert len(text.tokens) == len(text.labels) == 900  # more than the 20 texts have
    chosen = [token for token, is_label in zip(text.tokens, text.labels, strict=True) if is_label]
    words = writer.tokenizer.decode(chosen[: -len(writer.encode(" card_arrival"))]).split()
    assert set(words) <= set(LABELS) and len(words) > 20


@pytest.mark.parametrize("size", [7, 100, 1000])
def test_chunks_hold_every_token_once(size: int) -> None:
    text = tasks.StreamTask(list(range(100)), [False] * 100)
    chunks = text.chunks(size)
    assert all(chunk[0] == 0 and len(chunk) <= size for chunk in chunks)
    assert [token for chunk in chunks for token in chunk[1:]] == list(range(1, 100))


def test_perplexities() -> None:
    assert tasks.perplexity([-math.log(4)] * 3) == pytest.approx(4)
    values = [-math.log(n) for n in (2, 2, 8, 8, 5)]
    assert tasks.by_bins(values, [True] * 5, 2) == pytest.approx([2, 8, 5])
    assert tasks.by_bins(values, [True, False, False, False, True], 2) == pytest.approx([2, 5])
    with pytest.raises(ValueError, match="at least one"):
        tasks.perplexity([])


# ---- budgets ----


@pytest.mark.parametrize(
    "figure",
    [lambda x: x, lambda x: 0.05 + 0.8 * x, lambda x: min(x, 0.9) ** 0.5, lambda x: round(x * 40) / 40],
    ids=["equal", "affine", "concave", "steps"],
)
@pytest.mark.parametrize("target", [0.1, 0.3, 0.6])
def test_an_option_meets_its_target(figure: Callable[[float], float], target: float) -> None:
    asked: list[float] = []

    def measured(value: float) -> float:
        asked.append(value)
        return figure(value)

    value, got = engine.match(measured, target)
    assert got == figure(value) and abs(got / target - 1) < 0.04 and len(asked) <= engine.ROUNDS


def test_a_target_out_of_reach_gives_the_most() -> None:
    assert engine.match(lambda x: 0.5 * x, 0.8) == (1.0, 0.5)
    assert engine.match(lambda x: 0.5 * x, 0.8, most=0.7) == (0.7, pytest.approx(0.35))
    with pytest.raises(ValueError, match="above 0"):
        engine.match(lambda x: x, 0.0)


class Reads:
    """An engine whose answers read what their options say."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def generate(self, input_ids: list[list[int]], sampling_params: list[dict[str, Any]]) -> list[dict[str, Any]]:
        own = sampling_params[0]["custom_params"]
        self.asked.append(own)
        exact, kept = 0.05 + own["exact"], min(1.0, 0.05 + own["exact"] + 0.8 * own["approx"])
        step = {"exact": [exact], "kept": [kept], "recovered": [kept], "recovered_least": [0.5]}
        return [{"text": "", "meta_info": {engine.REPORT: [None, step]}} for _ in input_ids]


def test_two_budgets_are_set_one_after_the_other() -> None:
    task = tasks.QualityTask("t", [[1]] * 20, ["x"] * 20, new_tokens=2)
    method = engine.double_p_methods()["retroinfer"]
    found = engine.Asker(reads := Reads(), method).budgets(task, {"exact": 0.25, "kept": 0.45})
    assert found["exact"] == pytest.approx(0.2, rel=0.05) and found["approx"] == pytest.approx(0.25, rel=0.12)
    assert all(own[engine.REPORT] for own in reads.asked)
    assert engine.Asker(Reads(), method).budgets(task, {"exact": 0.25, "kept": 0.2})["approx"] == 0.0


class TopP(Reads):
    """An engine that reads little for p = 0.95, however large the budget."""

    def generate(self, input_ids: list[list[int]], sampling_params: list[dict[str, Any]]) -> list[dict[str, Any]]:
        own = sampling_params[0]["custom_params"]
        self.asked.append(own)
        kept = min(own["budget"], 0.2 - 0.1 * math.log10((1 - own["p"]) / 0.05))
        step = {"exact": [kept], "kept": [kept], "recovered": [kept], "recovered_least": [0.5]}
        return [{"text": "", "meta_info": {engine.REPORT: [None, step]}} for _ in input_ids]


def test_p_is_raised_only_where_no_budget_suffices() -> None:
    task, method = tasks.QualityTask("t", [[1]] * 20, ["x"] * 20, new_tokens=2), engine.double_p_methods()["twilight"]
    found = engine.Asker(TopP(), method).budgets(task, {"kept": 0.15})
    assert found == {"budget": pytest.approx(0.15, rel=0.03)}
    found = engine.Asker(TopP(), method).budgets(task, {"kept": 0.5})
    assert found["budget"] == 1.0 and found["p"] == pytest.approx(1 - 0.05e-3, abs=0.05e-3)


def test_what_was_read_is_averaged_over_steps_and_layers() -> None:
    def step(kept: float, least: float) -> dict[str, list[float]]:
        return {"exact": [0.1, 0.3], "kept": [kept, 0.5], "recovered": [0.8, 1.0], "recovered_least": [least, 0.9]}

    found = engine.attention([[None, step(0.2, 0.3), step(0.4, 0.6)], [None, {}, step(0.6, 0.7)]])
    assert found["exact"] == pytest.approx(0.2) and found["kept"] == pytest.approx(0.45)
    assert found["kept_by_layer"] == pytest.approx([0.4, 0.5])
    assert (found["recovered_least"], found["steps"], found["dense_steps"]) == (0.3, 3, 1)
    assert engine.attention([[None, {}]])["kept"] == 1.0


# ---- rows ----


def measured(method: str, scores: list[float], **more: Any) -> dict[str, Any]:
    return {
        "method": method,
        "task": "passkey, 2048 tokens",
        "tokens": 2043,
        "options": {},
        "accuracy": sum(score == 1 for score in scores) / len(scores),
        "digits": sum(scores) / len(scores),
        "scores": scores,
        "attention": None,
        "target": None,
        **more,
    }


@pytest.mark.parametrize(("wrong", "met"), [(0, True), (1, True), (2, False)])
def test_double_p_is_held_to_one_point(wrong: int, met: bool) -> None:
    read = {"kept": 0.4, "exact": 0.1, "recovered": 0.97, "approximated_clusters": 0.2}
    found = [
        measured("dense", [1.0] * 100),
        measured("double_p", [0.0] * wrong + [1.0] * (100 - wrong), attention=read),
        measured("quest", [0.0] * 50 + [1.0] * 50, attention=read),
    ]
    ours, quest = rows.figures({"suite": "double_p"}, engine.double_p_methods(), found)
    assert ours.met is met and ours.timing.median == pytest.approx(1 - wrong / 100) and ours.unit == "share"
    assert ours.baseline == "dense" and "kept 0.400, exact 0.100, recovered 0.970" in ours.name
    assert quest.met is None and quest.ratio == pytest.approx(0.5)
    assert quest.notes["difference"] == pytest.approx(-0.5)
    assert quest.notes["difference_error"] == pytest.approx(0.0503, abs=1e-3)
    assert quest.name.endswith("; -50.0 points, standard error 5.0")


def test_ltri_is_compared_with_what_sees_as_many_tokens() -> None:
    methods = engine.ltri_methods(1024, 512, 64, 16384)
    systems = ours()
    seen = {name: systems[method.backend].options(**method.policy) for name, method in methods.items() if method.policy}
    wide = seen.pop("streaming_llm")
    assert {each.window + each.retrieved * each.block for each in seen.values()} == {wide.window}
    assert {methods[name].slots for name in seen} == {each.slots for each in seen.values()}
    assert (seen["infllm"].index, seen["infllm"].vote, seen["infllm"].heads) == ("infllm", "off", "all")
    assert len({json.dumps(vars(each)) for each in seen.values()}) == len(seen), "all differ"
    (row,) = rows.figures(
        {"suite": "ltri", "window": 1024}, methods, [measured("infllm", [0.0, 1.0]), measured("ltri-max", [1.0, 1.0])]
    )
    assert row.baseline == "InfLLM" and row.ratio == 2.0


def test_cascades_are_held_to_streaming_llm_past_the_window() -> None:
    settings = {"suite": "cascade", "window": 1024}
    methods = engine.cascade_methods(1024, 512, 64, 16384)
    # What dense attention reads of a stream at once leaves room for the token of the answer.
    text = tasks.StreamTask(list(range(40_000)), [False] * 40_000)
    assert max(map(len, text.chunks(methods["dense"].reads))) == 16384 - engine.ANSWERED
    found = [
        measured("streaming_llm", [0.0, 1.0]),
        measured("cascade-4", [0.2, 1.0]),
        measured("cascade-8", [0.0, 1.0]),
        measured("cascade-4-unselected", [0.4, 1.0]),
    ]
    met = {row.name.split(": ")[0].split(", ", 2)[2]: row.met for row in rows.figures(settings, methods, found)}
    assert met == {"4 cascades": True, "8 cascades": False, "4 cascades, no selection": None}
    within = [{**each, "task": "passkey, 1024 tokens", "tokens": 1019} for each in found]
    assert {row.met for row in rows.figures(settings, methods, within)} == {None}

    bins = {"all": [3.0, 5.0], "labels": [2.0, 2.0]}
    stream = {"task": "stream, 9 tokens", "tokens": 9, "bin": 4, "bins": bins}
    found = [
        {"method": "streaming_llm", **stream, "perplexity": {"all": 4.0, "labels": 2.0}},
        {"method": "cascade-2", **stream, "perplexity": {"all": 5.0, "labels": 1.0}},
    ]
    all_tokens, labels = rows.figures(settings, methods, found)
    assert (all_tokens.met, labels.met, labels.ratio, labels.unit) == (False, True, 2.0, "perplexity")
    curves = {curve.y: curve for curve in rows.curves(settings, methods, found)}
    assert curves["perplexity of all tokens"].series["2 cascades"] == [(4.0, 3.0), (8.0, 5.0)]


def test_right_answers_are_drawn_against_length() -> None:
    methods = engine.double_p_methods()
    found = [
        measured("dense", [1.0], task="passkey, 4096 tokens", tokens=4091),
        measured("dense", [0.5]),
        measured("double_p", [0.25], attention={"kept": 0.4}),
    ]
    digits, kept = rows.curves({"suite": "double_p"}, methods, found)
    assert digits.doubling and digits.series["dense"] == [(2043.0, 0.5), (4091.0, 1.0)]
    assert kept.series == {methods["double_p"].title: [(2043.0, 0.4)]}


# ---- runs ----


def test_what_cannot_be_run_is_refused(tmp_path: Path, data: str) -> None:
    words = ["--suite", "double_p", "--data", data, "--out", tmp_path / "x.json"]
    with pytest.raises(ValueError, match=r"--methods cascade-4: expected some of dense, double_p"):
        quality.Study(arguments(*words, "--methods", "cascade-4"))
    with pytest.raises(ValueError, match=r"quest: they read as much as Double-P does, .* add double_p"):
        quality.Study(arguments(*words, "--methods", "quest")).run()
    with pytest.raises(ValueError, match=r"--kernels triton --methods double_p: .* expected --kernels torch"):
        quality.Study(arguments(*words, "--methods", "dense", "double_p", "--kernels", "triton"))
    (tmp_path / "x.json").write_text(json.dumps({"settings": {"suite": "double_p"}, "measurements": []}))
    with pytest.raises(ValueError, match=r"queries=None.*expected queries=7, .*--anew"):
        quality.Study(arguments(*words, "--queries", 7))
    assert quality.Study(arguments(*words, "--anew")).measured == []


def test_a_file_of_several_runs_names_them_all(tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "x.json"
    for words in (["--shots", 3], ["--shots", "--passkey", 2048], ["--shots", 3]):
        words = ["--suite", "double_p", "--data", data, "--passkey", *words, "--out", out, "--commit", "none"]
        monkeypatch.setattr("sys.argv", ["sglang-ext", *map(str, words)])
        study = quality.Study(arguments(*words))
        study.save()
    record = json.loads(out.read_text())
    first, second = record["command"].split(" && ")
    assert first.endswith("--passkey --shots 3") and second.endswith("--shots --passkey 2048")
    assert (record["settings"]["shots"], record["settings"]["passkey"]) == ([3], [2048])


@pytest.mark.parametrize("gpu", [False, True])
def test_kernels_answer_beside_the_measured_steps_on_a_gpu(
    tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    monkeypatch.setattr(quality.torch.cuda, "is_available", lambda: gpu)
    study = quality.Study(arguments("--suite", "double_p", "--data", data, "--out", tmp_path / "x.json"))
    assert ("double_p-kernels" in study.chosen) is gpu and "double_p" in study.chosen
    method = study.methods["double_p-kernels"]
    assert not method.reports and study.methods["double_p"].reports
    assert (study._kernels("double_p-kernels"), study._kernels("double_p")) == ("triton", "torch")
    found = [measured("dense", [1.0]), measured("double_p-kernels", [1.0])]
    (row,) = rows.figures(study.settings, study.methods, found)
    assert row.met is True and "(0.95, 0.7), in kernels: " in row.name


def test_half_a_line_waits_for_the_other_half(tmp_path: Path) -> None:
    process = quality.StudyEngine.__new__(quality.StudyEngine)
    process.out, process._read = tmp_path / "lines", 0
    assert process.lines() == []
    process.out.write_bytes(b'{"a": 1}\n{"b"')
    assert process.lines() == [{"a": 1}]
    with process.out.open("ab") as file:
        file.write(b": 2}\n")
    assert process.lines() == [{"b": 2}]


@pytest.mark.timeout(300)
def test_a_method_in_an_engine(tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passkeys of 1,200 tokens are read through clusters; the second run finds them measured."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    out = tmp_path / "quality.json"
    words = ["--suite", "double_p", "--data", data, "--methods", "double_p", "--trials", 1, "--passkey", 1200]
    words += ["--shots", "--context", 1200, "--out", out, "--commit", "none"]  # no token to spare
    assert quality.main(arguments(*words)) == 0
    record = json.loads(out.read_text())
    (found,) = record["measurements"]
    assert found["method"] == "double_p" and len(found["scores"]) == 10 and found["digits"] >= 0.9
    read = found["attention"]
    assert read["dense_steps"] == 0 and read["steps"] == 40  # five digits, the first from the prompt's pass
    assert 0.05 < read["exact"] < read["kept"] < 0.95 and 0.9 < read["recovered"] <= 1
    assert record["figures"][0]["unit"] == "share" and record["curves"]

    assert quality.main(arguments(*words)) == 0
    assert json.loads(out.read_text())["measurements"] == record["measurements"]
