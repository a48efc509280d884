"""Names of SGLang's classes, for annotations: they say what an argument is.

Type checkers treat them as `Any`. SGLang sets attributes from outside of its classes, and so do plugins like this one:
checked against its annotations, our code would mostly be told about SGLang's. This module imports nothing, so that
`import sglang_ext` stays fast.
"""

from __future__ import annotations

from typing import Any, TypeAlias

Engine: TypeAlias = Any
"""`sglang.Engine`."""
ServerArgs: TypeAlias = Any
"""`sglang.srt.server_args.ServerArgs`."""
TokenizerManager: TypeAlias = Any
"""`sglang.srt.managers.tokenizer_manager.TokenizerManager`."""
RequestInput: TypeAlias = Any
"""`sglang.srt.managers.io_struct.GenerateReqInput` (or `EmbeddingReqInput`): what a route makes of a request's body."""
OpenAIRequest: TypeAlias = Any
"""A request of one of `sglang.srt.entrypoints.openai.protocol`'s classes."""
OpenAIHandler: TypeAlias = Any
"""A subclass of `sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase`."""
Tokenizer: TypeAlias = Any
"""`transformers.PreTrainedTokenizerBase`, or SGLang's own stand-in for one."""
SamplingParams: TypeAlias = Any
"""`sglang.srt.sampling.sampling_params.SamplingParams`."""
Scheduler: TypeAlias = Any
"""`sglang.srt.managers.scheduler.Scheduler`."""
Req: TypeAlias = Any
"""`sglang.srt.managers.schedule_batch.Req`: a request in the scheduler."""
ScheduleBatch: TypeAlias = Any
"""`sglang.srt.managers.schedule_batch.ScheduleBatch`: requests that run together."""
PrefillAdder: TypeAlias = Any
"""`sglang.srt.managers.schedule_policy.PrefillAdder`: it puts waiting requests into a batch."""
ModelRunner: TypeAlias = Any
"""`sglang.srt.model_executor.model_runner.ModelRunner`."""
ForwardBatch: TypeAlias = Any
"""`sglang.srt.model_executor.forward_batch_info.ForwardBatch`: tensors of a batch."""
AttentionLayer: TypeAlias = Any
"""`sglang.srt.layers.radix_attention.RadixAttention`: one layer's heads and scale."""
AttentionBackend: TypeAlias = Any
"""A subclass of `sglang.srt.layers.attention.base_attn_backend.AttentionBackend`."""
GraphRunner: TypeAlias = Any
"""A runner of CUDA graphs, of `sglang.srt.model_executor`."""
KVPool: TypeAlias = Any
"""A subclass of `sglang.srt.mem_cache.memory_pool.KVCache`: keys and values of all slots."""
PrefixCache: TypeAlias = Any
"""A subclass of `sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache`."""
Passed: TypeAlias = Any
"""Arguments and results that a hook passes on as they are."""
