"""Ltri-LLM in the real engine, in plain PyTorch, against `tests/oracle/ltri.py`: `transformers` in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.e2e.server import until
from tests.e2e.streams import (
    TOLERANCE,
    TURNS,
    Served,
    abort_some,
    beside,
    converse,
    deviation,
    prompt_of,
    retract_often,
    save,
    sequence,
    serving,
)
from tests.oracle.ltri import LtriOracle, LtriSizes

SIZES = LtriSizes(
    8, 16, 8, 16, 5, 2, spans=2, vectors=12, queries=8, rate=0.0, early_rate=0.05, theta=0.5, early_layers=1, askers=4
)  # fmt: skip
"""A span is remembered by several tokens: in the first layer equal tokens have equal keys, and of blocks that one such
token each stands for, float32 would choose by its rounding."""
OF_KERNELS = replace(SIZES, sinks=16, window=32, block=16, chunk=32, queries=12)
"""The kernel of spans takes no smaller blocks, and a prompt's last tokens have a frame in two of them."""
LENGTHS = (1, 5, 16, 37, 150)


def policy_of(sizes: LtriSizes) -> dict[str, Any]:
    """`--policy` of the same settings."""
    return {name: value for name, value in asdict(sizes).items() if name not in ("everything", "heads")}


class Replayed:
    """The oracle in the place of `Served.cascades`: a conversation is replayed turn by turn."""

    def __init__(self, oracle: LtriOracle, conversation: Sequence[tuple[int, int]] = TURNS) -> None:
        self.oracle, self.conversation = oracle, conversation

    def log_probs(self, tokens: Sequence[int], sizes: LtriSizes) -> torch.Tensor:
        turns, at = [], 0
        for length, answered in self.conversation:
            turns.append((max(0, at - 1), at + length))
            at += length + answered
        begun = [(begin, end) for begin, end in turns if end <= len(tokens)]
        return self.oracle.log_probs(tokens, begun, sizes)


