"""k-means over the keys of one layer, segment by segment and head by head."""

from sglang_ext.kernels.kmeans.clusters import ClusterPlan, Clusters
from sglang_ext.kernels.kmeans.reference import kmeans, kmeans_layers

__all__ = ["ClusterPlan", "Clusters", "kmeans", "kmeans_layers"]
