"""`--speculative-algorithm SPARSE_DRAFT` in the real engine on the CPU: whatever is guessed, answers are dense ones.

The oracle is dense attention of `transformers`. Guesses are made by attention that is far from it (`SPARSE`), so that
an answer which took one of them without verification shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext import compat, lines
from sglang_ext.config import DRAFTING
from tests.e2e.test_double_p import DENSE, MIN_TOKENS, SPARSE, TOLERANCE, Served, generated, prompt_of, serving
from tests.oracle import models, oracle

DRAFTED = 5  # rows of a verification; the window of `POLICY` has 6
TOTAL = 2500
NEW_TOKENS = 24

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not lines.at_least("0.5.17"), reason="SGLang 0.5.16 cannot draft, and is refused by name"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    return models.save_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    """One at a time; SGLang checks its accounting of KV slots all the while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
        patch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1")
        with serving(
            model,
            attention_backend="dbsa+double_p",
            speculative_algorithm=DRAFTING,
            speculative_num_draft_tokens=DRAFTED,
            max_total_tokens=TOTAL,
            schedule_conservativeness=0.1,
        ) as running:
            yield running


def sampled(served: Served, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
    """meta_info of one answer with sampling parameters of its own."""
    params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "custom_params": SPARSE, **params}
    found = served.engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True, top_logprobs_num=5)
    return {**found["meta_info"], "text": found["text"]}


# ---- answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [49, 136, 300])
def test_an_answer_is_dense_whatever_was_guessed(served: Served, length: int) -> None:
    prompt = prompt_of(length, 1 + length % 13)
    before = served.clustered()
    (meta,) = served.generate([prompt], SPARSE, NEW_TOKENS)
    assert served.dense_deviation(prompt, meta) < DENSE
    assert len(generated(meta)) == NEW_TOKENS and served.clustered() > before, "the guesses read clusters"
    assert 0 < meta["spec_num_correct_drafts"] < meta["spec_num_proposed_drafts"], "some were right, and not all"


@pytest.mark.parametrize("options", [{"dense": True}, {"p1": 1, "p2": 1}])
def test_guesses_that_read_everything_are_all_right(served: Served, options: dict[str, Any]) -> None:
    prompt = prompt_of(150, 20)
    (meta,) = served.generate([prompt], options, 1 + 4 * DRAFTED)
    assert served.dense_deviation(prompt, meta) < DENSE
    check_rounds(meta, 4)


def check_rounds(meta: dict[str, Any], rounds: int) -> None:
    """All that was guessed was right; the last token is taken alone where its length would hide what stops it."""
    right, verified = meta["spec_num_correct_drafts"], meta["spec_verify_ct"]
    assert (right, verified) in ((rounds * (DRAFTED - 1), rounds), (rounds * (DRAFTED - 1) - 1, rounds + 1))
    assert (verified == rounds) == (not compat.LENGTH_HIDES_STOPS)


def test_short_rows_guess_with_all_they_have(served: Served) -> None:
    (meta,) = served.generate([prompt_of(MIN_TOKENS - 2 * DRAFTED - 2, 21)], SPARSE, 1 + 2 * DRAFTED)
    check_rounds(meta, 2)


def test_a_batch_of_many_kinds(served: Served) -> None:
    kinds: list[Any] = [SPARSE, {"p1": 1, "p2": 1}, {"dense": True}, {"p1": 0.5, "p2": 0}, None]
    prompts = [prompt_of(n, 30 + n % 7) for n in (90, 101, 120, 133, 30)]
    for prompt, meta in zip(prompts, served.generate(prompts, kinds, NEW_TOKENS), strict=True):
        assert served.dense_deviation(prompt, meta) < DENSE


@pytest.mark.parametrize("tokens", range(1, 2 * DRAFTED))
def test_an_answer_ends_where_it_is_to_end(served: Served, tokens: int) -> None:
    prompt = prompt_of(100, 40)
    (meta,) = served.generate([prompt], {"p1": 1, "p2": 1}, tokens)
    assert len(generated(meta)) == tokens and meta["finish_reason"]["type"] == "length"


