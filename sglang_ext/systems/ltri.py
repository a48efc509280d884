"""Ltri-LLM: streams that lose nothing, what leaves the window is kept on the host and found again by semantic spans."""

from sglang_ext.policies.ltri_options import Ltri
from sglang_ext.systems.registry import System

NAME = "ltri"
SYSTEM = System(
    summary="Streams of any length keep all on the host, and get back the blocks that a layer asks for.",
    policy="sglang_ext.attention.ltri:LtriPolicy",
    options=Ltri,
    streams=True,
    kernels="sglang_ext.attention.readers.ltri:LtriReader",
)
