"""The kernels' half of ``sglang-ext bench double_p``: attention of one decode layer, Llama-3.1-8B's shape.

Keys are planted in clusters; how, is said at `Planted`. They are clustered by the k-means that serves requests. Nothing
is timed before its output was compared with the references in the same run; kept fractions and the recovered mass
stand beside every time. Dense attention is FlashInfer's paged decode over pages of one token, as SGLang runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from sglang_ext.kernels.cluster_attention import ClusterPool, ClusterRows, DenseTokens, joint_impl, reference
from sglang_ext.kernels.cluster_attention import triton_impl as attention
from sglang_ext.kernels.cluster_attention.buffers import Capacity, PlannedRow, RowBuffers, Shape
from sglang_ext.kernels.kmeans import Clusters
from sglang_ext.kernels.kmeans import kmeans as kmeans_reference
from sglang_ext.kernels.rope import Rope
from sglang_ext.kernels.top_p import Selection
from sglang_ext.kernels.top_p import select as select_by_sorting
from sglang_ext.kernels.top_p import triton_impl as top_p
from sglang_ext.launch.bench._gpu import copy_bandwidth, time_turns
from sglang_ext.launch.bench._record import Figure, Timing, at_least, at_most
from sglang_ext.policies.double_p import DoubleP, recovered_mass

SHAPES = {
    "llama-3.1-8b": Shape(heads=32, kv_heads=8, head_dim=128, value_dim=128, dtype=torch.bfloat16),
    # For trying the benchmark itself without a GPU: Triton's interpreter multiplies bfloat16 matrices wrongly.
    "tiny": Shape(heads=4, kv_heads=2, head_dim=32, value_dim=32, dtype=torch.float16),
}
WIDTH = 64
"""Clusters of a tile, as `cache.cluster_pool` has them."""

NOISE = 0.3
"""Standard deviation of a key around its planted centre, of the centre's own."""

TOLERANCE = 2e-2
"""Half precision, of the largest value of the reference."""

EDGE = 0.01
"""Share of the clusters by which the kernels' selection may differ from sorting: rounded masses at the threshold."""

COLD = 6
"""Times the L2 cache that the data of one round of calls must be."""

MOST_COPIES = 32


@dataclass(frozen=True)
class Level:
    """How peaked the attention over planted keys is.

    Attributes:
        deviation: standard deviation of the clusters' logits.
        shared: correlation of the logits of two heads of one group.
    """

    deviation: float
    shared: float


LEVELS = {"flat": Level(1.41, 0.9), "middle": Level(2.52, 0.55), "peaked": Level(2.87, 0.2)}
"""At (0.95, 0.7), 64K: 0.28, 0.08 and 0.05 of the tokens exact (union over a group of four), 0.43, 0.35 and 0.31 of the
clusters approximated."""


