"""Drafting on a GPU: in CUDA graphs and without, beside a server that does not draft, in float16 and bfloat16.

What an answer must be in float32 says `test_drafting.py`. Here half precision rounds, and a verification has other rows
than a step, so that its sums have another order: tokens may part where two candidates are as close as that moves them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_ext.config import DRAFTING
from tests.e2e.test_gpu_double_p import DENSE, EXACT, HOPPER, SPARSE, Running, differences, options, prompts
from tests.oracle import models

pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU, where kernels serve Double-P")

DRAFTED, NEW_TOKENS = 5, 90  # more than `append`: what is clustered grows on the way
DRAFTS: dict[str, Any] = {"speculative_algorithm": DRAFTING, "speculative_num_draft_tokens": DRAFTED}
ENGINES: dict[str, dict[str, Any]] = {
    "steps": {},
    "graphs": DRAFTS,
    "prefill graphs": {**DRAFTS, "cuda_graph_backend_prefill": None},  # as SGLang chooses
    "eager": {**DRAFTS, "disable_cuda_graph": True},
    "plain": {**DRAFTS, "attention_backend": "double_p"},
}
DRAFTING_ENGINES = [name for name in ENGINES if name != "steps"]
ROUNDED = {"float16": 0.03, "bfloat16": 0.25}
"""What rounding may do to a log-probability, and to the distance of the two best candidates."""
PLAIN, OVER = (0, 1, 3), (2, 4)
"""Which of the prompts are over a pool, and which are not."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return models.save_model("llama", tmp_path_factory.mktemp("llama"), head_dim=64, max_position_embeddings=4096)


@pytest.fixture(scope="module", params=list(ROUNDED))
def answered(request: Any, folder: Path) -> dict[str, dict[str, Any]]:
    """Answers by engine and by what was asked; one engine after the other."""
    found: dict[str, dict[str, Any]] = {"rounded": ROUNDED[request.param]}
    for name, more in ENGINES.items():
        running = Running(folder, "flashinfer", dtype=request.param, **more)
        try:
            asked, over = ([prompts()[place] for place in places] for places in (PLAIN, OVER))
            read = DENSE if name == "steps" else SPARSE
            kinds = [{**options(SPARSE)[2], **read}, options(SPARSE)[4]]
            found[name] = {
                "dense": running.answers(asked, [DENSE] * 3, NEW_TOKENS),
                "short": running.answers(asked[-1:], [DENSE if name == "steps" else None], NEW_TOKENS),
                "pool": running.answers(over, kinds, NEW_TOKENS),
                "sparse": running.answers(asked, [SPARSE] * 3, NEW_TOKENS),
                "exact": running.answers(asked, [EXACT] * 3, NEW_TOKENS),
                "alone": [running.answers([each], [SPARSE], NEW_TOKENS)[0] for each in asked],
                "many": running.answers([asked[1][n:] for n in range(12)], [read] * 12, NEW_TOKENS),
                "stats": running.stats(),
                "rounds": rounds(running, asked[0]),
            }
            print(name, found[name]["stats"], found[name]["rounds"])
        finally:
            running.engine.shutdown()
    return found


def rounds(running: Running, prompt: list[int]) -> dict[str, int]:
    """Verifications that an answer of `NEW_TOKENS` takes; a server that does not draft counts none."""
    found = {}
    for name, custom in (("sparse", SPARSE), ("exact", EXACT)):
        params = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "custom_params": custom}
        (out,) = running.engine.generate(input_ids=[prompt], sampling_params=[params])
        found[name] = out["meta_info"].get("spec_verify_ct", 0)
    return found


@pytest.mark.parametrize("engine", DRAFTING_ENGINES)
@pytest.mark.parametrize("asked", ["dense", "sparse", "exact", "alone", "short", "pool", "many"])
def test_answers_are_dense(answered: Any, asked: str, engine: str) -> None:
    """Log-probabilities are near where the tokens before are equal, and tokens part at ties alone.

    Over blocks a verification reads all of them, as `dense: true` does; 12 requests are more than graphs have rows.
    """
    rounded = answered["rounded"]
    dense = answered["steps"]["dense" if asked in ("sparse", "exact", "alone") else asked]
    for place, (a, b) in enumerate(zip(answered[engine][asked], dense, strict=True)):
        assert len(a[0]) == len(b[0]) == NEW_TOKENS
        found = differences(a, b)
        gaps = [gap for x, y, gap in zip(a[0], b[0], b[2], strict=True) if x != y][:1]
        print(f"{engine}, {asked}, {place}: {len(found)} steps, median {sorted(found)[len(found) // 2]:.4f}, "
              f"largest {max(found):.4f}, parted at gaps of {gaps}")  # fmt: skip
        assert max(found) < rounded and all(gap < rounded for gap in gaps)


def test_drafts_hold(answered: Any) -> None:
    """With p of one nearly every draft does, but at ties; sparse ones do where clusters tell enough."""
    for engine in DRAFTING_ENGINES:
        found = answered[engine]["rounds"]
        assert found["exact"] <= NEW_TOKENS // DRAFTED + 4
        assert found["exact"] <= found["sparse"] < NEW_TOKENS
    assert answered["steps"]["rounds"] == {"sparse": 0, "exact": 0}


def test_the_kernels_ran(answered: Any) -> None:
    for name in ENGINES:
        stats = answered[name]["stats"]
        assert (stats["attention_backend"], stats["reader"]) == ("Fa3Views", "ClusterReader")
        assert stats["cluster_tokens_computed"] > 1000 and stats.get("cluster_refused", 0) == 0
