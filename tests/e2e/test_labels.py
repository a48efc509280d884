"""Labels over HTTP: their probabilities beside ``transformers``, answers constrained to them, and odd ones."""

from __future__ import annotations

import json
import math
import random
import shutil
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
import torch
from tokenizers import Tokenizer, decoders

from sglang_ext import lines
from sglang_ext.config import PoolOptions
from tests.e2e.server import Server, error_of, model, until
from tests.oracle import models, oracle

QUESTION = "how do i activate my card?"
LIMIT = 6000  # tokens of labels for one answer: a thousand labels need fewer, "wordy" more
TOLERANCE = 3e-4  # nats, float32 beside float64
ENDING = "\n\n"

NESTED = ["1", "11", "111", "1e5", "NaN", "1" * 12, "1e", "N"]
ODD = [
    'say "hi"',
    "back\\slash",
    "two\nlines",
    "tab\there",
    "é😀 ünïcode",
    "\u2028",
    "x",
    " ",
    "  ",
    "\t",
    "blank",
    "blank ",
    "blank  ",
    "\x01",
    "a\rb",
    "ends\n",
    "a\n\nb",
    ENDING,
    "l" * 2000,
    '", "',
    "root ::= x",
]
THOUSAND = [f"i{i:03d}" for i in range(1000)]


def pool_of(labels: list[str]) -> list[dict[str, str]]:
    return [{"input": f"q{n}", "output": label} for n, label in enumerate(labels)]


POOLS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "nested": (NESTED, {"block_size": 3}),
    "odd": (ODD, {"block_size": 7, "positions": "local"}),
    "one": (["only"], {"block_size": 1}),
    "thousand": (
        THOUSAND,
        {"block_size": 50, "positions": "local", "template": "{input}>{output}", "separator": "\n"},
    ),
    "wordy": ([f"{i} {'words ' * 30}" for i in range(50)], {"block_size": 10, "positions": "local"}),
}


@cache
def folder() -> Path:
    return model("llama", max_position_embeddings=8192)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    settings = json.dumps({"max_label_tokens": LIMIT})
    with Server(
        folder(), env={"SGLANG_EXT_SETTINGS": settings}, max_total_tokens=40000, chunked_prefill_size=200
    ) as running:
        for name, (labels, options) in POOLS.items():
            running.put(name, pool_of(labels), **options)
        yield running
        until(lambda: running.idle() is not None)
        assert running.faults() == []


def ask(server: Server, text: str = QUESTION, **options: Any) -> requests.Response:
    custom = {"ratio": 0.3, **options.pop("custom_params", {})}
    params = {"max_new_tokens": 4, **options.pop("sampling_params", {}), "custom_params": custom}
    return server.call("POST", "/generate", json={"text": text, "sampling_params": params, **options}, timeout=600)


