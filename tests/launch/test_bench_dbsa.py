"""The engine's half of `sglang-ext bench dbsa`: what is asked of both engines in turns, their sizes, and the rows."""

from __future__ import annotations

import argparse
import copy
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.launch.bench import _dbsa_turns as turns
from sglang_ext.launch.bench import dbsa
from sglang_ext.launch.bench._dbsa_engine import LABELLED, Ours, Stock
from sglang_ext.launch.bench._record import arguments_of_ranks, in_turns, of_engines, table
from sglang_ext.launch.bench._shapes import write_model

RESULTS = Path(dbsa.__file__).parent / "results" / "dbsa_engine.json"


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    dbsa.add_arguments(parser)
    return parser.parse_args(words)


# ---- turns ----


def test_every_run_of_ours_stands_beside_one_of_the_stock_engine() -> None:
    args = arguments("--concurrency", "1", "32", "--repeats", "3")
    kept: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for step in turns.steps(args):
        if step.do == "run" and step.keep:
            kept[(step.role, *step.keep[1:])].append(dict(step.options))
    for label, number in (("4", "1"), ("4", "32"), ("8", "1"), ("8", "32")):
        runs = [kept[(role, label, kind, number)] for role, kind in turns.TURN]
        assert all(len(run) == 3 for run in runs)
        for together in zip(*runs, strict=True):
            assert len({(each["first"], each["count"], each["tokens"]) for each in together}) == 1
    light, beside = kept[("stock", "4", "retrieval", "1")], kept[("ours", "4", turns.BESIDE_RETRIEVAL, "1")]
    assert [each["first"] for each in light] == [each["first"] for each in beside] and len(light) == 3
    assert ("stock", "4", "retrieval", "32") not in kept, "seconds a request: at the first concurrency only"


def test_a_turn_is_not_interrupted() -> None:
    alone = ("retrieval", LABELLED)
    asked = [step for step in turns.steps(arguments()) if step.do == "run" and step.options["kind"] not in alone]
    whole = len(asked) // len(turns.TURN) * len(turns.TURN)
    regular = [(step.role, step.options["kind"]) for step in asked[:whole]][: 2 * 3 * 4 * len(turns.TURN)]
    assert regular == list(turns.TURN) * (2 * 3 * 4)
    pairs = [step.role for step in turns.steps(arguments()) if step.do in ("prefill", "encode")]
    assert pairs[:8] == ["stock", "ours"] * 4


def test_no_question_is_asked_twice() -> None:
    asked: Counter[tuple[str, str, int]] = Counter()
    for step in turns.steps(arguments()):
        if "first" in step.options:
            kind = step.options.get("kind", "dbsa")
            numbers = range(step.options["first"], step.options["first"] + step.options["count"])
            asked.update((step.role, kind, number) for number in numbers)
    assert max(asked.values()) == 1 and max(number for _, _, number in asked) < 60_000


def test_profiles_are_last() -> None:
    asked, short = (
        [step.do for step in turns.steps(arguments(*words)) if step.role != "larger"]
        for words in ((), ("--decode-tokens", "0"))
    )
    assert set(asked[asked.index("stages") :]) == {"stages"}
    assert "stages" not in short[:-6] and len(short) == len(asked) - 3
    kinds = [step.options["kind"] for step in turns.steps(arguments()) if step.do == "stages"]
    assert kinds == ["dbsa"] * 3 + ["examples"] * 3 + ["dbsa"] * 3


def test_engines_that_are_together_fit_on_one_gpu() -> None:
    args = arguments()
    sizes, groups = turns.capacities(args), turns.phases(args)
    assert sizes["stock"] > 90_000 * 1.3125 and sizes["larger"] > 540_000 + 6 * 1880 > sizes["ours"] > 90_000
    assert [[each.name for each in group] for group in groups] == [
        ["stock on fa3", "stock on flashinfer", "ours"],
        ["larger"],
    ]
    weights = 15
    for group in groups:
        gib = sum(weights + sizes[each.role] * turns.token_bytes(args) / 2**30 for each in group)
        assert gib < 0.88 * 139, "the rest is for graphs, activations and contexts"
    assert [len(group) for group in turns.phases(arguments("--apart", "--larger", "0"))] == [1, 1, 1]
    given = arguments("--engine", '{"disable_cuda_graph": true, "ours": {"max_total_tokens": 7}}')
    assert turns.capacities(given) == {**sizes, "ours": 7}
    words, _ = turns._words(turns.Wanted("stock", "fa3"), Path("model"), given, sizes["stock"])
    options = json.loads(words[words.index("--engine") + 1])
    assert options["disable_cuda_graph"] and options["max_total_tokens"] == sizes["stock"] and "ours" not in options
    assert options["attention_backend"] == "fa3"


