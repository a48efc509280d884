"""Two tensor-parallel ranks, each with its own cache, answer as one does: cache decisions are deterministic."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

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
    served.engine.loop.run_until_complete(mixed.all(150))
    assert sum(mixed.ends.values()) == 150 and min(mixed.ends.values()) > 5, mixed.ends
    served.idle()
    until(lambda: served.engine.flush_cache().success)
    assert served.one(prompt_of(90, 3))["output_ids"] == before["output_ids"]