class CachedRows:
    """KV caches of one layer, rows one after the other, and the clusters that k-means finds in them.

    Args:
        length: tokens of a row.
        batch: rows, each with slots one after the other.
        shape: heads and components.
        config: sinks, window and clustering.
        device: of everything.
        cluster: `kernels.kmeans.kmeans` or its Triton form.

    Attributes:
        keys, values: [batch * length, kv_heads, ...], filled by `fill`.
        pool: their clusters.
        labels: of each row that was filled, [kv_heads, clustered tokens], numbered as `Clusters.labels` are.
        words: what keys they are, for the names of figures.
    """

    words = ""

    def __init__(
        self,
        length: int,
        batch: int,
        shape: Shape,
        config: DoubleP,
        device: torch.device,
        cluster: Callable[..., Clusters] = kmeans_reference,
    ) -> None:
        self.length, self.batch, self.shape, self.config, self.device = length, batch, shape, config, device
        self.begin, self.end = config.clustered(length)
        self.plan = config.plan(self.begin, self.end, WIDTH)
        self.scale = shape.head_dim**-0.5
        self._cluster = cluster
        kv_heads, dim, tokens = shape.kv_heads, shape.head_dim, self.end - self.begin
        self.keys = torch.empty(batch * length, kv_heads, dim, dtype=shape.dtype, device=device)
        self.values = torch.empty(batch * length, kv_heads, shape.value_dim, dtype=shape.dtype, device=device)
        self.tiles = sum(self.plan.tiles)
        self.pool = ClusterPool.empty(
            batch * self.tiles, kv_heads, dim, shape.value_dim, batch * tokens, shape.dtype, device, WIDTH
        )
        self.labels: list[torch.Tensor] = []

    def fill(self, row: int, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Keep the keys and values [length, kv_heads, ...] of a row, cluster them; returns the labels."""
        slots = torch.arange(row * self.length, (row + 1) * self.length, dtype=torch.int32, device=self.device)
        self.keys[slots.long()] = keys.to(self.shape.dtype)
        self.values[slots.long()] = values.to(self.shape.dtype)
        clustered = slots[self.begin : self.end].contiguous()
        found = self._cluster(
            self.keys,
            self.values,
            clustered,
            self.plan,
            iterations=self.config.iterations,
            assignment=self.config.assignment,
        )
        places = torch.arange(row * self.tiles, (row + 1) * self.tiles, device=self.device)
        self.pool.write(places, row * (self.end - self.begin), found, clustered)
        self.labels.append(found.labels)
        return found.labels

    def queries(self, level: Level | None = None) -> torch.Tensor:
        """[batch, heads, head_dim]: the same at every call."""
        raise NotImplementedError

    def row(self, number: int) -> PlannedRow:
        """What a decoding step of this row reads."""
        tiles = np.arange(number * self.tiles, (number + 1) * self.tiles, dtype=np.int32)
        base = number * self.length
        return PlannedRow(
            tiles=tiles,
            sized=tiles,
            turns=np.zeros(self.tiles, dtype=np.int32),
            deltas=(0,),
            spans=((base, self.begin, 0),),
            tail=(base + self.end, self.end),
            p=self.config.stages,
            tokens=self.end - self.begin,
        )

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one row."""
        shape = self.shape
        return self.length * shape.kv_heads * (shape.head_dim + shape.value_dim) * shape.dtype.itemsize

    @property
    def summary_bytes(self) -> int:
        """Clusters of one row: centroids, mean values, sizes, starts, members."""
        tokens = self.end - self.begin
        parts = (self.pool.centroids, self.pool.values, self.pool.sizes, self.pool.starts)
        per_tile = sum(x[0].numel() * x.element_size() for x in parts)
        return self.tiles * per_tile + tokens * self.shape.kv_heads * 4


class Planted(CachedRows):
    """Rows whose keys lie in planted clusters.

    Each row and head has one centre for 16 middle tokens, components normal(0, 1); a key is its centre plus
    normal(0, `NOISE`^2). Which tokens of a segment belong to a centre is shuffled, but for one token each: that with
    which k-means starts. So it finds the planted clusters, and what is timed does not depend on how well it clusters;
    that is measured on captured keys. Values, and the keys of sinks and window, are normal(0, 1). Positions play no
    part: keys stand as if rotated.

    A query of level (t, r) is t sqrt(head_dim) times the unit vector along sqrt(r) u + sqrt(1 - r) v, u of its group
    and v its own, both normal: the logits of the clusters have standard deviation t, correlated by r in a group.

    Args: as `CachedRows`; seed: of all random numbers.

    Attributes:
        agreed: share of the tokens that k-means has in their planted cluster.
    """

    words = "planted keys"

    def __init__(
        self,
        length: int,
        batch: int,
        shape: Shape,
        config: DoubleP,
        device: torch.device,
        cluster: Callable[..., Clusters] = kmeans_reference,
        seed: int = 0,
    ) -> None:
        super().__init__(length, batch, shape, config, device, cluster)
        self._seed = seed
        self._dice = torch.Generator(device=device).manual_seed(seed)
        kv_heads, dim = shape.kv_heads, shape.head_dim
        agreed = []
        for row in range(batch):
            planted = self._planted_labels()
            centres = self._normal(kv_heads, self.tiles * WIDTH, dim)
            keys = self._normal(length, kv_heads, dim)
            middle = centres.gather(1, planted.unsqueeze(-1).expand(-1, -1, dim)).transpose(0, 1)
            keys[self.begin : self.end] = middle + NOISE * keys[self.begin : self.end]
            labels = self.fill(row, keys, self._normal(length, kv_heads, shape.value_dim))
            agreed.append((labels == planted).float().mean())
        self.agreed = float(torch.stack(agreed).mean())

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._dice, device=self.device)

    def _planted_labels(self) -> torch.Tensor:
        """[kv_heads, tokens] int64, numbered as `Clusters.labels` are."""
        labels, tile = [], 0
        for length, count, tiles in zip(self.plan.lengths, self.plan.clusters, self.plan.tiles, strict=True):
            own = torch.full((self.shape.kv_heads, length), -1, device=self.device)
            number = torch.arange(count, device=self.device)
            first = number * length // count
            own[:, first] = number
            rest = torch.ones(length, dtype=torch.bool, device=self.device)
            rest[first] = False
            free = rest.nonzero().flatten()
            drawn = torch.rand(self.shape.kv_heads, len(free), generator=self._dice, device=self.device).argsort(-1)
            own[:, free] = drawn % count
            labels.append(own + tile * WIDTH)
            tile += tiles
        return torch.cat(labels, 1)

    def queries(self, level: Level | None = None) -> torch.Tensor:
        """[batch, heads, head_dim] of a level, the first one where none is given: the same at every call."""
        level = level or next(iter(LEVELS.values()))
        shape = self.shape
        self._dice.manual_seed(self._seed + 1)
        common = self._normal(self.batch, shape.kv_heads, 1, shape.head_dim)
        own = self._normal(self.batch, shape.kv_heads, shape.group, shape.head_dim)
        x = math.sqrt(level.shared) * common + math.sqrt(1 - level.shared) * own
        x = x / x.norm(dim=-1, keepdim=True) * level.deviation * math.sqrt(shape.head_dim)
        return x.flatten(1, 2).to(shape.dtype)


