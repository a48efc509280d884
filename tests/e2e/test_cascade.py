"""The cascading KV cache in the real engine, in plain PyTorch, against `tests/oracle/streams.py`, in float32.

Its kernels: `test_cascade_kernels.py`, in Triton's interpreter and so with less of them; on a GPU, where SGLang serves
half precision alone, `test_gpu_cascade.py` says what they answer and `test_gpu_streams.py` what they leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.e2e.server import until
from tests.e2e.streams import (
    BETA,
    CASCADES,
    POOL,
    SINKS,
    SLOTS,
    STREAMING,
    STRIDE,
    TOLERANCE,
    TURNS,
    WINDOW,
    Served,
    abort_some,
    beside,
    converse,
    deviation,
    five_hundred_leave_clean_books,
    goes_on,
    prompt_of,
    save,
    sequence,
    serving,
)
from tests.oracle import models
from tests.oracle.streams import Sizes, streaming_llm


@pytest.fixture(scope="module")
def served(tmp_path_factory: Any) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_EXT_KERNELS", "torch")
        with serving(save(tmp_path_factory.mktemp("model")), attention_backend="cascade") as served:
            yield served


@pytest.mark.parametrize("length", [1, 37, 64, 211])
def test_one_cascade_is_streaming_llm(served: Served, length: int) -> None:
    prompt = prompt_of(length, length)
    answer = served.one(prompt, cascades=1)
    assert deviation(prompt, answer, streaming_llm(served.model, sequence(prompt, answer), STREAMING)) <= TOLERANCE


def test_a_window_that_slides_token_by_token(served: Served) -> None:
    """StreamingLLM as it was published: strides of one token."""
    prompt = prompt_of(75, 6)
    answer = served.one(prompt, cascades=1, stride=1)
    table = streaming_llm(served.model, sequence(prompt, answer), Sizes(SINKS, WINDOW, 1))
    assert deviation(prompt, answer, table) <= TOLERANCE


VARIANTS: list[tuple[dict[str, Any], Sizes]] = [
    ({}, CASCADES),
    ({"score_every": 2}, Sizes(SINKS, WINDOW, STRIDE, 4, BETA, score_every=2)),
    ({"score_every": 3, "head_reduction": "max"}, Sizes(SINKS, WINDOW, STRIDE, 4, BETA, True, score_every=3)),
    ({"head_reduction": "max"}, Sizes(SINKS, WINDOW, STRIDE, 4, BETA, maximum=True)),
    ({"heads": "homogeneous"}, Sizes(SINKS, WINDOW, STRIDE, 4, BETA, homogeneous=True)),
    ({"selection": False}, Sizes(SINKS, WINDOW, STRIDE, 4, BETA, selection=False)),
    ({"window": 18, "cascades": 3, "sinks": 0, "stride": 7, "beta": 0.5}, Sizes(0, 18, 7, 3, 0.5)),
    ({"window": 8, "cascades": 2, "sinks": 9, "stride": 30}, Sizes(9, 8, 30, 2, BETA)),
]


def test_cascades_equal_the_rules(served: Served) -> None:
    """Settings of the server and of requests, answered together and beside each other."""
    prompts = [prompt_of(150 + 3 * n, n) for n in range(len(VARIANTS))]
    answers = served.generate(prompts, [options for options, _ in VARIANTS])
    for prompt, answer, (options, sizes) in zip(prompts, answers, VARIANTS, strict=True):
        table = served.cascades.log_probs(sequence(prompt, answer), sizes)
        assert deviation(prompt, answer, table) <= TOLERANCE, options
        if not options:
            lanes = [tuple(lane) for layer in served.cascades.kept for lane in layer]
            assert len(set(lanes)) == len(lanes) == 6  # or one head could be read for another
            for other in (Sizes(SINKS, WINDOW, STRIDE, 4, BETA, selection=False), Sizes(3, WINDOW, STRIDE, 4, BETA)):
                table = served.cascades.log_probs(sequence(prompt, answer), other)
                assert deviation(prompt, answer, table) > 100 * TOLERANCE


def test_within_sinks_and_window_it_is_dense_attention(served: Served) -> None:
    prompt = prompt_of(SINKS + WINDOW - 10, 5)
    answer = served.one(prompt, new_tokens=10)
    with torch.no_grad():
        table = torch.log_softmax(served.model(torch.tensor([sequence(prompt, answer)])).logits[0], -1)
    assert deviation(prompt, answer, table) <= TOLERANCE


@pytest.mark.parametrize("cascades", [1, 4])
def test_twenty_times_the_pool(served: Served, cascades: int) -> None:
    """A prompt that exceeds the pool twenty times, and the model's context 25 times; others run beside it."""
    long, short = prompt_of(20 * POOL, 1), prompt_of(30, 2)
    alone = served.one(short)
    found = beside(served, long, short, cascades=cascades)
    assert all(other["output_ids"] == alone["output_ids"] for other in found.others)
    assert SLOTS in found.reserved  # the long one alone, at that moment, keeps what any other does
    assert max(found.reserved) <= 2 * SLOTS and 0 < max(found.used) <= 2 * SLOTS  # ours, and SGLang's own
    tokens = sequence(long, found.answer)
    table = (
        streaming_llm(served.model, tokens, STREAMING) if cascades == 1 else served.cascades.log_probs(tokens, CASCADES)
    )
    assert deviation(long, found.answer, table) <= TOLERANCE
    served.idle()