@pytest.fixture(scope="module", params=["overlap", "retracted", "kernels"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """In plain PyTorch, or with the reader of kernels, for which references stand on a CPU."""
    retracts, kernels = request.param == "retracted", request.param == "kernels"
    sizes = OF_KERNELS if kernels else SIZES
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_EXT_KERNELS", "triton" if kernels else "torch")
        if retracts:
            retract_often(patch)
        folder = save(tmp_path_factory.mktemp("model"))
        oracle, policy = LtriOracle(folder), policy_of(sizes)
        options = {"attention_backend": "ltri", "policy": policy, **({"max_total_tokens": 300} if kernels else {})}
        with serving(folder, **options, disable_overlap_schedule=retracts) as served:
            served.cascades = Replayed(oracle)  # type: ignore[assignment]
            served.retracts, served.oracle = retracts, oracle  # type: ignore[attr-defined]
            served.sizes = sizes  # type: ignore[attr-defined]
            assert served.stats()["reader"] == ("LtriReader" if kernels else "StreamReader")
            yield served


def replays(served: Served) -> None:
    """Chunks of prompts were replayed, where kernels serve."""
    stats = served.stats()
    if stats["reader"] == "LtriReader":
        assert stats["prompt_chunks"]["replayed"] > stats["prompt_chunks"]["launched"]
        assert stats["block_ends"]["replayed"] > 4


def clean(served: Served) -> None:
    """Nothing runs, and nothing is left on the host."""
    served.idle()
    until(lambda: served.engine.flush_cache().success)
    stats = served.stats()
    assert stats["host_blocks"] == stats["host_blocks_promised"] == 0


def test_answers_are_the_papers(served: Served) -> None:
    """Together, so that prompts are cut where others leave room; no number of the chunked prefill is a chunk's."""
    sizes = served.sizes  # type: ignore[attr-defined]
    prompts = [prompt_of(length, length) for length in LENGTHS]
    answers = served.generate(prompts, [{}] * len(prompts))
    oracle = served.oracle  # type: ignore[attr-defined]
    for prompt, answer in zip(prompts, answers, strict=True):
        table = oracle.log_probs(sequence(prompt, answer), len(prompt), sizes)
        assert deviation(prompt, answer, table) <= TOLERANCE, len(prompt)
    retracted = sum(answer["meta_info"].get("num_retractions", 0) for answer in answers)
    assert bool(retracted) == served.retracts  # type: ignore[attr-defined]
    for other in (
        replace(sizes, vote="off"),
        replace(sizes, retrieved=1),
        replace(sizes, persist=False),
        replace(sizes, last=4),
        replace(sizes, asking="spans"),
        replace(sizes, askers=1),
    ):
        table = oracle.log_probs(sequence(prompts[-1], answers[-1]), len(prompts[-1]), other)
        assert deviation(prompts[-1], answers[-1], table) > 10 * TOLERANCE, other
    replays(served)
    clean(served)


def test_turns_go_on_from_what_is_on_the_host(served: Served) -> None:
    sizes = served.sizes  # type: ignore[attr-defined]
    if served.retracts:  # type: ignore[attr-defined]
        pytest.skip("a turn that is retracted ends")
    converse(served, "a", {}, sizes, TURNS)  # type: ignore[arg-type]
    tokens = sum(map(sum, TURNS)) - 1  # the last one is computed by nobody
    blocks, stats = [(count - 1 - sizes.sinks - sizes.window) // sizes.block for count in (tokens, 62)], served.stats()
    # The requests between the turns, of 60 tokens, have ended, and later ones may begin like them.
    assert stats["host_blocks"] == blocks[0] + blocks[1] * stats["ended_streams"]
    assert stats["host_blocks_promised"] == 0
    clean(served)


def test_blocks_that_end_in_an_answer_are_found_again(served: Served) -> None:
    """A later turn gets back what left the window between decoding steps."""
    if served.retracts:  # type: ignore[attr-defined]
        pytest.skip("a turn that is retracted ends")
    turns, sizes = ((35, 80), (45, 10)), served.sizes  # type: ignore[attr-defined]
    of_turns = SimpleNamespace(
        **{name: getattr(served, name) for name in ("generate", "one")},
        cascades=Replayed(served.oracle, turns),  # type: ignore[attr-defined]
    )
    before = served.stats()
    converse(of_turns, "long", {}, sizes, turns)  # type: ignore[arg-type]
    if before["reader"] == "LtriReader":
        ends = {how: served.stats()["block_ends"][how] - before["block_ends"][how] for how in ("replayed", "launched")}
        assert ends["replayed"] >= 4 and ends["launched"] <= 4, ends
    clean(served)


def test_log_probabilities_of_a_prompt_are_computed_anew(served: Served) -> None:
    """Though the prompt begins like that of an ended stream."""
    sizes = served.sizes  # type: ignore[attr-defined]
    first = prompt_of(61, 3)
    answer = served.one(first, new_tokens=6)
    longer = [*first, *answer["output_ids"], *prompt_of(30, 4)]
    again = served.one(longer, new_tokens=6)
    assert again["meta_info"]["cached_tokens"] == 0
    table = served.oracle.log_probs(sequence(longer, again), len(longer), sizes)  # type: ignore[attr-defined]
    assert deviation(longer, again, table) <= TOLERANCE
    clean(served)


def test_what_layers_got_back_is_reported(served: Served) -> None:
    """Of the pass that gives the first token: the chunk that ends the prompt; of each layer, the best first."""
    sizes = served.sizes  # type: ignore[attr-defined]
    prompt = prompt_of(150, 11)
    answer = served.one(prompt, new_tokens=3, attention_report=True)
    served.oracle.log_probs(sequence(prompt, answer), len(prompt), sizes)  # type: ignore[attr-defined]
    (last,) = (chunk for chunk in served.oracle.chunks if chunk.end == len(prompt))  # type: ignore[attr-defined]
    first, *others = answer["meta_info"]["attention_report"]
    if not answer["meta_info"].get("num_retractions"):
        assert first == {"blocks": [last.lists[layer] for layer in sorted(last.lists)]}
        assert len(first["blocks"][-1]) == sizes.retrieved and not any(others)
    assert "attention_report" not in served.one(prompt, new_tokens=2)["meta_info"]
    with pytest.raises(ValueError, match="attention_report=1: expected true or false"):
        served.one(prompt, new_tokens=2, attention_report=1)
    clean(served)


def test_a_long_prompt_beside_others(served: Served) -> None:
    """Longer than the KV pool and the model's context; short requests run while it is computed."""
    sizes = served.sizes  # type: ignore[attr-defined]
    prompt, short = prompt_of(400, 8), prompt_of(20, 9)
    found = beside(served, prompt, short)
    table = served.oracle.log_probs(sequence(prompt, found.answer), len(prompt), sizes)  # type: ignore[attr-defined]
    assert deviation(prompt, found.answer, table) <= TOLERANCE
    assert found.others and all(other["output_ids"] == found.others[0]["output_ids"] for other in found.others)
    clean(served)


def test_aborted_streams_leave_nothing(served: Served) -> None:
    abort_some(served)
    clean(served)
