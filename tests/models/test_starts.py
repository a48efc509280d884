"""One start of each architecture that views serve: its answers are those of `transformers`.

Systems take turns, so that all of them meet architectures of many kinds; `make models-table` tries every pair.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_ext.systems.registry import ours
from tests.models.architectures import HYBRID, MIXED, SERVED, Architecture
from tests.models.serve import TOLERANCE, error_of

TRIED = [each for each in SERVED if not each.needs_gpu]
SYSTEMS = ["dbsa", *(name for name in ours() if name != "dbsa")]
PAIRS = [(each, SYSTEMS[i % len(SYSTEMS)]) for i, each in enumerate(TRIED)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="engines in float32: run it with CUDA_VISIBLE_DEVICES= (empty)")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("architecture", "system"), PAIRS, ids=[f"{each.name} {system}" for each, system in PAIRS])
def test_answers_are_those_of_transformers(architecture: Architecture, system: str, tmp_path: Path) -> None:
    assert error_of(architecture.save(tmp_path), system) <= TOLERANCE


@pytest.mark.skipif(torch.cuda.is_available(), reason="engines in float32: run it with CUDA_VISIBLE_DEVICES= (empty)")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("architecture", [*MIXED, *HYBRID], ids=lambda each: each.name)
def test_models_with_windows_or_states(architecture: Architecture, tmp_path: Path) -> None:
    assert error_of(architecture.save(tmp_path), "double_p", architecture.wider) <= TOLERANCE


def test_every_system_is_started() -> None:
    assert {system for _, system in PAIRS} == set(ours())
