"""StreamingLLM, a baseline for the cascading KV cache: sinks and a sliding window."""

from dataclasses import replace

from sglang_ext.policies.options import StreamingLlmOptions
from sglang_ext.systems import cascade

NAME = "streaming_llm"
SYSTEM = replace(
    cascade.SYSTEM,
    summary="Streams of any length keep sinks and a sliding window; the cascade of one sub-cache.",
    policy="sglang_ext.attention.cascade:StreamingLlmPolicy",
    options=StreamingLlmOptions,
)
