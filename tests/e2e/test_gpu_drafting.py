"""Drafting on a GPU: in CUDA graphs and without, beside a server that does not draft, in float16 and bfloat16.

What an answer must be in float32 says `test_drafting.py`. Here half precision rounds, and a verification has other rows
than a step, so that its sums have another order: tokens may part where two candidates are as close as that moves them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.config import DRAFTING
from tests.e2e.test_gpu_double_p import DENSE, EXACT, HOPPER, SPARSE, Running, differences, options, prompts
from tests.oracle import models

pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU, where kernels serve Double-P")

DRAFTED, NEW_TOKENS = 5, 90  # more than `append`: what is clustered grows on the way
DRAFTS: dict[str, Any] = {"speculative_algorithm": DRAFTING, "speculative_num_draft_tokens": DRAFTED}
ENGINES: dict[str, dict[str, Any]] = {
    "steps": {},
    "graphs": DRAFTS,
    "eager": {**DRAFTS, "disable_cuda_graph": True},
    "plain": {**DRAFTS, "attention_backend": "double_p"},
    "bfloat16 steps": {"dtype": "bfloat16"},
    "bfloat16": {**DRAFTS, "dtype": "bfloat16"},
}
ROUNDED = {"float16": 0.03, "bfloat16": 0.25}
"""What rounding may do to a log-probability, and to the distance of the two best candidates."""
PLAIN = [0, 1, 3]
"""Prompts that are not over a pool."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return models.save_model("llama", tmp_path_factory.mktemp("llama"), head_dim=64, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def answered(folder: Path) -> dict[str, dict[str, Any]]:
    """Answers by engine and by what was asked; one engine after the other."""
    found: dict[str, dict[str, Any]] = {}
    for name, more in ENGINES.items():
        running = Running(folder, "flashinfer", **more)
        try:
            asked = [prompts()[place] for place in PLAIN]
            over = [prompt for place, prompt in enumerate(prompts()) if place not in PLAIN]
            read = DENSE if name == "steps" else SPARSE
            kinds = [{**options(SPARSE)[2], **read}, options(SPARSE)[4]]
            found[name] = {
                "dense": running.answers(asked, [DENSE] * 3, NEW_TOKENS),
                "short": running.answers(asked[-1:], [None], NEW_TOKENS),
                "pool": running.answers(over, kinds, NEW_TOKENS) if name != "plain" else [],
                "sparse": running.answers(asked, [SPARSE] * 3, NEW_TOKENS),
                "exact": running.answers(asked, [EXACT] * 3, NEW_TOKENS),
                "alone": [running.answers([each], [SPARSE], NEW_TOKENS)[0] for each in asked],
                "many": running.answers([asked[1][n:] for n in range(12)], [SPARSE] * 12, NEW_TOKENS),
                "stats": running.stats(),
                "rounds": rounds(running, asked[0]),
            }
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


def check_same(ours: list[Any], dense: list[Any], rounded: float, what: str) -> None:
    """Log-probabilities are near where the tokens before are equal, and tokens part at ties alone."""
    for place, (a, b) in enumerate(zip(ours, dense, strict=True)):
        assert len(a[0]) == len(b[0]) == NEW_TOKENS
        found = differences(a, b)
        gaps = [gap for x, y, gap in zip(a[0], b[0], b[2], strict=True) if x != y][:1]
        print(f"{what}, {place}: {len(found)} steps, median {sorted(found)[len(found) // 2]:.4f}, "
              f"largest {max(found):.4f}, parted at gaps of {gaps}")  # fmt: skip
        assert max(found) < rounded and all(gap < rounded for gap in gaps)


@pytest.mark.parametrize("engine", ["graphs", "eager", "plain", "bfloat16"])
def test_answers_are_dense(answered: Any, engine: str) -> None:
    steps = answered["bfloat16 steps" if engine == "bfloat16" else "steps"]
    rounded = ROUNDED["bfloat16" if engine == "bfloat16" else "float16"]
    for asked in ("dense", "sparse", "exact", "alone"):
        check_same(answered[engine][asked], steps["dense"], rounded, f"{engine}, {asked}")
    check_same(answered[engine]["short"], steps["short"], rounded, f"{engine}, short")


@pytest.mark.parametrize("engine", ["graphs", "eager"])
def test_answers_over_pools_are_dense(answered: Any, engine: str) -> None:
    """A verification reads all of the blocks, as `dense: true` does."""
    check_same(answered[engine]["pool"], answered["steps"]["pool"], ROUNDED["float16"], f"{engine}, pool")
    assert answered["steps"]["stats"]["cluster_tokens_computed"] > 0


def test_more_requests_than_graphs_have_rows(answered: Any) -> None:
    for engine in ("graphs", "plain"):
        for a, b in zip(answered[engine]["many"], answered["eager"]["many"], strict=True):
            check_same([a], [b], ROUNDED["float16"], f"{engine}, many")


def test_drafts_hold(answered: Any) -> None:
    """With p of one nearly every draft does, but at ties; sparse ones do where clusters tell enough."""
    for engine in ("graphs", "eager", "plain"):
        found = answered[engine]["rounds"]
        print(f"{engine}: {NEW_TOKENS} tokens in {found} verifications of {DRAFTED} tokens")
        assert found["exact"] <= NEW_TOKENS // DRAFTED + 4
        assert found["exact"] <= found["sparse"] < NEW_TOKENS
    assert answered["steps"]["rounds"] == {"sparse": 0, "exact": 0}


def test_the_kernels_ran(answered: Any) -> None:
    for name in ("graphs", "eager", "plain", "bfloat16"):
        stats = answered[name]["stats"]
        assert (stats["attention_backend"], stats["reader"]) == ("Fa3Views", "ClusterReader")
        assert stats["cluster_tokens_computed"] > 1000 and stats.get("cluster_refused", 0) == 0