@dataclass(frozen=True)
class Layer:
    """Caches and clusters of one layer."""

    keys: torch.Tensor
    values: torch.Tensor
    pool: ClusterPool


def layers(planted: CachedRows, batch: int, touched: float = 0.08) -> list[Layer]:
    """Copies of the first `batch` rows, so many that a round over them leaves nothing of a layer in the L2 cache.

    Args:
        planted: the rows.
        batch: how many of them.
        touched: the least share of keys and values that a step reads.
    """
    size = batch * planted.kv_bytes
    count = 1
    if planted.device.type == "cuda":
        cache = torch.cuda.get_device_properties(planted.device).L2_cache_size
        count = min(MOST_COPIES, math.ceil(COLD * cache / (touched * size)))
    slots, tiles = batch * planted.length, batch * planted.tiles
    members = batch * (planted.end - planted.begin)
    pool = planted.pool

    def one() -> Layer:
        return Layer(
            planted.keys[:slots].clone(),
            planted.values[:slots].clone(),
            ClusterPool(
                centroids=pool.centroids[:tiles].clone(),
                values=pool.values[:tiles].clone(),
                sizes=pool.sizes[:tiles].clone(),
                starts=pool.starts[:tiles].clone(),
                members=pool.members[:, :members].clone(memory_format=torch.contiguous_format),
            ),
        )

    if count == 1 and batch == planted.batch:
        return [Layer(planted.keys, planted.values, pool)]
    return [one() for _ in range(count)]


def tunings(device: torch.device) -> tuple[attention.Tuning, top_p.Tuning]:
    """Those of `attention.clustered_backend`; small ones for Triton's interpreter."""
    if device.type == "cuda":
        from sglang_ext.attention.clustered_backend import PROGRAMS

        sms = torch.cuda.get_device_properties(device).multi_processor_count
        return replace(attention.TUNING, programs=PROGRAMS * sms), top_p.TUNING
    return replace(attention.TUNING, programs=5, registers=None), replace(top_p.TUNING, joint=False)


def _engine_capacity(batch: int, config: DoubleP) -> Capacity:
    """What `attention.clustered_backend` allocates for `double_p`'s CUDA graphs of so many rows."""
    from sglang_ext.attention.clustered_backend import GRAPH_TOKENS, graph_capacity

    return graph_capacity(batch, GRAPH_TOKENS, config.cluster * WIDTH, over_pools=False)


