"""What a verification accepts, and which servers do not draft."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext import compat, lines
from sglang_ext.attention import choice, select
from sglang_ext.compat import line
from sglang_ext.config import DRAFTING, POLICY_ENV
from sglang_ext.drafting.algorithm import TOKENS, SparseDraft, register
from sglang_ext.drafting.verify import accepted, row_positions
from sglang_ext.drafting.worker import _most
from sglang_ext.serving import checks
from sglang_ext.systems.registry import System, systems
from tests.models.architectures import HYBRID, MIXED, SERVED, Architecture
from tests.plugin.test_models import arguments

pytestmark = pytest.mark.skipif(not lines.at_least("0.5.17"), reason="SGLang 0.5.16 cannot draft: refused by name")


def by_hand(drafts: list[bool], drawn: list[bool], most: int) -> int:
    """The rule of `accepted`, a token at a time."""
    held = 1
    while held < len(drafts) and held < most and drafts[held] == drawn[held - 1]:
        held += 1
    return held


@pytest.mark.parametrize("tokens", [2, 3, 9])
def test_tokens_hold_up_to_the_first_that_was_not_guessed(tokens: int) -> None:
    dice = random.Random(tokens)
    drafts = [[dice.random() < 0.1 for _ in range(tokens)] for _ in range(257)]
    drawn = [[dice.random() < 0.1 for _ in range(tokens)] for _ in range(257)]
    most = [dice.choice([1, tokens, tokens]) for _ in range(257)]
    found = accepted(torch.tensor(drafts).long(), torch.tensor(drawn).long(), torch.tensor(most))
    assert found.dtype == torch.int32
    assert found.tolist() == [by_hand(*each) for each in zip(drafts, drawn, most, strict=True)]
    assert min(found) == 1 and max(found) == tokens


def test_rows_follow_what_a_request_has() -> None:
    assert row_positions(torch.tensor([5, 0]), 3).tolist() == [5, 6, 7, 0, 1, 2]


def server_args(**given: Any) -> Any:
    """Arguments as SGLang has them before it asks the algorithm."""
    plain = {
        "attention_backend": "double_p",
        "speculative_num_draft_tokens": None,
        "speculative_num_steps": None,
        "speculative_eagle_topk": None,
        "enable_mixed_chunk": False,
        "device": "cpu",
        "disable_overlap_schedule": False,
    }
    return SimpleNamespace(**{**plain, **given})


@pytest.fixture
def algorithm() -> SparseDraft:
    return SparseDraft(DRAFTING, lambda _: object, supports_overlap=True)


def test_what_is_not_given_is_set(algorithm: SparseDraft) -> None:
    found = server_args()
    algorithm.handle_server_args(found)
    assert (found.speculative_num_draft_tokens, found.speculative_num_steps) == (TOKENS, TOKENS - 1)
    assert found.speculative_eagle_topk == 1 and found.disable_overlap_schedule
    found = server_args(speculative_num_draft_tokens=4, speculative_num_steps=3)
    algorithm.handle_server_args(found)
    assert (found.speculative_num_draft_tokens, found.speculative_num_steps) == (4, 3)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"attention_backend": "dbsa"}, "with --attention-backend dbsa: .* one of double_p, dbsa.double_p"),
        ({"attention_backend": "triton"}, "with --attention-backend triton"),
        ({"attention_backend": "cascade"}, "with --attention-backend cascade"),
        ({"speculative_num_draft_tokens": 1}, "--speculative-num-draft-tokens 1: .* set 2 to 32"),
        ({"speculative_num_draft_tokens": 33}, "--speculative-num-draft-tokens 33: .* set 2 to 32"),
        ({"enable_mixed_chunk": True}, "with --enable-mixed-chunk"),
        ({"speculative_num_steps": 3}, f"--speculative-num-steps 3: {TOKENS} tokens are verified"),
        ({"speculative_eagle_topk": 2}, "--speculative-eagle-topk 2"),
    ],
)
def test_what_does_not_fit_is_refused(algorithm: SparseDraft, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        algorithm.handle_server_args(server_args(**given))


def test_sglang_knows_the_algorithm_once(algorithm: SparseDraft) -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    register()
    register()
    known = SpeculativeAlgorithm.from_string(DRAFTING.lower())
    assert isinstance(known, SparseDraft) and known.is_speculative() and known.supports_overlap
    # SGLang asks a registered algorithm what it asks its own ones.
    asked = {name for name, each in vars(SpeculativeAlgorithm).items() if callable(each) and not name.startswith("_")}
    own = {"register", "from_string", "get_platform_worker_cls"}  # SGLang's algorithms ask the last of themselves
    assert not {name for name in asked - own if not hasattr(known, name)}


def test_gpus_that_have_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafting = {"speculative_algorithm": DRAFTING, "speculative_num_draft_tokens": TOKENS}
    server_args = arguments(SERVED[0].save(tmp_path, weights=False), backend="double_p", **drafting)
    able = [name for name, each in systems().items() if each.drafts]
    assert able == ["double_p", "dbsa+double_p"]
    assert all(choice.drafts(systems()[name]) for name in able)
    monkeypatch.setattr(choice.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(choice.torch.cuda, "get_device_capability", lambda: (9, 0))
    assert all(choice.drafts(systems()[name]) for name in able)
    assert not choice.drafts(systems()["cascade"])
    monkeypatch.setattr(choice.torch.cuda, "get_device_capability", lambda: (8, 0))
    assert not any(choice.drafts(systems()[name]) for name in able)
    (problem,) = checks._of_drafts(server_args, systems()["double_p"])
    assert "on this GPU, where nobody has run it: use a Hopper GPU with SGLANG_EXT_PLAIN_ATTENTION=auto" in problem


def loaded(folder: Path, drafting: bool) -> SimpleNamespace:
    """A model runner, as far as `select` looks at it."""
    config = line.model_config(arguments(folder, backend="double_p"))
    windows = getattr(config.hf_text_config, "layer_types", None) or ["full_attention"]
    server_args = SimpleNamespace(attention_backend="double_p", speculative_algorithm=DRAFTING if drafting else None)
    return SimpleNamespace(model_config=config, server_args=server_args, windows="sliding_attention" in windows)


@pytest.mark.parametrize("plain", ["fa3", "flashinfer", "torch"])
@pytest.mark.parametrize(
    ("architecture", "drafting", "beside"),
    [(SERVED[0], False, ""), (SERVED[0], True, "flashinfer torch"), (MIXED[0], False, "flashinfer")]
    + [(each, False, "flashinfer") for each in HYBRID],
    ids=["plain", "drafting", "windows", *(f"states {each.name}" for each in HYBRID)],
)
def test_what_no_gpu_has_run_is_refused_when_the_model_is_loaded(
    architecture: Architecture, drafting: bool, beside: str, plain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What serves dense attention on a GPU is known then; `beside` says where it is refused."""
    runner = loaded(architecture.save(tmp_path, weights=False), drafting)
    monkeypatch.setattr(compat, "window_layers", lambda runner: frozenset({0} if runner.windows else ()))
    monkeypatch.setattr(compat, "resolved", lambda server_args: server_args)
    if plain not in beside.split():
        return select._refuse_untried(runner, plain)
    words = "drafts have been verified on fa3 alone" if drafting else "double_p has read its layers beside fa3 alone"
    with pytest.raises(ValueError, match=f"{words}; set SGLANG_EXT_PLAIN_ATTENTION and SGLANG_EXT_KERNELS to auto"):
        select._refuse_untried(runner, plain)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"policy": '{"window": 8}'}, "window=8 with --speculative-num-draft-tokens 9: .* set it to 9 or more"),
        ({"enable_custom_logit_processor": True}, "with --enable-custom-logit-processor"),
        ({"enable_return_routed_experts": True}, "with --enable-return-routed-experts"),
    ],
)
def test_a_server_that_would_guess_wrongly_does_not_start(
    given: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SERVED[0].save(tmp_path, weights=False)
    drafting = {"speculative_algorithm": DRAFTING, "speculative_num_draft_tokens": TOKENS}
    assert checks.refusals(arguments(folder, backend="double_p", **drafting)) == []
    given = dict(given)
    if "policy" in given:
        monkeypatch.setenv(POLICY_ENV, given.pop("policy"))
    (problem,) = checks.refusals(arguments(folder, backend="double_p", **drafting, **given))
    assert re.search(words, problem)


def test_a_model_whose_layers_keep_a_state_does_not_draft(tmp_path: Path) -> None:
    folder = HYBRID[0].save(tmp_path, weights=False)
    drafting = {"speculative_algorithm": DRAFTING, "speculative_num_draft_tokens": TOKENS}
    assert checks.refusals(arguments(folder, backend="double_p")) == []
    (problem,) = checks.refusals(arguments(folder, backend="double_p", **drafting))
    assert "with a model whose layers keep a state" in problem and "leave out --speculative-algorithm" in problem


def test_a_release_of_sglang_that_cannot_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.lines, "installed_sglang", lambda: "0.5.16.post1")
    (problem,) = checks._of_drafts(SimpleNamespace(speculative_algorithm=DRAFTING), systems()["double_p"])
    assert "with SGLang 0.5.16.post1" in problem and "install SGLang 0.5.17 or later" in problem


def test_a_system_says_itself_whether_it_drafts() -> None:
    assert not System("", "").drafts


@pytest.mark.parametrize(("answered", "hides", "most"), [(8, True, 9), (17, True, 2), (19, True, 1), (17, False, 9)])
def test_the_last_token_of_an_answer_is_taken_alone(
    monkeypatch: pytest.MonkeyPatch, answered: int, hides: bool, most: int
) -> None:
    """Of 20, where SGLang looks at the length first; tokens of the newest pass, which the request lacks, count too."""
    monkeypatch.setattr(compat, "LENGTH_HIDES_STOPS", hides)
    params = SimpleNamespace(
        max_new_tokens=20, frequency_penalty=0, presence_penalty=0, repetition_penalty=1, min_new_tokens=0
    )
    request: Any = SimpleNamespace(sampling_params=params, output_ids=[1] * min(answered, 8))
    assert _most(request, answered, 9) == most
    params.min_new_tokens = answered + 1
    assert _most(request, answered, 9) == 1
