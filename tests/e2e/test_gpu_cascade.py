"""The cascading KV cache's kernels on a GPU, in float16: in CUDA graphs and without, alone and under load.

What an answer must be in float32 says `test_cascade_kernels.py`. Here half precision rounds, and where two tokens were
attended to almost equally it decides which of them is kept. StreamingLLM compares no scores: how far its answers stray
from those of plain PyTorch is what rounding alone does. Answers of cascades may stray further, but a good deal less
than those of another selection do.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle import models

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

POLICY = {"sinks": 4, "window": 64, "cascades": 4, "stride": 32, "beta": 0.95}
CASCADES: dict[str, Any] = {}
STREAMING = {"cascades": 1}
OWN = {"window": 48, "cascades": 3, "heads": "homogeneous", "head_reduction": "max"}
NEW_TOKENS = 70  # over the ends of two strides
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "graphs": ("flashinfer", {}),
    "eager": ("flashinfer", {"disable_cuda_graph": True}),
    "torch": ("torch", {}),
}


class Running:
    def __init__(self, folder: Path, kernels: str, **options: Any) -> None:
        from sglang_ext import Engine

        arguments: dict[str, Any] = {
            "dtype": "float16",
            "max_total_tokens": 1000,  # ten streams
            "max_running_requests": 12,
            "cuda_graph_max_bs_decode": 12,
            "cuda_graph_backend_prefill": "disabled",
            "chunked_prefill_size": 80,  # no multiple of the stride
            "attention_backend": "cascade",
            "policy": POLICY,
            "log_level": "error",
        }
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("SGLANG_EXT_KERNELS", kernels)
            monkeypatch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
            monkeypatch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1")
            self.engine = Engine(model_path=str(folder), **{**arguments, **options})

    def answers(self, prompts: list[list[int]], options: list[Any], new_tokens: int = NEW_TOKENS) -> list[Any]:
        """[(tokens, log-probability of each)] of a batch."""
        params = [
            {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "custom_params": each or None}
            for each in options
        ]
        out = self.engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)
        found = []
        for answer in out:
            steps = answer["meta_info"]["output_token_logprobs"]
            found.append(([t for _, t, *_ in steps], [lp for lp, *_ in steps]))
        return found

    def turns(self) -> list[Any]:
        """Three turns of a conversation."""
        found = []
        for number, prompt in enumerate((prompts()[0][:150], prompts()[1][:1], prompts()[2][:40])):
            options = {"conversation": "a", "continue": bool(number)}
            found += self.answers([prompt], [options], 33 if number == 0 else 12)
        return found

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.engine.get_server_info()["internal_states"][0]["sglang_ext"]
        return found


def prompts() -> list[list[int]]:
    gen = torch.Generator().manual_seed(0)
    return [torch.randint(50, 380, (n,), generator=gen).tolist() for n in (3000, 700, 129, 64, 33, 5, 97, 250)]


def deviation(a: Any, b: Any) -> float:
    """Largest difference in log-probability, up to the first token that differs."""
    worst = 0.0
    for token, other, x, y in zip(a[0], b[0], a[1], b[1], strict=True):
        worst = max(worst, abs(x - y))
        if token != other:
            break
    return worst


def typical(some: list[Any], others: list[Any]) -> float:
    """Deviation of the middle one among pairs of answers."""
    return statistics.median(deviation(*pair) for pair in zip(some, others, strict=True))


@pytest.fixture(scope="module")
def answered(tmp_path_factory: Any) -> dict[str, dict[str, Any]]:
    """Answers by engine and by what was asked; one engine after the other."""
    folder = models.save_model("llama", tmp_path_factory.mktemp("llama"), head_dim=64, max_position_embeddings=512)
    found: dict[str, dict[str, Any]] = {}
    for name, (kernels, more) in ENGINES.items():
        running = Running(folder, kernels, **more)
        try:
            asked = prompts()
            found[name] = {
                "alone": [running.answers([prompt], [CASCADES])[0] for prompt in asked],
                "batch": running.answers(asked, [CASCADES] * len(asked)),
                "streaming": running.answers(asked, [STREAMING] * len(asked)),
                "own": running.answers(asked, [OWN, CASCADES] * (len(asked) // 2)),
                "turns": running.turns(),
                "again": running.answers(asked, [CASCADES] * len(asked)),
                "stats": running.stats(),
            }
        finally:
            running.engine.shutdown()
    return found


@pytest.fixture(scope="module")
def wrong(answered: Any) -> float:
    """How far answers of another selection stray, which is far more than rounding does."""
    torch_only = answered["torch"]
    found = typical(torch_only["batch"][:2], torch_only["streaming"][:2])  # the long ones
    rounding = typical(answered["graphs"]["streaming"], torch_only["streaming"])
    assert rounding < 0.05 and found > 8 * rounding
    return found


def test_the_kernels_ran(answered: Any) -> None:
    for name, backend in (
        ("graphs", "FlashInferStreamBackend"), ("eager", "FlashInferStreamBackend"), ("torch", "StreamAttnBackend")
    ):  # fmt: skip
        assert answered[name]["stats"]["attention_backend"] == backend
    assert answered["graphs"]["stats"]["view_prefills"]["flashinfer"] > 100


@pytest.mark.parametrize("asked", ["alone", "batch", "streaming", "own", "turns"])
@pytest.mark.parametrize("other", ["eager", "torch"])
def test_graphs_answer_alike(answered: Any, wrong: float, asked: str, other: str) -> None:
    assert typical(answered["graphs"][asked], answered[other][asked]) < wrong / 4


def test_under_load_the_same_as_alone(answered: Any, wrong: float) -> None:
    for name in ENGINES:
        assert typical(answered[name]["alone"], answered[name]["batch"]) < wrong / 4


def test_nothing_of_earlier_streams_is_left(answered: Any, wrong: float) -> None:
    """Rows were taken again and again: by streams, by conversations."""
    assert typical(answered["graphs"]["batch"], answered["graphs"]["again"]) < wrong / 4
