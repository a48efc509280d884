"""Which of these a machine can run: SGLang serves float32 on the CPU alone, half precision has tests of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        return
    reason = "an engine in float32: run it with CUDA_VISIBLE_DEVICES= (empty), SGLang has no such kernels for a GPU"
    for item in items:
        if item.path.parent == HERE and not item.path.name.startswith("test_gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))
