"""The most likely label over HTTP: beside ``transformers``, on every route, and what does not go with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from sglang_ext.config import PoolOptions
from tests.e2e.server import Server, error_of, until
from tests.e2e.test_labels import POOLS, QUESTION, TOLERANCE, ask, best, ext, folder, pool_of
from tests.oracle import models, oracle

LIMIT = 6000  # tokens of labels for one answer: "wordy" has more


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    env = {"SGLANG_EXT_SETTINGS": json.dumps({"max_label_tokens": LIMIT})}
    with Server(folder(), env=env, max_total_tokens=20000, chunked_prefill_size=200) as running:
        for name in ("nested", "odd", "one", "wordy"):
            running.put(name, pool_of(POOLS[name][0]), **POOLS[name][1])
        yield running
        until(lambda: running.idle() is not None)
        assert running.faults() == []


@pytest.mark.parametrize("pool", ["nested", "odd", "one"])
def test_the_most_likely_label_is_found_without_scoring_all(server: Server, pool: str) -> None:
    labels, options = POOLS[pool]
    written = PoolOptions.parse(options)
    lead, tokenizer = written.render_query("")[1], models.load_tokenizer(folder())
    blocks = [block["token_ids"] for block in server.pool(pool, tokens=True)["blocks"]]
    reference = models.load_model(folder(), torch.float64)
    encoded = oracle.encode(reference, blocks, positions=written.positions)
    for number in range(3):
        text = f"{number} {QUESTION}"
        said = ask(server, text, custom_params={"pool": pool, "choose": "likely"}).json()
        label = best(ask(server, text, custom_params={"pool": pool, "label_probs": True}).json())
        assert ext(said)["choice"]["passes"] == 1 or pool == "odd"
        assert said["text"] == lead + label and label in labels
        ids = tokenizer(lead + label + written.answer_end, add_special_tokens=False)["input_ids"]
        assert said["output_ids"] == ids and said["meta_info"]["completion_tokens"] == len(ids)
        assert said["meta_info"]["finish_reason"] == {"type": "stop", "matched": written.answer_end}
        prompt = tokenizer(written.render_query(text)[0], add_special_tokens=False)["input_ids"]
        pieces = oracle.whole_blocks(blocks, ext(said)["blocks"])
        table = oracle.log_probs(reference, encoded, pieces, [*prompt, *ids])
        score = sum(float(table[len(prompt) - 1 + at, token]) for at, token in enumerate(ids))
        assert ext(said)["choice"]["log_prob"] == pytest.approx(score, abs=TOLERANCE * max(1.0, abs(score) / 20))


def test_the_most_likely_label_is_the_same_however_it_is_asked_for(server: Server) -> None:
    """In a batch and a stream, sampled twice, with probabilities, with log-probabilities, and by OpenAI's client."""
    custom = {"pool": "nested", "choose": "likely", "ratio": 0.3}
    texts = [f"{number} {QUESTION}" for number in range(6)]
    said = [ask(server, text, custom_params=custom).json()["text"] for text in texts]
    params = {"max_new_tokens": 1, "n": 2, "stop": "1", "min_new_tokens": 1, "custom_params": custom}
    batch = server.json("POST", "/generate", json={"text": texts, "sampling_params": params})
    assert [answer["text"] for answer in batch] == [text for text in said for _ in range(2)]
    events = list(server.stream({"text": texts[0], "sampling_params": params | {"n": 1}}))
    assert events[-1]["text"] == said[0] and events[-1]["meta_info"]["finish_reason"]["type"] == "stop"
    assert ask(server, texts[0], custom_params={**custom, "label_probs": True}).json()["text"] == said[0]
    generated = ask(server, texts[0], custom_params=custom, return_logprob=True).json()
    assert generated["text"] == said[0]
    values = [value for value, *_ in generated["meta_info"]["output_token_logprobs"]]
    assert len(values) == generated["meta_info"]["completion_tokens"] > 1
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=600)
    extra = {"custom_params": custom}
    completion = client.completions.create(model="m", prompt=texts[0], extra_body=extra)
    assert completion.choices[0].text == said[0] and completion.choices[0].finish_reason == "stop"
    messages: Any = [{"role": "user", "content": QUESTION}]
    scored = client.chat.completions.create(
        model="m",
        messages=messages,
        extra_body={"custom_params": {"pool": "nested", "ratio": 0.3, "label_probs": True}},
    )
    found = scored.choices[0].model_extra
    assert found is not None
    probs = found["sglang_ext"]["label_probs"]
    for stream in (False, True):
        chat = client.chat.completions.create(model="m", messages=messages, extra_body=extra, stream=stream)
        if stream:
            content = "".join(chunk.choices[0].delta.content or "" for chunk in chat if chunk.choices)
        else:
            content, usage = chat.choices[0].message.content, chat.usage
            assert usage is not None and usage.completion_tokens > 1
        assert content == max(probs, key=probs.__getitem__)


def test_what_does_not_go_with_the_most_likely_label(server: Server) -> None:
    custom = {"pool": "nested", "choose": "likely"}
    answer = ask(server, custom_params=custom, sampling_params={"temperature": 0.5})
    assert answer.status_code == 400 and "is not sampled" in error_of(answer)
    answer = ask(server, custom_params=custom, sampling_params={"regex": "a"})
    assert answer.status_code == 400 and 'choose="likely" and regex' in error_of(answer)
    answer = ask(server, custom_params={**custom, "choose": "best"})
    assert answer.status_code == 400 and "choose 'best': expected 'likely'" in error_of(answer)
    answer = ask(server, custom_params={**custom, "pool": "wordy"})
    assert answer.status_code == 413 and "choose=\"likely\": the 50 labels of pool 'wordy'" in error_of(answer)
