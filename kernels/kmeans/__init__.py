"""k-means over the keys of one layer, segment by segment and head by head."""

from sglang_ext.kernels.kmeans.clusters import Clusters, Plan
from sglang_ext.kernels.kmeans.reference import kmeans, kmeans_layers

__all__ = ["Clusters", "Plan", "kmeans", "kmeans_layers"]
