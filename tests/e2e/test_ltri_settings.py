"""Settings of Ltri-LLM in the real engine, one engine for each, against `tests/oracle/ltri.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.streams import TOLERANCE, deviation, prompt_of, save, sequence, serving
from tests.e2e.test_ltri import SIZES, policy_of
from tests.oracle.ltri import LtriOracle

VARIANTS: tuple[dict[str, Any], ...] = (
    {"similarity": "max", "persist": False, "far": True},
    {"similarity": "mass", "vote": "preceding", "ratio": "rowcol", "sinks": 0},
    {"vote": "off", "ratio": "col", "sinks": 11, "block": 4, "last": 16, "retrieved": 5, "theta": 0.6, "phi": 0.3},
    {"retrieved": 0},
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