def ext(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer["meta_info"]["sglang_ext"]
    return found


# --------------------------------------------------------------------------- probabilities


@pytest.mark.parametrize(
    ("pool", "count", "rebase"),
    [("nested", 8, True), ("nested", 8, False), ("odd", len(ODD), True), ("odd", len(ODD), False), ("one", 1, True),
     ("thousand", 24, True)],
)  # fmt: skip
def test_probabilities_are_those_of_each_label_scored_alone(
    server: Server, pool: str, count: int, rebase: bool
) -> None:
    """The oracle runs each label behind the prompt on its own, in float64."""
    labels, options = POOLS[pool]
    answer = ask(server, custom_params={"pool": pool, "label_probs": True, "rebase": rebase}).json()
    probs = ext(answer)["label_probs"]
    assert list(probs) == labels and sum(probs.values()) == pytest.approx(1.0)
    blocks = server.pool(pool, tokens=True)["blocks"]
    reference, tokenizer = models.load_model(folder(), torch.float64), models.load_tokenizer(folder())
    tokens = [block["token_ids"] for block in blocks]
    encoded = oracle.encode(reference, tokens, positions=options.get("positions", "sequential"))
    pieces = oracle.whole_blocks(tokens, ext(answer)["blocks"])
    written = PoolOptions.parse(options)
    question, lead = written.render_query(QUESTION)
    prompt = tokenizer(question, add_special_tokens=False)["input_ids"]
    some = [label for label in random.Random(1).sample(labels, count) if probs[label] > 0]
    scores = {}
    for label in some:
        ids = tokenizer(lead + label + written.answer_end, add_special_tokens=False)["input_ids"]
        table = oracle.log_probs(reference, encoded, pieces, [*prompt, *ids], rebase=rebase)
        scores[label] = sum(float(table[len(prompt) - 1 + at, token]) for at, token in enumerate(ids))
    assert len(some) > len(labels) // 2 or len(some) == count
    total = math.log(sum(math.exp(score - max(scores.values())) for score in scores.values())) + max(scores.values())
    share = sum(probs[label] for label in some)
    for label in some:
        spread = TOLERANCE * max(1.0, abs(scores[label]) / 20)
        assert math.log(probs[label] / share) == pytest.approx(scores[label] - total, abs=spread), label


@pytest.mark.parametrize("how", [{"label_probs": True}, {"choose": "likely"}, {"choose": "likely", "rebase": False}])
def test_labels_that_do_not_fit_behind_a_long_question(server: Server, how: dict[str, Any]) -> None:
    """Of 8,192 tokens of context, SGLang takes 8,186 in a prompt; labels have two tokens and more."""
    first = len(server.pool("nested", tokens=True)["blocks"][0]["token_ids"])
    custom = {"pool": "nested", "block_ids": [0], **how}
    body = {
        "input_ids": [7] * (8192 - 6 - first - 1),
        "sampling_params": {"max_new_tokens": 4, "custom_params": custom},
    }
    answer = server.call("POST", "/generate", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert "the longest label" in answer.text and "they must be at most 8186" in answer.text


def test_they_are_the_same_whatever_else_is_asked(server: Server) -> None:
    """Constrained or not, streamed or not, in a batch, of a question of one token, and with a row of examples."""
    custom = {"pool": "nested", "label_probs": True}
    expected = ext(ask(server, custom_params=custom).json())["label_probs"]
    for more in ({"constrain": "labels"}, {"blocks": None}):
        assert ext(ask(server, custom_params={**custom, **more}).json())["label_probs"] == pytest.approx(
            expected, abs=1e-4
        )
    body = {"sampling_params": {"max_new_tokens": 2, "n": 2, "custom_params": {**custom, "ratio": 0.3}}}
    batch = server.json("POST", "/generate", json={"text": [QUESTION, "else"], **body})
    assert len(batch) == 4
    assert ext(batch[0])["label_probs"] == ext(batch[1])["label_probs"] == pytest.approx(expected, abs=1e-4)
    assert ext(batch[2])["label_probs"] == ext(batch[3])["label_probs"] != pytest.approx(expected, abs=1e-4)
    alone = {**custom, "ratio": 0.3, "query": QUESTION}
    single = {"input_ids": [42], "sampling_params": {"max_new_tokens": 1, "custom_params": alone}}
    first = ext(server.json("POST", "/generate", json={**single, "extra_key": "mine"}))["label_probs"]
    assert first == ext(server.json("POST", "/generate", json=single))["label_probs"]
    assert sum(first.values()) == pytest.approx(1.0)
    examples = {"pool": "nested", "label_probs": True, "granularity": "example"}
    assert sum(ext(ask(server, custom_params=examples).json())["label_probs"].values()) == pytest.approx(1.0)


def test_a_quota_is_checked_before_anything_is_computed(server: Server) -> None:
    counted = server.log().count("Prefill batch")
    for stream in (False, True):
        answer = ask(server, custom_params={"pool": "wordy", "label_probs": True}, stream=stream)
        message = answer.text if stream else error_of(answer)
        assert stream or answer.status_code == 413
        assert "50 labels of pool 'wordy' need" in message and f"at most {LIMIT}" in message
        assert "--max-label-tokens" in message
    custom = {"pool": "thousand", "label_probs": True}
    body = {"sampling_params": {"max_new_tokens": 1, "custom_params": custom}}
    many = LIMIT // 1000 + 1  # there is a token in every label: they are counted before they are tokenized
    assert f"need at least 1000 tokens for each of {many} prompts" in error_of(ask_many(server, many, body))
    listed = {**body, "sampling_params": [body["sampling_params"]] * 4 + [{"max_new_tokens": 1}]}
    assert "for each of 4 prompts" in error_of(server.call("POST", "/generate", json={"text": ["a"] * 5, **listed}))
    assert server.log().count("Prefill batch") == counted
    assert ask(server, custom_params={"pool": "wordy"}).status_code == 200


def ask_many(server: Server, count: int, body: dict[str, Any]) -> requests.Response:
    """A batch of so many prompts, which is too large."""
    answer = server.call("POST", "/generate", json={"text": ["a", *["b"] * (count - 1)], **body})
    assert answer.status_code == 413, answer.text
    return answer


class Background:
    """A request for a thousand labels' probabilities in a thread of its own."""

    def __init__(self, server: Server, text: str) -> None:
        self.answer: requests.Response | None = None
        self._thread = threading.Thread(target=self._run, args=(server, text))
        self._thread.start()

    def _run(self, server: Server, text: str) -> None:
        self.answer = ask(server, text, custom_params={"pool": "thousand", "label_probs": True})

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> requests.Response:
        self._thread.join(600)
        assert self.answer is not None
        return self.answer


def scoring(server: Server) -> int:
    """How many batches of prompts the server has computed."""
    return server.log().count("Prefill batch")


def test_a_thousand_labels_are_few_requests_and_a_neighbour_is_served_between_them(server: Server) -> None:
    before = scoring(server)
    background = Background(server, "first of all")
    served = 0
    while background.alive:
        body = {"text": "plain", "sampling_params": {"max_new_tokens": 1}}
        server.json("POST", "/generate", json=body)
        served += background.alive
    assert background.join().status_code == 200
    assert served >= 3, "a neighbour's one token waited for all the labels"
    assert scoring(server) - before - served < 120  # it was a request a label


@pytest.mark.parametrize("stream", [False, True])
def test_scoring_stops_when_its_client_hangs_up(server: Server, stream: bool) -> None:
    held = server.state()["sglang_ext"]["held_tokens"]
    before = scoring(server)
    assert ask(server, f"whole {stream}", custom_params={"pool": "thousand", "label_probs": True}).status_code == 200
    whole = scoring(server) - before
    before = scoring(server)
    params = {"max_new_tokens": 4, "custom_params": {"pool": "thousand", "label_probs": True, "ratio": 0.3}}
    body = {"text": f"hang up {stream}", "sampling_params": params, "stream": stream}
    with (
        pytest.raises(requests.RequestException),
        requests.Session() as session,
        session.post(server.url + "/generate", json=body, timeout=0.3, stream=stream) as answer,
    ):
        for _ in answer.iter_lines():
            pass
    server.idle(300)
    until(lambda: server.pool("thousand")["requests_in_flight"] == 0, 60)
    server.idle(300)
    assert scoring(server) - before < whole - 2, "the labels were scored for nobody"
    assert server.state()["sglang_ext"]["held_tokens"] == held


# --------------------------------------------------------------------------- constrained answers


def best(answer: Any) -> str:
    probs: dict[str, float] = ext(answer)["label_probs"]
    return max(probs, key=probs.__getitem__)


def test_with_probabilities_the_answer_is_the_most_likely_label(server: Server) -> None:
    """Without, it is the greedy one: another for some questions, or this test could not fail."""
    differ = 0
    for number in range(24):
        text = f"{number} {QUESTION[number % 7 :]}"
        custom = {"pool": "nested", "constrain": "labels"}
        greedy = ask(server, text, custom_params=custom).json()
        assert greedy["text"].removeprefix(" ") in NESTED
        both = {**custom, "label_probs": True}
        answer = ask(server, text, custom_params=both, return_logprob=True).json()
        assert answer["text"] == f" {best(answer)}" and answer["meta_info"]["finish_reason"]["type"] == "stop"
        spelled = "".join(
            models.load_tokenizer(folder()).decode([token])
            for _, token, _ in answer["meta_info"]["output_token_logprobs"]
        )
        assert spelled.startswith(answer["text"])
        assert (
            ask(server, text, custom_params=both, sampling_params={"temperature": 0}).json()["text"] == answer["text"]
        )
        differ += greedy["text"] != answer["text"]
        if number < 4:
            body = {"text": text, "sampling_params": {"max_new_tokens": 4, "custom_params": {**both, "ratio": 0.3}}}
            events = list(server.stream(body))
            assert events[-1]["text"] == answer["text"] and all(best(event) == best(answer) for event in events)
    assert differ > 0
    hot = {"temperature": 5.0}
    custom = {"pool": "nested", "constrain": "labels", "label_probs": True}
    sampled = {ask(server, custom_params=custom, sampling_params=hot).json()["text"] for _ in range(12)}
    assert len(sampled) > 1 and {text.removeprefix(" ") for text in sampled} <= set(NESTED)


def test_the_openai_routes_answer_alike(server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=600)
    custom = {"pool": "nested", "constrain": "labels", "label_probs": True}
    for stream in (False, True):
        extra = {"custom_params": custom}
        texts = client.completions.create(model="m", prompt=QUESTION, extra_body=extra, stream=stream)
        text = "".join(c.choices[0].text for c in texts if c.choices) if stream else texts.choices[0].text
        answer = ask(server, custom_params={**custom, "ratio": None}).json()
        assert text == f" {best(answer)}"
        messages: Any = [{"role": "user", "content": QUESTION}]
        said = client.chat.completions.create(model="m", messages=messages, extra_body=extra, stream=stream)
        if stream:
            chat = "".join(c.choices[0].delta.content or "" for c in said if c.choices)
        else:
            chat = said.choices[0].message.content
        assert chat in NESTED


@pytest.mark.parametrize("label", ODD)
def test_odd_labels_are_answered_as_they_are_written(server: Server, label: str) -> None:
    """A pool with that label alone must answer it, in one piece and in a stream; trailing blanks and all."""
    server.put("lone", [{"input": "what?", "output": label}])
    try:
        custom = {"pool": "lone", "constrain": "labels"}
        whole = ask(server, custom_params=custom).json()
        assert whole["text"] == f" {label}", whole
        assert whole["meta_info"]["finish_reason"]["type"] == "stop"
        body = {"text": QUESTION, "sampling_params": {"temperature": 1.5, "custom_params": custom}}
        texts = [event["text"] for event in server.stream(body)]
        assert texts[-1] == f" {label}" and all(texts[-1].startswith(text) for text in texts)
    finally:
        server.json("DELETE", "/v1/pools/lone")


def test_odd_labels_are_sampled_beside_each_other(server: Server) -> None:
    custom = {"pool": "odd", "constrain": "labels", "ratio": 1.0}
    seen = set()
    for number in range(40):
        answer = ask(server, f"{number}?", custom_params=custom, sampling_params={"temperature": 3.0}).json()
        assert answer["text"].removeprefix(" ") in ODD or answer["text"][1:] in ODD, answer["text"]
        seen.add(answer["text"])
    assert len(seen) > 4


def test_a_label_with_a_special_token_is_refused(server: Server) -> None:
    for label in ("<s>", "</s>", "a <|end|> b"):
        items = pool_of(["fine", label])
        answer = server.call("PUT", "/v1/pools/special", json={"demonstrations": items})
        assert answer.status_code == 400 and "special token of the model's tokenizer" in error_of(answer), answer.text
        assert server.call("GET", "/v1/pools/special").status_code == 404
    server.put("special", pool_of(["fine"]))
    answer = server.call("POST", "/v1/pools/special/demonstrations", json={"demonstrations": pool_of(["</s>"])})
    assert answer.status_code == 400 and server.pool("special")["labels"] == ["fine"]
    answer = server.call("PUT", "/v1/pools/empty", json={"demonstrations": [{"input": "a", "output": ""}]})
    assert answer.status_code == 400 and "output not empty" in error_of(answer)


# --------------------------------------------------------------------------- other grammar backends and tokenizers


def mistaken_model() -> Path:
    """A model whose tokenizer decodes as before, and whose kind xgrammar mistakes."""
    path = folder().with_name(folder().name + "-mistaken")
    if not path.exists():
        shutil.copytree(folder(), path)
        backend = Tokenizer.from_file(str(path / "tokenizer.json"))
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.ByteLevel()])
        backend.save(str(path / "tokenizer.json"))
    return path


