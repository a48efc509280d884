"""Names of SGLang's classes, for annotations: they say what an argument is.

Type checkers treat them as `Any`. SGLang sets attributes from outside of its classes, and so do plugins like this one:
checked against its annotations, our code would mostly be told about SGLang's. This module imports nothing, so that
`import sglang_ext` stays fast.
"""

from __future__ import annotations

from typing import Any, TypeAlias

_Unchecked: TypeAlias = Any

Engine: TypeAlias = _Unchecked
"""`sglang.Engine`."""
ServerArgs: TypeAlias = _Unchecked
"""`sglang.srt.server_args.ServerArgs`."""
TokenizerManager: TypeAlias = _Unchecked
"""`sglang.srt.managers.tokenizer_manager.TokenizerManager`."""
RequestInput: TypeAlias = _Unchecked
"""`sglang.srt.managers.io_struct.GenerateReqInput` (or `EmbeddingReqInput`): what a route makes of a request's body."""
TokenizedInput: TypeAlias = _Unchecked
"""`sglang.srt.managers.io_struct.TokenizedGenerateReqInput`: what the schedulers are sent, and make a `Req` of."""
RequestState: TypeAlias = _Unchecked
"""`sglang.srt.managers.tokenizer_manager.ReqState`: a request that waits for its answer."""
OpenAIRequest: TypeAlias = _Unchecked
"""A request of one of `sglang.srt.entrypoints.openai.protocol`'s classes."""
OpenAIHandler: TypeAlias = _Unchecked
"""A subclass of `sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase`."""
OpenAIAnswer: TypeAlias = _Unchecked
"""An answer of one of `sglang.srt.entrypoints.openai.protocol`'s classes."""
AnthropicRequest: TypeAlias = _Unchecked
"""`sglang.srt.entrypoints.anthropic.protocol.AnthropicMessagesRequest`."""
OllamaRequest: TypeAlias = _Unchecked
"""A request of one of `sglang.srt.entrypoints.ollama.protocol`'s classes."""
Handler: TypeAlias = _Unchecked
"""What serves routes: an `OpenAIHandler`, or SGLang's `AnthropicServing` or `OllamaServing`."""
TemplateManager: TypeAlias = _Unchecked
"""`sglang.srt.parser.template_manager.TemplateManager`."""
Tokenizer: TypeAlias = _Unchecked
"""`transformers.PreTrainedTokenizerBase`, or SGLang's own stand-in for one."""
SamplingParams: TypeAlias = _Unchecked
"""`sglang.srt.sampling.sampling_params.SamplingParams`."""
Scheduler: TypeAlias = _Unchecked
"""`sglang.srt.managers.scheduler.Scheduler`."""
Req: TypeAlias = _Unchecked
"""`sglang.srt.managers.schedule_batch.Req`: a request in the scheduler."""
ScheduleBatch: TypeAlias = _Unchecked
"""`sglang.srt.managers.schedule_batch.ScheduleBatch`: requests that run together."""
PrefillAdder: TypeAlias = _Unchecked
"""`sglang.srt.managers.schedule_policy.PrefillAdder`: it puts waiting requests into a batch."""
ModelConfig: TypeAlias = _Unchecked
"""`sglang.srt.configs.model_config.ModelConfig`."""
ModelRunner: TypeAlias = _Unchecked
"""`sglang.srt.model_executor.model_runner.ModelRunner`."""
ForwardBatch: TypeAlias = _Unchecked
"""`sglang.srt.model_executor.forward_batch_info.ForwardBatch`: tensors of a batch."""
AttentionLayer: TypeAlias = _Unchecked
"""`sglang.srt.layers.radix_attention.RadixAttention`: one layer's heads and scale."""
LinearLayer: TypeAlias = _Unchecked
"""`sglang.srt.layers.radix_linear_attention.RadixLinearAttention`: one layer's heads, convolution and gates."""
AttentionBackend: TypeAlias = _Unchecked
"""A subclass of `sglang.srt.layers.attention.base_attn_backend.AttentionBackend`."""
GraphRunner: TypeAlias = _Unchecked
"""A runner of CUDA graphs, of `sglang.srt.model_executor`."""
KVPool: TypeAlias = _Unchecked
"""A subclass of `sglang.srt.mem_cache.memory_pool.KVCache`: keys and values of all slots."""
PrefixCache: TypeAlias = _Unchecked
"""A subclass of `sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache`."""
Passed: TypeAlias = _Unchecked
"""Arguments and results that a hook passes on as they are."""
