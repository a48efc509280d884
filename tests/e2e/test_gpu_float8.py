"""A KV cache in float8 on a GPU, in 16 bits: kernels over views beside SGLang's dense attention over it.

What an answer must be in float32 says `test_float8.py`. Here half precision rounds keys to another float8 now and then,
and `fa3` rounds queries to float8, too. So both are compared with an oracle that rounds nothing: how far plain requests
stray from it, which SGLang's dense attention serves from the same cache, bounds how far answers over views may stray.
`test_gpu_float8_clusters.py` looks at Double-P.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from tests.e2e.exact import Answer, Ask, Served
from tests.e2e.test_gpu import DEMONSTRATIONS, PREFILL_GRAPHS, asks, start
from tests.e2e.test_gpu_double_p import BACKEND
from tests.oracle import float8, models

CAPABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = pytest.mark.skipif(not CAPABLE, reason="needs an NVIDIA GPU of compute capability 8.9 or more")

FLOAT8: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3"}
ENGINES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"disable_cuda_graph": True},
    "prefill graphs": PREFILL_GRAPHS,
    "clusters": {"attention_backend": "dbsa+double_p"},
    "bfloat16": {"dtype": "bfloat16"},
}
"""All but the last are in float16, over which FlashAttention-3 cannot read such a cache: plain requests run on
FlashInfer there."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_model("llama", tmp_path_factory.mktemp("llama"), head_dim=64, max_position_embeddings=4096)


@pytest.fixture(scope="module", params=sorted(ENGINES))
def served(request: pytest.FixtureRequest, folder: Path) -> Iterator[Served]:
    running = start(folder, "triton", **FLOAT8, **ENGINES[request.param])
    try:
        yield running
    finally:
        running.engine.shutdown()


@pytest.fixture(scope="module")
def dense(served: Served) -> float:
    """The worst error of plain requests as long as the stitched ones, beside an oracle that rounds nothing."""
    shots = "".join(f"{d['input']}\nLabel: {d['output']}\n\n" for d in models.demonstrations(DEMONSTRATIONS, 5))
    ids = served.text(shots)
    plain = [Ask(None, ids[first : first + size], new_tokens=8) for first, size in ((0, 1200), (40, 500), (9, 150))]
    worst = max(max(served.errors(answer)) for answer in served.generate(plain))
    assert 0.01 < worst < 2, f"plain requests stray by {worst}: is the cache in float8 at all?"
    return worst


def errors(served: Served, answers: list[Answer]) -> list[float]:
    return [error for answer in answers for error in served.errors(answer)]


@pytest.mark.parametrize("number", [1, 5, 10])
def test_views_stray_no_further_than_dense_attention(served: Served, dense: float, number: int) -> None:
    answers = served.generate(asks(served, seed=number)[-number:])
    assert max(errors(served, answers)) <= 2 * dense


def test_answers_are_those_of_rounded_keys(served: Served) -> None:
    """Nearer to the oracle that rounds than to the one that does not; blocks in another order are another answer."""
    rounding = Served(served.engine, served.model, served.tokenizer, float8)
    answers = [answer for answer in served.generate(asks(served)) if answer.ask.pool is not None]
    right = median(errors(rounding, answers))
    assert right < median(errors(served, answers)) / 1.5
    (answer,) = served.generate([asks(served)[4]])
    pieces = served.pieces(answer)
    wrong = rounding.errors(answer, [pieces[0], *pieces[:0:-1]])
    assert median(wrong) > 3 * median(rounding.errors(answer))


def test_the_kernels_ran(served: Served, request: pytest.FixtureRequest) -> None:
    state = served.engine.get_server_info()["internal_states"][0]["sglang_ext"]
    name = request.node.callspec.params["served"]
    reader = "ClusterReader" if name == "clusters" else "PlannedReader"
    backend = BACKEND if name == "bfloat16" else "FlashInferViews"
    assert (state["attention_backend"], state["reader"]) == (backend, reader)
    assert state["view_prefills"]["dense"] == 0, "FlashInfer's prefill kernels are not given float8"