@pytest.mark.parametrize("further", range(1, DRAFTED + 2))
def test_a_stop_token_near_the_end_of_an_answer(served: Served, further: int) -> None:
    """A run of accepted tokens that reaches `max_new_tokens` does not pass over it."""
    prompt = prompt_of(100, 41)
    whole = generated(sampled(served, prompt, {"ignore_eos": True, "custom_params": {"dense": True}}))
    place = next(n for n in range(2, NEW_TOKENS) if whole[n] not in whole[:n])
    stops = {"stop_token_ids": [whole[place]], "max_new_tokens": place + 1 + further}
    meta = sampled(served, prompt, {**stops, "custom_params": {"dense": True}})
    assert generated(meta) == whole[: place + 1] and meta["finish_reason"]["type"] == "stop"


def test_a_stop_token_among_the_guesses(served: Served) -> None:
    """It ends the answer; what the tree has of the guesses behind it is right for whoever goes on with other tokens."""
    served.empty()
    prompt = prompt_of(100, 41)
    whole = generated(sampled(served, prompt, {"ignore_eos": True, "custom_params": {"dense": True}}))
    place = next(n for n in range(2, NEW_TOKENS) if whole[n] not in whole[:n])
    meta = sampled(served, prompt, {"stop_token_ids": [whole[place]], "custom_params": {"dense": True}})
    assert generated(meta) == whole[: place + 1] and meta["finish_reason"]["matched"] == whole[place]
    longer = [*prompt, *whole[:place], 77, 78, *prompt_of(20, 42)]
    (meta,) = served.generate([longer], SPARSE)
    assert len(prompt) <= meta["cached_tokens"] <= len(prompt) + place
    assert served.dense_deviation(longer, meta) < DENSE


@pytest.mark.parametrize("short", range(12, 12 + DRAFTED))
def test_to_the_last_position_of_the_context(served: Served, short: int) -> None:
    prompt = prompt_of(1024 - short, 43)
    (meta,) = served.generate([prompt], SPARSE, short)
    assert len(generated(meta)) == short - 2, "SGLang keeps two positions"
    assert served.dense_deviation(prompt, meta) < DENSE


# ---- sampling ----------------------------------------------------------------------------------------------------


def test_tokens_are_drawn_from_the_model_s_distribution(served: Served) -> None:
    """Guesses are greedy: frequencies of the second and third token over many answers are dense attention's."""
    prompt, answers, kept = prompt_of(120, 50), 300, 2
    params = {"temperature": 1.5, "top_k": kept, "max_new_tokens": 4, "ignore_eos": True, "custom_params": SPARSE}
    found = served.engine.generate(input_ids=[prompt] * answers, sampling_params=params, return_logprob=True)
    drawn = [generated(each["meta_info"]) for each in found]
    assert sum(each["meta_info"]["spec_num_correct_drafts"] for each in found) > answers / 10, "some guesses held"
    begun: list[int] = []
    for place in range(3):
        behind = [each[place] for each in drawn if each[:place] == begun]
        with torch.no_grad():
            logits = served.dense(torch.tensor([[*prompt, *begun]]), use_cache=False).logits[0, -1] / 1.5
        values, tokens = logits.topk(kept)
        for token, expected in zip(tokens.tolist(), torch.softmax(values, 0).tolist(), strict=True):
            spread = (expected * (1 - expected) / len(behind)) ** 0.5
            assert abs(behind.count(token) / len(behind) - expected) < 4.5 * spread, (place, token)
        assert set(behind) <= set(tokens.tolist())
        begun.append(int(tokens[0]))  # the guess


