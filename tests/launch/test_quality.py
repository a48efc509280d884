"""The quality studies: their tasks, budgets and rows, and one method in a real engine."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.launch.bench import _quality_engine as engine
from sglang_ext.launch.bench import _quality_figures as rows
from sglang_ext.launch.bench import _quality_ltri as ltri
from sglang_ext.launch.bench import _quality_tasks as tasks
from sglang_ext.launch.bench import quality
from sglang_ext.launch.bench._reference_reader import Writer
from sglang_ext.launch.bench.reference import MODEL, word_ids
from sglang_ext.systems.registry import ours
from tests.launch.test_quality_figures import measured

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


def test_passkeys_stand_among_words(writer: Writer) -> None:
    words = word_ids(writer)
    assert len(words) > 100 and all(writer.tokenizer.decode([token])[0] == " " for token in words)
    task = tasks.passkeys(writer, 400, 2, filler="words")
    assert task.name == "passkey among words, 400 tokens"
    assert {len(prompt) + task.new_tokens for prompt in task.prompts} == {400}
    for prompt, key, tenth in zip(task.prompts, task.answers, task.cells, strict=True):
        text = writer.tokenizer.decode(prompt)
        assert text.endswith("The pass key is") and text.count(key) == 2 and "grass is green" not in text
        assert abs(text.index(key) / len(text) - (tenth + 0.5) / 10) < 0.13
        assert len(set(prompt) & set(words)) > 100, "drawn at random"
    assert task.prompts == tasks.passkeys(writer, 400, 2, filler="words").prompts


def hidden(writer: Writer, data: str, kind: str, prompts: int = 12, seed: int = 0) -> tasks.QualityTask:
    task = tasks.hidden_keys(writer, data, kind, 2000, prompts, 64, seed)
    assert len(task.prompts) == prompts and {len(prompt) + task.new_tokens for prompt in task.prompts} == {2000}
    return task


@pytest.mark.parametrize("kind", tasks.HIDDEN)
def test_the_place_of_hidden_evidence_is_known(writer: Writer, data: str, kind: str) -> None:
    task = hidden(writer, data, kind)
    for prompt, key, place, tenth in zip(task.prompts, task.answers, task.places, task.cells, strict=True):
        text, needle = writer.tokenizer.decode(prompt), writer.tokenizer.decode(prompt[slice(*place)])
        owner = text.rpartition(" is")[0].rpartition("The pass key")[2]
        assert needle.strip() == f"The pass key{owner} is {key}. Remember it. {key} is the pass key{owner}."
        assert text.endswith(f"\n\nWhat is the pass key{owner}? The pass key{owner} is")
        assert tenth == 10 * place[0] // len(prompt)
    assert len(set(task.cells)) > 4, "depths are drawn"


def test_hidden_prompts_depend_on_seed_and_number_alone(writer: Writer, data: str) -> None:
    task = hidden(writer, data, "named", prompts=3)
    assert task.prompts == hidden(writer, data, "named").prompts[:3]
    assert not {*map(tuple, task.prompts)} & {*map(tuple, hidden(writer, data, "named", seed=1).prompts)}


def test_one_of_16_names_is_asked_for(writer: Writer, data: str) -> None:
    task = hidden(writer, data, "named")
    for prompt, key in zip(task.prompts, task.answers, strict=True):
        text = writer.tokenizer.decode(prompt)
        owners = re.findall(r" The pass key of (\w+) is \d{5}\. Remember", text)
        assert len(set(owners)) == 16
        assert text.count(f" is {key}.") == 1 and text.count(f" of {text.split()[-2]}") == 4


def test_texts_stand_around_a_hidden_key_whole(writer: Writer, data: str) -> None:
    for prompt, (begin, end) in zip(
        *(lambda task: (task.prompts, task.places))(hidden(writer, data, "texts")), strict=True
    ):
        before, behind = writer.tokenizer.decode(prompt[1:begin]), writer.tokenizer.decode(prompt[end:-20])
        assert before == "" or before.endswith("?\n")
        assert behind == "" or behind.startswith("where is train card ")


@pytest.mark.parametrize("size", [tasks.BLOCK, 128])
@pytest.mark.parametrize(("kind", "blocks"), [("block", 1), ("split", 2)])
def test_evidence_lies_in_as_many_blocks_as_asked(writer: Writer, data: str, kind: str, blocks: int, size: int) -> None:
    for begin, end in tasks.hidden_keys(writer, data, kind, 2000, 12, 64, 0, size).places:
        touched = {(token - 64) // size for token in range(begin, end)}
        assert len(touched) == blocks and min(touched) >= 0
        assert tasks.blocks_of((begin, end), 64, size) == sorted(touched)


@pytest.mark.parametrize(
    ("place", "blocks"), [((10, 30), []), ((60, 70), [0]), ((64, 96), [0]), ((90, 97), [0, 1]), ((200, 210), [4])]
)
def test_blocks_begin_behind_the_sinks(place: tuple[int, int], blocks: list[int]) -> None:
    assert tasks.blocks_of(place, 64, 32) == blocks


def test_rows_too_short_for_their_keys_are_refused(writer: Writer, data: str) -> None:
    with pytest.raises(ValueError, match=r"16 named passkeys, 300 tokens: expected at least \d+ tokens"):
        tasks.hidden_keys(writer, data, "named", 300, 1, 64, 0)
    with pytest.raises(ValueError, match=r"over two blocks, 90 tokens: no place where 23 tokens lie over 2 blocks"):
        tasks.hidden_keys(writer, data, "split", 90, 1, 64, 0)


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


# ---- requests, and methods ----


class Says:
    """An engine that says one text."""

    def __init__(self, text: str) -> None:
        self.text, self.own = text, list[dict[str, Any] | None]()

    def generate(self, input_ids: list[list[int]], sampling_params: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.own += [each["custom_params"] for each in sampling_params]
        report = [{"blocks": [[0, 1], [7, 2]]}, None]
        return [{"text": self.text, "meta_info": {"attention_report": report}} for _ in input_ids]


def test_each_request_names_the_blocks_with_its_evidence() -> None:
    task = tasks.QualityTask("passkey", [[1], [2]], ["12345"] * 2, 5, cells=[0, 1], places=[(90, 100), (300, 310)])
    larger = ltri.ltri_methods(1024, 512, 64, 16384, block=128)
    engine.Asker(told := Says(" 12345"), larger["given"]).answers(task, None)
    assert told.own == [{"blocks": [0]}, {"blocks": [1]}]
    methods = ltri.ltri_methods(1024, 512, 64, 16384)
    found = engine.Asker(told := Says(" 12345"), methods["given"]).answers(task, None)
    assert told.own == [{"blocks": [0, 1]}, {"blocks": [7]}]
    assert found["exact"] == [1, 1] and found["places"] == task.places
    assert found["recall"] is None
    found = engine.Asker(others := Says(""), methods["random"]).answers(task, None)
    assert others.own == [{"attention_report": True}] * 2
    assert found["recall"] == {"layers": [], "answers": 0}, "prompts of one token"


def test_a_model_of_ones_own_names_the_heads_that_vote() -> None:
    methods = ltri.ltri_methods(1024, 512, 64, 16384, "mine.json")
    heads = {name: each.policy.get("heads") for name, each in methods.items()}
    assert (heads["ltri-max"], heads["given"], heads["random"]) == ("mine.json",) * 3
    assert heads["ltri-max-all-heads"] == "all", "a method's own choice stays"
    without = ltri.ltri_methods(1024, 512, 64, 16384, "all")
    assert set(methods) - set(without) == {"ltri-max-four-bits"}, "for which one head must vote"
    assert heads["infllm"] is None and heads["streaming_llm"] is None, "these have no such setting, or one of their own"


def test_ltri_is_compared_with_what_sees_as_many_tokens() -> None:
    methods = ltri.ltri_methods(1024, 512, 64, 16384)
    systems = ours()
    seen = {name: systems[method.backend].options(**method.policy) for name, method in methods.items() if method.policy}
    wide = seen.pop("streaming_llm")
    assert {each.window + each.retrieved * each.block for each in seen.values()} == {wide.window}
    assert {methods[name].slots for name in seen} == {each.slots for each in seen.values()}
    assert (seen["infllm"].index, seen["infllm"].vote, seen["infllm"].heads) == ("infllm", "off", "all")
    assert len({json.dumps(vars(each)) for each in seen.values()}) == len(seen), "all differ"
    plotted = {name for names in ltri.PLOTS.values() for name in names}
    assert plotted <= set(methods) and max(map(len, ltri.PLOTS.values())) <= 6


def test_only_streams_of_clamped_distances_are_longer_than_the_context(writer: Writer, data: str) -> None:
    settings = {"suite": "ltri", "data": data, "passkey": [2000, 3000], "prompts": {"2000": 1, "3000": 2}, "stream": 0}
    settings |= {"sinks": 64, "seed": 0, "context": 2500, "hidden": ["block"]}
    methods = ltri.ltri_methods(1024, 512, 64, 2500)
    for name, lengths in (("dense", [2000]), ("ltri-max-true-distances", [2000]), ("infllm", [2000, 3000])):
        found = engine.tasks(writer, settings, methods[name])
        assert list(found) == [f"passkey within one block, {length} tokens" for length in lengths]
        assert [len(task.prompts) for task in found.values()] == [1, 2][: len(lengths)]


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


def test_a_length_has_one_number_of_prompts(tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "x.json"

    def study(*words: Any) -> quality.Study:
        words = ("--suite", "ltri", "--data", data, "--out", out, "--commit", "none", *words)
        monkeypatch.setattr("sys.argv", ["sglang-ext", *map(str, words)])
        return quality.Study(arguments(*words))

    study("--passkey", 4096, 8192, "--prompts", 20, 10, "--hidden", "plain").save()
    study("--passkey", 8192, 16384, "--prompts", 10, "--hidden", "named").save()
    settings = json.loads(out.read_text())["settings"]
    assert settings["prompts"] == {"4096": 20, "8192": 10, "16384": 10}
    assert settings["hidden"] == ["plain", "named"] and settings["passkey"] == [4096, 8192, 16384]
    with pytest.raises(ValueError, match=r"20 prompts of 4096 tokens; expected --prompts 20 and not 30: .*--anew"):
        study("--passkey", 4096, "--prompts", 30)
    with pytest.raises(ValueError, match=r"--prompts 1 2 of 3 lengths: expected one number from 1 on, or 3"):
        study("--passkey", 4096, 8192, 512, "--prompts", 1, 2)
    with pytest.raises(ValueError, match=r"--prompts 0 of 1 lengths"):
        study("--passkey", 4096, "--prompts", 0)


def test_host_memory_is_for_streams_that_use_it(tmp_path: Path, data: str) -> None:
    words = ["--suite", "ltri", "--data", data, "--out", tmp_path / "x.json"]
    study = quality.Study(arguments(*words, "--host-gb", 2.5))
    policies = {name: study._job(name, {})["method"]["policy"] for name in study.methods}
    assert {name for name, policy in policies.items() if policy.get("host_gb") == 2.5} == {
        name for name in study.methods if name not in ("dense", "streaming_llm")
    }
    study = quality.Study(arguments(*words))
    assert "host_gb" not in study._job("ltri-max", {})["method"]["policy"]


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


@pytest.mark.usefixtures("forked_engines")
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
