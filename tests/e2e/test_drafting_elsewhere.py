"""Drafting with models that have windows, with KV slots in pages, and on two tensor-parallel ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.config import DRAFTING
from tests.e2e.test_double_p import DENSE, SPARSE, TOLERANCE, Served, prompt_of, serving
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
    assert answers[2]["spec_num_correct_drafts"] == answers[2]["spec_num_proposed_drafts"] > 0
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


def test_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # SGLang asks for the cores of each rank on a machine with one NUMA node.
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"0|{min(1, (os.cpu_count() or 1) - 1)}")
    folder = models.save_model("llama", tmp_path, max_position_embeddings=1024)
    with serving(folder, attention_backend="double_p", tp_size=2, max_total_tokens=1600, **DRAFTS) as served:
        check(served, DENSE)
