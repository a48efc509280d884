"""`sglang-ext bench retrieval`: what is found of the demonstrations with a question's label."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from rank_bm25 import BM25Okapi
from transformers import AutoTokenizer

from sglang_ext.launch.bench import retrieval
from sglang_ext.launch.bench.reference import MODEL
from sglang_ext.launch.demo_data import DemoTask
from sglang_ext.retrievers.grouping import group

WORDS = {"lost_card": "my card is missing", "top_up": "add money to the account", "open_hours": "when are you open"}
"""Class -> words of its texts."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name in ("banking77", "nlu"):
        (folder / name).mkdir()
        for split, count in (("train", 60), ("test", 12)):
            labels = [list(WORDS)[at % 3] for at in range(count)]
            rows = [{"text": f"{WORDS[label]} {split}{at}", "label": label} for at, label in enumerate(labels)]
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def arguments(data: Path, *words: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    retrieval.add_arguments(parser)
    given = ["--data", data, "--sets", "banking77", "nlu", "--commit", "none", "--pool-tokens", 400, "--draws", 2]
    return parser.parse_args([str(word) for word in [*given, *words]])


def best(texts: list[list[str]], query: list[str], count: int, first: int = 0) -> set[int]:
    scores = BM25Okapi(texts).get_scores(query)
    return {*range(first), *sorted(range(first, len(texts)), key=lambda at: (-scores[at], at))[: count - first]}


def test_shares_are_those_of_rank_bm25() -> None:
    labels = ["lost card", "top up", "open hours"]
    inputs = ["my card", "the card", "add money", "more money", "open today", "card money", "when open", "a card"]
    inputs += ["pay", "late card"]
    demonstrations = [{"input": text, "output": labels[at % 3]} for at, text in enumerate(inputs)]
    queries = [{"input": "card is gone", "output": "lost card"}, {"input": "open", "output": "open hours"}]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    found = retrieval.gold_shares(DemoTask("t", demonstrations, queries), ["bm25", "all"], 2, tokenizer)

    texts = [f"{each['input']}\nLabel: {each['output']}" for each in demonstrations]
    words = [text.lower().replace(":", "").split() for text in texts]
    lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    groups = group(texts, lengths, 2)
    expected = []
    for query in queries:
        asked = query["input"].split()
        gold = {at for at, each in enumerate(demonstrations) if each["output"] == query["output"]}
        nearest = best(words, asked, 5)
        own = [len(gold & nearest) / 5, len(gold & best(words, asked, 3)) / len(gold)]
        single, whole = (
            BM25Okapi(words).get_scores(asked),
            [[word for at in each for word in words[at]] for each in groups],
        )
        for scores in ([max(single[at] for at in each) for each in groups], BM25Okapi(whole).get_scores(asked)):
            chosen = {0, max(range(1, len(groups)), key=lambda block: (scores[block], -block))}  # 30% of 5 are 1.5
            in_blocks = {at for block in chosen for at in groups[block]}
            own += [len(gold & in_blocks) / len(gold), len(nearest & in_blocks) / 5]
        expected.append(own)
    assert found["bm25"] == pytest.approx([sum(each) / 2 for each in zip(*expected, strict=True)])
    assert found["all"][:2] == pytest.approx([(2 / 5 + 1 / 5) / 2, (1 / 4 + 1 / 3) / 2])  # the first ones


def test_rows_stand_beside_the_first_retriever() -> None:
    draws: list[dict[str, tuple[float, ...]]] = [
        {"bm25": (0.5, 0.6, 0.0, 0.5, 0.5, 0.5), "bm25:stem": (0.7, 0.6, 0.1, 0.5, 0.5, 0.5)},
        {"bm25": (0.3, 0.6, 0.0, 0.5, 0.5, 0.5), "bm25:stem": (0.4, 0.6, 0.1, 0.5, 0.5, 0.5)},
    ]
    rows = retrieval.figures("nlu", draws)
    assert [row.baseline for row in rows] == ["", "bm25"] * 6
    assert rows[0].name == "nlu, gold ones among the 5 best examples, bm25"
    assert rows[1].name == "nlu, gold ones among the 5 best examples, bm25:stem; +15.0 points, standard error 5.0"
    assert rows[1].ratio == pytest.approx(0.55 / 0.4) and rows[1].notes["difference"] == pytest.approx(0.15)
    assert rows[5].ratio is None and rows[5].timing.median == pytest.approx(0.1)


def test_a_run_writes_where_it_is_told_to(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    assert retrieval.main(arguments(data, "--out", out)) == 0
    record = json.loads(out.read_text())
    assert len(record["figures"]) == 2 * 6 * 4 and record["settings"]["draws"] == 2
    shown = capsys.readouterr().out
    assert "| nlu, pools of 400 tokens, gold ones found in 30% of the blocks, bm25:stem+stop_words; " in shown
    assert retrieval.main(arguments(data, "--labels", 2, "--retrievers", "all")) == 0
    assert "written" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--retrievers", "bm52"], "unknown retriever 'bm52'"),
        (["--retrievers", "bm25:stems"], "unknown analysis 'stems'"),
        (["--draws", 0], "--draws 0: expected at least 1"),
        (["--block-size", 0], "--block-size 0: expected at least 1"),
        (["--sets", "absent"], r"no train.jsonl"),
    ],
)
def test_bad_arguments(data: Path, words: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        retrieval.main(arguments(data, *words))