def test_under_load_the_same_as_alone(served: Served) -> None:
    """Fourteen requests, of which three fit at a time, of all lengths: each as it is answered alone."""
    prompts = [prompt_of(length, length) for length in (3, 16, 20, 33, 48, 60, 77, 100, 144, 150, 201, 5, 64, 300)]
    options = [{}, {"cascades": 1}] * 7
    together = served.generate(prompts, options)
    for prompt, each, answer in zip(prompts, options, together, strict=True):
        alone = served.one(prompt, **each)
        assert alone["output_ids"] == answer["output_ids"]
        got, want = ([x[0] for x in a["meta_info"]["output_token_logprobs"]] for a in (answer, alone))
        assert got == pytest.approx(want, abs=TOLERANCE)
        assert answer["meta_info"]["cached_tokens"] == 0
    served.idle()


def test_aborted_streams_leave_nothing(served: Served) -> None:
    """Ended while they wait, while their prompt is computed, and while they answer."""
    before = served.one(prompt_of(90, 3))
    abort_some(served)
    served.idle()
    assert served.one(prompt_of(90, 3))["output_ids"] == before["output_ids"]
    until(lambda: served.engine.flush_cache().success)


def test_five_hundred_mixed_requests_leave_clean_books(served: Served) -> None:
    before = served.one(prompt_of(90, 3))
    five_hundred_leave_clean_books(served)
    assert served.one(prompt_of(90, 3))["output_ids"] == before["output_ids"]
    # As many fit beside each other as before: three, and a fourth waits.
    served.generate([prompt_of(90, n) for n in range(4)], [{}] * 4)
    served.idle()


def test_conversations_go_on(served: Served) -> None:
    a = converse(served, "a", {}, CASCADES, TURNS)
    b = converse(served, "b", {"cascades": 1}, STREAMING, TURNS[::-1])
    assert served.stats()["conversations"] == 2 and served.stats()["conversation_slots"] == 2 * SLOTS
    assert a["conversation_key"] != b["conversation_key"]
    with pytest.raises(ValueError, match=r"'b' began with the options {'cascades': 1}"):
        served.one([9, 8], **b)
    for stranger in ({}, {"conversation_key": a["conversation_key"]}):
        with pytest.raises(ValueError, match="conversation 'b' cannot be continued"):
            served.one([9, 8], conversation="b", cascades=1, **{"continue": True}, **stranger)
        with pytest.raises(ValueError, match="conversation 'b' is another's"):
            served.one([9, 8], conversation="b", **stranger)
    # Two streams of full size find no room beside them, three of four do: the one longest without a turn goes.
    served.generate([prompt_of(90, n) for n in range(2)], [{}, {}])
    assert served.stats()["conversations"] == 1
    for name in ("a", "never begun"):
        with pytest.raises(ValueError, match=f"conversation '{name}' cannot be continued"):
            served.one([9, 8], **{**a, "conversation": name})
    assert served.one([9, 8], cascades=1, **b)["meta_info"]["finish_reason"]["type"] == "length"
    with pytest.raises(ValueError, match="expected true or false, and the name of a conversation"):
        served.one([9, 8], **{"continue": True})
    several = {**served.params({"cascades": 1, **b}, 4), "n": 2}
    with pytest.raises(ValueError, match="n=2 with custom_params: conversation='b': a conversation goes on from one"):
        served.engine.generate(input_ids=[9, 8], sampling_params=several)
    assert served.one([9, 8], cascades=1, **b)["meta_info"]["finish_reason"]["type"] == "length", "it is still there"
    until(lambda: served.engine.flush_cache().success)
    assert served.stats()["conversations"] == served.stats()["conversation_slots"] == 0