def test_several_gpus(tmp_path: Path) -> None:
    """All engines get them, rows say so, and have no aims, which are of one GPU."""
    args = arguments(
        "--tp", "2", "--shape", "llama-3.1-70b", "--layers", "40", "--engine", '{"ours": {"dtype": "half"}}'
    )
    for wanted, dtype in ((turns.Wanted("stock", "fa3"), None), (turns.Wanted("ours"), "half")):
        words, _ = turns._words(wanted, Path("model"), args, 1000)
        options = json.loads(words[words.index("--engine") + 1])
        assert options["tp_size"] == 2 and options.get("dtype") == dtype
    assert "tp_size" not in arguments_of_ranks(arguments())
    assert turns.token_bytes(args) == 2 * 40 * 8 * 128 * 2
    write_model(tmp_path, args.shape, 4096, args.layers)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["num_hidden_layers"], written["hidden_size"], written["num_attention_heads"]) == (40, 8192, 64)
    raw = json.loads(RESULTS.read_text())["engine"]
    one = dbsa.compare(raw, [1])
    both = of_engines(one, args)
    assert [each.name for each in both] == [f"{each.name}, llama-3.1-70b, 40 layers, on 2 GPUs" for each in one]
    assert not any(each.aim or each.met is not None for each in both) and any(each.aim for each in one)
    assert {each.notes["tp"] for each in both} == {2} and of_engines(one, arguments()) == one


class Small:
    name = "ours"

    def ask(self, what: str) -> dict[str, Any]:
        return {"capacity": 99}


def test_an_engine_with_too_small_a_cache_is_not_measured() -> None:
    with pytest.raises(RuntimeError, match=r"99 tokens, 100 are needed.*--apart"):
        turns._about(Small(), 100)  # type: ignore[arg-type]


# ---- rows ----


def test_the_ratio_is_the_median_of_pairs() -> None:
    row = in_turns("plain", [1.0, 2.0, 4.0, 1.0, 1.0], "stock", [1.1, 1.8, 4.4, 1.2, 0.9], 0.97, notes={"a": 1})
    assert row.ratio == pytest.approx(1.1) and row.timing.median == 1.0
    assert row.met is False, "the interval goes below the aim"
    assert row.notes["a"] == 1 and row.notes["paired"] == pytest.approx([1.1, 0.9, 1.1, 1.2, 0.9])
    assert row.notes["spread"] == pytest.approx([0.9, 1.16])
    assert "| 1.1x (0.9-1.16) | at least 0.97x | no |" in table([row])
    assert in_turns("plain", [1.0] * 5, "stock", [1.1] * 5, 0.97).met
    with pytest.raises(ValueError, match="2 times of ours and 1 of stock"):
        in_turns("plain", [1.0, 2.0], "stock", [1.0], None)


def raw(order: str) -> dict[str, Any]:
    """Figures of 3 turns; the host becomes four times slower from the first to the last."""

    def runs(seconds: float, **more: Any) -> dict[str, Any]:
        return {"1": [{"seconds": seconds * slow, "requests": 8, **more} for slow in (1, 2, 4)]}

    return {
        "order": order,
        "stock": {
            "backend": "flashinfer", "tokens": 1000, "question_tokens": 26, "prefill": [1.0, 2.0, 4.0],
            "answers": {"4": {
                "zero-shot": runs(0.99), "fixed": runs(2, cached=1000), "retrieval": runs(60),
            }},
        },
        "ours": {
            "tokens": 1000, "blocks": 5, "encode": [0.25, 0.5, 1.0], "append": [1.0], "decode stages": {},
            "answers": {"4": {
                "zero-shot": runs(1), "dbsa": runs(1), "all blocks": runs(1.4), turns.BESIDE_RETRIEVAL: runs(1.5),
            }},
        },
    }  # fmt: skip


def test_rows_of_turns() -> None:
    rows = dbsa.compare(raw(turns.IN_TURNS), [1])
    assert [row.ratio for row in rows] == pytest.approx([4, 2, 1.4, 40, 0.99, 0.99, 2 / 1.4])
    for row in rows:
        assert row.notes["spread"] == pytest.approx([row.ratio, row.ratio]), "what slows both is in no ratio"
        assert row.notes["order"] == turns.IN_TURNS


