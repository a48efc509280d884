"""What a selection is made from, how it is asked for, what it says, and the buffers that it needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

GROUPS = ("union", "mean")


@dataclass(frozen=True, slots=True)
class SearchedClusters:
    """The clusters that a row's search is over, beside their logits; a row is a request's key-value head.

    Attributes:
        sizes: [batch, kv_heads, cells] int32 tokens of each cluster. -n: n tokens of a cut cluster, whose logit is
            -inf: it is exact whatever p says, and has no mass.
        starts: [batch, kv_heads, cells] int32 index of each cluster's first token in the list of members.
        cells: [batch] int32, how many entries of each request are clusters; entries from there on are not read.
    """

    sizes: torch.Tensor
    starts: torch.Tensor
    cells: torch.Tensor


@dataclass(frozen=True, slots=True)
class SetRule:
    """Which clusters are in a set.

    Attributes:
        group: `union`: a cluster is in a set if it is in any head's set. `mean`: one set for the group by the mean of
            the heads' probabilities.
        by_count: sets of a given number of clusters (as RetroInfer's) instead of a given mass.
    """

    group: str = "union"
    by_count: bool = False


UNION = SetRule()


@dataclass(frozen=True, slots=True)
class Numbering:
    """How the tokens of a row's exact clusters are numbered: one after the other, in the order of the list.

    Attributes:
        run: clusters, a power of two; see `align`.
        align: the tokens of each `run` clusters begin at a multiple of it, and the numbers between are nobody's. 1: no
            numbers are left out, whatever `run` is.
    """

    run: int = 1
    align: int = 1


WITHOUT_GAPS = Numbering()


@dataclass(frozen=True)
class Selection:
    """Clusters of every (request, key-value head): read token by token, or by their centroid.

    The lists are in ascending cluster order; what lies behind their counts is stale. The numbers of the exact clusters'
    tokens are the work that attention splits.

    Attributes:
        counts: [batch, kv_heads, 5] int32: exact clusters, their tokens, approximated clusters, non-empty clusters,
            numbers of tokens, nobody's counted.
        exact: [batch, kv_heads, cells] int32 clusters computed token by token.
        prefix: [batch, kv_heads, cells] int32, number of the first token of each listed exact cluster.
        shift: [batch, kv_heads, cells] int32: token number + shift = index into the list of members.
        approx: [batch, kv_heads, cells] int32 clusters computed by their centroid.
        numbering: of the tokens.
        expanded: whether what the lists stand for was written out with them (`Expansion`).
    """

    counts: torch.Tensor
    exact: torch.Tensor
    prefix: torch.Tensor
    shift: torch.Tensor
    approx: torch.Tensor
    numbering: Numbering = WITHOUT_GAPS
    expanded: bool = False

    @staticmethod
    def empty(
        batch: int, kv_heads: int, cells: int, device: torch.device | str, numbering: Numbering = WITHOUT_GAPS
    ) -> Selection:
        """Uninitialised buffers.

        Args:
            batch, kv_heads: rows of the buffers.
            cells: the most clusters of a request, empty ones counted.
            device: of the buffers.
            numbering: of the tokens.
        """

        def ints(*shape: int) -> torch.Tensor:
            return torch.empty(batch, kv_heads, *shape, dtype=torch.int32, device=device)

        return Selection(ints(5), ints(cells), ints(cells), ints(cells), ints(cells), numbering)

    def of(self, requests: slice) -> Selection:
        """That of some requests: the same memory."""
        return Selection(
            self.counts[requests],
            self.exact[requests],
            self.prefix[requests],
            self.shift[requests],
            self.approx[requests],
            self.numbering,
        )

    def said_expanded(self, expanded: bool) -> Selection:
        """The same buffers, said to be written out or not."""
        if self.expanded == expanded:
            return self
        # Not `dataclasses.replace`, which is slower: this runs in every layer.
        return Selection(self.counts, self.exact, self.prefix, self.shift, self.approx, self.numbering, expanded)


@dataclass(frozen=True, slots=True)
class Expansion:
    """Where a kernel that selects also writes out what attention reads, so that no other kernel has to.

    Only for tokens that are numbered without gaps.

    Attributes:
        members: [kv_heads, tokens] int32 contiguous: KV slots, which the clusters' starts point into.
        tiles: [batch, most tiles] int32 contiguous: places of each request's tiles of clusters.
        width: clusters of a tile, a multiple of 4.
        slots: [batch * kv_heads, most tokens] int32: written, the members of a row's exact clusters by their numbers.
        summaries: [batch * kv_heads, cells] int32: written, (place of the tile * kv_heads + head) * width + number in
            the tile of each approximated cluster.
    """

    members: torch.Tensor
    tiles: torch.Tensor
    width: int
    slots: torch.Tensor
    summaries: torch.Tensor


@dataclass(frozen=True, slots=True)
class TopPTuning:
    """What is chosen by measurement, of the search in Triton.

    Attributes:
        chunk: clusters of a head that a search program takes at once.
        warps: of `_search`.
        rounds: rounds over all clusters, before those between the bounds are listed.
        compact_chunk: clusters of a program of `_compact`.
        compact_warps: of `_compact`.
        joint: one reduction for the sums of a round, instead of one each.
    """

    chunk: int = 512
    warps: int = 4
    rounds: int = 2
    compact_chunk: int = 2048
    compact_warps: int = 8
    joint: bool = True


TUNING = TopPTuning()


@dataclass(frozen=True, slots=True)
class TopPWorkspace:
    """Buffers that the search in Triton needs beside its output; allocate once, before a CUDA graph is captured.

    Attributes:
        keys: [batch, kv_heads, group, cells] int32: masses in whole units, or the order of the masses.
        few: [batch, kv_heads, group, cells] int32: the keys between the bounds, once they are listed.
        levels: [batch, kv_heads, group, cells] int8: bit 0, the cluster is in a head's first set; bit 1, in its second.
    """

    keys: torch.Tensor
    few: torch.Tensor
    levels: torch.Tensor

    @staticmethod
    def empty(
        batch: int, kv_heads: int, group: int, cells: int, device: torch.device | str, lent: torch.Tensor | None = None
    ) -> TopPWorkspace:
        """Buffers; those of int32 in `lent` [n] int32, memory that nobody needs while `select` runs, where it fits."""
        shape, size = (batch, kv_heads, group, cells), batch * kv_heads * group * cells
        if lent is None or lent.numel() < 2 * size:
            lent = torch.empty(2 * size, dtype=torch.int32, device=device)
        keys, few = lent[:size].view(shape), lent[size : 2 * size].view(shape)
        return TopPWorkspace(keys, few, torch.empty(shape, dtype=torch.int8, device=device))

    def first(self, batch: int) -> TopPWorkspace:
        """Of the first `batch` requests."""
        return TopPWorkspace(self.keys[:batch], self.few[:batch], self.levels[:batch])
