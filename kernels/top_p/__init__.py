"""Smallest sets of clusters that reach a mass: no sort, no fixed budget, lists compacted on the device."""

from sglang_ext.kernels.top_p.reference import select, top_p_mask
from sglang_ext.kernels.top_p.types import Expansion, Numbering, SearchedClusters, Selection, SetRule

__all__ = ["Expansion", "Numbering", "SearchedClusters", "Selection", "SetRule", "select", "top_p_mask"]
