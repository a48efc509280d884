"""Double-P's kernels in the real engine, against the same oracle as the plain PyTorch that `test_double_p.py` tests.

Without a GPU the kernels run in Triton's interpreter, seconds a step: every kind of row occurs once. On a GPU,
`test_gpu_double_p.py` says more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_double_p import DENSE, POLICY, SEGMENT, SPARSE, TOLERANCE, Run, Served, prompt_of, runs_of, whole
from tests.oracle import models

NEW_TOKENS = 3


@pytest.fixture(scope="module")
def served(tmp_path_factory: Any) -> Iterator[Served]:
    from sglang_ext import Engine

    folder: Path = models.save_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=256)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("SGLANG_EXT_KERNELS", "triton")
        engine = Engine(
            model_path=str(folder),
            attention_backend="dbsa+double_p",
            policy=POLICY,
            dtype="float32",
            max_total_tokens=1200,
            max_running_requests=4,
            random_seed=0,
            log_level="error",
        )
        try:
            yield Served(engine, folder)
        finally:
            engine.shutdown()


def test_a_batch_of_many_kinds(served: Served) -> None:
    kinds: list[Any] = [SPARSE, {"p1": 1, "p2": 1}, {"dense": True}]
    prompts = [prompt_of(n, 30 + n % 7) for n in (100, 75, 30)]
    answers = served.generate(prompts, kinds, new_tokens=NEW_TOKENS)
    assert served.plain(prompts[0], answers[0], runs_of(100), **SPARSE) < TOLERANCE
    assert served.dense_deviation(prompts[0], answers[0]) > 10 * TOLERANCE
    assert max(served.dense_deviation(*each) for each in zip(prompts[1:], answers[1:], strict=True)) < DENSE


def test_a_prefix_that_cuts_clusters(served: Served) -> None:
    """The first prompt's answer left its clusters in the tree; the second has a part of them, the third less.

    Of the second's part the clusters wholly inside serve; the third's is clustered anew.
    """
    served.empty()
    other, end = prompt_of(130, 10), 130 - POLICY["window"]
    served.generate([other], SPARSE, new_tokens=1)
    served.generate([other], SPARSE, new_tokens=2)
    keys = [layer[:, SEGMENT:end] for layer in served.oracle.keys(other)]
    first = runs_of(130)[0]
    for cut, run in ((121, Run(SEGMENT, end, SEGMENT, 121, keys=keys)), (100, whole(SEGMENT, 100))):
        prompt = [*other[:cut], *prompt_of(30, 11)]
        (meta,) = served.generate([prompt], SPARSE, new_tokens=NEW_TOKENS)
        assert meta["cached_tokens"] == cut
        own = runs_of(len(prompt), begin=cut)
        assert served.plain(prompt, meta, [first, run, *own]) < TOLERANCE
        assert served.plain(prompt, meta, [first, *own]) > 10 * TOLERANCE, "clusters of the prefix are read"


def test_blocks_read_through_their_clusters(served: Served) -> None:
    served.engine.create_pool("p", models.demonstrations(8), block_size=3)
    try:
        custom = {"pool": "p", "raw": True, "block_ids": [0, 2, 1]}
        own = prompt_of(10, 13)
        exact, dense, sparse = (
            served.generate([own], {**custom, **more}, new_tokens=NEW_TOKENS)[0]
            for more in ({"p1": 1, "p2": 1}, {"dense": True}, SPARSE)
        )
        logprobs = [[step[0] for step in meta["output_token_logprobs"]] for meta in (exact, dense, sparse)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=DENSE) != logprobs[2]
        assert served.stats()["cluster_tokens"] > 0
    finally:
        served.engine.delete("p")


def test_the_kernels_ran(served: Served) -> None:
    """A silent fallback to plain PyTorch would pass every test above."""
    stats: dict[str, Any] = served.stats()
    assert stats["reader"] == "ClusterReader"
    assert stats["cluster_refused"] == 0


def test_what_a_step_kept_is_reported(served: Served) -> None:
    """Of what the kernels chose; `test_clustered_backend.py` has the figures beside those of plain PyTorch."""
    kinds: list[Any] = [{"p1": 1, "p2": 1, "attention_report": True}, {**SPARSE, "attention_report": True}, SPARSE]
    everything, some, unasked = served.generate([prompt_of(100, 6)] * 3, kinds, new_tokens=NEW_TOKENS)
    assert not any(unasked.get("attention_report") or ())
    for meta in (everything, some):
        assert "prompt" in meta["attention_report"][0]["dense"] and len(meta["attention_report"]) == NEW_TOKENS
        assert all(len(figures) == 3 for step in meta["attention_report"][1:] for figures in step.values())  # layers
    for step in everything["attention_report"][1:]:
        assert step["exact"] == step["kept"] == [1.0] * 3 and step["approximated_clusters"] == [0.0] * 3
        assert min(step["recovered_least"]) > 1 - 1e-6
    for step in some["attention_report"][1:]:
        assert all(0 < exact <= kept < 1 for exact, kept in zip(step["exact"], step["kept"], strict=True))
        assert 0 < min(step["recovered_least"]) <= max(step["recovered"]) < 1


def test_nothing_is_kept_of_what_left(served: Served) -> None:
    served.empty()
    stats = served.stats()
    assert stats["cluster_runs"] == 0 and stats["cluster_tiles_free"] == stats["cluster_tiles"]
