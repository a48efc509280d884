"""Quest, a baseline for Double-P: pages of keys by the bounds of their logits."""

from sglang_ext.policies.options import QuestOptions
from sglang_ext.systems.registry import System

NAME = "quest"
SYSTEM = System(
    summary="Decoding reads the pages of keys with the largest bounds; a baseline in plain PyTorch.",
    policy="sglang_ext.attention.quest:QuestPolicy",
    options=QuestOptions,
    apart=True,
)
