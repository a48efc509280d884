"""`sglang-ext bench quality --suite dbsa`: draws, what is measured when, and the rows."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from transformers import AutoTokenizer

from sglang_ext.launch.bench import _dbsa_methods as methods
from sglang_ext.launch.bench import _quality_dbsa as study
from sglang_ext.launch.bench import quality
from sglang_ext.launch.bench.reference import MODEL
from sglang_ext.launch.demo_methods import MethodRow

OF = {"model": study.EMBEDDED, "concurrency": 8}
CLASSES = [f"class_{letter}" for letter in "abcdefghi"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name in ("banking77", "nlu"):
        (folder / name).mkdir()
        for split in ("train", "test"):
            rows = [{"text": f"{split} text {at} of {name}", "label": CLASSES[at % len(CLASSES)]} for at in range(180)]
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def arguments(data: Path, *words: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    quality.add_arguments(parser)
    given = ["--suite", "dbsa", "--data", data, "--commit", "none", "--queries", 10, *words]
    return parser.parse_args([str(word) for word in given])


# ---- draws ----


def test_a_draw_is_of_its_numbers_alone(data: Path) -> None:
    tokenizer, args = AutoTokenizer.from_pretrained(MODEL), arguments(data, "--labels", 4, "--model", "another")
    first, again, other = (study.draw("banking77", 300, number, args, tokenizer) for number in (0, 0, 1))
    assert first == again and first.demonstrations != other.demonstrations
    counts = Counter(each["output"] for each in first.demonstrations)
    assert len(counts) == 4 and max(counts.values()) - min(counts.values()) <= 1
    assert all(label.startswith("class ") for label in counts)
    assert all(each["input"].startswith("train") for each in first.demonstrations)
    assert len(first.queries) == 10 and {each["output"] for each in first.queries} <= set(counts)
    assert all(each["input"].startswith("test") for each in first.queries)
    longer = study.draw("banking77", 600, 0, args, tokenizer)
    assert len(longer.demonstrations) > 1.5 * len(first.demonstrations)
    every = study.draw("nlu", 600, 0, arguments(data, "--labels", 0, "--model", "another"), tokenizer)
    assert len(every.labels) == len(CLASSES)


def test_the_embedded_model_is_asked_for_classes_that_it_did_not_see(data: Path) -> None:
    tokenizer, args = AutoTokenizer.from_pretrained(MODEL), arguments(data, "--labels", 3)
    assert set(study.draw("nlu", 600, 0, args, tokenizer).labels) == {"class c", "class f", "class i"}
    with pytest.raises(ValueError, match="--labels 4: nlu has 3 classes"):
        study.draw("nlu", 600, 0, arguments(data, "--labels", 4), tokenizer)
    assert len(study.draw("banking77", 600, 0, arguments(data, "--labels", 9), tokenizer).labels) == 9  # held out whole


# ---- measuring ----


class Pool:
    """Stands for `Bench`, and says what it was made of."""

    shares: ClassVar[list[float]] = []
    """What each of them reads."""

    def __init__(self, server: Any, task: Any, tokenizer: Any, ratio: float, concurrency: int, **pool: Any) -> None:
        self.task, self.pool = task, pool
        self.shares.append(ratio)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The names of the methods that are asked, with the options of their pools, on no server."""
    found: list[tuple[str, dict[str, Any]]] = []

    @contextmanager
    def served(*_: Any) -> Iterator[None]:
        yield None

    def asking(name: str) -> Any:
        def ask(bench: Any) -> MethodRow:
            found.append((name, bench.pool))
            count = len(bench.task.queries)
            return MethodRow(name, count // 2, count, 2.0, 30.0, 20.0, 0.5, ["a"] * count, [[]] * count)

        return ask

    asked_of = {name: replace(each, ask=asking(name)) for name, each in methods.METHODS.items()}
    monkeypatch.setattr(study, "METHODS", asked_of)
    monkeypatch.setattr(study, "Bench", Pool)
    monkeypatch.setattr(study, "served", served)
    monkeypatch.setenv(study.KERNELS_ENV, "")
    monkeypatch.setattr(study.signal, "signal", lambda *_: None)
    return found


def test_each_method_of_each_draw_is_measured_once(
    data: Path,
    tmp_path: Path,
    asked: list[Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "q.json"
    words = ["--sets", "banking77", "--pool-tokens", 300, "--labels", 4, "--out", out]
    assert quality.main(arguments(data, *words, "--draws", 1)) == 0
    assert [name for name, _ in asked] == list(methods.MAIN)
    assert all(pool == {"block_size": 10} for _, pool in asked[:-1])
    assert asked[-1][1] == {"block_size": 1, "sink_blocks": 20, "previous_blocks": 100}
    assert "banking77, 300 tokens, draw 0, DBSA 30%: 0.500" in capsys.readouterr().out
    asked.clear()
    quality.main(arguments(data, *words, "--draws", 2, "--methods", "fixed", "dbsa-30"))
    assert [name for name, _ in asked] == ["fixed", "dbsa-30"]  # of the second draw alone
    asked.clear()
    monkeypatch.setattr(study, "served", None)  # nothing is missing: no server is started
    quality.main(arguments(data, *words, "--draws", 2, "--methods", "fixed", "dbsa-30"))
    assert not asked
    record = json.loads(out.read_text())
    assert record["settings"]["model"] == "the embedded one" and "data" not in record["settings"]
    assert len(record["measurements"]) == 10 and record["commit"] == "none"
    assert record["measurements"][0]["seconds"] == 0.2 and len(record["curves"]) == 2
    with pytest.raises(ValueError, match=r"labels=4; expected labels=5: measure --anew"):
        study.DrawStudy(arguments(data, *words, "--labels", 5))
    with pytest.raises(
        ValueError,
        match="magic: expected some of main, labels, ablations, blocks, examples, scores, tenth, retrievers, beyond,",
    ):
        study.DrawStudy(arguments(data, *words, "--methods", "magic"))


# ---- rows ----


def measurement(method: str, number: int, accuracy: float, **more: Any) -> dict[str, Any]:
    of_draw = {"set": "nlu", "size": 300, "draw": number, "method": method, "accuracy": accuracy}
    return {**of_draw, "queries": 10, "seconds": 0.1, "setup": 5.0, **more}


def test_a_pool_beyond_the_context_fills_most_of_it(
    data: Path, tmp_path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions are local, and as much is read as fills 0.8 of the embedded model's 16,384 tokens."""
    monkeypatch.setattr(Pool, "shares", [])
    words = ["--sets", "banking77", "--pool-tokens", 300, "--labels", 4, "--draws", 1, "--out", tmp_path / "q.json"]
    quality.main(arguments(data, *words, "--methods", "beyond"))
    assert [name for name, _ in asked] == ["zero-shot-filled", "example-filled", "dbsa-filled", "dbsa-example-filled"]
    assert [pool.get("positions") for _, pool in asked] == ["local"] * 4
    assert Pool.shares == [1.0, 1.0], "a pool that is shorter is read whole"
    filled = methods.METHODS["dbsa-filled"]
    assert filled.share(131072, 16384) == pytest.approx(0.1) and methods.METHODS["dbsa-30"].share(131072, 16384) == 0.3
    (row,) = (
        each for each in json.loads((tmp_path / "q.json").read_text())["figures"] if "DBSA, as much" in each["name"]
    )
    assert row["baseline"] == "RetICL by example, as many as fit"


def test_differences_are_of_the_same_draws() -> None:
    """Draws differ much from each other, and methods little within one."""
    levels = [0.2, 0.9, 0.5, 0.6]
    measured = [measurement("fixed", at, level) for at, level in enumerate(levels)]
    measured += [measurement("dbsa-30", at, level + 0.05 + 0.01 * (at % 2)) for at, level in enumerate(levels)]
    measured += [measurement("dbsa-10", at, level - 0.3) for at, level in enumerate(levels[:2])]
    fixed, fewer, ours = study.figures(measured, OF)
    assert fixed.name == "nlu, pools of 300 tokens, Fixed ICL: answers right; 100.0 ms a request, 8 at a time"
    assert study.figures(measured, {**OF, "model": "Small"})[0].name.startswith("Small, nlu, pools of")
    assert fixed.baseline == "" and fixed.timing.median == pytest.approx(0.55)
    assert ours.notes["difference"] == pytest.approx(0.055) and ours.notes["difference_error"] < 0.01
    assert ours.timing.high - ours.timing.low > 0.2 and ours.notes["questions"] == 40
    assert ours.aim == "95% interval at most 2 points below Fixed ICL" and ours.met
    assert fewer.notes["difference"] == pytest.approx(-0.3) and fewer.aim == "" and fewer.timing.samples == 2
    assert fewer.baseline_timing and fewer.ratio == pytest.approx(0.25 / 0.55)  # of the two draws that both have
    worse = [each if each["method"] != "dbsa-30" else {**each, "accuracy": each["accuracy"] - 0.2} for each in measured]
    assert study.figures(worse, OF)[2].met is False
    assert study.figures([each for each in measured if each["draw"] == 0], OF)[2].met is None  # of one draw
    best = [*measured, *(measurement("example", at, 1.0) for at in range(4))]
    found = {figure.aim for figure in study.figures(best, OF)}
    assert found == {"", "95% interval at most 2 points below RetICL by example, 30%"}


def test_the_most_likely_label_stands_beside_the_greedy_one_with_its_passes() -> None:
    measured = [measurement("dbsa-30", at, 0.5, passes=None) for at in range(2)]
    measured += [measurement("likely", at, 0.75, passes=2.0 + at) for at in range(2)]
    greedy, likely = study.figures(measured, OF)
    assert "passes" not in greedy.name + likely.baseline and "passes" not in greedy.notes
    assert "the most likely label: answers right; 100.0 ms a request, 8 at a time, 2.5 passes to find" in likely.name
    assert likely.baseline == "DBSA 30%" and likely.notes["passes"] == 2.5 and likely.notes["difference"] == 0.25


def test_an_ablation_changes_one_thing_and_stands_beside_dbsa(data: Path, tmp_path: Path, asked: list[Any]) -> None:
    words = ["--sets", "banking77", "--pool-tokens", 300, "--labels", 4, "--draws", 1, "--out", tmp_path / "q.json"]
    quality.main(arguments(data, *words, "--methods", "ablations", "dbsa-30", "fixed"))
    assert {name for name, _ in asked} == {*methods.ABLATIONS, "dbsa-30", "fixed"}
    changed = {name: {**pool} for name, pool in asked}
    assert all(pool.pop("block_size") == 10 for pool in changed.values())
    assert changed["pattern-self"] == {"pattern": "self"} and changed["previous-blocks-4"] == {"previous_blocks": 4}
    assert changed["grouping-cluster_diverse"] == {"grouping": "cluster_diverse"}
    assert [name for name, pool in changed.items() if not pool] == [
        "order-low_to_high", "order-high_to_low", "order-reversed", "block-score-text", "granularity-example",
        "dbsa-30", "fixed",
    ]  # fmt: skip
    measured = [measurement(name, 0, 0.5) for name in ("fixed", "dbsa-30", "order-reversed")]
    assert [row.baseline for row in study.figures(measured, OF)] == ["", "Fixed ICL", "DBSA 30%"]
    assert all(len(curve.series) == 2 for curve in study.curves(measured, OF))


def test_a_tenth_of_the_pool_is_read_by_examples_and_by_blocks(data: Path, tmp_path: Path, asked: list[Any]) -> None:
    """As in DBSA's Table 6, each beside DBSA 10%; other methods read as much as before."""
    words = ["--sets", "banking77", "--pool-tokens", 300, "--labels", 4, "--draws", 1, "--out", tmp_path / "q.json"]
    quality.main(arguments(data, *words, "--methods", "tenth", "dbsa-30", "examples"))
    names = [name for name, _ in asked]
    assert set(names) == {"dbsa-10", *methods.TENTH, "dbsa-30", *methods.GROUPS["examples"]}
    shares = {name: methods.METHODS[name].share(300, 2048) for name in names}
    assert {name for name, share in shares.items() if share == 0.1} == set(methods.TENTH)
    assert {shares[name] for name in shares.keys() - methods.TENTH.keys()} == {0.3}
    apart = [name in methods.TENTH for name in names]
    assert sum(before != after for before, after in pairwise(apart)) <= 2, "pools are encoded anew between them"
    measured = [measurement(name, 0, 0.5) for name in ("dbsa-10", *methods.TENTH)]
    assert [row.baseline for row in study.figures(measured, OF)] == ["", *["DBSA 10%"] * 3]


def test_another_retriever_stands_beside_the_same_method_with_bm25(
    data: Path, tmp_path: Path, asked: list[Any]
) -> None:
    words = ["--sets", "banking77", "--pool-tokens", 300, "--labels", 4, "--draws", 1, "--out", tmp_path / "q.json"]
    quality.main(arguments(data, *words, "--methods", "retrievers", "dbsa-example"))
    assert {name for name, _ in asked} == {"dbsa-example", *methods.RETRIEVED} and len(methods.RETRIEVED) == 9
    pools = {name: pool for name, pool in asked}
    assert pools["dbsa-example-bm25:stem"] == pools["dbsa-example"] != pools["example-bm25:stem"]
    measured = [measurement(name, 0, 0.5) for name in ("dbsa-example", "dbsa-example-bm25:stem", "example-bm25:stem")]
    rows = study.figures(measured, OF)
    assert [row.baseline for row in rows] == ["", "DBSA by example, 30%", ""]
    assert "DBSA by example, 30%, retriever bm25:stem: answers right" in rows[1].name


def test_a_method_asks_with_its_retriever() -> None:
    class Asked:
        def dbsa(self, **options: Any) -> Any:
            return options

        def ret_icl_by_example(self, retriever: str) -> Any:
            return retriever

    asked: Any = Asked()
    assert methods.METHODS["dbsa-30-bm25:stem"].ask(asked) == {"retriever": "bm25:stem"}
    assert methods.METHODS["dbsa-example-bm25:stop_words"].ask(asked) == {"retriever": "bm25:stop_words"}
    assert methods.METHODS["example-bm25:stem+stop_words"].ask(asked) == "bm25:stem+stop_words"


def test_time_is_drawn_with_and_without_the_pool() -> None:
    measured = [measurement("fixed", 0, 0.5), measurement("fixed", 0, 0.7, size=600, seconds=0.3, setup=7.0)]
    right, cost = study.curves(measured, OF)
    assert right.series == {"Fixed ICL": [(100.0, 0.5), (pytest.approx(300.0), 0.7)]}
    assert cost.series["Fixed ICL"][:2] == [(1.0, 7.3), (10.0, 10.0)] and cost.doubling


def test_an_option_of_the_engine_is_the_servers(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    @contextmanager
    def served(model: str, tokens: int, extra: Any) -> Iterator[SimpleNamespace]:
        seen.extend([tokens, extra])
        yield SimpleNamespace()

    monkeypatch.setattr(study, "served", served)
    monkeypatch.setenv(study.KERNELS_ENV, "")
    args = arguments(data, "--sets", "banking77", "--pool-tokens", 7000, "--engine", '{"mem_fraction_static": 0.5}')
    args.out = tmp_path / "q.json"
    monkeypatch.setattr(study.DrawStudy, "_rows", lambda *_: [])
    study.DrawStudy(args).run()
    assert seen == [11 * 7000 + 8192, ["--mem-fraction-static", "0.5"]]
