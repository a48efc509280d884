"""Ltri-LLM on two tensor-parallel ranks: answers are those of one, by `tests/oracle/ltri.py`.

Each rank has two of the four query heads, and one of the two key-value heads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.policies.heads import Heads, weights_hash
from tests.e2e import test_ltri as of_one
from tests.e2e import test_ltri_forks as forks
from tests.e2e.streams import (
    TOLERANCE,
    Mixed,
    Served,
    abort_some,
    answer_mixed,
    deviation,
    prompt_of,
    save,
    sequence,
    serving,
)
from tests.e2e.test_ltri_host import LAYER_BYTES, LAYERS
from tests.e2e.test_ltri_settings import HEADS, different
from tests.oracle.ltri import LtriOracle, LtriSizes

SIZES = of_one.SIZES
BLOCKS = 1000  # one of the longest streams at a time, and short ones beside it
OPTIONS: dict[str, Any] = {"attention_backend": "ltri", "tp_size": 2}


@pytest.fixture(autouse=True, scope="module")
def two_ranks() -> Iterator[None]:
    """SGLang asks for the cores of each rank on a machine with one NUMA node."""
    cores = os.cpu_count() or 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"0|{min(1, cores - 1)}")
        patch.setenv("SGLANG_EXT_KERNELS", "torch")
        yield


# ---- settings, one engine for each, before the one below ----


def check(folder: Path, sizes: LtriSizes, **options: Any) -> int:
    """Answers of two ranks are the oracle's; how often they were retracted."""
    prompts = [different(length) for length in (3, 70, 131)]
    with serving(folder, **OPTIONS | options) as served:
        answers = served.generate(prompts, [{}] * len(prompts), 10)
    oracle = LtriOracle(folder)
    for prompt, answer in zip(prompts, answers, strict=True):
        table = oracle.log_probs(sequence(prompt, answer), len(prompt), sizes)
        assert deviation(prompt, answer, table) <= TOLERANCE, len(prompt)
    other = replace(sizes, heads={0: (3, 0.4), 2: (3, 0.6)} if sizes.heads else None, retrieved=2 if sizes.heads else 1)
    table = oracle.log_probs(sequence(prompts[-1], answers[-1]), len(prompts[-1]), other)
    assert deviation(prompts[-1], answers[-1], table) > 10 * TOLERANCE
    return sum(answer["meta_info"].get("num_retractions", 0) for answer in answers)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_retrieval_heads_of_both_ranks_vote(kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer's is on the first rank, the last layer's on the second; references stand for the kernels."""
    monkeypatch.setenv("SGLANG_EXT_KERNELS", kernels)
    folder = save(tmp_path / "model")
    Heads("tiny", weights_hash(str(folder)), HEADS, {}).save(tmp_path / "heads.json")
    sizes = SIZES if kernels == "torch" else of_one.OF_KERNELS
    sizes = replace(sizes, heads={0: (1, 0.4), 2: (3, 0.6)}, similarity="max")
    check(folder, sizes, policy={**of_one.policy_of(sizes), "heads": str(tmp_path / "heads.json")})


def test_all_heads_and_the_largest_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of an answer retrieves anew, and requests are retracted."""
    forks.retract_often(monkeypatch)
    sizes = replace(SIZES, similarity="max", persist=False)
    policy = of_one.policy_of(sizes)
    assert check(save(tmp_path), sizes, policy=policy, disable_overlap_schedule=True) > 0


def test_infllm(tmp_path: Path) -> None:
    policy = {name: value for name, value in of_one.policy_of(SIZES).items() if name not in ("index", "vote")}
    check(save(tmp_path), replace(SIZES, index="infllm", vote="off"), attention_backend="infllm", policy=policy)


# ---- one engine ----


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """All heads vote, and their products are summed. Host memory is that of one rank, dealt to two."""
    folder = save(tmp_path_factory.mktemp("model"))
    policy = {**of_one.policy_of(SIZES), "host_gb": (BLOCKS + 0.5) * LAYERS * LAYER_BYTES / 2**30}
    with serving(folder, policy=policy, **OPTIONS) as served:
        oracle = LtriOracle(folder)
        served.cascades = of_one.Replayed(oracle)  # type: ignore[assignment]
        served.oracle, served.sizes, served.retracts = oracle, SIZES, False  # type: ignore[attr-defined]
        assert served.stats()["host_blocks_total"] == BLOCKS
        yield served


def test_answers_are_the_papers(served: Served) -> None:
    of_one.test_answers_are_the_papers(served)


def test_turns_go_on_from_what_is_on_the_host(served: Served) -> None:
    of_one.test_turns_go_on_from_what_is_on_the_host(served)


def test_what_layers_got_back_is_reported(served: Served) -> None:
    of_one.test_what_layers_got_back_is_reported(served)


def test_forks(served: Served) -> None:
    forks.test_a_second_question_over_a_document(served)
    forks.test_siblings_leave_each_other_alone(served)


class Asked(Mixed):
    """Requests to a server of Ltri-LLM, of which some share beginnings or have host memory that others wait for."""

    def options(self) -> dict[str, Any]:
        chosen: dict[str, Any] = {}
        if self.dice.random() < 0.3:
            chosen = {"conversation": self.dice.choice("abc"), "conversation_key": self.KEY}
            if self.dice.random() < 0.7:
                chosen["continue"] = True
        return chosen


def test_the_ranks_keep_the_same_books(served: Served) -> None:
    """Aborted and mixed streams: ranks that decided differently would wait for each other, or answer otherwise."""
    prompt = prompt_of(150, 3)
    before = served.one(prompt)
    abort_some(served)
    mixed = Asked(served, seed=2)
    answer_mixed(served, mixed, 100)
    of_one.clean(served)
    assert served.one(prompt)["output_ids"] == before["output_ids"]
