"""Two tensor-parallel ranks, each with its own cache, answer as one does: cache decisions are deterministic."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import test_double_p as double_p
from tests.e2e.server import until
from tests.e2e.streams import (
    BETA,
    CASCADES,
    SINKS,
    STREAMING,
    STRIDE,
    TOLERANCE,
    TURNS,
    WINDOW,
    Mixed,
    Served,
    abort_some,
    answer_mixed,
    converse,
    deviation,
    prompt_of,
    save,
    sequence,
    serving,
)
from tests.oracle import models
from tests.oracle.streams import Sizes, streaming_llm

QUESTIONS = ["item 7 please", "item 9 or more", "third one 5"]


@pytest.fixture(autouse=True, scope="module")
def two_ranks() -> Iterator[None]:
    """SGLang asks for the cores of each rank on a machine with one NUMA node."""
    cores = os.cpu_count() or 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"0|{min(1, cores - 1)}")
        yield


def _answers(folder: Path, ranks: int) -> list[list[int]]:
    from sglang_ext import Engine

    engine = Engine(
        model_path=str(folder), dtype="float32", max_total_tokens=2000, chunked_prefill_size=48, tp_size=ranks
    )
    try:
        engine.create_pool("p", models.demonstrations(12), block_size=3, pinned=False)
        custom = {"pool": "p", "blocks": 2}
        parameters = {"max_new_tokens": 6, "temperature": 0, "custom_params": custom}
        answers = [out["output_ids"] for out in engine.generate(QUESTIONS, parameters)]
        until(lambda: engine.flush_cache().success)  # every rank encodes again what the same requests need
        again = [out["output_ids"] for out in engine.generate(QUESTIONS, parameters)]
        assert again == answers
        return answers
    finally:
        engine.shutdown()


def test_two_ranks_answer_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = models.save_model("llama", tmp_path / "llama")
    both = _answers(folder, 2)
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND")
    assert _answers(folder, 1) == both
    assert len({tuple(ids) for ids in both}) > 1, "the questions must have different answers, or equality shows little"


# ---- clusters: reports are of all heads ----


def _reports(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """meta_info of answers to a long prompt, and over a pool, that were read through clusters and measured."""
    from sglang_ext import Engine

    options: dict[str, Any] = {"attention_backend": "dbsa+double_p", "policy": double_p.POLICY, "tp_size": ranks}
    engine = Engine(model_path=str(folder), dtype="float32", max_total_tokens=2000, chunked_prefill_size=80, **options)
    try:
        engine.create_pool("p", models.demonstrations(12), block_size=3, pinned=False)
        asked = {**double_p.SPARSE, "attention_report": True}
        params = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
        alone, over_pool = ({**params, "custom_params": {**asked, **more}} for more in ({}, {"pool": "p"}))
        prompt = double_p.prompt_of(140, 6)
        answers = [
            engine.generate(input_ids=prompt, sampling_params=alone, return_logprob=True),
            engine.generate(QUESTIONS[0], over_pool, return_logprob=True),
        ]
        return [answer["meta_info"] for answer in answers]
    finally:
        engine.shutdown()


def test_reports_are_of_the_heads_of_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = models.save_model("llama", tmp_path / "llama")
    both = _reports(folder, 2)
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND")
    for mine, one in zip(both, _reports(folder, 1), strict=True):
        got, want = ([value for value, *_ in each["output_token_logprobs"]] for each in (mine, one))
        assert got == pytest.approx(want, abs=1e-4)
        measured = list(zip(mine["attention_report"][1:], one["attention_report"][1:], strict=True))
        assert len(measured) == 4
        for figures, expected in measured:
            assert "recovered_least" in expected and figures.keys() == expected.keys()
            for name, layers in expected.items():
                assert figures[name] == pytest.approx(layers, abs=1e-4), name


# ---- streams: a rank has half of the heads, and each head its own tokens ----


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = save(tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_EXT_KERNELS", "torch")
        with serving(folder, attention_backend="cascade", tp_size=2) as served:
            yield served


VARIANTS: list[tuple[dict[str, Any], Sizes]] = [
    ({}, CASCADES),
    ({"head_reduction": "max"}, Sizes(SINKS, WINDOW, STRIDE, 4, BETA, maximum=True)),
    ({"heads": "homogeneous", "selection": False}, Sizes(SINKS, WINDOW, STRIDE, 4, BETA, selection=False)),
    ({"window": 18, "cascades": 3, "sinks": 0, "stride": 7, "beta": 0.5}, Sizes(0, 18, 7, 3, 0.5)),
]


def test_cascades_of_both_ranks_equal_the_rules(served: Served) -> None:
    """Four streams, of which three fit at a time, and prompts of several chunks."""
    prompts = [prompt_of(150 + 3 * n, n) for n in range(len(VARIANTS))]
    answers = served.generate(prompts, [options for options, _ in VARIANTS])
    for prompt, answer, (options, sizes) in zip(prompts, answers, VARIANTS, strict=True):
        table = served.cascades.log_probs(sequence(prompt, answer), sizes)
        assert deviation(prompt, answer, table) <= TOLERANCE, options
        if not options:
            kept = [tuple(lane) for layer in served.cascades.kept for lane in layer]
            assert len(set(kept)) == len(kept)  # the ranks keep different tokens
    prompt = prompt_of(211, 9)
    answer = served.one(prompt, cascades=1)
    assert deviation(prompt, answer, streaming_llm(served.model, sequence(prompt, answer), STREAMING)) <= TOLERANCE


def test_conversations_go_on_on_both_ranks(served: Served) -> None:
    converse(served, "mine", {}, CASCADES, TURNS)


def test_a_decision_of_all_heads_is_refused(served: Served) -> None:
    with pytest.raises(ValueError, match=r"heads=homogeneous with tp_size=2.*set heads to independent"):
        served.one(prompt_of(20, 1), heads="homogeneous")


def test_the_ranks_keep_the_same_books(served: Served) -> None:
    """Aborted and mixed streams: ranks that decided differently would wait for each other, or answer otherwise."""
    before = served.one(prompt_of(90, 3))
    abort_some(served)
    mixed = Mixed(served, seed=2)
    answer_mixed(served, mixed, 150)
    assert served.one(prompt_of(90, 3))["output_ids"] == before["output_ids"]
