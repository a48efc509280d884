"""Planned views (the work list and its Triton kernels) in the real engine, against ``transformers``.

Without a GPU the kernels run in Triton's interpreter, which takes a hundred times as long as the reference: the pools
are small, and every kind of batch occurs once. On a GPU, ``test_gpu.py`` says more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.exact import Ask, Served
from tests.oracle import models

POOLS: dict[str, dict[str, Any]] = {
    "paper": {},
    "local": {"positions": "local"},  # keys are rotated while blocks are encoded
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    from sglang_ext import Engine

    folder = models.save_model("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=512)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("SGLANG_EXT_KERNELS", "triton")
        engine = Engine(
            model_path=str(folder),
            dtype="float32",
            max_total_tokens=2048,
            max_running_requests=4,
            chunked_prefill_size=48,
            log_level="error",
        )
    try:
        for name, options in POOLS.items():
            engine.create_pool(name, models.demonstrations(7), block_size=2, **options)
        yield Served(engine, models.load_model(folder), models.load_tokenizer(folder))
    finally:
        engine.shutdown()


@pytest.mark.parametrize("pool", sorted(POOLS))
def test_one_request(served: Served, pool: str) -> None:
    own = served.text("77: freeze my card\nLabel:")
    served.assert_exact(served.generate([Ask(pool, own, {"block_ids": [0, 3, 1]}, new_tokens=3)]))


def test_a_batch_that_shares_blocks_beside_a_plain_request(served: Served) -> None:
    """Selections in different orders read one block at different positions; a plain prompt stands among them."""
    own = served.text("78: open the branch?\nLabel:")
    asks = [
        Ask("paper", own, {"block_ids": [0, 3, 1]}, new_tokens=4),
        Ask(None, own * 2, new_tokens=2),  # ends first: the batch is planned anew
        Ask("paper", own[3:], {"block_ids": [0, 1, 2, 3]}, new_tokens=4),
    ]
    served.assert_exact(served.generate(asks))


def test_the_kernels_ran(served: Served) -> None:
    """A silent fallback to the reference would pass every test above."""
    state = served.engine.get_server_info()["internal_states"][0]["sglang_ext"]
    assert state["reader"] == "PlannedReader"
