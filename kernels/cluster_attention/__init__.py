"""Attention over clusters: exact tokens and centroid summaries in one softmax."""

from sglang_ext.kernels.cluster_attention.pool import ClusterPool, ClusterRows, DenseTokens
from sglang_ext.kernels.cluster_attention.reference import centroid_scores, cluster_attention

__all__ = ["ClusterPool", "ClusterRows", "DenseTokens", "centroid_scores", "cluster_attention"]
