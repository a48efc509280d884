"""Requests with one wrong value each, made from SGLang's own dataclasses: every field, wrong types, signs and sizes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import requests

from tests.e2e.server import Server

MESSAGES = [{"role": "user", "content": "how do i activate my card?"}]
TEXT = "how do i activate"
VALUES: tuple[Any, ...] = (
    "x",
    -5,
    0,
    10**30,
    2**31,
    1.5,
    float("nan"),
    1e308,
    True,
    [],
    ["a", 1],
    [[-1]],
    {"a": {"b": 1}},
    "\ud800",
)
SECONDS = 90.0  # for an answer, on a crowded machine


@dataclass(frozen=True)
class Case:
    """One request; `what` names its wrong value."""

    path: str
    body: Any
    what: str

    def send(self, url: str) -> tuple[int, str]:
        """(status, text); a client that waits in vain gets status 0."""
        data = self.body if isinstance(self.body, str) else json.dumps(self.body)
        try:
            answer = requests.post(
                url + self.path, data=data, headers={"Content-Type": "application/json"}, timeout=SECONDS
            )
        except requests.RequestException as error:
            return 0, repr(error)
        return answer.status_code, answer.text


def sampling_names() -> list[str]:
    """SGLang's sampling parameters, those among them that no client should set."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    return list(SamplingParams.__struct_fields__)


def generate_names() -> list[str]:
    """SGLang's fields of a request to /generate."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    return [field.name for field in dataclasses.fields(GenerateReqInput)]


def model_names(name: str) -> list[str]:
    """Fields of a pydantic model of SGLang's routes."""
    from sglang.srt.entrypoints.anthropic import protocol as anthropic
    from sglang.srt.entrypoints.ollama import protocol as ollama
    from sglang.srt.entrypoints.openai import protocol as openai

    found = next(kind for each in (openai, anthropic, ollama) if (kind := getattr(each, name, None)) is not None)
    return list(found.model_fields)


def with_params(**params: Any) -> dict[str, Any]:
    """A request to /generate that ends soon."""
    return {"text": TEXT, "sampling_params": {"max_new_tokens": 2, **params}}


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/completions": ("CompletionRequest", {"model": "m", "prompt": TEXT, "max_tokens": 2}),
    "/v1/chat/completions": ("ChatCompletionRequest", {"model": "m", "messages": MESSAGES, "max_tokens": 2}),
    "/invocations": ("ChatCompletionRequest", {"model": "m", "messages": MESSAGES, "max_tokens": 2}),
    "/v1/responses": ("ResponsesRequest", {"model": "m", "input": TEXT, "max_output_tokens": 2, "store": False}),
    "/v1/messages": ("AnthropicMessagesRequest", {"model": "m", "messages": MESSAGES, "max_tokens": 2}),
    "/api/chat": (
        "OllamaChatRequest",
        {"model": "m", "messages": MESSAGES, "stream": False, "options": {"num_predict": 2}},
    ),
    "/api/generate": (
        "OllamaGenerateRequest",
        {"model": "m", "prompt": TEXT, "stream": False, "options": {"num_predict": 2}},
    ),
    "/v1/score": ("ScoringRequest", {"model": "m", "query": "a", "items": ["b"], "label_token_ids": [5]}),
    "/v1/embeddings": ("EmbeddingRequest", {"model": "m", "input": "a"}),
    "/v1/rerank": ("V1RerankReqInput", {"query": "a", "documents": ["b"]}),
    "/tokenize": ("TokenizeRequest", {"model": "m", "prompt": "a"}),
    "/detokenize": ("DetokenizeRequest", {"model": "m", "tokens": [5]}),
}
OLLAMA = ("temperature", "top_p", "top_k", "num_predict", "stop", "presence_penalty", "frequency_penalty", "seed")


def generated() -> Iterator[Case]:
    """Every field of every route with every value of `VALUES`."""
    for value in VALUES:
        shown = repr(value)[:40]
        for name in sampling_names():
            yield Case("/generate", with_params(**{name: value}), f"sampling_params.{name}={shown}")
        for name in generate_names():
            yield Case("/generate", {**with_params(), name: value}, f"{name}={shown}")
            batch = {**with_params(), "text": [TEXT, TEXT], name: [value, value]}
            yield Case("/generate", batch, f"{name}=[{shown}, {shown}]")
            if name not in ("text", "stream"):
                parameters = {"sampling_params": {"max_new_tokens": 2}, name: value}
                yield Case(
                    "/vertex_generate", {"instances": [{"text": TEXT}], "parameters": parameters}, f"{name}={shown}"
                )
        for path, (model, body) in BODIES.items():
            for name in model_names(model):
                if (path, name) != ("/invocations", "stream"):
                    yield Case(path, {**body, name: value}, f"{name}={shown}")
        for name in OLLAMA:
            yield Case(
                "/api/chat", {**BODIES["/api/chat"][1], "options": {"num_predict": 2, name: value}}, name + shown
            )


def answered(server: Server, cases: list[Case], workers: int = 8) -> list[tuple[Case, int, str]]:
    """What each case was answered, several at a time."""
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(lambda case: case.send(server.url), cases)
        return [(case, *answer) for case, answer in zip(cases, found, strict=True)]


def wrong(results: list[tuple[Case, int, str]]) -> list[str]:
    """Answers that tell of a server's fault, or did not come."""
    return [
        f"{status} {case.path} {case.what}: {text[:200]}" for case, status, text in results if not (200 <= status < 500)
    ]
