"""The cascading KV cache's kernels in the real engine, against the same oracle as plain PyTorch in `test_cascade.py`.

Without a GPU the kernels run in Triton's interpreter, seconds a step: every kind of pass occurs once. On a GPU,
`test_gpu_cascade.py` says more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.e2e.server import until
from tests.e2e.streams import (
    CASCADES,
    SLOTS,
    STREAMING,
    TOLERANCE,
    Served,
    converse,
    deviation,
    prompt_of,
    save,
    sequence,
    serving,
)
from tests.oracle.streams import Sizes

NEW_TOKENS = 6


@pytest.fixture(scope="module")
def served(tmp_path_factory: Any) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_EXT_KERNELS", "triton")
        with serving(save(tmp_path_factory.mktemp("model")), attention_backend="cascade") as served:
            yield served


def test_a_batch_of_many_kinds(served: Served) -> None:
    """Prompts of several strides and chunks, decoding over the end of a stride, settings of the server and others."""
    kinds: list[tuple[int, dict[str, Any], Sizes]] = [
        (92, {}, CASCADES),
        (60, {}, CASCADES),
        (44, {"cascades": 1}, STREAMING),
    ]
    prompts = [prompt_of(length, length) for length, _, _ in kinds]
    answers = served.generate(prompts, [options for _, options, _ in kinds], NEW_TOKENS)
    for prompt, answer, (_, options, sizes) in zip(prompts, answers, kinds, strict=True):
        table = served.cascades.log_probs(sequence(prompt, answer), sizes)
        assert deviation(prompt, answer, table) <= TOLERANCE, options
    served.idle()


def test_conversations_go_on(served: Served) -> None:
    """The first turn's answer ends a stride, whose last token the step past its end has computed."""
    converse(served, "a", {}, CASCADES, ((40, 9), (5, 3)))
    assert served.stats()["conversation_slots"] == SLOTS


def test_a_prompt_goes_on_from_an_ended_stream(served: Served) -> None:
    """In a stride that was begun: its row of states is taken over as it is."""
    prompt, more = prompt_of(38, 3), prompt_of(7, 4)
    ask = lambda tokens, new: served.engine.generate(  # noqa: E731
        input_ids=tokens, sampling_params=served.params({}, new), return_logprob=True
    )
    said = [*prompt, *ask(prompt, 4)["output_ids"]]
    answer = ask([*said, *more], 3)
    assert answer["meta_info"]["cached_tokens"] == len(said) - 1
    whole = [*said, *more, *answer["output_ids"]]
    table = served.cascades.log_probs(whole, CASCADES)[len(said) + len(more) - 1 : -1]
    for (got, token, *_), row in zip(answer["meta_info"]["output_token_logprobs"], table, strict=True):
        assert abs(row[token] - got) <= TOLERANCE and row.max() - row[token] <= TOLERANCE
    served.idle()


def test_conversations_give_their_rows_back(served: Served) -> None:
    """Three streams at a time are all that there are rows for: to requests, and to flushing, conversations give way."""
    three: list[Any] = [[prompt_of(3, n) for n in range(3)], [{}] * 3, 2]
    served.generate(*three)
    assert served.stats()["conversations"] == 0
    served.one(prompt_of(3, 0), 1, conversation="b")
    until(lambda: served.engine.flush_cache().success)
    served.generate(*three)
    served.idle()


def test_aborted_streams_give_their_rows_back(served: Served) -> None:
    """While a prompt is computed, and while an answer is: three streams fit again."""

    async def abort() -> None:
        engine = served.engine
        lengths = ((400, 3), (5, 300))
        running = [
            asyncio.create_task(
                engine.async_generate(
                    input_ids=prompt_of(length, n), sampling_params=served.params({}, new_tokens), rid=f"gone-{n}"
                )
            )
            for n, (length, new_tokens) in enumerate(lengths)
        ]
        await asyncio.sleep(3)
        for n in range(2):
            engine.tokenizer_manager.abort_request(rid=f"gone-{n}")
        for answer in await asyncio.gather(*running):
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"

    served.engine.loop.run_until_complete(abort())
    served.idle()
    served.generate([prompt_of(3, n) for n in range(3)], [{}] * 3, 2)
    served.idle()


def test_the_kernels_ran(served: Served) -> None:
    """A silent fallback to plain PyTorch would pass every test above."""
    stats: dict[str, Any] = served.stats()
    assert stats["reader"] == "CellReader"
    assert stats["view_prefills"]["torch"] > 10
    assert stats["decoding_steps"]["eager"] > 10
    assert (stats["decoding_steps"]["graph"] > 10) == torch.cuda.is_available()
