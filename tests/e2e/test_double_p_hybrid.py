"""Double-P on models most of whose layers keep a state for a whole context, in the real engine on the CPU.

The oracle is that of `test_double_p.py`: clusters in the attention layers; the others are those of `transformers`. The
radix tree is empty, so that no prefix is known, and clusters go with their request.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_double_p import SPARSE, TOLERANCE, Served, prompt_of, runs_of, serving
from tests.models.architectures import HYBRID
from tests.oracle import models

NEXT = next(each for each in HYBRID if each.name == "Qwen3-Next")


@pytest.fixture(scope="module")
def served(tmp_path_factory: Any) -> Iterator[Served]:
    folder: Path = NEXT.save(tmp_path_factory.mktemp("model"))
    with serving(folder, attention_backend="double_p", max_total_tokens=1500) as running:
        yield running


def test_p_of_one_is_the_model_s_own_attention(served: Served) -> None:
    """Beside a dense request and a short one; prompts of one chunk, of several, and one that goes on behind another."""
    prompts = [prompt_of(n, seed) for seed, n in enumerate((60, 206, 120, 30))]
    kinds: list[Any] = [{"p1": 1, "p2": 1}, {"p1": 1, "p2": 1}, {"dense": True}, None]
    for prompt, meta in zip(prompts, served.generate(prompts, kinds), strict=True):
        assert served.dense_deviation(prompt, meta) < TOLERANCE
    longer = [*prompts[1], *prompt_of(40, 8)]
    (meta,) = served.generate([longer], kinds[0])
    assert meta["cached_tokens"] == 0 and served.dense_deviation(longer, meta) < TOLERANCE


def test_a_step_is_the_paper_s_in_attention_layers(served: Served) -> None:
    prompts = [prompt_of(n, seed) for seed, n in enumerate((100, 206), 20)]
    before = served.clustered()
    for prompt, meta in zip(prompts, served.generate(prompts, SPARSE), strict=True):
        runs = runs_of(len(prompt))
        assert served.plain(prompt, meta, runs, **SPARSE) < TOLERANCE
        assert served.dense_deviation(prompt, meta) > 100 * TOLERANCE
        assert served.plain(prompt, meta, runs_of(len(prompt) - 30), **SPARSE) > 10 * TOLERANCE, "the clusters matter"
    assert served.clustered() - before == sum(run.end - run.begin for p in prompts for run in runs_of(len(p)))
