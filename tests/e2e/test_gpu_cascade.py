"""The cascading KV cache's kernels on a GPU, in float16: in CUDA graphs and without, alone and under load.

What an answer must be in float32 says `test_cascade_kernels.py`. Here half precision rounds, and where two tokens were
attended to almost equally it decides which of them is kept. So every answer is sent, as one prompt with its own, to
plain PyTorch, which runs last: the same tokens get log-probabilities from both, and the worst of each single answer is
bounded, by a part of what another selection does to the same tokens.

With SGLANG_EXT_DRY_RUN=1 the tests run without a GPU: plain PyTorch in float16 stands for the kernels, and in float32
for plain PyTorch. That tells whether the tests themselves work, and what rounding alone does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle import models

GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(
    not GPU and os.environ.get("SGLANG_EXT_DRY_RUN") != "1", reason="needs an NVIDIA GPU, or SGLANG_EXT_DRY_RUN=1"
)

POLICY: dict[str, Any] = {"sinks": 4, "window": 64, "cascades": 4, "stride": 32, "beta": 0.95}
CASCADES: dict[str, Any] = {}
STREAMING = {"cascades": 1}
OWN = {"window": 48, "cascades": 3, "heads": "homogeneous", "head_reduction": "max"}
ROUNDING = 0.03
"""What half precision does to a deviation where it decides nothing; 0.004 was measured without a GPU."""
NEW_TOKENS = 70  # over the ends of two strides
TURNS = ((0, 150, 33), (1, 1, 12), (2, 40, 12))
"""(prompt, its first tokens, tokens of the answer) of each turn of a conversation."""
KERNELS: dict[str, tuple[str, dict[str, Any]]] = {
    "graphs": ("flashinfer", {}),
    "eager": ("flashinfer", {"disable_cuda_graph": True}),
}
ENGINES = KERNELS if GPU else {"graphs": ("torch", {})}
PLAIN: dict[str, Any] = {} if GPU else {"dtype": "float32"}
ASKED = ("alone", "batch", "streaming", "own", "turns", "again")


@dataclass
class Answer:
    """A request's tokens with those before it, its settings, and log-probabilities of as many of the last tokens."""

    tokens: list[int]
    options: dict[str, Any]
    log_probs: list[float]


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

    def generate(self, prompts: list[list[int]], options: list[Any], new_tokens: int) -> list[Any]:
        params = [
            {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "custom_params": each or None}
            for each in options
        ]
        found: list[Any] = self.engine.generate(
            input_ids=prompts, sampling_params=params, return_logprob=True, logprob_start_len=0
        )
        return found

    def answers(self, prompts: list[list[int]], options: list[Any]) -> list[Answer]:
        """Answers to a batch, with log-probabilities of the prompts' tokens too."""
        out = self.generate(prompts, options, NEW_TOKENS)
        return [
            Answer([*prompt, *answer["output_ids"]], each, [*given(answer), *chosen(answer)])
            for prompt, each, answer in zip(prompts, options, out, strict=True)
        ]

    def turns(self) -> list[Answer]:
        """Turns of a conversation, each with all that was said before it."""
        found, said = [], list[int]()
        turn: dict[str, Any] = {"conversation": "a"}
        for prompt, length, new_tokens in TURNS:
            new = prompts()[prompt][:length]
            (answer,) = self.generate([new], [turn], new_tokens)
            turn = {"conversation": "a", "continue": True, **answer["meta_info"]["sglang_ext"]}
            said = [*said, *new, *answer["output_ids"]]
            found.append(Answer(said, CASCADES, chosen(answer)))
        return found

    def forced(self, answers: list[Answer], **other: Any) -> list[list[float]]:
        """Log-probabilities of the same tokens, all of them sent as a prompt; with `other` settings where given."""
        out = self.generate([each.tokens for each in answers], [{**each.options, **other} for each in answers], 1)
        return [given(one)[-len(each.log_probs) :] for one, each in zip(out, answers, strict=True)]

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.engine.get_server_info()["internal_states"][0]["sglang_ext"]
        return found


def given(answer: Any) -> list[float]:
    """Log-probabilities of a prompt's tokens behind the first."""
    return [lp for lp, *_ in answer["meta_info"]["input_token_logprobs"][1:]]


