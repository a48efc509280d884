"""What kernels take, for those who check options before torch is imported."""

from __future__ import annotations

MAX_CASCADES = 13
"""Sub-caches that the kernels take: a tile of 2^12 steps is as much as one program's registers hold."""

ASSIGNMENTS = ("inner", "l2")
"""By what k-means gives a key to a cluster: the inner product with its centroid, or the distance to it."""

CENTROIDS = ("same", "float8")
"""Types of centroids: the queries', or float8 e4m3, half the bytes that every step reads of every cluster."""
