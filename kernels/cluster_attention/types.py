"""What attention over clusters is told: what a batch reads of a layer, sizes, tuning, and the buffers that it needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_ext.kernels.top_p.types import Selection


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of the attention: heads of queries and of keys, components, and the queries' type."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class ClusterRows:
    """The clusters that each request of a batch reads; equal for all layers.

    Attributes:
        tiles: [batch, most tiles] int32 tiles of the pool.
        counts: [batch] int32 tiles of each request; 0 for one that has no clusters.
        rotation: [batch, most tiles] int32: which of the query's rotations reads the tile; None: the only one.
        sized: [batch, most tiles] int32 tiles of the pool's `sizes` and `starts`, where a request has a piece of a
            tile's tokens only; None: those of `tiles`.
    """

    tiles: torch.Tensor
    counts: torch.Tensor
    rotation: torch.Tensor | None = None
    sized: torch.Tensor | None = None


@dataclass(frozen=True)
class DenseTokens:
    """Tokens that every head reads exactly: sinks, the window, new tokens, or all tokens of a dense request.

    Attributes:
        slots: [batch, most tokens] int32 KV slots, in any order; -1 is skipped.
        counts: [batch] int32 entries of each request, skipped ones counted.
        rotation: [batch, ceil(most tokens / tile)] int32: which of the query's rotations reads each run of `tile`
            entries; None: the only one.
        tile: t above; also the tokens of a tile of attention's work.
    """

    slots: torch.Tensor
    counts: torch.Tensor
    rotation: torch.Tensor | None = None
    tile: int = 64


@dataclass(frozen=True, slots=True)
class ClusterReads:
    """What each request of a batch reads in one layer, beside the pool that its clusters lie in.

    Attributes:
        rows: its clusters.
        dense: its tokens outside the clusters, always exact.
        selection: which of the clusters are exact and which approximated.
        logits: [batch, kv_heads, group, cells] float32 log of the estimated mass of each cluster, as `centroid_scores`
            writes it (the reference, float64 for float64 queries); of approximated clusters alone they are read.
    """

    rows: ClusterRows
    dense: DenseTokens
    selection: Selection
    logits: torch.Tensor


PARTS_OF_TILE = 4
"""Parts of a tile that may each be read with a rotation of its own."""


def aligned(tile: int) -> int:
    """`align` of the selections for tiles of so many tokens, where the query comes in several rotations."""
    return max(1, tile // PARTS_OF_TILE)


@dataclass(frozen=True, slots=True)
class ClusterTuning:
    """What is chosen by measurement, of the kernels in Triton and of which others run in their place.

    Attributes:
        programs: programs of `_attend`; two for each of an H200's 132 multiprocessors, as their loads leave room for.
        expanding: programs of `_expand` for each row.
        summaries: centroid summaries of a tile.
        token_tile: what a tile of tokens costs, in tiles of summaries.
        warps, stages: of `_attend`.
        registers: the most a thread of `_attend` may use, for more programs on a multiprocessor; None: the compiler's.
        score_warps, score_stages: of `_scores`.
        score_tiles: cluster tiles that one program of `_scores` reads.
        merge_parts: parts that `_merge` reads at once.
        joint: scores and selection in one kernel (`joint_impl`) where that runs: 2 to 6 us less of a step on an H200.
        any_size: whether batches have any number of rows, as outside of CUDA graphs. The kernels are compiled for few
            numbers of rows then (`triton_impl.padded`), and every program looks through so many.
        fused: attention and merge in one CUDA kernel (`attend_impl`) where that runs: 4 to 16 us less of a step of
            eight rows of 64K or 128K tokens on an H200, 5 to 7 us of one row's.
    """

    programs: int = 264
    expanding: int = 8
    summaries: int = 32
    token_tile: int = 1
    warps: int = 4
    stages: int = 6
    registers: int | None = None
    score_warps: int = 4
    score_stages: int = 4
    score_tiles: int = 4
    merge_parts: int = 16
    any_size: bool = False
    joint: bool = True
    fused: bool = True


TUNING = ClusterTuning()


@dataclass(frozen=True, slots=True)
class ClusterWorkspace:
    """Buffers of `cluster_attention`, shared by all layers; allocate once, before a CUDA graph is captured.

    Attributes:
        parts: [programs + batch * kv_heads, group, value_dim] float32; means of what a program saw of a row.
        part_lse: [programs + batch * kv_heads, group] float32, to base 2.
        slots: [batch * kv_heads, tokens] int32 KV slots of a row's exact tokens.
        rotations: [batch * kv_heads, tokens / ALIGN] int32, which of the query's rotations reads each ALIGN of them;
            empty where there is one.
        summaries: [batch * kv_heads, cells] int32 rows of the pool's mean values.
        arrived: [batch * kv_heads, 2] int32 zeros, and zeros again after every launch of `attend_impl`: its blocks that
            have come to the end of a row, and those that have seen that all have.
    """

    parts: torch.Tensor
    part_lse: torch.Tensor
    slots: torch.Tensor
    rotations: torch.Tensor
    summaries: torch.Tensor
    arrived: torch.Tensor

    @staticmethod
    def empty(
        batch: int,
        kv_heads: int,
        group: int,
        value_dim: int,
        cells: int,
        tokens: int,
        device: torch.device | str,
        tuning: ClusterTuning = TUNING,
        *,
        align: int = 1,
        programs: int = 0,
    ) -> ClusterWorkspace:
        """Buffers for `batch` requests of at most `cells` clusters with `tokens` tokens.

        Args:
            batch, kv_heads, group, value_dim: sizes.
            cells: the most clusters of a request, empty ones counted.
            tokens: the most clustered tokens of a request; with `align`, the most numbers of them.
            device: of the buffers.
            tuning: that `cluster_attention` will be called with.
            align: of the selections: more than 1 where the query comes in more than one rotation.
            programs: of another kernel that is to find room here (`attend_impl.PROGRAMS`).
        """
        rows, tokens = batch * kv_heads, -(-max(1, tokens) // align) * align
        places = max(tuning.programs, programs) + rows

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return ClusterWorkspace(
            torch.empty(places, group, value_dim, dtype=torch.float32, device=device),
            torch.empty(places, group, dtype=torch.float32, device=device),
            ints(rows, tokens),
            ints(rows, tokens // align if align > 1 else 0),
            ints(rows, max(1, cells)),
            ints(rows, 2),
        )

    def first(self, rows: int) -> ClusterWorkspace:
        """Of the first `rows` rows (batch * kv_heads)."""
        of_rows = (self.slots[:rows], self.rotations[:rows], self.summaries[:rows], self.arrived[:rows])
        return ClusterWorkspace(self.parts, self.part_lse, *of_rows)
