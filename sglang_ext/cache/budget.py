"""How many bytes policies keep beside keys and values: the only place that says it.

SGLang is told at start, and takes them off the memory for its KV cache (`plugin.after_compute_cell_size`). Where a
policy allocates its memory itself, it asks here, too.
"""

from __future__ import annotations

from dataclasses import dataclass

INT32, FLOAT32 = 4, 4
SLACK = 10
"""One tile of clusters in so many is there for what runs leave empty of their last tiles.

Of plain rows those that end just behind a segment leave the most: 8,188 and 1,025 tokens take 8 and 2 tiles and fill 9.
Where more is left, by small blocks, the last ones find no room and are read densely.
"""


@dataclass(frozen=True)
class KVShape:
    """The KV cache of one rank.

    Attributes:
        layers: that have one.
        kv_heads: key-value heads of a layer.
        head_dim, value_dim: components of a key, and of a value.
        itemsize: bytes of a component.
        query_itemsize: bytes of a component of a query; 0: those of a key.
    """

    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    query_itemsize: int = 0

    @property
    def summary_itemsize(self) -> int:
        """Bytes of a component of a mean key or value: a KV cache of 8 bits is summarised in the queries' type."""
        return max(self.itemsize, self.query_itemsize)


@dataclass(frozen=True)
class ClusterBytes:
    """Bytes of clusters, in all layers and key-value heads.

    Attributes:
        cluster: centroid, mean value, size and first member of one cluster.
        piece: size and first member once more, for a run of which a row has a piece.
        member: the slot of one token.
    """

    cluster: int
    piece: int
    member: int

    @classmethod
    def of(cls, shape: KVShape, centroid_itemsize: int) -> ClusterBytes:
        """Bytes for a KV cache, where a component of a centroid has `centroid_itemsize`."""
        heads = shape.layers * shape.kv_heads
        vectors = shape.head_dim * centroid_itemsize + shape.value_dim * shape.summary_itemsize
        return cls(heads * (vectors + 2 * INT32), heads * 2 * INT32, heads * INT32)

    def per_token(self, tokens: int, in_tiles: bool) -> int:
        """Bytes a token of the KV cache, where a cluster has so many tokens in the mean.

        With 16 tokens a cluster and 128 components: 7.1% of a 16-bit KV cache, 6.7% of a 32-bit one. In tiles 7.95%:
        that memory is there from the start, has sizes and first members twice, for pieces of runs, and a tenth more of
        everything, for tiles that are partly empty. Tokens that are in two runs, because a prefix ends inside one of
        them, are at most a twentieth of the KV cache's.
        """
        total = self.cluster + tokens * self.member + (self.piece if in_tiles else 0)
        return -(-total * (SLACK + in_tiles) // (tokens * SLACK))


def cascade_bytes_per_token(layers: int, lanes: int, lists: bool) -> int:
    """Bytes a cell of a cascade: its token, its slot and its score.

    They are 2.3% of a 16-bit KV cache with 128 components. A request that is shorter than sinks + window + stride has
    them for that many tokens all the same.

    Args:
        layers: that have a KV cache.
        lanes: sets of tokens in a layer, one for each key-value head or one for all.
        lists: whether kernels have lists of the slots, which they read in every layer.
    """
    return layers * lanes * (2 * INT32 + FLOAT32 + (INT32 if lists else 0))


def cached_bytes_per_slot(shape: KVShape, tokens: int, slots: int) -> int:
    """Bytes a KV slot of tokens that a stream of Ltri-LLM gets back from the host, beside its slots.

    Args:
        shape: the KV cache of one rank.
        tokens: that a stream has of them.
        slots: of a stream that has all of its slots.
    """
    token_bytes = shape.layers * shape.kv_heads * (shape.head_dim + shape.value_dim) * shape.itemsize
    return -(-tokens * token_bytes // slots)
