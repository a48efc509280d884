"""RetroInfer, a baseline for Double-P: fixed numbers of clusters."""

from sglang_ext.policies.options import RetroInferOptions
from sglang_ext.systems.registry import System

NAME = "retroinfer"
SYSTEM = System(
    summary="Decoding reads fixed numbers of clusters of keys; a baseline in plain PyTorch.",
    policy="sglang_ext.attention.retroinfer:RetroInferPolicy",
    options=RetroInferOptions,
    apart=True,
)
