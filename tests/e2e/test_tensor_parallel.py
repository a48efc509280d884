"""Two tensor-parallel ranks, each with its own tree, answer as one does: cache decisions are deterministic."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.server import until
from tests.oracle import models

QUESTIONS = ["item 7 please", "item 9 or more", "third one 5"]


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
    one = _answers(folder, 1)
    assert len({tuple(ids) for ids in one}) > 1, "the questions must have different answers, or equality shows little"
    # SGLang asks for the cores of each rank on a machine with one NUMA node.
    cores = os.cpu_count() or 1
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"0|{min(1, cores - 1)}")
    assert _answers(folder, 2) == one
