"""The spans of a block and the tokens that stand for them, found on the device (Ltri-LLM, sections 3.2 and 3.3).

`reference` is the definition in plain PyTorch, on any device; `cuda_impl` and `triton_impl` have kernels.
`dispatch` chooses.
"""

from sglang_ext.kernels.span_index.dispatch import cut_spans, cut_summed, pick, sum_heads
from sglang_ext.kernels.span_index.types import HeadSums, SpanRule, Spans, SpanWorkspace

__all__ = ["HeadSums", "SpanRule", "SpanWorkspace", "Spans", "cut_spans", "cut_summed", "pick", "sum_heads"]
