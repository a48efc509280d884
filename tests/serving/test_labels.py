"""The tree of labels, the grammar that constrains an answer to them, and what cannot be an answer."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xgrammar
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from sglang_ext import lines
from sglang_ext.attention.branches import _visible, branch_positions, branch_runs
from sglang_ext.cache.rows import Row
from sglang_ext.compat import line
from sglang_ext.config import RequestOptions
from sglang_ext.serving.errors import PoolError
from sglang_ext.serving.grammar import MOST_CHARACTERS, Ending, LabelCheck, constrain, label_grammar
from sglang_ext.serving.label_tree import Branches, LabelTokens, branches, cut, tree_tokens
from sglang_ext.serving.labels import check_quota
from sglang_ext.serving.likely import Whole
from sglang_ext.serving.tokenizer import _refuse_aborted
from tests.oracle import models

LABELS = ("card", "card issue", "card issue deep", "c", "1", "11", "111", "1e5", "NaN", 'a"b', "a\\b", "é😀", "\u2028")


def sequences(seed: int, count: int, longest: int = 6, alphabet: int = 3) -> list[tuple[int, ...]]:
    dice = random.Random(seed)
    return [tuple(dice.randrange(alphabet) for _ in range(dice.randint(1, longest))) for _ in range(count)]


# --------------------------------------------------------------------------- the tree


def log_probability(path: Sequence[int], token: int) -> float:
    """Of a model that looks at everything before a token."""
    return -1.0 - (hash((tuple(path), token)) % 1000) / 1000


def values(found: Branches, prompt: list[int]) -> list[float]:
    """What a model gives for the columns of branches, from what the branches say they see and where they stand."""
    row = Row((), tuple(found.blocks), own=len(prompt) - 1)
    mask, positions = _visible(row), branch_positions(row, len(prompt) - 1, len(prompt) - 1 + len(found.token_ids))
    result = [0.0]
    for column in range(1, len(found.token_ids)):
        seen = np.flatnonzero(mask[column - 1])
        order = sorted(seen, key=lambda place: positions[place])
        assert [positions[place] for place in order] == list(range(len(prompt) - 1, positions[column - 1] + 1))
        path = [*prompt[:-1], *(found.token_ids[place] for place in order)]
        result.append(log_probability(path, found.token_ids[column]))
    return result


@pytest.mark.parametrize("seed", range(8))
def test_the_tree_scores_every_sequence_as_if_it_were_alone(seed: int) -> None:
    prompt = [90, 91, 92]
    listed = sequences(seed, 1 + 7 * seed)
    found = branches(sorted(set(listed)), prompt[-1], len(prompt) - 1)
    scores = found.scores(values(found, prompt))
    for sequence in listed:
        alone = sum(log_probability([*prompt, *sequence[:at]], token) for at, token in enumerate(sequence))
        assert scores[sequence] == pytest.approx(alone)


def test_the_tree_computes_shared_beginnings_once() -> None:
    listed = sorted((7, 7, 7, 7, 7, 7, 7, label) for label in range(50))
    assert tree_tokens(listed) == 7 + 50
    assert len(branches(listed, 1, 0).token_ids) <= 7 + 2 * 50
    nested = [(1,) * length for length in range(1, 400)]
    assert tree_tokens(nested) == 399 and len(branches(nested, 1, 0).token_ids) == 400
    assert LabelTokens.of([[3, 4], [3], [3, 4], [3, 5]]).tree_tokens == 3


@pytest.mark.parametrize("limit", [1, 5, 40, 10_000])
def test_groups_hold_every_sequence_once_and_stay_below_the_limit(limit: int) -> None:
    listed = sorted(set(sequences(3, 200, longest=9)))
    groups = list(cut(listed, limit))
    assert [sequence for group in groups for sequence in group] == listed
    assert all(len(group) == 1 or tree_tokens(group) <= limit for group in groups)
    assert limit < 10_000 or len(groups) == 1


def test_what_branches_see_is_told_alike_to_kernels_and_to_the_mask() -> None:
    own = 4
    found = branches(sorted(set(sequences(5, 30))), 9, own)
    row = Row((), tuple(found.blocks), own=own)
    total = own + len(found.token_ids)
    for begin, end in ((0, total), (2, total - 3), (own + 3, own + 17)):  # a chunk may cut anywhere
        runs = branch_runs(row, (), begin, end)
        assert [column for run in runs for column in range(run.begin, run.end)] == list(range(begin, end))
        for run in runs:
            for column in range(run.begin, run.end):
                told = {c for part in run.runs for c in range(part.column, part.column + part.tokens)}
                told |= set(range(run.tail, column + 1))
                masked = set(range(min(own, column + 1)))
                if column >= own:
                    masked |= {own + int(place) for place in np.flatnonzero(_visible(row)[column - own])}
                assert told == masked, (begin, end, column)


def test_a_quota_is_named_with_its_numbers() -> None:
    needed = LabelTokens.of([[1, 2, 3], [1, 2, 4], [5]]).tree_tokens
    check_quota(3, needed, 5, "p", "label_probs")
    with pytest.raises(
        PoolError, match=r"label_probs: the 3 labels of pool 'p' need 5 tokens.*at most 4.*--max-label-tokens"
    ) as caught:
        check_quota(3, needed, 4, "p", "label_probs")
    with pytest.raises(PoolError, match=r'choose="likely": the 5 labels .* need at least 5 tokens'):
        check_quota(5, 5, 4, "p", 'choose="likely"')
    assert caught.value.status_code == 413


# --------------------------------------------------------------------------- the grammar


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return served(models.build_tokenizer())


def served(backend: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=models.BOS, eos_token=models.EOS, pad_token=models.PAD
    )


@pytest.mark.parametrize(("lead", "end"), [(" ", "\n\n"), ("", ""), ("\n", "x")])
def test_the_grammar_takes_every_label_and_nothing_else(tokenizer: Any, lead: str, end: str) -> None:
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=models.VOCAB_SIZE, stop_token_ids=[2])
    compiled = xgrammar.GrammarCompiler(info).compile_grammar(label_grammar(LABELS, lead, end))

    def whole(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return matcher.accept_string(text) and (matcher.is_terminated() or matcher.accept_token(2))

    assert all(whole(lead + label + end) for label in LABELS)
    assert not any(whole(lead + text + end) for text in ("", "ca", "card issue dee", "cardx", "1e", "N"))


def test_the_grammar_of_labels_that_begin_one_another_is_not_nested_too_deep(tokenizer: Any) -> None:
    LabelCheck(tokenizer, models.VOCAB_SIZE, [2], "xgrammar").check(["a" * n for n in range(1, 1200)], " ", "\n\n")


def test_constraining_sets_what_is_needed() -> None:
    params: dict[str, Any] = {"max_new_tokens": 1, "temperature": None}
    assert constrain(params, ("a", "bcd"), " ", "\n\n", "xgrammar") == ""
    assert params["temperature"] == 0.0 and params["stop"] == ["\n\n"] and params["max_new_tokens"] == 8
    params = {"temperature": 2.0, "stop": "x"}
    assert constrain(params, ("a\n\nb", "c"), " ", "\n\n", "xgrammar") == "\n\n"
    assert params["temperature"] == 2.0 and params["stop"] == "x"
    for labels, lead in ((("a\n",), " "), (("a",), "\n\n")):  # the end would be found too early
        params = {}
        assert constrain(params, labels, lead, "\n\n", "xgrammar") == "\n\n" and "stop" not in params
    with pytest.raises(ValueError, match=r"--grammar-backend none.*label_probs works"):
        constrain({}, ("a",), " ", "", "none")
    with pytest.raises(ValueError, match=r"constrain=.labels. and regex"):
        constrain({"regex": "a"}, ("a",), " ", "", "xgrammar")
    with pytest.raises(ValueError, match=f"at most {MOST_CHARACTERS}"):
        constrain({}, ("a" * MOST_CHARACTERS, "b"), " ", "", "xgrammar")


@pytest.mark.parametrize("label", ["a\n\nb", "a\n", "\n\n", "a", "\n\n\n\n"])
def test_the_end_is_taken_off_however_the_text_comes(label: str) -> None:
    text, reason = f" {label}\n\n", {"type": "stop", "matched": 2}
    whole, parts = Ending("\n\n"), Ending("\n\n")
    shown, pieces = [], []
    for at in range(1, len(text) + 1):
        ended = reason if at == len(text) else None
        shown.append(whole.whole(text[:at], ended))
        pieces.append(parts.part(text[at - 1], ended))
    assert shown[-1] == f" {label}" == "".join(pieces)
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(shown))


def test_an_answer_that_was_cut_keeps_its_text() -> None:
    assert Ending("\n\n").whole(" a\n\n", {"type": "length", "length": 3}) == " a\n\n"
    assert Ending("\n\n").whole(" a\n\n", {"type": "stop", "matched": "b"}) == " a\n\n"


# --------------------------------------------------------------------------- what cannot be an answer


def test_labels_that_can_be_spelled_pass(tokenizer: Any) -> None:
    check = LabelCheck(tokenizer, models.VOCAB_SIZE, [2], "xgrammar")
    check.check([*LABELS, " ", "\t", "a ", "a", "x" * 2000, "\x00", "\x7f", "a\rb", "[x](y)", "|", "::="], " ", "\n\n")
    check.check([], " ", "\n\n")


@pytest.mark.parametrize("label", ["<s>", "</s>", "before <|end|> after"])
def test_special_tokens_are_refused(tokenizer: Any, label: str) -> None:
    for backend in ("xgrammar", "none"):
        with pytest.raises(ValueError, match="a special token of the model's tokenizer"):
            LabelCheck(tokenizer, models.VOCAB_SIZE, [2], backend).check(["fine", label], " ", "\n\n")


def test_a_tokenizer_whose_kind_is_mistaken_is_found() -> None:
    backend = models.build_tokenizer()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.ByteLevel()])  # decodes as before
    mistaken = served(backend)
    by_xgrammar = LabelCheck(mistaken, models.VOCAB_SIZE, [2], "xgrammar")
    if lines.current() is lines.NEWER:  # its xgrammar takes such a tokenizer for what it is
        by_xgrammar.check(["card issue"], " ", "\n\n")
        return
    with pytest.raises(ValueError, match=r"cannot spell the output 'card issue'.*BYTE_FALLBACK.*--grammar-backend"):
        by_xgrammar.check(["card issue"], " ", "\n\n")
    LabelCheck(mistaken, models.VOCAB_SIZE, [2], "none").check(["card issue"], " ", "\n\n")


def manager_with(constrained: str | None, abort_requested: bool, whole: Whole | None = None) -> Any:
    version, options = SimpleNamespace(name="p"), RequestOptions("p", constrain=constrained)
    state = SimpleNamespace(**{line.ABORT_FLAG: abort_requested})
    return SimpleNamespace(
        ext_leases={"r": SimpleNamespace(version=version, options=options, whole=whole)}, rid_to_state={"r": state}
    )


def test_an_answer_that_its_grammar_ended_is_an_error() -> None:
    out = {"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": "Aborted", "status_code": None}}}
    with pytest.raises(PoolError, match=r"constrained to the labels of pool 'p'.*tokenizer") as caught:
        _refuse_aborted(manager_with("labels", False), "r", None, out)
    assert caught.value.status_code == 400
    _refuse_aborted(manager_with("labels", True), "r", None, out)  # somebody asked for it
    _refuse_aborted(manager_with(None, False), "r", None, out)
    _refuse_aborted(manager_with("labels", False, Whole("a", (1,), 1)), "r", None, out)  # it has no grammar
    invalid = {"type": "abort", "message": "Failed to compile ebnf grammar: x", "status_code": 400}
    with pytest.raises(PoolError, match="Failed to compile"):
        _refuse_aborted(manager_with("labels", False), "r", None, {"meta_info": {"finish_reason": invalid}})


def test_a_row_with_branches_survives_the_wire() -> None:
    row = Row((), tuple(branches([(1, 2), (1, 3)], 9, 4).blocks), own=4)
    assert Row.load(row.dump()) == row and not row.encodes
    assert json.loads(row.dump())["own"] == 4