def test_a_prompt_that_begins_with_an_ended_stream_goes_on_from_it(served: Served) -> None:
    """As the next turn of a chat does, with the answer before it; from all of its tokens, and from no fewer."""
    prompt, more = prompt_of(83, 7), prompt_of(29, 8)
    ask = lambda tokens, new, **options: served.engine.generate(  # noqa: E731
        input_ids=tokens, sampling_params=served.params(options, new), return_logprob=True
    )
    until(lambda: served.engine.flush_cache().success)
    said = [*prompt, *ask(prompt, 12)["output_ids"]]
    assert served.stats()["ended_streams"] == 1 and served.stats()["ended_stream_slots"] == SLOTS
    for probe in range(6):  # as SGLang asks for /health
        served.idle()  # a scheduler that has something to do answers no probe
        served.engine.generate(input_ids=[0], sampling_params={"max_new_tokens": 1}, rid=f"HEALTH_CHECK_{probe}")
    assert served.stats()["ended_streams"] == 1, "probes drive nobody's stream out"
    other = [*said[:-1], said[-1] - 1, *more]
    for tokens, cached in ((other, 0), ([*said, *more], len(said) - 1), ([*said, *more], 0)):
        if cached:  # the answer before left its own stream, and this one's is still there
            assert served.stats()["ended_streams"] == 2
        answer = ask(tokens, 20)
        assert answer["meta_info"]["cached_tokens"] == cached
        table = served.cascades.log_probs([*tokens, *answer["output_ids"]], CASCADES)[len(tokens) - 1 : -1]
        for (got, token, *_), row in zip(answer["meta_info"]["output_token_logprobs"], table, strict=True):
            assert abs(row[token] - got) <= TOLERANCE and row.max() - row[token] <= TOLERANCE
    served.idle()
    # A third turn; one with other settings; one after others took the room.
    whole = [*said, *more, *answer["output_ids"]]
    assert ask([*whole, 7], 1, cascades=1)["meta_info"]["cached_tokens"] == 0
    third = ask([*whole, 7, 8], 5)
    assert third["meta_info"]["cached_tokens"] == len(whole) - 1
    served.one([1, 2, 3], conversation="stays")
    for n in range(4):
        ask(prompt_of(100, n), 3)
    assert served.stats()["conversations"] == 1  # those without a name gave way first
    assert ask([*whole, 7, 8, *third["output_ids"], 9], 2)["meta_info"]["cached_tokens"] == 0
    served.idle()
    until(lambda: served.engine.flush_cache().success)
    assert served.stats()["ended_streams"] == served.stats()["ended_stream_slots"] == 0


def test_a_turn_that_ends_by_itself(served: Served) -> None:
    """At a token to stop at, behind which the next step has begun: that leaves no trace in the turn after it."""
    prompt, more = prompt_of(38, 4), prompt_of(21, 5)
    free = served.one(prompt, 30)["output_ids"]
    stop = next(n for n in range(8, 30) if free[n] not in free[:n])
    params = {"temperature": 0, "max_new_tokens": 30, "stop_token_ids": [free[stop]]}
    first = served.engine.generate(
        input_ids=prompt, sampling_params={**params, "custom_params": {"conversation": "stops"}}
    )
    assert first["meta_info"]["finish_reason"]["type"] == "stop" and first["output_ids"] == free[: stop + 1]
    second = served.generate([more], [goes_on("stops", first)], 6)[0]
    whole = [*prompt, *first["output_ids"], *more]
    table = served.cascades.log_probs([*whole, *second["output_ids"]], CASCADES)[len(whole) - 1 : -1]
    for (got, token, *_), row in zip(second["meta_info"]["output_token_logprobs"], table, strict=True):
        assert abs(row[token] - got) <= TOLERANCE and row.max() - row[token] <= TOLERANCE
    until(lambda: served.engine.flush_cache().success)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 33, "cascades": 3, "stride": 20}, "= 57 KV slots; the server reserves at most 52 a request"),
        ({"window": 30}, "window=30, cascades=4: expected a multiple"),
        ({"cascades": 16}, "cascades=16: expected at most 13"),
        ({"beta": 1}, "beta=1: expected a number of at least 0 and below 1"),
        ({"stride": True}, "stride=True: expected a whole number"),
        ({"heads": "both"}, "heads='both': expected one of independent, homogeneous"),
        ({"score_every": 3_000_000_000}, "score_every=3000000000: expected at most 1073741824"),
    ],
)
def test_wrong_options_of_a_request(served: Served, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        served.one(prompt_of(5, 0), **options)


def test_pools_are_refused(served: Served) -> None:
    with pytest.raises(ValueError, match="every request of this server is a stream"):
        served.engine.create_pool("pool", models.demonstrations(4))
