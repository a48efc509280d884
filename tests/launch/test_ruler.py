"""Prompts in the manner of RULER: what they hide and where, their lengths, and how answers are scored; no engine."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from sglang_ext.launch.bench import _ruler as ruler
from sglang_ext.launch.bench import _ruler_pieces as pieces
from sglang_ext.launch.bench._reference_reader import Writer
from sglang_ext.launch.bench.reference import FILLER, MODEL

PIECE = 40
"""No piece of a haystack has more tokens here."""
CLASSES = [f"{first}_{second}" for first in ("red", "blue", "old", "new", "odd") for second in ("card", "loan", "fee")]


def write_sets(folder: Path) -> str:
    """A small banking77: 17 classes, and one whose name is a part of another's."""
    (folder / "banking77").mkdir()
    for split in ("train", "test"):
        labels = [*CLASSES, "top_up", "top_up_late", "cash"]
        rows = [{"text": f"What of {split} {label} {n}?", "label": label} for n in range(4) for label in labels]
        (folder / "banking77" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_sets(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module", params=[True, False], ids=["embedded", "template"])
def source(request: pytest.FixtureRequest, data: str) -> pieces.RulerSource:
    """In the words of the embedded model, and in RULER's within a chat template."""
    return pieces.ruler_source(Writer(MODEL), data, request.param)


def prompts(source: pieces.RulerSource, kind: str, count: int = 8, tokens: int = 1500) -> list[pieces.RulerPrompt]:
    return [ruler.ruler_prompt(source, kind, tokens, 0, number) for number in range(count)]


def text_of(source: pieces.RulerSource, prompt: pieces.RulerPrompt) -> str:
    return str(source.writer.tokenizer.decode(prompt.tokens))


@pytest.mark.parametrize("kind", ruler.KINDS)
@pytest.mark.parametrize("tokens", [1500, 3000])
def test_prompts_have_as_many_tokens_as_asked(source: pieces.RulerSource, kind: str, tokens: int) -> None:
    sizes = [len(each.tokens) for each in prompts(source, kind, 4, tokens)]
    assert all(tokens - PIECE < size <= tokens for size in sizes)


@pytest.mark.parametrize("kind", ruler.KINDS)
def test_a_seed_repeats_and_another_differs(source: pieces.RulerSource, kind: str) -> None:
    first = ruler.ruler_prompt(source, kind, 1500, 0, 3)
    assert first == ruler.ruler_prompt(source, kind, 1500, 0, 3)
    for seed, number in ((1, 3), (0, 4)):
        other = ruler.ruler_prompt(source, kind, 1500, seed, number)
        assert other.answers != first.answers or other.tokens != first.tokens
        assert other.tokens != first.tokens


@pytest.mark.parametrize(("kind", "values"), [("single-key", 1), ("multi-key", 1), ("multi-value", 4)])
def test_each_number_is_hidden_once(source: pieces.RulerSource, kind: str, values: int) -> None:
    said = 2 if source.frame.trained else 1  # a passkey's sentence says it twice
    for prompt in prompts(source, kind):
        text = text_of(source, prompt)
        assert len(set(prompt.answers)) == values == len(prompt.places)
        for answer, place in zip(prompt.answers, prompt.places, strict=True):
            needle = source.writer.tokenizer.decode(prompt.tokens[slice(*place)])
            assert needle.count(answer) == text.count(answer) == said
            assert len(answer) == source.frame.digits and not answer.startswith("0")
        hidden = re.findall(r"pass key[\w ]* is (\d+)\. R" if source.frame.trained else r" is: (\d+)\.", text)
        assert len(hidden) == (4 if kind == "multi-key" else values) and set(prompt.answers) <= set(hidden)


@pytest.mark.parametrize("kind", ["multi-key", "multi-value"])
def test_one_name_is_asked_for(source: pieces.RulerSource, kind: str) -> None:
    for prompt in prompts(source, kind):
        text = text_of(source, prompt)
        (asked,) = set(
            re.findall(r"[Pp]ass keys? of (\w+) (?:is|are)$|magic numbers? for (\w+) mentioned in the", text[-200:])[-1]
        ) - {""}
        for place in prompt.places:
            assert f" {asked} is" in source.writer.tokenizer.decode(prompt.tokens[slice(*place)])


@pytest.mark.parametrize("depth", [0.0, 0.3, 0.77, 1.0])
def test_a_needle_stands_at_its_depth(source: pieces.RulerSource, depth: float) -> None:
    words = pieces.RulerWords("Begin.", "\nEnd?", " It is")
    tokens, ((first, end),) = pieces.hidden_in(source, words, pieces.noise(), [(depth, " Here 123 is.")], 2000)
    decode = source.writer.tokenizer.decode
    assert decode(tokens[first:end]) == " Here 123 is."
    before, behind = (decode(part).count("back again.") for part in (tokens[:first], tokens[end:]))
    assert before / (before + behind) == pytest.approx(depth, abs=0.02)
    assert decode(tokens).count(FILLER) == before + behind and decode(tokens).endswith("It is")


def test_all_variables_of_a_chain_hold_its_value(source: pieces.RulerSource) -> None:
    for prompt in prompts(source, "variables"):
        text = text_of(source, prompt)
        begin = text.rindex("Memorize and track")  # behind the example
        (value,) = re.findall(r"assigned the value (\d+) in the text above", text[begin:])
        held: dict[str, str] = {}
        for name, number, other in re.findall(r"VAR (\w+) = (?:(\d+)|VAR (\w+))\.", text[begin:]):
            held[name] = number or held[other]  # a variable is assigned before it is read
        assert held == dict.fromkeys(prompt.answers, value) and len(held) == ruler.HOPS + 1
        assert not any(answer in text[:begin] for answer in prompt.answers), "the example does not say them"
        assert text[:begin].count("VAR ") == 2 * ruler.HOPS + 1
        told = [source.writer.tokenizer.decode(prompt.tokens[slice(*place)]) for place in prompt.places]
        assert [re.findall(r"VAR (\w+) =", sentence)[0] for sentence in told] == prompt.answers


def test_common_words_are_the_most_frequent_ones(source: pieces.RulerSource) -> None:
    for prompt in prompts(source, "words", 3, 3000):
        text = text_of(source, prompt)
        listed = re.findall(r" (\d+)\. (\w+)", text[text.rindex("Below is a numbered list") : text.rindex("Question")])
        assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
        counts = Counter(word for _, word in listed)
        assert {word for word, _ in counts.most_common(ruler.COMMON)} == set(prompt.answers)
        frequent, others = (
            set(counts[word] for word in words)
            for words in (prompt.answers, counts - Counter(dict.fromkeys(prompt.answers, 10**6)))
        )
        assert len(frequent) == len(others) == 1 and min(frequent) > 2 * max(others)
        assert prompt.chance == ruler.COMMON / len(counts)
        assert not any(re.search(rf"\b{word}\b", text[: text.rindex("Below is")]) for word in prompt.answers)


def test_frequent_words_need_enough_others() -> None:
    words = [f"word{n}x" for n in range(100)]
    common, listed = ruler.word_list(words, 900, 30, random.Random(0))
    counts = Counter(listed)
    assert {counts[word] for word in common} == {30} and set(counts.values()) == {30, 7} and len(listed) <= 900
    with pytest.raises(ValueError, match="5000 entries of 100 words: expected 10 to be much more frequent"):
        ruler.word_list(words, 5000, 30, random.Random(0))


def test_a_question_is_about_a_label_that_documents_have(source: pieces.RulerSource) -> None:
    assert "top up late" in source.labels and "top up" not in source.labels, "it is a part of another one"
    for prompt in prompts(source, "questions"):
        text = text_of(source, prompt)
        shown = Counter(re.findall(r"\nLabel: ([\w ]+)\n\n", text))
        assert len(shown) == ruler.LABELS and shown[prompt.answers[0]] and prompt.chance == 1 / ruler.LABELS
        (asked,) = re.findall(r"what of test (\w+) \d\?", text)  # no other document is of the test texts
        assert asked.replace("_", " ") == prompt.answers[0] and text.endswith("Label")


def test_what_stands_around_a_prompt(source: pieces.RulerSource) -> None:
    texts = [text_of(source, prompts(source, kind, 1)[0]) for kind in ruler.KINDS]
    tags = ("<|user|>", "<|end|><|assistant|>")
    assert all(text.startswith("<|bos|>") and text.count("<|bos|>") == 1 for text in texts)
    assert {text.count(tag) for text, tag in itertools.product(texts, tags)} == {int(source.frame.chat)}
    assert source.frame.chat != source.frame.trained


@pytest.mark.parametrize("kind", ruler.KINDS)
def test_too_few_tokens_are_refused(source: pieces.RulerSource, kind: str) -> None:
    with pytest.raises(ValueError, match=rf"{ruler.KINDS[kind].title}, 25 tokens of a prompt: .*expected"):
        ruler.ruler_prompt(source, kind, 25, 0, 0)


@pytest.mark.parametrize(
    ("said", "share"), [("They are 12 and 34.", 1.0), ("ab 34", 0.5), ("", 0.0), ("1 2 3 4", 0.0), ("34, 34", 0.5)]
)
def test_a_score_is_the_share_of_answers_found(said: str, share: float) -> None:
    assert ruler.found(said, ["12", "34"]) == share


def test_letters_match_in_any_case() -> None:
    assert ruler.found("Is it CARD fee?", ["card Fee"]) == 1.0


def test_words_that_are_a_part_of_another_are_left_out() -> None:
    assert pieces.apart(["there", "therefore", "card", "other", "another"]) == ["therefore", "card", "another"]