class Step:
    """One layer of a decoding step over planted rows, through what the engine's backend calls."""

    def __init__(
        self,
        planted: CachedRows,
        batch: int,
        copies: Sequence[Layer],
        engine_room: bool = False,
        *,
        group: str | None = None,
        by_count: bool = False,
        joint: bool = False,
    ) -> None:
        """Args: as named; engine_room: buffers as large as the engine's for CUDA graphs, not as the batch needs.

        group: how the heads of a group share a set (default: the configuration's); by_count: rows keep numbers of
        clusters, which `keep` tells; joint: scores and selection in one kernel.
        """
        self.planted, self.batch, self.copies = planted, batch, copies
        self.group, self.by_count, self.stages = group or planted.config.group, by_count, planted.config.stages
        device, shape = planted.device, planted.shape
        rows, lengths = self._rows()
        frequency = 500000.0 ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
        how, search = tunings(device)
        capacity = Capacity.of(rows, lengths)
        self.buffers = RowBuffers(
            capacity.joined(_engine_capacity(batch, planted.config)) if engine_room else capacity,
            shape,
            Rope(frequency.float().to(device)),
            WIDTH,
            group_rule=self.group,
            by_count=by_count,
            tuning=replace(how, joint=joint),
            search=search,
        )
        self.keep(*self.stages)
        self.query = torch.empty(batch, shape.heads, shape.head_dim, dtype=shape.dtype, device=device)
        self.ask()

    def _rows(self) -> tuple[list[PlannedRow], list[int]]:
        rows = [replace(self.planted.row(number), p=self.stages) for number in range(self.batch)]
        return rows, [self.planted.length] * self.batch

    def keep(self, first: float, second: float) -> None:
        """Have every row keep so much from now on: (p1, p2), or the numbers of clusters."""
        self.stages = (first, second)
        planted, device = self.planted, self.planted.device
        rows, lengths = self._rows()
        table = torch.arange(self.batch * planted.length, dtype=torch.int32, device=device)
        self.buffers.load(rows, lengths, table)
        ends = torch.tensor(lengths, device=device)
        self.buffers.advance(ends, torch.arange(1, self.batch + 1, device=device) * planted.length - 1)

    def ask(self, level: Level | None = None) -> None:
        """Queries of a level (of rows that have levels) for the runs to come: the same at every call."""
        self.query.copy_(self.planted.queries(level)[: self.batch])

    def run(self, turn: int = 0) -> torch.Tensor:
        layer = self.copies[turn]
        return self.buffers.attend(self.query, layer.keys, layer.values, layer.pool, self.planted.scale)

    def read_again(self, turn: int = 0) -> torch.Tensor:
        """Attention alone, to what the last `run` chose: the copies are alike."""
        layer = self.copies[turn]
        return self.buffers.read_again(self.query, layer.keys, layer.values, layer.pool, self.planted.scale)

    def check(self) -> dict[str, float]:
        """Errors of the last row: {"logits", "selection", "output"}, of the largest value or of the clusters.

        Raises:
            ValueError: one of them is larger than `TOLERANCE` or `EDGE`; nothing is timed then.
        """
        out = self.run()
        layer, planted, last = self.copies[0], self.planted, self.batch - 1
        selection, logits = self.buffers.chosen(self.batch)
        chosen, logits, query = (
            selection.of(slice(last, last + 1)),
            logits[last : last + 1],
            self.query[last : last + 1],
        )
        device, whole = planted.device, planted.row(last)
        rows = ClusterRows(
            torch.tensor(whole.tiles, device=device).unsqueeze(0),
            torch.tensor([planted.tiles], dtype=torch.int32, device=device),
        )
        slots = torch.arange(last * planted.length, (last + 1) * planted.length, dtype=torch.int32, device=device)
        own = torch.cat([slots[: planted.begin], slots[planted.end :]])
        dense = DenseTokens(own.unsqueeze(0), torch.tensor([len(own)], dtype=torch.int32, device=device))
        turned = query.double().unsqueeze(1)
        expected, sizes, starts = reference.centroid_scores(turned, layer.pool, rows, planted.scale)
        filled = sizes.unsqueeze(2).expand_as(expected) > 0
        errors = {"logits": relative_error(logits[filled], expected[filled])}
        cells = torch.tensor([planted.tiles * WIDTH], dtype=torch.int32, device=device)
        p = torch.tensor([self.stages], dtype=torch.float64, device=device)
        sorted_out = select_by_sorting(
            logits.double(), sizes, starts, cells, p, group=self.group, by_count=self.by_count
        )
        errors["selection"] = difference(chosen, sorted_out, int(cells))
        wanted, _ = reference.cluster_attention(
            turned, layer.keys, layer.values, layer.pool, rows, dense, chosen, logits, planted.scale
        )
        errors["output"] = relative_error(out[last : last + 1], wanted)
        for name, most in (("logits", TOLERANCE), ("selection", EDGE), ("output", TOLERANCE)):
            if not errors[name] <= most:
                raise ValueError(f"the kernels' {name} are wrong by {errors[name]:.2g} (at most {most}): not timed")
        return errors

    def joint_notes(self) -> dict[str, Any]:
        """With scores and selection in one kernel: {"joint_ms", "joint_errors"}, or {"joint_refused"}, why not."""
        turned = self.query.unsqueeze(1)
        refused = joint_impl.refusal(turned, self.copies[0].pool, self.buffers.clusters(self.batch), group=self.group)
        if refused:
            return {"joint_refused": refused}
        try:
            errors = self.check()
        except ValueError as error:
            return {"joint_refused": str(error)}
        timing = time_turns(self.run, len(self.copies), self.planted.device)
        return {"joint_ms": timing.median * 1e3, "joint_errors": errors}

    def shares(self, sampled: int = 4) -> dict[str, float]:
        """What the last run kept, means over rows and key-value heads, and the true attention that it recovered.

        `exact`: share of the clustered tokens that a group of heads reads; `approx`: share of the clusters that it
        reads by their centroid; `kept` and `kept_tokens`, both together, of the clusters and of the tokens;
        `recovered`, of the true attention (float32, sinks and window counted): mean, 5th percentile, least over the
        query heads of at most `sampled` rows. `read_p5` likewise, of what is read token by token alone.
        """
        self.run()
        selection, _ = self.buffers.chosen(self.batch)
        counts = selection.counts.double()
        exact, tokens, approx, clusters = (counts[..., n] for n in range(4))
        planted = self.planted
        numbers = sorted({round(n) for n in np.linspace(0, self.batch - 1, min(sampled, self.batch))})
        mass, read, kept_tokens = [], [], []
        for row in numbers:
            both = _mask(selection.of(slice(row, row + 1)), planted.tiles * WIDTH)[0]
            kept = both.any(0)
            labels = planted.labels[row].long()
            x = true_logits(planted, self.query, row)
            dense = torch.cat([x[..., : planted.begin], x[..., planted.end :]], -1)
            middle = x[..., planted.begin : planted.end]
            mass.append(recovered_mass(middle, labels, kept, dense).flatten())
            read.append(recovered_mass(middle, labels, both[0], dense).flatten())
            kept_tokens.append(kept.gather(1, labels).double().mean())
        recovered = torch.cat(mass)
        return {
            "exact": float((tokens / (planted.end - planted.begin)).mean()),
            "approx": float((approx / clusters).mean()),
            "kept": float(((exact + approx) / clusters).mean()),
            "kept_tokens": float(torch.stack(kept_tokens).mean()),
            "recovered": float(recovered.mean()),
            "recovered_p5": float(recovered.quantile(0.05)),
            "recovered_least": float(recovered.min()),
            "read_p5": float(torch.cat(read).quantile(0.05)),
        }

    def floor_bytes(self) -> float:
        """What a step must read: every centroid; mean values of the approximated clusters; exact keys and values."""
        selection, _ = self.buffers.chosen(self.batch)
        _, tokens, approx, clusters = (float(selection.counts[..., n].double().sum()) for n in range(4))
        shape, planted = self.planted.shape, self.planted
        own = self.batch * shape.kv_heads * (planted.length - planted.end + planted.begin)
        vectors = clusters * shape.head_dim + approx * shape.value_dim
        vectors += (tokens + own) * (shape.head_dim + shape.value_dim)
        return vectors * shape.dtype.itemsize


