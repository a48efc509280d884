"""Requests that have no views, beside stock SGLang on the attention backend that it would choose: Hopper GPUs, float16.

The same kernels run there over the same rows, so that most log-probabilities are equal to the last bit. Where tokens of
a prompt come in other batches, sums have another order. What other kernels do is seen beside the other backend
(`SGLANG_EXT_PLAIN_ATTENTION=flashinfer`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.attention.choice import PLAIN_ENV
from tests.e2e.test_gpu_double_p import HOPPER, differences
from tests.oracle import models

pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU, where SGLang chooses fa3")

OPTIONS: dict[str, Any] = {
    "dtype": "float16",
    "page_size": 1,
    "max_total_tokens": 20_000,
    "max_running_requests": 12,
    "cuda_graph_max_bs_decode": 8,
    "cuda_graph_bs_prefill": [16, 64, 256, 704],
    "chunked_prefill_size": 700,
    "log_level": "error",
}
NEW_TOKENS = 40
ROUNDED = 1e-2  # float16: what another order of sums may do to a log-probability, where kernels are the same


def prompts() -> list[list[int]]:
    """Short ones, and one of three chunks; all below `min_tokens`, so that no step reads clusters."""
    gen = torch.Generator().manual_seed(3)
    return [torch.randint(50, 380, (n,), generator=gen).tolist() for n in (5, 33, 200, 450, 1800)]


def answers(engine: Any) -> dict[str, list[Any]]:
    """[(tokens, log-probability of each)] of the answers, of prompts alone and of all at once."""
    params = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}

    def ask(asked: list[list[int]]) -> list[Any]:
        engine.flush_cache()
        found = engine.generate(input_ids=asked, sampling_params=params, return_logprob=True)
        steps = [each["meta_info"]["output_token_logprobs"] for each in found]
        return [([token for _, token, *_ in each], [logprob for logprob, *_ in each]) for each in steps]

    return {"alone": [ask([each])[0] for each in prompts()], "batch": ask(prompts())}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return models.save_model("llama", tmp_path_factory.mktemp("llama"), head_dim=64, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def stock(folder: Path) -> dict[str, list[Any]]:
    from sglang import Engine

    engine = Engine(model_path=str(folder), attention_backend="fa3", **OPTIONS)
    try:
        return answers(engine)
    finally:
        engine.shutdown()


@pytest.mark.parametrize("backend", ["dbsa", "double_p"])
@pytest.mark.parametrize("plain", ["auto", "flashinfer"])
def test_plain_requests_are_stock_sglangs(folder: Path, stock: dict[str, list[Any]], plain: str, backend: str) -> None:
    from sglang_ext import Engine

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(PLAIN_ENV, plain)
        engine = Engine(model_path=str(folder), attention_backend=backend, **OPTIONS)
    try:
        state = engine.get_server_info()["internal_states"][0]["sglang_ext"]
        assert state["attention_backend"] == ("Fa3Views" if plain == "auto" else "FlashInferViews")
        found = answers(engine)
    finally:
        engine.shutdown()
    for asked in ("alone", "batch"):
        pairs = zip(found[asked], stock[asked], strict=True)
        of_all = sorted(difference for pair in pairs for difference in differences(*pair))
        median, largest = of_all[len(of_all) // 2], of_all[-1]
        print(f"{backend}, {plain}, {asked}: median {median:.5f}, largest {largest:.5f} of {len(of_all)} steps")
        if plain == "auto":
            assert len(of_all) == NEW_TOKENS * len(prompts()) and median == 0 and largest < ROUNDED
        else:
            assert median > 0 and largest < 0.1  # other kernels round differently: the comparison above can fail
