"""Host memory of Ltri-LLM that is too small for all: who waits, who gives way, and who is refused with numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.server import until
from tests.e2e.streams import TOLERANCE, Served, deviation, goes_on, prompt_of, save, sequence, serving
from tests.e2e.test_ltri import SIZES, clean, policy_of
from tests.oracle.ltri import LtriOracle

BLOCKS = 12
LONGEST = SIZES.sinks + SIZES.window + (BLOCKS + 1) * SIZES.block
"""Tokens of the longest stream."""
LAYER_BYTES = SIZES.block * 2 * 2 * 32 * 4  # keys and values of two heads with 32 components, float32
LAYERS = 3


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = save(tmp_path_factory.mktemp("model"))
    size = (BLOCKS + 0.5) * LAYERS * LAYER_BYTES / 2**30
    with serving(folder, attention_backend="ltri", policy={**policy_of(SIZES), "host_gb": size}) as served:
        served.oracle = LtriOracle(folder)  # type: ignore[attr-defined]
        assert served.stats()["host_blocks_total"] == BLOCKS
        yield served


def right(served: Served, prompt: list[int], answer: dict[str, Any]) -> bool:
    table = served.oracle.log_probs(sequence(prompt, answer), len(prompt), SIZES)  # type: ignore[attr-defined]
    return deviation(prompt, answer, table) <= TOLERANCE


def test_what_can_never_fit_is_refused_with_numbers(served: Served) -> None:
    with pytest.raises(
        ValueError, match=rf"has {LONGEST} tokens with this prompt: expected fewer than {LONGEST}"
    ) as error:
        served.one(prompt_of(LONGEST, 1), new_tokens=1)
    assert error.value.status_code == 413  # type: ignore[attr-defined]
    assert "GiB of host memory have room; set --policy host_gb higher" in str(error.value)
    clean(served)


def test_an_answer_ends_where_host_memory_does(served: Served) -> None:
    prompt = prompt_of(LONGEST - 30, 2)
    answer = served.one(prompt, new_tokens=1000)
    assert len(answer["output_ids"]) == 29 and answer["meta_info"]["finish_reason"]["type"] == "length"
    assert right(served, prompt, answer)
    clean(served)


def test_requests_wait_for_host_memory(served: Served) -> None:
    """There are slots for three, and host memory for one or two."""
    prompts = [prompt_of(length, length) for length in (70, 80, 90, 60, 75)]
    answers = served.generate(prompts, [{}] * len(prompts), 10)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert right(served, prompt, answer), len(prompt)
    clean(served)


def test_conversations_give_way(served: Served) -> None:
    """The one that had a turn last stays, where there is room for it beside the request."""
    first = served.one(prompt_of(47, 5), new_tokens=4, conversation="first")
    second = served.one(prompt_of(47, 6), new_tokens=4, conversation="second")
    held = served.stats()["host_blocks"]
    assert held == 2 * ((47 + 3 - 1 - SIZES.sinks - SIZES.window) // SIZES.block)
    prompt = prompt_of(SIZES.sinks + SIZES.window + (BLOCKS - 3) * SIZES.block - 4, 7)  # takes all but three blocks
    assert right(served, prompt, served.one(prompt, new_tokens=4))
    with pytest.raises(ValueError, match="conversation 'first' cannot be continued"):
        served.one(prompt_of(5, 8), new_tokens=4, **goes_on("first", first))
    assert served.one(prompt_of(5, 8), new_tokens=4, **goes_on("second", second))["output_ids"]
    until(lambda: served.engine.flush_cache().success)
    clean(served)


def test_a_turn_that_can_never_fit(served: Served) -> None:
    """It is refused, and the conversation can go on with a shorter one."""
    first = served.one(prompt_of(45, 9), new_tokens=4, conversation="a")
    with pytest.raises(ValueError, match=f"expected fewer than {LONGEST}"):
        served.one(prompt_of(LONGEST - 45, 10), new_tokens=4, **goes_on("a", first))
    assert served.one(prompt_of(6, 10), new_tokens=4, **goes_on("a", first))["output_ids"]
    until(lambda: served.engine.flush_cache().success)
    clean(served)


def test_a_request_that_finds_no_room_beside_the_stream_it_would_copy(served: Served) -> None:
    """That one gives way, and the request computes all of its prompt."""
    document = prompt_of(100, 11)
    served.engine.generate(input_ids=document, sampling_params=served.params({}, 4))
    assert served.stats()["ended_streams"] == 1 and served.stats()["host_blocks"] > BLOCKS - 4
    params = {"sampling_params": served.params({}, 4), "return_logprob": True}
    short = served.engine.generate(input_ids=[*document[:40], *prompt_of(10, 12)], **params)
    assert short["meta_info"]["cached_tokens"] == 2 * SIZES.chunk
    served.engine.flush_cache()
    served.engine.generate(input_ids=document, sampling_params=served.params({}, 4))
    prompt = [*document[:40], *prompt_of(60, 13)]
    answer = served.engine.generate(input_ids=prompt, **params)
    assert answer["meta_info"]["cached_tokens"] == 0 and len(answer["output_ids"]) == 4
    until(lambda: served.engine.flush_cache().success)
    clean(served)


def test_a_request_that_is_refused_takes_no_room(served: Served) -> None:
    first = served.one(prompt_of(90, 14), new_tokens=4, conversation="mine")
    with pytest.raises(ValueError, match="conversation 'yours' cannot be continued"):
        served.one(prompt_of(5, 15), new_tokens=1000, conversation="yours", **{"continue": True})
    assert served.stats()["conversations"] == 1
    assert served.one(prompt_of(5, 15), new_tokens=2, **goes_on("mine", first))["output_ids"]
    until(lambda: served.engine.flush_cache().success)
    clean(served)


def test_a_prompt_that_leaves_no_room_for_an_answer(served: Served) -> None:
    prompt = prompt_of(LONGEST - 1, 16)
    with pytest.raises(ValueError, match=f"expected fewer than {LONGEST}"):
        served.one(prompt, new_tokens=1)
    assert served.one(prompt, new_tokens=0)["output_ids"] == []
    clean(served)
