"""Drafting with windows, with slots in pages, at the end of context and cache, and on two tensor-parallel ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.config import DRAFTING
from tests.e2e.test_double_p import DENSE, POLICY, SPARSE, TOLERANCE, Served, generated, prompt_of, serving
from tests.models.architectures import MIXED
from tests.oracle import models

DRAFTS = {"speculative_algorithm": DRAFTING, "speculative_num_draft_tokens": 5}
NEW_TOKENS = 16

pytestmark = pytest.mark.timeout(600)


def check(served: Served, tolerance: float) -> None:
    """Dense answers of a batch of many kinds, whatever was guessed."""
    prompts = [prompt_of(n, seed) for seed, n in enumerate((60, 206, 120, 30), 3)]
    kinds: list[Any] = [SPARSE, SPARSE, {"dense": True}, None]
    answers = served.generate(prompts, kinds, NEW_TOKENS)
    for prompt, meta in zip(prompts, answers, strict=True):
        assert served.dense_deviation(prompt, meta) < tolerance
    assert served.clustered() > 0, "the guesses read clusters"
    assert answers[2]["spec_verify_ct"] <= 4, "five tokens a verification, but for the last ones"
    served.empty()


def test_a_model_with_windows(tmp_path: Path) -> None:
    gemma = next(each for each in MIXED if each.name == "Gemma 3, text")
    folder = replace(gemma, fields={**gemma.fields, "sliding_window": 24}).save(tmp_path)
    with serving(folder, attention_backend="double_p", max_total_tokens=1500, **DRAFTS) as served:
        check(served, TOLERANCE)


def test_slots_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
    monkeypatch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1")
    folder = models.save_model("llama", tmp_path, max_position_embeddings=1024)
    with serving(folder, attention_backend="double_p", page_size=16, max_total_tokens=1600, **DRAFTS) as served:
        check(served, DENSE)
        longer = [*prompt_of(206, 4), *prompt_of(20, 9)]
        (meta,) = served.generate([longer], SPARSE, NEW_TOKENS)
        assert served.dense_deviation(longer, meta) < DENSE


@pytest.mark.parametrize("rows", [9, 16])
def test_to_the_end_of_the_context_and_of_the_cache(tmp_path: Path, rows: int) -> None:
    """Rows of the last verification lie beyond both, and what is guessed needs slots of its own."""
    folder = models.save_model("llama", tmp_path, max_position_embeddings=256)
    window = {**POLICY, "window": rows}
    drafts = {"speculative_algorithm": DRAFTING, "speculative_num_draft_tokens": rows, "attention_backend": "double_p"}
    with serving(folder, max_total_tokens=600, policy=window, **drafts) as served:
        for short in (*range(8, 8 + rows, 3), 40):
            prompt = prompt_of(256 - short, short)
            (meta,) = served.generate([prompt], SPARSE, short)
            assert len(generated(meta)) == short - 2 and served.dense_deviation(prompt, meta) < DENSE
        params = {"temperature": 0, "max_new_tokens": 56, "ignore_eos": True, "frequency_penalty": 0.1}
        found = served.engine.generate(input_ids=prompt_of(200, 1), sampling_params=params)
        assert found["meta_info"]["completion_tokens"] == 54
        served.empty()
    with serving(folder, max_total_tokens=230, policy=window, **drafts) as served:
        (meta,) = served.generate([prompt_of(150, 2)], {"dense": True}, 100)
        assert len(generated(meta)) == 230 - 150 - 2 - 2 * rows
        words = f"needs 229 tokens of KV cache and {2 + 2 * rows} beside them, 230 of 230"
        with pytest.raises(ValueError, match=words):
            served.generate([prompt_of(229, 3)], SPARSE, 2)


def test_ranks_that_sample_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that accepted other lengths would wait for each other."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"0|{min(1, (os.cpu_count() or 1) - 1)}")
    folder = models.save_model("llama", tmp_path, max_position_embeddings=1024)
    with serving(folder, attention_backend="double_p", tp_size=2, max_total_tokens=1600, **DRAFTS) as served:
        params = {"temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True, "custom_params": SPARSE}
        asked = [params, {**params, "regex": "(a|b)+", "ignore_eos": False}, params]
        found = served.engine.generate(input_ids=[prompt_of(90 + n, n) for n in range(3)], sampling_params=asked)
        assert [each["meta_info"]["completion_tokens"] for each in (found[0], found[2])] == [40, 40]
        assert set(found[1]["text"]) <= {"a", "b"}


def test_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # SGLang asks for the cores of each rank on a machine with one NUMA node.
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"0|{min(1, (os.cpu_count() or 1) - 1)}")
    folder = models.save_model("llama", tmp_path, max_position_embeddings=1024)
    with serving(folder, attention_backend="double_p", tp_size=2, max_total_tokens=1600, **DRAFTS) as served:
        check(served, DENSE)
