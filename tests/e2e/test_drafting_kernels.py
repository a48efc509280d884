"""Drafting by Double-P's kernels, in Triton's interpreter: as `test_drafting.py`, once each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.config import DRAFTING
from tests.e2e.test_double_p import DENSE, SPARSE, Served, prompt_of, serving
from tests.oracle import models

DRAFTED, NEW_TOKENS = 3, 6

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def served(tmp_path_factory: Any) -> Iterator[Served]:
    folder: Path = models.save_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=256)
    drafts = {"speculative_algorithm": DRAFTING, "speculative_num_draft_tokens": DRAFTED}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("SGLANG_EXT_KERNELS", "triton")
        with serving(folder, attention_backend="double_p", max_total_tokens=1200, **drafts) as running:
            yield running


def test_answers_are_dense_whatever_was_guessed(served: Served) -> None:
    kinds: list[Any] = [SPARSE, {"p1": 1, "p2": 1}, None]
    prompts = [prompt_of(n, 30 + n % 7) for n in (75, 100, 30)]
    answers = served.generate(prompts, kinds, NEW_TOKENS)
    for prompt, meta in zip(prompts, answers, strict=True):
        assert served.dense_deviation(prompt, meta) < DENSE
    assert answers[1]["spec_verify_ct"] <= 3, "three tokens a verification, but for the last ones"
    stats = served.stats()
    assert stats["reader"] == "ClusterReader" and stats["cluster_tokens_computed"] > 0


def test_answers_over_pools_are_those_without_drafts(served: Served) -> None:
    """`double_p` reads blocks as dbsa does, so that every guess is right."""
    served.engine.create_pool("p", models.demonstrations(8), block_size=3)
    try:
        custom = {"pool": "p", "raw": True, "block_ids": [0, 2, 1]}
        (meta,) = served.generate([prompt_of(10, 13)], custom, 1 + 2 * DRAFTED)
        assert meta["spec_verify_ct"] <= 3, "three tokens a verification, but for the last ones"
    finally:
        served.engine.delete("p")
