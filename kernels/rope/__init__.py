"""Rotation of queries and keys by position *differences* (rebasing)."""

from sglang_ext.kernels.rope.reference import Rope, rotate

__all__ = ["Rope", "rotate"]
