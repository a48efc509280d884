"""Estimates for candidate tokens: pages by the bounds of their keys (Quest), tokens by keys of 4 bits (Twilight)."""

from sglang_ext.kernels.candidates.quantised import QuantisedKeys
from sglang_ext.kernels.candidates.reference import token_scores

__all__ = ["QuantisedKeys", "token_scores"]