def true_logits(rows: CachedRows, query: torch.Tensor, row: int) -> torch.Tensor:
    """[kv_heads, group, length] float32 logits of all tokens of a row; `query` is [batch, heads, head_dim]."""
    shape = rows.shape
    keys = rows.keys[row * rows.length : (row + 1) * rows.length].float()
    of_row = query[row].float().view(shape.kv_heads, shape.group, shape.head_dim)
    return torch.einsum("hgd,thd->hgt", of_row, keys) * rows.scale


def _mask(selection: Selection, cells: int) -> torch.Tensor:
    """[batch, 2 (exact, approximated), kv_heads, cells] bool."""
    batch, kv_heads, _ = selection.counts.shape
    mask = torch.zeros(batch, 2, kv_heads, cells + 1, dtype=torch.bool, device=selection.counts.device)
    place = torch.arange(selection.exact.shape[-1], device=mask.device)
    for which, (listed, column) in enumerate(((selection.exact, 0), (selection.approx, 2))):
        named = torch.where(place < selection.counts[..., column : column + 1], listed.long(), cells)
        mask[:, which].scatter_(-1, named, True)
    return mask[..., :cells]


def difference(one: Selection, other: Selection, cells: int) -> float:
    """Share of the clusters that two selections read differently, the worst head's."""
    return float((_mask(one, cells) != _mask(other, cells)).any(1).double().mean(-1).max())


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    return float(error.nan_to_num(float("inf")))


