"""Double-P: decoding reads only the clusters of keys that carry the attention mass."""

from sglang_ext.policies.options import DoubleP
from sglang_ext.systems.registry import System

NAME = "double_p"
SYSTEM = System(
    summary="Decoding reads clusters of keys in two stages of top-p, or drafts so; pools are served as by dbsa.",
    policy="sglang_ext.attention.double_p:DoublePPolicy",
    options=DoubleP,
    apart=True,
    kernels="sglang_ext.attention.readers.clusters:ClusterReader",
    float8=True,
    pages=True,
    mixed=True,
    hybrid=True,
    drafts=True,
)
