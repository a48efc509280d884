"""Attention over clusters: exact tokens and centroid summaries in one softmax."""

from sglang_ext.kernels.cluster_attention.pool import ClusterPool
from sglang_ext.kernels.cluster_attention.reference import centroid_scores, cluster_attention
from sglang_ext.kernels.cluster_attention.types import ClusterReads, ClusterRows, DenseTokens

__all__ = ["ClusterPool", "ClusterReads", "ClusterRows", "DenseTokens", "centroid_scores", "cluster_attention"]