def test_a_batch_of_many_samplings(served: Served) -> None:
    """Each row of a verification has its own request's parameters, and answers are those of requests alone."""
    prompt = prompt_of(110, 53)
    kinds: list[dict[str, Any]] = [
        {},
        {"logit_bias": {"99": 6.0}},
        {"frequency_penalty": 1.5},
        {"min_new_tokens": 9, "ignore_eos": False, "stop_token_ids": list(range(0, 384, 2))},
        {"temperature": 1.0, "top_k": 1},
        {"regex": "(a|b){3} (card|loan)+", "ignore_eos": False},
    ]
    common = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, "custom_params": SPARSE}
    alone = [sampled(served, prompt, {"ignore_eos": True, **kind}) for kind in kinds]
    together = served.engine.generate(
        input_ids=[prompt] * len(kinds),
        sampling_params=[{**common, **kind} for kind in kinds],
        return_logprob=True,
        top_logprobs_num=[5, 0, 2, 5, 1, 3],
    )
    assert [each["output_ids"] for each in together] == [generated(meta) for meta in alone]
    for each, meta, count in zip(together, alone, (5, 0, 2, 5, 1, 3), strict=True):
        pairs = zip(each["meta_info"]["output_token_logprobs"], meta["output_token_logprobs"], strict=True)
        assert max(abs(a[0] - b[0]) for a, b in pairs) < DENSE
        tops = each["meta_info"].get("output_top_logprobs") or [()]
        assert all(len(top or ()) == count for top in tops)
    assert 9 <= len(generated(alone[3])) < NEW_TOKENS


def test_a_grammar_that_ends_among_the_guesses(served: Served) -> None:
    prompt = prompt_of(120, 54)
    answers = [sampled(served, prompt, {"regex": "(a|b){2,5}!", "max_new_tokens": n}) for n in (20, 7, 6)]
    text = answers[0]["text"]
    assert text[-1] == "!" and 3 <= len(text) <= 6 and set(text[:-1]) <= {"a", "b"}
    assert all(meta["text"] == text for meta in answers[1:] if meta["finish_reason"]["type"] == "stop")


def test_an_answer_that_is_streamed(served: Served) -> None:
    prompt = prompt_of(130, 55)
    params = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, "custom_params": SPARSE}
    whole = served.engine.generate(input_ids=prompt, sampling_params=params)
    pieces = list(served.engine.generate(input_ids=prompt, sampling_params=params, stream=True))
    assert pieces[-1]["output_ids"] == whole["output_ids"] and pieces[-1]["text"] == whole["text"]
    assert 1 < len(pieces) < NEW_TOKENS, "some pieces have several tokens"


