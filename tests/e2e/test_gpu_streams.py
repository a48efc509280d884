"""Streams in kernels on a GPU, in float16 and CUDA graphs: what they leave behind, however they end.

What they answer says `test_gpu_cascade.py`; the same requests in plain PyTorch, with what each must be answered,
`test_cascade.py`. SGLang's strict checks of its accounting end the scheduler when a slot is missing.

With SGLANG_EXT_DRY_RUN=1 the tests run without a GPU, in plain PyTorch: that tells whether they themselves work.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.e2e.server import until
from tests.e2e.streams import (
    CONTEXT,
    NEW_TOKENS,
    POOL,
    SLOTS,
    Served,
    abort_some,
    beside,
    five_hundred_leave_clean_books,
    prompt_of,
    serving,
)
from tests.oracle import models

GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(
    not GPU and os.environ.get("SGLANG_EXT_DRY_RUN") != "1", reason="needs an NVIDIA GPU, or SGLANG_EXT_DRY_RUN=1"
)
TIMES = 100 if GPU else 20  # the pool; long enough for others to run beside it
ROUNDING = 0.03
"""Mean difference of log-probabilities; another selection of tokens makes ten times as much (`test_gpu_cascade.py`)."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: Any) -> Iterator[Served]:
    folder = models.save_model("llama", tmp_path_factory.mktemp("llama"), head_dim=64, max_position_embeddings=CONTEXT)
    options: dict[str, Any] = {"attention_backend": "cascade", "dtype": "float16"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_EXT_KERNELS", "flashinfer" if GPU else "torch")
        if GPU:
            options |= {"cuda_graph_max_bs_decode": 8, "cuda_graph_backend_prefill": "disabled"}
        with serving(folder, **options) as served:
            yield served


def log_probs(served: Served) -> list[float]:
    """Of the tokens of a prompt that takes several strides, behind the first."""
    meta = served.one(prompt_of(90, 3))["meta_info"]
    return [value for value, *_ in meta["input_token_logprobs"][1:]]


def assert_as_before(served: Served, before: list[float]) -> None:
    differences = [abs(a - b) for a, b in zip(log_probs(served), before, strict=True)]
    assert sum(differences) / len(differences) < ROUNDING


@pytest.mark.parametrize("cascades", [1, 4])
def test_many_times_the_pool(served: Served, cascades: int) -> None:
    """The slots of a long stream do not grow, by our counters and by SGLang's; others run beside it."""
    found = beside(served, prompt_of(TIMES * POOL, 1), prompt_of(30, 2), cascades=cascades)
    assert found.answer["meta_info"]["prompt_tokens"] == TIMES * POOL
    assert {answer["meta_info"]["completion_tokens"] for answer in [found.answer, *found.others]} == {NEW_TOKENS}
    assert SLOTS in found.reserved  # the long one alone, at that moment, keeps what any other does
    assert max(found.reserved) <= 2 * SLOTS and 0 < max(found.used) <= 2 * SLOTS
    served.idle()


def test_aborted_streams_leave_nothing(served: Served) -> None:
    before = log_probs(served)
    abort_some(served)
    served.idle()
    assert_as_before(served, before)
    until(lambda: served.engine.flush_cache().success)


def test_five_hundred_mixed_requests_leave_clean_books(served: Served) -> None:
    before = log_probs(served)
    five_hundred_leave_clean_books(served)
    assert_as_before(served, before)
    served.generate([prompt_of(90, n) for n in range(4)], [{}] * 4)  # three fit beside each other, a fourth waits
    served.idle()


def test_the_kernels_ran(served: Served) -> None:
    """And streams with settings of their own, which no graph serves, beside those in graphs."""
    stats: dict[str, Any] = served.stats()
    assert stats["reader"] == ("CellReader" if GPU else "StreamReader")
    if GPU:
        assert stats["view_prefills"]["dense"] > 1000
        assert stats["decoding_steps"]["graph"] > 100 and stats["decoding_steps"]["eager"] > 100
