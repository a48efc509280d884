"""The gated delta rule, its convolution, its gates and its norm: layers that keep one state for a whole context."""

from sglang_ext.kernels.gated_delta.reference import (
    causal_convolution,
    delta_rule,
    delta_step,
    gates,
    norm_gated,
)

__all__ = ["causal_convolution", "delta_rule", "delta_step", "gates", "norm_gated"]
