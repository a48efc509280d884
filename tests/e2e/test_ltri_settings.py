"""Settings of Ltri-LLM in the real engine, one engine for each, against `tests/oracle/ltri.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.policies.heads import Heads, weights_hash
from tests.e2e.streams import TOLERANCE, deviation, prompt_of, save, sequence, serving
from tests.e2e.test_ltri import SIZES, policy_of
from tests.oracle.ltri import LtriOracle

VARIANTS: tuple[dict[str, Any], ...] = (
    {"similarity": "max", "persist": False, "far": True},
    {"similarity": "mass", "vote": "preceding", "ratio": "rowcol", "sinks": 0},
    {"vote": "off", "ratio": "col", "sinks": 11, "block": 4, "last": 16, "retrieved": 5, "theta": 0.6, "phi": 0.3},
    {"retrieved": 0},
    {"index": "mean", "vote": "preceding"},
)


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: "-".join(map(str, changes.values())))
def test_settings(changes: dict[str, Any], tmp_path: Path) -> None:
    sizes, folder = replace(SIZES, **changes), save(tmp_path)
    prompts = [prompt_of(length, length) for length in (3, 70, 131)]
    with serving(folder, attention_backend="ltri", policy=policy_of(sizes), chunked_prefill_size=64) as served:
        answers = served.generate(prompts, [{}] * len(prompts), 10)
    oracle = LtriOracle(folder)
    for prompt, answer in zip(prompts, answers, strict=True):
        table = oracle.log_probs(sequence(prompt, answer), len(prompt), sizes)
        assert deviation(prompt, answer, table) <= TOLERANCE, len(prompt)


HEADS = ((0.1, 0.4, 0.0, 0.2), (0.1, 0.0, 0.0, 0.1), (0.3, 0.2, 0.5, 0.6))


@pytest.mark.parametrize("vote", ["inclusive", "preceding"])
def test_retrieval_heads_vote(vote: str, tmp_path: Path) -> None:
    """The first and the last layer have one each, the one between has none, and gets what the first voted for."""
    folder = save(tmp_path / "model")
    Heads("tiny", weights_hash(str(folder)), HEADS, {}).save(tmp_path / "heads.json")
    sizes = replace(SIZES, heads={0: (1, 0.4), 2: (3, 0.6)}, similarity="max", vote=vote)
    prompt, oracle = prompt_of(131, 5), LtriOracle(folder)
    policy = {**policy_of(sizes), "heads": str(tmp_path / "heads.json")}
    with serving(folder, attention_backend="ltri", policy=policy) as served:
        answer = served.one(prompt, 10)
    table = oracle.log_probs(sequence(prompt, answer), len(prompt), sizes)
    assert deviation(prompt, answer, table) <= TOLERANCE
    other = replace(sizes, heads={0: (3, 0.4), 2: (3, 0.6)})
    assert deviation(prompt, answer, oracle.log_probs(sequence(prompt, answer), len(prompt), other)) > 10 * TOLERANCE


def test_infllm(tmp_path: Path) -> None:
    """By its name: its index, all heads, and no votes."""
    folder = save(tmp_path / "model")
    sizes = replace(SIZES, index="infllm", vote="off")
    prompt, oracle = prompt_of(131, 6), LtriOracle(folder)
    policy = {name: value for name, value in policy_of(SIZES).items() if name not in ("index", "vote")}
    with serving(folder, attention_backend="infllm", policy=policy) as served:
        answer = served.one(prompt, 10)
    assert deviation(prompt, answer, oracle.log_probs(sequence(prompt, answer), len(prompt), sizes)) <= TOLERANCE
    for other in (replace(sizes, index="mean"), replace(sizes, vote="inclusive")):
        table = oracle.log_probs(sequence(prompt, answer), len(prompt), other)
        assert deviation(prompt, answer, table) > 10 * TOLERANCE, other
