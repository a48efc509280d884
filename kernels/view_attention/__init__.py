"""Attention over views: what a query row sees is a list of segments of KV slots, each at its own positions."""

from sglang_ext.kernels.view_attention.reference import merge_states, view_attention
from sglang_ext.kernels.view_attention.view import (
    Consecutive,
    Positions,
    Ranks,
    Segment,
    SharedDistance,
    View,
    Written,
    runs,
)

__all__ = [
    "Consecutive",
    "Positions",
    "Ranks",
    "Segment",
    "SharedDistance",
    "View",
    "Written",
    "merge_states",
    "runs",
    "view_attention",
]
