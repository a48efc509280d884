"""The cascading KV cache in the real engine on the CPU, against `tests/oracle/streams.py`.

The pool has 160 slots and the model 128 positions; a request takes 52 of both, however long it is. SGLang's own strict
checks of its accounting run while it is busy and when it is idle, and end the scheduler when a slot is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.server import until
from tests.oracle import models
from tests.oracle.streams import CascadeOracle, Sizes, streaming_llm

TOLERANCE = 1e-4  # on log-probabilities; another selection, sink or stride moves them by more than 1e-2
CONTEXT, POOL, CHUNK, NEW_TOKENS = 128, 160, 50, 40
SINKS, WINDOW, STRIDE, BETA = 4, 32, 16, 0.95
SLOTS = SINKS + WINDOW + STRIDE
POLICY = {"sinks": SINKS, "window": WINDOW, "stride": STRIDE, "beta": BETA}
CASCADES = Sizes(SINKS, WINDOW, STRIDE, 4, BETA)
STREAMING = Sizes(SINKS, WINDOW, STRIDE, 1)


class Served:
    """One engine, and its model in `transformers`."""

    def __init__(self, engine: Any, folder: Path) -> None:
        self.engine = engine
        self.cascades, self.model = CascadeOracle(folder), models.load_model(folder)

    def params(self, options: dict[str, Any], new_tokens: int = NEW_TOKENS) -> dict[str, Any]:
        return {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "custom_params": options or None}

    def generate(
        self, prompts: Sequence[Sequence[int]], options: Sequence[dict[str, Any]], new_tokens: int = NEW_TOKENS
    ) -> list[dict[str, Any]]:
        """Answers to prompts that are sent together."""
        answers: list[dict[str, Any]] = self.engine.generate(
            input_ids=[list(prompt) for prompt in prompts],
            sampling_params=[self.params(each, new_tokens) for each in options],
            return_logprob=True,
            logprob_start_len=0,
        )
        return answers

    def one(self, prompt: Sequence[int], new_tokens: int = NEW_TOKENS, **options: Any) -> dict[str, Any]:
        return self.generate([prompt], [options], new_tokens)[0]

    def stats(self) -> dict[str, int]:
        return self.engine.get_server_info()["internal_states"][0]["sglang_ext"]

    def idle(self) -> None:
        """Wait until no stream is left; SGLang checks its accounting as soon as nothing runs."""
        until(lambda: self.stats()["streams"] == 0)
        assert self.stats()["reserved_slots"] == 0


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(50, 380, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def sequence(prompt: Sequence[int], answer: dict[str, Any]) -> list[int]:
    return [*prompt, *answer["output_ids"]]


def deviation(prompt: Sequence[int], answer: dict[str, Any], table: torch.Tensor) -> float:
    """Largest error of a log-probability of the prompt's or the answer's tokens, or of a choice, which was greedy."""
    tokens, meta = sequence(prompt, answer), answer["meta_info"]
    got = [value for value, *_ in [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]]
    want = table[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert len(got) == len(want)
    chosen = slice(len(prompt) - 1, len(tokens) - 1)
    choice = (table[chosen].amax(1) - want[chosen]).max()
    return float(max((torch.tensor(got, dtype=want.dtype) - want).abs().max(), choice))


def engine_of(folder: Path, **arguments: Any) -> Any:
    from sglang_ext import Engine

    settings = {
        "dtype": "float32",
        "max_total_tokens": POOL,
        "max_running_requests": 8,
        "chunked_prefill_size": CHUNK,  # no multiple of the stride
        "random_seed": 0,
        "log_level": "error",
    }
    return Engine(model_path=str(folder), **{**settings, **arguments})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return models.save_model("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module", autouse=True)
def strict() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
        patch.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "1")
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    engine = engine_of(folder, attention_backend="cascade", policy=POLICY)
    try:
        yield Served(engine, folder)
    finally:
        engine.shutdown()


@pytest.mark.parametrize("length", [1, 37, 64, 211])
def test_one_cascade_is_streaming_llm(served: Served, length: int) -> None:
    prompt = prompt_of(length, length)
    answer = served.one(prompt, cascades=1)
    assert deviation(prompt, answer, streaming_llm(served.model, sequence(prompt, answer), STREAMING)) <= TOLERANCE


VARIANTS: list[tuple[dict[str, Any], Sizes]] = [
    ({}, CASCADES),
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


def test_twenty_times_the_pool(served: Served) -> None:
    """A prompt that exceeds the pool twenty times, and the model's context 25 times; others run beside it."""
    long, short = prompt_of(20 * POOL, 1), prompt_of(30, 2)
    alone = served.one(short)

    async def together() -> tuple[dict[str, Any], list[dict[str, Any]], list[int]]:
        ask = served.engine.async_generate
        stream = asyncio.create_task(
            ask(
                input_ids=long, sampling_params=served.params({"cascades": 1}), return_logprob=True, logprob_start_len=0
            )
        )
        others, reserved = [], []
        while not stream.done() and len(others) < 3:
            others.append(await ask(input_ids=short, sampling_params=served.params({})))
            info = await served.engine.tokenizer_manager.get_internal_state()
            reserved.append(info[0]["sglang_ext"]["reserved_slots"])
        return await stream, others, reserved

    answer, others, reserved = served.engine.loop.run_until_complete(together())
    assert all(other["output_ids"] == alone["output_ids"] for other in others)
    assert SLOTS in reserved  # the long one alone, at that moment, keeps what any other does
    assert deviation(long, answer, streaming_llm(served.model, sequence(long, answer), STREAMING)) <= TOLERANCE
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

    async def abort() -> None:
        ask, manager = served.engine.async_generate, served.engine.tokenizer_manager
        lengths = (60, 60, 4000, 4000, 70, 80, 3000)
        running = [
            asyncio.create_task(
                ask(input_ids=prompt_of(length, n), sampling_params=served.params({}, 3000), rid=f"stream-{n}")
            )
            for n, length in enumerate(lengths)
        ]
        for n in (2, 0, 5, 1, 3, 4, 6):
            await asyncio.sleep(0.15)
            manager.abort_request(rid=f"stream-{n}")
        for answer in await asyncio.gather(*running):
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"

    served.engine.loop.run_until_complete(abort())
    served.idle()
    assert served.one(prompt_of(90, 3))["output_ids"] == before["output_ids"]
    until(lambda: served.engine.flush_cache().success)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 33, "cascades": 3, "stride": 20}, "= 57 KV slots; the server reserves at most 52 a request"),
        ({"window": 30}, "window=30, cascades=4: expected a multiple"),
        ({"beta": 1}, "beta=1: expected a number of at least 0 and below 1"),
        ({"stride": True}, "stride=True: expected a whole number"),
        ({"heads": "both"}, "heads='both': expected one of independent, homogeneous"),
    ],
)
def test_wrong_options_of_a_request(served: Served, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        served.one(prompt_of(5, 0), **options)


def test_pools_are_refused(served: Served) -> None:
    with pytest.raises(Exception, match="every request of this server is a stream"):
        served.engine.create_pool("pool", models.demonstrations(4))


def test_without_overlap_and_retracted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`streaming_llm` by name; SGLang's own test of retraction computes prompt and answer anew, as one prompt."""
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "7")
    engine = engine_of(folder, attention_backend="streaming_llm", policy=POLICY, disable_overlap_schedule=True)
    try:
        served = Served(engine, folder)
        prompts = [prompt_of(length, length) for length in (20, 75, 130)]
        variants = [({}, STREAMING), ({"cascades": 4}, CASCADES), ({}, STREAMING)]
        answers = served.generate(prompts, [options for options, _ in variants])
        assert sum(answer["meta_info"].get("num_retractions", 0) for answer in answers) > 0
        for prompt, answer, (_, sizes) in zip(prompts, answers, variants, strict=True):
            tokens = sequence(prompt, answer)
            alone = sizes.cascades == 1
            table = streaming_llm(served.model, tokens, sizes) if alone else served.cascades.log_probs(tokens, sizes)
            assert deviation(prompt, answer, table) <= TOLERANCE
        served.idle()
    finally:
        engine.shutdown()
