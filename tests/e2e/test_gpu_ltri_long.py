"""Ltri-LLM on a GPU over a long prompt, in layers of Llama's width: there kernels last long enough to meet each other.

Chunks of one pass run beside each other (`attention.ltri_recorded`). What they compute says `test_gpu_ltri.py`, and
`tests/plugin/test_ltri_alike.py` reads prompts again without an engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.attention.sparse import REPORT
from tests.e2e.streams import prompt_of, serving
from tests.e2e.test_ltri import clean
from tests.oracle import models

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def test_a_long_prompt_is_read_alike_each_time(
    tmp_path: Path, tokens: int = 40_000, rounds: int = 4, **others: Any
) -> None:
    """If a chunk read what another one writes beside it, rounds would differ."""
    heads = {"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8}
    shape = {"hidden_size": 1024, "num_hidden_layers": 6, "max_position_embeddings": 8192, **heads, **others}
    folder = models.save_model("llama", tmp_path, **shape)
    options: dict[str, Any] = {"attention_backend": "ltri", "policy": {"host_gb": 4}, "dtype": "float16"}
    options |= {"max_total_tokens": 20_000, "chunked_prefill_size": 4096}
    with serving(folder, **options) as served:
        prompt, found = prompt_of(tokens, 9), []
        for _ in range(rounds):
            params = served.params({REPORT: True}, 20)
            answer = served.engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True)
            meta = answer["meta_info"]
            assert meta["cached_tokens"] == 0
            found.append((meta[REPORT], meta["output_token_logprobs"]))
            clean(served)
        stats: dict[str, Any] = served.stats()
    assert stats["prompt_chunks"]["replayed"] > 4 * stats["prompt_chunks"]["launched"]
    assert found[0][0]
    for number, (blocks, said) in enumerate(found):
        apart = [abs(one[0] - other[0]) for one, other in zip(said, found[0][1], strict=True)]
        assert (blocks, said) == found[0], f"round {number}: log-probabilities are {apart} apart, blocks are {blocks}"