class Dense:
    """FlashInfer's paged decode over all tokens, page size 1; plain PyTorch where there is no GPU."""

    def __init__(self, step: Step) -> None:
        self.step, self.planted = step, step.planted
        self.out = torch.empty(
            step.batch, self.planted.shape.heads, self.planted.shape.value_dim, dtype=step.query.dtype,
            device=self.planted.device,
        )  # fmt: skip

    def _flashinfer(self) -> Callable[[int], Any]:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        step, planted, shape, device = self.step, self.planted, self.planted.shape, self.planted.device
        workspace = torch.empty(512 << 20, dtype=torch.uint8, device=device)
        # Tensor cores, as SGLang decodes where four heads or more share keys.
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        bounds = torch.arange(step.batch + 1, dtype=torch.int32) * planted.length
        slots = torch.arange(step.batch * planted.length, dtype=torch.int32, device=device)
        last = torch.ones(step.batch, dtype=torch.int32)
        wrapper.plan(
            bounds, slots, last, shape.heads, shape.kv_heads, shape.head_dim, 1, q_data_type=shape.dtype,
            kv_data_type=shape.dtype, sm_scale=planted.scale,
        )  # fmt: skip

        def run(turn: int) -> None:
            layer = step.copies[turn]
            wrapper.run(step.query, (layer.keys.unsqueeze(1), layer.values.unsqueeze(1)), out=self.out)

        return run

    def _plain(self, turn: int) -> None:
        step, layer, shape = self.step, self.step.copies[turn], self.planted.shape
        for row in range(step.batch):
            part = slice(row * self.planted.length, (row + 1) * self.planted.length)
            weights = torch.softmax(true_logits(self.planted, step.query, row), -1)
            out = torch.einsum("hgt,thd->hgd", weights, layer.values[part].float())
            self.out[row] = out.reshape(shape.heads, -1).to(self.out.dtype)

    def check(self, run: Callable[[int], Any]) -> None:
        self.out.fill_(float("nan"))
        run(0)
        last = self.step.batch - 1
        weights = torch.softmax(true_logits(self.planted, self.step.query, last), -1)
        values = self.planted.values[last * self.planted.length : (last + 1) * self.planted.length].float()
        expected = torch.einsum("hgt,thd->hgd", weights, values).flatten(0, 1)
        error = relative_error(self.out[last], expected)
        if not error <= TOLERANCE:
            raise ValueError(f"dense attention is wrong by {error:.2g} of the largest value: not timed")

    def time(self) -> tuple[str, Timing]:
        """(name, seconds a layer)."""
        device = self.planted.device
        gpu = device.type == "cuda"
        name = "dense FlashInfer" if gpu else "dense PyTorch, no GPU"
        run: Callable[[int], Any] = self._flashinfer() if gpu else self._plain
        self.check(run)
        return name, time_turns(run, len(self.step.copies), device)


@dataclass(frozen=True)
class Case:
    """One measured configuration.

    Attributes:
        batch, length, level: which.
        ours, dense: seconds a layer.
        dense_name: which dense attention.
        floor: seconds that the bytes take at copy bandwidth; None without a GPU.
        shares: from `Step.shares`.
        notes: errors, what else was measured.
        reading: seconds of attention and merge alone; None without a GPU. What the step takes longer, scores and
            selection add.
    """

    batch: int
    length: int
    level: str
    ours: Timing
    dense: Timing
    dense_name: str
    floor: float | None
    shares: dict[str, float]
    notes: dict[str, Any]
    reading: Timing | None

    @property
    def name(self) -> str:
        return f"{self.level} planted keys, batch {self.batch}, {thousands(self.length)}"


