"""Twilight, a baseline for Double-P: top-p of the tokens within Quest's pages."""

from sglang_ext.policies.options import TwilightOptions
from sglang_ext.systems.registry import System

NAME = "twilight"
SYSTEM = System(
    summary="Decoding reads the top-p tokens of Quest's pages; a baseline in plain PyTorch.",
    policy="sglang_ext.attention.twilight:TwilightPolicy",
    options=TwilightOptions,
    apart=True,
)
