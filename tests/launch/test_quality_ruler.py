"""`sglang-ext bench quality --suite ruler`: its tasks, methods and rows, and two methods in real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.launch import cli
from sglang_ext.launch.bench import _quality_engine as engine
from sglang_ext.launch.bench import _quality_ruler as study
from sglang_ext.launch.bench import _ruler_tasks as tasks
from sglang_ext.launch.bench import quality
from sglang_ext.launch.bench._quality_figures import near_dense
from sglang_ext.launch.bench._reference_reader import Writer
from sglang_ext.launch.bench.reference import MODEL
from sglang_ext.systems.registry import ours
from tests.launch.test_quality import Says, arguments
from tests.launch.test_ruler import write_sets

SIZES = (1024, 128, 64, 16384, None)
METHODS = study.ruler_methods(*SIZES)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_sets(tmp_path_factory.mktemp("data"))


def of_tasks(data: str, method: str, **changed: Any) -> dict[str, Any]:
    settings = {"suite": "ruler", "data": data, "model": str(MODEL), "tasks": list(study.KINDS), "passkey": [1500]}
    settings |= {"prompts": {"1500": 2, "9000": 1}, "seed": 0, "context": 8192, "stream": 0, **changed}
    return engine.tasks(Writer(MODEL), settings, METHODS[method])


# ---- tasks ----


def test_prompts_and_answers_fit_the_length_together(data: str) -> None:
    found = of_tasks(data, "dense")
    assert list(found) == [f"{kind.title}, 1500 tokens" for kind in study.KINDS.values()]
    for task in found.values():
        assert len(task.prompts) == len(task.expected) == 2 and 1460 <= task.length + task.new_tokens <= 1500
    other = of_tasks(data, "quest", seed=1, tasks=["words"])["common words, 1500 tokens"]
    assert other.prompts != found["common words, 1500 tokens"].prompts
    assert of_tasks(data, "quest", tasks=["words"])["common words, 1500 tokens"] == found["common words, 1500 tokens"]


def test_labels_are_forced_upon_the_embedded_model_alone(data: str) -> None:
    found = of_tasks(data, "dense")
    assert [name for name, task in found.items() if task.grammar] == ["questions about banking77, 1500 tokens"]
    asked = found["questions about banking77, 1500 tokens"]
    assert asked.said(": red card\n\n") == "red card" and asked.marks(["red card"] * 2)[1] == [
        float(answers == ["red card"]) for answers in asked.expected
    ]
    longest = max(len(Writer(MODEL).encode(f": {label}\n\n")) for label in ("top up late", "new card"))
    assert longest + 4 <= asked.new_tokens and asked.stop == "\n\n"


def test_another_model_has_its_template_and_its_name(data: str, tmp_path: Path) -> None:
    (tmp_path / "Other").symlink_to(MODEL)
    for name, task in of_tasks(data, "dense", model=str(tmp_path / "Other")).items():
        assert name.startswith("Other, ") and not task.grammar and task.stop is None and task.ends
        assert "<|assistant|>" in Writer(MODEL).tokenizer.decode(task.prompts[0])


def test_streams_read_what_dense_attention_cannot(data: str) -> None:
    lengths = {"passkey": [1500, 9000], "tasks": ["single-key"]}
    assert len(of_tasks(data, "dense", **lengths)) == len(of_tasks(data, "double_p", **lengths)) == 1
    for name in ("streaming_llm", "cascade-4", "infllm", "ltri-max"):
        assert list(of_tasks(data, name, **lengths)) == [
            f"single-key needle, {length} tokens" for length in (1500, 9000)
        ]


def test_methods_see_as_much_as_each_other() -> None:
    assert METHODS["dense"].backend == "double_p" and METHODS["dense"].options == {"dense": True}
    assert {"double_p", "quest", "retroinfer", "twilight", "cascade-8", "streaming_llm", "infllm", "ltri-sum"} < {
        *METHODS
    }
    systems = ours()
    seen = [systems[each.backend].options(**each.policy) for each in METHODS.values() if each.backend in engine.STREAMS]
    assert {each.window + getattr(each, "retrieved", 0) * getattr(each, "block", 0) for each in seen} == {1024}
    assert set(study.PLOTTED) <= {*METHODS}


def test_answers_count_by_what_is_found_in_them() -> None:
    task = tasks.FindTask("t, 9 tokens", [[1]] * 2, ["ab, cd", "xy"], 5, ends=True, chance=0.1,
                          expected=[["ab", "cd"], ["xy"]])  # fmt: skip
    found = engine.Asker(says := Says("CD and xy"), METHODS["streaming_llm"]).answers(task, None)
    assert (found["scores"], found["exact"], found["found"], found["accuracy"]) == ([0.5, 1.0], [0, 1], 0.75, 0.5)
    assert found["chance"] == 0.1 and found["wrong"] == [("CD and xy", "ab, cd")] and found["digits"] is None
    assert len(says.own) == 2
    assert "accuracy 0.500, answers found 0.750" in quality.summary(found)


# ---- rows ----


def measured(method: str, scores: list[float], length: int = 4096, chance: float = 0.0) -> dict[str, Any]:
    return {
        "method": method,
        "task": f"multi-key needle, {length} tokens",
        "tokens": length - 20,
        "options": {},
        "scores": scores,
        "exact": [int(score == 1) for score in scores],
        "found": sum(scores) / len(scores),
        "chance": chance,
        "attention": None,
        "target": None,
    }


def right(share: float) -> list[float]:
    return [1.0] * round(100 * share) + [0.0] * round(100 - 100 * share)


def test_near_dense_is_meant_with_its_interval() -> None:
    words = "95% interval at most 1 point below dense"
    assert near_dense(0.0, 0.005, None) == (words, True) and near_dense(0.0, 0.006, None) == (words, False)
    assert near_dense(0.02, 0.01, {"kept": 0.49}) == (words, True) and near_dense(0.02, 0.0, {"kept": 0.5}) == (
        "",
        None,
    )


@pytest.mark.parametrize(
    ("method", "share", "aim", "met"),
    [
        ("double_p", 0.8, "95% interval at most 1 point below dense", True),
        ("double_p", 0.79, "95% interval at most 1 point below dense", False),
        ("quest", 0.79, "", None),
        ("cascade-4", 0.5, "95% interval above StreamingLLM", True),
        ("cascade-4", 0.4, "95% interval above StreamingLLM", False),
        ("cascade-4-unselected", 0.5, "", None),
        ("ltri-max", 0.5, "95% interval above StreamingLLM", True),
        ("ltri-sum", 0.5, "", None),
    ],
)
def test_what_is_aimed_at(method: str, share: float, aim: str, met: bool | None) -> None:
    found = [measured("dense", right(0.8)), measured("streaming_llm", right(0.4)), measured(method, right(share))]
    rows = {row.name.split(", ", 2)[2].split(":")[0]: row for row in study.figures({"window": 1024}, METHODS, found)}
    row = rows[METHODS[method].title]
    assert (row.aim, row.met) == (aim, met) and row.baseline == "dense" and row.unit == "share"
    assert row.notes["difference"] == pytest.approx(share - 0.8)
    assert rows["dense"].baseline == "" and rows["StreamingLLM"].met is None
    short = [{**each, "tokens": 1000} for each in found]
    assert all(not row.aim or "dense" in row.aim for row in study.figures({"window": 1024}, METHODS, short))


@pytest.mark.parametrize(
    ("share", "chance", "why"),
    [
        (0.24, 0.0, "below 0.25"),
        (0.3, 0.25, "not clearly above chance, 0.25"),
        (0.3, 0.1, ""),
        (0.0, 0.0, "below 0.25"),
    ],
)
def test_where_dense_attention_fails_nothing_is_aimed_at(share: float, chance: float, why: str) -> None:
    found = [measured(name, right(share), chance=chance) for name in ("dense", "double_p")]
    rows = study.figures({"window": 1024}, METHODS, found)
    assert all(row.name.endswith(f"; dense fails: {why}") if why else "fails" not in row.name for row in rows)
    assert {row.met for row in rows if row.baseline} == {None if why else True}


def test_rows_have_intervals_and_paired_differences() -> None:
    halves = [0.5] * 20
    dense, ours = measured("dense", [1.0] * 20), measured("double_p", [*halves[:10], *[1.0] * 10])
    row = study.figures({"window": 1024}, METHODS, [dense, ours])[-1]
    assert "answers found; 95% 0.53 to 0.89 of 20 prompts; -25.0 points, standard error 5.7" in row.name
    assert row.timing.median == 0.75 and row.notes["all_found"] == 10 and row.ratio == 0.75
    alone = study.figures({"window": 1024}, METHODS, [measured("ltri-max", halves, 65_536)])
    assert (alone[0].baseline, alone[0].met, alone[0].timing.median) == ("", None, 0.5)


def test_each_task_is_drawn_against_length() -> None:
    found = [measured("dense", [0.5], length) for length in (8192, 4096)] + [measured("quest", [0.5])]
    (curve,) = study.curves(METHODS, found)
    assert curve.title == "Multi-key needle" and curve.series == {"dense": [(4076.0, 0.5), (8172.0, 0.5)]}


# ---- runs ----


def test_a_file_holds_tasks_of_several_runs(tmp_path: Path, data: str) -> None:
    words = ["--suite", "ruler", "--data", data, "--out", tmp_path / "x.json", "--commit", "none", "--prompts", 5]
    first = quality.Study(arguments(*words, "--tasks", "words", "--heads", "all"))
    assert first.settings["passkey"] == [4096, 8192] and first.settings["prompts"] == {"4096": 5, "8192": 5}
    first.save()
    quality.Study(arguments(*words, "--tasks", "single-key", "--heads", "all")).save()
    record = json.loads((tmp_path / "x.json").read_text())
    assert record["settings"]["tasks"] == ["words", "single-key"] and record["settings"]["heads"] == "all"
    with pytest.raises(ValueError, match=r"heads=all; expected heads=None: measure --anew"):
        quality.Study(arguments(*words))
    with pytest.raises(ValueError, match="--suite ruler needs --data"):
        quality.main(arguments("--suite", "ruler"))


@pytest.mark.usefixtures("forked_engines")
def test_needles_in_engines(tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Dense attention and Double-P find a named passkey among texts; the row says what was read for it."""
    out = tmp_path / "quality.json"
    words = ["bench", "quality", "--suite", "ruler", "--data", data, "--methods", "dense", "double_p", "--tasks"]
    words += ["multi-key", "--passkey", "1200", "--prompts", "4", "--out", str(out), "--commit", "none"]
    assert cli.main(words) == 0
    record = json.loads(out.read_text())
    assert [each["found"] for each in record["measurements"]] == [1.0, 1.0]
    dense, double_p = record["figures"]
    assert "kept" not in dense["name"] and "; kept 0." in double_p["name"] and double_p["met"] is True
    assert "multi-key needle, 1200 tokens, accuracy 1.000, answers found 1.000" in capsys.readouterr().out
