"""What stands for SGLang's tokenizer manager where a `PoolService` runs without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.oracle import models


@pytest.fixture(scope="session")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizer = models.load_tokenizer(models.save_model("llama", tmp_path_factory.mktemp("llama")))
    server_args = SimpleNamespace(
        attention_backend="dbsa",
        dtype="auto",
        served_model_name="m",
        revision=None,
        kv_cache_dtype="auto",
        quantization=None,
        grammar_backend="none",
    )
    return SimpleNamespace(
        server_args=server_args,
        enable_metrics=False,
        tokenizer=tokenizer,
        context_len=10**7,
        model_path="m",
        model_config=SimpleNamespace(vocab_size=len(tokenizer), hf_eos_token_id=None, hf_text_config=SimpleNamespace()),
        rid_to_state={},
    )