def thousands(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def dense_aim(batch: int, length: int, shares: dict[str, float]) -> float | None:
    """How many times faster than dense a case is to be; None: nothing was aimed at."""
    exact, approx = round(shares["exact"], 2), round(shares["approx"], 2)
    if batch == 8 and length in (65536, 131072) and exact <= 0.08 and approx <= 0.35:
        return 5.3
    if batch == 1 and length == 131072 and exact <= 0.09 and approx <= 0.36:
        return 2.5
    return None


def figures_of(case: Case) -> list[Figure]:
    """The rows of a case."""
    notes = {**case.shares, **case.notes}
    aim = dense_aim(case.batch, case.length, case.shares)
    kept = f"{case.shares['exact']:.2f} exact, {case.shares['approx']:.2f} by centroid"
    name = f"decode attention, one layer, {case.name} ({kept}, recovered {case.shares['recovered']:.3f})"
    figures = [at_least(name, case.ours, case.dense_name, case.dense, aim, notes=notes)]
    if case.floor is not None:
        figures.append(at_most(f"{case.name}: the step", case.ours, case.floor, "centroids and kept set", 1.45))
    if case.reading is not None:
        whole, rest = case.ours.median, case.reading.median
        notes = {"attention_and_merge_alone_ms": rest * 1e3}
        spent = Timing.of([max(0.0, whole - rest)])
        words = f"{case.name}: scores and selection, what they add"
        figures.append(at_most(words, spent, whole, "the step", 0.35, notes=notes))
    return figures


def cases(
    shape: Shape, lengths: Sequence[int], batches: Sequence[int], config: DoubleP, device: torch.device
) -> list[Case]:
    """Every level at every length and batch."""
    bandwidth = copy_bandwidth(device) if device.type == "cuda" else None
    found: list[Case] = []
    for step in _steps(shape, lengths, batches, config, device):
        planted, batch = step.planted, step.batch
        dense_name, dense = Dense(step).time()  # as long on every level
        wide = joint = None
        if device.type == "cuda":
            wide = Step(planted, batch, step.copies, engine_room=True)
            joint = Step(planted, batch, step.copies, engine_room=True, joint=True)
        for name, level in LEVELS.items():
            step.ask(level)
            errors, shares = step.check(), step.shares()
            notes = {
                "errors": errors,
                "layers": len(step.copies),
                "planted_found": getattr(planted, "agreed", None),
                "level": vars(level),
                "p": list(config.stages),
                "summaries_of_kv": planted.summary_bytes / planted.kv_bytes,
            }
            floor = None if bandwidth is None else step.floor_bytes() / bandwidth
            if bandwidth is not None:
                notes["copy_tb_s"] = bandwidth * 1e-12
            ours = time_turns(step.run, len(step.copies), device)
            reading: Timing | None = None
            if wide is not None and joint is not None:
                reading = time_turns(step.read_again, len(step.copies), device)
                wide.ask(level)
                notes["engine_room_ms"] = time_turns(wide.run, len(step.copies), device).median * 1e3
                joint.ask(level)
                notes |= joint.joint_notes()
            found.append(Case(batch, planted.length, name, ours, dense, dense_name, floor, shares, notes, reading))
            print(_line(found[-1]), flush=True)
        del step, planted, wide, joint
    return found


def _line(case: Case) -> str:
    shares, ours = case.shares, case.ours.median
    floor = "" if case.floor is None else f"floor {case.floor * 1e3:.4f} ({ours / case.floor:.2f}x), "
    return (
        f"{case.name}: {ours * 1e3:.4f} ms (engine's buffers: {case.notes.get('engine_room_ms', math.nan):.4f}, "
        f"scores and selection in one kernel there: {case.notes.get('joint_ms', math.nan):.4f}), "
        f"dense {case.dense.median * 1e3:.4f} ({case.dense.median / ours:.2f}x), {floor}exact {shares['exact']:.3f}, "
        f"by centroid {shares['approx']:.3f}, recovered {shares['recovered']:.4f} (5%: {shares['recovered_p5']:.4f})"
    )


def _steps(
    shape: Shape, lengths: Sequence[int], batches: Sequence[int], config: DoubleP, device: torch.device
) -> Iterator[Step]:
    cluster: Callable[..., Clusters] = kmeans_reference
    if device.type == "cuda":
        from sglang_ext.kernels.kmeans.fast import kmeans as cluster
    for length in lengths:
        planted = Planted(length, max(batches), shape, config, device, cluster)
        for batch in batches:
            yield Step(planted, batch, layers(planted, batch))
        del planted


def measure(
    device: torch.device, shape: str, lengths: Sequence[int], batches: Sequence[int], config: DoubleP
) -> list[Figure]:
    """All rows of the kernels' half."""
    return [row for case in cases(SHAPES[shape], lengths, batches, config, device) for row in figures_of(case)]
