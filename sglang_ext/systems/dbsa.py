"""DBSA: many-shot in-context learning over pools of demonstrations (papers: Dynamic Block-Sparse Attention)."""

from sglang_ext.policies.options import DbsaOptions
from sglang_ext.systems.registry import System

NAME = "dbsa"
SYSTEM = System(
    summary="Pools of demonstrations are encoded once in blocks; each request retrieves some and reuses their KV.",
    policy="sglang_ext.attention.dbsa:DbsaPolicy",
    options=DbsaOptions,
    kernels="sglang_ext.attention.readers.planned:PlannedReader",
    float8=True,
)
