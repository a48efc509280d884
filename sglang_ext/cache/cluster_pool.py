"""Memory that kernels read clusters from: one pool a layer, places in it that are equal in all layers.

A run takes whole tiles of clusters and a range of members (its tokens' slots, sorted by cluster). The host only gives
places out and takes them back; what fills them is queued, and runs in its order before the layers of the next pass, on
that pass's stream (`settle`). A place goes back when nothing names it any more: what was launched before and still
reads it comes earlier on the same stream than what will fill it.

A row may have a piece of a run only: a prefix ends inside it, a piece of a block was selected, sinks or the window
begin there. The clusters are the same then, but their sizes are not: a `Cut` is tiles of sizes and first members beside
the run's tiles of centroids. Members of a cluster are sorted by token, so that what a piece has of a cluster is one
range of them. Of clusters that lie wholly in the piece nothing changes; of those that the cut goes through the kernels
read what is there token by token (negative sizes). So nothing is copied, clustered anew or listed a head at a time.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn.functional import pad

from sglang_ext.cache.budget import SLACK, ClusterBytes, KVShape
from sglang_ext.cache.clusters import TokenRun
from sglang_ext.kernels.cluster_attention import ClusterPool
from sglang_ext.kernels.cluster_attention.pool import centroid_dtype
from sglang_ext.kernels.float8 import FLOAT8, widened
from sglang_ext.kernels.kmeans import ClusterPlan, Clusters, kmeans_layers
from sglang_ext.policies.clustering import Clustering

SPARE = 16
"""Tiles that are allocated beyond the estimate, for runs that fill theirs in part."""

AT_ONCE = 1 << 20
"""Keys that are clustered in one call, of as many layers as that is.