def test_a_stop_string_among_the_guesses(served: Served) -> None:
    prompt = prompt_of(100, 56)
    text = sampled(served, prompt, {"ignore_eos": True})["text"]
    middle = text[len(text) // 2 : len(text) // 2 + 2]
    meta = sampled(served, prompt, {"ignore_eos": True, "stop": middle})
    assert meta["text"] == text[: text.index(middle)] and meta["finish_reason"]["type"] == "stop"


@pytest.mark.parametrize(
    "params",
    [{"frequency_penalty": 1.5}, {"presence_penalty": 2.0}, {"repetition_penalty": 1.7}, {"logit_bias": {"99": 6.0}}],
)
def test_what_changes_the_distribution_changes_it_at_every_token(served: Served, params: dict[str, Any]) -> None:
    """A request takes one token of a verification at a time, where each token changes the next."""
    prompt = prompt_of(110, 51)
    plain = generated(sampled(served, prompt, {"ignore_eos": True}))
    meta = sampled(served, prompt, {"ignore_eos": True, **params})
    tokens = generated(meta)
    assert tokens != plain
    with torch.no_grad():
        table = served.dense(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 :]
    for step, token in enumerate(tokens):
        assert int(penalized(table[step], tokens[:step], params).argmax()) == token, step


def penalized(logits: torch.Tensor, before: list[int], params: dict[str, Any]) -> torch.Tensor:
    """What OpenAI's and Hugging Face's penalties make of logits [vocabulary], after some generated tokens."""
    counts = torch.bincount(torch.tensor(before, dtype=torch.int64), minlength=logits.numel())
    scale = torch.where(counts > 0, float(params.get("repetition_penalty", 1.0)), 1.0)
    logits = logits - params.get("frequency_penalty", 0) * counts - params.get("presence_penalty", 0) * (counts > 0)
    logits = torch.where(logits > 0, logits / scale, logits * scale)
    for token, bias in params.get("logit_bias", {}).items():
        logits[int(token)] += bias
    return logits


def test_a_grammar_holds_at_every_token(served: Served) -> None:
    meta = sampled(served, prompt_of(120, 52), {"regex": "(a|b){3} (card|loan)+", "max_new_tokens": 20})
    text = meta["text"]
    assert len(text) >= 4 and set(text[:3]) <= {"a", "b"} and text[3] == " "


# ---- pools -------------------------------------------------------------------------------------------------------


def test_answers_over_pools_are_dbsa_s(served: Served) -> None:
    """On `dbsa+double_p` guesses read the blocks through their clusters; what verifies them reads the blocks."""
    served.empty()
    served.engine.create_pool("p", models.demonstrations(30), block_size=6)
    try:
        info = served.engine.pool("p", tokens=True)
        blocks = [list(block["token_ids"]) for block in info["blocks"]]
        options = {key: info["options"][key] for key in ("pattern", "sink_blocks", "previous_blocks", "positions")}
        encoded = oracle.encode(served.oracle.model, blocks, **options)
        own = prompt_of(12, 13)
        for ids in ([0, 2, 4], [4, 2]):
            custom = {"pool": "p", "raw": True, "block_ids": ids, **SPARSE}
            (meta,) = served.generate([own], custom, NEW_TOKENS)
            tokens = [*own, *generated(meta)]
            pieces = oracle.whole_blocks(blocks, ids)
            dense = served.oracle.log_probs(tokens, None, (), None, encoded, pieces)
            assert served_deviation(meta, dense[len(own) - 1 :]) < 10 * DENSE
            assert meta["spec_num_correct_drafts"] < meta["spec_num_proposed_drafts"]
    finally:
        served.engine.delete("p")
    served.empty()


def served_deviation(meta: dict[str, Any], table: torch.Tensor) -> float:
    """Largest difference in log-probability over the generated tokens."""
    return max(abs(each[0] - table[step, each[1]].item()) for step, each in enumerate(meta["output_token_logprobs"]))


# ---- life --------------------------------------------------------------------------------------------------------


def test_retracted(served: Served) -> None:
    """More than fits: some give their slots back and begin again; nothing of their guesses stays."""
    served.empty()
    prompts = [prompt_of(150, 80 + seed) for seed in range(12)]
    answers = served.generate(prompts, {"p1": 1, "p2": 1}, 600, fixed=False)
    assert sum(meta["num_retractions"] for meta in answers) > 0, "nothing was retracted"
    whole = [pair for pair in zip(prompts, answers, strict=True) if whole_answer(pair[1])]
    assert any(meta["num_retractions"] for _, meta in whole), "no answer that was retracted has all log-probabilities"
    for prompt, meta in whole:
        assert served.dense_deviation(prompt, meta) < TOLERANCE
    served.empty()


def whole_answer(meta: dict[str, Any]) -> bool:
    return len(meta["output_token_logprobs"]) == meta["completion_tokens"]


def test_a_turn_that_goes_on(served: Served) -> None:
    served.empty()
    prompt = prompt_of(150, 70)
    (meta,) = served.generate([prompt], SPARSE, NEW_TOKENS)
    longer = [*prompt, *generated(meta), *prompt_of(30, 71)]
    (second,) = served.generate([longer], SPARSE, NEW_TOKENS)
    # The key of an answer's last token is there where it was guessed.
    assert second["cached_tokens"] in (len(prompt) + NEW_TOKENS - 1, len(prompt) + NEW_TOKENS)
    assert served.dense_deviation(longer, second) < DENSE, "keys of accepted tokens are those of dense attention"


def test_a_report_is_refused(served: Served) -> None:
    with pytest.raises(ValueError, match="attention_report=true on a server whose sparse steps only draft"):
        served.generate([prompt_of(60, 7)], {"attention_report": True})