def test_answers_over_single_demonstrations_stand_beside_those_over_blocks() -> None:
    found = raw(turns.IN_TURNS)
    answers = found["ours"]["answers"]["4"]
    for kind, factor in (("examples", 1.25), ("examples as written", 0.5)):
        answers[kind] = {"1": [{**run, "seconds": factor * run["seconds"]} for run in answers["dbsa"]["1"]]}
    before = {(row.name, row.baseline) for row in dbsa.compare(raw(turns.IN_TURNS), [1])}
    rows = [row for row in dbsa.compare(found, [1]) if (row.name, row.baseline) not in before]
    assert [(row.name, row.baseline) for row in rows] == [
        (f"answering over single demonstrations{how} with 4 tokens, 1 at a time, time a request", baseline)
        for how in ("", ", as written,")
        for baseline in ("over blocks", "Fixed ICL, cached, stock SGLang on flashinfer")
    ]
    assert [row.ratio for row in rows] == pytest.approx([0.8, 1.6, 2, 4])


def test_each_row_has_the_fastest_of_the_stock_engines() -> None:
    one = raw(turns.IN_TURNS)["stock"]
    other = {**copy.deepcopy(one), "backend": "fa3", "prefill": [0.5, 1.0, 2.0]}
    for run in other["answers"]["4"]["zero-shot"]["1"]:
        run["seconds"] *= 2
    rows = dbsa.compare({**raw(turns.IN_TURNS), "stock": {"flashinfer": one, "fa3": other}}, [1])
    assert [row.ratio for row in rows] == pytest.approx([2, 2, 1.4, 40, 0.99, 0.99, 2 / 1.4])
    assert "fa3" in rows[0].baseline and "flashinfer" in rows[4].baseline and "flashinfer" in rows[5].baseline
    assert rows[0].notes["ratios to others"] == {"flashinfer": pytest.approx(4)}
    assert rows[5].notes["ratios to others"] == {"fa3": pytest.approx(1.98)}
    assert "ratios to others" not in rows[2].notes, "it is ours"
    other["answers"]["4"]["fixed"]["1"][0]["cached"] = 7
    with pytest.raises(ValueError, match="of 1000 tokens of pool 7 were cached"):
        dbsa.compare({**raw(turns.IN_TURNS), "stock": {"flashinfer": one, "fa3": other}}, [1])


def test_answers_that_are_labels_have_rows_of_their_own() -> None:
    """Of as many pairs, with the tokens of the answers, which are not the same on both sides."""
    steps = [step for step in turns.steps(arguments("--concurrency", "1", "8")) if step.options.get("kind") == LABELLED]
    kept = [(step.role, *step.keep) for step in steps if step.keep]
    assert kept == [(role, "labelled", at) for at in ("1", "8") for _ in range(3) for role in ("stock", "ours")]
    assert not [each for each in turns.steps(arguments("--no-labels")) if each.options.get("kind") == LABELLED]
    found = raw(turns.IN_TURNS)
    found["ours"]["labelled"] = {"1": [{"seconds": 1.0, "requests": 2, "said": 5.0}] * 2}
    found["stock"]["labelled"] = {"1": [{"seconds": 3.0, "requests": 2, "said": 4.0, "cached": 1000} for _ in range(2)]}
    (row,) = [each for each in dbsa.compare(found, [1]) if each.name.startswith("answering with a label, 1 at a time")]
    assert row.ratio == pytest.approx(3) and row.baseline.endswith("a grammar of the labels")
    assert set(row.notes["answer_tokens"].values()) == {5.0, 4.0}
    found["stock"]["labelled"]["1"][0]["cached"] = 1
    with pytest.raises(ValueError, match="1 were cached"):
        dbsa.compare(found, [1])


def test_a_label_is_asked_for_by_a_grammar_and_by_a_pool() -> None:
    stock, ours = object.__new__(Stock), object.__new__(Ours)
    stock.whole, stock.grammar, stock.end, ours.ratio = [1, 2], "root ::= x", "\n", 0.25
    stock.__dict__["questions"] = ours.__dict__["questions"] = ["which?"]
    stock.question_ids = lambda number: [3 + number]  # type: ignore[method-assign]
    assert stock.labelled(1, 9) == {
        "input_ids": [1, 2, 4],
        "sampling_params": {"temperature": 0, "max_new_tokens": 9, "ebnf": "root ::= x", "stop": ["\n"]},
    }
    custom = {"pool": "bench", "ratio": 0.25, "constrain": "labels"}
    params = {"temperature": 0, "max_new_tokens": 9, "custom_params": custom}
    assert ours.labelled(0, 9) == {"prompt": "which?", "sampling_params": params}