With 128 components of 16 bits that takes about 100 MB for a moment, which SGLang's budget does not know of.
"""


def tiles_of(tokens: int, tile: int) -> int:
    """Tiles of `tile` tokens that clusters of so many tokens take at most: the last one of a run is partly empty."""
    tiles = -(-tokens // tile)
    return tiles + tiles // SLACK + SPARE


def by_head(values: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """[..., kv_heads, clusters] of some tiles, one after the other; values [..., tiles, kv_heads, width]."""
    return values[..., tiles, :, :].transpose(-3, -2).flatten(-2)


class Ranges:
    """Ranges of [0, size): the first one that is large enough is given out, neighbours that come back are joined."""

    def __init__(self, size: int) -> None:
        self._free = [(0, size)]  # (begin, size), by begin

    def take(self, size: int) -> int | None:
        """First number of a range of `size`, or None where no range is that long."""
        for at, (begin, room) in enumerate(self._free):
            if room >= size:
                self._free[at : at + 1] = [(begin + size, room - size)] if room > size else []
                return begin
        return None

    def give_back(self, begin: int, size: int) -> None:
        insort(self._free, (begin, size))
        joined: list[tuple[int, int]] = []
        for low, length in self._free:
            if joined and sum(joined[-1]) == low:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((low, length))
        self._free = joined

    @property
    def free(self) -> int:
        return sum(size for _, size in self._free)


@dataclass(eq=False)
class Cut:
    """Sizes and first members of a piece of a run.

    Attributes:
        cells: tiles of the pool's `sizes` and `starts`, one for each of the run's tiles.
    """

    cells: tuple[int, ...]


@dataclass(eq=False)
class Place:
    """Where a run lies, in every layer.

    Attributes:
        tiles: of centroids, mean values, sizes and starts.
        begin: first of its members.
        tokens: members.
        slots: [tokens] int32 KV slots in token order, once it was filled.
        cuts: (first token, end token) -> piece, for as long as somebody reads it.
    """

    tiles: tuple[int, ...]
    begin: int
    tokens: int
    slots: torch.Tensor | None = None
    cuts: weakref.WeakValueDictionary[tuple[int, int], Cut] = field(default_factory=weakref.WeakValueDictionary)


@dataclass(frozen=True, eq=False)
class PooledRun(TokenRun):
    """Clusters in the pool.

    Attributes:
        place: where they are; of more tokens than the run has where it was cut.
        memory: the pool.
    """

    place: Place
    memory: ClusterMemory

    @property
    def bytes(self) -> int:
        return self.memory.bytes_of(len(self.place.tiles), self.place.tokens)

    def cut(self, end: int) -> PooledRun:
        return PooledRun(self.begin, end - self.begin, self.place, self.memory, lost=self.lost + self.end - end)

    def moved(self, slots: torch.Tensor) -> None:
        self.memory.move(self.place, slots)

    def piece(self, low: int, high: int) -> tuple[int, ...] | Cut | None:
        """What says the sizes of tokens [low, high) of the run: its own tiles for all, None where there is no room."""
        if (low, high) == (0, self.place.tokens):
            return self.place.tiles
        return self.memory.cut(self.place, low, high)


class ClusterMemory:
    """The clusters of all runs, in all layers.

    Attributes:
        layers: pool by layer, for kernels.
        slots: of the KV cache.
        width: clusters of a tile.
        refused: runs and pieces for which there was no room.
    """

    def __init__(
        self,
        caches: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
        config: Clustering,
        cluster: Callable[..., Clusters] = kmeans_layers,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Room for clusters of as many tokens as the KV cache has, plus a tenth for tiles that are partly empty.

        Args:
            caches: (keys [num_slots, kv_heads, head_dim], values [num_slots, kv_heads, value_dim]) by layer.
            config: how keys are clustered.
            cluster: `kernels.kmeans.kmeans_layers` or its fast form.
            dtype: of mean keys and values, where the KV cache is in float8; None: of the KV cache.
        """
        self._caches, self._config, self._kmeans = caches, config, cluster
        keys, values = next(iter(caches.values()))
        slots, kv_heads, head_dim = keys.shape
        self.slots = slots
        value_dim = values.shape[2]
        # A run has at least `append` tokens (blocks may have fewer): wider tiles would be partly empty.
        width = 16
        while width < 64 and width * config.cluster < config.append:
            width *= 2
        self.width = width
        tiles = tiles_of(slots, config.cluster * width)
        members = slots + slots // SLACK
        self._tiles, self._members, self._cells = list(range(tiles))[::-1], Ranges(members), Ranges(tiles)
        self._num_tiles = tiles
        count, device = len(caches), keys.device

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(count, *shape, dtype=torch.int32, device=device)

        self._dtype = dtype or keys.dtype
        of_centroids = centroid_dtype(config.centroids, self._dtype)
        # One tensor for all layers, so that what is written is a few launches however many layers there are.
        self._pools = ClusterPool(
            torch.zeros(count, tiles, kv_heads, width, head_dim, dtype=of_centroids, device=device),
            torch.zeros(count, tiles, kv_heads, width, value_dim, dtype=self._dtype, device=device),
            ints(2 * tiles, kv_heads, width),
            ints(2 * tiles, kv_heads, width),
            ints(kv_heads, members),
        )
        self._lookup = torch.zeros(slots, dtype=torch.int32, device=device)
        self.layers = {layer: self._pools.layers(at) for at, layer in enumerate(caches)}
        shape = KVShape(count, kv_heads, head_dim, value_dim, values.element_size(), self._dtype.itemsize)
        self._bytes = ClusterBytes.of(shape, of_centroids.itemsize)
        self._jobs: list[Callable[[], None]] = []
        self.refused = 0

    def bytes_of(self, tiles: int, members: int) -> int:
        return tiles * self.width * self._bytes.cluster + members * self._bytes.member

    def stats(self) -> dict[str, int]:
        """For /server_info."""
        return {
            "cluster_tiles": self._num_tiles,
            "cluster_tiles_free": len(self._tiles),
            "cluster_refused": self.refused,
        }

    # ---- places, on the host ----

    def make(self, slots: torch.Tensor, begin: int) -> PooledRun | None:
        """Have tokens clustered before the next pass; None where there is no room.

        Args:
            slots: [tokens] integer KV slots in token order; read when the memory settles.
            begin: number of the first token.
        """
        tokens = slots.numel()
        (count,) = ClusterPlan((tokens,), self._config.cluster, self.width).tiles
        at = self._members.take(tokens) if count <= len(self._tiles) else None
        if at is None:
            self.refused += 1
            return None
        place = Place(tuple(self._tiles.pop() for _ in range(count)), at, tokens)
        weakref.finalize(place, self._free, place.tiles, at, tokens).atexit = False
        self._jobs.append(partial(self._fill, place, slots))
        return PooledRun(begin, tokens, place, self)

    def _free(self, tiles: tuple[int, ...], begin: int, tokens: int) -> None:
        self._tiles.extend(reversed(tiles))
        self._members.give_back(begin, tokens)

    def cut(self, place: Place, low: int, high: int) -> Cut | None:
        """The piece [low, high) of a run's tokens; None where there is no room."""
        known = place.cuts.get((low, high))
        if known is not None:
            return known
        count = len(place.tiles)
        begin = self._cells.take(count)
        if begin is None:
            self.refused += 1
            return None
        made = Cut(tuple(range(self._num_tiles + begin, self._num_tiles + begin + count)))
        weakref.finalize(made, self._cells.give_back, begin, count).atexit = False
        place.cuts[low, high] = made
        self._jobs.append(partial(self._cut, place, made, low, high))
        return made

    def labels(self, layer: int, place: Place, cells: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Which cluster each token of a run is in, on the current stream; waits for the device.

        Args:
            layer: index of the layer.
            place: of the run, filled.
            cells: tiles that say the sizes: the run's own, or those of a `Cut`.

        Returns:
            (labels [kv_heads, tokens] int64, -1 for tokens that `cells` leave out; sizes [kv_heads, clusters] int32 as
            the kernels read them, negative ones of clusters that are cut).
        """
        pool, tiles = self.layers[layer], self._numbers(cells)
        sizes, first = by_head(pool.sizes, tiles), by_head(pool.starts, tiles)
        heads, clusters = sizes.shape
        counts = sizes.abs().flatten().long()
        cell = torch.arange(heads * clusters, device=sizes.device).repeat_interleave(counts)
        head, before = cell // clusters, counts.cumsum(0) - counts
        at = first.flatten()[cell] + torch.arange(len(cell), device=sizes.device) - before[cell]
        found = torch.full((heads, place.tokens), -1, device=sizes.device)
        found[head, self._token_numbers(place)[pool.members[head, at].long()].long()] = cell % clusters
        return found, sizes

    def move(self, place: Place, slots: torch.Tensor) -> None:
        """The tokens of a place lie in other slots now: [tokens] integer, in token order."""
        self._jobs.append(partial(self._move, place, slots))

    # ---- contents, on the device ----

    def settle(self) -> None:
        """Do what was queued, on the current stream, without waiting for it."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job()

    def _numbers(self, values: tuple[int, ...]) -> torch.Tensor:
        numbers = torch.tensor(values, dtype=torch.int64, pin_memory=self._lookup.is_cuda)
        return numbers.to(self._lookup.device, non_blocking=True)

    @staticmethod
    def _copied(slots: torch.Tensor) -> torch.Tensor:
        """[tokens] int32, this stream's own; the scheduler may free the original, which its stream made."""
        if slots.is_cuda:
            slots.record_stream(torch.cuda.current_stream())
        return slots.to(torch.int32, copy=True)

    def _fill(self, place: Place, slots: torch.Tensor) -> None:
        config, tiles = self._config, self._numbers(place.tiles)
        plan = ClusterPlan((place.tokens,), config.cluster, self.width)
        place.slots = self._copied(slots)
        options = {"iterations": config.iterations, "assignment": config.assignment}
        caches, kv_heads = list(self._caches.values()), self._pools.members.shape[1]
        at_once = AT_ONCE // 4 if caches[0][0].dtype == FLOAT8 else AT_ONCE  # beside widened keys and values
        layers = max(1, at_once // (place.tokens * kv_heads))
        for first in range(0, len(caches), layers):
            keys, values = zip(*caches[first : first + layers], strict=True)
            found = self._kmeans(*widened(keys, values, place.slots, self._dtype), plan, **options)
            self._pools.layers(slice(first, first + layers)).write(tiles, place.begin, found, place.slots)

    def _token_numbers(self, place: Place) -> torch.Tensor:
        """[num_slots] int32: the number in its run of the token in each slot of a place, until the next call."""
        if place.slots is None:
            raise ValueError("a place is read that was never filled: jobs run in the order in which they were queued")
        self._lookup[place.slots.long()] = torch.arange(place.tokens, dtype=torch.int32, device=self._lookup.device)
        return self._lookup

    def _move(self, place: Place, slots: torch.Tensor) -> None:
        if place.slots is None:
            raise ValueError("a place is moved that was never filled: jobs run in the order in which they were queued")
        members = self._pools.members[:, :, place.begin : place.begin + place.tokens]
        before, place.slots = place.slots, self._copied(slots)
        self._lookup[before.long()] = place.slots
        members.copy_(self._lookup[members.long()])

    def _cut(self, place: Place, made: Cut, low: int, high: int) -> None:
        members = self._pools.members[:, :, place.begin : place.begin + place.tokens]
        number = self._token_numbers(place)[members.long()]
        tiles, cells = self._numbers(place.tiles), self._numbers(made.cells)

        def by_tile(values: torch.Tensor) -> torch.Tensor:
            return values.unflatten(2, (len(place.tiles), self.width)).transpose(1, 2).int()

        sizes = by_head(self._pools.sizes, tiles).long()
        first = by_head(self._pools.starts, tiles).long() - place.begin

        def counted(which: torch.Tensor) -> torch.Tensor:
            """How many members of each cluster are among these."""
            before = pad(which.cumsum(-1), (1, 0))
            return before.gather(-1, first + sizes) - before.gather(-1, first)

        there, gone = counted((number >= low) & (number < high)), counted(number < low)
        self._pools.sizes[:, cells] = by_tile(torch.where(there == sizes, sizes, -there))
        self._pools.starts[:, cells] = by_tile(first + gone + place.begin)
