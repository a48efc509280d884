"""InfLLM's index, a baseline for Ltri-LLM: a block is remembered by the mean key of its most attended tokens."""

from dataclasses import replace

from sglang_ext.policies.ltri_options import InfLlmOptions
from sglang_ext.systems import ltri

NAME = "infllm"
SYSTEM = replace(
    ltri.SYSTEM,
    summary="As ltri, with InfLLM's index: every layer chooses blocks by their most attended keys.",
    policy="sglang_ext.attention.ltri:InfLlmPolicy",
    options=InfLlmOptions,
    spreads=False,  # all heads choose, and kernels add no products of several ranks
    automatic=False,  # not measured yet
)