def chosen(answer: Any) -> list[float]:
    return [lp for lp, *_ in answer["meta_info"]["output_token_logprobs"]]


def prompts() -> list[list[int]]:
    gen = torch.Generator().manual_seed(0)
    return [torch.randint(50, 380, (n,), generator=gen).tolist() for n in (3000, 700, 129, 64, 33, 5, 97, 250)]


def deviation(some: list[float], others: list[float]) -> float:
    """Difference of log-probabilities, in the mean of the stride's length of tokens in a row where it is largest.

    Of a single token it says little: one whose place another took, for rounding, may have been all that others saw.
    """
    differences = torch.tensor([abs(x - y) for x, y in zip(some, others, strict=True)])
    return float(differences.unfold(0, min(POLICY["stride"], len(differences)), 1).mean(1).max())


@dataclass
class Found:
    """What engines said.

    Attributes:
        worst: deviation of every answer, by engine and what was asked.
        wrong: what one sub-cache instead of several, or several instead of one, changes in the log-probabilities of the
            same tokens, likewise.
        stats: of every engine.
    """

    worst: dict[tuple[str, str], list[float]]
    wrong: dict[tuple[str, str], list[float]]
    stats: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: Any) -> Found:
    """One engine after the other; plain PyTorch is the last one."""
    folder = models.save_model("llama", tmp_path_factory.mktemp("llama"), head_dim=64, max_position_embeddings=512)
    asked, answers, stats = prompts(), dict[tuple[str, str], list[Answer]](), dict[str, dict[str, Any]]()
    worst, wrong = (dict[tuple[str, str], list[float]]() for _ in range(2))
    for name, (kernels, more) in ENGINES.items():
        running = Running(folder, kernels, **more)
        try:
            answers[name, "alone"] = [running.answers([prompt], [CASCADES])[0] for prompt in asked]
            answers[name, "batch"] = running.answers(asked, [CASCADES] * len(asked))
            answers[name, "streaming"] = running.answers(asked, [STREAMING] * len(asked))
            answers[name, "own"] = running.answers(asked, [OWN, CASCADES] * (len(asked) // 2))
            answers[name, "turns"] = running.turns()
            answers[name, "again"] = running.answers(asked, [CASCADES] * len(asked))
            stats[name] = running.stats()
        finally:
            running.engine.shutdown()
    running = Running(folder, "torch", **PLAIN)
    try:
        for key, each in answers.items():
            forced = running.forced(each)
            other = running.forced(each, cascades=4 if key[1] == "streaming" else 1)
            worst[key] = [deviation(one.log_probs, wanted) for one, wanted in zip(each, forced, strict=True)]
            wrong[key] = [deviation(*pair) for pair in zip(forced, other, strict=True)]
        stats["torch"] = running.stats()
    finally:
        running.engine.shutdown()
    return Found(worst, wrong, stats)


def test_the_kernels_ran(found: Found) -> None:
    expected = {name: "CellReader" if GPU else "StreamReader" for name in ENGINES}
    got = {name: stats["reader"] for name, stats in found.stats.items()}
    assert got == expected | {"torch": "StreamReader"}
    if GPU:
        assert found.stats["graphs"]["view_prefills"]["dense"] > 100
        steps = {name: found.stats[name]["decoding_steps"] for name in ENGINES}
        assert steps["graphs"]["graph"] > 50, steps
        assert steps["eager"]["graph"] == 0, steps


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", list(ENGINES))
def test_every_answer_is_right(found: Found, name: str, asked: str) -> None:
    """Each by itself: alone, under load, with settings of its own, in every turn, in rows that were taken before."""
    worst, wrong = found.worst[name, asked], found.wrong[name, asked]
    print(f"{name}, {asked}: {[(round(a, 4), round(b, 4)) for a, b in zip(worst, wrong, strict=True)]}")
    assert len(worst) == (len(TURNS) if asked == "turns" else len(prompts()))
    assert max(wrong) > 10 * ROUNDING
    for number, (got, other) in enumerate(zip(worst, wrong, strict=True)):
        assert got < (ROUNDING if asked == "streaming" else max(ROUNDING, other / 2)), number