def test_a_tokenizer_that_the_grammar_mistakes_is_found_when_a_pool_is_put() -> None:
    with Server(mistaken_model(), max_total_tokens=4000) as server:
        answer = server.call("PUT", "/v1/pools/p", json={"demonstrations": pool_of(["card issue"])})
        if lines.current() is lines.NEWER:  # its xgrammar takes the tokenizer for what it is
            until(lambda: server.pool("p")["status"] == "ready")
            asked = ask(server, custom_params={"pool": "p", "constrain": "labels"})
            assert asked.json()["text"].strip() == "card issue"
            return
        assert answer.status_code == 400, answer.text
        assert "cannot spell the output 'card issue'" in error_of(answer) and "BYTE_FALLBACK" in error_of(answer)


def test_a_server_without_a_grammar_says_so() -> None:
    with Server(mistaken_model(), max_total_tokens=4000, grammar_backend="none") as server:
        server.put("p", pool_of(NESTED))
        answer = ask(server, custom_params={"pool": "p", "constrain": "labels"})
        assert answer.status_code == 400 and "--grammar-backend none" in error_of(answer)
        probs = ext(ask(server, custom_params={"pool": "p", "label_probs": True}).json())["label_probs"]
        assert sum(probs.values()) == pytest.approx(1.0)
