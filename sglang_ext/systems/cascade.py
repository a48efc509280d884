"""The cascading KV cache: streams of any length in a fixed pool."""

from sglang_ext.policies.options import CascadeOptions
from sglang_ext.systems.registry import System

NAME = "cascade"
SYSTEM = System(
    summary="Streams of any length keep sinks and a cascade of sub-caches in a fixed set of KV slots.",
    policy="sglang_ext.attention.cascade:CascadePolicy",
    options=CascadeOptions,
    streams=True,
    kernels="sglang_ext.attention.readers.cells:CellReader",
)
