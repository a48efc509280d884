"""Kernels over a KV cache in float8 e4m3 in the real engine, against the oracle of `test_float8.py`.

Without a GPU the kernels run in Triton's interpreter, seconds a step: every kind of row occurs once. On a GPU,
`test_gpu_float8.py` says more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.exact import Ask
from tests.e2e.test_float8 import Running, check, check_clusters, running
from tests.oracle import models


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder: Path = models.save_model("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=512)
    yield from running(folder, "dbsa+double_p", "triton")


def test_pools(served: Running) -> None:
    served.create("local", positions="local")
    own = served.views.text("77: freeze my card\nLabel:")
    check(served, [Ask("local", own, {"block_ids": [0, 3, 1], "dense": True}, new_tokens=3)])


def test_a_step_through_clusters(served: Running) -> None:
    check_clusters(served, 100, new_tokens=3)


def test_the_kernels_ran(served: Running) -> None:
    """A silent fallback to plain PyTorch would pass every test above."""
    state = served.engine.get_server_info()["internal_states"][0]["sglang_ext"]
    assert state["reader"] == "ClusterReader"
