"""Double-P on a GPU where some layers are SGLang's own: windows (Gemma 3), or states (Qwen3.5, Qwen3-Next).

In half precision, in CUDA graphs and without, beside plain PyTorch and dense attention in the same engine. What a
step must be in float32 says `test_double_p_mixed.py` and `test_double_p_hybrid.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_ext.attention.choice import KERNELS_ENV
from tests.e2e.test_gpu_double_p import DENSE, EXACT, HOPPER, POLICY, SPARSE, differences
from tests.models.architectures import HYBRID, MIXED

pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU, where kernels serve Double-P")

NEW_TOKENS, CONTEXT = 60, 4096
STATES = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "graphs": ("auto", {}),
    "prefill graphs": ("auto", {"cuda_graph_backend_prefill": None}),  # as SGLang chooses
    "eager": ("auto", {"disable_cuda_graph": True}),
    "torch": ("torch", {}),
}
KERNELS = [name for name, (kernels, _) in ENGINES.items() if kernels == "auto"]
CHANGED: dict[str, dict[str, Any]] = {
    "Gemma 3, text": {"head_dim": 128, "sliding_window": 200},
    "Qwen3.5": STATES,
    "Qwen3-Next": STATES,
}

DTYPES = {"Gemma 3, text": "float16", "Qwen3.5": "bfloat16", "Qwen3-Next": "bfloat16"}
"""SGLang keeps what its convolutions see before a chunk in bfloat16, and then takes no others of float16."""
FACTORS = {
    "Gemma 3, text": ("embed_tokens.weight", 0.25),  # which it multiplies by the root of its width
    "Qwen3.5": ("o_proj.weight", 6.0),
    "Qwen3-Next": ("o_proj.weight", 6.0),
}
"""Weights that are multiplied, so that attention moves the logits more than half precision does."""


def prompts() -> list[list[int]]:
    """Longer than the windows, of several chunks; one too short for clusters."""
    gen = torch.Generator().manual_seed(5)
    return [torch.randint(50, 360, (n,), generator=gen).tolist() for n in (1500, 900, 703, 60)]


def saved(name: str, folder: Path) -> Path:
    """A model with heads and states of published sizes, whose attention decides more than its embeddings do."""
    made = next(each for each in (*MIXED, *HYBRID) if each.name == name)
    changed = {**CHANGED[name], "max_position_embeddings": CONTEXT}
    field = "fields" if made.text is None else "text"
    replace(made, **{field: {**(getattr(made, field) or {}), **changed}}).save(folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    ending, factor = FACTORS[name]
    for each in tensors:
        if each.endswith(ending):
            tensors[each] = tensors[each] * factor
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def answers(engine: Any, options: Any) -> list[Any]:
    """[(tokens, log-probability of each, the best two's distance at each step)] of all prompts at once."""
    params = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, "custom_params": options}
    out = engine.generate(input_ids=prompts(), sampling_params=params, return_logprob=True, top_logprobs_num=2)
    found = []
    for answer in out:
        steps, best = (answer["meta_info"][name] for name in ("output_token_logprobs", "output_top_logprobs"))
        found.append(([t for _, t, *_ in steps], [lp for lp, *_ in steps], [b[0][0] - b[1][0] for b in best]))
    return found


@pytest.fixture(scope="module", params=list(CHANGED))
def answered(request: Any, tmp_path_factory: Any) -> dict[str, dict[str, Any]]:
    """Answers of one model by engine and by what was asked."""
    from sglang_ext import Engine

    folder = saved(request.param, tmp_path_factory.mktemp("model"))
    found: dict[str, dict[str, Any]] = {}
    for name, (kernels, more) in ENGINES.items():
        arguments: dict[str, Any] = {
            "dtype": DTYPES[request.param],
            "max_total_tokens": 20_000,
            "max_running_requests": 8,
            "cuda_graph_max_bs_decode": 8,
            "cuda_graph_backend_prefill": "disabled",
            "chunked_prefill_size": 700,
            "attention_backend": "double_p",
            "policy": POLICY,
            "log_level": "error",
        }
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv(KERNELS_ENV, kernels)
            engine = Engine(model_path=str(folder), **{**arguments, **more})
        try:
            found[name] = {
                "sparse": answers(engine, SPARSE),
                "exact": answers(engine, EXACT),
                "dense": answers(engine, DENSE),
                "again": answers(engine, SPARSE),
                "stats": (info := engine.get_server_info())["internal_states"][0]["sglang_ext"],
            }
            print(request.param, name, info.get("cuda_graph_config"), found[name]["stats"])
        finally:
            engine.shutdown()
    return found


def of(a: list[Any], b: list[Any], what: str) -> list[float]:
    """Differences of log-probabilities, in order of size, of the prompts that have clusters."""
    found = sorted(x for pair in list(zip(a, b, strict=True))[:3] for x in differences(*pair))
    print(f"{what}: {len(found)} steps, median {found[len(found) // 2]:.4f}, largest {found[-1]:.4f}")
    return found


def test_answers_are_those_of_plain_pytorch(answered: Any) -> None:
    """Rounding sorts keys into other clusters now and then, so that medians are compared with what reading all does."""
    for engine in KERNELS:
        ours, torchs = answered[engine], answered["torch"]
        wrong = median(of(ours["sparse"], torchs["dense"], f"{engine}, sparse beside PyTorch's dense"))
        for asked, beside in (("sparse", torchs), ("again", torchs), ("dense", torchs)):
            assert median(of(ours[asked], beside[asked], f"{engine}, {asked} beside PyTorch's")) < wrong / 2
        assert median(of(ours["exact"], ours["dense"], f"{engine}, p = 1 beside dense")) < wrong / 2


def test_short_rows_are_dense(answered: Any) -> None:
    for name in KERNELS:
        found = differences(answered[name]["sparse"][3], answered["torch"]["dense"][3])
        print(f"{name}, short: largest {max(found):.4f}")
        assert median(found) < 0.05


def test_the_kernels_ran(answered: Any) -> None:
    for name, (kernels, _) in ENGINES.items():
        stats = answered[name]["stats"]
        expected = ("TorchViews", "ViewReader") if kernels == "torch" else ("Fa3Views", "ClusterReader")
        assert (stats["attention_backend"], stats["reader"]) == expected
        assert stats["cluster_tokens_computed"] > 2000
