"""SGLang's frontend language (`gen`, `select`) over a pool.

backend = sglang_ext.RuntimeEndpoint("http://127.0.0.1:30000")
program.run(question="...", backend=backend.with_pool("tickets", ratio=0.3))
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint as SglangRuntimeEndpoint
from sglang.lang.ir import SglSamplingParams

from sglang_ext.config import RequestOptions
from sglang_ext.types import Json, JsonObject

if TYPE_CHECKING:
    from sglang.lang.interpreter import StreamExecutor


class _PoolSamplingParams(SglSamplingParams):
    """SGLang's parameters drop custom_params on the way to the server; these do not."""

    custom_params: JsonObject

    def to_srt_kwargs(self) -> JsonObject:
        return {**super().to_srt_kwargs(), "custom_params": self.custom_params}


class RuntimeEndpoint(SglangRuntimeEndpoint):
    """SGLang's endpoint whose programs may run over a pool of demonstrations."""

    _options: JsonObject | None = None

    def with_pool(self, pool: str, **options: Json) -> RuntimeEndpoint:
        """The same endpoint over `pool`; options are those of `sglang_ext.config.RequestOptions`.

        A program's text is taken as it is. What it had said at its first `gen` or `select` is what retrieves, all
        through the program, unless `query` is given.
        """
        RequestOptions.parse({"pool": pool, **options})
        bound = copy.copy(self)
        bound._options = {"raw": True, **options, "pool": pool}
        return bound

    def _custom_params(self, state: StreamExecutor) -> JsonObject:
        query = getattr(state, "ext_query", None)
        if query is None:
            query = state.ext_query = state.text_
        return {"query": query, **(self._options or {})}

    def generate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> tuple[str, JsonObject]:
        return super().generate(s, self._bind(s, sampling_params))

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, JsonObject]]:
        return super().generate_stream(s, self._bind(s, sampling_params))

    def _bind(self, state: StreamExecutor, sampling_params: SglSamplingParams) -> SglSamplingParams:
        if self._options is None:
            return sampling_params
        bound = copy.copy(sampling_params)
        bound.__class__ = _PoolSamplingParams
        bound.custom_params = self._custom_params(state)
        return bound

    def commit_lazy_operations(self, s: StreamExecutor) -> None:
        self._generate_http_request(s, {"text": s.text_, "sampling_params": {"max_new_tokens": 0}})

    def fill_image(self, s: StreamExecutor) -> None:
        if self._options is not None:
            raise ValueError("images cannot be combined with a pool")
        super().fill_image(s)

    def _generate_http_request(self, s: StreamExecutor, data: JsonObject) -> Json:
        if self._options is None or "input_ids" in data:  # input_ids: a choice's probability without any context
            return super()._generate_http_request(s, data)
        # What asks for labels is for generation; `select` chooses among its own choices.
        labels = ("constrain", "choose", "label_probs")
        custom = {key: value for key, value in self._custom_params(s).items() if key not in labels}
        data = {**data, "sampling_params": {**data["sampling_params"], "custom_params": custom}}
        answer = super()._generate_http_request(s, data)
        for item in answer if isinstance(answer, list) else [answer]:
            # `select` computes logprob_start_len from prompt_tokens, and the server counts it from the own tokens on.
            item["meta_info"]["prompt_tokens"] -= item["meta_info"]["sglang_ext"]["stitched_tokens"]
        return answer
