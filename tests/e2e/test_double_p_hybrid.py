"""Double-P on models most of whose layers keep a state for a whole context, in the real engine on the CPU.

The oracle is that of `test_double_p.py`: clusters in the attention layers; the others are those of `transformers`. The
radix tree is empty, so that no prefix is known, and clusters go with their request.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_double_p import (
    SPARSE,
    TOLERANCE,
    Served,
    check_everything,
    check_steps,
    prompt_of,
    runs_of,
    serving,
)
from tests.models.architectures import HYBRID
from tests.oracle import models

QWEN = next(each for each in HYBRID if each.name == "Qwen3.5")  # without experts, between which a last bit may decide


@pytest.fixture(scope="module")
def served(tmp_path_factory: Any) -> Iterator[Served]:
    folder: Path = QWEN.save(tmp_path_factory.mktemp("model"))
    with serving(folder, attention_backend="double_p", max_total_tokens=1500, schedule_conservativeness=0.1) as running:
        yield running


def test_p_of_one_is_the_model_s_own_attention(served: Served) -> None:
    """Beside a dense request and a short one; prompts of one chunk, of several, and one that goes on behind another."""
    check_everything(served, cached=0)


def test_a_step_is_the_paper_s_in_attention_layers(served: Served) -> None:
    check_steps(served)


def test_equal_prompts_and_what_goes_with_a_request(served: Served) -> None:
    """Nothing is found of an earlier request, and nothing is left of it; a slot of states begins anew."""
    prompt = prompt_of(150, 17)
    before = served.clustered()
    for _ in range(2):
        for meta in served.generate([prompt] * 3, SPARSE):
            assert meta["cached_tokens"] == 0 and served.plain(prompt, meta, runs_of(150)) < TOLERANCE
    stats = served.stats()
    assert served.clustered() - before == 6 * sum(run.end - run.begin for run in runs_of(150))
    assert not any(stats[name] for name in ("cluster_runs", "cluster_tokens", "cluster_bytes", "cluster_tokens_loose"))


def test_reports_are_of_the_attention_layers(served: Served) -> None:
    (meta,) = served.generate([prompt_of(140, 6)], {**SPARSE, "attention_report": True})
    for step in meta["attention_report"][1:]:
        assert {len(figures) for figures in step.values()} == {1}, "one of 4 layers has attention"
        assert 0 < step["recovered_least"][0] < 1


def test_retracted_requests_begin_anew(served: Served) -> None:
    """Under p = 1 a retraction changes no token; afterwards all of the KV cache is free again."""
    prompts = [prompt_of(150, seed) for seed in (85, 88, 99, 100, 101, 103, 105, 108)]  # whose answers are long
    answers = served.generate(prompts, {"p1": 1, "p2": 1}, new_tokens=300, fixed=False)
    assert sum(meta["num_retractions"] for meta in answers) > 0, "nothing was retracted"
    compared = 0
    for prompt, meta in zip(prompts, answers, strict=True):
        if len(meta["output_token_logprobs"]) == meta["completion_tokens"]:
            assert served.dense_deviation(prompt, meta) < TOLERANCE
            compared += meta["num_retractions"] > 0
    assert compared, "no answer that was retracted has all of its log-probabilities"
    assert served.stats()["cluster_tokens_loose"] == 0
    served.empty()
    (meta,) = served.generate([prompt_of(900, 3)], {"p1": 1, "p2": 1})
    assert served.dense_deviation(prompt_of(900, 3), meta) < TOLERANCE


def test_there_are_no_pools(served: Served) -> None:
    words = "3 of 4 layers of this server's model keep a state.*--attention-backend double_p"
    with pytest.raises(ValueError, match=words):
        served.engine.create_pool("p", models.demonstrations(8))
    with pytest.raises(ValueError, match=words):
        served.engine.plan_pool(models.demonstrations(8))
    with pytest.raises(ValueError, match="'p'"):
        served.generate([prompt_of(20, 1)], {"pool": "p"})
    assert served.engine.pools() == []


def test_texts_alone_are_read(served: Served) -> None:
    with pytest.raises(ValueError, match="image_data: this server reads text only"):
        served.engine.generate(prompt="what is that?", image_data="https://example.com/a.png")
