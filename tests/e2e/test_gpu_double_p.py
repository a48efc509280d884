"""Double-P's kernels on a GPU, in float16: in CUDA graphs and without, beside dense attention and plain PyTorch.

What a step must be in float32 says `test_double_p_kernels.py`. Here half precision rounds: how far p = 1 strays from
the same engine's dense attention is what rounding alone does, and sparse answers may stray twice as far from those of
plain PyTorch; another p strays further.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_ext.kernels.cluster_attention import attend_impl
from tests.oracle import models

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

POLICY = {"sink": 2, "window": 16, "cluster": 8, "segment": 512, "append": 64, "min_tokens": 100, "iterations": 4}
SPARSE, EXACT, DENSE = {"p1": 0.9, "p2": 0.5}, {"p1": 1, "p2": 1}, {"dense": True}
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
BACKEND = "Fa3Views" if HOPPER else "FlashInferViews"
NEW_TOKENS = 90  # more than `append`: what is clustered grows on the way


class Running:
    def __init__(self, folder: Path, kernels: str, **options: Any) -> None:
        from sglang_ext import Engine

        arguments: dict[str, Any] = {
            "dtype": "float16",
            "max_total_tokens": 20_000,
            "max_running_requests": 12,
            "cuda_graph_max_bs_decode": 8,
            "cuda_graph_backend_prefill": "disabled",
            "chunked_prefill_size": 700,
            "attention_backend": "dbsa+double_p",
            "policy": POLICY,
            "log_level": "error",
        }
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("SGLANG_EXT_KERNELS", kernels)
            self.engine = Engine(model_path=str(folder), **{**arguments, **options})
        self.engine.create_pool("p", models.demonstrations(60), block_size=12)

    def answers(self, prompts: list[list[int]], options: list[Any], new_tokens: int = NEW_TOKENS) -> list[Any]:
        """[(tokens, log-probability of each, the best two's distance at each step)] of a batch."""
        params = [
            {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "custom_params": each}
            for each in options
        ]
        out = self.engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True, top_logprobs_num=2)
        found = []
        for answer in out:
            meta = answer["meta_info"]
            steps, best = meta["output_token_logprobs"], meta["output_top_logprobs"]
            found.append(([t for _, t, *_ in steps], [lp for lp, *_ in steps], [b[0][0] - b[1][0] for b in best]))
        return found

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.engine.get_server_info()["internal_states"][0]["sglang_ext"]
        return found


def differences(a: Any, b: Any) -> list[float]:
    """Of the log-probabilities, up to the first token that differs."""
    found = []
    for token, other, x, y in zip(a[0], b[0], a[1], b[1], strict=True):
        found.append(abs(x - y))
        if token != other:
            break
    return found


def deviation(a: Any, b: Any) -> float:
    return max(differences(a, b))


def prompts() -> list[list[int]]:
    gen = torch.Generator().manual_seed(0)
    long = torch.randint(50, 380, (1500,), generator=gen).tolist()
    # One that the first one's clusters are cut for, once it was answered; one over blocks; one too short for clusters.
    return [long, long[:900] + long[200:500], long[700:1000], long[3:40], long[5:60]]


CLUSTERED = 3
"""So many of the prompts, the first ones, are long enough to have clusters and are not asked for dense attention."""

PLAIN = [0, 1, 3]
"""Those that are not over a pool: all that `double_p` itself reads by clusters, the first two."""


def options(sparse: Any) -> list[Any]:
    over = {"pool": "p", "raw": True, "block_ids": [0, 3, 1, 2]}
    return [sparse, sparse, {**over, **sparse}, sparse, {**over, "dense": True}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return models.save_model("llama", tmp_path_factory.mktemp("llama"), head_dim=64, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def answered(folder: Path) -> dict[str, dict[str, Any]]:
    """Answers by engine and by what was asked; one engine after the other."""
    found: dict[str, dict[str, Any]] = {}
    engines: dict[str, tuple[str, dict[str, Any]]] = {
        "graphs": ("flashinfer", {}),
        "eager": ("flashinfer", {"disable_cuda_graph": True}),
        "plain": ("flashinfer", {"attention_backend": "double_p"}),
        "torch": ("torch", {}),
    }
    for name, (kernels, more) in engines.items():
        running = Running(folder, kernels, **more)
        try:
            places = PLAIN if name == "plain" else range(len(prompts()))
            of = lambda listed, places=places: [listed[place] for place in places]  # noqa: E731
            asked = of(prompts())
            found[name] = {
                "alone": [running.answers([p], [o])[0] for p, o in zip(asked, of(options(SPARSE)), strict=True)],
                "batch": running.answers(asked, of(options(SPARSE))),
                "exact": running.answers(asked, of(options(EXACT))),
                "dense": running.answers(asked, of(options(DENSE))),
                "stats": running.stats(),
            }
        finally:
            running.engine.shutdown()
    return found


@pytest.fixture(scope="module")
def noise(answered: Any) -> float:
    """What rounding does: p = 1 beside dense attention, in the kernels."""
    worst = max(deviation(*pair) for pair in zip(answered["graphs"]["exact"], answered["graphs"]["dense"], strict=True))
    assert 0 < worst < 0.1, f"p = 1 strays by {worst} from dense attention"
    return worst


def test_the_kernels_ran(answered: Any) -> None:
    for name in ("graphs", "eager", "plain", "torch"):
        expected = ("TorchViews", "ViewReader") if name == "torch" else (BACKEND, "ClusterReader")
        stats = answered[name]["stats"]
        assert (stats["attention_backend"], stats["reader"]) == expected
        assert answered[name]["stats"]["cluster_tokens_computed"] > (1000 if name == "plain" else 2000)
        assert answered[name]["stats"].get("cluster_refused", 0) == 0


@pytest.mark.parametrize("asked", ["exact", "dense"])
def test_graphs_change_no_token(answered: Any, noise: float, asked: str) -> None:
    """But for ties in half precision."""
    for a, b in zip(answered["graphs"][asked], answered["eager"][asked], strict=True):
        for token, other, distance in zip(a[0], b[0], a[2], strict=True):
            if token != other:
                assert distance < 2 * noise
                break


def test_graphs_of_plain_requests_are_the_same(answered: Any, noise: float) -> None:
    """Their rows have one rotation, and attention over clusters is in CUDA; alone and together."""
    assert attend_impl._unusable(torch.cuda.current_device(), 64, 2, 2, False) is None
    for asked in ("alone", "batch"):
        pairs = [(answered["graphs"][asked][place], answered["plain"][asked][n]) for n, place in enumerate(PLAIN[:2])]
        same = sorted(x for pair in pairs for x in differences(*pair))
        wrong = [x for n, place in enumerate(PLAIN[:2])
                 for x in differences(answered["plain"][asked][n], answered["torch"]["dense"][place])]  # fmt: skip
        assert same[len(same) // 2] < 2 * noise < sorted(wrong)[len(wrong) // 2]
        assert same[-1] < max(wrong) / 2


@pytest.mark.parametrize("asked", ["alone", "batch"])
@pytest.mark.parametrize("engine", ["eager", "torch"])
def test_sparse_steps_are_the_same(answered: Any, noise: float, engine: str, asked: str) -> None:
    """But for clusters on the edge of a set, which fall on either side of it where keys are rounded differently.

    Without graphs a row that is alone has one rotation, so that its tokens lie in other tiles and round differently,
    too. Each such cluster makes a difference of its own; most steps have none, and none makes what reading everything
    does.
    """

    def of_all(engine: str, name: str) -> tuple[list[float], list[float]]:
        pairs = list(zip(answered["graphs"][asked], answered[engine][name], strict=True))[:CLUSTERED]
        found = sorted(x for pair in pairs for x in differences(*pair))
        parted = [[gap for x, y, gap in zip(a[0], b[0], a[2], strict=True) if x != y][:1] for a, b in pairs]
        gaps = [gap for first in parted for gap in first]
        print(f"graphs, {asked}, beside {engine}, {name}: median {found[len(found) // 2]:.4f}, largest {found[-1]:.4f} "
              f"({len(found)} steps; rounding alone: {noise:.4f}); parted at gaps of {gaps}")  # fmt: skip
        return found, gaps

    (same, gaps), (wrong, _) = of_all(engine, asked), of_all("torch", "dense")  # the comparison must be able to fail
    assert same[len(same) // 2] < 2 * noise < wrong[len(wrong) // 2]
    assert same[-1] < wrong[-1] / 2 and all(gap < wrong[-1] / 2 for gap in gaps)
    assert len(same) > 4 * len(wrong)  # differences end where tokens part
