"""Streams of Ltri-LLM that begin as copies of others: their answers are those of streams that were computed whole."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.e2e.server import until
from tests.e2e.streams import TOLERANCE, Served, prompt_of, retract_often, save, serving
from tests.e2e.test_ltri import OF_KERNELS, SIZES, clean, policy_of
from tests.oracle.ltri import LtriOracle, LtriSizes

DOCUMENT = prompt_of(150, 1)


@pytest.fixture(scope="module", params=["overlap", "retracted", "kernels"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """In plain PyTorch, or with the reader of kernels; there is room for three streams."""
    retracts, kernels = request.param == "retracted", request.param == "kernels"
    sizes = OF_KERNELS if kernels else SIZES
    pool = {"max_total_tokens": 3 * 96 + 8} if kernels else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_EXT_KERNELS", "triton" if kernels else "torch")
        if retracts:
            retract_often(patch)
        folder = save(tmp_path_factory.mktemp("model"))
        options = {"attention_backend": "ltri", "policy": policy_of(sizes), **pool}
        with serving(folder, **options, disable_overlap_schedule=retracts) as s:
            s.oracle, s.sizes = LtriOracle(folder), sizes  # type: ignore[attr-defined]
            yield s


def ask(served: Served, prompts: Sequence[list[int]], new_tokens: int = 12) -> list[dict[str, Any]]:
    """Answers without log-probabilities of the prompt, for which all of it would be computed."""
    params = served.params({}, new_tokens)
    answers: list[dict[str, Any]] = served.engine.generate(
        input_ids=[list(prompt) for prompt in prompts], sampling_params=[params] * len(prompts), return_logprob=True
    )
    return answers


def check(served: Served, prompt: list[int], answer: dict[str, Any]) -> None:
    tokens = [*prompt, *answer["output_ids"]]
    oracle, sizes = served.oracle, served.sizes  # type: ignore[attr-defined]
    table = oracle.log_probs(tokens, len(prompt), sizes)[len(prompt) - 1 : -1]
    for (got, token, *_), row in zip(answer["meta_info"]["output_token_logprobs"], table, strict=True):
        assert abs(row[token] - got) <= TOLERANCE and row.max() - row[token] <= TOLERANCE


def shared(sizes: LtriSizes, one: Sequence[int], prompt: Sequence[int], source: int) -> int:
    """Tokens of a prompt that are copied from a stream whose prompt of `source` tokens begins with `one`."""
    return min(len(one), source - sizes.last, len(prompt) - sizes.last) // sizes.chunk * sizes.chunk


def fresh(served: Served) -> None:
    until(lambda: served.engine.flush_cache().success)
    clean(served)


def test_a_second_question_over_a_document(served: Served) -> None:
    """The source has ended. The third prompt is the first one again, and the fourth shares less of the document.

    The last one ends with it, right behind a chunk: its last tokens are a chunk of their own.
    """
    prompts = [[*DOCUMENT, *prompt_of(20, 2)], [*DOCUMENT, *prompt_of(33, 3)], [*DOCUMENT, *prompt_of(20, 2)]]
    prompts += [[*DOCUMENT[:90], *prompt_of(30, 4)], DOCUMENT[:130]]
    alike: tuple[list[int], ...] = ([], DOCUMENT, prompts[0], DOCUMENT[:90], prompts[4])
    sizes = served.sizes  # type: ignore[attr-defined]
    wanted = [shared(sizes, one, prompt, len(prompts[0])) for one, prompt in zip(alike, prompts, strict=True)]
    for prompt, cached in zip(prompts, wanted, strict=True):
        (answer,) = ask(served, [prompt])
        check(served, prompt, answer)
        found = answer["meta_info"]["cached_tokens"]
        assert found == cached or answer["meta_info"].get("num_retractions")
    fresh(served)


def test_a_fork_is_the_cold_run(served: Served) -> None:
    prompt = [*DOCUMENT, *prompt_of(25, 5)]
    (cold,) = ask(served, [prompt])
    fresh(served)
    ask(served, [[*DOCUMENT, *prompt_of(9, 6)]])
    (fork,) = ask(served, [prompt])
    assert fork["output_ids"] == cold["output_ids"]
    both = (each["meta_info"]["output_token_logprobs"] for each in (cold, fork))
    assert all(abs(one - other) < 1e-6 for (one, *_), (other, *_) in zip(*both, strict=True))
    fresh(served)


def test_siblings_leave_each_other_alone(served: Served) -> None:
    """Three questions at once; two of the forks go on while their source does, and the blocks are there once."""
    source = [*DOCUMENT, *prompt_of(18, 7)]

    async def together() -> tuple[list[dict[str, Any]], list[list[int]]]:
        generate = served.engine.async_generate
        params = {"input_ids": source, "sampling_params": served.params({}, 60), "return_logprob": True}
        first = await generate(**params, stream=True)
        await anext(first)  # it answers
        prompts = [[*DOCUMENT, *prompt_of(21, 8)], [*DOCUMENT[:120], *prompt_of(40, 9)]]
        others = [
            generate(input_ids=prompt, sampling_params=served.params({}, 30), return_logprob=True) for prompt in prompts
        ]
        answers = await asyncio.gather(*others)
        return [*answers, [part async for part in first][-1]], [*prompts, source]

    answers, prompts = served.engine.loop.run_until_complete(together())
    for prompt, answer in zip(prompts, answers, strict=True):
        check(served, prompt, answer)
    assert answers[0]["meta_info"]["cached_tokens"] > 0 or answers[0]["meta_info"].get("num_retractions")
    fresh(served)


def test_forks_hold_blocks_once(served: Served) -> None:
    source, fork = [*DOCUMENT, *prompt_of(18, 7)], [*DOCUMENT, *prompt_of(21, 8)]
    ask(served, [source], 3)
    alone, sizes = served.stats()["host_blocks"], served.sizes  # type: ignore[attr-defined]
    (answer,) = ask(served, [fork], 3)
    ends = (len(fork) + 3 - 2 - sizes.sinks - sizes.window) // sizes.block
    copied = (answer["meta_info"]["cached_tokens"] - sizes.sinks - sizes.window) // sizes.block
    assert served.stats()["ended_streams"] == 2
    assert served.stats()["host_blocks"] == alone + ends - copied
    fresh(served)


def test_forks_of_forks_whose_sources_gave_way(served: Served) -> None:
    """There is room for three streams; each next question finds the one before."""
    document = prompt_of(100, 10)
    for number in range(6):
        document = [*document, *prompt_of(20, 20 + number)]
        (answer,) = ask(served, [document], 5)
        check(served, document, answer)
        assert bool(answer["meta_info"]["cached_tokens"]) == (number > 0)
    fresh(served)


def test_conversations_with_names_are_no_sources(served: Served) -> None:
    prompt = [*DOCUMENT, *prompt_of(20, 2)]
    served.one(prompt, 3, conversation="mine")
    (answer,) = ask(served, [prompt], 3)
    assert answer["meta_info"]["cached_tokens"] == 0
    fresh(served)
