"""The two oracles of streams agree where they overlap, and tell every setting from another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle import models
from tests.oracle.streams import CascadeOracle, Sizes, streaming_llm

TOKENS = torch.randint(7, models.VOCAB_SIZE, (130,), generator=torch.Generator().manual_seed(4)).tolist()
ONE = Sizes(sinks=3, window=24, stride=16, cascades=1)
SEVERAL = replace(ONE, cascades=3, beta=0.95)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return models.save_model("llama", tmp_path_factory.mktemp("model"))


def test_one_cascade_by_both_routes(folder: Path) -> None:
    by_mask = streaming_llm(models.load_model(folder), TOKENS, ONE)
    by_rules = CascadeOracle(folder).log_probs(TOKENS, ONE)
    assert (by_mask - by_rules).abs().max() <= 2e-5


def test_every_setting_shows(folder: Path) -> None:
    oracle = CascadeOracle(folder)
    base = oracle.log_probs(TOKENS, SEVERAL)
    changes: tuple[dict[str, Any], ...] = (
        {"sinks": 2},
        {"stride": 15},
        {"window": 27},
        {"cascades": 1},
        {"beta": 0.3},
        {"maximum": True},
        {"homogeneous": True},
        {"selection": False},
    )
    for change in changes:
        assert (oracle.log_probs(TOKENS, replace(SEVERAL, **change)) - base).abs().max() > 1e-2, change
