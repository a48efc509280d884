"""Double-P over a KV cache in float8 on a GPU, in float16: in CUDA graphs and without, beside plain PyTorch.

Half precision rounds keys to another float8 now and then, which no two ways of computing do alike, and k-means may then
sort them otherwise. So medians are compared: sparse answers must be nearer to each other than to dense attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.e2e.test_gpu_double_p import DENSE, EXACT, PLAIN, SPARSE, Running, differences, options, prompts
from tests.e2e.test_gpu_float8 import FLOAT8, pytestmark  # noqa: F401  (the same GPUs)
from tests.oracle import models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_model("llama", tmp_path_factory.mktemp("llama"), head_dim=64, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def answered(folder: Path) -> dict[str, dict[str, Any]]:
    """Answers by engine and by what was asked; one engine after the other."""
    found: dict[str, dict[str, Any]] = {}
    engines: dict[str, tuple[str, dict[str, Any]]] = {
        "graphs": ("triton", {}),
        "eager": ("triton", {"disable_cuda_graph": True}),
        "plain": ("triton", {"attention_backend": "double_p"}),
        "torch": ("torch", {}),
    }
    for name, (kernels, more) in engines.items():
        running = Running(folder, kernels, **FLOAT8, **more)
        try:
            places = PLAIN if name == "plain" else range(len(prompts()))
            found[name] = {
                asked: running.answers([prompts()[n] for n in places], [options(given)[n] for n in places])
                for asked, given in (("sparse", SPARSE), ("exact", EXACT), ("dense", DENSE))
            }
            found[name]["stats"] = running.stats()
        finally:
            running.engine.shutdown()
    return found


def apart(answered: Any, one: tuple[str, str], other: tuple[str, str], places: Sequence[int] = (0, 1, 2)) -> float:
    """The median difference of log-probabilities between two kinds of answers to the same prompts."""
    pairs = [(answered[one[0]][one[1]][n], answered[other[0]][other[1]][n]) for n in places]
    return median(x for pair in pairs for x in differences(*pair))


@pytest.mark.parametrize("name", ["graphs", "eager"])
def test_clusters_in_kernels_and_in_plain_pytorch(answered: Any, name: str) -> None:
    """Sparse answers are nearer to each other than to dense ones, and p = 1 is nearer to dense attention than those."""
    sparse = apart(answered, (name, "sparse"), ("torch", "dense"))
    assert apart(answered, (name, "sparse"), ("torch", "sparse")) < sparse / 2
    assert apart(answered, (name, "exact"), (name, "dense")) < sparse / 2


def test_clusters_of_plain_requests(answered: Any) -> None:
    """`double_p` itself: one rotation of the query, and no kernel in CUDA for attention."""
    sparse = apart(answered, ("plain", "sparse"), ("torch", "dense"), places=(0, 1))
    assert apart(answered, ("plain", "sparse"), ("torch", "sparse"), places=(0, 1)) < sparse / 2


def test_cluster_kernels_ran(answered: Any) -> None:
    for name in ("graphs", "eager", "plain", "torch"):
        expected = ("TorchViews", "ViewReader") if name == "torch" else ("FlashInferViews", "ClusterReader")
        stats = answered[name]["stats"]
        assert (stats["attention_backend"], stats["reader"]) == expected
        assert stats["cluster_tokens_computed"] > 1000 and stats.get("cluster_refused", 0) == 0