def test_rows_of_engines_apart_have_no_pairs() -> None:
    rows = dbsa.compare(raw(turns.APART), [1])
    assert [row.ratio for row in rows] == pytest.approx([4, 2, 1.4, 40, 0.99, 0.99, 2 / 1.4])
    assert all("paired" not in row.notes and row.notes["order"] == turns.APART for row in rows)


def test_nothing_is_compared_that_was_prefilled_again() -> None:
    changed = copy.deepcopy(raw(turns.IN_TURNS))
    changed["stock"]["answers"]["4"]["fixed"]["1"][1]["cached"] = 12
    with pytest.raises(ValueError, match="of 1000 tokens of pool 12 were cached"):
        dbsa.compare(changed, [1])


def test_kept_results_are_compared_as_they_were() -> None:
    kept = json.loads(RESULTS.read_text())
    rows = dbsa.compare(kept["engine"], [1, 32, 128])
    figures = {(row["name"], row["baseline"]): row for row in kept["figures"]}
    found = {(row.name, row.baseline): row for row in rows}
    assert figures.keys() <= found.keys()
    for key, row in figures.items():
        assert (found[key].ratio, found[key].aim) == (pytest.approx(row["ratio"]), row["aim"])


# ---- both engines ----


@pytest.mark.usefixtures("forked_engines")
def test_both_engines_answer_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "APPENDS", 1)
    args = arguments(
        *("--shape", "tiny", "--tokens", "600", "--larger", "1200", "--block-size", "5", "--concurrency", "1", "2"),
        *("--label-tokens", "2", "--min-requests", "2", "--rounds", "1", "--repeats", "1", "--decode-tokens", "3"),
        *("--stock-backend", "torch_native", "--kernels", "torch", "--no-labels"),
    )
    found = turns.engines(args)
    stock = found["stock"]["torch_native"]
    assert found["order"] == turns.IN_TURNS and found["ours"]["tokens"] >= 600 and stock["tokens"] >= 600
    assert stock["capacity"] >= found["memory"]["stock"]["tokens"]
    rows = dbsa.compare(found, args.concurrency)
    assert all(len(row.notes["paired"]) == 1 for row in rows if "order" in row.notes)
    assert {row.baseline.split(",")[0] for row in rows} == {
        "dense prefill", "Fixed ICL", "RetICL", "zero-shot", "linear growth", "to the smaller", "over blocks",
    }  # fmt: skip
    assert rows[-1].notes["encoding"].keys() == {"append", "append larger"}
    assert 0 < rows[-1].notes["encoding"]["append larger"] < rows[-1].timing.high
    names = {"1 at a time", "2 at a time"}
    assert all(found["ours"][stages].keys() == names for stages in turns.STAGES)


@pytest.mark.usefixtures("forked_engines")
def test_a_pool_leaves_for_the_host_and_comes_back(tmp_path: Path) -> None:
    """The whole command; on this machine its times are of no meaning, and that blocks came back has been checked."""
    out = tmp_path / "host.json"
    words = ("--only", "host", "--shape", "tiny", "--tokens", "2000", "--block-size", "20", "--repeats", "1")
    words += ("--kernels", "torch")
    args = arguments(*words, "--out", str(out), "--engine", '{"max_running_requests": 8, "chunked_prefill_size": 512}')
    assert dbsa.main(args) == 0
    kept = json.loads(out.read_text())
    assert [row["aim"] for row in kept["figures"]] == ["at least 8x", "at most 2x", ""]
    assert kept["engine"]["ahead"] >= kept["engine"]["blocks"] > 3
    assert [run["evicted"] > 0 for name in ("evicting", "calm") for run in kept["engine"][name]] == [True, False]


def test_aims_are_of_large_pools() -> None:
    """Those of plain requests are of all: they have no pool."""
    aimed = []
    for tokens in (1000, 90_000):
        found = raw(turns.IN_TURNS)
        found["ours"]["tokens"] = tokens
        aimed.append([row.name for row in dbsa.compare(found, [1]) if row.aim])
    assert aimed[0] and all(name.startswith("a plain request") for name in aimed[0])
    assert len(aimed[1]) > len(aimed[0]) and any(name.startswith("encoding a pool") for name in aimed[1])
